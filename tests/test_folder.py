"""Hugging Face folders against transformers, which writes what we read and reads what we write."""

import json
import math
import shutil
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from examples import examples
from shardwise.formats.huggingface import weight_files as files
from shardwise.formats.huggingface.folder_reader import FolderReader
from shardwise.formats.huggingface.hf_config import from_hugging_face, read_folder_config
from shardwise.formats.huggingface.write_folder import write_folder
from shardwise.formats.load import open_weights
from shardwise.formats.model_source import read_config
from shardwise.formats.reader import strips
from shardwise.formats.tokenizers.train_bpe import byte_tokenizer
from shardwise.layout import Layout
from shardwise.params import model_specs
from shardwise.shards import Box, boxes, local_shape
from tiny_models import MODELS, VOCAB, our_weights, tiny_model
from whole_weights import load_weights

ONE = Layout().coord(0)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Folders that transformers wrote, each once; a `max_shard_size` cuts them into many files."""
    root = tmp_path_factory.mktemp("saved")

    def save(name: str, dtype: torch.dtype = torch.float32, max_shard_size: str = "1GB") -> Path:
        path = root / f"{name}-{dtype}-{max_shard_size}"
        if not path.exists():
            tiny_model(name, dtype).save_pretrained(path, max_shard_size=max_shard_size)
        return path

    return save


@pytest.fixture
def broken(saved: Callable[..., Path], tmp_path: Path) -> Path:
    """A copy of the sharded llama, to be damaged."""
    return shutil.copytree(saved("llama", max_shard_size="100KB"), tmp_path / "broken")


def load_whole(path: Path, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    config = read_config(path)
    return load_weights(path, config, model_specs(config), Layout(), ONE, dtype)


def assert_same(got: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert got.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert got[name].dtype == tensor.dtype, name
        assert torch.equal(got[name], tensor), name


def reassembled(path: Path, layout: Layout) -> dict[str, Tensor]:
    """The whole weights out of what every rank loads; asserts that padding is zero and that copies
    agree."""
    config = read_config(path)
    specs = model_specs(config)
    whole = {spec.name: torch.full(spec.shape, torch.nan) for spec in specs if spec.tied_to is None}
    for rank in range(layout.world_size):
        coord = layout.coord(rank)
        local = load_weights(path, config, specs, layout, coord, torch.float32)
        assert local.keys() == whole.keys()
        for spec in (spec for spec in specs if spec.tied_to is None):
            assert local[spec.name].shape == local_shape(spec, layout, coord)
            for box in boxes(spec, layout, coord):
                mine = local[spec.name][box.local_slices]
                there = whole[spec.name][box.slices]
                assert torch.all(there.isnan() | (there == mine)), spec.name
                there.copy_(mine)
                mine.zero_()
            assert not local[spec.name].any(), f"padding of {spec.name}"
    return whole


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("name", MODELS)
def test_every_cut_reassembles_to_the_state_of_transformers(saved, name: str, tp: int) -> None:
    path = saved(name)
    layout = Layout(tp=tp)
    assert not layout.problems(read_folder_config(path))
    assert_same(reassembled(path, layout), our_weights(tiny_model(name)))


@pytest.mark.parametrize("name", MODELS)
def test_sharded_bf16_folder_equals_transformers_in_either_dtype(saved, name: str) -> None:
    path = saved(name, torch.bfloat16, "40KB")
    assert (path / "model.safetensors.index.json").exists() and len(
        list(path.glob("*.safetensors"))
    ) > 3
    wanted = our_weights(tiny_model(name, torch.bfloat16))
    assert_same(load_whole(path, torch.bfloat16), wanted)
    assert_same(
        load_whole(path, torch.float32), {key: weight.float() for key, weight in wanted.items()}
    )
    with closing(open_weights(path, read_config(path))) as reader:
        assert reader.dtype is torch.bfloat16


@pytest.mark.parametrize("name", ["llama-tied", "gpt2"])
def test_folder_saved_without_its_head_lacks_the_prefix(tmp_path: Path, name: str) -> None:
    model = tiny_model(name)
    model.base_model.save_pretrained(tmp_path)
    assert not any(
        key.startswith(("model.", "transformer."))
        for key in load_file(tmp_path / "model.safetensors")
    )
    assert_same(load_whole(tmp_path), our_weights(model))


@pytest.mark.parametrize("name", ["llama-tied", "gpt2"])
def test_buffers_and_a_second_copy_of_a_tied_head_are_ignored(
    saved, tmp_path: Path, name: str
) -> None:
    shutil.copytree(saved(name), tmp_path, dirs_exist_ok=True)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["lm_head.weight"] = our_weights(tiny_model(name))["embed"].clone()
    buffers = [
        "h.0.attn.bias",
        "transformer.h.1.attn.masked_bias",
        "model.layers.0.self_attn.rotary_emb.inv_freq",
    ]
    save_file(
        tensors | {buffer: torch.ones(3) for buffer in buffers}, tmp_path / "model.safetensors"
    )
    assert_same(load_whole(tmp_path), our_weights(tiny_model(name)))


@pytest.mark.parametrize("name", ["llama-tied", "gpt2"])
def test_a_tied_model_may_store_its_head_alone(saved, tmp_path: Path, name: str) -> None:
    """`save_model` of safetensors keeps one of two names; transformers loads either."""
    shutil.copytree(saved(name), tmp_path, dirs_exist_ok=True)
    tensors = load_file(tmp_path / "model.safetensors")
    (embed,) = (each for each in tensors if each.endswith(("embed_tokens.weight", "wte.weight")))
    tensors["lm_head.weight"] = tensors.pop(embed)
    save_file(tensors, tmp_path / "model.safetensors")
    assert_same(load_whole(tmp_path), our_weights(tiny_model(name)))


@pytest.mark.parametrize("name", ["llama-tied", "gpt2"])
def test_a_tied_head_with_other_values_is_refused(saved, tmp_path: Path, name: str) -> None:
    """One number of the last row is enough; in another dtype equal values are equal."""
    shutil.copytree(saved(name), tmp_path, dirs_exist_ok=True)
    tensors = load_file(tmp_path / "model.safetensors")
    head = our_weights(tiny_model(name))["embed"].double()
    save_file(tensors | {"lm_head.weight": head.float()}, tmp_path / "model.safetensors")
    assert_same(load_whole(tmp_path), our_weights(tiny_model(name)))
    head[-1, -1] += 1
    save_file(tensors | {"lm_head.weight": head.float()}, tmp_path / "model.safetensors")
    with pytest.raises(
        ValueError, match=r"stores lm_head\.weight with other values than .*embed|wte"
    ):
        load_whole(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    untied = json.dumps(config | {"tie_word_embeddings": False})
    if name != "gpt2":  # which is always tied
        (tmp_path / "config.json").write_text(untied)
        assert torch.equal(load_whole(tmp_path)["head"], head.float())


class CountingFile:
    """A safetensors file that counts the bytes of the slices taken from it."""

    def __init__(self, file: Path, taken_bytes: list[int], framework: str) -> None:
        self._file = safe_open(file, framework=framework)
        self._taken_bytes = taken_bytes

    def __enter__(self) -> "CountingFile":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def keys(self) -> list[str]:
        return self._file.keys()

    def get_slice(self, name: str) -> "CountingSlice":
        return CountingSlice(self._file.get_slice(name), self._taken_bytes)


class CountingSlice:
    def __init__(self, inner: Any, taken_bytes: list[int]) -> None:
        self._inner = inner
        self._taken_bytes = taken_bytes
        self.get_shape = inner.get_shape
        self.get_dtype = inner.get_dtype

    def __getitem__(self, where: tuple[slice, ...]) -> Tensor:
        taken = self._inner[where]
        self._taken_bytes.append(taken.nbytes)
        return taken


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_a_rank_takes_the_bytes_of_its_boxes_and_no_others(saved, monkeypatch, name: str) -> None:
    path = saved(name, max_shard_size="100KB")
    taken_bytes = []
    monkeypatch.setattr(
        files, "safe_open", lambda file, framework: CountingFile(file, taken_bytes, framework)
    )
    config = read_folder_config(path)
    specs = model_specs(config)
    layout = Layout(tp=2)
    held = [spec for spec in specs if spec.tied_to is None]
    by_rank = []
    for rank in range(2):
        coord = layout.coord(rank)
        taken_bytes.clear()
        load_weights(path, config, specs, layout, coord, torch.bfloat16)
        by_rank.append(sum(taken_bytes))
        assert by_rank[-1] == sum(
            4 * math.prod(box.shape) for spec in held for box in boxes(spec, layout, coord)
        )
    whole_bytes = sum(4 * spec.numel for spec in held)
    assert all(0.45 < taken / whole_bytes < 0.55 for taken in by_rank)


def test_a_pipeline_stage_loads_only_what_it_asks_for(saved) -> None:
    path = saved("llama")
    config = read_folder_config(path)
    stage = [spec for spec in model_specs(config) if spec.unit in ("blocks.1", "final")]
    got = load_weights(path, config, stage, Layout(pp=2), Layout(pp=2).coord(1), torch.float32)
    wanted = our_weights(tiny_model("llama"))
    assert_same(got, {spec.name: wanted[spec.name] for spec in stage})


@settings(max_examples=examples(60))
@given(data=st.data(), name=st.sampled_from(["llama", "gpt2"]))
def test_drawn_boxes_are_what_the_tensor_has_there(
    saved_for_boxes, data: st.DataObject, name: str
) -> None:
    reader, specs, wanted = saved_for_boxes[name]
    spec = data.draw(st.sampled_from(specs))
    row = 0
    part = data.draw(st.sampled_from(spec.all_parts))
    for earlier in spec.all_parts[: spec.all_parts.index(part)]:
        row += earlier.size
    edges = [
        sorted(data.draw(st.tuples(*[st.integers(0, size)] * 2)))
        for size in (part.size, *spec.shape[1:])
    ]
    start, stop = zip(*edges, strict=True)
    start = (start[0] + row, *start[1:])
    stop = (stop[0] + row, *stop[1:])
    box = Box(
        part.name, start, (0,) * len(start), tuple(b - a for a, b in zip(start, stop, strict=True))
    )
    assert torch.equal(reader.read(spec, box), wanted[spec.name][box.slices])


@pytest.fixture(scope="module")
def saved_for_boxes(saved) -> Iterator[dict[str, Any]]:
    found = {}
    for name in ("llama", "gpt2"):
        config = read_folder_config(saved(name))
        specs = [spec for spec in model_specs(config) if spec.tied_to is None]
        found[name] = (FolderReader(saved(name), config), specs, our_weights(tiny_model(name)))
    yield found
    for reader, *_ in found.values():
        reader.close()


@given(
    rows=st.integers(0, 40),
    columns=st.lists(st.integers(0, 2000), max_size=1),
    block=st.sampled_from([1, 2, 5]),
    limit=st.integers(1, 5000),
)
def test_strips_tile_a_box_in_whole_blocks(
    rows: int, columns: list[int], block: int, limit: int
) -> None:
    box = Box(
        "part", (7 * block, *columns), (block, *(0 for _ in columns)), (rows * block, *columns)
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("shardwise.formats.reader.STRIP_ELEMENTS", limit)
        found = list(strips(box, block))
    if not math.prod(box.shape):
        assert not found
        return
    row = 7 * block
    for strip in found:
        assert strip.start[0] == row
        row += strip.shape[0]
        assert strip.start[0] - strip.local[0] == 6 * block and strip.shape[0] % block == 0
        assert (strip.shape[1:], strip.start[1:], strip.local[1:]) == (
            box.shape[1:],
            box.start[1:],
            box.local[1:],
        )
        assert math.prod(strip.shape) <= limit or strip.shape[0] == block
    assert row == 7 * block + box.shape[0]


# Writing


def write_again(
    name: str, path: Path, dtype: torch.dtype = torch.float32, **options: Any
) -> tuple[str, ...]:
    model = tiny_model(name)
    config = from_hugging_face(model.config.to_dict())
    weights = our_weights(model)
    specs = model_specs(config)
    tensors = ((spec.name, weights[spec.name]) for spec in specs if spec.tied_to is None)
    return write_folder(path, config, specs, tensors, dtype, **options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("max_shard_bytes", [5_000_000_000, 40_000])
@pytest.mark.parametrize("name", MODELS)
def test_transformers_loads_what_is_written(
    tmp_path: Path, name: str, max_shard_bytes: int, dtype
) -> None:
    files = write_again(name, tmp_path / "new", dtype, max_shard_bytes=max_shard_bytes)
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == list(files)
    loaded, report = AutoModelForCausalLM.from_pretrained(
        tmp_path / "new", dtype="auto", output_loading_info=True
    )
    assert not any(
        report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs")
    )
    assert loaded.dtype == dtype
    assert_same(dict(loaded.state_dict()), dict(tiny_model(name, dtype).state_dict()))
    if max_shard_bytes < 1_000_000:
        shards = [load_file(file) for file in sorted((tmp_path / "new").glob("*.safetensors"))]
        assert len(shards) > 2
        sizes = [[tensor.nbytes for tensor in shard.values()] for shard in shards]
        assert all(sum(size) <= max_shard_bytes or len(size) == 1 for size in sizes)
        index = json.loads((tmp_path / "new" / "model.safetensors.index.json").read_text())
        assert index["metadata"]["total_size"] == sum(map(sum, sizes))


def test_tokenizer_and_its_end_tokens_come_along(tmp_path: Path) -> None:
    model = tiny_model("llama", vocab_size=300)
    model.save_pretrained(tmp_path / "source")
    config = read_folder_config(tmp_path / "source")
    tokenizer = byte_tokenizer()
    specs = model_specs(config)
    weights = our_weights(model)
    tensors = ((spec.name, weights[spec.name]) for spec in specs)
    files = write_folder(tmp_path / "new", config, specs, tensors, torch.float32, tokenizer)
    assert {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json"} <= set(
        files
    )
    for file in ("config.json", "generation_config.json"):
        written = json.loads((tmp_path / "new" / file).read_text())
        assert (written["bos_token_id"], written["eos_token_id"]) == (256, 256)
    assert (
        AutoModelForCausalLM.from_pretrained(tmp_path / "new").generation_config.eos_token_id == 256
    )


def test_a_tokenizer_with_more_ids_than_the_vocabulary_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=f"ids up to 256, but the model's vocabulary has only {VOCAB}"
    ):
        write_again("llama", tmp_path / "new", tokenizer=byte_tokenizer())
    assert not list(tmp_path.iterdir())


def test_a_destination_in_use_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "kept").write_text("precious")
    with pytest.raises(ValueError, match="already exists and is not empty"):
        write_again("llama", tmp_path)
    with pytest.raises(ValueError, match="already exists and is not a folder"):
        write_again("llama", tmp_path / "kept")
    with pytest.raises(ValueError, match="cannot be written"):
        write_again("llama", tmp_path / "kept" / "new")
    assert [path.name for path in tmp_path.iterdir()] == ["kept"] and (
        tmp_path / "kept"
    ).read_text() == "precious"


def test_a_failure_half_way_leaves_nothing(saved, tmp_path: Path) -> None:
    config = read_folder_config(saved("llama"))
    specs = model_specs(config)
    weights = our_weights(tiny_model("llama"))

    def given(names: list[str]) -> Iterator[tuple[str, Tensor]]:
        return ((name, weights[name]) for name in names)

    order = [spec.name for spec in specs]
    for names, message in (
        (order[:-1], "expected head of 101 x 64 as the next tensor to write, got nothing"),
        (
            order[1:],
            "expected embed of 101 x 64 as the next tensor to write, got blocks.0.norm1 of 64",
        ),
        ([*order, "head"], "got head, which is not in the model or was already written"),
    ):
        with pytest.raises(ValueError, match=message):
            write_folder(
                tmp_path / "new", config, specs, given(names), torch.float32, max_shard_bytes=40_000
            )
        assert not list(tmp_path.iterdir())


# Bad input


def rewrite(path: Path, change: Callable[[dict[str, Tensor]], None]) -> None:
    """Change the first file of a folder."""
    file = min(path.glob("*.safetensors"))
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)


def refusal(path: Path) -> str:
    """The one sentence with which loading is refused."""
    with pytest.raises(ValueError) as caught:
        load_whole(path)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_missing_extra_and_misshapen_tensors_are_named(broken: Path) -> None:
    rewrite(broken, lambda tensors: tensors.pop("model.embed_tokens.weight"))
    assert "it lacks model.embed_tokens.weight" in refusal(broken)
    rewrite(broken, lambda tensors: tensors.update({"model.strange": torch.ones(2)}))
    assert "it lacks model.embed_tokens.weight; it has no parameter for model.strange" in refusal(
        broken
    )
    rewrite(broken, lambda tensors: tensors.pop("model.strange"))
    rewrite(
        broken, lambda tensors: tensors.update({"model.embed_tokens.weight": torch.ones(VOCAB, 63)})
    )
    assert refusal(broken).endswith(
        "its tensor model.embed_tokens.weight is 101 x 63 and should be 101 x 64"
    )


def test_every_rank_of_a_pipeline_refuses_alike(broken: Path) -> None:
    rewrite(broken, lambda tensors: tensors.update({"model.strange": torch.ones(2)}))
    config = read_folder_config(broken)
    with pytest.raises(ValueError, match=r"model\.strange"):
        load_weights(broken, config, model_specs(config)[-1:], Layout(), ONE, torch.float32)


def test_a_config_with_more_layers_names_what_is_not_there(broken: Path) -> None:
    config = json.loads((broken / "config.json").read_text())
    (broken / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 3}))
    assert "it lacks model.layers.2.input_layernorm.weight" in refusal(
        broken
    ) and "and 6 more" in refusal(broken)


@pytest.mark.parametrize("file", ["adapter_model.safetensors", "adapter_model.bin"])
def test_an_adapter_beside_the_weights_is_named(broken: Path, file: str) -> None:
    """transformers applies it."""
    (broken / file).write_bytes(b"")
    assert f"{file} is an adapter (LoRA), which is not supported; merge it" in refusal(broken)


def test_an_untied_model_needs_its_head(saved, tmp_path: Path) -> None:
    shutil.copytree(saved("llama"), tmp_path, dirs_exist_ok=True)
    rewrite(tmp_path, lambda tensors: tensors.pop("lm_head.weight"))
    assert "it lacks lm_head.weight" in refusal(tmp_path)


def test_a_tensor_in_two_files_is_named(broken: Path) -> None:
    last = max(broken.glob("*.safetensors"))
    save_file(load_file(last) | {"model.embed_tokens.weight": torch.ones(VOCAB, 64)}, last)
    assert "model.embed_tokens.weight in two files" in refusal(broken)


def test_integers_in_place_of_weights_are_refused(broken: Path) -> None:
    def quantize(tensors: dict[str, Tensor]) -> None:
        tensors["model.embed_tokens.weight"] = torch.ones(VOCAB, 64, dtype=torch.int8)

    rewrite(broken, quantize)
    assert "model.embed_tokens.weight as I8; supported are F32, F16, BF16" in refusal(broken)


@pytest.mark.parametrize("keep", [0, 5, 200, 100_000, -1])
def test_a_file_cut_short_is_refused(saved, tmp_path: Path, keep: int) -> None:
    shutil.copytree(saved("llama"), tmp_path, dirs_exist_ok=True)
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    assert "is not a complete safetensors file" in refusal(
        tmp_path
    ) and "download it again" in refusal(tmp_path)


def test_a_missing_shard_is_named(broken: Path) -> None:
    file = max(broken.glob("*.safetensors"))
    file.unlink()
    assert f"{file} is missing" in refusal(broken)


@pytest.mark.parametrize(
    "index",
    [
        "",
        "[]",
        "{}",
        '{"weight_map": 3}',
        '{"weight_map": {"a": [1]}}',
        '{"weight_map": {"a": "../b"}}',
        '{"weight_map": {}}',
        '{"weight_map": {"a": 1, "b": "c"}}',
    ],
)
def test_an_index_that_makes_no_sense_is_refused(broken: Path, index: str) -> None:
    (broken / "model.safetensors.index.json").write_text(index)
    assert str(broken / "model.safetensors.index.json") in refusal(broken)


def test_folders_without_safetensors_are_refused_with_a_way_out(broken: Path) -> None:
    for file in [*broken.glob("*.safetensors"), broken / "model.safetensors.index.json"]:
        file.unlink()
    assert "has no weights: expected model.safetensors" in refusal(broken)
    (broken / "pytorch_model.bin").write_bytes(b"pickle")
    assert "only as pytorch_model.bin" in refusal(broken) and "save_pretrained" in refusal(broken)


def test_paths_that_are_no_model_are_refused(tmp_path: Path) -> None:
    assert "does not exist" in refusal(tmp_path / "none")
    assert "has no config.json" in refusal(tmp_path)
    (tmp_path / "weights.pt").write_bytes(b"x")
    assert "is not a model" in refusal(tmp_path / "weights.pt")
