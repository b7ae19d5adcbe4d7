"""The two kinds of byte pair encoding (BPE) that language models use, as `tokenizers` pipelines.

*Byte-level BPE* (GPT-2, Llama 3, Qwen, SmolLM): a regular expression splits text into words, each
byte of a word is written as one printable character, and merges join them in the order in which
they were learned.

*SentencePiece BPE* (Llama 2, Mistral): a space is an ordinary character, every token has a score,
and the pair whose union scores highest is merged first. A character without a token falls back to
its bytes, `<0xE2>`.

Papers: Sennrich et al. 2016 (BPE), Radford et al. 2019 (bytes), Kudo and Richardson 2018
(SentencePiece).
"""

from collections.abc import Mapping, Sequence
from typing import Any

from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

from shardwise.formats.tokenizers.pre_tokenizers import find_pre_tokenizer


def _byte_characters() -> list[str]:
    """Return GPT-2's character for each byte: printable Latin-1 as it is, the other 68 bytes as
    U+0100 and up, in order."""
    characters = []
    num_shifted = 0
    for byte in range(256):
        if 0x21 <= byte <= 0x7E or (byte >= 0xA1 and byte != 0xAD):
            characters.append(chr(byte))
        else:
            characters.append(chr(0x100 + num_shifted))
            num_shifted += 1
    return characters


BYTE_TO_CHAR = _byte_characters()
CHAR_TO_BYTE = {char: byte for byte, char in enumerate(BYTE_TO_CHAR)}


def byte_level_bpe(
    vocab: Mapping[str, int], merges: Sequence[tuple[str, str]], pre: str
) -> Backend:
    """Build byte-level BPE; `pre` is the name of a pre-tokenizer.

    Raises ValueError for an unknown `pre` and for merges that do not fit the vocabulary.
    """
    rule = find_pre_tokenizer(pre)
    try:
        bpe = models.BPE(dict(vocab), list(merges), ignore_merges=rule.whole_words_first)
    except Exception as error:  # the library raises nothing narrower
        raise ValueError(f"the tokenizer's merges do not fit its vocabulary: {error}") from error
    backend = Backend(bpe)
    if rule.composes_unicode:
        backend.normalizer = normalizers.NFC()
    splits: list[Any] = [pre_tokenizers.Split(Regex(words), "isolated") for words in rule.patterns]
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    backend.decoder = decoders.ByteLevel()
    return backend


MAX_TOKEN_CHARS = 256
MAX_VOCAB_CHARS = 1 << 23


def sentencepiece_bpe(
    scores: Mapping[str, float], vocab: Mapping[str, int], unk: str, space_prefix: bool
) -> Backend:
    """Build SentencePiece BPE with byte fallback; `scores` holds the tokens that merges may make.

    With `space_prefix` every text gets a leading space, as if it followed a word; decoding strips
    it again. Raises ValueError for scores that do not fit the vocabulary, and for tokens so long
    that the search for their merges would take minutes.
    """
    longest = max(map(len, scores), default=0)
    if longest > MAX_TOKEN_CHARS or sum(map(len, scores)) > MAX_VOCAB_CHARS:
        raise ValueError(
            f"the tokenizer's longest token has {longest} characters, and at most "
            f"{MAX_TOKEN_CHARS} are supported, with {MAX_VOCAB_CHARS} in all tokens"
        )
    try:
        bpe = models.BPE(
            dict(vocab), _merges_by_score(scores), unk_token=unk, fuse_unk=True, byte_fallback=True
        )
    except Exception as error:  # the library raises nothing narrower
        raise ValueError(f"the tokenizer's scores do not fit its vocabulary: {error}") from error
    backend = Backend(bpe)
    normalizer: list[Any] = [normalizers.Replace(" ", "▁")]
    decoder: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if space_prefix:
        normalizer.insert(0, normalizers.Prepend("▁"))
        decoder.append(decoders.Strip(" ", 1, 0))
    backend.normalizer = normalizers.Sequence(normalizer)
    backend.decoder = decoders.Sequence(decoder)
    return backend


def _merges_by_score(scores: Mapping[str, float]) -> list[tuple[str, str]]:
    """Return the merges that scores imply: each way to join two tokens into a third, the one with
    the highest score first, the longer left part first."""
    merges = []
    for token in sorted(scores, key=lambda token: -scores[token]):
        for length in range(len(token) - 1, 0, -1):
            left = token[:length]
            right = token[length:]
            if left in scores and right in scores:
                merges.append((left, right))
    return merges


def add_bos_eos(backend: Backend, bos: str | None, eos: str | None) -> None:
    """Make `special_tokens=True` put `bos` before and `eos` after a text; None adds nothing."""
    backend.post_processor = processors.TemplateProcessing(
        single=[*([bos] if bos else []), "$A", *([eos] if eos else [])],
        special_tokens=[
            (token, backend.token_to_id(token)) for token in dict.fromkeys((bos, eos)) if token
        ],
    )


def parse_merge(line: str) -> tuple[str, str]:
    """Parse `"Ġ t"`, a line of merges.txt or of `tokenizer.ggml.merges`, into the pair to join."""
    left, space, right = line.partition(" ")
    if not (left and space and right):
        raise ValueError(f"{line!r} is not a merge: it needs two tokens with a space between them")
    return left, right
