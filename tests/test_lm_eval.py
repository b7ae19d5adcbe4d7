"""lm-eval's `local-completions` and `local-chat-completions`: what version 0.4.13 sends, written
down from its runs, and what it reads of the answers, against transformers. It is not needed itself;
docs/serving.md says how to run it."""

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from starlette.testclient import TestClient

from shardwise.serve.api.server import make_app
from shardwise.serve.settings import ServerSettings
from tiny_engine import TinyEngine, TinyModel, talking_model

LOGPROB = 1e-4  # absolute, in fp32, of a sum over an answer
CONTEXT = "Question: How many legs does a spider have?\nAnswer:"
ANSWERS = (" six", " eight", " ten 🕷")
SCORING = {
    "model": "tiny",
    "temperature": 0,
    "max_tokens": 1,
    "logprobs": 1,
    "seed": 1234,
    "echo": True,
}
WRITING = {"model": "tiny", "max_tokens": 24, "temperature": 0.0, "seed": 1234}
STOPS = ["\n", "Question:", "<|endoftext|>"]
QUESTION = {"role": "user", "content": CONTEXT}


@pytest.fixture(scope="module")
def model() -> TinyModel:
    return talking_model()


@pytest.fixture
def client(model: TinyModel) -> Iterator[TestClient]:
    app = make_app(TinyEngine(model), ServerSettings(("tiny",), ("sesame",)))
    with TestClient(
        app, headers={"authorization": "Bearer sesame", "user-agent": "python-requests/2.34.2"}
    ) as client:
        yield client


def post(client: TestClient, path: str, body: dict[str, Any]) -> Any:
    answer = client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def ids_of(text: str) -> list[int]:
    return list(text.encode())


@torch.no_grad()
def next_rows(model: TinyModel, ids: Sequence[int]) -> torch.Tensor:
    """transformers' log-probabilities after each token."""
    rows: torch.Tensor = model.theirs(torch.tensor([list(ids)])).logits[0].log_softmax(-1)
    return rows


def likelihood(model: TinyModel, context: str, answer: str) -> tuple[float, bool]:
    """Of an answer after its context, and whether greedy decoding would give it."""
    num_context = len(ids_of(context))
    ids = ids_of(context + answer)
    rows = next_rows(model, ids)[num_context - 1 : -1]
    own = torch.tensor(ids[num_context:])
    return float(rows.gather(-1, own[:, None]).sum()), bool((rows.argmax(-1) == own).all())


def continuation(model: TinyModel, ids: list[int], num_tokens: int) -> list[int]:
    for _ in range(num_tokens):
        ids = [*ids, int(next_rows(model, ids)[-1].argmax())]
    return ids[-num_tokens:]


def read_likelihoods(answer: Any, context_lengths: Sequence[int]) -> list[tuple[float, bool]]:
    """As lm-eval does: the log-probabilities after the context but for the token made, and whether
    each is the highest that is told at its place."""
    found = []
    choices = sorted(answer["choices"], key=lambda choice: int(choice["index"]))
    for choice, length in zip(choices, context_lengths, strict=True):
        own = choice["logprobs"]["token_logprobs"][length:-1]
        top = choice["logprobs"]["top_logprobs"][length:-1]
        found.append(
            (sum(own), all(mine == max(each.values()) for mine, each in zip(own, top, strict=True)))
        )
    return found


@pytest.mark.parametrize("form", ["ids", "batch of ids", "text", "batch of texts"])
def test_likelihoods_are_those_of_transformers(
    client: TestClient, model: TinyModel, form: str
) -> None:
    greedy = next(
        text
        for length in range(1, 9)
        if (text := as_text(continuation(model, ids_of(CONTEXT), length))) is not None
    )
    answers = [*ANSWERS, greedy]
    expected = [likelihood(model, CONTEXT, answer) for answer in answers]
    assert [is_greedy for _, is_greedy in expected] == [False] * len(ANSWERS) + [True]
    texts = [CONTEXT + answer for answer in answers]
    forms: dict[str, list[Any]] = {
        "ids": [[ids_of(text)] for text in texts],
        "batch of ids": [[ids_of(text) for text in texts]],
        "text": texts,
        "batch of texts": [texts],
    }
    found: list[tuple[float, bool]] = []
    for prompt in forms[form]:
        told = post(client, "/v1/completions", {**SCORING, "prompt": prompt})
        found += read_likelihoods(told, [len(ids_of(CONTEXT))] * len(told["choices"]))
    assert [each for each, _ in found] == pytest.approx([each for each, _ in expected], abs=LOGPROB)
    assert [each for _, each in found] == [each for _, each in expected]


def as_text(ids: list[int]) -> str | None:
    """None if the bytes are no text, or tokens are among them that are no bytes."""
    try:
        return bytes(ids).decode()
    except ValueError:
        return None


def test_a_whole_text_is_scored_after_the_end_of_another(
    client: TestClient, model: TinyModel
) -> None:
    """Of perplexity tasks, which begin with the end token instead of a context."""
    eos = model.tokenizer.eos_id
    assert eos is not None
    ids = [eos, *ids_of("日本の首都は? 東京")]
    (found,) = read_likelihoods(post(client, "/v1/completions", {**SCORING, "prompt": [ids]}), [1])
    expected = next_rows(model, ids)[:-1].gather(-1, torch.tensor(ids[1:])[:, None]).sum()
    assert found[0] == pytest.approx(float(expected), abs=LOGPROB)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": [ids_of(CONTEXT)], "stop": STOPS}),
        ("/v1/completions", {"prompt": CONTEXT, "stop": STOPS}),
        ("/v1/completions", {"prompt": [ids_of(CONTEXT), ids_of("Question: 2 + 3?")], "stop": []}),
        ("/v1/chat/completions", {"messages": [QUESTION], "stop": ["\n", "Question:"]}),
        ("/v1/chat/completions", {"messages": [QUESTION], "stop": []}),
        (
            "/v1/chat/completions",
            {"messages": [{**QUESTION, "type": "text"}], "stop": ["é"], "do_sample": False},
        ),
    ],
)
def test_texts_are_those_of_transformers(
    client: TestClient, model: TinyModel, path: str, body: dict[str, Any]
) -> None:
    choices = sorted(
        post(client, path, {**body, **WRITING})["choices"], key=lambda choice: int(choice["index"])
    )
    if "messages" in body:
        prompts = [ids_of(model.tokenizer.chat(body["messages"]))]
        found = [choice["message"]["content"] for choice in choices]
    else:
        several = body["prompt"] if isinstance(body["prompt"], list) else [ids_of(body["prompt"])]
        prompts = several
        found = [choice["text"] for choice in choices]
    for prompt, text in zip(prompts, found, strict=True):
        made = continuation(model, prompt, WRITING["max_tokens"])  # type: ignore[arg-type]
        ended = next((at for at, id in enumerate(made) if id in model.tokenizer.eos_ids), len(made))
        whole = model.tokenizer.decode(made[:ended])
        assert (
            text
            == whole[
                : min(
                    (whole.find(stop) for stop in body["stop"] if stop in whole), default=len(whole)
                )
            ]
        )


def test_the_server_cuts_texts_for_it(client: TestClient) -> None:
    """`tokenizer_backend=auto` asks for these, and falls back to a tokenizer of its own without
    them."""
    info = client.get("/tokenizer_info").json()
    assert info["eos_token"] == "<|endoftext|>" and "message.role" in info["chat_template"]
    cut = {"add_special_tokens": False}
    assert post(client, "/tokenize", {"prompt": "test", **cut})["tokens"] == ids_of("test")
    assert len(post(client, "/tokenize", {"prompt": info["eos_token"], **cut})["tokens"]) == 1
    assert post(client, "/detokenize", {"tokens": ids_of(CONTEXT)}) == {"prompt": CONTEXT}
