"""Long texts are tokenized in pieces: to the ids of the whole, with every kind of tokenizer."""

import io
import json
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, trainers

from examples import examples
from sentencepieces import gguf_tokenizer, metaspace_tokenizer, sentencepiece_tokenizer
from shardwise.formats.tokenizers.bpe import byte_level_bpe
from shardwise.formats.tokenizers.load_tokenizer import load_tokenizer
from shardwise.formats.tokenizers.pre_tokenizers import PRE_TOKENIZERS
from shardwise.formats.tokenizers.tokenizer import Tokenizer
from shardwise.formats.tokenizers.train_bpe import byte_tokenizer, train_bpe
from shardwise.train.calibration import first_tokens
from shardwise.train.data.batches import TokenFile
from shardwise.train.data.corpus_builder import build_corpus
from shardwise.train.data.document_encoder import DocumentEncoder
from shardwise.train.data.documents import CHUNK_CHARACTERS, TextChunk
from shardwise.train.data.long_text import AROUND, pieces
from smollm2 import smollm2_gguf

SOURCE = "\n".join(
    path.read_text(encoding="utf-8") for path in sorted(Path(json.__file__).parent.glob("*.py"))
)


def byte_level_tokenizers() -> dict[str, Tokenizer]:
    """One vocabulary under the rule of every known pre-tokenizer."""
    model = json.loads(train_bpe([SOURCE], 1000).backend.to_str())["model"]
    merges = [tuple(pair) for pair in model["merges"]]
    return {
        pre: Tokenizer(byte_level_bpe(model["vocab"], merges, pre), {}, frozenset([0]))
        for pre in PRE_TOKENIZERS
    }


def unigram_tokenizer() -> Tokenizer:
    backend = Backend(models.Unigram())
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=500, unk_token="<unk>", special_tokens=["<unk>"], show_progress=False
    )
    backend.train_from_iterator(SOURCE.splitlines(), trainer)
    return Tokenizer(backend, {}, frozenset([0]))


def trained_sentencepiece() -> tuple[Tokenizer, Any]:
    """Llama 2's kind, trained; and the processor of the package sentencepiece."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(SOURCE.splitlines()),
        model_writer=model,
        vocab_size=600,
        model_type="bpe",
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        minloglevel=2,
    )
    processor = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    return gguf_tokenizer(processor), processor


@pytest.fixture(scope="module")
def trained() -> tuple[Tokenizer, Any]:
    return trained_sentencepiece()


@pytest.fixture(scope="module")
def tokenizers(trained: tuple[Tokenizer, Any]) -> dict[str, Tokenizer]:
    return {
        "bytes": byte_tokenizer(),
        "smollm2": load_tokenizer(smollm2_gguf()),
        "sentencepiece": trained[0],
        "no prefix": sentencepiece_tokenizer(space_prefix=False),
        "metaspace": metaspace_tokenizer(),
        "metaspace, split": metaspace_tokenizer("always", split=True),
        "unigram": unigram_tokenizer(),
        **byte_level_tokenizers(),
    }


PARTS = st.one_of(
    st.integers(0, len(SOURCE)).map(lambda start: SOURCE[start : start + 90]),
    st.sampled_from(
        ["é", "e\u0301", "👩‍👩‍👧", "漢字。", "नमस्ते", "\r\n", "\n\n", "\n    x", "it's", "½²"]
    ),
    st.sampled_from([" ", "\n", "7", "<s>", "<|endoftext|>"]).flatmap(
        lambda part: st.sampled_from([1, 3, 40, 600]).map(lambda times: part * times)
    ),
    st.text(max_size=8),
)


@given(
    parts=st.lists(PARTS, min_size=10, max_size=40),
    chunk_characters=st.integers(1, 900),
    piece_characters=st.integers(1, 900),
)
@settings(max_examples=examples(15))
def test_pieces_have_the_ids_of_the_whole(
    tokenizers: dict[str, Tokenizer], parts: list[str], chunk_characters: int, piece_characters: int
) -> None:
    text = "".join(parts)
    starts = range(0, max(1, len(text)), chunk_characters)
    chunks = [
        TextChunk(text[start : start + chunk_characters], start == starts[-1], 1)
        for start in starts
    ]
    for name, tokenizer in tokenizers.items():
        found = list(
            pieces([*chunks, *chunks], DocumentEncoder(tokenizer).encode, piece_characters)
        )
        ids: list[list[int]] = [[]]
        for piece in found:
            ids[-1] += tokenizer.encode(piece.text, parse_special=False)
            if piece.ends_document:
                ids.append([])
        assert ids == [tokenizer.encode(text, parse_special=False)] * 2 + [[]], name
        assert sum(piece.source_bytes for piece in found) == 2 * len(chunks)


def test_a_text_is_cut_if_it_has_words(tokenizers: dict[str, Tokenizer]) -> None:
    chunks = [TextChunk(SOURCE, False, 0)] * 2 + [TextChunk("", True, 0)]
    for name, tokenizer in tokenizers.items():
        found = list(pieces(chunks, DocumentEncoder(tokenizer).encode, len(SOURCE)))
        assert len(found) > 1 and len(found[0].text) > len(SOURCE) - 2 * AROUND, name


def test_a_text_without_a_place_stays_whole(tokenizers: dict[str, Tokenizer]) -> None:
    """SentencePiece puts a space before a text, so one without spaces is not cut."""
    chunks = [TextChunk("漢字\n" * 1000, number == 3, 0) for number in range(4)]
    for name, most in (("sentencepiece", 1), ("bytes", 100)):
        found = list(pieces(chunks, DocumentEncoder(tokenizers[name]).encode, 1000))
        assert (len(found) == 1) == (most == 1), name


@pytest.mark.parametrize("kind", ["sentencepiece", "gpt-2"])
def test_a_data_set_has_the_tokenizers_own_ids(
    tokenizers: dict[str, Tokenizer], kind: str, tmp_path: Path
) -> None:
    text = (SOURCE * (2 + CHUNK_CHARACTERS // len(SOURCE)))[: CHUNK_CHARACTERS + 9000] + " end"
    (tmp_path / "long.txt").write_text(text, encoding="utf-8", newline="")
    build_corpus(tmp_path / "long.txt", tmp_path / "data", tokenizers[kind])
    ids = TokenFile(tmp_path / "data").tokens[:-1].tolist()
    assert ids == tokenizers[kind].encode(text)


def test_sentencepiece_itself_has_the_same_ids(
    trained: tuple[Tokenizer, Any], tmp_path: Path
) -> None:
    """Calibration reads a long text as a data set does."""
    tokenizer, processor = trained
    text = SOURCE * (1 + CHUNK_CHARACTERS // len(SOURCE)) + "end"
    (tmp_path / "long.txt").write_text(text, encoding="utf-8", newline="")
    ids = first_tokens(tmp_path / "long.txt", tokenizer, len(text)).tolist()
    assert ids == processor.encode(text)
    assert processor.decode(ids) == text
