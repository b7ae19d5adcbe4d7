"""The engine: the step loop; requests are added and removed between steps.

Independent of processes, clients and HTTP: it takes requests and returns deltas.
"""

import logging
import time
from concurrent.futures import Future
from typing import Protocol

from torch import Tensor

from shardwise.config import ModelConfig
from shardwise.formats.tokenizers.tokenizer import Tokenizer
from shardwise.kernels.serving_interface import ServingKernels
from shardwise.parallel.mesh import CollectiveFailed
from shardwise.serve.engine.runner import Logits, PromptLogprobs
from shardwise.serve.engine.scheduler import QueueFull, Scheduler
from shardwise.serve.engine.sequence import Batch, Sequence
from shardwise.serve.engine_client import Stats
from shardwise.serve.request import Delta, Logprob, Request, SamplingParams, check_ids, check_length
from shardwise.serve.sampling.constraints import Constraints, bad_word_ids
from shardwise.serve.sampling.detokenize import Detokenizer
from shardwise.serve.sampling.grammar import LIMIT_S, GrammarCompiler, GrammarState
from shardwise.serve.sampling.penalties import SamplerState
from shardwise.serve.sampling.sampler import sample_tokens

log = logging.getLogger(__name__)

RATE_DECAY = 0.9
"""Decay per step of the moving average of tokens per second."""


class BatchRunner(Protocol):
    """A runner, or the driver rank's runner, which also runs the batch on the other ranks.

    `run` copies pages before it does anything that can fail.
    """

    @property
    def kernels(self) -> ServingKernels: ...
    def run(self, batch: Batch) -> tuple[Logits, PromptLogprobs]: ...
    def embed(self, inputs: list[list[int]]) -> list[list[float]]: ...
    def keep_alive(self) -> None: ...


class Engine:
    """Runs one model for many concurrent requests.

    Attributes:
        requests: The sequences that have not ended, by request id.
        compiling: Requests whose grammar is being compiled, each with the time (of
            `time.monotonic`) at which it is refused, by request id.
    """

    def __init__(
        self, config: ModelConfig, tokenizer: Tokenizer, runner: BatchRunner, scheduler: Scheduler
    ) -> None:
        self.config = config
        self.tokenizer = tokenizer
        self.runner = runner
        self.scheduler = scheduler
        self.requests: dict[int, list[Sequence]] = {}
        self.compiling: dict[int, tuple[Request, Future[GrammarState], float]] = {}
        self.grammars: GrammarCompiler | None = None
        self.grammar_limit_s = LIMIT_S
        self.failed_ids: set[int] = set()
        self.num_steps = 0
        self.num_prompt_tokens = 0
        self.num_generated_tokens = 0
        self.num_failures = 0
        self.tokens_per_s = 0.0

    @property
    def max_len(self) -> int:
        """The most tokens that prompt and completion may have together."""
        return self.scheduler.max_len

    @property
    def has_work(self) -> bool:
        return bool(self.requests)

    @property
    def num_waiting(self) -> int:
        """Requests in the queue, including those whose grammar is being compiled."""
        return len(self.scheduler.waiting) + len(self.compiling)

    # -- requests come and go

    def check(self, request: Request) -> None:
        """Raise ValueError, with what would work, for a request that can never be served."""
        check_ids("prompt", request.tokens, self.config.vocab_size)
        request.params.check_vocabulary(self.config.vocab_size)
        self.scheduler.check(request)

    def add(self, request: Request) -> None:
        """Queue a request, after its grammar has been compiled if it has one.

        Raises QueueFull, and ValueError as `check` does.
        """
        self.check(request)
        if request.params.structure is None:
            self.start(request)
        elif self.num_waiting >= self.scheduler.limits.max_queued:
            retry_after_s = self.scheduler.retry_after_s(self.tokens_per_s)
            raise QueueFull(self.num_waiting, retry_after_s)
        else:
            self.grammars = self.grammars or GrammarCompiler(self.tokenizer, self.config.vocab_size)
            grammar = self.grammars.compile(*request.params.structure)
            due_s = time.monotonic() + self.grammar_limit_s
            self.compiling[request.request_id] = request, grammar, due_s

    def start_compiled(self) -> list[tuple[int, Exception]]:
        """Queue the requests whose grammar has been compiled.

        Returns (request id, reason) of those that are refused.
        """
        refused: list[tuple[int, Exception]] = []
        for request_id, (request, grammar, due_s) in list(self.compiling.items()):
            if not grammar.done():
                if time.monotonic() > due_s:
                    self.abort(request_id)
                    reason = f"the grammar takes more than {self.grammar_limit_s:g} s to compile"
                    refused.append((request_id, ValueError(f"{reason}; a simpler one works")))
                continue
            del self.compiling[request_id]
            if (failure := grammar.exception()) is not None:
                error = failure if isinstance(failure, ValueError) else ValueError(str(failure))
                refused.append((request_id, error))
                continue
            try:
                self.start(request, grammar.result())
            except (ValueError, QueueFull) as refusal:
                refused.append((request_id, refusal))
        return refused

    def start(self, request: Request, grammar: GrammarState | None = None) -> None:
        """Make the sequences of a request and queue them.

        Raises QueueFull, and ValueError as `check` does or if no token may come first.
        """
        params = request.params
        max_tokens = check_length(len(request.tokens), params, self.max_len)
        ends = end_tokens(params, self.tokenizer)
        bad_words = bad_word_ids(self.tokenizer, params.bad_words)
        constraints = Constraints(params, self.config.vocab_size, ends, bad_words, grammar)
        allowed = constraints.allowed()
        if allowed is not None and not allowed.any():
            raise ValueError(
                "allowed_token_ids, bad_words and the grammar exclude each other: no token may "
                "come first"
            )
        id = self.scheduler.next_id
        first, *siblings = (
            make_sequence(
                id + index, request, self.tokenizer, max_tokens, constraints.fork(), index
            )
            for index in range(params.n)
        )
        first.siblings = tuple(siblings)
        self.scheduler.add(first, self.tokens_per_s)
        self.requests[request.request_id] = [first, *siblings]
        self.num_prompt_tokens += len(request.tokens)

    def abort(self, request_id: int) -> None:
        """Abort a request after its client disconnects. No-op if it has finished."""
        if request_id in self.compiling:
            _, grammar, _ = self.compiling.pop(request_id)
            grammar.cancel()
        for sequence in self.requests.pop(request_id, ()):
            self.scheduler.finish(sequence.id)
        self.failed_ids.discard(request_id)

    # -- one step

    def step(self) -> list[Delta]:
        """Compute one batch and return what it adds to completions."""
        start_s = time.perf_counter()
        batch = self.scheduler.next_batch()
        if batch is None:
            return []
        logits, failed = self.run(batch)
        tokens, logprobs = self.sample(batch, logits)
        deltas = [*failed, *self.scheduler.commit(batch, tokens, logprobs)]
        self.forget_ended(deltas)
        self.count(batch, deltas, time.perf_counter() - start_s)
        return deltas

    def run(self, batch: Batch) -> tuple[Logits, list[Delta]]:
        """Run a batch; return its logits, and the last deltas of requests that failed.

        A batch that fails is run again entry by entry, so that a request that fails inside the
        model fails alone.
        """
        try:
            return self.forward(batch), []
        except CollectiveFailed:
            raise
        except Exception:
            log.exception("batch failed; retrying its requests one at a time")
        logits: Logits = {}
        failed: list[Delta] = []
        for entry in batch.entries:
            sequence = self.scheduler.sequences.get(entry.id)
            if sequence is None:  # another sample of its request has failed
                continue
            try:
                logits |= self.forward(Batch((entry,), ()))
            except CollectiveFailed:
                raise
            except Exception:
                request_id = sequence.request.request_id
                log.exception("request %d failed in the forward pass", request_id)
                failed += self.fail(request_id)
        return logits, failed

    def forward(self, batch: Batch) -> Logits:
        """Run the model; store log-probabilities of prompts in their sequences, return logits."""
        logits, prompt_logprobs = self.runner.run(batch)
        for entry in batch.entries:
            if entry.id in prompt_logprobs:
                positions = range(entry.start + 1, entry.start + len(entry.tokens))
                by_position = zip(positions, prompt_logprobs[entry.id], strict=True)
                self.scheduler.sequences[entry.id].prompt_logprobs.update(by_position)
        return logits

    def fail(self, request_id: int) -> list[Delta]:
        """End all samples of a request with an error."""
        deltas = []
        for sequence in self.requests[request_id]:
            self.scheduler.finish(sequence.id)
            deltas.append(sequence.end("error"))
        return deltas

    def sample(
        self, batch: Batch, logits: Logits
    ) -> tuple[dict[int, int | None], dict[int, Logprob]]:
        """Sample the next token of each sequence that has logits: n tokens when a request with n
        samples forks.

        Returns tokens and requested log-probabilities, by sequence id.
        """
        rows: list[Tensor] = []
        sequences: list[Sequence] = []
        for entry in batch.entries:
            sequence = self.scheduler.sequences.get(entry.id)
            if sequence is not None and entry.id in logits:
                rows += [logits[entry.id]] * sequence.num_samples
                sequences += sequence.samples
        if not rows:
            return {}, {}
        masks = [sequence.constraints.allowed() for sequence in sequences]
        samplers = [sequence.sampler for sequence in sequences]
        tokens, logprobs = sample_tokens(rows, samplers, masks, self.runner.kernels)
        ids = [sequence.id for sequence in sequences]
        return (
            dict(zip(ids, tokens, strict=True)),
            {ids[row]: logprob for row, logprob in logprobs.items()},
        )

    def forget_ended(self, deltas: list[Delta]) -> None:
        """Drop the sequences that ended in this step, and count the requests that failed."""
        failed_ids = {delta.request_id for delta in deltas if delta.finish_reason == "error"}
        self.num_failures += len(failed_ids - self.failed_ids)
        self.failed_ids |= failed_ids
        for request_id in {delta.request_id for delta in deltas if delta.finish_reason is not None}:
            live = [each for each in self.requests[request_id] if each.finish_reason is None]
            if live:
                self.requests[request_id] = live
            else:
                del self.requests[request_id]
                self.failed_ids.discard(request_id)

    def count(self, batch: Batch, deltas: list[Delta], seconds: float) -> None:
        self.num_steps += 1
        self.num_generated_tokens += sum(len(delta.tokens) for delta in deltas)
        rate = sum(len(entry.tokens) for entry in batch.entries) / seconds
        if self.tokens_per_s:
            rate = RATE_DECAY * self.tokens_per_s + (1 - RATE_DECAY) * rate
        self.tokens_per_s = rate

    # -- embeddings and counters

    def embed(self, inputs: list[list[int]]) -> list[list[float]]:
        """Return the mean of the last hidden states of each input, scaled to length 1.

        Raises ValueError as `check_input` does.
        """
        for tokens in inputs:
            self.check_input(tokens)
        return self.runner.embed(inputs)

    def check_input(self, tokens: list[int]) -> None:
        """Raise ValueError for an input that can never be embedded."""
        if not 0 < len(tokens) <= self.max_len:
            raise ValueError(f"an input must have 1 to {self.max_len} tokens, not {len(tokens)}")
        check_ids("input", tokens, self.config.vocab_size)

    def stats(self) -> Stats:
        counters = self.scheduler.counters()
        pages = self.scheduler.pages.counts()
        return Stats(
            num_waiting=counters.num_waiting,
            num_running=counters.num_running,
            num_preemptions=counters.num_preemptions,
            recomputed_tokens=counters.num_recomputed_tokens,
            prefix_cache_queried_tokens=counters.num_queried_tokens,
            prefix_cache_hit_tokens=counters.num_hit_tokens,
            pages_free=pages.free,
            pages_used=pages.used,
            pages_cached=pages.cached,
            prompt_tokens=self.num_prompt_tokens,
            generated_tokens=self.num_generated_tokens,
            steps=self.num_steps,
            failures=self.num_failures,
        )


def make_sequence(
    id: int,
    request: Request,
    tokenizer: Tokenizer,
    max_tokens: int,
    constraints: Constraints,
    index: int = 0,
) -> Sequence:
    """Return sample `index` of a request before its first token; it owns `constraints`."""
    params = request.params
    # a grammar counts the space of the first word, so it is shown
    continued = () if request.starts_text and params.structure is None else request.tokens
    return Sequence(
        id,
        request,
        max_tokens,
        end_tokens(params, tokenizer),
        SamplerState(params, request.tokens, index),
        constraints,
        Detokenizer(
            tokenizer,
            params.stop,
            params.skip_special_tokens,
            params.include_stop_str_in_output,
            continued,
        ),
        index,
    )


def end_tokens(params: SamplingParams, tokenizer: Tokenizer) -> dict[int, str | int | None]:
    """Return the stop_reason of each token that ends a completion: the stop string that is this
    special token, its id, or None for an end token of the model.
    """
    ends: dict[int, str | int | None] = {id: id for id in params.stop_token_ids}
    for text in params.stop:
        id = tokenizer.backend.token_to_id(text)
        if id is not None and id in tokenizer.special_ids:
            ends[id] = text
    return ends if params.ignore_eos else ends | dict.fromkeys(tokenizer.eos_ids)
