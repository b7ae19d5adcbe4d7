"""The memory that the plan counts for a run, in words."""

from shardwise.plan.activations import MicroBatchShape
from shardwise.plan.ledger import Ledger, training_ledgers
from shardwise.train.settings import Run


def planned_memory(run: Run) -> Ledger:
    """Return what `shardwise plan` computes for the rank of a run that needs most."""
    settings = run.settings
    microbatch = MicroBatchShape(settings.microbatch_sequences(run.layout), settings.data.seq_len)
    stages = training_ledgers(
        run.config,
        run.layout,
        settings.run.precision,
        settings.run.gradients,
        microbatch,
        offload=settings.run.offload != "none",
    )
    return max(stages, key=lambda stage: stage.total_bytes)


def largest_rows(ledger: Ledger) -> str:
    """Return the two largest rows of a ledger: "activations 12 GB, optimizer 3 GB, ..."."""
    rows = sorted(ledger.rows, key=lambda row: -ledger.rows[row])[:2]
    return ", ".join([*(f"{row} {gigabytes(ledger.rows[row])}" for row in rows), "..."])


def out_of_memory(run: Run) -> str:
    """Return what to say of a run that ran out of memory: its plan, and what to try."""
    planned = planned_memory(run)
    return (
        f"out of memory in {run.layout}, for which the plan counts "
        f"{gigabytes(planned.total_bytes)} per rank ({largest_rows(planned)}) and what kernels and "
        "fragmentation take in addition; rc-full, smaller micro-batches (data.global_batch, or "
        'more of them with mN), run.offload = "host" and more ranks with z3 need less'
    )


def gigabytes(num_bytes: int) -> str:
    """Return bytes as GB (1e9) with three digits or more."""
    size = num_bytes / 1e9
    return f"{size:,.0f} GB" if size >= 1000 else f"{size:.3g} GB"
