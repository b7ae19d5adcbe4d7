"""The settings of a run: one TOML file, every field of which `--set section.key=value` can set too.

The dataclasses below are the only list of them: the reader, the errors and the commented template
come from it.
"""

import difflib
import json
import math
import tomllib
import types
from collections.abc import Sequence
from dataclasses import MISSING, Field, dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from shardwise.config import ModelConfig
from shardwise.parallel.pipeline.actions import BUCKET_BYTES
from shardwise.precision import GradientPrecision, Precision
from shardwise.setting import setting


@dataclass(frozen=True)
class ModelSettings:
    name: str = setting(
        "10M",
        "a catalogue name (smollm2-135m), a folder, a hub id, a .gguf file, or a count of parameters",
    )
    weights: Literal["random", "given"] = setting(
        "random", "random | given: drawn from the seed, or those of the named model"
    )
    num_layers: int = setting(
        0, "0: as the model has; so for every number below. They need random weights"
    )
    hidden_size: int = setting(0, "width of the residual stream")
    ffn_size: int = setting(0, "width inside the MLP")
    num_heads: int = setting(0, "query heads")
    num_kv_heads: int = setting(0, "key and value heads")
    vocab_size: int = setting(
        0, "0: the tokenizer's for a count of parameters, else as the model has"
    )
    max_positions: int = setting(0, "the longest sequence the model may see")


@dataclass(frozen=True)
class DataSettings:
    folder: str = setting("data", "what `shardwise data build` made")
    seq_len: int = setting(512, "tokens of a sequence")
    global_batch: int = setting(16, "sequences of one step, over all ranks and micro-batches")
    separate_documents: bool = setting(False, "keep packed documents from attending to each other")


@dataclass(frozen=True)
class OptimizerSettings:
    lr: float = setting(1e-3, "the peak learning rate")
    schedule: Literal["cosine", "wsd", "constant"] = setting(
        "cosine", "cosine | wsd | constant: after warm-up falls, or stays and then falls, or stays"
    )
    warmup_steps: int = setting(20, "steps of linear warm-up")
    decay_steps: int = setting(0, "wsd: steps of the final linear decay")
    final_lr: float = setting(0.1, "where the decay ends, as a share of the peak")
    beta1: float = setting(0.9, "decay of the mean of gradients")
    beta2: float = setting(0.95, "decay of the mean of squared gradients")
    eps: float = setting(1e-8, "keeps the division finite")
    weight_decay: float = setting(0.1, "shrinks matrices, not norms and biases")
    max_norm: float = setting(1.0, "gradients are clipped to this 2-norm; 0: not at all")


@dataclass(frozen=True)
class RunSettings:
    folder: str = setting("runs/first", "where metrics, checkpoints and the resolved settings go")
    layout: str = setting("dp1", "how the work is cut, e.g. dp4 or dp2.m4; see docs/layout.md")
    pipeline_table: str = setting(
        "",
        "a .csv file with a schedule of your own, in place of the layout's; see docs/schedules.md",
    )
    steps: int = setting(200, "optimizer steps in all")
    seed: int = setting(0, "of the first weights and of the order of the data")
    precision: Precision = setting(
        "bf16", "bf16 | fp32, of weights, activations and gradients; bf16 keeps fp32 masters"
    )
    gradients: GradientPrecision = setting(
        "same", "same (as the weights) | fp32: what micro-batches add up in"
    )
    reduction: GradientPrecision = setting(
        "fp32", "fp32 | same (as the gradients): what ranks add up in"
    )
    overlap: bool = setting(
        True, "move weights and gradients beside the computation; false: in between"
    )
    bucket_bytes: int = setting(
        BUCKET_BYTES, "gradients travel in buckets of at most this, of which two are held"
    )
    offload: Literal["none", "host", "file"] = setting(
        "none",
        "none | host | file: keep the optimizer's states in host memory, or in the run's folder",
    )
    eval_every: int = setting(50, "steps between evaluations on held-out data; 0: never")
    eval_sequences: int = setting(64, "held-out sequences of one evaluation")
    save_every: int = setting(
        100, "steps between checkpoints; the last step is saved as well; 0: the last only"
    )
    keep_checkpoints: int = setting(2, "older ones are removed; 0: keep all")
    trace_step: int = setting(
        3, "of this step it is written down which rank did what when, in RUN/trace; 0: of none"
    )
    tensorboard: bool = setting(
        False, "write TensorBoard events too (needs the extra shardwise[tensorboard])"
    )


@dataclass(frozen=True)
class Settings:
    model: ModelSettings = field(default_factory=ModelSettings)
    data: DataSettings = field(default_factory=DataSettings)
    optimizer: OptimizerSettings = field(default_factory=OptimizerSettings)
    run: RunSettings = field(default_factory=RunSettings)

    def __post_init__(self) -> None:
        data = self.data
        run = self.run
        optimizer = self.optimizer
        for name, value, least in (
            ("data.seq_len", data.seq_len, 1),
            ("data.global_batch", data.global_batch, 1),
            ("run.steps", run.steps, 1),
            ("run.bucket_bytes", run.bucket_bytes, 4096),
            ("run.eval_every", run.eval_every, 0),
            ("run.eval_sequences", run.eval_sequences, 1),
            ("run.save_every", run.save_every, 0),
            ("run.keep_checkpoints", run.keep_checkpoints, 0),
            ("run.trace_step", run.trace_step, 0),
            ("optimizer.warmup_steps", optimizer.warmup_steps, 0),
            ("optimizer.decay_steps", optimizer.decay_steps, 0),
            ("optimizer.lr", optimizer.lr, 0),
            ("optimizer.weight_decay", optimizer.weight_decay, 0),
            ("optimizer.max_norm", optimizer.max_norm, 0),
            ("optimizer.final_lr", optimizer.final_lr, 0),
            ("run.seed", run.seed, 0),
        ):
            if not value >= least:
                raise ValueError(f"{name} must be at least {least}, not {value}")
        if not optimizer.eps > 0:
            raise ValueError(
                f"optimizer.eps must be above 0, not {optimizer.eps}, or the first step divides by zero"
            )
        for name, beta in (("beta1", optimizer.beta1), ("beta2", optimizer.beta2)):
            if not 0 <= beta < 1:
                raise ValueError(f"optimizer.{name} must be at least 0 and below 1, not {beta}")


def read_settings(path: Path, overrides: Sequence[str] = ()) -> Settings:
    """The settings in a TOML file or a run's folder, with `section.key=value` overrides. Raises
    ValueError that names the nearest key."""
    if (path / "config.toml").is_file():
        path = path / "config.toml"  # of a run
    try:
        raw = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(
            f"{path} does not exist; `shardwise config > {path}` writes one to start from"
        ) from None
    except IsADirectoryError:
        raise ValueError(f"{path} is a folder, not a TOML file") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not valid TOML: {error}") from None
    for override in overrides:
        put(raw, override)
    return parse_section(Settings, raw, "")


def put(raw: dict[str, Any], override: str) -> None:
    """Write `section.key=value` into the nested dicts; the value is TOML, or else taken as a
    string."""
    key, equals, value = override.partition("=")
    section, dot, name = key.strip().partition(".")
    if not equals or not dot:
        raise ValueError(
            f"--set {override!r} is not of the form section.key=value, as in run.steps=100"
        )
    try:
        parsed = tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        parsed = value
    table = raw.setdefault(section, {})
    if not isinstance(table, dict):
        raise ValueError(f"{section} is not a section")
    table[name] = parsed


def parse_section(kind: type, raw: dict[str, Any], prefix: str) -> Any:
    hints = get_type_hints(kind)
    given = {}
    for key, value in raw.items():
        if key not in hints:
            raise ValueError(f"{prefix}{key} is not a setting{nearest(prefix + key)}")
        given[key] = parse_value(hints[key], value, prefix + key)
    return kind(**given)


def parse_value(kind: Any, value: Any, name: str) -> Any:
    if is_dataclass(kind):
        if not isinstance(value, dict):
            raise ValueError(f"{name} is a section: write [{name}] above its keys")
        return parse_section(kind, value, f"{name}.")  # type: ignore[arg-type]
    if get_origin(kind) is Literal:
        if value not in get_args(kind):
            raise ValueError(f"{name} must be one of {', '.join(get_args(kind))}, not {value!r}")
        return value
    assert get_origin(kind) not in (Union, types.UnionType)
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if type(value) is not kind or (kind is float and not math.isfinite(value)):
        word = {
            int: "a whole number",
            float: "a finite number",
            bool: "true or false",
            str: "a text in quotes",
        }[kind]
        raise ValueError(f"{name} must be {word}, not {value!r}")
    return value


def all_fields() -> list[tuple[str, Field[Any]]]:
    """Every setting as (section, field), in the order of the template."""
    return [
        (section.name, entry)
        for section in fields(Settings)
        for entry in fields(default_of(section))
    ]


def default_of(section: Field[Any]) -> Any:
    assert section.default_factory is not MISSING
    return section.default_factory()


def nearest(name: str) -> str:
    sections = [section.name for section in fields(Settings)]
    known = [f"{section}.{entry.name}" for section, entry in all_fields()]
    found = [
        key for key in known if key.split(".")[1] == name.split(".")[-1]
    ]  # the right key, in the wrong section
    found += difflib.get_close_matches(name, known if "." in name else sections + known, 1, 0.5)
    return f"; did you mean {found[0]}?" if found else f"; sections are {', '.join(sections)}"


def to_toml(settings: Settings, explained: bool = False) -> str:
    """The settings as TOML, each with its explanation if wanted: what `shardwise config` prints."""
    lines = []
    for section in fields(Settings):
        lines.append(f"[{section.name}]")
        values = getattr(settings, section.name)
        for entry in fields(values):
            text = f"{entry.name} = {to_toml_value(getattr(values, entry.name))}"
            lines.append(f"{text:<32} # {entry.metadata['help']}" if explained else text)
        lines.append("")
    return "\n".join(lines)


def to_toml_value(value: str | float | bool) -> str:
    """JSON but for one character, which TOML wants escaped."""
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def shaped(
    config: ModelConfig,
    settings: ModelSettings,
    tokenizer_vocab_size: int,
    seq_len: int,
    counted: bool,
) -> ModelConfig:
    """The model with the sizes that the settings change; a counted one takes the vocabulary of the
    tokenizer, and the positions that it is trained on."""
    sizes = (
        "num_layers",
        "hidden_size",
        "ffn_size",
        "num_heads",
        "num_kv_heads",
        "vocab_size",
        "max_positions",
    )
    changed = {name: size for name in sizes if (size := getattr(settings, name))}
    if changed and settings.weights == "given":
        raise ValueError(
            f"model.{next(iter(changed))} changes the shape, so the given weights do not fit; use random"
        )
    if counted:
        changed = {"vocab_size": tokenizer_vocab_size, "max_positions": seq_len} | changed
    heads = changed.get("num_heads", config.num_heads)
    if "num_heads" in changed and "num_kv_heads" not in changed:
        changed["num_kv_heads"] = max(
            n for n in range(1, config.num_kv_heads + 1) if heads % n == 0
        )
    if {"hidden_size", "num_heads"} & changed.keys():
        hidden = changed.get("hidden_size", config.hidden_size)
        if hidden % heads:
            raise ValueError(f"model.hidden_size {hidden} is not a multiple of {heads} heads")
        changed["head_dim"] = hidden // heads
    if config.windowed_layers and "num_layers" in changed:
        kept = range(changed["num_layers"])
        everywhere = len(config.windowed_layers) == config.num_layers
        windowed = frozenset(kept) if everywhere else config.windowed_layers & frozenset(kept)
        return replace(config, **changed, windowed_layers=windowed)
    return replace(config, **changed)
