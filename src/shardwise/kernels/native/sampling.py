"""The native kernels that choose tokens and tell of them: Python's side of `csrc/sampling.h`.

Shapes: R rows of logits of a vocabulary V.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from shardwise.kernels.native.library import InstructionSet, library
from shardwise.kernels.reference.logprobs import Told
from shardwise.kernels.reference.sampling import COLDEST, Draw


class NativeSampling(InstructionSet):
    """What is done to the logits on a CPU."""

    def choose(self, rows: Sequence[Tensor], draws: Sequence[Draw]) -> list[int | None]:
        """`choose.choose_each`, for rows in fp32."""
        warm = [
            draw._replace(temperature=max(draw.temperature, COLDEST)) if draw.temperature else draw
            for draw in draws
        ]
        told = torch.tensor(warm, dtype=torch.float64)
        addresses = addresses_of(rows)
        tokens = torch.empty(len(draws), dtype=torch.int64)
        shape = len(rows), len(rows[0])
        library.choose_tokens(
            self.functions, addresses.data_ptr(), *shape, told.data_ptr(), tokens.data_ptr()
        )
        return [None if token < 0 else token for token in tokens.tolist()]

    def log_probabilities(
        self, rows: Sequence[Tensor] | Tensor, tokens: Sequence[int], num_top: int
    ) -> Told:
        """`logprobs.log_probabilities`, for rows in fp32."""
        shape = len(rows), len(rows[0])
        num_top = min(num_top, shape[1])
        ids = torch.empty(len(rows), 1 + num_top, dtype=torch.int64)
        values = torch.empty(ids.shape)
        asked = torch.tensor(tokens)
        addresses = addresses_of(rows)
        library.log_probabilities(
            self.functions,
            addresses.data_ptr(),
            *shape,
            asked.data_ptr(),
            num_top,
            values.data_ptr(),
            ids.data_ptr(),
        )
        return ids.tolist(), values.tolist()


def addresses_of(rows: Sequence[Tensor] | Tensor) -> Tensor:
    """Of rows that each lie in one piece."""
    assert all(row.dtype == torch.float32 and row.stride(0) == 1 for row in rows)
    return torch.tensor([row.data_ptr() for row in rows])
