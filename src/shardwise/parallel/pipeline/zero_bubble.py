"""Zero-bubble schedules: a backward is split into I, the gradient of its input, for which the stage
before waits, and W, that of its weights, for which nobody does, so that W can fill what would be a
bubble.

Qi, Wan, Huang and Lin: Zero Bubble Pipeline Parallelism (arXiv 2401.10241), which writes B for I.
Imports no torch.
"""

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Literal, NamedTuple

from shardwise.parallel.pipeline.actions import Action
from shardwise.parallel.pipeline.table import Costs, Table, held, table_span

Half = Literal["F", "I", "W"]
MOST_TRIED = 1_000_000
"""Actions that a search places, over all the orders it tries: a few seconds."""


def zb_h1(stage: int, p: int, m: int) -> list[Action]:
    """1F1B's memory, and a third of its bubble where F, I and W take equally long: stage i puts i
    Ws off."""
    return split_in_turns(stage, m, warmup=p - stage, put_off=stage)


def zb_h2(stage: int, p: int, m: int) -> list[Action]:
    """Almost twice the memory, and no bubble where F, I and W take equally long: more forwards fill
    the time before the first I, and as many more Ws the time after the last one. Needs 2p - 1
    micro-batches."""
    return split_in_turns(stage, m, warmup=2 * (p - stage) - 1, put_off=2 * stage)


def split_in_turns(stage: int, m: int, warmup: int, put_off: int) -> list[Action]:
    """`warmup` forwards, then I, W and F in turns, each W of the I of `put_off` turns before; then
    the Ws left over."""
    actions = [Action("F", stage, microbatch) for microbatch in range(min(warmup, m))]
    for turn in range(m):
        actions.append(Action("I", stage, turn))
        if turn >= put_off:
            actions.append(Action("W", stage, turn - put_off))
        if turn + warmup < m:
            actions.append(Action("F", stage, turn + warmup))
    return actions + [
        Action("W", stage, microbatch) for microbatch in range(max(0, m - put_off), m)
    ]


# -- zb-auto
# ------------------------------------------------------------------------------------------------


class Policy(NamedTuple):
    """What a rank does where it has a choice.

    `alternate`: after an I, a forward goes first. `delay`: a forward may hold an I up by at most
    this part of itself. `reach`: how many forwards a rank takes ahead of their Is. 0: as many as
    1F1B, 1: as many as fill the time until the first gradient comes back.
    """

    alternate: bool
    delay: float
    reach: float


POLICIES = [
    Policy(*each)
    for each in product((True, False), (0.5, 1, 0, 0.8), (1, 0, 0.5, 0.9, 1.2, 0.25, 0.75))
]


class Problem(NamedTuple):
    """`limit` in forwards that a rank may hold, of which one counts `mem_w` between its I and its
    W."""

    p: int
    m: int
    costs: Costs
    limit: float
    mem_w: float

    @property
    def slack(self) -> float:
        """Times that differ by less are the same, but for rounding."""
        return 1e-9 * self.costs.microbatch

    def most_ahead(self, stage: int, reach: float) -> int:
        """Forwards that a stage may be ahead of its Is."""
        later = self.p - 1 - stage
        back = (
            reach * later * (self.costs.tb + 2 * self.costs.tc)
        )  # until the first gradient is there, beyond 1F1B's
        if back > self.m * self.costs.tf:
            return self.m
        return min(self.m, later + 1 + (math.ceil(back / self.costs.tf - 1e-9) if back else 0))


@dataclass(slots=True)
class Progress:
    """One rank in the middle of a search: what it has done, and when the inputs of its next F and I
    are there."""

    most_ahead: int
    activations: list[float]
    gradients: list[float] = field(default_factory=list)
    done: list[Half] = field(default_factory=list)
    forwards: int = 0
    inputs: int = 0
    weights: int = 0
    turn: Half = "I"
    free_at: float = 0.0
    idle: float = 0.0

    def next_input(self) -> float:
        """When the next I can start; infinity while nobody can tell."""
        return self.gradients[self.inputs] if self.inputs < len(self.gradients) else math.inf

    def next_forward(self, limit: float, mem_w: float) -> float:
        """When the next F can start; infinity while there is no room for it, too."""
        ahead = self.forwards - self.inputs
        held = ahead + (self.inputs - self.weights) * mem_w
        if ahead >= self.most_ahead or held + 1 > limit or self.forwards >= len(self.activations):
            return math.inf
        return self.activations[self.forwards]

    def take(self, half: Half, now: float, seconds: float) -> None:
        if self.done:
            self.idle += now - self.free_at
        self.free_at = now + seconds
        self.done.append(half)
        if half == "W":
            self.weights += 1
            return
        self.turn = half
        if half == "F":
            self.forwards += 1
        else:
            self.inputs += 1


def zb_auto(p: int, m: int, costs: Costs, limit: float, mem_w: float) -> list[list[Action]]:
    """The shortest order that a search finds in which no rank holds more than `limit` forwards:
    zb-h1 or zb-h2 where they fit, or what comes about when ranks take one action after another as
    `choose` says, under many policies.

    In the spirit of the paper's heuristic (section 3.1): forwards until the memory is full or a
    gradient is there, then I and F in turns, and W in gaps and where its memory is needed. Raises
    ValueError for a limit that no order meets.
    """
    if limit < 1 - 1e-9:
        raise ValueError(
            f"a memory limit of {limit / p:g} times {p} stages is {limit:g} forwards; every order needs 1 at least, so "
            f"{math.ceil(1000 / p) / 1000:g} works"
        )
    problem = Problem(p, m, costs, limit + 1e-9, mem_w)
    best, least_idle = handmade(problem)
    tried = 0
    for policy in POLICIES:
        if tried > MOST_TRIED or least_idle <= problem.slack:
            break
        ranks = try_policy(problem, policy, least_idle - problem.slack)
        tried += sum(len(rank.done) for rank in ranks)
        if (idle := max(rank.idle for rank in ranks)) < least_idle - problem.slack:
            best = [written_out(stage, rank.done) for stage, rank in enumerate(ranks)]
            least_idle = idle
    return best


def handmade(problem: Problem) -> tuple[list[list[Action]], float]:
    """The shorter of zb-h1 and zb-h2 within the limit, and for how long its longest rank is
    idle."""
    p = problem.p
    m = problem.m
    best: tuple[list[list[Action]], float] = ([], math.inf)
    for schedule in (zb_h1, zb_h2) if m >= 2 * p - 1 else (zb_h1,):
        ranks = [schedule(stage, p, m) for stage in range(p)]
        if max(max(held(actions, problem.mem_w)) for actions in ranks) <= problem.limit:
            span = table_span(Table(tuple(map(tuple, ranks)), tuple(range(p)), m), problem.costs)
            best = min(best, (ranks, span - m * problem.costs.microbatch), key=lambda each: each[1])
    return best


def try_policy(problem: Problem, policy: Policy, idle_limit: float) -> list[Progress]:
    """What every rank does when all follow a policy: up to the end, or until one has been idle for
    `idle_limit` between its actions. `agenda` is the clock: it holds when a rank is free, or gets
    an input."""
    p = problem.p
    m = problem.m
    costs = problem.costs
    seconds: dict[Half, float] = {"F": costs.tf, "I": costs.tb, "W": costs.tw}
    ranks = [Progress(problem.most_ahead(stage, policy.reach), []) for stage in range(p)]
    ranks[0].activations = [0.0] * m
    agenda = [(0.0, 0)]
    most_idle = 0.0
    while agenda and most_idle < idle_limit:
        now, stage = heapq.heappop(agenda)
        rank = ranks[stage]
        if now < rank.free_at:
            continue
        half, later = choose(rank, now, most_idle, problem, policy)
        if half is None:
            if later < math.inf:
                heapq.heappush(agenda, (later, stage))
            continue
        rank.take(half, now, seconds[half])
        most_idle = max(most_idle, rank.idle)
        heapq.heappush(agenda, (rank.free_at, stage))
        if half == "F" and stage == p - 1:
            rank.gradients.append(rank.free_at)
        elif (half == "F" and stage < p - 1) or (half == "I" and stage > 0):
            neighbour = stage + (1 if half == "F" else -1)
            arrival = rank.free_at + costs.tc
            (ranks[neighbour].activations if half == "F" else ranks[neighbour].gradients).append(
                arrival
            )
            heapq.heappush(agenda, (arrival, neighbour))
    assert most_idle >= idle_limit or all(len(rank.done) == 3 * m for rank in ranks), (
        "no rank stops before its end"
    )
    return ranks


def choose(
    rank: Progress, now: float, most_idle: float, problem: Problem, policy: Policy
) -> tuple[Half | None, float]:
    """What a rank that is free does now; or nothing, until when. A rank that waits rather than
    start a W that would hold an F or I up does no harm until it has been idle for longer than any
    other, since the longest span counts."""
    soon = now + problem.slack
    forward_at = rank.next_forward(problem.limit, problem.mem_w)
    input_at = rank.next_input()
    forward_first = policy.alternate and rank.turn == "I"
    if input_at <= soon and not (forward_first and forward_at <= soon):
        return "I", now
    if (
        not forward_first
        and input_at - max(now, forward_at) < (1 - policy.delay) * problem.costs.tf - problem.slack
    ):
        forward_at = math.inf  # it would hold the I up for too long
    if forward_at <= soon:
        return "F", now
    coming = min(forward_at, input_at)
    if rank.weights < rank.inputs:
        idle = rank.idle + coming - rank.free_at
        if coming - now >= problem.costs.tw - problem.slack or idle > most_idle:
            return "W", now
    return None, coming


def written_out(stage: int, done: Sequence[Half]) -> list[Action]:
    """Each F, I and W is of the next micro-batch."""
    following = {"F": 0, "I": 0, "W": 0}
    actions = []
    for half in done:
        actions.append(Action(half, stage, following[half]))
        following[half] += 1
    return actions
