"""The engine: a step anyone can recite. Requests come and go between steps.

It knows nothing of processes, clients or HTTP: what is made goes out as pieces, under the name by
which a request came in.
"""

import logging
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Protocol

from torch import Tensor

from shardwise.config import ModelConfig
from shardwise.formats.tokenizers.tokenizer import Tokenizer
from shardwise.kernels.serving_interface import ServingKernels
from shardwise.parallel.mesh import CollectiveFailed
from shardwise.serve.engine.batch import Batch
from shardwise.serve.engine.runner import Ran
from shardwise.serve.engine.scheduler import QueueFull, Scheduler
from shardwise.serve.engine.scheduler import check as check_request
from shardwise.serve.engine.sequence import Request
from shardwise.serve.engine_client import Stats
from shardwise.serve.request import Ask, Logprob, Piece, check_ids
from shardwise.serve.sampling.grammar import Structure, Structures
from shardwise.serve.sampling.penalties import Sampling
from shardwise.serve.sampling.sampler import Picked, pick
from shardwise.serve.sampling.stopping import Answer, end_ids

log = logging.getLogger(__name__)

RATE_KEPT = 0.9
"""Of the measured rate of tokens, from step to step."""

Named = tuple[int, Piece]
"""The name of a request, and a piece of it."""


class Runs(Protocol):
    """A runner, or one that tells the other ranks first. `run` copies pages before it does what can
    fail."""

    @property
    def kernels(self) -> ServingKernels: ...
    def run(self, batch: Batch) -> Ran: ...
    def embed(self, tokens: Sequence[int]) -> list[float]: ...
    def keep_alive(self) -> None: ...


@dataclass
class Job:
    """A request under way: its n answers by id, each with what it takes to choose its tokens."""

    name: int
    ask: Ask
    request: Request
    samplings: dict[int, Sampling]
    answers: dict[int, Answer]
    structures: dict[int, Structure]
    """Of those that must follow one."""
    prompt: dict[int, Logprob] = field(default_factory=dict)
    """By position, of those that asked for the log-probabilities of their prompt."""
    has_failed: bool = False


class Engine:
    """Everything of a model that answers requests but the process it lives in."""

    def __init__(
        self,
        config: ModelConfig,
        tokenizer: Tokenizer,
        runner: Runs,
        scheduler: Scheduler,
        max_len: int,
    ) -> None:
        self.config = config
        self.tokenizer = tokenizer
        self.runner = runner
        self.scheduler = scheduler
        self.max_len = max_len
        self.jobs: dict[int, Job] = {}
        """By the name of a request."""
        self.job_of: dict[int, Job] = {}
        """By the id of a sequence."""
        self.structures: Structures | None = None
        self.compiling: dict[int, tuple[Ask, Future[Structure]]] = {}
        """By name, those that wait for their structure."""
        self.num_steps = self.num_prompt_tokens = self.num_generated_tokens = self.num_failures = 0
        self.tokens_per_s = 0.0

    @property
    def has_work(self) -> bool:
        return bool(self.jobs)

    def add(self, name: int, ask: Ask) -> None:
        """Queue a request, or have its structure compiled first. Raises QueueFull, and ValueError
        for one that can never be served."""
        self.check(ask)
        if ask.params.structure is None:
            self.begin(name, ask)
        else:
            num_waiting = len(self.scheduler.waiting) + len(self.compiling)
            scheduler = self.scheduler
            if num_waiting >= scheduler.limits.max_queued:
                raise QueueFull(num_waiting, scheduler.retry_after_s(self.tokens_per_s))
            self.structures = self.structures or Structures(self.tokenizer, self.config.vocab_size)
            self.compiling[name] = ask, self.structures.compile(*ask.params.structure)

    def begin_compiled(self) -> list[tuple[int, Exception]]:
        """Queue those whose structure has been compiled; returns those that are refused, and
        why."""
        refused: list[tuple[int, Exception]] = []
        for name, (ask, structure) in list(self.compiling.items()):
            if structure.done():
                del self.compiling[name]
                if (failure := structure.exception()) is not None:
                    refused.append(
                        (
                            name,
                            failure
                            if isinstance(failure, ValueError)
                            else ValueError(str(failure)),
                        )
                    )
                    continue
                try:
                    self.begin(name, ask, structure.result())
                except (ValueError, QueueFull) as error:
                    refused.append((name, error))
        return refused

    def begin(self, name: int, ask: Ask, structure: Structure | None = None) -> None:
        params = ask.params
        room = self.max_len - len(ask.tokens)
        request = self.request(ask)
        ends = end_ids(params, self.tokenizer.eos_ids)
        samplings = {
            id: Sampling(params, ask.tokens, ends, index) for index, id in enumerate(request.ids)
        }
        answers = {
            id: Answer(self.tokenizer, params, room, index) for index, id in enumerate(request.ids)
        }
        structures = {id: structure.fork() for id in request.ids} if structure is not None else {}
        self.scheduler.add(request, self.tokens_per_s)
        self.jobs[name] = job = Job(name, ask, request, samplings, answers, structures)
        self.job_of |= dict.fromkeys(request.ids, job)
        self.num_prompt_tokens += len(ask.tokens)

    def request(self, ask: Ask) -> Request:
        params = ask.params
        most = self.max_len - len(ask.tokens) if params.max_tokens is None else params.max_tokens
        scores = params.prompt_logprobs
        return Request(
            self.scheduler.next_id, list(ask.tokens), most, ask.priority, ask.salt, params.n, scores
        )

    def check(self, ask: Ask) -> None:
        """Raise ValueError, with what would work, for a request that can never be served."""
        params = ask.params
        vocab_size = self.config.vocab_size
        num_prompt = len(ask.tokens)
        check_ids("prompt", ask.tokens, vocab_size)
        params.check_vocabulary(vocab_size)
        wanted = params.max_tokens or 1
        if num_prompt + wanted > self.max_len:
            room = self.max_len - num_prompt
            works = (
                f"max_tokens={room} works"
                if room > 0
                else f"a prompt of {self.max_len - 1} tokens works"
            )
            raise ValueError(
                f"{num_prompt} prompt tokens and {wanted} new ones are more than the {self.max_len} that a request may "
                f"have; {works}"
            )
        check_request(self.request(ask), self.scheduler.pages, self.scheduler.limits)

    def abort(self, name: int) -> None:
        """End a request whose client has left. One that has ended is ignored."""
        if name in self.compiling:
            _, structure = self.compiling.pop(name)
            structure.cancel()
        if (job := self.jobs.get(name)) is not None:
            self.scheduler.abort(job.request)
            self.forget(job)

    def forget(self, job: Job) -> None:
        del self.jobs[job.name]
        for id in job.request.ids:
            self.job_of.pop(id, None)

    def step(self) -> list[Named]:
        """Run one batch; what came of it."""
        began = time.perf_counter()
        batch = self.scheduler.next_batch()
        if batch is None:
            return []
        ran, pieces = self.run(batch)
        picked = self.pick(batch, ran)
        tokens = {
            id: [0 if each.token is None else each.token for each in row]
            for id, row in picked.items()
        }
        chosen = {id: iter(row) for id, row in picked.items()}
        for each in self.scheduler.commit(batch, tokens):
            job = self.job_of[each.id]
            source = each.id if each.id in chosen else job.request.id
            pieces.append((job.name, self.advance(job, each.id, next(chosen[source]))))
        self.count(
            batch, sum(len(piece.tokens) for _, piece in pieces), time.perf_counter() - began
        )
        return pieces

    def run(self, batch: Batch) -> tuple[Ran, list[Named]]:
        """A batch that fails is run part by part, so that a request that fails inside the model
        fails alone."""
        try:
            return self.runner.run(batch), []
        except CollectiveFailed:
            raise
        except Exception:
            log.exception("a batch has failed; its requests are run one by one")
        logits: dict[int, Tensor] = {}
        scores: dict[int, list[Logprob]] = {}
        pieces: list[Named] = []
        for part in batch.parts:
            if part.id not in self.job_of:  # another answer to its prompt has failed
                continue
            try:
                ran = self.runner.run(Batch((part,), ()))
                logits |= ran.logits
                scores |= ran.scores
            except CollectiveFailed:
                raise
            except Exception:
                log.exception("request %d has failed inside the model", self.job_of[part.id].name)
                pieces += self.fail(self.job_of[part.id])
        return Ran(logits, scores), pieces

    def fail(self, job: Job) -> Iterator[Named]:
        """End all answers of a request with an error."""
        self.scheduler.abort(job.request)
        self.forget(job)
        self.num_failures += 1
        for answer in job.answers.values():
            yield job.name, answer.end("error")

    def pick(self, batch: Batch, ran: Ran) -> dict[int, list[Picked]]:
        """The next tokens of each part that samples: n of the one that forks."""
        rows: list[Tensor] = []
        samplings: list[Sampling] = []
        allowed: list[Tensor | None] = []
        sampled = [part for part in batch.parts if part.id in ran.logits and part.id in self.job_of]
        for part in batch.parts:
            if part.id in self.job_of and part.id in ran.scores:
                places = range(part.start + 1, part.start + len(part.tokens))
                self.job_of[part.id].prompt |= zip(places, ran.scores[part.id], strict=True)
        for part in sampled:
            job = self.job_of[part.id]
            ids = job.request.ids if part.samples > 1 else (part.id,)
            rows += [ran.logits[part.id]] * part.samples
            samplings += [job.samplings[id] for id in ids]
            allowed += [job.structures[id].allowed() if job.structures else None for id in ids]
        picked = iter(pick(rows, samplings, allowed, self.runner.kernels)) if rows else iter(())
        return {part.id: [next(picked) for _ in range(part.samples)] for part in sampled}

    def advance(self, job: Job, id: int, picked: Picked) -> Piece:
        """One more token of an answer."""
        answer = job.answers[id]
        first = answer.num_tokens == 0 and answer.index == 0
        if picked.token is None:
            self.num_failures += not job.has_failed
            job.has_failed = True
            piece = answer.end("error")
        else:
            job.samplings[id].add(picked.token)
            if job.structures:
                job.structures[id].add(picked.token)
            piece = answer.add(picked.token, picked.logprob)
        if first:
            scores = (
                tuple(job.prompt[at] for at in sorted(job.prompt))
                if job.ask.params.prompt_logprobs is not None
                else None
            )
            piece = replace(piece, prompt=scores, num_cached_tokens=job.request.num_found)
        if piece.finish_reason is not None:
            self.scheduler.finish(id)
            del job.answers[id]
            if not job.answers:
                self.forget(job)
        return piece

    def count(self, batch: Batch, num_tokens: int, seconds: float) -> None:
        self.num_steps += 1
        self.num_generated_tokens += num_tokens
        rate = sum(len(part.tokens) for part in batch.parts) / seconds
        self.tokens_per_s = (
            rate
            if not self.tokens_per_s
            else RATE_KEPT * self.tokens_per_s + (1 - RATE_KEPT) * rate
        )

    def embed(self, tokens: Sequence[int]) -> list[float]:
        """The mean of the last hidden states, of length 1. Raises ValueError as `check_input`
        does."""
        self.check_input(tokens)
        return self.runner.embed(tokens)

    def check_input(self, tokens: Sequence[int]) -> None:
        """Raise ValueError for what can never be embedded."""
        if not 0 < len(tokens) <= self.max_len:
            raise ValueError(f"an input must have 1 to {self.max_len} tokens, not {len(tokens)}")
        check_ids("input", tokens, self.config.vocab_size)

    def stats(self) -> Stats:
        now = self.scheduler.counters()
        pages = self.scheduler.pages.counts()
        return Stats(
            now.num_waiting,
            now.num_running,
            now.num_preemptions,
            pages.free,
            pages.used,
            pages.cached,
            self.num_prompt_tokens,
            self.num_generated_tokens,
            self.num_steps,
            self.num_failures,
        )
