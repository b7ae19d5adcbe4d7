"""Text of messages: the nearest known word, and lists of words."""

from collections.abc import Iterable
from difflib import get_close_matches


def nearest(word: str, known: Iterable[str], most: int = 3) -> list[str]:
    """Return at most `most` known words similar to `word`, best first."""
    return get_close_matches(word, list(known), n=most, cutoff=0.6)


def listed(items: Iterable[object]) -> str:
    """Return the items as text: "a, b and c"."""
    *most, last = map(str, items)
    return f"{', '.join(most)} and {last}" if most else last
