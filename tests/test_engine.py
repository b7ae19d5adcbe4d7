"""The engine against plain generation, and through everything that can go wrong in it."""

import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from threading import Event
from typing import Any

import pytest
import torch

from engines import (
    AsDriver,
    Asked,
    Got,
    answers,
    assert_empty,
    drawn_tokens,
    engine_of,
    greedy,
    plain_logprobs,
    runner_of,
    tiny,
)
from shardwise.formats.tokenizers.train_bpe import byte_tokenizer
from shardwise.kernels.reference.attention import causal_attention
from shardwise.kernels.reference.serving import REFERENCE
from shardwise.kv_pages import pages_per_sequence
from shardwise.measure.reference_model import ReferenceModel, load_reference_model
from shardwise.model.layers import Causal
from shardwise.model.transformer import Transformer
from shardwise.quant.kv_dtype import KvDtype
from shardwise.serve.engine.runner import Logits, PromptLogprobs, Runner
from shardwise.serve.engine.scheduler import Limits, QueueFull
from shardwise.serve.engine.sequence import Batch, BatchEntry
from shardwise.serve.request import Request, SamplingParams
from shardwise.serve.sampling.grammar import MAX_BYTES, SMALL_BYTES, GrammarCompiler, GrammarState
from shardwise.serve.sampling.penalties import SamplerState
from shardwise.serve.sampling.sampler import sample_tokens
from smollm2 import smollm2_gguf
from tiny_models import MODELS

ERROR = 1e-4  # of log-probabilities, against products that add in another order
MARK = 255
"""The token at which models here fail."""


@pytest.fixture(scope="module")
def model() -> ReferenceModel:
    return tiny()


@pytest.fixture(scope="module")
def runner(model: ReferenceModel) -> Runner:
    return runner_of(model)


def values(got: Got) -> torch.Tensor:
    return torch.tensor([each.logprob for each in got.logprobs])


# -- against other definitions


def assert_greedy(model: ReferenceModel, prompt: Sequence[int], got: Got) -> None:
    """Each token is the most likely one of a forward pass over all tokens before it."""
    rows = plain_logprobs(model, [*prompt, *got.tokens])[len(prompt) - 1 : -1]
    assert got.tokens == rows.argmax(-1).tolist()
    torch.testing.assert_close(values(got), rows.amax(-1), rtol=0, atol=ERROR)


@pytest.mark.parametrize("name", MODELS)
def test_greedy_tokens_are_those_of_a_plain_forward(name: str) -> None:
    model = tiny(name)
    prompts = [drawn_tokens(count, count) for count in (1, 5, 16, 33, 50)]
    found = answers(
        engine_of(runner_of(model), model.tokenizer),
        [Request(prompt, greedy(14)) for prompt in prompts],
    )
    for prompt, (got,) in zip(prompts, found, strict=True):
        assert_greedy(model, prompt, got)
        assert (got.text, got.reason) == (model.tokenizer.decode(got.tokens), "length")


@pytest.mark.parametrize(
    ("dtype", "kv_dtype"),
    [(torch.float32, "auto"), (torch.bfloat16, "auto"), (torch.bfloat16, "int8")],
)
def test_a_sliding_window_is_served_from_the_pages_of_one_window(
    dtype: torch.dtype, kv_dtype: KvDtype
) -> None:
    """90 tokens with a window of 20 in 3 pages of 16 have the bits of a run that keeps all pages,
    alone and with others in twice the pages."""
    wide = {"hidden_size": 128, "intermediate_size": 192, "head_dim": 32}  # for native kernels
    model = tiny("mistral", dtype, sliding_window=20, max_position_embeddings=128, **wide)
    runner = runner_of(model, kv_dtype)
    requests = [
        Request(drawn_tokens(count, count), greedy(90 - count, n=n, prompt_logprobs=scored))
        for count, n, scored in ((60, 1, None), (33, 2, None), (70, 1, 2))
    ]
    keeping = engine_of(runner, model.tokenizer, 64)
    keeping.scheduler.pages.window = None
    expected = answers(keeping, requests)
    if dtype == torch.float32:
        assert_greedy(model, requests[0].tokens, expected[0][0])
    one_by_one = engine_of(runner, model.tokenizer, pages_per_sequence(90, 16, 20))
    assert [answers(one_by_one, [each]) for each in requests[::2]] == [
        [completions] for completions in expected[::2]
    ]
    assert answers(engine_of(runner, model.tokenizer, 6), requests) == expected


def test_drawn_tokens_follow_from_a_plain_forward(model: ReferenceModel, runner: Runner) -> None:
    requests = [
        Request(
            drawn_tokens(9, seed),
            SamplingParams(0.9, top_k=50, top_p=0.9, seed=seed, max_tokens=20, logprobs=0),
        )
        for seed in range(4)
    ]
    found = answers(engine_of(runner, model.tokenizer), requests)
    for request, (got,) in zip(requests, found, strict=True):
        rows = plain_logprobs(model, [*request.tokens, *got.tokens])[len(request.tokens) - 1 : -1]
        sampler = SamplerState(request.params, request.tokens)
        for row, token in zip(rows, got.tokens, strict=True):
            assert sample_tokens(row[None], [sampler])[0] == [token]
            sampler.add(token)


def test_smollm2_in_fp32_follows_a_plain_forward() -> None:
    model = load_reference_model(smollm2_gguf(), torch.float32, torch.device("cpu"))
    prompts = [model.tokenizer.encode(text) for text in ("Once upon a time", "def fibonacci(n):\n")]
    requests = [Request(tuple(prompt), greedy(12)) for prompt in prompts]
    found = answers(engine_of(runner_of(model), model.tokenizer), requests)
    for prompt, (got,) in zip(prompts, found, strict=True):
        assert_greedy(model, prompt, got)


@pytest.mark.parametrize("num_pages", [128, 9])
@pytest.mark.parametrize("budget", [11, 40, 512])
def test_logprobs_of_a_prompt_are_those_of_a_plain_forward(
    model: ReferenceModel, runner: Runner, num_pages: int, budget: int
) -> None:
    prompts = [drawn_tokens(count, count) for count in (1, 2, 12, 30, 41, 50)]
    engine = engine_of(runner, model.tokenizer, num_pages, Limits(budget, 8, 64))
    requests = [
        Request(prompt, greedy(min(40, 64 - len(prompt)), prompt_logprobs=5)) for prompt in prompts
    ]
    for prompt, (got,) in zip(
        prompts, answers(engine, [*requests, *requests])[len(requests) :], strict=True
    ):
        expected = plain_logprobs(model, prompt)
        assert got.prompt is not None and [each.id for each in got.prompt] == list(prompt[1:])
        for row, told in zip(expected, got.prompt, strict=False):
            assert abs(row[told.id] - told.logprob) < ERROR
            top = torch.tensor([logprob for _, logprob in told.top])
            torch.testing.assert_close(top, row.topk(5).values, rtol=0, atol=ERROR)
    assert (engine.scheduler.counters().num_preemptions > 0) == (num_pages == 9)


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_an_embedding_is_the_mean_of_the_last_hidden_states(name: str) -> None:
    theirs = tiny(name)
    engine = engine_of(runner_of(theirs), theirs.tokenizer)
    tokens = drawn_tokens(23, 0)
    with torch.inference_mode():
        hidden = Transformer(theirs.config, REFERENCE).hidden(
            theirs.weights,
            torch.tensor([tokens]),
            torch.arange(23)[None],
            Causal(theirs.config, causal_attention),
        )[0]
    expected = torch.nn.functional.normalize(hidden.mean(0), dim=0)
    alone, *company = engine.embed([[*tokens]]) + engine.embed([[*tokens[:5]], [*tokens], [7]])
    torch.testing.assert_close(torch.tensor(alone), expected, rtol=0, atol=1e-5)
    torch.testing.assert_close(torch.tensor(company[1]), expected, rtol=0, atol=1e-5)
    (short,) = engine.embed([[*tokens[:5]]])
    torch.testing.assert_close(torch.tensor(company[0]), torch.tensor(short), rtol=0, atol=1e-5)
    for wrong in ((), drawn_tokens(65, 0), (264,), (-1,)):
        with pytest.raises(ValueError, match=r"1 to 64 tokens|token ids from 0"):
            engine.embed([[1], [*wrong]])


# -- failures


@dataclass
class Failing(AsDriver):
    """A runner that raises after it has written pages, for each batch that `fails` names."""

    fails: Callable[[Batch], bool]
    error: type[Exception] = RuntimeError

    def run(self, batch: Batch) -> tuple[Logits, PromptLogprobs]:
        output = self.runner.run(batch)
        if self.fails(batch):
            raise self.error("the device has had enough")
        return output


def is_marked(entry: BatchEntry) -> bool:
    return MARK in entry.tokens


def company(num: int = 6) -> list[Request]:
    """Requests of all kinds, none of which says or hears MARK."""
    kinds = [greedy(9), greedy(9, n=3, temperature=1.0, seed=4), greedy(12, prompt_logprobs=1)]
    bias = {MARK: -100.0}
    return [
        Request(
            tuple(token % 250 for token in drawn_tokens(7 + 6 * number, number)),
            replace(kinds[number % 3], logit_bias=bias),
        )
        for number in range(num)
    ]


@pytest.mark.parametrize("error", [RuntimeError, IndexError, MemoryError])
@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("budget", [40, 512])
def test_a_request_that_fails_inside_the_model_fails_alone(
    model: ReferenceModel,
    runner: Runner,
    error: type[Exception],
    n: int,
    budget: int,
    caplog: pytest.LogCaptureFixture,
) -> None:
    wanted = answers(engine_of(runner, model.tokenizer, limits=Limits(budget, 32, 64)), company())
    runs = Failing(runner, lambda batch: any(map(is_marked, batch.entries)), error)
    engine = engine_of(runner, model.tokenizer, limits=Limits(budget, 32, 64), runs=runs)
    bad = [Request((*drawn_tokens(count, 1), MARK, 3), greedy(9, n=n)) for count in (4, 47)]
    requests = company()
    found = answers(engine, [*requests[:3], bad[0], *requests[3:], bad[1]])
    for mine in (found.pop(3), found.pop()):
        assert [got.reason for got in mine] == ["error"] * n
        assert not any(got.tokens for got in mine)
    assert [[got.said for got in mine] for mine in found] == [
        [got.said for got in mine] for mine in wanted
    ]
    assert engine.num_failures == 2
    assert (
        "request 3 failed in the forward pass" in caplog.text
        and "the device has had enough" in caplog.text
    )


@pytest.mark.parametrize("failing", [{1}, {2}, {3}, {1, 2, 3}])
def test_an_answer_that_fails_takes_those_to_the_same_prompt_with_it(
    model: ReferenceModel, runner: Runner, failing: set[int]
) -> None:
    """After its fork, in a later step; those of the others before and after it were run already, or
    not yet."""
    requests = company(2)
    bad = Request(drawn_tokens(5, 0), SamplingParams(seed=1, n=3, max_tokens=9))
    wanted = answers(engine_of(runner, model.tokenizer), requests)
    engine = engine_of(
        runner,
        model.tokenizer,
        runs=Failing(
            runner,
            lambda batch: any(entry.id in failing and entry.start == 7 for entry in batch.entries),
        ),
    )
    found = answers(engine, [requests[0], bad, requests[1]])
    assert [got.reason for got in found[1]] == ["error"] * 3
    assert [len(got.tokens) for got in found[1]] == [3] * 3
    assert [[got.said for got in found[number]] for number in (0, 2)] == [
        [got.said for got in mine] for mine in wanted
    ]


def test_a_batch_that_is_too_much_is_run_part_by_part(
    model: ReferenceModel, runner: Runner
) -> None:
    wanted = answers(engine_of(runner, model.tokenizer), company(8))
    engine = engine_of(
        runner, model.tokenizer, runs=Failing(runner, lambda batch: len(batch.entries) > 1)
    )
    found = answers(engine, company(8))
    assert [[got.said for got in mine] for mine in found] == [
        [got.said for got in mine] for mine in wanted
    ]
    assert [mine[0].prompt for mine in found] == [mine[0].prompt for mine in wanted]


@dataclass
class Damaged(AsDriver):
    """A runner of a model whose logits are no numbers after MARK."""

    def run(self, batch: Batch) -> tuple[Logits, PromptLogprobs]:
        logits, prompt_logprobs = self.runner.run(batch)
        for entry in batch.entries:
            if is_marked(entry) and entry.id in logits:
                logits[entry.id] = logits[entry.id] * torch.nan
        return logits, prompt_logprobs


@pytest.mark.parametrize("temperature", [0, 1.0])
def test_logits_that_are_no_numbers_end_one_request(
    model: ReferenceModel, runner: Runner, temperature: float
) -> None:
    wanted = answers(engine_of(runner, model.tokenizer), company())
    engine = engine_of(runner, model.tokenizer, runs=Damaged(runner))
    bad = Request((1, 2, MARK), SamplingParams(temperature=temperature, n=2, max_tokens=1))
    *found, mine = answers(engine, [*company(), bad])
    assert [(got.reason, got.tokens) for got in mine] == [("error", [])] * 2
    assert [[got.said for got in mine] for mine in found] == [
        [got.said for got in mine] for mine in wanted
    ]


@pytest.mark.parametrize("moment", ["queued", "prompt", "first", "answering", "ended", "twice"])
def test_an_abort_leaves_nothing_behind(model: ReferenceModel, runner: Runner, moment: str) -> None:
    requests = company()
    wanted = answers(engine_of(runner, model.tokenizer), requests)
    asked = Asked(engine_of(runner, model.tokenizer, limits=Limits(40, 8, 64)))
    for request in requests[:3]:
        asked.add(request)
    asked.step()
    name = asked.add(Request(drawn_tokens(55, 3), greedy(9, n=1 if moment == "ended" else 3)))
    for request in requests[3:]:
        asked.add(request)
    engine = asked.engine
    mine = asked.got[name]
    until: dict[str, Callable[[], bool]] = {
        "queued": lambda: True,
        "prompt": lambda: 0 < engine.requests[name][0].num_computed < 55,
        "first": lambda: len(mine[0].tokens) == 1,
        "answering": lambda: len(mine[0].tokens) == 4,
        "ended": lambda: mine[0].reason is not None,
        "twice": lambda: len(mine[0].tokens) == 4,
    }
    while not until[moment]():
        asked.step()
    before = [list(got.tokens) for got in mine]
    engine.abort(name)
    if moment == "twice":
        engine.abort(name)
    engine.abort(999)
    asked.drain()
    assert [got.tokens for got in mine] == before
    del asked.got[name]
    assert [[got.said for got in each] for each in asked.got.values()] == [
        [got.said for got in each] for each in wanted
    ]


def test_a_full_queue_says_when_to_come_back(model: ReferenceModel, runner: Runner) -> None:
    engine = engine_of(runner, model.tokenizer, limits=Limits(9, 1, 2))
    for name in range(2):
        engine.add(Request((1, 2, 3), greedy(5), request_id=name))
    with pytest.raises(QueueFull) as full:
        engine.add(Request((1, 2, 3), greedy(5), request_id=2))
    assert full.value.retry_after_s >= 1
    engine.step()
    engine.add(Request((1, 2, 3), greedy(5), request_id=2))
    with pytest.raises(QueueFull):
        engine.add(Request((1, 2, 3), greedy(5), request_id=3))
    while engine.has_work:
        engine.step()
    assert_empty(engine)
    assert engine.stats().generated_tokens == 15


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (Request((), greedy(4)), "at least one token"),
        (Request((1, 264), greedy(4)), "token ids from 0"),
        (Request((-1,), greedy(4)), "token ids from 0"),
        (Request((1,) * 64, greedy(1)), "a prompt of 63 tokens works"),
        (Request((1,) * 64, greedy(None)), "a prompt of 63 tokens works"),
        (Request((1,) * 60, greedy(5)), "max_tokens=4 works"),
        (Request((1,), greedy(4, n=33)), "only 32 sequences"),
        (Request((1,), greedy(4, n=10**9)), "only 32 sequences"),
        (Request((1,), greedy(4, stop_token_ids=(300,))), "from 0 to 263, but has 300"),
        (Request((1,), greedy(4, n=33, structure=("regex", "a"))), "only 32 sequences"),
    ],
)
def test_what_can_never_be_served_is_refused_when_it_is_added(
    model: ReferenceModel, runner: Runner, wrong: Request, said: str
) -> None:
    engine = engine_of(runner, model.tokenizer)
    with pytest.raises(ValueError, match=said):
        engine.check(wrong)
    with pytest.raises(ValueError, match=said):
        engine.add(wrong)
    assert_empty(engine)


def test_a_request_beyond_all_pages_is_refused(model: ReferenceModel, runner: Runner) -> None:
    engine = engine_of(runner, model.tokenizer, num_pages=2)
    with pytest.raises(ValueError, match="max_tokens=23 works"):
        engine.add(Request((1,) * 10, greedy(30)))
    assert len(answers(engine, [Request((1,) * 10, greedy(23))])[0][0].tokens) == 23


def test_lengths_are_kept(model: ReferenceModel, runner: Runner) -> None:
    engine = engine_of(runner, model.tokenizer)
    (whole,) = answers(engine, [Request((1, 2, 3), greedy(30))])[0]
    end = next(token for token in whole.tokens if whole.tokens.index(token) > 3)
    place = whole.tokens.index(end)
    requests = [
        Request((1, 2, 3), greedy(30, stop_token_ids=(end,))),
        Request((1, 2, 3), greedy(30, stop_token_ids=(end,), min_tokens=place + 2)),
        Request((1, 2, 3), greedy(1)),
        Request((1, 2, 3), greedy(None)),
        Request((1,) * 63, greedy(1)),
    ]
    (stopped,), (longer,), (one,), (most,), (last,) = answers(engine, requests)
    assert (stopped.reason, stopped.tokens) == ("stop", whole.tokens[: place + 1])
    assert len(longer.tokens) >= place + 2 and end not in longer.tokens[: place + 1]
    assert [len(each.tokens) for each in (one, most, last)] == [1, 61, 1]
    assert most.reason == "length"


# -- structures


def test_a_bad_structure_is_refused_and_an_aborted_one_forgotten(
    model: ReferenceModel, runner: Runner
) -> None:
    pytest.importorskip("llguidance")
    engine = engine_of(runner, byte_tokenizer(), limits=Limits(20, 4, 4))
    ends = greedy(9, structure=("regex", "ab+"))
    engine.add(Request((1, 2), greedy(9, structure=("json_schema", '{"type": 3}')), request_id=0))
    engine.add(Request((1, 2), greedy(9, structure=("regex", "((")), request_id=1))
    engine.add(Request((1, 2), ends, request_id=2))
    engine.add(Request((1, 2), ends, request_id=3))
    with pytest.raises(QueueFull):
        engine.add(Request((1, 2), ends, request_id=4))
    engine.abort(2)
    refused: list[tuple[int, Exception]] = []
    texts = ""
    while engine.compiling or engine.has_work:
        refused += engine.start_compiled()
        for delta in engine.step():
            assert delta.request_id == 3
            texts += delta.text
    refused.sort(key=lambda each: each[0])
    assert [(name, type(error)) for name, error in refused] == [(0, ValueError), (1, ValueError)]
    assert "json_schema cannot be used" in str(refused[0][1]) and "regex cannot be used" in str(
        refused[1][1]
    )
    assert re.fullmatch("ab+", texts)
    assert_empty(engine)


def test_a_structure_that_takes_too_long_or_is_too_large_is_refused(
    model: ReferenceModel, runner: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And one that is small waits for no large one."""
    pytest.importorskip("llguidance")
    may_compile = Event()
    genuine = GrammarCompiler._compile

    def compile_slowly(self: GrammarCompiler, kind: Any, text: str) -> GrammarState:
        if len(text) > SMALL_BYTES:
            may_compile.wait(30)
        return genuine(self, kind, text)

    monkeypatch.setattr(GrammarCompiler, "_compile", compile_slowly)
    engine = engine_of(runner, byte_tokenizer(), limits=Limits(20, 4, 9))
    with pytest.raises(ValueError, match=r"the regex has 262,145 bytes, but the limit is 262,144"):
        engine.add(Request((1, 2), greedy(9, structure=("regex", "a" * (MAX_BYTES + 1)))))
    engine.grammar_limit_s = 0.0
    for name in range(5):
        large = greedy(9, structure=("regex", "a" * (SMALL_BYTES + 1)))
        engine.add(Request((1, 2), large, request_id=name))
    engine.grammar_limit_s = 1e9
    engine.add(Request((1, 2), greedy(9, structure=("regex", "ab+")), request_id=5))
    engine.compiling[5][1].result()
    refused = dict(engine.start_compiled())
    assert refused.keys() == {0, 1, 2, 3, 4} and engine.requests.keys() == {5}
    assert str(refused[0]) == "the grammar takes more than 1e+09 s to compile; a simpler one works"
    engine.abort(5)
    may_compile.set()
    assert_empty(engine)


# -- many


def test_a_thousand_requests_leave_nothing_behind(model: ReferenceModel, runner: Runner) -> None:
    """Some are aborted, some fail, memory is short."""
    chance = random.Random(0)
    runs = Failing(runner, lambda batch: any(map(is_marked, batch.entries)))
    asked = Asked(engine_of(runner, model.tokenizer, 14, Limits(60, 10, 40), runs))
    engine = asked.engine
    aborted = set()
    failing = set()
    num_full = 0
    bias = {MARK: -100.0}
    while len(asked.got) < 1000:
        for _ in range(chance.randrange(8)):
            n = chance.choice([1, 1, 1, 2, 4])
            prompt = drawn_tokens(chance.randint(1, 22), chance.randrange(20), 250)
            params = SamplingParams(
                temperature=chance.choice([0, 1.0]),
                n=n,
                max_tokens=chance.choice([1, 3, 3, 40]),
                logit_bias=bias,
                prompt_logprobs=chance.choice([None, None, 0]),
                logprobs=0,
                stop=chance.choice([(), ("e",)]),
            )
            fails = chance.random() < 0.06
            try:
                name = asked.add(
                    Request(
                        (*prompt, MARK) if fails else prompt,
                        params,
                        chance.randrange(3),
                        chance.choice("ab"),
                    )
                )
            except QueueFull:
                num_full += 1
                del asked.got[len(asked.got) - 1]
            else:
                failing |= {name} if fails else set()
        for name in chance.sample(
            sorted(engine.requests), min(len(engine.requests), chance.randrange(2))
        ):
            engine.abort(name)
            aborted.add(name)
        asked.step()
    asked.drain()
    for name, mine in asked.got.items():
        if name not in aborted:
            assert all(
                got.reason == "error" if name in failing else got.reason in ("stop", "length")
                for got in mine
            )
    counters = engine.scheduler.counters()
    assert (
        counters.num_preemptions > 0
        and counters.num_hit_tokens > 0
        and num_full > 0
        and len(aborted) > 100
    )
    assert engine.num_failures == len(failing - aborted) > 10
