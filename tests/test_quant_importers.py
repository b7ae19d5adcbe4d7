"""Folders of GPTQ, AWQ, compressed-tensors and fp8: every weight exactly as the format defines it,
with stored codes or dequantized."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LlamaForCausalLM

from quantized_files import WRITERS, Tensors, awq, edit_tensors, gptq, quantize_folder, set_config
from shardwise.cli import main
from shardwise.formats.convert import convert
from shardwise.formats.huggingface.hf_config import from_hugging_face
from shardwise.formats.model_source import read_config
from shardwise.formats.storage_formats import quantized_formats
from shardwise.formats.tokenizers.train_bpe import byte_tokenizer
from shardwise.kernels.reference.attention import causal_attention
from shardwise.kernels.reference.serving import REFERENCE
from shardwise.layout import Layout
from shardwise.model.layers import Causal
from shardwise.model.transformer import Transformer
from shardwise.params import model_specs
from shardwise.plan import plan
from shardwise.quant.weight import QuantizedWeight
from shardwise.quantize.load_quantized import load_quantized
from shardwise.shards import boxes
from tiny_models import our_weights, tiny_model
from whole_weights import load_weights

STEM = "model.layers.1.mlp.down_proj"


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plain")
    tiny_model("llama", vocab_size=264).save_pretrained(folder)
    byte_tokenizer().save(folder)
    return folder


@pytest.fixture
def folder(plain: Path, tmp_path: Path) -> Path:
    """One of GPTQ, to be damaged."""
    quantize_folder(plain, tmp_path / "folder", gptq(4, 32, False))
    return tmp_path / "folder"


def ours(folder: Path, meant: Tensors) -> dict[str, Tensor]:
    """The expected weights under our names, assembled by transformers and by hand."""
    model = LlamaForCausalLM(tiny_model("llama", vocab_size=264).config)
    model.load_state_dict(meant)
    return our_weights(model)


def nbytes(weight: Tensor | QuantizedWeight) -> int:
    return weight.nbytes if isinstance(weight, Tensor) else weight.num_bytes


@pytest.mark.parametrize("name", WRITERS)
def test_every_weight_is_what_the_format_means(plain: Path, tmp_path: Path, name: str) -> None:
    """Weights are exact in fp32, dequantized or with stored codes, unsharded and on each of two
    ranks, and have the bytes of the plan."""
    meant = quantize_folder(plain, tmp_path / "folder", WRITERS[name])
    wanted = ours(plain, meant)
    path = tmp_path / "folder"
    config = read_config(path)
    specs = [spec for spec in model_specs(config) if spec.tied_to is None]
    one = Layout()
    loaded = load_weights(path, config, specs, one, one.coord(0), torch.float32)
    for each in wanted:
        assert torch.equal(loaded[each], wanted[each]), each
    formats = quantized_formats(path, config, one, "as-stored")
    assert {key.split(".")[-1] for key, _ in formats} == {"qkv", "out", "gate_up", "down"}
    can_cut = all(each.group in (None, 16) for each in formats.values())
    for layout in (one, Layout(tp=2)) if can_cut else (one,):
        for rank in range(layout.tp):
            coord = layout.coord(rank)
            kept = load_quantized(path, config, specs, layout, coord, torch.float32, "as-stored")
            for spec in specs:
                held = kept[spec.name]
                assert isinstance(held, QuantizedWeight) == (
                    (spec.name, spec.all_parts[0].name) in formats
                )
                local = (
                    held.dequantized(torch.float32) if isinstance(held, QuantizedWeight) else held
                )
                for box in boxes(spec, layout, coord):
                    assert torch.equal(local[box.local_slices], wanted[spec.name][box.slices]), (
                        spec.name
                    )
            planned = plan(
                str(path),
                "h100-80gb",
                layout=layout,
                mode="serve",
                precision="fp32",
                quant="as-stored",
            )
            assert (
                sum(map(nbytes, kept.values()))
                == planned.modes[0].candidates[0].ledger[0].rows["parameters"]
            )


@pytest.mark.parametrize("name", ["gptq-4", "awq", "packed-4", "int8", "fp8-block"])
def test_logits_are_those_of_transformers(plain: Path, tmp_path: Path, name: str) -> None:
    """Logits with the expected weights in fp32 agree to 1e-4 of the largest."""
    meant = quantize_folder(plain, tmp_path / "folder", WRITERS[name])
    theirs = LlamaForCausalLM(tiny_model("llama", vocab_size=264).config).eval()
    theirs.load_state_dict(meant)
    config = from_hugging_face(theirs.config.to_dict())
    layout = Layout()
    specs = model_specs(config)
    kept = load_quantized(
        tmp_path / "folder", config, specs, layout, layout.coord(0), torch.float32, "as-stored"
    )
    ids = torch.randint(264, (1, 20), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        wanted = theirs(ids).logits
        found = Transformer(config, REFERENCE).forward(
            kept, ids, torch.arange(20)[None], Causal(config, causal_attention)
        )  # type: ignore[arg-type]
    assert (found - wanted).abs().max() <= 1e-4 * wanted.abs().max()


def test_layers_may_stay_plain(plain: Path, tmp_path: Path) -> None:
    """Those that were left out, even one of a fused q, k and v."""
    path = tmp_path / "folder"
    meant = quantize_folder(
        plain,
        path,
        WRITERS["packed-4"],
        lambda stem: stem.endswith(("0.self_attn.v_proj", "1.mlp.down_proj")),
    )
    wanted = ours(plain, meant)
    config = read_config(path)
    one = Layout()
    kept = load_quantized(
        path, config, model_specs(config), one, one.coord(0), torch.float32, "as-stored"
    )
    assert isinstance(kept["blocks.1.down"], Tensor)
    qkv = kept["blocks.0.qkv"]
    assert isinstance(qkv, QuantizedWeight) and len(qkv.parts) == 3
    assert torch.equal(qkv.dequantized(torch.float32), wanted["blocks.0.qkv"])
    planned = plan(str(path), "h100-80gb", mode="serve", precision="fp32", quant="as-stored")
    assert (
        sum(map(nbytes, kept.values()))
        == planned.modes[0].candidates[0].ledger[0].rows["parameters"]
    )


def test_it_can_be_converted_to_a_plain_folder(plain: Path, tmp_path: Path) -> None:
    meant = quantize_folder(plain, tmp_path / "folder", WRITERS["awq"])
    converted = convert(tmp_path / "folder", tmp_path / "new", torch.float32)
    assert converted.checked_logits == 0
    assert "quantization_config" not in json.loads((tmp_path / "new" / "config.json").read_text())
    found = LlamaForCausalLM.from_pretrained(tmp_path / "new").state_dict()
    assert all(torch.equal(found[name], tensor) for name, tensor in meant.items())


# -- refused


def refused(folder: Path) -> str:
    config = read_config(folder)
    with pytest.raises(ValueError) as caught:
        load_weights(
            folder, config, model_specs(config), Layout(), Layout().coord(0), torch.float32
        )
    return str(caught.value)


GPTQ: dict[str, Any] = {"quant_method": "gptq", "bits": 4, "group_size": 32}
WEIGHTS: dict[str, Any] = {
    "num_bits": 4,
    "type": "int",
    "symmetric": True,
    "strategy": "group",
    "group_size": 32,
}


def compressed_with(
    form: str = "pack-quantized", groups: int = 1, **weights: object
) -> dict[str, Any]:
    each = {
        f"group_{n}": {"weights": WEIGHTS | ({"num_bits": 8} if n else {}) | weights}
        for n in range(groups)
    }
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": each}


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        (
            {"quant_method": "bitsandbytes"},
            "unknown quantization method 'bitsandbytes'; supported are gptq, awq, ",
        ),
        ({"bits": 4}, "unknown quantization method None"),
        ("gptq", "quantization_config must be an object"),
        (GPTQ | {"bits": 2}, "codes of 2 bits are not supported; 3, 4 and 8 bits are"),
        (GPTQ | {"checkpoint_format": "marlin"}, "GPTQ in the format 'marlin' is not supported"),
        (GPTQ | {"dynamic": {"+:.*down.*": {"bits": 8}}}, "quantized in different ways"),
        (GPTQ | {"group_size": "many"}, "a group size must be a whole number"),
        (GPTQ | {"group_size": 128}, "has groups of 128 columns, which do not divide its 64"),
        (GPTQ | {"group_size": 20}, "the group size must be a multiple of 8, not 20"),
        (
            {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemv"},
            "in version 'gemv' is not supported",
        ),
        (
            {"quant_method": "awq", "bits": 4, "zero_point": False},
            "without zero points is not supported",
        ),
        (compressed_with(groups=2), "quantized in different ways"),
        (compressed_with("mixed-precision"), "quantized in different ways"),
        (compressed_with("marlin-24"), "in the format 'marlin-24' is not supported"),
        (compressed_with(strategy="token"), "scales per token are not supported"),
        (compressed_with(actorder="group"), "act-order"),
        (compressed_with("float-quantized", type="float"), "floats of 4 bits are not supported"),
        (compressed_with("int-quantized"), "codes of 4 bits that are not packed"),
        (
            compressed_with() | {"kv_cache_scheme": {"num_bits": 8}},
            "its kv_cache_scheme is not supported",
        ),
        (compressed_with(strategy="block"), "a block of scales must be two whole numbers"),
        (
            {"quant_method": "fp8", "weight_block_size": [128]},
            "a block of scales must be two whole numbers",
        ),
    ],
)
def test_formats_that_are_refused(folder: Path, config: Any, sentence: str) -> None:
    set_config(folder, quantization_config=config)
    said = refused(folder)
    assert sentence in said and "\n" not in said


@pytest.mark.parametrize(
    ("edit", "sentence"),
    [
        (lambda t: t.pop(f"{STEM}.scales"), f"{STEM} is quantized, but has no scales"),
        (lambda t: t.pop(f"{STEM}.qzeros"), f"{STEM} is quantized, but has no qzeros"),
        (
            lambda t: t.update({f"{STEM}.scales": torch.ones(2, 64)}),
            f"{STEM}.scales is [2, 64] and should be [3, 64]",
        ),
        (lambda t: t.update({f"{STEM}.scales": torch.ones(3, 64).double()}), "is stored as F64"),
        (
            lambda t: t.update({f"{STEM}.g_idx": torch.arange(96).flip(0) // 32}),
            f"{STEM}: its columns are ordered by activation",
        ),
        (lambda t: t.pop(f"{STEM}.qweight"), f"it lacks {STEM}.weight"),
        (lambda t: t.update({f"{STEM}.odd": torch.ones(1)}), f"it has no parameter for {STEM}.odd"),
        (lambda t: t.update({f"{STEM}.bias": torch.ones(1)}), f"no parameter for {STEM}.bias"),
        (
            lambda t: t.update({f"{STEM}.weight": torch.ones(64, 96)}),
            f"{STEM} is stored twice: quantized, and as {STEM}.weight",
        ),
    ],
)
def test_tensors_that_are_refused(
    folder: Path, edit: Callable[[Tensors], object], sentence: str
) -> None:
    edit_tensors(folder, edit)
    said = refused(folder)
    assert sentence in said and "\n" not in said


def test_biases_of_zero_are_ignored(folder: Path) -> None:
    """AutoGPTQ stores one for each matrix of a model without biases."""
    config = read_config(folder)
    layout = Layout()

    def loaded() -> dict[str, torch.Tensor]:
        specs = model_specs(config)
        return load_weights(folder, config, specs, layout, layout.coord(0), torch.float32)

    plain = loaded()
    edit_tensors(folder, lambda t: t.update({f"{STEM}.bias": torch.zeros(64)}))
    again = loaded()
    assert all(torch.equal(again[name], plain[name]) for name in plain)


def test_a_quantized_head_of_a_tied_model_is_refused(folder: Path) -> None:
    """It has values of its own, which tying would drop."""
    tensors = load_file(folder / "model.safetensors")
    weight = tensors.pop("lm_head.weight")
    set_config(folder, tie_word_embeddings=True)
    head, _ = gptq(4, 32, False).write((weight.shape[0], weight.shape[1]), torch.Generator())
    save_file(
        tensors | {f"lm_head.{suffix}": each for suffix, each in head.items()},
        folder / "model.safetensors",
    )
    assert "stores lm_head.weight with other values than model.embed_tokens" in refused(folder)


def test_act_order_without_harm_is_read(folder: Path) -> None:
    """A file may say desc_act and keep its columns in order all the same."""
    config = read_config(folder)

    def loaded() -> dict[str, torch.Tensor]:
        return load_weights(
            folder, config, model_specs(config), Layout(), Layout().coord(0), torch.float32
        )

    plain = loaded()
    set_config(folder, quantization_config=gptq(4, 32, False).config | {"desc_act": True})
    found = loaded()
    assert found.keys() == plain.keys() and all(
        torch.equal(found[name], plain[name]) for name in plain
    )


def test_zero_points_off_the_middle_are_not_symmetric(folder: Path) -> None:
    set_config(folder, quantization_config=gptq(4, 32, True).config)
    assert "should be symmetric, but its zero points are not all in the middle" in refused(folder)


def test_gpt2_is_refused(tmp_path: Path) -> None:
    tiny_model("gpt2").save_pretrained(tmp_path / "gpt2")
    set_config(tmp_path / "gpt2", quantization_config=awq(32).config)
    assert "quantized folders of gpt2 are not supported" in refused(tmp_path / "gpt2")


@pytest.mark.parametrize(
    ("quant", "sentence"),
    [
        ("int4-g32", "is already quantized (int4z-g32); use --quant as-stored"),
        ("int4_g32", "did you mean int4-g32?; as-stored serves a quantized model as it is stored"),
    ],
)
def test_the_command_line_refuses_in_a_sentence(
    folder: Path, capsys: pytest.CaptureFixture[str], quant: str, sentence: str
) -> None:
    data = folder / "text.txt"
    data.write_text("some text")
    for command in (
        ["serve", str(folder), "--port", "0"],
        ["plan", str(folder), "--gpu", "h100-80gb"],
        ["eval", "perplexity", str(folder), "--data", str(data)],
    ):
        assert main([*command, "--quant", quant]) == 2
        said = capsys.readouterr().err
        assert sentence in said and said.count("\n") == 1


def cut_short(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-9])


def without_a_header(file: Path) -> None:
    file.write_bytes((1 << 40).to_bytes(8, "little") + b"{}")


def listed_but_gone(file: Path) -> None:
    index = {"weight_map": {"a": "model-1.safetensors"}}
    file.with_name("model.safetensors.index.json").write_text(json.dumps(index))
    file.unlink()


def in_two_files(file: Path) -> None:
    for name in ("model-1.safetensors", "model-2.safetensors"):
        shutil.copyfile(file, file.with_name(name))
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    file.with_name("model.safetensors.index.json").write_text(json.dumps(index))
    file.unlink()


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (cut_short, "is not a complete safetensors file"),
        (without_a_header, "is not a complete safetensors file"),
        (listed_but_gone, "is missing, although model.safetensors.index.json lists it"),
        (in_two_files, "in two files"),
        (Path.unlink, "has no weights: expected model.safetensors or model.safetensors.index.json"),
    ],
)
def test_plan_and_loader_say_the_same_of_damaged_files(
    folder: Path, capsys: pytest.CaptureFixture[str], damage: Callable[[Path], None], sentence: str
) -> None:
    damage(folder / "model.safetensors")
    said = refused(folder)
    assert sentence in said
    assert main(["plan", str(folder), "--gpu", "h100-80gb", "--quant", "as-stored"]) == 2
    assert capsys.readouterr().err == f"shardwise: {said}\n"


def test_a_damaged_folder_stops_the_server_in_a_sentence(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    edit_tensors(folder, lambda tensors: tensors.pop(f"{STEM}.scales"))
    assert main(["serve", str(folder), "--port", "0", "--quant", "as-stored"]) == 2
    assert f"{STEM} is quantized, but has no scales" in capsys.readouterr().err


def test_what_is_plain_has_nothing_to_keep(
    plain: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", str(plain), "--gpu", "h100-80gb", "--quant", "as-stored"]) == 2
    assert "is not quantized, so as-stored does not apply" in capsys.readouterr().err
    run = tmp_path / "run"
    shutil.copytree(plain, run / "model")
    assert main(["plan", str(run), "--gpu", "h100-80gb", "--quant", "as-stored"]) == 2
    assert "is not quantized, so as-stored" in capsys.readouterr().err
