"""All blocks of a decoder in one call of the native kernels (`csrc/blocks.h`).

With a single token a step's products take as long as Python takes to call them one by one. These
are the same kernels in the order in which `model/transformer.py` has them, so the bits are the same
too.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from shardwise.config import ModelConfig
from shardwise.kernels.kv_cache import KVPages
from shardwise.kernels.native.library import LANES, library
from shardwise.kernels.native.serving import (
    KINDS_OF_PAGES,
    NativeAttention,
    NativeBatch,
    PackedQuantized,
    PackedWeight,
)

if TYPE_CHECKING:
    from shardwise.kernels.interface import Turns

NORMS = ("norm1", "norm2", "q_norm", "k_norm")
MATRICES = ("qkv", "out", "gate_up", "down")


@dataclass(frozen=True)
class NativeBlocks:
    """The blocks of one model with its pages. `held` is what the decoder has the addresses of."""

    decoder: Any
    attention: NativeAttention
    shape: tuple[int, ...]
    """Of the pages of a layer."""
    norm_eps: float
    held: tuple[Mapping[str, Any], Sequence[KVPages]]

    def run(self, x: Tensor, turns: "Turns", batch: NativeBatch) -> Tensor:
        """x [N, D] goes through all blocks, in place."""
        assert x.is_contiguous()
        cos, sin = turns
        heads = self.attention.heads
        spans = batch.spans
        table = batch.table
        num_kv_heads, num_pages, page_tokens, head_dim = self.shape
        self.decoder.run(
            self.attention.functions,
            KINDS_OF_PAGES[heads.kv_dtype],
            num_kv_heads,
            num_pages,
            page_tokens,
            head_dim,
            heads.num_heads,
            cos.data_ptr(),
            sin.data_ptr(),
            spans.data_ptr(),
            len(spans),
            table.data_ptr(),
            table.shape[1],
            len(x),
            self.norm_eps,
            x.data_ptr(),
        )
        return x


def native_blocks(
    config: ModelConfig, weights: Mapping[str, Any], attention: object, pages: Sequence[KVPages]
) -> NativeBlocks | None:
    """The blocks of a model on one rank, or None where some part of them has no native kernel, as
    GPT-2's norms and activations have none."""
    known = (
        config.norm == "rms"
        and config.gated
        and config.activation == "silu"
        and config.positions == "rope"
    )
    if not known or not isinstance(attention, NativeAttention):
        return None
    layers = [f"blocks.{layer}." for layer in range(config.num_layers)]
    matrices = [weights[layer + name] for layer in layers for name in MATRICES]
    if config.ffn_size % LANES or not all(
        isinstance(each, PackedWeight | PackedQuantized) for each in matrices
    ):
        return None
    decoder = library.Decoder()
    for number, (layer, of_layer) in enumerate(zip(layers, pages, strict=True)):
        decoder.add(
            *(address(weights.get(layer + name)) for name in NORMS),
            *(
                matrix(weights[layer + name], weights.get(f"{layer}{name}_bias"))
                for name in MATRICES
            ),
            of_layer.keys.numbers.data_ptr(),
            of_layer.values.numbers.data_ptr(),
            *(
                0 if each.scales is None else each.scales.data_ptr()
                for each in (of_layer.keys, of_layer.values)
            ),
            config.window(number) or 0,
        )
    return NativeBlocks(
        decoder, attention, tuple(pages[0].keys.numbers.shape), config.norm_eps, (weights, pages)
    )


def address(vector: Tensor | None) -> int:
    """Of the weight of a norm or a bias, or 0 of one that the model has not."""
    assert vector is None or (vector.dtype == torch.bfloat16 and vector.is_contiguous())
    return 0 if vector is None else vector.data_ptr()


def matrix(weight: PackedWeight | PackedQuantized, bias: Tensor | None) -> Any:
    shape = (weight.layout,) if isinstance(weight, PackedQuantized) else weight.shape
    return library.Matrix(weight.packed.data_ptr(), address(bias), *shape)
