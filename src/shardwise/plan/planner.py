"""`plan`: from a model, a kind of GPU and a number of them to what fits, why not, and what
would."""

from dataclasses import dataclass, replace
from typing import Any, get_args

from shardwise.config import ModelConfig
from shardwise.formats.catalogue import FoundModel, find_model
from shardwise.formats.storage import quantized_formats
from shardwise.hardware import Device, find_device
from shardwise.layout import Layout, Recompute
from shardwise.params import model_specs, num_params
from shardwise.plan.ledger import BYTES_PER_PARAMETER, NOT_COUNTED, NOT_QUANTIZED, Mode
from shardwise.plan.search import Candidate, Job
from shardwise.plan.why import smallest_change, why_one_is_not_enough
from shardwise.precision import PRECISIONS, Precision
from shardwise.quant.kv_dtype import KvDtype, check_kv_dtype, vector_bytes
from shardwise.quant.scheme import StorageFormats

DEFAULT_SEQ_TOKENS = 8192


@dataclass(frozen=True)
class Answer:
    """What training, or serving, comes to. `candidates` are sorted, those that fit first; `reasons`
    say sentence by sentence why one GPU is not enough, and are empty where it is."""

    job: Job
    candidates: tuple[Candidate, ...]
    reasons: tuple[str, ...]
    smallest_change: str | None
    remark: str | None = None
    """What was asked for and is not answered."""

    @property
    def why_not(self) -> str | None:
        return " ".join(self.reasons) or None

    @property
    def fits(self) -> bool:
        return self.candidates[0].fits

    @property
    def uncounted(self) -> tuple[str, ...]:
        return NOT_COUNTED[self.job.mode]

    def to_json(self) -> dict[str, Any]:
        return {
            "mode": self.job.mode,
            "not_counted": list(self.uncounted),
            "candidates": [each.to_json() for each in self.candidates],
            "one_gpu": self.job.on_one_gpu.to_json(),
            "why_not": self.why_not,
            "smallest_change": self.smallest_change,
        }


@dataclass(frozen=True)
class Plan:
    """The answer to training, to serving, or to both, for one model on `num_gpus` of one device."""

    model: FoundModel
    device: Device
    num_gpus: int
    precision: Precision
    seq_tokens: int
    num_sequences: int
    """Of a micro-batch in training."""
    answers: tuple[Answer, ...]
    quant: str | None = None
    """How weights are quantized in serving."""
    kv_dtype: KvDtype = "auto"
    """What keys and values are kept in, in serving."""

    @property
    def fits(self) -> bool:
        """Whether the first candidate of what was asked for first fits."""
        return self.answers[0].fits

    def to_json(self) -> dict[str, Any]:
        """The object that the command line prints: the first answer at the top, a second one under
        its mode."""
        params = num_params(model_specs(self.model.config))
        kv = vector_bytes(self.kv_dtype, BYTES_PER_PARAMETER[self.precision].parameters)
        model = {
            "name": self.model.name,
            "params": params,
            "active_params": params,
            "kv_bytes_per_token": self.model.config.kv_bytes_per_token(kv.element, kv.scale),
        }
        first, *others = (answer.to_json() for answer in self.answers)
        return {
            "model": model,
            "gpu": {"name": self.device.name, "memory_bytes": self.device.memory_bytes},
            "gpus": self.num_gpus,
            "precision": self.precision,
            "quant": self.quant,
            "kv_dtype": self.kv_dtype,
            "seq": self.seq_tokens,
            "micro_batch": self.num_sequences,
            **first,
            **{answer["mode"]: answer for answer in others},
        }


def plan(
    model: str | ModelConfig | FoundModel,
    gpu: str | Device,
    gpus: int | None = None,
    mode: Mode | None = None,
    layout: str | Layout | None = None,
    seq: int | None = None,
    precision: Precision = "bf16",
    micro_batch: int | None = None,
    recompute: Recompute | None = None,
    quant: str | None = None,
    kv_dtype: KvDtype = "auto",
) -> Plan:
    """What a model needs on `gpus` GPUs (1, or as many as `layout` has ranks), before anything is
    started.

    Without `mode`, training first, then serving. With `layout` the first candidate is that one,
    whether it fits or not. `seq` is the length in tokens of a sequence in training and of a request
    in serving; by default 8192, or the model's positions where they are fewer. `micro_batch` counts
    the sequences that a data rank trains on at a time (1), and `recompute` is that of every layout
    of training; `quant` is how serving holds weights, and `kv_dtype` what it keeps keys and values
    in. Raises ValueError for what is not known and for a layout that cannot work.
    """
    found = as_model(model)
    device = find_device(gpu) if isinstance(gpu, str) else gpu
    wanted = Layout.parse(layout) if isinstance(layout, str) else layout
    num_gpus = gpus if gpus is not None else wanted.world_size if wanted else 1
    check_choices(mode, precision, num_gpus)
    check_training_choices(mode, micro_batch, recompute, wanted)
    check_cache(kv_dtype, mode)
    formats = NOT_QUANTIZED if quant is None else served_formats(quant, found, mode, wanted)
    trained = replace(wanted, recompute=recompute) if wanted and recompute else wanted
    if trained:
        check_layout(trained, found.config, num_gpus, mode)
    seq_tokens = choose_seq(found.config, seq)
    num_sequences = micro_batch or 1
    serving = Job(
        "serve",
        found.name,
        found.config,
        device,
        precision,
        seq_tokens,
        quant=quant,
        formats=formats,
        kv_dtype=kv_dtype,
    )
    recomputed = trained.recompute if trained else recompute or "none"
    training = replace(
        serving,
        mode="train",
        num_sequences=num_sequences,
        recompute=recomputed,
        quant=None,
        formats=NOT_QUANTIZED,
    )
    asked = [
        (job, one)
        for job, one in ((training, trained), (serving, wanted))
        if mode in (None, job.mode)
    ]
    answers = tuple(answer(job, num_gpus, one) for job, one in asked)
    return Plan(
        found, device, num_gpus, precision, seq_tokens, num_sequences, answers, quant, kv_dtype
    )


def answer(job: Job, num_gpus: int, wanted: Layout | None) -> Answer:
    """A layout that only training can use is left out of serving, where candidates are searched
    instead."""
    if wanted and (job.mode == "train" or serves(wanted)):
        candidates: tuple[Candidate, ...] = (job.candidate(wanted),)
        start = candidates[0]
    else:
        candidates = job.candidates(num_gpus)
        start = candidates[0] if candidates[0].fits else job.copies(num_gpus)
    remark = None
    if wanted and candidates[0].layout != wanted:
        remark = (
            f"{wanted} is a layout for training; these are layouts that serve, on as many GPUs."
        )
    return Answer(job, candidates, why_one_is_not_enough(job), smallest_change(job, start), remark)


def as_model(model: str | ModelConfig | FoundModel) -> FoundModel:
    if isinstance(model, str):
        return find_model(model)
    return FoundModel(model.family, model, "catalogue") if isinstance(model, ModelConfig) else model


def serves(layout: Layout) -> bool:
    return layout == Layout(dp=layout.dp, tp=layout.tp)


def check_choices(mode: str | None, precision: str, num_gpus: int) -> None:
    if mode is not None and mode not in get_args(Mode):
        raise ValueError(f"mode {mode!r} is not known; train and serve are")
    if precision not in PRECISIONS:
        raise ValueError(f"precision {precision!r} is not known; {' and '.join(PRECISIONS)} are")
    if num_gpus < 1:
        raise ValueError(f"the number of GPUs must be at least 1, not {num_gpus}")


def check_training_choices(
    mode: Mode | None, micro_batch: int | None, recompute: Recompute | None, layout: Layout | None
) -> None:
    if mode == "serve" and (micro_batch is not None or recompute is not None):
        raise ValueError("a micro-batch and recompute are of training; leave them out of serving")
    if micro_batch is not None and micro_batch < 1:
        raise ValueError(f"a micro-batch has at least 1 sequence, not {micro_batch}")
    if recompute is not None and recompute not in get_args(Recompute):
        raise ValueError(
            f"recompute {recompute!r} is not known; {', '.join(get_args(Recompute))} are"
        )
    if layout and recompute and layout.recompute not in ("none", recompute):
        raise ValueError(
            f"layout {layout} says rc-{layout.recompute}, so recompute cannot be {recompute}; say it once"
        )


def check_cache(kv_dtype: KvDtype, mode: Mode | None) -> None:
    check_kv_dtype(kv_dtype)
    if mode == "train" and kv_dtype != "auto":
        raise ValueError("keys and values are kept in serving; leave kv_dtype out of training")


def served_formats(
    quant: str, found: FoundModel, mode: Mode | None, layout: Layout | None
) -> StorageFormats:
    """In what formats the weights are served. Raises ValueError for what cannot be."""
    if mode == "train":
        raise ValueError("weights are quantized in serving; leave quant out of training")
    served = Layout(tp=layout.tp) if layout and serves(layout) else Layout()
    return quantized_formats(found.gguf or found.path, found.config, served, quant)


def check_layout(layout: Layout, config: ModelConfig, num_gpus: int, mode: Mode | None) -> None:
    if problems := layout.problems(config):
        raise ValueError(f"layout {layout} cannot work: {'; '.join(problems)}")
    if layout.world_size != num_gpus:
        size = layout.world_size
        raise ValueError(f"layout {layout} is for {size} GPUs, not {num_gpus}; --gpus {size} works")
    if mode == "serve" and not serves(layout):
        works = Layout(dp=num_gpus // layout.tp, tp=layout.tp)
        raise ValueError(
            f"layout {layout} is for training; serving takes tp, and dp for replicas: {works} works"
        )


def choose_seq(config: ModelConfig, seq: int | None) -> int:
    if seq is None:
        return min(config.max_positions, DEFAULT_SEQ_TOKENS)
    if not 1 <= seq <= config.max_positions:
        raise ValueError(
            f"the model has no positions for {seq} tokens; a --seq of 1 to {config.max_positions} works"
        )
    return seq
