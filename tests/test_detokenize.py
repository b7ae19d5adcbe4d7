"""Streaming text against decoding everything at the end, on byte-level and SentencePiece
vocabularies."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from examples import examples
from sentencepieces import metaspace_tokenizer, sentencepiece_tokenizer
from shardwise.formats.tokenizers.load_tokenizer import load_tokenizer
from shardwise.formats.tokenizers.tokenizer import Tokenizer
from shardwise.formats.tokenizers.train_bpe import byte_tokenizer
from shardwise.serve.sampling.detokenize import Detokenizer, is_byte_token
from smollm2 import smollm2_gguf

TEXTS = st.text(max_size=30) | st.sampled_from(
    ["👩‍👩‍👧 e\u0301 漢字", "  two  spaces ", "\r\n\t\x00", "नमस्ते 🇫🇷"]
)


TOKENIZERS = {
    "bytes": byte_tokenizer(),
    "sentencepiece": sentencepiece_tokenizer(),
    "metaspace": metaspace_tokenizer(),
}


@pytest.fixture(scope="module", autouse=True)
def smollm2() -> None:
    TOKENIZERS["smollm2"] = load_tokenizer(smollm2_gguf())


def pieces(detokenizer: Detokenizer, ids: Sequence[int]) -> list[str]:
    return [*(detokenizer.add(index) for index in ids), detokenizer.flush()]


@pytest.mark.parametrize("name", ["bytes", "sentencepiece", "smollm2"])
@pytest.mark.parametrize("skip_special", [True, False])
def test_pieces_are_the_decoded_whole(name: str, skip_special: bool) -> None:
    tokenizer = TOKENIZERS[name]
    euro = [3 + byte for byte in "€".encode()]

    @given(
        ids=st.lists(
            st.integers(0, min(tokenizer.vocab_size, 300) + 5)
            | st.integers(0, tokenizer.vocab_size + 5)
        )
    )
    @example(
        [1, 259, 260, *euro, 259, 262]
    )  # the first space of the text is dropped, the others stay
    @example([259, 259, 264, 1, 259])
    @example(
        [*euro, 3 + 0xFF, 260, *euro, 1, *euro[:2]]
    )  # one wrong byte spoils a run of byte tokens, skipped ids do not end it
    @settings(max_examples=examples(300))
    def same(ids: list[int]) -> None:
        assert "".join(pieces(Detokenizer(tokenizer, (), skip_special), ids)) == tokenizer.decode(
            ids, skip_special
        )

    same()


@pytest.mark.parametrize("name", ["bytes", "sentencepiece", "smollm2"])
def test_text_comes_back(name: str) -> None:
    tokenizer = TOKENIZERS[name]

    @given(text=TEXTS)
    def same(text: str) -> None:
        ids = tokenizer.encode(text)
        shown = pieces(Detokenizer(tokenizer), ids)
        assert "".join(shown) == tokenizer.decode(ids)
        assert name != "bytes" or "".join(shown) == text

    same()


def test_half_characters_are_never_shown() -> None:
    assert pieces(Detokenizer(TOKENIZERS["bytes"]), "é€👩a".encode()) == [
        "",
        "é",
        "",
        "",
        "€",
        "",
        "",
        "",
        "👩",
        "a",
        "",
    ]
    assert pieces(Detokenizer(TOKENIZERS["bytes"]), "👩".encode()[:3]) == [
        "",
        "",
        "",
        "\N{REPLACEMENT CHARACTER}",
    ]
    smollm2 = TOKENIZERS["smollm2"]
    ids = smollm2.encode("Flags: 🇫🇷🇯🇵!")
    shown = pieces(Detokenizer(smollm2), ids)
    assert "".join(shown) == "Flags: 🇫🇷🇯🇵!" and not any(
        "\N{REPLACEMENT CHARACTER}" in piece for piece in shown
    )
    assert len(ids) > len(
        [piece for piece in shown if piece]
    )  # some tokens did end inside a character


def test_plain_text_is_shown_at_once() -> None:
    smollm2 = TOKENIZERS["smollm2"]
    ids = smollm2.encode("The capital of France is Paris.")
    assert pieces(Detokenizer(smollm2, stop=("\n\n",)), ids) == [
        *(smollm2.decode([index]) for index in ids),
        "",
    ]


def test_space_of_the_first_word_only_is_dropped() -> None:
    assert pieces(Detokenizer(TOKENIZERS["sentencepiece"]), [1, 262, 262, 260]) == [
        "",
        "a",
        " a",
        "a",
        "",
    ]


@pytest.mark.parametrize("name", ["bytes", "sentencepiece", "metaspace", "smollm2"])
@pytest.mark.parametrize("skip_special", [True, False])
def test_a_prompt_and_its_completion_are_the_text_of_all_ids(name: str, skip_special: bool) -> None:
    tokenizer = TOKENIZERS[name]
    ids = st.lists(st.integers(0, 2) | st.integers(256, 268) | st.integers(0, 300))

    @given(prompt=ids, completion=ids)
    @example([1, 262], [262, 260])  # the space before the first word stays
    @example([1], [262, 260])  # where the prompt has no text, the completion starts one
    @example([262, 259], [259, 262])
    @settings(max_examples=examples(100))
    def whole(prompt: list[int], completion: list[int]) -> None:
        text = tokenizer.decode(prompt, skip_special)
        if tokenizer.is_byte_level:
            assume("\N{REPLACEMENT CHARACTER}" not in text)
        assume(not ends_in_bytes(tokenizer, prompt))
        detokenizer = Detokenizer(tokenizer, (), skip_special, prompt=prompt)
        text += "".join(pieces(detokenizer, completion))
        assert text == tokenizer.decode([*prompt, *completion], skip_special)

    whole()


def ends_in_bytes(tokenizer: Tokenizer, prompt: list[int]) -> bool:
    """A character of which one half is in the prompt is no text of either."""
    shown = [index for index in prompt if index not in tokenizer.special_ids]
    tokens = [tokenizer.backend.id_to_token(index) for index in shown]
    known = [token for token in tokens if token is not None]
    return bool(known) and is_byte_token(known[-1])


def test_a_stop_string_may_begin_with_the_space_of_the_first_word() -> None:
    tokenizer = TOKENIZERS["sentencepiece"]
    detokenizer = Detokenizer(tokenizer, (" ab",), prompt=tokenizer.encode("b"))
    assert "".join(pieces(detokenizer, tokenizer.encode("ab a"))) == "" and detokenizer.stopped


# Stop strings


def cut_by_definition(text: str, stop: Sequence[str]) -> tuple[str, bool]:
    """Read the text character by character; the first moment at which it ends in a stop string ends
    it."""
    for end in range(1, len(text) + 1):
        ending = [each for each in stop if text[:end].endswith(each)]
        if ending:
            return text[: end - max(map(len, ending))], True
    return text, False


@given(
    text=st.text("ab\né", max_size=25),
    stop=st.lists(st.text("ab\né", min_size=1, max_size=4), max_size=3),
    name=st.sampled_from(["bytes", "sentencepiece", "smollm2"]),
)
@example("a\nab", ["\n\n", "ab"], "smollm2")
@example("abab", ["abb", "bab"], "smollm2")
@example("aaab", ["aab"], "smollm2")
@settings(max_examples=examples(400))
def test_stop_strings_cut_by_definition(text: str, stop: list[str], name: str) -> None:
    tokenizer = TOKENIZERS[name]
    ids = tokenizer.encode(text)
    expected, stopped = cut_by_definition(tokenizer.decode(ids), stop)
    detokenizer = Detokenizer(tokenizer, stop)
    shown = ""
    for index in ids:
        shown += detokenizer.add(index)
        assert expected.startswith(shown), "text was shown that is not in the answer"
    shown += detokenizer.flush()
    assert (shown, detokenizer.stopped) == (expected, stopped)
    assert detokenizer.add(ids[0] if ids else 0) == "" or not stopped
    assert detokenizer.flush() == "" or not stopped


def test_only_what_may_begin_a_stop_string_waits() -> None:
    detokenizer = Detokenizer(TOKENIZERS["bytes"], stop=("User:", "###"))
    shown = [detokenizer.add(index) for index in b"Us Use# ##U"]
    assert (
        shown == ["", "", "Us ", "", "", "", "Use", "# ", "", "", "##"] and not detokenizer.stopped
    )
    assert detokenizer.flush() == "U"


def test_stop_string_ends_the_text_inside_a_token() -> None:
    smollm2 = TOKENIZERS["smollm2"]
    detokenizer = Detokenizer(smollm2, stop=("apit",))
    assert (
        "".join(pieces(detokenizer, smollm2.encode("The capital of"))) == "The c"
        and detokenizer.stopped
    )


def test_empty_stop_string_is_a_fault_of_the_caller() -> None:
    with pytest.raises(AssertionError):
        Detokenizer(TOKENIZERS["bytes"], stop=("",))


# Cost


@dataclass(frozen=True, eq=False)
class Counting(Tokenizer):
    """A tokenizer that notes how many tokens it was asked to decode."""

    num_decoded: list[int] = field(default_factory=list)

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        self.num_decoded.append(len(ids))
        return super().decode(ids, skip_special)


@pytest.mark.parametrize("run_tokens", [0, 1, 40])
def test_a_token_costs_the_same_at_any_length(run_tokens: int) -> None:
    """Tokens decoded in all: at most 3 for each that is added, also where bytes that are no UTF-8
    wait in long runs."""
    plain = TOKENIZERS["sentencepiece"]
    tokenizer = Counting(plain.backend, plain.special, plain.eos_ids)
    ids = ([262] + [3 + 0xFF] * run_tokens) * (4000 // (1 + run_tokens))
    shown = pieces(Detokenizer(tokenizer, stop=("never",)), ids)
    assert "".join(shown) == plain.decode(ids)
    assert sum(tokenizer.num_decoded) <= 3 * len(ids)


def test_wrong_bytes_do_not_pile_up() -> None:
    shown = pieces(Detokenizer(TOKENIZERS["bytes"]), [0xFF] * 5000)
    assert shown == ["\N{REPLACEMENT CHARACTER}"] * 5000 + [""]
    assert replace(TOKENIZERS["bytes"]).decode([0xFF] * 5000) == "".join(shown)
