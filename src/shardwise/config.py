"""`ModelConfig`: the shape of a decoder and the choices in which families differ."""

import math
import sys
from dataclasses import dataclass
from typing import Any, Literal

Positions = Literal["rope", "learned"]
Activation = Literal["silu", "gelu", "gelu_tanh"]
RopeScalingKind = Literal["linear", "dynamic", "llama3", "yarn"]
MAX_LAYERS = 1024
MAX_SIZE = (1 << 31) - 1
LARGEST = {
    "num_layers": MAX_LAYERS,
    "hidden_size": 1 << 17,
    "ffn_size": 1 << 22,
    "num_heads": 1 << 14,
    "num_kv_heads": 1 << 14,
    "head_dim": 1 << 14,
    "vocab_size": 1 << 24,
    "max_positions": MAX_SIZE,
}
MAX_WEIGHTS = 2 * 10**13
"""The largest sizes of a model, far above those of any: a config comes from a stranger, and what is
computed from it takes time and memory that grow with them."""


@dataclass(frozen=True)
class RopeScaling:
    """Scaling of RoPE for longer contexts; the formulas are in `model/rotary.py`.

    Attributes:
        kind: `linear` divides all frequencies by `factor`; `dynamic` raises the base (NTK);
            `llama3` and `yarn` keep high frequencies, divide low ones, and interpolate between.
        low_freq_factor, high_freq_factor: the limits of `llama3`, in rotations within the original
            context.
        original_max_positions: the context length before scaling, for all but `linear`.
        beta_slow, beta_fast: the limits of `yarn`, in rotations within the original context.
        attention_factor: the factor of cosines and sines, which `yarn` alone has.
        truncate: whether the limits of `yarn` are widened to whole pairs of elements.
    """

    kind: RopeScalingKind
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_positions: int = 8192
    beta_slow: float = 1.0
    beta_fast: float = 32.0
    attention_factor: float = 1.0
    truncate: bool = True

    def __post_init__(self) -> None:
        limits = (("low_freq_factor", "high_freq_factor"), ("beta_slow", "beta_fast"))
        for name in ("factor", "attention_factor", *limits[0], *limits[1]):
            check_positive(f"rope scaling: {name}", getattr(self, name))
        for low, high in limits:
            if getattr(self, high) <= getattr(self, low):
                raise ValueError(
                    f"rope scaling: {high} must be above {low} {getattr(self, low)}, not "
                    f"{getattr(self, high)}"
                )
        check_size("rope scaling: original_max_positions", self.original_max_positions)
        check_flag("rope scaling: truncate", self.truncate)
        if self.kind == "dynamic" and self.factor < 1:
            raise ValueError(
                f"rope scaling: dynamic needs a factor of at least 1, not {self.factor}"
            )

    @property
    def scaled_max_positions(self) -> int:
        """The context length that the scaling makes from the original one."""
        return int(self.original_max_positions * self.factor)


def yarn_attention_factor(factor: float, mscale: float = 1.0) -> float:
    """Return the factor of cosines and sines that the YaRN paper proposes."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


@dataclass(frozen=True)
class ModelConfig:
    """One decoder. Sizes count elements.

    Attributes:
        family: the family, such as `llama`, as in config.json of Hugging Face.
        max_positions: the context length.
        tied: whether the head is the embedding.
        norm: RMSNorm or LayerNorm.
        gated: whether the MLP multiplies an activated gate projection with the up projection.
        positions: RoPE, or learned position embeddings.
        qk_norm: whether q and k are normalized per head.
        windowed_layers: layers whose attention is limited to `sliding_window` tokens.
    """

    family: str
    num_layers: int
    hidden_size: int
    ffn_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_positions: int
    tied: bool = False
    norm: Literal["rms", "layer"] = "rms"
    norm_eps: float = 1e-5
    activation: Activation = "silu"
    gated: bool = True
    positions: Positions = "rope"
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    sliding_window: int | None = None
    windowed_layers: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        for name, most in LARGEST.items():
            check_size(f"model config: {name}", getattr(self, name), most)
        for name in ("tied", "gated", "qkv_bias", "out_bias", "mlp_bias", "qk_norm"):
            check_flag(f"model config: {name}", getattr(self, name))
        for name in ("norm_eps", "rope_theta"):
            check_positive(f"model config: {name}", getattr(self, name))
        if self.sliding_window is not None:
            check_size("model config: sliding_window", self.sliding_window)
        if self.num_weights > MAX_WEIGHTS:
            raise ValueError(
                f"model config: its matrices have {self.num_weights:.3g} weights, and at most "
                f"{MAX_WEIGHTS:.3g} are supported"
            )
        if self.num_heads % self.num_kv_heads:
            works = [k for k in range(1, self.num_heads + 1) if self.num_heads % k == 0]
            raise ValueError(
                f"model config: {self.num_kv_heads} kv heads do not divide {self.num_heads} heads; "
                f"{works} do"
            )
        if self.positions == "rope":
            self._check_rope()

    def _check_rope(self) -> None:
        if self.head_dim % 2:
            raise ValueError(
                f"model config: rotary positions need an even head size, not {self.head_dim}"
            )
        kind = self.rope_scaling.kind if self.rope_scaling else None
        if kind == "dynamic" and self.head_dim < 4:
            raise ValueError(
                f"model config: dynamic rope scaling needs a head size above 2, not {self.head_dim}"
            )
        if kind == "yarn" and self.rope_theta <= 1:
            raise ValueError(
                f"model config: yarn rope scaling needs a rope_theta above 1, not {self.rope_theta}"
            )

    @property
    def num_weights(self) -> int:
        """The number of weights in the matrices of all blocks, the embedding and the head."""
        attention = 2 * (self.q_size + self.kv_size)
        block = attention + (3 if self.gated else 2) * self.ffn_size
        return self.hidden_size * (self.num_layers * block + 2 * self.vocab_size)

    @property
    def norm_bias(self) -> bool:
        """True if norms have a bias, as LayerNorm does."""
        return self.norm == "layer"

    @property
    def q_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim

    def window(self, layer: int) -> int | None:
        """Return the number of tokens that attention of a layer sees, the query's own included;
        None: all."""
        return self.sliding_window if layer in self.windowed_layers else None

    @property
    def kv_window(self) -> int | None:
        """The window of the KV cache: what all layers see at most; None if one of them sees all."""
        return self.sliding_window if len(self.windowed_layers) == self.num_layers else None

    def kv_bytes_per_token(self, element_bytes: int = 2, scale_bytes: int = 0) -> int:
        """Return the bytes of keys and values of one token in the KV cache, over all layers and
        heads, each vector with its scale."""
        vector_bytes = self.head_dim * element_bytes + scale_bytes
        return 2 * self.num_layers * self.num_kv_heads * vector_bytes


def check_size(name: str, value: Any, most: int = MAX_SIZE) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{name} must be a whole number of at least 1, not {value!r:.60}")
    if value > most:
        raise ValueError(f"{name} is {value!r:.60}, and at most {most} is supported")
    return value


def check_positive(name: str, value: Any) -> float:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not 0 < value <= sys.float_info.max:
        raise ValueError(f"{name} must be a finite number above 0, not {value!r:.60}")
    return float(value)


def check_flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"{name} must be true or false, not {value!r:.60}")
    return value
