"""What all tests share."""

import os
from collections.abc import Iterator

os.environ["TRITON_INTERPRET"] = (
    "1"  # kernels for GPUs run on CPUs; Triton reads it when it is first imported
)

import hypothesis
import pytest

from processes import default_dispositions, ended_with_block, tag_descendants
from ranks import Ranks

tag_descendants()

# A busy machine is slow now and then: how long one example takes says nothing about the code.
hypothesis.settings.register_profile("shardwise", deadline=None)
hypothesis.settings.load_profile("shardwise")


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    """Up to 8 rank processes, started on first use: `ranks.run(world_size, function, *args)`, see
    `ranks.py`."""
    with Ranks() as pool:
        yield pool


@pytest.fixture(autouse=True)
def processes_end_with_their_test() -> Iterator[None]:
    with ended_with_block():
        yield


@pytest.fixture
def default_signals() -> Iterator[None]:
    """For tests of signals: as in the foreground, under `nohup` and in background jobs too."""
    with default_dispositions():
        yield
