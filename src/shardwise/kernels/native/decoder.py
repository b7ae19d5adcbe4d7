"""All blocks of a decoder in one call of the native kernels (`csrc/blocks.h`).

For a single token the products of a step take as long as the Python calls around them. The library
runs the same kernels in the order of `model/transformer.py`, so results are bit-identical.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shardwise.block import block_params
from shardwise.config import ModelConfig
from shardwise.kernels.interface import RopeTables
from shardwise.kernels.kv_cache import KVPages
from shardwise.kernels.native.library import LANES, library
from shardwise.kernels.native.serving import (
    PAGE_FORMATS,
    NativeBatch,
    NativePagedAttention,
    PackedQuantized,
    PackedWeight,
    scale_addresses,
)

NORMS = ("norm1", "norm2", "q_norm", "k_norm")
MATRICES = ("qkv", "out", "gate_up", "down")
"""The parameters of a block in the order of the library's arguments; each matrix may have a
bias."""
SUPPORTED = frozenset((*NORMS, *MATRICES, *(f"{name}_bias" for name in MATRICES)))


@dataclass(frozen=True)
class NativeDecoder:
    """The blocks of one model with its pages.

    Attributes:
        decoder: The library's object, which holds addresses.
        attention: The attention of the model.
        page_shape: The shape of a layer's pages [K, pages, P, C].
        norm_eps: Epsilon of the RMS norms.
        owners: The weights and pages whose memory the addresses point to.
    """

    decoder: Any
    attention: NativePagedAttention
    page_shape: tuple[int, ...]
    norm_eps: float
    owners: tuple[Mapping[str, Any], Sequence[KVPages]]

    def run(self, x: Tensor, rope: RopeTables, batch: NativeBatch) -> Tensor:
        """Run x [N, D] through all blocks, in place."""
        assert x.is_contiguous()
        shape = self.attention.shape
        num_kv_heads, num_pages, page_tokens, head_dim = self.page_shape
        self.decoder.run(
            self.attention.functions,
            PAGE_FORMATS[shape.kv_dtype],
            num_kv_heads,
            num_pages,
            page_tokens,
            head_dim,
            shape.num_heads,
            rope.cos.data_ptr(),
            rope.sin.data_ptr(),
            batch.spans.data_ptr(),
            len(batch.spans),
            batch.page_table.data_ptr(),
            batch.page_table.shape[1],
            len(x),
            self.norm_eps,
            x.data_ptr(),
        )
        return x


def native_decoder(
    config: ModelConfig, weights: Mapping[str, Any], attention: object, pages: Sequence[KVPages]
) -> NativeDecoder | None:
    """Return the blocks of a model on one rank, or None where some part of them has no native
    kernel, such as GPT-2's norms and activations."""
    is_llama_block = (
        config.norm == "rms"
        and config.gated
        and config.activation == "silu"
        and config.positions == "rope"
        and all(param.name in SUPPORTED for param in block_params(config))
    )
    if not is_llama_block or not isinstance(attention, NativePagedAttention):
        return None
    prefixes = [f"blocks.{layer}." for layer in range(config.num_layers)]
    matrices = [weights[prefix + name] for prefix in prefixes for name in MATRICES]
    are_packed = all(isinstance(each, PackedWeight | PackedQuantized) for each in matrices)
    if config.ffn_size % LANES or not are_packed:
        return None
    decoder = library.Decoder()
    for layer, (prefix, layer_pages) in enumerate(zip(prefixes, pages, strict=True)):
        decoder.add(
            *(address(weights.get(prefix + name)) for name in NORMS),
            *(
                matrix(weights[prefix + name], weights.get(f"{prefix}{name}_bias"))
                for name in MATRICES
            ),
            layer_pages.keys.numbers.data_ptr(),
            layer_pages.values.numbers.data_ptr(),
            *scale_addresses(layer_pages),
            config.window(layer) or 0,
        )
    page_shape = tuple(pages[0].keys.numbers.shape)
    return NativeDecoder(decoder, attention, page_shape, config.norm_eps, (weights, pages))


def address(vector: Tensor | None) -> int:
    """Return the address of the weight of a norm or of a bias, or 0 if the model has none."""
    assert vector is None or (vector.dtype == torch.bfloat16 and vector.is_contiguous())
    return 0 if vector is None else vector.data_ptr()


def matrix(weight: PackedWeight | PackedQuantized, bias: Tensor | None) -> Any:
    """Return the library's description of a matrix and its bias."""
    shape = (weight.layout,) if isinstance(weight, PackedQuantized) else weight.shape
    return library.Matrix(weight.packed.data_ptr(), address(bias), *shape)
