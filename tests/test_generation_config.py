"""Sampling parameters of requests that leave them out: those of the model's
`generation_config.json`, in `LLM`, `generate` and the server."""

import json
import shutil
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from shardwise import LLM
from shardwise.cli import main
from shardwise.formats.huggingface.generation_config import read_sampling_defaults
from shardwise.formats.tokenizers.train_bpe import byte_tokenizer
from shardwise.serve.api.server import make_app
from shardwise.serve.default_params import default_params
from shardwise.serve.request import SamplingParams
from shardwise.serve.settings import ServerSettings
from smollm2 import smollm2_gguf
from tiny_engine import TinyEngine, talking_model
from tiny_models import tiny_model

CONTENT = {
    "temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.1, "repetition_penalty": 1.05,
    "do_sample": True, "max_new_tokens": 7, "eos_token_id": 256,
}  # fmt: skip
DEFAULTS = SamplingParams(0.6, 20, 0.95, 0.1, 1.05)


def write(folder: Path, content: object) -> Path:
    (folder / "generation_config.json").write_text(json.dumps(content))
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    tiny_model("llama", vocab_size=264).save_pretrained(path)
    byte_tokenizer().save(path)
    return write(path, CONTENT)


def test_fields_that_both_have_are_read(folder: Path, tmp_path: Path) -> None:
    assert default_params(folder, "auto") == DEFAULTS
    assert default_params(folder, "none") == SamplingParams()
    run = tmp_path / "run"
    shutil.copytree(folder, run / "model")
    assert default_params(run, "auto") == DEFAULTS
    (tmp_path / "config.json").touch()
    assert default_params(tmp_path, "auto") == SamplingParams()
    assert read_sampling_defaults(smollm2_gguf()) == {}


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ({"temperature": "hot"}, "temperature is 'hot', but must be a number"),
        ({"top_k": True}, "top_k is True, but must be a number"),
        ({"top_p": 1.5}, "top_p is 1.5, but it must be above 0"),
        ({"top_k": 1.5}, "top_k is 1.5"),
        ([], "must hold a JSON object"),
    ],
)
def test_damage_is_a_sentence(content: object, says: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").touch()
    with pytest.raises(ValueError, match=r"generation_config\.json") as refused:
        default_params(write(tmp_path, content), "auto")
    assert says.split(",")[0] in str(refused.value)


def test_llm_uses_them_for_prompts_without_parameters(folder: Path) -> None:
    llm = LLM(str(folder), dtype="fp32", kv_bytes=1 << 20, seed=3)
    assert llm.get_default_sampling_params() == DEFAULTS
    texts = [
        llm.generate("Hello", params, use_tqdm=False)[0].outputs[0].text
        for params in (None, DEFAULTS)
    ]
    llm.next_id = 0
    assert llm.generate("Hello", use_tqdm=False)[0].outputs[0].text == texts[0]
    plain = LLM(str(folder), dtype="fp32", kv_bytes=1 << 20, generation_config="none")
    assert plain.get_default_sampling_params() == SamplingParams()


def test_generate_uses_them_and_flags_win(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def tokens(*flags: str) -> list[int]:
        words = ("--prompt", "Hello", "--max-tokens", "12", "--seed", "1", "--dtype", "fp32")
        assert main(["generate", str(folder), *words, "--json", *flags]) == 0
        found: list[int] = json.loads(capsys.readouterr().out)["tokens"]
        return found

    own = tokens()
    write(folder, {})
    explicit = ("--temperature", "0.6", "--top-k", "20", "--top-p", "0.95", "--min-p", "0.1")
    differs = tokens()
    write(folder, CONTENT | {"repetition_penalty": 1.0})
    assert tokens("--generation-config", "none") == differs != own
    same = tokens()
    write(folder, {})
    assert tokens(*explicit) == same
    write(folder, CONTENT)
    assert tokens("--temperature", "0") != own


def test_the_server_uses_them_and_requests_win() -> None:
    engine = TinyEngine(talking_model())
    settings = ServerSettings(("tiny",), default_params=SamplingParams(temperature=0))
    with TestClient(make_app(engine, settings)) as client:

        def text(**fields: object) -> str:
            body = {"prompt": "Hello", "max_tokens": 8, **fields}
            answer: str = client.post("/v1/completions", json=body).json()["choices"][0]["text"]
            return answer

        assert text() == text() == text(temperature=0)
        assert len({text(temperature=5.0, seed=seed) for seed in range(4)}) > 1
