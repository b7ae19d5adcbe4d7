"""Block sizes of the ggml tensor types: elements and bytes of each block. Imports no torch."""

from dataclasses import dataclass


@dataclass(frozen=True)
class BlockSize:
    """The unit in which a tensor type stores a row: `num_elements` weights in `num_bytes` bytes."""

    num_elements: int
    num_bytes: int


BLOCKS: dict[str, BlockSize] = {
    "F32": BlockSize(1, 4),
    "F16": BlockSize(1, 2),
    "BF16": BlockSize(1, 2),
    "Q8_0": BlockSize(32, 34),
    "Q4_0": BlockSize(32, 18),
    "Q4_1": BlockSize(32, 20),
    "Q5_0": BlockSize(32, 22),
    "Q5_1": BlockSize(32, 24),
    "Q2_K": BlockSize(256, 84),
    "Q3_K": BlockSize(256, 110),
    "Q4_K": BlockSize(256, 144),
    "Q5_K": BlockSize(256, 176),
    "Q6_K": BlockSize(256, 210),
    "Q8_K": BlockSize(256, 292),
}
