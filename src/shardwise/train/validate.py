"""Everything about a run that can be refused, before its folder is made and a rank starts."""

import os
from dataclasses import dataclass, fields, replace
from importlib.util import find_spec
from pathlib import Path

import torch

from shardwise.config import ModelConfig
from shardwise.formats.catalogue import find_model, model_path
from shardwise.formats.huggingface.hf_config import from_hugging_face, to_hugging_face
from shardwise.formats.load import open_weights
from shardwise.formats.tokenizers.tokenizer import Tokenizer, check_vocabulary, load_tokenizer
from shardwise.kernels.registry import training_kernels
from shardwise.layout import Layout
from shardwise.model.layers import DTYPES
from shardwise.parallel.apply import check_schedule, check_trainable
from shardwise.parallel.launch import device_of, joined_world_size, local_world_size
from shardwise.parallel.offload import STATE_BYTES
from shardwise.parallel.pipeline.table_csv import read_csv
from shardwise.params import stage_units
from shardwise.plan.ledger import shard_sizes, training_ledgers
from shardwise.train.data import Batches, TokenFile
from shardwise.train.settings import Settings, shaped


@dataclass(frozen=True)
class Run:
    """A run ready to start. `weights` is where its first weights come from; None: drawn from the
    seed."""

    settings: Settings
    config: ModelConfig
    weights: Path | None


def check_run(settings: Settings) -> Run:
    """Resolve the model and hold it against layout, data and tokenizer."""
    layout = Layout.parse(settings.run.layout)
    check_joined(layout)
    data = settings.data
    tokens = TokenFile(Path(data.folder), "train")
    tokenizer = load_tokenizer(Path(data.folder))
    found = find_model(settings.model.name)
    config = shaped(
        found.config, settings.model, tokenizer.vocab_size, data.seq_len, found.kind == "count"
    )
    weights = None
    if settings.model.weights == "given":
        if found.kind in ("count", "catalogue"):
            raise ValueError(
                f"model {settings.model.name} names a shape and has no weights; name a folder, hub id or file"
            )
        weights = model_path(found)
        open_weights(weights, config).close()
        check_same_tokenizer(weights, tokenizer, data.folder)
    check_expressible(config)
    check_trainable(layout, config)
    training_kernels(device_of(0, layout.world_size), DTYPES[settings.run.precision])
    if settings.run.pipeline_table:
        check_schedule(read_csv(Path(settings.run.pipeline_table)), layout)
    check_store(layout, settings)
    check_memory(config, layout, settings)
    if tokens.vocab_size > config.vocab_size:
        raise ValueError(
            f"{data.folder} was tokenized with {tokens.vocab_size} ids, but the model's vocabulary has "
            f"{config.vocab_size}; build the data with the model's own tokenizer"
        )
    check_vocabulary(tokenizer, config.vocab_size)
    if data.seq_len > config.max_positions:
        raise ValueError(
            f"data.seq_len {data.seq_len} is longer than the model's {config.max_positions} positions"
        )
    Batches(
        tokens,
        data.seq_len,
        data.global_batch,
        layout.microbatches,
        0,
        layout.dp,
        settings.run.seed,
    )
    if settings.run.eval_every:
        check_held_out(settings)
    if settings.run.tensorboard and find_spec("tensorboard") is None:
        raise ValueError("run.tensorboard needs the extra: pip install 'shardwise[tensorboard]'")
    return Run(settings, config, weights)


def check_expressible(config: ModelConfig) -> None:
    """What is trained must be what its config.json says, or nothing could read it back."""
    known = from_hugging_face(to_hugging_face(config))
    for field in fields(config):
        ours = getattr(config, field.name)
        theirs = getattr(known, field.name)
        if ours != theirs:
            raise ValueError(
                f"a model of the {config.family} family has no {field.name} of its own: {theirs!r} works"
            )


def check_same_tokenizer(weights: Path, tokenizer: Tokenizer, data_folder: str) -> None:
    """Given weights mean nothing to ids of another vocabulary."""
    try:
        own = load_tokenizer(weights)
    except ValueError:
        return  # none to compare with
    if own.backend.get_vocab() != tokenizer.backend.get_vocab():
        raise ValueError(
            f"{data_folder} was tokenized with another vocabulary than that of {weights}; "
            f"build it with --tokenizer {weights}"
        )


def check_held_out(settings: Settings) -> None:
    try:
        TokenFile(Path(settings.data.folder), "held_out").num_samples(settings.data.seq_len)
    except ValueError as error:
        raise ValueError(
            f"{str(error).rstrip('.')}; without evaluation (run.eval_every=0) it trains as it is"
        ) from None


def check_store(layout: Layout, settings: Settings) -> None:
    """PyTorch's own FSDP moves and keeps states its own way."""
    run = settings.run
    default = type(settings.run)()
    for name in ("overlap", "bucket_bytes", "offload"):
        if layout.shard == "fsdp" and getattr(run, name) != getattr(default, name):
            raise ValueError(
                f"run.{name} does not apply to fsdp, which decides that itself; leave it out, or take "
                f"{replace(layout, shard='zero3')}"
            )


def check_memory(config: ModelConfig, layout: Layout, settings: Settings) -> None:
    """Refuse a run whose states alone exceed the memory, by the planner's figures, before it
    exceeds it."""
    run = settings.run
    device = device_of(0, layout.world_size)
    ledgers = training_ledgers(config, layout, run.precision, run.gradients)
    needed = max(stage.state_bytes for stage in ledgers)
    what = f"the parameters, gradients and optimizer of {layout}"
    if run.offload != "none":
        needed = max(stage.state_bytes - stage.rows["optimizer"] for stage in ledgers)
        what = f"the parameters and gradients of {layout}"
    if run.offload == "host":
        check_fits(
            f"the offloaded states of {layout}",
            offloaded_bytes(config, layout),
            layout,
            torch.device("cpu"),
        )
        needed += offloaded_bytes(config, layout) if device.type == "cpu" else 0
    check_fits(what, needed, layout, device)
    check_batch(settings.data.global_batch, settings.data.seq_len, layout, device)


def check_batch(num_sequences: int, length: int, layout: Layout, device: torch.device) -> None:
    """Raise ValueError if the tokens of a step alone exceed the memory."""
    sequence_bytes = 3 * 8 * length
    held = memory_bytes(device)  # ids, targets and positions
    if num_sequences * sequence_bytes > held:
        works = held // sequence_bytes // layout.data_size * layout.data_size
        raise ValueError(
            f"a global batch of {num_sequences} sequences exceeds the memory; {works} do not"
        )


def offloaded_bytes(config: ModelConfig, layout: Layout) -> int:
    """Of one rank, the fullest."""
    sizes = shard_sizes(config, layout)
    return STATE_BYTES * max(
        sum(sizes[unit] for unit in sizes.keys() & stage_units(config, layout, stage))
        for stage in range(layout.pp)
    )


def check_joined(layout: Layout) -> None:
    """Raise ValueError if torchrun started another number of ranks than the layout has."""
    joined = joined_world_size()
    if joined is not None and joined != layout.world_size:
        raise ValueError(
            f"torchrun started {joined} ranks, but layout {layout} is for {layout.world_size}; "
            f"--layout dp{joined} works"
        )


def ranks_here(layout: Layout) -> int:
    """Ranks of the layout that run on this machine."""
    return local_world_size() or layout.world_size


def check_fits(what: str, bytes_a_rank: int, layout: Layout, device: torch.device) -> None:
    """Raise ValueError if the ranks here that share the memory of `device` cannot hold it
    together."""
    ranks = ranks_here(layout) if device.type == "cpu" else 1
    held = memory_bytes(device)
    if bytes_a_rank * ranks > held:
        raise ValueError(
            f"{what} take {bytes_a_rank / 1e9:,.3g} GB a rank, on {ranks} "
            f"rank{'s' if ranks > 1 else ''} more than the {held / 1e9:,.3g} GB there are; "
            "`shardwise plan` tells what would fit"
        )


def memory_bytes(device: torch.device) -> int:
    """All the memory of a GPU, or of this machine."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
