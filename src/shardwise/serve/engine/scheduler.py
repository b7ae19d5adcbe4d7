"""Continuous batching: sequences join and leave at every step (Yu et al. 2022, Orca), long prompts
are run in chunks beside those that already generate (Agrawal et al. 2023, Sarathi), and who finds
no memory gives way.

Everything goes by a request's place: (priority, id), lower first, ids in order of arrival. In each
step

- every running sequence that generates has one token run, and those still at their prompts share what is left of the
  budget of tokens, in order of place;
- then the first of the queue is taken in, again and again, while there are tokens and memory left. Nobody overtakes:
  one that does not fit waits, and so do all behind it;
- who needs a page when none is left takes those of the last in order, which goes back to its place in the queue; it
  keeps its tokens and computes their keys and values again, but for what it still finds. The last itself just waits.

So the first in order goes on in every step. It fits alone, or it would have been refused; so it
ends, and with it each after it, unless requests of higher priority never cease. Pure,
deterministic, no clock; imports no torch.
"""

import math
from bisect import bisect_left, insort
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter

from shardwise.serve.engine.batch import Batch, Part
from shardwise.serve.engine.pages import Pages
from shardwise.serve.engine.sequence import Request


@dataclass(frozen=True)
class Limits:
    """What a step and the queue may hold: tokens run in one step, sequences at the same time,
    requests that wait."""

    max_batch_tokens: int = 2048
    max_running: int = 256
    max_queued: int = 1024

    def __post_init__(self) -> None:
        if self.max_running < 1 or self.max_queued < 1:
            raise ValueError("max_running and max_queued must be at least 1")
        if self.max_batch_tokens <= self.max_running:
            raise ValueError(
                f"{self.max_batch_tokens} tokens a step leave nothing for prompts beside {self.max_running} running "
                f"sequences; max_batch_tokens must be at least {self.max_running + 1}"
            )


class QueueFull(Exception):
    """Too many requests wait already; one is worth trying again after `retry_after_s` seconds (HTTP
    429)."""

    def __init__(self, num_waiting: int, retry_after_s: int) -> None:
        super().__init__(
            f"{num_waiting} requests are waiting already; try again in {retry_after_s} s"
        )
        self.num_waiting = num_waiting
        self.retry_after_s = retry_after_s


@dataclass(frozen=True, slots=True)
class Picked:
    """A sequence has one more token; `last` if that makes max_tokens, so that it has ended."""

    id: int
    token: int
    last: bool


@dataclass(frozen=True)
class Counters:
    """Requests now, and since the start: preemptions, tokens run again because of them, tokens of
    prompts that were looked up in the cache, and those of them that were found."""

    num_waiting: int
    num_running: int
    num_preemptions: int
    num_recomputed_tokens: int
    num_asked_tokens: int
    num_found_tokens: int


place = attrgetter("place")


class Scheduler:
    """Which tokens of which sequences are run next: `next_batch`, run it, `commit`, and again.
    `add`, `finish` and `abort` may come at any time between these."""

    def __init__(self, pages: Pages, limits: Limits) -> None:
        self.pages = pages
        self.limits = limits
        self.requests: dict[int, Request] = {}
        self.waiting: list[Request] = []  # both in order of place
        self.running: list[Request] = []
        self.next_id = 0
        self.in_flight: Batch | None = None
        self.num_preemptions = self.num_recomputed_tokens = self.num_asked_tokens = (
            self.num_found_tokens
        ) = 0

    def counters(self) -> Counters:
        return Counters(
            len(self.waiting),
            len(self.running),
            self.num_preemptions,
            self.num_recomputed_tokens,
            self.num_asked_tokens,
            self.num_found_tokens,
        )

    def add(self, request: Request, tokens_per_s: float = 0.0) -> None:
        """Queue a request. `tokens_per_s`, as measured over the last steps (0: not known), tells
        how long to wait where the queue is full. Raises QueueFull, and ValueError for a request
        that can never be served."""
        check(request, self.pages, self.limits)
        assert request.id >= self.next_id
        if len(self.waiting) >= self.limits.max_queued:
            raise QueueFull(len(self.waiting), self.retry_after_s(tokens_per_s))
        self.next_id = request.ids.stop
        self.requests[request.id] = request
        insort(self.waiting, request, key=place)

    def retry_after_s(self, tokens_per_s: float) -> int:
        """When one request, on average, will have been served: its share of all the tokens still to
        be run."""
        num_tokens = sum(request.num_tokens_left for request in self.requests.values())
        return (
            max(1, math.ceil(num_tokens / len(self.requests) / tokens_per_s))
            if tokens_per_s > 0
            else 1
        )

    def finish(self, id: int) -> None:
        """End a sequence: it has picked an end token or met a stop string. One that has ended
        already is ignored."""
        request = self.requests.pop(id, None)
        if request is not None:
            remove(self.running if request.pages else self.waiting, request)
            self.pages.release(request.pages)

    def abort(self, request: Request) -> None:
        """End all sequences of a request: its client has left."""
        for id in request.ids:
            self.finish(id)

    def next_batch(self) -> Batch | None:
        """What to run next; None if there is nothing to do."""
        assert self.in_flight is None
        ones: list[Part] = []
        chunks: list[Part] = []
        copies: list[tuple[int, int]] = []
        left = self.limits.max_batch_tokens - sum(
            request.num_pending == 1 for request in self.running
        )
        number = 0
        while number < len(self.running):  # who comes later may have to leave meanwhile
            request = self.running[number]
            number += 1
            if request.num_pending == 1:
                if self.make_room(request, 1):
                    ones.append(self.part(request, 1, copies))
            elif count := self.make_room(request, min(left, request.num_pending)):
                chunks.append(self.part(request, count, copies))
                left -= count
        while (admitted := self.admit(left)) is not None:
            count = min(left, admitted.num_pending)
            (chunks if count > 1 else ones).append(self.part(admitted, count, copies))
            left -= count
        assert ones or chunks or not self.requests
        self.in_flight = Batch((*ones, *chunks), tuple(copies)) if self.requests else None
        return self.in_flight

    def make_room(self, request: Request, wanted: int) -> int:
        """How many of the tokens that a running request wants to run can be written, after those
        behind it have been preempted if there was no other way. Chunks of one token are not made:
        parts with scores overlap by one."""
        least = min(2, request.num_pending)
        if wanted < least:
            return 0
        while (room := self.pages.room(request.pages, request.num_computed)) < least:
            if self.running[-1] is request:
                return 0
            self.preempt(self.running.pop())
        return min(wanted, room)

    def admit(self, left: int) -> Request | None:
        """Take in the first of the queue, if it may run two tokens now and memory holds all that it
        has, beside a spare page for each running sequence: without these, it would soon be
        preempted (of a trace as in ShareGPT, 28 % of all tokens were run again then, and with them
        9 %)."""
        if left < 2 or not self.waiting:
            return None
        request = self.waiting[0]
        num_running = sum(each.num_sequences for each in self.running)
        if (
            num_running + request.num_sequences > self.limits.max_running
            or self.pages.num_available <= num_running
        ):
            return None
        found = [] if request.scoring else self.pages.begin(request.tokens, request.salt)
        if (
            self.pages.num_available
            < self.pages.num_needed(len(request.tokens)) - len(found) + num_running
        ):
            self.pages.release(found)
            return None
        del self.waiting[0]
        insort(self.running, request, key=place)
        request.pages = found
        request.num_computed = len(found) * self.pages.page_tokens
        if not request.scoring and not request.num_ever_run:
            request.num_found = request.num_computed
            self.num_asked_tokens += request.num_prompt
            self.num_found_tokens += request.num_found
        return request

    def part(self, request: Request, count: int, copies: list[tuple[int, int]]) -> Part:
        """The next `count` tokens of a request, for which there is room."""
        start = request.num_computed
        stop = request.num_computed + count
        copies += self.pages.grow(request.pages, start, stop)
        samples = request.num_sequences if stop == len(request.tokens) else 0
        tokens = tuple(request.tokens[start:stop])
        scores = request.scores if request.scoring else None
        return Part(request.id, tokens, start, tuple(request.pages), samples, scores)

    def preempt(self, request: Request) -> None:
        """Back to the queue with a request that is no longer among the running; what it computed
        may be evicted."""
        self.pages.release(request.pages)
        request.num_computed = 0
        insort(self.waiting, request, key=place)
        self.num_preemptions += 1

    def commit(self, batch: Batch, picked: Mapping[int, Sequence[int]]) -> list[Picked]:
        """The batch was run. `picked` holds, for the id of each part with samples, that many next
        tokens; of parts that were finished or aborted meanwhile nothing is wanted. Returns the new
        token of each sequence, forks included."""
        assert batch is self.in_flight
        self.in_flight = None
        happened: list[Picked] = []
        for part in batch.parts:
            request = self.requests.get(part.id)
            if request is None:
                continue
            self.advance(request, part)
            if part.samples:
                for sequence, token in zip(self.fork(request), picked[part.id], strict=True):
                    sequence.tokens.append(token)
                    last = len(sequence.tokens) == sequence.num_prompt + sequence.max_tokens
                    happened.append(Picked(sequence.id, token, last))
                    if last:
                        self.finish(sequence.id)
        return happened

    def advance(self, request: Request, part: Part) -> None:
        """The tokens of a part have their keys and values now."""
        start = part.start
        stop = part.start + len(part.tokens)
        assert start == request.num_computed
        overlap = 1 if part.scores is not None and start > 0 else 0
        self.num_recomputed_tokens += max(0, min(stop, request.num_ever_run) - start - overlap)
        request.num_ever_run = max(stop, request.num_ever_run)
        if part.scores is not None and not part.samples:
            stop -= 1  # is run once more, to score the token after it
        self.pages.commit(request.pages, request.tokens, start, stop, request.salt)
        request.num_computed = stop

    def fork(self, request: Request) -> list[Request]:
        """The sequences of a request whose prompt has just been run, the first being itself; they
        share its pages."""
        sequences = [request]
        for id in request.ids[1 : request.num_sequences]:
            sequence = Request(
                id, list(request.tokens), request.max_tokens, request.priority, request.salt
            )
            sequence.num_computed = sequence.num_ever_run = request.num_computed
            sequence.pages = self.pages.fork(request.pages)
            self.requests[id] = sequence
            insort(self.running, sequence, key=place)
            sequences.append(sequence)
        request.num_sequences = 1
        return sequences

    def audit(self) -> None:
        """Assert that all of this agrees with itself and with the pages."""
        assert sorted([*self.waiting, *self.running], key=place) == sorted(
            self.requests.values(), key=place
        )
        assert self.running == sorted(self.running, key=place) and self.waiting == sorted(
            self.waiting, key=place
        )
        assert sum(request.num_sequences for request in self.running) <= self.limits.max_running
        assert all(not request.pages and not request.num_computed for request in self.waiting)
        for request in self.running:
            assert request.num_pending > 0 and self.pages.num_needed(request.num_computed) <= len(
                request.pages
            )
        self.pages.audit(request.pages for request in self.running)


def check(request: Request, pages: Pages, limits: Limits) -> None:
    """Raise ValueError, with what would work, for a request that could never end. Its last token is
    never run."""
    if not request.tokens or request.max_tokens < 1 or request.n < 1:
        raise ValueError(
            "a request needs a prompt of at least one token, and max_tokens and n of at least 1"
        )
    if request.n > limits.max_running:
        raise ValueError(
            f"n is {request.n}, but only {limits.max_running} sequences run at the same time"
        )
    has = pages.num_pages * pages.page_tokens
    needs = request.num_prompt + request.max_tokens - 1
    if needs > has:
        room = has + 1 - request.num_prompt
        works = (
            f"max_tokens={room} works" if room > 0 else f"a prompt of at most {has} tokens works"
        )
        raise ValueError(
            f"{request.num_prompt} prompt tokens and {request.max_tokens} new ones need room for {needs} tokens in the "
            f"KV cache ({pages.num_needed(needs)} pages), which has room for {has} ({pages.num_pages} pages); {works}"
        )


def remove(line: list[Request], request: Request) -> None:
    """Take a request out of a line in order of place."""
    number = bisect_left(line, request.place, key=place)
    assert line[number] is request
    del line[number]
