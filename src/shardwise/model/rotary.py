"""`Rotary`: the angles of RoPE, and its tables of cosines and sines, for every kind of scaling.

All kernels of training and serving rotate by the tables that `Rotary.tables` makes, so what scaling
changes is here and nowhere else. Papers: Su et al. 2021 (RoPE), Peng et al. 2023 (YaRN).
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from shardwise.config import ModelConfig, RopeScaling
from shardwise.kernels.interface import RopeTables


@dataclass(frozen=True)
class Rotary:
    """The rotation of the queries and keys of a model.

    Attributes:
        frequencies: the angle per position of each pair of elements, [C/2] in fp32.
        magnitude: the factor of cosines and sines, 1 unless the model uses YaRN.
    """

    frequencies: Tensor
    magnitude: float = 1.0

    @classmethod
    def of(cls, config: ModelConfig, device: torch.device | str = "cpu") -> "Rotary":
        """Return the rotation of a model with rotary positions."""
        scaling = config.rope_scaling
        frequencies = rotary_frequencies(config.head_dim, config.rope_theta, scaling)
        return cls(frequencies.to(device), scaling.attention_factor if scaling else 1.0)

    def tables(self, positions: Tensor, dtype: torch.dtype) -> RopeTables:
        """Return cosines and sines of the angles of `positions` [..., T]: [..., T, 1, C/2]."""
        angles = positions[..., None, None].float() * self.frequencies.to(positions.device)
        cosines = angles.cos() * self.magnitude
        sines = angles.sin() * self.magnitude
        return RopeTables(cosines.to(dtype), sines.to(dtype))


def rotary_frequencies(head_dim: int, theta: float, scaling: RopeScaling | None) -> Tensor:
    """Return the angle per position of each pair of elements, [C/2] in fp32.

    They are those of `ROPE_INIT_FUNCTIONS` in transformers. For `dynamic`, whose frequencies depend
    there on the length of the sequence, they are those of the longest sequence that the scaling
    allows, at every length: a KV cache holds keys that are already rotated, which would be wrong as
    soon as a sequence grows. vLLM does the same.
    """
    if scaling is None:
        return base_frequencies(head_dim, theta)
    if scaling.kind == "dynamic":
        return base_frequencies(head_dim, dynamic_base(head_dim, theta, scaling.factor))
    frequencies = base_frequencies(head_dim, theta)
    if scaling.kind == "linear":
        return frequencies / scaling.factor
    if scaling.kind == "llama3":
        divided = llama3_divided(frequencies, scaling)
    else:
        divided = yarn_divided(head_dim, theta, scaling)
    return (1 - divided) * frequencies + divided * frequencies / scaling.factor


def base_frequencies(head_dim: int, theta: float) -> Tensor:
    """Return the frequencies [C/2] without scaling."""
    return 1.0 / theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)


def dynamic_base(head_dim: int, theta: float, factor: float) -> float:
    """Return the base of NTK scaling for a sequence of `factor` times the original context."""
    growth = factor * factor - (factor - 1)
    return theta * growth ** (head_dim / (head_dim - 2))


def llama3_divided(frequencies: Tensor, scaling: RopeScaling) -> Tensor:
    """Return how much of each frequency [C/2] Llama 3.1 divides, from 0 to 1: those of pairs that
    make few rotations within the original context."""
    rotations = scaling.original_max_positions * frequencies / (2 * math.pi)
    low = scaling.low_freq_factor
    high = scaling.high_freq_factor
    return ((high - rotations) / (high - low)).clamp(0, 1)


def yarn_divided(head_dim: int, theta: float, scaling: RopeScaling) -> Tensor:
    """Return how much of each frequency [C/2] YaRN divides, from 0 to 1: a ramp over pairs, from
    `beta_fast` rotations within the original context to `beta_slow`."""

    def pair_with(rotations: float) -> float:
        wavelength = scaling.original_max_positions / (rotations * 2 * math.pi)
        return head_dim * math.log(wavelength) / (2 * math.log(theta))

    first = pair_with(scaling.beta_fast)
    last = pair_with(scaling.beta_slow)
    if scaling.truncate:
        first = math.floor(first)
        last = math.ceil(last)
    first = max(first, 0)
    last = min(last, head_dim - 1)
    width = last - first or 0.001
    return ((torch.arange(head_dim // 2, dtype=torch.float32) - first) / width).clamp(0, 1)
