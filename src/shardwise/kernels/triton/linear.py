"""Products with quantized weights in Triton: y = x w^T, where w stays in 8 or 4 bits and x has the
model's dtype.

Codes, and codes minus zero points, are exact in bf16. So tensor cores get the codes, decoded in
registers a block of columns at a time; sums are fp32, and scales are applied to the sums. Nothing
is rounded but the result:

    y = sum over blocks of  s (q . x),   s ((q - z) . x),   or  s (q . x) + m sum(x)

A block lies within a group, so it has one scale. Where a row has one scale, its sum is scaled at
the end.

Codes are reordered once, in as many bytes: tile by tile of 64 outputs and a block of columns, so
that a program reads one piece of memory in order. With 4 bits, the low bits of a byte hold a column
of the first half of its block, and the high bits the same column of the second half, so both halves
are contiguous columns of x.

Columns are split into parts, by the shape of the weight alone. Each part has its own sum, and parts
are added from the first to the last: by one program, or by many and a second kernel, with the same
bits. So products are batch-invariant, at the numbers of rows of a tile that agree
(`agreeing_rows`).

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
    flat_rows,
    head_of,
    random_like,
    row_weights,
)
from shardwise.kernels.triton.attention import INTERPRETED, num_multiprocessors
from shardwise.quant.format import STRIP_ELEMENTS, QuantizedMatrix, unpack
from shardwise.quant.weight import QuantizedTable, QuantizedWeight

OUTPUTS = 64
"""Outputs of a program, and of a tile of codes: what four warps of tensor cores compute at once."""
BLOCKS = (128, 64, 32)
"""Columns of a block: the most that divide a group (or a row with one scale) and whose decoded
codes fit into registers. 128 is for 4 bits without minima."""
PREFETCH_BYTES = 1 << 14
"""Bytes of codes that a program of few rows has in flight, to keep memory busy."""
ROW_TILES = (16, 64, 128)
"""Rows of a program: few for decode, many for prefill, which decodes codes less often."""
PART_COLUMNS = 256
"""Fewest columns of a part."""
PROGRAMS_PER_MULTIPROCESSOR = 4
CHUNK = 8
"""Blocks per program of the small kernels."""
COLUMNS = 256
"""Outputs per program of the kernel that adds parts."""
SCALES = (torch.bfloat16, torch.float16, torch.float32)

OffsetKind = Literal["none", "points", "minima"]
"""The offsets next to the scales."""
AgreeingRows = dict[tuple[object, ...], tuple[int, ...]]
"""The numbers of rows that agree, by everything that a kernel is compiled for."""


@triton.jit
def subtract_zero_points(codes, point_at, KIND: tl.constexpr, MIDDLE: tl.constexpr):
    """Return codes in fp32, minus their zero points, or minus the offset of symmetric codes."""
    numbers = codes.to(tl.float32)
    if KIND == "points":
        numbers -= tl.load(point_at).to(tl.float32)
    elif MIDDLE:
        numbers -= MIDDLE
    return numbers


@triton.jit(do_not_specialize=["num_rows"])
def product_kernel(
    x,
    codes,
    scales,
    offsets,
    x_sums,
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
    """Program (tile of outputs, tile of rows, part).

    With SPLIT it computes one part, into part_sums [parts, M, N]; else all parts, added up. It
    computes y^T, so that few rows still fill tensor cores. The interpreter has no bf16; it gets the
    same numbers in fp32 (WIDE).
    """
    tile = tl.program_id(0).to(tl.int64)
    output = tl.arange(0, OUTPUTS)
    byte = tl.arange(0, WIDTH)
    row = tl.program_id(1).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    is_row = row < num_rows
    codes_at = codes + tile * num_blocks * (OUTPUTS * WIDTH) + output[:, None] * WIDTH + byte
    x_at = x + row * x_row + byte[:, None]
    column = tile * OUTPUTS + output
    in_output = is_row & (column < num_out)[:, None]
    total = tl.zeros((OUTPUTS, ROWS), tl.float32)
    for part in range(tl.program_id(2), num_parts, tl.num_programs(2)):
        part_sum = tl.zeros((OUTPUTS, ROWS), tl.float32)
        for block in range(part * part_blocks, tl.minimum((part + 1) * part_blocks, num_blocks)):
            scale_at = (block // group_blocks * padded_out + column)[:, None]
            stored = tl.load(codes_at + block * (OUTPUTS * WIDTH))
            block_sum = tl.zeros((OUTPUTS, ROWS), tl.float32) if GROUPED else part_sum
            for half in tl.static_range(8 // BITS):
                first = block * BLOCK + half * WIDTH
                mask = is_row[None, :]
                if not WHOLE:
                    mask = mask & (first + byte < num_in)[:, None]
                x_block = tl.load(x_at + first, mask=mask, other=0.0)
                half_codes = (stored >> 4 * half) & 15 if BITS == 4 else stored
                numbers = subtract_zero_points(half_codes, offsets + scale_at, KIND, MIDDLE)
                if WIDE:
                    x_block = x_block.to(tl.float32)
                else:
                    numbers = numbers.to(x_block.dtype)
                block_sum = tl.dot(numbers, x_block, block_sum, input_precision="ieee")
            if GROUPED:
                part_sum += block_sum * tl.load(scales + scale_at).to(tl.float32)
                if KIND == "minima":
                    x_sum = tl.load(x_sums + row * num_blocks + block, mask=is_row, other=0.0)
                    part_sum += tl.load(offsets + scale_at).to(tl.float32) * x_sum
            else:
                part_sum = block_sum
        if not GROUPED:
            part_sum *= tl.load(scales + column).to(tl.float32)[:, None]
        if SPLIT:
            part_at = part_sums + (part * num_rows + row) * num_out + column[:, None]
            tl.store(part_at, part_sum, mask=in_output)
        else:
            total += part_sum
    if not SPLIT:
        tl.store(y + row * num_out + column[:, None], total, mask=in_output)


@triton.jit(do_not_specialize=["num_rows"])
def add_parts_kernel(part_sums, y, num_rows, num_out, num_parts, COLUMNS: tl.constexpr):
    """Program (row, columns): adds the sums of all parts [parts, M, N] from the first to the
    last."""
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < num_out
    result = tl.program_id(0).to(tl.int64) * num_out + column
    total = tl.zeros((COLUMNS,), tl.float32)
    for _ in range(0, num_parts):
        total += tl.load(part_sums + result, mask=inside, other=0.0)
        part_sums += num_rows.to(tl.int64) * num_out
    tl.store(y + result, total, mask=inside)


@triton.jit
def block_sums_kernel(
    x, x_sums, x_row, num_in, num_blocks, BLOCK: tl.constexpr, CHUNK: tl.constexpr
):
    """Program (row, chunk of blocks): the sum of x over each block."""
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    column = block[:, None] * BLOCK + tl.arange(0, BLOCK)
    x_fp32 = tl.load(x + row * x_row + column, mask=column < num_in, other=0.0).to(tl.float32)
    tl.store(x_sums + row * num_blocks + block, tl.sum(x_fp32, 1), mask=block < num_blocks)


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
    """Program (id, chunk of blocks): a row of the weight, dequantized as `quant.format` does."""
    y_row = tl.program_id(0).to(tl.int64)
    id = tl.load(ids + tl.program_id(0)).to(tl.int64)
    block = (tl.program_id(1) * CHUNK + tl.arange(0, CHUNK))[:, None]
    is_block = block < num_blocks
    byte = tl.arange(0, WIDTH)
    line = (id // OUTPUTS * num_blocks + block) * OUTPUTS + id % OUTPUTS
    stored = tl.load(codes + line * WIDTH + byte, mask=is_block, other=0)
    scale_at = tl.where(is_block, block // group_blocks * padded_out, 0) + id
    for half in tl.static_range(8 // BITS):
        half_codes = (stored >> 4 * half) & 15 if BITS == 4 else stored
        numbers = subtract_zero_points(half_codes, offsets + scale_at, KIND, MIDDLE)
        numbers *= tl.load(scales + scale_at).to(tl.float32)
        if KIND == "minima":
            numbers += tl.load(offsets + scale_at).to(tl.float32)
        column = block * BLOCK + half * WIDTH + byte
        tl.store(y + y_row * num_in + column, numbers, mask=is_block & (column < num_in))


@dataclass(frozen=True)
class Packed:
    """A weight [N, K] as the kernels read it.

    Attributes:
        shape: (N, K).
        bits: Bits of a code, 8 or 4.
        middle: Offset of symmetric codes.
        block: Columns of a block.
        group: Columns that share a scale; None: all.
        codes: [tiles, blocks, OUTPUTS, bytes of a block], padded with zeros.
        scales: [G, N padded to whole tiles].
        offsets: Zero points or minima of the same shape, or None.
    """

    shape: tuple[int, int]
    bits: int
    middle: int
    block: int
    group: int | None
    codes: Tensor
    scales: Tensor
    offsets: Tensor | None

    @property
    def offset_kind(self) -> OffsetKind:
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
        """Codes, scales and offsets. Kernels do not read offsets that do not exist."""
        return self.codes, self.scales, self.scales if self.offsets is None else self.offsets

    @property
    def counts(self) -> tuple[int, int, int]:
        """Padded outputs, blocks, and blocks of a group."""
        return len(self.codes) * OUTPUTS, self.num_blocks, self.group_blocks

    @property
    def constants(self) -> dict[str, Any]:
        """Values that kernels are compiled for."""
        return {
            "KIND": self.offset_kind,
            "BITS": self.bits,
            "MIDDLE": self.middle,
            "OUTPUTS": OUTPUTS,
            "BLOCK": self.block,
            "WIDTH": self.codes.shape[3],
            "enable_fp_fusion": False,
        }

    @property
    def kernel_key(self) -> tuple[object, ...]:
        """Properties that weights with the same kernels share."""
        return (
            self.shape,
            self.bits,
            self.middle,
            self.block,
            self.group,
            self.offset_kind,
            self.scales.dtype,
        )

    def first_tile(self) -> "Packed":
        """Return a weight of the first tile of outputs."""
        scales = self.scales[:, :OUTPUTS].contiguous()
        offsets = None if self.offsets is None else self.offsets[:, :OUTPUTS].contiguous()
        return replace(
            self,
            shape=(OUTPUTS, self.shape[1]),
            codes=self.codes[:1],
            scales=scales,
            offsets=offsets,
        )


def pack_integers(integers: QuantizedMatrix) -> Packed:
    """Return the same codes in the order of the kernels. Only a strip of them is unpacked at a
    time."""
    num_out, num_in = integers.shape
    scheme = integers.scheme
    unit = scheme.group or num_in
    has_minima = integers.zeros is not None and integers.zeros.is_floating_point()
    fitting = BLOCKS[1:] if scheme.bits == 8 or has_minima else BLOCKS
    block = next((each for each in fitting if unit % each == 0), BLOCKS[-1])
    num_tiles = triton.cdiv(num_out, OUTPUTS)
    num_blocks = triton.cdiv(num_in, block)
    shape = num_tiles, num_blocks, OUTPUTS, block * scheme.bits // 8
    codes = torch.empty(shape, dtype=integers.codes.dtype, device=integers.codes.device)
    step = max(1, STRIP_ELEMENTS // (OUTPUTS * num_in))
    for start in range(0, num_tiles, step):
        rows = unpack(integers.codes[start * OUTPUTS : (start + step) * OUTPUTS], scheme.bits)
        padded = F.pad(rows, (0, num_blocks * block - rows.shape[1], 0, -len(rows) % OUTPUTS))
        tiles = padded.view(-1, OUTPUTS, num_blocks, block)
        if scheme.bits == 4:
            low, high = tiles.unflatten(-1, (2, -1)).unbind(-2)
            tiles = low | high << 4
        codes[start : start + step] = tiles.transpose(1, 2)
    return Packed(
        integers.shape,
        scheme.bits,
        scheme.implicit_zero,
        block,
        scheme.group,
        codes,
        padded_groups(integers.scales),
        None if integers.zeros is None else padded_groups(integers.zeros),
    )


def padded_groups(scales: Tensor) -> Tensor:
    """[N, G] -> [G, N padded to whole tiles]."""
    return F.pad(scales.t(), (0, -len(scales) % OUTPUTS)).contiguous()


def quantized_product(
    x: Tensor, packed: Packed, num_rows: int, part_blocks: int, split: bool, dtype: torch.dtype
) -> Tensor:
    """x [M, K] -> [M, N] in `dtype`, in tiles of `num_rows` rows and parts of `part_blocks`
    blocks."""
    num_out, num_in = packed.shape
    num_blocks = packed.num_blocks
    assert x.stride(1) == 1, "rows are contiguous"
    y = torch.empty(len(x), num_out, dtype=dtype, device=x.device)
    num_parts = triton.cdiv(num_blocks, part_blocks)
    has_minima = packed.offset_kind == "minima"
    x_sums = x.new_empty((len(x), num_blocks) if has_minima else (0, 0), dtype=torch.float32)
    if has_minima:
        grid = len(x), triton.cdiv(num_blocks, CHUNK)
        block_sums_kernel[grid](
            x, x_sums, x.stride(0), num_in, num_blocks, BLOCK=packed.block, CHUNK=CHUNK, num_warps=4
        )
    part_sums = x.new_empty((num_parts, *y.shape) if split else (0, 0, 0), dtype=torch.float32)
    is_smallest = num_rows == ROW_TILES[0]
    prefetch_stages = min(8, PREFETCH_BYTES // packed.codes[0, 0].nbytes)
    product_kernel[len(packed.codes), triton.cdiv(len(x), num_rows), num_parts if split else 1](
        x,
        *packed.tensors,
        x_sums,
        y,
        part_sums,
        *packed.counts,
        x.stride(0),
        len(x),
        num_in,
        num_out,
        part_blocks,
        num_parts,
        GROUPED=packed.group is not None or has_minima,
        WHOLE=num_in % packed.block == 0,
        ROWS=num_rows,
        SPLIT=split,
        WIDE=INTERPRETED,
        **packed.constants,
        num_warps=4 if is_smallest else 8,
        num_stages=prefetch_stages if is_smallest else 2,
    )
    if split:
        columns = len(x), triton.cdiv(num_out, COLUMNS)
        add_parts_kernel[columns](
            part_sums, y, len(x), num_out, num_parts, COLUMNS=COLUMNS, num_warps=4
        )
    return y


@dataclass(frozen=True)
class TritonQuantized:
    """A weight [N, K] of integers for `model.layers.linear`.

    Attributes:
        packed: The weight as the kernels read it.
        sizes: Numbers of rows of a tile that agree.
        part_blocks: Blocks of a part.
        min_programs: Programs below which parts are split over programs.
        dtype: The model's.
        wide: True if products are fp32.
    """

    packed: Packed
    sizes: tuple[int, ...]
    part_blocks: int
    min_programs: int
    dtype: torch.dtype
    wide: bool = False

    @classmethod
    def of(
        cls,
        integers: QuantizedMatrix,
        dtype: torch.dtype,
        agreeing: AgreeingRows,
        wide: bool = False,
    ) -> "TritonQuantized":
        """Pack a weight. `agreeing` caches the measured sizes."""
        packed = pack_integers(integers)
        num_processors = num_multiprocessors(integers.codes.device)
        min_programs = PROGRAMS_PER_MULTIPROCESSOR * num_processors
        part_blocks = blocks_per_part(packed, min_programs)
        key = packed.kernel_key, part_blocks, dtype
        if key not in agreeing:
            agreeing[key] = agreeing_rows(packed.first_tile(), part_blocks, dtype)
        return cls(packed, agreeing[key], part_blocks, min_programs, dtype, wide)

    def apply(self, x: Tensor) -> Tensor:
        """x [..., K] -> [..., N]."""
        rows = flat_rows(x)
        rows = rows if rows.stride(1) == 1 else rows.contiguous()
        size = next((size for size in self.sizes if len(rows) <= size), self.sizes[-1])
        num_programs = len(self.packed.codes) * triton.cdiv(len(rows), size)
        split = self.part_blocks < self.packed.num_blocks and num_programs < self.min_programs
        dtype = torch.float32 if self.wide else x.dtype
        y = quantized_product(rows, self.packed, size, self.part_blocks, split, dtype)
        return y.view(*x.shape[:-1], y.shape[1])

    def look_up(self, ids: Tensor) -> Tensor:
        """Return rows [..., K] of the weight, dequantized."""
        packed = self.packed
        num_in = packed.shape[1]
        ids = ids.contiguous()
        y = torch.empty(*ids.shape, num_in, dtype=self.dtype, device=ids.device)
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


def blocks_per_part(packed: Packed, min_programs: int) -> int:
    """Return the blocks of a part, so that parts occupy that many programs and are not too short.

    It depends on the weight alone, not on the number of rows of x.
    """
    wanted_parts = triton.cdiv(min_programs, len(packed.codes))
    num_parts = max(1, min(packed.shape[1] // PART_COLUMNS, wanted_parts))
    return triton.cdiv(packed.num_blocks, num_parts)


def agreeing_rows(packed: Packed, part_blocks: int, dtype: torch.dtype) -> tuple[int, ...]:
    """Return the numbers of rows of a tile whose results are bit-identical to those of the
    smallest.

    They are measured in fp32, since rounding hides differences. Raises RuntimeError if the results
    of the smallest tile depend on how its parts are split over programs.
    """
    x = random_like(ROW_TILES[-1], packed.shape[1], packed.codes.new_empty(0, dtype=dtype))
    smallest, *larger = ROW_TILES
    splits = (False, True) if part_blocks < packed.num_blocks else (False,)

    def product(num_rows: int, split: bool) -> Tensor:
        return quantized_product(x, packed, num_rows, part_blocks, split, torch.float32)

    def agrees(num_rows: int) -> bool:
        return all(torch.equal(product(num_rows, split), expected) for split in splits)

    expected = product(smallest, False)
    if not agrees(smallest):
        raise RuntimeError("a product in Triton has other bits where its parts are split")
    return smallest, *filter(agrees, larger)


def triton_integers(weight: Tensor | QuantizedWeight) -> QuantizedMatrix | None:
    """Return the integers of a weight if they have a product here: 8 or 4 bits, with groups of
    whole blocks.

    None also where the rank holds no element.
    """
    integers = weight.integers(BLOCKS[-1]) if isinstance(weight, QuantizedWeight) else None
    if integers is None or not all(integers.shape):
        return None
    known_zeros = integers.zeros is None or integers.zeros.dtype in (torch.uint8, *SCALES)
    return integers if known_zeros and integers.scales.dtype in SCALES else None


LinearWeight = Tensor | RowWeight | QuantizedTable | TritonQuantized


def pack_weights(weights: dict[str, Tensor | QuantizedWeight]) -> dict[str, LinearWeight]:
    """Pack the integers of a model's blocks.

    Each is removed from `weights` as it is packed, so that little memory is used twice. The other
    matrices have torch's products (`reference/batch_invariant.py`); embedding tables stay as they
    are.
    """
    dtype = next(each.dtype for each in weights.values() if isinstance(each, Tensor))
    agreeing: AgreeingRows = {}
    packed: dict[str, LinearWeight] = {}
    for name in list(weights):
        integers = triton_integers(weights[name])
        if integers is not None and not isinstance(weights[name], QuantizedTable):
            del weights[name]
            packed[name] = TritonQuantized.of(integers, dtype, agreeing)
    return {**row_weights(weights), **packed}


def pack_head(
    weight: Tensor | QuantizedWeight, dtype: torch.dtype
) -> tuple[TritonQuantized | Head, TritonQuantized | QuantizedTable | Tensor]:
    """Return the output projection of the weight [V, D], with fp32 logits, and the embedding table
    for a tied model: for integers the same object, so that memory holds it once."""
    integers = triton_integers(weight)
    if integers is None:
        return head_of(weight, dtype)
    head = TritonQuantized.of(integers, dtype, {}, wide=True)
    return head, head
