"""Spans: the tokens of each sequence that one step of serving runs. Imports no torch."""

from collections.abc import Sequence
from dataclasses import dataclass

BLOCK_TOKENS = 128
"""Attention adds up a context in blocks of this many positions, so a block must be whole pages.
`csrc/attention.h` has the same constant."""


@dataclass(frozen=True)
class TokenSpan:
    """The tokens of one sequence in a step: `num_tokens` from position `start`, and the pages of
    the sequence up to there."""

    start: int
    num_tokens: int
    pages: tuple[int, ...]


def padded_page_tables(spans: Sequence[TokenSpan]) -> list[list[int]]:
    """Return the page table of each span, padded with page 0 to the longest."""
    width = max(len(span.pages) for span in spans)
    return [[*span.pages, *[0] * (width - len(span.pages))] for span in spans]
