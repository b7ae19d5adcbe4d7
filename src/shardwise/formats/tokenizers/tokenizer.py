"""Text to token ids and back: from a Hugging Face folder, a GGUF file or a text to train on, and
saved again.

The work is done by the `tokenizers` package; what is here is knowing where models keep what it
needs, and the chat template. File formats:
https://huggingface.co/docs/transformers/main_classes/tokenizer
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

from tokenizers import AddedToken, decoders, trainers
from tokenizers import Tokenizer as Backend

from shardwise.formats.tokenizers.vocabulary import (
    BYTE_TO_CHAR,
    CHAR_TO_BYTE,
    TokenType,
    add_ends,
    backend_from_gguf,
    byte_level_bpe,
    gguf_special,
    parse_merge,
)

END_OF_TEXT = "<|endoftext|>"
SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token")

# GGUF files name one end token, but a chat model may end its turn with another one.
ENDS_OF_TURN = frozenset(
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


@dataclass(frozen=True, eq=False)
class Tokenizer:
    """One model's text interface: ids for text, text for ids, and the prompt for a conversation.

    `special` holds the texts of `bos_token`, `eos_token`, `unk_token` and `pad_token` as far as the
    model has them; `eos_ids` are all ids that end a generation (a chat model often has several).
    """

    backend: Backend
    special: Mapping[str, str]
    eos_ids: frozenset[int]
    chat_template: str | None = None

    def encode(self, text: str, special_tokens: bool = False) -> list[int]:
        """The ids of `text`; special tokens written out in it, as chat prompts do, become their own
        ids.

        `special_tokens=True` also adds what the model wants around every text, e.g. a BOS in front.
        """
        return self.encode_batch([text], special_tokens)[0]

    def encode_batch(self, texts: Sequence[str], special_tokens: bool = False) -> list[list[int]]:
        """`encode` for many texts at once, on all cores."""
        try:
            encodings = self.backend.encode_batch_fast(
                list(texts), add_special_tokens=special_tokens
            )
        except (
            TypeError
        ) as error:  # the library takes Python strings, but not those that no UTF-8 can spell
            raise ValueError(
                "the text is not valid Unicode: it holds half of a surrogate pair."
            ) from error
        return [encoding.ids for encoding in encodings]

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        """The text of `ids`; bytes that are not UTF-8 become U+FFFD, and ids that have no token
        become nothing."""
        return self.backend.decode(list(ids), skip_special_tokens=skip_special)

    @cached_property
    def vocab_size(self) -> int:
        """The largest id plus one: the number of embedding rows that this tokenizer can ask for."""
        return 1 + max(self.backend.get_vocab(with_added_tokens=True).values(), default=-1)

    @property
    def bos_id(self) -> int | None:
        """The id that begins a text, or None where the model has none."""
        return self._special_id("bos_token")

    @property
    def eos_id(self) -> int | None:
        """The id that ends a text (what stands between two documents in training), or None where
        there is none."""
        return self._special_id("eos_token")

    def _special_id(self, name: str) -> int | None:
        text = self.special.get(name)
        return None if text is None else self.backend.token_to_id(text)

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """The ids that `decode` leaves out."""
        added = self.backend.get_added_tokens_decoder()
        return frozenset(index for index, token in added.items() if token.special)

    @cached_property
    def is_byte_level(self) -> bool:
        """Whether a token is a run of bytes whatever stands beside it, so that `token_bytes`
        holds."""
        return isinstance(self.backend.decoder, decoders.ByteLevel)

    def token_bytes(self, index: int) -> bytes:
        """The bytes of one token of a byte-level tokenizer; they may begin or end inside a
        character."""
        assert self.is_byte_level
        token = self.backend.id_to_token(index) or ""
        try:
            return bytes(CHAR_TO_BYTE[char] for char in token)
        except KeyError:  # an added token that is written as plain text
            return token.encode()

    def chat(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True
    ) -> str:
        """The prompt for a conversation of `{"role": ..., "content": ...}` messages, special tokens
        written out.

        Encode it with `special_tokens=False`: the template has already put in what belongs there.
        """
        from shardwise.formats.tokenizers.chat_template import render_chat

        if self.chat_template is None:
            raise ValueError(
                "this model has no chat template: give it plain text to continue, not messages."
            )
        return render_chat(self._template, messages, self.special, add_generation_prompt)

    @cached_property
    def _template(self) -> Any:
        from shardwise.formats.tokenizers.chat_template import compile_template

        assert self.chat_template is not None
        return compile_template(self.chat_template)

    def save(self, folder: str | Path) -> None:
        """Write what `transformers.AutoTokenizer` and `load_tokenizer` read back with the same ids.

        The files are tokenizer.json, tokenizer_config.json, chat_template.jinja if there is a
        template, and the end tokens in generation_config.json, whose other entries are kept.
        """
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        self.backend.save(str(folder / "tokenizer.json"))
        config = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "clean_up_tokenization_spaces": False,
            **self.special,
        }
        _write_json(folder / "tokenizer_config.json", config)
        if self.chat_template is not None:
            (folder / "chat_template.jinja").write_text(self.chat_template, encoding="utf-8")
        ends = sorted(self.eos_ids, key=lambda index: (index != self.eos_id, index))
        generation = _read_json(folder / "generation_config.json")
        if self.bos_id is not None:
            generation["bos_token_id"] = self.bos_id
        if ends:
            generation["eos_token_id"] = ends if len(ends) > 1 else ends[0]
        if generation:
            _write_json(folder / "generation_config.json", generation)


def load_tokenizer(path: str | Path) -> Tokenizer:
    """The tokenizer at `path`: a `.gguf` file, a Hugging Face folder, or a Shardwise run (it is in
    `model/`)."""
    path = Path(path)
    if not path.exists():
        raise ValueError(
            f"{path} does not exist: expected a model folder, a run folder or a .gguf file."
        )
    if path.is_dir():
        return from_folder(
            path / "model" if not _has_tokenizer(path) and (path / "model").is_dir() else path
        )
    if path.suffix != ".gguf":
        raise ValueError(
            f"{path} is neither a folder nor a .gguf file, so there is no tokenizer to read."
        )
    from shardwise.formats.gguf.gguf_file import read_gguf

    file = read_gguf(path)
    try:
        return from_gguf(file)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def check_vocabulary(tokenizer: Tokenizer, vocab_size: int) -> None:
    """ValueError if the tokenizer can produce ids without a row in an embedding of `vocab_size`
    rows.

    More rows than ids is common and fine: vocabularies are padded to a multiple that devices like.
    """
    if tokenizer.vocab_size > vocab_size:
        raise ValueError(
            f"the tokenizer has ids up to {tokenizer.vocab_size - 1} but the model's vocabulary only {vocab_size} "
            f"rows; use the tokenizer that the model was trained with."
        )


# Tokenizers out of a Hugging Face folder


def from_folder(path: str | Path) -> Tokenizer:
    """Read a Hugging Face folder: tokenizer.json, or GPT-2's and Qwen's older vocab.json with
    merges.txt."""
    folder = Path(path)
    config = _read_json(folder / "tokenizer_config.json")
    if (folder / "tokenizer.json").is_file():
        backend = _read_backend(folder / "tokenizer.json")
    elif (folder / "vocab.json").is_file() and (folder / "merges.txt").is_file():
        backend = _backend_from_merges(folder, config)
    elif (folder / "tokenizer.model").is_file():
        raise ValueError(
            f"{folder} has its tokenizer only as tokenizer.model, which is not read here; write tokenizer.json beside "
            f"it once with transformers: AutoTokenizer.from_pretrained({str(folder)!r}).save_pretrained(the folder)."
        )
    else:
        raise ValueError(
            f"{folder} holds no tokenizer: expected tokenizer.json, or vocab.json and merges.txt."
        )
    special, eos_ids = _special_tokens(folder, config, backend)
    if not (folder / "tokenizer.json").is_file():  # which says itself what goes around a text
        bos = special.get("bos_token")
        eos = special.get("eos_token")
        add_ends(
            backend,
            bos if config.get("add_bos_token") else None,
            eos if config.get("add_eos_token") else None,
        )
    missing = [text for text in special.values() if text not in _added(backend)]
    backend.add_special_tokens(
        [AddedToken(text, special=True, normalized=False) for text in missing]
    )
    return Tokenizer(backend, special, eos_ids, _folder_template(folder, config))


def _has_tokenizer(folder: Path) -> bool:
    return any(
        (folder / name).is_file() for name in ("tokenizer.json", "vocab.json", "tokenizer.model")
    )


def _read_backend(file: Path) -> Backend:
    try:
        backend = Backend.from_file(str(file))
    except Exception as error:  # the library raises nothing narrower
        raise ValueError(f"{file} is not a tokenizer that can be read: {error}.") from error
    backend.no_truncation()  # files remember the lengths of somebody's last batch
    backend.no_padding()
    return backend


def _backend_from_merges(folder: Path, config: Mapping[str, Any]) -> Backend:
    pre_by_class = {"GPT2Tokenizer": "gpt-2", "Qwen2Tokenizer": "qwen2"}
    kind = str(config.get("tokenizer_class") or "GPT2Tokenizer").removesuffix("Fast")
    if kind not in pre_by_class:
        raise ValueError(
            f"{folder} has no tokenizer.json, and vocab.json with merges.txt is understood only for "
            f"{' and '.join(pre_by_class)}, not for {kind}; save it once with transformers to get a tokenizer.json."
        )
    vocab = _read_json(folder / "vocab.json")
    try:
        lines = _read_text(folder / "merges.txt").split("\n")
        merges = [parse_merge(line) for line in lines if line and not line.startswith("#version")]
        backend = byte_level_bpe(vocab, merges, pre_by_class[kind])
        return _with_added_tokens(folder, config, backend)
    except ValueError as error:
        raise ValueError(
            str(error) if str(error).startswith(str(folder)) else f"{folder}: {error}"
        ) from None
    except (TypeError, AttributeError, KeyError, OverflowError) as error:
        raise ValueError(
            f"{folder}: the list of its added tokens is malformed ({error!r:.80})."
        ) from None


def _with_added_tokens(folder: Path, config: Mapping[str, Any], backend: Backend) -> Backend:
    added = {int(index): token for index, token in config.get("added_tokens_decoder", {}).items()}
    added |= {
        index: {"content": text} for text, index in _read_json(folder / "added_tokens.json").items()
    }
    for index, token in sorted(added.items()):
        options = {
            key: token.get(key, False) for key in ("single_word", "lstrip", "rstrip", "normalized")
        }
        backend.add_tokens(
            [AddedToken(token["content"], special=token.get("special", True), **options)]
        )
        if backend.token_to_id(token["content"]) != index:
            raise ValueError(
                f"{folder}: added token {token['content']!r} has id {index}, which leaves a gap."
            )
    return backend


def _special_tokens(
    folder: Path, config: Mapping[str, Any], backend: Backend
) -> tuple[dict[str, str], frozenset[int]]:
    """Texts of the special tokens and ids of all end tokens, from whichever of the four files has
    them."""
    tables = {"tokenizer_config.json": config}
    tables["special_tokens_map.json"] = _read_json(folder / "special_tokens_map.json")
    special: dict[str, str] = {}
    for name in SPECIAL_NAMES:
        file = next((file for file, table in tables.items() if table.get(name) is not None), None)
        text = None if file is None else _token_text(folder / file, name, tables[file][name])
        if text is not None and backend.token_to_id(text) is not None:
            special[name] = text
    eos_ids = set(_token_ids(folder, "eos_token_id"))
    end = backend.token_to_id(special["eos_token"]) if "eos_token" in special else None
    if end is not None:
        eos_ids.add(end)
    if not any(
        table.get("eos_token") for table in tables.values()
    ):  # GPT-2's folder has it in the model's config only
        for name in ("bos_token", "eos_token"):
            ids = _token_ids(folder, f"{name}_id")
            text = backend.id_to_token(ids[0]) if ids else None
            if text is not None:
                special.setdefault(name, text)
    return special, frozenset(eos_ids)


def _token_text(file: Path, name: str, entry: Any) -> str:
    text = entry.get("content") if isinstance(entry, dict) else entry
    if not isinstance(text, str):
        raise ValueError(
            f"{file}: {name} should be a text, or an object whose content is one, not {entry!r:.60}."
        )
    return text


def _token_ids(folder: Path, key: str) -> list[int]:
    """One id or a list of them, out of generation_config.json if it has the key, else out of
    config.json."""
    for file in (folder / "generation_config.json", folder / "config.json"):
        table = _read_json(file)
        if key in table:
            ids = table[key]
            ids = ids if isinstance(ids, list) else [] if ids is None else [ids]
            if not all(type(index) is int and 0 <= index < 2**32 for index in ids):
                raise ValueError(
                    f"{file}: {key} should be a token's id or a list of ids, not {table[key]!r:.60}."
                )
            return ids
    return []


def _added(backend: Backend) -> set[str]:
    return {token.content for token in backend.get_added_tokens_decoder().values()}


def _folder_template(folder: Path, config: Mapping[str, Any]) -> str | None:
    """The chat template: a file of its own, or in the config, alone or as one of several with
    names."""
    file = folder / "chat_template.jinja"
    if file.is_file():
        return _read_text(file)
    template = config.get("chat_template")
    if isinstance(template, list) and all(map(_is_named_template, template)):
        named = {entry["name"]: entry["template"] for entry in template}
        template = named.get("default") or next(iter(named.values()), None)
    if template is not None and not isinstance(template, str):
        raise ValueError(
            f"{folder / 'tokenizer_config.json'}: chat_template should be a text, or a list of objects with name and "
            f"template, not {config['chat_template']!r:.60}."
        )
    return template


def _is_named_template(entry: Any) -> bool:
    return isinstance(entry, dict) and all(
        isinstance(entry.get(key), str) for key in ("name", "template")
    )


def _read_text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{file} is not UTF-8: {error}.") from None


def _read_json(file: Path) -> dict[str, Any]:
    """The object in `file`; an absent file is an empty object."""
    if not file.is_file():
        return {}
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file} is not valid JSON: {error}.") from error
    if not isinstance(content, dict):
        raise ValueError(
            f"{file} should hold one JSON object, but it holds a {type(content).__name__}."
        )
    return content


def _write_json(file: Path, content: Mapping[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


# Tokenizers from elsewhere


GGUF_SPECIAL = {
    "bos_token": "bos",
    "eos_token": "eos",
    "unk_token": "unknown",
    "pad_token": "padding",
}
"""What GGUF calls the tokens that Hugging Face's files name."""


class GgufLike(Protocol):
    """What `from_gguf` needs of an open GGUF file."""

    @property
    def metadata(self) -> Mapping[str, Any]: ...


def from_gguf(gguf: GgufLike) -> Tokenizer:
    """The tokenizer, end tokens and chat template that a GGUF file carries in its metadata."""
    metadata = gguf.metadata
    _check_gguf_types(metadata)
    backend = backend_from_gguf(metadata)
    found = {name: gguf_special(metadata, short) for name, short in GGUF_SPECIAL.items()}
    special = {name: text for name, text in found.items() if text is not None}
    tokens = metadata["tokenizer.ggml.tokens"]
    types = metadata.get("tokenizer.ggml.token_type", ())
    control = {text for text, kind in zip(tokens, types, strict=False) if kind == TokenType.CONTROL}
    ends = (control & ENDS_OF_TURN) | {
        gguf_special(metadata, name) for name in ("eos", "eot", "eom")
    } - {None}
    eos_ids = frozenset(index for index, text in enumerate(tokens) if text in ends)
    return Tokenizer(backend, special, eos_ids, metadata.get("tokenizer.chat_template") or None)


def _check_gguf_types(metadata: Mapping[str, Any]) -> None:
    """ValueError for a key whose value is of another type than
    https://github.com/ggml-org/ggml/blob/master/docs/gguf.md says: a file's header may hold
    anything under any name."""
    ggml = {
        key.removeprefix("tokenizer.ggml."): value
        for key, value in metadata.items()
        if value is not None
    }
    kinds: dict[str, type] = {"model": str, "pre": str, "tokenizer.chat_template": str}
    kinds |= {
        f"{name}_token_id": int for name in ("bos", "eos", "unknown", "padding", "eot", "eom")
    }
    kinds |= {f"add_{name}": bool for name in ("bos_token", "eos_token", "space_prefix")}
    wrong = [key for key, kind in kinds.items() if key in ggml and type(ggml[key]) is not kind]
    lists: dict[str, set[type]] = {
        "tokens": {str},
        "merges": {str},
        "token_type": {int, TokenType},
        "scores": {int, float},
    }
    for key, item_kinds in lists.items():
        items = ggml.get(key, ())
        if not isinstance(items, list | tuple) or not item_kinds.issuperset(map(type, items)):
            wrong.append(key)
    if wrong:
        raise ValueError(
            f"the value of {wrong[0]} in this GGUF file's metadata is of a wrong type; convert it again."
        )


def byte_tokenizer() -> Tokenizer:
    """A token for each of the 256 bytes (its id is its value) and one to end a text, 256: nothing
    to download."""
    backend = byte_level_bpe({char: byte for byte, char in enumerate(BYTE_TO_CHAR)}, [], "gpt-2")
    return _ending_in_text_end(backend)


def train_bpe(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Learn a byte-level BPE vocabulary of at most `vocab_size` tokens; the same texts give the
    same vocabulary.

    Fewer tokens come out if the texts have no more pairs to merge. Raises ValueError below 257:
    bytes and text end.
    """
    smallest = len(BYTE_TO_CHAR) + 1
    if vocab_size < smallest:
        raise ValueError(
            f"vocab_size is {vocab_size}, but 256 bytes and {END_OF_TEXT} need at least {smallest}."
        )
    backend = byte_level_bpe({}, [], "gpt-2")
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=list(BYTE_TO_CHAR),
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    return _ending_in_text_end(backend)


def _ending_in_text_end(backend: Backend) -> Tokenizer:
    backend.add_special_tokens([AddedToken(END_OF_TEXT, special=True, normalized=False)])
    end = backend.token_to_id(END_OF_TEXT)
    assert end is not None
    return Tokenizer(
        backend, {"bos_token": END_OF_TEXT, "eos_token": END_OF_TEXT}, frozenset((end,))
    )
