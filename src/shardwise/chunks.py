"""Chunk sizes of the loss, which processes its logits a few rows at a time.

The planner counts the chunks, so this file imports no torch.
"""

from collections.abc import Iterator

PRODUCT_BYTES = 64 << 20
"""Upper limit on the bytes of logits in memory at once, in the dtype of the model."""
SOFTMAX_BYTES = 24 << 20
"""Upper limit on the bytes of logits in memory at once in fp32."""


def chunks(num_rows: int, most: int) -> Iterator[slice]:
    """Yield slices of `num_rows` rows, of equal length up to the last, at most `most` rows each."""
    size = longest_chunk(num_rows, most)
    return (slice(a, min(a + size, num_rows)) for a in range(0, num_rows, max(1, size)))


def longest_chunk(num_rows: int, most: int) -> int:
    """Return the rows of the longest chunk: at least 1, unless there are no rows."""
    number = -(-num_rows // max(1, most))
    return -(-num_rows // max(1, number))
