"""Where tensor parallelism meets the model. Uncut, each seam is the identity or the plain
operation, so the model has no branch for it; `parallel/tensor.py` has the cut ones."""

from torch import Tensor

from shardwise.model.layers import AppliedTable, look_up


class Seams:
    """A block uses `enter` and `leave`; embedding and loss, which are cut over the vocabulary, use
    the others."""

    rank: int = 0
    """Which block of the vocabulary this rank holds."""

    def enter(self, x: Tensor) -> Tensor:
        """Before weights that are cut by columns."""
        return x

    def leave(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """After weights that are cut by rows: the sum over ranks, then the bias, once."""
        return x if bias is None else x + bias

    def look_up(
        self, ids: Tensor, weight: Tensor | AppliedTable, sparse_grad: bool = False
    ) -> Tensor:
        """Rows of a weight whose rows are cut."""
        return look_up(ids, weight, sparse_grad)

    def part(self, x: Tensor) -> Tensor:
        """Of what is the same on all ranks, as positions are, this rank's part of the sequence: [B,
        T, ...]."""
        return x

    def total(self, x: Tensor) -> Tensor:
        """The sum over ranks, in place, without a gradient: of what each found in its block of the
        vocabulary."""
        return x

    def highest(self, x: Tensor) -> Tensor:
        """The maximum over ranks, in place, without a gradient."""
        return x


UNCUT = Seams()
