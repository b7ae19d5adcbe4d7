"""In which pieces the loss goes through the rows of its logits. The planner counts them, so this
imports no torch."""

from collections.abc import Iterator

SOFTMAX_BYTES = 24 << 20
PRODUCT_BYTES = 64 << 20
"""At most so much of logits is there at a time, and of those in fp32."""


def chunks(num_rows: int, most: int) -> Iterator[slice]:
    """Even slices of at most `most` rows."""
    size = longest_chunk(num_rows, most)
    return (slice(a, min(a + size, num_rows)) for a in range(0, num_rows, max(1, size)))


def longest_chunk(num_rows: int, most: int) -> int:
    """Rows of the longest of them; at least one, if there is any."""
    number = -(-num_rows // max(1, most))
    return -(-num_rows // max(1, number))
