"""`plan`: which layouts of a model fit on given GPUs, why others do not, and what would fit."""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, get_args

from shardwise.config import ModelConfig
from shardwise.formats.catalogue import FoundModel, find_model
from shardwise.formats.storage_formats import choose_formats, stored_formats
from shardwise.hardware import GPUS_PER_NODE, MARGIN, Device, find_device
from shardwise.layout import Layout, Recompute
from shardwise.params import model_specs, num_params
from shardwise.plan.ledger import BYTES_PER_PARAMETER, NOT_COUNTED, NOT_QUANTIZED, Mode
from shardwise.plan.proposal import Proposal, best_fits, propose, rough_step_s
from shardwise.plan.search import Candidate, Job
from shardwise.plan.why import smallest_change, why_not, why_one_is_not_enough
from shardwise.precision import PRECISIONS, GradientPrecision, Precision
from shardwise.quant.kv_dtype import KvDtype, check_kv_dtype, vector_bytes
from shardwise.quant.scheme import AS_STORED, AUTO, UNQUANTIZED, StorageFormats

DEFAULT_SEQ_TOKENS = 8192


@dataclass(frozen=True)
class ModePlan:
    """The plan of one mode, training or serving.

    Attributes:
        num_gpus: GPUs that the candidates use
        candidates: sorted layouts, those that fit first
        judged: the requested layout, if it is the only candidate
        remark: why the candidates are not the requested layout
    """

    job: Job
    num_gpus: int
    candidates: tuple[Candidate, ...]
    judged: Layout | None = None
    remark: str | None = None

    @cached_property
    def reasons(self) -> tuple[str, ...]:
        """Sentences that explain why the GPUs are not enough; where they are, why one is not."""
        if self.fits:
            return why_one_is_not_enough(self.job)
        return why_not(self.job, self.num_gpus, self.nearest)

    @cached_property
    def proposal(self) -> Proposal | None:
        """The cheapest option; None where the first candidate fits, or nothing does."""
        return None if self.fits else propose(self.job, self.num_gpus, self.judged)

    @cached_property
    def smallest_change(self) -> str | None:
        """The smallest change that fits, in words; None where the first candidate fits."""
        if self.fits:
            return None
        return smallest_change(self.job, self.num_gpus, self.nearest.layout, self.proposal)

    @property
    def nearest(self) -> Candidate:
        """The candidate that needs least."""
        return min(self.candidates, key=lambda each: each.peak_bytes)

    @property
    def why_not(self) -> str | None:
        return " ".join(self.reasons) or None

    @property
    def fits(self) -> bool:
        return self.candidates[0].fits

    @property
    def uncounted(self) -> tuple[str, ...]:
        return NOT_COUNTED[self.job.mode]

    def candidate_json(self, candidate: Candidate) -> dict[str, Any]:
        if self.job.mode == "train":
            return candidate.to_json()
        served = {"max_concurrency": candidate.max_concurrency(self.job.limit_bytes)}
        return {**candidate.to_json(), "serve": served}

    def to_json(self) -> dict[str, Any]:
        return {
            "mode": self.job.mode,
            "not_counted": list(self.uncounted),
            "candidates": [self.candidate_json(each) for each in self.candidates],
            "one_gpu": self.candidate_json(self.job.on_one_gpu),
            "why_not": self.why_not,
            "smallest_change": self.smallest_change,
            "proposal": self.proposal and self.proposal.to_json(),
        }


@dataclass(frozen=True)
class Plan:
    """The plan of a model on `num_gpus` of one device, for training, serving or both.

    Attributes:
        num_sequences: sequences per micro-batch in training
        modes: the plans by mode; the requested one, or training and then serving
        quant: quantization of the weights in serving
        kv_dtype: dtype of the KV cache in serving
    """

    model: FoundModel
    device: Device
    num_gpus: int
    precision: Precision
    seq_tokens: int
    num_sequences: int
    modes: tuple[ModePlan, ...]
    quant: str | None = None
    kv_dtype: KvDtype = "auto"

    @property
    def fits(self) -> bool:
        """True if the first candidate of the first mode fits."""
        return self.modes[0].fits

    def to_json(self) -> dict[str, Any]:
        """Return the object that `shardwise plan --json` prints: the first mode at the top level, a
        second one under its name."""
        params = num_params(model_specs(self.model.config))
        kv = vector_bytes(self.kv_dtype, BYTES_PER_PARAMETER[self.precision].parameters)
        model = {
            "name": self.model.name,
            "params": params,
            "active_params": params,
            "kv_bytes_per_token": self.model.config.kv_bytes_per_token(kv.element, kv.scale),
        }
        first, *others = (each.to_json() for each in self.modes)
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
            **{other["mode"]: other for other in others},
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
    gradients: GradientPrecision = "auto",
    offload: bool = False,
    margin: float = MARGIN,
    gpus_per_node: int = GPUS_PER_NODE,
    global_batch: int | None = None,
) -> Plan:
    """Return what a model needs on GPUs, without one.

    Args:
        gpus: number of GPUs; by default the ranks of `layout`, or 1
        mode: "train" or "serve"; by default both, training first
        layout: the first candidate, whether it fits or not; by default layouts are searched
        seq: tokens per sequence in training and per request in serving; by default 8192, or the
            model's context length if that is shorter
        micro_batch: sequences per micro-batch and data rank in training; by default 1
        recompute: recompute of all training layouts
        quant: quantization of the weights in serving, as `shardwise serve` takes it; by default
            auto, as the device has kernels
        kv_dtype: dtype of the KV cache in serving
        gradients: dtype of the gradients in training, as `run.gradients`
        offload: whether training keeps optimizer states in host memory
        margin: share of a GPU's memory that proposals leave to the CUDA context, NCCL and
            fragmentation
        gpus_per_node: GPUs that fast links join; proposals use whole nodes
        global_batch: sequences of a training step; a layout whose data ranks and micro-batches do
            not divide it is not proposed

    Raises ValueError for an unknown model, GPU or choice, and for a layout that cannot work.
    """
    found = as_model(model)
    device = find_device(gpu) if isinstance(gpu, str) else gpu
    requested = Layout.parse(layout) if isinstance(layout, str) else layout
    num_gpus = gpus if gpus is not None else requested.world_size if requested else 1
    check_choices(mode, precision, num_gpus)
    check_limits(margin, gpus_per_node)
    check_training_choices(mode, micro_batch, recompute, requested, offload)
    check_kv_choice(kv_dtype, mode)
    stored, formats = served_formats(quant, found, mode, requested)
    served_as = served_quant(quant or AUTO, formats)
    trained = requested
    if requested and recompute:
        trained = replace(requested, recompute=recompute)
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
        quant=served_as,
        formats=formats,
        stored=stored,
        kv_dtype=kv_dtype,
        margin=margin,
        gpus_per_node=gpus_per_node,
    )
    recomputed = trained.recompute if trained else recompute or "none"
    training = replace(
        serving,
        mode="train",
        num_sequences=num_sequences,
        recompute=recomputed,
        gradients=gradients,
        offload=offload,
        global_batch=global_batch,
        quant=None,
        formats=NOT_QUANTIZED,
    )
    modes = tuple(
        plan_mode(job, num_gpus, job_layout)
        for job, job_layout in ((training, trained), (serving, requested))
        if mode in (None, job.mode)
    )
    return Plan(
        found, device, num_gpus, precision, seq_tokens, num_sequences, modes, served_as, kv_dtype
    )


def plan_mode(job: Job, num_gpus: int, requested: Layout | None) -> ModePlan:
    """Return the plan of one mode. Where serving cannot use the requested layout, candidates are
    searched instead."""
    is_judged = requested is not None and (job.mode == "train" or serves(requested))
    if requested is not None and is_judged:
        candidates: tuple[Candidate, ...] = (job.candidate(requested),)
    else:
        candidates = compared(job, num_gpus)
    remark = None
    if requested and not is_judged:
        remark = f"{requested} is for training only; these layouts serve on as many GPUs."
    return ModePlan(job, num_gpus, candidates, requested if is_judged else None, remark)


def compared(job: Job, num_gpus: int) -> tuple[Candidate, ...]:
    """Return the layouts to compare: those that fit first, the fastest of them leading, then the
    others by size. In training, the best layouts of the search are among them."""
    found = {candidate.layout: candidate for candidate in job.common_layouts(num_gpus)}
    if job.mode == "train":
        for proposal in best_fits(job, num_gpus):
            found.setdefault(proposal.candidate.layout, proposal.candidate)

    def order(each: Candidate) -> tuple[bool, float]:
        if job.mode == "serve":  # the simplest that fit come first
            return not each.fits, 0 if each.fits else each.peak_bytes
        fits = each.peak_bytes <= job.limit_bytes
        return not fits, rough_step_s(job, each.layout) if fits else each.peak_bytes

    return tuple(sorted(found.values(), key=order))


def as_model(model: str | ModelConfig | FoundModel) -> FoundModel:
    if isinstance(model, str):
        return find_model(model)
    return FoundModel(model.family, model, "catalogue") if isinstance(model, ModelConfig) else model


def serves(layout: Layout) -> bool:
    """Return whether a layout has only what serving supports: tensor parallel and replicas."""
    return layout == Layout(dp=layout.dp, tp=layout.tp)


def check_choices(mode: str | None, precision: str, num_gpus: int) -> None:
    if mode is not None and mode not in get_args(Mode):
        raise ValueError(f"unknown mode {mode!r}; use train or serve")
    if precision not in PRECISIONS:
        raise ValueError(f"unknown precision {precision!r}; use {' or '.join(PRECISIONS)}")
    if num_gpus < 1:
        raise ValueError(f"the number of GPUs must be at least 1, not {num_gpus}")


def check_limits(margin: float, gpus_per_node: int) -> None:
    if not 0 <= margin < 1:
        raise ValueError(f"the margin is a share from 0 to below 1, such as 0.08, not {margin:g}")
    if gpus_per_node < 1:
        raise ValueError(f"a node has at least 1 GPU, not {gpus_per_node}")


def check_training_choices(
    mode: Mode | None,
    micro_batch: int | None,
    recompute: Recompute | None,
    layout: Layout | None,
    offload: bool,
) -> None:
    if mode == "serve" and (micro_batch is not None or recompute is not None or offload):
        raise ValueError(
            "micro_batch, recompute and offload apply to training only; leave them out with mode "
            "serve"
        )
    if micro_batch is not None and micro_batch < 1:
        raise ValueError(f"micro_batch must be at least 1, not {micro_batch}")
    if recompute is not None and recompute not in get_args(Recompute):
        raise ValueError(f"unknown recompute {recompute!r}; use {', '.join(get_args(Recompute))}")
    if layout and recompute and layout.recompute not in ("none", recompute):
        raise ValueError(
            f"layout {layout} has rc-{layout.recompute}, so recompute cannot be {recompute}; "
            "leave one of them out"
        )


def check_kv_choice(kv_dtype: KvDtype, mode: Mode | None) -> None:
    check_kv_dtype(kv_dtype)
    if mode == "train" and kv_dtype != "auto":
        raise ValueError("kv_dtype applies to serving only; leave it out with mode train")


def served_formats(
    quant: str | None, found: FoundModel, mode: Mode | None, layout: Layout | None
) -> tuple[StorageFormats, StorageFormats]:
    """Return the storage formats of the weights in the model's files, and in serving. Raises
    ValueError for a quantization that does not apply."""
    if mode == "train":
        if quant is not None:
            raise ValueError("quant applies to serving only; leave it out with mode train")
        return NOT_QUANTIZED, NOT_QUANTIZED
    stored = NOT_QUANTIZED
    if (source := found.gguf or found.path) is not None:
        try:
            stored = stored_formats(source, found.config)
        except ValueError:
            if quant is not None:
                raise
            # a folder with no weights, or with weights that cannot be read, still has a shape
    served = Layout(tp=layout.tp) if layout and serves(layout) else Layout()
    return stored, choose_formats(stored, found.path, found.config, served, quant or AUTO)


def served_quant(quant: str, formats: StorageFormats) -> str | None:
    """Return the quantization that `quant` amounts to; None for unquantized weights."""
    if quant == AUTO and formats:
        return AS_STORED
    return None if quant in (AUTO, UNQUANTIZED) else quant


def check_layout(layout: Layout, config: ModelConfig, num_gpus: int, mode: Mode | None) -> None:
    """Raise ValueError if a requested layout cannot work for the model, the GPUs or the mode."""
    if problems := layout.problems(config):
        raise ValueError(f"layout {layout} cannot work: {'; '.join(problems)}")
    if layout.world_size != num_gpus:
        size = layout.world_size
        raise ValueError(f"layout {layout} is for {size} GPUs, not {num_gpus}; --gpus {size} works")
    if mode == "serve" and not serves(layout):
        works = Layout(dp=num_gpus // layout.tp, tp=layout.tp)
        raise ValueError(
            f"layout {layout} is for training; serving takes tp, and dp for replicas; {works} works"
        )


def choose_seq(config: ModelConfig, seq: int | None) -> int:
    if seq is None:
        return min(config.max_positions, DEFAULT_SEQ_TOKENS)
    if not 1 <= seq <= config.max_positions:
        raise ValueError(
            f"the model's context is {config.max_positions:,} tokens, so --seq must be 1 to "
            f"{config.max_positions}, not {seq}"
        )
    return seq
