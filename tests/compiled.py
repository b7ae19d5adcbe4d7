"""Compiles the kernels as they are launched, for GPUs of which there is none here, and prints what
came of each.

    python tests/compiled.py 80 90

A line of JSON for each: its name, the GPU's compute capability, the bytes that a program has in
shared memory and those that its registers did not hold, the fused multiplications in its code, and
whether it uses tensor cores.
"""

import json
import re
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver

from shardwise.kernels.interface import RopeTables
from shardwise.kernels.kv_cache import KVPages
from shardwise.kernels.page_table import TokenSpan
from shardwise.kernels.triton.attention import triton_paged_attention
from shardwise.kernels.triton.batch import table_batch
from shardwise.kernels.triton.linear import TritonQuantized, pack_integers, quantized_product
from shardwise.kernels.triton.pointwise import gated, rms_norm, rope_and_write_kv
from shardwise.quant.format import quantize
from shardwise.quant.kv_dtype import KvDtype
from shardwise.quant.scheme import Scheme

CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
SPANS = [TokenSpan(0, 40, (0, 1, 2)), TokenSpan(600, 1, tuple(range(38)))]


class NoGPU:
    """Says which GPU to compile for, in place of one."""

    def __init__(self, capability: int) -> None:
        self.capability = capability

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self) -> int:
        return self.capability

    def get_current_stream(self, device: int) -> int:
        return 0


def compile_all(compiled: list[Any]) -> None:
    """Launch every kernel, in the ways that a server does."""
    run = triton.JITFunction.run

    def compile_only(self: Any, *args: Any, **options: Any) -> None:
        compiled.append(run(self, *args, **options | {"warmup": True}))

    triton.JITFunction.run = compile_only
    try:
        for rows, window, wanted_programs in ((16, None, 1000), (16, 100, 0), (64, None, 0)):
            launch_attention(torch.bfloat16, 64, rows, window, wanted_programs)
        launch_attention(torch.bfloat16, 128, 64, None, 0)
        launch_attention(torch.float32, 64, 16, None, 0)
        for rows, kv_dtype in ((16, "int8"), (64, "fp8")):
            launch_attention(torch.bfloat16, 128, rows, None, 0, kv_dtype)
        launch_small(torch.bfloat16)
        for scheme, rows, split in (
            ("int8", 16, True),
            ("int4-g128", 64, False),
            ("int4z-g32", 128, False),
        ):
            launch_product(torch.bfloat16, scheme, rows, split)
    finally:
        triton.JITFunction.run = run


def launch_attention(
    dtype: torch.dtype,
    size: int,
    rows: int,
    window: int | None,
    wanted_programs: int,
    kv_dtype: KvDtype = "auto",
) -> None:
    q = torch.empty(41, 8, size, dtype=dtype)
    pages = KVPages.empty((2, 64, 16, size), kv_dtype, dtype)
    batch = table_batch(SPANS, 4, 16, (rows,), torch.device("cpu"))
    triton_paged_attention(q, pages, batch, window, wanted_programs)


def launch_small(dtype: torch.dtype) -> None:
    x, weight, inner = (torch.empty(shape, dtype=dtype) for shape in ((5, 576), (576,), (5, 3072)))
    rms_norm(x, weight, 1e-5)
    for activation in ("silu", "gelu", "gelu_tanh"):
        gated(inner, activation)
    q, k, v = torch.empty(5, 15, 64, dtype=dtype).split((9, 3, 3), 1)
    rope = RopeTables(*(torch.empty(5, 1, 32, dtype=dtype),) * 2)
    slots = torch.zeros(5, dtype=torch.int32)
    for kv_dtype in get_args(KvDtype):
        rope_and_write_kv(q, k, v, rope, KVPages.empty((3, 4, 16, 64), kv_dtype, dtype), slots)
    rope_and_write_kv(q, k, v, None, KVPages.empty((3, 4, 16, 64), "auto", dtype), slots)


def launch_product(dtype: torch.dtype, name: str, num_rows: int, split: bool) -> None:
    """Of a name with offsets and groups of 32: with minima, as Q4_1 has."""
    held = quantize(torch.randn(192, 1536), Scheme.parse(name))
    if name == "int4z-g32":
        held = replace(held, zeros=held.scales)
    quantized_product(
        torch.empty(300, 1536, dtype=dtype), pack_integers(held), num_rows, 4, split, dtype
    )
    TritonQuantized(pack_integers(held), (16,), 4, 1, dtype).look_up(
        torch.zeros(3, dtype=torch.int64)
    )


def told(kernel: Any, capability: int) -> dict[str, Any]:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        usage = subprocess.run(
            [CUOBJDUMP, "-res-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    return {
        "name": kernel.metadata.name,
        "capability": capability,
        "shared_bytes": kernel.metadata.shared,
        "spilled_bytes": sum(map(int, re.findall(r"STACK:(\d+)", usage))),
        "fused": sorted(set(re.findall(r"fma\.\S+", kernel.asm["ptx"]))),
        "tensor_cores": bool(re.search(r"mma\.sync|wgmma", kernel.asm["ptx"])),
    }


def main() -> None:
    for capability in map(int, sys.argv[1:]):
        driver.set_active(NoGPU(capability))
        compiled: list[Any] = []
        compile_all(compiled)
        for kernel in compiled:
            print(json.dumps(told(kernel, capability)), flush=True)


if __name__ == "__main__":
    main()
