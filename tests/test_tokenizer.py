"""Tokenizers against transformers and sentencepiece, on the real SmolLM2 vocabulary and on trained
ones."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import transformers
from gguf import GGUFWriter
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import decoders, pre_tokenizers

from examples import examples
from sentencepieces import gguf_tokenizer
from shardwise.formats.gguf.gguf_file import read_gguf
from shardwise.formats.gguf.gguf_tokenizer import TokenType, tokenizer_from_gguf
from shardwise.formats.tokenizers.bpe import BYTE_TO_CHAR
from shardwise.formats.tokenizers.folder_tokenizer import tokenizer_from_folder
from shardwise.formats.tokenizers.load_tokenizer import load_tokenizer
from shardwise.formats.tokenizers.pre_tokenizers import OTHER_NAMES, PRE_TOKENIZERS
from shardwise.formats.tokenizers.tokenizer import Tokenizer, check_vocabulary
from shardwise.formats.tokenizers.train_bpe import byte_tokenizer, train_bpe
from smollm2 import smollm2_gguf

CORPUS = [
    path.read_text(encoding="utf-8") for path in sorted(Path(json.__file__).parent.glob("*.py"))
]
PIECES = [
    "é",
    "e\u0301",
    "👩‍👩‍👧",
    "🇫🇷",
    "漢字",
    "한글",
    "नमस्ते",
    "\r\n",
    "\t",
    "\x00",
    "\u200b",
    "  ",
    "don't",
    "I'LL",
    "2024",
    "½",
    "½²",
]
TEXTS = st.lists(st.one_of(st.sampled_from(PIECES), st.text(max_size=12))).map("".join)


@pytest.fixture(scope="module")
def smollm2() -> Tokenizer:
    return load_tokenizer(smollm2_gguf())


@pytest.fixture(scope="module")
def trained() -> Tokenizer:
    return train_bpe(CORPUS, 600)


@pytest.fixture(scope="module")
def saved(smollm2: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    smollm2.save(folder)
    return folder


@pytest.fixture(scope="module")
def reference(saved: Path) -> Any:
    return transformers.AutoTokenizer.from_pretrained(saved)


@pytest.fixture(scope="module")
def gguf_reference() -> Any:
    """The tokenizer that transformers reads from the same file, with the rule that SmolLM2 splits
    digits, which it does not read.

    (The pre-tokenizer is that of HuggingFaceTB/SmolLM2-135M-Instruct/tokenizer.json.)
    """
    path = smollm2_gguf()
    tokenizer = transformers.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    return tokenizer


@given(text=TEXTS)
@settings(max_examples=examples(150))
def test_same_ids_and_text_as_transformers_reads_from_the_gguf(
    smollm2: Tokenizer, gguf_reference: Any, text: str
) -> None:
    ids = smollm2.encode(text)
    assert ids == gguf_reference.encode(text, add_special_tokens=False)
    assert smollm2.decode(ids) == gguf_reference.decode(ids)
    vocab = smollm2.backend.get_vocab()
    if all(
        BYTE_TO_CHAR[byte] in vocab for byte in text.encode()
    ):  # a few control characters and planes have no token
        assert smollm2.decode(ids) == text


@given(text=TEXTS, special_tokens=st.booleans())
@settings(max_examples=examples(150))
def test_saved_folder_is_the_same_tokenizer_in_transformers(
    smollm2: Tokenizer, reference: Any, text: str, special_tokens: bool
) -> None:
    text = f"<|im_start|>{text}<|im_end|>"
    ids = smollm2.encode(text, special_tokens)
    assert ids == reference.encode(text, add_special_tokens=special_tokens)
    for skip_special in (False, True):
        assert smollm2.decode(ids, skip_special) == reference.decode(
            ids, skip_special_tokens=skip_special
        )


@given(ids=st.lists(st.integers(0, 49151)))
def test_any_ids_decode_as_in_transformers(
    smollm2: Tokenizer, reference: Any, ids: list[int]
) -> None:
    assert smollm2.decode(ids) == reference.decode(ids, skip_special_tokens=True)
    assert b"".join(map(smollm2.token_bytes, ids)).decode("utf-8", "replace") == smollm2.decode(
        ids, skip_special=False
    )


def test_special_tokens_survive_saving(smollm2: Tokenizer, saved: Path, reference: Any) -> None:
    again = load_tokenizer(saved)
    assert (smollm2.bos_id, smollm2.eos_id, smollm2.eos_ids, smollm2.vocab_size) == (
        1,
        2,
        {0, 2},
        49152,
    )
    assert (again.bos_id, again.eos_id, again.eos_ids, again.vocab_size) == (1, 2, {0, 2}, 49152)
    assert (reference.bos_token_id, reference.eos_token_id, len(reference)) == (1, 2, 49152)
    assert again.special == smollm2.special and again.special_ids == smollm2.special_ids
    assert again.chat_template == smollm2.chat_template == reference.chat_template
    assert transformers.GenerationConfig.from_pretrained(saved).eos_token_id == [2, 0]


def test_saving_keeps_other_generation_settings(smollm2: Tokenizer, tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text('{"temperature": 0.2, "eos_token_id": 7}')
    smollm2.save(tmp_path)
    kept = json.loads((tmp_path / "generation_config.json").read_text())
    assert kept == {"temperature": 0.2, "eos_token_id": [2, 0], "bos_token_id": 1}


@pytest.mark.parametrize("model_type", ["llama", "qwen3", "gpt2", "mistral"])
def test_transformers_keeps_to_the_saved_files_beside_any_model(
    smollm2: Tokenizer, saved: Path, tmp_path: Path, model_type: str
) -> None:
    smollm2.save(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type, "eos_token_id": 2}))
    text = " don't split 2024 here,\n\n  or é there"
    assert transformers.AutoTokenizer.from_pretrained(tmp_path).encode(text) == smollm2.encode(
        text, True
    )


def test_a_run_keeps_its_tokenizer_in_model(trained: Tokenizer, tmp_path: Path) -> None:
    trained.save(tmp_path / "model")
    assert load_tokenizer(tmp_path).backend.to_str() == trained.backend.to_str()


def test_batch_is_each_alone(trained: Tokenizer) -> None:
    assert trained.encode_batch(CORPUS) == [trained.encode(text) for text in CORPUS]


# Chat templates

MESSAGES = [
    {"role": "system", "content": "Be brief & <kind>."},
    {"role": "user", "content": "Say 'hé' 漢字\n  twice "},
    {
        "role": "assistant",
        "content": "hé hé",
        "calls": [{"name": "f", "arguments": {"x": "<b>&é", "a": None}}],
    },
    {"role": "user", "content": "Once more"},
]
TEMPLATES = {
    "chatml": "{% for m in messages %}{{'<|im_start|>' + m.role + '\n' + m.content + "
    "'<|im_end|>\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}",
    "white space": "{{ bos_token }}\n  {% for m in messages %}\n    {%- if loop.first %}first {% "
    "endif %}\n"
    "    {{ m['content'] | trim }}\n  {% endfor %}\n{{ eos_token }}",
    "tojson": "{% for m in messages %}{{ m | tojson }}{{ m | tojson(indent=2) }}{% endfor %}{{ "
    "tools is none }}",
    "loop controls": "{% for m in messages %}{% if loop.index0 == 1 %}{% continue %}{% endif %}{{ "
    "m.content }}"
    "{% if loop.index0 == 2 %}{% break %}{% endif %}{% endfor %}",
    "date": "{{ strftime_now('%Y') }} {% set ns = namespace(n=0) %}"
    "{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}",
    "generation": "{% for m in messages %}{% generation %}{{ m.content }}!{% endgeneration %}{% "
    "endfor %}",
}


@pytest.mark.parametrize("add_generation_prompt", [True, False])
@pytest.mark.parametrize("name", ["its own", *TEMPLATES])
def test_templates_render_as_in_transformers(
    smollm2: Tokenizer, reference: Any, name: str, add_generation_prompt: bool
) -> None:
    template = TEMPLATES.get(name, smollm2.chat_template)
    ours = Tokenizer(smollm2.backend, smollm2.special, smollm2.eos_ids, template)
    expected = reference.apply_chat_template(
        MESSAGES,
        chat_template=template,
        tokenize=False,
        add_generation_prompt=add_generation_prompt,
    )
    assert ours.chat(MESSAGES, add_generation_prompt) == expected
    assert expected


def test_contents_reach_the_template_as_it_takes_them(trained: Tokenizer) -> None:
    """A message without content, as one with tool calls, has none in the template either."""
    writes = "{% for m in messages %}[{{ m.content }}]{% endfor %}"
    loops = "{% for m in messages %}[{% for p in m.content %}{{ p.text }};{% endfor %}]{% endfor %}"
    parts = [{"type": "text", "text": "b"}, {"type": "text", "text": "c"}]
    messages = [{"content": "a"}, {"content": parts}, {"tool_calls": []}, {"content": ""}]
    assert replace(trained, chat_template=writes).chat(messages) == "[a][b\nc][][]"
    assert replace(trained, chat_template=loops).chat(messages) == "[a;][b;c;][][]"


def test_chat_prompt_has_special_ids(smollm2: Tokenizer, reference: Any) -> None:
    prompt = smollm2.encode(smollm2.chat(MESSAGES))
    assert (
        prompt == reference.apply_chat_template(MESSAGES, add_generation_prompt=True)["input_ids"]
    )
    assert prompt.count(1) == len(MESSAGES) + 1


@pytest.mark.parametrize(
    ("template", "sentence"),
    [
        (None, "no chat template"),
        (
            "{{ raise_exception('roles must alternate') }}",
            "does not accept these messages: roles must alternate",
        ),
        ("{{ messages[0].content.x.y }}", "does not accept these messages"),
        ("{{ messages[0].content + 1 }}", "does not accept these messages"),
        ("{{ ().__class__.__base__.__subclasses__() }}", "does not accept these messages"),
        ("{{ messages.append(1) }}", "does not accept these messages"),
        ("{% for m in %}", r"not valid Jinja \(line 1\)"),
    ],
)
def test_template_faults_are_sentences(
    trained: Tokenizer, template: str | None, sentence: str
) -> None:
    with pytest.raises(ValueError, match=sentence):
        Tokenizer(trained.backend, trained.special, trained.eos_ids, template).chat(MESSAGES)


# Hugging Face folders


def write_merges(tokenizer: Tokenizer, folder: Path, **config: Any) -> None:
    """GPT-2's own files, vocab.json and merges.txt."""
    model = json.loads(tokenizer.backend.to_str())["model"]
    (folder / "vocab.json").write_text(json.dumps(model["vocab"]))
    merges = "\n".join(" ".join(pair) for pair in model["merges"])
    (folder / "merges.txt").write_text("#version: 0.2\n" + merges + "\n", encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "config.json").write_text(
        '{"model_type": "gpt2", "bos_token_id": 0, "eos_token_id": 0}'
    )


@pytest.mark.parametrize("kind", ["GPT2Tokenizer", "Qwen2Tokenizer"])
def test_vocab_and_merges_read_as_in_transformers(
    trained: Tokenizer, tmp_path: Path, kind: str
) -> None:
    write_merges(trained, tmp_path, tokenizer_class=kind)
    ours = tokenizer_from_folder(tmp_path)
    theirs = getattr(transformers, kind).from_pretrained(tmp_path)
    assert (ours.bos_id, ours.eos_ids) == (0, {0})

    @given(text=TEXTS)
    @example("x = 12345 and  I'LL don't\r\n\r\n  e\u0301")
    def same(text: str) -> None:
        assert ours.encode(text) == theirs.encode(text, add_special_tokens=False)
        assert ours.encode("<|endoftext|>" + text) == theirs.encode("<|endoftext|>" + text)

    same()


def test_added_tokens_of_an_old_folder(trained: Tokenizer, tmp_path: Path) -> None:
    size = trained.vocab_size
    added = {
        str(size): {"content": "<|im_start|>", "special": True},
        str(size + 1): {"content": "<think>", "special": False},
    }
    write_merges(trained, tmp_path, tokenizer_class="Qwen2Tokenizer", added_tokens_decoder=added)
    ours = tokenizer_from_folder(tmp_path)
    theirs = transformers.Qwen2Tokenizer.from_pretrained(tmp_path)
    text = "<|im_start|>a<think>b<|endoftext|>"
    ids = ours.encode(text)
    assert ids == theirs.encode(text) and {size, size + 1, 0} < set(ids)
    assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True) == "a<think>b"


@pytest.mark.parametrize(
    ("generation", "model", "expected"),
    [
        ({"eos_token_id": [5, 6]}, {"eos_token_id": 9}, {0, 5, 6}),
        ({"eos_token_id": 5}, {}, {0, 5}),
        ({}, {"eos_token_id": [9]}, {0, 9}),
        (None, None, {0}),
    ],
)
def test_end_tokens_of_a_folder(
    trained: Tokenizer, tmp_path: Path, generation: Any, model: Any, expected: set[int]
) -> None:
    trained.save(tmp_path)
    (tmp_path / "generation_config.json").unlink()
    for name, content in (("generation_config.json", generation), ("config.json", model)):
        if content is not None:
            (tmp_path / name).write_text(json.dumps(content))
    assert tokenizer_from_folder(tmp_path).eos_ids == expected


def test_config_decides_about_bos_where_no_tokenizer_json_does(
    trained: Tokenizer, tmp_path: Path
) -> None:
    bos = {"__type": "AddedToken", "content": "<|endoftext|>", "special": True}
    write_merges(
        trained, tmp_path, add_bos_token=True, bos_token=bos, tokenizer_class="GPT2Tokenizer"
    )
    (tmp_path / "special_tokens_map.json").write_text(
        json.dumps({"eos_token": {"content": "<|endoftext|>"}})
    )
    ours = tokenizer_from_folder(tmp_path)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert (
        ours.encode("a b", special_tokens=True) == theirs.encode("a b") == [0, *ours.encode("a b")]
    )
    assert (ours.bos_id, ours.eos_ids) == (0, {0})
    ours.save(tmp_path)
    assert tokenizer_from_folder(tmp_path).encode("a b", special_tokens=True) == ours.encode(
        "a b", special_tokens=True
    )
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"add_bos_token": False, "bos_token": bos})
    )
    ours = tokenizer_from_folder(tmp_path)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert (
        ours.encode("a b", special_tokens=True) == theirs.encode("a b") == [0, *ours.encode("a b")]
    )


def test_templates_of_a_folder(trained: Tokenizer, tmp_path: Path) -> None:
    trained.save(tmp_path)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    named = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]
    for template, expected in ((named, "D"), (named[:1], "T"), ("S", "S"), (None, None)):
        (tmp_path / "tokenizer_config.json").write_text(
            json.dumps({**config, "chat_template": template})
        )
        assert tokenizer_from_folder(tmp_path).chat_template == expected
    (tmp_path / "chat_template.jinja").write_text("J")
    assert tokenizer_from_folder(tmp_path).chat_template == "J"


def test_lengths_in_a_file_do_not_cut_text(trained: Tokenizer, tmp_path: Path) -> None:
    trained.save(tmp_path)
    spec = json.loads((tmp_path / "tokenizer.json").read_text())
    spec["truncation"] = {
        "direction": "Right",
        "max_length": 3,
        "strategy": "LongestFirst",
        "stride": 0,
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps(spec))
    assert tokenizer_from_folder(tmp_path).encode(CORPUS[0]) == trained.encode(CORPUS[0])


# GGUF vocabularies


DIGITS = ["1", "2", "3", "4", "5", "²"]


WORDS = {
    "default": ["Don", "'", "t", " ", " add", " ", "123", "45²", "\n\n", " ok", "!="],
    "gpt-2": ["Don", "'t", " ", " add", " 12345²", "\n\n", " ok", "!="],
    "smollm": ["Don", "'t", " ", " add", " ", *DIGITS, "\n\n", " ok", "!="],
    "llama-bpe": ["Don", "'t", " ", " add", " ", "123", "45²", "\n\n", " ok", "!="],
    "smaug-bpe": ["Don", "'t", " ", " add", " ", "123", "45²", "\n\n", " ok", "!="],
    "qwen2": ["Don", "'t", " ", " add", " ", *DIGITS, "\n\n", " ok", "!="],
    "stablelm2": ["Don", "'t", " ", " add", " ", *DIGITS, "\n\n", " ok", "!="],
    "seed-coder": ["Don", "'t", " ", " add", " ", *DIGITS, "\n\n", " ok", "!="],
    "tekken": ["Don", "'t", " ", " add", " ", *DIGITS, "\n\n", " ok", "!="],
    "falcon": ["Don", "'", "t", " ", " add", " ", "123", "45²", "\n\n", " ok", "!="],
    "deepseek-coder": ["Don", "'", "t", " ", " add", " ", *DIGITS, "\n", "\n", " ok", "!", "="],
    "bloom": ["Don't", " ", " add", " 12345²", "\n\n", " ok", "!", "="],
    "viking": ["Don't", " ", " add", " ", *DIGITS, "\n\n", " ok", "!", "="],
}


@pytest.mark.parametrize("pre", PRE_TOKENIZERS)
def test_pre_tokenizers_split_as_in_llama_cpp(pre: str) -> None:
    """Under each of their names."""
    for name in (pre, *OTHER_NAMES.get(pre, ())):
        cut = byte_level_from(name).backend.pre_tokenizer
        parts = cut.pre_tokenize_str("Don't  add 12345²\n\n ok!=")
        words = [decoders.ByteLevel().decode([word]) for word, _ in parts]
        assert words == WORDS[pre], name


@pytest.mark.parametrize("name", ["llama3", "llama-v3", "falcon3", "pixtral", "mistral-bpe"])
def test_other_names_begin_with_a_bos_too(name: str) -> None:
    assert byte_level_from(name).encode("hi", special_tokens=True) == [259, ord("h"), ord("i")]
    for other in ("smaug-bpe", "phi-2", "olmo", "starcoder"):
        assert byte_level_from(other).encode("hi", special_tokens=True) == [ord("h"), ord("i")]


def test_a_missing_pre_tokenizer_is_reported() -> None:
    with pytest.warns(UserWarning, match="does not name its pre-tokenizer .*'default', splits"):
        tokenizer = byte_level_from(None)
    assert tokenizer.encode("hi", special_tokens=True) == [ord("h"), ord("i")]
    assert tokenizer.encode("'s the") == byte_level_from("default").encode("'s the")


def byte_level_from(pre: str | None, **more: Any) -> Tokenizer:
    tokens = [*BYTE_TO_CHAR, "Ġt", "th", "the", "<s>", "</s>", "<think>"]
    types = [TokenType.NORMAL] * 259 + [TokenType.CONTROL] * 2 + [TokenType.USER_DEFINED]
    keys = {
        "model": "gpt2",
        "pre": pre,
        "tokens": tokens,
        "token_type": types,
        "merges": ["Ġ t", "t h", "th e"],
    }
    keys |= {"bos_token_id": 259, "eos_token_id": 260, **more}
    return tokenizer_from_gguf(
        {f"tokenizer.ggml.{key}": value for key, value in keys.items() if value is not None}
    )


def test_bos_is_added_where_the_kind_or_the_file_says_so() -> None:
    plain = [ord("h"), ord("i")]
    assert byte_level_from("gpt-2").encode("hi", special_tokens=True) == plain
    assert byte_level_from("llama-bpe").encode("hi", special_tokens=True) == [259, *plain]
    assert (
        byte_level_from("llama-bpe", add_bos_token=False).encode("hi", special_tokens=True) == plain
    )
    assert byte_level_from("qwen2", add_bos_token=True, add_eos_token=True).encode("hi", True) == [
        259,
        *plain,
        260,
    ]
    assert byte_level_from("llama-bpe").encode("hi") == plain


@pytest.mark.parametrize("kind", [TokenType.NORMAL, TokenType.CONTROL, TokenType.USER_DEFINED])
def test_an_end_of_turn_ends_whatever_its_type(kind: TokenType) -> None:
    """Published files type `<|im_end|>` as a word or user-defined; llama.cpp goes by its text."""
    tokens = [*BYTE_TO_CHAR, "<s>", "<|endoftext|>", "<|im_end|>"]
    types = [TokenType.NORMAL] * 256 + [TokenType.CONTROL] * 2 + [kind]
    changes = {"tokens": tokens, "token_type": types, "merges": []}
    tokenizer = byte_level_from("gpt-2", bos_token_id=256, eos_token_id=257, **changes)
    assert tokenizer.eos_ids == {257, 258} and tokenizer.special_ids >= {257, 258}
    assert tokenizer.encode("a<|im_end|>") == [ord("a"), 258]
    assert tokenizer.decode([ord("a"), 258]) == "a"


def test_end_tokens_of_a_gguf_file() -> None:
    assert byte_level_from("gpt-2").eos_ids == {260}
    assert byte_level_from("gpt-2", eos_token_id=259).eos_ids == {
        259,
        260,
    }  # `</s>` is a control token
    assert byte_level_from("gpt-2", eot_token_id=261).eos_ids == {260, 261}


def test_user_defined_tokens_are_whole_and_shown() -> None:
    tokenizer = byte_level_from("gpt-2")
    assert tokenizer.encode("<think>the</s>") == [261, 258, 260]
    assert tokenizer.decode([261, 258, 260]) == "<think>the"


def test_qwen2_saved_is_qwen2_in_transformers(tmp_path: Path) -> None:
    """Beside a config of model type qwen2 transformers builds its own class, whatever
    tokenizer.json says."""
    ours = byte_level_from("qwen2")
    ours.save(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "qwen2"}')
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    text = "the<think>I'LL  e\u0301 2024\n\n the</s>"
    assert theirs.encode(text) == ours.encode(text, special_tokens=True)


def test_unicode_is_composed_for_qwen2_only() -> None:
    assert byte_level_from("qwen2").encode("e\u0301") == list("é".encode())
    assert byte_level_from("llama-bpe").encode("e\u0301") == list("e\u0301".encode())


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"model": "wordlevel"}, "unknown GGUF tokenizer 'wordlevel'; known are gpt2, llama"),
        ({"model": None}, "has no tokenizer"),
        (
            {"pre": "mystery"},
            "unknown pre-tokenizer 'mystery'; known are a.x-4.0, bloom, .*llama-bpe, llama-v3, ",
        ),
        ({"merges": None}, "has no merges"),
        ({"merges": ["ab"]}, "'ab' is not a merge"),
        ({"merges": ["zz zz"]}, "merges do not fit"),
        ({"bos_token_id": 999}, "bos token has id 999, but its vocabulary has 262 tokens"),
        ({"tokens": ["a", "a"]}, "lists 1 tokens twice"),
        ({"model": "llama"}, "262 tokens but 0 scores"),
        ({"bos_token_id": "1"}, "the value of bos_token_id"),
        ({"eos_token_id": 1.0}, "the value of eos_token_id"),
        ({"merges": [1, 2]}, "the value of merges"),
        ({"merges": 5}, "the value of merges"),
        ({"tokens": 5}, "the value of tokens"),
        ({"tokens": [1]}, "the value of tokens"),
        ({"model": ["gpt2"]}, "the value of model"),
        ({"pre": ["gpt-2"]}, "the value of pre"),
        ({"token_type": "x"}, "the value of token_type"),
        ({"scores": ["x"]}, "the value of scores"),
        ({"add_bos_token": "no"}, "the value of add_bos_token"),
    ],
)
def test_gguf_faults_are_sentences(change: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        byte_level_from(change.pop("pre", "gpt-2"), **change)


@pytest.fixture(scope="module")
def sentencepiece() -> tuple[Tokenizer, Any]:
    """A small SentencePiece model and our tokenizer from the GGUF metadata that llama.cpp writes
    for such a model."""
    package = pytest.importorskip("sentencepiece")
    model = bytearray()

    class Sink:
        write = staticmethod(model.extend)

    package.SentencePieceTrainer.train(
        sentence_iterator=(line for text in CORPUS for line in text.splitlines() if line.strip()),
        model_writer=Sink(),
        model_type="bpe",
        vocab_size=800,
        byte_fallback=True,
        minloglevel=2,
        num_threads=1,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        user_defined_symbols=["<think>"],
    )
    processor = package.SentencePieceProcessor(model_proto=bytes(model))
    return gguf_tokenizer(processor, {"<think>": TokenType.USER_DEFINED}), processor


@given(text=TEXTS, source=st.sampled_from(CORPUS), start=st.integers(0, 1000))
@settings(max_examples=examples(150))
def test_sentencepiece_ids(
    sentencepiece: tuple[Tokenizer, Any], text: str, source: str, start: int
) -> None:
    ours, processor = sentencepiece
    text = (
        (source[start : start + 60] + text).replace("\x00", "").replace("▁", "")
    )  # characters that it changes itself
    ids = ours.encode(text)
    assert ids == processor.encode(text)
    assert ours.decode(ids) == processor.decode(ids) == text
    assert ours.encode(text, special_tokens=True) == [1, *ids]


def test_sentencepiece_scores_decide() -> None:
    """Naive reading of the definition, by hand: join the neighbours whose union scores highest."""
    tokens = [
        "<unk>",
        "<s>",
        "</s>",
        "<0xC3>",
        "<0xA9>",
        "▁",
        "a",
        "b",
        "c",
        "ab",
        "bc",
        "abc",
        "▁a",
    ]
    scores = [0.0] * 5 + [-9.0, -9.0, -9.0, -9.0, -2.0, -1.0, -3.0, -4.0]
    types = (
        [TokenType.UNKNOWN]
        + [TokenType.CONTROL] * 2
        + [TokenType.BYTE] * 2
        + [TokenType.NORMAL] * 8
    )
    keys = {
        "model": "llama",
        "tokens": tokens,
        "scores": scores,
        "token_type": types,
        "unknown_token_id": 0,
    }
    metadata = {f"tokenizer.ggml.{key}": value for key, value in keys.items()}
    tokenizer = tokenizer_from_gguf(metadata)
    assert tokenizer.encode("abc") == [
        5,
        11,
    ]  # ▁ abc: bc (-1) is joined before ab (-2), then a+bc (-3) before ▁a (-4)
    assert tokenizer.encode("aé d") == [12, 3, 4, 5, 0]  # é in bytes, d in none
    assert tokenizer.decode([12, 3, 4, 5, 6]) == "aé a"
    bare = tokenizer_from_gguf({**metadata, "tokenizer.ggml.add_space_prefix": False})
    assert bare.encode("abc") == [11] and bare.decode([5, 6]) == " a"


# Made here


@given(data=st.binary(max_size=40), text=TEXTS)
def test_byte_tokenizer_ids_are_bytes(data: bytes, text: str) -> None:
    tokenizer = byte_tokenizer()
    assert tokenizer.encode(text) == list(text.encode())
    assert tokenizer.decode(list(data)) == data.decode("utf-8", "replace")
    assert (tokenizer.vocab_size, tokenizer.eos_ids, tokenizer.bos_id) == (257, {256}, 256)
    assert tokenizer.encode("a<|endoftext|>") == [97, 256] and tokenizer.decode([97, 256]) == "a"


@pytest.mark.parametrize("make", [byte_tokenizer, lambda: train_bpe(CORPUS, 400)])
def test_made_tokenizers_load_in_transformers(make: Any, tmp_path: Path) -> None:
    tokenizer = make()
    tokenizer.save(tmp_path)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    text = "def f():\n    return 'é漢' <|endoftext|>"
    assert theirs.encode(text) == tokenizer.encode(text)
    assert theirs.eos_token_id == theirs.bos_token_id == tokenizer.eos_id
    assert load_tokenizer(tmp_path).encode(text) == tokenizer.encode(text)


@given(text=TEXTS)
def test_trained_text_comes_back(trained: Tokenizer, text: str) -> None:
    assert trained.decode(trained.encode(text)) == text


def test_training_learns_and_repeats_itself(trained: Tokenizer) -> None:
    assert train_bpe(iter(CORPUS), 600).backend.to_str() == trained.backend.to_str()
    assert trained.vocab_size == 600
    num_bytes = sum(len(text.encode()) for text in CORPUS)
    assert sum(map(len, trained.encode_batch(CORPUS))) < 0.5 * num_bytes
    assert train_bpe(["aaaa"], 600).vocab_size < 270
    with pytest.raises(ValueError, match="need at least 257"):
        train_bpe(CORPUS, 256)


# Bad input


def test_vocabulary_must_fit_the_model(trained: Tokenizer) -> None:
    check_vocabulary(trained, 600)
    check_vocabulary(trained, 640)
    with pytest.raises(
        ValueError, match="ids up to 599, but the model's vocabulary has only 512 rows"
    ):
        check_vocabulary(trained, 512)


def test_half_a_surrogate_pair_is_refused(trained: Tokenizer) -> None:
    with pytest.raises(ValueError, match="not valid Unicode"):
        trained.encode("a\ud800b")


@pytest.mark.parametrize(
    ("files", "sentence"),
    [
        ({}, "has no tokenizer: expected tokenizer.json"),
        ({"tokenizer.model": "x"}, "only as tokenizer.model.*save_pretrained"),
        ({"tokenizer.json": "{"}, "tokenizer.json is not valid JSON"),
        ({"tokenizer.json": "{}"}, "is not a tokenizer that can be read"),
        ({"vocab.json": "{", "merges.txt": ""}, "is not valid JSON"),
        ({"vocab.json": "[]", "merges.txt": ""}, "must hold a JSON object, but it holds a list"),
        ({"vocab.json": '{"a": 0}', "merges.txt": "b c"}, "merges do not fit"),
        (
            {
                "vocab.json": '{"a": 0}',
                "merges.txt": "",
                "tokenizer_config.json": '{"tokenizer_class": "RobertaTokenizer"}',
            },
            "supported only for Qwen2Tokenizer and GPT2Tokenizer, not RobertaTokenizer",
        ),
    ],
)
def test_folder_faults_are_sentences(tmp_path: Path, files: dict[str, str], sentence: str) -> None:
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=sentence):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize(
    ("file", "change"),
    [
        ("tokenizer_config.json", {"eos_token": 5}),
        ("tokenizer_config.json", {"eos_token": {"foo": 1}}),
        ("tokenizer_config.json", {"bos_token": {"content": 1}}),
        ("special_tokens_map.json", {"pad_token": ["x"]}),
        ("tokenizer_config.json", {"chat_template": 5}),
        ("tokenizer_config.json", {"chat_template": [{"name": "x"}]}),
        ("tokenizer_config.json", {"chat_template": ["x"]}),
        (
            "tokenizer_config.json",
            {"chat_template": [{"name": "x", "template": None}, {"name": []}]},
        ),
        ("generation_config.json", {"eos_token_id": {"a": 1}}),
        ("generation_config.json", {"eos_token_id": [[1]]}),
        ("generation_config.json", {"eos_token_id": -1}),
        ("config.json", {"eos_token_id": [[1]]}),
        ("config.json", {"eos_token_id": {"a": 1}}),
        ("config.json", {"eos_token_id": "2"}),
        ("config.json", {"eos_token_id": True}),
    ],
)
def test_a_value_of_another_type_is_named(
    trained: Tokenizer, tmp_path: Path, file: str, change: Any
) -> None:
    trained.save(tmp_path)
    (tmp_path / "generation_config.json").unlink()
    (tmp_path / file).write_text(json.dumps(change))
    with pytest.raises(ValueError) as caught:
        load_tokenizer(tmp_path)
    assert str(caught.value).startswith(f"{tmp_path / file}: {next(iter(change))} must be")


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("merges.txt", b"\xff"),
        ("merges.txt", b"ab"),
        ("vocab.json", b"[" * 100_000),
        ("vocab.json", b'{"a": "b"}'),
        ("added_tokens.json", b'{"<x>": "y"}'),
        ("added_tokens.json", b'{"<x>": [1]}'),
        ("tokenizer_config.json", b'{"added_tokens_decoder": [1]}'),
        ("tokenizer_config.json", b'{"added_tokens_decoder": {"600": 5}}'),
        ("tokenizer_config.json", b'{"added_tokens_decoder": {"600": {"content": 5}}}'),
        ("chat_template.jinja", b"\xff"),
    ],
)
def test_a_broken_file_of_an_old_folder_is_named(
    trained: Tokenizer, tmp_path: Path, file: str, content: bytes
) -> None:
    write_merges(trained, tmp_path)
    (tmp_path / file).write_bytes(content)
    with pytest.raises(ValueError) as caught:
        load_tokenizer(tmp_path)
    assert str(caught.value).startswith(str(tmp_path))


def test_a_gguf_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "bad.gguf"
    writer = GGUFWriter(path, "llama")
    writer.add_string("tokenizer.ggml.model", "gpt2")
    writer.add_token_list(["a", "b"])
    writer.add_array("tokenizer.ggml.merges", [1, 2])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(ValueError) as caught:
        load_tokenizer(path)
    assert str(caught.value).startswith(f"{path}: the value of merges")


def test_path_faults_are_sentences(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="does not exist"):
        load_tokenizer(tmp_path / "nothing")
    (tmp_path / "file.bin").write_text("x")
    with pytest.raises(ValueError, match=r"neither a folder nor a \.gguf file"):
        load_tokenizer(tmp_path / "file.bin")
    assert (
        tokenizer_from_gguf(read_gguf(smollm2_gguf()).metadata).vocab_size
        == load_tokenizer(smollm2_gguf()).vocab_size
    )
