"""Activations: what a rank saves of a micro-batch from its forward until its backward, as a
formula, tensor by tensor.

With B sequences of T tokens, a rank has n = B T / c tokens, over c context ranks, and n / s of them
in norms and residuals: s is t, the number of tensor ranks, with sequence parallel, otherwise 1. D
model, H heads, K KV heads, F ffn; e bytes per element.

It is the table of Korthikanti et al. 2022 (arXiv 2205.05198, table 2). Bytes of a GPT block (F =
4D, K = H, e = 2), divided by n D:

                            their table                    here
    none                    34          + 5HT/D            32          + 8/D
    tp                      10 + 24/t   + 5HT/(Dt)          8 + 24/t   + 8/D
    tp, sp                       34/t   + 5HT/(Dt)          4 + 28/t   + 8/(Dt)
    tp, selective           10 + 24/t                       4 + 16/t
    tp, sp, selective            34/t                           20/t
    full                    2                               2, or 2/t with sp

The differences:

- There is no dropout here, and so no dropout mask: 2 bytes of their 34.
- Scores, 5HT, are never saved here, whatever is recomputed and whichever kernels run (Dao et al.
  2022). Ring attention saves their log-sum-exp, 4 bytes per head. The backward of norms needs
  statistics, which they do not count.
- With sp, the inputs of qkv and gate_up are saved as gathered, 4 instead of their 4/t, which they
  gather again.
- `selective` drops scores in the paper. Here it drops what is cheap to recompute: the inputs of qkv
  and gate_up, which are norms, and that of down, an activation. With sp it gathers the first two
  again.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from shardwise.block import BLOCK, BlockParam, SavedTensor, block_params, is_set
from shardwise.chunks import PRODUCT_BYTES, SOFTMAX_BYTES, longest_chunk
from shardwise.config import ModelConfig
from shardwise.layout import Coord, Layout, Recompute
from shardwise.parallel.pipeline.actions import Action
from shardwise.parallel.pipeline.schedules import rank_actions
from shardwise.params import rank_layers, stage_layers
from shardwise.precision import FP32_BYTES
from shardwise.shards import shard_dim

RECOMPUTED = frozenset(each.name for param in BLOCK for each in param.saved if each.recomputed)
"""The saved tensors that selective recompute drops."""


@dataclass(frozen=True)
class MicroBatchShape:
    """The micro-batch of a data rank, whose sequences are sharded over its context ranks."""

    num_sequences: int
    seq_tokens: int


@dataclass(frozen=True)
class Share:
    """One rank's share of a micro-batch in tokens, and of a block and the head in elements per
    token. Where a dimension does not divide evenly, that of the first rank, which has most.

    Attributes:
        outer_tokens: tokens of norms and residuals, which sequence parallel shards
        in_ring: context parallel by ring attention
        traded: context parallel by all-to-all, which trades tokens for heads
    """

    tokens: int
    outer_tokens: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    in_ring: bool
    traded: bool

    @property
    def q(self) -> int:
        return self.heads * self.head_dim

    @property
    def kv(self) -> int:
        return self.kv_heads * self.head_dim

    def elements(self, dim: str) -> int:
        """Return the elements per token of a dim of the block's parameters."""
        return {"embed": self.hidden, "q_heads": self.q, "kv_heads": self.kv, "ffn": self.ffn}[dim]


def share_of(config: ModelConfig, layout: Layout, microbatch: MicroBatchShape) -> Share:
    """Return the share of the rank that has most."""
    first = Coord(dp=0, tp=0, pp=0, cp=0)
    c = config.head_dim
    sizes = {
        "q_heads": config.q_size,
        "kv_heads": config.kv_size,
        "ffn": config.ffn_size,
        "vocab": config.vocab_size,
    }
    cut = {
        dim: shard_dim(dim, size, c if dim.endswith("heads") else 1, layout, first)
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
        cut["vocab"].size,
        in_ring=layout.cp > 1 and not layout.all_to_all,
        traded=layout.cp > 1 and layout.all_to_all,
    )


def saved_tensors(config: ModelConfig, share: Share, element_bytes: int) -> dict[str, int]:
    """Return the bytes of each tensor that a block saves without recompute, by name."""
    saved = {
        each.name: saved_bytes(config, share, element_bytes, param, each)
        for param in block_params(config)
        for each in param.saved
        if is_set(config, each.flag)
    }
    if share.in_ring:
        saved["log-sum-exp"] = share.tokens * share.heads * FP32_BYTES
    if share.traded:
        saved["attention output of other tokens"] = share.tokens * share.q * element_bytes
    return saved


def saved_bytes(
    config: ModelConfig, share: Share, element_bytes: int, param: BlockParam, saved: SavedTensor
) -> int:
    """Return the bytes of one row of the table of a block (`block.BLOCK`)."""
    is_outer = param.normalized == "embed"
    tokens = share.outer_tokens if is_outer else share.tokens
    if saved.tensor == "statistics":
        assert param.normalized is not None, param
        rows = 1 if is_outer else share.elements(param.normalized) // share.head_dim
        return tokens * rows * norm_bytes(config, element_bytes)
    dims = param.dims[-1:] if saved.tensor == "input" else param.output_dims(config)
    return tokens * sum(map(share.elements, dims)) * element_bytes


def norm_bytes(config: ModelConfig, element_bytes: int) -> int:
    """Return the bytes of a row's statistics: one over its root mean square in fp32, or mean and
    deviation in the dtype of the row."""
    return 2 * element_bytes if config.norm == "layer" else FP32_BYTES


def block_bytes(
    config: ModelConfig, share: Share, element_bytes: int, recompute: Recompute = "none"
) -> int:
    """Return the bytes that a block saves."""
    saved = saved_tensors(config, share, element_bytes)
    if recompute == "full":
        return saved["block input"]
    dropped = RECOMPUTED if recompute == "selective" else ()
    return sum(size for name, size in saved.items() if name not in dropped)


def head_bytes(config: ModelConfig, share: Share, element_bytes: int) -> int:
    """Return the bytes that the head saves: the input and statistics of the final norm, and the
    gradient of the loss's input, which its forward computes."""
    final = share.outer_tokens * (share.hidden * element_bytes + norm_bytes(config, element_bytes))
    return final + share.tokens * share.hidden * element_bytes


def deferred_bytes(config: ModelConfig, share: Share, element_bytes: int) -> int:
    """Return the bytes that a block with a split backward holds from I to W: the input, and the
    gradient of the output, of each linear."""
    matrices = [param for param in block_params(config) if param.kind == "matrix"]
    dims = [dim for each in matrices for dim in (each.dims[-1], *each.output_dims(config))]
    return share.tokens * sum(map(share.elements, dims)) * element_bytes


def activation_bytes(
    config: ModelConfig, layout: Layout, stage: int, microbatch: MicroBatchShape, element_bytes: int
) -> int:
    """Return the peak bytes of saved activations on a pipeline rank.

    A stage holds its output until the gradient comes back, and the gradient of its input until the
    end of the step. In a pipeline, the head runs in its backward; with `full`, each block also runs
    again there, once the head is done. With a split backward, the blocks above wait for W.
    """
    share = share_of(config, layout, microbatch)
    block = block_bytes(config, share, element_bytes, layout.recompute)
    recomputed = (
        block_bytes(config, share, element_bytes) - block if layout.recompute == "full" else 0
    )
    head = head_bytes(config, share, element_bytes)
    deferred = deferred_bytes(config, share, element_bytes)
    blocks = {s: len(layers) for s, layers in enumerate(stage_layers(config, layout))}
    last = len(blocks) - 1
    if not last:
        return blocks[0] * block + max(head, recomputed)
    boundary = share.outer_tokens * share.hidden * element_bytes
    within: dict[tuple[str, int], int] = {}
    for s, number in blocks.items():
        above = (number - 1) * max(0, deferred - block) if layout.recompute == "full" else 0
        first = head - boundary if s == last else recomputed
        within["B", s] = max(first, recomputed - boundary)
        within["I", s] = max(first, recomputed - boundary + above)
    return peak_held(
        rank_actions(layout, stage),
        saved={s: number * block + boundary for s, number in blocks.items()},
        deferred={s: number * deferred for s, number in blocks.items()},
        within=within,
        sent={s: boundary if s else 0 for s in blocks},
    )


def head_gradient_bytes(layout: Layout, stage: int, num_bytes: int) -> int:
    """Return the peak bytes of the gradient of the head's weight, which has `num_bytes` and is
    computed with the loss: that of one micro-batch, or of all between their I and W."""
    last = layout.pp * layout.chunks - 1
    if stage < layout.pp - 1:
        return 0
    if not last:
        return num_bytes
    none = defaultdict[int, int](int)
    one = defaultdict(int, {last: num_bytes})
    within = {(kind, s): one[s] for kind in "BI" for s in range(last + 1)}
    return peak_held(rank_actions(layout, stage), none, one, within)


def logits_bytes(
    config: ModelConfig,
    layout: Layout,
    stage: int,
    microbatch: MicroBatchShape,
    element_bytes: int,
    grad_bytes: int,
) -> int:
    """Return the peak bytes of the loss: the gradient of the head's weight, a chunk of logits, and
    a chunk of the softmax in fp32, which is the same memory where logits are in fp32. Native
    kernels need no fp32 chunk: up to SOFTMAX_BYTES less. For a gradient in fp32 of a head in bf16
    (`grad_bytes`, `element_bytes`), CPUs widen its factors."""
    if stage < layout.pp - 1:
        return 0
    share = share_of(config, layout, microbatch)
    rows = longest_chunk(share.tokens, PRODUCT_BYTES // (share.vocab * element_bytes))
    wide_rows = longest_chunk(rows, SOFTMAX_BYTES // (share.vocab * 4)) if element_bytes < 4 else 0
    widened = 0
    if grad_bytes > element_bytes:
        columns = longest_chunk(share.vocab, SOFTMAX_BYTES // (rows * grad_bytes))
        widened = rows * (columns + share.hidden) * grad_bytes
    gradient = head_gradient_bytes(layout, stage, share.vocab * share.hidden * grad_bytes)
    return gradient + share.vocab * rows * element_bytes + max(share.vocab * wide_rows * 4, widened)


def peak_held(
    actions: Sequence[Action],
    saved: Mapping[int, int],
    deferred: Mapping[int, int],
    within: Mapping[tuple[str, int], int] | None = None,
    sent: Mapping[int, int] | None = None,
) -> int:
    """Return the peak bytes of a sequence of actions.

    Args:
        saved: bytes that a forward of a virtual stage saves until its B or I
        deferred: bytes that remain from I to W
        within: peak bytes of a B or I beyond what was held before it, by kind and stage
        sent: bytes that a B or I leaves until the end
    """
    held = most = 0
    for action in actions:
        if within and action.kind in "BI":
            most = max(most, held + within[action.kind, action.stage])
        if action.kind == "F":
            held += saved[action.stage]
        elif action.kind == "W":
            held -= deferred[action.stage]
        else:
            held += (deferred[action.stage] if action.kind == "I" else 0) - saved[action.stage]
            held += sent[action.stage] if sent else 0
        most = max(most, held)
    return most


def num_blocks(config: ModelConfig, layout: Layout, stage: int) -> int:
    """Return the number of blocks of a pipeline rank."""
    return len(rank_layers(config, layout, stage))
