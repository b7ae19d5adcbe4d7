"""Zero-bubble schedules: a backward is split into I, the gradient of the input, which the previous
stage waits for, and W, the gradient of the weights, which nothing waits for, so that W can fill
what would be a bubble.

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
from shardwise.parallel.pipeline.table import Costs, Table, held_forwards, table_span

Half = Literal["F", "I", "W"]
MOST_TRIED = 1_000_000
"""Limit of the actions that a search places, over all orders that it tries: a few seconds."""


def zb_h1(stage: int, p: int, m: int) -> list[Action]:
    """Return the schedule with the memory of 1F1B, and a third of its bubble where F, I and W take
    equally long: stage i delays W by i micro-batches."""
    return alternate_halves(stage, m, warmup=p - stage, delay=stage)


def zb_h2(stage: int, p: int, m: int) -> list[Action]:
    """Return the schedule with almost twice the memory of 1F1B, and no bubble where F, I and W take
    equally long: more forwards fill the time before the first I, and as many more Ws the time after
    the last one. Needs 2p - 1 micro-batches."""
    return alternate_halves(stage, m, warmup=2 * (p - stage) - 1, delay=2 * stage)


def alternate_halves(stage: int, m: int, warmup: int, delay: int) -> list[Action]:
    """Return `warmup` forwards, then I, W and F in turn, where W is `delay` micro-batches behind I;
    then the remaining Ws."""
    actions = [Action("F", stage, microbatch) for microbatch in range(min(warmup, m))]
    for turn in range(m):
        actions.append(Action("I", stage, turn))
        if turn >= delay:
            actions.append(Action("W", stage, turn - delay))
        if turn + warmup < m:
            actions.append(Action("F", stage, turn + warmup))
    return actions + [Action("W", stage, microbatch) for microbatch in range(max(0, m - delay), m)]


# -- zb-auto
# ------------------------------------------------------------------------------------------------


class Policy(NamedTuple):
    """Rules by which a rank chooses its next action.

    Attributes:
        alternate: after an I, a forward has priority
        delay: the share of a forward by which it may delay an I
        reach: how many forwards run ahead of their Is; 0: as many as in 1F1B, 1: as many as fill
            the time until the first gradient comes back
    """

    alternate: bool
    delay: float
    reach: float


POLICIES = [
    Policy(*each)
    for each in product((True, False), (0.5, 1, 0, 0.8), (1, 0, 0.5, 0.9, 1.2, 0.25, 0.75))
]


class Problem(NamedTuple):
    """The input of a search. `limit` is the number of forwards that a rank may hold; one
    counts `mem_w` between its I and its W."""

    p: int
    m: int
    costs: Costs
    limit: float
    mem_w: float

    @property
    def slack(self) -> float:
        """Differences of time below this are rounding."""
        return 1e-9 * self.costs.microbatch

    def most_ahead(self, stage: int, reach: float) -> int:
        """Return how many forwards a stage may be ahead of its Is."""
        later = self.p - 1 - stage
        # The time until the first gradient arrives, beyond that of 1F1B.
        wait = reach * later * (self.costs.tb + 2 * self.costs.tc)
        if wait > self.m * self.costs.tf:
            return self.m
        return min(self.m, later + 1 + (math.ceil(wait / self.costs.tf - 1e-9) if wait else 0))


@dataclass(slots=True)
class Progress:
    """A rank during a search.

    Attributes:
        most_ahead: how many forwards may be ahead of their Is
        activations, gradients: arrival times of the inputs of F and I
        done: the actions so far
        forwards, inputs, weights: numbers of F, I and W done
        turn: the last F or I
        free_at: when the last action ends
        idle: time without work between its actions
    """

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
        """Return when the input of the next I arrives; infinity if unknown."""
        return self.gradients[self.inputs] if self.inputs < len(self.gradients) else math.inf

    def next_forward(self, limit: float, mem_w: float) -> float:
        """Return when the input of the next F arrives; infinity if unknown, or if F would exceed
        the limit."""
        ahead = self.forwards - self.inputs
        forwards_held = ahead + (self.inputs - self.weights) * mem_w
        if (
            ahead >= self.most_ahead
            or forwards_held + 1 > limit
            or self.forwards >= len(self.activations)
        ):
            return math.inf
        return self.activations[self.forwards]

    def take(self, half: Half, now: float, seconds: float) -> None:
        """Run an action from `now` on."""
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
    """Return the shortest order that a search finds in which no rank holds more than `limit`
    forwards: zb-h1 or zb-h2 where they fit, or the result of one of many policies by which ranks
    choose their actions one after another.

    This follows the heuristic of the paper (section 3.1): forwards until the memory is full or a
    gradient arrives, then I and F in turn, and W in gaps and where its memory is needed. Raises
    ValueError for a limit that no order meets.
    """
    if limit < 1 - 1e-9:
        raise ValueError(
            f"a memory limit of {limit / p:g} times {p} stages is {limit:g} forwards, but every "
            f"order needs at least 1; {math.ceil(1000 / p) / 1000:g} works"
        )
    problem = Problem(p, m, costs, limit + 1e-9, mem_w)
    best, least_idle = best_known(problem)
    tried = 0
    for policy in POLICIES:
        if tried > MOST_TRIED or least_idle <= problem.slack:
            break
        ranks = try_policy(problem, policy, least_idle - problem.slack)
        tried += sum(len(rank.done) for rank in ranks)
        if (idle := max(rank.idle for rank in ranks)) < least_idle - problem.slack:
            best = [numbered_actions(stage, rank.done) for stage, rank in enumerate(ranks)]
            least_idle = idle
    return best


def best_known(problem: Problem) -> tuple[list[list[Action]], float]:
    """Return the shorter of zb-h1 and zb-h2 within the limit, and its bubble: the idle time in the
    longest span of a rank."""
    p = problem.p
    m = problem.m
    best: tuple[list[list[Action]], float] = ([], math.inf)
    for schedule in (zb_h1, zb_h2) if m >= 2 * p - 1 else (zb_h1,):
        ranks = [schedule(stage, p, m) for stage in range(p)]
        most_held = max(max(held_forwards(actions, problem.mem_w)) for actions in ranks)
        if most_held <= problem.limit:
            span = table_span(Table(tuple(map(tuple, ranks)), tuple(range(p)), m), problem.costs)
            best = min(best, (ranks, span - m * problem.costs.microbatch), key=lambda each: each[1])
    return best


def try_policy(problem: Problem, policy: Policy, idle_limit: float) -> list[Progress]:
    """Return what every rank does under a policy, up to the end, or until one has been idle for
    `idle_limit` between its actions. `agenda` is a clock of events: a rank becomes free or receives
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
            receiver = ranks[neighbour]
            (receiver.activations if half == "F" else receiver.gradients).append(arrival)
            heapq.heappush(agenda, (arrival, neighbour))
    completed = all(len(rank.done) == 3 * m for rank in ranks)
    assert most_idle >= idle_limit or completed, "a rank stopped before its last action"
    return ranks


def choose(
    rank: Progress, now: float, most_idle: float, problem: Problem, policy: Policy
) -> tuple[Half | None, float]:
    """Return the action that a free rank takes now; or None, and the time when to decide again.

    A rank that waits, rather than start a W that would delay an F or I, does no harm until it has
    been idle for longer than any other rank, since only the longest span counts.
    """
    soon = now + problem.slack
    forward_at = rank.next_forward(problem.limit, problem.mem_w)
    input_at = rank.next_input()
    forward_first = policy.alternate and rank.turn == "I"
    if input_at <= soon and not (forward_first and forward_at <= soon):
        return "I", now
    least_gap = (1 - policy.delay) * problem.costs.tf - problem.slack
    if not forward_first and input_at - max(now, forward_at) < least_gap:
        forward_at = math.inf  # a forward would delay the I for too long
    if forward_at <= soon:
        return "F", now
    next_at = min(forward_at, input_at)
    if rank.weights < rank.inputs:
        idle = rank.idle + next_at - rank.free_at
        if next_at - now >= problem.costs.tw - problem.slack or idle > most_idle:
            return "W", now
    return None, next_at


def numbered_actions(stage: int, done: Sequence[Half]) -> list[Action]:
    """Return actions with micro-batches: each F, I and W takes the next one."""
    following = {"F": 0, "I": 0, "W": 0}
    actions = []
    for half in done:
        actions.append(Action(half, stage, following[half]))
        following[half] += 1
    return actions
