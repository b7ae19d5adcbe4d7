"""PyTorch's tensor parallelism on the Llama of transformers: DTensor weights through
`parallelize_module`, as torchtitan has them. The vocabulary is cut in embedding, head and loss;
gradients are summed before attention and before the MLP."""

from collections import defaultdict
from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn import Parameter
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM


def cut(model: "LlamaForCausalLM", mesh: DeviceMesh, sequence: bool) -> None:
    """Shard `model` over `mesh`, in place; with `sequence` also norms and residuals, by tokens."""
    between = Shard(1) if sequence else Replicate()
    parallelize_module(
        model,
        mesh,
        {
            "model.embed_tokens": RowwiseParallel(
                input_layouts=Replicate(), output_layouts=between
            ),
            "lm_head": ColwiseParallel(
                input_layouts=between, output_layouts=Shard(-1), use_local_output=False
            ),
            **({"model.norm": SequenceParallel()} if sequence else {}),
        },
    )
    model.lm_head.weight = model.model.embed_tokens.weight  # tied before, and cut alike
    for block in model.model.layers:
        parallelize_module(block, mesh, block_plan(sequence))


def block_plan(sequence: bool) -> dict[str, ParallelStyle]:
    between = Shard(1) if sequence else Replicate()
    whole = Replicate()
    columns = (
        "self_attn.q_proj",
        "self_attn.k_proj",
        "self_attn.v_proj",
        "mlp.gate_proj",
        "mlp.up_proj",
    )
    norms = ("input_layernorm", "post_attention_layernorm") if sequence else ()
    return {
        **{name: SequenceParallel() for name in norms},
        "self_attn": PrepareModuleInput(
            input_kwarg_layouts={"hidden_states": between},
            desired_input_kwarg_layouts={"hidden_states": whole},
        ),
        "mlp": PrepareModuleInput(input_layouts=between, desired_input_layouts=whole),
        **{name: ColwiseParallel() for name in columns},
        "self_attn.o_proj": RowwiseParallel(output_layouts=between),
        "mlp.down_proj": RowwiseParallel(output_layouts=between),
    }


def alike(parameters: Iterable[Parameter]) -> list[list[Parameter]]:
    """Separate sharded from replicated parameters: torch's fused kernels do not mix them."""
    parts: dict[bool, list[Parameter]] = defaultdict(list)
    for parameter in parameters:
        parts[isinstance(parameter, DTensor)].append(parameter)
    return list(parts.values())


def groups_of(parameters: Iterable[Parameter]) -> list[dict[str, list[Parameter]]]:
    return [{"params": part} for part in alike(parameters)]


def clip_cut(parameters: Iterable[Parameter], max_norm: float) -> Tensor:
    """Clip the gradients of both as torch's `clip_grad_norm_` does; return the norm."""
    parts = alike(parameters)
    norms = [
        whole(get_total_norm([each.grad for each in part if each.grad is not None]))
        for part in parts
    ]
    total = torch.linalg.vector_norm(torch.stack(norms))
    for part in parts:
        clip_grads_with_norm_(part, max_norm, total)
    return total


def whole(x: Tensor) -> Tensor:
    return x.full_tensor() if isinstance(x, DTensor) else x
