"""Words for the user about what an engine runs: how weights are held, and the kernels."""

from shardwise.kernels.native.library import library
from shardwise.precision import Precision
from shardwise.quant.scheme import AUTO, StorageFormats, parse_quant
from shardwise.suggest import listed

INSTRUCTION_SETS = {
    "avx512_bf16": "AVX-512 BF16",
    "avx512_vnni": "AVX-512 VNNI",
    "avx512": "AVX-512",
    "avx2": "AVX2",
    "portable": "portable",
}
"""Names of instruction sets for people."""


def weights_in_words(
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


def kernels_in_words(name: str, device_type: str, dtype: Precision) -> str:
    """Return the kernels of that name, and why they are not faster ones."""
    if name.startswith("native "):
        return f"{INSTRUCTION_SETS[name.removeprefix('native ')]} kernels"
    if name != "torch" or device_type != "cpu":
        return f"{name} kernels"
    if library is None:
        return (
            "torch operations (native kernels are missing: install a C++ compiler, such as g++, "
            "and reinstall Shardwise)"
        )
    reason = "native kernels are for bf16" if dtype != "bf16" else "SHARDWISE_KERNELS=torch"
    return f"torch operations ({reason})"
