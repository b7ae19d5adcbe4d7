"""Engines in the process of the test, their outputs, and an audit after each of their steps."""

from collections import abc
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from shardwise.config import ModelConfig
from shardwise.formats.huggingface.hf_config import from_hugging_face
from shardwise.formats.tokenizers.tokenizer import Tokenizer
from shardwise.formats.tokenizers.train_bpe import byte_tokenizer
from shardwise.kernels.kv_cache import KVPages
from shardwise.kernels.reference.serving import REFERENCE
from shardwise.kernels.serving_interface import ServingKernels
from shardwise.layout import Layout
from shardwise.measure.reference_model import ReferenceModel
from shardwise.model.transformer import Transformer
from shardwise.parallel.mesh import make_mesh
from shardwise.quant.kv_dtype import KvDtype
from shardwise.serve.engine.engine import BatchRunner, Engine, end_tokens, make_sequence
from shardwise.serve.engine.pages import Pages
from shardwise.serve.engine.runner import Runner
from shardwise.serve.engine.scheduler import Limits, Scheduler
from shardwise.serve.engine.sequence import Sequence
from shardwise.serve.request import Delta, Logprob, Request, SamplingParams
from shardwise.serve.sampling.constraints import Constraints
from shardwise.serve.sampling.grammar import GrammarState
from tiny_models import our_weights, tiny_model

BYTES = {"vocab_size": 264}  # 256 bytes, an end, and 7 rows of padding
LIMITS = Limits(512, 32, 1024)


def tiny(
    name: str = "llama", dtype: torch.dtype = torch.float32, **changes: object
) -> ReferenceModel:
    """A random model over bytes, which has no end token."""
    theirs = tiny_model(name, dtype, **BYTES, **changes)
    tokenizer = replace(byte_tokenizer(), eos_ids=frozenset())
    config = from_hugging_face(theirs.config.to_dict())
    return ReferenceModel(config, our_weights(theirs), tokenizer, dtype, torch.device("cpu"))


def runner_of(
    model: ReferenceModel, kv_dtype: KvDtype = "auto", kernels: ServingKernels | None = None
) -> Runner:
    mesh = make_mesh(Layout(), 0, model.device, model.config.num_kv_heads)
    return Runner(model.config, dict(model.weights), mesh, model.dtype, 16, kernels, kv_dtype)


def fill_with_anything(pages: KVPages) -> None:
    """Fill pages with NaN, or with 99 in dtypes without NaN."""
    for tensor in pages.tensors:
        tensor.fill_(torch.nan if tensor.dtype.is_floating_point else 99)


def engine_of(
    runner: Runner,
    tokenizer: Tokenizer,
    num_pages: int = 128,
    limits: Limits = LIMITS,
    runs: BatchRunner | None = None,
    max_len: int | None = None,
) -> Engine:
    """Return an engine whose pages hold NaN until they are written. `runs` replaces the driver."""
    runner.make_pages(num_pages)
    for pages in runner.pages:
        fill_with_anything(pages)
    config: ModelConfig = runner.config
    pages = Pages(num_pages, runner.page_tokens, runner.config.kv_window)
    scheduler = Scheduler(pages, limits, max_len or config.max_positions)
    return Engine(config, tokenizer, AsDriver(runner) if runs is None else runs, scheduler)


def sequence_of(
    tokenizer: Tokenizer,
    params: SamplingParams,
    max_tokens: int,
    index: int = 0,
    grammar: GrammarState | None = None,
) -> Sequence:
    """Return a sequence without a prompt that generates at most `max_tokens` tokens."""
    most = min(max_tokens, params.max_tokens or max_tokens)
    request = Request((), params)
    ends = end_tokens(params, tokenizer)
    constraints = Constraints(params, tokenizer.vocab_size, ends, grammar=grammar)
    return make_sequence(0, request, tokenizer, most, constraints, index)


@dataclass
class AsDriver:
    """The runner of an engine with one rank."""

    runner: Runner

    @property
    def kernels(self) -> ServingKernels:
        return self.runner.kernels

    def run(self, batch: Any) -> Any:
        return self.runner.run(batch)

    def embed(self, inputs: list[list[int]]) -> list[list[float]]:
        return self.runner.embed(inputs)

    def keep_alive(self) -> None:
        pass


@dataclass
class Got:
    """One of n completions so far. `prompt`: the log-probabilities of the prompt."""

    text: str = ""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[Logprob] = field(default_factory=list)
    reason: str | None = None
    prompt: tuple[Logprob, ...] | None = None
    num_cached: int = 0

    def add(self, delta: Delta) -> None:
        assert self.reason is None, "a delta came after the last"
        self.text += delta.text
        self.tokens += delta.tokens
        self.logprobs += delta.logprobs
        self.reason = delta.finish_reason
        self.prompt = delta.prompt_logprobs if delta.prompt_logprobs is not None else self.prompt
        self.num_cached += delta.num_cached_tokens

    @property
    def said(self) -> tuple[str, list[int], list[Logprob], str | None]:
        return self.text, self.tokens, self.logprobs, self.reason


class Asked:
    """An engine and its completions so far, by request id."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.got: dict[int, list[Got]] = {}
        self.num_steps = 0

    def add(self, request: Request) -> int:
        request_id = len(self.got)
        self.got[request_id] = [Got() for _ in range(request.params.n)]
        self.engine.add(replace(request, request_id=request_id))
        return request_id

    def step(self) -> None:
        engine = self.engine
        self.num_steps += 1
        assert self.num_steps < 20_000, "it does not come to an end"
        for request_id, error in engine.start_compiled():
            raise AssertionError(f"{request_id} was refused") from error
        for delta in engine.step():
            self.got[delta.request_id][delta.index].add(delta)
        audit(engine)

    def drain(self) -> None:
        while self.engine.has_work or self.engine.compiling:
            self.step()
        assert_empty(self.engine)


def audit(engine: Engine) -> None:
    engine.scheduler.audit()
    live = [sequence for sequences in engine.requests.values() for sequence in sequences]
    assert {sequence.id for sequence in live} >= set(engine.scheduler.sequences)
    assert all(engine.requests.values()) and engine.failed_ids <= set(engine.requests)
    assert all(sequence.finish_reason is None for sequence in live)


def assert_empty(engine: Engine) -> None:
    """Assert that the engine has no requests, sequences or used pages."""
    audit(engine)
    counters = engine.scheduler.counters()
    assert (counters.num_waiting, counters.num_running, engine.scheduler.pages.counts().used) == (
        0,
        0,
        0,
    )
    assert not engine.requests and not engine.compiling and not engine.scheduler.sequences


def answers(engine: Engine, requests: Iterable[Request]) -> list[list[Got]]:
    """Return all n completions of each request, run together."""
    asked = Asked(engine)
    for request in requests:
        asked.add(request)
    asked.drain()
    return list(asked.got.values())


def greedy(max_tokens: int | None = 12, **changes: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0, "max_tokens": max_tokens, "logprobs": 3} | changes)


def drawn_tokens(num_tokens: int, seed: int, vocab_size: int = 256) -> tuple[int, ...]:
    random = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(0, vocab_size, (num_tokens,), generator=random).tolist())


@torch.inference_mode()
def plain_logprobs(model: ReferenceModel, tokens: abc.Sequence[int]) -> Tensor:
    """Return log_softmax [T, V] of one forward over all tokens, with logits in fp32."""
    hidden = model.hidden(torch.tensor(tokens))
    head = Transformer(model.config, REFERENCE).head_name
    return (hidden.float() @ model.weights[head].float().T).log_softmax(-1)
