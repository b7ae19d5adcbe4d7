"""The KV cache in its simplest form: room for the longest sequence, for one sequence, filled from
the front.

A token's keys and values never change once computed, since attention looks back only. So each step
computes them for the new tokens alone and reads the rest: a step costs one token's work where
recomputing would cost the whole sequence.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise.config import ModelConfig


class Cache:
    """Keys and values of one sequence, [layer, K, max_tokens, C] each; `attend` of the tokens being
    run.

    Call the model with it as `attend` on the next T tokens, at positions `length` and on, then
    `advance(T)`.
    """

    def __init__(
        self, config: ModelConfig, max_tokens: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.config = config
        self.max_tokens = max_tokens
        self.length = 0
        shape = (config.num_layers, config.num_kv_heads, max_tokens, config.head_dim)
        self.keys = torch.empty(shape, dtype=dtype, device=device)
        self.values = torch.empty(shape, dtype=dtype, device=device)

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [1, T, H, C], k and v [1, T, K, C] of the new tokens -> [1, T, H, C]."""
        start = self.length
        stop = self.length + q.shape[1]
        assert stop <= self.max_tokens
        self.keys[layer, :, start:stop] = k[0].transpose(0, 1)
        self.values[layer, :, start:stop] = v[0].transpose(0, 1)
        window = self.config.window(layer)
        first = (
            0 if window is None else max(0, start + 1 - window)
        )  # what the first new token may see
        mask = self.mask(first, start, stop, window, q.device)
        out = F.scaled_dot_product_attention(
            q.transpose(1, 2),
            self.keys[None, layer, :, first:stop],
            self.values[None, layer, :, first:stop],
            attn_mask=mask,
            enable_gqa=self.config.num_heads != self.config.num_kv_heads,
        )
        return out.transpose(1, 2)

    def mask(
        self, first: int, start: int, stop: int, window: int | None, device: torch.device
    ) -> Tensor | None:
        """[new tokens, cached tokens from `first`], true where seen; None for a single new token,
        which sees all."""
        if stop - start == 1:
            return None
        behind = (
            torch.arange(start, stop, device=device)[:, None]
            - torch.arange(first, stop, device=device)[None, :]
        )
        return (behind >= 0) if window is None else (behind >= 0) & (behind < window)

    def advance(self, num_tokens: int) -> None:
        """The tokens just run are part of the sequence now."""
        self.length += num_tokens
