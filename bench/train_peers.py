"""Training steps of the alternatives a user has, on gloo: prints tokens/s and peak memory as a line
of JSON.

    torchrun --standalone --nproc-per-node 2 bench/train_peers.py PEER WORK [STEPS]

Runs in an environment of its own with torch, transformers, accelerate and deepspeed, without
Shardwise. WORK is JSON that `bench/train.py` writes: the same shape, tokens, optimizer and clipping
as in `shardwise bench train`, bf16 with fp32 master weights.
"""

import contextlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

os.environ.setdefault("DS_ACCELERATOR", "cpu")  # read when deepspeed is imported

import torch
import torch.distributed as dist
from peers_context import know_cpus
from peers_pipeline import Pipeline, PipelineSizes
from peers_tensor import clip_cut, cut, groups_of
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.parallel import loss_parallel
from transformers import LlamaConfig, LlamaForCausalLM

STEPS = 5


@dataclass(frozen=True)
class Work:
    """Work of a training step.

    Attributes:
        shape: A config.json.
        sequences: Sequences of `length` tokens per data rank and micro-batch.
        blocks: Blocks of each pipeline stage, in order.
    """

    shape: dict[str, Any]
    sequences: int
    length: int
    microbatches: int
    blocks: list[int]
    warmup_steps: int
    lr: float
    max_norm: float


Step = Callable[[Tensor], Tensor]
"""step(tokens [B, T + 1]) -> loss: forward, backward, clipping, optimizer."""


def ddp(model: LlamaForCausalLM, work: Work) -> Step:
    """DistributedDataParallel under autocast, with fp32 weights that are the master weights."""
    return torch_step(data_parallel(model), adamw(work, model.parameters()), work, autocast)


def zero_optimizer(model: LlamaForCausalLM, work: Work) -> Step:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    wrapped = data_parallel(model)
    optimizer = ZeroRedundancyOptimizer(
        model.parameters(), optimizer_class=torch.optim.AdamW, lr=work.lr, fused=True
    )
    return torch_step(wrapped, optimizer, work, autocast)


def fsdp2(model: LlamaForCausalLM, work: Work, keep: bool = False) -> Step:
    """Fully shard the model; `keep` keeps gathered parameters after the forward, as ZeRO-2."""
    shard(model, keep)
    return torch_step(model, adamw(work, model.parameters()), work)


def fsdp2_keep(model: LlamaForCausalLM, work: Work) -> Step:
    return fsdp2(model, work, keep=True)


def deepspeed(model: LlamaForCausalLM, work: Work, stage: int) -> Step:
    import deepspeed

    engine, *_ = deepspeed.initialize(
        model=model,
        config=dict(
            train_micro_batch_size_per_gpu=work.sequences,
            gradient_accumulation_steps=1,
            bf16=dict(enabled=True),
            zero_optimization=dict(stage=stage),
            gradient_clipping=work.max_norm,
            optimizer=dict(type="AdamW", params=dict(lr=work.lr, torch_adam=True)),
        ),
    )

    def step(tokens: Tensor) -> Tensor:
        loss = loss_of(engine, *cut_tokens(tokens))
        engine.backward(loss)
        engine.step()
        return loss

    return step


def dtensor(model: LlamaForCausalLM, work: Work, sequence: bool = False) -> Step:
    """parallelize_module and loss_parallel under autocast; `sequence` adds SequenceParallel."""
    cut(model, init_device_mesh("cpu", (dist.get_world_size(),)), sequence)
    optimizer = adamw(work, groups_of(model.parameters()))
    return torch_step(model, optimizer, work, autocast, lambda *_: loss_parallel(), clip_cut)


def dtensor_sp(model: LlamaForCausalLM, work: Work) -> Step:
    return dtensor(model, work, sequence=True)


def context_ddp(model: LlamaForCausalLM, work: Work) -> Step:
    """context_parallel on replicas under autocast."""
    wrapped = data_parallel(model)
    return context_step(
        model, torch_step(wrapped, adamw(work, model.parameters()), work, autocast, context())
    )


def context_fsdp2(model: LlamaForCausalLM, work: Work) -> Step:
    """context_parallel with parameters sharded over the same ranks, as in accelerate and
    torchtitan."""
    shard(model, keep=True)
    return context_step(
        model, torch_step(model, adamw(work, model.parameters()), work, around=context())
    )


def context_step(model: LlamaForCausalLM, step: Step) -> Step:
    """Return steps whose loss is the mean over ranks; `context_parallel` applies the mask."""
    from accelerate.big_modeling import _attach_context_parallel_hooks

    know_cpus()
    _attach_context_parallel_hooks(model)

    def mean_step(tokens: Tensor) -> Tensor:
        loss = step(tokens).detach()
        dist.all_reduce(loss)
        return loss / dist.get_world_size()

    return mean_step


def pipeline(model: LlamaForCausalLM, work: Work, schedule: str) -> Step:
    """torch.distributed.pipelining on bf16 weights with fp32 master weights."""
    cut = PipelineSizes(work.blocks, work.microbatches)
    pipeline = Pipeline(model, schedule, cut, work.lr, work.max_norm)

    def step(tokens: Tensor) -> Tensor:
        ids, targets, _ = cut_tokens(tokens)
        return pipeline.step(ids, targets)[0]

    return step


Around = Callable[[Tensor, Tensor, Tensor], contextlib.AbstractContextManager]
"""around(ids, targets, positions), entered for forward and backward."""


def context() -> Around:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))

    def around(*buffers: Tensor) -> contextlib.AbstractContextManager:
        dims = [1] * len(buffers)
        return context_parallel(
            mesh, buffers=list(buffers), buffer_seq_dims=dims, no_restore_buffers=set(buffers)
        )

    return around


def torch_step(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    work: Work,
    precision: Callable[[], contextlib.AbstractContextManager] = contextlib.nullcontext,
    around: Around = lambda *_: contextlib.nullcontext(),
    clip: Callable = torch.nn.utils.clip_grad_norm_,
) -> Step:
    def step(tokens: Tensor) -> Tensor:
        buffers = cut_tokens(tokens)
        with around(*buffers):
            with precision():
                loss = loss_of(model, *buffers)
            loss.backward()
        clip(list(model.parameters()), work.max_norm)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


def cut_tokens(tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Split [B, T + 1] into ids, targets and positions, each [B, T]."""
    ids = tokens[:, :-1].contiguous()
    targets = tokens[:, 1:].contiguous()
    return ids, targets, torch.arange(ids.shape[1]).repeat(len(ids), 1)


def loss_of(model: Callable, ids: Tensor, targets: Tensor, positions: Tensor) -> Tensor:
    return model(input_ids=ids, position_ids=positions, labels=targets, shift_labels=targets).loss


def data_parallel(model: LlamaForCausalLM) -> torch.nn.Module:
    return torch.nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)


def shard(model: LlamaForCausalLM, keep: bool) -> None:
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for part in [*model.model.layers, model]:
        fully_shard(part, mesh=mesh, mp_policy=policy, reshard_after_forward=not keep)


def adamw(work: Work, parameters: Iterable) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=work.lr, fused=True)


def autocast() -> torch.autocast:
    return torch.autocast("cpu", dtype=torch.bfloat16)


DATA_PEERS: dict[str, Callable[[LlamaForCausalLM, Work], Step]] = {
    "ddp": ddp,
    "zero_optimizer": zero_optimizer,
    "fsdp2_keep": fsdp2_keep,
    "fsdp2": fsdp2,
    "deepspeed1": lambda model, work: deepspeed(model, work, 1),
    "deepspeed2": lambda model, work: deepspeed(model, work, 2),
    "deepspeed3": lambda model, work: deepspeed(model, work, 3),
}
"""Peers whose ranks have different tokens."""
CUT_PEERS: dict[str, Callable[[LlamaForCausalLM, Work], Step]] = {
    "dtensor": dtensor,
    "dtensor_sp": dtensor_sp,
    "context_ddp": context_ddp,
    "context_fsdp2": context_fsdp2,
    "pipeline_gpipe": lambda model, work: pipeline(model, work, "gpipe"),
    "pipeline_1f1b": lambda model, work: pipeline(model, work, "1f1b"),
    "pipeline_interleaved": lambda model, work: pipeline(model, work, "interleaved"),
    "pipeline_zb1p": lambda model, work: pipeline(model, work, "zb1p"),
}
"""Peers whose ranks have the same tokens."""


def peak_resident_mb() -> float:
    """Return the peak resident memory of this process in MiB."""
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmHWM")) / 1024


def main(peer: str, work: Work, steps: int) -> None:
    world_size = int(os.environ["WORLD_SIZE"])
    rank = int(os.environ["RANK"])
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // world_size))
    if peer.startswith("deepspeed"):
        from deepspeed import init_distributed

        init_distributed("gloo")
    else:
        dist.init_process_group("gloo")
    torch.manual_seed(0)
    build = (DATA_PEERS | CUT_PEERS)[peer]
    step = build(LlamaForCausalLM(LlamaConfig(**work.shape, attn_implementation="sdpa")), work)
    data_rank, data_size = (rank, world_size) if peer in DATA_PEERS else (0, 1)
    random = torch.Generator().manual_seed(1 + data_rank)
    sequences = work.sequences * work.microbatches
    for taken in range(work.warmup_steps + steps):
        if taken == work.warmup_steps:
            dist.barrier()
            began = time.perf_counter()
        loss = step(
            torch.randint(work.shape["vocab_size"], (sequences, work.length + 1), generator=random)
        )
    dist.barrier()
    step_s = (time.perf_counter() - began) / steps
    peak = torch.tensor(peak_resident_mb())
    dist.all_reduce(peak, dist.ReduceOp.MAX)
    if rank == 0:
        tokens = sequences * work.length * data_size
        row = dict(
            step_s=step_s,
            tokens_per_s=tokens / step_s,
            peak_resident_mb=peak.item(),
            loss=number(loss),
        )
        print(json.dumps(row), flush=True)
    dist.destroy_process_group()


def number(loss: Tensor) -> float:
    return (loss.to_local() if isinstance(loss, DTensor) else loss).item()


if __name__ == "__main__":
    main(
        sys.argv[1],
        Work(**json.loads(sys.argv[2])),
        int(sys.argv[3]) if len(sys.argv) > 3 else STEPS,
    )
