"""The settings of a run: defaults, overrides, and what a mistake is told."""

import tomllib
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.cli import main
from shardwise.config import ModelConfig
from shardwise.train.resolve import resized
from shardwise.train.settings import Settings, all_fields, default_of, read_settings, to_toml

SECTIONS = {section.name: default_of(section) for section in fields(Settings)}
KEYS = [(section, entry.name) for section, entry in all_fields()]


def kind_of(section: str, key: str) -> Any:
    return get_type_hints(type(SECTIONS[section]))[key]


def written(folder: Path, text: str) -> Path:
    path = folder / "c.toml"
    path.write_text(text, encoding="utf-8")
    return path


def refusal(folder: Path, text: str, *overrides: str) -> str:
    with pytest.raises(ValueError) as caught:
        read_settings(written(folder, text), overrides)
    return str(caught.value)


def test_the_printed_template_is_the_defaults(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["config"]) == 0
    text = capsys.readouterr().out
    assert read_settings(written(tmp_path, text)) == Settings()
    for _, key in KEYS:
        lines = [line for line in text.splitlines() if line.startswith(f"{key} ")]
        assert lines and all(len(line.partition("# ")[2]) > 5 for line in lines), (
            f"{key} is not explained"
        )
    assert read_settings(written(tmp_path, "")) == Settings()


def changed(section: str, key: str) -> Any:
    """Another valid value than the default."""
    value = getattr(SECTIONS[section], key)
    kind = kind_of(section, key)
    if get_origin(kind) is Literal:
        return next(choice for choice in get_args(kind) if choice != value)
    return {bool: not value, int: 8192 if value == 64 << 20 else 7, float: 0.25, str: "other"}[kind]


@pytest.mark.parametrize(("section", "key"), KEYS)
def test_every_key_can_be_set_both_ways(tmp_path: Path, section: str, key: str) -> None:
    value = changed(section, key)
    expected = replace(Settings(), **{section: replace(SECTIONS[section], **{key: value})})
    toml = (
        {True: "true", False: "false"}.get(value, repr(value).replace("'", '"'))
        if value != 7
        else "7"
    )
    assert read_settings(written(tmp_path, f"[{section}]\n{key} = {toml}\n")) == expected
    assert read_settings(written(tmp_path, ""), [f"{section}.{key}={toml}"]) == expected
    if isinstance(value, str):
        assert read_settings(written(tmp_path, ""), [f"{section}.{key}={value}"]) == expected, (
            "no quotes needed"
        )


def test_an_override_wins_over_the_file_and_a_later_over_an_earlier(tmp_path: Path) -> None:
    path = written(tmp_path, "[run]\nsteps = 5\nseed = 3\n")
    settings = read_settings(
        path, ["run.steps=6", "run.steps=8", "optimizer.lr = 1", "run.folder=a=b"]
    )
    assert (settings.run.steps, settings.run.seed, settings.optimizer.lr) == (8, 3, 1.0)
    assert settings.run.folder == "a=b"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[run]\nstps = 5", "run.stps is not a setting; did you mean run.steps?"),
        ("[optimizer]\nweight_dacay = 0.1", "did you mean optimizer.weight_decay?"),
        (
            "[run]\nwarmup_steps = 5",
            "run.warmup_steps is not a setting; did you mean optimizer.warmup_steps?",
        ),
        ("[data]\nlr = 0.1", "data.lr is not a setting; did you mean optimizer.lr?"),
        ("[optimiser]\nlr = 0.1", "optimiser is not a setting; did you mean optimizer?"),
        ("[modle]\nname = '1M'", "modle is not a setting; did you mean model?"),
        ("lr = 0.1", "lr is not a setting; did you mean optimizer.lr?"),
        ("steps = 5", "steps is not a setting; did you mean run.steps?"),
        ("[zzz]\nqq = 5", "zzz is not a setting; sections are model, data, optimizer, run"),
        ("[run]\nqqqqqqq = 5", "run.qqqqqqq is not a setting"),
        ("[run.steps]\nmore = 5", "run.steps must be a whole number, not {'more': 5}"),
        ("run = 5", "run is a section: write [run] above its keys"),
        ("[run]\nsteps = 5.0", "run.steps must be a whole number, not 5.0"),
        ("[run]\nsteps = true", "run.steps must be a whole number, not True"),
        ("[run]\nsteps = '5'", "run.steps must be a whole number, not '5'"),
        ("[run]\nsteps = 0", "run.steps must be at least 1, not 0"),
        ("[run]\nfolder = 5", "run.folder must be a string in quotes, not 5"),
        ("[run]\ntensorboard = 1", "run.tensorboard must be true or false, not 1"),
        ("[optimizer]\nlr = 'high'", "optimizer.lr must be a finite number, not 'high'"),
        ("[optimizer]\nlr = true", "optimizer.lr must be a finite number, not True"),
        ("[optimizer]\nlr = nan", "optimizer.lr must be a finite number, not nan"),
        ("[optimizer]\nmax_norm = inf", "optimizer.max_norm must be a finite number, not inf"),
        ("[optimizer]\nlr = -1", "optimizer.lr must be at least 0, not -1"),
        ("[optimizer]\nbeta2 = 1", "optimizer.beta2 must be at least 0 and below 1, not 1"),
        ("[run]\nprecision = 'fp16'", "run.precision must be one of bf16, fp32, not 'fp16'"),
        ("[run]\nprecision = ['bf16']", "run.precision must be one of bf16, fp32, not ['bf16']"),
        ("[run]\nsteps = ", "c.toml is not valid TOML: "),
        ("[run]\nsteps = 1\nsteps = 2", "c.toml is not valid TOML: "),
    ],
)
def test_errors_name_the_setting(tmp_path: Path, text: str, said: str) -> None:
    message = refusal(tmp_path, text)
    assert said in message
    assert "\n" not in message


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("run.stps=5", "did you mean run.steps?"),
        ("steps=5", "'steps=5' must have the form section.key=value"),
        ("run.steps", "'run.steps' must have the form section.key=value"),
        ("rum.steps=5", "rum is not a setting; did you mean run?"),
        ("run.steps=many", "run.steps must be a whole number, not 'many'"),
        ("run.steps=", "run.steps must be a whole number, not ''"),
        ("run.steps.x=1", "run.steps.x is not a setting; did you mean run.steps?"),
    ],
)
def test_errors_name_the_override(tmp_path: Path, override: str, said: str) -> None:
    assert said in refusal(tmp_path, "", override)


def test_invalid_files(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"`shardwise config > run.toml` writes a file"):
        read_settings(tmp_path / "none.toml")
    with pytest.raises(ValueError, match="is a folder, not a TOML file"):
        read_settings(tmp_path)
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match="is not UTF-8"):
        read_settings(tmp_path / "binary.toml")


def values_of(section: str) -> st.SearchStrategy[Any]:
    drawn = {}
    for entry in fields(SECTIONS[section]):
        kind = kind_of(section, entry.name)
        if get_origin(kind) is Literal:
            drawn[entry.name] = st.sampled_from(get_args(kind))
        else:
            text = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
            number = st.floats(0, 1, exclude_min=True, exclude_max=True) | st.sampled_from(
                [1e-8, 1e-30]
            )
            drawn[entry.name] = {
                bool: st.booleans(),
                int: st.integers(4096, 10**9),
                float: number,
                str: text,
            }[kind]
    return st.builds(type(SECTIONS[section]), **drawn)


@given(st.builds(Settings, **{name: values_of(name) for name in SECTIONS}), st.booleans())
def test_settings_round_trip(settings: Settings, explained: bool) -> None:
    """So a run goes on with the settings it began with, whatever its folder is called."""
    raw = tomllib.loads(to_toml(settings, explained))
    assert raw == {name: vars(getattr(settings, name)) for name in SECTIONS}


@pytest.mark.parametrize("name", ["runs/ünïcode \U0001f600", 'a"b\\c', "del\x7f", "tab\t"])
def test_folders_with_odd_names(tmp_path: Path, name: str) -> None:
    settings = replace(Settings(), run=replace(SECTIONS["run"], folder=name))
    assert read_settings(written(tmp_path, to_toml(settings))) == settings


LLAMA = ModelConfig("llama", 2, 64, 96, 4, 2, 16, 256, 128)


def test_sizes_change_the_shape() -> None:
    model = replace(SECTIONS["model"], num_layers=3, hidden_size=48, num_heads=6, max_positions=32)
    config = resized(LLAMA, model, 1000, 24, is_count=True)
    assert config == replace(
        LLAMA,
        num_layers=3,
        hidden_size=48,
        num_heads=6,
        head_dim=8,
        max_positions=32,
        vocab_size=1000,
    )
    assert resized(LLAMA, SECTIONS["model"], 1000, 24, is_count=False) == LLAMA


@pytest.mark.parametrize(
    ("sizes", "said"),
    [
        ({"hidden_size": 50}, "model.hidden_size 50 is not a multiple of 4 heads"),
        ({"num_heads": 8, "num_kv_heads": 3}, "3 kv heads do not divide 8 heads"),
        ({"hidden_size": 60, "num_heads": 4}, "need an even head size, not 15"),
        ({"num_layers": 3, "weights": "given"}, "model.num_layers changes the shape"),
        ({"num_layers": -1}, "num_layers must be a whole number of at least 1, not -1"),
    ],
)
def test_sizes_that_do_not_make_a_model(sizes: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        resized(LLAMA, replace(SECTIONS["model"], **sizes), 256, 24, is_count=True)


@pytest.mark.parametrize(("heads", "kv_heads"), [(3, 1), (8, 2), (1, 1)])
def test_fewer_heads_keep_kv_heads_that_divide(heads: int, kv_heads: int) -> None:
    """Heads alone are changed: kv heads follow to the largest count that still divides them."""
    config = resized(
        LLAMA, replace(SECTIONS["model"], num_heads=heads, hidden_size=48), 256, 24, is_count=True
    )
    assert (config.num_heads, config.num_kv_heads) == (heads, kv_heads)


def test_settings_that_do_not_exist(tmp_path: Path) -> None:
    """Next to other runs it is probably a misspelled one; else a file is still to be written."""
    with pytest.raises(
        ValueError, match=r"none\.toml does not exist; `shardwise config > run\.toml`"
    ):
        read_settings(tmp_path / "none.toml")
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.toml").touch()
    with pytest.raises(ValueError, match=r"does not exist; .* has the runs first and second$"):
        read_settings(tmp_path / "frist")
