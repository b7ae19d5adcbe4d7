"""The metadata of one architecture in a GGUF file, `llama.block_count` and so on, and the treatment
of every key.

Keys are those of `Keys` in gguf-py/gguf/constants.py of llama.cpp; a test compares the table with
the installed package.
"""

from collections.abc import Mapping
from typing import Any

from shardwise.config import MAX_SIZE, check_positive, check_size
from shardwise.formats.config_files import Fields, warn_unknown

OF_OTHER_ARCHITECTURES = (
    "activation_sparsity_scale", "altup.active_idx", "altup.num_inputs", "attention.clamp_kqv",
    "attention.decay_lora_rank", "attention.gate_lora_rank", "attention.group_norm_epsilon",
    "attention.group_norm_groups", "attention.iclr_lora_rank", "attention.indexer.head_count",
    "attention.indexer.key_length", "attention.indexer.top_k", "attention.key_length_mla",
    "attention.key_length_swa", "attention.kv_lora_rank", "attention.max_alibi_bias",
    "attention.q_lora_rank", "attention.relative_buckets_count", "attention.scale",
    "attention.shared_kv_layers", "attention.sliding_window_pattern",
    "attention.temperature_length", "attention.temperature_scale", "attention.value_length_mla",
    "attention.value_length_swa", "attention.value_residual_mix_lora_rank",
    "attn_logit_softcapping", "decoder_block_count", "embedding_length_out",
    "embedding_length_per_layer_input", "expert_chunk_feed_forward_length", "expert_count",
    "expert_feed_forward_length", "expert_gating_func", "expert_group_count",
    "expert_group_scale", "expert_group_used_count", "expert_shared_count",
    "expert_shared_feed_forward_length", "expert_used_count", "expert_weights_norm",
    "expert_weights_scale", "experts_per_group", "features_length", "final_logit_softcapping",
    "full_attention_interval", "interleave_moe_layer_step", "leading_dense_block_count",
    "moe_every_n_layers", "moe_latent_size", "n_deepstack_layers", "nextn_predict_layers",
    "rescale_every_n_layers", "rope.dimension_count_swa", "rope.dimension_sections",
    "rope.freq_base_swa", "rope.scaling.alpha", "rope.scaling.yarn_log_multiplier",
    "router_logit_softcapping", "swiglu_clamp_exp", "swiglu_clamp_shexp", "swin_norm",
    "time_decay_extra_dim", "time_mix_extra_dim", "token_shift_count", "use_parallel_residual",
)  # fmt: skip
"""Keys that change the computation of other architectures, or would change that of ours."""

FIELDS = Fields(
    read=frozenset(
        (
            "attention.head_count", "attention.head_count_kv", "attention.key_length",
            "attention.layer_norm_epsilon", "attention.layer_norm_rms_epsilon",
            "attention.sliding_window", "attention.value_length", "block_count", "context_length",
            "embedding_length", "feed_forward_length", "rope.dimension_count", "rope.freq_base",
            "rope.scale_linear", "rope.scaling.attn_factor", "rope.scaling.factor",
            "rope.scaling.original_context_length", "rope.scaling.type",
            "rope.scaling.yarn_attn_factor", "rope.scaling.yarn_beta_fast",
            "rope.scaling.yarn_beta_slow", "vocab_size",
        )
    ),
    harmless=frozenset(
        ("decoder_start_token_id", "pooling_type", "rope.scaling.finetuned", "tensor_data_layout")
    ),
    only=dict.fromkeys(OF_OTHER_ARCHITECTURES, (0,))
    | {
        "attention.causal": (True,),
        "attention.output_scale": (0, 1),
        "embedding_scale": (0, 1),
        "logit_scale": (0, 1),
        "residual_scale": (0, 1),
        "rope.scaling.yarn_ext_factor": (1, -1),  # -1 is llama.cpp's default: 1 under YaRN
    },
)  # fmt: skip


class Keys:
    """The metadata of one architecture."""

    def __init__(self, metadata: Mapping[str, Any], architecture: str) -> None:
        self.metadata = metadata
        self.architecture = architecture

    def check(self, source: str) -> None:
        """Raise ValueError for a key whose value is not supported, and warn about unknown keys."""
        prefix = f"{self.architecture}."
        own = {
            key.removeprefix(prefix): value
            for key, value in self.metadata.items()
            if key.startswith(prefix)
        }
        warn_unknown(FIELDS.check(own, frozenset(), prefix), source)

    def get(self, key: str, default: Any = None) -> Any:
        return self.metadata.get(f"{self.architecture}.{key}", default)

    def size(self, key: str, default: int | None = None, most: int = MAX_SIZE) -> int:
        return check_size(f"{self.architecture}.{key}", self._required(key, default), most)

    def number(self, key: str, default: float | None = None) -> float:
        return check_positive(f"{self.architecture}.{key}", self._required(key, default))

    def _required(self, key: str, default: Any) -> Any:
        value = self.get(key, default)
        if value is None:
            raise KeyError(f"{self.architecture}.{key}")
        return value
