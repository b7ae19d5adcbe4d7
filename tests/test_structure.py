"""Structured output on the real vocabulary: whatever is drawn from what is allowed follows the
schema or the regex."""

import json
import re
from collections.abc import Iterator

import pytest
import torch

from engines import sequence_of
from shardwise.formats.tokenizers.load_tokenizer import load_tokenizer
from shardwise.formats.tokenizers.tokenizer import Tokenizer
from shardwise.serve.request import SamplingParams
from shardwise.serve.sampling.grammar import GrammarCompiler, GrammarState
from shardwise.serve.sampling.penalties import SamplerState
from shardwise.serve.sampling.sampler import sample_tokens
from smollm2 import smollm2_gguf

pytest.importorskip("llguidance")
VOCAB = 49152
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"enum": ["Ann", "Bob"]},
        "ages": {"type": "array", "items": {"type": "integer"}},
    },
    "required": ["name", "ages"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return load_tokenizer(smollm2_gguf())


@pytest.fixture(scope="module")
def structures(tokenizer: Tokenizer) -> Iterator[GrammarCompiler]:
    made = GrammarCompiler(tokenizer, VOCAB)
    yield made
    made.close()


def drawn(
    structure: GrammarState, tokenizer: Tokenizer, seed: int, num_tokens: int = 200
) -> tuple[str, str | None]:
    """What a model says that knows nothing but that it should come to an end, and why it ended."""
    ends = {id: 9.0 for id in (*tokenizer.eos_ids, *tokenizer.encode("]}"))}
    params = SamplingParams(seed=seed, max_tokens=num_tokens, logit_bias=ends)
    answer = sequence_of(tokenizer, params, num_tokens, grammar=structure)
    text = ""
    while answer.finish_reason is None:
        allowed = [structure.allowed()]
        (token,), _ = sample_tokens(torch.zeros(1, VOCAB), [answer.sampler], allowed)
        assert token is not None
        text += answer.append(token).text
    return text, answer.finish_reason


def test_a_schema_is_followed(structures: GrammarCompiler, tokenizer: Tokenizer) -> None:
    """Five answers forked from one compilation."""
    start = structures.compile("json_schema", json.dumps(SCHEMA)).result()
    for seed in range(5):
        text, reason = drawn(start.fork(), tokenizer, seed)
        assert reason == "stop" and not re.search(r"\s{41}", text)
        told = json.loads(text)
        assert told.keys() == {"name", "ages"} and told["name"] in ("Ann", "Bob")
        assert all(isinstance(age, int) for age in told["ages"])


def test_a_regex_is_followed_to_its_end(structures: GrammarCompiler, tokenizer: Tokenizer) -> None:
    for seed in range(5):
        text, reason = drawn(
            structures.compile("regex", r"[a-f]{3}-(yes|no)-[0-9]{2}").result(), tokenizer, seed
        )
        assert reason == "stop" and re.fullmatch(r"[a-f]{3}-(yes|no)-[0-9]{2}", text)


CHOICES = ["a b", "a", "c|d.", 'é"\n\\', "<|im_end|>"]


def test_one_of_the_choices_is_generated(structures: GrammarCompiler, tokenizer: Tokenizer) -> None:
    """Also of choices that are patterns, or begin like another."""
    start = structures.compile("choice", json.dumps(CHOICES)).result()
    found = {drawn(start.fork(), tokenizer, seed) for seed in range(30)}
    assert found <= {(choice, "stop") for choice in CHOICES} and len(found) > 2


@pytest.mark.parametrize(
    "grammar",
    [
        'start: "yes" | NUMBER "."\nNUMBER: /[1-9]{1,3}/',
        'root ::= "yes" | number "."\nnumber ::= [1-9] [1-9]? [1-9]?',
    ],
)
def test_a_grammar_in_lark_or_gbnf_is_followed(
    structures: GrammarCompiler, tokenizer: Tokenizer, grammar: str
) -> None:
    start = structures.compile("grammar", grammar).result()
    found = [drawn(start.fork(), tokenizer, seed) for seed in range(8)]
    assert all(reason == "stop" for _, reason in found)
    assert all(re.fullmatch(r"yes|[1-9]{1,3}\.", text) for text, _ in found), found


def test_any_object(structures: GrammarCompiler, tokenizer: Tokenizer) -> None:
    structure = structures.compile("json").result()
    for token in tokenizer.encode('{"a": [1, {"b": null}]}'):
        assert allows(structure, token)
        structure.add(token)
    assert all(allows(structure, end) for end in tokenizer.eos_ids)


def allows(structure: GrammarState, token: int) -> bool:
    return bool(int(structure.allowed()[token // 32]) >> token % 32 & 1)


def test_after_a_token_that_was_not_allowed_nothing_is(
    structures: GrammarCompiler, tokenizer: Tokenizer
) -> None:
    structure = structures.compile("json").result()
    structure.add(tokenizer.encode("x")[0])
    assert not structure.allowed().any() and len(structure.allowed()) == VOCAB // 32
    samplers = [SamplerState(SamplingParams())]
    tokens, _ = sample_tokens(torch.zeros(1, VOCAB), samplers, [structure.allowed()])
    assert tokens == [None]


@pytest.mark.parametrize(
    ("form", "text"),
    [
        ("regex", "a+["),
        ("json_schema", "{"),
        ("json_schema", '{"type": "objec"}'),
        ("json_schema", "3"),
        ("json_schema", '{"$ref": "#"}'),
        ("grammar", "start: foo"),
        ("grammar", "nothing"),
        ("grammar", 'root ::= "a" ('),
        ("grammar", ""),
    ],
)
def test_what_cannot_be_used_is_a_sentence(
    structures: GrammarCompiler, form: str, text: str
) -> None:
    with pytest.raises(ValueError, match=f"^the {form} cannot be used: [^\n]+$"):
        structures.compile(form, text).result()  # type: ignore[arg-type]
