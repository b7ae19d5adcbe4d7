"""Configs read and written as Hugging Face spells them, shapes drawn from a count, and what is
refused."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.config import ModelConfig, RopeScaling
from shardwise.formats.catalogue import CATALOGUE
from shardwise.formats.config_files import read_json_object, read_toml
from shardwise.formats.families import FAMILIES, Family
from shardwise.formats.huggingface.hf_config import (
    from_hugging_face,
    read_folder_config,
    to_hugging_face,
)
from shardwise.formats.synthetic import config_of_count, parse_count
from shardwise.params import model_specs, num_params

LLAMA = {
    "model_type": "llama", "num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 96,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 100,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5, "hidden_act": "silu", "tie_word_embeddings": False,
}  # fmt: skip


@st.composite
def configs(draw: st.DrawFn, family: Family) -> ModelConfig:
    """Any config of a family that a config.json can express."""
    kv_heads = draw(st.integers(1, 4))
    head_dim = 2 * draw(st.integers(1, 8))
    heads = kv_heads * draw(st.integers(1, 4))
    layers = draw(st.integers(1, 6))
    shape: dict[str, Any] = {
        "num_layers": layers,
        "hidden_size": draw(st.integers(1, 99)) if family.keys.head_dim else heads * head_dim,
        "ffn_size": draw(st.integers(1, 99)),
        "num_heads": heads,
        "num_kv_heads": kv_heads if family.keys.num_kv_heads else heads,
        "head_dim": head_dim,
        "vocab_size": draw(st.integers(1, 99)),
        "max_positions": draw(st.integers(1, 999)),
        "tied": draw(st.booleans()),
        "norm": family.norm,
        "norm_eps": draw(st.sampled_from([1e-5, 1e-6])),
        "activation": draw(st.sampled_from(["silu", "gelu_tanh"])),
        "gated": family.gated,
        "positions": family.positions,
        "qk_norm": family.qk_norm,
    }
    if family.positions == "rope":
        factor = draw(st.floats(1, 64))
        scalings = [
            None,
            RopeScaling("linear", factor),
            RopeScaling("llama3", factor, 1.0, 4.0, 8192),
        ]
        shape |= {
            "rope_theta": draw(st.floats(1e3, 1e6)),
            "rope_scaling": draw(st.sampled_from(scalings)),
        }
    flags = {"attention_bias": draw(st.booleans()), "mlp_bias": draw(st.booleans())}
    for name in ("qkv_bias", "out_bias", "mlp_bias"):
        rule = getattr(family, name)
        shape[name] = flags[rule] if isinstance(rule, str) else rule
    window = draw(st.none() | st.integers(1, 64))
    if window and family.window != "never":
        first = 0 if family.window == "every layer" else draw(st.integers(0, layers - 1))
        shape |= {"sliding_window": window, "windowed_layers": frozenset(range(first, layers))}
    return ModelConfig(family.model_type, **shape)


@pytest.mark.parametrize("family", FAMILIES)
@given(st.data())
def test_round_trip(family: str, data: st.DataObject) -> None:
    config = data.draw(configs(FAMILIES[family]))
    written = json.loads(json.dumps(to_hugging_face(config)))
    assert from_hugging_face(written) == config


@pytest.mark.parametrize("name", CATALOGUE)
def test_round_trip_of_published_shapes(name: str) -> None:
    assert from_hugging_face(to_hugging_face(CATALOGUE[name])) == CATALOGUE[name]


@pytest.mark.parametrize(
    "name", ["gpt2", "llama-3.1-8b", "mistral-7b", "qwen2.5-0.5b", "qwen3-0.6b", "smollm2-135m"]
)
def test_transformers_reads_what_we_write_and_we_read_what_it_writes(
    name: str, tmp_path: Path
) -> None:
    from transformers import AutoConfig

    config = CATALOGUE[name]
    (tmp_path / "config.json").write_text(json.dumps(to_hugging_face(config)))
    theirs = AutoConfig.from_pretrained(tmp_path)
    assert theirs.architectures == [FAMILIES[config.family].transformers_class]
    theirs.save_pretrained(tmp_path / "saved")
    assert read_folder_config(tmp_path / "saved") == config


def test_transformers_windows_the_same_layers(tmp_path: Path) -> None:
    from transformers import AutoConfig

    config = replace(
        CATALOGUE["qwen2.5-0.5b"], sliding_window=64, windowed_layers=frozenset(range(20, 24))
    )
    (tmp_path / "config.json").write_text(json.dumps(to_hugging_face(config)))
    kinds = AutoConfig.from_pretrained(tmp_path).layer_types
    assert {
        i for i, kind in enumerate(kinds) if kind == "sliding_attention"
    } == config.windowed_layers


def test_both_spellings_of_rope_mean_the_same() -> None:
    """transformers 4: rope_theta and rope_scaling apart; 5: one rope_parameters."""
    scaling = {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    old = LLAMA | {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **scaling}}
    new = LLAMA | {"rope_parameters": {"rope_theta": 5e5, "rope_type": "llama3", **scaling}}
    assert from_hugging_face(old) == from_hugging_face(new)
    assert from_hugging_face(old).rope_scaling == RopeScaling("llama3", 8.0, 1.0, 4.0, 64)
    assert from_hugging_face(
        LLAMA | {"rope_scaling": {"type": "linear", "factor": 2}}
    ).rope_scaling == RopeScaling("linear", 2.0)
    assert (
        from_hugging_face(
            LLAMA | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}
        ).rope_theta
        == 1e4
    )


def test_windows_are_those_of_the_family() -> None:
    mistral = LLAMA | {"model_type": "mistral", "sliding_window": 16}
    assert from_hugging_face(mistral).windowed_layers == {0, 1}
    assert from_hugging_face(mistral | {"sliding_window": None}).sliding_window is None
    qwen = LLAMA | {"model_type": "qwen2", "sliding_window": 16, "max_window_layers": 1}
    assert from_hugging_face(qwen | {"use_sliding_window": False}).sliding_window is None
    assert from_hugging_face(qwen | {"use_sliding_window": True}).windowed_layers == {1}
    assert from_hugging_face(LLAMA | {"sliding_window": 16}).sliding_window is None


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            {"model_type": "mamba"},
            "unknown architecture 'mamba'; known are llama, mistral, qwen2, qwen3, gpt2",
        ),
        ({"model_type": None}, "unknown architecture None"),
        ({"hidden_act": "relu6"}, "unknown activation 'relu6'"),
        (
            {"rope_scaling": {"rope_type": "ntk", "factor": 4}},
            "rope scaling 'ntk'; known are linear",
        ),
        ({"rope_scaling": {"rope_type": "linear"}}, "factor is missing"),
        ({"num_key_value_heads": 3}, "3 kv heads do not divide 4 heads; [1, 2, 4] do"),
        ({"num_hidden_layers": 0}, "num_hidden_layers must be a whole number of at least 1, not 0"),
        ({"vocab_size": "many"}, "vocab_size must be a whole number"),
        ({"num_hidden_layers": True}, "num_hidden_layers must be a whole number"),
        ({"hidden_size": "wide"}, "hidden_size must be a whole number of at least 1, not 'wide'"),
        (
            {"num_attention_heads": 0},
            "num_attention_heads must be a whole number of at least 1, not 0",
        ),
        ({"model_type": []}, "unknown architecture []"),
        ({"hidden_act": ["silu"]}, "unknown activation ['silu']"),
        ({"rope_scaling": "abc"}, "rope_scaling must be an object, not 'abc'"),
        ({"rope_parameters": [1]}, "rope_parameters must be an object, not [1]"),
        (
            {"rope_scaling": {"type": "linear", "factor": 0}},
            "factor must be a finite number above 0, not 0",
        ),
        (
            {"rope_scaling": {"type": "linear", "factor": "2"}},
            "factor must be a finite number above 0, not '2'",
        ),
        ({"rope_scaling": {"type": ["linear"]}}, "rope scaling ['linear']; known are"),
        ({"rms_norm_eps": None}, "rms_norm_eps must be a finite number above 0, not None"),
        ({"rms_norm_eps": "1e-5"}, "rms_norm_eps must be a finite number"),
        ({"rope_theta": "nan"}, "rope_theta must be a finite number above 0, not 'nan'"),
        ({"rope_theta": float("nan")}, "rope_theta must be a finite number above 0, not nan"),
        ({"rope_theta": -1}, "rope_theta must be a finite number above 0, not -1"),
        ({"rope_theta": 0}, "rope_theta must be a finite number above 0, not 0"),
        ({"rope_theta": 10**400}, "rope_theta must be a finite number above 0, not 1000"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000, and at most 1024 is"),
        ({"num_hidden_layers": 10**400}, "num_hidden_layers is 1000"),
        ({"hidden_size": 10**18}, "hidden_size is 1000"),
        ({"num_attention_heads": 10**9}, "num_heads is 1000000000, and at most 16384 is"),
        (
            {"num_hidden_layers": 1024, "hidden_size": 1 << 17, "intermediate_size": 1 << 22}
            | {"head_dim": 8},
            "its matrices have 1.69e+15 weights, and at most 2e+13 are supported",
        ),
        ({"model_type": "mistral", "sliding_window": "x"}, "sliding_window must be a whole number"),
        (
            {"model_type": "mistral", "sliding_window": -3},
            "sliding_window must be a whole number of at least 1",
        ),
        (
            {"model_type": "mistral", "sliding_window": 8, "layer_types": 5},
            "layer_types must be a list of sliding_attention and full_attention, not 5",
        ),
        (
            {"tie_word_embeddings": "false"},
            "tie_word_embeddings must be true or false, not 'false'",
        ),
        ({"attention_bias": "no"}, "attention_bias must be true or false"),
        ({"num_key_value_heads": [2]}, "num_kv_heads must be a whole number"),
        ({"num_key_value_heads": 0}, "num_kv_heads must be a whole number of at least 1, not 0"),
        ({"head_dim": False}, "head_dim must be a whole number of at least 1, not False"),
        ({"head_dim": 15}, "even head size, not 15"),
    ],
)
def test_bad_configs_are_refused_in_a_sentence(change: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError) as caught:
        from_hugging_face(LLAMA | change)
    assert said in str(caught.value)
    assert str(caught.value).startswith("config.json")


@pytest.mark.parametrize(
    "change",
    [
        {"rope_theta": 0.0},
        {"rope_theta": float("inf")},
        {"norm_eps": float("nan")},
        {"norm_eps": None},
        {"sliding_window": 0},
        {"sliding_window": 1.5},
        {"tied": "false"},
        {"qk_norm": 1},
        {"qkv_bias": None},
    ],
)
def test_a_config_holds_only_what_a_model_can_be(change: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"model config: {next(iter(change))} must be"):
        replace(CATALOGUE["mistral-7b"], **change)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"factor": 0.0}, "factor must be"),
        ({"factor": float("inf")}, "factor must be"),
        ({"high_freq_factor": 1.0}, "high_freq_factor must be above"),
        ({"original_max_positions": 0}, "original_max_positions must be"),
    ],
)
def test_a_scaling_divides_by_no_zero(change: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        replace(RopeScaling("llama3", 8.0), **change)


SIZES = (
    "num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads",
    "num_key_value_heads", "head_dim", "vocab_size", "max_position_embeddings",
)  # fmt: skip


@pytest.mark.parametrize("value", [-1, 1.0, True, "8", [8], {"a": 8}, 1e400, 10**12, 10**400])
@pytest.mark.parametrize("key", [*SIZES, "rms_norm_eps", "rope_theta"])
def test_a_number_that_no_model_has_is_refused_for_every_field(key: str, value: Any) -> None:
    is_float = key not in SIZES
    if is_float and value in (1.0, 10**12) and value is not True:
        from_hugging_face(LLAMA | {key: value})
        return
    with pytest.raises(ValueError, match=r"^config\.json: .+") as caught:
        from_hugging_face(LLAMA | {key: value})
    assert "malformed" not in str(caught.value) and len(str(caught.value)) < 250


def test_a_missing_size_is_named() -> None:
    for key in (
        "num_hidden_layers",
        "hidden_size",
        "intermediate_size",
        "num_attention_heads",
        "vocab_size",
    ):
        with pytest.raises(ValueError, match=f"{key} is missing"):
            from_hugging_face({k: v for k, v in LLAMA.items() if k != key})


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff\xfe", b"[" * 100_000])
def test_a_broken_config_file_is_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ValueError, match=r"config\.json"):
        read_folder_config(tmp_path)


def test_json_is_bounded_before_it_is_parsed(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text('{"a": [' + "[]," * 10_000 + "1]}")
    assert len(read_json_object(file)["a"]) == 10_001
    with pytest.raises(ValueError, match="holds more than 4096 values"):
        read_json_object(file, max_bytes=1 << 16)
    with pytest.raises(ValueError, match="has 30010 bytes, and at most 4096 are supported"):
        read_json_object(file, max_bytes=4096)


@pytest.mark.parametrize("content", ["[", "a = " + "[" * 5000, "a = " + "9" * 5000, "a = 1\na = 2"])
def test_a_broken_toml_file_is_refused(content: str, tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(content)
    with pytest.raises(ValueError, match=r"run\.toml is not valid TOML"):
        read_toml(tmp_path / "run.toml")


@given(st.floats(6, 13))
def test_a_count_is_met_within_a_twentieth_of_a_percent(exponent: float) -> None:
    count = round(10**exponent)
    assert abs(num_params(model_specs(config_of_count(count))) - count) <= 0.0005 * count


@pytest.mark.parametrize("count", [0, 1, 5000, 10**15])
def test_a_count_out_of_range_is_refused(count: int) -> None:
    with pytest.raises(ValueError, match="1M to 10T work"):
        config_of_count(count)


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("70B", 70 * 10**9),
        ("7.5b", 7_500_000_000),
        ("1T", 10**12),
        ("135M", 135_000_000),
        ("900k", 900_000),
    ],
)
def test_counts_are_read(text: str, count: int) -> None:
    assert parse_count(text) == count


@pytest.mark.parametrize(
    "text", ["", "B", "70", "-7B", "7.B", "7BB", "7 B", "llama-7b", "1e9B", "seven"]
)
def test_other_words_are_no_counts(text: str) -> None:
    assert parse_count(text) is None
