"""Computes a batch: the same model as in training, with attention over pages. Every tensor rank has
a runner.

Shapes: N tokens of the batch, R rows that need logits, V vocabulary, D model, H query heads, K kv
heads, P tokens per page, C head dim.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from shardwise.config import ModelConfig
from shardwise.kernels.interface import RopeTables
from shardwise.kernels.kv_cache import KVPages
from shardwise.kernels.page_table import TokenSpan
from shardwise.kernels.reference.attention import causal_attention
from shardwise.kernels.registry import serving_kernels
from shardwise.kernels.serving_interface import (
    AttentionShape,
    DecoderBlocks,
    PagedAttention,
    ServingKernels,
)
from shardwise.kernels.triton.batch import TableBatch
from shardwise.model.layers import Causal
from shardwise.model.rotary import Rotary
from shardwise.model.transformer import Transformer
from shardwise.parallel.apply import seams_of
from shardwise.parallel.mesh import Mesh
from shardwise.quant.kv_dtype import KvDtype, vector_bytes
from shardwise.quantize.load_quantized import Weights
from shardwise.serve.engine.cuda_graphs import Capture, DecodeGraphs, only_decodes
from shardwise.serve.engine.sequence import Batch, BatchEntry
from shardwise.serve.request import Logprob
from shardwise.serve.sampling.sampler import token_logprobs

LOGPROB_ROWS = 64
"""Rows of logits that are held at a time for the log-probabilities of a prompt."""

Logits = dict[int, Tensor]
"""Logits [V] in fp32 after the last token of each entry that samples, by sequence id."""
PromptLogprobs = dict[int, list[Logprob]]
"""Log-probabilities of all tokens but the first of each entry that requests them, by sequence id;
on rank 0 only."""


@dataclass(frozen=True)
class BatchAttention:
    """`attend` of one batch: applies RoPE to queries and keys, writes keys and values into their
    pages, and attends to all tokens so far.
    """

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
    """The weights and the pages of one rank.

    Takes ownership of `weights` and repacks them for the kernels. `kernels` are by default the best
    for the device.
    """

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
        self.rotary = None if config.positions == "learned" else Rotary.of(config, mesh.device)
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
        """Bytes of one page: keys and values of all layers on this rank."""
        vectors = 2 * self.config.num_layers * self.num_kv_heads * self.page_tokens
        return vectors * vector_bytes(self.kv_dtype, self.dtype.itemsize).of(self.config.head_dim)

    def make_pages(self, num_pages: int) -> None:
        """Replace all pages by `num_pages` new ones, which are not initialized, and drop what was
        made for the old ones.
        """
        self.graphs = None
        self.blocks = None
        self.pages.clear()  # before the new ones are allocated
        self.pages += (self.allocate_layer(num_pages) for _ in range(self.config.num_layers))
        self.blocks = self.make_blocks()

    def allocate_layer(self, num_pages: int) -> KVPages:
        """Return the pages [K, num_pages, P, C] of one layer, not initialized."""
        shape = self.num_kv_heads, num_pages, self.page_tokens, self.config.head_dim
        return KVPages.empty(shape, self.kv_dtype, self.dtype, self.mesh.device)

    def make_blocks(self) -> DecoderBlocks | None:
        """Return kernels that run whole blocks over the pages, if this device has them and tensor
        ranks need no sums within a block.
        """
        if self.mesh.tp.size > 1:
            return None
        return self.kernels.decoder_blocks(self.config, self.weights, self.attention, self.pages)

    @torch.inference_mode()
    def run(self, batch: Batch) -> tuple[Logits, PromptLogprobs]:
        """Compute every entry of a batch, which must be the same on all ranks."""
        self.copy_pages(batch.copies)
        entries = batch.entries
        ids = [entry.id for entry in entries]
        if self.graphs is not None and only_decodes(entries):
            return dict(zip(ids, self.graphs.run(entries), strict=True)), {}
        x = self.run_entries(entries)
        ends = list(accumulate(len(entry.tokens) for entry in entries))
        prompt_logprobs: PromptLogprobs = {}
        for entry, end in zip(entries, ends, strict=True):
            if entry.num_prompt_logprobs is not None and len(entry.tokens) > 1:
                before = x[end - len(entry.tokens) : end - 1]
                prompt_logprobs[entry.id] = self.prompt_logprobs(
                    before, entry.tokens[1:], entry.num_prompt_logprobs
                )
        last = {e.id: end - 1 for e, end in zip(entries, ends, strict=True) if e.num_samples}
        if not last:
            return {}, prompt_logprobs
        logits = self.logits(x[torch.tensor(list(last.values()), device=self.mesh.device)])
        return dict(zip(last, logits, strict=True)), prompt_logprobs

    def run_entries(self, entries: Sequence[BatchEntry]) -> Tensor:
        """Return the last hidden states [N, D] of the tokens of all entries, concatenated."""
        device = self.mesh.device
        spans = [TokenSpan(entry.start, len(entry.tokens), entry.pages) for entry in entries]
        tokens = torch.tensor([token for e in entries for token in e.tokens], device=device)
        positions = torch.cat([torch.arange(e.start, e.start + len(e.tokens)) for e in entries])
        return self.hidden(tokens, positions.to(device), self.attention.batch(spans))

    def hidden(self, tokens: Tensor, positions: Tensor, batch: Any) -> Tensor:
        """Return the last hidden states [N, D] of tokens [N] at positions [N]."""
        rope = None if self.rotary is None else self.rotary.tables(positions, self.dtype)
        if self.blocks is not None and rope is not None:
            x = self.blocks.run(self.model.embed(self.weights, tokens, positions), rope, batch)
            return self.model.final(self.weights, x)
        attend = BatchAttention(self.config, self.attention, batch, rope, self.pages)
        return self.model.hidden(self.weights, tokens, positions, attend)

    @torch.inference_mode()
    def capture_graphs(self, max_running: int, max_len: int, capture: Capture) -> None:
        """Capture decode steps of up to `max_running` sequences; batches of decodes replay them
        until the pages are replaced.
        """
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

    def prompt_logprobs(self, x: Tensor, tokens: Sequence[int], num_top: int) -> list[Logprob]:
        """Return the log-probability of each of `tokens` under the logits of its row of x [R, D],
        on rank 0; nothing on other ranks.
        """
        logprobs: list[Logprob] = []
        for start in range(0, len(tokens), LOGPROB_ROWS):
            some = tokens[start : start + LOGPROB_ROWS]
            logits = self.logits(x[start : start + LOGPROB_ROWS])
            if self.mesh.tp.rank == 0:
                logprobs += token_logprobs(logits, some, [num_top] * len(some), self.kernels)
        return logprobs

    def logits(self, x: Tensor) -> Tensor:
        """Return logits [R, V] in fp32 of x [R, D], complete on every rank."""
        shard = self.head.apply(x)
        tp = self.mesh.tp
        if tp.size == 1:
            return shard
        gathered = shard.new_empty(tp.size * len(shard), shard.shape[1])
        tp.all_gather(shard.contiguous(), gathered).wait()
        by_row = gathered.view(tp.size, *shard.shape).transpose(0, 1).flatten(1)
        return by_row[:, : self.config.vocab_size]

    @torch.inference_mode()
    def embed(self, inputs: Sequence[Sequence[int]]) -> list[list[float]]:
        """Return the mean of the last hidden states of each input, scaled to length 1.

        All inputs run as one sequence, in which each is a document of its own.
        """
        device = self.mesh.device
        sizes = torch.tensor([len(tokens) for tokens in inputs])
        ids = torch.tensor([token for tokens in inputs for token in tokens], device=device)
        positions = torch.cat([torch.arange(len(tokens)) for tokens in inputs]).to(device)
        documents = torch.arange(len(inputs)).repeat_interleave(sizes).to(device)
        attend = Causal(self.config, causal_attention, documents[None] if len(inputs) > 1 else None)
        model = replace(self.model, applies_rope=True)
        x = model.hidden(self.weights, ids[None], positions[None], attend)[0].float()
        means = torch.stack([part.mean(0) for part in x.split(sizes.tolist())])
        vectors: list[list[float]] = (means / means.norm(dim=-1, keepdim=True)).tolist()
        return vectors
