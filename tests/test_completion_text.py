"""The text of completions over tokenizers of the SentencePiece line, and the offsets of tokens in
it: what is shown is the text of all ids, and each token is where its offset says."""

import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from starlette.testclient import TestClient

from sentencepieces import TOKENS, metaspace_tokenizer, sentencepiece_tokenizer
from shardwise.formats.huggingface.hf_config import from_hugging_face
from shardwise.formats.tokenizers.tokenizer import Tokenizer
from shardwise.formats.tokenizers.train_bpe import byte_tokenizer
from shardwise.serve.api.server import make_app
from shardwise.serve.settings import ServerSettings
from test_server import post, stream
from tiny_engine import TEMPLATE, TinyEngine, TinyModel
from tiny_models import our_weights, tiny_model

KINDS = {"prepend": sentencepiece_tokenizer, "metaspace": metaspace_tokenizer}
BOS = 1
FIRST = TOKENS.index("▁a")
NEXT = TOKENS.index("b")


def client_of(tokenizer: Tokenizer) -> TestClient:
    theirs = tiny_model("llama", vocab_size=272, max_position_embeddings=256)
    config = from_hugging_face(theirs.config.to_dict())
    tokenizer = replace(tokenizer, chat_template=TEMPLATE)
    model = TinyModel(theirs, config, our_weights(theirs), tokenizer)
    return TestClient(make_app(TinyEngine(model), ServerSettings(model_names=("tiny",))))


@pytest.fixture(scope="module", params=list(KINDS))
def client(request: pytest.FixtureRequest) -> Iterator[TestClient]:
    with client_of(KINDS[request.param]()) as client:
        yield client


def forced(token: int, **fields: Any) -> dict[str, Any]:
    """A request whose first token is forced; those after it are the model's."""
    return {"temperature": 0, "max_tokens": 1, "logit_bias": {str(token): 100}, **fields}


def streamed_text(client: TestClient, body: dict[str, Any]) -> str:
    events = stream(client, "/v1/completions", body)
    return "".join(choice["text"] for event in events for choice in event["choices"])


@pytest.mark.parametrize("echo", [False, True])
def test_the_first_word_keeps_its_space(client: TestClient, echo: bool) -> None:
    body = forced(FIRST, prompt="ab b", echo=echo)
    (choice,) = post(client, "/v1/completions", body)["choices"]
    assert choice["text"] == ("ab b a" if echo else " a")
    assert streamed_text(client, body) == choice["text"]


def test_a_client_goes_on_from_the_same_tokens(client: TestClient) -> None:
    (choice,) = post(client, "/v1/completions", forced(FIRST, prompt="ab", max_tokens=3))["choices"]
    counted = post(client, "/tokenize", {"prompt": "ab" + choice["text"]})
    ids = post(client, "/tokenize", {"prompt": "ab"})["tokens"]
    assert counted["tokens"] == [*ids, FIRST, FIRST, FIRST]


def test_a_stop_string_may_begin_with_that_space(client: TestClient) -> None:
    body = forced(FIRST, prompt="ab", stop=" a", max_tokens=5)
    (choice,) = post(client, "/v1/completions", body)["choices"]
    assert (choice["text"], choice["stop_reason"]) == ("", " a")


def test_a_message_begins_without_a_space_as_in_hugging_face(client: TestClient) -> None:
    body = forced(FIRST, messages=[{"role": "user", "content": "ab"}], max_tokens=2)
    (choice,) = post(client, "/v1/chat/completions", body)["choices"]
    assert choice["message"]["content"] == "a a"


def test_a_message_that_is_continued_keeps_the_space(client: TestClient) -> None:
    messages = [{"role": "user", "content": "b"}, {"role": "assistant", "content": "ab"}]
    body = forced(FIRST, messages=messages, continue_final_message=True, max_tokens=2)
    (choice,) = post(client, "/v1/chat/completions", body)["choices"]
    assert choice["message"]["content"] == " a a"


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_what_is_shown_matches_the_grammar(client: TestClient, path: str) -> None:
    pytest.importorskip("llguidance")
    prompt: dict[str, Any] = {"messages": [{"role": "user", "content": "ab"}]}
    if path == "/v1/completions":
        prompt = {"prompt": "ab"}
    body = {"guided_regex": " (ab|ba) a", "max_tokens": 9, "temperature": 0, **prompt}
    (choice,) = post(client, path, body)["choices"]
    text = choice["text"] if "text" in choice else choice["message"]["content"]
    assert re.fullmatch(body["guided_regex"], text)


PROMPTS = {
    "words": "ab b a",
    "two spaces": "  ab  b",
    "control tokens": "ab<s> b</s>a",
    "bytes": "a漢字 é 漢b",
    "ids": [FIRST, NEXT, FIRST],
    "ids with control tokens": [BOS, FIRST, BOS, NEXT, 2, FIRST],
    "a control token alone": [BOS],
}


@pytest.mark.parametrize("prompt", PROMPTS.values(), ids=PROMPTS)
@pytest.mark.parametrize("first", [FIRST, NEXT, BOS])
def test_each_token_is_where_its_offset_says(
    client: TestClient, prompt: str | list[int], first: int
) -> None:
    body = forced(first, prompt=prompt, echo=True, logprobs=0, max_tokens=3)
    check_offsets(client, body, added=int(isinstance(prompt, str)))
    check_offsets(client, body | {"skip_special_tokens": False}, int(isinstance(prompt, str)))


@pytest.mark.parametrize("prompt", ["<|endoftext|>Hi <|endoftext|>é", [256, 104, 256]])
def test_offsets_of_bytes_with_control_tokens(prompt: str | list[int]) -> None:
    with client_of(byte_tokenizer()) as client:
        body = forced(256, prompt=prompt, echo=True, logprobs=0, max_tokens=2, ignore_eos=True)
        check_offsets(client, body, added=0)


def check_offsets(client: TestClient, body: dict[str, Any], added: int) -> None:
    """Check that the echo without the `added` tokens, and the completion, are cut at the offsets
    into the texts of the tokens; the space of a token may be missing at the start and after a
    control token."""
    (choice,) = post(client, "/v1/completions", body)["choices"]
    text, found = choice["text"], choice["logprobs"]
    offsets = found["text_offset"]
    echo = len(offsets) - body["max_tokens"]
    controls = {"<s>", "</s>", "<|endoftext|>"}
    for at, (start, end) in enumerate(zip(offsets, [*offsets[1:], len(text)], strict=True)):
        token = found["tokens"][at]
        is_skipped = at >= echo and token in controls and body.get("skip_special_tokens", True)
        if at < added or is_skipped:
            assert start == end
        elif not token.startswith("bytes:"):
            assert text[start:end] in (token, token.removeprefix(" "))
            may_drop = at == added or found["tokens"][at - 1] in controls
            assert text[start:end] == token or may_drop
    streamed = []
    for event in stream(client, "/v1/completions", body):
        streamed += event["choices"][0]["logprobs"]["text_offset"]
    assert streamed == offsets
