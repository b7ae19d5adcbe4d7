"""A model as training computes it: unsharded, with torch's operations and no KV cache. Served
models are compared with it.

Shapes: T tokens, V vocabulary.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch
from torch import Tensor

from shardwise.config import ModelConfig
from shardwise.formats.open_model import open_model
from shardwise.formats.tokenizers.tokenizer import Tokenizer
from shardwise.kernels.reference.attention import causal_attention
from shardwise.kernels.reference.serving import REFERENCE
from shardwise.layout import Layout
from shardwise.model.layers import Causal
from shardwise.model.transformer import Transformer
from shardwise.params import model_specs
from shardwise.quant.scheme import UNQUANTIZED
from shardwise.quantize.load_quantized import load_quantized

ROWS = 64
"""Rows of logits in memory at a time."""


@dataclass(frozen=True)
class ReferenceModel:
    """A model on one device."""

    config: ModelConfig
    weights: dict[str, Tensor]
    tokenizer: Tokenizer
    dtype: torch.dtype
    device: torch.device

    @torch.inference_mode()
    def hidden(self, ids: Tensor) -> Tensor:
        """Return the last hidden states [T, D] of the tokens [T], in one forward pass."""
        positions = torch.arange(len(ids), device=self.device)[None]
        attend = Causal(self.config, causal_attention)
        decoder = Transformer(self.config, REFERENCE)
        return decoder.hidden(self.weights, ids.to(self.device)[None], positions, attend)[0]

    @torch.inference_mode()
    def logits(self, ids: Tensor, num_rows: int) -> Iterator[Tensor]:
        """Yield fp32 logits [ROWS, V] after each of the last `num_rows` of the tokens [T], a few
        rows at a time. They are rounded to the dtype of the weights, as in the training loss.
        """
        decoder = Transformer(self.config, REFERENCE)
        for rows in self.hidden(ids)[-num_rows:].split(ROWS):
            yield decoder.logits(self.weights, rows).float()


def load_reference_model(
    path: Path, dtype: torch.dtype, device: torch.device, quant: str = UNQUANTIZED
) -> ReferenceModel:
    """Load a Hugging Face folder, a GGUF file or a run, with its tokenizer. `quant` as in
    `load_quantized`; products dequantize its weights.
    """
    model = open_model(path)
    layout = Layout()
    weights = load_quantized(
        model.source,
        model.config,
        model_specs(model.config),
        layout,
        layout.coord(0),
        dtype,
        quant,
        device,
    )
    tensors = cast(dict[str, Tensor], weights)  # `linear` takes quantized weights too
    return ReferenceModel(model.config, tensors, model.tokenizer, dtype, device)


def training_logprobs(model: ReferenceModel, tokens: Sequence[int]) -> Tensor:
    """Return log p of each token after those before it, fp32 [T - 1], as in training."""
    ids = torch.tensor(tokens)
    targets = ids[1:].to(model.device).split(ROWS)
    logprobs = [
        rows.log_softmax(-1).gather(1, row_targets[:, None])[:, 0]
        for rows, row_targets in zip(model.logits(ids[:-1], len(ids) - 1), targets, strict=True)
    ]
    return torch.cat(logprobs).cpu()
