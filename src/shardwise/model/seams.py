"""TP hooks: the places in the model where tensor parallelism communicates.

Without tensor parallelism each hook is the identity or the ordinary operation, so the model has no
branch for it. `parallel/tensor.py` implements the hooks that communicate.
"""

from torch import Tensor

from shardwise.model.layers import AppliedTable, look_up


class Seams:
    """Hooks of one rank. Blocks call `enter` and `leave` (Megatron-LM's f and g); the embedding and
    the loss, which are sharded over the vocabulary, call the others.

    Attributes:
        vocab_rank: index of this rank's shard of the vocabulary.
    """

    vocab_rank: int = 0

    def enter(self, x: Tensor) -> Tensor:
        """Return the input of column-parallel weights."""
        return x

    def leave(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return the output of row-parallel weights: the sum over ranks, plus the bias, once."""
        return x if bias is None else x + bias

    def look_up(
        self, ids: Tensor, weight: Tensor | AppliedTable, sparse_grad: bool = False
    ) -> Tensor:
        """Return rows [..., D] of an embedding whose rows are sharded over ranks."""
        return look_up(ids, weight, sparse_grad)

    def local_tokens(self, x: Tensor) -> Tensor:
        """Return this rank's tokens of x [B, T, ...], which all ranks hold in full."""
        return x

    def sum(self, x: Tensor) -> Tensor:
        """Sum a statistic of the vocabulary over its shards, in place and without gradient."""
        return x

    def max(self, x: Tensor) -> Tensor:
        """Take the maximum over the shards of the vocabulary, in place and without gradient."""
        return x


UNSHARDED = Seams()
