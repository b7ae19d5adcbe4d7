"""Generation against transformers, and what `shardwise generate` promises."""

import io
import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from engines import BYTES, Got, answers, engine_of, greedy, runner_of, tiny
from shardwise.cli import main
from shardwise.formats.tokenizers.train_bpe import byte_tokenizer
from shardwise.measure.reference_model import ReferenceModel, load_reference_model
from shardwise.serve.request import Request, SamplingParams
from smollm2 import smollm2_gguf
from tiny_models import MODELS, tiny_model

LOGPROB = 1e-5  # absolute, in fp32
PROMPT = list(b"Hello, world")


def generate(model: ReferenceModel, prompt: list[int], params: SamplingParams) -> Got:
    """Complete a prompt in an engine of its own."""
    engine = engine_of(runner_of(model), model.tokenizer)
    ((got,),) = answers(engine, [Request(tuple(prompt), replace(params, logprobs=0))])
    return got


@torch.no_grad()
def their_logprobs(model: PreTrainedModel, prompt: list[int], tokens: list[int]) -> Tensor:
    """log_softmax [new tokens, V] of what transformers computes for prompt and tokens at once."""
    logits = model(torch.tensor([[*prompt, *tokens]])).logits[0]
    return logits[len(prompt) - 1 : -1].log_softmax(-1)


def assert_logprobs(model: PreTrainedModel, prompt: list[int], got: Got) -> None:
    rows = their_logprobs(model, prompt, got.tokens)
    expected = rows.gather(1, torch.tensor(got.tokens)[:, None])[:, 0]
    found = torch.tensor([each.logprob for each in got.logprobs])
    torch.testing.assert_close(found, expected, rtol=0, atol=LOGPROB)


@pytest.mark.parametrize("name", MODELS)
def test_greedy_is_the_likeliest_token_at_every_step(name: str) -> None:
    theirs = tiny_model(name, **BYTES)
    got = generate(tiny(name), PROMPT, greedy(40))
    assert got.tokens == their_logprobs(theirs, PROMPT, got.tokens).argmax(-1).tolist()
    assert_logprobs(theirs, PROMPT, got)
    assert (len(got.tokens), got.reason) == (40, "length")


@pytest.mark.parametrize("name", ["llama", "mistral", "gpt2"])
def test_logprobs_of_drawn_tokens_are_of_the_unmodified_distribution(name: str) -> None:
    theirs = tiny_model(name, **BYTES)
    params = SamplingParams(temperature=0.7, top_k=20, top_p=0.9, seed=3, max_tokens=40)
    got = generate(tiny(name), PROMPT, params)
    assert_logprobs(theirs, PROMPT, got)
    ranks = their_logprobs(theirs, PROMPT, got.tokens).argsort(-1, descending=True).tolist()
    places = [row.index(token) for row, token in zip(ranks, got.tokens, strict=True)]
    assert max(places) < 20 and any(places)


def test_a_seed_repeats_itself() -> None:
    model = tiny("qwen3")
    params = SamplingParams(temperature=1.5, max_tokens=30, seed=1)
    first = generate(model, PROMPT, params)
    assert generate(model, PROMPT, params).tokens == first.tokens
    assert generate(model, PROMPT, replace(params, seed=2)).tokens != first.tokens
    assert generate(model, PROMPT, replace(params, seed=None)).tokens != first.tokens


# The command


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "llama"
    tiny_model("llama", **BYTES).save_pretrained(path)
    byte_tokenizer().save(path)
    return path


Command = Callable[..., tuple[int, str, str]]


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Command:
    """Run `shardwise generate` with these words; exit code, stdout, stderr."""

    def run(*words: object) -> tuple[int, str, str]:
        capsys.readouterr()  # what making the model printed
        code = main(["generate", *map(str, words)])
        return code, *capsys.readouterr()

    return run


def test_the_command_says_what_the_engine_says(folder: Path, command: Command) -> None:
    words = ("--prompt", "Hello", "--max-tokens", 20, "--seed", 4, "--top-k", 50, "--dtype", "fp32")
    model = load_reference_model(folder, torch.float32, torch.device("cpu"))
    expected = generate(model, list(b"Hello"), SamplingParams(max_tokens=20, seed=4, top_k=50))
    code, out, err = command(folder, *words)
    assert (code, out) == (0, expected.text + "\n")
    assert re.fullmatch(
        r"20 tokens: model loaded in \d+\.\d\d s, first token after \d+\.\d\d s, then "
        r"[\d,]+ tokens/s\n",
        err,
    )
    code, out, err = command(folder, *words, "--json")
    told = json.loads(out)  # exactly one object, or this raises
    assert (code, err) == (0, "") and out.count("\n") == 1
    assert told.keys() >= {"text", "tokens", "logprobs", "prompt_tokens", "tokens_per_s"}
    assert (told["text"], told["tokens"]) == (expected.text, expected.tokens)
    assert told["logprobs"] == [each.logprob for each in expected.logprobs]
    assert (told["prompt_tokens"], told["finish_reason"]) == (5, "length")
    assert told["tokens_per_s"] > 0 and told["first_token_s"] > 0 and told["load_s"] > 0


def test_an_end_token_is_not_part_of_a_completion(folder: Path, command: Command) -> None:
    """A token that the model generates is made its end token."""
    model = tiny_model("llama", **BYTES)
    words = ("--prompt", "Hello", "--temperature", 0, "--max-tokens", 30, "--dtype", "fp32")
    tokens = json.loads(command(folder, *words, "--json")[1])["tokens"]
    ending = folder.parent / "ending"
    model.save_pretrained(ending)
    replace(byte_tokenizer(), eos_ids=frozenset({tokens[17]})).save(ending)
    told = json.loads(command(ending, *words, "--json")[1])
    assert told["tokens"] == tokens[: tokens.index(tokens[17])]
    assert told["finish_reason"] == "stop" and len(told["logprobs"]) == len(told["tokens"])


def test_a_model_that_computes_nan_is_a_sentence(tmp_path: Path, command: Command) -> None:
    model = tiny_model("llama", **BYTES)
    model.lm_head.weight.data[:] = torch.nan
    model.save_pretrained(tmp_path / "model")
    byte_tokenizer().save(tmp_path / "model")
    said = "the model's logits are not numbers: its weights are damaged, or it diverged in training"
    assert_refused(command(tmp_path / "model", "--prompt", "x", "--max-tokens", 2), said)


def test_one_token_has_no_rate(folder: Path, command: Command) -> None:
    told = json.loads(command(folder, "--prompt", "Hi", "--max-tokens", 1, "--json")[1])
    assert told["tokens_per_s"] == 0 and told["first_token_s"] > 0


def test_quantized_weights_complete(folder: Path, command: Command) -> None:
    words = ("--prompt", "Hello", "--max-tokens", 12, "--temperature", 0, "--dtype", "fp32")
    model = load_reference_model(folder, torch.float32, torch.device("cpu"), "int3-g32")
    expected = generate(model, list(b"Hello"), SamplingParams(temperature=0, max_tokens=12))
    told, plain = (
        json.loads(command(folder, *words, "--json", *more)[1])
        for more in (("--quant", "int3-g32"), ())
    )
    assert told["tokens"] == expected.tokens
    assert told["logprobs"] == [each.logprob for each in expected.logprobs] != plain["logprobs"]


def test_the_prompt_may_come_from_stdin(
    folder: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ("--max-tokens", 9, "--temperature", 0, "--json")
    wanted = json.loads(command(folder, "--prompt", "two\nlines é", *words)[1])
    monkeypatch.setattr("sys.stdin", io.StringIO("two\nlines é"))
    told = json.loads(command(folder, "--prompt", "-", *words)[1])
    assert (
        told["tokens"] == wanted["tokens"]
        and told["prompt_tokens"] == wanted["prompt_tokens"] == 12
    )


def test_stop_flags_add_up(folder: Path, command: Command) -> None:
    words = (folder, "--prompt", "Hi", "--max-tokens", 40, "--seed", 8, "--json")
    text = json.loads(command(*words)[1])["text"]
    told = json.loads(command(*words, "--stop", text[6:8], "--stop", text[12:14])[1])
    assert told["text"] == text[: min(text.index(text[6:8]), text.index(text[12:14]))]
    assert told["finish_reason"] == "stop"


def test_without_a_limit_a_small_model_fills_its_positions(folder: Path, command: Command) -> None:
    told = json.loads(command(folder, "--prompt", "x" * 40, "--temperature", 0, "--json")[1])
    assert told["prompt_tokens"] == 40 and len(told["tokens"]) == 24


@pytest.mark.parametrize("flags", [[], ["--json"]])
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--temperature", "-0.5"], "temperature is -0.5, but it must be 0"),
        (["--temperature", "nan"], "temperature is nan"),
        (["--temperature", "warm"], "argument --temperature: invalid float value: 'warm'"),
        (["--max-tokens", "0"], "max_tokens is 0, but it must be at least 1"),
        (
            ["--max-tokens", "64"],
            "1 prompt tokens and max_tokens=64 exceed the 64 tokens that a request may have; "
            "max_tokens=63 works",
        ),
        (["--top-p", "0"], "top_p is 0.0"),
        (["--top-k", "-3"], "top_k is -3"),
        (["--min-p", "2"], "min_p is 2.0"),
        (["--stop", ""], "stop must contain non-empty strings"),
        (["--seed", str(2**63)], "seed is 9223372036854775808"),
        (["--dtype", "fp8"], "invalid choice: 'fp8'"),
        (
            ["--quant", "int4-g128"],
            "groups of 128 columns do not divide the 64 columns of blocks.0.qkv; groups of 32 do",
        ),
        (["--prompt", ""], "the prompt is empty"),
        (["--prompt", "x" * 64], "64 prompt tokens and max_tokens="),
        (["--prompt", "\udc80"], "the text is not valid Unicode"),
        (["--chat"], "this model has no chat template"),
        (["--system", "be brief"], "--system requires --chat"),
        (["--temprature", "0"], "generate does not take --temprature; did you mean --temperature?"),
    ],
)
def test_a_request_that_makes_no_sense_is_a_sentence(
    folder: Path, command: Command, words: list[str], said: str, flags: list[str]
) -> None:
    assert_refused(command(folder, "--prompt", "x", *words, *flags), said)


def assert_refused(ended: tuple[int, str, str], said: str) -> None:
    code, out, err = ended
    assert (code, out) == (2, "")
    assert re.fullmatch(r"shardwise: [^\n]+\n", err) and said in err


def test_a_model_that_cannot_be_used_is_a_sentence(
    folder: Path, tmp_path: Path, command: Command
) -> None:
    def refused(model: object, said: str) -> None:
        assert_refused(command(model, "--prompt", "x", "--max-tokens", 2), said)

    refused(tmp_path / "none.gguf", "does not exist; a model is a catalogue")
    refused(tmp_path / "none", "does not exist; a model is a catalogue")
    refused(tmp_path, "is not a model folder")
    refused("gpt2", "'gpt2' is only a shape, without weights; name a folder")
    refused("7B", "'7B' is only a shape, without weights")
    refused("smollm", "unknown model 'smollm'; the nearest names are smollm2")
    refused(folder / "config.json", "is a file, but not a .gguf file")


def test_a_gguf_file_that_is_broken_is_a_sentence(tmp_path: Path, command: Command) -> None:
    with smollm2_gguf().open("rb") as file:
        start = file.read(4_000_000)
    broken = {
        "empty": (b"", "it has only 0 bytes"),
        "other": (b"PK\x03\x04" + start[4:], "it does not start with the letters GGUF"),
        "header": (start[:1000], "cannot be used as a GGUF file"),
        "tables": (start[:500_000], "cannot be used as a GGUF file"),
        "weights": (start, "it may be truncated"),
    }
    for name, (content, said) in broken.items():
        (tmp_path / f"{name}.gguf").write_bytes(content)
        assert_refused(command(tmp_path / f"{name}.gguf", "--prompt", "x"), said)


def test_a_folder_that_is_broken_is_a_sentence(
    folder: Path, tmp_path: Path, command: Command
) -> None:
    def refused(said: str, **files: bytes | None) -> None:
        """Every file of the model linked into a folder of its own, some replaced or, with None,
        left out."""
        broken = tmp_path / f"model-{len(list(tmp_path.iterdir()))}"
        broken.mkdir()
        for file in folder.iterdir():
            content = files.get(file.stem, b"")
            if content:
                (broken / file.name).write_bytes(content)
            elif content is not None:
                (broken / file.name).symlink_to(file)
        assert_refused(command(broken, "--prompt", "x", "--max-tokens", 2), said)

    config = json.loads((folder / "config.json").read_text())
    weights = (folder / "model.safetensors").read_bytes()
    refused("it has neither config.json nor model/config.json", config=None)
    refused("is not valid JSON", config=b"{")
    refused(
        "unknown architecture 'mamba'; known are llama",
        config=json.dumps(config | {"model_type": "mamba"}).encode(),
    )
    refused(
        "it has no parameter for", config=json.dumps(config | {"num_hidden_layers": 1}).encode()
    )
    refused("model.safetensors", model=weights[: len(weights) // 2])
    refused("model.safetensors", model=weights[:4])
    refused("has no weights: expected model.safetensors", model=None)
    refused("has no tokenizer", tokenizer=None)
    refused("must hold a JSON object, but it holds a list", tokenizer=b"[]")


def test_a_tokenizer_larger_than_the_vocabulary_is_a_sentence(
    tmp_path: Path, command: Command
) -> None:
    tiny_model("llama").save_pretrained(tmp_path / "model")
    byte_tokenizer().save(tmp_path / "model")
    said = "the tokenizer has ids up to 256, but the model's vocabulary has only 101 rows"
    assert_refused(command(tmp_path / "model", "--prompt", "x", "--max-tokens", 2), said)


def test_the_real_model_knows_berlin(command: Command) -> None:
    words = (
        smollm2_gguf(),
        "--chat",
        "--prompt",
        "What is the capital of Germany?",
        "--temperature",
        0,
    )
    code, out, err = command(*words, "--max-tokens", 24)
    assert code == 0 and "Berlin" in out and "<|im_end|>" not in out and err.count("\n") == 1
    code, told, err = command(*words, "--max-tokens", 24, "--json")
    answer = json.loads(told)
    assert (code, err) == (0, "") and answer["text"] + "\n" == out
    assert (
        answer["finish_reason"] == "stop" and len(answer["tokens"]) == len(answer["logprobs"]) < 24
    )
    assert all(-20 < logprob <= 0 for logprob in answer["logprobs"])
