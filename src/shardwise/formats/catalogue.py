"""Which model is meant: a word on the command line becomes a `ModelConfig`."""

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from shardwise.config import ModelConfig, RopeScaling
from shardwise.formats.gguf.gguf_config import config_from_gguf
from shardwise.formats.gguf.gguf_file import read_gguf
from shardwise.formats.hub import fetch_config, fetch_model
from shardwise.formats.huggingface.hf_config import read_folder_config
from shardwise.formats.synthetic import from_count, parse_count
from shardwise.suggest import nearest

Kind = Literal["gguf", "folder", "run", "count", "catalogue", "hub"]

WORDS = "a catalogue name (llama-3.1-8b), a count (70B), a Hugging Face folder, a .gguf file, a run folder, or org/name"
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


def gpt2(num_layers: int, hidden: int, heads: int) -> ModelConfig:
    return ModelConfig(
        "gpt2",
        num_layers,
        hidden,
        4 * hidden,
        heads,
        heads,
        hidden // heads,
        50257,
        1024,
        tied=True,
        norm="layer",
        activation="gelu_tanh",
        gated=False,
        positions="learned",
        qkv_bias=True,
        out_bias=True,
        mlp_bias=True,
    )


def llama(
    num_layers: int,
    hidden: int,
    ffn: int,
    heads: int,
    kv_heads: int,
    vocab: int = 32000,
    max_positions: int = 4096,
    tied: bool = False,
    rope_theta: float = 10000.0,
) -> ModelConfig:
    return ModelConfig(
        "llama",
        num_layers,
        hidden,
        ffn,
        heads,
        kv_heads,
        hidden // heads,
        vocab,
        max_positions,
        tied,
        rope_theta=rope_theta,
    )


def llama3(
    num_layers: int, hidden: int, ffn: int, heads: int, factor: float = 0, tied: bool = False
) -> ModelConfig:
    """Llama 3 as released; with `factor`, the 131072 positions of 3.1 and 3.2."""
    shape = llama(num_layers, hidden, ffn, heads, 8, 128256, 8192, tied, 500000.0)
    return (
        replace(shape, max_positions=131072, rope_scaling=RopeScaling("llama3", factor))
        if factor
        else shape
    )


def qwen2(
    num_layers: int,
    hidden: int,
    ffn: int,
    heads: int,
    kv_heads: int,
    vocab: int,
    tied: bool = False,
) -> ModelConfig:
    """Qwen2.5 with the positions that it has before YaRN stretches them."""
    return ModelConfig(
        "qwen2",
        num_layers,
        hidden,
        ffn,
        heads,
        kv_heads,
        hidden // heads,
        vocab,
        32768,
        tied,
        norm_eps=1e-6,
        rope_theta=1e6,
        qkv_bias=True,
    )


def qwen3(num_layers: int, hidden: int, ffn: int, heads: int, tied: bool = False) -> ModelConfig:
    return ModelConfig(
        "qwen3",
        num_layers,
        hidden,
        ffn,
        heads,
        8,
        128,
        151936,
        40960,
        tied,
        norm_eps=1e-6,
        rope_theta=1e6,
        qk_norm=True,
    )


CATALOGUE: dict[str, ModelConfig] = {
    "gpt2": gpt2(12, 768, 12),
    "gpt2-medium": gpt2(24, 1024, 16),
    "gpt2-large": gpt2(36, 1280, 20),
    "gpt2-xl": gpt2(48, 1600, 25),
    "llama-65b": llama(80, 8192, 22016, 64, 64, max_positions=2048),
    "llama-2-7b": llama(32, 4096, 11008, 32, 32),
    "llama-2-13b": llama(40, 5120, 13824, 40, 40),
    "llama-2-70b": llama(80, 8192, 28672, 64, 8),
    "llama-3-8b": llama3(32, 4096, 14336, 32),
    "llama-3-70b": llama3(80, 8192, 28672, 64),
    "llama-3.1-8b": llama3(32, 4096, 14336, 32, factor=8),
    "llama-3.1-70b": llama3(80, 8192, 28672, 64, factor=8),
    "llama-3.1-405b": llama3(126, 16384, 53248, 128, factor=8),
    "llama-3.2-1b": llama3(16, 2048, 8192, 32, factor=32, tied=True),
    "llama-3.2-3b": llama3(28, 3072, 8192, 24, factor=32, tied=True),
    "mistral-7b": ModelConfig(
        "mistral",
        32,
        4096,
        14336,
        32,
        8,
        128,
        32000,
        32768,
        sliding_window=4096,
        windowed_layers=frozenset(range(32)),
    ),
    "qwen2.5-0.5b": qwen2(24, 896, 4864, 14, 2, 151936, tied=True),
    "qwen2.5-1.5b": qwen2(28, 1536, 8960, 12, 2, 151936, tied=True),
    "qwen2.5-3b": qwen2(36, 2048, 11008, 16, 2, 151936, tied=True),
    "qwen2.5-7b": qwen2(28, 3584, 18944, 28, 4, 152064),
    "qwen2.5-14b": qwen2(48, 5120, 13824, 40, 8, 152064),
    "qwen2.5-32b": qwen2(64, 5120, 27648, 40, 8, 152064),
    "qwen2.5-72b": qwen2(80, 8192, 29568, 64, 8, 152064),
    "qwen3-0.6b": qwen3(28, 1024, 3072, 16, tied=True),
    "qwen3-1.7b": qwen3(28, 2048, 6144, 16, tied=True),
    "qwen3-4b": qwen3(36, 2560, 9728, 32, tied=True),
    "qwen3-8b": qwen3(36, 4096, 12288, 32),
    "qwen3-14b": qwen3(40, 5120, 17408, 40),
    "qwen3-32b": qwen3(64, 5120, 25600, 64),
    "smollm2-135m": llama(30, 576, 1536, 9, 3, 49152, 8192, tied=True, rope_theta=100000.0),
    "smollm2-360m": llama(32, 960, 2560, 15, 5, 49152, 8192, tied=True, rope_theta=100000.0),
    "smollm2-1.7b": llama(24, 2048, 8192, 32, 32, 49152, 8192, tied=True, rope_theta=130000.0),
}


@dataclass(frozen=True)
class FoundModel:
    """What a MODEL word names. `path` is the file or folder on this machine; None for a bare
    shape."""

    name: str
    config: ModelConfig
    kind: Kind
    path: Path | None = None


def find_model(
    text: str, cache_dir: Path | None = None, local_files_only: bool = False
) -> FoundModel:
    """Resolve a MODEL word. A path that exists wins, then a count, a catalogue name, a hub id.

    Of a hub model only `config.json` is fetched, and what the hub's local cache holds is used as it
    is. `cache_dir` and `local_files_only` are those of huggingface_hub. Raises ValueError with one
    sentence for what cannot be found or read.
    """
    path = Path(text).expanduser()
    if text and path.exists():
        return found_on_disk(text, path)
    count = parse_count(text)
    if count is not None:
        return FoundModel(text.upper(), from_count(count), "count")
    if text.lower() in CATALOGUE:
        return FoundModel(text.lower(), CATALOGUE[text.lower()], "catalogue")
    if (
        path.suffix == ".gguf"
        or text.endswith("/")
        or text.startswith(("/", "./", "../", "~"))
        or text.count("/") > 1
    ):
        raise ValueError(f"{text}: there is no such file or folder")
    if HUB_ID.fullmatch(text):
        config_path = fetch_config(text, cache_dir, local_files_only)
        return FoundModel(text, read_folder_config(config_path.parent), "hub", config_path.parent)
    near = nearest(text.lower(), CATALOGUE)
    hint = f"the nearest names are {', '.join(near)}; a" if near else "a"
    raise ValueError(f"unknown model {text!r}; {hint} model is {WORDS}")


def found_on_disk(text: str, path: Path) -> FoundModel:
    if path.is_file():
        if path.suffix != ".gguf":
            raise ValueError(f"{text} is a file, but not a .gguf file; a model is {WORDS}")
        return FoundModel(path.stem, config_from_gguf(read_gguf(path), text), "gguf", path)
    name = path.resolve().name
    if (path / "config.json").is_file():
        return FoundModel(name, read_folder_config(path), "folder", path)
    if (path / "model" / "config.json").is_file():
        return FoundModel(name, read_folder_config(path / "model"), "run", path)
    files = sorted(path.glob("*.gguf"))
    hint = f"; name the file in it, {files[0]}" if files else "; a model is " + WORDS
    raise ValueError(
        f"{text} is not a model folder: it has neither config.json nor model/config.json{hint}"
    )


def model_path(
    found: FoundModel, cache_dir: Path | None = None, local_files_only: bool = False
) -> Path:
    """The file or folder with the weights of `found`; a hub model is downloaded (config, tokenizer,
    safetensors).

    Raises ValueError for a bare shape, which has none, and for a hub that cannot be reached.
    """
    if found.kind == "hub":
        return fetch_model(found.name, cache_dir, local_files_only)
    if found.path is None:
        raise ValueError(
            f"{found.name} is a shape without weights; name a folder, a .gguf file, a run, or org/name"
        )
    return found.path
