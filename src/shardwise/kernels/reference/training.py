"""The reference kernels of training, in torch operations."""

from shardwise.kernels.interface import TrainingKernels
from shardwise.kernels.reference.attention import causal_attention
from shardwise.kernels.reference.cross_entropy import cross_entropy_grad_
from shardwise.kernels.reference.gated import gated
from shardwise.kernels.reference.norm import rms_norm
from shardwise.kernels.reference.rope import apply_rope

REFERENCE_TRAINING = TrainingKernels(
    name="torch",
    rms_norm=rms_norm,
    gated=gated,
    apply_rope=apply_rope,
    attention=causal_attention,
    cross_entropy_grad=cross_entropy_grad_,
)
