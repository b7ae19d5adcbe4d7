"""Runs a batch: the same model as in training, with attention over pages. Every rank of tensor
parallel has one.

Shapes: N tokens of the batch, R rows whose logits are wanted, V vocabulary, K kv heads, P tokens of
a page, C head dim.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from shardwise.config import ModelConfig
from shardwise.kernels.interface import RopeTables
from shardwise.kernels.kv_cache import KVPages
from shardwise.kernels.reference.attention import causal_attention
from shardwise.kernels.registry import serving_kernels
from shardwise.kernels.serving_interface import (
    AttentionShape,
    DecoderBlocks,
    PagedAttention,
    ServingKernels,
)
from shardwise.kernels.spans import Span
from shardwise.kernels.triton.batch import TableBatch
from shardwise.model.layers import Causal, rope_tables
from shardwise.model.transformer import Transformer
from shardwise.parallel.apply import seams_of
from shardwise.parallel.mesh import Mesh
from shardwise.quant.kv_dtype import KvDtype, vector_bytes
from shardwise.quantize.load_quantized import Weights
from shardwise.serve.engine.batch import Batch
from shardwise.serve.engine.cuda_graphs import Capture, DecodeGraphs, only_decodes
from shardwise.serve.request import Logprob
from shardwise.serve.sampling.logprobs import log_probabilities

SCORED_ROWS = 64
"""Prompts whose log-probabilities are wanted have logits for every token, of which so many are held
at a time."""


@dataclass(frozen=True)
class Ran:
    """By the id of a part. logits [V] in fp32: after its last token, of those that sample. scores:
    of those that asked, and on the first rank: the log-probabilities of all tokens but the first,
    in order."""

    logits: Mapping[int, Tensor]
    scores: Mapping[int, list[Logprob]]


@dataclass(frozen=True)
class BatchAttention:
    """`attend` of one batch: applies RoPE, writes keys and values into their pages, and attends to
    all earlier tokens."""

    config: ModelConfig
    attention: PagedAttention
    batch: Any
    rope: RopeTables | None
    pages: Sequence[KVPages]

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [N, H, C], k and v [N, K, C] -> [N, H, C]."""
        window = self.config.window(layer)
        return self.attention.attend(q, k, v, self.rope, self.pages[layer], self.batch, window)


class Runner:
    """The weights and the pages of one rank. `weights` are given up to it: it packs them as
    products like them best. `kernels` are those that its device likes best, if none are named."""

    def __init__(
        self,
        config: ModelConfig,
        weights: Weights,
        mesh: Mesh,
        dtype: torch.dtype,
        page_tokens: int,
        kernels: ServingKernels | None = None,
        kv_dtype: KvDtype = "auto",
    ) -> None:
        self.config = config
        self.mesh = mesh
        self.dtype = dtype
        self.page_tokens = page_tokens
        self.kv_dtype = kv_dtype
        self.kernels = kernels or serving_kernels(mesh.device, dtype)
        self.model = Transformer(config, self.kernels, seams_of(mesh), applies_rope=False)
        name = self.model.head_name
        self.head, table = self.kernels.pack_head(weights.pop(name), dtype)
        tables = {name: table} if config.tied else {}
        self.weights = self.kernels.pack_weights(weights) | tables
        self.frequencies = (
            None if config.positions == "learned" else self.model.frequencies.to(mesh.device)
        )
        self.num_kv_heads = max(1, config.num_kv_heads // mesh.tp.size)
        windows = frozenset(config.window(layer) for layer in range(config.num_layers))
        num_heads = config.num_heads // mesh.tp.size
        shape = (config.head_dim, page_tokens)
        self.attention = self.kernels.paged_attention(
            AttentionShape(
                num_heads, self.num_kv_heads, *shape, windows, dtype, mesh.device, kv_dtype
            )
        )
        self.graphs: DecodeGraphs | None = None
        self.pages: list[KVPages] = []
        self.blocks: DecoderBlocks | None = None

    @property
    def page_bytes(self) -> int:
        """Of keys and values in all layers on this rank."""
        vectors = 2 * self.config.num_layers * self.num_kv_heads * self.page_tokens
        return vectors * vector_bytes(self.kv_dtype, self.dtype.itemsize).of(self.config.head_dim)

    def make_pages(self, num_pages: int) -> None:
        """Memory for that many; what was there is gone. It holds anything until it is written."""
        shape = self.num_kv_heads, num_pages, self.page_tokens, self.config.head_dim
        self.graphs = self.blocks = None
        self.pages.clear()
        for _ in range(self.config.num_layers):
            self.pages.append(KVPages.empty(shape, self.kv_dtype, self.dtype, self.mesh.device))
        if self.mesh.tp.size == 1:  # more ranks have sums to make within a block
            self.blocks = self.kernels.decoder_blocks(
                self.config, self.weights, self.attention, self.pages
            )

    @torch.inference_mode()
    def run(self, batch: Batch) -> Ran:
        """Run every part; all ranks must be given the same batch."""
        self.copy_pages(batch.copies)
        parts = batch.parts
        device = self.mesh.device
        if self.graphs is not None and only_decodes(parts):
            return Ran(
                dict(zip((part.id for part in parts), self.graphs.run(parts), strict=True)), {}
            )
        spans = [Span(part.start, len(part.tokens), part.pages) for part in parts]
        tokens = torch.tensor([token for part in parts for token in part.tokens], device=device)
        positions = torch.cat(
            [torch.arange(part.start, part.start + len(part.tokens)) for part in parts]
        ).to(device)
        x = self.hidden(tokens, positions, self.attention.batch(spans))
        ends = dict(
            zip(
                (part.id for part in parts),
                accumulate(len(part.tokens) for part in parts),
                strict=True,
            )
        )
        sampled = [part.id for part in parts if part.samples]
        scores = {}
        for part in parts:
            if part.scores is not None and len(part.tokens) > 1:
                before = x[ends[part.id] - len(part.tokens) : ends[part.id] - 1]
                scores[part.id] = self.score(before, part.tokens[1:], part.scores)
        if not sampled:
            return Ran({}, scores)
        logits = self.logits(x[torch.tensor([ends[id] - 1 for id in sampled], device=device)])
        return Ran(dict(zip(sampled, logits, strict=True)), scores)

    def hidden(self, tokens: Tensor, positions: Tensor, batch: Any) -> Tensor:
        """The last hidden states [N, D] of the tokens of a batch."""
        rope = None
        if self.frequencies is not None:
            rope = rope_tables(positions, self.frequencies, self.dtype)
        if self.blocks is not None and rope is not None:
            x = self.blocks.run(self.model.embed(self.weights, tokens, positions), rope, batch)
            return self.model.final(self.weights, x)
        attend = BatchAttention(self.config, self.attention, batch, rope, self.pages)
        return self.model.hidden(self.weights, tokens, positions, attend)

    @torch.inference_mode()
    def capture_graphs(self, max_running: int, max_len: int, capture: Capture) -> None:
        """From now on, until there are other pages, run batches of single tokens by what is
        captured here."""
        assert self.attention.is_capturable and self.mesh.tp.size == 1
        width = -(-max_len // self.page_tokens)

        def decode(tokens: Tensor, batch: TableBatch) -> Tensor:
            return self.logits(self.hidden(tokens, batch.starts, batch))

        sizes = self.attention.row_sizes
        self.graphs = DecodeGraphs(
            decode, max_running, width, self.page_tokens, sizes[0], self.mesh.device, capture
        )

    def copy_pages(self, copies: Sequence[tuple[int, int]]) -> None:
        if not copies:
            return
        source, target = torch.tensor(copies, device=self.mesh.device).t()
        for pages in self.pages:
            pages.copy(source, target)

    def score(self, x: Tensor, tokens: Sequence[int], num_top: int) -> list[Logprob]:
        """The log-probabilities of `tokens`, each under the logits of its row of x [R, D], on the
        first rank."""
        told: list[Logprob] = []
        for start in range(0, len(tokens), SCORED_ROWS):
            some = tokens[start : start + SCORED_ROWS]
            logits = self.logits(x[start : start + SCORED_ROWS])
            if self.mesh.tp.rank == 0:
                told += log_probabilities(logits, some, [num_top] * len(some), self.kernels)
        return told

    def logits(self, x: Tensor) -> Tensor:
        """x [R, D] -> [R, V] in fp32, whole on every rank."""
        mine = self.head.apply(x)
        tp = self.mesh.tp
        if tp.size == 1:
            return mine
        columns = mine.new_empty(tp.size * len(mine), mine.shape[1])
        tp.all_gather(mine.contiguous(), columns).wait()
        return (
            columns.view(tp.size, *mine.shape)
            .transpose(0, 1)
            .flatten(1)[:, : self.config.vocab_size]
        )

    @torch.inference_mode()
    def embed(self, tokens: Sequence[int]) -> list[float]:
        """The mean of the last hidden states, of length 1."""
        ids = torch.tensor(tokens, device=self.mesh.device)
        attend = Causal(self.config, causal_attention)
        model = replace(self.model, applies_rope=True)
        x = model.hidden(
            self.weights, ids[None], torch.arange(len(ids), device=ids.device)[None], attend
        )
        mean = x[0].float().mean(0)
        found: list[float] = (mean / mean.norm()).tolist()
        return found
