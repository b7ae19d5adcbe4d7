"""Suggestions for misspelled words."""

from collections.abc import Iterable
from difflib import get_close_matches


def nearest(word: str, known: Iterable[str], most: int = 3) -> list[str]:
    """Return at most `most` known words similar to `word`, best first."""
    return get_close_matches(word, list(known), n=most, cutoff=0.6)
