"""The compiled library of native kernels, and the instruction sets that it supports."""

from dataclasses import dataclass
from typing import Any, Self

import torch  # noqa: F401 (first: it loads the OpenMP runtime that the module shares)

from shardwise.environment import CPU_KERNELS_VARIABLE, cpu_kernels

library: Any
try:
    from shardwise.kernels import _native as library  # type: ignore[attr-defined,no-redef]
except ImportError:  # built without a compiler
    library = None

LANES = 16
"""fp32 numbers in the widest register (`csrc/vectors.h`). Shapes that the kernels support are
multiples of it, whatever the instruction set."""


def instruction_sets() -> tuple[str, ...]:
    """Return the instruction sets that this processor and the library have, the fastest first.

    Empty where the module is not built.
    """
    return tuple(library.instruction_sets()) if library is not None else ()


def chosen_cpu_kernels() -> str:
    """Return the kernels for CPUs that the environment names, or else the fastest: an instruction
    set, or `torch`.

    Raises ValueError for kernels that this processor does not have.
    """
    known = (*instruction_sets(), "torch")
    name = cpu_kernels() or known[0]
    if name not in known:
        raise ValueError(
            f"{CPU_KERNELS_VARIABLE} is {name!r}, but the kernels for this processor are "
            f"{', '.join(known)}"
        )
    return name


@dataclass(frozen=True)
class InstructionSet:
    """The kernels of one instruction set. `functions` is the address of their table."""

    name: str
    functions: int

    @classmethod
    def of(cls, name: str) -> Self:
        return cls(name, library.kernels(name))
