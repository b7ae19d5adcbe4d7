"""The input of one forward of the model."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, eq=False)
class MicroBatch:
    """Sequences that go through the model together.

    Attributes:
        tokens: token ids [B, T], int64.
        targets: the token to predict at each position [B, T], int64; -100 where there is none.
        positions: position of each token in its sequence [B, T], int64.
        documents: number of the document of each token [B, T], int64, so that attention stays
            within a document; None: a token attends to all earlier tokens of its sequence.
    """

    tokens: Tensor
    targets: Tensor
    positions: Tensor
    documents: Tensor | None
