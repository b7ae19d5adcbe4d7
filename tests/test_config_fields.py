"""Every field of config.json is read, harmless or refused by name: the table against the
configuration classes of the installed transformers."""

import inspect
import re
import warnings
from dataclasses import MISSING, fields
from typing import Any

import pytest
import torch
from transformers import GenerationConfig, PreTrainedConfig
from transformers.modeling_rope_utils import RopeParameters, RotaryEmbeddingConfigMixin

from shardwise.config import ModelConfig
from shardwise.formats.catalogue import CATALOGUE
from shardwise.formats.families import FAMILIES
from shardwise.formats.huggingface.config_fields import CONFIG, ROPE, family_fields
from shardwise.formats.huggingface.hf_config import from_hugging_face, to_hugging_face
from tiny_models import MODELS, VOCAB

TINY = {
    "llama": "llama-tied", "mistral": "mistral", "qwen2": "qwen2", "qwen3": "qwen3", "gpt2": "gpt2",
}  # fmt: skip
"""The tiny model of each family."""


def known(family: str) -> frozenset[str]:
    return CONFIG.read | CONFIG.harmless | CONFIG.only.keys() | family_fields(FAMILIES[family])


def raw_config(family: str) -> dict[str, Any]:
    """A config.json of transformers for a tiny model, in the old spelling of RoPE."""
    raw = MODELS[TINY[family]][1].to_dict()
    rope = raw.pop("rope_parameters", None)
    return raw | ({} if rope is None else {"rope_theta": rope["rope_theta"], "rope_scaling": None})


def popped_fields() -> set[str]:
    """Fields that transformers reads although they are no fields of a class: old spellings."""
    functions = (
        PreTrainedConfig.__post_init__,
        RotaryEmbeddingConfigMixin.convert_rope_params_to_dict,
    )
    source = "".join(map(inspect.getsource, functions))
    return set(re.findall(r"kwargs\.(?:pop|get)\(\s*\"(\w+)\"", source))


@pytest.mark.parametrize("family", FAMILIES)
def test_every_field_of_transformers_is_in_the_table(family: str) -> None:
    kind = MODELS[TINY[family]][1].__class__
    theirs = {field.name for field in fields(kind)}
    theirs |= kind().to_dict().keys() | kind.attribute_map.keys() | popped_fields()
    theirs |= GenerationConfig._get_default_generation_params().keys()
    assert {"torch_dtype", "rope_theta", "per_layer_config", "vocab_size"} <= theirs
    assert not theirs - known(family)


def test_every_field_of_rope_is_in_the_table() -> None:
    theirs = RopeParameters.__annotations__.keys()
    assert "mscale_all_dim" in theirs
    assert not theirs - (ROPE.read | ROPE.harmless | ROPE.only.keys())


def test_a_field_has_one_treatment() -> None:
    for table in (CONFIG, ROPE):
        assert not table.read & table.harmless
        assert not (table.read | table.harmless) & table.only.keys()


READ_ELSEWHERE = {"model_type", "quantization_config", "compression_config"}
OTHER_VALUES: dict[str, Any] = {
    "activation_function": "gelu", "hidden_act": "gelu", "layer_types": ["full_attention"],
    "rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}, "sliding_window": 5,
    "rms_norm_eps": 0.5, "layer_norm_epsilon": 0.5, "add_cross_attention": True,
    "cross_attention_hidden_size": 8, "is_encoder_decoder": True, "partial_rotary_factor": 0.5,
    "per_layer_config": {"0": {"head_dim": 8}}, "pruned_heads": {"0": [1]},
    "rope_interleaved": True, "scale_attn_by_inverse_layer_idx": True, "scale_attn_weights": False,
    "use_mrope": True, "n_inner": 8,
}  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
def test_a_field_that_is_read_changes_the_model_or_is_refused(family: str) -> None:
    raw = raw_config(family) | {"use_sliding_window": True, "max_window_layers": 1}
    if FAMILIES[family].window == "optional":
        raw |= {"sliding_window": 8, "layer_types": None}
    config = from_hugging_face(raw)
    own = family_fields(FAMILIES[family]) | CONFIG.read | CONFIG.only.keys()
    for name in own - READ_ELSEWHERE - ({"head_dim"} if family == "gpt2" else set()):
        value = OTHER_VALUES.get(name)
        if value is None:
            value = not raw.get(name, False) if isinstance(raw.get(name, False), bool) else 8
        if value == raw.get(name):
            value = 16
        try:
            changed = from_hugging_face(raw | {name: value})
        except ValueError as refused:
            assert name in str(refused) or "heads" in str(refused), name
        else:
            assert changed != config, name


HARMLESS_VALUES: dict[str, Any] = {
    "_name_or_path": "a/b", "architectures": ["Other"], "dtype": "float64",
    "id2label": {0: "a", 1: "b", 2: "c"}, "label2id": {"a": 0}, "problem_type": "regression",
    "summary_type": "last", "summary_activation": "tanh", "transformers_version": "4.0.0",
    "bos_token_id": 7, "eos_token_id": [7, 8], "pad_token_id": 9, "attention_bias": None,
    "mlp_bias": None, "initializer_range": 0.5, "pretraining_tp": 2,
}  # fmt: skip
"""Values that the strict classes take, for fields whose default does not show their type. Biases
have weights of their own, and are read where a family has them."""


@pytest.mark.parametrize("family", FAMILIES)
def test_a_harmless_field_changes_no_logit_of_transformers(family: str) -> None:
    """Exactly equal, in evaluation mode."""
    model_class, config = MODELS[TINY[family]]
    kind = type(config)
    tokens = torch.arange(VOCAB)[None, :40]
    weights = model_class(config).state_dict()

    def logits(change: dict[str, Any]) -> torch.Tensor:
        model = model_class(kind.from_dict(config.to_dict() | change)).eval()
        model.load_state_dict(weights)
        with torch.no_grad():
            result: torch.Tensor = model(tokens, return_dict=True).logits
        return result

    expected = logits({})
    defaults = {field.name: field.default for field in fields(kind) if field.default is not MISSING}
    names = CONFIG.harmless & defaults.keys() - family_fields(FAMILIES[family])
    names -= {
        "return_dict",
        "rope_parameters",
        "sliding_window",
        "max_window_layers",
        "use_sliding_window",
    }
    assert {"initializer_range", "chunk_size_feed_forward", "use_cache"} <= names
    for name in names:
        default = defaults[name]
        value = HARMLESS_VALUES.get(name, not default if isinstance(default, bool) else 1)
        assert value != default
        assert torch.equal(logits({name: value}), expected), name


@pytest.mark.parametrize("family", FAMILIES)
def test_absent_fields_have_the_defaults_of_transformers(family: str) -> None:
    """Sizes of matrices are required; everything else may be left out."""
    kind = MODELS[TINY[family]][1].__class__
    keys = FAMILIES[family].keys
    sizes = (keys.num_layers, keys.hidden_size, keys.ffn_size, keys.num_heads, "vocab_size")
    values = {keys.num_layers: 30, keys.hidden_size: 4096, keys.num_heads: 32}
    raw = {name: values.get(name, 512) for name in sizes} | {"model_type": family}
    for change in ({}, {"use_sliding_window": True}):
        theirs = kind.from_dict(raw | change).to_dict()
        assert from_hugging_face(raw | change) == from_hugging_face(theirs)


def test_standard_names_of_sizes_are_read_as_in_transformers() -> None:
    """GPT2Config has an `attribute_map`."""
    raw = to_hugging_face(CATALOGUE["gpt2"])
    other = {"n_embd": "hidden_size", "n_positions": "max_position_embeddings",
             "n_head": "num_attention_heads", "n_layer": "num_hidden_layers"}  # fmt: skip
    renamed = {other.get(name, name): value for name, value in raw.items()}
    assert from_hugging_face(renamed) == from_hugging_face(raw) == CATALOGUE["gpt2"]
    with pytest.raises(ValueError, match="n_embd = 768 and hidden_size = 64 are two names"):
        from_hugging_face(raw | {"hidden_size": 64})


@pytest.mark.parametrize(
    ("family", "change", "said"),
    [
        ("gpt2", {"scale_attn_weights": False}, "scale_attn_weights = false is not supported;"),
        (
            "gpt2",
            {"scale_attn_by_inverse_layer_idx": True},
            "scale_attn_by_inverse_layer_idx = true is not supported; false works",
        ),
        ("gpt2", {"add_cross_attention": True}, "add_cross_attention = true is not supported"),
        ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5 is not supported"),
        ("llama", {"is_encoder_decoder": True}, "is_encoder_decoder = true is not supported"),
        ("llama", {"per_layer_config": {"1": {"head_dim": 8}}}, 'per_layer_config = {"1": {"'),
        ("llama", {"rope_interleaved": True}, "rope_interleaved = true is not supported"),
        ("llama", {"layer_types": ["full_attention", "sliding_attention"]}, "state no window"),
        ("llama", {"layer_types": ["full_attention", "linear_attention"]}, "layer_types must be"),
        ("qwen3", {"layer_types": ["full_attention"]}, "layer_types has 1 entries for 2 layers"),
        ("qwen2", {"layer_types": ["sliding_attention"] * 2}, "layer_types has sliding_attention"),
        (
            "mistral",
            {"layer_types": ["full_attention", "sliding_attention"]},
            "layer_types states windows in 1 of 2 layers, but models of mistral have them in all",
        ),
    ],
)
def test_a_value_that_changes_the_computation_is_refused(
    family: str, change: dict[str, Any], said: str
) -> None:
    with pytest.raises(ValueError) as caught:
        from_hugging_face(raw_config(family) | change)
    assert str(caught.value).startswith("config.json: ") and said in str(caught.value)


def test_unknown_fields_are_named_in_a_warning() -> None:
    raw = raw_config("llama") | {"brand_new": {"a": 1}, "off": False, "none": None}
    rope = {"rope_type": "linear", "factor": 2.0, "llama_5_beta": 0.1}
    with pytest.warns(UserWarning) as caught:
        config = from_hugging_face(raw | {"rope_scaling": rope})
    assert [str(each.message) for each in caught] == [
        "config.json has fields that are not known and are ignored: brand_new, "
        "rope_scaling.llama_5_beta"
    ]
    assert isinstance(config, ModelConfig)


PUBLISHED: dict[str, dict[str, Any]] = {
    "smollm2-135m": {
        "architectures": ["LlamaForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
        "bos_token_id": 1, "eos_token_id": 2, "initializer_range": 0.041666666666666664,
        "is_llama_config": True, "mlp_bias": False, "pad_token_id": 2, "pretraining_tp": 1,
        "rope_interleaved": False, "rope_scaling": None, "torch_dtype": "bfloat16",
        "transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16"}},
        "transformers_version": "4.42.3", "use_cache": True,
    },
    "mistral-7b": {
        "architectures": ["MistralForCausalLM"], "bos_token_id": 1, "eos_token_id": 2,
        "initializer_range": 0.02, "torch_dtype": "bfloat16", "transformers_version": "4.34.0.dev0",
        "use_cache": True, "attention_dropout": 0.0, "unsloth_fixed": True,
    },
    "qwen2.5-0.5b": {
        "attention_dropout": 0.0, "bos_token_id": 151643, "eos_token_id": 151643,
        "max_window_layers": 24, "sliding_window": 32768, "use_mrope": False,
        "use_sliding_window": False, "transformers_version": "4.40.1", "_name_or_path": "x",
    },
    "qwen3-0.6b": {
        "attention_bias": False, "max_window_layers": 28, "rope_scaling": None,
        "sliding_window": None, "use_sliding_window": False, "auto_map": {"AutoConfig": "x.Y"},
    },
    "gpt2": {
        "attn_pdrop": 0.1, "embd_pdrop": 0.1, "initializer_range": 0.02, "n_ctx": 1024,
        "resid_pdrop": 0.1, "summary_activation": None, "summary_first_dropout": 0.1,
        "summary_proj_to_labels": True, "summary_type": "cls_index", "summary_use_proj": True,
        "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}},
        "n_inner": None, "output_past": True, "reorder_and_upcast_attn": False, "head_dim": 64,
    },
}  # fmt: skip
"""Fields of published folders, beside those of the shape."""


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configs_are_read_without_a_warning(name: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert (
            from_hugging_face(to_hugging_face(CATALOGUE[name]) | PUBLISHED[name])
            == (CATALOGUE[name])
        )
