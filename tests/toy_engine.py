"""An engine with a model in a few lines, whose memory detects reads of other sequences' pages."""

from collections.abc import Iterable
from itertools import count, pairwise

from shardwise.formats.tokenizers.train_bpe import byte_tokenizer
from shardwise.serve.engine.pages import Pages
from shardwise.serve.engine.scheduler import Limits, Scheduler
from shardwise.serve.engine.sequence import Batch, BatchEntry, Sequence
from shardwise.serve.request import Request, SamplingParams
from shardwise.serve.sampling.constraints import Constraints
from shardwise.serve.sampling.detokenize import Detokenizer
from shardwise.serve.sampling.penalties import SamplerState

VOCAB = 5
END = 0
BYTES = byte_tokenizer()


def sequence(
    id: int,
    prompt: list[int],
    max_tokens: int,
    priority: int = 0,
    salt: str = "",
    n: int = 1,
    prompt_logprobs: int | None = None,
    ends: bool = False,
) -> Sequence:
    """Return the first sample of a request, with its siblings; END ends them if `ends`."""
    params = SamplingParams(
        n=n,
        max_tokens=max_tokens,
        prompt_logprobs=prompt_logprobs,
        stop_token_ids=(END,) if ends else (),
    )
    request = Request(tuple(prompt), params, priority, salt, request_id=id)
    end_tokens = {token: token for token in params.stop_token_ids}

    def sample(index: int) -> Sequence:
        sampler = SamplerState(params, prompt, index)
        constraints = Constraints(params, VOCAB, end_tokens)
        text = Detokenizer(BYTES)
        return Sequence(
            id + index, request, max_tokens, end_tokens, sampler, constraints, text, index=index
        )

    first, *siblings = map(sample, range(n))
    first.siblings = tuple(siblings)
    return first


def state(before: int, token: int) -> int:
    """Return the state of a token: like keys and values, it depends on all tokens so far."""
    return hash((before, token))


def states(tokens: Iterable[int]) -> list[int]:
    found = [0]
    for token in tokens:
        found.append(state(found[-1], token))
    return found[1:]


def next_tokens(last: int, num_samples: int) -> list[int]:
    return [(last + sample) % VOCAB for sample in range(num_samples)]


def alone(prompt: list[int], max_tokens: int, sample: int, ends: bool) -> list[int]:
    """Return all tokens of the sequence that the model generates from a prompt."""
    tokens = list(prompt)
    last = states(prompt)[-1]
    while len(tokens) < len(prompt) + max_tokens:
        tokens.append((last + (sample if len(tokens) == len(prompt) else 0)) % VOCAB)
        if ends and tokens[-1] == END:
            break
        last = state(last, tokens[-1])
    return tokens


class ToyEngine:
    """Scheduler, model and memory. An entry runs as a real one does: its first token reads the
    state before it through the page table, each writes its own, and the states of the whole
    sequence must be there once the batch has been written.
    """

    def __init__(self, pages: Pages, limits: Limits, max_len: int | None = None) -> None:
        self.scheduler = Scheduler(pages, limits, max_len)
        self.pages = pages
        self.limits = limits
        self.memory = [[0] * pages.page_tokens for _ in range(pages.num_pages)]
        self.outputs: dict[int, list[int]] = {}  # of each sequence that was not aborted
        self.scored: dict[int, list[int]] = {}
        self.num_ever_run: dict[int, int] = {}
        self.num_tokens = self.num_recomputed = 0

    def add(self, sequence: Sequence) -> None:
        self.scheduler.add(sequence)

    def step(self) -> Batch | None:
        batch = self.scheduler.next_batch()
        if batch is not None:
            self.check(batch)
            self.commit(batch, self.run(batch))
        return batch

    def check(self, batch: Batch) -> None:
        sizes = [len(entry.tokens) for entry in batch.entries]
        assert 0 < sum(sizes) <= self.limits.max_batch_tokens and min(sizes) > 0
        assert all(one == 1 or other > 1 for one, other in pairwise(sizes)), "ones come first"
        assert all(len(entry.tokens) > 1 or entry.num_samples for entry in batch.entries), (
            "no chunks of one token"
        )
        assert self.scheduler.running[0].id in {entry.id for entry in batch.entries}, (
            "the first always goes on"
        )

    def run(self, batch: Batch) -> dict[int, int | None]:
        size = self.pages.page_tokens
        for source, target in batch.copies:
            self.memory[target] = list(self.memory[source])
        for entry in batch.entries:
            # of a window of 1, the token before is not read; its page is still there
            before = self.read(entry, entry.start - 1) if entry.start else 0
            for position, token in enumerate(entry.tokens, entry.start):
                before = self.memory[entry.pages[position // size]][position % size] = state(
                    before, token
                )
        for entry in batch.entries:
            sequence = self.scheduler.sequences[entry.id]
            stop = entry.start + len(entry.tokens)
            assert list(entry.tokens) == sequence.tokens[entry.start : stop]
            first = 0 if self.pages.window is None else max(0, entry.start + 1 - self.pages.window)
            assert [self.read(entry, position) for position in range(first, stop)] == states(
                sequence.tokens[:stop]
            )[first:]
            assert len(entry.pages) == -(-stop // size)
        tokens: dict[int, int | None] = {}
        for entry in batch.entries:
            last = self.read(entry, entry.start + len(entry.tokens) - 1)
            tokens |= enumerate(next_tokens(last, entry.num_samples), entry.id)
        return tokens

    def read(self, entry: BatchEntry, position: int) -> int:
        size = self.pages.page_tokens
        return self.memory[entry.pages[position // size]][position % size]

    def count(self, entry: BatchEntry) -> None:
        self.num_tokens += len(entry.tokens)
        stop = entry.start + len(entry.tokens)
        ever = self.num_ever_run.get(entry.id, 0)
        overlap = int(entry.num_prompt_logprobs is not None and entry.start > 0)
        self.num_recomputed += max(0, min(stop, ever) - entry.start - overlap)
        self.num_ever_run[entry.id] = max(stop, ever)
        if entry.num_prompt_logprobs is not None:
            self.scored.setdefault(entry.id, []).extend(range(entry.start + 1, stop))

    def commit(self, batch: Batch, tokens: dict[int, int | None]) -> None:
        for entry in batch.entries:
            if entry.id in self.scheduler.sequences:
                self.count(entry)
        for delta in self.scheduler.commit(batch, tokens):
            id = delta.request_id + delta.index
            owner = next(
                entry for entry in batch.entries if 0 <= id - entry.id < max(1, entry.num_samples)
            )
            if id not in self.outputs:
                self.outputs[id] = []
                self.num_ever_run[id] = self.num_ever_run[owner.id]
            self.outputs[id] += delta.tokens
            assert (delta.finish_reason is not None) == (id not in self.scheduler.sequences)

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
    """Return (id, first position, number of tokens) of each entry."""
    assert batch is not None
    return [(entry.id, entry.start, len(entry.tokens)) for entry in batch.entries]
