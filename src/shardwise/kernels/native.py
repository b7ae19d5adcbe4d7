"""The native kernels for CPUs, in bf16: Python's side of `native/`, which says what they can take.

Tensors are passed as addresses, so one build serves every version of torch. A row has the same bits in any company by
construction: each sum has a register of its own, to which its terms are added from the first to the last
(`native/tile.h`). Nothing is to be found out about the machine as in `rows.py`.

Shapes: M rows, K in, N out; N tokens of a step, H query heads, K kv heads, C head dim, P tokens of a page.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch  # first: it brings the OpenMP runtime that the module shares
from torch import Tensor

from shardwise.kernels.gated import gated
from shardwise.kernels.kv import KVPages
from shardwise.kernels.paged import Span
from shardwise.kernels.rows import RowWeight, row_quantized
from shardwise.quant.cache import KvDtype
from shardwise.quant.weight import QuantizedWeight

if TYPE_CHECKING:
    from shardwise.kernels.choice import Heads, Turns

library: Any
try:
    from shardwise.kernels import _native as library  # type: ignore[attr-defined,no-redef]
except ImportError:  # built without a compiler
    library = None

LANES = 16
"""Columns of a panel, and positions of a page that are worked on at once."""
MAX_HEAD_DIM = 256
KINDS_OF_PAGES: dict[KvDtype, int] = {"auto": 0, "int8": 1, "fp8": 2}
"""As `native/kernels.h` numbers them."""


def instruction_sets() -> tuple[str, ...]:
    """Those that this processor has and kernels are built for, the best first; none where the module is not built."""
    return tuple(library.instruction_sets()) if library is not None else ()


@dataclass(frozen=True)
class PackedWeight:
    """A weight [N, K] for `model.layers.linear`, in the order in which products read it. With `wide` they are fp32."""

    functions: int
    packed: Tensor
    num_out: int
    num_in: int
    wide: bool = False

    def apply(self, x: Tensor) -> Tensor:
        """x [..., K] -> [..., N]."""
        rows = x.reshape(-1, self.num_in)
        if rows.stride(1) != 1 or rows.stride(0) % 2:
            rows = rows.contiguous()
        y = torch.empty(*x.shape[:-1], self.num_out, dtype=torch.float32 if self.wide else x.dtype)
        library.linear(
            self.functions, rows.data_ptr(), rows.stride(0), len(rows), self.packed.data_ptr(), self.num_out,
            self.num_in, y.data_ptr(), self.wide,
        )  # fmt: skip
        return y


@dataclass(frozen=True)
class NativeBatch:
    """A step as the kernel reads it, in int32: start and count of each sequence [S, 2], and its pages [S, W]."""

    spans: Tensor
    table: Tensor


@dataclass(frozen=True)
class NativeAttention:
    """Attention over pages, read where they lie. Their inner order is the kernel's own (`native/attention.h`)."""

    functions: int
    heads: "Heads"
    sizes: tuple[int, ...] = tuple(range(1, 49))
    """Numbers of query rows that are worked on together: any, up to that of `native/attention.h`."""
    reads_tables: bool = False

    def batch(self, spans: Sequence[Span]) -> NativeBatch:
        width = max(len(span.pages) for span in spans)
        table = torch.tensor([[*span.pages, *[0] * (width - len(span.pages))] for span in spans], dtype=torch.int32)
        return NativeBatch(torch.tensor([(span.start, span.num_tokens) for span in spans], dtype=torch.int32), table)

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, turns: "Turns | None", pages: KVPages, batch: NativeBatch,
        window: int | None,
    ) -> Tensor:  # fmt: skip
        keys, values = pages.keys.numbers, pages.values.numbers
        assert keys.shape == values.shape and keys.shape[2] == self.heads.page_tokens
        scales = [0 if each.scales is None else each.scales.data_ptr() for each in (pages.keys, pages.values)]
        assert all(x.stride()[1:] == (x.shape[2], 1) for x in (q, k, v)), "heads lie side by side"
        out = torch.empty(q.shape, dtype=q.dtype)
        cos, sin = (0, 0) if turns is None else (turns[0].data_ptr(), turns[1].data_ptr())
        library.attend(
            self.functions, KINDS_OF_PAGES[self.heads.kv_dtype], keys.data_ptr(), values.data_ptr(), *scales,
            *keys.shape,
            q.data_ptr(), k.data_ptr(), v.data_ptr(), q.stride(0), k.stride(0), v.stride(0), q.shape[1], cos, sin,
            window or 0, batch.spans.data_ptr(), len(batch.spans), batch.table.data_ptr(), batch.table.shape[1],
            out.data_ptr(),
        )  # fmt: skip
        return out


@dataclass(frozen=True)
class Native:
    """The kernels of one instruction set. `functions` is the address of their table."""

    name: str
    functions: int

    @classmethod
    def of(cls, name: str) -> "Native":
        return cls(name, library.kernels(name))

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """`norm.rms_norm`, without its backward."""
        rows = x.reshape(-1, x.shape[-1])
        y = torch.empty(x.shape, dtype=x.dtype)
        start, step = rows.data_ptr(), rows.stride(0)
        library.rms_norm(self.functions, start, step, *rows.shape, weight.data_ptr(), eps, y.data_ptr())
        return y

    def gated(self, inner: Tensor, activation: str) -> Tensor:
        """`gated.gated`, without its backward."""
        *leading, width = inner.shape
        if activation != "silu" or width % (2 * LANES):
            return gated(inner, activation)
        y = torch.empty(*leading, width // 2, dtype=inner.dtype)
        library.gated_silu(self.functions, inner.data_ptr(), inner.numel() // width, width // 2, y.data_ptr())
        return y

    def attends(self, heads: "Heads") -> bool:
        """Whether attention of this shape is for these kernels."""
        return not heads.page_tokens % LANES and not heads.head_dim % (2 * LANES) and heads.head_dim <= MAX_HEAD_DIM

    def attention(self, heads: "Heads") -> NativeAttention:
        return NativeAttention(self.functions, heads)

    def weights(self, weights: dict[str, Tensor | QuantizedWeight]) -> dict[str, Tensor | PackedWeight | RowWeight]:
        """The weights of a model with the matrices of its blocks packed, side by side in one piece of memory. They are
        taken out of `weights` one after the other, so that little is there twice. Quantized ones have no native product
        yet."""
        ready: dict[str, Tensor | PackedWeight | RowWeight] = dict(row_quantized(weights))
        plain = {name: weight for name, weight in weights.items() if isinstance(weight, Tensor)}
        weights.clear()
        packs = [name for name, weight in plain.items() if packable(name, weight)]
        sizes = [packed_elements(plain[name]) for name in packs]
        places = dict(zip(packs, huge_pages(sum(sizes)).split(sizes), strict=True))
        for name in list(plain):
            weight = plain.pop(name)
            ready[name] = self.packed(weight, places[name]) if name in places else weight
        return ready

    def head(self, weight: Tensor) -> PackedWeight:
        """The weight [V, D] that makes logits, in fp32."""
        return self.packed(weight, huge_pages(packed_elements(weight)), wide=True)

    def packed(self, weight: Tensor, place: Tensor, wide: bool = False) -> PackedWeight:
        weight = weight.contiguous()
        library.pack(self.functions, weight.data_ptr(), *weight.shape, place.data_ptr())
        return PackedWeight(self.functions, place, weight.shape[0], weight.shape[1], wide)


def packable(name: str, weight: Tensor) -> bool:
    """Whether it is a matrix of a block, of whole pairs."""
    return name.startswith("blocks.") and weight.dim() == 2 and weight.shape[1] % 2 == 0


def packed_elements(weight: Tensor) -> int:
    """Of a packed weight [N, K]: whole panels."""
    num_out, num_in = weight.shape
    return -(-num_out // LANES) * LANES * num_in


def huge_pages(num_elements: int) -> Tensor:
    """Uninitialised bf16 memory, in pages of 2 MiB where the system has them: fewer addresses to look up."""
    memory = torch.empty(num_elements, dtype=torch.bfloat16)
    library.use_huge_pages(memory.data_ptr(), memory.nbytes)
    return memory
