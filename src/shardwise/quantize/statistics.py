"""What calibration wants to know of a matrix: what it is multiplied with, in two sums that do not
grow with the text.

Shapes: N outputs, K inputs, M rows of activations.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise.quant.weight import Recomputed


@dataclass(frozen=True, eq=False)
class InputStatistics:
    """Of the rows x [K] that a matrix is multiplied with: the mean of x x^T, [K, K], and of |x|,
    [K], in fp32.

    The first says what a change E of the matrix does to its outputs: on average |E x|^2 = sum(E C *
    E).
    """

    second_moment: Tensor
    magnitude: Tensor

    def divided(self, scales: Tensor) -> "InputStatistics":
        """Those of x / scales [K]."""
        second = self.second_moment / scales[:, None] / scales
        return InputStatistics(second, self.magnitude / scales)

    def output_error(self, difference: Tensor) -> float:
        """The mean of |E x|^2 for a difference E [N, K]."""
        return float(((difference @ self.second_moment) * difference).sum(dtype=torch.float64))


class ObservedWeight:
    """A plain weight [N, K] for `model.layers.linear` that keeps count of what it is multiplied
    with."""

    def __init__(self, weight: Tensor) -> None:
        num_columns = weight.shape[1]
        self.weight = weight
        self._products = torch.zeros(num_columns, num_columns, device=weight.device)
        self._magnitudes = torch.zeros(num_columns, device=weight.device)
        self._num_rows = 0

    def apply(self, x: Tensor | Recomputed) -> Tensor:
        """x [..., K] -> [..., N]."""
        x = x if isinstance(x, Tensor) else x.make(*x.inputs)
        rows = x.detach().flatten(0, -2).float()
        self._products.addmm_(rows.t(), rows)
        self._magnitudes += rows.abs().sum(0)
        self._num_rows += len(rows)
        return F.linear(x, self.weight)

    def statistics(self) -> InputStatistics:
        """Raises ValueError where activations were infinite or no numbers."""
        assert self._num_rows, "the weight was used"
        if not self._products.isfinite().all():
            raise ValueError(
                "calibration met activations that are infinite or no numbers: the model's weights are damaged"
            )
        return InputStatistics(self._products / self._num_rows, self._magnitudes / self._num_rows)
