"""A model quantized block by block, in bounded memory: besides the result there are the inputs of
one block, that block as plain numbers, and the statistics of its matrices.

With a calibrated method the text runs through the blocks as they will be: each is first watched at
work, then quantized, then run again, so that the next one sees the errors of those before it.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

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

MATRICES = ("qkv", "out", "gate_up", "down")
BATCH_TOKENS = 4096
"""Of the text, that run through a block at once."""

Statistics = dict[str, InputStatistics]


@dataclass(frozen=True, eq=False)
class Quantizer:
    """How the matrices of a model are quantized. `dtype` is that of what stays plain numbers, so
    that scales which are taken into a norm are rounded as the norm will be; work is done in fp32 on
    `device`."""

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
        """The model's parameters in their order, each asked of `weights` (in fp32) once it is
        needed. `text` holds token ids [sequences, tokens] of a calibrated method. Raises ValueError
        for weights that are no numbers."""
        assert (text is not None) == self.quant_config.calibrated
        x = None if text is None else self.embedded(weights, text)
        for unit, specs in units(model_specs(self.config)).items():
            if not unit.startswith("blocks."):
                yield from ((spec.name, weights[spec.name]) for spec in specs)
                continue
            layer = int(unit.removeprefix("blocks."))
            prefix = f"{unit}."
            block = {
                spec.name.removeprefix(prefix): weights[spec.name].to(self.device) for spec in specs
            }
            check_numbers(block, unit)
            ready = self.block(block, None if x is None else self.watched(block, layer, x))
            if x is not None and layer + 1 < self.config.num_layers:
                self.run(dequantized_block(ready), layer, x, out=x)
            yield from ((prefix + name, value.to("cpu")) for name, value in ready.items())
            progress("quantizing", (layer + 1) / self.config.num_layers)

    def embedded(self, weights: Mapping[str, Tensor], text: Tensor) -> Tensor:
        """[sequences, tokens, D]."""
        return Transformer(self.config, REFERENCE).embed(
            weights, text, torch.arange(text.shape[1])[None]
        )

    def watched(self, block: Block, layer: int, x: Tensor) -> Statistics:
        """What the matrices of a block are multiplied with while it runs."""
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
        """A block over all of the text, a few sequences at a time; what it makes of x goes to
        `out`, if given."""
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

    def block(
        self, block: Block, statistics: Statistics | None
    ) -> dict[str, Tensor | QuantizedMatrix]:
        """A block with its matrices quantized, and, of AWQ, with scales taken in."""
        scheme = self.quant_config.scheme
        if statistics is None:
            made = {name: round_to_nearest(block[name], scheme, self.choose) for name in MATRICES}
        elif self.quant_config.method == "gptq":
            made = {
                name: gptq(block[name], scheme, statistics[name].second_moment, self.choose)
                for name in MATRICES
            }
        else:
            block, statistics = self.scaled(block, statistics)
            made = {
                name: clipped(block[name], scheme, statistics[name].second_moment, self.choose)
                for name in MATRICES
            }
        return block | made

    def scaled(self, block: Block, statistics: Statistics) -> tuple[Block, Statistics]:
        """A block with the scales of AWQ taken in, and what is then known of it."""
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


def check_numbers(block: Block, unit: str) -> None:
    for name, weight in block.items():
        if not weight.isfinite().all():
            raise ValueError(
                f"{unit}.{name} holds weights that are infinite or no numbers, so it cannot be quantized"
            )


def dequantized_block(block: Mapping[str, Tensor | QuantizedMatrix]) -> Block:
    return {
        name: value if isinstance(value, Tensor) else dequantize(value, torch.float32)
        for name, value in block.items()
    }
