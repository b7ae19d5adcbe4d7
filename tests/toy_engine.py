"""An engine with a model in a few lines, whose memory finds out whether anybody reads what is not
theirs."""

from collections.abc import Iterable
from itertools import count, pairwise

from shardwise.serve.engine.batch import Batch, Part
from shardwise.serve.engine.pages import Pages
from shardwise.serve.engine.scheduler import Limits, Scheduler
from shardwise.serve.engine.sequence import Request

VOCAB = 5
END = 0


def state(before: int, token: int) -> int:
    """What is written for a token: as keys and values do, it depends on all tokens so far."""
    return hash((before, token))


def states(tokens: Iterable[int]) -> list[int]:
    found = [0]
    for token in tokens:
        found.append(state(found[-1], token))
    return found[1:]


def next_tokens(last: int, num_samples: int) -> list[int]:
    return [(last + sample) % VOCAB for sample in range(num_samples)]


def alone(prompt: list[int], max_tokens: int, sample: int, ends: bool) -> list[int]:
    """All tokens of the sequence that the model makes of a prompt."""
    tokens = list(prompt)
    last = states(prompt)[-1]
    while len(tokens) < len(prompt) + max_tokens:
        tokens.append((last + (sample if len(tokens) == len(prompt) else 0)) % VOCAB)
        if ends and tokens[-1] == END:
            break
        last = state(last, tokens[-1])
    return tokens


class ToyEngine:
    """Scheduler, model and memory. A part runs as a real one does: its first token reads the state
    before it through the block table, each writes its own, and all of its sequence must be there
    once the whole batch has been written."""

    def __init__(self, pages: Pages, limits: Limits) -> None:
        self.scheduler = Scheduler(pages, limits)
        self.pages = pages
        self.limits = limits
        self.memory = [[0] * pages.page_tokens for _ in range(pages.num_pages)]
        self.outputs: dict[int, list[int]] = {}  # of each sequence that was not aborted
        self.ends: dict[int, bool] = {}
        self.scored: dict[int, list[int]] = {}
        self.num_ever_run: dict[int, int] = {}
        self.num_tokens = self.num_recomputed = 0

    def add(self, request: Request, ends: bool = False) -> None:
        self.scheduler.add(request)
        self.ends |= dict.fromkeys(request.ids, ends)

    def step(self) -> Batch | None:
        batch = self.scheduler.next_batch()
        if batch is not None:
            self.check(batch)
            self.commit(batch, self.run(batch))
        return batch

    def check(self, batch: Batch) -> None:
        sizes = [len(part.tokens) for part in batch.parts]
        assert 0 < sum(sizes) <= self.limits.max_batch_tokens and min(sizes) > 0
        assert all(one == 1 or other > 1 for one, other in pairwise(sizes)), "ones come first"
        assert all(len(part.tokens) > 1 or part.samples for part in batch.parts), (
            "no chunks of one token"
        )
        assert self.scheduler.running[0].id in {part.id for part in batch.parts}, (
            "the first always goes on"
        )

    def run(self, batch: Batch) -> dict[int, list[int]]:
        size = self.pages.page_tokens
        for source, target in batch.copies:
            self.memory[target] = list(self.memory[source])
        for part in batch.parts:
            before = self.read(part, part.start - 1) if part.start else 0
            for position, token in enumerate(part.tokens, part.start):
                before = self.memory[part.pages[position // size]][position % size] = state(
                    before, token
                )
        for part in batch.parts:
            request = self.scheduler.requests[part.id]
            stop = part.start + len(part.tokens)
            assert list(part.tokens) == request.tokens[part.start : stop]
            assert [self.read(part, position) for position in range(stop)] == states(
                request.tokens[:stop]
            )
            assert len(part.pages) == self.pages.num_needed(stop)
        return {
            part.id: next_tokens(self.read(part, part.start + len(part.tokens) - 1), part.samples)
            for part in batch.parts
            if part.samples
        }

    def read(self, part: Part, position: int) -> int:
        size = self.pages.page_tokens
        return self.memory[part.pages[position // size]][position % size]

    def count(self, part: Part) -> None:
        self.num_tokens += len(part.tokens)
        stop = part.start + len(part.tokens)
        ever = self.num_ever_run.get(part.id, 0)
        overlap = int(part.scores is not None and part.start > 0)
        self.num_recomputed += max(0, min(stop, ever) - part.start - overlap)
        self.num_ever_run[part.id] = max(stop, ever)
        if part.scores is not None:
            self.scored.setdefault(part.id, []).extend(range(part.start + 1, stop))

    def commit(self, batch: Batch, picked: dict[int, list[int]]) -> None:
        for part in batch.parts:
            if part.id in self.scheduler.requests:
                self.count(part)
        for one in self.scheduler.commit(batch, picked):
            owner = next(
                part for part in batch.parts if 0 <= one.id - part.id < max(1, part.samples)
            )
            if one.id not in self.outputs:
                self.outputs[one.id] = []
                self.num_ever_run[one.id] = self.num_ever_run[owner.id]
            self.outputs[one.id].append(one.token)
            assert one.last == (one.id not in self.scheduler.requests)
            if self.ends[one.id] and one.token == END:
                self.scheduler.finish(one.id)

    def drain(self) -> None:
        """Run until nothing is left; if somebody could go on forever without progress, this would
        not end."""
        for number in count():
            assert number < 5000
            if self.step() is None:
                break
        assert self.scheduler.counters().num_running == self.scheduler.counters().num_waiting == 0
        assert self.pages.counts().used == 0


def engine(num_pages: int = 64, page_tokens: int = 4, limits: Limits | None = None) -> ToyEngine:
    return ToyEngine(Pages(num_pages, page_tokens), limits or Limits(64, 8, 64))


def ran(batch: Batch | None) -> list[tuple[int, int, int]]:
    """(id, first position, tokens) of each part."""
    assert batch is not None
    return [(part.id, part.start, len(part.tokens)) for part in batch.parts]
