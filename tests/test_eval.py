"""Perplexity against the formula over transformers' logits, trainer against server, and what
`shardwise eval` says."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedModel

from shardwise.cli import main
from shardwise.commands.eval import read_utf8
from shardwise.formats.tokenizers.train_bpe import byte_tokenizer
from shardwise.measure.perplexity import windows
from shardwise.train.data.documents import read_text
from smollm2 import smollm2_gguf
from tiny_models import tiny_model

TEXT = (
    "The quick brown fox jumps over the lazy dog; pack my box with five dozen liquor jugs. Größe: "
    "5 µm.\n" * 2
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, PreTrainedModel]:
    """A drawn model of bytes with 64 positions, and its folder."""
    folder = tmp_path_factory.mktemp("model")
    theirs = tiny_model("llama", vocab_size=264)
    theirs.save_pretrained(folder)
    replace(byte_tokenizer(), eos_ids=frozenset()).save(folder)
    return folder, theirs


@pytest.fixture
def text_file(tmp_path: Path) -> Path:
    file = tmp_path / "text.txt"
    file.write_text(TEXT, encoding="utf-8")
    return file


def evaluate(capsys: pytest.CaptureFixture[str], *argv: str) -> dict[str, float]:
    assert main(["eval", *argv, "--json"]) == 0
    answer: dict[str, float] = json.loads(capsys.readouterr().out)
    return answer


@torch.no_grad()
def their_nll(model: PreTrainedModel, tokens: list[int], context: int, stride: int) -> float:
    """The definition: each token after as many as its window has before it; a window starts every
    `stride`, runs at most `context` tokens, and scores what no window before it has."""
    ids = torch.tensor(tokens)
    nlls: list[float] = []
    for start in range(0, len(tokens), stride):
        logits = model(ids[None, start : start + context]).logits[0]
        for at in range(start + 1, min(start + context, len(tokens) - 1) + 1):
            if at > len(nlls):
                nlls.append(-float(logits[at - start - 1].double().log_softmax(-1)[tokens[at]]))
    assert len(nlls) == len(tokens) - 1
    return sum(nlls) / len(nlls)


@pytest.mark.parametrize(("context", "stride"), [(64, 64), (64, 16), (50, 7), (10, 10), (1, 1)])
def test_perplexity_is_the_formula_over_their_logits(
    context: int,
    stride: int,
    model: tuple[Path, PreTrainedModel],
    text_file: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder, theirs = model
    sizes = ("--context", str(context), "--stride", str(stride), "--dtype", "fp32")
    found = evaluate(capsys, "perplexity", str(folder), "--data", str(text_file), *sizes)
    tokens = list(TEXT.encode())
    assert found["tokens"] == len(tokens) - 1
    assert found["nll"] == pytest.approx(their_nll(theirs, tokens, context, stride), abs=1e-5)
    assert found["perplexity"] == pytest.approx(math.exp(found["nll"]), rel=1e-12)


@given(num_tokens=st.integers(2, 200), context=st.integers(1, 70), data=st.data())
def test_every_token_but_the_first_is_scored_once(
    num_tokens: int, context: int, data: st.DataObject
) -> None:
    stride = data.draw(st.integers(1, context))
    scored: list[int] = []
    for each in windows(num_tokens, context, stride):
        assert (
            0 < each.stop - each.start <= context and 0 < each.num_scored <= each.stop - each.start
        )
        mine = range(each.stop + 1 - each.num_scored, each.stop + 1)
        assert each.start == 0 or all(at - each.start > context - stride for at in mine)
        scored += mine
    assert scored == list(range(1, num_tokens))


@pytest.mark.parametrize("context", ["20", "62"])
def test_trainer_and_server_agree(
    context: str,
    model: tuple[Path, PreTrainedModel],
    text_file: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """In fp32 but for the order of addition."""
    found = evaluate(
        capsys,
        "logprobs",
        str(model[0]),
        "--data",
        str(text_file),
        "--dtype",
        "fp32",
        "--context",
        context,
    )
    assert found["tokens"] == len(TEXT.encode()) - 1
    assert 0 <= found["mean_abs_difference"] <= found["max_abs_difference"] < 1e-5


def test_the_real_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """English is foreseen; in bf16 trainer and server round logits and sums differently."""
    file = tmp_path / "text.txt"
    file.write_text(
        "The capital of France is Paris, and the capital of Germany is Berlin. " * 2,
        encoding="utf-8",
    )
    gguf = str(smollm2_gguf())
    found = evaluate(capsys, "perplexity", gguf, "--data", str(file))
    assert 2 < found["perplexity"] < 20
    agreed = evaluate(capsys, "logprobs", gguf, "--data", str(file))
    assert agreed["tokens"] == found["tokens"] > 20
    assert agreed["max_abs_difference"] < 0.5 and agreed["mean_abs_difference"] < 0.1


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        (["perplexity", "--stride", "0"], "--stride must be at least 1"),
        (
            ["perplexity", "--context", "8", "--stride", "9"],
            "the stride must be from 1 to the context",
        ),
        (["perplexity", "--context", "65"], "at most the model's 64 tokens"),
        (
            ["logprobs", "--stride", "3"],
            "--stride is a flag of `eval perplexity`, not of `eval logprobs`",
        ),
    ],
)
def test_what_cannot_be_is_refused(
    argv: list[str],
    sentence: str,
    model: tuple[Path, PreTrainedModel],
    text_file: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    what, *flags = argv
    assert main(["eval", what, str(model[0]), "--data", str(text_file), *flags]) == 2
    assert sentence in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "read"), [(b"a\r\nb\r\n", b"a\r\nb\r\n"), (b"\xef\xbb\xbfab", b"ab")]
)
def test_a_text_is_read_as_training_data_is(content: bytes, read: bytes, tmp_path: Path) -> None:
    """CR LF stays, and a byte order mark is no text."""
    file = tmp_path / "text.txt"
    file.write_bytes(content)
    (chunk,) = read_text(file)
    assert read_utf8(file).encode() == chunk.text.encode() == read


def test_a_folder_is_no_text(
    model: tuple[Path, PreTrainedModel], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["eval", "perplexity", str(model[0]), "--data", str(tmp_path)]) == 2
    assert "--data takes a UTF-8 text file, but" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "sentence"), [(b"a", "the text has 1 token;"), (b"a\xff", "is not UTF-8 text")]
)
def test_a_text_that_cannot_be_scored(
    content: bytes,
    sentence: str,
    model: tuple[Path, PreTrainedModel],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file = tmp_path / "text.txt"
    file.write_bytes(content)
    assert main(["eval", "perplexity", str(model[0]), "--data", str(file)]) == 2
    assert sentence in capsys.readouterr().err
