"""MODEL on the command line: a word is resolved to a `ModelConfig` and its files."""

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from shardwise.config import ModelConfig, RopeScaling
from shardwise.formats.gguf.gguf_config import config_from_gguf
from shardwise.formats.gguf.gguf_file import Gguf, read_gguf
from shardwise.formats.hub import fetch_config, fetch_model
from shardwise.formats.huggingface.hf_config import read_folder_config
from shardwise.formats.synthetic import config_of_count, parse_count
from shardwise.suggest import nearest

ModelKind = Literal["gguf", "folder", "run", "count", "catalogue", "hub"]

EXPECTED_MODEL = (
    "a catalogue name (llama-3.1-8b), a parameter count (70B), a Hugging Face folder, a .gguf "
    "file, a run folder, or a hub id (org/name)"
)
MIXTURE_OF_EXPERTS = re.compile(
    r"mixtral|moe\b|-a\d+(\.\d+)?b\b|deepseek-(v[23]|r1$)|gpt-oss|llama-?4|scout|maverick|grok|dbrx"
)
"""Names of well-known mixtures of experts."""
SAME_SHAPE = {"llama-3.3-70b": "llama-3.1-70b", "mistral-7b-v0.1": "mistral-7b"}
"""Models with the parameters of one in CATALOGUE."""
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


def gpt2(num_layers: int, hidden: int, heads: int) -> ModelConfig:
    return ModelConfig(
        "gpt2",
        num_layers=num_layers,
        hidden_size=hidden,
        ffn_size=4 * hidden,
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=hidden // heads,
        vocab_size=50257,
        max_positions=1024,
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
        num_layers=num_layers,
        hidden_size=hidden,
        ffn_size=ffn,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=hidden // heads,
        vocab_size=vocab,
        max_positions=max_positions,
        tied=tied,
        rope_theta=rope_theta,
    )


def llama3(
    num_layers: int, hidden: int, ffn: int, heads: int, factor: float = 0, tied: bool = False
) -> ModelConfig:
    """Return a Llama 3 shape; with a RoPE `factor`, the context of 131,072 tokens of 3.1 and
    3.2."""
    shape = llama(num_layers, hidden, ffn, heads, 8, 128256, 8192, tied, 500000.0)
    if not factor:
        return shape
    return replace(shape, max_positions=131072, rope_scaling=RopeScaling("llama3", factor))


def qwen2(
    num_layers: int,
    hidden: int,
    ffn: int,
    heads: int,
    kv_heads: int,
    vocab: int,
    tied: bool = False,
) -> ModelConfig:
    """Return a Qwen2.5 shape with its context length before YaRN extends it."""
    shape = llama(num_layers, hidden, ffn, heads, kv_heads, vocab, 32768, tied, 1e6)
    return replace(shape, family="qwen2", norm_eps=1e-6, qkv_bias=True)


def qwen3(num_layers: int, hidden: int, ffn: int, heads: int, tied: bool = False) -> ModelConfig:
    shape = llama(num_layers, hidden, ffn, heads, 8, 151936, 40960, tied, 1e6)
    return replace(shape, family="qwen3", head_dim=128, norm_eps=1e-6, qk_norm=True)


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
    "mistral-7b": replace(
        llama(32, 4096, 14336, 32, 8, max_positions=32768),
        family="mistral",
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
    """The model that MODEL on the command line refers to.

    Attributes:
        name: what to call it.
        config: its shape.
        kind: which kind of word it was.
        path: the file or folder on this machine; None for a shape without weights.
        gguf: the open file, if it is a .gguf file: its header is read once.
    """

    name: str
    config: ModelConfig
    kind: ModelKind
    path: Path | None = None
    gguf: Gguf | None = None


def find_model(
    text: str, cache_dir: Path | None = None, local_files_only: bool = False
) -> FoundModel:
    """Resolve MODEL: an existing path first, then a count, a catalogue name, a hub id.

    Only the config.json of a hub model is downloaded, unless the local cache has it. `cache_dir`
    and `local_files_only` have the meaning of huggingface_hub. Raises ValueError, in one sentence,
    for what cannot be found or read.
    """
    path = Path(text).expanduser()
    if text and path.exists():
        return _find_on_disk(text, path)
    count = parse_count(text)
    if count is not None:
        return FoundModel(text.upper(), config_of_count(count), "count")
    if (name := catalogue_name(text)) in CATALOGUE:
        return FoundModel(name, CATALOGUE[name], "catalogue")
    if _looks_like_path(text):
        raise ValueError(f"{text} does not exist; a model is {EXPECTED_MODEL}")
    if HUB_ID.fullmatch(text):
        try:
            folder = fetch_config(text, cache_dir, local_files_only).parent
        except ValueError as error:
            if path.parent.is_dir():
                names = sorted(each.name for each in path.parent.iterdir())
                raise ValueError(
                    f"{text} does not exist; {path.parent} has {', '.join(names[:8]) or 'no files'}"
                ) from error
            raise
        return FoundModel(text, read_folder_config(folder), "hub", folder)
    if MIXTURE_OF_EXPERTS.search(text.lower()):
        raise ValueError(
            f"{text!r} is a mixture of experts, which is not supported yet; a folder or a .gguf "
            "file of it is planned by the size of its weights"
        )
    near = nearest(text.lower(), [each for each in CATALOGUE if each[0] == text.lower()[:1]])
    hint = f"the nearest names are {', '.join(near)}; a" if near else "a"
    raise ValueError(f"unknown model {text!r}; {hint} model is {EXPECTED_MODEL}")


def catalogue_name(text: str) -> str:
    """Return the name in CATALOGUE of a model with the same shape: variants that were trained
    further (`-instruct`), and later releases."""
    name = re.sub(r"-(instruct|chat|base|it|hf)$", "", text.lower().removeprefix("meta-"))
    return SAME_SHAPE.get(name, name)


def _looks_like_path(text: str) -> bool:
    """Return True for what cannot be a hub id, `org/name`."""
    has_path_prefix = text.startswith(("/", "./", "../", "~"))
    return has_path_prefix or text.endswith((".gguf", "/")) or text.count("/") > 1


def _find_on_disk(text: str, path: Path) -> FoundModel:
    if path.is_file():
        if path.suffix != ".gguf":
            raise ValueError(f"{text} is a file, but not a .gguf file; a model is {EXPECTED_MODEL}")
        file = read_gguf(path)
        return FoundModel(path.stem, config_from_gguf(file, text), "gguf", path, file)
    name = path.resolve().name
    if (path / "config.json").is_file():
        return FoundModel(name, read_folder_config(path), "folder", path)
    if (path / "model" / "config.json").is_file():
        return FoundModel(name, read_folder_config(path / "model"), "run", path)
    files = sorted(path.glob("*.gguf"))
    hint = f"name the file in it, {files[0]}" if files else f"a model is {EXPECTED_MODEL}"
    raise ValueError(
        f"{text} is not a model folder: it has neither config.json nor model/config.json; {hint}"
    )


def model_path(
    found: FoundModel, cache_dir: Path | None = None, local_files_only: bool = False
) -> Path:
    """Return the file or folder with the weights of a model; a hub model is downloaded.

    Raises ValueError for a shape without weights, and if the download fails.
    """
    if found.kind == "hub":
        return fetch_model(found.name, cache_dir, local_files_only)
    if found.path is None:
        raise ValueError(
            f"{found.name!r} is only a shape, without weights; name a folder, a .gguf file, a run "
            "or a hub id (org/name)"
        )
    return found.path


def model_source(found: FoundModel) -> Path | Gguf:
    """Return the weights of a model as `model_path` does, but a .gguf file open."""
    return found.gguf or model_path(found)
