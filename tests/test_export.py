"""`shardwise convert --quant`: transformers, compressed-tensors and the gguf package read what it
writes as the same model, and other requests are refused. `bench/check_gguf.py` checks llama.cpp."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from compressed_tensors.compressors.pack_quantized.base import PackedQuantizationCompressor
from compressed_tensors.quantization import QuantizationConfig
from safetensors.torch import load_file
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers
from torch import Tensor
from transformers import AutoModelForCausalLM

from shardwise.cli import main
from shardwise.config import RopeScaling, yarn_attention_factor
from shardwise.formats.catalogue import CATALOGUE
from shardwise.formats.convert import prompt_logits, random_prompt
from shardwise.formats.families import FAMILIES, find_gguf_family
from shardwise.formats.gguf.gguf_blocks import choose_block_scales, to_blocks
from shardwise.formats.gguf.gguf_config import config_metadata
from shardwise.formats.gguf.gguf_file import read_gguf
from shardwise.formats.gguf.gguf_tokenizer import tokenizer_from_gguf
from shardwise.formats.gguf.write_gguf_tokenizer import tokenizer_metadata
from shardwise.formats.huggingface import compressed_tensors as compressed
from shardwise.formats.huggingface.hf_config import (
    check_expressible,
    from_hugging_face,
    read_folder_config,
)
from shardwise.formats.huggingface.write_folder import write_folder
from shardwise.formats.model_source import read_config
from shardwise.formats.tokenizers.bpe import byte_level_bpe
from shardwise.formats.tokenizers.load_tokenizer import load_tokenizer
from shardwise.formats.tokenizers.pre_tokenizers import PRE_TOKENIZERS
from shardwise.formats.tokenizers.tokenizer import Tokenizer
from shardwise.formats.tokenizers.train_bpe import byte_tokenizer, train_bpe
from shardwise.measure.reference_model import load_reference_model
from shardwise.params import model_specs
from shardwise.quant.format import dequantize, quantize, round_to_nearest
from shardwise.quant.scheme import GGUF_SCHEMES, Scheme, quantizable
from shardwise.quantize.export import export
from shardwise.quantize.quant_config import METHODS, QuantConfig
from shardwise.quantize.quantizer import Quantizer
from smollm2 import smollm2_gguf
from tiny_models import MODELS, tiny_model

TOLERANCE = 1e-5  # of the largest logit, in fp32
FOLDERS = ("int8", "int8-g32", "int4-g32", "int4", "int3-g32", "fp8")
WITH_ZEROS = ("int4z-g32", "int8z", "int3z-g16")
LLAMAS = tuple(name for name in MODELS if name != "gpt2")
TEXT = (
    "The quick brown fox jumps over the lazy dog; pack my box with five dozen liquor jugs. Größe: "
    "5 µm.\n" * 40
)


def saved(path: Path, name: str, dtype: torch.dtype = torch.float32, **changes: Any) -> Path:
    tiny_model(name, dtype, **changes).save_pretrained(path)
    return path


def drawn_text() -> Tensor:
    return torch.randint(101, (8, 64), generator=torch.Generator().manual_seed(0))


def exported(tmp_path: Path, source: Path, quant: str, method: str = "rtn") -> Path:
    quant_config = QuantConfig.parse(quant, method)
    new = tmp_path / f"new{'.gguf' if quant_config.gguf else ''}"
    done = export(source, new, quant_config, drawn_text() if quant_config.calibrated else None)
    assert done.checked_logits == 0.0
    assert done.params == sum(
        each.numel for each in model_specs(read_config(source)) if each.tied_to is None
    )
    return new


@torch.no_grad()
def assert_agrees(path: Path) -> None:
    """Assert that transformers computes the same logits in fp32."""
    theirs = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    config = read_config(path)
    ours = prompt_logits(path, config, torch.float32)
    assert (ours - theirs(random_prompt(config)).logits).abs().max() <= TOLERANCE * ours.abs().max()


# -- folders


@pytest.mark.parametrize("quant", FOLDERS)
def test_transformers_loads_every_scheme(tmp_path: Path, quant: str) -> None:
    assert_agrees(exported(tmp_path, saved(tmp_path / "old", "llama", torch.bfloat16), quant))


@pytest.mark.parametrize("name", LLAMAS)
@pytest.mark.parametrize("method", METHODS)
def test_transformers_loads_every_family_by_every_method(
    tmp_path: Path, name: str, method: str
) -> None:
    assert_agrees(exported(tmp_path, saved(tmp_path / "old", name), "int4-g32", method))


@pytest.mark.parametrize("quant", WITH_ZEROS)
def test_zero_points_equal_those_of_compressed_tensors(tmp_path: Path, quant: str) -> None:
    """transformers cannot load them in this version (llm-compressor 1618); compressed-tensors
    can."""
    new = exported(tmp_path, saved(tmp_path / "old", "qwen2"), quant)
    scheme = QuantizationConfig(
        **json.loads((new / "config.json").read_text())["quantization_config"]
    )
    (group,) = scheme.config_groups.values()
    stored = load_file(new / "model.safetensors")
    stem = "model.layers.1.mlp.down_proj"
    state = {
        name.removeprefix(f"{stem}."): each
        for name, each in stored.items()
        if name.startswith(f"{stem}.")
    }
    theirs = PackedQuantizationCompressor.decompress(state, group)["weight"]
    weight = load_file(tmp_path / "old" / "model.safetensors")[f"{stem}.weight"]
    ours = dequantize(quantize(weight, Scheme.parse(quant)), torch.float32)
    assert (
        theirs.float() - ours
    ).abs().max() <= 2**-7 * ours.abs().max()  # theirs is rounded to the scales' bf16
    assert torch.equal(theirs.float(), ours.to(theirs.dtype).float())


@pytest.mark.parametrize("quant", [*FOLDERS, *WITH_ZEROS])
@pytest.mark.parametrize("shape", [(5, 96), (64, 32), (1, 160), (33, 512)])
def test_bytes_are_known_before_they_are_written(quant: str, shape: tuple[int, int]) -> None:
    scheme = Scheme.parse(quant)
    stored = compressed.compress(quantize(torch.randn(shape), scheme))
    assert {name: each.nbytes for name, each in stored.items()} == compressed.compressed_bytes(
        scheme, shape
    )
    assert all(each.is_contiguous() for each in stored.values())


def test_shards_stay_below_the_size_limit(tmp_path: Path) -> None:
    source = saved(tmp_path / "old", "llama")
    config = read_config(source)
    weights = load_file(source / "model.safetensors")
    specs = model_specs(config)
    quantizer = Quantizer(read_config(source), QuantConfig.parse("int4-g32"), torch.bfloat16)
    ours = {spec.name: torch.zeros(spec.shape) for spec in specs} | {
        "embed": weights["model.embed_tokens.weight"]
    }
    tensors = quantizer.parameters(ours, None, lambda *_: None)
    scheme = Scheme.parse("int4-g32")
    files = write_folder(
        tmp_path / "new",
        config,
        specs,
        tensors,
        torch.bfloat16,
        max_shard_bytes=20_000,
        scheme=scheme,
    )
    shards = [name for name in files if name.endswith(".safetensors")]
    assert len(shards) > 2
    for name in shards:
        held = load_file(tmp_path / "new" / name)
        assert sum(each.nbytes for each in held.values()) <= 20_000
    index = json.loads((tmp_path / "new" / "model.safetensors.index.json").read_text())
    assert (
        index["metadata"]["total_size"]
        == sum(
            compressed_bytes(scheme, spec.shape) if quantizable(spec) else 2 * spec.numel
            for spec in specs
        )
        + 16 * 3 * config.num_layers
    )  # each of q, k, v, gate and up has a weight_shape


def compressed_bytes(scheme: Scheme, shape: tuple[int, ...]) -> int:
    num_rows, num_columns = shape
    return sum(compressed.compressed_bytes(scheme, (num_rows, num_columns)).values())


# -- GGUF files


@pytest.mark.parametrize("kind", GGUF_SCHEMES)
def test_blocks_equal_those_of_the_gguf_package(kind: str) -> None:
    scheme = Scheme.parse(GGUF_SCHEMES[kind])
    weight = torch.randn(9, 160, generator=torch.Generator().manual_seed(0)) * 0.1 + 0.02
    weight[0, :64] = 0
    quantized = round_to_nearest(weight, scheme, choose_block_scales)
    theirs = gguf.quants.dequantize(to_blocks(quantized).numpy(), gguf.GGMLQuantizationType[kind])
    assert torch.equal(torch.from_numpy(np.array(theirs)), dequantize(quantized, torch.float32))
    steps = quantized.scales.float().repeat_interleave(32, 1)
    assert ((dequantize(quantized, torch.float32) - weight).abs() <= steps * 0.52 + 1e-4).all()


@pytest.mark.parametrize("kind", GGUF_SCHEMES)
@pytest.mark.parametrize("name", [name for name in MODELS if name != "llama"])
def test_a_gguf_file_is_the_same_model(tmp_path: Path, name: str, kind: str) -> None:
    """The config is read from it. A Mistral model, a llama in GGUF, is known by its window."""
    source = saved(tmp_path / "old", name, torch.bfloat16)
    config = read_config(source)
    again = read_config(exported(tmp_path, source, f"gguf:{kind}"))
    reader = find_gguf_family(FAMILIES[config.family].gguf_architecture, "a file")
    family = config.family if config.sliding_window else reader.model_type
    assert replace(config, family=family) == replace(again, norm_eps=config.norm_eps)
    assert again.norm_eps == pytest.approx(config.norm_eps, rel=1e-6)  # an f32 there
    kinds = {each.name: each.kind for each in read_gguf(tmp_path / "new.gguf").tensors.values()}
    assert kinds["blk.0.ffn_down.weight"] == kind.upper() and kinds["token_embd.weight"] == "BF16"
    assert kinds["blk.1.attn_norm.weight"] == "F32"


@pytest.mark.parametrize(
    "name", ["llama-tied", "llama-biases", "qwen2", "qwen3", "mistral", "gpt2"]
)
def test_tensors_have_the_names_and_order_of_llama_cpp(tmp_path: Path, name: str) -> None:
    """Names follow the table of the gguf package, and rows of llama's heads the order of its
    converter."""
    new = exported(tmp_path, saved(tmp_path / "old", name), "gguf:q8_0")
    theirs = tiny_model(name).state_dict()
    config = read_config(new)
    arch = next(
        number
        for number, text in gguf.MODEL_ARCH_NAMES.items()
        if text == FAMILIES[config.family].gguf_architecture
    )
    names = gguf.get_tensor_name_map(arch, config.num_layers)
    stored = {each.name: each for each in gguf.GGUFReader(new).tensors}
    tied = "lm_head.weight" if config.tied else ""
    for key, weight in theirs.items():
        if key == tied:
            continue
        base, ending = key.rsplit(".", 1)
        found = stored.pop(f"{names.get_name(base)}.{ending}")
        if config.family == "gpt2" and weight.dim() == 2 and ".c_" in key:
            weight = weight.t()
        if config.family in ("llama", "mistral") and ("q_proj" in key or "k_proj" in key):
            weight = permuted(weight, config.num_heads if "q_proj" in key else config.num_kv_heads)
        plain = torch.from_numpy(np.array(gguf.quants.dequantize(found.data, found.tensor_type)))
        assert tuple(int(size) for size in found.shape) == tuple(reversed(weight.shape))
        assert (plain - weight).abs().max() <= 0.01 * weight.abs().max()
    assert not stored


def permuted(weight: Tensor, num_heads: int) -> Tensor:
    """LlamaModel.permute of llama.cpp's convert_hf_to_gguf.py: [heads, 2, C / 2] -> [heads, C / 2,
    2]."""
    num_rows = weight.shape[0]
    rest = weight.shape[1:]
    return (
        weight.reshape(num_heads, 2, num_rows // num_heads // 2, *rest)
        .swapaxes(1, 2)
        .reshape(weight.shape)
    )


YARN = RopeScaling("yarn", 4.0, original_max_positions=16384, beta_fast=16.0)


@pytest.mark.parametrize(
    "scaling",
    [
        RopeScaling("linear", 4.0),
        RopeScaling("llama3", 8.0),
        replace(YARN, attention_factor=yarn_attention_factor(4.0)),
        replace(YARN, attention_factor=yarn_attention_factor(4.0) / 2),
    ],
)
def test_rope_scaling_is_written(tmp_path: Path, scaling: RopeScaling) -> None:
    rope = {"rope_type": scaling.kind, "rope_theta": 10000.0, "factor": scaling.factor}
    if scaling.kind == "yarn":
        rope |= {
            "beta_fast": 16.0,
            "original_max_position_embeddings": 16384,
            "attention_factor": scaling.attention_factor,
        }
    if scaling.kind == "llama3":
        rope |= {
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        }
    source = saved(
        tmp_path / "old", "llama", rope_parameters=rope, max_position_embeddings=65536, head_dim=64
    )
    assert read_config(source).rope_scaling == scaling
    assert read_config(exported(tmp_path, source, "gguf:q8_0")).rope_scaling == scaling


def test_rope_scaling_that_gguf_cannot_store_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A GGUF file stores the factor of Llama 3's scaling, but not the original context length."""
    source = saved(tmp_path / "old", "llama")
    capsys.readouterr()  # what making the model printed
    assert main(["convert", str(source), str(tmp_path / "new.gguf"), "--quant", "gguf:q8_0"]) == 2
    said = capsys.readouterr().err
    assert "GGUF cannot store llama3 RoPE scaling with constants other than Llama 3.1's" in said
    assert said.count("\n") == 1 and not (tmp_path / "new.gguf").exists()
    assert main(["convert", str(source), str(tmp_path / "new"), "--quant", "int4-g32"]) == 0
    assert read_config(tmp_path / "new").rope_scaling == read_config(source).rope_scaling


def test_configs_that_gguf_cannot_store() -> None:
    config = from_hugging_face(tiny_model("qwen2").config.to_dict())
    with pytest.raises(ValueError, match="no key for the activation gelu"):
        config_metadata(replace(config, activation="gelu"))
    for scaling, what in (
        (replace(YARN, truncate=False), "YaRN without truncate"),
        (RopeScaling("dynamic", 2.0), "dynamic RoPE scaling"),
    ):
        with pytest.raises(ValueError, match=f"GGUF cannot store {what}; a folder can"):
            config_metadata(replace(config, rope_scaling=scaling))
    with pytest.raises(ValueError, match="no key for a sliding window in only some layers"):
        config_metadata(replace(config, sliding_window=8, windowed_layers=frozenset({1})))


@pytest.mark.parametrize("pre", PRE_TOKENIZERS)
def test_tokenizers_are_written(pre: str) -> None:
    trained = train_bpe([TEXT], 400)
    content = json.loads(trained.backend.to_str())["model"]
    backend = byte_level_bpe(content["vocab"], [tuple(merge) for merge in content["merges"]], pre)
    backend.add_special_tokens(["<|endoftext|>", "<s>"])
    backend.add_tokens(["<tool>"])
    end = backend.token_to_id("<|endoftext|>")
    tokenizer = Tokenizer(
        backend, {"eos_token": "<|endoftext|>"}, frozenset((end,)), "{{ messages }}"
    )
    written = tokenizer_metadata(tokenizer, 500)
    assert len(written["tokenizer.ggml.tokens"]) == 500 and written["tokenizer.ggml.pre"] == pre

    again = tokenizer_from_gguf(written)
    for text in (TEXT, "<s>a<tool> 12345 b<|endoftext|>", "\n\n  \tÀ 日本語"):
        assert again.encode(text) == tokenizer.encode(text)
    assert again.eos_ids == tokenizer.eos_ids and again.chat_template == tokenizer.chat_template


def test_the_tokenizer_of_the_real_model_is_written() -> None:
    tokenizer = load_tokenizer(smollm2_gguf())
    original = read_gguf(smollm2_gguf()).metadata
    written = tokenizer_metadata(tokenizer, 49152)
    for key in (
        "model",
        "tokens",
        "merges",
        "pre",
        "bos_token_id",
        "eos_token_id",
        "add_bos_token",
    ):
        assert written[f"tokenizer.ggml.{key}"] == original[f"tokenizer.ggml.{key}"]
    assert written["tokenizer.chat_template"] == original["tokenizer.chat_template"]


def test_a_tokenizer_that_gguf_cannot_store_is_an_error() -> None:
    backend = Backend(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    with pytest.raises(ValueError, match="GGUF has no name for this model's kind of tokenizer"):
        tokenizer_metadata(Tokenizer(backend, {}, frozenset()), 2)
    backend = Backend(models.BPE({"a": 0, "b": 1, "ab": 2}, [("a", "b")]))
    backend.pre_tokenizer = pre_tokenizers.Split("a", "isolated")
    backend.decoder = decoders.ByteLevel()
    with pytest.raises(ValueError, match="GGUF has no name"):
        tokenizer_metadata(Tokenizer(backend, {}, frozenset()), 3)
    with pytest.raises(ValueError, match="GGUF cannot store a tokenizer without merges"):
        tokenizer_metadata(byte_tokenizer(), 257)


# -- the command


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A random model with a vocabulary of 290 tokens and a context length of 64."""
    folder = saved(tmp_path / "old", "llama-tied", vocab_size=304)
    train_bpe([TEXT], 290).save(folder)
    return folder


@pytest.fixture
def text(tmp_path: Path) -> Path:
    file = tmp_path / "text.txt"
    file.write_text(TEXT, encoding="utf-8")
    return file


@pytest.mark.parametrize("method", ["gptq", "awq"])
def test_the_command_calibrates_on_a_text(
    method: str, source: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    new = tmp_path / "new"
    flags = ("--quant", "int4-g32", "--method", method, "--calibration", str(text), "--json")
    assert main(["convert", str(source), str(new), *flags]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["checked_logits"] == 0.0 and str(new / "model.safetensors") in answer["files"]
    assert (
        json.loads((new / "config.json").read_text())["quantization_config"]["format"]
        == "pack-quantized"
    )
    assert load_tokenizer(new).encode(TEXT) == train_bpe([TEXT], 290).encode(TEXT)


def test_the_command_writes_gguf_files(
    source: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    new = tmp_path / "made" / "new.gguf"
    assert (
        main(
            ["convert", str(source), str(new), "--quant", "gguf:q4_1", "--dtype", "fp16", "--json"]
        )
        == 0
    )
    assert json.loads(capsys.readouterr().out)["files"] == [str(new)]
    assert [file.name for file in new.parent.iterdir()] == ["new.gguf"]
    assert load_tokenizer(new).encode(TEXT) == train_bpe([TEXT], 290).encode(TEXT)
    assert main(["eval", "perplexity", str(new), "--data", str(text), "--dtype", "fp32"]) == 0


def test_a_data_set_calibrates_too(source: Path, text: Path, tmp_path: Path) -> None:
    assert (
        main(["data", "build", str(text), str(tmp_path / "data"), "--tokenizer", str(source)]) == 0
    )
    flags = ("--quant", "gguf:q4_0", "--method", "gptq", "--calibration")
    for number, given in enumerate((text, tmp_path / "data")):
        assert (
            main(["convert", str(source), str(tmp_path / f"{number}.gguf"), *flags, str(given)])
            == 0
        )
    files = [read_gguf(tmp_path / f"{number}.gguf") for number in range(2)]
    raw = [file.raw_rows("blk.1.ffn_down.weight", 0, 64) for file in files]
    assert (raw[0] == raw[1]).all()  # one document is the same text


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (
            ["--quant", "int4-g128"],
            "groups of 128 columns do not divide the 64 columns of blocks.0.qkv; groups of 32 do",
        ),
        (["--quant", "int4-g20"], "the group size must be a multiple of 8, not 20"),
        (["--quant", "int5"], "unknown quantization scheme 'int5'"),
        (["--quant", "gguf:q2_k"], "known are gguf:q8_0, gguf:q4_0, gguf:q4_1 for GGUF files"),
        (["--quant", "gguf:q4_0"], "must end in .gguf, since --quant gguf writes one file"),
        (
            ["--quant", "int8", "--method", "best"],
            "unknown method 'best'; known are rtn, gptq, awq",
        ),
        (
            ["--quant", "int8", "--method", "gtpq", "--calibration", "text.txt"],
            "unknown method 'gtpq'",
        ),
        (["--quant", "int8", "--method", "gptq"], "--method gptq needs --calibration FILE"),
        (
            ["--quant", "int8", "--calibration", "text.txt"],
            "round-to-nearest uses no calibration text",
        ),
        (["--method", "gptq"], "--method and --calibration need a quantization"),
        (
            ["--quant", "fp8", "--method", "awq", "--calibration", "text.txt"],
            "awq supports integers only; fp8 needs --method rtn",
        ),
        (
            ["--quant", "int8", "--method", "awq", "--calibration", "none.txt"],
            "none.txt does not exist",
        ),
        (
            ["--quant", "int8", "--method", "awq", "--calibration", "empty.txt"],
            "empty.txt has 0 tokens, too few",
        ),
        (
            ["--quant", "int8", "--method", "awq", "--calibration", "short.txt"],
            "short.txt has 8 tokens, too few",
        ),
        (
            [
                "--quant",
                "int8",
                "--method",
                "awq",
                "--calibration",
                "text.txt",
                "--calibration-tokens",
                "7",
            ],
            "7 tokens are too few to calibrate with; at least 1,024 work",
        ),
    ],
)
def test_invalid_requests(
    flags: list[str],
    sentence: str,
    source: Path,
    text: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "empty.txt").touch()
    (tmp_path / "short.txt").write_text("too short")
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.iterdir())
    assert main(["convert", str(source), "new", *flags]) == 2
    error = capsys.readouterr().err
    assert sentence in error and error.count("\n") == 1
    assert sorted(tmp_path.iterdir()) == before


def test_nothing_is_quantized_twice(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Neither a folder nor a GGUF file, unless it was dequantized first."""
    folder = tmp_path / "once"
    file = tmp_path / "once.gguf"
    assert main(["convert", str(source), str(folder), "--quant", "int8"]) == 0
    assert main(["convert", str(source), str(file), "--quant", "gguf:q8_0"]) == 0
    capsys.readouterr()
    for once, kinds in ((folder, "compressed-tensors"), (file, "Q8_0")):
        assert main(["convert", str(once), str(tmp_path / "twice"), "--quant", "int4-g32"]) == 2
        assert f"{once} is already quantized ({kinds})" in capsys.readouterr().err
    config = (
        (folder / "config.json")
        .read_text()
        .replace('"quantization_config"', '"compression_config"')
    )  # of old files
    (folder / "config.json").write_text(config)
    assert main(["convert", str(folder), str(tmp_path / "twice"), "--quant", "int4-g32"]) == 2
    assert main(["convert", str(file), str(tmp_path / "plain")]) == 0
    assert (
        main(["convert", str(tmp_path / "plain"), str(tmp_path / "twice"), "--quant", "int4-g32"])
        == 0
    )


def test_existing_destinations_are_not_overwritten(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "there.gguf").touch()
    gpt2 = saved(tmp_path / "gpt2", "gpt2")
    for origin, target, quant, sentence in (
        (
            source,
            tmp_path / "there.gguf",
            "gguf:q4_0",
            "there.gguf already exists; choose another file",
        ),
        (source, source, "int8", "already exists and is not empty"),
        (source, tmp_path / "new.gguf", "int8", "would become a folder; --quant gguf:q4_0"),
        (
            gpt2,
            tmp_path / "new",
            "int8",
            "folders of gpt2 cannot be quantized, since they store matrices as [in, out]",
        ),
    ):
        assert main(["convert", str(origin), str(target), "--quant", quant]) == 2
        assert sentence in capsys.readouterr().err


def test_a_data_set_of_another_tokenizer_is_an_error(
    source: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["data", "build", str(text), str(tmp_path / "data"), "--tokenizer", "bpe:280"]) == 0
    flags = ("--quant", "int4-g32", "--method", "gptq", "--calibration", str(tmp_path / "data"))
    assert main(["convert", str(source), str(tmp_path / "new"), *flags]) == 2
    assert (
        "was built with a tokenizer of 280 tokens, but that of the model has 290"
        in capsys.readouterr().err
    )


def test_a_file_with_wrong_logits_is_removed(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "shardwise.formats.gguf.write_gguf.to_blocks", lambda q: to_blocks(q).flip(0)
    )
    with pytest.raises(ValueError, match="does not compute the same"):
        export(source, tmp_path / "new.gguf", QuantConfig.parse("gguf:q8_0"))
    assert not (tmp_path / "new.gguf").exists()


def test_a_sliding_window_survives_gguf(tmp_path: Path) -> None:
    """A folder of Mistral as GGUF and back computes the same far beyond its window; transformers
    reads the window too."""
    source = tmp_path / "old"
    tiny_model("mistral", vocab_size=290).save_pretrained(source)
    train_bpe([TEXT], 290).save(source)
    file = exported(tmp_path, source, "gguf:q8_0")
    assert main(["convert", str(file), str(tmp_path / "back"), "--dtype", "fp32"]) == 0
    config = read_folder_config(tmp_path / "back")
    window = read_folder_config(source).sliding_window
    assert window is not None and window < 30
    assert (config.family, config.sliding_window) == ("mistral", window)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "back")
    assert theirs.config.sliding_window == window
    ids = torch.arange(60) % config.vocab_size
    ours = load_reference_model(file, torch.float32, torch.device("cpu"))
    logits = torch.cat(list(ours.logits(ids, 60)))
    with torch.no_grad():
        torch.testing.assert_close(logits, theirs(ids[None]).logits[0], rtol=0, atol=1e-4)


def test_a_window_that_no_folder_describes_is_refused(tmp_path: Path) -> None:
    config = CATALOGUE["llama-2-7b"]
    windowed = replace(
        config, sliding_window=8, windowed_layers=frozenset(range(config.num_layers))
    )
    with pytest.raises(ValueError, match="sliding_window of a llama model cannot be 8; None works"):
        check_expressible(windowed)
    check_expressible(config)


def test_a_folder_is_not_named_like_a_gguf_file(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["convert", str(source), str(tmp_path / "x.gguf")]) == 2
    assert "x.gguf would become a folder; a GGUF file needs --quant gguf" in capsys.readouterr().err
    assert not (tmp_path / "x.gguf").exists()
