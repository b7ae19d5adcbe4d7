"""Keywords of `LLM`: the fields of `EngineSettings`, and the names that vLLM gives to them."""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from shardwise.layout import Layout
from shardwise.serve.settings import EngineSettings
from shardwise.suggest import nearest

VLLM_NAMES = {
    "max_model_len": "max_len",
    "max_num_seqs": "max_running",
    "max_num_batched_tokens": "max_batch_tokens",
    "block_size": "page_tokens",
    "quantization": "quant",
    "kv_cache_dtype": "kv_dtype",
    "kv_cache_memory_bytes": "kv_bytes",
    "tensor_parallel_size": "layout",
    "gpu_memory_utilization": "memory_share",
}
"""vLLM's keyword, and the field of `EngineSettings`."""
VLLM_FLAGS = {
    f"--{theirs.replace('_', '-')}": f"--{ours.replace('_', '-')}"
    for theirs, ours in VLLM_NAMES.items()
    if ours != "page_tokens"  # which has no flag
} | {"--tensor-parallel-size": "--tp"}
"""vLLM's flag, and the flag of `shardwise serve`."""
VLLM_DTYPES = {"auto": "bf16", "bfloat16": "bf16", "float32": "fp32", "float": "fp32"}
SUPPORTED = "auto, bfloat16 and float32 are"


def settings_of_keywords(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return fields of `EngineSettings` for keywords of `LLM`.

    Raises ValueError for an unknown keyword, with the nearest one, for a field that is given under
    both of its names, and for a dtype that is not supported.
    """
    known = {field.name for field in fields(EngineSettings)} - {"model"}
    found: dict[str, Any] = {}
    for name, value in given.items():
        field = VLLM_NAMES.get(name, name)
        if field not in known:
            near = nearest(name, [*known, *VLLM_NAMES, "seed"], most=1)
            hint = f"did you mean {near[0]}?" if near else f"it has {', '.join(sorted(known))}"
            raise ValueError(f"LLM has no argument {name!r}; {hint}")
        if field in found:
            raise ValueError(f"{name} and {field} are one setting; give one of them")
        found[field] = value
    if found.get("quant", "") is None:  # vLLM's default
        del found["quant"]
    if "dtype" in found:
        found["dtype"] = dtype_of(found["dtype"])
    if isinstance(tp := found.get("layout"), int):
        found["layout"] = Layout(tp=tp)
    return found


def dtype_of(value: Any) -> Any:
    """Return a precision for one of its names in vLLM or torch; other values as they are."""
    name = str(value).removeprefix("torch.")
    if name in ("half", "float16"):
        raise ValueError(f"dtype {name} is not supported; {SUPPORTED}")
    return VLLM_DTYPES.get(name, value)
