"""Floating-point dtypes as safetensors and GGUF files name them. Imports no torch."""

TORCH_NAMES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
NUM_BYTES = {"F32": 4, "F16": 2, "BF16": 2}
