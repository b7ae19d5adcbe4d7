"""Weights of GGUF files, with the names and row order of the `gguf` package and llama.cpp's
converter."""

from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter
from torch import Tensor

from shardwise.config import RopeScaling
from shardwise.formats.families import FAMILIES
from shardwise.formats.gguf import gguf_reader
from shardwise.formats.gguf.gguf_rope import llama3_divisors
from shardwise.formats.load import open_weights
from shardwise.formats.model_source import read_config
from shardwise.layout import Layout
from shardwise.params import ParamSpec, model_specs
from shardwise.quant.ggml_decode import decode_blocks
from shardwise.shards import boxes
from smollm2 import smollm2_gguf
from tiny_models import our_weights, tiny_model
from whole_weights import load_weights

ARCHITECTURES = {
    name: next(
        number for number, text in gguf.MODEL_ARCH_NAMES.items() if text == family.gguf_architecture
    )
    for name, family in FAMILIES.items()
}
NAMES = ["llama", "llama-tied", "llama-biases", "mistral", "qwen2", "qwen3", "gpt2"]
CONV1D = (
    ".c_attn.weight",
    ".c_proj.weight",
    ".c_fc.weight",
)  # GPT-2 stores these [in, out], GGUF [out, in]
Edit = Callable[[dict[str, np.ndarray]], object]


def sides_together(rows: np.ndarray, num_heads: int) -> np.ndarray:
    """The order in which llama.cpp wants rows of q and k: the two halves of each head dealt out
    alternately."""
    head_dim = len(rows) // num_heads
    order = [
        head * head_dim + half + i
        for head in range(num_heads)
        for i in range(head_dim // 2)
        for half in (0, head_dim // 2)
    ]
    return rows[order]


def gguf_tensors(name: str) -> dict[str, np.ndarray]:
    """The tensors of a tiny model as convert_hf_to_gguf.py names and orders them."""
    model = tiny_model(name)
    config = model.config
    kind = model.config.model_type
    translate = gguf.get_tensor_name_map(ARCHITECTURES[kind], config.num_hidden_layers)
    tensors = {}
    for key, weight in model.state_dict().items():
        if key == "lm_head.weight" and config.tie_word_embeddings:
            continue
        rows = weight.T.numpy() if kind == "gpt2" and key.endswith(CONV1D) else weight.numpy()
        if ARCHITECTURES[kind] is gguf.MODEL_ARCH.LLAMA and "self_attn.q_proj" in key:
            rows = sides_together(rows, config.num_attention_heads)
        if ARCHITECTURES[kind] is gguf.MODEL_ARCH.LLAMA and "self_attn.k_proj" in key:
            rows = sides_together(rows, config.num_key_value_heads)
        stored_name = translate.get_name(key, try_suffixes=(".weight", ".bias"))
        assert stored_name, key
        tensors[stored_name] = np.ascontiguousarray(rows)
    return tensors


def write_gguf(path: Path, name: str, kind: str = "F32", edit: Edit | None = None) -> Path:
    """A GGUF file of a tiny model with matrices of a kind; `edit` may damage its tensors first."""
    config = tiny_model(name).config
    tensors = gguf_tensors(name)
    if edit:
        edit(tensors)
    writer = GGUFWriter(path, gguf.MODEL_ARCH_NAMES[ARCHITECTURES[config.model_type]])
    writer.add_block_count(2)
    writer.add_context_length(64)
    writer.add_embedding_length(64)
    writer.add_head_count(4)
    writer.add_vocab_size(config.vocab_size)
    if config.model_type == "gpt2":
        writer.add_feed_forward_length(256)
        writer.add_layer_norm_eps(1e-5)
    else:
        writer.add_feed_forward_length(96)
        writer.add_head_count_kv(2)
        writer.add_layer_norm_rms_eps(1e-6)
    for key, rows in tensors.items():
        stored_kind = GGMLQuantizationType[kind if rows.ndim == 2 else "F32"]
        writer.add_tensor(key, gguf.quants.quantize(rows, stored_kind), raw_dtype=stored_kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def as_stored(weights: dict[str, Tensor], kind: str) -> dict[str, Tensor]:
    """What is left of weights after a kind has rounded them. Its blocks lie along rows, whose order
    does not matter."""
    stored = GGMLQuantizationType[kind]
    return {
        name: torch.from_numpy(
            gguf.quants.dequantize(gguf.quants.quantize(weight.numpy(), stored), stored).copy()
        )
        if weight.dim() == 2
        else weight
        for name, weight in ((name, weight.contiguous()) for name, weight in weights.items())
    }


def stored_specs(path: Path) -> list[ParamSpec]:
    return [spec for spec in model_specs(read_config(path)) if spec.tied_to is None]


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("kind", ["F32", "F16", "Q8_0", "Q4_1"])
@pytest.mark.parametrize("name", NAMES)
def test_every_cut_of_every_family_is_the_original(
    tmp_path: Path, name: str, kind: str, tp: int
) -> None:
    path = write_gguf(tmp_path / "model.gguf", name, kind)
    layout = Layout(tp=tp)
    config = read_config(path)
    specs = stored_specs(path)
    wanted = as_stored(our_weights(tiny_model(name)), kind)
    assert {spec.name for spec in specs} == wanted.keys() and not layout.problems(config)
    for rank in range(tp):
        coord = layout.coord(rank)
        local = load_weights(path, config, specs, layout, coord, torch.float32)
        for spec in specs:
            for box in boxes(spec, layout, coord):
                assert torch.equal(
                    local[spec.name][box.local_slices], wanted[spec.name][box.slices]
                ), spec.name


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0"])
def test_dtype_is_what_most_is_stored_in(tmp_path: Path, kind: str) -> None:
    path = write_gguf(tmp_path / "model.gguf", "llama", kind)
    reader = open_weights(path, read_config(path))
    assert reader.dtype == {"F32": torch.float32, "F16": torch.float16}.get(kind, torch.bfloat16)
    reader.close()


def test_real_model_equals_the_gguf_package() -> None:
    path = smollm2_gguf()
    some_rows = 2000  # of the embedding; the package needs seconds for all 49152
    stored = {tensor.name: tensor for tensor in GGUFReader(path).tensors}

    def read(name: str) -> Tensor:
        rows = gguf.quants.dequantize(stored[name].data[:some_rows], stored[name].tensor_type)
        if "attn_q." in name or "attn_k." in name:
            rows = rows[np.argsort(sides_together(np.arange(len(rows)), num_heads=len(rows) // 64))]
        return torch.from_numpy(rows.copy())

    weights = load_weights(
        path, read_config(path), stored_specs(path), Layout(), Layout().coord(0), torch.float32
    )
    assert sum(weight.numel() for weight in weights.values()) == 134_515_008
    for layer in (0, 17, 29):
        for name, joined in (
            ("norm1", ["attn_norm"]),
            ("qkv", ["attn_q", "attn_k", "attn_v"]),
            ("out", ["attn_output"]),
            ("norm2", ["ffn_norm"]),
            ("gate_up", ["ffn_gate", "ffn_up"]),
            ("down", ["ffn_down"]),
        ):
            wanted = torch.cat([read(f"blk.{layer}.{stem}.weight") for stem in joined])
            assert torch.equal(weights[f"blocks.{layer}.{name}"], wanted), name
    assert torch.equal(weights["embed"][:some_rows], read("token_embd.weight"))
    assert torch.equal(weights["norm"], read("output_norm.weight"))


def test_real_model_in_bf16_is_the_rounded_fp32() -> None:
    path = smollm2_gguf()
    one = (Layout(), Layout().coord(0))
    config = read_config(path)
    specs = stored_specs(path)
    wide = load_weights(path, config, specs, *one, torch.float32)
    narrow = load_weights(path, config, specs, *one, torch.bfloat16)
    assert all(torch.equal(narrow[name], weight.bfloat16()) for name, weight in wide.items())


def test_real_model_is_cut_over_three_ranks() -> None:
    path = smollm2_gguf()
    layout = Layout(tp=3)
    config = read_config(path)
    specs = stored_specs(path)
    whole = load_weights(path, config, specs, Layout(), Layout().coord(0), torch.bfloat16)
    local = load_weights(path, config, specs, layout, layout.coord(1), torch.bfloat16)
    for spec in specs:
        for box in boxes(spec, layout, layout.coord(1)):
            assert torch.equal(local[spec.name][box.local_slices], whole[spec.name][box.slices]), (
                spec.name
            )


def test_a_rank_decodes_only_the_blocks_of_its_columns(tmp_path: Path, monkeypatch) -> None:
    path = write_gguf(tmp_path / "model.gguf", "llama", "Q8_0")
    layout = Layout(tp=2)
    decoded: list[int] = []

    def counted(raw: Tensor, kind: str, shape: tuple[int, ...]) -> Tensor:
        decoded.append(raw.numel())
        return decode_blocks(raw, kind, shape)

    monkeypatch.setattr(gguf_reader, "decode_blocks", counted)
    out = [spec for spec in stored_specs(path) if spec.name.endswith("out")]
    load_weights(path, read_config(path), out, layout, layout.coord(1), torch.float32)
    assert (
        decoded == [64 * 34] * 2
    )  # of 64 rows of 64 columns, two blocks of 34 bytes each, one of the two blocks


# Bad input


def refusal(path: Path, name: str = "llama") -> str:
    config = read_config(path)
    with pytest.raises(ValueError) as caught:
        load_weights(path, config, model_specs(config), Layout(), Layout().coord(0), torch.float32)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_missing_extra_and_misshapen_tensors_are_named(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    edits: list[tuple[Edit, str]] = [
        (lambda tensors: tensors.pop("blk.1.attn_v.weight"), "it lacks blk.1.attn_v.weight"),
        (
            lambda tensors: tensors.update(strange=np.ones(3, np.float32)),
            "it has no parameter for strange",
        ),
        (
            lambda tensors: tensors.update({"rope_factors_long.weight": np.ones(8, np.float32)}),
            "it has no parameter for rope_factors_long.weight",
        ),
        (
            lambda tensors: tensors.update({"blk.2.attn_norm.weight": np.ones(64, np.float32)}),
            "it has no parameter for blk.2.attn_norm.weight",
        ),
        (
            lambda tensors: tensors.update({"output_norm.weight": np.ones(63, np.float32)}),
            "its tensor output_norm.weight is 63 and should be 64",
        ),
    ]
    for edit, message in edits:
        path.unlink(missing_ok=True)
        assert message in refusal(write_gguf(path, "llama", edit=edit))


def test_stretched_frequencies_are_no_weight(tmp_path: Path) -> None:
    divisors = llama3_divisors(RopeScaling("llama3", 8.0), 16, 10000.0).astype(np.float32)
    stretch = {"rope_freqs.weight": divisors}
    path = write_gguf(
        tmp_path / "model.gguf", "llama", edit=lambda tensors: tensors.update(stretch)
    )
    config = read_config(path)
    specs = stored_specs(path)
    assert config.rope_scaling and config.rope_scaling.factor == 8
    weights = load_weights(path, config, specs, Layout(), Layout().coord(0), torch.float32)
    wanted = our_weights(tiny_model("llama"))
    assert weights.keys() == wanted.keys() and all(
        torch.equal(weights[name], wanted[name]) for name in wanted
    )


def test_a_file_cut_short_is_refused(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf", "llama")
    content = path.read_bytes()
    for keep in (0, 10, 200, len(content) - 1000):
        path.write_bytes(content[:keep])
        with pytest.raises(ValueError, match="cannot be used as a GGUF file"):
            read_config(path)
