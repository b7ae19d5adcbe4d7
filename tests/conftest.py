"""What all tests share."""

import os
from collections.abc import Iterator

os.environ["TRITON_INTERPRET"] = (
    "1"  # kernels for GPUs run on CPUs; Triton reads it when it is first imported
)

import hypothesis
import pytest

from ranks import Ranks

# A busy machine is slow now and then: how long one example takes says nothing about the code.
hypothesis.settings.register_profile("shardwise", deadline=None)
hypothesis.settings.load_profile("shardwise")


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    """Up to 8 rank processes, started on first use: `ranks.run(world_size, function, *args)`, see
    `ranks.py`."""
    with Ranks() as pool:
        yield pool
