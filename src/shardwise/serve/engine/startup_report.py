"""The description of an engine's weights in the start line of the server."""

from shardwise.precision import Precision
from shardwise.quant.scheme import AUTO, StorageFormats, parse_quant
from shardwise.suggest import listed


def describe_weights(
    stored: StorageFormats, kept: StorageFormats, quant: str, dtype: Precision
) -> str:
    """Return how the weights are held, given the formats of the file and those of the engine."""
    if parse_quant(quant) is not None:
        return f"block weights quantized to {quant}"
    words = [f"{format_names(kept)} weights kept as stored"] if kept else []
    if dequantized := {part: format for part, format in stored.items() if part not in kept}:
        reason = " (no kernels for them here; --quant as-stored keeps them, slower)"
        text = f"{format_names(dequantized)} weights dequantized to {dtype}"
        words.append(text + reason * (quant == AUTO))
    return ", ".join(words) or f"{dtype} weights"


def format_names(formats: StorageFormats) -> str:
    return listed(sorted({format.name for format in formats.values()}))
