"""Loading a model quantized: rounded as it is read, or kept as it is stored. Only a strip of it is
plain at a time."""

from collections.abc import Iterable, Sequence
from contextlib import closing
from dataclasses import replace

import torch
from torch import Tensor

from shardwise.config import ModelConfig
from shardwise.formats.load import open_weights
from shardwise.formats.model_source import ModelSource, source_path
from shardwise.formats.reader import Reader, read_box, read_param, strips
from shardwise.formats.storage_formats import choose_formats
from shardwise.layout import Coord, Layout
from shardwise.params import Box, ParamSpec, block_of, boxes
from shardwise.quant.format import QuantizedMatrix, quantize, stack_rows
from shardwise.quant.ggml_blocks import GgmlMatrix, stack_ggml
from shardwise.quant.scheme import Scheme, parse_quant
from shardwise.quant.weight import FloatMatrix, MatrixPart, QuantizedTable, QuantizedWeight

Weights = dict[str, Tensor | QuantizedWeight]


def load_quantized(
    source: ModelSource,
    config: ModelConfig,
    specs: Iterable[ParamSpec],
    layout: Layout,
    coord: Coord,
    dtype: torch.dtype,
    quant: str | None,
    device: torch.device | str = "cpu",
) -> Weights:
    """As `load_weights`, with the matrices of blocks quantized: to the scheme `quant` by rounding
    to nearest, or as they are stored; with None none is. What a rank holds are slices of what one
    rank would hold. `specs` may be part of the model, as on a pipeline stage. Raises ValueError as
    `quantized_formats` does."""
    scheme = parse_quant(quant) if quant else None
    with closing(open_weights(source, config)) as reader:
        formats = (
            choose_formats(reader.formats, source_path(source), config, layout, quant)
            if quant
            else {}
        )

        def piece(spec: ParamSpec, box: Box) -> MatrixPart:
            if scheme is not None:
                return quantized_box(reader, spec, box, scheme)
            is_kept = (spec.name, box.part) in formats
            return (
                reader.read_quantized(spec, box) if is_kept else float_box(reader, spec, box, dtype)
            )

        weights: Weights = {}
        for spec in (spec for spec in specs if spec.tied_to is None):
            held = boxes(spec, layout, coord)
            if any((spec.name, box.part) in formats for box in held):
                weight = QuantizedWeight(joined([piece(spec, box) for box in held])).to(device)
                weights[spec.name] = (
                    QuantizedTable(weight.parts, dtype) if spec.name == "embed" else weight
                )
            else:
                weights[spec.name] = read_param(reader, spec, layout, coord, dtype, device)
    return weights


def quantized_box(reader: Reader, spec: ParamSpec, box: Box, scheme: Scheme) -> QuantizedMatrix:
    """A box of a matrix, rounded a few rows at a time. Where a row has one scale it is read whole,
    so that its scale is that of all of it, whoever holds which part."""
    start, stop = (box.slices[1].start, box.slices[1].stop) if scheme.group else (0, spec.shape[1])
    read = replace(box, start=(box.start[0], start), shape=(box.shape[0], stop - start))
    pieces = []
    for strip in strips(read, max(block_of(spec, part.dim) for part in spec.rows)):
        rows = torch.empty(strip.shape)
        read_box(reader, spec, strip, rows)
        pieces.append(
            quantize(rows, scheme).columns(
                box.start[1] - start, box.start[1] - start + box.shape[1]
            )
        )
    return stack_rows(pieces)


def float_box(reader: Reader, spec: ParamSpec, box: Box, dtype: torch.dtype) -> FloatMatrix:
    rows = torch.empty(box.shape, dtype=dtype)
    read_box(reader, spec, box, rows)
    return FloatMatrix(rows)


def joined(pieces: Sequence[MatrixPart]) -> tuple[MatrixPart, ...]:
    """The pieces, those of one form in one: a product is then one product."""
    quantized = [piece for piece in pieces if isinstance(piece, QuantizedMatrix)]
    if (
        len(quantized) == len(pieces)
        and len({(each.scheme, each.scales.dtype) for each in quantized}) == 1
    ):
        return (stack_rows(quantized),)
    blocks = [piece for piece in pieces if isinstance(piece, GgmlMatrix)]
    if len(blocks) == len(pieces) and len({each.kind for each in blocks}) == 1:
        return (stack_ggml(blocks),)
    return tuple(pieces)
