"""Tiny models and data for tests of training: a few thousand parameters, sequences of 16 tokens."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shardwise.config import ModelConfig
from shardwise.layout import Layout
from shardwise.model.tokenizer import byte_tokenizer
from shardwise.params import model_specs
from shardwise.train.corpus import build
from shardwise.train.data import Batch, MicroBatch
from shardwise.train.settings import Settings

VOCAB, SEQ_LEN, SEQUENCES = 97, 16, 12

LLAMA = ModelConfig("llama", 2, 32, 40, 4, 2, 8, VOCAB, 32)
FAMILIES = {
    "llama": LLAMA,
    "llama-tied": replace(LLAMA, tied=True),
    "gpt2": ModelConfig(
        "gpt2", 2, 32, 64, 4, 4, 8, VOCAB, 32, tied=True, norm="layer", activation="gelu_tanh", gated=False,
        positions="learned", qkv_bias=True, out_bias=True, mlp_bias=True,
    ),
    "qwen2": replace(LLAMA, family="qwen2", qkv_bias=True),
    "qwen3": replace(LLAMA, family="qwen3", qk_norm=True, tied=True),
    "mistral": replace(LLAMA, family="mistral", sliding_window=5, windowed_layers=frozenset({0, 1})),
}  # fmt: skip


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def tiny_weights(config: ModelConfig) -> dict[str, Tensor]:
    """Every stored parameter drawn, norms and biases too, so that none can be mistaken for another."""
    random = seeded(5)
    return {
        spec.name: (spec.init.kind == "ones") + 0.1 * torch.randn(spec.shape, generator=random)
        for spec in model_specs(config)
        if spec.tied_to is None
    }


def global_batch(step: int) -> tuple[Tensor, Tensor]:
    """Tokens and targets [SEQUENCES, SEQ_LEN] of one step, row by row with ever fewer targets; the last three rows have
    none, so that some rank or micro-batch of a layout may have none at all."""
    random = seeded(100 + step)
    window = torch.randint(VOCAB, (SEQUENCES, SEQ_LEN + 1), generator=random)
    kept = torch.rand(SEQUENCES, SEQ_LEN, generator=random) < torch.linspace(1.0, 0.1, SEQUENCES)[:, None]
    kept[-3:] = False
    return window[:, :-1].contiguous(), torch.where(kept, window[:, 1:], -100)


def part_of(tokens: Tensor, targets: Tensor, layout: Layout, data_rank: int) -> Batch:
    """What one data rank takes of a global batch: ranks side by side, one micro-batch after another."""
    rows = len(tokens) // (layout.microbatches * layout.dp)
    positions = torch.arange(tokens.shape[1]).expand(rows, -1)
    firsts = [(m * layout.dp + data_rank) * rows for m in range(layout.microbatches)]
    cut = [slice(first, first + rows) for first in firsts]
    microbatches = tuple(MicroBatch(tokens[rows], targets[rows], positions, None) for rows in cut)
    return Batch(microbatches, sum(int((each.targets != -100).sum()) for each in microbatches))


TEXT = "the quick brown fox jumps over the lazy dog; pack my box with five dozen liquor jugs. " * 3


def write_source(folder: Path) -> Path:
    """Thirty short documents."""
    source = folder / "source"
    source.mkdir(parents=True)
    for number in range(30):
        (source / f"{number:02d}.txt").write_text(f"{number} {TEXT[number:][: 120 + number]}")
    return source


def build_data(folder: Path) -> Path:
    """The documents as bytes, a tenth of them held out."""
    build(write_source(folder), folder / "data", byte_tokenizer(), held_out=0.1)
    return folder / "data"


def tiny_settings(data: Path, run: Path, **changes: Any) -> Settings:
    """A model of 2 blocks and 9,000 weights in fp32; `changes` are those of any section, by key."""
    values: dict[str, dict[str, Any]] = {
        "model": {
            "name": "1M", "num_layers": 2, "hidden_size": 16, "ffn_size": 24, "num_heads": 2, "num_kv_heads": 1,
            "max_positions": 64,
        },
        "data": {"folder": str(data), "seq_len": 16, "global_batch": 4},
        "optimizer": {"lr": 1e-2, "warmup_steps": 2},
        "run": {
            "folder": str(run), "steps": 6, "precision": "fp32", "eval_every": 3, "eval_sequences": 6, "save_every": 3,
            "keep_checkpoints": 0,
        },
    }  # fmt: skip
    sections = {}
    for section, given in values.items():
        default = getattr(Settings(), section)
        sections[section] = replace(default, **given | {k: v for k, v in changes.items() if hasattr(default, k)})
    assert not changes.keys() - {key for section in sections.values() for key in vars(section)}
    return Settings(**sections)
