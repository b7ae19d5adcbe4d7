"""GGUF headers and block formats, against the `gguf` package and against files that are broken in
every way."""

import math
import os
import struct
import subprocess
import sys
import time
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFEndian, GGUFReader, GGUFWriter
from hypothesis import given, settings
from hypothesis import strategies as st

from examples import examples
from shardwise.formats.gguf.gguf_file import Gguf, read_gguf
from shardwise.formats.gguf.gguf_reader import read_tensor
from shardwise.quant.ggml import BLOCKS
from shardwise.quant.ggml_decode import decode_blocks
from smollm2 import smollm2_gguf

FLOATS = ("F32", "F16", "BF16")
# Where a block holds f16 scales. Other bytes of a block may be anything; a scale should be finite.
SCALES = {
    "Q8_0": [0], "Q4_0": [0], "Q4_1": [0, 2], "Q5_0": [0], "Q5_1": [0, 2],
    "Q2_K": [80, 82], "Q3_K": [108], "Q4_K": [0, 2], "Q5_K": [0, 2], "Q6_K": [208],
}  # fmt: skip
REFERENCE_KINDS = [*FLOATS, *SCALES]  # Q8_K, never in a file, is one the package does not decode
ROWS = 7
COLUMNS = 768


def draw_bytes(kind: str, num_rows: int, num_columns: int, seed: int) -> np.ndarray:
    """Random rows of a kind as the bytes of a file: every pattern of bits, but finite scales of
    both signs."""
    random = np.random.default_rng(seed)
    if kind in FLOATS:
        values = random.standard_normal((num_rows, num_columns)).astype(np.float32)
        return gguf.quants.quantize(values, GGMLQuantizationType[kind]).view(np.uint8)
    block = BLOCKS[kind]
    blocks = random.integers(
        0, 256, (num_rows * num_columns // block.num_elements, block.num_bytes), np.uint8
    )
    for at in SCALES[kind]:
        scale = random.standard_normal((len(blocks), 1)).astype("<f2")
        blocks[:, at : at + 2] = scale.view(np.uint8)
    return blocks.reshape(num_rows, -1)


def expected(raw: np.ndarray, kind: str) -> torch.Tensor:
    stored = raw.view({"F32": np.float32, "F16": np.float16}.get(kind, np.uint8))
    return torch.from_numpy(np.array(gguf.quants.dequantize(stored, GGMLQuantizationType[kind])))


def same_bits(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    return ours.shape == theirs.shape and torch.equal(
        ours.view(torch.int32), theirs.view(torch.int32)
    )


def add(writer: GGUFWriter, name: str, raw: np.ndarray, kind: str) -> None:
    stored = raw.view({"F32": np.float32, "F16": np.float16}.get(kind, np.uint8))
    writer.add_tensor(name, stored, raw_dtype=GGMLQuantizationType[kind])


def write(writer: GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


METADATA = {
    "t.flag": True,
    "t.count": 70_000,
    "t.negative": -3,
    "t.real": 0.5,
    "t.text": "naïve ✓",
    "t.words": ["", "a", "Ġthe"],
    "t.ids": [3, -1, 2**31 - 1],
    "t.reals": [0.25, -1.5],
    "t.flags": [True, False, True],
    "t.nested": [[[1, 2], [3]], [[-4]]],
    "t.nested_words": [["a", ""], ["Ġthe"]],
}


def new_writer(path: Path, endian: GGUFEndian = GGUFEndian.LITTLE, **options: int) -> GGUFWriter:
    writer = GGUFWriter(path, "llama", endianess=endian, **options)
    writer.add_bool("t.flag", True)
    writer.add_uint32("t.count", 70_000)
    writer.add_int64("t.negative", -3)
    writer.add_float64("t.real", 0.5)
    writer.add_string("t.text", "naïve ✓")
    for key in ("t.words", "t.ids", "t.reals", "t.flags", "t.nested", "t.nested_words"):
        writer.add_array(key, METADATA[key])
    return writer


@pytest.fixture(scope="module")
def every_kind(tmp_path_factory: pytest.TempPathFactory) -> Gguf:
    """One file with a matrix of every kind, a vector, and a stack of three matrices."""
    path = tmp_path_factory.mktemp("gguf") / "kinds.gguf"
    writer = new_writer(path)
    for seed, kind in enumerate(REFERENCE_KINDS):
        add(writer, kind, draw_bytes(kind, ROWS, COLUMNS, seed), kind)
    add(writer, "vector", draw_bytes("Q4_1", 1, COLUMNS, 50).reshape(-1), "Q4_1")
    add(writer, "stack", draw_bytes("Q6_K", 15, COLUMNS, 51).reshape(3, 5, -1), "Q6_K")
    write(writer)
    return read_gguf(path)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, bytes]:
    """A small whole file, to be broken; the path is free to write to."""
    path = tmp_path_factory.mktemp("gguf") / "small.gguf"
    writer = new_writer(path)
    add(writer, "norm", draw_bytes("F32", 1, 5, 0).reshape(-1), "F32")
    add(writer, "matrix", draw_bytes("Q4_1", 3, 64, 1), "Q4_1")
    add(writer, "other", draw_bytes("Q8_0", 2, 32, 2), "Q8_0")
    write(writer)
    return path, path.read_bytes()


def test_metadata_becomes_plain_values(every_kind: Gguf) -> None:
    ours = {key: value for key, value in every_kind.metadata.items() if key.startswith("t.")}
    assert ours == METADATA
    assert [type(value) for value in ours.values()] == [type(value) for value in METADATA.values()]
    assert all(type(flag) is bool for flag in ours["t.flags"])
    assert every_kind.metadata["general.architecture"] == "llama"


def test_block_sizes_are_the_formats() -> None:
    for kind, block in BLOCKS.items():
        assert (block.num_elements, block.num_bytes) == gguf.GGML_QUANT_SIZES[
            GGMLQuantizationType[kind]
        ]


@pytest.mark.parametrize("kind", REFERENCE_KINDS)
def test_every_kind_decodes_bit_for_bit(kind: str, every_kind: Gguf) -> None:
    tensor = every_kind.tensors[kind]
    assert (tensor.shape, tensor.kind) == ((ROWS, COLUMNS), kind)
    raw = draw_bytes(kind, ROWS, COLUMNS, REFERENCE_KINDS.index(kind))
    assert np.array_equal(every_kind.raw_rows(kind, 0, ROWS), raw.reshape(-1))
    assert same_bits(read_tensor(every_kind, kind), expected(raw, kind))
    assert same_bits(
        decode_blocks(torch.from_numpy(raw), kind, (ROWS, COLUMNS)), expected(raw, kind)
    )


@pytest.mark.parametrize("kind", REFERENCE_KINDS)
@settings(max_examples=examples(10), deadline=None)
@given(seed=st.integers(0, 2**32 - 1), num_rows=st.integers(0, 4))
def test_drawn_blocks_decode_bit_for_bit(kind: str, seed: int, num_rows: int) -> None:
    raw = draw_bytes(kind, max(num_rows, 1), 512, seed)
    ours = decode_blocks(torch.from_numpy(raw[:num_rows].copy()), kind, (num_rows, 512))
    assert same_bits(ours, expected(raw, kind)[:num_rows])


def test_more_blocks_than_one_slice_decode_alike() -> None:
    raw = draw_bytes("Q4_K", 1500, 256, 3)  # 384,000 weights: three slices, the last one short
    assert same_bits(
        decode_blocks(torch.from_numpy(raw), "Q4_K", (1500, 256)), expected(raw, "Q4_K")
    )


def test_q8_k_is_a_float_scale_times_signed_bytes() -> None:
    quants = np.random.default_rng(0).integers(-128, 128, 256)
    raw = struct.pack("<f256b16h", -0.37, *quants, *range(16))
    ours = decode_blocks(torch.frombuffer(bytearray(raw), dtype=torch.uint8), "Q8_K", (256,))
    assert ours.tolist() == [float(np.float32(-0.37) * np.float32(q)) for q in quants]


@settings(max_examples=examples(60), deadline=None)
@given(name=st.sampled_from([*REFERENCE_KINDS, "stack"]), data=st.data())
def test_rows_alone_equal_rows_of_the_whole(
    every_kind: Gguf, name: str, data: st.DataObject
) -> None:
    num_rows = every_kind.tensors[name].shape[0]
    start = data.draw(st.integers(0, num_rows))
    stop = data.draw(st.integers(start, num_rows))
    dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16]))
    whole = read_tensor(every_kind, name)
    assert torch.equal(
        read_tensor(every_kind, name, start, stop, dtype), whole[start:stop].to(dtype)
    )


def test_a_stack_of_matrices_keeps_its_shape(every_kind: Gguf) -> None:
    assert every_kind.tensors["stack"].shape == (3, 5, COLUMNS)
    raw = draw_bytes("Q6_K", 15, COLUMNS, 51)
    assert same_bits(
        read_tensor(every_kind, "stack", 1, 3), expected(raw, "Q6_K").view(3, 5, COLUMNS)[1:]
    )


def test_a_vector_of_blocks_is_cut_at_blocks_only(every_kind: Gguf) -> None:
    whole = read_tensor(every_kind, "vector")
    assert torch.equal(read_tensor(every_kind, "vector", 64, 160), whole[64:160])
    with pytest.raises(ValueError, match="only at multiples of 32"):
        read_tensor(every_kind, "vector", 0, 33)


def test_raw_rows_share_the_mapped_bytes(every_kind: Gguf) -> None:
    rows = every_kind.raw_rows("Q4_1", 2, 5)
    assert not rows.flags.owndata and not rows.flags.writeable
    assert np.shares_memory(rows, every_kind.parts[0])
    assert rows.size == 3 * COLUMNS // 32 * 20


@pytest.mark.parametrize(("start", "stop"), [(-1, 2), (3, 2), (0, ROWS + 1), (ROWS + 1, ROWS + 2)])
def test_rows_that_are_not_there_are_refused(every_kind: Gguf, start: int, stop: int) -> None:
    with pytest.raises(ValueError, match=r"has rows 0 to 7, not"):
        read_tensor(every_kind, "Q4_0", start, stop)


def test_wrong_requests_are_refused(every_kind: Gguf) -> None:
    with pytest.raises(ValueError, match="no tensor 'missing'"):
        read_tensor(every_kind, "missing")
    with pytest.raises(ValueError, match="unknown GGUF tensor type IQ4_XS; supported"):
        decode_blocks(torch.zeros(8, dtype=torch.uint8), "IQ4_XS", (1, 8))
    with pytest.raises(ValueError, match="blocks hold 32 weights in 20 bytes"):
        decode_blocks(torch.zeros(21, dtype=torch.uint8), "Q4_1", (1, 32))
    with pytest.raises(ValueError, match=r"torch\.float32"):
        decode_blocks(torch.zeros(20), "Q4_1", (1, 32))


def test_opening_reads_no_tensor_and_imports_no_torch(
    tmp_path: Path, small: tuple[Path, bytes]
) -> None:
    """A tensor of 8 GiB, a hole in a sparse file, opens in a fraction of the seconds that reading
    it takes."""
    path = tmp_path / "large.gguf"
    rows = 2**21
    entry = tensor_entry("large", (1024, rows), kind=0, offset=0)
    path.write_bytes(header(tensors=[entry]))
    with path.open("r+b") as file:
        file.truncate(len(header(tensors=[entry])) + rows * 4096)
    start = time.process_time()
    large = read_gguf(path)
    assert not large.raw_rows("large", rows - 2, rows).any()
    assert time.process_time() - start < 0.5
    code = (
        "import sys, shardwise.formats.gguf.gguf_file as g; g.read_gguf(sys.argv[1]); "
        "sys.exit('torch' in "
        "sys.modules)"
    )
    small[0].write_bytes(small[1])
    subprocess.run([sys.executable, "-c", code, str(small[0])], check=True)


# The real model


@pytest.fixture(scope="module")
def real() -> Gguf:
    return read_gguf(smollm2_gguf())


@pytest.fixture(scope="module")
def real_reference() -> GGUFReader:
    return GGUFReader(smollm2_gguf())


def test_the_real_header_equals_the_reference(real: Gguf, real_reference: GGUFReader) -> None:
    theirs = {
        key: field.contents()
        for key, field in real_reference.fields.items()
        if not key.startswith("GGUF.")
    }
    assert real.metadata == theirs
    assert len(real.metadata["tokenizer.ggml.tokens"]) == 49152
    assert [tensor.name for tensor in real_reference.tensors] == list(real.tensors)
    for theirs in real_reference.tensors:
        ours = real.tensors[theirs.name]
        assert ours.shape == tuple(reversed(theirs.shape.tolist()))
        assert (ours.kind, ours.offset, ours.num_bytes) == (
            theirs.tensor_type.name,
            theirs.data_offset,
            theirs.n_bytes,
        )


def test_real_weights_decode_bit_for_bit(real: Gguf, real_reference: GGUFReader) -> None:
    for theirs in real_reference.tensors:
        if theirs.name.startswith("blk.29."):
            weights = torch.from_numpy(
                np.array(gguf.quants.dequantize(theirs.data, theirs.tensor_type))
            )
            assert same_bits(read_tensor(real, theirs.name), weights)
    embedding = real_reference.tensors[0]
    rows = torch.from_numpy(
        gguf.quants.dequantize(embedding.data[40_000:40_100], embedding.tensor_type)
    )
    assert same_bits(read_tensor(real, "token_embd.weight", 40_000, 40_100), rows)


# Models in parts


@pytest.fixture
def parts(tmp_path: Path) -> list[Path]:
    writer = new_writer(tmp_path / "model.gguf", split_max_tensors=2)
    for seed in range(5):
        add(writer, f"w{seed}", draw_bytes("Q5_K", 4, 256, seed), "Q5_K")
    write(writer)
    return [tmp_path / f"model-0000{part}-of-00003.gguf" for part in (1, 2, 3)]


def test_parts_are_read_as_one_model(parts: list[Path]) -> None:
    model = read_gguf(parts[0])
    assert model.metadata["t.words"] == METADATA["t.words"]
    assert sorted(model.tensors) == ["w0", "w1", "w2", "w3", "w4"]
    assert sorted({tensor.part for tensor in model.tensors.values()}) == [0, 1, 2]
    for seed in range(5):
        assert same_bits(
            read_tensor(model, f"w{seed}"), expected(draw_bytes("Q5_K", 4, 256, seed), "Q5_K")
        )


def test_parts_that_do_not_belong_together_are_refused(parts: list[Path]) -> None:
    refuse(parts[1], "not the first of its 3 parts")
    bytes_of = [part.read_bytes() for part in parts]
    parts[1].write_bytes(bytes_of[2])
    refuse(parts[0], "part 2 of 3", named=parts[1])
    parts[1].unlink()
    refuse(parts[0], "it does not exist", named=parts[1])
    renamed = parts[0].with_name("renamed.gguf")
    renamed.write_bytes(bytes_of[0])
    refuse(renamed, "has to end in -00001-of-00003.gguf")
    parts[1].write_bytes(bytes_of[1].replace(b"w2", b"w0"))
    refuse(parts[0], "'w0' is also in another part", named=parts[1])
    parts[1].write_bytes(bytes_of[1])
    parts[0].write_bytes(set_number(bytes_of[0], b"split.tensors.count", struct.pack("<i", 9)))
    refuse(parts[0], "it should have 9 tensors")


# Broken files


def refuse(path: Path, reason: str, named: Path | None = None) -> None:
    """Opening the path raises ValueError with one line that names the file and the reason."""
    with pytest.raises(ValueError) as caught:
        read_gguf(path)
    sentence = str(caught.value)
    assert str(named or path) in sentence and reason in sentence and "\n" not in sentence


def string(text: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + text


def tensor_entry(name: str, dims: tuple[int, ...], kind: int, offset: int) -> bytes:
    """A line of the tensor table; dims innermost first, as in the file."""
    shape = struct.pack(f"<I{len(dims)}Q", len(dims), *dims)
    return string(name.encode()) + shape + struct.pack("<IQ", kind, offset)


def header(
    tensors: list[bytes] | None = None,
    entries: list[bytes] | None = None,
    version: int = 3,
    alignment: int = 32,
) -> bytes:
    tensors = tensors or []
    entries = entries or []
    whole = (
        b"GGUF"
        + struct.pack("<IQQ", version, len(tensors), len(entries))
        + b"".join([*entries, *tensors])
    )
    return whole + b"\0" * (-len(whole) % alignment)


def entry(value_type: int, value: bytes, key: bytes = b"key") -> bytes:
    return string(key) + struct.pack("<I", value_type) + value


def set_number(whole: bytes, key: bytes, value: bytes) -> bytes:
    at = whole.index(key) + len(key) + 4
    return whole[:at] + value + whole[at + len(value) :]


F32 = 0
Q4_1 = 3
IQ4_XS = 23
ALIGNMENT = b"general.alignment"
GOOD = tensor_entry("good", (4, 2), F32, 0)
DATA = bytes(4096)

BROKEN = {
    "empty": (b"", "only 0 bytes"),
    "not GGUF": (b"PK\3\4" + DATA, "letters GGUF"),
    "version 1": (header([GOOD], version=1) + DATA, "version 1"),
    "version of the other endian": (header([GOOD], version=0x03000000) + DATA, "big endian"),
    "cannot be so many tensors": (
        b"GGUF" + struct.pack("<IQQ", 3, 2**63, 0) + DATA,
        "its count of tensors",
    ),
    "cannot be so many entries": (
        b"GGUF" + struct.pack("<IQQ", 3, 0, 2**64 - 1) + DATA,
        "its count of metadata entries",
    ),
    "fewer entries than said": (b"GGUF" + struct.pack("<IQQ", 3, 0, 2) + DATA, "'' is repeated"),
    "key twice": (header(entries=[entry(0, b"1"), entry(0, b"1")]), "'key' is repeated"),
    "string past the end": (
        header(entries=[entry(8, struct.pack("<Q", 2**40))]) + DATA,
        "exceeds the file",
    ),
    "string just past the end": (
        header(entries=[entry(8, struct.pack("<Q", 100) + b"short")]),
        "exceeds the file",
    ),
    "string of nearly 2^64": (
        header(entries=[entry(8, struct.pack("<Q", 2**64 - 1))]),
        "exceeds the file",
    ),
    "not UTF-8": (header(entries=[entry(8, string(b"\xff\xfe"))]), "not UTF-8"),
    "truth value of 2": (header(entries=[entry(7, b"\2")]), "neither 0 nor 1"),
    "unknown type of value": (header(entries=[entry(13, bytes(8))]), "unknown type, 13"),
    "arrays nested without end": (
        header(entries=[entry(9, struct.pack("<IQ", 9, 1) * 5)]) + DATA,
        "arrays nested in more than 4 levels",
    ),
    "more nested arrays than bytes": (
        header(entries=[entry(9, struct.pack("<IQ", 9, 10_000))]) + bytes(100_000),
        "its count of items in an array, 10000, exceeds the size of the file",
    ),
    "array of unknown items": (
        header(entries=[entry(9, struct.pack("<IQ", 77, 1))]) + DATA,
        "unknown type, 77",
    ),
    "array past the end": (
        header(entries=[entry(9, struct.pack("<IQ", 12, 4000))]) + DATA,
        "in the middle",
    ),
    "array with an absurd count": (
        header(entries=[entry(9, struct.pack("<IQ", 8, 2**60))]) + DATA,
        "its count of items in an array",
    ),
    "alignment 24": (header(entries=[entry(4, struct.pack("<I", 24), ALIGNMENT)]), "power of two"),
    "alignment 0": (header(entries=[entry(4, struct.pack("<I", 0), ALIGNMENT)]), "power of two"),
    "alignment as text": (header(entries=[entry(8, string(b"32"), ALIGNMENT)]), "power of two"),
    "count of parts as text": (
        header(entries=[entry(8, string(b"3"), b"split.count")]),
        "number of its parts",
    ),
    "kind that is not read": (
        header([tensor_entry("w", (256,), IQ4_XS, 0)]) + DATA,
        "IQ4_XS; supported are",
    ),
    "kind that does not exist": (
        header([tensor_entry("w", (256,), 4_000_000_000, 0)]) + DATA,
        "kind 4000000000",
    ),
    "tensor twice": (header([GOOD, GOOD]) + DATA, "'good' is repeated"),
    "tensors overlap": (
        header([GOOD, tensor_entry("w", (4,), F32, 0)]) + DATA,
        "starts inside tensor",
    ),
    "unaligned": (
        header([tensor_entry("w", (4,), F32, 4)]) + DATA,
        "not a multiple of the alignment",
    ),
    "part of a block": (
        header([tensor_entry("w", (48, 2), Q4_1, 0)]) + DATA,
        "a multiple of the 32",
    ),
    "five dims": (header([tensor_entry("w", (1, 1, 1, 1, 1), F32, 0)]) + DATA, "5 dims"),
    "dim of 0": (header([tensor_entry("w", (4, 0), F32, 0)]) + DATA, "size 0"),
    "offset outside": (header([tensor_entry("w", (4,), F32, 2**40)]) + DATA, "truncated"),
    "offset of nearly 2^64": (
        header([tensor_entry("w", (4,), F32, 2**64 - 32)]) + DATA,
        "truncated",
    ),
    "tensor of 2^252 weights": (
        header([tensor_entry("w", (2**63,) * 4, F32, 0)]) + DATA,
        "truncated",
    ),
    "data missing": (header([GOOD]), "truncated"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_each_kind_of_damage_is_named(name: str, tmp_path: Path) -> None:
    whole, reason = BROKEN[name]
    path = tmp_path / "broken.gguf"
    path.write_bytes(whole)
    refuse(path, reason)


MANY = 1 << 21


@pytest.mark.parametrize(
    ("parts", "reason"),
    [
        ([(0, 2**30)], "it has 1073741824 items in an array, and at most 4194304 are supported"),
        ([(0, MANY)] * 3, "its arrays have more than 4194304 items in all"),
        ([(8, 2**28)], "its header is longer than 256 MiB"),
    ],
)
def test_metadata_is_bounded_in_its_sum(
    parts: list[tuple[int, int]], reason: str, tmp_path: Path
) -> None:
    """A file of 1 GB of arrays of bytes took 8.9 GB. The files are sparse."""
    path = tmp_path / "large.gguf"
    with path.open("wb") as file:
        file.write(b"GGUF" + struct.pack("<IQQ", 3, 0, len(parts)))
        for number, (kind, size) in enumerate(parts):
            value = struct.pack("<Q", size)
            if kind == 0:
                value = struct.pack("<IQ", kind, size)
            file.write(entry(9 if kind == 0 else kind, value, f"key{number}".encode()))
            file.seek(size, 1)
        file.truncate(file.tell() + 64)
    refuse(path, reason)


@pytest.mark.parametrize(
    ("tensors", "entries", "what"), [(2**20, 0, "tensors"), (0, 2**20, "metadata entries")]
)
def test_counts_are_bounded(tensors: int, entries: int, what: str, tmp_path: Path) -> None:
    path = tmp_path / "large.gguf"
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, tensors, entries))
    os.truncate(path, 1 << 26)
    refuse(path, f"it has 1048576 {what}, and at most")


def test_what_the_format_allows_is_read(tmp_path: Path) -> None:
    path = tmp_path / "allowed.gguf"
    scalar = tensor_entry("scalar", (), F32, 0)
    wide = tensor_entry("wide", (4,), F32, 128)
    aligned = entry(4, struct.pack("<I", 128), ALIGNMENT)
    nothing = entry(9, struct.pack("<IQ", 8, 0), b"nothing")
    path.write_bytes(header([wide, scalar], [aligned, nothing], version=2, alignment=128) + DATA)
    model = read_gguf(str(path))
    assert model.metadata["nothing"] == []
    assert (model.tensors["scalar"].shape, model.tensors["wide"].offset) == ((1,), 128 + 256)
    path.write_bytes(header())
    assert read_gguf(path).tensors == {}


def test_a_path_that_is_no_file_is_refused(tmp_path: Path) -> None:
    refuse(tmp_path, "it does not exist")
    refuse(tmp_path / "missing.gguf", "it does not exist")


def test_a_big_endian_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "big.gguf"
    writer = new_writer(path, GGUFEndian.BIG)
    add(writer, "norm", draw_bytes("F32", 1, 8, 0).reshape(-1), "F32")
    write(writer)
    refuse(path, "big endian")


def opens_or_refuses(path: Path) -> bool:
    """Opens a damaged file and, if that works, looks at every tensor; nothing but ValueError may be
    raised."""
    try:
        model = read_gguf(path)
    except ValueError as refusal:
        assert str(path) in str(refusal) and "\n" not in str(refusal)
        return False
    for name, tensor in model.tensors.items():
        block = BLOCKS[tensor.kind]
        assert tensor.num_bytes == math.prod(tensor.shape) // block.num_elements * block.num_bytes
        assert model.raw_rows(name, 0, tensor.shape[0]).size == tensor.num_bytes
    return True


@settings(max_examples=examples(150), deadline=5000)
@given(data=st.data())
def test_a_file_cut_short_anywhere_is_refused(
    small: tuple[Path, bytes], data: st.DataObject
) -> None:
    path, whole = small
    path.write_bytes(whole)
    needed = max(tensor.offset + tensor.num_bytes for tensor in read_gguf(path).tensors.values())
    path.write_bytes(whole[: data.draw(st.integers(0, needed - 1))])
    assert not opens_or_refuses(path)


@settings(max_examples=examples(300), deadline=5000)
@given(data=st.data())
def test_bytes_changed_in_the_header_are_refused_or_harmless(
    small: tuple[Path, bytes], data: st.DataObject
) -> None:
    path, whole = small
    changed = bytearray(whole)
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(whole) - 1))
        width = data.draw(st.integers(1, 8))
        changed[at : at + width] = data.draw(st.binary(min_size=width, max_size=width))
    path.write_bytes(changed)
    opens_or_refuses(path)


@settings(max_examples=examples(150), deadline=5000)
@given(
    noise=st.binary(max_size=300),
    head=st.sampled_from([b"", b"GGUF", b"GGUF\3\0\0\0", header([GOOD])[:-40]]),
)
def test_noise_is_refused_or_harmless(small: tuple[Path, bytes], noise: bytes, head: bytes) -> None:
    small[0].write_bytes(head + noise)
    opens_or_refuses(small[0])
