"""Building a data set, reading it back, and the order and cut of training batches."""

import gzip
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from examples import examples
from shardwise.cli import main
from shardwise.formats.tokenizers.load_tokenizer import load_tokenizer
from shardwise.formats.tokenizers.train_bpe import byte_tokenizer
from shardwise.model.loss import IGNORE_INDEX
from shardwise.train.data import documents
from shardwise.train.data.batches import Batches, Order, TokenFile, held_out_batches
from shardwise.train.data.corpus import read_corpus
from shardwise.train.data.corpus_builder import build_corpus, staged
from shardwise.train.data.documents import python_source_files
from smollm2 import smollm2_gguf


class Bytes:
    """A tokenizer whose tokens are the bytes of UTF-8."""

    eos_ids = frozenset({300, 256})

    def __init__(self, vocab_size: int = 301) -> None:
        self.vocab_size = vocab_size

    def encode_batch(
        self, texts: Sequence[str], special_tokens: bool = False, parse_special: bool = True
    ) -> list[list[int]]:
        return [list(text.encode()) for text in texts]

    def encode_marked(self, texts: Sequence[str]) -> list[list[int]]:
        return self.encode_batch(texts)

    def mark_special(self, messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
        return list(messages)

    def count_special(self, content: Any) -> int:
        return 0

    def chat(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True
    ) -> str:
        assert not add_generation_prompt
        return "".join(f"<{each['role']}>{each['content']}" for each in messages)

    def save(self, folder: Path) -> None:
        (folder / "tokenizer.json").write_text("{}")


END = 256


class Words(Bytes):
    """A tokenizer of numbers between spaces, so that a test can say which tokens it wants."""

    def encode_batch(
        self, texts: Sequence[str], special_tokens: bool = False, parse_special: bool = True
    ) -> list[list[int]]:
        return [[int(word) for word in text.split()] for text in texts]


def write_jsonl(path: Path, texts: list[str], field: str = "text") -> Path:
    path.write_text("".join(json.dumps({field: text}) + "\n" for text in texts))
    return path


def read_documents(folder: Path, split: str) -> list[list[int]]:
    token_file = TokenFile(folder, split)
    ends = [*token_file.starts[1:].tolist(), token_file.num_tokens]
    return [
        token_file.tokens[start:end].tolist()
        for start, end in zip(token_file.starts.tolist(), ends, strict=True)
    ]


def token_file_of(
    folder: Path, lengths: list[int], split: str = "train", held_out: float = 0.0
) -> TokenFile:
    """A data set of documents of the given lengths (end-of-text included), every token but that one
    distinct."""
    number = iter(range(1_000_000))
    texts = [" ".join(str(next(number)) for _ in range(length - 1)) for length in lengths]
    tokenizer = Words(1_000_000)
    tokenizer.eos_ids = frozenset({999_999})
    build_corpus(write_jsonl(folder / "numbers.jsonl", texts), folder / "data", tokenizer, held_out)
    return TokenFile(folder / "data", split)


# -- build and read back


@settings(max_examples=examples(60), deadline=None)
@given(
    st.lists(st.text(max_size=30), min_size=1, max_size=12), st.sampled_from([0.0, 0.1, 0.5, 0.9])
)
def test_documents_round_trip(texts: list[str], held_out: float) -> None:
    expected = [[*text.encode(), END] for text in texts if text]
    with tempfile.TemporaryDirectory() as name:
        source = write_jsonl(Path(name, "d.jsonl"), texts)
        data = Path(name, "data")
        if not expected:
            with pytest.raises(ValueError, match="holds no text"):
                build_corpus(source, data, Bytes(), held_out)
            assert not data.exists()
            return
        made = build_corpus(source, data, Bytes(), held_out)
        assert made == read_corpus(data)
        assert made.tokens == sum(map(len, expected))
        train = read_documents(data, "train")
        if not held_out:
            assert train == expected
            assert made.documents == len(expected)
            return
        held = read_documents(data, "held_out")
        if len(train) == len(expected):  # the last document was most of the text, and is cut in two
            assert len(held) == 1 and held[0] and train[-1] and 2 * len(expected[-1]) > made.tokens
            assert [*train[:-1], train[-1] + held[0]] == expected
            assert len(held[0]) <= max(1, round(held_out * made.tokens))
            return
        assert train and held
        assert made.documents == len(expected) == len(train) + len(held)
        rest = iter(expected)  # both splits keep the order of the source
        assert all(document in rest for document in train)
        assert Counter(map(tuple, train + held)) == Counter(map(tuple, expected))


def test_held_out_share_is_drawn_from_everywhere(tmp_path: Path) -> None:
    lengths = [3] * 2000
    token_file_of(tmp_path, lengths, held_out=0.1)
    held = read_documents(tmp_path / "data", "held_out")
    assert 150 < len(held) < 250  # 200 expected, standard deviation 13
    first_tokens = np.array([document[0] for document in held])
    assert np.histogram(first_tokens, bins=4, range=(0, 4000))[0].min() > 25
    build_corpus(tmp_path / "numbers.jsonl", tmp_path / "again", Words(1_000_000), 0.1)
    assert (tmp_path / "again/held_out.idx").read_bytes() == (
        tmp_path / "data/held_out.idx"
    ).read_bytes()


def test_a_folder_may_hold_pictures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = tmp_path / "source"
    source.mkdir()
    (source / "a.txt").write_text("text")
    (source / "b.png").write_bytes(b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR")
    assert main(["data", "build", str(source), str(tmp_path / "data"), "--tokenizer", "bytes"]) == 0
    assert "left out 1 file: 1 not text" in capsys.readouterr().err
    assert read_corpus(tmp_path / "data").files == (str(source / "a.txt"),)
    with pytest.raises(ValueError, match=r"b\.png is not UTF-8"):
        build_corpus(source / "b.png", tmp_path / "other", Bytes())


@pytest.mark.parametrize("sizes", [(20, 90_000), (1, 1, 50)])
def test_a_last_document_that_is_most_of_the_text_is_not_held_out_whole(
    tmp_path: Path, sizes: tuple[int, ...]
) -> None:
    source = write_jsonl(tmp_path / "d.jsonl", ["x" * size for size in sizes])
    made = build_corpus(source, tmp_path / "data", Bytes(), 0.01)
    assert made.splits["held_out"].tokens == max(1, round(0.01 * made.tokens))


def test_folder_of_files(tmp_path: Path) -> None:
    source = tmp_path / "source"
    for name, content in {
        "b.txt": "bé\r\n".encode(),
        "a/z.py": b"z = 1\n",
        "a/y.md": b"\xef\xbb\xbf# y",
        "a-b.txt": b"dash",
        "c.jsonl": b'\xef\xbb\xbf{"text": "one"}\n\n{"text": "two", "id": 2}',
        "empty.txt": b"",
        ".hidden": b"\xff",
        ".git/config": b"\xff",
        "a/__pycache__/z.pyc": b"\xff",
    }.items():
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_bytes(content)
    made = build_corpus(source, tmp_path / "deep/er/data", Bytes())
    texts = ["# y", "z = 1\n", "dash", "bé\r\n", "one", "two"]
    assert read_documents(tmp_path / "deep/er/data", "train") == [
        [*text.encode(), END] for text in texts
    ]
    assert made.files == tuple(
        str(source / name)
        for name in ("a/y.md", "a/z.py", "a-b.txt", "b.txt", "c.jsonl", "empty.txt")
    )
    assert made.end_of_text == END
    assert sorted(os.listdir(tmp_path / "deep/er")) == ["data"]
    assert sorted(os.listdir(tmp_path / "deep/er/data")) == [
        "data.json",
        "tokenizer.json",
        "train.bin",
        "train.idx",
    ]
    listed = build_corpus([source / "b.txt", source / "a"], tmp_path / "listed", Bytes())
    assert [Path(file).name for file in listed.files] == ["b.txt", "y.md", "z.py"]


@pytest.mark.parametrize("suffix", ["txt", "jsonl"])
def test_long_documents_are_read_in_chunks(tmp_path: Path, suffix: str) -> None:
    text = (
        "".join(f"{'é' * (number % 90)} {number}\n" for number in range(60_000)) + "€" * 1_200_000
    )
    source = tmp_path / f"long.{suffix}"
    if suffix == "txt":
        source.write_text(text, newline="")
    else:
        write_jsonl(source, [text])
    pieces = list(documents.read_file(source, documents.Reading(never, "text")))
    assert len(pieces) > 3
    assert max(len(piece.text) for piece in pieces) <= 2 * documents.CHUNK_CHARACTERS
    assert pieces[0].text.endswith("\n")
    assert [piece.ends_document for piece in pieces] == [False] * (len(pieces) - 1) + [True]
    assert "".join(piece.text for piece in pieces) == text
    reports = []
    made = build_corpus(
        source, tmp_path / "data", Bytes(), progress=lambda *report: reports.append(report)
    )
    assert made.documents == 1
    assert bytes(TokenFile(tmp_path / "data").tokens[:-1].astype(np.uint8)).decode() == text
    assert reports[-1] == (source.stat().st_size, source.stat().st_size, made.tokens)
    assert reports == sorted(reports)


@pytest.mark.parametrize("vocab_size, dtype", [(65_536, "uint16"), (65_537, "uint32")])
def test_width_of_a_token(tmp_path: Path, vocab_size: int, dtype: str) -> None:
    (tmp_path / "t.txt").write_text(f"0 65535 {vocab_size - 1}")
    made = build_corpus(tmp_path / "t.txt", tmp_path / "data", Words(vocab_size))
    token_file = TokenFile(tmp_path / "data")
    assert made.dtype == token_file.tokens.dtype.name == dtype
    assert token_file.window(0, 4).tolist() == [0, 65_535, vocab_size - 1, END]
    assert token_file.vocab_size == vocab_size


def test_field_can_be_named(tmp_path: Path) -> None:
    build_corpus(
        write_jsonl(tmp_path / "d.jsonl", ["ab"], "content"),
        tmp_path / "data",
        Bytes(),
        field="content",
    )
    assert read_documents(tmp_path / "data", "train") == [[97, 98, END]]


def test_parquet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "d.parquet"
    texts = [f"té {number}" for number in range(1000)]
    parquet.write_table(
        pyarrow.table({"id": list(range(1000)), "text": texts}), path, row_group_size=300
    )
    build_corpus(path, tmp_path / "data", Bytes())
    assert read_documents(tmp_path / "data", "train") == [[*text.encode(), END] for text in texts]
    with pytest.raises(ValueError, match=r'd\.parquet has no column "body", only "id", "text"'):
        build_corpus(path, tmp_path / "other", Bytes(), field="body")
    parquet.write_table(pyarrow.table({"text": ["a", None]}), path)
    with pytest.raises(ValueError, match=r"d\.parquet, row 1, is not text but null"):
        build_corpus(path, tmp_path / "other", Bytes())
    path.write_bytes(b"PAR1 and then nothing of the kind")
    with pytest.raises(ValueError, match=r"d\.parquet cannot be read as Parquet"):
        build_corpus(path, tmp_path / "other", Bytes())
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ValueError, match=r"needs an extra: in the clone, pip install"):
        build_corpus(path, tmp_path / "other", Bytes())


# -- conversations

CHAT = [{"role": "user", "content": "Hi é"}, {"role": "assistant", "content": "Ho"}]


def never(messages: Sequence[Mapping[str, Any]]) -> str:
    raise AssertionError("a text is not rendered")


@pytest.mark.parametrize("field", ["messages", "conversation"])
def test_messages_are_rendered_with_the_chat_template(field: str, tmp_path: Path) -> None:
    """The field `messages` is read by default, in lines that may also hold texts."""
    lines = [{field: CHAT}, {field: CHAT[:1], "id": 3}]
    named = None if field == "messages" else field
    if named is None:
        lines.append({"text": "plain", "messages": CHAT})
    source = tmp_path / "chats.jsonl"
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    build_corpus(source, tmp_path / "data", Bytes(), field=named)
    found = [bytes(tokens[:-1]).decode() for tokens in read_documents(tmp_path / "data", "train")]
    assert found == ["<user>Hi é<assistant>Ho", "<user>Hi é", "plain"][: len(lines)]


@pytest.mark.parametrize("behind", ["", "\n"])
def test_a_conversation_that_its_template_ends_gets_no_second_end(
    behind: str, tmp_path: Path
) -> None:
    """Templates end the last turn with the end token (Mistral, Llama 3), some with a line break
    behind it (ChatML). Texts and conversations without it get one."""
    mark = "."

    class Ending(Bytes):
        eos_ids = frozenset({ord(mark), END})

        def chat(self, messages: Any, add_generation_prompt: bool = True) -> str:
            return "".join(each["content"] for each in messages)

    texts = [f"Ho{mark}{behind}", "Ho", f"Ho{mark} a"]
    lines = [{"messages": [{"role": "user", "content": text}]} for text in texts]
    source = tmp_path / "chats.jsonl"
    source.write_text("".join(json.dumps(line) + "\n" for line in (*lines, {"text": texts[0]})))
    build_corpus(source, tmp_path / "data", Ending())
    found = [list(tokens) for tokens in read_documents(tmp_path / "data", "train")]
    ended = [[*text.encode(), ord(mark)] for text in texts]
    ended[0].pop()
    assert found == [*ended, [*texts[0].encode(), ord(mark)]]


def test_messages_in_parquet(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.table({"messages": [CHAT, CHAT[:1]]}), tmp_path / "d.parquet")
    build_corpus(tmp_path / "d.parquet", tmp_path / "data", Bytes())
    found = [bytes(tokens[:-1]).decode() for tokens in read_documents(tmp_path / "data", "train")]
    assert found == ["<user>Hi é<assistant>Ho", "<user>Hi é"]


def test_a_real_template_makes_its_own_tokens(tmp_path: Path) -> None:
    """The tokens of a conversation are those that the server reads, without the prompt for the next
    answer; its template ends it, so no end of text follows."""
    tokenizer = load_tokenizer(smollm2_gguf())
    source = tmp_path / "chats.jsonl"
    source.write_text(json.dumps({"messages": CHAT}) + "\n")
    build_corpus(source, tmp_path / "data", tokenizer)
    (tokens,) = read_documents(tmp_path / "data", "train")
    text = tokenizer.chat(CHAT, add_generation_prompt=False)
    assert "<|im_start|>assistant\nHo<|im_end|>" in text
    assert tokens == tokenizer.encode(text)


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ([], "has no messages"),
        ([1], 'is neither text nor messages: item 1 must look like {"role": "user"'),
        ([*CHAT, {"content": "a"}], "is neither text nor messages: item 3"),
        ({"role": "user"}, "is not text but"),
    ],
)
def test_what_is_no_conversation_is_named(value: object, says: str, tmp_path: Path) -> None:
    source = tmp_path / "chats.jsonl"
    source.write_text(json.dumps({"messages": CHAT}) + "\n" + json.dumps({"messages": value}))
    where = re.escape(f'The field "messages" of {source}, line 2 {says}')
    with pytest.raises(ValueError, match=where):
        build_corpus(source, tmp_path / "data", Bytes())


def test_a_template_that_refuses_is_named(tmp_path: Path) -> None:
    source = tmp_path / "chats.jsonl"
    source.write_text(json.dumps({"messages": CHAT}))
    with pytest.raises(ValueError, match=r"line 1 cannot be rendered .* no chat template"):
        build_corpus(source, tmp_path / "data", byte_tokenizer())
    words = [str(source), str(tmp_path / "data"), "--tokenizer", "bpe:300"]
    assert main(["data", "build", *words]) == 2


# -- names of files

RECORDS = [{"body": "one é", "id": 1}, {"body": "two"}]


def texts_in(folder: Path) -> list[str]:
    return [bytes(tokens[:-1]).decode() for tokens in read_documents(folder, "train")]


@pytest.mark.parametrize("name", ["c.jsonl", "c.ndjson", "c.NDJSON", "c.json", "list.json"])
@pytest.mark.parametrize("gz", [False, True])
@pytest.mark.parametrize("field", [None, "body"])
def test_json_under_any_name_is_read_as_records(
    name: str, gz: bool, field: str | None, tmp_path: Path
) -> None:
    records = RECORDS if field else [{"text": each["body"]} for each in RECORDS]
    lines = "".join(json.dumps(each) + "\n" for each in records)
    content = (json.dumps(records, indent=1) if name.startswith("list") else lines).encode()
    source = tmp_path / (name + ".gz" * gz)
    source.write_bytes(gzip.compress(content) if gz else content)
    build_corpus(source, tmp_path / "data", Bytes(), field=field)
    assert texts_in(tmp_path / "data") == ["one é", "two"]


@pytest.mark.parametrize(
    "content", ['{\n "name": "x"\n}\n', "[1, 2]", '{"name": 1}', "// no\n{}", "[1"]
)
def test_json_of_a_program_is_text_unless_a_field_is_named(content: str, tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "package.json").write_text(content)
    build_corpus(tmp_path / "source", tmp_path / "data", Bytes())
    assert texts_in(tmp_path / "data") == [content]
    with pytest.raises(ValueError, match=r"package\.json"):
        build_corpus(tmp_path / "source", tmp_path / "other", Bytes(), field="body")


def test_compressed_text_is_read_and_other_compression_refused(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    (source / "a.txt.gz").write_bytes(gzip.compress(b"text"))
    (source / "b.jsonl.xz").write_bytes(b"\xfd7zXZ\0\0")
    build_corpus(source, tmp_path / "data", Bytes())
    assert texts_in(tmp_path / "data") == ["text"]
    with pytest.raises(ValueError, match=r"b\.jsonl\.xz is compressed in a way that is not read"):
        build_corpus(source / "b.jsonl.xz", tmp_path / "other", Bytes())
    for damaged in (gzip.compress(b"text" * 99)[:-9], b"no gzip"):
        (source / "a.txt.gz").write_bytes(damaged)
        with pytest.raises(ValueError, match=r"a\.txt\.gz is not a complete gzip file"):
            build_corpus(source / "a.txt.gz", tmp_path / "other", Bytes())


def test_zstandard_is_read(tmp_path: Path) -> None:
    zstd = pytest.importorskip("backports.zstd")
    source = tmp_path / "source"
    source.mkdir()
    frames = [zstd.compress(json.dumps({"text": text}).encode() + b"\n") for text in ("é", "two")]
    (source / "a.jsonl.zst").write_bytes(b"".join(frames))
    (source / "b.txt.ZST").write_bytes(zstd.compress(b"text"))
    build_corpus(source, tmp_path / "data", Bytes())
    assert texts_in(tmp_path / "data") == ["é", "two", "text"]
    for damaged in (frames[0] + frames[1][:-3], b"no frame"):
        (source / "a.jsonl.zst").write_bytes(damaged)
        with pytest.raises(ValueError, match=r"a\.jsonl\.zst is not a complete Zstandard file"):
            build_corpus(source / "a.jsonl.zst", tmp_path / "other", Bytes())


def test_zstandard_needs_a_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "backports", None)
    (tmp_path / "a.jsonl.zst").write_bytes(b"\x28\xb5\x2f\xfd\0\0")
    with pytest.raises(ValueError, match=r"needs an extra: in the clone, pip install '\.\[zstd\]'"):
        build_corpus(tmp_path, tmp_path / "data", Bytes())


# -- bad input


@pytest.mark.parametrize(
    "name, content, sentence",
    [
        ("d.jsonl", b'{"text": "a"}\n{"text": \n', r"d\.jsonl, line 2 is not JSON"),
        ("d.jsonl", b"[" * 100_000, r"d\.jsonl, line 1 is not JSON"),
        ("d.jsonl", b'{"text": "a"}\n["a"]\n', r"d\.jsonl, line 2 is not a JSON object"),
        (
            "d.jsonl",
            b'\n{"body": "a", "id": 1}\n',
            r'd\.jsonl, line 2 has no field "text", only "body", "id"',
        ),
        ("d.jsonl", b'{"text": 3}\n', r'The field "text" of .*d\.jsonl, line 1 is not text but 3'),
        ("d.jsonl", b'{"text": "\\ud800"}\n', r"line 1 holds half of a surrogate pair"),
        ("d.jsonl", b'{"text": "a"}\n{"text": "\xff"}\n', r"d\.jsonl, line 2 is not UTF-8 text"),
        ("d.txt", b"abc\xffdef", r"d\.txt is not UTF-8 text \(byte 3\)"),
        (
            "d.txt",
            "é".encode() * (1 << 19) + b"abc\xc3",
            r"d\.txt is not UTF-8 text \(byte 1048579\)",
        ),
        ("d.txt", b"", r"holds no text"),
        ("d.jsonl", b"\n\n", r"holds no text"),
    ],
)
def test_unreadable_source(tmp_path: Path, name: str, content: bytes, sentence: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=sentence) as caught:
        build_corpus(tmp_path / name, tmp_path / "data", Bytes())
    assert "\n" not in str(caught.value)
    assert os.listdir(tmp_path) == [name]


def test_source_without_files(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"nowhere does not exist"):
        build_corpus(tmp_path / "nowhere", tmp_path / "data", Bytes())
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"empty holds no files to read"):
        build_corpus(tmp_path / "empty", tmp_path / "data", Bytes())
    with pytest.raises(ValueError, match=r"list of source files holds no files"):
        build_corpus([], tmp_path / "data", Bytes())


def test_unfit_tokenizer_and_share(tmp_path: Path) -> None:
    (tmp_path / "t.txt").write_text("7 400")
    with pytest.raises(ValueError, match=r"returned token 400, outside its vocabulary of 301"):
        build_corpus(tmp_path / "t.txt", tmp_path / "data", Words())
    with pytest.raises(ValueError, match=r"below 1, not 1\.0"):
        build_corpus(tmp_path / "t.txt", tmp_path / "data", Bytes(), held_out=1.0)
    without_end = Bytes()
    without_end.eos_ids = frozenset()
    with pytest.raises(ValueError, match="has no end-of-text token"):
        build_corpus(tmp_path / "t.txt", tmp_path / "data", without_end)
    assert os.listdir(tmp_path) == ["t.txt"]


def test_destination_in_use_is_refused(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "d.jsonl", ["ab"])
    (tmp_path / "data").mkdir()
    build_corpus(source, tmp_path / "data", Bytes())
    before = (tmp_path / "data/data.json").read_bytes()
    with pytest.raises(ValueError, match="already holds a data set"):
        build_corpus(source, tmp_path / "data", Bytes())
    assert (tmp_path / "data/data.json").read_bytes() == before
    with pytest.raises(ValueError, match="is not an empty folder"):
        build_corpus(source, tmp_path, Bytes())
    with pytest.raises(ValueError, match="is not an empty folder"):
        build_corpus(source, source, Bytes())
    with pytest.raises(ValueError, match=r"failed: Not a directory"):
        build_corpus(source, source / "data", Bytes())


def test_concurrent_builds_are_refused(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "d.jsonl", ["ab"])
    with staged(tmp_path / "data") as folder:
        (folder / "kept").write_text("")
        with pytest.raises(ValueError, match="Another process is building"):
            build_corpus(source, tmp_path / "data", Bytes())
    assert os.listdir(tmp_path / "data") == ["kept"]


def test_interrupted_build_leaves_nothing(tmp_path: Path) -> None:
    def interrupt(*_: int) -> None:
        raise KeyboardInterrupt

    source = write_jsonl(tmp_path / "d.jsonl", ["ab"])
    with pytest.raises(KeyboardInterrupt):
        build_corpus(source, tmp_path / "data", Bytes(), progress=interrupt)
    assert os.listdir(tmp_path) == ["d.jsonl"]


def test_killed_build_leaves_no_data_set_and_the_next_one_works(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "d.jsonl", ["ab"])
    program = f"""
import os, pathlib, signal
from shardwise.formats.tokenizers.train_bpe import byte_tokenizer
from shardwise.train.data.corpus_builder import build_corpus

kill = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
source, destination = pathlib.Path({str(source)!r}), pathlib.Path({str(tmp_path / "data")!r})
build_corpus(source, destination, byte_tokenizer(), progress=kill)
"""
    done = subprocess.run([sys.executable, "-c", program], timeout=60)
    assert done.returncode == -signal.SIGKILL
    assert sorted(os.listdir(tmp_path)) == [".data.partial", "d.jsonl"]
    build_corpus(source, tmp_path / "data", Bytes())
    assert sorted(os.listdir(tmp_path)) == ["d.jsonl", "data"]


def test_a_folder_that_is_not_a_data_set_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is not a data set"):
        TokenFile(tmp_path)
    build_corpus(write_jsonl(tmp_path / "d.jsonl", ["abc"]), tmp_path / "data", Bytes())
    with pytest.raises(ValueError, match="has no held_out split, only train"):
        TokenFile(tmp_path / "data", "held_out")
    (tmp_path / "data/train.bin").write_bytes(b"\0\0")
    with pytest.raises(
        ValueError, match=r"train\.bin is damaged: it has 2 bytes where data\.json says 8"
    ):
        TokenFile(tmp_path / "data")
    record = json.loads((tmp_path / "data/data.json").read_text())
    for broken, sentence in [
        (
            json.dumps({**record, "format_version": 99}),
            "has format version 99, but this program reads version 1",
        ),
        (json.dumps({**record, "dtype": "float32"}), "does not describe a data set"),
        (json.dumps({**record, "splits": {"train": 3}}), "does not describe a data set"),
        ("[]", "must hold a JSON object"),
        ("{", "is not valid JSON"),
    ]:
        (tmp_path / "data/data.json").write_text(broken)
        with pytest.raises(ValueError, match=sentence):
            TokenFile(tmp_path / "data")


# -- the standard library with a real tokenizer


class ByteLevelBPE(Bytes):
    """The `tokenizers` package's byte-level BPE, trained on the files given."""

    eos_ids = frozenset({0})

    def __init__(self, files: list[Path], vocab_size: int) -> None:
        self.model = Tokenizer(models.BPE())
        self.model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        self.model.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=["<|end|>"],
            initial_alphabet=alphabet,
            show_progress=False,
        )
        self.model.train([str(file) for file in files], trainer)
        self.vocab_size = self.model.get_vocab_size()

    def encode_batch(
        self, texts: Sequence[str], special_tokens: bool = False, parse_special: bool = True
    ) -> list[list[int]]:
        return [
            encoding.ids for encoding in self.model.encode_batch(texts, add_special_tokens=False)
        ]

    def save(self, folder: Path) -> None:
        self.model.save(str(folder / "tokenizer.json"))


def test_python_source_files() -> None:
    files = python_source_files()
    assert files == python_source_files() == sorted(files, key=lambda file: file.parts)
    names = {"/".join(file.parts[-2:]) for file in files}
    assert {"json/decoder.py", "asyncio/tasks.py"} <= names
    assert any(file.name == "argparse.py" for file in files)
    parts = {part for file in files for part in file.parts}
    assert parts.isdisjoint(
        {"site-packages", "test", "tests", "idlelib", "__pycache__", "encodings"}
    )
    for file in files:
        file.read_text(encoding="utf-8")
    assert sum(file.stat().st_size for file in files) > 4_000_000


def test_the_standard_library_round_trip(tmp_path: Path) -> None:
    files = [file for file in python_source_files() if file.stat().st_size][:40]
    tokenizer = ByteLevelBPE(files[:10], 600)
    made = build_corpus(files, tmp_path / "data", tokenizer)
    assert made.documents == len(files)
    decoder = Tokenizer.from_file(str(tmp_path / "data/tokenizer.json"))
    for file, tokens in zip(files, read_documents(tmp_path / "data", "train"), strict=True):
        assert tokens[-1] == 0
        assert decoder.decode(tokens[:-1]) == file.read_bytes().decode()


# -- order


@settings(max_examples=examples(100), deadline=None)
@given(
    st.one_of(st.sampled_from([1, 2, 3, 4, 5, 16, 17, 64, 65, 257]), st.integers(1, 700)),
    st.integers(-(2**70), 2**70),
    st.integers(0, 10**6),
)
def test_every_epoch_is_a_permutation(num_samples: int, seed: int, epoch: int) -> None:
    order = Order(num_samples, seed)
    first = epoch * num_samples
    assert sorted(order[first + place] for place in range(num_samples)) == list(range(num_samples))


@given(st.integers(20, 300), st.integers(0, 2**64 - 1), st.integers(0, 1000))
@settings(max_examples=examples(50), deadline=None)
def test_epochs_and_seeds_differ(num_samples: int, seed: int, epoch: int) -> None:
    def permutation(seed: int, epoch: int) -> list[int]:
        return [
            Order(num_samples, seed)[epoch * num_samples + place] for place in range(num_samples)
        ]

    here = permutation(seed, epoch)
    assert here != list(range(num_samples))
    assert here != permutation(seed, epoch + 1)
    assert here != permutation(seed + 1, epoch)


@pytest.mark.parametrize("num_samples", [2, 3, 7, 8])
def test_order_is_even(num_samples: int) -> None:
    """Over 4,000 seeds each sample comes first, and each follows each, equally often: within 5
    standard deviations."""
    trials = 4000
    pairs = Counter(
        (Order(num_samples, seed)[0], Order(num_samples, seed)[1]) for seed in range(trials)
    )
    firsts = Counter[int]()
    for (first, _), count in pairs.items():
        firsts[first] += count
    for counts, cases in [(firsts, num_samples), (pairs, num_samples * (num_samples - 1))]:
        assert len(counts) == cases
        expected = trials / cases
        assert all(abs(count - expected) < 5 * expected**0.5 for count in counts.values())


def test_order_of_a_trillion_samples_takes_constant_memory() -> None:
    order = Order(10**12 + 39, seed=3)
    drawn = [order[index] for index in range(1000)]
    assert len(set(drawn)) == 1000
    assert 0 <= min(drawn) < 10**11 and 9 * 10**11 < max(drawn) < 10**12 + 39


def test_order_is_pinned() -> None:
    """Resuming an old run needs the order of then: these values may never change."""
    assert [Order(10, seed=1)[index] for index in range(20)] == [
        9,
        0,
        3,
        7,
        4,
        1,
        6,
        2,
        8,
        5,
        1,
        7,
        6,
        0,
        9,
        3,
        8,
        2,
        5,
        4,
    ]


# -- batches


def test_packed_samples_are_shifted_by_one(tmp_path: Path) -> None:
    token_file = token_file_of(
        tmp_path, [5, 1, 8, 3]
    )  # the document of length 1 is empty, and left out
    stream = [0, 1, 2, 3, 999_999, 4, 5, 6, 7, 8, 9, 10, 999_999, 11, 12, 999_999]
    assert token_file.num_tokens == 16 and token_file.num_documents == 3
    assert token_file.num_samples(5) == 3 and token_file.num_samples(15) == 1
    batches = Batches(token_file, 5, 3, 1, 0, 1, seed=0)
    batch = batches.batch(0)
    (microbatch,) = batch.microbatches
    assert batch.num_targets == 15
    assert microbatch.documents is None
    order = Order(3, 0)
    for row in range(3):
        start = order[row] * 5
        assert microbatch.tokens[row].tolist() == stream[start : start + 5]
        assert microbatch.targets[row].tolist() == stream[start + 1 : start + 6]
        assert microbatch.positions[row].tolist() == [0, 1, 2, 3, 4]
    for tensor in (microbatch.tokens, microbatch.targets, microbatch.positions):
        assert tensor.dtype == torch.int64 and tensor.is_contiguous()


def test_set_shorter_than_a_sample(tmp_path: Path) -> None:
    token_file = token_file_of(tmp_path, [4, 3])
    for ask in (
        lambda: Batches(token_file, 7, 1, 1, 0, 1, 0),
        lambda: held_out_batches(token_file, 7, 1, 0, 1, None),
    ):
        with pytest.raises(
            ValueError, match=r"train split of .*data holds 7 tokens, .* at most 6 work"
        ):
            ask()
    assert Batches(token_file, 6, 1, 1, 0, 1, 0).batch(5).num_targets == 6
    with pytest.raises(ValueError, match="at least 1 token, not 0"):
        token_file.num_samples(0)


@pytest.mark.parametrize(
    "global_batch, nearest",
    [(10, r"6 or 12 would"), (5, r"6 would"), (0, r"6 would"), (-6, r"6 would")],
)
def test_global_batch_that_does_not_divide(tmp_path: Path, global_batch: int, nearest: str) -> None:
    token_file = token_file_of(tmp_path, [40])
    with pytest.raises(ValueError, match=rf"2 data ranks x 3 micro-batches; {nearest}"):
        Batches(token_file, 4, global_batch, 3, 0, 2, seed=0)


@pytest.mark.parametrize("separate", [False, True])
@pytest.mark.parametrize(
    "data_size, microbatches", [(1, 1), (1, 4), (2, 1), (2, 3), (4, 2), (3, 4), (12, 1), (1, 12)]
)
def test_any_layout_reads_what_one_rank_reads(
    tmp_path: Path, data_size: int, microbatches: int, separate: bool
) -> None:
    token_file = token_file_of(tmp_path, [7, 30, 2, 50, 11, 64])
    whole = Batches(token_file, 5, 24, 1, 0, 1, seed=9, separate_documents=separate)
    for step in (0, 1, 7):
        parts = [
            Batches(token_file, 5, 24, microbatches, rank, data_size, 9, separate).batch(step)
            for rank in range(data_size)
        ]
        expected = whole.batch(step)
        assert sum(part.num_targets for part in parts) == expected.num_targets
        for name in ("tokens", "targets", "positions", "documents"):
            rows = [
                getattr(part.microbatches[m], name) for m in range(microbatches) for part in parts
            ]
            if rows[0] is None:
                assert name == "documents" and not separate
            else:
                assert torch.equal(torch.cat(rows), getattr(expected.microbatches[0], name))


def test_batches_continue_in_the_order(tmp_path: Path) -> None:
    """An epoch's samples once each, across steps that do not divide it; and a batch does not depend
    on history."""
    token_file = token_file_of(tmp_path, [50, 23, 29])
    num_samples = token_file.num_samples(4)
    assert num_samples == 25
    straight = Batches(token_file, 4, 6, 3, 0, 1, seed=2)
    seen = [tokens for step in range(50) for tokens in read_rows(straight, step)]
    for epoch in range(12):
        rows = seen[epoch * num_samples : (epoch + 1) * num_samples]
        assert sorted(rows) == sorted(
            tuple(token_file.window(4 * i, 4).tolist()) for i in range(num_samples)
        )
    for step in (49, 3, 17, 3):
        resumed = Batches(TokenFile(tmp_path / "data"), 4, 6, 1, 0, 1, seed=2)
        assert read_rows(resumed, step) == seen[step * 6 : step * 6 + 6]


def read_rows(batches: Batches, step: int) -> list[tuple[int, ...]]:
    return [tuple(row) for each in batches.batch(step).microbatches for row in each.tokens.tolist()]


@settings(max_examples=examples(50), deadline=None)
@given(st.lists(st.integers(2, 9), min_size=2, max_size=8), st.integers(1, 10))
def test_separate_documents(lengths: list[int], seq_len: int) -> None:
    total = sum(lengths)
    seq_len = min(seq_len, total - 1)
    numbers = [number for number, length in enumerate(lengths) for _ in range(length)]
    with tempfile.TemporaryDirectory() as name:
        token_file = token_file_of(Path(name), lengths)
        num_samples = token_file.num_samples(seq_len)
        assert token_file.documents(0, total).tolist() == numbers
        batches = list(
            held_out_batches(token_file, seq_len, num_samples, 0, 1, separate_documents=True)
        )
    (microbatch,) = batches[0].microbatches
    assert len(batches) == 1 and microbatch.documents is not None
    num_targets = 0
    for sample in range(num_samples):
        position = 0
        for t in range(seq_len):
            here = sample * seq_len + t
            position = 0 if t == 0 or numbers[here] != numbers[here - 1] else position + 1
            assert microbatch.positions[sample, t] == position
            assert microbatch.documents[sample, t] == numbers[here]
            if numbers[here + 1] == numbers[here]:
                assert microbatch.targets[sample, t] == token_file.window(here + 1, 1)[0]
                num_targets += 1
            else:
                assert microbatch.tokens[sample, t] == 999_999
                assert microbatch.targets[sample, t] == IGNORE_INDEX
    assert batches[0].num_targets == num_targets


@pytest.mark.parametrize("limit", [None, 1, 5, 8, 1000])
@pytest.mark.parametrize("data_size, batch", [(1, 1), (1, 4), (2, 3), (4, 1), (3, 16)])
def test_held_out_is_read_once_in_order_by_ranks_in_step(
    tmp_path: Path, data_size: int, batch: int, limit: int | None
) -> None:
    token_file = token_file_of(tmp_path, [20, 15, 9])
    num_samples = min(limit or 10, token_file.num_samples(4))
    ranks = [
        list(held_out_batches(token_file, 4, batch, rank, data_size, limit))
        for rank in range(data_size)
    ]
    num_batches = -(-num_samples // (data_size * batch))
    assert [len(batches) for batches in ranks] == [num_batches] * data_size
    rows = [
        each.microbatches[0]
        for k in range(num_batches)
        for each in (batches[k] for batches in ranks)
    ]
    targets = torch.cat([row.targets for row in rows])
    assert targets.shape == (num_batches * data_size * batch, 4)
    assert (targets[num_samples:] == IGNORE_INDEX).all()
    stream = token_file.window(0, 4 * num_samples + 1).tolist()
    assert targets[:num_samples].flatten().tolist() == stream[1:]
    assert torch.cat([row.tokens for row in rows])[:num_samples].flatten().tolist() == stream[:-1]
    assert sum(each.num_targets for batches in ranks for each in batches) == 4 * num_samples


def test_held_out_limit_of_nothing(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="at least 1 sequence, not 0"):
        held_out_batches(token_file_of(tmp_path, [20]), 4, 1, 0, 1, 0)
