"""Decode steps as CUDA graphs: the kernels of a step are recorded once, at the start, and started
again by one call.

A step of one token for each sequence has a few hundred kernels, each of which takes less time to
run than Python takes to start it. What a graph reads lies where it lay when it was captured, so the
integers of a step (`kernels/tables.py`) are written over those of the last one, and batches are
filled up to the next number of sequences that was captured. Rows that fill up run nothing in
attention, write nowhere, and since a row has the same bits in any company nobody can tell that they
were there. All other steps, those with prompts in them, run operation by operation.

Shapes: S sequences, W pages of the longest, V vocabulary.
"""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from shardwise.kernels.triton.batch import ALIGNED, NO_SLOT, TableBatch, decode_batch
from shardwise.serve.engine.batch import Part

Step = Callable[[], Tensor]
"""Logits [S, V] from integers that lie in a fixed place."""
Capture = Callable[[Step], Step]
"""Records a step; what it returns does the same again, into the same place."""
Decode = Callable[[Tensor, TableBatch], Tensor]
"""Logits [S, V] after tokens [S]."""


def only_decodes(parts: Sequence[Part]) -> bool:
    """Whether a batch is one token of each sequence, of which each samples."""
    return all(len(part.tokens) == 1 and part.samples for part in parts)


def captured_sizes(max_running: int) -> list[int]:
    """Numbers of sequences: powers of two, and the most that run at a time."""
    return [*(1 << n for n in range((max_running - 1).bit_length())), max_running]


class DecodeGraphs:
    """Steps of one token of each of up to `max_running` sequences of up to W pages, in tiles of
    `num_rows`."""

    def __init__(
        self,
        decode: Decode,
        max_running: int,
        width: int,
        page_tokens: int,
        num_rows: int,
        device: torch.device,
        capture: Capture,
    ) -> None:
        self.page_tokens = page_tokens
        self.sizes = captured_sizes(max_running)
        columns = -(-max_running // ALIGNED) * ALIGNED
        pinned = device.type == "cuda"
        self.numbers, self.table = (
            torch.zeros(shape, dtype=torch.int32, pin_memory=pinned)
            for shape in ((4, columns), (max_running, width))
        )
        self.numbers[2] = NO_SLOT
        self.numbers_there = self.numbers.to(device, copy=True)
        self.table_there = self.table.to(device, copy=True)

        def step(size: int) -> Tensor:
            tokens, starts, slots, lengths = self.numbers_there[:, :size]
            return decode(
                tokens, decode_batch(starts, slots, lengths, self.table_there[:size], num_rows)
            )

        # the largest first: smaller ones then find its memory
        self.steps = {size: capture(partial(step, size)) for size in reversed(self.sizes)}

    def run(self, parts: Sequence[Part]) -> Tensor:
        """Logits [S, V] of parts of one token each."""
        size = next(size for size in self.sizes if size >= len(parts))
        self.write(parts)
        self.numbers_there.copy_(self.numbers)
        self.table_there[:size].copy_(self.table[:size])
        return self.steps[size]()[: len(parts)].clone()

    def write(self, parts: Sequence[Part]) -> None:
        """Into numbers, of each sequence: its token, its position, the slot where it goes, how many
        tokens; and its pages. What a table has beyond them is not read."""
        page_tokens = self.page_tokens
        slots = (
            part.pages[part.start // page_tokens] * page_tokens + part.start % page_tokens
            for part in parts
        )
        written = [
            (part.tokens[0], part.start, slot, 1) for part, slot in zip(parts, slots, strict=True)
        ]
        empty = [(0, 0, NO_SLOT, 0)] * (self.numbers.shape[1] - len(parts))
        self.numbers[:] = torch.tensor(written + empty, dtype=torch.int32).t()
        for row, part in zip(self.table, parts, strict=False):
            row[: len(part.pages)] = torch.tensor(part.pages, dtype=torch.int32)


def cuda_capture(device: torch.device) -> Capture:
    """Capture CUDA graphs that share their memory: of what one leaves behind nobody reads anything
    but its logits."""
    pool = torch.cuda.graph_pool_handle()
    stream = torch.cuda.Stream(device)

    def capture(step: Step) -> Step:
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            step()  # compiles kernels and makes workspaces, neither of which can be captured
        torch.cuda.current_stream(device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool, stream=stream):
            logits = step()

        def replay() -> Tensor:
            graph.replay()
            return logits

        return replay

    return capture
