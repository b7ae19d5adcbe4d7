"""Tokenizers of strangers: whatever a file holds, loading and encoding end soon, in one sentence,
and without a word from Rust."""

import base64
import json
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tokenizers.pre_tokenizers import FixedLength

from shardwise.formats.gguf.gguf_tokenizer import tokenizer_from_gguf
from shardwise.formats.tokenizers.check_pipeline import check_charsmap
from shardwise.formats.tokenizers.load_tokenizer import load_tokenizer
from shardwise.formats.tokenizers.tokenizer import backend_errors, check_usable, check_vocabulary
from shardwise.formats.tokenizers.train_bpe import byte_tokenizer
from shardwise.train.data.corpus_builder import build_corpus

TEXTS = ("hello a b zz é", "", "a" * 1000)
A = {"Sequence": {"id": "A", "type_id": 0}}
Z = {"SpecialToken": {"id": "<z>", "type_id": 0}}


def charsmap(units: list[int], strings: bytes = b"x\0") -> str:
    trie = struct.pack(f"<{len(units)}I", *units)
    return base64.b64encode(struct.pack("<I", len(trie)) + trie + strings).decode()


def precompiled(text: Any) -> dict[str, Any]:
    return {"normalizer": {"type": "Precompiled", "precompiled_charsmap": text}}


def template(single: list[Any], **special_tokens: Any) -> dict[str, Any]:
    tokens = {f"<{name}>": token for name, token in special_tokens.items()}
    return {
        "post_processor": {
            "type": "TemplateProcessing",
            "single": single,
            "pair": [],
            "special_tokens": tokens,
        }
    }


def replacing(pattern: Any, content: str, times: int = 1) -> dict[str, Any]:
    node = {"type": "Replace", "pattern": pattern, "content": content}
    return {"normalizer": {"type": "Sequence", "normalizers": [node] * times}}


def model(kind: str, **changes: Any) -> dict[str, Any]:
    bare = dict.fromkeys(("normalizer", "pre_tokenizer", "post_processor", "decoder"))
    return {**bare, "added_tokens": [], "model": {"type": kind, **changes}}


def load(folder: Path, changes: dict[str, Any]) -> Any:
    byte_tokenizer().save(folder)
    content = json.loads((folder / "tokenizer.json").read_text())
    (folder / "tokenizer.json").write_text(json.dumps(content | changes))
    return load_tokenizer(folder)


NODE = 1 | 1 << 8 | 2 << 10  # label 1, a value, offset 2
REFUSED = {
    "no charsmap": (precompiled(""), "charsmap"),
    "no text": (precompiled(5), "charsmap"),
    "a short charsmap": (
        precompiled(base64.b64encode(b"\xff\xff\xff\x7f123").decode()),
        "charsmap",
    ),
    "units outside": (precompiled(charsmap([0x01020304] * 256)), "points outside"),
    "half a block": (precompiled(charsmap([0] * 8)), "points outside"),
    "no such string": (
        precompiled(charsmap([0, NODE, 0, 99] + [0] * 252)),
        "points into no string",
    ),
    "half a character": (
        precompiled(charsmap([0, NODE, 0, 1] + [0] * 252, "é\0".encode())),
        "points into no string",
    ),
    "a long string": (precompiled(charsmap([0, NODE] + [0] * 254, b"x" * 999 + b"\0")), "replaces"),
    "growth": (replacing({"String": "a"}, "aa", 40), "normalizer may make a text 1.1e.12 times"),
    "growth without a type": (
        {"normalizer": {"normalizers": [{"pattern": {"String": "a"}, "content": "aa"}] * 40}},
        "normalizer may make",
    ),
    "growth by a regex": (replacing({"Regex": "x*"}, "xyz", 9), "normalizer may make"),
    "growth of a decoder": (
        {"decoder": {"type": "Replace", "pattern": {"String": "a"}, "content": "b" * 9999}},
        "decoder may make",
    ),
    "many components": (replacing({"String": "a"}, "a", 999), "more than 256 components"),
    "pieces of nothing": ({"pre_tokenizer": {"type": "FixedLength", "length": 0}}, "length 0"),
    "an undefined token": (template([Z, A]), "adds '<z>', which it does not define"),
    "an id of no token": (
        template([Z, A], z={"id": "<z>", "ids": [4_000_000], "tokens": ["<z>"]}),
        "gives '<z>' the id 4000000, which no token has",
    ),
    "ids of BERT": (
        {"post_processor": {"type": "BertProcessing", "sep": ["x", 300], "cls": ["y", 1]}},
        "gives 'x' the id 300, which no token has",
    ),
    "ids of RoBERTa": (
        {
            "post_processor": {
                "type": "RobertaProcessing",
                "sep": ["x", 1],
                "cls": ["y", 300],
                "trim_offsets": True,
                "add_prefix_space": False,
            }
        },
        "gives 'y' the id 300, which no token has",
    ),
    "a text many times": (template([A] * 90), "around one text, not around 90"),
    "long words": (
        model(
            "WordPiece",
            unk_token="u",
            continuing_subword_prefix="#",
            max_input_chars_per_word=10**9,
            vocab={"u": 0},
        ),
        "max_input_chars_per_word is 1e.09",
    ),
    "an unknown unknown": (model("Unigram", unk_id=7, vocab=[["a", 0.0]]), "UnkIdNotInVocabulary"),
    "deep": ({"normalizer": json.loads("[" * 900 + "]" * 900)}, "tokenizer.json"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_pipeline_that_cannot_work_is_refused_when_it_is_loaded(
    name: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    changes, sentence = REFUSED[name]
    with pytest.raises(ValueError, match=sentence) as caught:
        load(tmp_path, changes)
    assert str(caught.value).startswith(str(tmp_path)) and "\n" not in str(caught.value)
    assert not capfd.readouterr().err


WITHOUT_UNKNOWN = {
    "Unigram": model("Unigram", unk_id=None, vocab=[["a", 0.0]], byte_fallback=False),
    "WordPiece": model(
        "WordPiece",
        unk_token="[UNK]",
        continuing_subword_prefix="##",
        max_input_chars_per_word=100,
        vocab={"a": 0},
    ),
    "WordLevel": model("WordLevel", unk_token="[UNK]", vocab={"a": 0}),
    "BPE": model("BPE", unk_token="[UNK]", vocab={"a": 0, "b": 1}, merges=[]),
}


@pytest.mark.parametrize("name", WITHOUT_UNKNOWN)
def test_a_text_that_has_no_tokens_is_refused_in_a_sentence(
    name: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    tokenizer = load(tmp_path, WITHOUT_UNKNOWN[name])
    assert tokenizer.encode("a") == [0]
    with pytest.raises(ValueError, match=r"^the tokenizer cannot encode this text: .+"):
        tokenizer.encode("z")
    assert not capfd.readouterr().err


def test_a_panic_that_no_check_foresees_is_a_sentence() -> None:
    tokenizer = byte_tokenizer()
    tokenizer.backend.pre_tokenizer = FixedLength(0)  # type: ignore[assignment]
    with pytest.raises(ValueError, match="cannot encode this text: chunk size must be non-zero"):
        tokenizer.encode("abc")
    with (
        pytest.raises(ValueError, match=r"^its file: chunk size must be non-zero"),
        backend_errors("its file"),
    ):
        check_usable(tokenizer)


@pytest.mark.parametrize(
    "changes",
    [
        replacing({"Regex": " {2,}"}, "▁"),
        replacing({"String": "``"}, '"'),
        template([Z, A, Z], z={"id": "<z>", "ids": [256], "tokens": ["<z>"]}),
        {"post_processor": {"type": "BertProcessing", "sep": ["x", 3], "cls": ["y", 1]}},
        {"pre_tokenizer": {"type": "FixedLength", "length": 3}},
    ],
)
def test_usual_pipelines_are_accepted(changes: dict[str, Any], tmp_path: Path) -> None:
    tokenizer = load(tmp_path, changes)
    for text in TEXTS:
        ids = tokenizer.encode(text, special_tokens=True)
        assert max(ids, default=0) < tokenizer.vocab_size


@pytest.mark.parametrize("rule", ["nmt_nfkc", "nfkc", "nmt_nfkc_cf"])
def test_the_maps_of_sentencepiece_are_accepted(rule: str) -> None:
    package = pytest.importorskip("sentencepiece")
    normalizer = package.SentencePieceNormalizer(rule_name=rule)
    check_charsmap(base64.b64encode(charsmap_of(normalizer.serialized_model_proto())).decode())


def charsmap_of(proto: bytes) -> bytes:
    from sentencepiece import sentencepiece_model_pb2

    parsed = sentencepiece_model_pb2.ModelProto.FromString(proto)
    text: bytes = parsed.normalizer_spec.precompiled_charsmap
    assert len(text) > 100_000
    return text


def test_an_end_token_without_a_row_is_refused(tmp_path: Path) -> None:
    tokenizer = replace(byte_tokenizer(), eos_ids=frozenset((256, 70_000)))
    check_vocabulary(tokenizer, 70_001)
    with pytest.raises(ValueError, match="end token has the id 70000"):
        check_vocabulary(tokenizer, 70_000)
    (tmp_path / "text.txt").write_text("text")
    tokenizer = replace(tokenizer, eos_ids=frozenset((70_000,)))
    with pytest.raises(ValueError, match="end token has the id 70000"):
        build_corpus(tmp_path / "text.txt", tmp_path / "data", tokenizer)


def test_a_token_without_a_row_is_named() -> None:
    with pytest.raises(ValueError, match=r"rows, none for '<|endoftext|>'"):
        check_vocabulary(byte_tokenizer(), 256)


@pytest.mark.parametrize("tokens", [["a" * 10**6], [f"{i:0200}" for i in range(50_000)]])
def test_sentencepiece_tokens_are_short(tokens: list[str]) -> None:
    metadata = {"model": "llama", "tokens": tokens, "scores": [0.0] * len(tokens)}
    with pytest.raises(ValueError, match=r"longest token has \d+ characters, and at most 256"):
        tokenizer_from_gguf({f"tokenizer.ggml.{key}": value for key, value in metadata.items()})
