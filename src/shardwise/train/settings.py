"""Settings of a training run: one TOML file, each field of which `--set section.key=value` can also
set.

The dataclasses below are the only list of settings: reader, errors and the commented template
follow from it."""

import difflib
import math
import tomllib
import types
from collections.abc import Sequence
from dataclasses import MISSING, Field, dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from shardwise.config import ModelConfig
from shardwise.formats.config_files import read_toml
from shardwise.layout import Layout
from shardwise.parallel.pipeline.actions import BUCKET_BYTES
from shardwise.precision import GradientPrecision, Precision, ReductionPrecision
from shardwise.setting import setting
from shardwise.suggest import listed
from shardwise.writing.json_text import json_text


@dataclass(frozen=True)
class ModelSettings:
    name: str = setting(
        "10M", "catalogue name (smollm2-135m), folder, hub id, .gguf file, or number of parameters"
    )
    weights: Literal["random", "given"] = setting(
        "random", "random (from run.seed) | given (those of model.name, for fine-tuning)"
    )
    num_layers: int = setting(
        0, "0 = the model's own value, as for the numbers below; only with random weights"
    )
    hidden_size: int = setting(0, "width of the residual stream")
    ffn_size: int = setting(0, "intermediate size of the MLP")
    num_heads: int = setting(0, "query heads")
    num_kv_heads: int = setting(0, "key and value heads")
    vocab_size: int = setting(
        0, "0 = the model's own; the tokenizer's if model.name is a number of parameters"
    )
    max_positions: int = setting(0, "context length")


@dataclass(frozen=True)
class DataSettings:
    folder: str = setting("data", "a data set, written by `shardwise data build`")
    seq_len: int = setting(512, "tokens per sequence")
    global_batch: int = setting(16, "sequences per step, over all ranks and micro-batches")
    separate_documents: bool = setting(False, "keep packed documents from attending to each other")


@dataclass(frozen=True)
class OptimizerSettings:
    lr: float = setting(1e-3, "peak learning rate")
    schedule: Literal["cosine", "wsd", "constant"] = setting(
        "cosine", "cosine decay | wsd (warm-up, stable, decay) | constant, after warm-up"
    )
    warmup_steps: int = setting(20, "steps of linear warm-up")
    decay_steps: int = setting(0, "steps of the final linear decay of wsd")
    final_lr: float = setting(0.1, "learning rate at the end of the decay, as a share of the peak")
    beta1: float = setting(0.9, "decay rate of the first moment")
    beta2: float = setting(0.95, "decay rate of the second moment")
    eps: float = setting(1e-8, "added to the denominator of the update")
    weight_decay: float = setting(0.1, "applies to matrices, not to norms and biases")
    max_norm: float = setting(1.0, "gradient clipping: largest 2-norm (0 = no clipping)")


@dataclass(frozen=True)
class RunSettings:
    folder: str = setting("runs/first", "folder of metrics, checkpoints and the resolved settings")
    layout: str = setting("dp1", "how the model is sharded, e.g. dp4 or dp2.m4; see docs/layout.md")
    pipeline_table: str = setting(
        "", "a .csv file with a custom schedule, instead of the layout's; see docs/schedules.md"
    )
    steps: int = setting(200, "optimizer steps")
    seed: int = setting(0, "seed of the random weights and of the order of the data")
    precision: Precision = setting(
        "bf16",
        "bf16 (with fp32 master weights) | fp32: dtype of weights, activations and gradients",
    )
    gradients: GradientPrecision = setting(
        "auto",
        "auto (fp32 above 4 micro-batches) | same (as the weights) | fp32: dtype of gradient "
        "accumulation over micro-batches",
    )
    reduction: ReductionPrecision = setting(
        "fp32", "fp32 | same (as the gradients): dtype of gradient reduction across ranks"
    )
    overlap: bool = setting(True, "overlap communication with compute")
    bucket_bytes: int = setting(
        BUCKET_BYTES, "largest bucket of gradients to reduce at a time; two are in flight"
    )
    offload: Literal["none", "host", "file"] = setting(
        "none",
        "none | host | file: keep optimizer states in host memory, or in files in RUN/offload",
    )
    eval_every: int = setting(50, "steps between evaluations on held-out data (0 = never)")
    eval_sequences: int = setting(64, "held-out sequences per evaluation")
    save_every: int = setting(
        100, "steps between checkpoints (0 = only the last step, which is always saved)"
    )
    keep_checkpoints: int = setting(
        2, "number of checkpoints to keep; older ones are removed (0 = keep all)"
    )
    trace_step: int = setting(3, "step to trace (0 = never); written to RUN/trace")
    tensorboard: bool = setting(
        False, "also write TensorBoard events (needs the extra `tensorboard`)"
    )


@dataclass(frozen=True)
class Settings:
    model: ModelSettings = field(default_factory=ModelSettings)
    data: DataSettings = field(default_factory=DataSettings)
    optimizer: OptimizerSettings = field(default_factory=OptimizerSettings)
    run: RunSettings = field(default_factory=RunSettings)

    def microbatch_sequences(self, layout: Layout) -> int:
        """Return the sequences of a micro-batch on each data rank."""
        return self.data.global_batch // (layout.dp * layout.microbatches)

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
                f"optimizer.eps must be above 0, not {optimizer.eps}, to avoid division by zero"
            )
        for name, beta in (("beta1", optimizer.beta1), ("beta2", optimizer.beta2)):
            if not 0 <= beta < 1:
                raise ValueError(f"optimizer.{name} must be at least 0 and below 1, not {beta}")


@dataclass(frozen=True)
class Run:
    """A resolved run.

    Attributes:
        settings: the settings that it was resolved from
        layout: `run.layout`, parsed
        config: the model, with the sizes that the settings change
        weights: the file or folder of the first weights; None if they are random
    """

    settings: Settings
    layout: Layout
    config: ModelConfig
    weights: Path | None


def what_to_name(path: Path) -> str:
    """Return what to do about settings that do not exist at `path`: a run or a new file."""
    folder = path.parent
    runs = sorted(file.parent.name for file in folder.glob("*/config.toml")) if folder.name else []
    if path.suffix != ".toml" and runs:
        return f"{folder} has the run{'s' * (len(runs) > 1)} {listed(runs)}"
    return "`shardwise config > run.toml` writes a file to start from"


def read_settings(path: Path, overrides: Sequence[str] = ()) -> Settings:
    """Return the settings in a TOML file or the folder of a run, with `section.key=value`
    overrides. The folder of a run is its `run.folder`, also where it was copied or moved.

    Raises ValueError for an unknown key, with the nearest one, or a value of the wrong type.
    """
    folder = run_folder(path)
    if folder is not None:
        path = folder / "config.toml"
    try:
        raw = read_toml(path)
    except FileNotFoundError:
        raise ValueError(f"{path} does not exist; {what_to_name(path)}") from None
    except IsADirectoryError:
        raise ValueError(f"{path} is a folder, not a TOML file") from None
    if folder is not None:
        override_setting(raw, f"run.folder={json_text(str(folder))}")
    for override in overrides:
        override_setting(raw, override)
    return parse_section(Settings, raw, "")


def run_folder(path: Path) -> Path | None:
    """Return the folder of a run that `path` names, as the folder or as its config.toml."""
    if (path / "config.toml").is_file():
        return path
    is_settings = path.name == "config.toml" and (path.parent / "data.json").is_file()
    return path.parent if is_settings else None


def override_setting(raw: dict[str, Any], override: str) -> None:
    """Write `section.key=value` into nested dicts. The value is parsed as TOML, or taken as a
    string if it is not valid TOML."""
    key, equals, value = override.partition("=")
    section, dot, name = key.strip().partition(".")
    if not equals or not dot:
        raise ValueError(
            f"--set {override!r} must have the form section.key=value, such as run.steps=100"
            f"{'' if dot else suggestion(key.strip())}"
        )
    try:
        parsed = tomllib.loads(f"value = {value}")["value"]
    except (ValueError, RecursionError):
        parsed = value
    table = raw.setdefault(section, {})
    if not isinstance(table, dict):
        raise ValueError(f"--set {override!r}: {section} is not a section")
    table[name] = parsed


def parse_section(kind: type, raw: dict[str, Any], prefix: str) -> Any:
    """Return an instance of a settings class from a TOML table."""
    hints = get_type_hints(kind)
    values = {}
    for key, value in raw.items():
        if key not in hints:
            raise ValueError(f"{prefix}{key} is not a setting{suggestion(prefix + key)}")
        values[key] = parse_value(hints[key], value, prefix + key)
    return kind(**values)


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
            str: "a string in quotes",
        }[kind]
        raise ValueError(f"{name} must be {word}, not {value!r}")
    return value


def all_fields() -> list[tuple[str, Field[Any]]]:
    """Return every setting as (section, field), in the order of the template."""
    return [
        (section.name, entry)
        for section in fields(Settings)
        for entry in fields(default_of(section))
    ]


def default_of(section: Field[Any]) -> Any:
    assert section.default_factory is not MISSING
    return section.default_factory()


def suggestion(name: str) -> str:
    """Return the end of an error about an unknown setting: the nearest one, or the sections."""
    sections = [section.name for section in fields(Settings)]
    known = [f"{section}.{entry.name}" for section, entry in all_fields()]
    key = name.split(".")[-1]
    found = [setting for setting in known if setting.split(".")[1] == key]  # in another section
    found += difflib.get_close_matches(name, known if "." in name else sections + known, 1, 0.5)
    return f"; did you mean {found[0]}?" if found else f"; sections are {', '.join(sections)}"


def to_toml(settings: Settings, explained: bool = False) -> str:
    """Return the settings as TOML; `explained`: with comments, as `shardwise config` prints
    them."""
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
    """Return a TOML value: JSON except for one character, which TOML requires to be escaped."""
    return json_text(value, ensure_ascii=False).replace("\x7f", "\\u007f")
