"""Log-probabilities as a request is told of them."""

from collections.abc import Sequence

from torch import Tensor

from shardwise.kernels.reference.serving import REFERENCE
from shardwise.kernels.serving_interface import ServingKernels
from shardwise.serve.request import Logprob


def log_probabilities(
    logits: Sequence[Tensor] | Tensor,
    tokens: Sequence[int],
    num_top: Sequence[int],
    kernels: ServingKernels = REFERENCE,
) -> list[Logprob]:
    """For each row of `logits` [R, V] its token's log-probability, with the `num_top` most probable
    of that row.

    For a prompt's own tokens: row t is of the logits after token t, `tokens` are those that came
    next. NaN stays NaN.
    """
    ids, values = kernels.log_probabilities(logits, tokens, max(num_top, default=0))
    return [
        Logprob(
            mine[0], numbers[0], tuple(zip(mine[1 : 1 + num], numbers[1 : 1 + num], strict=True))
        )
        for mine, numbers, num in zip(ids, values, num_top, strict=True)
    ]
