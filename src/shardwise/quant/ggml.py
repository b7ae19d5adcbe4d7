"""Block sizes of the ggml tensor types: elements and bytes of each block."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Block:
    """The unit in which a kind stores a row: so many elements in so many bytes."""

    num_elements: int
    num_bytes: int


BLOCKS: dict[str, Block] = {
    "F32": Block(1, 4),
    "F16": Block(1, 2),
    "BF16": Block(1, 2),
    "Q8_0": Block(32, 34),
    "Q4_0": Block(32, 18),
    "Q4_1": Block(32, 20),
    "Q5_0": Block(32, 22),
    "Q5_1": Block(32, 24),
    "Q2_K": Block(256, 84),
    "Q3_K": Block(256, 110),
    "Q4_K": Block(256, 144),
    "Q5_K": Block(256, 176),
    "Q6_K": Block(256, 210),
    "Q8_K": Block(256, 292),
}
