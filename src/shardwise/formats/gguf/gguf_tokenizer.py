"""The tokenizer in the metadata of a GGUF file, `tokenizer.*`.

Keys: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

import warnings
from collections.abc import Callable, Mapping
from enum import IntEnum
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from shardwise.formats.tokenizers.bpe import (
    add_bos_eos,
    byte_level_bpe,
    parse_merge,
    sentencepiece_bpe,
)
from shardwise.formats.tokenizers.pre_tokenizers import find_pre_tokenizer
from shardwise.formats.tokenizers.tokenizer import Tokenizer

BYTE_LEVEL = "gpt2"
SENTENCEPIECE = "llama"
"""The values of `tokenizer.ggml.model`."""

DEFAULT_PRE_TOKENIZER = "default"

GGUF_SPECIAL = {
    "bos_token": "bos",
    "eos_token": "eos",
    "unk_token": "unknown",
    "pad_token": "padding",
}
"""GGUF's names for the special tokens of Hugging Face."""

END_OF_TURN_TOKENS = frozenset(
    (
        "<|im_end|>",
        "<|eot_id|>",
        "<|eom_id|>",
        "<|end|>",
        "<|end_of_text|>",
        "<|endoftext|>",
        "<end_of_turn>",
        "</s>",
    )
)
"""GGUF files name one end token, but a chat model may end its turn with another."""
UNMISTAKABLE = END_OF_TURN_TOKENS - {"</s>"}
"""End-of-turn tokens that are control tokens whatever type a file gives them, as in llama.cpp."""


class TokenType(IntEnum):
    """The values of `tokenizer.ggml.token_type`."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


def tokenizer_from_gguf(metadata: Mapping[str, Any]) -> Tokenizer:
    """Build the tokenizer, with its end tokens and chat template, from a GGUF file's metadata.

    Raises ValueError if it is missing, malformed or of an unknown kind.
    """
    _check_types(metadata)
    backend = _build_backend(metadata)
    special = {}
    for name, short in GGUF_SPECIAL.items():
        text = _special_token(metadata, short)
        if text is not None:
            special[name] = text
    tokens = metadata["tokenizer.ggml.tokens"]
    types = metadata.get("tokenizer.ggml.token_type", ())
    control = {text for text, kind in zip(tokens, types, strict=False) if kind == TokenType.CONTROL}
    named = {_special_token(metadata, name) for name in ("eos", "eot", "eom")} - {None}
    ends = (control & END_OF_TURN_TOKENS) | UNMISTAKABLE.intersection(tokens) | named
    eos_ids = frozenset(index for index, text in enumerate(tokens) if text in ends)
    return Tokenizer(backend, special, eos_ids, metadata.get("tokenizer.chat_template") or None)


def _build_backend(metadata: Mapping[str, Any]) -> Backend:
    model = metadata.get("tokenizer.ggml.model")
    if model is None or "tokenizer.ggml.tokens" not in metadata:
        raise ValueError("this GGUF file has no tokenizer; use a folder with a tokenizer.json")
    builders: dict[str, Callable[[Mapping[str, Any]], Backend]] = {
        BYTE_LEVEL: _byte_level,
        SENTENCEPIECE: _sentencepiece,
    }
    if model not in builders:
        raise ValueError(
            f"unknown GGUF tokenizer {model!r}; known are {', '.join(sorted(builders))}"
        )
    tokens = metadata["tokenizer.ggml.tokens"]
    num_duplicates = len(tokens) - len(set(tokens))
    if num_duplicates:
        raise ValueError(f"this GGUF file's tokenizer lists {num_duplicates} tokens twice")
    backend = builders[model](metadata)
    types = metadata.get("tokenizer.ggml.token_type", ())
    for added in (TokenType.CONTROL, TokenType.USER_DEFINED):
        special = added == TokenType.CONTROL
        kinds = zip(tokens, types, strict=False)
        texts = [text for text, kind in kinds if kind == added and text not in UNMISTAKABLE | {""}]
        if special:
            texts += [text for text in tokens if text in UNMISTAKABLE]
        backend.add_tokens([AddedToken(text, special=special, normalized=False) for text in texts])
    bos = _special_token(metadata, "bos") if _adds_bos(metadata) else None
    adds_eos = metadata.get("tokenizer.ggml.add_eos_token", False)
    eos = _special_token(metadata, "eos") if adds_eos else None
    if bos or eos:
        add_bos_eos(backend, bos, eos)
    return backend


def _adds_bos(metadata: Mapping[str, Any]) -> bool:
    """Return True if every text begins with a BOS; llama.cpp has a default for each kind."""
    is_sentencepiece = metadata["tokenizer.ggml.model"] == SENTENCEPIECE
    default = is_sentencepiece or find_pre_tokenizer(_pre_tokenizer(metadata)).begins_with_bos
    return bool(metadata.get("tokenizer.ggml.add_bos_token", default))


def _special_token(metadata: Mapping[str, Any], name: str) -> str | None:
    """Return the text of a special token (`bos`, `eos`, `unknown`, `padding`, `eot`, `eom`), or
    None if the file has none."""
    index = metadata.get(f"tokenizer.ggml.{name}_token_id")
    tokens = metadata["tokenizer.ggml.tokens"]
    if index is not None and not 0 <= index < len(tokens):
        raise ValueError(
            f"this GGUF file's {name} token has id {index}, but its vocabulary has {len(tokens)} "
            "tokens"
        )
    return None if index is None else tokens[index]


def _byte_level(metadata: Mapping[str, Any]) -> Backend:
    if "tokenizer.ggml.merges" not in metadata:
        raise ValueError(
            "this GGUF file's tokenizer has no merges (tokenizer.ggml.merges); convert the model "
            "again"
        )
    vocab = {token: index for index, token in enumerate(metadata["tokenizer.ggml.tokens"])}
    merges = [parse_merge(line) for line in metadata["tokenizer.ggml.merges"]]
    if "tokenizer.ggml.pre" not in metadata:
        warnings.warn(
            "this GGUF file does not name its pre-tokenizer (tokenizer.ggml.pre), so llama.cpp's "
            f"default, {DEFAULT_PRE_TOKENIZER!r}, splits text: it may get other tokens than in "
            "training; convert the model again",
            stacklevel=2,
        )
    return byte_level_bpe(vocab, merges, _pre_tokenizer(metadata))


def _pre_tokenizer(metadata: Mapping[str, Any]) -> str:
    name: str = metadata.get("tokenizer.ggml.pre", DEFAULT_PRE_TOKENIZER)
    return name


def _sentencepiece(metadata: Mapping[str, Any]) -> Backend:
    tokens = metadata["tokenizer.ggml.tokens"]
    scores = metadata.get("tokenizer.ggml.scores", ())
    if len(scores) != len(tokens):
        raise ValueError(
            f"this GGUF file's tokenizer has {len(tokens)} tokens but {len(scores)} scores"
        )
    types = metadata.get("tokenizer.ggml.token_type", [TokenType.NORMAL] * len(tokens))
    mergeable = (TokenType.NORMAL, TokenType.UNUSED)
    return sentencepiece_bpe(
        scores={
            token: score
            for token, score, kind in zip(tokens, scores, types, strict=True)
            if kind in mergeable
        },
        vocab={token: index for index, token in enumerate(tokens)},
        unk=_special_token(metadata, "unknown") or tokens[0],
        space_prefix=metadata.get("tokenizer.ggml.add_space_prefix", True),
    )


def _check_types(metadata: Mapping[str, Any]) -> None:
    """Raise ValueError for a value of another type than the format documents: a header may hold
    anything under any key."""
    values = {
        key.removeprefix("tokenizer.ggml."): value
        for key, value in metadata.items()
        if value is not None
    }
    scalars: dict[str, type] = {"model": str, "pre": str, "tokenizer.chat_template": str}
    for name in ("bos", "eos", "unknown", "padding", "eot", "eom"):
        scalars[f"{name}_token_id"] = int
    for name in ("bos_token", "eos_token", "space_prefix"):
        scalars[f"add_{name}"] = bool
    wrong = [
        key for key, kind in scalars.items() if key in values and type(values[key]) is not kind
    ]
    lists: dict[str, set[type]] = {
        "tokens": {str},
        "merges": {str},
        "token_type": {int, TokenType},
        "scores": {int, float},
    }
    for key, item_types in lists.items():
        items = values.get(key, ())
        if not isinstance(items, list | tuple) or not item_types.issuperset(map(type, items)):
            wrong.append(key)
    if wrong:
        raise ValueError(
            f"the value of {wrong[0]} in this GGUF file's metadata has the wrong type; convert the "
            "model again"
        )
