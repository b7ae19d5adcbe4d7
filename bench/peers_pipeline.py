"""PyTorch's pipeline parallelism on the Llama of transformers: `torch.distributed.pipelining` with
its schedules, and stages built by hand as in torchtitan.

Two things are left to its user. A tied embedding is on two ranks, so its gradient is summed over
the first and the last. Weights are bf16 with fp32 master weights, because under autocast every
micro-batch casts weights and gradients again, and fp32 is sent.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
)
from torch.distributed.pipelining.schedules import PipelineScheduleSingle
from torch.nn.functional import cross_entropy
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM


@dataclass(frozen=True)
class PipelineSizes:
    """Blocks of each stage in order, with stage s on rank s % p, and the number of
    micro-batches."""

    blocks: Sequence[int]
    microbatches: int

    @property
    def ranges(self) -> list[range]:
        ends = [sum(self.blocks[: stage + 1]) for stage in range(len(self.blocks))]
        return [
            range(end - num_blocks, end) for end, num_blocks in zip(ends, self.blocks, strict=True)
        ]


class StageModule(nn.Module):
    """Consecutive blocks; the first stage also has the embedding, the last norm and head."""

    def __init__(self, model: "LlamaForCausalLM", blocks: range, first: bool, last: bool) -> None:
        super().__init__()
        self.rotary = model.model.rotary_emb
        self.embed = model.model.embed_tokens if first else None
        self.blocks = nn.ModuleList(model.model.layers[at] for at in blocks)
        self.norm_and_head = nn.Sequential(model.model.norm, model.lm_head) if last else None

    def forward(self, x: Tensor) -> Tensor:
        """Map ids [B, T] or the output of the stage before [B, T, D] to an output, or to logits
        [B, T, V] in the last stage."""
        positions = torch.arange(x.shape[1], device=x.device)[None]
        if self.embed is not None:
            x = self.embed(x)
        turned = self.rotary(x, positions)
        for block in self.blocks:
            x = block(x, position_ids=positions, position_embeddings=turned)
        return x if self.norm_and_head is None else self.norm_and_head(x)


SCHEDULES: dict[str, type] = {
    "gpipe": ScheduleGPipe,
    "1f1b": Schedule1F1B,
    "interleaved": ScheduleInterleaved1F1B,
    "zb1p": ScheduleInterleavedZeroBubble,
}
"""The last, with one stage per rank, is ZB-H1 of Qi et al. (2023)."""


class Pipeline:
    """Training steps of this rank's stages, with what PyTorch leaves to its user."""

    def __init__(
        self,
        model: "LlamaForCausalLM",
        schedule: str,
        cut: PipelineSizes,
        lr: float,
        max_norm: float,
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        rank = dist.get_rank()
        size = dist.get_world_size()
        last = len(cut.blocks) - 1
        parts = {
            at: StageModule(model, cut.ranges[at], at == 0, at == last)
            for at in range(rank, last + 1, size)
        }
        self.weights = list(
            dict.fromkeys(weight for part in parts.values() for weight in part.parameters())
        )
        self.masters = [weight.detach().float() for weight in self.weights]
        for weight in self.weights:
            weight.data = weight.data.to(dtype)
        stages = [
            PipelineStage(part, at, last + 1, torch.device("cpu")) for at, part in parts.items()
        ]
        self.schedule = make_schedule(SCHEDULES[schedule], stages, cut.microbatches)
        self.optimizer = torch.optim.AdamW(self.masters, lr=lr, fused=True)
        self.max_norm = max_norm
        ends = sorted({0, last % size})
        self.ends = dist.new_group(ends)
        self.tied = (
            model.lm_head.weight if model.config.tie_word_embeddings and rank in ends else None
        )
        self.counts_tied = rank == 0

    def step(self, ids: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Run all micro-batches of [B, T]; return the mean loss and the gradient norm, on every
        rank."""
        losses: list[Tensor] = []
        self.schedule.step(ids, target=targets, losses=losses, return_outputs=False)
        if self.tied is not None:
            dist.all_reduce(self.tied.grad, group=self.ends)
        for weight, master in zip(self.weights, self.masters, strict=True):
            assert weight.grad is not None
            master.grad = weight.grad.float()
            weight.grad = None
        squared = get_total_norm(list(self.counted_grads())) ** 2
        sums = torch.stack([sum(losses, torch.zeros(())).detach(), squared])
        dist.all_reduce(sums)
        loss = sums[0]
        norm = sums[1].sqrt()
        clip_grads_with_norm_(self.masters, self.max_norm, norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
        with torch.no_grad():
            torch._foreach_copy_([*self.weights], self.masters)
        return loss, norm

    def counted_grads(self) -> Iterator[Tensor]:
        """Return each parameter of the model once; tied ones belong to the first rank."""
        for weight, master in zip(self.weights, self.masters, strict=True):
            if master.grad is not None and (weight is not self.tied or self.counts_tied):
                yield master.grad


def make_schedule(kind: type, stages: list[PipelineStage], microbatches: int) -> Any:
    """Make a schedule with the mean loss of all micro-batches: gradients need no scale."""

    def loss(logits: Tensor, targets: Tensor) -> Tensor:
        return cross_entropy(logits.flatten(0, 1).float(), targets.flatten()) / microbatches

    one = issubclass(kind, PipelineScheduleSingle)
    return kind(stages[0] if one else stages, microbatches, loss, scale_grads=False)
