"""The plan of a model whose architecture is not known: the size of its weights and of
its training states, evenly sharded. Imports no torch."""

from dataclasses import dataclass
from typing import Any

from shardwise.formats.stored_sizes import StoredSizes
from shardwise.hardware import Device
from shardwise.plan.ledger import BYTES_PER_PARAMETER, Mode
from shardwise.plan.why import count, gb
from shardwise.precision import Precision
from shardwise.suggest import listed

MISSING = (
    "activations", "logits", "KV cache", "buffers", "the layouts that the architecture allows",
)  # fmt: skip
"""The parts of a plan that depend on the architecture."""


@dataclass(frozen=True)
class WeightsPlan:
    """The weights of a model on `num_gpus`, sharded evenly.

    Attributes:
        reason: why there is no more.
        modes: the modes that were asked for, the first of which decides whether it fits.
    """

    name: str
    reason: str
    sizes: StoredSizes
    device: Device
    num_gpus: int
    precision: Precision
    margin: float
    modes: tuple[Mode, ...]

    def total_bytes(self, mode: Mode) -> int:
        """Return the bytes over all GPUs: weights as stored, or weights, gradients and optimizer
        states in training."""
        if mode == "serve":
            return self.sizes.num_bytes
        return self.sizes.params * BYTES_PER_PARAMETER[self.precision].total

    def fits_in(self, mode: Mode) -> bool:
        limit = self.device.limit_bytes(self.margin)
        return self.total_bytes(mode) <= self.num_gpus * limit

    @property
    def fits(self) -> bool:
        return self.fits_in(self.modes[0])

    def least_gpus(self, mode: Mode) -> int:
        return -(-self.total_bytes(mode) // self.device.limit_bytes(self.margin))

    def to_json(self) -> dict[str, Any]:
        return {
            "model": {"name": self.name, "params": self.sizes.params},
            "gpu": {"name": self.device.name, "memory_bytes": self.device.memory_bytes},
            "gpus": self.num_gpus,
            "weights_only": True,
            "reason": self.reason,
            "missing": list(MISSING),
            "stored_bytes": dict(self.sizes.bytes_by_dtype),
            **{
                mode: {
                    "total_bytes": self.total_bytes(mode),
                    "per_gpu_bytes": -(-self.total_bytes(mode) // self.num_gpus),
                    "fits": self.fits_in(mode),
                    "least_gpus": self.least_gpus(mode),
                }
                for mode in self.modes
            },
        }

    def sentences(self) -> list[str]:
        """Return the plan as text, a sentence per item."""
        dtypes = ", ".join(
            f"{gb(size)} {dtype}" for dtype, size in self.sizes.bytes_by_dtype.items()
        )
        lines = [
            f"{self.name}: {count(self.sizes.params)} parameters, {gb(self.sizes.num_bytes)} as "
            f"stored ({dtypes}).",
            f"{self.reason}. Only weights and training states are counted. Not known: "
            f"{listed(MISSING)}.",
        ]
        for mode in self.modes:
            what = "weights as stored"
            if mode == "train":
                total = BYTES_PER_PARAMETER[self.precision].total
                what = f"weights, gradients and optimizer, {total} bytes per parameter"
            each = self.total_bytes(mode) / self.num_gpus
            verb = "fit" if self.fits_in(mode) else "do not fit"
            lines.append(
                f"{'Serving' if mode == 'serve' else 'Training'}: {gb(self.total_bytes(mode))} of "
                f"{what}; {gb(each)} on each of {self.num_gpus} x {self.device.name} "
                f"({gb(self.device.memory_bytes)} usable) if evenly sharded, so they {verb}. At "
                f"least {self.least_gpus(mode)} such GPUs hold them."
            )
        return lines
