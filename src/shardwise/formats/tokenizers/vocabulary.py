"""From a vocabulary to a tokenizer: the two kinds of byte pair encoding that language models use.

*Byte-level BPE* (GPT-2, Llama 3, Qwen, SmolLM): text is cut into words by a regular expression,
each byte of a word is written as one printable character, and merges join them in the order in
which they were learned.

*SentencePiece BPE* (Llama 2, Mistral): a space is a character of its own, every piece has a score,
and the pair whose union scores highest is joined first; a character without a piece falls back to
its bytes, `<0xE2>`.

Papers: Sennrich et al. 2016 (BPE), Radford et al. 2019 (bytes), Kudo and Richardson 2018
(SentencePiece). GGUF keys: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from collections.abc import Callable, Mapping, Sequence
from enum import IntEnum
from typing import Any

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend


class TokenType(IntEnum):
    """`tokenizer.ggml.token_type`."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


def _printable_bytes() -> list[str]:
    """GPT-2's spelling of bytes: printable Latin-1 stands for itself, the other 68 are U+0100 and
    on, in order."""
    alphabet = []
    others = 0
    for byte in range(256):
        if 0x21 <= byte <= 0x7E or (byte >= 0xA1 and byte != 0xAD):
            alphabet.append(chr(byte))
        else:
            alphabet.append(chr(0x100 + others))
            others += 1
    return alphabet


BYTE_TO_CHAR = _printable_bytes()
CHAR_TO_BYTE = {char: byte for byte, char in enumerate(BYTE_TO_CHAR)}


# How each family cuts text into words before any merge. The names are those of
# `tokenizer.ggml.pre`.

GPT2_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2_WORDS = LLAMA3_WORDS.replace(r"\p{N}{1,3}", r"\p{N}")
TEKKEN_WORDS = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
UNKNOWN_WORDS = (r"[\p{P}\$\+<=>\^~\|]+", GPT2_WORDS, r"\p{N}+", r"[0-9][0-9][0-9]")

WORDS: dict[str, tuple[str, ...]] = {
    "default": UNKNOWN_WORDS,
    "gpt-2": (GPT2_WORDS,),
    "smollm": (r"\p{N}", GPT2_WORDS),
    "starcoder": (r"\p{N}", GPT2_WORDS),
    "llama-bpe": (LLAMA3_WORDS,),
    "qwen2": (QWEN2_WORDS,),
    "deepseek-r1-qwen": (QWEN2_WORDS,),
    "tekken": (TEKKEN_WORDS,),
}
WHOLE_WORDS_FIRST = {
    "llama-bpe",
    "tekken",
}  # a word that is itself a token is taken without looking at merges
BEGIN_WITH_BOS = {"llama-bpe", "tekken"}
COMPOSE_UNICODE = {"qwen2", "deepseek-r1-qwen"}


def byte_level_bpe(
    vocab: Mapping[str, int], merges: Sequence[tuple[str, str]], pre: str
) -> Backend:
    """Byte-level BPE; `pre` names the rule that cuts words, one of `WORDS`."""
    if pre not in WORDS:
        raise ValueError(
            f"unknown pre-tokenizer {pre!r}; the known ones are {', '.join(sorted(WORDS))}."
        )
    try:
        bpe = models.BPE(dict(vocab), list(merges), ignore_merges=pre in WHOLE_WORDS_FIRST)
    except Exception as error:  # the library raises nothing narrower
        raise ValueError(f"the tokenizer's merges do not fit its vocabulary: {error}.") from error
    backend = Backend(bpe)
    if pre in COMPOSE_UNICODE:
        backend.normalizer = normalizers.NFC()
    cuts: list[Any] = [pre_tokenizers.Split(Regex(words), "isolated") for words in WORDS[pre]]
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [*cuts, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    backend.decoder = decoders.ByteLevel()
    return backend


def sentencepiece_bpe(
    pieces: Mapping[str, float], vocab: Mapping[str, int], unk: str, space_prefix: bool
) -> Backend:
    """SentencePiece BPE with byte fallback; `pieces` are the tokens that merges may make, with
    their scores.

    With `space_prefix` every text begins with a space, as if it came after a word (not shown again
    in decoding).
    """
    try:
        bpe = models.BPE(
            dict(vocab), _merges_by_score(pieces), unk_token=unk, fuse_unk=True, byte_fallback=True
        )
    except Exception as error:  # the library raises nothing narrower
        raise ValueError(f"the tokenizer's scores do not fit its vocabulary: {error}.") from error
    backend = Backend(bpe)
    spaces: list[Any] = [normalizers.Replace(" ", "▁")]
    words: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if space_prefix:
        spaces.insert(0, normalizers.Prepend("▁"))
        words.append(decoders.Strip(" ", 1, 0))
    backend.normalizer = normalizers.Sequence(spaces)
    backend.decoder = decoders.Sequence(words)
    return backend


def _merges_by_score(pieces: Mapping[str, float]) -> list[tuple[str, str]]:
    """The merges that scores imply: each way to make a piece of two others, the best piece first,
    longer left first."""
    merges = []
    for piece in sorted(pieces, key=lambda piece: -pieces[piece]):
        for cut in range(len(piece) - 1, 0, -1):
            left = piece[:cut]
            right = piece[cut:]
            if left in pieces and right in pieces:
                merges.append((left, right))
    return merges


def add_ends(backend: Backend, bos: str | None, eos: str | None) -> None:
    """Let `special_tokens=True` put `bos` before and `eos` after a text; None adds nothing on that
    side."""
    backend.post_processor = processors.TemplateProcessing(
        single=[*([bos] if bos else []), "$A", *([eos] if eos else [])],
        special_tokens=[
            (token, backend.token_to_id(token)) for token in dict.fromkeys((bos, eos)) if token
        ],
    )


def backend_from_gguf(metadata: Mapping[str, Any]) -> Backend:
    """The tokenizer that GGUF metadata describes (`tokenizer.ggml.*`); ValueError if it is missing
    or unknown."""
    model = metadata.get("tokenizer.ggml.model")
    if model is None or "tokenizer.ggml.tokens" not in metadata:
        raise ValueError(
            "this GGUF file holds no tokenizer; give a tokenizer folder (tokenizer.json) beside it."
        )
    builders: dict[str, Callable[[Mapping[str, Any]], Backend]] = {
        "gpt2": _byte_level_from_gguf,
        "llama": _sentencepiece_from_gguf,
    }
    if model not in builders:
        raise ValueError(
            f"unknown GGUF tokenizer {model!r}; the known ones are {', '.join(sorted(builders))}."
        )
    tokens = metadata["tokenizer.ggml.tokens"]
    if len(set(tokens)) != len(tokens):
        raise ValueError(
            f"this GGUF file's tokenizer lists {len(tokens) - len(set(tokens))} tokens twice."
        )
    backend = builders[model](metadata)
    types = metadata.get("tokenizer.ggml.token_type", ())
    for wanted in (TokenType.CONTROL, TokenType.USER_DEFINED):
        special = wanted == TokenType.CONTROL
        texts = [text for text, kind in zip(tokens, types, strict=False) if kind == wanted and text]
        backend.add_tokens([AddedToken(text, special=special, normalized=False) for text in texts])
    by_default = model == "llama" or metadata.get("tokenizer.ggml.pre") in BEGIN_WITH_BOS
    bos = (
        gguf_special(metadata, "bos")
        if metadata.get("tokenizer.ggml.add_bos_token", by_default)
        else None
    )
    eos = (
        gguf_special(metadata, "eos")
        if metadata.get("tokenizer.ggml.add_eos_token", False)
        else None
    )
    if bos or eos:
        add_ends(backend, bos, eos)
    return backend


def gguf_special(metadata: Mapping[str, Any], name: str) -> str | None:
    """The text of a special token (`bos`, `eos`, `unknown`, `padding`, `eot`, `eom`), or None if
    the file has none."""
    index = metadata.get(f"tokenizer.ggml.{name}_token_id")
    tokens = metadata["tokenizer.ggml.tokens"]
    if index is not None and not 0 <= index < len(tokens):
        raise ValueError(
            f"this GGUF file's {name} token is id {index}, but its vocabulary has {len(tokens)} tokens."
        )
    return None if index is None else tokens[index]


def _byte_level_from_gguf(metadata: Mapping[str, Any]) -> Backend:
    if "tokenizer.ggml.merges" not in metadata:
        raise ValueError(
            "this GGUF file's tokenizer has no merges (tokenizer.ggml.merges); convert the model again."
        )
    vocab = {token: index for index, token in enumerate(metadata["tokenizer.ggml.tokens"])}
    merges = [parse_merge(line) for line in metadata["tokenizer.ggml.merges"]]
    return byte_level_bpe(vocab, merges, metadata.get("tokenizer.ggml.pre", "default"))


def _sentencepiece_from_gguf(metadata: Mapping[str, Any]) -> Backend:
    tokens = metadata["tokenizer.ggml.tokens"]
    scores = metadata.get("tokenizer.ggml.scores", ())
    if len(scores) != len(tokens):
        raise ValueError(
            f"this GGUF file's tokenizer has {len(tokens)} tokens but {len(scores)} scores."
        )
    types = metadata.get("tokenizer.ggml.token_type", [TokenType.NORMAL] * len(tokens))
    made = (TokenType.NORMAL, TokenType.UNUSED)
    return sentencepiece_bpe(
        pieces={
            token: score
            for token, score, kind in zip(tokens, scores, types, strict=True)
            if kind in made
        },
        vocab={token: index for index, token in enumerate(tokens)},
        unk=gguf_special(metadata, "unknown") or tokens[0],
        space_prefix=metadata.get("tokenizer.ggml.add_space_prefix", True),
    )


def parse_merge(line: str) -> tuple[str, str]:
    """`"Ġ t"`, a line of merges.txt or of `tokenizer.ggml.merges`, as the pair it joins."""
    left, space, right = line.partition(" ")
    if not (left and space and right):
        raise ValueError(f"{line!r} is not a merge: two tokens with a space between them.")
    return left, right
