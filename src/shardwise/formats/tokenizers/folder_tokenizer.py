"""The tokenizer of a Hugging Face folder: tokenizer.json, or the older vocab.json and merges.txt.

Special tokens, end tokens and the chat template are spread over up to six more files.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from shardwise.formats.config_files import read_json_object, read_optional_json, read_whole_text
from shardwise.formats.families import FAMILIES, GPT2
from shardwise.formats.tokenizers.added_tokens import add_tokens
from shardwise.formats.tokenizers.bpe import add_bos_eos, byte_level_bpe, parse_merge
from shardwise.formats.tokenizers.check_pipeline import check_pipeline
from shardwise.formats.tokenizers.tokenizer import SPECIAL_NAMES, Tokenizer, backend_errors

FILES = ("tokenizer.json", "vocab.json", "tokenizer.model")


def has_tokenizer(folder: Path) -> bool:
    """Return True if the folder has a tokenizer file, of a kind that can be read or not."""
    return any((folder / name).is_file() for name in FILES)


def tokenizer_from_folder(path: str | Path) -> Tokenizer:
    """Read the tokenizer of a Hugging Face folder.

    Raises ValueError, naming the file, if there is none or if it is malformed.
    """
    folder = Path(path)
    config = read_optional_json(folder / "tokenizer_config.json")
    is_complete = (folder / "tokenizer.json").is_file()
    backend = _read_backend(folder, config)
    add_tokens(folder, config, backend)
    special, eos_ids = _special_tokens(folder, config, backend)
    if not is_complete:  # tokenizer.json itself states what to put around a text
        bos = special.get("bos_token") if config.get("add_bos_token") else None
        eos = special.get("eos_token") if config.get("add_eos_token") else None
        add_bos_eos(backend, bos, eos)
    known = {token.content for token in backend.get_added_tokens_decoder().values()}
    missing = [text for text in special.values() if text not in known]
    backend.add_special_tokens(
        [AddedToken(text, special=True, normalized=False) for text in missing]
    )
    return Tokenizer(backend, special, eos_ids, _chat_template(folder, config))


def _read_backend(folder: Path, config: Mapping[str, Any]) -> Backend:
    if (folder / "tokenizer.json").is_file():
        return _read_tokenizer_json(folder / "tokenizer.json")
    if (folder / "vocab.json").is_file() and (folder / "merges.txt").is_file():
        return _read_vocab_and_merges(folder, config)
    if (folder / "tokenizer.model").is_file():
        raise ValueError(
            f"{folder} has its tokenizer only as tokenizer.model, which is not supported; write "
            "tokenizer.json once with transformers: "
            f"AutoTokenizer.from_pretrained({str(folder)!r}).save_pretrained({str(folder)!r})"
        )
    raise ValueError(
        f"{folder} has no tokenizer: expected tokenizer.json, or vocab.json and merges.txt"
    )


def _read_tokenizer_json(file: Path) -> Backend:
    try:
        check_pipeline(read_json_object(file))
    except ValueError as error:
        names_file = str(error).startswith(str(file))
        raise ValueError(str(error) if names_file else f"{file}: {error}") from None
    with backend_errors(f"{file} is not a tokenizer that can be read"):
        backend = Backend.from_file(str(file))
    backend.no_truncation()  # files store the truncation and padding that were last used
    backend.no_padding()
    return backend


def _read_vocab_and_merges(folder: Path, config: Mapping[str, Any]) -> Backend:
    pre_tokenizers = {
        family.tokenizer_class: family.pre_tokenizer
        for family in FAMILIES.values()
        if family.tokenizer_class
    }
    kind = str(config.get("tokenizer_class") or GPT2.tokenizer_class).removesuffix("Fast")
    if kind not in pre_tokenizers:
        raise ValueError(
            f"{folder} has no tokenizer.json, and vocab.json with merges.txt is supported only for "
            f"{' and '.join(pre_tokenizers)}, not {kind}; save it once with transformers, which "
            "writes tokenizer.json"
        )
    vocab = read_optional_json(folder / "vocab.json")
    try:
        lines = read_whole_text(folder / "merges.txt").split("\n")
        merges = [parse_merge(line) for line in lines if line and not line.startswith("#version")]
        backend = byte_level_bpe(vocab, merges, pre_tokenizers[kind])
    except ValueError as error:
        names_folder = str(error).startswith(str(folder))
        raise ValueError(str(error) if names_folder else f"{folder}: {error}") from None
    return backend


def _special_tokens(
    folder: Path, config: Mapping[str, Any], backend: Backend
) -> tuple[dict[str, str], frozenset[int]]:
    """Collect the special tokens and the ids of all end tokens from the four files that may state
    them."""
    tables = {
        "tokenizer_config.json": config,
        "special_tokens_map.json": read_optional_json(folder / "special_tokens_map.json"),
    }
    special: dict[str, str] = {}
    for name in SPECIAL_NAMES:
        file = next((file for file, table in tables.items() if table.get(name) is not None), None)
        text = None if file is None else _token_text(folder / file, name, tables[file][name])
        if text is not None and backend.token_to_id(text) is not None:
            special[name] = text
    eos_ids = set(_token_ids(folder, "eos_token_id"))
    eos_id = backend.token_to_id(special["eos_token"]) if "eos_token" in special else None
    if eos_id is not None:
        eos_ids.add(eos_id)
    if not _names_eos(tables.values()):
        for name in ("bos_token", "eos_token"):
            ids = _token_ids(folder, f"{name}_id")
            text = backend.id_to_token(ids[0]) if ids else None
            if text is not None:
                special.setdefault(name, text)
    return special, frozenset(eos_ids)


def _names_eos(tables: Iterable[Mapping[str, Any]]) -> bool:
    """GPT-2's folder has the end token only as an id, in the model's config."""
    return any(table.get("eos_token") for table in tables)


def _token_text(file: Path, name: str, entry: Any) -> str:
    text = entry.get("content") if isinstance(entry, dict) else entry
    if not isinstance(text, str):
        raise ValueError(
            f"{file}: {name} must be a string, or an object with a string as its content, "
            f"not {entry!r:.60}"
        )
    return text


def _token_ids(folder: Path, key: str) -> list[int]:
    """Return one id or a list of ids from generation_config.json, else from config.json."""
    for file in (folder / "generation_config.json", folder / "config.json"):
        table = read_optional_json(file)
        if key in table:
            value = table[key]
            ids = value if isinstance(value, list) else [] if value is None else [value]
            if not all(type(index) is int and 0 <= index < 2**32 for index in ids):
                raise ValueError(
                    f"{file}: {key} must be a token id or a list of ids, not {value!r:.60}"
                )
            return ids
    return []


def _chat_template(folder: Path, config: Mapping[str, Any]) -> str | None:
    """Return the chat template from its own file or from the config, where it may be one of several
    with names."""
    file = folder / "chat_template.jinja"
    if file.is_file():
        return read_whole_text(file)
    template = config.get("chat_template")
    if isinstance(template, list) and all(map(_is_named_template, template)):
        named = {entry["name"]: entry["template"] for entry in template}
        template = named.get("default") or next(iter(named.values()), None)
    if template is not None and not isinstance(template, str):
        raise ValueError(
            f"{folder / 'tokenizer_config.json'}: chat_template must be a string, or a list of "
            f"objects with name and template, not {config['chat_template']!r:.60}"
        )
    return template


def _is_named_template(entry: Any) -> bool:
    return isinstance(entry, dict) and all(
        isinstance(entry.get(key), str) for key in ("name", "template")
    )
