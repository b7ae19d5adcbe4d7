"""Calibration statistics of the inputs of a matrix: two sums, whose size does not depend on the
length of the text.

Shapes: N outputs, K inputs, M rows of activations.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise.quant.weight import Recomputed


@dataclass(frozen=True, eq=False)
class InputStatistics:
    """Statistics of the input rows x [K] of a matrix, in fp32.

    A change E of the matrix changes its outputs by |E x|^2 = sum(E C * E) on average, where C is
    the second moment.

    Attributes:
        second_moment: the mean of x x^T, [K, K].
        magnitude: the mean of |x|, [K].
    """

    second_moment: Tensor
    magnitude: Tensor

    def divided(self, scales: Tensor) -> "InputStatistics":
        """Return the statistics of x / scales [K]."""
        second = self.second_moment / scales[:, None] / scales
        return InputStatistics(second, self.magnitude / scales)

    def output_error(self, difference: Tensor) -> float:
        """Return the mean of |E x|^2 for a difference E [N, K]."""
        return float(((difference @ self.second_moment) * difference).sum(dtype=torch.float64))


class ObservedWeight:
    """A float weight [N, K] for `model.layers.linear` that collects statistics of its inputs."""

    def __init__(self, weight: Tensor) -> None:
        num_columns = weight.shape[1]
        self.weight = weight
        self._products = torch.zeros(num_columns, num_columns, device=weight.device)
        self._magnitudes = torch.zeros(num_columns, device=weight.device)
        self._num_rows = 0

    def apply(self, x: Tensor | Recomputed) -> Tensor:
        """Return x [..., K] @ W^T: [..., N]."""
        x = x if isinstance(x, Tensor) else x.make(*x.inputs)
        rows = x.detach().flatten(0, -2).float()
        self._products.addmm_(rows.t(), rows)
        self._magnitudes += rows.abs().sum(0)
        self._num_rows += len(rows)
        return F.linear(x, self.weight)

    def statistics(self) -> InputStatistics:
        """Return the statistics so far. Raises ValueError if activations were not finite."""
        assert self._num_rows, "the weight was used"
        if not self._products.isfinite().all():
            raise ValueError(
                "activations are infinite or NaN on the calibration text; "
                "the weights of the model are damaged"
            )
        return InputStatistics(self._products / self._num_rows, self._magnitudes / self._num_rows)
