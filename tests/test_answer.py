"""When an answer ends and what is shown of it, against the definition on text whose every letter is
a token."""

from dataclasses import dataclass, replace
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from engines import sequence_of
from examples import examples
from shardwise.formats.tokenizers.load_tokenizer import load_tokenizer
from shardwise.formats.tokenizers.tokenizer import Tokenizer
from shardwise.formats.tokenizers.train_bpe import byte_tokenizer
from shardwise.serve.engine.sequence import Sequence
from shardwise.serve.request import Delta, FinishReason, Logprob, SamplingParams
from smollm2 import smollm2_gguf

BYTES = byte_tokenizer()
EOS = 256
PARAMS = st.builds(
    SamplingParams,
    max_tokens=st.sampled_from([None, 6, 9]),
    min_tokens=st.integers(0, 5),
    stop=st.lists(st.text("ab", min_size=1, max_size=3), max_size=3).map(tuple),
    stop_token_ids=st.sampled_from([(), (ord("c"),), (ord("c"), EOS)]),
    ignore_eos=st.booleans(),
)


@dataclass(frozen=True)
class Ended:
    num_tokens: int
    text: str
    reason: FinishReason | None
    stop_reason: str | int | None = None


def by_definition(tokens: list[int], params: SamplingParams, room: int) -> Ended:
    """The rules one after another at every token; an end token that is not one here is special and
    has no text."""
    text = ""
    for num, token in enumerate(tokens, 1):
        may_stop = num > params.min_tokens
        if token == EOS and not params.ignore_eos:  # it is sampled early only if nothing else may
            return Ended(num, text, "stop")
        if may_stop and token in params.stop_token_ids:
            return Ended(num, text, "stop", token)
        new = "" if token == EOS else chr(token)
        text += new
        complete = sorted((each for each in params.stop if new and text.endswith(each)), key=len)
        if may_stop and complete:
            return Ended(num, text[: -len(complete[-1])], "stop", complete[-1])
        if num == room or num == params.max_tokens:
            return Ended(num, text, "length")
    return Ended(len(tokens), text, None)


def take(answer: Sequence, tokens: list[int]) -> list[Delta]:
    """The deltas of `tokens` up to the end."""
    deltas = []
    for token in tokens:
        deltas.append(answer.append(token, Logprob(token, -1.0)))
        if answer.finish_reason is not None:
            break
    return deltas


def text_of(deltas: list[Delta]) -> str:
    return "".join(delta.text for delta in deltas)


@given(
    tokens=st.lists(st.sampled_from([*b"aabbc", EOS]), min_size=1, max_size=12),
    params=PARAMS,
    room=st.integers(1, 12),
)
@example(
    [*b"ab"], SamplingParams(stop=("ab",), min_tokens=1), 9
)  # begins before min_tokens, ends after: it counts
@example([*b"abb"], SamplingParams(stop=("ab", "abb", "bb"), min_tokens=2), 9)
@example([*b"aaa"], SamplingParams(stop=("aa",), min_tokens=2), 9)
@example([*b"ab"], SamplingParams(stop=("ab",), min_tokens=2, max_tokens=2), 9)
@settings(max_examples=examples(400))
def test_an_answer_by_definition(tokens: list[int], params: SamplingParams, room: int) -> None:
    expected = by_definition(tokens, params, room)
    answer = sequence_of(BYTES, params, room, index=3)
    deltas = take(answer, tokens)
    assert (answer.num_generated, answer.finish_reason) == (expected.num_tokens, expected.reason)
    assert [token for delta in deltas for token in delta.tokens] == tokens[: expected.num_tokens]
    assert [each.id for delta in deltas for each in delta.logprobs] == tokens[: expected.num_tokens]
    assert (deltas[-1].finish_reason, deltas[-1].stop_reason) == (
        expected.reason,
        expected.stop_reason,
    )
    assert all(delta.finish_reason is None and delta.stop_reason is None for delta in deltas[:-1])
    if expected.reason is None:
        assert expected.text.startswith(text_of(deltas))
        deltas.append(answer.end("abort"))
        assert deltas[-1].finish_reason == "abort" and deltas[-1].tokens == ()
    assert text_of(deltas) == expected.text and {delta.index for delta in deltas} == {3}


def test_what_can_end_an_answer() -> None:
    params = SamplingParams(stop_token_ids=(7, 9))
    tokenizer = replace(BYTES, eos_ids=frozenset({1, 7}))
    assert sequence_of(tokenizer, params, 5).end_tokens == {1: None, 7: None, 9: 9}
    assert sequence_of(tokenizer, replace(params, ignore_eos=True), 5).end_tokens == {7: 7, 9: 9}


def deltas_of(tokenizer: Tokenizer, text: str, **fields: Any) -> list[Delta]:
    params = SamplingParams(**{"max_tokens": None, **fields})
    return take(sequence_of(tokenizer, params, 100), tokenizer.encode(text))


def test_real_tokens_reach_over_the_borders_of_stop_strings() -> None:
    """Tokens that hold several letters: the text is cut inside one, and the token counts."""
    tokenizer = load_tokenizer(smollm2_gguf())
    tokens = tokenizer.encode("The capital of France")
    deltas = deltas_of(tokenizer, "The capital of France", stop=("tal o", "x"))
    assert text_of(deltas) == "The capi" and deltas[-1].stop_reason == "tal o"
    assert [token for delta in deltas for token in delta.tokens] == tokens[:3]
    later = deltas_of(tokenizer, "The capital of France", stop=("api", "l of", "nce"), min_tokens=3)
    assert text_of(later) == "The capital of Fra" and later[-1].stop_reason == "nce"
    end = next(iter(tokenizer.eos_ids))
    answer = sequence_of(tokenizer, SamplingParams(stop=("capitals",)), 100)
    deltas = take(answer, [*tokens[:2], end])
    assert [delta.text for delta in deltas] == ["The", " ", "capital"] and deltas[
        -1
    ].finish_reason == "stop"


def test_a_special_token_that_ends_nothing_is_shown_if_wanted() -> None:
    params = SamplingParams(ignore_eos=True, max_tokens=2)
    shown = [
        text_of(take(sequence_of(BYTES, replace(params, skip_special_tokens=skip), 9), [65, EOS]))
        for skip in (True, False)
    ]
    assert shown == ["A", "A<|endoftext|>"]


@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize("include", [True, False])
def test_a_stop_string_that_is_a_special_token_ends_at_that_token(
    skip: bool, include: bool
) -> None:
    tokenizer = load_tokenizer(smollm2_gguf())
    for text, reason in (("Hi<|im_start|>user", "<|im_start|>"), ("Hi<|im_end|>", None)):
        deltas = deltas_of(
            tokenizer,
            text,
            stop=("<|im_start|>",),
            include_stop_str_in_output=include,
            skip_special_tokens=skip,
        )
        assert len(deltas) == 2 and deltas[-1].finish_reason == "stop"
        assert deltas[-1].stop_reason == reason
        # the end token of a model is special: it is shown where special tokens are
        is_shown = include and (reason is not None or not skip)
        assert text_of(deltas) == (text.removesuffix("user") if is_shown else "Hi")


@pytest.mark.parametrize(
    ("fields", "shown", "reason"),
    [
        ({"stop": ("of",)}, "The capital of", "of"),
        ({"stop": ("tal o", "x")}, "The capital o", "tal o"),
        ({"stop_token_ids": (282,)}, "The capital of", 282),
    ],
)
def test_what_ended_a_completion_is_included_if_wanted(
    fields: dict[str, Any], shown: str, reason: str | int
) -> None:
    tokenizer = load_tokenizer(smollm2_gguf())
    assert tokenizer.encode("The capital of France")[2] == 282
    deltas = deltas_of(
        tokenizer, "The capital of France", include_stop_str_in_output=True, **fields
    )
    assert (text_of(deltas), deltas[-1].stop_reason) == (shown, reason)


@pytest.mark.parametrize("reason", ["abort", "error"])
def test_what_waited_is_shown_when_a_request_ends_early(reason: FinishReason) -> None:
    answer = sequence_of(BYTES, SamplingParams(stop=("ABC",)), 9)
    assert text_of(take(answer, [*b"xAB", 0xE2])) == "x"
    assert (
        answer.end(reason) == Delta(0, 0, "AB�", finish_reason=reason)
        and answer.finish_reason == reason
    )
    with pytest.raises(AssertionError, match="has ended"):
        answer.append(65)


def test_a_token_without_a_log_probability() -> None:
    assert sequence_of(BYTES, SamplingParams(), 9).append(65) == Delta(0, 0, "A", (65,))
