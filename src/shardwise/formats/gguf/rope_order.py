"""The order of the rows of q and k in GGUF files of the llama architecture.

RoPE rotates rows i and i + C/2 of a head of C rows together. llama.cpp stores the two as neighbours
(LlamaModel.permute in convert_hf_to_gguf.py); Shardwise and Hugging Face keep the halves apart.
"""

from torch import Tensor


def deinterleave(rows: Tensor, head_dim: int) -> Tensor:
    """Return the rows [heads C, ...] of a GGUF file in the order of Shardwise."""
    return rows.unflatten(0, (-1, head_dim // 2, 2)).transpose(1, 2).flatten(0, 2)


def interleave(rows: Tensor, head_dim: int) -> Tensor:
    """Return the rows [heads C, ...] of Shardwise in the order of a GGUF file, the inverse of
    `deinterleave`."""
    return rows.unflatten(0, (-1, 2, head_dim // 2)).transpose(1, 2).flatten(0, 2)
