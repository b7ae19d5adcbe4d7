"""A model as the engine computes it: its weights, kernels and KV cache, one text at a time.

Shapes: T tokens, V vocabulary.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from shardwise.formats.open_model import OpenModel
from shardwise.measure.reference_model import ROWS
from shardwise.parallel.launch import Place, device_of
from shardwise.serve.engine.runner import Runner
from shardwise.serve.engine.sequence import BatchEntry
from shardwise.serve.engine.worker import start_rank
from shardwise.serve.settings import EngineSettings


@dataclass(frozen=True)
class ServedModel:
    """A runner whose pages hold a text of `num_pages` pages. Prompts are computed in chunks of
    `chunk_tokens`, as in an engine step; the results do not depend on it.
    """

    runner: Runner
    num_pages: int
    chunk_tokens: int = 512

    @torch.inference_mode()
    def logits(self, ids: Tensor, num_rows: int) -> Iterator[Tensor]:
        """Yield fp32 logits [ROWS, V] after each of the last `num_rows` of the tokens [T], a few
        rows at a time.
        """
        tokens = tuple(ids.tolist())
        pages = tuple(range(self.num_pages))
        chunks = []
        for start in range(0, len(tokens), self.chunk_tokens):
            chunk = tokens[start : start + self.chunk_tokens]
            chunks.append(self.runner.run_entries([BatchEntry(0, chunk, start, pages, 0, None)]))
        for rows in torch.cat(chunks)[-num_rows:].split(ROWS):
            yield self.runner.logits(rows)


def start_model(settings: EngineSettings, opened: OpenModel) -> ServedModel:
    """Load a model on one device as the engine does. Raises ValueError for what does not fit."""
    started = start_rank(Place(0, 1, device_of(0, 1)), settings, opened=opened)
    return ServedModel(started.runner, started.num_pages, settings.max_batch_tokens)
