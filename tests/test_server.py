"""What the server answers: against the model itself, against the documented shapes, and to requests
that are wrong."""

import asyncio
import base64
import json
import math
import re
import struct
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import schemathesis
import torch
from fastapi import FastAPI
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families
from starlette.testclient import TestClient
from transformers.utils.chat_template_utils import render_jinja_template

from examples import examples
from shardwise.formats.tokenizers.template_process import TemplateProcesses
from shardwise.serve.api.log import log_throughput, throughput
from shardwise.serve.api.server import make_app
from shardwise.serve.engine_client import EngineDied, Stats
from shardwise.serve.request import Request, SamplingParams
from shardwise.serve.settings import ServerSettings
from tiny_engine import LOOP, TEMPLATE, TinyEngine, TinyModel, talking_model

LOGPROB = 1e-5  # absolute, in fp32
GREEDY = {"temperature": 0, "max_tokens": 12}
ASKED: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}
CHAT = {**ASKED, **GREEDY}
MIB = 1 << 20


@pytest.fixture(scope="module")
def model() -> TinyModel:
    return talking_model()


@pytest.fixture
def engine(model: TinyModel) -> TinyEngine:
    return TinyEngine(model)


@pytest.fixture
def client(engine: TinyEngine) -> Iterator[TestClient]:
    with client_of(engine) as client:
        yield client


def client_of(engine: TinyEngine, **changes: Any) -> TestClient:
    app = make_app(engine, ServerSettings(**{"model_names": ("tiny", "other/name"), **changes}))
    return TestClient(app)


def post(client: TestClient, path: str, body: Any, status: int = 200, **headers: str) -> Any:
    answer = client.post(path, json=body, headers=headers)
    assert answer.status_code == status, answer.text
    return answer.json()


def tokens_used(answer: dict[str, Any]) -> dict[str, int]:
    """Without how many of them were found in the cache, which depends on who asked before."""
    return {
        name: number for name, number in answer["usage"].items() if name != "prompt_tokens_details"
    }


def stream(client: TestClient, path: str, body: dict[str, Any]) -> list[Any]:
    """The events before [DONE], each parsed."""
    answer = client.post(path, json={**body, "stream": True})
    assert (answer.status_code, answer.headers["content-type"]) == (
        200,
        "text/event-stream; charset=utf-8",
    )
    *events, done, rest = answer.text.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    return [json.loads(event.removeprefix("data: ")) for event in events]


# What is answered


@torch.no_grad()
def their_answer(
    model: TinyModel, tokens: list[int], num_new: int
) -> tuple[list[int], list[float]]:
    """What transformers goes on with, greedily, and the log-probabilities of that."""
    num_prompt = len(tokens)
    logprobs = []
    for _ in range(num_new):
        row = model.theirs(torch.tensor([tokens])).logits[0, -1].log_softmax(-1)
        tokens = [*tokens, int(row.argmax())]
        logprobs.append(float(row.max()))
    return tokens[num_prompt:], logprobs


@pytest.mark.parametrize("prompt", ["Hello, world", "é→ is not ASCII", "a"])
def test_a_completion_is_what_the_model_says(
    client: TestClient, model: TinyModel, prompt: str
) -> None:
    tokens, logprobs = their_answer(model, list(prompt.encode()), 12)
    answer = post(
        client, "/v1/completions", {"prompt": prompt, "logprobs": 0, "ignore_eos": True, **GREEDY}
    )
    (choice,) = answer["choices"]
    assert (choice["text"], choice["finish_reason"]) == (
        bytes(tokens).decode(errors="replace"),
        "length",
    )
    assert choice["logprobs"]["token_logprobs"] == pytest.approx(logprobs, abs=LOGPROB)
    num_prompt = len(prompt.encode())
    num_new = 12
    expected = {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_new,
        "total_tokens": num_prompt + num_new,
    }
    assert answer["usage"] == {**expected, "prompt_tokens_details": {"cached_tokens": 0}}
    assert (answer["object"], answer["model"]) == ("text_completion", "tiny")


@pytest.mark.parametrize("give_ids", [False, True])
def test_an_echo_has_the_log_probabilities_that_transformers_computes(
    client: TestClient, model: TinyModel, give_ids: bool
) -> None:
    text = "The sky is blue"
    ids = list(text.encode())
    body = {
        "prompt": ids if give_ids else text,
        "echo": True,
        "logprobs": 3,
        "temperature": 0,
        "max_tokens": 1,
    }
    (choice,) = post(client, "/v1/completions", body)["choices"]
    found = choice["logprobs"]
    with torch.no_grad():
        rows = model.theirs(torch.tensor([ids])).logits[0].log_softmax(-1)
    expected = [float(row[id]) for row, id in zip(rows, ids[1:], strict=False)] + [
        float(rows[-1].max())
    ]
    assert choice["text"].startswith(text)
    assert found["tokens"][: len(ids)] == list(text) and len(found["tokens"]) == len(ids) + 1
    assert found["token_logprobs"][0] is None and found["top_logprobs"][0] is None
    assert found["token_logprobs"][1:] == pytest.approx(expected, abs=LOGPROB)
    for row, top, logprob in zip(
        rows, found["top_logprobs"][1:], found["token_logprobs"][1:], strict=True
    ):
        assert sorted(top.values(), reverse=True)[:3] == pytest.approx(
            row.topk(3).values.tolist(), abs=LOGPROB
        )
        assert logprob in top.values()
    assert found["text_offset"][: len(ids)] == list(range(len(ids)))


def test_the_echo_alone(client: TestClient) -> None:
    body = {"prompt": "abc", "echo": True, "logprobs": 1, "max_tokens": 0}
    answer = post(client, "/v1/completions", body)
    (choice,) = answer["choices"]
    assert (choice["text"], choice["finish_reason"], answer["usage"]["completion_tokens"]) == (
        "abc",
        "length",
        0,
    )
    assert choice["logprobs"]["tokens"] == list("abc")


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"n": 3, "temperature": 1.0, "seed": 7},
        {"prompt": ["ab", "cde"], "n": 2, "temperature": 0.5, "seed": 1},
        {"echo": True, "logprobs": 2},
        {"prompt": [[97, 98], [99]]},
        {"max_tokens": 1},
        {"stop": ["{", "\n"]},
    ],
)
def test_a_streamed_completion_adds_up_to_the_whole(
    client: TestClient, changes: dict[str, Any]
) -> None:
    body = {"prompt": "Hello", **GREEDY, **changes}
    whole = post(client, "/v1/completions", body)
    *chunks, last = stream(
        client, "/v1/completions", {**body, "stream_options": {"include_usage": True}}
    )
    assert last["choices"] == [] and tokens_used(last) == tokens_used(whole)
    assert all(chunk["usage"] is None and chunk["id"] == last["id"] for chunk in chunks)
    for choice in whole["choices"]:
        mine = [
            each
            for chunk in chunks
            for each in chunk["choices"]
            if each["index"] == choice["index"]
        ]
        assert "".join(each["text"] for each in mine) == choice["text"]
        assert [each["finish_reason"] for each in mine] == [None] * (len(mine) - 1) + [
            choice["finish_reason"]
        ]
        for name in choice["logprobs"] or ():
            assert [entry for each in mine for entry in each["logprobs"][name]] == choice[
                "logprobs"
            ][name]


def test_events_have_no_line_ends_of_their_own(client: TestClient) -> None:
    """U+0085, U+2028 and U+2029 are characters of JSON, at which some clients end a line."""
    text = "a\u2028b\u0085c\u2029d"
    body = {"prompt": text, "echo": True, "stream": True, **GREEDY}
    raw = client.post("/v1/completions", json=body).content.decode()
    assert raw.splitlines() == raw.split("\n")[:-1]
    events = stream(client, "/v1/completions", {"prompt": text, "echo": True, **GREEDY})
    assert "".join(each["text"] for event in events for each in event["choices"]).startswith(text)


def test_an_empty_model_name_is_none_and_usage_in_each_chunk_is_refused(client: TestClient) -> None:
    assert (
        post(client, "/v1/completions", {"prompt": "a", "model": "", **GREEDY})["model"] == "tiny"
    )
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {"prompt": "a", "stream": True, "stream_options": options, **GREEDY}
    assert "continuous_usage_stats" in str(post(client, "/v1/completions", body, 400))


def test_choices_are_in_the_order_of_the_prompts(client: TestClient) -> None:
    prompts = ["abc", "x", "Hello, world"]
    alone = [
        post(client, "/v1/completions", {"prompt": each, **GREEDY})["choices"][0]["text"]
        for each in prompts
    ]
    choices = post(client, "/v1/completions", {"prompt": prompts, **GREEDY, "n": 2, "best_of": 2})[
        "choices"
    ]
    assert [choice["index"] for choice in choices] == list(range(6))
    assert [choice["text"] for choice in choices] == [text for text in alone for _ in range(2)]


def test_every_sampling_field_reaches_the_engine(client: TestClient, engine: TinyEngine) -> None:
    fields: dict[str, Any] = {
        "temperature": 0.5,
        "top_k": 5,
        "top_p": 0.9,
        "min_p": 0.01,
        "repetition_penalty": 1.1,
        "seed": 3,
        "frequency_penalty": 0.5,
        "presence_penalty": -0.5,
        "n": 2,
        "max_tokens": 4,
        "min_tokens": 1,
        "stop": ["zz"],
        "stop_token_ids": [7],
        "ignore_eos": True,
        "include_stop_str_in_output": True,
        "skip_special_tokens": False,
        "allowed_token_ids": [*range(97, 110)],
        "bad_words": ["zz"],
        "logprobs": 2,
        "prompt_logprobs": 1,
    }
    ours = {"prompt": "ab", "logit_bias": {"5": -1.5}, "priority": -2, "cache_salt": "mine"}
    answer = post(
        client, "/v1/completions", {**ours, **fields, "user": "somebody", "not_known_yet": 1}
    )
    (request,) = engine.asked
    assert request.params == SamplingParams(**{**fields, "logit_bias": {5: -1.5}})
    assert (request.tokens, request.priority, request.salt) == ((97, 98), -2, "mine")
    assert len(answer["choices"][1]["prompt_logprobs"]) == 2


def test_null_is_as_good_as_left_out(client: TestClient, engine: TinyEngine) -> None:
    names = (
        "model temperature n stop max_tokens logit_bias stream stream_options suffix echo logprobs"
    )
    post(client, "/v1/completions", {"prompt": "a", **dict.fromkeys(names.split())})
    post(client, "/v1/completions", {"prompt": "a"})
    assert engine.asked[0] == engine.asked[1] and engine.asked[0].params == SamplingParams()


def test_what_was_found_in_the_cache_is_told_unless_the_salt_is_another(client: TestClient) -> None:
    body = {"prompt": "x" * 40, "max_tokens": 1}
    found = [
        post(client, "/v1/completions", {**body, **salt})["usage"]["prompt_tokens_details"][
            "cached_tokens"
        ]
        for salt in ({}, {}, {"cache_salt": "mine"})
    ]
    assert found == [0, 32, 0]  # whole pages of 16


def test_the_default_length_of_a_completion_gives_way_to_a_long_prompt(client: TestClient) -> None:
    answer = post(
        client, "/v1/completions", {"prompt": "a" * 250, "temperature": 0, "ignore_eos": True}
    )
    assert answer["usage"]["completion_tokens"] == 6


def test_prompt_logprobs_have_the_form_of_vllm(client: TestClient) -> None:
    body = {"prompt": "ab", "prompt_logprobs": 2, **GREEDY}
    first, second = post(client, "/v1/completions", body)["choices"][0]["prompt_logprobs"]
    assert first is None and second[str(ord("b"))]["decoded_token"] == "b"
    assert sorted(entry["rank"] for entry in second.values() if entry["rank"]) == [1, 2]
    assert (
        post(client, "/v1/chat/completions", {**CHAT, "prompt_logprobs": 0})["prompt_logprobs"][0]
        is None
    )


def test_a_chat_is_its_template_gone_on_with(client: TestClient) -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    messages = [
        {"role": "developer", "content": "be short"},
        {"role": "user", "content": parts, "name": "me"},
    ]
    prompt = "system: be short\nuser: one\ntwo\nassistant: "
    text = post(client, "/v1/completions", {"prompt": prompt, **GREEDY})
    chat = post(client, "/v1/chat/completions", {"messages": messages, **GREEDY})
    assert chat["choices"][0]["message"] == {
        "role": "assistant",
        "content": text["choices"][0]["text"],
    }
    assert tokens_used(chat) == tokens_used(text) and chat["object"] == "chat.completion"


def prompt_of(client: TestClient, **body: Any) -> str:
    """The text of the prompt that the chat template renders."""
    tokens = post(client, "/tokenize", body)["tokens"]
    return str(post(client, "/detokenize", {"tokens": tokens})["prompt"])


WRITES_ALL = (
    "{% for m in messages %}[{{ m.role }}]{{ m.reasoning_content }}|{{ m.reasoning }}|"
    "{{ m.content | trim }}{% for call in m.tool_calls %}{{ call.function.name }}"
    "{{ call.function.arguments | tojson }}{% for name, value in call.function.arguments.items() "
    "%}<{{ name }}={{ value }}>{% endfor %}{% endfor %}{% endfor %}"
    "{% if enable_thinking is false %}<no thoughts>{% endif %}{{ reasoning_effort }}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
CALL = {
    "id": "1", "type": "function",
    "function": {"name": "add", "arguments": '{"a": 3, "b": "é"}'},
}  # fmt: skip


@pytest.fixture
def writer(model: TinyModel) -> Iterator[TestClient]:
    """Serves a template that writes all that it gets."""
    engine = TinyEngine(model)
    engine.tokenizer = replace(model.tokenizer, chat_template=WRITES_ALL)
    with client_of(engine) as client:
        yield client


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning"])
def test_past_tool_calls_and_reasoning_reach_the_template(writer: TestClient, name: str) -> None:
    messages = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "tool_calls": [CALL], name: "hm"},
        {"role": "tool", "content": "7", "tool_call_id": "1"},
    ]
    assert prompt_of(writer, messages=messages) == (
        '[user]||hi[assistant]hm|hm|add{"a": 3, "b": "é"}<a=3><b=é>[tool]||7[assistant]'
    )
    chat = post(writer, "/v1/chat/completions", {"messages": messages, **GREEDY})
    assert chat["usage"]["prompt_tokens"] == len(prompt_of(writer, messages=messages).encode())


def test_variables_of_the_request_reach_the_template(writer: TestClient) -> None:
    kwargs = {"enable_thinking": False}
    assert prompt_of(writer, **ASKED, chat_template_kwargs=kwargs) == (
        "[user]||hi<no thoughts>[assistant]"
    )
    assert prompt_of(writer, **ASKED, reasoning_effort="low") == "[user]||hilow[assistant]"
    assert prompt_of(writer, **ASKED, reasoning_effort="none") == (
        "[user]||hi<no thoughts>none[assistant]"
    )


@pytest.mark.parametrize(
    ("template", "content", "end"),
    [
        (TEMPLATE, "The sky is ", "assistant: The sky is "),
        (TEMPLATE, [{"type": "text", "text": "The "}, {"type": "text", "text": "sky"}],
         "assistant: The \nsky"),
        (WRITES_ALL, "The sky is ", "[assistant]||The sky is"),  # it trims contents
    ],
)  # fmt: skip
def test_the_last_message_is_continued(
    model: TinyModel, template: str, content: Any, end: str
) -> None:
    """The prompt is that of transformers, and the completion is that of the text."""
    engine = TinyEngine(model)
    engine.tokenizer = replace(model.tokenizer, chat_template=template)
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": content}]
    with client_of(engine) as client:
        body = {"messages": messages, "continue_final_message": True}
        prompt = prompt_of(client, **body)
        chat = post(client, "/v1/chat/completions", {**body, **GREEDY})
        text = post(client, "/v1/completions", {"prompt": prompt, **GREEDY})
    assert prompt.endswith(end)
    assert chat["choices"][0]["message"]["content"] == text["choices"][0]["text"]
    if isinstance(content, str):
        theirs, _ = render_jinja_template(
            [messages], chat_template=template, continue_final_message=True
        )
        assert theirs == [prompt]


PARTS = (
    "{% for m in messages %}[{{ m.role }}]{% for part in m.content %}"
    "{% if part.type == 'text' %}<{{ part.text }}>{% endif %}{% endfor %}{% endfor %}"
)


def test_a_template_that_knows_content_as_parts_gets_parts(model: TinyModel) -> None:
    engine = TinyEngine(model)
    engine.tokenizer = replace(model.tokenizer, chat_template=PARTS)
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    messages = [{"role": "user", "content": "hi"}, {"role": "user", "content": parts}]
    with client_of(engine) as client:
        assert prompt_of(client, messages=messages) == "[user]<hi>[user]<one><two>"
        body = {"messages": messages, "continue_final_message": True}
        assert prompt_of(client, **body) == "[user]<hi>[user]<one><two"


@pytest.mark.parametrize(("side", "kept"), [(None, "cdef"), ("left", "cdef"), ("right", "abcd")])
def test_a_prompt_is_truncated(
    client: TestClient, engine: TinyEngine, side: str | None, kept: str
) -> None:
    body = {"truncate_prompt_tokens": 4, "truncation_side": side}
    post(client, "/v1/completions", {"prompt": ["abcdef", "a"], **GREEDY, **body})
    assert [bytes(request.tokens).decode() for request in engine.asked] == [kept, "a"]
    post(client, "/v1/completions", {"prompt": "a" * 400, **GREEDY, "truncate_prompt_tokens": -1})
    assert len(engine.asked[-1].tokens) == 256 - 12
    one, other = (
        post(client, "/v1/embeddings", {"input": text, **changes})["data"][0]["embedding"]
        for text, changes in ((kept, {}), ("abcdef", body))
    )
    assert one == other


def test_chats_that_loop_in_the_template_are_400s_and_hold_up_no_others(model: TinyModel) -> None:
    loop = "{% if messages[0].content == 'loop' %}" + LOOP + "{% endif %}x"
    tokenizer = replace(model.tokenizer, chat_template=loop)
    tokenizer.__dict__["_templates"] = TemplateProcesses(cpu_s=0.5)

    def chat(content: str, status: int) -> Any:
        messages = [{"role": "user", "content": content}]
        return post(client, "/v1/chat/completions", {"messages": messages, **GREEDY}, status)

    engine = TinyEngine(replace(model, tokenizer=tokenizer))
    with client_of(engine) as client, ThreadPoolExecutor(8) as pool:
        looping = [pool.submit(chat, "loop", 400) for _ in range(8)]
        chat("hello", 200)
        post(client, "/tokenize", {"prompt": "hello"})
        assert not any(each.done() for each in looping)
        for each in looping:
            assert "more than 0.5 s of CPU time" in each.result()["error"]["message"]


def test_a_chat_without_a_limit_goes_on_as_long_as_there_is_room(client: TestClient) -> None:
    messages = [{"role": "user", "content": "x" * 180}]
    unlimited = post(
        client, "/v1/chat/completions", {"messages": messages, "temperature": 0, "ignore_eos": True}
    )
    assert unlimited["usage"]["total_tokens"] == 256
    both = {"messages": messages, "max_tokens": 9, "max_completion_tokens": 3, "ignore_eos": True}
    assert post(client, "/v1/chat/completions", both)["usage"]["completion_tokens"] == 3


@pytest.mark.parametrize("n", [1, 3])
def test_a_streamed_chat_adds_up_to_the_whole(client: TestClient, n: int) -> None:
    body = {**CHAT, "n": n, "seed": 5, "temperature": 1.0, "logprobs": True, "top_logprobs": 2}
    whole = post(client, "/v1/chat/completions", body)
    *chunks, last = stream(
        client, "/v1/chat/completions", {**body, "stream_options": {"include_usage": True}}
    )
    assert last["choices"] == [] and tokens_used(last) == tokens_used(whole)
    for choice in whole["choices"]:
        mine = [
            each
            for chunk in chunks
            for each in chunk["choices"]
            if each["index"] == choice["index"]
        ]
        assert mine[0]["delta"] == {"role": "assistant", "content": ""}
        assert (
            "".join(each["delta"].get("content", "") for each in mine)
            == choice["message"]["content"]
        )
        assert [each["finish_reason"] for each in mine] == [None] * (len(mine) - 1) + [
            choice["finish_reason"]
        ]
        entries = [entry for each in mine[1:] for entry in each["logprobs"]["content"]]
        assert entries == choice["logprobs"]["content"] and len(entries[0]["top_logprobs"]) == 2


def test_log_probabilities_of_a_chat_spell_its_bytes(client: TestClient) -> None:
    body = {**CHAT, "logprobs": True, "top_logprobs": 1}
    (choice,) = post(client, "/v1/chat/completions", body)["choices"]
    entries = choice["logprobs"]["content"]
    spelled = b"".join(bytes(entry["bytes"]) for entry in entries)
    assert spelled.decode(errors="replace") == choice["message"]["content"]
    for entry in entries:  # greedy: the chosen is the likeliest
        assert entry["logprob"] == pytest.approx(entry["top_logprobs"][0]["logprob"], abs=LOGPROB)
        assert entry["token"] == entry["top_logprobs"][0]["token"]


def test_embeddings_in_both_forms_have_length_one(client: TestClient) -> None:
    floats = post(client, "/v1/embeddings", {"input": ["abc", "x"]})
    packed = post(
        client, "/v1/embeddings", {"input": [[97, 98, 99], [120]], "encoding_format": "base64"}
    )
    assert [entry["index"] for entry in floats["data"]] == [0, 1]
    assert floats["usage"] == packed["usage"] == {"prompt_tokens": 4, "total_tokens": 4}
    for one, other in zip(floats["data"], packed["data"], strict=True):
        vector = struct.unpack(f"<{len(one['embedding'])}f", base64.b64decode(other["embedding"]))
        assert vector == pytest.approx(one["embedding"], abs=1e-7)
        assert math.hypot(*vector) == pytest.approx(1, abs=1e-6)


@settings(max_examples=examples(25), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=st.text(max_size=40))
def test_text_comes_back_from_its_tokens(client: TestClient, text: str) -> None:
    tokens = post(client, "/tokenize", {"prompt": text})
    ids = list(text.encode())
    assert tokens == {"count": len(ids), "max_model_len": 256, "tokens": ids, "token_strs": None}
    assert post(client, "/detokenize", {"tokens": tokens["tokens"]}) == {"prompt": text}


def test_messages_are_tokenized_in_their_template(client: TestClient) -> None:
    body = {"messages": CHAT["messages"], "return_token_strs": True}
    assert "".join(post(client, "/tokenize", body)["token_strs"]) == "user: hi\nassistant: "
    without = post(client, "/tokenize", {**body, "add_generation_prompt": False})
    assert "".join(without["token_strs"]) == "user: hi\n"


def test_models(client: TestClient) -> None:
    models = client.get("/v1/models").json()["data"]
    assert [model["id"] for model in models] == ["tiny", "other/name"] and models[0][
        "max_model_len"
    ] == 256
    assert client.get("/v1/models/other/name").json() == models[1]
    assert client.get("/v1/models/nobody").json()["error"]["code"] == "model_not_found"
    assert (
        post(client, "/v1/completions", {"prompt": "a", "model": "other/name"})["model"]
        == "other/name"
    )


SCHEMA_OF_A_TOWN = {
    "type": "object",
    "properties": {"name": {"enum": ["Rome", "Oslo"]}, "old": {"type": "boolean"}},
    "required": ["name", "old"], "additionalProperties": False,
}  # fmt: skip


@pytest.mark.parametrize(
    "asked",
    [
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "town", "schema": SCHEMA_OF_A_TOWN},
            }
        },
        {"guided_json": SCHEMA_OF_A_TOWN},
        {"structured_outputs": {"json": json.dumps(SCHEMA_OF_A_TOWN)}},
    ],
)
def test_an_answer_follows_its_schema(client: TestClient, asked: dict[str, Any]) -> None:
    body = {
        "messages": CHAT["messages"],
        "max_tokens": 200,
        "seed": 3,
        "logit_bias": {"32": -100, "10": -100},
        **asked,
    }
    (choice,) = post(client, "/v1/chat/completions", body)["choices"]
    town = json.loads(choice["message"]["content"])
    assert (
        choice["finish_reason"] == "stop"
        and town["name"] in ("Rome", "Oslo")
        and town["old"] in (True, False)
    )


@pytest.mark.parametrize(
    "asked",
    [
        {"guided_choice": ["yes", "no."]},
        {"guided_grammar": 'start: "yes" | "no."'},
        {"structured_outputs": {"choice": ["yes", "no."], "regex": None, "json_object": False}},
        {"structured_outputs": {"grammar": 'root ::= "yes" | "no."'}},
    ],
)
def test_an_answer_is_one_of_the_choices(client: TestClient, asked: dict[str, Any]) -> None:
    for path in ("/v1/completions", "/v1/chat/completions"):
        answer = post(client, path, {**PROMPT, **CHAT, "seed": 2, **asked})["choices"][0]
        text = answer["text"] if "text" in answer else answer["message"]["content"]
        assert text in ("yes", "no.") and answer["finish_reason"] == "stop"


def test_any_object_may_be_asked_for(client: TestClient) -> None:
    body = {
        **CHAT, "temperature": 1, "seed": 1, "max_tokens": 60,
        "logit_bias": {"125": 50, "34": -100}, "structured_outputs": {"json_object": True},
    }  # fmt: skip
    (choice,) = post(client, "/v1/chat/completions", body)["choices"]
    assert json.loads(choice["message"]["content"]) == {}


def test_an_answer_follows_its_regex(client: TestClient) -> None:
    body = {"prompt": "a", "guided_regex": "[a-f]{3}-[0-9]{2}", "max_tokens": 20}
    (choice,) = post(client, "/v1/completions", body)["choices"]
    assert re.fullmatch("[a-f]{3}-[0-9]{2}", choice["text"])


@pytest.mark.parametrize("stream_it", [False, True])
@pytest.mark.parametrize(
    "asked",
    [
        {"guided_regex": "[a-f]{3}", "min_tokens": 9},
        {"guided_regex": "[a-f]{3}", "stop_token_ids": [98], "min_tokens": 9},
        {"guided_regex": "[a-f]{3}", "allowed_token_ids": [97, 98, 99]},
        {"guided_regex": "[a-f]{3}", "logit_bias": {str(at): -100 for at in range(97, 103)}},
        {"guided_json": {"enum": ["abc", "def"]}, "min_tokens": 60},
    ],
)
def test_a_complete_grammar_ends_the_completion(
    client: TestClient, asked: dict[str, Any], stream_it: bool
) -> None:
    """Whatever min_tokens and other constraints ask for, and in a batch."""
    body = {"prompt": ["a", "b"], "max_tokens": 80, "seed": 1, "n": 2, **asked}
    texts = [""] * 4
    reasons = [""] * 4
    answers = stream if stream_it else lambda *each: [post(*each)]
    for answer in answers(client, "/v1/completions", body):
        for choice in answer["choices"]:
            texts[choice["index"]] += choice["text"]
            reasons[choice["index"]] += choice["finish_reason"] or ""
    assert reasons == ["stop"] * 4
    form = "[a-f]{3}" if "guided_regex" in asked else '"(abc|def)"'
    assert all(re.fullmatch(form, text) for text in texts), texts


def test_only_allowed_tokens_and_no_bad_words_are_generated(client: TestClient) -> None:
    body = {"prompt": "a", "max_tokens": 60, "seed": 1, "allowed_token_ids": [97, 98], "n": 2}
    texts = [choice["text"] for choice in post(client, "/v1/completions", body)["choices"]]
    assert all(set(text) == {"a", "b"} and "ab" in text for text in texts)
    without = post(client, "/v1/completions", {**body, "bad_words": ["ab"]})["choices"]
    assert all(re.fullmatch("b*a*", choice["text"]) for choice in without)


def test_a_completion_ends_where_constraints_leave_no_token(
    client: TestClient, engine: TinyEngine
) -> None:
    """Within a grammar the completion is cut off, so the reason is length."""
    body = {"prompt": "a", "guided_regex": "abc", "bad_words": ["abc"], "min_tokens": 5}
    (choice,) = post(client, "/v1/completions", body)["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("ab", "length")
    assert engine.engine.num_failures == 0


# What is refused

PROMPT = {"prompt": "a"}
WRONG: list[tuple[str, Any, str | None, str]] = [
    ("/v1/completions", {**PROMPT, "temperature": -1}, "temperature", "greedy"),
    ("/v1/completions", {**PROMPT, "temperature": "1"}, "temperature", "must be a valid number"),
    ("/v1/completions", {**PROMPT, "temperature": True}, "temperature", "must be a valid number"),
    ("/v1/completions", {**PROMPT, "max_tokens": -5}, "max_tokens", "at least 1"),
    ("/v1/completions", {**PROMPT, "max_tokens": 0}, "max_tokens", "at least 1 unless"),
    ("/v1/completions", {**PROMPT, "max_tokens": 1.5}, "max_tokens", "must be a valid integer"),
    ("/v1/completions", {**PROMPT, "max_tokens": 10**300}, "max_tokens", "must be less than"),
    ("/v1/completions", {**PROMPT, "top_k": 2**62, "top_p": 0}, "top_p", "above 0"),
    ("/v1/completions", {**PROMPT, "seed": 2**63}, "seed", "must be less than"),
    ("/v1/completions", {**PROMPT, "n": 0}, "n", "greater than or equal to 1"),
    ("/v1/completions", {**PROMPT, "n": 129}, "n", "less than or equal to 128"),
    ("/v1/completions", {**PROMPT, "best_of": 2}, "best_of", "must equal n"),
    ("/v1/completions", {**PROMPT, "suffix": "b"}, "suffix", "not supported"),
    ("/v1/completions", {**PROMPT, "logprobs": 21}, "logprobs", "from 0 to 20"),
    ("/v1/completions", {**PROMPT, "stop": [""]}, "stop", "1 to 1000 characters"),
    ("/v1/completions", {**PROMPT, "stop": 3}, "stop", "a text or a list of texts"),
    ("/v1/completions", {**PROMPT, "logit_bias": {"a": 1}}, "logit_bias", "not 'a'"),
    ("/v1/completions", {**PROMPT, "logit_bias": {"264": 1}},
     "logit_bias", "from 0 to 263, but has 264"),
    ("/v1/completions", {**PROMPT, "logit_bias": {"1": 101}}, "logit_bias", "between -100 and 100"),
    ("/v1/completions", {**PROMPT, "stream_options": {}}, "stream_options", "stream: true"),
    ("/v1/completions", {**PROMPT, "response_format": {"type": "xml"}},
     "response_format", "'text', 'json_object' or"),
    ("/v1/completions", {**PROMPT, "response_format": {"type": "json_schema"}},
     "response_format", "an object"),
    ("/v1/completions", {**PROMPT, "guided_json": {}, "guided_regex": "a"}, None, "must not be "
        "combined"),
    ("/v1/completions", {**PROMPT, "structured_outputs": {"choice": []}},
     "structured_outputs", "texts under choice"),
    ("/v1/completions", {**PROMPT, "structured_outputs": {"structural_tag": "a"}},
     "structured_outputs", "'structural_tag'"),
    ("/v1/completions", {**PROMPT, "guided_choice": ["a"], "structured_outputs": {"regex": "a"}},
     None, "must not be combined"),
    ("/v1/completions", {**PROMPT, "guided_grammar": "root ::= ("}, None, "the grammar cannot be"),
    ("/v1/completions", {**PROMPT, "guided_regex": "("}, None, "("),
    ("/v1/completions", {**PROMPT, "guided_regex": "a", "allowed_token_ids": [98]}, None,
     "allowed_token_ids, bad_words and the grammar exclude each other"),
    ("/v1/completions", {**PROMPT, "bad_words": ["b"], "allowed_token_ids": [98]}, None,
     "no token may come first"),
    ("/v1/completions", {**PROMPT, "allowed_token_ids": []}, "allowed_token_ids", "empty"),
    ("/v1/completions", {**PROMPT, "allowed_token_ids": [264]},
     "allowed_token_ids", "from 0 to 263, but has 264"),
    ("/v1/completions", {**PROMPT, "bad_words": [""]}, "bad_words", "at least 1 character"),
    ("/v1/completions", {**PROMPT, "bad_words": "a"}, "bad_words", "must be a valid list"),
    ("/v1/completions", {**PROMPT, "priority": 2**31}, "priority", "less than"),
    ("/v1/completions", {}, "prompt", "field required"),
    ("/v1/completions", {"prompt": ""}, "prompt", "is empty"),
    ("/v1/completions", {"prompt": []}, "prompt", "not empty"),
    ("/v1/completions", {"prompt": [[]]}, "prompt", "none empty"),
    ("/v1/completions", {"prompt": ["a", ""]}, "prompt", "is empty"),
    ("/v1/completions", {"prompt": ["a", 1]}, "prompt", "a list of texts"),
    ("/v1/completions", {"prompt": [True]}, "prompt", "a list of texts"),
    ("/v1/completions", {"prompt": [-1]}, "prompt", "but has -1"),
    ("/v1/completions", {"prompt": [264]}, "prompt", "from 0 to 263, but has 264"),
    ("/v1/completions", {"prompt": [10**4000]}, "prompt", "from 0 to 263"),
    ("/v1/completions", {"prompt": ["a"] * 1025}, "prompt", "1025 prompts"),
    ("/v1/completions", {"prompt": "a" * 256}, None, "exceed the 256 tokens that a request may "
        "have; a prompt of 255 tokens works"),
    ("/v1/completions", {"prompt": "a" * 250, "max_tokens": 7}, "max_tokens", "max_tokens=6 works"),
    ("/v1/completions", {**PROMPT, "min_tokens": 17}, "min_tokens", "from 0 to 16, the most"),
    ("/v1/completions", {"prompt": "a" * 250, "min_tokens": 7}, "min_tokens", "from 0 to 6"),
    ("/v1/chat/completions", {**ASKED, "min_tokens": 2**62}, "min_tokens", "min_tokens=236 works"),
    ("/v1/chat/completions", {**ASKED, "max_tokens": 2**62}, "max_tokens", "max_tokens=236 works"),
    ("/v1/chat/completions", {**CHAT, "max_completion_tokens": 237},
     "max_completion_tokens", "max_completion_tokens=236 works"),
    ("/v1/chat/completions", {**ASKED, "max_completion_tokens": 0},
     "max_completion_tokens", "greater than or equal to 1"),
    ("/v1/chat/completions", {**ASKED, "max_completion_tokens": 3, "min_tokens": 4},
     "min_tokens", "from 0 to 3"),
    ("/v1/chat/completions", {**ASKED, "logprobs": True, "top_logprobs": 21},
     "top_logprobs", "less than or equal to 20"),
    ("/v1/chat/completions", {}, "messages", "field required"),
    ("/v1/chat/completions", {"messages": []}, "messages", "at least 1 item"),
    ("/v1/chat/completions", {"messages": [{"content": "a"}]}, "messages", "messages.0.role: "
        "field required"),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": 3}]},
     "messages", "a text or a list of parts"),
    ("/v1/chat/completions", {"messages": [{"role": "u", "content": [{"type": "file"}]}]},
     "messages", "type file"),
    ("/v1/chat/completions", {"messages": [{"role": "wizard", "content": ""}]}, None, "no wizards "
        "here"),
    ("/v1/chat/completions", {**CHAT, "top_logprobs": 2}, "top_logprobs", "logprobs: true"),
    ("/v1/chat/completions", {**CHAT, "logprobs": 2}, "logprobs", "must be a valid boolean"),
    ("/v1/chat/completions", {**CHAT, "tools": [{"type": "function"}]}, None, "tools are not "
        "supported"),
    ("/v1/chat/completions", {**CHAT, "tool_choice": "required"}, "tool_choice", "none or auto"),
    ("/v1/chat/completions", {**CHAT, "chat_template": "{{ 1 }}"}, "chat_template", "left out"),
    ("/v1/chat/completions", {**CHAT, "documents": [{"text": "a"}]}, "documents", "left out"),
    ("/v1/chat/completions", {**CHAT, "echo": True}, "echo", "left out: a chat is not echoed"),
    ("/v1/completions", {**PROMPT, "use_beam_search": True}, "use_beam_search", "no beam search"),
    ("/v1/chat/completions",
     {**CHAT, "continue_final_message": True, "add_generation_prompt": True},
     "continue_final_message", "add_generation_prompt"),
    ("/v1/chat/completions",
     {"messages": [{"role": "assistant", "content": ""}], "continue_final_message": True},
     "continue_final_message", "a text to continue"),
    ("/v1/chat/completions", {**CHAT, "chat_template_kwargs": {"messages": []}},
     "chat_template_kwargs", "must not have messages"),
    ("/v1/chat/completions", {"messages": [{"role": "assistant", "tool_calls": [
        {"function": {"name": "f", "arguments": "{"}}]}]}, "messages", "not valid JSON"),
    ("/v1/chat/completions", {"messages": [{"role": "assistant", "tool_calls": [
        {"function": {"name": "f", "arguments": "[" * 9000}}]}]}, "messages", "not valid JSON"),
    ("/v1/chat/completions", {"messages": [{"role": "assistant", "tool_calls": [
        {"function": {"name": "f", "arguments": "3"}}]}]}, "messages", "no object"),
    ("/v1/completions", {**PROMPT, "truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "-1 or"),
    ("/v1/completions", {**PROMPT, "truncate_prompt_tokens": 1, "echo": True},
     "truncate_prompt_tokens", "echo"),
    ("/v1/chat/completions", {**CHAT, "response_format": "json"}, "response_format", "must be"),
    ("/v1/embeddings", {"input": "a", "dimensions": 8}, "dimensions", "left out"),
    ("/v1/embeddings", {"input": "a", "encoding_format": "int8"}, "encoding_format", "'float' or "
        "'base64'"),
    ("/v1/embeddings", {"input": "a" * 257}, "input", "the limit is 256"),
    ("/tokenize", {}, None, "not both"),
    ("/detokenize", {"tokens": [2**70]}, "tokens", "from 0 to 263"),
    ("/detokenize", {"tokens": "ab"}, "tokens", "must be a valid list"),
    ("/v1/completions", [1], None, "must be a JSON object"),
]  # fmt: skip


@pytest.mark.parametrize(("path", "body", "param", "says"), WRONG)
def test_a_wrong_request_is_a_400_that_names_the_field(
    client: TestClient, engine: TinyEngine, path: str, body: Any, param: str | None, says: str
) -> None:
    error = post(client, path, body, 400)["error"]
    assert says in error["message"] and error["param"] == param
    assert error["type"] == "invalid_request_error" and len(error["message"]) < 300
    assert engine.engine.num_steps == 0


TOO_LONG = "x" * (1 << 20)


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/completions", {"prompt": ["a", TOO_LONG]}, "prompt"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": TOO_LONG}]}, "messages"),
        ("/v1/embeddings", {"input": TOO_LONG}, "input"),
        ("/tokenize", {"prompt": TOO_LONG}, "prompt"),
        ("/tokenize", {"messages": [{"role": "user", "content": TOO_LONG}]}, "messages"),
    ],
)
def test_a_text_that_cannot_fit_is_refused_before_it_is_encoded(
    client: TestClient, path: str, body: Any, param: str
) -> None:
    error = post(client, path, body, 400)["error"]
    assert (error["code"], error["param"]) == ("context_length_exceeded", param)
    assert re.search(r"at least [\d,]+ tokens, but the limit is 256", error["message"])
    assert re.search(r"a text of [\d,]+ bytes may fit", error["message"])


@pytest.mark.parametrize("stream", [False, True])
def test_tools_that_must_not_be_called_are_no_hindrance(client: TestClient, stream: bool) -> None:
    answer = client.post(
        "/v1/chat/completions",
        json={**CHAT, "tools": [{}], "tool_choice": "none", "stream": stream},
    )
    assert answer.status_code == 200


RAW = {
    "no JSON": b"{", "nothing": b"", "NaN": b'{"prompt": "a", "temperature": '
        b'NaN}', "deep": b"[" * 200_000,
    "infinite": b'{"prompt": "a", "temperature": 1e999}', "invalid UTF-8": b'{"prompt": "\xff"}',
    "lone surrogate": b'{"prompt": "\\ud800"}', "huge number": b'{"prompt": "a", "seed": '
        b'' + b"9" * 10_000 + b"}",
    "deep value": b'{"prompt": "a", "logit_bias": ' + b'{"a":' * 150 + b"1" + b"}" * 151,
    "UTF-16": '{"prompt": "a"}'.encode("utf-16"),
    "not text": b'{"prompt": "\x00"}',
}  # fmt: skip


@pytest.mark.parametrize("name", RAW)
def test_a_body_that_is_no_json_is_a_400(client: TestClient, name: str) -> None:
    answer = client.post(
        "/v1/completions", content=RAW[name], headers={"content-type": "application/json"}
    )
    assert answer.status_code == 400 and answer.json()["error"]["message"]


def test_json_must_be_called_json(client: TestClient) -> None:
    """A page in a browser may send plain text anywhere without asking first."""
    answer = client.post(
        "/v1/completions", content=b'{"prompt": "a"}', headers={"content-type": "text/plain"}
    )
    assert (
        answer.status_code == 400
        and "content-type: application/json" in answer.json()["error"]["message"]
    )


@pytest.mark.parametrize("path", ["/", "/health", "/ready", "/v1/models", "/metrics", "/nowhere"])
def test_head_is_get_without_a_body(client: TestClient, path: str) -> None:
    get = client.get(path, headers={"x-request-id": "a"})
    head = client.head(path, headers={"x-request-id": "a"})
    assert (head.status_code, head.content) == (get.status_code, b"")
    assert head.headers.keys() == get.headers.keys()
    assert head.headers["content-type"] == get.headers["content-type"]


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", "/nowhere", 404), ("GET", "/v1/completions", 405), ("HEAD", "/v1/completions", 405)],
)
def test_unknown_paths_and_methods(client: TestClient, method: str, path: str, status: int) -> None:
    answer = client.request(method, path)
    assert answer.status_code == status
    assert answer.json()["error"]["code"] if method == "GET" else not answer.content


def test_an_unknown_model_is_a_404(client: TestClient) -> None:
    error = post(client, "/v1/completions", {"prompt": "a", "model": "no-such"}, 404)["error"]
    assert (error["code"], error["param"]) == ("model_not_found", "model") and "tiny" in error[
        "message"
    ]


# Failures of the engine


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_a_full_queue_is_a_429_and_a_dead_engine_a_503(
    model: TinyModel, path: str, stream: bool
) -> None:
    body = {**PROMPT, **CHAT, "stream": stream}
    engine = TinyEngine(model, queue=1)
    with client_of(engine) as client:
        engine.engine.add(
            Request((1,), SamplingParams(), request_id=-1)
        )  # it waits until somebody steps
        full = client.post(path, json=body)
        assert full.status_code == 429 and int(full.headers["retry-after"]) >= 1
        assert full.json()["error"]["type"] == "rate_limit_error"
        engine.death = "rank 1 was killed"
        dead = client.post(path, json=body)
        assert dead.status_code == 503 and dead.json()["error"]["message"] == "rank 1 was killed"
        assert client.get("/health").status_code == 200 and client.get("/ready").status_code == 503
        engine.is_running = False
        for unavailable in (dead, client.get("/health"), client.get("/ready")):
            assert unavailable.status_code == 503 and int(unavailable.headers["retry-after"]) > 0
        assert "shardwise_kv_pages" not in client.get("/metrics").text


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_a_request_that_the_model_fails_on_fails_alone(
    client: TestClient, engine: TinyEngine, path: str
) -> None:
    body = {**PROMPT, **CHAT, "ignore_eos": True}
    num_prompt = post(client, path, body)["usage"]["prompt_tokens"]
    engine.runner.fails_at = num_prompt + 2
    assert post(client, path, body, 500)["error"]["code"] == "model_failed"
    *chunks, error = stream(client, path, body)
    assert (
        chunks
        and error["error"]["code"] == "model_failed"
        and error["error"]["type"] == "server_error"
    )
    engine.runner.fails_at = None
    assert "shardwise_request_failures_total 2.0" in client.get("/metrics").text
    post(client, path, body)
    assert engine.num_running == 0


def test_an_internal_error_reveals_nothing(
    client: TestClient, engine: TinyEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(_: object) -> None:
        raise KeyError("secret")

    monkeypatch.setattr(engine, "embed", broken)
    answer = client.post("/v1/embeddings", json={"input": "a"}, headers={"x-request-id": "mine"})
    assert (
        answer.status_code == 500
        and "secret" not in answer.text
        and answer.headers["x-request-id"] == "mine"
    )


# The door

PATHS = ("/v1/models", "/v1/models/tiny", "/ready", "/metrics", "/openapi.json", "/nowhere")


def test_keys_guard_every_path_but_health(engine: TinyEngine) -> None:
    with client_of(engine, api_keys=("first", "second")) as client:
        assert client.get("/health").status_code == 200
        for path in PATHS:
            for key in (
                "",
                "Bearer third",
                "Bearer firs",
                "Basic first",
                "first",
                "Bearer",
                "Bearer é",
            ):
                answer = client.get(path, headers=[(b"authorization", key.encode("latin-1"))])
                assert (
                    answer.status_code == 401
                    and answer.json()["error"]["type"] == "authentication_error"
                )
            for key in ("Bearer first", "bearer second"):
                assert client.get(path, headers={"authorization": key}).status_code != 401
        post(client, "/v1/completions", PROMPT, 401)
        post(client, "/v1/completions", PROMPT, 200, authorization="Bearer second")
    assert len(engine.asked) == 1


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "x" * 40, "max_tokens": 1}),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "x" * 40}], "max_tokens": 1},
        ),
    ],
)
def test_keys_share_no_prefix_cache(engine: TinyEngine, path: str, body: dict[str, Any]) -> None:
    """A salt of the request separates what one key sends, too."""

    def cached(client: TestClient, key: str, **salt: str) -> int:
        sent = post(client, path, {**body, **salt}, authorization=f"Bearer {key}")
        tokens: int = sent["usage"]["prompt_tokens_details"]["cached_tokens"]
        return tokens

    with client_of(engine, api_keys=("first", "second")) as client:
        assert cached(client, "first") == 0 < cached(client, "first")
        assert cached(client, "second") == 0 < cached(client, "second")
        assert cached(client, "first", cache_salt="s") == 0 < cached(client, "first")
        assert cached(client, "second", cache_salt="s") == 0
        assert cached(client, "first", cache_salt="s") > 0


@pytest.mark.parametrize("in_chunks", [False, True])
def test_a_body_has_a_limit_with_and_without_a_told_length(
    engine: TinyEngine, in_chunks: bool
) -> None:
    def content(size: int) -> Any:
        body = json.dumps({"prompt": "a", "user": ""}).encode()
        body = body[:-2] + b"u" * (size - len(body)) + body[-2:]
        return (body[at : at + 65536] for at in range(0, size, 65536)) if in_chunks else body

    with client_of(engine, max_body_bytes=MIB) as client:
        headers = {"content-type": "application/json"}
        assert (
            client.post("/v1/completions", content=content(MIB), headers=headers).status_code == 200
        )
        large = client.post("/v1/completions", content=content(MIB + 1), headers=headers)
    assert large.status_code == 413 and large.json()["error"]["code"] == "too_large"
    assert ("content-length" in large.request.headers) != in_chunks


@pytest.mark.parametrize(
    ("given", "is_taken"),
    [("my-id.7/x", True), ("a" * 129, False), ("two words", False), ("", False)],
)
def test_a_request_has_an_id(client: TestClient, given: str, is_taken: bool) -> None:
    answer = client.post("/v1/completions", json=PROMPT, headers={"x-request-id": given})
    name = answer.headers["x-request-id"]
    assert answer.json()["id"] == f"cmpl-{name}" and (name == given) == is_taken and len(name) >= 9
    assert (
        client.get("/nowhere").headers["x-request-id"]
        != client.get("/nowhere").headers["x-request-id"]
    )


def test_pages_of_others_may_ask_only_where_that_is_wanted(engine: TinyEngine) -> None:
    requests = {"origin": "http://a.example", "access-control-request-method": "POST"}
    with client_of(engine) as client:
        assert (
            "access-control-allow-origin"
            not in client.options("/v1/completions", headers=requests).headers
        )
        assert "access-control-allow-origin" not in client.get("/health", headers=requests).headers
    with client_of(engine, cors_origins=("http://a.example",), api_keys=("key",)) as client:
        allowed = client.options(
            "/v1/completions",
            headers={**requests, "access-control-request-headers": "authorization"},
        )
        assert (
            allowed.status_code == 200
            and allowed.headers["access-control-allow-origin"] == "http://a.example"
        )
        refused = client.get(
            "/v1/models", headers=requests
        )  # a browser shows an error only to pages that are allowed
        assert (
            refused.status_code == 401
            and refused.headers["access-control-allow-origin"] == "http://a.example"
        )
        assert (
            client.options(
                "/v1/completions", headers={**requests, "origin": "http://b.example"}
            ).status_code
            == 400
        )


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"api_keys": ("",)}, "API key"),
        ({"max_body_bytes": MIB - 1}, "1 MiB"),
        ({"model_names": ()}, "must not be empty"),
    ],
)
def test_settings_that_cannot_work(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        ServerSettings(**{"model_names": ("m",), **changes})


# What it tells of itself


def test_metrics_count_what_was_done(client: TestClient) -> None:
    post(client, "/v1/completions", {"prompt": ["ab", "c"], **GREEDY, "ignore_eos": True})
    stream(client, "/v1/chat/completions", {**CHAT, "ignore_eos": True})
    post(client, "/v1/completions", {"prompt": "a", "temperature": -1}, 400)
    text = client.get("/metrics").text
    families = {family.name: family for family in text_string_to_metric_families(text)}
    samples = {
        (each.name, *each.labels.values()): each.value
        for family in families.values()
        for each in family.samples
    }
    states = {
        labels[1]: value for labels, value in samples.items() if labels[0] == "shardwise_kv_pages"
    }
    assert set(states) == {"free", "used", "cached"} and states["used"] == 0
    assert sum(states.values()) == samples["shardwise_kv_pages_total",]
    assert samples["shardwise_generated_tokens_total",] == 36
    assert samples["shardwise_prompt_tokens_total",] == 3 + len("user: hi\nassistant: ")
    assert samples["shardwise_time_to_first_token_seconds_count",] == 3
    assert samples["shardwise_time_between_tokens_seconds_count",] == 33
    assert samples["shardwise_request_seconds_count",] == 2
    assert samples["shardwise_completions_total", "length"] == 3
    assert samples["shardwise_errors_total", "invalid_value"] == 1
    assert (
        samples["shardwise_request_failures_total",]
        == samples["shardwise_requests_in_flight",]
        == 0
    )
    assert "pid" not in text


def test_two_servers_do_not_mix(model: TinyModel) -> None:
    with client_of(TinyEngine(model)) as one, client_of(TinyEngine(model)) as other:
        post(one, "/v1/completions", {**PROMPT, **GREEDY})
        assert "shardwise_request_seconds_count 1.0" in one.get("/metrics").text
        assert "shardwise_request_seconds_count 0.0" in other.get("/metrics").text


def test_the_document_describes_every_path_and_no_422(client: TestClient) -> None:
    document = client.get("/openapi.json").json()
    assert {path for path in document["paths"] if path.startswith("/v1")} == {
        "/v1/completions",
        "/v1/chat/completions",
        "/v1/embeddings",
        "/v1/models",
        "/v1/models/{name}",
    }
    assert "422" not in json.dumps(document)


def schema_of(app: FastAPI) -> Any:
    return schemathesis.openapi.from_asgi("/openapi.json", app)


SCHEMA = schema_of(make_app(TinyEngine(talking_model()), ServerSettings(("tiny",))))


@SCHEMA.parametrize()
@settings(
    max_examples=examples(5),
    suppress_health_check=list(HealthCheck),
    deadline=None,
    derandomize=True,
)
def test_nothing_that_the_document_allows_or_forbids_is_a_5xx(case: Any) -> None:
    if isinstance(case.body, dict):  # what is drawn may ask for much
        case.body.pop("n", None)
    answer = case.call()
    assert answer.status_code < 500, answer.text


# -- the log


def test_a_line_is_logged_for_each_request(
    client: TestClient, caplog: pytest.LogCaptureFixture
) -> None:
    """But for probes that succeed; and with the status that the client got."""
    with caplog.at_level("INFO", logger="shardwise.serve"):
        for path in ("/health", "/v1/models", "/none", "/metrics", "/%0A%1B[31ma"):
            client.get(path)
        client.post("/v1/completions", json={"prompt": "a", "max_tokens": 2})
        client.post("/v1/completions", json={"prompt": "a", "max_tokens": -2})
    lines = [record.getMessage() for record in caplog.records]
    assert [re.sub(r" in \d+\.\d\d s, request [0-9a-f]{32}$", "", line) for line in lines] == [
        "GET /v1/models 200",
        "GET /none 404",
        "GET /%0A%1B%5B31ma 404",
        "POST /v1/completions 200",
        "POST /v1/completions 400",
    ]


def test_throughput_is_that_of_the_interval() -> None:
    before = Stats(prompt_tokens=100, generated_tokens=50, steps=3)
    now = Stats(
        num_waiting=1,
        num_running=2,
        pages_free=10,
        pages_used=5,
        pages_cached=5,
        prompt_tokens=300,
        generated_tokens=90,
        prefix_cache_queried_tokens=200,
        prefix_cache_hit_tokens=50,
        steps=9,
    )
    assert throughput(before, now, 10.0) == (
        "2 running, 1 waiting; prompts 20 tokens/s, generation 4 tokens/s; KV cache 25% in use, "
        "prefix cache hits 25%"
    )


def test_throughput_is_logged_after_a_restart_too(caplog: pytest.LogCaptureFixture) -> None:
    """Only of intervals with steps; a restarted engine counts from 0."""
    reports: list[Stats | None] = [
        Stats(steps=0),
        Stats(steps=2, generated_tokens=4),
        Stats(steps=2, generated_tokens=4),
        None,
        Stats(steps=1, generated_tokens=3),
    ]

    class Restarted:
        async def stats(self) -> Stats:
            if not reports:
                raise asyncio.CancelledError
            if (report := reports.pop(0)) is None:
                raise EngineDied("it ended")
            return report

    with caplog.at_level("INFO", logger="shardwise.serve"), pytest.raises(asyncio.CancelledError):
        asyncio.run(log_throughput(Restarted(), 0.001))  # type: ignore[arg-type]
    rates = [
        re.findall(r"generation ([\d,]+) tokens/s", each.getMessage()) for each in caplog.records
    ]
    assert rates == [["4,000"], ["3,000"]]


def test_the_root_says_what_this_is_and_docs_can_be_turned_off(client: TestClient) -> None:
    answer = client.get("/").json()
    assert answer["name"] == "Shardwise" and answer["api"] == "/v1"
    assert "swagger" in client.get(answer["docs"]).text.lower()
    with client_of(TinyEngine(talking_model()), no_docs=True) as other:
        assert "docs" not in other.get("/").json() and other.get("/docs").status_code == 404
