"""Fixtures and settings of all tests."""

import os
from collections.abc import Iterator

# Triton interprets kernels for GPUs on CPUs; it reads this when it is first imported.
os.environ["TRITON_INTERPRET"] = "1"

import hypothesis
import pytest

from examples import LONG
from processes import default_dispositions, ended_with_block, tag_descendants
from ranks import Ranks

tag_descendants()

# No deadline: the time that one example takes on a busy machine says nothing about the code.
hypothesis.settings.register_profile("shardwise", deadline=None)
hypothesis.settings.register_profile(LONG, deadline=None, max_examples=1000)
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
    """Give tests of signals the dispositions of the foreground, also under `nohup`."""
    with default_dispositions():
        yield
