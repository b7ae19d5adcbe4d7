"""The kernels that a model runs on, as logs and reports describe them."""

from shardwise.environment import CPU_KERNELS_VARIABLE
from shardwise.kernels.native.library import library
from shardwise.precision import Precision

INSTRUCTION_SETS = {
    "avx512_bf16": "AVX-512 BF16",
    "avx512_vnni": "AVX-512 VNNI",
    "avx512": "AVX-512",
    "avx2": "AVX2",
    "portable": "portable",
}
"""Display names of instruction sets."""
MISSING = "native kernels are missing: install a C++ compiler, such as g++, and reinstall Shardwise"


def describe_kernels(name: str, device_type: str, dtype: Precision) -> str:
    """Return a description of the kernels of that name, with the reason where faster ones exist."""
    if name.startswith("native "):
        return f"{INSTRUCTION_SETS[name.removeprefix('native ')]} kernels"
    if name != "torch" or device_type != "cpu":
        return f"{name} kernels"
    if library is None:
        return f"torch operations ({MISSING})"
    reason = "native kernels are for bf16" if dtype != "bf16" else f"{CPU_KERNELS_VARIABLE}=torch"
    return f"torch operations ({reason})"
