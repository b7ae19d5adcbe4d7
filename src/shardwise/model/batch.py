"""What one forward of the model reads."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, eq=False)
class MicroBatch:
    """Tokens that go through the model together; each [B, T], int64. `targets` is -100 where there
    is none.

    `documents` numbers the document of each token, so that attention can stay inside it; None:
    attend to all before.
    """

    tokens: Tensor
    targets: Tensor
    positions: Tensor
    documents: Tensor | None
