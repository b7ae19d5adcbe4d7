"""Continuous batching: sequences join and leave the batch at every step (Yu et al. 2022, Orca),
long prompts are computed in chunks next to the decodes of others (Agrawal et al. 2023,
Sarathi-Serve), and sequences that find no memory are preempted.

Scheduling order is (priority, id), lowest first; ids increase with arrival. In each step:

- every running sequence that decodes gets one token; sequences within their prompt share the rest
  of the token budget, in scheduling order;
- then the head of the queue is admitted, repeatedly, while tokens and memory are left. Requests do
  not overtake: if the head of the queue does not fit, the rest wait;
- a sequence that needs a page when none is left preempts the last running sequence. The preempted
  sequence returns to its place in the queue; it keeps its tokens, and recomputes their keys and
  values except for what is still in the prefix cache. If the sequence that needs the page is itself
  last, it waits.

The first sequence in order always makes progress (it fits alone, or it would have been refused), so
every sequence eventually finishes unless higher-priority requests keep arriving. Deterministic,
without a clock. Imports no torch.
"""

import math
from bisect import bisect_left, insort
from collections.abc import Mapping
from dataclasses import dataclass
from operator import attrgetter

from shardwise.serve.engine.pages import NO_PAGE, Pages
from shardwise.serve.engine.sequence import Batch, BatchEntry, Sequence
from shardwise.serve.request import Delta, Logprob, Request, check_length


@dataclass(frozen=True)
class Limits:
    """Limits of a step and of the queue: tokens per step, sequences that run at the same time,
    and requests that wait.
    """

    max_batch_tokens: int
    max_running: int
    max_queued: int

    def __post_init__(self) -> None:
        if self.max_running < 1 or self.max_queued < 1:
            raise ValueError("max_running and max_queued must be at least 1")
        if self.max_batch_tokens <= self.max_running:
            raise ValueError(
                f"max_batch_tokens is {self.max_batch_tokens}, which leaves nothing for prompts "
                f"next to {self.max_running} running sequences; {self.max_running + 1} works"
            )


class QueueFull(Exception):
    """Too many requests wait already; retry after `retry_after_s` seconds (HTTP 429)."""

    def __init__(self, num_waiting: int, retry_after_s: int) -> None:
        super().__init__(
            f"{num_waiting} requests are waiting already; try again in {retry_after_s} s"
        )
        self.num_waiting = num_waiting
        self.retry_after_s = retry_after_s


@dataclass(frozen=True)
class SchedulerCounters:
    """Counters of the scheduler: requests now, the rest since the start.

    Attributes:
        num_waiting: Sequences in the queue.
        num_running: Sequences in the batch.
        num_preemptions: Sequences that lost their pages.
        num_recomputed_tokens: Tokens computed again because of that.
        num_queried_tokens: Prompt tokens that were looked up in the prefix cache.
        num_hit_tokens: Those of them that were found.
    """

    num_waiting: int
    num_running: int
    num_preemptions: int
    num_recomputed_tokens: int
    num_queried_tokens: int
    num_hit_tokens: int


scheduling_order = attrgetter("order")


class Scheduler:
    """Decides which tokens of which sequences are computed next.

    Call `next_batch`, compute it, `commit`, and repeat; `add` and `finish` may come at any time
    between these. `max_len` is the most tokens that prompt and completion may have together: the
    given limit, or what all pages hold if that is less.
    """

    def __init__(self, pages: Pages, limits: Limits, max_len: int | None = None) -> None:
        self.pages = pages
        self.limits = limits
        capacity = pages.num_pages * pages.page_tokens + 1  # the last token is never computed
        limit = capacity if max_len is None else max_len
        self.max_len = limit if pages.holds(limit - 1) else capacity
        self.sequences: dict[int, Sequence] = {}
        self.waiting: list[Sequence] = []  # both in scheduling order
        self.running: list[Sequence] = []
        self.next_id = 0
        self.in_flight: Batch | None = None
        self.num_preemptions = 0
        self.num_recomputed_tokens = 0
        self.num_queried_tokens = 0
        self.num_hit_tokens = 0

    def counters(self) -> SchedulerCounters:
        return SchedulerCounters(
            len(self.waiting),
            len(self.running),
            self.num_preemptions,
            self.num_recomputed_tokens,
            self.num_queried_tokens,
            self.num_hit_tokens,
        )

    # -- requests come and go

    def check(self, request: Request) -> None:
        """Raise ValueError, with what would work, for a request that could never finish."""
        check_length(len(request.tokens), request.params, self.max_len)
        if request.params.n > self.limits.max_running:
            raise ValueError(
                f"n is {request.params.n}, but only {self.limits.max_running} sequences run at the "
                "same time"
            )

    def add(self, sequence: Sequence, tokens_per_s: float = 0.0) -> None:
        """Queue the first sample of a request, with its siblings.

        `tokens_per_s` is the measured rate (0 if unknown), from which QueueFull takes its retry
        time. Raises QueueFull, and ValueError as `check` does.
        """
        self.check(sequence.request)
        assert sequence.id >= self.next_id
        if len(self.waiting) >= self.limits.max_queued:
            raise QueueFull(len(self.waiting), self.retry_after_s(tokens_per_s))
        self.next_id = sequence.id + sequence.num_samples
        self.sequences[sequence.id] = sequence
        insort(self.waiting, sequence, key=scheduling_order)

    def retry_after_s(self, tokens_per_s: float) -> int:
        """Return the expected time to serve one request, in seconds: its average share of all the
        tokens that are still to be computed, at least 1.
        """
        if tokens_per_s <= 0:
            return 1
        num_tokens = sum(sequence.num_tokens_left for sequence in self.sequences.values())
        return max(1, math.ceil(num_tokens / len(self.sequences) / tokens_per_s))

    def finish(self, id: int) -> None:
        """Drop a sequence that has ended or was aborted. One that is not there is ignored."""
        sequence = self.sequences.pop(id, None)
        if sequence is not None:
            remove_sequence(self.running if sequence.pages else self.waiting, sequence)
            self.pages.release(sequence.pages)

    # -- one step

    def next_batch(self) -> Batch | None:
        """Return what to compute next, or None if there is nothing to do."""
        assert self.in_flight is None
        decodes: list[BatchEntry] = []
        chunks: list[BatchEntry] = []
        copies: list[tuple[int, int]] = []
        num_decodes = sum(sequence.num_pending == 1 for sequence in self.running)
        budget = self.limits.max_batch_tokens - num_decodes
        number = 0
        while number < len(self.running):  # later ones may be preempted meanwhile
            sequence = self.running[number]
            number += 1
            if sequence.num_pending == 1:
                if self.make_space(sequence, 1):
                    decodes.append(self.entry(sequence, 1, copies))
            elif count := self.make_space(sequence, min(budget, sequence.num_pending)):
                chunks.append(self.entry(sequence, count, copies))
                budget -= count
        while (admitted := self.admit(budget)) is not None:
            space = self.pages.space(admitted.pages, admitted.num_computed)
            count = min(budget, admitted.num_pending, space)
            (chunks if count > 1 else decodes).append(self.entry(admitted, count, copies))
            budget -= count
        assert decodes or chunks or not self.sequences
        self.in_flight = Batch((*decodes, *chunks), tuple(copies)) if self.sequences else None
        return self.in_flight

    def make_space(self, sequence: Sequence, num_tokens: int) -> int:
        """Return how many of the next `num_tokens` tokens of a running sequence have space,
        preempting those behind it if there is no other way.

        A chunk has at least two tokens, because entries with prompt log-probabilities overlap by
        one.
        """
        least = min(2, sequence.num_pending)
        if num_tokens < least:
            return 0
        while (space := self.pages.space(sequence.pages, sequence.num_computed)) < least:
            if self.running[-1] is sequence:
                return 0
            self.preempt(self.running.pop())
        return min(num_tokens, space)

    def admit(self, budget: int) -> Sequence | None:
        """Move the head of the queue to the running sequences.

        It must be able to compute two tokens now, and memory must hold all its tokens and a spare
        page for each running sequence. Without spare pages it would soon be preempted: on a trace
        like ShareGPT, 28 % of all tokens were recomputed without them and 9 % with them.
        """
        if budget < 2 or not self.waiting:
            return None
        sequence = self.waiting[0]
        num_running = sum(each.num_samples for each in self.running)
        has_slots = num_running + sequence.num_samples <= self.limits.max_running
        if not has_slots or self.pages.num_available <= num_running:
            return None
        needs_all = sequence.num_prompt_logprobs is not None
        cached = [] if needs_all else self.pages.begin(sequence.tokens, sequence.request.salt)
        num_held = len(cached) - cached.count(NO_PAGE)
        num_new = self.pages.num_needed(len(sequence.tokens)) - num_held
        if self.pages.num_available < num_new + num_running:
            self.pages.release(cached)
            return None
        del self.waiting[0]
        insort(self.running, sequence, key=scheduling_order)
        sequence.pages = cached
        sequence.num_computed = len(cached) * self.pages.page_tokens
        if not needs_all and not sequence.num_ever_computed:
            sequence.num_cached_tokens = sequence.num_computed
            self.num_queried_tokens += sequence.num_prompt
            self.num_hit_tokens += sequence.num_cached_tokens
        return sequence

    def entry(self, sequence: Sequence, count: int, copies: list[tuple[int, int]]) -> BatchEntry:
        """Return the next `count` tokens of a sequence, for which there is space."""
        start = sequence.num_computed
        stop = start + count
        copies += self.pages.grow(sequence.pages, start, stop)
        num_samples = sequence.num_samples if stop == len(sequence.tokens) else 0
        tokens = tuple(sequence.tokens[start:stop])
        pages = tuple(sequence.pages)
        if pages[0] == NO_PAGE:
            pages = tuple(max(page, 0) for page in pages)  # kernels do not read behind the window
        num_logprobs = sequence.num_prompt_logprobs
        return BatchEntry(sequence.id, tokens, start, pages, num_samples, num_logprobs)

    def preempt(self, sequence: Sequence) -> None:
        """Return a sequence that is no longer running to the queue and release its pages."""
        self.pages.release(sequence.pages)
        sequence.num_computed = 0
        insort(self.waiting, sequence, key=scheduling_order)
        self.num_preemptions += 1

    def commit(
        self,
        batch: Batch,
        tokens: Mapping[int, int | None],
        logprobs: Mapping[int, Logprob] | None = None,
    ) -> list[Delta]:
        """Append the tokens that were sampled after a batch, and finish sequences that ended.

        tokens: by sequence id, for each sample of the entries that sample. Sequences that were
        finished or aborted in the meantime are ignored. Returns the delta of each
        sequence.
        """
        assert batch is self.in_flight
        self.in_flight = None
        deltas: list[Delta] = []
        for entry in batch.entries:
            sequence = self.sequences.get(entry.id)
            if sequence is None:
                continue
            self.advance(sequence, entry)
            if entry.num_samples:
                for sample in self.fork(sequence):
                    logprob = None if logprobs is None else logprobs.get(sample.id)
                    deltas.append(sample.append(tokens[sample.id], logprob))
                    if sample.finish_reason is not None:
                        self.finish(sample.id)
        return deltas

    def advance(self, sequence: Sequence, entry: BatchEntry) -> None:
        """Record that the keys and values of an entry's tokens have been computed."""
        start = entry.start
        stop = start + len(entry.tokens)
        assert start == sequence.num_computed
        needs_logprobs = entry.num_prompt_logprobs is not None
        overlap = 1 if needs_logprobs and start > 0 else 0
        num_again = min(stop, sequence.num_ever_computed) - start - overlap
        self.num_recomputed_tokens += max(0, num_again)
        sequence.num_ever_computed = max(stop, sequence.num_ever_computed)
        if needs_logprobs and not entry.num_samples:
            stop -= 1  # computed once more, for the log-probability of the token after it
        self.pages.commit(sequence.pages, sequence.tokens, start, stop, sequence.request.salt)
        sequence.num_computed = stop

    def fork(self, sequence: Sequence) -> tuple[Sequence, ...]:
        """Return all samples of a request whose prompt has just been computed; its siblings start
        to run, with the same pages.
        """
        samples = sequence.samples
        for sibling in sequence.siblings:
            sibling.num_computed = sequence.num_computed
            sibling.num_ever_computed = sequence.num_computed
            sibling.pages = self.pages.fork(sequence.pages)
            self.sequences[sibling.id] = sibling
            insort(self.running, sibling, key=scheduling_order)
        sequence.siblings = ()
        return samples

    def audit(self) -> None:
        """Assert that the scheduler is consistent with itself and with the pages."""
        key = scheduling_order
        assert sorted([*self.waiting, *self.running], key=key) == sorted(
            self.sequences.values(), key=key
        )
        assert self.running == sorted(self.running, key=key)
        assert self.waiting == sorted(self.waiting, key=key)
        assert sum(sequence.num_samples for sequence in self.running) <= self.limits.max_running
        assert all(not sequence.pages and not sequence.num_computed for sequence in self.waiting)
        for sequence in self.running:
            assert sequence.num_pending > 0
            assert sequence.num_computed <= len(sequence.pages) * self.pages.page_tokens
        self.pages.audit(sequence.pages for sequence in self.running)


def remove_sequence(queue: list[Sequence], sequence: Sequence) -> None:
    """Remove a sequence from a list in scheduling order."""
    number = bisect_left(queue, sequence.order, key=scheduling_order)
    assert queue[number] is sequence
    del queue[number]
