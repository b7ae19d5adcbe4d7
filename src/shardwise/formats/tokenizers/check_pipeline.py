"""Checks of the pipeline in a tokenizer.json, before the package `tokenizers` builds it.

The package trusts the file: some values make it panic, which prints a backtrace of Rust, and some
make a short text grow without limit. The checks look at keys rather than at `type`, which a file
may leave out.
"""

import base64
from collections.abc import Iterable, Mapping
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

MAX_GROWTH = 64
"""The most characters that a normalizer or decoder may make of one; Unicode's NFKC makes 18."""
MAX_COMPONENTS = 256
MAX_WORD_CHARS = 10_000
"""WordPiece needs time in the square of this; BERT has 100."""
LABEL = np.uint32(0x800000FF)
"""The bits of a unit of a double array that say which byte leads to it."""


def check_pipeline(content: Mapping[str, Any]) -> None:
    """Raise ValueError if the pipeline of a tokenizer.json can panic, or grow or take time without
    limit, or if it adds ids that no token has.

    Other faults are left to the package, which reports them.
    """
    normalizer = _objects("normalizer", content)
    decoder = _objects("decoder", content)
    for node in normalizer:
        if "precompiled_charsmap" in node:
            check_charsmap(node["precompiled_charsmap"])
    for name, nodes in (("normalizer", normalizer), ("decoder", decoder)):
        growth = prod(_growth(node) for node in nodes)
        if growth > MAX_GROWTH:
            raise ValueError(
                f"its {name} may make a text {growth:.3g} times as long, and at most {MAX_GROWTH} "
                "is supported"
            )
    for node in _objects("pre_tokenizer", content):
        if node.get("length") == 0:
            raise ValueError("its pre_tokenizer splits a text into pieces of length 0")
    model = content.get("model")
    if isinstance(model, dict):
        longest = model.get("max_input_chars_per_word", 0)
        if isinstance(longest, int) and longest > MAX_WORD_CHARS:
            raise ValueError(
                f"its max_input_chars_per_word is {longest:.6g}, and at most {MAX_WORD_CHARS} is "
                "supported"
            )
    ids = _known_ids(content)
    for node in _objects("post_processor", content):
        _check_post_processor(node, ids)


def _objects(stage: str, content: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the objects of one stage of the pipeline, its components among them."""
    found: list[dict[str, Any]] = []
    todo = [content.get(stage)]
    while todo:
        node = todo.pop()
        if isinstance(node, dict):
            found.append(node)
            todo += node.values()
        elif isinstance(node, list):
            todo += node
    if len(found) > MAX_COMPONENTS:
        raise ValueError(f"its {stage} has more than {MAX_COMPONENTS} components")
    return found


def _growth(node: Mapping[str, Any]) -> int:
    """Return at most how many characters a component makes of one; only replacing ones make
    more."""
    replacement = node.get("content")
    pattern = node.get("pattern")
    if not isinstance(replacement, str) or pattern is None:
        return 1
    text = pattern.get("String") if isinstance(pattern, dict) else pattern
    if isinstance(text, str) and text:
        return max(1, -(-len(replacement) // len(text)))
    return 1 + len(replacement)  # a regular expression may match between any two characters


def _known_ids(content: Mapping[str, Any]) -> set[Any]:
    model = content.get("model")
    vocab = model.get("vocab") if isinstance(model, dict) else None
    ids: set[Any] = set()
    if isinstance(vocab, dict):
        ids.update(index for index in vocab.values() if isinstance(index, int))
    elif isinstance(vocab, list):
        ids.update(range(len(vocab)))
    added = content.get("added_tokens")
    tokens = added if isinstance(added, list) else []
    ids.update(token["id"] for token in tokens if isinstance(token, dict) and _has_id(token))
    return ids


def _has_id(token: Mapping[str, Any]) -> bool:
    return isinstance(token.get("id"), int)


def _check_post_processor(node: Mapping[str, Any], known: set[Any]) -> None:
    """Check one object of a post-processor, which puts tokens around every text."""
    for pair in (node.get("sep"), node.get("cls")):
        if isinstance(pair, list) and len(pair) == 2:
            _check_ids(pair[0], [pair[1]], known)
    pieces = node.get("single")
    if not isinstance(pieces, list):
        return
    table = node.get("special_tokens")
    defined = table if isinstance(table, dict) else {}
    names = [_value(piece, "SpecialToken") for piece in pieces]
    for name in names:
        if name is not None and name not in defined:
            raise ValueError(f"its post_processor adds {name!r:.60}, which it does not define")
    texts = [name for name in (_value(piece, "Sequence") for piece in pieces) if name is not None]
    if texts != ["A"]:
        raise ValueError(
            f"its post_processor must put tokens around one text, not around {len(texts)}"
        )
    for name, token in defined.items():
        ids = token.get("ids") if isinstance(token, dict) else None
        _check_ids(name, ids if isinstance(ids, list) else [], known)


def _value(piece: Any, kind: str) -> str | None:
    """Return the id of a piece of a template if it is of that kind."""
    node = piece.get(kind) if isinstance(piece, dict) else None
    name = node.get("id") if isinstance(node, dict) else None
    return name if isinstance(name, str) else None


def _check_ids(token: Any, ids: Iterable[Any], known: set[Any]) -> None:
    for index in ids:
        if isinstance(index, int) and index not in known:
            raise ValueError(
                f"its post_processor gives {token!r:.60} the id {index!r:.40}, which no token has"
            )


# -- SentencePiece's precompiled normalization
# ----------------------------------------------------------------------------------------------


def check_charsmap(text: Any) -> None:
    """Raise ValueError unless a `precompiled_charsmap` of SentencePiece can be walked with any
    text.

    It is, in base64, the bytes of a double-array trie (u32), the trie (u32 each), and strings that
    end in NUL. From a node at `base`, byte `b` leads to the unit at `base ^ b`, whose label must be
    `b`; a value is the place of the string that replaces the text so far.
    """
    try:
        raw = base64.b64decode(text, validate=True)
        num_bytes = int.from_bytes(raw[:4], "little")
        units = np.frombuffer(raw[4 : 4 + num_bytes], "<u4")
        strings = raw[4 + num_bytes :]
        strings.decode()
    except (TypeError, ValueError):
        raise ValueError("its precompiled_charsmap is damaged; download the file again") from None
    if len(raw) < 4 + num_bytes or not len(units):
        raise ValueError("its precompiled_charsmap is incomplete; download the file again")
    labels = units & LABEL
    is_node = (labels > 0) & (labels < 256)
    is_node[0] = True
    nodes = units[is_node]
    offsets = nodes >> 10 << ((nodes & 512) >> 6)
    bases = np.flatnonzero(is_node).astype(np.uint32) ^ offsets
    has_value = (nodes >> 8 & 1).astype(bool)
    if (bases | 255).max() >= len(units):  # every byte may follow
        raise ValueError("its precompiled_charsmap points outside itself; download the file again")
    starts = units[bases[has_value]] & np.uint32(0x7FFFFFFF)
    _check_strings(strings, starts)


def _check_strings(strings: bytes, starts: NDArray[np.uint32]) -> None:
    """Check that a string of bounded length begins at each of `starts`."""
    data = np.frombuffer(strings, np.uint8)
    is_inside = not len(starts) or starts.max() < len(data)
    if not is_inside or (data[starts] & 0xC0 == 0x80).any():
        raise ValueError("its precompiled_charsmap points into no string; download the file again")
    ends = np.flatnonzero(data == 0)
    stops = np.append(ends, len(data))[np.searchsorted(ends, starts)]
    longest = int((stops - starts).max(initial=0))
    if longest > 4 * MAX_GROWTH:
        raise ValueError(
            f"its precompiled_charsmap replaces a character by {longest} bytes, and at most "
            f"{4 * MAX_GROWTH} are supported"
        )
