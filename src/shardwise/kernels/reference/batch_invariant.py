"""Products of which a row has the same bits however many rows there are.

A library picks its kernel by the shape of a product, and kernels add in different orders: a token
computed alone and the same token among 512 may differ in their last bits, and greedy decoding then
in its tokens (He et al. 2025, "Defeating nondeterminism in LLM inference"). Which numbers of rows
agree is a fact about the machine, so it is found out when a model is loaded, on numbers that cancel
out and leave nothing but the order of addition. Then a product only ever has a number of rows that
agrees: fewer are padded, more are cut.

Shapes: M rows, K in, N out.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise.quant.format import strip_rows
from shardwise.quant.weight import QuantizedTable, QuantizedWeight

SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 128, 256)
"""Numbers of rows that are tried."""
TILE_ROWS = 32
"""Where not even rows of one size agree with another, all products have this one."""
CUT_ROWS = 64
"""From here on arithmetic bounds a product, so rows are cut; below, reading the weight does, so
they are padded."""
HEAD_BLOCK_BYTES = 8 << 20
"""Of a head's weight, so that its second reading finds it in the cache."""

Product = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class RowWeight:
    """A weight [N, K] for `model.layers.linear` whose product has the same bits in every row, in
    any company."""

    product: Product
    sizes: tuple[int, ...]

    def apply(self, x: Tensor) -> Tensor:
        """x [..., K] -> [..., N]."""
        y = in_sizes(self.product, self.sizes, flat_rows(x))
        return y.view(*x.shape[:-1], y.shape[1])


def flat_rows(x: Tensor) -> Tensor:
    """x [..., K] as [M, K], also where a rank has no columns."""
    return x.reshape(x.shape[:-1].numel(), x.shape[-1])


@dataclass(frozen=True)
class Head:
    """The weight [V, D] that makes logits, in blocks of V. They are fp32: rounded to bf16 many of
    them would tie."""

    blocks: tuple[RowWeight, ...]

    def apply(self, x: Tensor) -> Tensor:
        """x [..., D] -> [..., V] in fp32, of which 16 bits are right where weights are bf16."""
        return torch.cat([block.apply(x) for block in self.blocks], -1)


def row_weights(
    weights: Mapping[str, Tensor | QuantizedWeight],
) -> dict[str, Tensor | RowWeight | QuantizedTable]:
    """The weights of a model with the matrices of its blocks made row-invariant. On CPUs bf16 ones
    are packed as the library likes them, else every call would pack them again: half the time of a
    decode step."""
    found: dict[tuple[int, ...], tuple[int, ...]] = {}
    plain = {name: weight for name, weight in weights.items() if isinstance(weight, Tensor)}
    ready: dict[str, Tensor | RowWeight | QuantizedTable] = plain | row_quantized(weights)
    for name, weight in plain.items():
        if name.startswith("blocks.") and weight.dim() == 2:
            if weight.shape not in found:
                found[weight.shape] = agreeing_sizes(packed(cancelling(weight)), weight)
            ready[name] = RowWeight(packed(weight), found[weight.shape])
    return ready


def row_quantized(
    weights: Mapping[str, Tensor | QuantizedWeight],
) -> dict[str, RowWeight | QuantizedTable]:
    """The quantized ones among them. Each makes its own rows plain whatever x is, so the numbers of
    rows that agree are those of products with plain strips alike. An embedding stays: its rows are
    looked up."""
    found: dict[tuple[tuple[int, int], ...], tuple[int, ...]] = {}
    ready: dict[str, RowWeight | QuantizedTable] = {}
    for name, weight in weights.items():
        if isinstance(weight, QuantizedTable):
            ready[name] = weight
        elif isinstance(weight, QuantizedWeight):
            shapes = tuple(piece.shape for piece in weight.pieces)
            if shapes not in found:
                first = next(each for each in weights.values() if isinstance(each, Tensor))
                probe = weight.like(cancelling(first.new_empty(weight.shape)))
                found[shapes] = agreeing_sizes(probe.apply, first.new_empty(weight.shape))
            ready[name] = RowWeight(weight.apply, found[shapes])
    return ready


def head_of(
    weight: Tensor | QuantizedWeight, dtype: torch.dtype
) -> tuple[Head, Tensor | QuantizedTable]:
    """The head with weight [V, D], and what looks its rows up, in `dtype`."""
    if isinstance(weight, QuantizedWeight):
        return quantized_head(weight), QuantizedTable(weight.pieces, dtype)
    num_rows = max(1, HEAD_BLOCK_BYTES // (weight.shape[1] * weight.element_size()))
    blocks = weight.split(num_rows)
    found = {}
    for block in blocks:
        if block.shape not in found:
            found[block.shape] = agreeing_sizes(packed_twice(cancelling(block)), block)
    return Head(
        tuple(RowWeight(packed_twice(block), found[block.shape]) for block in blocks)
    ), weight


def quantized_head(weight: QuantizedWeight) -> Head:
    """Logits of fp32 products: its rows are made plain numbers a strip at a time."""
    (held,) = weight.pieces
    blocks = [QuantizedWeight((held.rows(*strip),)) for strip in strip_rows(weight.shape)]
    found = {}
    for block in blocks:
        if block.shape not in found:
            probe = block.like(cancelling(torch.empty(block.shape)))
            found[block.shape] = agreeing_sizes(probe.apply, torch.empty(block.shape))
    return Head(
        tuple(RowWeight(partial(wide_product, block), found[block.shape]) for block in blocks)
    )


def wide_product(weight: QuantizedWeight, x: Tensor) -> Tensor:
    return weight.apply(x.float())


def packed(weight: Tensor) -> Product:
    """The product with weight [N, K], which is not needed afterwards."""
    if not packs(weight):
        return lambda x: F.linear(x, weight)
    inner = torch.ops.mkldnn._reorder_linear_weight(weight)
    return lambda x: torch.ops.mkldnn._linear_pointwise(x, inner, None, "none", [], "")


def packed_twice(weight: Tensor) -> Product:
    """The same in fp32. On CPUs no product of torch's takes bf16 and gives fp32, but one can add to
    its fp32 sums before it rounds them: taking off the rounded product leaves what rounding
    lost."""
    if weight.dtype == torch.float32:
        return packed(weight)
    if weight.device.type == "cuda":
        return lambda x: torch.mm(x, weight.t(), out_dtype=torch.float32)
    if not packs(weight):
        return lambda x: with_rest(
            rounded := F.linear(x, weight), torch.addmm(rounded, x, weight.t(), beta=-1)
        )
    inner = torch.ops.mkldnn._reorder_linear_weight(weight)

    def product(x: Tensor) -> Tensor:
        rounded = torch.ops.mkldnn._linear_pointwise(x, inner, None, "none", [], "")
        return with_rest(
            rounded, torch.ops.mkldnn._linear_pointwise.binary(x, -rounded, inner, None, "add")
        )

    return product


def with_rest(rounded: Tensor, rest: Tensor) -> Tensor:
    return rounded.float().add_(rest)


def packs(weight: Tensor) -> bool:
    on_cpu = weight.device.type == "cpu" and weight.dtype == torch.bfloat16
    return on_cpu and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def in_sizes(product: Product, sizes: tuple[int, ...], rows: Tensor) -> Tensor:
    """The product of rows [M, K], in pieces of those sizes."""
    if len(rows) in sizes:
        return product(rows)
    made = []
    for start, count, size in pieces(len(rows), sizes):
        piece = rows[start : start + count]
        made.append(
            product(piece if count == size else F.pad(piece, (0, 0, 0, size - count)))[:count]
        )
    return made[0] if len(made) == 1 else torch.cat(made)


def pieces(num_rows: int, sizes: tuple[int, ...]) -> Iterator[tuple[int, int, int]]:
    """(start, rows, size to pad them to) of each piece."""
    start = 0
    while start < num_rows:
        rest = num_rows - start
        whole = [size for size in sizes if size <= rest and (size >= CUT_ROWS or size == sizes[-1])]
        size = max(whole) if whole else min(size for size in sizes if size >= rest)
        yield start, min(size, rest), size
        start += size


def agreeing_sizes(product: Product, weight: Tensor) -> tuple[int, ...]:
    """The numbers of rows, of SIZES, at which the product with a weight like this one gives rows of
    the same bits."""
    rows = alike(SIZES[-1], weight)

    def agrees(size: int, wanted: Tensor) -> bool:
        """Whether rows are as wanted at the first places and at others."""
        return all(
            torch.equal(product(rows[at : at + size]), wanted[at : at + size])
            for at in places(size)
        )

    def found(tile: int) -> tuple[int, ...]:
        wanted = torch.cat([product(piece) for piece in rows.split(tile)])
        return tuple(size for size in SIZES if agrees(size, wanted))

    sizes = found(TILE_ROWS)
    return sizes if TILE_ROWS in sizes else tuple(sorted({1, *found(1)}))


def places(size: int) -> tuple[int, ...]:
    last = SIZES[-1] - size
    return (0,) if last == 0 else (1, last) if size <= CUT_ROWS else (last,)


def cancelling(weight: Tensor) -> Tensor:
    """A matrix like this one of which the columns cancel out in pairs, if what it is times is
    `alike` in these pairs: sums of which nothing is left but the errors of partial sums, which
    rounding to bf16 does not hide."""
    pair, sign = pairs(weight.shape[1])
    half = drawn(weight.shape[0], weight.shape[1], weight)
    return half[:, pair.to(weight.device)] * sign.to(weight.device, weight.dtype)


def alike(num_rows: int, weight: Tensor) -> Tensor:
    pair, _ = pairs(weight.shape[1])
    return drawn(num_rows, weight.shape[1], weight)[:, pair.to(weight.device)]


def pairs(num_columns: int) -> tuple[Tensor, Tensor]:
    """Of each column, the number of its pair and its sign. Pairs lie apart, as an instruction may
    add up neighbours."""
    order = torch.randperm(num_columns, generator=torch.Generator().manual_seed(num_columns))
    return order // 2, 1.0 - 2.0 * (order % 2)


def drawn(num_rows: int, num_columns: int, like: Tensor) -> Tensor:
    random = torch.Generator().manual_seed(num_rows)
    return torch.randn(num_rows, num_columns, generator=random).to(like.device, like.dtype)
