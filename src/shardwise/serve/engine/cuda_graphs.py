"""Decode steps as CUDA graphs: the kernels of a step are captured once, at the start, and replayed
by one call.

A decode step has a few hundred kernels, each of which takes less time to run than Python takes to
launch it. A graph reads from the addresses that it was captured with, so the integers of a step
(`kernels/triton/batch.py`) overwrite those of the last one, and batches are padded to the next
captured number of sequences. Padding rows skip attention and write nowhere; kernels are
batch-invariant, so they cannot affect other rows. All other steps, those with prompts in them, run
operation by operation.

Shapes: S sequences, W pages of the longest, V vocabulary.
"""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from shardwise.kernels.triton.batch import ALIGNED, NO_SLOT, TableBatch, decode_batch
from shardwise.serve.engine.sequence import BatchEntry

Step = Callable[[], Tensor]
"""Returns logits [S, V] from integers at fixed addresses."""
Capture = Callable[[Step], Step]
"""Records a step and returns its replay, which writes to the same addresses."""
Decode = Callable[[Tensor, TableBatch], Tensor]
"""Returns logits [S, V] after tokens [S]."""


def only_decodes(entries: Sequence[BatchEntry]) -> bool:
    """Return True if each entry is one token after which one is sampled."""
    return all(len(entry.tokens) == 1 and entry.num_samples for entry in entries)


def captured_sizes(max_running: int) -> list[int]:
    """Return the batch sizes to capture: powers of two, and `max_running`."""
    return [*(1 << n for n in range((max_running - 1).bit_length())), max_running]


class DecodeGraphs:
    """Captured decode steps of up to `max_running` sequences with up to `width` pages each, with
    attention in tiles of `num_rows` query rows.
    """

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
        self.device_numbers = self.numbers.to(device, copy=True)
        self.device_table = self.table.to(device, copy=True)

        def step(size: int) -> Tensor:
            tokens, starts, slots, lengths = self.device_numbers[:, :size]
            return decode(
                tokens, decode_batch(starts, slots, lengths, self.device_table[:size], num_rows)
            )

        # the largest first: smaller ones then reuse its memory
        self.steps = {size: capture(partial(step, size)) for size in reversed(self.sizes)}

    def run(self, entries: Sequence[BatchEntry]) -> Tensor:
        """Return logits [S, V] of entries of one token each."""
        size = next(size for size in self.sizes if size >= len(entries))
        self.fill_tables(entries)
        self.device_numbers.copy_(self.numbers)
        self.device_table[:size].copy_(self.table[:size])
        return self.steps[size]()[: len(entries)].clone()

    def fill_tables(self, entries: Sequence[BatchEntry]) -> None:
        """Write the integers of a step: token, position, KV slot and number of tokens of each
        sequence, and its pages. Table entries beyond the pages are not read.
        """
        columns = []
        for entry in entries:
            number, offset = divmod(entry.start, self.page_tokens)
            slot = entry.pages[number] * self.page_tokens + offset
            columns.append((entry.tokens[0], entry.start, slot, 1))
        columns += [(0, 0, NO_SLOT, 0)] * (self.numbers.shape[1] - len(entries))
        self.numbers[:] = torch.tensor(columns, dtype=torch.int32).t()
        for row, entry in zip(self.table, entries, strict=False):
            row[: len(entry.pages)] = torch.tensor(entry.pages, dtype=torch.int32)


def cuda_capture(device: torch.device) -> Capture:
    """Return a capture of CUDA graphs that share one memory pool: only a graph's logits are read
    after it has run.
    """
    pool = torch.cuda.graph_pool_handle()
    stream = torch.cuda.Stream(device)

    def capture(step: Step) -> Step:
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            step()  # compiles kernels and allocates workspaces, which cannot be captured
        torch.cuda.current_stream(device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool, stream=stream):
            logits = step()

        def replay() -> Tensor:
            graph.replay()
            return logits

        return replay

    return capture
