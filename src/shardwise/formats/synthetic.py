"""Synthetic Llama shapes for a bare parameter count such as 70B."""

import math
import re

from shardwise.config import ModelConfig
from shardwise.formats.families import LLAMA

LLAMA_WIDTHS = (  # hidden sizes with the number of layers that models of that width have
    (32, 2), (64, 2), (128, 4), (256, 6), (512, 8), (768, 12), (1024, 16), (2048, 16), (3072, 28), (4096, 32),
    (5120, 40), (6144, 48), (8192, 80), (12288, 96), (16384, 126), (20480, 128), (25600, 128), (32768, 160),
    (49152, 200),
)  # fmt: skip


def from_count(count: int) -> ModelConfig:
    """A Llama shape of `count` parameters to within 0.05 %: usual width and depth, the ffn size
    makes up the count."""
    vocab = 32000 if count >= 100_000_000 else 256
    shapes = [
        shape
        for hidden, layers in LLAMA_WIDTHS
        if (shape := shape_of_count(count, hidden, layers, vocab))
    ]
    if not shapes or count > 10**13:
        raise ValueError(
            f"a model of {count} parameters is too small or too large to draw; 1M to 10T work"
        )
    return min(shapes, key=lambda shape: abs(math.log(shape.ffn_size / shape.hidden_size / 3.5)))


def shape_of_count(count: int, hidden: int, layers: int, vocab: int) -> ModelConfig | None:
    heads = hidden // 128 if hidden >= 512 else max(1, hidden // 32)
    kv_heads = 8 if heads % 8 == 0 else heads
    head_dim = hidden // heads
    fixed = (
        2 * vocab * hidden
        + hidden
        + layers * (2 * hidden + 2 * hidden * (heads + kv_heads) * head_dim)
    )
    per_ffn = 3 * hidden * layers
    for step in (256, 64, 8, 1):
        ffn = round((count - fixed) / per_ffn / step) * step
        if 4 * ffn >= hidden and abs(fixed + per_ffn * ffn - count) <= 0.0005 * count:
            return ModelConfig(
                LLAMA.model_type,
                layers,
                hidden,
                ffn,
                heads,
                kv_heads,
                head_dim,
                vocab,
                max_positions=131072,
            )
    return None


def parse_count(text: str) -> int | None:
    """`7.5B` -> 7500000000; None when the text is not a count."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([KMBT])", text.upper())
    if not match:
        return None
    return round(float(match[1]) * {"K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}[match[2]])
