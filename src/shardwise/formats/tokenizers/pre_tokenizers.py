"""The rules by which byte-level tokenizers split text into words, by the names of GGUF files.

A name stands for the rule that llama.cpp has for it (src/llama-vocab.cpp), as far as tokenizers of
the supported architectures use it; text is also composed where the original tokenizer does so.
"""

from dataclasses import dataclass

GPT2_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2_WORDS = LLAMA3_WORDS.replace(r"\p{N}{1,3}", r"\p{N}")
SEED_WORDS = QWEN2_WORDS.replace(r" ?[^\s\p{L}\p{N}]+[\r\n]*", r" ?[^\s\p{L}\p{N}\r\n]+")
TEKKEN_WORDS = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
BLOOM_WORDS = " ?[^(\\s|.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c)]+"
DIGIT = r"\p{N}"
THREE_DIGITS = r"[0-9][0-9][0-9]"


@dataclass(frozen=True)
class PreTokenizer:
    """The rule by which a byte-level tokenizer splits text into words before any merge.

    Attributes:
        patterns: regular expressions, applied one after the other.
        whole_words_first: a word that is itself a token is used without applying merges.
        begins_with_bos: llama.cpp puts a BOS in front unless the file states otherwise.
        composes_unicode: text is normalized to NFC first.
    """

    patterns: tuple[str, ...]
    whole_words_first: bool = False
    begins_with_bos: bool = False
    composes_unicode: bool = False


PRE_TOKENIZERS: dict[str, PreTokenizer] = {
    "default": PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", GPT2_WORDS, r"\p{N}+", THREE_DIGITS)),
    "gpt-2": PreTokenizer((GPT2_WORDS,)),
    "smollm": PreTokenizer((DIGIT, GPT2_WORDS)),
    "llama-bpe": PreTokenizer((LLAMA3_WORDS,), whole_words_first=True, begins_with_bos=True),
    "smaug-bpe": PreTokenizer((LLAMA3_WORDS,)),
    "qwen2": PreTokenizer((QWEN2_WORDS,), composes_unicode=True),
    "stablelm2": PreTokenizer((QWEN2_WORDS,)),
    "seed-coder": PreTokenizer((SEED_WORDS,)),
    "tekken": PreTokenizer((TEKKEN_WORDS,), whole_words_first=True, begins_with_bos=True),
    "falcon": PreTokenizer((r"[\p{P}\$\+<=>\^~\|`]+", GPT2_WORDS, THREE_DIGITS)),
    "deepseek-coder": PreTokenizer(
        (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-\ud7ff]+", DIGIT)
    ),
    "bloom": PreTokenizer((BLOOM_WORDS,)),
    "viking": PreTokenizer((BLOOM_WORDS, DIGIT)),
}
"""The rules, by the first of their names."""

OTHER_NAMES: dict[str, tuple[str, ...]] = {
    "gpt-2": (
        "a.x-4.0", "exaone4", "gigachat", "granite-docling", "jais", "jina-de", "jina-es",
        "jina-v2-de", "jina-v2-es", "mellum", "modern-bert", "mpt", "olmo", "phi-2", "trillion",
    ),
    "smollm": ("codeshell", "command-r", "exaone", "mellum2", "minerva-7b", "refact", "starcoder"),
    "llama-bpe": (
        "falcon-h1", "falcon3", "jina-v5-nano", "lfm2", "llama-v3", "llama3", "midm-2.0", "pixtral",
    ),
    "smaug-bpe": ("dbrx",),
    "qwen2": ("deepseek-r1-qwen", "f2llmv2"),
    "stablelm2": ("grok-2", "hunyuan", "kormo", "megrez", "solar-open"),
    "tekken": ("mistral-bpe",),  # of early files of Mistral Nemo
    "bloom": ("gpt3-finnish", "poro-chat"),
}  # fmt: skip
"""More names of the same rules."""

FIRST_NAMES = {name: first for first, names in OTHER_NAMES.items() for name in names}


def find_pre_tokenizer(name: str) -> PreTokenizer:
    """Return the rule with a name of GGUF files. Raises ValueError if there is none."""
    rule = PRE_TOKENIZERS.get(FIRST_NAMES.get(name, name))
    if rule is None:
        known = ", ".join(sorted(PRE_TOKENIZERS.keys() | FIRST_NAMES.keys()))
        raise ValueError(f"unknown pre-tokenizer {name!r}; known are {known}")
    return rule
