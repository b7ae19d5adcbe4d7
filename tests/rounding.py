"""The rounding error of a computation in torch, measured by Monte Carlo arithmetic.

Every operation's result is multiplied by 1 + u, with u drawn uniformly within half a unit in the
last place of fp32, as if each had been rounded in another direction. How far the results of such
runs are apart is what any order of additions may change: little where terms add up, much where they
cancel (Parker 1997, Monte Carlo Arithmetic)."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

UNIT = 2.0**-24
"""The largest relative error of one rounding to fp32."""


class RandomRounding(TorchDispatchMode):
    """Perturb the result of every floating-point operation, views excepted."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(seed)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        returns = func._schema.returns
        if any(each.alias_info and not each.alias_info.is_write for each in returns):
            return result
        for each in result if isinstance(result, tuple | list) else (result,):
            if isinstance(each, Tensor) and each.dtype in (torch.float32, torch.float64):
                noise = torch.empty(each.shape, dtype=torch.float64)
                noise.uniform_(1 - UNIT, 1 + UNIT, generator=self.generator)
                each.copy_(each.double() * noise)
        return result


def rounding_errors(
    run: Callable[[], Mapping[str, Tensor]], num_samples: int = 4
) -> dict[str, float]:
    """Return by name the standard deviation (2-norm) of what `run` returns under random
    rounding."""
    samples = []
    for seed in range(num_samples):
        with RandomRounding(seed):
            results = run()
        samples.append({name: value.double() for name, value in results.items()})
    errors = {}
    for name in samples[0]:
        stacked = torch.stack([sample[name] for sample in samples])
        errors[name] = float((stacked - stacked.mean(0)).norm()) / (num_samples - 1) ** 0.5
    return errors
