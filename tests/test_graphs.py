"""Decode steps that are captured once: what is written into their fixed places, and which of them
is run."""

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from examples import examples
from shardwise.kernels.page_table import TokenSpan
from shardwise.kernels.triton.batch import NO_SLOT, TableBatch, table_batch
from shardwise.serve.engine.cuda_graphs import DecodeGraphs, Step, captured_sizes, only_decodes
from shardwise.serve.engine.sequence import BatchEntry

CPU = torch.device("cpu")
PAGE_TOKENS = 16
WIDTH = 6


class Played:
    """A decode step whose logits are all that a step reads, and a capture that notes which sizes
    were run."""

    def __init__(self) -> None:
        self.captured: list[int] = []
        self.replayed: list[int] = []
        self.lengths: list[list[int]] = []
        self.slots: list[list[int]] = []

    def decode(self, tokens: Tensor, batch: TableBatch) -> Tensor:
        self.lengths.append(batch.lengths.tolist())
        self.slots.append(batch.slots.tolist())
        (tiles,) = batch.tiles
        assert tiles.num_rows == 16
        assert (
            tiles.origins.tolist() == [[n, 0] for n in range(len(tokens))]
            and batch.first_tokens.tolist() == tiles.origins[:, 0].tolist()
        )
        return torch.cat((torch.stack((tokens, batch.starts, batch.slots), 1), batch.page_table), 1)

    def capture(self, step: Step) -> Step:
        kept = step()
        self.captured.append(len(kept))
        assert self.slots[-1] == [NO_SLOT] * len(kept) and not any(self.lengths[-1]), (
            "a first run writes nowhere"
        )

        def replay() -> Tensor:
            self.replayed.append(len(kept))
            return kept.copy_(step())

        return replay


def graphs_of(played: Played, max_running: int) -> DecodeGraphs:
    return DecodeGraphs(played.decode, max_running, WIDTH, PAGE_TOKENS, 16, CPU, played.capture)


def part_of(id: int, token: int, start: int, pages: Sequence[int]) -> BatchEntry:
    return BatchEntry(id, (token,), start, tuple(pages), 1, False)


parts = st.lists(
    st.integers(0, WIDTH * PAGE_TOKENS - 1).flatmap(
        lambda start: st.builds(
            part_of,
            st.integers(0, 9),
            st.integers(0, 999),
            st.just(start),
            st.lists(st.integers(0, 99), min_size=start // PAGE_TOKENS + 1, max_size=WIDTH),
        )
    ),
    min_size=1,
    max_size=7,
)


@settings(max_examples=examples(50))
@given(steps=st.lists(parts, min_size=1, max_size=3), max_running=st.sampled_from([7, 8, 12]))
def test_a_step_reads_what_its_batch_says_whatever_was_there_before(
    steps: list[list[BatchEntry]], max_running: int
) -> None:
    played = Played()
    graphs = graphs_of(played, max_running)
    kept = []
    for batch in steps:
        found = graphs.run(batch)
        size = played.replayed[-1]
        assert size in captured_sizes(max_running) and len(batch) <= size
        assert size == 1 or size // 2 < len(batch) or size == max_running
        spans = [TokenSpan(entry.start, 1, entry.pages) for entry in batch]
        wanted = table_batch(spans, 1, PAGE_TOKENS, (16,), CPU)
        assert found[:, 0].tolist() == [entry.tokens[0] for entry in batch]
        assert torch.equal(found[:, 1], wanted.starts) and torch.equal(found[:, 2], wanted.slots)
        for row, entry in zip(found[:, 3:].tolist(), batch, strict=True):
            assert row[: len(entry.pages)] == list(entry.pages)
        assert played.lengths[-1] == [1] * len(batch) + [0] * (size - len(batch))
        assert played.slots[-1][len(batch) :] == [NO_SLOT] * (size - len(batch))
        kept.append((found, found.clone()))
    assert all(torch.equal(found, copy) for found, copy in kept), (
        "a later step changes nothing of an earlier one"
    )


@pytest.mark.parametrize(
    ("max_running", "sizes"),
    [
        (1, [1]),
        (2, [1, 2]),
        (3, [1, 2, 3]),
        (64, [1, 2, 4, 8, 16, 32, 64]),
        (65, [1, 2, 4, 8, 16, 32, 64, 65]),
    ],
)
def test_sizes_that_are_captured(max_running: int, sizes: list[int]) -> None:
    assert captured_sizes(max_running) == sizes
    played = Played()
    graphs_of(played, max_running)
    assert played.captured == sizes[::-1]


def test_which_batches_decode() -> None:
    decoding = part_of(0, 5, 20, [1, 2])
    assert only_decodes([decoding, decoding])
    assert only_decodes(
        [BatchEntry(0, (5,), 20, (1, 2), 3, True)]
    )  # it forks, and no token follows one whose score is wanted
    assert not only_decodes([decoding, BatchEntry(1, (5, 6), 0, (3,), 1, False)])
    assert not only_decodes(
        [decoding, BatchEntry(1, (5,), 0, (3,), 0, False)]
    )  # a prompt of which more is to come
