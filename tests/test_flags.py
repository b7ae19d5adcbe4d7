"""Flags of the command line reach what they are for: each changes the answer as it says."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open

from shardwise.cli import main
from shardwise.formats.catalogue import CATALOGUE
from shardwise.formats.tokenizers.load_tokenizer import load_tokenizer
from shardwise.formats.tokenizers.train_bpe import byte_tokenizer
from shardwise.train.data.batches import TokenFile
from smollm2 import smollm2_gguf
from tiny_models import tiny_model

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if "
    "add_generation_prompt %}<a>{% endif %}"
)
STORED = {"bf16": "BF16", "fp16": "F16", "fp32": "F32"}


def answer_of(capsys: pytest.CaptureFixture[str], *argv: str) -> dict[str, Any]:
    capsys.readouterr()
    assert main([*argv, "--json"]) == 0
    answer: dict[str, Any] = json.loads(capsys.readouterr().out)
    return answer


# -- generate


@pytest.fixture(scope="module")
def chat_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A drawn model of bytes whose template writes the role before each message."""
    folder = tmp_path_factory.mktemp("model")
    tiny_model("llama", vocab_size=264).save_pretrained(folder)
    replace(byte_tokenizer(), chat_template=TEMPLATE).save(folder)
    return folder


@pytest.mark.parametrize(
    ("flags", "prompt"),
    [
        ([], "Hello"),
        (["--chat"], "<user>Hello<a>"),
        (["--chat", "--system", "Be brief."], "<system>Be brief.<user>Hello<a>"),
        (["--chat", "--system", ""], "<user>Hello<a>"),
    ],
)
def test_the_template_gets_what_the_flags_say(
    flags: list[str], prompt: str, chat_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of bytes there is one token each; and the next token is that of the same prompt written
    out."""
    common = ("--temperature", "0", "--max-tokens", "4", "--dtype", "fp32")
    answer = answer_of(capsys, "generate", str(chat_model), "--prompt", "Hello", *flags, *common)
    assert answer["prompt_tokens"] == len(prompt.encode())
    written_out = answer_of(capsys, "generate", str(chat_model), "--prompt", prompt, *common)
    assert (answer["tokens"], answer["logprobs"]) == (
        written_out["tokens"],
        written_out["logprobs"],
    )


def test_a_system_message_takes_the_place_of_the_real_models_own(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """SmolLM2's template writes a system message of its own where none is given."""
    path = smollm2_gguf()
    tokenizer = load_tokenizer(path)
    system = "You are a pirate. Answer every question as one, in verse, and never mention the sea."
    prompts = {
        (): tokenizer.chat([{"role": "user", "content": "Hi"}]),
        (
            "--system",
            system,
        ): f"<|im_start|>system\n{system}<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
        "<|im_start|>assistant\n",
    }
    counted = []
    for flags, prompt in prompts.items():
        answer = answer_of(
            capsys, "generate", str(path), "--prompt", "Hi", "--chat", *flags, "--max-tokens", "1"
        )
        counted.append(answer["prompt_tokens"])
        assert counted[-1] == len(tokenizer.encode(prompt))
    assert counted[0] != counted[1]


# -- convert


@pytest.mark.parametrize("dtype", [None, *STORED])
def test_convert_stores_the_dtype_that_was_asked_for(
    dtype: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny_model("llama").save_pretrained(tmp_path / "old")
    flags = ["--dtype", dtype] if dtype else []
    answer_of(capsys, "convert", str(tmp_path / "old"), str(tmp_path / "new"), *flags)
    with safe_open(tmp_path / "new" / "model.safetensors", "pt") as file:
        assert {file.get_slice(name).get_dtype() for name in file.keys()} == {  # noqa: SIM118
            STORED[dtype or "fp32"]
        }


# -- data


def test_held_out_is_the_share_that_was_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of 400 documents: within 4 standard deviations of the share, none at 0, about 1 % unless
    told."""
    source = tmp_path / "source.jsonl"
    source.write_text(
        "".join(json.dumps({"text": f"document {number}"}) + "\n" for number in range(400))
    )
    for share in (None, 0.0, 0.1, 0.5):
        made = tmp_path / f"data-{share}"
        flags = [] if share is None else ["--held-out", str(share)]
        answer = answer_of(
            capsys, "data", "build", str(source), str(made), "--tokenizer", "bytes", *flags
        )
        assert answer["documents"] == 400
        expected = 0.01 if share is None else share
        held_out = TokenFile(made, "held_out").num_documents if expected else 0
        assert (made / "held_out.bin").exists() == (expected > 0)
        assert abs(held_out - 400 * expected) <= 4 * (400 * expected * (1 - expected)) ** 0.5
        assert TokenFile(made, "train").num_documents == 400 - held_out


def test_field_is_what_is_read_and_what_a_vocabulary_is_trained_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each record has another text under the default field, without a letter in common: a
    vocabulary trained on it would leave the bytes of the field as they are."""
    source = tmp_path / "source.jsonl"
    body = "abracadabra"
    text = "xylyxylyxy"
    source.write_text((json.dumps({"body": body, "text": text}) + "\n") * 20)
    for tokenizer in ("bytes", "bpe:260"):
        for flags, wanted in (([], text), (["--field", "body"], body)):
            made = tmp_path / f"{tokenizer[:3]}-{wanted}"
            answer_of(
                capsys,
                "data",
                "build",
                str(source),
                str(made),
                "--tokenizer",
                tokenizer,
                "--held-out",
                "0",
                *flags,
            )
            split = TokenFile(made)
            read_with = load_tokenizer(made)
            first = np.asarray(split.tokens[: int(split.starts[1])]).tolist()
            assert read_with.decode(first) == wanted
            assert (len(first) - 1 < len(wanted)) == (tokenizer != "bytes"), (
                "an end of text follows"
            )


# -- plan


@pytest.mark.parametrize("flags", [[], ["--seq", "1024"], ["--seq", "4096"]])
def test_seq_is_the_length_of_the_planned_cache(
    flags: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    answer = answer_of(
        capsys, "plan", "smollm2-135m", "--gpu", "h100-80gb", "--mode", "serve", *flags
    )
    config = CATALOGUE["smollm2-135m"]
    seq_tokens = int(flags[1]) if flags else 8192
    ((rows,),) = [[stage["rows"] for stage in each["ledger"]] for each in answer["candidates"][:1]]
    per_token = (
        2 * 2 * config.num_layers * config.num_kv_heads * config.head_dim
    )  # key and value, two bytes each
    assert (answer["seq"], rows["kv"]) == (seq_tokens, per_token * seq_tokens)


def test_precision_is_of_the_planned_weights(capsys: pytest.CaptureFixture[str]) -> None:
    for flags, num_bytes in (([], 2), (["--precision", "fp32"], 4)):
        answer = answer_of(
            capsys, "plan", "smollm2-135m", "--gpu", "h100-80gb", "--mode", "serve", *flags
        )
        assert answer["one_gpu"]["ledger"][0]["rows"]["parameters"] == num_bytes * 134_515_008
