"""Files of strangers: real files of every format, each changed in a drawn place. Whatever is
changed, a model is opened as before or refused in a sentence, in bounded time and memory."""

import copy
import json
import math
import random
import shutil
import signal
import struct
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from examples import examples
from memory import forget_peak, process_bytes
from quantized_files import WRITERS, quantize_folder
from ranks import Ranks
from shardwise.cli import main, user_sentence
from shardwise.formats.gguf.gguf_file import Gguf, read_gguf
from shardwise.formats.huggingface.generation_config import read_sampling_defaults
from shardwise.formats.open_model import open_model
from shardwise.formats.run_checkpoint import checksum
from shardwise.formats.stored_sizes import stored_sizes
from shardwise.formats.tokenizers.train_bpe import byte_tokenizer, train_bpe
from shardwise.layout import Layout
from shardwise.params import model_specs
from shardwise.quantize.export import export
from shardwise.quantize.quant_config import QuantConfig
from shardwise.train.data.corpus import read_corpus
from shardwise.train.run import prepare_folder
from shardwise.train.settings import read_settings
from shardwise.train.validate import validated_run
from test_checkpoint import trained
from tiny_engine import TEMPLATE
from tiny_models import tiny_model
from tiny_training import build_data, tiny_settings
from whole_weights import load_weights

CASES = 12
MAX_SECONDS = 20
"""CPU time of one case: a vocabulary of a tokenizer takes most of it."""
MAX_GROWTH = 512 << 20
DEEP: Any = json.loads("[" * 400 + "]" * 400)
VALUES: list[Any] = [
    None, True, False, -1, 0, 1, 3, 1.5, 1e-300, 1e308, -1e308, math.nan, math.inf, 255, 2**31,
    2**32 - 1, 2**63, 10**18, 10**400, "", "x", "\ud800", "\0", "a" * 100_000, "../../x", [], {},
    [[]], ["x"] * 1000, [0] * 1000, {"a": {"a": 1}}, {"": None}, DEEP,
]  # fmt: skip


class Hang(BaseException):
    """No subclass of Exception, so that nothing takes it for an error of the file."""


@contextmanager
def bounded() -> Iterator[None]:
    """Raise unless the block ends soon and takes little memory, and refuses in sentences."""

    def stop(*_: Any) -> None:
        raise Hang

    forget_peak()
    before = process_bytes("VmHWM")
    start_s = time.process_time()
    previous = signal.signal(signal.SIGVTALRM, stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, 2 * MAX_SECONDS)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    except (ValueError, OSError) as error:
        sentence = user_sentence(error)
        assert sentence and len(sentence) < 2000, error
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, previous)
    assert time.process_time() - start_s < MAX_SECONDS
    assert process_bytes("VmHWM") - before < MAX_GROWTH


# -- changes


def places(value: Any) -> list[tuple[Any, Any]]:
    """Every (container, key) within a JSON value, those near the root as often as all others."""
    found = []
    todo = [value]
    while todo:
        node = todo.pop()
        keys: Any = range(len(node)) if isinstance(node, list) else list(node)
        for key in keys:
            found.append((node, key))
            if isinstance(node[key], dict | list):
                todo.append(node[key])
    return found


def change_json(content: Any, draw: random.Random) -> Any:
    """Return a copy with one or two values replaced, removed, exchanged or renamed."""
    content = copy.deepcopy(content)
    for _ in range(draw.choice((1, 1, 2))):
        everywhere = places(content)
        if not everywhere:
            return draw.choice(VALUES)
        at_top = [place for place in everywhere if place[0] is content]
        node, key = draw.choice(draw.choice((everywhere, everywhere[:200], at_top)))
        change = draw.randrange(8)
        other, other_key = draw.choice(everywhere)
        if change == 0:
            del node[key]
        elif change == 1:
            node[key] = copy.deepcopy(other[other_key])
        elif change == 2 and isinstance(node, dict):
            node[draw.choice(("", "x", "type", str(other_key)))] = node.pop(key)
        elif change == 3 and isinstance(node[key], int | float):
            node[key] = node[key] * draw.choice((2, 1000, -1)) + draw.choice((-1, 0, 1))
        elif change == 4 and isinstance(node[key], str):
            node[key] = node[key][: draw.randrange(len(node[key]) + 1)] + draw.choice("\0{%é")
        else:
            node[key] = copy.deepcopy(draw.choice(VALUES))
    return content


def change_bytes(data: bytes, draw: random.Random, end: int | None = None) -> bytes:
    """Change, cut or repeat a few bytes before `end`."""
    changed = bytearray(data)
    end = len(data) if end is None else min(end, len(data))
    for _ in range(draw.randrange(1, 5)):
        at = draw.randrange(max(1, end))
        match draw.randrange(5):
            case 0:
                del changed[at:]
            case 1:
                changed[at:at] = changed[at : at + draw.randrange(1, 100)]
            case 2:
                changed[at : at + 8] = struct.pack(
                    "<Q", draw.choice((0, 1, 2**31, 2**63, 2**64 - 1))
                )
            case _:
                changed[at : at + 1] = bytes([draw.randrange(256)])
    return bytes(changed)


def change_safetensors(data: bytes, draw: random.Random) -> bytes:
    size = int.from_bytes(data[:8], "little")
    if draw.random() < 0.3:
        return change_bytes(data, draw, 8 + size)
    header = json.dumps(change_json(json.loads(data[8 : 8 + size]), draw)).encode()
    return len(header).to_bytes(8, "little") + header + data[8 + size :]


def change_toml(text: str, draw: random.Random) -> str:
    lines = text.split("\n")
    at = draw.choice([number for number, line in enumerate(lines) if "=" in line])
    key = lines[at].partition("=")[0]
    values = ("-1", "0", "1e999", "nan", "true", '""', '"x"', "[]", "[[[]]]", "{}", "9" * 30)
    deep = "[" * 3000 + "]" * 3000
    lines[at] = draw.choice((f"{key}= {draw.choice((*values, deep))}", "", key, "[" + key, "=1"))
    return "\n".join(lines)


def change_file(path: Path, draw: random.Random) -> None:
    data = path.read_bytes()
    if draw.random() < 0.1:
        path.write_bytes(change_bytes(data, draw, 4096))
    elif path.suffix == ".json":
        path.write_text(json.dumps(change_json(json.loads(data), draw)))
    elif path.suffix == ".safetensors":
        path.write_bytes(change_safetensors(data, draw))
    elif path.suffix == ".gguf":
        path.write_bytes(change_bytes(data, draw, 16_384))
    elif path.suffix == ".toml":
        path.write_text(change_toml(data.decode(), draw))
    else:
        path.write_bytes(change_bytes(data, draw))
    if path.name == "index.json":  # its author can compute the checksum
        path.with_name("index.sha256").write_text(checksum(path))


# -- real files


@dataclass(frozen=True)
class Source:
    """A model and the files in it that are changed."""

    path: Path
    files: tuple[str, ...]


FOLDER_FILES = (
    "config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json",
    "chat_template.jinja", "model.safetensors",
)  # fmt: skip


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory, ranks: Ranks) -> dict[str, Source]:
    root = tmp_path_factory.mktemp("sources")
    model = tiny_model("llama", vocab_size=264)
    for name, size in (("plain", "5GB"), ("sharded", "100KB")):
        model.save_pretrained(root / name, max_shard_size=size)
        replace(byte_tokenizer(), chat_template=TEMPLATE).save(root / name)
    index = ("config.json", "model.safetensors.index.json")
    found = {
        "plain": Source(root / "plain", FOLDER_FILES),
        "sharded": Source(root / "sharded", index),
    }
    for name in ("gptq-4", "awq", "packed-4", "fp8-block"):
        quantize_folder(root / "plain", root / name, WRITERS[name])
        found[name] = Source(root / name, ("config.json", "model.safetensors"))
    tiny_model("llama-tied", vocab_size=264).save_pretrained(root / "tied")
    replace(train_bpe(["a text of words " * 9], 262), chat_template=TEMPLATE).save(root / "tied")
    export(root / "tied", root / "model.gguf", QuantConfig.parse("gguf:q8_0", "rtn"))
    found["gguf"] = Source(root / "model.gguf", ("",))
    return found | {"run": trained_run(root, ranks)}


def trained_run(root: Path, ranks: Ranks) -> Source:
    settings = tiny_settings(build_data(root), root / "run", eval_every=0)
    prepare_folder(validated_run(settings), False, pytest.fail)
    trained(ranks, settings)
    shutil.rmtree(root / "run/checkpoints/step-00000003")
    newest = "checkpoints/step-00000006"
    model = ("model/config.json", "model/tokenizer.json")
    files = (f"{newest}/index.json", f"{newest}/rank-00000.safetensors", *model)
    return Source(root / "run", ("config.toml", "data.json", *files))


def use(source: Path | Gguf) -> None:
    """Open a model, and read everything that commands read."""
    model = open_model(source)
    read_sampling_defaults(source)
    use_tokenizer(model.tokenizer)
    layout = Layout()
    load_weights(
        source, model.config, model_specs(model.config), layout, layout.coord(0), torch.float32
    )


def use_tokenizer(tokenizer: Any) -> None:
    for text in ("Hello, world! é→漢字", ""):
        ids = tokenizer.encode(text, special_tokens=True)
        assert max(ids, default=0) < tokenizer.vocab_size
        tokenizer.decode(ids)
    if tokenizer.chat_template is not None:
        tokenizer.chat([{"role": "user", "content": "hi"}])


def copied(source: Path, target: Path) -> Path:
    if source.is_dir():
        return Path(shutil.copytree(source, target))
    target = target.with_suffix(source.suffix)
    return Path(shutil.copyfile(source, target))


@pytest.mark.parametrize(
    "name", ["plain", "sharded", "gptq-4", "awq", "packed-4", "fp8-block", "gguf", "run"]
)
def test_changed_files_are_opened_or_refused(
    sources: dict[str, Source], name: str, tmp_path: Path
) -> None:
    """Each seed changes one file of a copy."""
    source = sources[name]
    use(source.path)
    for seed in range(examples(CASES)):
        draw = random.Random(f"{name} {seed}")
        path = copied(source.path, tmp_path / f"{seed}")
        change_file(path / draw.choice(source.files) if path.is_dir() else path, draw)
        with bounded():
            use(path)
        with bounded():
            stored_sizes(path)
        if name == "run":
            with bounded():
                read_settings(path)
            with bounded():
                read_corpus(path)
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def test_changed_metadata_of_gguf_is_opened_or_refused(sources: dict[str, Source]) -> None:
    file = read_gguf(sources["gguf"].path)
    for seed in range(examples(CASES)):
        draw = random.Random(seed)
        changed = change_json(file.metadata, draw)
        if isinstance(changed, dict):  # as every file's, and the format has no null
            metadata = {key: value for key, value in changed.items() if value is not None}
            with bounded():
                use(replace(file, metadata=metadata))


@pytest.mark.parametrize("command", ["plan", "generate", "convert"])
def test_commands_refuse_changed_files_in_a_sentence(
    sources: dict[str, Source], command: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    arguments: dict[str, Callable[[Path], list[str]]] = {
        "plan": lambda path: ["plan", str(path), "--gpu", "h100-80gb", "--gpus", "2"],
        "generate": lambda path: ["generate", str(path), "--prompt", "hi", "--max-tokens", "2"],
        "convert": lambda path: ["convert", str(path), str(tmp_path / "new")],
    }
    refused = 0
    for seed in range(examples(6)):
        draw = random.Random(f"{command} {seed}")
        path = copied(sources["plain"].path, tmp_path / f"{seed}")
        change_file(
            path / ("config.json" if command == "plan" else draw.choice(FOLDER_FILES)), draw
        )
        with bounded():
            code = main(arguments[command](path))
        said = capfd.readouterr().err
        assert code in (0, 1, 2) and "Traceback" not in said and "panicked" not in said
        refused += code == 2
        shutil.rmtree(path)
        shutil.rmtree(tmp_path / "new", ignore_errors=True)
    assert refused
