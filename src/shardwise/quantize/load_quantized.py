"""Loading quantized weights: rounded to nearest while they are read, or with their stored codes.

Only a strip of rows is in floating point at a time.
"""

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
from shardwise.params import ParamSpec
from shardwise.quant.format import QuantizedMatrix, quantize, stack_rows
from shardwise.quant.ggml_blocks import GgmlMatrix, stack_ggml
from shardwise.quant.scheme import Scheme, parse_quant
from shardwise.quant.weight import FloatMatrix, MatrixPart, QuantizedTable, QuantizedWeight
from shardwise.shards import Box, block_of, boxes

Weights = dict[str, Tensor | QuantizedWeight]


def load_quantized(
    source: ModelSource,
    config: ModelConfig,
    specs: Iterable[ParamSpec],
    layout: Layout,
    coord: Coord,
    dtype: torch.dtype,
    quant: str,
    device: torch.device | str = "cpu",
    multiplies_codes: bool = True,
) -> Weights:
    """Return the shards of the parameters `specs` on the rank at `coord`, by name; tied parameters
    have no entry.

    `quant` is a scheme, to which the matrices of blocks are rounded to nearest; `as-stored`, which
    keeps stored codes; `auto`, which keeps those that kernels multiply by, if the device has such
    kernels (`multiplies_codes`); or `none`. Shards are exact slices of what one rank would load.
    `specs` may be part of the model, as on a pipeline stage. Raises ValueError if `source` does not
    store exactly the model of `config`, and as `quantized_formats` does.
    """
    scheme = parse_quant(quant)
    with closing(open_weights(source, config)) as reader:
        path = source_path(source)
        formats = choose_formats(reader.formats, path, config, layout, quant, multiplies_codes)

        def load_part(spec: ParamSpec, box: Box) -> MatrixPart:
            if scheme is not None:
                return quantized_box(reader, spec, box, scheme)
            if (spec.name, box.part) in formats:
                return reader.read_quantized(spec, box)
            return float_box(reader, spec, box, dtype)

        weights: Weights = {}
        for spec in (spec for spec in specs if spec.tied_to is None):
            local = boxes(spec, layout, coord)
            if any((spec.name, box.part) in formats for box in local):
                parts = stack_parts([load_part(spec, box) for box in local])
                weight = QuantizedWeight(parts).to(device)
                is_table = spec.name == "embed"
                weights[spec.name] = QuantizedTable(weight.parts, dtype) if is_table else weight
            else:
                weights[spec.name] = read_param(reader, spec, layout, coord, dtype, device)
    return weights


def quantized_box(reader: Reader, spec: ParamSpec, box: Box, scheme: Scheme) -> QuantizedMatrix:
    """Read a box of a matrix and round it, a few rows at a time. With one scale per row whole rows
    are read, so that the scale does not depend on how the matrix is sharded."""
    start, stop = (box.slices[1].start, box.slices[1].stop) if scheme.group else (0, spec.shape[1])
    read = replace(box, start=(box.start[0], start), shape=(box.shape[0], stop - start))
    first = box.start[1] - start
    quantized = []
    for strip in strips(read, max(block_of(spec, part.dim) for part in spec.all_parts)):
        rows = torch.empty(strip.shape)
        read_box(reader, spec, strip, rows)
        quantized.append(quantize(rows, scheme).columns(first, first + box.shape[1]))
    return stack_rows(quantized)


def float_box(reader: Reader, spec: ParamSpec, box: Box, dtype: torch.dtype) -> FloatMatrix:
    rows = torch.empty(box.shape, dtype=dtype)
    read_box(reader, spec, box, rows)
    return FloatMatrix(rows)


def stack_parts(parts: Sequence[MatrixPart]) -> tuple[MatrixPart, ...]:
    """Return the parts, concatenated into one if all have the same format, so that they need one
    matmul."""
    quantized = [part for part in parts if isinstance(part, QuantizedMatrix)]
    schemes = {(each.scheme, each.scales.dtype) for each in quantized}
    if len(quantized) == len(parts) and len(schemes) == 1:
        return (stack_rows(quantized),)
    ggml = [part for part in parts if isinstance(part, GgmlMatrix)]
    if len(ggml) == len(parts) and len({each.kind for each in ggml}) == 1:
        return (stack_ggml(ggml),)
    return tuple(parts)
