"""One training step of a Llama of 70.8 million parameters: all of it in Shardwise (forward,
backward, clipping, AdamW on fp32 master weights), or only forward and backward of the
transformers model in bf16. Prints the seconds of the best of a few steps as JSON.

    python bench/train_step.py ours|transformers [STEPS]
"""

import json
import sys
import time
from collections.abc import Callable

import torch

from shardwise.formats.huggingface.hf_config import to_hugging_face
from shardwise.measure.train_step import LR, MAX_NORM, WARMUP_STEPS, WORKLOAD, bench_program

SEQUENCES = WORKLOAD.sequences
LENGTH = WORKLOAD.length
VOCAB = WORKLOAD.config.vocab_size


def ours() -> Callable[[torch.Tensor], float]:
    from shardwise.layout import Layout
    from shardwise.parallel.mesh import make_mesh
    from shardwise.train.data.batches import Batch, MicroBatch
    from shardwise.train.loop import take_step

    mesh = make_mesh(Layout(), 0, torch.device("cpu"))
    program = bench_program(mesh, WORKLOAD)
    positions = torch.arange(LENGTH).expand(SEQUENCES, -1)

    def step(tokens: torch.Tensor) -> float:
        microbatch = MicroBatch(
            tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), positions, None
        )
        return take_step(program, mesh, Batch((microbatch,), SEQUENCES * LENGTH), LR, MAX_NORM)[0]

    return step


def transformers() -> Callable[[torch.Tensor], float]:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(**to_hugging_face(WORKLOAD.config), attn_implementation="sdpa")
    ).bfloat16()

    def step(tokens: torch.Tensor) -> float:
        loss = model(input_ids=tokens[:, :-1], labels=tokens[:, :-1]).loss
        loss.backward()
        model.zero_grad()
        return loss.item()

    return step


def main(which: str, steps: int) -> None:
    torch.set_num_threads(2)
    step = {"ours": ours, "transformers": transformers}[which]()
    generator = torch.Generator().manual_seed(1)
    seconds = []
    for _ in range(WARMUP_STEPS + steps):
        tokens = torch.randint(0, VOCAB, (SEQUENCES, LENGTH + 1), generator=generator)
        start = time.perf_counter()
        loss = step(tokens)
        seconds.append(time.perf_counter() - start)
    print(json.dumps({"seconds": min(seconds[WARMUP_STEPS:]), "loss": loss}))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 5)
