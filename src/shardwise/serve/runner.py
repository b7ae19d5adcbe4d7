"""Runs a batch: the same model as in training, with attention over pages. Every rank of tensor parallel has one.

Shapes: N tokens of the batch, R rows whose logits are wanted, V vocabulary, K kv heads, P tokens of a page, C head dim.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from shardwise.config import ModelConfig
from shardwise.kernels.paged import PagedBatch, Span, attention_sizes, paged_attention, paged_batch, write_pages
from shardwise.kernels.rows import head_of, row_weights
from shardwise.model.layers import Causal
from shardwise.model.quantized import Weights
from shardwise.model.transformer import Transformer
from shardwise.parallel.apply import seams_of
from shardwise.parallel.mesh import Mesh
from shardwise.serve.batch import Batch

SCORED_ROWS = 64
"""Prompts whose log-probabilities are wanted have logits for every token, in chunks of this many."""


@dataclass(frozen=True)
class Ran:
    """By the id of a part. logits [V] in fp32: after its last token, of those that sample. scores: of those that asked,
    logits [R, V] after all tokens but the last, in order and in chunks."""

    logits: Mapping[int, Tensor]
    scores: Mapping[int, list[Tensor]]


@dataclass(frozen=True)
class PagedAttention:
    """`attend` of one batch: writes its keys and values into their pages, and reads all that came before."""

    config: ModelConfig
    batch: PagedBatch
    keys: Sequence[Tensor]
    values: Sequence[Tensor]

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [N, H, C], k and v [N, K, C] -> [N, H, C]."""
        write_pages(self.keys[layer], self.batch.slots, k)
        write_pages(self.values[layer], self.batch.slots, v)
        return paged_attention(q, self.keys[layer], self.values[layer], self.batch, self.config.window(layer))


class Runner:
    """The weights and the pages of one rank. `weights` are given up to it: it packs them as products like them best."""

    def __init__(self, config: ModelConfig, weights: Weights, mesh: Mesh, dtype: torch.dtype, page_tokens: int) -> None:
        self.config, self.mesh, self.dtype, self.page_tokens = config, mesh, dtype, page_tokens
        self.model = Transformer(config, seams_of(mesh))
        head = weights[self.model.head_name]
        assert isinstance(head, Tensor), "the head is never quantized"
        self.head = head_of(head)
        self.weights = row_weights(weights)
        self.sizes = attention_sizes(config.head_dim, dtype, mesh.device)
        self.num_kv_heads = max(1, config.num_kv_heads // mesh.tp.size)
        self.group = config.num_heads // mesh.tp.size // self.num_kv_heads
        self.windows = {config.window(layer) for layer in range(config.num_layers)}
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []

    @property
    def page_bytes(self) -> int:
        """Of keys and values in all layers on this rank."""
        heads = 2 * self.config.num_layers * self.num_kv_heads
        return heads * self.page_tokens * self.config.head_dim * self.dtype.itemsize

    def make_pages(self, num_pages: int) -> None:
        """Memory for that many; what was there is gone. It holds anything until it is written."""
        shape = self.num_kv_heads, num_pages, self.page_tokens, self.config.head_dim
        self.keys.clear()
        self.values.clear()
        for _ in range(self.config.num_layers):
            self.keys.append(torch.empty(shape, dtype=self.dtype, device=self.mesh.device))
            self.values.append(torch.empty(shape, dtype=self.dtype, device=self.mesh.device))

    @torch.inference_mode()
    def run(self, batch: Batch) -> Ran:
        """Run every part; all ranks must be given the same batch."""
        self.copy_pages(batch.copies)
        parts, device = batch.parts, self.mesh.device
        spans = [Span(part.start, len(part.tokens), part.pages) for part in parts]
        paged = paged_batch(spans, self.group, self.page_tokens, self.windows, self.sizes, device)
        tokens = torch.tensor([token for part in parts for token in part.tokens], device=device)
        positions = torch.cat([torch.arange(part.start, part.start + len(part.tokens)) for part in parts]).to(device)
        attend = PagedAttention(self.config, paged, self.keys, self.values)
        x = self.model.hidden(self.weights, tokens, positions, attend)  # type: ignore[arg-type]
        ends = dict(zip((part.id for part in parts), accumulate(len(part.tokens) for part in parts), strict=True))
        sampled = [part.id for part in parts if part.samples]
        scores = {}
        for part in parts:
            if part.scores and len(part.tokens) > 1:
                before = x[ends[part.id] - len(part.tokens) : ends[part.id] - 1]
                scores[part.id] = [self.logits(rows) for rows in before.split(SCORED_ROWS)]
        if not sampled:
            return Ran({}, scores)
        logits = self.logits(x[torch.tensor([ends[id] - 1 for id in sampled], device=device)])
        return Ran(dict(zip(sampled, logits, strict=True)), scores)

    def copy_pages(self, copies: Sequence[tuple[int, int]]) -> None:
        if not copies:
            return
        source, target = torch.tensor(copies, device=self.mesh.device).t()
        for pages in (*self.keys, *self.values):
            pages[:, target] = pages[:, source]

    def logits(self, x: Tensor) -> Tensor:
        """x [R, D] -> [R, V] in fp32, whole on every rank."""
        mine, tp = self.head.apply(x), self.mesh.tp
        if tp.size == 1:
            return mine
        columns = mine.new_empty(tp.size * len(mine), mine.shape[1])
        tp.all_gather(mine.contiguous(), columns).wait()
        return columns.view(tp.size, *mine.shape).transpose(0, 1).flatten(1)[:, : self.config.vocab_size]

    @torch.inference_mode()
    def embed(self, tokens: Sequence[int]) -> list[float]:
        """The mean of the last hidden states, of length 1."""
        ids = torch.tensor(tokens, device=self.mesh.device)
        attend = Causal(self.config)
        x = self.model.hidden(self.weights, ids[None], torch.arange(len(ids), device=ids.device)[None], attend)  # type: ignore[arg-type]
        mean = x[0].float().mean(0)
        found: list[float] = (mean / mean.norm()).tolist()
        return found
