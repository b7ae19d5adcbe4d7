"""PyTorch's `context_parallel` on CPUs.

In torch 2.13 it supports only the attention operations of GPUs, and fails on that of CPUs
("Operator aten._scaled_dot_product_flash_attention_for_cpu.default does not have a sharding
strategy registered"). Only the table of operations lacks an entry: the ring, its load balancing and
its merge work with any. This file adds the entry for CPUs; all else is PyTorch's.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.experimental._context_parallel import _attention

ring: Any = _attention
FORWARD: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
BACKWARD: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
SEQUENCE = 2
"""The dimension of q, k, v [B, H, T, C] that is sharded."""


def know_cpus() -> None:
    """Make `context_parallel` work on CPUs, for causal attention without another mask."""
    ring.custom_ops |= {FORWARD: attend, BACKWARD: attend_backward}


def attend(op: Callable, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[DTensor, ...]:
    """Return output and log-sum-exp of (q, k, v, dropout, is_causal)."""
    q, k, v, _, is_causal = args
    assert kwargs.get("attn_mask") is None
    found = ring._templated_ring_attention(
        q.device_mesh.get_group(),
        SEQUENCE,
        FORWARD,
        *local((q, k, v)),
        is_causal,
        scale=kwargs.get("scale"),
    )
    return cut_alike(found, q.device_mesh)


def attend_backward(
    op: Callable, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[DTensor, ...]:
    """Return the gradients of q, k, v.

    `args` are (gradient, q, k, v, output, log-sum-exp, dropout, is_causal).
    """
    *tensors, _, is_causal = args
    mesh = tensors[0].device_mesh
    grad, *others = local(tensors)
    found = ring._templated_ring_attention_backward(
        mesh.get_group(),
        SEQUENCE,
        backward,
        grad,
        "grad_out",
        *others,
        is_causal,
        scale=kwargs.get("scale"),
    )
    return cut_alike(found, mesh)


def backward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    grad_out: Tensor,
    is_causal: bool,
    scale: float | None,
) -> tuple[Tensor, ...]:
    """Call the operation for CPUs, with the argument names of the ring."""
    grads: tuple[Tensor, ...] = BACKWARD(
        grad_out, query, key, value, out, logsumexp, 0.0, is_causal, scale=scale
    )
    return grads


def local(tensors: Iterable[DTensor]) -> tuple[Tensor, ...]:
    return tuple(tensor.to_local() for tensor in tensors)


def cut_alike(tensors: Iterable[Tensor], mesh: DeviceMesh) -> tuple[DTensor, ...]:
    return tuple(
        DTensor.from_local(tensor, mesh, [Shard(SEQUENCE)], run_check=False) for tensor in tensors
    )
