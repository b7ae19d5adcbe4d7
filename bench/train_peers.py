"""One training step with what a user would pick instead, on gloo: prints tokens/s and peak memory as a line of JSON.

    torchrun --standalone --nproc-per-node 2 bench/train_peers.py PEER [STEPS]

Runs in an environment of its own with torch, transformers and deepspeed; Shardwise is not needed there. The work is
that of `shardwise bench train`: the same model, tokens, optimizer and clipping, bf16 over fp32 master weights.
"""

import contextlib
import json
import os
import sys
import time
from collections.abc import Callable

os.environ.setdefault("DS_ACCELERATOR", "cpu")  # read when deepspeed is imported

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

SHAPE = dict(vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=12, num_attention_heads=9,
             num_key_value_heads=3, tie_word_embeddings=True)  # fmt: skip
SEQUENCES, LENGTH, WARMUP, STEPS = 2, 512, 2, 5
LR, MAX_NORM = 3e-4, 1.0

Step = Callable[[Tensor], Tensor]
"""step(token ids) -> loss: forward, backward, clipping, optimizer."""


def ddp(model: LlamaForCausalLM, world_size: int) -> Step:
    """DistributedDataParallel under autocast, whose weights are their own fp32 masters."""
    wrapped = torch.nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    return torch_step(wrapped, torch.optim.AdamW(model.parameters(), lr=LR, fused=True), autocast)


def zero_optimizer(model: LlamaForCausalLM, world_size: int) -> Step:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    wrapped = torch.nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=torch.optim.AdamW, lr=LR, fused=True)
    return torch_step(wrapped, optimizer, autocast)


def fsdp2(model: LlamaForCausalLM, world_size: int, keep: bool = False) -> Step:
    """`keep` leaves the gathered parameters whole after the forward, as ZeRO-2 has them."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    mesh = init_device_mesh("cpu", (world_size,))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for part in [*model.model.layers, model]:
        fully_shard(part, mesh=mesh, mp_policy=policy, reshard_after_forward=not keep)
    return torch_step(model, torch.optim.AdamW(model.parameters(), lr=LR, fused=True), contextlib.nullcontext)


def fsdp2_keep(model: LlamaForCausalLM, world_size: int) -> Step:
    return fsdp2(model, world_size, keep=True)


def deepspeed(model: LlamaForCausalLM, world_size: int, stage: int) -> Step:
    import deepspeed

    engine, *_ = deepspeed.initialize(model=model, config=dict(
        train_micro_batch_size_per_gpu=SEQUENCES, gradient_accumulation_steps=1, bf16=dict(enabled=True),
        zero_optimization=dict(stage=stage), gradient_clipping=MAX_NORM,
        optimizer=dict(type="AdamW", params=dict(lr=LR, torch_adam=True))))  # fmt: skip

    def step(ids: Tensor) -> Tensor:
        loss = engine(input_ids=ids, labels=ids).loss
        engine.backward(loss)
        engine.step()
        return loss

    return step


def torch_step(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, precision: Callable[[], contextlib.AbstractContextManager]
) -> Step:
    def step(ids: Tensor) -> Tensor:
        with precision():
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


def autocast() -> torch.autocast:
    return torch.autocast("cpu", dtype=torch.bfloat16)


PEERS: dict[str, Callable[[LlamaForCausalLM, int], Step]] = {
    "ddp": ddp,
    "zero_optimizer": zero_optimizer,
    "fsdp2_keep": fsdp2_keep,
    "fsdp2": fsdp2,
    "deepspeed1": lambda model, world_size: deepspeed(model, world_size, 1),
    "deepspeed2": lambda model, world_size: deepspeed(model, world_size, 2),
    "deepspeed3": lambda model, world_size: deepspeed(model, world_size, 3),
}


def peak_resident_mb() -> float:
    """The most that this process ever held in memory, in MiB."""
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmHWM")) / 1024


def main(peer: str, steps: int) -> None:
    world_size, rank = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // world_size))
    if peer.startswith("deepspeed"):
        from deepspeed import init_distributed

        init_distributed("gloo")
    else:
        dist.init_process_group("gloo")
    torch.manual_seed(0)
    step = PEERS[peer](LlamaForCausalLM(LlamaConfig(**SHAPE, attn_implementation="sdpa")), world_size)
    random = torch.Generator().manual_seed(1 + rank)
    for taken in range(WARMUP + steps):
        if taken == WARMUP:
            dist.barrier()
            began = time.perf_counter()
        loss = step(torch.randint(SHAPE["vocab_size"], (SEQUENCES, LENGTH), generator=random))
    dist.barrier()
    step_s = (time.perf_counter() - began) / steps
    peak = torch.tensor(peak_resident_mb())
    dist.all_reduce(peak, dist.ReduceOp.MAX)
    if rank == 0:
        row = dict(step_s=step_s, tokens_per_s=SEQUENCES * LENGTH * world_size / step_s, peak_resident_mb=peak.item(),
                   loss=loss.item())  # fmt: skip
        print(json.dumps(row), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else STEPS)
