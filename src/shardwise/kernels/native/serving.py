"""The native kernels for CPUs, in bf16: Python's side of `csrc/`, which says what they can take.

Tensors are passed as addresses, so one build serves every version of torch. A row has the same bits
in any company by construction: each sum has a register of its own, to which its terms are added
from the first to the last (`csrc/tile.h`). Nothing is to be found out about the machine as in
`rows.py`.

Shapes: M rows, K in, N out; N tokens of a step, H query heads, K kv heads, C head dim, P tokens of
a page.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch  # first: it brings the OpenMP runtime that the module shares
from torch import Tensor

from shardwise.kernels.kv_cache import KVPages
from shardwise.kernels.native.library import LANES, InstructionSet, library
from shardwise.kernels.reference.batch_invariant import (
    Head,
    RowWeight,
    flat_rows,
    head_of,
    row_quantized,
)
from shardwise.kernels.reference.gated import gated
from shardwise.kernels.reference.paged_attention import Span
from shardwise.quant.dynamic import STRETCH
from shardwise.quant.format import Quantized
from shardwise.quant.kv_dtype import KvDtype
from shardwise.quant.weight import QuantizedTable, QuantizedWeight

if TYPE_CHECKING:
    from shardwise.kernels.interface import Heads, Turns

MAX_HEAD_DIM = 256
KINDS_OF_PAGES: dict[KvDtype, int] = {"auto": 0, "int8": 1, "fp8": 2}
LINE_BYTES = 64
SCALE_KINDS = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}
"""As `csrc/kernels.h` numbers them."""


@dataclass(frozen=True)
class PackedWeight:
    """A weight [N, K] for `model.layers.linear`, in the order in which products read it. With
    `wide` they are fp32."""

    functions: int
    packed: Tensor
    shape: tuple[int, int]
    wide: bool = False

    def apply(self, x: Tensor) -> Tensor:
        """x [..., K] -> [..., N]."""
        rows = rows_of(x)
        y = out_for(x, self.shape[0], self.wide)
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
        """Rows [..., K] of the weight."""
        return looked_up(library.look_up, self.functions, ids, self.packed, self.shape, *self.shape)


@dataclass(frozen=True)
class PackedQuantized:
    """A weight [N, K] of integers in that order. Its products take activations in int8
    (`quant/dynamic.py`)."""

    functions: int
    packed: Tensor
    shape: tuple[int, int]
    layout: Any
    """The library's description of it."""
    wide: bool = False

    def apply(self, x: Tensor) -> Tensor:
        """x [..., K] -> [..., N]."""
        rows = rows_of(x)
        y = out_for(x, self.shape[0], self.wide)
        start = rows.data_ptr()
        step = rows.stride(0)
        packed = self.packed.data_ptr()
        library.quantized_linear(
            self.functions, start, step, len(rows), packed, self.layout, y.data_ptr(), self.wide
        )
        return y

    def look_up(self, ids: Tensor) -> Tensor:
        """Rows [..., K] of the weight as plain numbers."""
        return looked_up(
            library.look_up_quantized, self.functions, ids, self.packed, self.shape, self.layout
        )


def rows_of(x: Tensor) -> Tensor:
    """x [..., K] as [M, K] whose pairs lie side by side."""
    rows = flat_rows(x)
    return rows if rows.stride(1) == 1 and rows.stride(0) % 2 == 0 else rows.contiguous()


def out_for(x: Tensor, num_out: int, wide: bool) -> Tensor:
    return torch.empty(*x.shape[:-1], num_out, dtype=torch.float32 if wide else x.dtype)


def looked_up(
    look_up: Callable[..., None],
    functions: int,
    ids: Tensor,
    packed: Tensor,
    shape: tuple[int, int],
    *layout: Any,
) -> Tensor:
    """Rows [..., K] of a packed weight that the library knows by `layout`."""
    y = torch.empty(*ids.shape, shape[1], dtype=torch.bfloat16)
    ids = ids.contiguous()
    look_up(functions, ids.data_ptr(), ids.numel(), packed.data_ptr(), *layout, y.data_ptr())
    return y


Applied = PackedWeight | PackedQuantized | RowWeight | QuantizedTable


@dataclass(frozen=True)
class NativeBatch:
    """A step as the kernel reads it, in int32: start and count of each sequence [S, 2], and its
    pages [S, W]."""

    spans: Tensor
    table: Tensor


@dataclass(frozen=True)
class NativeAttention:
    """Attention over pages, read where they lie. Their inner order is the kernel's own
    (`csrc/attention.h`)."""

    functions: int
    heads: "Heads"
    sizes: tuple[int, ...] = tuple(range(1, 49))
    """Numbers of query rows that are worked on together: any, up to that of `csrc/attention.h`."""
    reads_tables: bool = False

    def batch(self, spans: Sequence[Span]) -> NativeBatch:
        width = max(len(span.pages) for span in spans)
        table = torch.tensor(
            [[*span.pages, *[0] * (width - len(span.pages))] for span in spans], dtype=torch.int32
        )
        return NativeBatch(
            torch.tensor([(span.start, span.num_tokens) for span in spans], dtype=torch.int32),
            table,
        )

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        turns: "Turns | None",
        pages: KVPages,
        batch: NativeBatch,
        window: int | None,
    ) -> Tensor:
        keys = pages.keys.numbers
        values = pages.values.numbers
        assert keys.shape == values.shape and keys.shape[2] == self.heads.page_tokens
        scales = [
            0 if each.scales is None else each.scales.data_ptr()
            for each in (pages.keys, pages.values)
        ]
        assert all(x.stride()[1:] == (x.shape[2], 1) for x in (q, k, v)), "heads lie side by side"
        out = torch.empty(q.shape, dtype=q.dtype)
        cos, sin = (0, 0) if turns is None else (turns[0].data_ptr(), turns[1].data_ptr())
        library.attend(
            self.functions,
            KINDS_OF_PAGES[self.heads.kv_dtype],
            keys.data_ptr(),
            values.data_ptr(),
            *scales,
            *keys.shape,
            q.data_ptr(),
            k.data_ptr(),
            v.data_ptr(),
            q.stride(0),
            k.stride(0),
            v.stride(0),
            q.shape[1],
            cos,
            sin,
            window or 0,
            batch.spans.data_ptr(),
            len(batch.spans),
            batch.table.data_ptr(),
            batch.table.shape[1],
            out.data_ptr(),
        )
        return out


class Native(InstructionSet):
    """The kernels that a model is served with."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """`norm.rms_norm`, without its backward."""
        rows = x.reshape(-1, x.shape[-1])
        y = torch.empty(x.shape, dtype=x.dtype)
        start = rows.data_ptr()
        step = rows.stride(0)
        library.rms_norm(
            self.functions, start, step, *rows.shape, weight.data_ptr(), eps, y.data_ptr()
        )
        return y

    def gated(self, inner: Tensor, activation: str) -> Tensor:
        """`gated.gated`, without its backward."""
        *leading, width = inner.shape
        if activation != "silu" or width % (2 * LANES):
            return gated(inner, activation)
        y = torch.empty(*leading, width // 2, dtype=inner.dtype)
        library.gated_silu(
            self.functions, inner.data_ptr(), y.shape[:-1].numel(), width // 2, y.data_ptr()
        )
        return y

    def attends(self, heads: "Heads") -> bool:
        """Whether attention of this shape is for these kernels."""
        return (
            not heads.page_tokens % LANES
            and not heads.head_dim % (2 * LANES)
            and heads.head_dim <= MAX_HEAD_DIM
        )

    def attention(self, heads: "Heads") -> NativeAttention:
        return NativeAttention(self.functions, heads)

    def weights(self, weights: dict[str, Tensor | QuantizedWeight]) -> dict[str, Tensor | Applied]:
        """The weights of a model with the matrices of its blocks packed, side by side in one piece
        of memory. They are taken out of `weights` one after the other, so that little is there
        twice. Quantized ones that have no native product are multiplied as plain numbers."""
        others = {
            name: weights.pop(name)
            for name, weight in list(weights.items())
            if not self.packs(name, weight)
        }
        ready: dict[str, Tensor | Applied] = {
            name: each for name, each in others.items() if isinstance(each, Tensor)
        }
        ready |= row_quantized(others)
        places = split_memory([self.packed_bytes(weight) for weight in weights.values()])
        for name, place in zip(list(weights), places, strict=True):
            ready[name] = self.packed(weights.pop(name), place)
        return ready

    def packs(self, name: str, weight: Tensor | QuantizedWeight) -> bool:
        """Whether it is a matrix of a block for which there is a native product."""
        if isinstance(weight, QuantizedWeight):
            return integers_of(weight) is not None
        return name.startswith("blocks.") and weight.dim() == 2 and weight.shape[1] % 2 == 0

    def head(
        self, weight: Tensor | QuantizedWeight, dtype: torch.dtype
    ) -> tuple[Applied | Head, Applied | QuantizedTable | Tensor]:
        """What makes logits, in fp32, of the weight [V, D], and what looks its rows up if it is the
        embedding too: the same, so that it is there once. A quantized one that has no native
        product is kept as it is."""
        if isinstance(weight, QuantizedWeight) and integers_of(weight) is None:
            return head_of(weight, dtype)
        (place,) = split_memory([self.packed_bytes(weight)])
        head = self.packed(weight, place, wide=True)
        return head, head

    def packed_bytes(self, weight: Tensor | QuantizedWeight) -> int:
        if isinstance(weight, Tensor):
            num_out, num_in = weight.shape
            return -(-num_out // LANES) * LANES * num_in * 2
        found: int = library.quantized_bytes(self.functions, layout_of(known_integers(weight)))
        return found

    def packed(
        self, weight: Tensor | QuantizedWeight, place: Tensor, wide: bool = False
    ) -> PackedWeight | PackedQuantized:
        num_out, num_in = weight.shape
        if isinstance(weight, Tensor):
            weight = weight.contiguous()
            library.pack(self.functions, weight.data_ptr(), num_out, num_in, place.data_ptr())
            return PackedWeight(self.functions, place, (num_out, num_in), wide)
        held = known_integers(weight)
        layout = layout_of(held)
        stored = (held.codes, held.scales, held.zeros)
        parts = [None if part is None else part.contiguous() for part in stored]
        addresses = [0 if part is None else part.data_ptr() for part in parts]
        library.pack_quantized(self.functions, *addresses, layout, place.data_ptr())
        return PackedQuantized(self.functions, place, (num_out, num_in), layout, wide)


def integers_of(weight: QuantizedWeight) -> Quantized | None:
    """What a weight is held as, if that has a native product: integers of 8 or 4 bits, whose groups
    are of whole stretches of activations; a rank may hold no columns."""
    held = weight.integers(STRETCH)
    if held is None or not held.shape[1]:
        return None
    alike = held.zeros is None or held.zeros.dtype in (torch.uint8, held.scales.dtype)
    return held if alike and held.scales.dtype in SCALE_KINDS else None


def known_integers(weight: QuantizedWeight) -> Quantized:
    held = integers_of(weight)
    assert held is not None, "it has no native product"
    return held


def layout_of(held: Quantized) -> Any:
    """The library's description of integers that have a native product."""
    scheme = held.scheme
    zeros = held.zeros
    middle = (
        128 if scheme.bits == 8 and not scheme.zero else scheme.middle
    )  # bytes with a sign are moved up by 128
    offsets = 0 if zeros is None else 1 if zeros.dtype == torch.uint8 else 2
    return library.QuantizedShape(
        *held.shape, scheme.group or 0, scheme.bits, middle, SCALE_KINDS[held.scales.dtype], offsets
    )


def split_memory(sizes: Sequence[int]) -> list[Tensor]:
    """Uninitialised memory of those sizes in bytes, in one piece, in pages of 2 MiB where the
    system has them: fewer addresses to look up."""
    whole = [-(-size // LINE_BYTES) * LINE_BYTES for size in sizes]
    memory = torch.empty(sum(whole), dtype=torch.uint8)
    library.use_huge_pages(memory.data_ptr(), memory.nbytes)
    return [place[:size] for place, size in zip(memory.split(whole), sizes, strict=True)]
