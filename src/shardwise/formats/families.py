"""Where Hugging Face checkpoints and GGUF files keep our parameters: a table of names a family, as
data.

Ours are [out, in] and fuse q|k|v and gate|up; files split them, or store them [in, out] (GPT-2), or
put the rows of each head in another order (GGUF files of the llama architecture). GGUF names follow
gguf-py/gguf/tensor_mapping.py of https://github.com/ggml-org/llama.cpp.
"""

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace

from shardwise.params import Box, ParamSpec

IGNORED = re.compile(
    r"(^|\.)attn\.(masked_)?bias$|rotary_emb\.inv_freq$|^rope_freqs\.weight$"
)  # buffers, no weights


@dataclass(frozen=True)
class Names:
    """How files of one kind name and store a family's parameters.

    `stems` leads from our name in a block (`qkv`, or `qkv.q` for a part with a tensor of its own)
    to the stored one, less `.weight` or `.bias`; `{}` stands for the layer. A file saved without
    its head may lack `prefix` throughout.
    """

    stems: Mapping[str, str]
    prefix: str = ""
    transposed: frozenset[str] = frozenset()  # matrices stored [in, out]
    interleaved: frozenset[str] = (
        frozenset()
    )  # parts whose heads keep the two rows that rotate together side by side


@dataclass(frozen=True)
class Source:
    """The stored tensor that holds `rows` of one of our parameters; `shape` is as stored."""

    name: str
    rows: slice
    shape: tuple[int, ...]
    transposed: bool = False
    interleaved: bool = False

    def slices(self, box: Box) -> tuple[slice, ...]:
        """Where a box of our parameter lies in the stored tensor."""
        rows, *columns = box.slices
        rows = slice(rows.start - self.rows.start, rows.stop - self.rows.start)
        return (*columns, rows) if self.transposed else (rows, *columns)


FOLDER_LLAMA = Names(
    {
        "embed": "model.embed_tokens",
        "norm1": "model.layers.{}.input_layernorm",
        "qkv.q": "model.layers.{}.self_attn.q_proj",
        "qkv.k": "model.layers.{}.self_attn.k_proj",
        "qkv.v": "model.layers.{}.self_attn.v_proj",
        "q_norm": "model.layers.{}.self_attn.q_norm",
        "k_norm": "model.layers.{}.self_attn.k_norm",
        "out": "model.layers.{}.self_attn.o_proj",
        "norm2": "model.layers.{}.post_attention_layernorm",
        "gate_up.gate": "model.layers.{}.mlp.gate_proj",
        "gate_up.up": "model.layers.{}.mlp.up_proj",
        "down": "model.layers.{}.mlp.down_proj",
        "norm": "model.norm",
        "head": "lm_head",
    },
    prefix="model.",
)
FOLDER_GPT2 = Names(
    {
        "embed": "transformer.wte",
        "positions": "transformer.wpe",
        "norm1": "transformer.h.{}.ln_1",
        "qkv": "transformer.h.{}.attn.c_attn",
        "out": "transformer.h.{}.attn.c_proj",
        "norm2": "transformer.h.{}.ln_2",
        "gate_up": "transformer.h.{}.mlp.c_fc",
        "down": "transformer.h.{}.mlp.c_proj",
        "norm": "transformer.ln_f",
        "head": "lm_head",
    },
    prefix="transformer.",
    transposed=frozenset({"qkv", "out", "gate_up", "down"}),
)
GGUF_STEMS = {
    "embed": "token_embd",
    "positions": "position_embd",
    "norm1": "blk.{}.attn_norm",
    "q_norm": "blk.{}.attn_q_norm",
    "k_norm": "blk.{}.attn_k_norm",
    "out": "blk.{}.attn_output",
    "norm2": "blk.{}.ffn_norm",
    "down": "blk.{}.ffn_down",
    "norm": "output_norm",
    "head": "output",
}
GGUF_QWEN = Names(
    GGUF_STEMS
    | {
        "qkv.q": "blk.{}.attn_q",
        "qkv.k": "blk.{}.attn_k",
        "qkv.v": "blk.{}.attn_v",
        "gate_up.gate": "blk.{}.ffn_gate",
        "gate_up.up": "blk.{}.ffn_up",
    }
)
GGUF_LLAMA = replace(GGUF_QWEN, interleaved=frozenset({"qkv.q", "qkv.k"}))
GGUF_GPT2 = Names(GGUF_STEMS | {"qkv": "blk.{}.attn_qkv", "gate_up": "blk.{}.ffn_up"})

FOLDER_NAMES = dict.fromkeys(("llama", "mistral", "qwen2", "qwen3"), FOLDER_LLAMA) | {
    "gpt2": FOLDER_GPT2
}
GGUF_NAMES = dict.fromkeys(("llama", "mistral"), GGUF_LLAMA) | dict.fromkeys(
    ("qwen2", "qwen3"), GGUF_QWEN
)
GGUF_NAMES["gpt2"] = GGUF_GPT2


def sources(spec: ParamSpec, names: Names) -> dict[str, Source]:
    """The stored tensor of each part of a parameter, by the part's name; parts stored fused share
    one."""
    *block, local = spec.name.split(".")
    stem = local.removesuffix("_bias")
    ending = ".bias" if local.endswith("_bias") else ".weight"
    found = {}
    row = 0
    for part in spec.rows:
        own = f"{stem}.{part.name}"
        rows = slice(row, row + part.size) if own in names.stems else slice(0, spec.shape[0])
        name = (names.stems.get(own) or names.stems[stem]).format(*block[1:]) + ending
        shape = (rows.stop - rows.start, *spec.shape[1:])
        transposed = stem in names.transposed and len(shape) == 2
        found[part.name] = Source(
            name,
            rows,
            shape[::-1] if transposed else shape,
            transposed,
            interleaved=own in names.interleaved,
        )
        row += part.size
    return found


def stored_tensors(specs: Iterable[ParamSpec], names: Names) -> dict[str, tuple[int, ...]]:
    """The shape of every stored tensor that the parameters are made of, by its name, in their
    order."""
    return {source.name: source.shape for spec in specs for source in sources(spec, names).values()}


def fit_prefix(names: Names, stored: Collection[str]) -> Names:
    """`names` as a file spells them: without the prefix if none of the `stored` names begins with
    it."""
    if any(name.startswith(names.prefix) for name in stored):
        return names
    return replace(
        names, stems={ours: stem.removeprefix(names.prefix) for ours, stem in names.stems.items()}
    )


def check_stored(
    stored: Mapping[str, tuple[int, ...]], specs: Collection[ParamSpec], names: Names, where: object
) -> None:
    """Raise ValueError, naming the tensors, unless a file stores exactly the parameters `specs` in
    their shapes.

    A head that is tied may be stored or not, since some save it twice; buffers are ignored.
    """
    wanted = stored_tensors((spec for spec in specs if spec.tied_to is None), names)
    known = stored_tensors(specs, names)
    missing = [name for name in wanted if name not in stored]
    extra = [name for name in stored if name not in known and not IGNORED.search(name)]
    wrong = [
        f"{name} is {written(stored[name])} and should be {written(shape)}"
        for name, shape in wanted.items()
        if name in stored and stored[name] != shape
    ]
    faults = [
        f"{what} {some(them)}"
        for what, them in (
            ("it lacks", missing),
            ("it has no place for", extra),
            ("its tensor", wrong),
        )
        if them
    ]
    if faults:
        raise ValueError(
            f"{where} does not hold the model that its config describes: {'; '.join(faults)}"
        )


def some(them: list[str], at_most: int = 3) -> str:
    rest = f" and {len(them) - at_most} more" if len(them) > at_most else ""
    return ", ".join(them[:at_most]) + rest


def written(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape)) or "a scalar"
