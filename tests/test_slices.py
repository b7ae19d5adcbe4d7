"""A rank reads exactly the bytes of a folder that it holds, and what many ranks have trained is
written as one ordinary folder, which transformers reads."""

import json
from collections import Counter
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors import safe_open
from torch import Tensor
from transformers import AutoModelForCausalLM

from ranks import Ranks
from shardwise.cli import main
from shardwise.config import ModelConfig
from shardwise.formats.convert import prompt_logits
from shardwise.formats.huggingface.folder_reader import FolderReader
from shardwise.formats.huggingface.hf_config import read_folder_config
from shardwise.formats.model_source import read_config
from shardwise.layout import Layout
from shardwise.parallel.apply import apply, read_weights
from shardwise.parallel.launch import Place
from shardwise.parallel.mesh import Axis, Mesh
from shardwise.train.data.batches import TokenFile, held_out_batches
from shardwise.train.rank import train
from shardwise.train.run import prepare_folder
from shardwise.train.settings import ModelSettings, Run
from shardwise.train.validate import validated_run
from tiny_models import our_weights, tiny_model
from tiny_training import OPTIMIZER, build_data, tiny_settings

CPU = torch.device("cpu")

# -- reading


@dataclass(frozen=True)
class Stored:
    """A stored tensor that counts the bytes that are taken of it."""

    name: str
    tensor: Any
    taken: Counter[str]

    def __getitem__(self, slices: tuple[slice, ...]) -> Tensor:
        part: Tensor = self.tensor[slices]
        self.taken[self.name] += part.nbytes
        return part


class CountingReader(FolderReader):
    """A reader that counts the bytes read of every stored tensor, in `taken`."""

    def __init__(self, path: Path, config: ModelConfig) -> None:
        super().__init__(path, config)
        self.taken = Counter[str]()
        self._slices = {
            name: Stored(name, tensor, self.taken) for name, tensor in self._slices.items()
        }


def mesh_of(layout: Layout, rank: int, config: ModelConfig) -> Mesh:
    """A rank's axes without the other ranks: to read, it needs to ask nobody."""
    axes = {}
    for name in layout.AXES:
        members = layout.ranks(name, layout.coord(rank), config.num_kv_heads)
        axes[name] = Axis(name, members.index(rank), len(members), CPU)
    return Mesh(layout, rank, CPU, axes)


def read_by(path: Path, layout: Layout, rank: int, wanted: dict[str, Tensor]) -> Counter[str]:
    """Return the bytes that `rank` reads of every stored tensor. Asserts that it then holds its
    slices of `wanted`."""
    config = read_config(path)
    program = apply(
        config, mesh_of(layout, rank, config), torch.float32, torch.float32, OPTIMIZER.update
    )
    with closing(CountingReader(path, config)) as reader:
        read_weights(program, reader)
    num_elements = 0
    for spec, box, view in program.store.owned("master"):
        assert torch.equal(view, wanted[spec.name][box.slices].float()), spec.name
        num_elements += view.numel()
    assert num_elements > 0
    return reader.taken


def saved(
    path: Path, name: str, dtype: torch.dtype = torch.float32, **changes: Any
) -> dict[str, Tensor]:
    """Write a model of transformers in many files; returns its weights under our names."""
    model = tiny_model(name, dtype, **changes)
    model.save_pretrained(path, max_shard_size="40KB")
    assert len(list(path.glob("*.safetensors"))) > 3
    return our_weights(model)


def sizes_in(path: Path) -> dict[str, int]:
    """Bytes of every tensor in the files of a folder."""
    found: dict[str, int] = {}
    for file in path.glob("*.safetensors"):
        with safe_open(file, "pt") as opened:
            found |= {key: opened.get_tensor(key).nbytes for key in opened.keys()}  # noqa: SIM118
    return found


def num_holders(name: str, config: ModelConfig, layout: Layout) -> int:
    """Return how many tensor ranks hold an element of a stored tensor: all for norms, positions and
    biases after a sum; for k and v those that share a head; otherwise one."""
    if "norm" in name or "ln_" in name or "wpe" in name:
        return layout.tp
    if name.endswith(("o_proj.bias", "down_proj.bias", "c_proj.bias")):
        return layout.tp
    return layout.kv_replicas(config.num_kv_heads) if "k_proj" in name or "v_proj" in name else 1


MODELS: list[tuple[str, torch.dtype, dict[str, Any]]] = [
    ("llama", torch.float32, {}),
    ("llama-tied", torch.bfloat16, {}),
    ("llama-biases", torch.float32, {"num_key_value_heads": 1}),
    ("qwen2", torch.bfloat16, {"intermediate_size": 50}),
    ("qwen3", torch.float32, {}),
    ("gpt2", torch.float32, {}),
]


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize(("name", "dtype", "changes"), MODELS, ids=[name for name, _, _ in MODELS])
def test_tensor_ranks_read_one_model_together(
    tmp_path: Path, name: str, dtype: torch.dtype, changes: dict[str, Any], tp: int
) -> None:
    """Each stored element once a rank that holds it, to the byte, cut by rows or by columns; so
    each rank 1 / tp of the matrices, but for what does not divide (101 ids, an ffn of 50: 4%
    here)."""
    weights = saved(tmp_path, name, dtype, **changes)
    layout = Layout(tp=tp)
    config = read_config(tmp_path)
    sizes = sizes_in(tmp_path)
    taken = [read_by(tmp_path, layout, rank, weights) for rank in range(tp)]
    for stored, size in sizes.items():
        holders = num_holders(stored, config, layout)
        assert sum(local[stored] for local in taken) == size * holders, stored
        assert max(local[stored] for local in taken) <= 1.04 * size * holders / tp, stored
    replicated = sum(
        size * (num_holders(stored, config, layout) - 1) for stored, size in sizes.items()
    )
    assert sum(local.total() for local in taken) == sum(sizes.values()) + replicated


@pytest.mark.parametrize(
    "short", ["dp2.tp2", "dp2.tp2.z1", "dp2.tp2.z3", "cp2", "cp2.z3", "tp2.cp2.z2.s2", "dp3.z3"]
)
@pytest.mark.parametrize("name", ["qwen3", "gpt2"])
def test_data_ranks_read_what_they_own(tmp_path: Path, name: str, short: str) -> None:
    """Without ZeRO each reads what it computes with. With it each reads its shard alone, so that
    they read one model together; where a shard ends within a head, both sides read that head: 5%
    here, of a model of two blocks."""
    weights = saved(tmp_path, name)
    layout = Layout.parse(short)
    config = read_config(tmp_path)
    sizes = sizes_in(tmp_path)
    once = sum(size * num_holders(stored, config, layout) for stored, size in sizes.items())
    copies = layout.data_size // layout.shard_size
    taken = [read_by(tmp_path, layout, rank, weights).total() for rank in range(layout.world_size)]
    assert copies * once <= sum(taken) <= (1.0 if layout.shard == "none" else 1.05) * copies * once
    assert max(taken) <= 1.05 * sum(taken) / len(taken)


# -- writing


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_data(tmp_path_factory.mktemp("data"))


def train_on(rank: int, world: int, run: Run) -> None:
    train(Place(rank, world, CPU), run, 0)


@torch.no_grad()
def their_loss(path: Path, data: Path, num_sequences: int) -> float:
    """The mean loss that transformers finds over held-out sequences."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    summed = 0.0
    num_targets = 0
    for batch in held_out_batches(
        TokenFile(data, "held_out"), 16, num_sequences, 0, 1, num_sequences
    ):
        (each,) = batch.microbatches
        logits = model(each.tokens).logits
        summed += F.cross_entropy(
            logits.flatten(0, 1), each.targets.flatten(), reduction="sum"
        ).item()
        num_targets += batch.num_targets
    return summed / num_targets


@torch.no_grad()
def their_logits(path: Path) -> Tensor:
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    tokens = torch.randint(
        model.config.vocab_size, (1, 32), generator=torch.Generator().manual_seed(0)
    )
    return model(tokens).logits


def shapes_in(path: Path) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for file in path.glob("*.safetensors"):
        with safe_open(file, "pt") as opened:
            found |= {key: opened.get_slice(key).get_shape() for key in opened.keys()}  # noqa: SIM118
    return found


@pytest.mark.parametrize(
    ("layout", "name", "changes"),
    [
        ("tp2.sp", "qwen3", {}),
        ("dp2.tp2.z3", "gpt2", {}),
        ("tp4.z1", "llama-biases", {"num_key_value_heads": 1, "intermediate_size": 50}),
        ("tp2.cp2.sp.rc-full", "qwen2", {}),
    ],
)
def test_what_ranks_trained_is_one_ordinary_folder(
    ranks: Ranks, data: Path, tmp_path: Path, layout: str, name: str, changes: dict[str, Any]
) -> None:
    """From a folder in many files, by way of a run, to a folder: the tensors that transformers
    saves, in its shapes, without padding of the 263 ids; with it transformers finds the held-out
    loss that the ranks found together after two steps, within 1e-5, and the logits that we find,
    within 1e-5 of the largest."""
    source = tmp_path / "source"
    run_path = tmp_path / "run"
    new = tmp_path / "new"
    saved(source, name, vocab_size=263, **changes)
    settings = tiny_settings(
        data, run_path, layout=layout, steps=2, eval_every=2, eval_sequences=6, warmup_steps=0
    )
    run = validated_run(replace(settings, model=ModelSettings(name=str(source), weights="given")))
    assert run.weights == source
    prepare_folder(run, False, print)
    ranks.run(Layout.parse(layout).world_size, train_on, run)
    assert main(["convert", str(run_path), str(new)]) == 0

    assert {path.name for path in new.iterdir()} >= {
        "config.json",
        "model.safetensors",
        "tokenizer.json",
    }
    assert shapes_in(new) == shapes_in(source)
    config = read_folder_config(new)
    assert config == read_folder_config(source)
    logits = prompt_logits(run_path, config, torch.float32)
    theirs = their_logits(new)
    assert (logits - theirs).abs().max() <= 1e-5 * theirs.abs().max()
    assert (theirs - their_logits(source)).abs().max() > 1e-2 * theirs.abs().max(), "it has learned"
    lines = [json.loads(line) for line in (run_path / "metrics.jsonl").read_text().splitlines()]
    (held_out,) = [
        line["held_out_loss"] for line in lines if "held_out_loss" in line and line["step"] == 2
    ]
    assert their_loss(new, data, 6) == pytest.approx(held_out, rel=1e-5)
