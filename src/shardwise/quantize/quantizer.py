"""Quantization of a model, one block at a time.

Memory is bounded: in addition to the result it holds one block in fp32, its inputs, and the
statistics of its matrices. A calibrated method runs the calibration text through each block twice:
to collect statistics, and, once the block is quantized, to compute the inputs of the next block,
which thus include the errors of the blocks before it.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from shardwise.block import MATRICES
from shardwise.config import ModelConfig
from shardwise.formats.convert import Progress
from shardwise.formats.gguf.gguf_blocks import choose_block_scales
from shardwise.kernels.reference.attention import causal_attention
from shardwise.kernels.reference.serving import REFERENCE
from shardwise.layout import Layout
from shardwise.model.layers import AppliedWeight, Causal
from shardwise.model.transformer import BlockWeights, Transformer
from shardwise.params import model_specs, units
from shardwise.quant.format import (
    ChooseScales,
    QuantizedMatrix,
    choose_scales,
    dequantize,
    round_to_nearest,
)
from shardwise.quant.scheme import check_groups
from shardwise.quantize.awq import clipped, input_scales
from shardwise.quantize.fold import Block, folds
from shardwise.quantize.gptq import gptq
from shardwise.quantize.quant_config import QuantConfig
from shardwise.quantize.statistics import InputStatistics, ObservedWeight

BATCH_TOKENS = 4096
"""Tokens of the calibration text that run through a block at once."""

Statistics = dict[str, InputStatistics]


@dataclass(frozen=True, eq=False)
class Quantizer:
    """Quantizes the matrices of a model's blocks. Raises ValueError for groups that do not divide
    the columns of one.

    Attributes:
        config: the model.
        quant_config: scheme and method.
        dtype: the dtype in which the other parameters are stored. AWQ scales are chosen so that
            norms in this dtype absorb them exactly.
        device: where to compute, in fp32.
    """

    config: ModelConfig
    quant_config: QuantConfig
    dtype: torch.dtype
    device: torch.device | str = "cpu"

    def __post_init__(self) -> None:
        check_groups(model_specs(self.config), self.quant_config.scheme.group, Layout())

    @property
    def choose(self) -> ChooseScales:
        return choose_block_scales if self.quant_config.gguf else choose_scales

    def parameters(
        self, weights: Mapping[str, Tensor], text: Tensor | None, progress: Progress
    ) -> Iterator[tuple[str, Tensor | QuantizedMatrix]]:
        """Yield the parameters in the order of the model, matrices of blocks quantized.

        `weights` are in fp32, and each is read when it is needed. `text` holds the token ids
        [sequences, tokens] of a calibrated method. Raises ValueError for weights that are not
        finite.
        """
        assert (text is not None) == self.quant_config.calibrated
        x = None if text is None else self.embedded(weights, text)
        for unit, specs in units(model_specs(self.config)).items():
            layer = specs[0].layer
            if layer is None:
                yield from ((spec.name, weights[spec.name]) for spec in specs)
                continue
            prefix = f"{unit}."
            block = {spec.short_name: weights[spec.name].to(self.device) for spec in specs}
            check_finite(block, unit)
            statistics = None if x is None else self.collect(block, layer, x)
            quantized = self.quantize_block(block, statistics)
            if x is not None and layer + 1 < self.config.num_layers:
                self.run(dequantized_block(quantized), layer, x, out=x)
            yield from ((prefix + name, value.to("cpu")) for name, value in quantized.items())
            progress("quantizing", (layer + 1) / self.config.num_layers)

    def embedded(self, weights: Mapping[str, Tensor], text: Tensor) -> Tensor:
        """Return the inputs [sequences, tokens, D] of the first block."""
        return Transformer(self.config, REFERENCE).embed(
            weights, text, torch.arange(text.shape[1])[None]
        )

    def collect(self, block: Block, layer: int, x: Tensor) -> Statistics:
        """Return the input statistics of the matrices of a block that runs on x."""
        weights = {name: ObservedWeight(block[name]) for name in MATRICES}
        self.run({**block, **weights}, layer, x)
        return {name: weight.statistics() for name, weight in weights.items()}

    @torch.no_grad()
    def run(
        self,
        block: Mapping[str, Tensor | AppliedWeight],
        layer: int,
        x: Tensor,
        out: Tensor | None = None,
    ) -> None:
        """Run a block on x [sequences, tokens, D], a few sequences at a time, and write its outputs
        to `out`, if given."""
        decoder = Transformer(self.config, REFERENCE)
        weights = BlockWeights(**block)  # type: ignore[arg-type]
        positions = torch.arange(x.shape[1], device=self.device)[None]
        rope = decoder.rope_tables(positions, torch.float32)
        attend = Causal(self.config, causal_attention)
        step = max(1, BATCH_TOKENS // x.shape[1])
        for start in range(0, len(x), step):
            y = decoder.block(x[start : start + step].to(self.device), layer, weights, rope, attend)
            if out is not None:
                out[start : start + step] = y.to(out.device)

    def quantize_block(
        self, block: Block, statistics: Statistics | None
    ) -> dict[str, Tensor | QuantizedMatrix]:
        """Return a block with quantized matrices and, for AWQ, with folded scales."""
        scheme = self.quant_config.scheme
        if statistics is None:
            return block | {
                name: round_to_nearest(block[name], scheme, self.choose) for name in MATRICES
            }
        method = gptq
        if self.quant_config.method == "awq":
            method = clipped
            block, statistics = self.scaled(block, statistics)
        return block | {
            name: method(block[name], scheme, statistics[name].second_moment, self.choose)
            for name in MATRICES
        }

    def scaled(self, block: Block, statistics: Statistics) -> tuple[Block, Statistics]:
        """Return a block with the scales of AWQ folded in, and its statistics."""
        for fold in folds(self.config, self.dtype):
            name = fold.matrix
            scales = input_scales(
                block[name],
                self.quant_config.scheme,
                statistics[name],
                partial(fold.foldable, block),
                self.choose,
            )
            block = fold.apply(block, scales)
            statistics = statistics | {name: statistics[name].divided(scales)}
        return block, statistics


def check_finite(block: Block, unit: str) -> None:
    for name, weight in block.items():
        if not weight.isfinite().all():
            raise ValueError(f"{unit}.{name} has infinities or NaNs and cannot be quantized")


def dequantized_block(block: Mapping[str, Tensor | QuantizedMatrix]) -> Block:
    return {
        name: value if isinstance(value, Tensor) else dequantize(value, torch.float32)
        for name, value in block.items()
    }
