"""Quantized folders and blocks, written bit by bit from the public descriptions of their formats:
words are built from Python integers, and the weights that they mean are computed separately."""

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from shardwise.quant.ggml import BLOCKS

FP8 = torch.float8_e4m3fn
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
Tensors = dict[str, Tensor]
HALVES = {
    "Q4_1": (0, 2),
    "Q5_1": (0, 2),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
}
"""Where the fp16 numbers of a block lie; in the others at 0."""


def words(codes: Sequence[int], bits: int) -> list[int]:
    """int32 words filled from the lowest bit, the last of them perhaps in part."""
    number = sum(code << bits * at for at, code in enumerate(codes))
    count = -(-len(codes) * bits // 32)
    unsigned = [number >> 32 * at & 0xFFFFFFFF for at in range(count)]
    return [word - (word >> 31 << 32) for word in unsigned]


def packed(codes: Tensor, bits: int) -> Tensor:
    """[N, K] codes -> [N, words of a row]."""
    return torch.tensor([words(row, bits) for row in codes.tolist()], dtype=torch.int32)


def awq_packed(codes: Tensor) -> Tensor:
    """[.., N] codes -> [.., N / 8] words, the eight of a word dealt out as AWQ does."""
    order = [8 * word + at for word in range(codes.shape[1] // 8) for at in AWQ_ORDER]
    return packed(codes[:, order], 4)


@dataclass
class Drawn:
    """A matrix [N, K] of drawn codes: unsigned ones of `bits`, zero points, scales, and the weights
    that they mean."""

    codes: Tensor
    scales: Tensor
    zeros: Tensor
    group: int

    @property
    def weight(self) -> Tensor:
        codes = self.codes.double()
        zeros = self.zeros.double().repeat_interleave(self.group, 1)
        return ((codes - zeros) * self.scales.double().repeat_interleave(self.group, 1)).float()


def draw(
    shape: tuple[int, int],
    bits: int,
    group: int | None,
    symmetric: bool,
    random: torch.Generator,
    dtype: torch.dtype,
) -> Drawn:
    num_rows, num_columns = shape
    levels = 1 << bits
    size = group or num_columns
    groups = (num_rows, num_columns // size)
    codes = torch.randint(levels, shape, generator=random)
    zeros = (
        torch.full(groups, levels // 2)
        if symmetric
        else torch.randint(levels, groups, generator=random)
    )
    scales = ((0.5 + torch.rand(groups, generator=random)) * 0.2 / levels).to(dtype)
    return Drawn(codes, scales, zeros, size)


@dataclass
class Writer:
    """Writes a matrix of a shape as the tensors that its format has, and says what plain matrix
    they are."""

    config: dict[str, Any]
    write: Callable[[tuple[int, int], torch.Generator], tuple[Tensors, Tensor]]


def gptq(
    bits: int,
    group: int | None,
    symmetric: bool,
    version: int = 1,
    g_idx: bool = True,
    named_version: int | None = None,
) -> Writer:
    def write(shape: tuple[int, int], random: torch.Generator) -> tuple[Tensors, Tensor]:
        drawn = draw(shape, bits, group, symmetric, random, torch.float16)
        stored_zeros = (drawn.zeros - int(version == 1)) % (1 << bits)
        tensors = {
            "qweight": packed(drawn.codes, bits).t().contiguous(),
            "qzeros": packed(stored_zeros.t(), bits),
            "scales": drawn.scales.t().contiguous(),
        }
        if g_idx:
            tensors["g_idx"] = (torch.arange(shape[1]) // drawn.group).to(torch.int32)
        return tensors, drawn.weight

    config = {
        "quant_method": "gptq",
        "bits": bits,
        "group_size": group or -1,
        "desc_act": False,
        "sym": symmetric,
        "checkpoint_format": "gptq" if (named_version or version) == 1 else "gptq_v2",
    }
    return Writer(config, write)


def awq(group: int) -> Writer:
    def write(shape: tuple[int, int], random: torch.Generator) -> tuple[Tensors, Tensor]:
        drawn = draw(shape, 4, group, False, random, torch.float16)
        return {
            "qweight": awq_packed(drawn.codes.t()),
            "qzeros": awq_packed(drawn.zeros.t()),
            "scales": drawn.scales.t().contiguous(),
        }, drawn.weight

    config = {
        "quant_method": "awq",
        "bits": 4,
        "group_size": group,
        "zero_point": True,
        "version": "gemm",
    }
    return Writer(config, write)


def compressed(
    bits: int, group: int | None, symmetric: bool, dtype: torch.dtype = torch.bfloat16
) -> Writer:
    """pack-quantized: codes and zero points as unsigned ones, as signed ones are with half the
    range added."""

    def write(shape: tuple[int, int], random: torch.Generator) -> tuple[Tensors, Tensor]:
        drawn = draw(shape, bits, group, symmetric, random, dtype)
        tensors = {
            "weight_packed": packed(drawn.codes, bits),
            "weight_scale": drawn.scales,
            "weight_shape": torch.tensor(shape),
        }
        if not symmetric:
            tensors["weight_zero_point"] = packed(drawn.zeros.t(), bits).t().contiguous()
        return tensors, drawn.weight

    return Writer(compressed_config("pack-quantized", bits, group, symmetric), write)


def compressed_int8(symmetric: bool) -> Writer:
    def write(shape: tuple[int, int], random: torch.Generator) -> tuple[Tensors, Tensor]:
        drawn = draw(shape, 8, None, symmetric, random, torch.bfloat16)
        tensors = {"weight": (drawn.codes - 128).to(torch.int8), "weight_scale": drawn.scales}
        if not symmetric:
            tensors["weight_zero_point"] = (drawn.zeros - 128).to(torch.int8)
        return tensors, drawn.weight

    return Writer(compressed_config("int-quantized", 8, None, symmetric), write)


def compressed_config(
    form: str, bits: int, group: int | None, symmetric: bool, kind: str = "int"
) -> dict[str, Any]:
    weights = {
        "num_bits": bits,
        "type": kind,
        "symmetric": symmetric,
        "strategy": "group" if group else "channel",
        "group_size": group,
        "dynamic": False,
        "actorder": None,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {
            "group_0": {"targets": ["Linear"], "weights": weights, "input_activations": None}
        },
    }


def fp8(rows: int | None, columns: int | None, method: str = "fp8") -> Writer:
    """A scale for each block of rows and columns; without, one for the matrix (fp8) or a row
    (compressed-tensors)."""

    def write(shape: tuple[int, int], random: torch.Generator) -> tuple[Tensors, Tensor]:
        num_rows, num_columns = shape
        per = (
            (num_rows if method == "fp8" else 1, num_columns)
            if rows is None or columns is None
            else (rows, columns)
        )
        grid = (-(-num_rows // per[0]), num_columns // per[1])
        codes = torch.randn(shape, generator=random).mul_(100).to(FP8)
        scales = (0.5 + torch.rand(grid, generator=random)) * 1e-3
        whole = scales.repeat_interleave(per[0], 0)[:num_rows].repeat_interleave(per[1], 1)
        if method == "fp8" and rows is not None:
            return {"weight": codes, "weight_scale_inv": scales}, codes.float() * whole
        stored = scales[0] if method == "fp8" else scales
        return {
            "weight": codes,
            "weight_scale": stored,
            "input_scale": torch.ones(1),
        }, codes.float() * whole

    if method == "fp8":
        block = [rows, columns] if rows is not None else None
        return Writer(
            {"quant_method": "fp8", "weight_block_size": block, "activation_scheme": "dynamic"},
            write,
        )
    config = compressed_config("float-quantized", 8, None, True, "float")
    if rows is not None:
        config["config_groups"]["group_0"]["weights"] |= {
            "strategy": "block",
            "block_structure": [rows, columns],
        }
    return Writer(config, write)


WRITERS = {
    "gptq-4": gptq(4, 32, False), "gptq-4-sym": gptq(4, 16, True),
    "gptq-4-v2": gptq(4, 32, False, version=2),
    "gptq-8": gptq(8, 32, False), "gptq-8-sym-row": gptq(8, None, True, g_idx=False),
    "gptq-3": gptq(3, 32, False),
    "gptq-3-sym": gptq(3, 32, True),
    "gptq-4-sym-v2-as-v1": gptq(4, 32, True, version=2, named_version=1),
    "gptq-8-sym-v2-as-v1": gptq(8, None, True, version=2, named_version=1),
    "awq": awq(32), "awq-16": awq(16),
    "packed-4": compressed(4, 32, True),
    "packed-4-zero": compressed(4, 16, False),
    "packed-4-row": compressed(4, None, True, torch.float32),
    "packed-8": compressed(8, 32, True), "packed-8-zero": compressed(8, None, False),
    "packed-3": compressed(3, 32, True), "int8": compressed_int8(True),
    "int8-zero": compressed_int8(False),
    "fp8-row": fp8(None, None, "compressed-tensors"),
    "fp8-compressed-block": fp8(24, 32, "compressed-tensors"), "fp8-block": fp8(24, 32),
    "fp8-matrix": fp8(None, None),
}  # fmt: skip


def quantize_folder(
    source: Path, target: Path, writer: Writer, keep: Callable[[str], bool] = lambda stem: False
) -> Tensors:
    """A copy of a plain folder with the linears of its blocks written anew; the plain tensors that
    they mean. `keep` says which stay plain."""
    shutil.copytree(source, target)
    random = torch.Generator().manual_seed(1)
    stored = {}
    meant = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        stem = name.removesuffix(".weight")
        meant[name] = tensor
        if "_proj" in name and tensor.dim() == 2 and not keep(stem):
            tensors, meant[name] = writer.write((tensor.shape[0], tensor.shape[1]), random)
            stored |= {f"{stem}.{suffix}": each for suffix, each in tensors.items()}
        else:
            stored[name] = tensor
    save_file(stored, target / "model.safetensors")
    set_config(target, quantization_config=writer.config)
    return meant


def set_config(folder: Path, **changes: object) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))


def edit_tensors(folder: Path, edit: Callable[[Tensors], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors")


def drawn_blocks(kind: str, num_rows: int, num_columns: int, seed: int = 0) -> Tensor:
    """The bytes of a matrix of any codes at all, with scales that are numbers."""
    block = BLOCKS[kind]
    random = torch.Generator().manual_seed(seed)
    raw = torch.randint(
        256, (num_rows * num_columns // block.num_elements, block.num_bytes), generator=random
    )
    raw = raw.to(torch.uint8)
    for at in HALVES.get(kind, (0,)):
        scales = 0.01 * torch.randn(len(raw), generator=random)
        if kind == "Q8_K":
            raw[:, :4] = scales[:, None].view(torch.uint8)
        else:
            raw[:, at : at + 2] = scales.half()[:, None].view(torch.uint8)
    return raw.reshape(num_rows, -1)
