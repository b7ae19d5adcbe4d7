"""The dtype of the KV cache and its size in bytes. Imports no torch, since the planner uses it."""

from dataclasses import dataclass
from typing import Literal, get_args

KvDtype = Literal["auto", "int8", "fp8"]
"""`auto`: the dtype of the model. `int8`, `fp8` (e4m3): codes of 8 bits, with one fp32 scale per
token and KV head."""
SCALE_BYTES = 4


@dataclass(frozen=True)
class VectorBytes:
    """The bytes of one key or value vector: of each element, and of the scale."""

    element: int
    scale: int = 0

    def of(self, head_dim: int) -> int:
        """Return the bytes of a vector of `head_dim` elements."""
        return head_dim * self.element + self.scale


def vector_bytes(kv_dtype: KvDtype, element_bytes: int) -> VectorBytes:
    """Return the size of a vector; `element_bytes` is the size of an element of the model dtype."""
    return VectorBytes(element_bytes) if kv_dtype == "auto" else VectorBytes(1, SCALE_BYTES)


def check_kv_dtype(kv_dtype: str) -> None:
    """Raise ValueError unless `kv_dtype` is a `KvDtype`."""
    if kv_dtype not in get_args(KvDtype):
        known = ", ".join(get_args(KvDtype))
        raise ValueError(f"unknown KV cache dtype {kv_dtype!r}; known are {known}")
