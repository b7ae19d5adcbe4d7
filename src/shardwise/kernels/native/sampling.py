"""Native sampling and log-probabilities on CPUs: the Python side of `csrc/sampling.h`.

Shapes: R rows of logits of a vocabulary V.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from shardwise.kernels.native.library import InstructionSet, library
from shardwise.kernels.reference.sampling import MIN_TEMPERATURE
from shardwise.kernels.serving_interface import SamplingRow, TokenLogprobs


class NativeSampling(InstructionSet):
    """Sampling kernels, for logits in fp32."""

    def sample(self, rows: Sequence[Tensor], params: Sequence[SamplingRow]) -> list[int | None]:
        """Compute `reference.sampling.sample_rows`."""
        clamped = [
            each._replace(temperature=max(each.temperature, MIN_TEMPERATURE))
            if each.temperature
            else each
            for each in params
        ]
        packed_params = torch.tensor(clamped, dtype=torch.float64)
        addresses = row_addresses(rows)
        tokens = torch.empty(len(params), dtype=torch.int64)
        shape = len(rows), len(rows[0])
        library.choose_tokens(
            self.functions,
            addresses.data_ptr(),
            *shape,
            packed_params.data_ptr(),
            tokens.data_ptr(),
        )
        return [None if token < 0 else token for token in tokens.tolist()]

    def log_probabilities(
        self, rows: Sequence[Tensor] | Tensor, tokens: Sequence[int], num_top: int
    ) -> TokenLogprobs:
        """Compute `reference.logprobs.log_probabilities`."""
        shape = len(rows), len(rows[0])
        num_top = min(num_top, shape[1])
        ids = torch.empty(len(rows), 1 + num_top, dtype=torch.int64)
        values = torch.empty(ids.shape)
        token_ids = torch.tensor(tokens)
        addresses = row_addresses(rows)
        library.log_probabilities(
            self.functions,
            addresses.data_ptr(),
            *shape,
            token_ids.data_ptr(),
            num_top,
            values.data_ptr(),
            ids.data_ptr(),
        )
        return ids.tolist(), values.tolist()


def row_addresses(rows: Sequence[Tensor] | Tensor) -> Tensor:
    """Return the addresses [R] of rows that are each contiguous."""
    assert all(row.dtype == torch.float32 and row.stride(0) == 1 for row in rows)
    return torch.tensor([row.data_ptr() for row in rows])
