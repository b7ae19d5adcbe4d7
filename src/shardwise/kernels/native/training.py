"""The native kernels that training uses, forward and backward, in bf16: Python's side of
`csrc/flash.h`, `rows_training.h` and `cross_entropy.h`. What their shapes do not suit runs on
torch's operations.

Their results do not depend on the number of threads. Shapes: N tokens, H query heads, K kv heads, C
head dim.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from shardwise.kernels.native.library import LANES, InstructionSet, library
from shardwise.kernels.reference.attention import causal_attention
from shardwise.kernels.reference.cross_entropy import Aims, loss_of
from shardwise.kernels.reference.gated import gated
from shardwise.kernels.reference.rotary import rotate


class NativeTraining(InstructionSet):
    """The kernels that a model is trained with."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """`norm.rms_norm`."""
        y: Tensor = NativeNorm.apply(x, weight, eps, self.functions)
        return y

    def gated(self, inner: Tensor, activation: str) -> Tensor:
        """`gated.gated`."""
        if activation != "silu" or inner.shape[-1] % (2 * LANES):
            return gated(inner, activation)
        y: Tensor = NativeGated.apply(inner, self.functions)
        return y

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """`rotary.rotate`; but the result lies in memory head beside head."""
        in_turn = cos.shape[:-2].numel() in (
            x.shape[-3],
            x.shape[:-2].numel(),
        )  # of all tokens, or of a sequence
        if x.shape[-1] % (2 * LANES) or not in_turn:
            return rotate(x, cos, sin)
        y: Tensor = NativeRotate.apply(x, cos.contiguous(), sin.contiguous(), self.functions)
        return y

    def attention(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        window: int | None = None,
        documents: Tensor | None = None,
    ) -> Tensor:
        """`attention.causal_attention`."""
        if q.shape[-1] % LANES:
            return causal_attention(q, k, v, window, documents)
        y: Tensor = NativeAttention.apply(q, k, v, window, documents, self.functions)
        return y

    def softmax_less_one_(self, logits: Tensor, aims: Aims, with_gradient: bool) -> Tensor:
        """`cross_entropy.softmax_less_one_`: one pass over the logits for the statistics, one for
        the gradient."""
        num_rows, num_columns = logits.shape
        place = logits.data_ptr(), logits.stride(0), num_rows, aims.num_real
        own = logits.new_empty(2, num_rows, 1, dtype=torch.float32)
        peaks, sums = own
        library.softmax_statistics(self.functions, *place, peaks.data_ptr(), sums.data_ptr())
        aimed = logits.gather(1, aims.at).float()
        highest = aims.highest(peaks.clone())
        aimed = (aimed - highest).where(aims.is_here, 0)
        sums, aimed = aims.total(torch.cat((sums * (peaks - highest).exp_(), aimed), 1)).split(1, 1)
        if with_gradient:
            share = aims.has_target / sums
            at_target = (aimed.exp() - sums) * share
            columns = aims.at.where(aims.is_here, -1)
            library.softmax_gradient(
                self.functions,
                *place,
                num_columns,
                highest.data_ptr(),
                share.data_ptr(),
                columns.data_ptr(),
                at_target.data_ptr(),
            )
        return loss_of(sums, aimed, aims)


# -- rows
# -----------------------------------------------------------------------------------------------------


def token_rows(x: Tensor) -> Tensor:
    """x [..., H, C] as [N, H, C], whose heads lie side by side: a view if they do, whatever lies
    between tokens."""
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


class NativeRotate(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, functions: int) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.functions = functions
        return turned(x, cos, sin, 1, functions)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        cos, sin = ctx.saved_tensors
        return turned(grads[0], cos, sin, -1, ctx.functions), None, None, None


def turned(x: Tensor, cos: Tensor, sin: Tensor, direction: int, functions: int) -> Tensor:
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


# -- attention
# ------------------------------------------------------------------------------------------------


class NativeAttention(Function):
    """Keeps q, k, v and what they gave; no row's sum, since blocks of scores are of whole rows."""

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
        numbers = document_numbers(documents)
        library.causal_forward(functions, *described(q, k, v, window, numbers), y.data_ptr())
        ctx.save_for_backward(q, k, v, y, documents)
        ctx.window = window
        ctx.functions = functions
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, y, documents = ctx.saved_tensors
        dy = grads[0].contiguous()
        numbers = document_numbers(documents)
        dq, dk, dv = (torch.empty_like(x) for x in (q, k, v))
        library.causal_backward(
            ctx.functions,
            *described(q, k, v, ctx.window, numbers),
            y.data_ptr(),
            dy.data_ptr(),
            dq.data_ptr(),
            dk.data_ptr(),
            dv.data_ptr(),
        )
        return dq, dk, dv, None, None, None


def document_numbers(documents: Tensor | None) -> Tensor | None:
    """As the kernel reads them: [B, T], where rows end with whole registers."""
    if documents is None:
        return None
    return F.pad(documents.to(torch.int32), (0, -documents.shape[1] % LANES)).contiguous()


def described(
    q: Tensor, k: Tensor, v: Tensor, window: int | None, numbers: Tensor | None
) -> tuple[int, ...]:
    addresses = q.data_ptr(), k.data_ptr(), v.data_ptr()
    return (
        *addresses,
        *q.shape[:3],
        k.shape[2],
        q.shape[3],
        window or 0,
        0 if numbers is None else numbers.data_ptr(),
    )
