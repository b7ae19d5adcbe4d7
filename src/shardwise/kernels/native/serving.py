"""Native serving kernels for CPUs, in bf16: the Python side of `csrc/`, whose headers state what
they support.

Tensors are passed as addresses, so one build serves every version of torch. Results are
batch-invariant by construction: each sum has its own lane of a register, to which its terms are
added from the first to the last (`csrc/tile.h`). So no sizes have to be measured, as
`reference/batch_invariant.py` does.

Shapes: M rows, K in, N out; N tokens of a step, S sequences, W pages of the longest, H query heads,
K kv heads, C head dim, P tokens of a page.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shardwise.block import is_block_matrix
from shardwise.kernels.interface import RopeTables
from shardwise.kernels.kv_cache import KVPages
from shardwise.kernels.native.library import LANES, InstructionSet, library
from shardwise.kernels.page_table import TokenSpan, padded_page_tables
from shardwise.kernels.reference.batch_invariant import (
    Head,
    RowWeight,
    flat_rows,
    head_of,
    row_quantized,
)
from shardwise.kernels.reference.gated import gated
from shardwise.kernels.serving_interface import AttentionShape
from shardwise.quant.dynamic import ACTIVATION_GROUP
from shardwise.quant.format import QuantizedMatrix
from shardwise.quant.kv_dtype import KvDtype
from shardwise.quant.weight import QuantizedTable, QuantizedWeight

MAX_HEAD_DIM = 256
MAX_TILE_ROWS = 48
"""Query rows of a tile of `csrc/attention.h`."""
PAGE_FORMATS: dict[KvDtype, int] = {"auto": 0, "int8": 1, "fp8": 2}
SCALE_KINDS = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}
"""The numbers of `csrc/kernels.h`."""
CACHE_LINE_BYTES = 64


@dataclass(frozen=True)
class PackedWeight:
    """A weight [N, K] for `model.layers.linear`, packed in the order in which products read it.

    With `wide` its products are fp32.
    """

    functions: int
    packed: Tensor
    shape: tuple[int, int]
    wide: bool = False

    def apply(self, x: Tensor) -> Tensor:
        """x [..., K] -> [..., N]."""
        rows = pair_aligned_rows(x)
        y = empty_output(x, self.shape[0], self.wide)
        library.linear(
            self.functions,
            rows.data_ptr(),
            rows.stride(0),
            len(rows),
            self.packed.data_ptr(),
            *self.shape,
            y.data_ptr(),
            self.wide,
        )
        return y

    def look_up(self, ids: Tensor) -> Tensor:
        """Return rows [..., K] of the weight."""
        return look_up_rows(
            library.look_up, self.functions, ids, self.packed, self.shape, *self.shape
        )


@dataclass(frozen=True)
class PackedQuantized:
    """A weight [N, K] of integers, packed. Its products quantize activations to int8
    (`quant/dynamic.py`). `layout` is the library's description of it."""

    functions: int
    packed: Tensor
    shape: tuple[int, int]
    layout: Any
    wide: bool = False

    def apply(self, x: Tensor) -> Tensor:
        """x [..., K] -> [..., N]."""
        rows = pair_aligned_rows(x)
        y = empty_output(x, self.shape[0], self.wide)
        library.quantized_linear(
            self.functions,
            rows.data_ptr(),
            rows.stride(0),
            len(rows),
            self.packed.data_ptr(),
            self.layout,
            y.data_ptr(),
            self.wide,
        )
        return y

    def look_up(self, ids: Tensor) -> Tensor:
        """Return rows [..., K] of the weight, dequantized."""
        return look_up_rows(
            library.look_up_quantized, self.functions, ids, self.packed, self.shape, self.layout
        )


def pair_aligned_rows(x: Tensor) -> Tensor:
    """Return x [..., K] as [M, K] with contiguous rows that start at 4-byte boundaries, which
    products read as pairs of bf16."""
    rows = flat_rows(x)
    return rows if rows.stride(1) == 1 and rows.stride(0) % 2 == 0 else rows.contiguous()


def empty_output(x: Tensor, num_out: int, wide: bool) -> Tensor:
    return torch.empty(*x.shape[:-1], num_out, dtype=torch.float32 if wide else x.dtype)


def look_up_rows(
    look_up: Callable[..., None],
    functions: int,
    ids: Tensor,
    packed: Tensor,
    shape: tuple[int, int],
    *layout: Any,
) -> Tensor:
    """Return rows [..., K] of a packed weight, which `layout` describes to the library."""
    y = torch.empty(*ids.shape, shape[1], dtype=torch.bfloat16)
    ids = ids.contiguous()
    look_up(functions, ids.data_ptr(), ids.numel(), packed.data_ptr(), *layout, y.data_ptr())
    return y


LinearWeight = PackedWeight | PackedQuantized | RowWeight | QuantizedTable


@dataclass(frozen=True)
class NativeBatch:
    """The metadata of a step, in int32: start and count of each sequence [S, 2], and its pages
    [S, W]."""

    spans: Tensor
    page_table: Tensor


@dataclass(frozen=True)
class NativePagedAttention:
    """Paged attention that reads the pages in place. The order of numbers within a page is the
    kernel's own (`csrc/attention.h`)."""

    functions: int
    shape: AttentionShape
    row_sizes: tuple[int, ...] = tuple(range(1, MAX_TILE_ROWS + 1))
    is_capturable: bool = False

    def batch(self, spans: Sequence[TokenSpan]) -> NativeBatch:
        starts = [(span.start, span.num_tokens) for span in spans]
        return NativeBatch(
            torch.tensor(starts, dtype=torch.int32),
            torch.tensor(padded_page_tables(spans), dtype=torch.int32),
        )

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        rope: RopeTables | None,
        pages: KVPages,
        batch: NativeBatch,
        window: int | None,
    ) -> Tensor:
        keys = pages.keys.numbers
        values = pages.values.numbers
        assert keys.shape == values.shape and keys.shape[2] == self.shape.page_tokens
        assert all(x.stride()[1:] == (x.shape[2], 1) for x in (q, k, v)), "heads are contiguous"
        out = torch.empty(q.shape, dtype=q.dtype)
        library.attend(
            self.functions,
            PAGE_FORMATS[self.shape.kv_dtype],
            keys.data_ptr(),
            values.data_ptr(),
            *scale_addresses(pages),
            *keys.shape,
            q.data_ptr(),
            k.data_ptr(),
            v.data_ptr(),
            q.stride(0),
            k.stride(0),
            v.stride(0),
            q.shape[1],
            *((0, 0) if rope is None else (rope.cos.data_ptr(), rope.sin.data_ptr())),
            window or 0,
            batch.spans.data_ptr(),
            len(batch.spans),
            batch.page_table.data_ptr(),
            batch.page_table.shape[1],
            out.data_ptr(),
        )
        return out


def scale_addresses(pages: KVPages) -> tuple[int, int]:
    """Return the addresses of the scales of keys and values; 0 without scales."""
    keys, values = (
        0 if each.scales is None else each.scales.data_ptr() for each in (pages.keys, pages.values)
    )
    return keys, values


class NativeServing(InstructionSet):
    """The serving kernels of one instruction set."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Compute `reference.norm.rms_norm`, without a backward."""
        rows = x.reshape(-1, x.shape[-1])
        y = torch.empty(x.shape, dtype=x.dtype)
        library.rms_norm(
            self.functions,
            rows.data_ptr(),
            rows.stride(0),
            *rows.shape,
            weight.data_ptr(),
            eps,
            y.data_ptr(),
        )
        return y

    def gated(self, inner: Tensor, activation: str) -> Tensor:
        """Compute `reference.gated.gated`, without a backward."""
        *leading, width = inner.shape
        if activation != "silu" or width % (2 * LANES):
            return gated(inner, activation)
        y = torch.empty(*leading, width // 2, dtype=inner.dtype)
        library.gated_silu(
            self.functions, inner.data_ptr(), y.shape[:-1].numel(), width // 2, y.data_ptr()
        )
        return y

    def supports_attention(self, shape: AttentionShape) -> bool:
        return (
            not shape.page_tokens % LANES
            and not shape.head_dim % (2 * LANES)
            and shape.head_dim <= MAX_HEAD_DIM
        )

    def paged_attention(self, shape: AttentionShape) -> NativePagedAttention:
        return NativePagedAttention(self.functions, shape)

    def pack_weights(
        self, weights: dict[str, Tensor | QuantizedWeight]
    ) -> dict[str, Tensor | LinearWeight]:
        """Pack the matrices of a model's blocks side by side in one piece of memory.

        Each is removed from `weights` as it is packed, so that little memory is used twice.
        Quantized weights without a native product have torch's, with dequantized numbers.
        """
        others = {
            name: weights.pop(name)
            for name, weight in list(weights.items())
            if not self.has_product(name, weight)
        }
        packed: dict[str, Tensor | LinearWeight] = {
            name: each for name, each in others.items() if isinstance(each, Tensor)
        }
        packed |= row_quantized(others)
        memory = allocate_packed([self.packed_bytes(weight) for weight in weights.values()])
        for name, target in zip(list(weights), memory, strict=True):
            packed[name] = self.pack(weights.pop(name), target)
        return packed

    def has_product(self, name: str, weight: Tensor | QuantizedWeight) -> bool:
        """Return True for a matrix of a block that has a native product."""
        if isinstance(weight, QuantizedWeight):
            return native_integers(weight) is not None
        return is_block_matrix(name) and weight.shape[1] % 2 == 0

    def pack_head(
        self, weight: Tensor | QuantizedWeight, dtype: torch.dtype
    ) -> tuple[LinearWeight | Head, LinearWeight | QuantizedTable | Tensor]:
        """Return the output projection of the weight [V, D], with fp32 logits, and the embedding
        table for a tied model: the same object, so that memory holds it once.

        A quantized weight without a native product stays as it is.
        """
        if isinstance(weight, QuantizedWeight) and native_integers(weight) is None:
            return head_of(weight, dtype)
        (target,) = allocate_packed([self.packed_bytes(weight)])
        head = self.pack(weight, target, wide=True)
        return head, head

    def packed_bytes(self, weight: Tensor | QuantizedWeight) -> int:
        if isinstance(weight, Tensor):
            num_out, num_in = weight.shape
            return -(-num_out // LANES) * LANES * num_in * 2
        layout = library_layout(require_native_integers(weight))
        num_bytes: int = library.quantized_bytes(self.functions, layout)
        return num_bytes

    def pack(
        self, weight: Tensor | QuantizedWeight, target: Tensor, wide: bool = False
    ) -> PackedWeight | PackedQuantized:
        """Pack a weight into the bytes of `target`."""
        num_out, num_in = weight.shape
        if isinstance(weight, Tensor):
            weight = weight.contiguous()
            library.pack(self.functions, weight.data_ptr(), num_out, num_in, target.data_ptr())
            return PackedWeight(self.functions, target, (num_out, num_in), wide)
        integers = require_native_integers(weight)
        layout = library_layout(integers)
        stored = (integers.codes, integers.scales, integers.zeros)
        contiguous = [None if each is None else each.contiguous() for each in stored]
        addresses = [0 if each is None else each.data_ptr() for each in contiguous]
        library.pack_quantized(self.functions, *addresses, layout, target.data_ptr())
        return PackedQuantized(self.functions, target, (num_out, num_in), layout, wide)


def native_integers(weight: QuantizedWeight) -> QuantizedMatrix | None:
    """Return the integers of a weight if they have a native product: 8 or 4 bits, with groups of
    whole activation groups.

    None also where the rank has no columns.
    """
    integers = weight.integers(ACTIVATION_GROUP)
    if integers is None or not integers.shape[1]:
        return None
    scale_dtype = integers.scales.dtype
    known_zeros = integers.zeros is None or integers.zeros.dtype in (torch.uint8, scale_dtype)
    return integers if known_zeros and scale_dtype in SCALE_KINDS else None


def require_native_integers(weight: QuantizedWeight) -> QuantizedMatrix:
    integers = native_integers(weight)
    assert integers is not None, "the weight has no native product"
    return integers


def library_layout(integers: QuantizedMatrix) -> Any:
    """Return the library's description of integers that have a native product."""
    scheme = integers.scheme
    zeros = integers.zeros
    # Signed bytes are stored with an offset of 128.
    middle = 128 if scheme.bits == 8 and not scheme.zero else scheme.implicit_zero
    offset_kind = 0 if zeros is None else 1 if zeros.dtype == torch.uint8 else 2
    return library.QuantizedShape(
        *integers.shape,
        scheme.group or 0,
        scheme.bits,
        middle,
        SCALE_KINDS[integers.scales.dtype],
        offset_kind,
    )


def allocate_packed(sizes: Sequence[int]) -> list[Tensor]:
    """Allocate uninitialized memory of those sizes in bytes, as slices of one allocation.

    It uses huge pages of 2 MiB where the system has them, for fewer TLB misses.
    """
    aligned = [-(-size // CACHE_LINE_BYTES) * CACHE_LINE_BYTES for size in sizes]
    memory = torch.empty(sum(aligned), dtype=torch.uint8)
    library.use_huge_pages(memory.data_ptr(), memory.nbytes)
    return [part[:size] for part, size in zip(memory.split(aligned), sizes, strict=True)]
