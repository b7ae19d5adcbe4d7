"""Products with weights of integers in Triton: y = x w^T, where w stays in 8 or 4 bits and x is as
the model computes.

Codes are exact in bf16, and so are they less zero points. So tensor cores are given the codes, made
plain in registers a block of columns at a time, sums are fp32, and scales come after them; nothing
is rounded but the result:

    y = sum over blocks of  s (q . x),   of  s ((q - z) . x),   or of  s (q . x) + m sum(x)

A block lies within a group, so it has one scale. Where a row has one scale, the sum is scaled at
its end.

Codes are put in another order once, in as many bytes: tile by tile of 64 outputs and a block, so
that what a program reads lies in one piece and in the order in which it is read. Of 4 bits, a byte
has a column of the first half of its block in its low bits and the same of the second half in its
high ones, so that both halves are whole pieces of x too.

Columns are cut into parts, by the shape of the weight alone; each has a sum of its own, and parts
are added from the first to the last. Whether one program adds them up, or many make them and
another kernel adds, changes no bit. So has a row the same bits in any company, at the numbers of
rows of a tile that were found to agree (`agreeing_rows`).

Shapes: M rows, K in, N out; G groups of a row.
"""

from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from shardwise.kernels.reference.batch_invariant import (
    Head,
    RowWeight,
    drawn,
    flat_rows,
    head_of,
    row_weights,
)
from shardwise.kernels.triton.attention import INTERPRETED, num_multiprocessors
from shardwise.quant.format import STRIP_ELEMENTS, QuantizedMatrix, unpack
from shardwise.quant.weight import QuantizedTable, QuantizedWeight

OUTPUTS = 64
"""Outputs of a program, and of a tile of codes: what four warps of tensor cores take at once."""
BLOCKS = (128, 64, 32)
"""Columns of a block: as many as divide a group, or a row that has one scale, and as fit into
registers when they are made plain: the first of 4 bits without minima alone."""
AHEAD_BYTES = 1 << 14
"""Of codes that a program has on their way when it has few rows, so that memory has always
something to do."""
ROW_TILES = (16, 64, 128)
"""Rows that a program works on: few for single tokens, many for prompts, so that codes are made
plain less often."""
PART_COLUMNS = 256
"""The fewest that a part has."""
PROGRAMS_PER_MULTIPROCESSOR = 4
CHUNK = 8
"""Blocks that a small program works on."""
COLUMNS = 256
"""Outputs that a program adds the parts of."""
SCALES = (torch.bfloat16, torch.float16, torch.float32)

Kind = Literal["none", "points", "minima"]
"""Of what stands beside the scales."""
Found = dict[tuple[object, ...], tuple[int, ...]]
"""The numbers of rows that agree, by all that a kernel is compiled for."""


@triton.jit
def centred(codes, point_at, KIND: tl.constexpr, MIDDLE: tl.constexpr):
    """Codes as they are multiplied, in fp32: less their zero points, or what symmetric ones are
    moved up by."""
    made = codes.to(tl.float32)
    if KIND == "points":
        made -= tl.load(point_at).to(tl.float32)
    elif MIDDLE:
        made -= MIDDLE
    return made


@triton.jit(do_not_specialize=["num_rows"])
def product_kernel(
    x,
    codes,
    scales,
    offsets,
    sums,
    y,
    part_sums,
    padded_out,
    num_blocks,
    group_blocks,
    x_row,
    num_rows,
    num_in,
    num_out,
    part_blocks,
    num_parts,
    KIND: tl.constexpr,
    BITS: tl.constexpr,
    MIDDLE: tl.constexpr,
    GROUPED: tl.constexpr,
    WHOLE: tl.constexpr,
    OUTPUTS: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    SPLIT: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Program (tile of outputs, tile of rows, part): with SPLIT one part, written into part_sums
    [parts, M, N]; else all of them, added up. What it makes is y^T, so that few rows are no fewer
    than tensor cores take. The interpreter has no bf16; it is given the same numbers in fp32
    (WIDE)."""
    tile = tl.program_id(0).to(tl.int64)
    output = tl.arange(0, OUTPUTS)
    byte = tl.arange(0, WIDTH)
    row = tl.program_id(1).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    is_row = row < num_rows
    codes_at = codes + tile * num_blocks * (OUTPUTS * WIDTH) + output[:, None] * WIDTH + byte
    x_at = x + row * x_row + byte[:, None]
    column = tile * OUTPUTS + output
    is_there = is_row & (column < num_out)[:, None]
    total = tl.zeros((OUTPUTS, ROWS), tl.float32)
    for part in range(tl.program_id(2), num_parts, tl.num_programs(2)):
        made = tl.zeros((OUTPUTS, ROWS), tl.float32)
        for block in range(part * part_blocks, tl.minimum((part + 1) * part_blocks, num_blocks)):
            beside = (block // group_blocks * padded_out + column)[:, None]
            stored = tl.load(codes_at + block * (OUTPUTS * WIDTH))
            block_sums = tl.zeros((OUTPUTS, ROWS), tl.float32) if GROUPED else made
            for half in tl.static_range(8 // BITS):
                first = block * BLOCK + half * WIDTH
                mask = (
                    is_row[None, :] if WHOLE else is_row[None, :] & (first + byte < num_in)[:, None]
                )
                piece = tl.load(x_at + first, mask=mask, other=0.0)
                plain = centred(
                    (stored >> 4 * half) & 15 if BITS == 4 else stored,
                    offsets + beside,
                    KIND,
                    MIDDLE,
                )
                if WIDE:
                    piece = piece.to(tl.float32)
                else:
                    plain = plain.to(piece.dtype)
                block_sums = tl.dot(plain, piece, block_sums, input_precision="ieee")
            if GROUPED:
                made += block_sums * tl.load(scales + beside).to(tl.float32)
                if KIND == "minima":
                    row_sum = tl.load(sums + row * num_blocks + block, mask=is_row, other=0.0)
                    made += tl.load(offsets + beside).to(tl.float32) * row_sum
            else:
                made = block_sums
        if not GROUPED:
            made *= tl.load(scales + column).to(tl.float32)[:, None]
        if SPLIT:
            tl.store(
                part_sums + (part * num_rows + row) * num_out + column[:, None], made, mask=is_there
            )
        else:
            total += made
    if not SPLIT:
        tl.store(y + row * num_out + column[:, None], total, mask=is_there)


@triton.jit(do_not_specialize=["num_rows"])
def add_parts_kernel(part_sums, y, num_rows, num_out, num_parts, COLUMNS: tl.constexpr):
    """Program (row, columns): the sums of all parts [parts, M, N], added up from the first to the
    last."""
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < num_out
    place = tl.program_id(0).to(tl.int64) * num_out + column
    total = tl.zeros((COLUMNS,), tl.float32)
    for _ in range(0, num_parts):
        total += tl.load(part_sums + place, mask=inside, other=0.0)
        part_sums += num_rows.to(tl.int64) * num_out
    tl.store(y + place, total, mask=inside)


@triton.jit
def block_sums_kernel(x, sums, x_row, num_in, num_blocks, BLOCK: tl.constexpr, CHUNK: tl.constexpr):
    """Program (row, chunk of blocks): the sum of x over each block."""
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    column = block[:, None] * BLOCK + tl.arange(0, BLOCK)
    wide = tl.load(x + row * x_row + column, mask=column < num_in, other=0.0).to(tl.float32)
    tl.store(sums + row * num_blocks + block, tl.sum(wide, 1), mask=block < num_blocks)


@triton.jit
def look_up_kernel(
    ids,
    codes,
    scales,
    offsets,
    y,
    padded_out,
    num_blocks,
    group_blocks,
    num_in,
    KIND: tl.constexpr,
    BITS: tl.constexpr,
    MIDDLE: tl.constexpr,
    OUTPUTS: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDTH: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Program (id, chunk of blocks): a row of the weight as plain numbers, as `format.dequantize_codes`
    has them."""
    place = tl.program_id(0).to(tl.int64)
    id = tl.load(ids + tl.program_id(0)).to(tl.int64)
    block = (tl.program_id(1) * CHUNK + tl.arange(0, CHUNK))[:, None]
    is_block = block < num_blocks
    byte = tl.arange(0, WIDTH)
    line = (id // OUTPUTS * num_blocks + block) * OUTPUTS + id % OUTPUTS
    stored = tl.load(codes + line * WIDTH + byte, mask=is_block, other=0)
    beside = tl.where(is_block, block // group_blocks * padded_out, 0) + id
    for half in tl.static_range(8 // BITS):
        plain = centred(
            (stored >> 4 * half) & 15 if BITS == 4 else stored, offsets + beside, KIND, MIDDLE
        )
        plain *= tl.load(scales + beside).to(tl.float32)
        if KIND == "minima":
            plain += tl.load(offsets + beside).to(tl.float32)
        column = block * BLOCK + half * WIDTH + byte
        tl.store(y + place * num_in + column, plain, mask=is_block & (column < num_in))


@dataclass(frozen=True)
class Packed:
    """A weight [N, K] as the kernels read it. codes [tiles, blocks, OUTPUTS, bytes of a block];
    scales, and zero points or minima, [G, N filled up to whole tiles]. Where N or K fill no tile or
    block, codes are zeros."""

    shape: tuple[int, int]
    bits: int
    middle: int
    block: int
    group: int | None
    codes: Tensor
    scales: Tensor
    offsets: Tensor | None

    @property
    def kind(self) -> Kind:
        if self.offsets is None:
            return "none"
        return "points" if self.offsets.dtype == torch.uint8 else "minima"

    @property
    def num_blocks(self) -> int:
        return self.codes.shape[1]

    @property
    def group_blocks(self) -> int:
        return self.num_blocks if self.group is None else self.group // self.block

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        """As kernels take them; what is not there they do not read."""
        return self.codes, self.scales, self.scales if self.offsets is None else self.offsets

    @property
    def counts(self) -> tuple[int, int, int]:
        """Outputs filled up, blocks, and blocks of a group."""
        return len(self.codes) * OUTPUTS, self.num_blocks, self.group_blocks

    @property
    def constants(self) -> dict[str, Any]:
        """What kernels are compiled for."""
        return {
            "KIND": self.kind,
            "BITS": self.bits,
            "MIDDLE": self.middle,
            "OUTPUTS": OUTPUTS,
            "BLOCK": self.block,
            "WIDTH": self.codes.shape[3],
            "enable_fp_fusion": False,
        }

    @property
    def form(self) -> tuple[object, ...]:
        """What weights that have the same kernels have in common."""
        return (
            self.shape,
            self.bits,
            self.middle,
            self.block,
            self.group,
            self.kind,
            self.scales.dtype,
        )

    def first_tile(self) -> "Packed":
        """Of the first outputs alone."""
        scales = self.scales[:, :OUTPUTS].contiguous()
        offsets = self.offsets
        offsets = None if offsets is None else offsets[:, :OUTPUTS].contiguous()
        return replace(
            self,
            shape=(OUTPUTS, self.shape[1]),
            codes=self.codes[:1],
            scales=scales,
            offsets=offsets,
        )


def pack(held: QuantizedMatrix) -> Packed:
    """The same codes in the order of the kernels. Only a strip of them is unpacked at a time."""
    num_out, num_in = held.shape
    scheme = held.scheme
    unit = scheme.group or num_in
    fitting = (
        BLOCKS[1:]
        if scheme.bits == 8 or (held.zeros is not None and held.zeros.is_floating_point())
        else BLOCKS
    )
    block = next((each for each in fitting if unit % each == 0), BLOCKS[-1])
    num_tiles = triton.cdiv(num_out, OUTPUTS)
    num_blocks = triton.cdiv(num_in, block)
    shape = num_tiles, num_blocks, OUTPUTS, block * scheme.bits // 8
    codes = torch.empty(shape, dtype=held.codes.dtype, device=held.codes.device)
    step = max(1, STRIP_ELEMENTS // (OUTPUTS * num_in))
    for start in range(0, num_tiles, step):
        rows = unpack(held.codes[start * OUTPUTS : (start + step) * OUTPUTS], scheme.bits)
        filled = F.pad(rows, (0, num_blocks * block - rows.shape[1], 0, -len(rows) % OUTPUTS))
        tiles = filled.view(-1, OUTPUTS, num_blocks, block)
        if scheme.bits == 4:
            low, high = tiles.unflatten(-1, (2, -1)).unbind(-2)
            tiles = low | high << 4
        codes[start : start + step] = tiles.transpose(1, 2)
    offsets = None if held.zeros is None else filled_up(held.zeros)
    return Packed(
        held.shape,
        scheme.bits,
        scheme.implicit_zero,
        block,
        scheme.group,
        codes,
        filled_up(held.scales),
        offsets,
    )


def filled_up(beside: Tensor) -> Tensor:
    """[N, G] -> [G, N of whole tiles]."""
    return F.pad(beside.t(), (0, -len(beside) % OUTPUTS)).contiguous()


def product(
    x: Tensor, packed: Packed, num_rows: int, part_blocks: int, split: bool, dtype: torch.dtype
) -> Tensor:
    """x [M, K] -> [M, N] in `dtype`, in tiles of so many rows and parts of so many blocks."""
    num_out, num_in = packed.shape
    num_blocks = packed.num_blocks
    assert x.stride(1) == 1, "columns lie side by side"
    y = torch.empty(len(x), num_out, dtype=dtype, device=x.device)
    num_parts = triton.cdiv(num_blocks, part_blocks)
    kind = packed.kind
    sums = x.new_empty((len(x), num_blocks) if kind == "minima" else (0, 0), dtype=torch.float32)
    if kind == "minima":
        grid = len(x), triton.cdiv(num_blocks, CHUNK)
        block_sums_kernel[grid](
            x, sums, x.stride(0), num_in, num_blocks, BLOCK=packed.block, CHUNK=CHUNK, num_warps=4
        )
    part_sums = x.new_empty((num_parts, *y.shape) if split else (0, 0, 0), dtype=torch.float32)
    stages = min(8, AHEAD_BYTES // packed.codes[0, 0].nbytes)
    product_kernel[len(packed.codes), triton.cdiv(len(x), num_rows), num_parts if split else 1](
        x,
        *packed.tensors,
        sums,
        y,
        part_sums,
        *packed.counts,
        x.stride(0),
        len(x),
        num_in,
        num_out,
        part_blocks,
        num_parts,
        GROUPED=packed.group is not None or kind == "minima",
        WHOLE=num_in % packed.block == 0,
        ROWS=num_rows,
        SPLIT=split,
        WIDE=INTERPRETED,
        **packed.constants,
        num_warps=4 if num_rows == ROW_TILES[0] else 8,
        num_stages=stages if num_rows == ROW_TILES[0] else 2,
    )
    if split:
        columns = len(x), triton.cdiv(num_out, COLUMNS)
        add_parts_kernel[columns](
            part_sums, y, len(x), num_out, num_parts, COLUMNS=COLUMNS, num_warps=4
        )
    return y


@dataclass(frozen=True)
class TritonQuantized:
    """A weight [N, K] of integers for `model.layers.linear`. `sizes` are numbers of rows of a tile
    that agree. `dtype` is the model's; with `wide` products are fp32."""

    packed: Packed
    sizes: tuple[int, ...]
    part_blocks: int
    wanted_programs: int
    dtype: torch.dtype
    wide: bool = False

    @classmethod
    def of(
        cls, held: QuantizedMatrix, dtype: torch.dtype, found: Found, wide: bool = False
    ) -> "TritonQuantized":
        packed = pack(held)
        wanted = PROGRAMS_PER_MULTIPROCESSOR * num_multiprocessors(held.codes.device)
        part_blocks = blocks_of_parts(packed, wanted)
        key = packed.form, part_blocks, dtype
        if key not in found:
            found[key] = agreeing_rows(packed.first_tile(), part_blocks, dtype)
        return cls(packed, found[key], part_blocks, wanted, dtype, wide)

    def apply(self, x: Tensor) -> Tensor:
        """x [..., K] -> [..., N]."""
        rows = flat_rows(x)
        rows = rows if rows.stride(1) == 1 else rows.contiguous()
        size = next((size for size in self.sizes if len(rows) <= size), self.sizes[-1])
        num_programs = len(self.packed.codes) * triton.cdiv(len(rows), size)
        split = self.part_blocks < self.packed.num_blocks and num_programs < self.wanted_programs
        y = product(
            rows,
            self.packed,
            size,
            self.part_blocks,
            split,
            torch.float32 if self.wide else x.dtype,
        )
        return y.view(*x.shape[:-1], y.shape[1])

    def look_up(self, ids: Tensor) -> Tensor:
        """Rows [..., K] of the weight as plain numbers."""
        packed = self.packed
        num_in = self.packed.shape[1]
        ids, y = (
            ids.contiguous(),
            torch.empty(*ids.shape, num_in, dtype=self.dtype, device=ids.device),
        )
        look_up_kernel[ids.numel(), triton.cdiv(packed.num_blocks, CHUNK)](
            ids,
            *packed.tensors,
            y,
            *packed.counts,
            num_in,
            CHUNK=CHUNK,
            **packed.constants,
            num_warps=4,
        )
        return y


def blocks_of_parts(packed: Packed, wanted_programs: int) -> int:
    """Blocks of a part, so that parts give that many programs something to do and are not too
    short: a fact of the weight, however many rows it is multiplied with."""
    num_parts = max(
        1, min(packed.shape[1] // PART_COLUMNS, triton.cdiv(wanted_programs, len(packed.codes)))
    )
    return triton.cdiv(packed.num_blocks, num_parts)


def agreeing_rows(packed: Packed, part_blocks: int, dtype: torch.dtype) -> tuple[int, ...]:
    """The numbers of rows of a tile whose rows have the same bits as in the smallest, found by
    trying, in fp32, since rounding hides much. Raises RuntimeError if the smallest itself depends
    on how its parts are shared out."""
    x = drawn(ROW_TILES[-1], packed.shape[1], packed.codes.new_empty(0, dtype=dtype))
    least, *larger = ROW_TILES

    ways = (False, True) if part_blocks < packed.num_blocks else (False,)

    def found(num_rows: int, split: bool) -> Tensor:
        return product(x, packed, num_rows, part_blocks, split, torch.float32)

    def agrees(num_rows: int) -> bool:
        return all(torch.equal(found(num_rows, split), wanted) for split in ways)

    wanted = found(least, False)
    if not agrees(least):
        raise RuntimeError("a product in Triton has other bits where parts are shared out")
    return least, *filter(agrees, larger)


def integers_of(weight: Tensor | QuantizedWeight) -> QuantizedMatrix | None:
    """What a weight is held as, if that has a product here: integers of 8 or 4 bits, whose groups
    are of whole blocks. Of what a rank may hold nothing there is none."""
    held = weight.integers(BLOCKS[-1]) if isinstance(weight, QuantizedWeight) else None
    if held is None or not all(held.shape):
        return None
    known = held.zeros is None or held.zeros.dtype in (torch.uint8, *SCALES)
    return held if known and held.scales.dtype in SCALES else None


Ready = Tensor | RowWeight | QuantizedTable | TritonQuantized


def pack_weights(weights: dict[str, Tensor | QuantizedWeight]) -> dict[str, Ready]:
    """The weights of a model with the integers of its blocks packed. They are taken out of
    `weights` one after the other, so that little is there twice. The others have torch's products
    (`rows.py`), an embedding is looked up."""
    dtype = next(each.dtype for each in weights.values() if isinstance(each, Tensor))
    found: Found = {}
    ready: dict[str, Ready] = {}
    for name in list(weights):
        held = integers_of(weights[name])
        if held is not None and not isinstance(weights[name], QuantizedTable):
            del weights[name]
            ready[name] = TritonQuantized.of(held, dtype, found)
    return {**row_weights(weights), **ready}


def pack_head(
    weight: Tensor | QuantizedWeight, dtype: torch.dtype
) -> tuple[TritonQuantized | Head, TritonQuantized | QuantizedTable | Tensor]:
    """What makes logits, in fp32, of the weight [V, D], and what looks its rows up if it is the
    embedding too: of integers the same, so that it is there once."""
    held = integers_of(weight)
    if held is None:
        return head_of(weight, dtype)
    made = TritonQuantized.of(held, dtype, {}, wide=True)
    return made, made
