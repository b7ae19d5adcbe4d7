"""The summary of a run that is printed before its first step, for users to check."""

from collections.abc import Iterator
from pathlib import Path

from shardwise.parallel.launch import device_of
from shardwise.params import model_specs, num_params
from shardwise.train.data.corpus import read_corpus
from shardwise.train.planned_memory import gigabytes, largest_rows, planned_memory
from shardwise.train.settings import Run


def run_summary(run: Run) -> Iterator[str]:
    """Yield lines on the model, the data, the layout and the memory of a run."""
    settings = run.settings
    config = run.config
    data = settings.data
    weights = "random weights" if run.weights is None else f"weights of {run.weights}"
    layers = f"{config.num_layers} layer{'s' * (config.num_layers > 1)}"
    yield (
        f"model: {settings.model.name}, {num_params(model_specs(config)):,} parameters, "
        f"{layers}, hidden size {config.hidden_size}, vocabulary {config.vocab_size:,}, {weights}"
    )
    split = read_corpus(Path(data.folder)).splits["train"]
    step_tokens = data.global_batch * data.seq_len
    trained = settings.run.steps * step_tokens
    yield (
        f"data: {data.folder}, {split.tokens:,} tokens in {split.documents:,} documents; "
        f"{settings.run.steps:,} steps of {step_tokens:,} tokens are {trained:,} tokens, "
        f"{trained / split.tokens:.2g} epochs"
    )
    world = run.layout.world_size
    device = device_of(0, world).type
    ranks = f"{world} {device} rank{'s' * (world > 1)}"
    yield (
        f"layout: {run.layout} on {ranks}, {settings.run.precision}, micro-batches of "
        f"{settings.microbatch_sequences(run.layout)} x {data.seq_len} tokens"
    )
    planned = planned_memory(run)
    yield (
        f"memory: {gigabytes(planned.total_bytes)} per rank by the plan ({largest_rows(planned)})"
    )
