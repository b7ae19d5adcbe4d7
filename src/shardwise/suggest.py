"""Nearest known words for a misspelled one."""

from collections.abc import Iterable
from difflib import get_close_matches


def nearest(word: str, known: Iterable[str], most: int = 3) -> list[str]:
    """The names that `word` may have been meant for, best first."""
    return get_close_matches(word, list(known), n=most, cutoff=0.6)
