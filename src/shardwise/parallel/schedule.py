"""What each rank does in one step, as data: a table of actions that the executor obeys, the planner prices and tests
check. Nothing here runs anything, or imports torch.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from shardwise.config import ModelConfig

Kind = Literal["F", "B", "REDUCE"]


@dataclass(frozen=True)
class Action:
    """One thing to do. F and B are a forward and a backward of one micro-batch: of a whole stage as scheduled, of one
    `piece` of it once lowered. REDUCE starts the sum of a unit's gradient over the data ranks."""

    kind: Kind
    stage: int
    microbatch: int = 0
    piece: str = ""
    unit: str = ""

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.unit or self.microbatch}{':' + self.piece if self.piece else ''}"


@dataclass(frozen=True)
class Piece:
    """A piece of compute, and the units of state whose weights it uses."""

    name: str
    units: tuple[str, ...]


def model_pieces(config: ModelConfig) -> tuple[Piece, ...]:
    """Embedding, each block, head, in the order of the forward. A tied head uses the embedding's unit as well."""
    embed = ("embed", "positions") if config.positions == "learned" else ("embed",)
    blocks = (Piece(f"blocks.{layer}", (f"blocks.{layer}",)) for layer in range(config.num_layers))
    head = ("final", "embed") if config.tied else ("final",)
    return (Piece("embed", embed), *blocks, Piece("head", head))


def accumulate(microbatches: int) -> list[Action]:
    """The schedule of a single stage: F0 B0 F1 B1 ... so that one micro-batch's activations live at a time."""
    return [Action(kind, 0, microbatch) for microbatch in range(microbatches) for kind in ("F", "B")]


def lower(actions: Sequence[Action], pieces: Sequence[Piece]) -> list[Action]:
    """Split each action of a stage into its pieces, and sum each unit's gradient right after its last contribution."""
    units_of = {piece.name: piece.units for piece in pieces}
    split = [
        replace(action, piece=piece.name)
        for action in actions
        for piece in (pieces if action.kind == "F" else reversed(pieces))
    ]
    last = {unit: at for at, action in enumerate(split) if action.kind == "B" for unit in units_of[action.piece]}
    table = []
    for at, action in enumerate(split):
        table.append(action)
        done = [unit for unit in units_of[action.piece] if last[unit] == at]
        table += [Action("REDUCE", action.stage, action.microbatch, unit=unit) for unit in done]
    return table
