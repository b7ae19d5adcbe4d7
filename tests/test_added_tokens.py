"""Tokens that a folder lists beside tokenizer.json, against transformers."""

import json
from pathlib import Path
from typing import Any

import pytest
import transformers

from shardwise.formats.tokenizers.folder_tokenizer import tokenizer_from_folder
from shardwise.formats.tokenizers.train_bpe import train_bpe


def listed(text: str, special: bool = True, strips: bool = False) -> dict[str, Any]:
    """An entry of `added_tokens_decoder`."""
    flags = {"lstrip": strips, "rstrip": strips, "normalized": not special, "single_word": False}
    return {"content": text, "special": special, **flags}


TRAINED = train_bpe(["the cat sat on the mat with a fat rat"] * 20, 300)
"""A vocabulary with `<|endoftext|>` as id 0."""
SIZE = TRAINED.vocab_size
LISTS: dict[str, dict[str, dict[str, Any]]] = {
    "only in the config": {
        "tokenizer_config": {
            "added_tokens_decoder": {
                "0": listed("<|endoftext|>"), str(SIZE + 1): listed("<x>"),
                str(SIZE): listed("<|tool|>"),
            },
        },
    },
    "ordinary": {
        "tokenizer_config": {"added_tokens_decoder": {str(SIZE): listed("<|tool|>", False)}},
    },
    "strips spaces": {
        "tokenizer_config": {
            "added_tokens_decoder": {str(SIZE): listed("<|tool|>", strips=True)}
        },
    },
    "of the vocabulary": {
        "tokenizer_config": {"added_tokens_decoder": {"70": listed("f")}},
    },
    "without ids": {
        "tokenizer_config": {
            "added_tokens_decoder": {str(SIZE): listed("<|tool|>")},
            "additional_special_tokens": ["<x>", "<|tool|>"],
        },
    },
    "added_tokens.json": {"added_tokens": {"<|tool|>": SIZE, "<x>": SIZE + 1}},
    "added_tokens.json, special": {
        "added_tokens": {"<|tool|>": SIZE, "<x>": SIZE + 1},
        "special_tokens_map": {"pad_token": "<x>", "extra_special_tokens": ["<|tool|>"]},
    },
}  # fmt: skip


@pytest.mark.parametrize("case", LISTS)
def test_tokens_that_tokenizer_json_lacks_are_those_of_transformers(
    case: str, tmp_path: Path
) -> None:
    assert TRAINED.backend.id_to_token(70) == "f"
    TRAINED.save(tmp_path)
    for name, change in LISTS[case].items():
        file = tmp_path / f"{name}.json"
        content = json.loads(file.read_text()) if file.is_file() else {}
        file.write_text(json.dumps(content | change))
    ours = tokenizer_from_folder(tmp_path)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    for text in ("a<|tool|>b", "x <|tool|> y", "the <x> fat", "<|endoftext|>f <|tool|>"):
        ids = theirs.encode(text, add_special_tokens=False)
        assert ours.encode(text) == ids
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)


def test_an_added_token_with_the_row_of_another_is_refused(tmp_path: Path) -> None:
    TRAINED.save(tmp_path)
    config = {"added_tokens_decoder": {str(SIZE + 3): listed("<|tool|>")}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=f"'<|tool|>' has id {SIZE + 3}, but .* gives it {SIZE}"):
        tokenizer_from_folder(tmp_path)
