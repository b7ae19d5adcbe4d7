"""The tokens that may come next under all constraints of a request, against their definition."""

import re

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from examples import examples
from shardwise.formats.tokenizers.load_tokenizer import load_tokenizer
from shardwise.formats.tokenizers.train_bpe import byte_tokenizer
from shardwise.serve.request import SamplingParams
from shardwise.serve.sampling.constraints import Constraints, bad_word_ids
from shardwise.serve.sampling.grammar import GrammarCompiler
from smollm2 import smollm2_gguf

VOCAB = 37  # no multiple of 32
TOKENS = st.integers(0, 4)


def members(bits: Tensor | None, vocab_size: int) -> set[int]:
    if bits is None:
        return set(range(vocab_size))
    assert len(bits) == -(-vocab_size // 32) and bits.dtype == torch.int32
    return {at for at in range(32 * len(bits)) if int(bits[at // 32]) >> at % 32 & 1}


@given(
    min_tokens=st.integers(0, 3),
    end_ids=st.frozensets(TOKENS | st.just(VOCAB - 1), max_size=3),
    allowed_ids=st.none() | st.lists(TOKENS, min_size=1, max_size=4),
    words=st.lists(st.lists(TOKENS, min_size=1, max_size=3).map(tuple), max_size=3),
    tokens=st.lists(TOKENS, max_size=6),
)
@settings(max_examples=examples(200))
def test_tokens_that_may_come_next_match_the_definition(
    min_tokens: int,
    end_ids: frozenset[int],
    allowed_ids: list[int] | None,
    words: list[tuple[int, ...]],
    tokens: list[int],
) -> None:
    """Also of a fork, which does not see the tokens of the other."""
    allowed = None if allowed_ids is None else tuple(allowed_ids)
    params = SamplingParams(min_tokens=min_tokens, allowed_token_ids=allowed)
    constraints = Constraints(params, VOCAB, end_ids, words)
    fresh = constraints.fork()
    for token in tokens:
        constraints.add(token)
    for each, said in ((constraints, tokens), (fresh, [])):
        expected = set(range(VOCAB)) if allowed_ids is None else set(allowed_ids)
        for word in words:
            if (*said, word[-1])[-len(word) :] == word:
                expected.discard(word[-1])
        if len(said) < min_tokens and expected - end_ids:
            expected -= end_ids
        assert members(each.allowed(), VOCAB) == expected
        assert each.end_reason() == ("error" if expected else "length")


def test_a_complete_grammar_leaves_its_end_tokens() -> None:
    """Whatever min_tokens asks for; without them the completion ends, and the reason is where."""
    tokenizer = load_tokenizer(smollm2_gguf())
    vocab_size = 49152
    compiler = GrammarCompiler(tokenizer, vocab_size)
    grammar = compiler.compile("regex", "yes|yesno").result()
    compiler.close()
    yes, no = tokenizer.encode("yes")[0], tokenizer.encode("no")[0]
    ends = frozenset(tokenizer.eos_ids)

    def after(params: SamplingParams, *tokens: int) -> Constraints:
        constraints = Constraints(params, vocab_size, ends, (), grammar.fork())
        for token in tokens:
            constraints.add(token)
        return constraints

    patient = SamplingParams(min_tokens=9)
    within = members(after(patient, yes).allowed(), vocab_size)
    assert no in within and not within & ends
    assert members(after(patient, yes, no).allowed(), vocab_size) == ends
    narrow = SamplingParams(allowed_token_ids=(yes,))
    assert members(after(narrow).allowed(), vocab_size) == {yes}
    assert after(narrow, yes).end_reason() == "stop"
    assert after(SamplingParams(allowed_token_ids=(no,))).end_reason() == "length"
    assert after(patient, no).end_reason() == "error"


@given(text=st.text("ab c", max_size=12), word=st.text("abc", min_size=1, max_size=3))
@settings(max_examples=examples(100))
def test_a_bad_word_cannot_be_completed(text: str, word: str) -> None:
    """Over single bytes, where every text has one spelling."""
    constraints = Constraints(SamplingParams(), 257, (), bad_word_ids(byte_tokenizer(), (word,)))
    for byte in text.encode():
        bans = byte not in members(constraints.allowed(), 257)
        before = text[: constraints._num_tokens]
        assert bans == bool(re.search(f"{word}$", before + chr(byte)))
        constraints.add(byte)
