"""Products of Triton's interpreter whose elements do not depend on the number of rows or columns.

The interpreter multiplies with numpy's BLAS, which may add in another order for another shape. That
depends on the processor, and would hide whether the structure of a kernel is batch-invariant.
"""

import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

os.environ["TRITON_INTERPRET"] = "1"  # Triton reads it when it is first imported
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle


@pytest.fixture(autouse=True)
def shape_invariant_dot(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Add the terms of every element from the first to the last, for all tests of a module that
    imports this fixture."""

    def create_dot(
        builder: Any, a: Any, b: Any, d: Any, input_precision: Any, max_num_imprecise_acc: Any
    ) -> Any:
        dtype = d.data.dtype
        rows = np.ascontiguousarray(a.data, dtype=dtype)
        columns = np.ascontiguousarray(b.data, dtype=dtype)
        product = np.einsum("mk,kn->mn", rows, columns, optimize=False)
        return TensorHandle(product + d.data, d.dtype.scalar)

    monkeypatch.setattr(InterpreterBuilder, "create_dot", create_dot)
    yield
