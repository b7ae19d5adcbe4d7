"""What a rank keeps of a micro-batch from its forward until its backward: a formula, tensor by
tensor.

Of B sequences of T tokens a rank has n = B T / c tokens, over c context ranks, and n / s of them
between the seams: s is t, the tensor ranks, under sequence parallel, else 1. D model, H heads, K kv
heads, F ffn; e bytes an element.

It is the table of Korthikanti et al. 2022 (arXiv 2205.05198, table 2). Bytes of a block of GPT (F =
4D, K = H, e = 2), over n D:

                            their table                    here
    none                    34          + 5HT/D            32          + 8/D
    tp                      10 + 24/t   + 5HT/(Dt)          8 + 24/t   + 8/D
    tp, sp                       34/t   + 5HT/(Dt)          4 + 28/t   + 8/(Dt)
    tp, selective           10 + 24/t                       4 + 16/t
    tp, sp, selective            34/t                           20/t
    full                    2                               2, or 2/t with sp

Where they differ:

- There is no dropout here, and so no masks of it: 2 bytes of their 34.
- Scores, 5HT, are never kept here, whatever is recomputed and whichever kernels run (Dao et al. 2022); around a ring
  their log-sum-exp is, 4 bytes a head. For the norms' backward there are statistics, which they leave out.
- With sp the inputs of qkv and gate_up are kept as they were gathered, 4 of which they keep 4/t, and gather again.
- `selective` is theirs for scores. Here it drops what is cheap to have again: the inputs of qkv and gate_up, norms of
  what is kept, and that of down, an activation. With sp this gathers the two again.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from shardwise.config import ModelConfig
from shardwise.layout import Coord, Layout, Recompute
from shardwise.model.chunks import PRODUCT_BYTES, SOFTMAX_BYTES, longest_chunk
from shardwise.parallel.pipeline.actions import Action
from shardwise.parallel.pipeline.schedules import rank_actions
from shardwise.params import cut_dim, stage_layers, stage_units

SUM_BYTES = 4  # fp32
RECOMPUTED = ("norm1 statistics", "qkv input", "norm2 statistics", "gate_up input", "down input")


@dataclass(frozen=True)
class MicroBatchShape:
    """What a data rank works on at a time; its context ranks have a part of every sequence each."""

    num_sequences: int
    seq_tokens: int


@dataclass(frozen=True)
class Share:
    """One rank's share of a micro-batch, in tokens, and of a block and the head, in elements a
    token. Of ranks that differ, as those do that an ffn does not divide among, the first, which has
    the most."""

    tokens: int
    outer_tokens: int
    """Between the seams, where sequence parallel cuts the sequence."""
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    inner: int
    """What the activation works on: gate and up, or up alone."""
    vocab: int
    in_ring: bool
    traded: bool
    """Whether context parallel is by a ring, or by trading tokens for heads."""

    @property
    def q(self) -> int:
        return self.heads * self.head_dim

    @property
    def kv(self) -> int:
        return self.kv_heads * self.head_dim


def share_of(config: ModelConfig, layout: Layout, microbatch: MicroBatchShape) -> Share:
    first = Coord(dp=0, tp=0, pp=0, cp=0)
    c = config.head_dim
    sizes = {
        "q_heads": config.q_size,
        "kv_heads": config.kv_size,
        "ffn": config.ffn_size,
        "vocab": config.vocab_size,
    }
    cut = {
        dim: cut_dim(dim, size, c if dim.endswith("heads") else 1, layout, first)
        for dim, size in sizes.items()
    }
    tokens = microbatch.num_sequences * layout.padded_tokens(microbatch.seq_tokens) // layout.cp
    outer = tokens // (layout.tp if layout.sequence_parallel else 1)
    return Share(
        tokens,
        outer,
        config.hidden_size,
        cut["q_heads"].size // c,
        cut["kv_heads"].size // c,
        c,
        cut["ffn"].size,
        cut["ffn"].size * (2 if config.gated else 1),
        cut["vocab"].size,
        in_ring=layout.cp > 1 and not layout.all_to_all,
        traded=layout.cp > 1 and layout.all_to_all,
    )


def saved_tensors(config: ModelConfig, share: Share, element_bytes: int) -> dict[str, int]:
    """Bytes of all that a block keeps where nothing is recomputed, in the order in which it comes
    about."""
    n = share.tokens
    outer = share.outer_tokens
    e = element_bytes
    statistics = outer * norm_bytes(config, element_bytes)
    saved = {
        "block input": outer * share.hidden * e,
        "norm1 statistics": statistics,
        "qkv input": n * share.hidden * e,
        "q, k, v": n * (share.q + 2 * share.kv) * e,
        "attention output": n * share.q * e,
        "norm2 input": outer * share.hidden * e,
        "norm2 statistics": statistics,
        "gate_up input": n * share.hidden * e,
        "gate_up output": n * share.inner * e,
        "down input": n * share.ffn * e,
    }
    if share.in_ring:
        saved["log-sum-exp"] = n * share.heads * SUM_BYTES
    if share.traded:
        saved["attention output of other tokens"] = n * share.q * e
    if config.qk_norm:
        saved["q, k, v before norms"] = n * (share.q + 2 * share.kv) * e
        saved["q, k norm statistics"] = (
            n * (share.heads + share.kv_heads) * norm_bytes(config, element_bytes)
        )
    return saved


def norm_bytes(config: ModelConfig, element_bytes: int) -> int:
    """Of a row's statistics: one over its root mean square, in fp32; or mean and deviation, in the
    dtype of the row."""
    return 2 * element_bytes if config.norm == "layer" else SUM_BYTES


def block_bytes(
    config: ModelConfig, share: Share, element_bytes: int, recompute: Recompute = "none"
) -> int:
    saved = saved_tensors(config, share, element_bytes)
    if recompute == "full":
        return saved["block input"]
    return sum(
        size for name, size in saved.items() if recompute == "none" or name not in RECOMPUTED
    )


def head_bytes(config: ModelConfig, share: Share, element_bytes: int) -> int:
    """The final norm's input and statistics; and of the loss, which works its gradients out on the
    way forward, that of its input."""
    final = share.outer_tokens * (share.hidden * element_bytes + norm_bytes(config, element_bytes))
    return final + share.tokens * share.hidden * element_bytes


def owed_bytes(share: Share, element_bytes: int) -> int:
    """Of a block whose backward is split, from I to W: the input and the gradient of the output of
    each linear."""
    inputs = 2 * share.hidden + share.q + share.ffn
    outputs = share.q + 2 * share.kv + 2 * share.hidden + share.inner
    return share.tokens * (inputs + outputs) * element_bytes


def activation_bytes(
    config: ModelConfig, layout: Layout, stage: int, microbatch: MicroBatchShape, element_bytes: int
) -> int:
    """The most that a pipeline rank keeps at a time. What a stage gives to the next it keeps until
    the gradient comes back, and what it gives to the one before until the end of the step. The
    head, in a pipeline, runs in its backward, and with `full` so does each block, once the head is
    through; if the backward is split, those above wait for W."""
    share = share_of(config, layout, microbatch)
    block = block_bytes(config, share, element_bytes, layout.recompute)
    again = block_bytes(config, share, element_bytes) - block if layout.recompute == "full" else 0
    head = head_bytes(config, share, element_bytes)
    left = owed_bytes(share, element_bytes)
    blocks = {s: len(layers) for s, layers in enumerate(stage_layers(config, layout))}
    last = len(blocks) - 1
    if not last:
        return blocks[0] * block + max(head, again)
    given = share.outer_tokens * share.hidden * element_bytes
    within: dict[tuple[str, int], int] = {}
    for s, number in blocks.items():
        above = (number - 1) * max(0, left - block)
        first = head - given if s == last else again
        within["B", s] = max(first, again - given)
        within["I", s] = max(first, again - given + (above if layout.recompute == "full" else 0))
    return most_held(
        rank_actions(layout, stage),
        whole={s: number * block + given for s, number in blocks.items()},
        owed={s: number * left for s, number in blocks.items()},
        within=within,
        sent={s: given if s else 0 for s in blocks},
    )


def head_gradient_bytes(layout: Layout, stage: int, num_bytes: int) -> int:
    """Of the head's gradient, which has `num_bytes` and is there with the loss, the most that a
    pipeline rank keeps at a time: of one micro-batch, or of all between their I and W."""
    last = layout.pp * layout.chunks - 1
    if stage < layout.pp - 1:
        return 0
    if not last:
        return num_bytes
    none = defaultdict[int, int](int)
    one = defaultdict(int, {last: num_bytes})
    within = {(kind, s): one[s] for kind in "BI" for s in range(last + 1)}
    return most_held(rank_actions(layout, stage), none, one, within)


def logits_bytes(
    config: ModelConfig, layout: Layout, stage: int, microbatch: MicroBatchShape, element_bytes: int
) -> int:
    """Of the head, the gradient of its weight and a chunk of logits; that of the softmax is in
    fp32, and the same where the logits are. Native kernels need none in fp32: with them it is up to
    SOFTMAX_BYTES less."""
    if stage < layout.pp - 1:
        return 0
    share = share_of(config, layout, microbatch)
    rows = longest_chunk(share.tokens, PRODUCT_BYTES // (share.vocab * element_bytes))
    wide_rows = longest_chunk(rows, SOFTMAX_BYTES // (share.vocab * 4)) if element_bytes < 4 else 0
    gradient = head_gradient_bytes(layout, stage, share.vocab * share.hidden * element_bytes)
    return gradient + share.vocab * (rows * element_bytes + wide_rows * 4)


def most_held(
    actions: Sequence[Action],
    whole: Mapping[int, int],
    owed: Mapping[int, int],
    within: Mapping[tuple[str, int], int] | None = None,
    sent: Mapping[int, int] | None = None,
) -> int:
    """The most bytes at a time where each forward of a virtual stage keeps `whole`, until its B, or
    until its I and from then `owed` of it until its W. `within` is what a B or I of a stage has at
    most beyond what there was before it; `sent` what it leaves to the end."""
    held = most = 0
    for action in actions:
        if within and action.kind in "BI":
            most = max(most, held + within[action.kind, action.stage])
        if action.kind == "F":
            held += whole[action.stage]
        elif action.kind == "W":
            held -= owed[action.stage]
        else:
            held += (owed[action.stage] if action.kind == "I" else 0) - whole[action.stage]
            held += sent[action.stage] if sent else 0
        most = max(most, held)
    return most


def num_blocks(config: ModelConfig, layout: Layout, stage: int) -> int:
    return sum(unit.startswith("blocks.") for unit in stage_units(config, layout, stage))
