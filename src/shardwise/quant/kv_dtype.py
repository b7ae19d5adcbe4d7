"""What the keys and values of a cache are kept in, and what that costs in bytes. Imports no torch:
the planner asks."""

from dataclasses import dataclass
from typing import Literal, get_args

KvDtype = Literal["auto", "int8", "fp8"]
"""As the model computes; or codes of 8 bits, integers or floats (e4m3), with a scale for each token
and head."""
SCALE_BYTES = 4


@dataclass(frozen=True)
class VectorBytes:
    """What a key, or a value, of one token and head costs: each of its elements, and its scale."""

    element: int
    scale: int = 0

    def of(self, head_dim: int) -> int:
        return head_dim * self.element + self.scale


def vector_bytes(kv_dtype: KvDtype, plain_bytes: int) -> VectorBytes:
    """`plain_bytes` are those of a number that the model computes with."""
    return VectorBytes(plain_bytes) if kv_dtype == "auto" else VectorBytes(1, SCALE_BYTES)


def check_kv_dtype(kv_dtype: str) -> None:
    """Raises ValueError, with those that are known, for another."""
    if kv_dtype not in get_args(KvDtype):
        raise ValueError(
            f"{kv_dtype!r} is no way to keep keys and values; {', '.join(get_args(KvDtype))} are"
        )
