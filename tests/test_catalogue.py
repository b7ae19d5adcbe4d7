"""MODEL on the command line is resolved. The hub is the real huggingface_hub with a cache that the
test writes, without a network."""

import json
import struct
from pathlib import Path

import pytest

from shardwise.config import ModelConfig
from shardwise.formats.catalogue import CATALOGUE, find_model, model_path
from shardwise.formats.hub import is_complete
from shardwise.formats.huggingface.hf_config import to_hugging_face
from shardwise.hardware import DEVICES, device_for, find_device

HUB_ID = "shardwise-tests/tiny"
TINY = ModelConfig("llama", 2, 64, 96, 4, 2, 16, 100, 128, tied=True, rope_theta=5e5)


def write_config(folder: Path, config: ModelConfig = TINY) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(to_hugging_face(config)))
    return folder


def write_weights(folder: Path) -> None:
    """Write a safetensors file of one tensor, and a tokenizer file: enough to differ from an
    unfinished download."""
    header = json.dumps({"norm": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(4))
    (folder / "tokenizer.json").write_text("{}")


@pytest.fixture
def snapshot(tmp_path: Path) -> Path:
    """A model in the layout of the hub's cache: refs name a commit, snapshots hold its files."""
    commit = "a" * 40
    repository = tmp_path / "cache" / f"models--{HUB_ID.replace('/', '--')}"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(commit)
    return write_config(repository / "snapshots" / commit)


@pytest.fixture
def cache(snapshot: Path) -> Path:
    return snapshot.parents[2]


@pytest.mark.parametrize("name", CATALOGUE)
def test_catalogue_names(name: str) -> None:
    found = find_model(name.upper())
    assert (found.kind, found.name, found.path) == ("catalogue", name, None)
    assert found.config == CATALOGUE[name]


def test_published_choices_beside_the_shape() -> None:
    llama31 = CATALOGUE["llama-3.1-8b"]
    llama3 = CATALOGUE["llama-3-8b"]
    assert llama3.rope_scaling is None
    assert llama3.max_positions == 8192
    scaling = llama31.rope_scaling
    assert scaling is not None
    assert (
        scaling.factor,
        scaling.low_freq_factor,
        scaling.high_freq_factor,
        scaling.original_max_positions,
    ) == (8, 1, 4, 8192)
    assert CATALOGUE["llama-3.2-1b"].rope_scaling.factor == 32  # type: ignore[union-attr]
    assert CATALOGUE["mistral-7b"].windowed_layers == frozenset(range(32))
    assert CATALOGUE["qwen3-0.6b"].qk_norm
    assert CATALOGUE["qwen2.5-7b"].qkv_bias
    assert not CATALOGUE["qwen2.5-7b"].tied


def test_a_count_is_a_model() -> None:
    found = find_model("7.5b")
    assert (found.kind, found.name, found.path) == ("count", "7.5B", None)


def test_a_hugging_face_folder(tmp_path: Path) -> None:
    folder = write_config(tmp_path / "tiny")
    found = find_model(str(folder))
    assert (found.kind, found.config, found.path, found.name) == ("folder", TINY, folder, "tiny")
    assert model_path(found) == folder


def test_a_run_folder(tmp_path: Path) -> None:
    write_config(tmp_path / "run" / "model")
    found = find_model(str(tmp_path / "run"))
    assert (found.kind, found.config, found.path, found.name) == (
        "run",
        TINY,
        tmp_path / "run",
        "run",
    )
    assert model_path(found) == tmp_path / "run"


def test_a_path_wins_over_the_catalogue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_config(tmp_path / "gpt2")
    monkeypatch.chdir(tmp_path)
    assert find_model("gpt2").kind == "folder"


def test_a_gguf_file(tmp_path: Path) -> None:
    from gguf import GGUFWriter

    path = tmp_path / "tiny.gguf"
    writer = GGUFWriter(path, "llama")
    writer.add_block_count(2)
    writer.add_embedding_length(64)
    writer.add_feed_forward_length(96)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_context_length(128)
    writer.add_vocab_size(100)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(5e5)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    found = find_model(str(path))
    assert (found.kind, found.path, found.name) == ("gguf", path, "tiny")
    assert found.config.norm_eps == pytest.approx(TINY.norm_eps)  # stored in 32 bits
    assert (found.config.num_layers, found.config.num_kv_heads, found.config.rope_theta) == (
        2,
        2,
        5e5,
    )
    assert model_path(found) == path


def test_a_hub_id_is_read_from_the_local_cache(cache: Path, snapshot: Path) -> None:
    found = find_model(HUB_ID, cache_dir=cache, local_files_only=True)
    assert (found.kind, found.config, found.path, found.name) == ("hub", TINY, snapshot, HUB_ID)


def test_a_whole_hub_model_is_used_where_it_lies(cache: Path, snapshot: Path) -> None:
    write_weights(snapshot)
    found = find_model(HUB_ID, cache_dir=cache, local_files_only=True)
    assert model_path(found, cache_dir=cache, local_files_only=True) == snapshot


def test_an_unfinished_download_is_said_to_be_one(cache: Path) -> None:
    found = find_model(HUB_ID, cache_dir=cache, local_files_only=True)
    with pytest.raises(ValueError, match="lacks its weights or tokenizer"):
        model_path(found, cache_dir=cache, local_files_only=True)


def test_every_shard_of_an_index_counts(snapshot: Path) -> None:
    write_weights(snapshot)
    index = {
        "weight_map": {
            "a": "model-00001-of-00002.safetensors",
            "b": "model-00002-of-00002.safetensors",
        }
    }
    (snapshot / "model.safetensors.index.json").write_text(json.dumps(index))
    (snapshot / "model-00001-of-00002.safetensors").touch()
    assert not is_complete(snapshot)
    (snapshot / "model-00002-of-00002.safetensors").touch()
    assert is_complete(snapshot)
    (snapshot / "tokenizer.json").unlink()
    assert not is_complete(snapshot)


def test_a_hub_id_that_the_cache_lacks(cache: Path) -> None:
    with pytest.raises(
        ValueError, match="neither a folder on this machine nor in the hub's local cache"
    ):
        find_model("shardwise-tests/other", cache_dir=cache, local_files_only=True)


def test_a_bad_hub_id(cache: Path) -> None:
    with pytest.raises(ValueError, match="cannot be downloaded: Cannot have -- or"):
        find_model("shardwise--tests/other", cache_dir=cache, local_files_only=True)


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("lama-3.1-8b", "the nearest names are llama-3.1-8b"),
        (
            "zzz",
            "a model is a catalogue name (llama-3.1-8b), a parameter count (70B), a Hugging Face "
            "folder",
        ),
        ("", "a model is a catalogue name"),
        ("mixtral-8x7b", "'mixtral-8x7b' is a mixture of experts, which is not supported yet"),
        ("Qwen3-30B-A3B", "is a mixture of experts"),
        ("llama-4-scout", "is a mixture of experts"),
        ("./nowhere", "does not exist; a model is"),
        ("a/b/c", "does not exist; a model is"),
        ("missing.gguf", "does not exist; a model is"),
    ],
)
def test_unknown_words(word: str, said: str) -> None:
    with pytest.raises(ValueError) as caught:
        find_model(word)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_what_lies_there_but_is_no_model(tmp_path: Path) -> None:
    (tmp_path / "weights.bin").write_bytes(b"x")
    (tmp_path / "bad.gguf").write_bytes(b"x" * 100)
    (tmp_path / "folder").mkdir()
    for name, said in (
        ("weights.bin", "not a .gguf file"),
        ("bad.gguf", "letters GGUF"),
        ("folder", "neither config"),
    ):
        with pytest.raises(ValueError, match=said):
            find_model(str(tmp_path / name))
    with pytest.raises(ValueError, match=r"name the file in it, .*bad\.gguf"):
        find_model(str(tmp_path))


def test_a_shape_has_no_folder() -> None:
    for word in ("70B", "gpt2"):
        with pytest.raises(ValueError, match="is only a shape, without weights"):
            model_path(find_model(word))


@pytest.mark.parametrize("name", DEVICES)
def test_devices_are_found_by_name_and_by_what_torch_calls_them(name: str) -> None:
    device = find_device(name.upper())
    assert device.name == name
    assert all(device_for(cuda_name) is device for cuda_name in device.cuda_names)


def test_cuda_names_belong_to_one_device() -> None:
    names = [cuda_name for device in DEVICES.values() for cuda_name in device.cuda_names]
    assert len(names) == len(set(names))
    assert device_for("NVIDIA H100 80GB HBM3") is DEVICES["h100-80gb"]
    assert device_for("NVIDIA GeForce RTX 4090 Laptop GPU") is None


def test_peaks_are_those_that_published_utilizations_use() -> None:
    """A100 312e12 and H100 989e12 FLOP/s; 1555, 2039 and 3350 GB/s; the ZeRO paper's V100 has 32e9
    bytes."""
    assert DEVICES["a100-80gb"].bf16_flops == 312e12
    assert DEVICES["h100-80gb"].bf16_flops == 989e12
    bandwidths = [
        DEVICES[name].memory_bandwidth for name in ("a100-40gb", "a100-80gb", "h100-80gb")
    ]
    assert bandwidths == [1555e9, 2039e9, 3350e9]
    assert DEVICES["v100-32gb"].memory_bytes == 32 * 10**9
    assert DEVICES["h100-80gb"].memory_bytes == 80 * 10**9


@pytest.mark.parametrize(
    ("name", "device"),
    [
        ("h100", "h100-80gb"),
        ("NVIDIA H100", "h100-80gb"),
        ("a100", "a100-80gb"),
        ("4090", "rtx-4090"),
        ("GeForce RTX 4090", "rtx-4090"),
        ("RTX A6000", "rtx-a6000"),
        ("l40", "l40"),
        ("mi325x", "mi325x"),
    ],
)
def test_devices_are_found_by_the_words_of_their_name(name: str, device: str) -> None:
    assert find_device(name) is DEVICES[device]


def test_a_device_may_be_its_memory_alone() -> None:
    device = find_device("48GB")
    assert (device.name, device.memory_bytes, device.cuda_names) == ("48gb", 48 * 10**9, ())


def test_a_margin_is_a_share_of_what_the_driver_reports() -> None:
    """94 % of which is `memory_bytes`: 6 % are left already."""
    device = DEVICES["h100-80gb"]
    assert device.limit_bytes(0.0) == device.limit_bytes(0.06) == 80 * 10**9
    assert device.limit_bytes(0.53) == pytest.approx(40 * 10**9, rel=1e-6)


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("Llama-3.1-70B-Instruct", "llama-3.1-70b"),
        ("llama-3.3-70b-instruct", "llama-3.1-70b"),
        ("Meta-Llama-3.1-8B", "llama-3.1-8b"),
        ("qwen2.5-72b-instruct", "qwen2.5-72b"),
        ("llama-2-7b-chat", "llama-2-7b"),
    ],
)
def test_variants_have_the_shape_of_their_base(name: str, shape: str) -> None:
    assert find_model(name).config == CATALOGUE[shape]


def test_hints_name_no_unrelated_model() -> None:
    with pytest.raises(ValueError, match="unknown model 'gemma-2-9b'; a model is"):
        find_model("gemma-2-9b")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("h1000-80gb", "did you mean h100-80gb"),
        ("tpu-v4", "known are v100-32gb"),
        ("", "known are v100-32gb"),
    ],
)
def test_unknown_devices(name: str, said: str) -> None:
    with pytest.raises(ValueError) as caught:
        find_device(name)
    assert said in str(caught.value)


def test_a_missing_path_in_a_folder_of_this_machine(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be a hub id, but probably is a run: the folder's content is named."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "first").mkdir(parents=True)
    with pytest.raises(ValueError, match=r"^runs/frist does not exist; runs has first$"):
        find_model("runs/frist", cache, local_files_only=True)
