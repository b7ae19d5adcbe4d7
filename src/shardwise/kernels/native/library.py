"""The compiled library of native kernels and the instruction sets that it was built for."""

from dataclasses import dataclass
from typing import Any, Self

import torch  # noqa: F401 (first: it brings the OpenMP runtime that the module shares)

library: Any
try:
    from shardwise.kernels import _native as library  # type: ignore[attr-defined,no-redef]
except ImportError:  # built without a compiler
    library = None

LANES = 16
"""Columns of a panel, and positions of a page that are worked on at once."""


def instruction_sets() -> tuple[str, ...]:
    """Those that this processor has and kernels are built for, the best first; none where the
    module is not built."""
    return tuple(library.instruction_sets()) if library is not None else ()


@dataclass(frozen=True)
class InstructionSet:
    """`functions` is the address of the table of its kernels."""

    name: str
    functions: int

    @classmethod
    def of(cls, name: str) -> Self:
        return cls(name, library.kernels(name))
