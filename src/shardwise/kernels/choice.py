"""Which version of each operation a model is served with, chosen once when it is loaded: native kernels on CPUs,
Triton's on GPUs, torch's own operations where those cannot be had.

What an operation computes is defined in plain torch (`norm.py`, `gated.py`, `rotary.py`, `paged.py`); a version is
another way to the same numbers.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, Protocol

import torch
from torch import Tensor

from shardwise.config import ModelConfig
from shardwise.kernels import native
from shardwise.kernels.choose import Draw, choose_each
from shardwise.kernels.gated import gated
from shardwise.kernels.kv import KVPages
from shardwise.kernels.logprobs import Told, log_probabilities
from shardwise.kernels.native_blocks import native_blocks
from shardwise.kernels.native_sampling import NativeSampling
from shardwise.kernels.norm import rms_norm
from shardwise.kernels.paged import PagedBatch, Span, attention_sizes, paged_attention, paged_batch
from shardwise.kernels.rotary import rotate
from shardwise.kernels.rows import head_of, row_weights
from shardwise.quant.cache import KvDtype
from shardwise.quant.weight import QuantizedWeight


@dataclass(frozen=True)
class Heads:
    """The shape of a model's attention on one rank: H query heads, K kv heads of C elements; pages of P tokens."""

    num_heads: int
    num_kv: int
    head_dim: int
    page_tokens: int
    windows: frozenset[int | None]
    dtype: torch.dtype
    device: torch.device
    kv_dtype: KvDtype = "auto"

    @property
    def group(self) -> int:
        """Query heads that share a kv head."""
        return self.num_heads // self.num_kv


Turns = tuple[Tensor, Tensor]
"""Cosine and sine [N, 1, C/2] of the angles by which the tokens of a step are turned."""


class Attention(Protocol):
    """Attention over pages for one model."""

    @property
    def sizes(self) -> tuple[int, ...]:
        """The numbers of query rows that are worked on together, at which rows have the same bits."""
        ...

    @property
    def reads_tables(self) -> bool:
        """Whether a batch is tables (`tables.py`), so that a step can be captured once and run again."""
        ...

    def batch(self, spans: Sequence[Span]) -> Any:
        """What all layers need to know of a step."""
        ...

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, turns: Turns | None, pages: KVPages, batch: Any, window: int | None
    ) -> Tensor:
        """Turn q [N, H, C] and k [N, K, C], write k and v into the pages, and attend: [N, H, C]."""
        ...


@dataclass(frozen=True)
class TorchAttention:
    """Plain torch: pages are gathered."""

    heads: Heads
    sizes: tuple[int, ...]
    reads_tables: bool = False

    @classmethod
    def of(cls, heads: Heads) -> "TorchAttention":
        return cls(heads, attention_sizes(heads.head_dim, heads.dtype, heads.device))

    def batch(self, spans: Sequence[Span]) -> PagedBatch:
        heads = self.heads
        return paged_batch(spans, heads.group, heads.page_tokens, heads.windows, self.sizes, heads.device)

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, turns: Turns | None, pages: KVPages, batch: PagedBatch,
        window: int | None,
    ) -> Tensor:  # fmt: skip
        if turns is not None:
            q, k = rotate(q, *turns), rotate(k, *turns)
        pages.keys.write(batch.slots, k)
        pages.values.write(batch.slots, v)
        return paged_attention(q, pages, batch, window)


class Blocks(Protocol):
    """All blocks of a decoder at once."""

    def run(self, x: Tensor, turns: Turns, batch: Any) -> Tensor:
        """x [N, D] -> [N, D]; x may be written to."""
        ...


def no_blocks(
    config: ModelConfig, weights: Mapping[str, Any], attention: Attention, pages: Sequence[KVPages]
) -> Blocks | None:
    return None


@dataclass(frozen=True)
class Kernels:
    """One version of each: rms_norm(x, weight, eps), gated(inner, activation), attention over pages, and what makes
    products of the weights of a model, which it takes out of the dict. head(weight [V, D], dtype): what makes logits,
    and what looks rows up if the embedding is the same. On a CPU, of rows of logits: choose(rows, draws), and
    log_probabilities(rows, tokens, num_top)."""

    name: str
    rms_norm: Callable[[Tensor, Tensor, float], Tensor]
    gated: Callable[[Tensor, str], Tensor]
    attention: Callable[[Heads], Attention]
    weights: Callable[[dict[str, Tensor | QuantizedWeight]], Any]
    head: Callable[[Tensor | QuantizedWeight, torch.dtype], tuple[Any, Any]]
    blocks: Callable[[ModelConfig, Mapping[str, Any], Attention, Sequence[KVPages]], Blocks | None] = no_blocks
    """All blocks of a decoder at once; None where they are run one by one."""
    choose: Callable[[Sequence[Tensor], Sequence[Draw]], list[int | None]] = choose_each
    log_probabilities: Callable[[Sequence[Tensor] | Tensor, Sequence[int], int], Told] = log_probabilities
    rotate: Callable[[Tensor, Tensor, Tensor], Tensor] = rotate
    """rotate(x, cos, sin), where it is not for attention to turn."""


TORCH = Kernels("torch", rms_norm, gated, TorchAttention.of, row_weights, head_of)
CHOICE = "SHARDWISE_KERNELS"
"""The environment may name the kernels for CPUs: torch, or an instruction set."""


def kernels_for(device: torch.device, dtype: torch.dtype) -> Kernels:
    """The fastest that there is for a device and a precision. Raises ValueError for a choice that is not there."""
    if device.type == "cuda" and find_spec("triton") is not None:
        return triton_kernels()
    name = chosen()
    takes = device.type == "cpu" and dtype == torch.bfloat16
    return TORCH if name == "torch" or not takes else native_kernels(name)


def chosen() -> str:
    """The kernels for CPUs that the environment names, or the fastest: an instruction set, or torch."""
    known = (*native.instruction_sets(), "torch")
    name = os.environ.get(CHOICE) or known[0]
    if name not in known:
        raise ValueError(f"{CHOICE} is {name!r}, but the kernels for this processor are {', '.join(known)}")
    return name


def native_kernels(name: str) -> Kernels:
    """Those of an instruction set."""
    kernels = native.Native.of(name)

    def attention(heads: Heads) -> Attention:
        return kernels.attention(heads) if kernels.attends(heads) else TorchAttention.of(heads)

    sampling = NativeSampling.of(name)
    return Kernels(
        f"native {name}", kernels.rms_norm, kernels.gated, attention, kernels.weights, kernels.head, native_blocks,
        sampling.choose, sampling.log_probabilities,
    )  # fmt: skip


def triton_kernels() -> Kernels:
    """Those for GPUs, which need the package triton; torch's builds for CUDA bring it along."""
    from shardwise.kernels import triton_paged, triton_quantized, triton_small

    norm, gate, attention = triton_small.rms_norm, triton_small.gated, triton_paged.TritonAttention.of
    return Kernels("Triton", norm, gate, attention, triton_quantized.weights, triton_quantized.head)
