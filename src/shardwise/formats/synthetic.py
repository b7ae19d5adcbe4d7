"""Llama shapes for a bare parameter count such as 70B."""

import math
import re

from shardwise.config import LARGEST, ModelConfig
from shardwise.formats.families import LLAMA

LLAMA_WIDTHS = (  # hidden sizes with the number of layers that models of that width have
    (32, 2), (64, 2), (128, 4), (256, 6), (512, 8), (768, 12), (1024, 16), (2048, 16), (3072, 28),
    (4096, 32), (5120, 40), (6144, 48), (8192, 80), (12288, 96), (16384, 126), (20480, 128),
    (25600, 128), (32768, 160), (49152, 200),
)  # fmt: skip
USUAL_FFN_RATIO = 3.5
TOLERANCE = 0.0005
SUFFIXES = {"K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}


def config_of_count(count: int) -> ModelConfig:
    """Return a Llama shape of `count` parameters to within 0.05 %, of usual width and depth.

    The FFN size makes up the count. Raises ValueError for a count out of range.
    """
    vocab = 32000 if count >= 100_000_000 else 256
    shapes = [
        shape
        for hidden, layers in LLAMA_WIDTHS
        if (shape := _fit_ffn(count, hidden, layers, vocab))
    ]
    if not shapes or count > 10**13:
        raise ValueError(f"no Llama shape has {count} parameters; 1M to 10T work")
    return min(
        shapes,
        key=lambda shape: abs(math.log(shape.ffn_size / shape.hidden_size / USUAL_FFN_RATIO)),
    )


def _fit_ffn(count: int, hidden: int, layers: int, vocab: int) -> ModelConfig | None:
    """Return the shape of that width and depth with `count` parameters, or None if no FFN size
    gives it."""
    heads = hidden // 128 if hidden >= 512 else max(1, hidden // 32)
    kv_heads = 8 if heads % 8 == 0 else heads
    head_dim = hidden // heads
    per_layer = 2 * hidden + 2 * hidden * (heads + kv_heads) * head_dim
    without_ffn = 2 * vocab * hidden + hidden + layers * per_layer
    per_ffn = 3 * hidden * layers
    for multiple in (256, 64, 8, 1):
        ffn = round((count - without_ffn) / per_ffn / multiple) * multiple
        is_usual = hidden <= 4 * ffn <= 4 * LARGEST["ffn_size"]
        if is_usual and abs(without_ffn + per_ffn * ffn - count) <= TOLERANCE * count:
            return ModelConfig(
                LLAMA.model_type,
                num_layers=layers,
                hidden_size=hidden,
                ffn_size=ffn,
                num_heads=heads,
                num_kv_heads=kv_heads,
                head_dim=head_dim,
                vocab_size=vocab,
                max_positions=131072,
            )
    return None


def parse_count(text: str) -> int | None:
    """Parse `7.5B` as 7500000000; return None for what is not a count."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([KMBT])", text.upper())
    if not match:
        return None
    return round(float(match[1]) * SUFFIXES[match[2]])
