"""Names and layouts under which files store parameters.

Shardwise stores matrices as [out, in] and fuses q|k|v and gate|up. Files split them, or store them
as [in, out] (GPT-2), or with the rows of each head in another order (GGUF files of the llama
architecture). Imports no torch.
"""

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace

from shardwise.params import ParamSpec
from shardwise.shards import Box

BUFFERS = re.compile(r"(^|\.)attn\.(masked_)?bias$|rotary_emb\.inv_freq$|^rope_freqs\.weight$")
"""Stored tensors that are no parameters."""


@dataclass(frozen=True)
class TensorNames:
    """The names under which files of one kind store a family's parameters.

    Attributes:
        stems: stored name, without `.weight` or `.bias`, for the name of a parameter within its
            block (`qkv`), or of a part that has a tensor of its own (`qkv.q`). `{}` is the layer.
        prefix: files saved without the output head may omit it from all names.
        transposed: parameters stored as [in, out].
        interleaved: parts whose heads store the two rows that RoPE rotates together as neighbours.
    """

    stems: Mapping[str, str]
    prefix: str = ""
    transposed: frozenset[str] = frozenset()
    interleaved: frozenset[str] = frozenset()


@dataclass(frozen=True)
class StoredPart:
    """The stored tensor with `rows` of a parameter; `shape` is the shape in the file."""

    name: str
    rows: slice
    shape: tuple[int, ...]
    transposed: bool = False
    interleaved: bool = False

    def slices(self, box: Box) -> tuple[slice, ...]:
        """Return the slices of the stored tensor that are a box of the parameter."""
        rows, *columns = box.slices
        rows = slice(rows.start - self.rows.start, rows.stop - self.rows.start)
        return (*columns, rows) if self.transposed else (rows, *columns)


def stored_parts(spec: ParamSpec, names: TensorNames) -> dict[str, StoredPart]:
    """Return the stored tensor of each part of a parameter, by the part's name; parts that are
    stored fused share one."""
    local = spec.short_name
    stem = local.removesuffix("_bias")
    ending = ".bias" if local.endswith("_bias") else ".weight"
    parts = {}
    row = 0
    for part in spec.all_parts:
        part_stem = f"{stem}.{part.name}"
        is_split = part_stem in names.stems
        rows = slice(row, row + part.size) if is_split else slice(0, spec.shape[0])
        stored_stem = names.stems[part_stem if is_split else stem].format(spec.layer)
        shape = (rows.stop - rows.start, *spec.shape[1:])
        transposed = stem in names.transposed and len(shape) == 2
        parts[part.name] = StoredPart(
            stored_stem + ending,
            rows,
            shape[::-1] if transposed else shape,
            transposed,
            interleaved=part_stem in names.interleaved,
        )
        row += part.size
    return parts


def distinct_parts(spec: ParamSpec, names: TensorNames) -> list[StoredPart]:
    """Return the stored tensors of a parameter in order, each once."""
    return list({part.name: part for part in stored_parts(spec, names).values()}.values())


def stored_shapes(specs: Iterable[ParamSpec], names: TensorNames) -> dict[str, tuple[int, ...]]:
    """Return the shape of every stored tensor of the parameters, by name, in order."""
    return {part.name: part.shape for spec in specs for part in stored_parts(spec, names).values()}


def fit_prefix(names: TensorNames, stored: Collection[str]) -> TensorNames:
    """Return `names` without their prefix if none of the `stored` names begins with it."""
    if any(name.startswith(names.prefix) for name in stored):
        return names
    stems = {ours: stem.removeprefix(names.prefix) for ours, stem in names.stems.items()}
    return replace(names, stems=stems)


def fit_tied(names: TensorNames, stored: Collection[str]) -> TensorNames:
    """Return `names` of a tied model whose file stores only the head, as `save_model` of
    safetensors does, with the head's name for the embedding."""
    embed, head = (f"{names.stems[name]}.weight" for name in ("embed", "head"))
    if embed in stored or head not in stored:
        return names
    return replace(names, stems={**names.stems, "embed": names.stems["head"]})


def check_stored(
    stored: Mapping[str, tuple[int, ...]],
    specs: Collection[ParamSpec],
    names: TensorNames,
    source: object,
) -> None:
    """Raise ValueError, naming the tensors, unless a file stores exactly the parameters `specs`.

    `stored` maps names to shapes. A tied head may be stored or not, since some files repeat it;
    buffers are ignored.
    """
    expected = stored_shapes((spec for spec in specs if spec.tied_to is None), names)
    known = stored_shapes(specs, names)
    missing = [name for name in expected if name not in stored]
    extra = [name for name in stored if name not in known and not BUFFERS.search(name)]
    misshapen = [
        f"{name} is {format_shape(stored[name])} and should be {format_shape(shape)}"
        for name, shape in expected.items()
        if name in stored and stored[name] != shape
    ]
    faults = [
        f"{what} {list_some(tensors)}"
        for what, tensors in (
            ("it lacks", missing),
            ("it has no parameter for", extra),
            ("its tensor", misshapen),
        )
        if tensors
    ]
    if faults:
        raise ValueError(
            f"{source} does not store the model that its config describes: {'; '.join(faults)}"
        )


def list_some(names: list[str], at_most: int = 3) -> str:
    """Join the first few names and count the rest, for messages."""
    rest = f" and {len(names) - at_most} more" if len(names) > at_most else ""
    return ", ".join(names[:at_most]) + rest


def format_shape(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape)) or "a scalar"
