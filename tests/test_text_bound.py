"""The fewest tokens that a text can have, before it is encoded: never more than it has."""

import unicodedata
from collections import defaultdict
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

from examples import examples
from shardwise.formats.tokenizers.load_tokenizer import load_tokenizer
from shardwise.formats.tokenizers.text_bound import SHRINKS, TextBound, text_bound
from shardwise.formats.tokenizers.train_bpe import byte_tokenizer
from smollm2 import smollm2_gguf

BYTES = {f"<0x{byte:02X}>": byte for byte in range(256)}
MERGED = ("▁", "a", "▁a", "ab", "▁ab", "<s>")


def byte_level(normalizer: Any = None, pre_tokenizer: Any = None) -> Backend:
    """Return the tokenizer of single bytes with other steps before it."""
    backend = Backend.from_str(byte_tokenizer().backend.to_str())
    backend.normalizer = normalizer
    if pre_tokenizer is not None:
        backend.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizer, backend.pre_tokenizer])
    return backend


def with_fallback(**options: Any) -> Backend:
    """Return a BPE over characters that spells unknown ones as bytes, as SentencePiece does."""
    vocab = BYTES | {token: 256 + index for index, token in enumerate((*MERGED, "b"))}
    merges = [("▁", "a"), ("a", "b"), ("▁", "ab")]
    options = {"byte_fallback": True, "fuse_unk": True, "unk_token": "<s>"} | options
    backend = Backend(models.BPE(vocab, merges, **options))
    backend.normalizer = normalizers.Replace(" ", "▁")
    return backend


TOKENIZERS = {
    "bytes": byte_level(),
    "SmolLM2": load_tokenizer(smollm2_gguf()).backend,
    "NFC": byte_level(normalizers.NFC()),
    "NFKC in lower case": byte_level(
        normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])
    ),
    "SentencePiece": with_fallback(),
}
STRIPPING = byte_level()
STRIPPING.add_special_tokens([AddedToken("<mask>", lstrip=True, rstrip=True, special=True)])
TOKENIZERS["stripping"] = STRIPPING
PIECES = st.sampled_from(
    [" ", "    ", "\n\n", "a", "ab", "1", "<mask>", "<|im_start|>", "####", "é", "e\u0301",
     "K", "\u212a", "각", "\u1100\u1161\u11a8", "\U0001d400", "\x04", "\U00051234", "😀"]
)  # fmt: skip


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(max_examples=examples(30))
@given(text=st.lists(PIECES | st.text(max_size=8), max_size=40).map("".join))
def test_no_text_has_fewer_tokens_than_its_bound(name: str, text: str) -> None:
    backend = TOKENIZERS[name]
    bound = text_bound(backend)
    assert bound is not None
    assert bound.fewest_tokens(text) <= len(backend.encode(text, add_special_tokens=False).ids)


def test_the_bound_is_that_of_the_longest_token() -> None:
    dropped = (4, 6, 19, 20, 22, 29, 0xC0, 0xC1, 0xF1, 0xF2, *range(0xF5, 0x100))
    assert text_bound(TOKENIZERS["SmolLM2"]) == TextBound(81, bytes(dropped))
    assert text_bound(with_fallback()) == TextBound(6)  # the six letters of <0x00>
    assert TextBound(81).fewest_tokens("1" * 4_190_000) == 51_729
    assert TextBound(2, b"\x04").fewest_tokens("é\x04 a") == 2
    assert TextBound(2, b"", skips_spaces=True).fewest_tokens(" a \n b ") == 1


@pytest.mark.parametrize(
    "backend",
    [
        Backend(models.WordPiece({"[UNK]": 0, "a": 1}, unk_token="[UNK]")),
        Backend(models.WordLevel({"[UNK]": 0, "a": 1}, unk_token="[UNK]")),
        Backend(models.BPE({"a": 0}, [])),
        with_fallback(byte_fallback=False),
        byte_level(normalizers.Strip()),
        byte_level(normalizers.Sequence([normalizers.NFD(), normalizers.StripAccents()])),
        byte_level(normalizers.Replace(Regex(" +"), " ")),
        byte_level(normalizers.Replace("a", "")),
        byte_level(pre_tokenizer=pre_tokenizers.WhitespaceSplit()),
        byte_level(pre_tokenizer=pre_tokenizers.Split("a", "removed")),
    ],
    ids=lambda backend: type(backend.model).__name__,
)
def test_a_tokenizer_that_may_drop_text_has_no_bound(backend: Backend) -> None:
    assert text_bound(backend) is None


@pytest.mark.parametrize(("form", "decomposed"), [("NFC", "NFD"), ("NFKC", "NFKD")])
def test_a_normal_form_shrinks_a_text_by_no_more_than_its_factor(
    form: Any, decomposed: Any
) -> None:
    """A character of the form stands for at most the longest spelling of each of its parts."""
    codes = (code for code in range(0x110000) if not 0xD800 <= code < 0xE000)
    parts = {
        char: apart
        for char in map(chr, codes)
        if (apart := unicodedata.normalize(decomposed, char)) != char
    }
    spellings: dict[str, int] = defaultdict(int)  # the longest character that becomes these parts
    for char, apart in parts.items():
        spellings[apart] = max(spellings[apart], len(char.encode()))

    def longest_spelling(part: str) -> int:
        return max(len(part.encode()), spellings[part])

    ratios = [
        Fraction(max(spellings[apart], sum(map(longest_spelling, apart))), len(char.encode()))
        for char, apart in parts.items()
        if unicodedata.normalize(form, char) == char
    ]
    ratios += [Fraction(longest_spelling(char), len(char.encode())) for char in {*spellings}]
    assert 3 <= max(ratios) <= SHRINKS[form] == SHRINKS[decomposed]
