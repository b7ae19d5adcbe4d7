"""Native training kernels for CPUs, forward and backward, in bf16: the Python side of
`csrc/flash.h`, `rows_training.h` and `cross_entropy.h`. Shapes that those do not support run the
torch reference.

Results do not depend on the number of threads. Shapes: N tokens, H query heads, K kv heads, C head
dim; R rows of logits of V columns.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from shardwise.kernels.interface import Targets
from shardwise.kernels.native.library import LANES, InstructionSet, library
from shardwise.kernels.reference.attention import causal_attention
from shardwise.kernels.reference.cross_entropy import summed_loss
from shardwise.kernels.reference.gated import gated
from shardwise.kernels.reference.rope import apply_rope


class NativeTraining(InstructionSet):
    """The training kernels of one instruction set."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Compute `reference.norm.rms_norm`."""
        y: Tensor = NativeNorm.apply(x, weight, eps, self.functions)
        return y

    def gated(self, inner: Tensor, activation: str) -> Tensor:
        """Compute `reference.gated.gated`."""
        if activation != "silu" or inner.shape[-1] % (2 * LANES):
            return gated(inner, activation)
        y: Tensor = NativeGated.apply(inner, self.functions)
        return y

    def apply_rope(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Compute `reference.rope.apply_rope`; the result is contiguous, [..., T, heads, C]."""
        num_angles = cos.shape[:-2].numel()
        # Angles of the tokens of one sequence, or of all of them.
        has_angles = num_angles in (x.shape[-3], x.shape[:-2].numel())
        if x.shape[-1] % (2 * LANES) or not has_angles:
            return apply_rope(x, cos, sin)
        y: Tensor = NativeRope.apply(x, cos.contiguous(), sin.contiguous(), self.functions)
        return y

    def attention(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        window: int | None = None,
        documents: Tensor | None = None,
    ) -> Tensor:
        """Compute `reference.attention.causal_attention`."""
        if q.shape[-1] % LANES:
            return causal_attention(q, k, v, window, documents)
        y: Tensor = NativeCausalAttention.apply(q, k, v, window, documents, self.functions)
        return y

    def cross_entropy_grad_(self, logits: Tensor, targets: Targets, with_gradient: bool) -> Tensor:
        """Compute `reference.cross_entropy.cross_entropy_grad_`, in two passes over the logits: one
        for the maximum and the sum of each row, one for the gradient."""
        num_rows, num_columns = logits.shape
        real_logits = logits.data_ptr(), logits.stride(0), num_rows, targets.num_real
        local_max, local_sums = logits.new_empty(2, num_rows, 1, dtype=torch.float32)
        library.softmax_statistics(
            self.functions, *real_logits, local_max.data_ptr(), local_sums.data_ptr()
        )
        target_logit = logits.gather(1, targets.columns).float()
        row_max = targets.max_over_ranks(local_max.clone())
        target_logit = (target_logit - row_max).where(targets.is_local, 0)
        local = torch.cat((local_sums * (local_max - row_max).exp_(), target_logit), 1)
        sums, target_logit = targets.sum_over_ranks(local).split(1, 1)
        if with_gradient:
            scale = targets.has_target / sums
            at_target = (target_logit.exp() - sums) * scale
            columns = targets.columns.where(targets.is_local, -1)
            library.softmax_gradient(
                self.functions,
                *real_logits,
                num_columns,
                row_max.data_ptr(),
                scale.data_ptr(),
                columns.data_ptr(),
                at_target.data_ptr(),
            )
        return summed_loss(sums, target_logit, targets)


# Row-wise kernels.


def token_rows(x: Tensor) -> Tensor:
    """Return x [..., H, C] as [N, H, C] with contiguous heads: a view if they are contiguous,
    whatever the stride between tokens is."""
    assert x.dtype == torch.bfloat16
    rows = x.flatten(0, -3) if x.dim() > 2 else x.view(1, -1, x.shape[-1])
    return rows if rows.stride()[1:] == (rows.shape[2], 1) else rows.contiguous()


class NativeNorm(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, functions: int) -> Tensor:
        rows = token_rows(x)
        weight = weight.contiguous()
        y = torch.empty(x.shape, dtype=x.dtype)
        scales = torch.empty(rows.shape[:2], dtype=torch.float32)
        library.norm_forward(
            functions,
            rows.data_ptr(),
            rows.stride(0),
            *rows.shape,
            weight.data_ptr(),
            eps,
            y.data_ptr(),
            scales.data_ptr(),
        )
        ctx.save_for_backward(rows, weight, scales)
        ctx.functions = functions
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None]:
        rows, weight, scales = ctx.saved_tensors
        dy = grads[0].contiguous()
        dx = torch.empty(dy.shape, dtype=dy.dtype)
        d_weight = torch.empty_like(weight)
        library.norm_backward(
            ctx.functions,
            rows.data_ptr(),
            rows.stride(0),
            *rows.shape,
            weight.data_ptr(),
            scales.data_ptr(),
            dy.data_ptr(),
            dx.data_ptr(),
            d_weight.data_ptr(),
        )
        return dx, d_weight, None, None


class NativeGated(Function):
    @staticmethod
    def forward(ctx: Any, inner: Tensor, functions: int) -> Tensor:
        inner = inner.contiguous()
        *leading, width = inner.shape
        y = torch.empty(*leading, width // 2, dtype=inner.dtype)
        library.gated_silu(
            functions, inner.data_ptr(), y.shape[:-1].numel(), width // 2, y.data_ptr()
        )
        ctx.save_for_backward(inner)
        ctx.functions = functions
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (inner,) = ctx.saved_tensors
        dy = grads[0].contiguous()
        d_inner = torch.empty_like(inner)
        library.gated_silu_backward(
            ctx.functions,
            inner.data_ptr(),
            dy.data_ptr(),
            dy.shape[:-1].numel(),
            dy.shape[-1],
            d_inner.data_ptr(),
        )
        return d_inner, None


class NativeRope(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, functions: int) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.functions = functions
        return rotate_rows(x, cos, sin, 1, functions)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        cos, sin = ctx.saved_tensors
        return rotate_rows(grads[0], cos, sin, -1, ctx.functions), None, None, None


def rotate_rows(x: Tensor, cos: Tensor, sin: Tensor, direction: int, functions: int) -> Tensor:
    """Rotate by the angles (`direction` 1) or back (-1)."""
    rows = token_rows(x)
    y = torch.empty(x.shape, dtype=x.dtype)
    library.rotate(
        functions,
        rows.data_ptr(),
        rows.stride(0),
        *rows.shape,
        cos.data_ptr(),
        sin.data_ptr(),
        cos.shape[:-2].numel(),
        direction,
        y.data_ptr(),
    )
    return y


# Attention.


class NativeCausalAttention(Function):
    """Causal attention that saves q, k, v and its output, but no log-sum-exp: blocks of scores are
    of whole rows, whose softmax the backward recomputes."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        window: int | None,
        documents: Tensor | None,
        functions: int,
    ) -> Tensor:
        q = q.contiguous()
        k = k.contiguous()
        v = v.contiguous()
        y = torch.empty_like(q)
        ids = padded_documents(documents)
        library.causal_forward(functions, *attention_arguments(q, k, v, window, ids), y.data_ptr())
        ctx.save_for_backward(q, k, v, y, documents)
        ctx.window = window
        ctx.functions = functions
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, y, documents = ctx.saved_tensors
        dy = grads[0].contiguous()
        ids = padded_documents(documents)
        dq, dk, dv = (torch.empty_like(x) for x in (q, k, v))
        library.causal_backward(
            ctx.functions,
            *attention_arguments(q, k, v, ctx.window, ids),
            y.data_ptr(),
            dy.data_ptr(),
            dq.data_ptr(),
            dk.data_ptr(),
            dv.data_ptr(),
        )
        return dq, dk, dv, None, None, None


def padded_documents(documents: Tensor | None) -> Tensor | None:
    """Return document ids [B, T] in int32, with rows padded to whole registers."""
    if documents is None:
        return None
    return F.pad(documents.to(torch.int32), (0, -documents.shape[1] % LANES)).contiguous()


def attention_arguments(
    q: Tensor, k: Tensor, v: Tensor, window: int | None, documents: Tensor | None
) -> tuple[int, ...]:
    """Return the arguments that the library's forward and backward share."""
    return (
        q.data_ptr(),
        k.data_ptr(),
        v.data_ptr(),
        *q.shape[:3],
        k.shape[2],
        q.shape[3],
        window or 0,
        0 if documents is None else documents.data_ptr(),
    )
