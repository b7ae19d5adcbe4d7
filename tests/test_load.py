"""Reading any box of a parameter from every kind of model file, as ZeRO needs, whose shards ignore
rows."""

import functools
import math
from collections.abc import Iterator
from contextlib import closing
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from examples import examples
from shardwise.cli import main
from shardwise.config import ModelConfig
from shardwise.formats import reader
from shardwise.formats.load import open_weights
from shardwise.formats.model_source import read_config
from shardwise.formats.reader import Reader, read_box
from shardwise.layout import Layout
from shardwise.params import ParamSpec, model_specs
from shardwise.shards import Box, boxes_within
from shardwise.train.settings import to_toml
from test_gguf_weights import write_gguf
from tiny_models import tiny_model
from tiny_training import build_data, tiny_settings
from whole_weights import load_weights

ONE = Layout()
COORD = ONE.coord(0)
FOLDERS = ["llama", "qwen3", "llama-biases", "gpt2"]
FILES = [
    ("llama", "F32"),
    ("llama-biases", "Q8_0"),
    ("mistral", "Q4_1"),
    ("qwen2", "F16"),
    ("gpt2", "Q8_0"),
]
SOURCES = [
    *(f"folder {name}" for name in FOLDERS),
    *(f"gguf {name} {kind}" for name, kind in FILES),
    "run",
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


def written(folder: Path, source: str) -> Path:
    """The model of a source, written once."""
    path = folder / source.replace(" ", "-")
    if source == "run":
        if not path.exists():
            file = folder / "c.toml"
            file.write_text(to_toml(tiny_settings(build_data(folder), path, steps=1, eval_every=0)))
            assert main(["train", str(file)]) == 0
        return path
    kind, name, *rest = source.split()
    if kind == "gguf":
        path = path.with_suffix(".gguf")
        return path if path.exists() else write_gguf(path, name, *rest)
    if not path.exists():
        tiny_model(name).save_pretrained(path)
    return path


@functools.lru_cache(maxsize=32)
def whole_of(path: Path) -> tuple[ModelConfig, dict[str, Tensor]]:
    config = read_config(path)
    return config, load_weights(path, config, model_specs(config), ONE, COORD, torch.float32)


@functools.lru_cache(maxsize=32)
def opened(path: Path) -> Reader:
    return open_weights(path, whole_of(path)[0])


def stored(config: ModelConfig) -> list[ParamSpec]:
    return [spec for spec in model_specs(config) if spec.tied_to is None]


def inside(part: Box, data: st.DataObject) -> Box:
    """A rectangle drawn within a part."""
    spans = [
        sorted(data.draw(st.lists(st.integers(0, size), min_size=2, max_size=2)))
        for size in part.shape
    ]
    start = tuple(first + a for first, (a, _) in zip(part.start, spans, strict=True))
    return Box(part.part, start, tuple(0 for _ in start), tuple(b - a for a, b in spans))


def read(path: Path, spec: ParamSpec, box: Box) -> Tensor:
    out = torch.full(box.shape, torch.nan)
    read_box(opened(path), spec, box, out)
    return out


@pytest.mark.parametrize("source", SOURCES)
@settings(max_examples=examples(40))
@given(data=st.data(), strip=st.integers(1, 3000))
def test_a_rectangle_is_the_slice_of_the_whole(
    folder: Path, source: str, data: st.DataObject, strip: int
) -> None:
    """Bit for bit, of any rows and columns, with files that keep the rows of a head in another
    order or many weights in a block; in strips of any size."""
    path = written(folder, source)
    config, weights = whole_of(path)
    spec = data.draw(st.sampled_from(stored(config)))
    parts = [box for box, _ in boxes_within(spec, ONE, COORD, 0, spec.numel)]
    box = inside(data.draw(st.sampled_from(parts)), data)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reader, "STRIP_ELEMENTS", strip)
        assert torch.equal(read(path, spec, box), weights[spec.name][box.slices]), (spec.name, box)


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("num_cuts", [1, 6])
def test_ranges_of_a_flat_tensor_are_read_piece_by_piece(
    folder: Path, source: str, num_cuts: int
) -> None:
    """Ranges as the shards of a unit need them: split anywhere, within a row and within a head."""
    path = written(folder, source)
    config, weights = whole_of(path)
    for spec in stored(config):
        flat = torch.full((spec.numel,), torch.nan)
        cuts = [spec.numel * cut // (num_cuts + 1) + cut % 2 for cut in range(1, num_cuts + 1)]
        for start, stop in pairwise([0, *cuts, spec.numel]):
            for box, first in boxes_within(spec, ONE, COORD, start, stop):
                read_box(
                    opened(path),
                    spec,
                    box,
                    flat[first : first + math.prod(box.shape)].view(box.shape),
                )
        assert torch.equal(flat.view(spec.shape), weights[spec.name]), spec.name


class Counting:
    """A reader that counts the elements it is asked for."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self.dtype = reader.dtype
        self.num_elements = 0

    def read(self, spec: ParamSpec, box: Box) -> Tensor:
        self.num_elements += math.prod(box.shape)
        return self._reader.read(spec, box)

    def close(self) -> None:
        self._reader.close()


def shares(spec: ParamSpec) -> Iterator[list[Box]]:
    """The rectangles of five equal shards."""
    for rank in range(5):
        cut = spec.numel * rank // 5, spec.numel * (rank + 1) // 5
        yield [box for box, _ in boxes_within(spec, ONE, COORD, *cut)]


@pytest.mark.parametrize("source", ["folder llama", "gguf llama F32", "run"])
def test_a_share_reads_little_more_than_itself(folder: Path, source: str) -> None:
    """Rounded up to whole heads, of q, k and v alone."""
    path = written(folder, source)
    config, _ = whole_of(path)
    with closing(Counting(open_weights(path, config))) as reader:
        for spec in stored(config):
            for share in shares(spec):
                reader.num_elements = 0
                for box in share:
                    read_box(reader, spec, box, torch.empty(box.shape))
                wanted = sum(math.prod(box.shape) for box in share)
                rounded = (
                    sum(2 * spec.head_dim * math.prod(box.shape[1:]) for box in share)
                    if spec.head_dim > 1
                    else 0
                )
                assert wanted <= reader.num_elements <= wanted + rounded, spec.name
