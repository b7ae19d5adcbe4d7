"""The program of one rank: what `apply` builds and the training loop runs."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from shardwise.config import ModelConfig
from shardwise.model.batch import MicroBatch
from shardwise.parallel.pipeline.actions import Action
from shardwise.parallel.state_store import StateStore
from shardwise.params import ParamSpec


class Executor(Protocol):
    """Runs a table: `Pipeline`, or the executor of FSDP."""

    def execute(self, action: Action, microbatches: Sequence[MicroBatch], scale: float) -> None: ...
    def finish(self) -> float: ...
    def evaluate(self, table: Sequence[Action], microbatch: MicroBatch) -> float: ...


@dataclass(frozen=True)
class Program:
    """The program of one rank.

    Attributes:
        config: the model.
        specs: all its parameters.
        store: the training states of this rank.
        pipeline: the executor of this rank's stages.
        table: the actions of one training step.
        evaluation: the actions of one forward.
        kernels: the name of the kernels, chosen by device and precision.
    """

    config: ModelConfig
    specs: tuple[ParamSpec, ...]
    store: StateStore
    pipeline: Executor
    table: list[Action]
    evaluation: list[Action]
    kernels: str
