"""The treatment of every field of config.json, in one table.

A field is read, or it changes no logits, or some of its values would change them and are refused by
name. The table covers the configuration classes of the supported families in transformers 5.24,
their fields in transformers 4, and what other tools add to real folders; a test compares it with
the installed transformers. A field that is not in it is ignored with a warning that names it, as
transformers ignores it in these classes, unless it is null or false.
"""

from collections.abc import Mapping
from dataclasses import astuple
from typing import Any

from shardwise.formats.config_files import Fields, warn_unknown
from shardwise.formats.families import FAMILIES, ConfigKeys, Family

STANDARD_NAMES = {
    "hidden_size": "hidden_size",
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_heads",
    "max_position_embeddings": "max_positions",
}
"""Names that transformers accepts in place of a family's own (`attribute_map`), with their fields
of `ConfigKeys`."""


GENERATION = frozenset(
    (
        "assistant_confidence_threshold", "assistant_lookbehind", "bad_words_ids",
        "begin_suppress_tokens", "decoder_start_token_id", "diversity_penalty", "do_sample",
        "early_stopping", "encoder_no_repeat_ngram_size", "encoder_repetition_penalty",
        "epsilon_cutoff", "eta_cutoff", "exponential_decay_length_penalty", "forced_bos_token_id",
        "forced_eos_token_id", "guidance_scale", "length_penalty", "max_length", "max_new_tokens",
        "min_length", "min_new_tokens", "min_p", "no_repeat_ngram_size", "num_assistant_tokens",
        "num_assistant_tokens_schedule", "num_beam_groups", "num_beams", "num_return_sequences",
        "output_scores", "penalty_alpha", "remove_invalid_values", "repetition_penalty",
        "return_dict_in_generate", "suppress_tokens", "target_lookbehind", "temperature",
        "token_healing", "top_k", "top_p", "typical_p", "use_cache",
    )
)  # fmt: skip
"""Parameters of generation. transformers reads them from generation_config.json alone."""

TRAINING = frozenset(
    (
        "attention_dropout", "attn_pdrop", "classifier_dropout", "embd_pdrop",
        "gradient_checkpointing", "hidden_dropout", "initializer_range", "neftune_noise_alpha",
        "resid_pdrop", "summary_first_dropout", "use_bfloat16",
    )
)  # fmt: skip
"""Settings of training that change no logits; Shardwise trains without dropout."""

OTHER_HEADS = frozenset(
    (
        "finetuning_task", "id2label", "label2id", "num_labels", "prefix", "problem_type",
        "summary_activation", "summary_proj_to_labels", "summary_type", "summary_use_proj",
        "task_specific_params",
    )
)  # fmt: skip
"""Settings of classifiers and other heads. Their weights would be refused by name."""

DESCRIPTION = frozenset(
    (
        "_commit_hash", "_name_or_path", "architectures", "auto_map", "dtype", "is_llama_config",
        "max_sequence_length", "model_max_length", "n_ctx", "name_or_path", "seq_length",
        "tokenizer_class", "torch_dtype", "transformers.js_config", "transformers_version",
        "unsloth_fixed", "unsloth_version",
    )
)  # fmt: skip
"""Origin and nominal properties of a model. Files state the dtype of each tensor, and the length of
the context is `max_position_embeddings`."""

EXECUTION = frozenset(
    (
        "_attn_implementation", "_attn_implementation_autoset", "_attn_implementation_internal",
        "_experts_implementation", "_experts_implementation_internal", "_flash_attn_2_enabled",
        "_output_attentions", "attn_implementation", "chunk_size_feed_forward",
        "experts_implementation", "is_decoder", "output_attentions", "output_hidden_states",
        "output_past", "pretraining_tp", "reorder_and_upcast_attn", "return_dict",
        "tf_legacy_loss", "tie_encoder_decoder", "tie_last_hidden_states", "torchscript",
        "use_return_dict",
    )
)  # fmt: skip
"""Ways in which transformers computes and returns the same function."""

OF_OTHER_FAMILIES = frozenset(
    (
        "max_window_layers", "original_max_position_embeddings",
        "rope_parameters", "rope_scaling", "rope_theta", "sliding_window", "use_sliding_window",
    )
)  # fmt: skip
"""Fields that one family reads and the classes of the others ignore, as they do with the fields
that the records of other families name; weights of a wrong shape are refused as such."""

TOKENS = frozenset(("bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id"))
"""Read with the tokenizer, or without effect on logits."""

CONFIG = Fields(
    read=frozenset(
        (
            "compression_config",
            "layer_types",
            "model_type",
            "quantization_config",
            "tie_word_embeddings",
            "vocab_size",
        )
    ),
    harmless=frozenset().union(
        GENERATION, TRAINING, OTHER_HEADS, DESCRIPTION, EXECUTION, OF_OTHER_FAMILIES, TOKENS
    ),
    only={
        "add_cross_attention": (False,),
        "cross_attention_hidden_size": (),
        "is_encoder_decoder": (False,),
        "partial_rotary_factor": (1,),
        "per_layer_config": ({},),
        "pruned_heads": ({},),
        "rope_interleaved": (False,),
        "scale_attn_by_inverse_layer_idx": (False,),
        "scale_attn_weights": (True,),
        "use_mrope": (False,),
    },
)
ROPE = Fields(
    read=frozenset(
        (
            "attention_factor", "beta_fast", "beta_slow", "factor", "high_freq_factor",
            "low_freq_factor", "mscale", "mscale_all_dim", "original_max_position_embeddings",
            "rope_theta", "rope_type", "truncate", "type",
        )
    ),
    harmless=frozenset(("finetuned", "long_factor", "short_factor")),  # LongRoPE is refused
    only={
        "alpha": (),
        "attn_factor": (1,),
        "extrapolation_factor": (1,),
        "full_attention": (),  # RoPE of its own for each kind of layer
        "sliding_attention": (),
        "mrope_section": (),
        "partial_rotary_factor": (1,),
    },
)  # fmt: skip


def check_fields(raw: Mapping[str, Any], family: Family, source: str) -> None:
    """Raise ValueError for a field whose value is not supported, and warn about unknown fields."""
    of_families = (family_fields(each) for each in (family, *FAMILIES.values()))
    unknown = CONFIG.check(raw, frozenset().union(*of_families))
    for name in ("rope_parameters", "rope_scaling"):
        rope = raw.get(name)
        if family.positions == "rope" and isinstance(rope, dict):
            unknown += ROPE.check(rope, frozenset(), f"{name}.")
    warn_unknown(unknown, source)


def family_fields(family: Family) -> frozenset[str]:
    """Return the fields that a family's record names, in all spellings."""
    keys = {value for value in astuple(family.keys) if isinstance(value, str)}
    biases = (family.qkv_bias, family.out_bias, family.mlp_bias)
    return frozenset(
        keys | {rule for rule in biases if isinstance(rule, str)} | STANDARD_NAMES.keys()
    )


def own_spelling(raw: Mapping[str, Any], keys: ConfigKeys) -> dict[str, Any]:
    """Return the fields with standard names replaced by the family's own. Raises ValueError if both
    are given and differ."""
    renamed = dict(raw)
    for standard, field in STANDARD_NAMES.items():
        name = getattr(keys, field)
        if name == standard or standard not in raw:
            continue
        if raw.get(name, raw[standard]) != raw[standard]:
            raise ValueError(
                f"{name} = {raw[name]!r:.40} and {standard} = {raw[standard]!r:.40} are two names "
                "of one size and contradict each other"
            )
        renamed[name] = renamed.pop(standard)
    return renamed
