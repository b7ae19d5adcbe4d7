"""Batch-invariant matrix products: a row has the same bits however many rows there are.

A library picks its kernel by the shape of a product, and kernels add in different orders. So a
token computed alone and the same token among 512 may differ in their last bits, and greedy decoding
then in its tokens (He et al. 2025, "Defeating nondeterminism in LLM inference"). Which numbers of
rows agree is a property of the machine. It is measured when a model is loaded, on matrices whose
terms cancel out, so that only the rounding errors of the order of addition are left. Then products
only ever have a number of rows that agrees: fewer rows are padded, more are split.

Shapes: M rows, K in, N out.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise.block import is_block_matrix
from shardwise.quant.format import strip_rows
from shardwise.quant.weight import QuantizedTable, QuantizedWeight

SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 128, 256)
"""Numbers of rows that are measured."""
TILE_ROWS = 32
"""The number of rows that others are compared with. If no other agrees, all products have it."""
SPLIT_ROWS = 64
"""Rows from which a product is compute-bound, so rows are split. A smaller product is bound by
reading the weight, so rows are padded."""
HEAD_BLOCK_BYTES = 8 << 20
"""Bytes of the head's weight per block, so that its second read hits the cache."""

Product = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class RowWeight:
    """A weight [N, K] for `model.layers.linear` whose product is batch-invariant."""

    product: Product
    sizes: tuple[int, ...]

    def apply(self, x: Tensor) -> Tensor:
        """x [..., K] -> [..., N]."""
        y = product_in_sizes(self.product, self.sizes, flat_rows(x))
        return y.view(*x.shape[:-1], y.shape[1])


def flat_rows(x: Tensor) -> Tensor:
    """Return x [..., K] as [M, K], also where a rank has no columns."""
    return x.reshape(x.shape[:-1].numel(), x.shape[-1])


@dataclass(frozen=True)
class Head:
    """The output projection of weight [V, D], in blocks of V. Logits are fp32: many would tie if
    they were rounded to bf16."""

    blocks: tuple[RowWeight, ...]

    def apply(self, x: Tensor) -> Tensor:
        """x [..., D] -> [..., V] in fp32, with an accuracy of 16 bits where weights are bf16."""
        return torch.cat([block.apply(x) for block in self.blocks], -1)


def row_weights(
    weights: Mapping[str, Tensor | QuantizedWeight],
) -> dict[str, Tensor | RowWeight | QuantizedTable]:
    """Return the weights of a model with batch-invariant matrices of its blocks.

    bf16 matrices on CPUs are packed once. Otherwise the library would pack them in every call,
    which is half the time of a decode step.
    """
    sizes: dict[tuple[int, ...], tuple[int, ...]] = {}
    tensors = {name: weight for name, weight in weights.items() if isinstance(weight, Tensor)}
    ready: dict[str, Tensor | RowWeight | QuantizedTable] = tensors | row_quantized(weights)
    for name, weight in tensors.items():
        if is_block_matrix(name):
            if weight.shape not in sizes:
                probe = packed_product(cancelling(weight))
                sizes[weight.shape] = agreeing_sizes(probe, weight)
            ready[name] = RowWeight(packed_product(weight), sizes[weight.shape])
    return ready


def row_quantized(
    weights: Mapping[str, Tensor | QuantizedWeight],
) -> dict[str, RowWeight | QuantizedTable]:
    """Return the quantized ones of `weights`, with batch-invariant products.

    A product dequantizes the same strips of rows whatever x is, so the sizes that agree are those
    of products with unquantized strips of the same shapes. Embedding tables stay as they are.
    """
    sizes: dict[tuple[tuple[int, int], ...], tuple[int, ...]] = {}
    ready: dict[str, RowWeight | QuantizedTable] = {}
    for name, weight in weights.items():
        if isinstance(weight, QuantizedTable):
            ready[name] = weight
        elif isinstance(weight, QuantizedWeight):
            shapes = tuple(part.shape for part in weight.parts)
            if shapes not in sizes:
                first = next(each for each in weights.values() if isinstance(each, Tensor))
                probe = weight.like(cancelling(first.new_empty(weight.shape)))
                sizes[shapes] = agreeing_sizes(probe.apply, first.new_empty(weight.shape))
            ready[name] = RowWeight(weight.apply, sizes[shapes])
    return ready


def head_of(
    weight: Tensor | QuantizedWeight, dtype: torch.dtype
) -> tuple[Head, Tensor | QuantizedTable]:
    """Return the output projection of weight [V, D], and the embedding table in `dtype`."""
    if isinstance(weight, QuantizedWeight):
        return quantized_head(weight), QuantizedTable(weight.parts, dtype)
    num_rows = max(1, HEAD_BLOCK_BYTES // (weight.shape[1] * weight.element_size()))
    blocks = weight.split(num_rows)
    sizes = {}
    for block in blocks:
        if block.shape not in sizes:
            sizes[block.shape] = agreeing_sizes(fp32_product(cancelling(block)), block)
    row_blocks = tuple(RowWeight(fp32_product(block), sizes[block.shape]) for block in blocks)
    return Head(row_blocks), weight


def quantized_head(weight: QuantizedWeight) -> Head:
    """Return an output projection with fp32 products, which dequantizes a strip of rows at a
    time."""
    (part,) = weight.parts
    blocks = [QuantizedWeight((part.rows(*strip),)) for strip in strip_rows(weight.shape)]
    sizes = {}
    for block in blocks:
        if block.shape not in sizes:
            probe = block.like(cancelling(torch.empty(block.shape)))
            sizes[block.shape] = agreeing_sizes(probe.apply, torch.empty(block.shape))
    return Head(
        tuple(RowWeight(partial(apply_in_fp32, block), sizes[block.shape]) for block in blocks)
    )


def apply_in_fp32(weight: QuantizedWeight, x: Tensor) -> Tensor:
    return weight.apply(x.float())


def packed_product(weight: Tensor) -> Product:
    """Return the product with weight [N, K], which the caller may free afterwards."""
    if not is_packable(weight):
        return lambda x: F.linear(x, weight)
    packed = torch.ops.mkldnn._reorder_linear_weight(weight)
    return lambda x: torch.ops.mkldnn._linear_pointwise(x, packed, None, "none", [], "")


def fp32_product(weight: Tensor) -> Product:
    """Return the product with weight [N, K], in fp32.

    On CPUs no product of torch takes bf16 and returns fp32, but one can add to its fp32 sums before
    it rounds them. Subtracting the rounded product leaves the rounding error.
    """
    if weight.dtype == torch.float32:
        return packed_product(weight)
    if weight.device.type == "cuda":
        return lambda x: torch.mm(x, weight.t(), out_dtype=torch.float32)
    if not is_packable(weight):
        return lambda x: add_rounding_error(
            rounded := F.linear(x, weight), torch.addmm(rounded, x, weight.t(), beta=-1)
        )
    packed = torch.ops.mkldnn._reorder_linear_weight(weight)

    def product(x: Tensor) -> Tensor:
        rounded = torch.ops.mkldnn._linear_pointwise(x, packed, None, "none", [], "")
        error = torch.ops.mkldnn._linear_pointwise.binary(x, -rounded, packed, None, "add")
        return add_rounding_error(rounded, error)

    return product


def add_rounding_error(rounded: Tensor, error: Tensor) -> Tensor:
    return rounded.float().add_(error)


def is_packable(weight: Tensor) -> bool:
    on_cpu = weight.device.type == "cpu" and weight.dtype == torch.bfloat16
    return on_cpu and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def product_in_sizes(product: Product, sizes: tuple[int, ...], rows: Tensor) -> Tensor:
    """Return the product of rows [M, K], computed in chunks of those sizes."""
    if len(rows) in sizes:
        return product(rows)
    results = []
    for start, count, size in row_chunks(len(rows), sizes):
        chunk = rows[start : start + count]
        padded = chunk if count == size else F.pad(chunk, (0, 0, 0, size - count))
        results.append(product(padded)[:count])
    return results[0] if len(results) == 1 else torch.cat(results)


def row_chunks(num_rows: int, sizes: tuple[int, ...]) -> Iterator[tuple[int, int, int]]:
    """Yield (start, rows, padded size) of each chunk."""
    start = 0
    while start < num_rows:
        rest = num_rows - start
        full = [
            size for size in sizes if size <= rest and (size >= SPLIT_ROWS or size == sizes[-1])
        ]
        size = max(full) if full else min(size for size in sizes if size >= rest)
        yield start, min(size, rest), size
        start += size


def agreeing_sizes(product: Product, weight: Tensor) -> tuple[int, ...]:
    """Return the numbers of rows, of SIZES, at which the product with a weight of this shape gives
    rows of the same bits."""
    rows = paired_rows(SIZES[-1], weight)

    def agrees(size: int, expected: Tensor) -> bool:
        """Compare rows at the start of the product and elsewhere."""
        return all(
            torch.equal(product(rows[start : start + size]), expected[start : start + size])
            for start in probe_starts(size)
        )

    def sizes_like(tile: int) -> tuple[int, ...]:
        expected = torch.cat([product(chunk) for chunk in rows.split(tile)])
        return tuple(size for size in SIZES if agrees(size, expected))

    sizes = sizes_like(TILE_ROWS)
    return sizes if TILE_ROWS in sizes else tuple(sorted({1, *sizes_like(1)}))


def probe_starts(size: int) -> tuple[int, ...]:
    last = SIZES[-1] - size
    if last == 0:
        return (0,)
    return (1, last) if size <= SPLIT_ROWS else (last,)


def cancelling(weight: Tensor) -> Tensor:
    """Return a random matrix of the same shape whose columns cancel out in pairs when multiplied
    with `paired_rows`.

    Of a sum only the errors of its partial sums are left, which rounding to bf16 does not hide.
    """
    pair, sign = column_pairs(weight.shape[1])
    half = random_like(weight.shape[0], weight.shape[1], weight)
    return half[:, pair.to(weight.device)] * sign.to(weight.device, weight.dtype)


def paired_rows(num_rows: int, weight: Tensor) -> Tensor:
    """Return random rows [num_rows, K] with equal numbers in the columns of a pair."""
    pair, _ = column_pairs(weight.shape[1])
    return random_like(num_rows, weight.shape[1], weight)[:, pair.to(weight.device)]


def column_pairs(num_columns: int) -> tuple[Tensor, Tensor]:
    """Return the number of each column's pair, and its sign.

    The columns of a pair are not neighbours, since an instruction may add neighbours up first.
    """
    order = torch.randperm(num_columns, generator=torch.Generator().manual_seed(num_columns))
    return order // 2, 1.0 - 2.0 * (order % 2)


def random_like(num_rows: int, num_columns: int, like: Tensor) -> Tensor:
    """Return normal numbers [num_rows, num_columns] with the device and dtype of `like`."""
    random = torch.Generator().manual_seed(num_rows)
    return torch.randn(num_rows, num_columns, generator=random).to(like.device, like.dtype)
