"""Tokens of a Hugging Face folder that are outside of the vocabulary in its main file.

They are added as by `PreTrainedTokenizerBase._from_pretrained` of transformers 5.24: those of
`added_tokens_decoder` in tokenizer_config.json, or else of added_tokens.json; then the special ones
that only have a text.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from shardwise.formats.config_files import read_optional_json
from shardwise.formats.tokenizers.tokenizer import SPECIAL_NAMES

FLAGS = ("single_word", "lstrip", "rstrip", "normalized")


def add_tokens(folder: Path, config: Mapping[str, Any], backend: Backend) -> None:
    """Add the tokens that tokenizer_config.json (`config`) and its companions list.

    Raises ValueError for a malformed list, and for a new token that cannot have the id that is
    stated: the model's embedding has another token in that row.
    """
    try:
        tables = [config]
        if "added_tokens_decoder" in config:
            added = {int(i): _token(each) for i, each in config["added_tokens_decoder"].items()}
        else:
            tables.append(read_optional_json(folder / "special_tokens_map.json"))
            added = _old_tokens(folder, tables)
        for index, token in sorted(added.items()):
            is_new = backend.token_to_id(token.content) is None
            backend.add_tokens([token])
            actual = backend.token_to_id(token.content)
            if is_new and actual != index:
                raise ValueError(
                    f"{folder}: added token {token.content!r} has id {index}, but the tokenizer "
                    f"gives it {actual}"
                )
        texts = [text for table in tables for text in _unnumbered(table)]
        missing = [text for text in texts if backend.token_to_id(text) is None]
        backend.add_special_tokens([AddedToken(text, special=True) for text in missing])
    except (TypeError, AttributeError, KeyError, OverflowError) as error:
        raise ValueError(
            f"{folder}: the list of added tokens is malformed ({error!r:.80})"
        ) from None


def _token(entry: Mapping[str, Any]) -> AddedToken:
    flags = {key: entry.get(key, False) for key in FLAGS}
    return AddedToken(entry["content"], special=entry.get("special", False), **flags)


def _old_tokens(folder: Path, tables: list[Mapping[str, Any]]) -> dict[int, AddedToken]:
    """Return the tokens of added_tokens.json, by id; those that other files name are special."""
    named = [table.get(name) for table in tables for name in SPECIAL_NAMES]
    special = [each.get("content") if isinstance(each, dict) else each for each in named]
    special += [text for table in tables for text in _texts(table, "extra_special_tokens")]
    tokens = {}
    for text, index in read_optional_json(folder / "added_tokens.json").items():
        is_special = text in special
        tokens[index] = AddedToken(text, special=is_special, normalized=not is_special)
    return tokens


def _unnumbered(table: Mapping[str, Any]) -> list[str]:
    """Return the special tokens, besides the named ones, that a file lists without their ids."""
    return _texts(table, "extra_special_tokens") + _texts(table, "additional_special_tokens")


def _texts(table: Mapping[str, Any], key: str) -> list[str]:
    entries = table.get(key) or []
    listed = entries.values() if isinstance(entries, dict) else entries
    return [entry["content"] if isinstance(entry, dict) else entry for entry in listed]
