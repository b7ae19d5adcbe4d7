"""Every reason to refuse a run, checked before its folder is created and a rank starts."""

import os
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import torch

from shardwise.config import ModelConfig
from shardwise.formats.huggingface.hf_config import check_expressible
from shardwise.formats.load import open_weights
from shardwise.formats.tokenizers.load_tokenizer import load_tokenizer
from shardwise.formats.tokenizers.tokenizer import Tokenizer, check_vocabulary
from shardwise.kernels.training_registry import training_kernels
from shardwise.layout import Layout
from shardwise.model.layers import DTYPES
from shardwise.parallel.apply import check_trainable
from shardwise.parallel.launch import device_of, joined_world_size, local_world_size
from shardwise.parallel.memory import container_bytes
from shardwise.parallel.offload import STATE_BYTES
from shardwise.parallel.pipeline.table_csv import read_csv
from shardwise.parallel.pipeline.validate import validate_for
from shardwise.params import stage_units
from shardwise.plan.ledger import shard_sizes
from shardwise.train.data.batches import Batches, TokenFile
from shardwise.train.global_batch import check_divides
from shardwise.train.planned_memory import gigabytes, largest_rows, planned_memory
from shardwise.train.resolve import resolve_run, resume_run
from shardwise.train.settings import Run, Settings


def validated_run(settings: Settings, resume: bool = False) -> Run:
    """Resolve the settings and return the run. Raises ValueError if it cannot start, or resume."""
    run = (resume_run(settings) if resume else None) or resolve_run(settings)
    validate_run(run)
    return run


def validate_run(run: Run) -> None:
    """Raise ValueError with the first reason why a run cannot start on this machine."""
    settings = run.settings
    check_joined(run.layout)
    tokens = TokenFile(Path(settings.data.folder), "train")
    tokenizer = load_tokenizer(Path(settings.data.folder))
    if run.weights is not None:
        open_weights(run.weights, run.config).close()
        check_same_tokenizer(run.weights, tokenizer, settings.data.folder)
    check_expressible(run.config)
    check_schedule(settings)
    check_execution(run)
    check_divides(settings.data.global_batch, run.layout.dp, run.layout.microbatches)
    check_memory(run)
    check_data(run, tokens, tokenizer)
    if settings.run.tensorboard and find_spec("tensorboard") is None:
        raise ValueError(
            "run.tensorboard needs an extra: in the clone, pip install '.[tensorboard]'"
        )


def check_schedule(settings: Settings) -> None:
    """Raise ValueError for a schedule wsd that never decays, or that has no room for its ramps."""
    optimizer = settings.optimizer
    if optimizer.schedule != "wsd":
        return
    if not optimizer.decay_steps:
        raise ValueError("optimizer.schedule wsd needs optimizer.decay_steps of at least 1")
    ramps = optimizer.warmup_steps + optimizer.decay_steps
    if ramps > settings.run.steps:
        raise ValueError(
            f"optimizer.warmup_steps and optimizer.decay_steps are {ramps} steps together, more "
            f"than run.steps, {settings.run.steps}"
        )


# -- the model and the data


def check_same_tokenizer(weights: Path, tokenizer: Tokenizer, data_folder: str) -> None:
    """Raise ValueError if the data was tokenized with another vocabulary than that of the given
    weights."""
    try:
        own = load_tokenizer(weights)
    except ValueError:
        return  # the weights come without a tokenizer
    if own.backend.get_vocab() != tokenizer.backend.get_vocab():
        raise ValueError(
            f"{data_folder} was tokenized with a vocabulary other than that of {weights}; "
            f"build it with --tokenizer {weights}"
        )


def check_data(run: Run, tokens: TokenFile, tokenizer: Tokenizer) -> None:
    """Raise ValueError if the data does not fit the model, the batch or the evaluation."""
    data = run.settings.data
    config = run.config
    if tokens.vocab_size > config.vocab_size:
        raise ValueError(
            f"{data.folder} was tokenized with {tokens.vocab_size} ids, but the model's vocabulary "
            f"has {config.vocab_size}; build the data with the model's own tokenizer"
        )
    check_vocabulary(tokenizer, config.vocab_size)
    if data.seq_len > config.max_positions:
        raise ValueError(
            f"data.seq_len {data.seq_len} exceeds the model's context length of "
            f"{config.max_positions}"
        )
    Batches(
        tokens,
        data.seq_len,
        data.global_batch,
        run.layout.microbatches,
        data_rank=0,
        data_size=run.layout.dp,
        seed=run.settings.run.seed,
    )
    if run.settings.run.eval_every:
        check_held_out(run.settings)


def check_held_out(settings: Settings) -> None:
    try:
        TokenFile(Path(settings.data.folder), "held_out").num_samples(settings.data.seq_len)
    except ValueError as error:
        raise ValueError(
            f"{str(error).rstrip('.')}; run.eval_every=0 trains without evaluation"
        ) from None


# -- the layout


def check_execution(run: Run) -> None:
    """Raise ValueError if the layout, the kernels, the schedule or the store cannot do what the
    settings ask."""
    settings = run.settings.run
    layout = run.layout
    check_trainable(layout, run.config)
    training_kernels(device_of(0, layout.world_size), DTYPES[settings.precision])
    if settings.pipeline_table:
        validate_for(layout, read_csv(Path(settings.pipeline_table)))
    default = type(settings)()
    for name in ("overlap", "bucket_bytes", "offload"):
        if layout.shard == "fsdp" and getattr(settings, name) != getattr(default, name):
            raise ValueError(
                f"run.{name} does not apply to fsdp, which decides that itself; leave it out, or "
                f"use {replace(layout, shard='zero3')}"
            )


def check_joined(layout: Layout) -> None:
    """Raise ValueError if torchrun started another number of ranks than the layout has."""
    joined = joined_world_size()
    if joined is not None and joined != layout.world_size:
        raise ValueError(
            f"torchrun started {joined} ranks, but layout {layout} is for {layout.world_size}; "
            f"--layout dp{joined} works"
        )


# -- memory


def check_memory(run: Run) -> None:
    """Raise ValueError if a run, by the plan of `shardwise plan`, needs more than the memory."""
    settings = run.settings
    layout = run.layout
    device = device_of(0, layout.world_size)
    planned = planned_memory(run)
    needed = planned.total_bytes
    if settings.run.offload == "host":
        offloaded = offloaded_bytes(run.config, layout)
        check_fits(f"the offload of {layout}", offloaded, layout, torch.device("cpu"))
        needed += offloaded if device.type == "cpu" else 0
    check_fits(f"{layout} ({largest_rows(planned)})", needed, layout, device)
    check_batch(settings.data.global_batch, settings.data.seq_len, layout, device)


def check_batch(num_sequences: int, length: int, layout: Layout, device: torch.device) -> None:
    """Raise ValueError if the token ids, targets and positions of a global batch exceed the
    memory."""
    sequence_bytes = 3 * 8 * length
    available = memory_bytes(device)
    if num_sequences * sequence_bytes > available:
        largest = available // sequence_bytes // layout.data_size * layout.data_size
        raise ValueError(
            f"the tokens of a global batch of {num_sequences} sequences exceed the memory; "
            f"{largest} sequences fit"
        )


def check_fits(what: str, rank_bytes: int, layout: Layout, device: torch.device) -> None:
    """Raise ValueError if the ranks that share the memory of `device` on this machine need more
    than it has."""
    ranks = ranks_here(layout) if device.type == "cpu" else 1
    available = memory_bytes(device)
    if rank_bytes * ranks > available:
        total = f", {gigabytes(rank_bytes * ranks)} for {ranks} ranks" if ranks > 1 else ""
        raise ValueError(
            f"{what} takes {gigabytes(rank_bytes)} per rank{total}, but there are "
            f"{gigabytes(available)}; `shardwise plan` with these settings shows what fits"
        )


def offloaded_bytes(config: ModelConfig, layout: Layout) -> int:
    """Return the bytes of offloaded states on the rank that has most."""
    sizes = shard_sizes(config, layout)
    return STATE_BYTES * max(
        sum(sizes[unit] for unit in sizes.keys() & stage_units(config, layout, stage))
        for stage in range(layout.pp)
    )


def ranks_here(layout: Layout) -> int:
    """Return the number of ranks of the layout that run on this machine."""
    return local_world_size() or layout.world_size


def memory_bytes(device: torch.device) -> int:
    """Return the memory of a GPU, or of this machine or its container."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min(machine, container_bytes())
