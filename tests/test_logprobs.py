"""Log-probabilities against log_softmax in fp64 and a stable sort."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from shardwise.kernels.reference.logprobs import most_probable
from shardwise.kernels.serving_interface import ServingKernels
from shardwise.serve.request import Logprob, SamplingParams
from shardwise.serve.sampling.penalties import SamplerState
from shardwise.serve.sampling.sampler import token_logprobs
from test_sampler import KERNELS, sample

of_kernels = pytest.mark.parametrize("kernels", KERNELS, ids=lambda kernels: kernels.name)


@of_kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_logprobs_are_of_unmodified_logits(kernels: ServingKernels, dtype: torch.dtype) -> None:
    """Values are within 1e-5 of log_softmax in fp64 of the same (rounded) logits, whatever
    penalties and filters change."""
    logits = (5 * torch.randn(8, 1000, generator=torch.Generator().manual_seed(2))).to(dtype)
    given_logits = logits.clone()
    filters: dict[str, Any] = {
        "top_p": 0.9,
        "repetition_penalty": 1.5,
        "logit_bias": {3: 20},
        "logprobs": 5,
    }
    params = [
        SamplingParams(temperature=0.3 * row, top_k=row, seed=row, **filters) for row in range(8)
    ]
    expected = logits.double().log_softmax(-1)
    for row, picked in enumerate(
        sample(logits, [SamplerState(each, [5, 6]) for each in params], kernels=kernels)
    ):
        assert picked.logprob and picked.logprob.id == picked.token
        assert picked.logprob.logprob == pytest.approx(float(expected[row, picked.token]), abs=1e-5)
        assert_top(picked.logprob, logits[row], 5)
    assert torch.equal(logits, given_logits)


def assert_top(told: Logprob, logits: Tensor, num_top: int) -> None:
    """Compare with the first of a stable sort, log-probabilities within 1e-5."""
    order = logits.float().argsort(descending=True, stable=True)[:num_top].tolist()
    assert [id for id, _ in told.top] == order
    expected = logits.double().log_softmax(-1)[order].tolist()
    assert [logprob for _, logprob in told.top] == pytest.approx(expected, abs=1e-5)


@given(
    rows=st.lists(st.lists(st.integers(0, 3), min_size=9, max_size=9), min_size=1, max_size=4),
    k=st.integers(1, 10),
)
def test_ties_of_the_most_probable_prefer_lowest_ids(rows: list[list[int]], k: int) -> None:
    logits = torch.tensor(rows).float()
    expected = logits.argsort(dim=-1, descending=True, stable=True)[:, :k].tolist()
    assert most_probable(logits, k) == expected
    for kernels in KERNELS:
        ids, _ = kernels.log_probabilities(logits, [5] * len(rows), k)
        assert ids == [[5, *top] for top in expected]


@of_kernels
def test_prompt_logprobs(kernels: ServingKernels) -> None:
    """Log-probabilities of given tokens, with and without the most probable ones, for a vocabulary
    that no register width divides."""
    logits = 3 * torch.randn(70, 5003, generator=torch.Generator().manual_seed(13)).round(
        decimals=2
    )
    tokens = torch.randint(5003, (70,), generator=torch.Generator().manual_seed(14)).tolist()
    told = token_logprobs(logits, tokens, [row % 4 for row in range(70)], kernels)
    expected = logits.double().log_softmax(-1)
    for row, each in enumerate(told):
        assert each.id == tokens[row] and each.logprob == pytest.approx(
            float(expected[row, tokens[row]]), abs=1e-5
        )
        assert_top(each, logits[row], row % 4)


@of_kernels
@pytest.mark.parametrize("fault", [float("nan"), float("inf")])
def test_nan_rows_have_no_logprobs(kernels: ServingKernels, fault: float) -> None:
    """A row with NaN has no log-probabilities; those of the other rows are bit-identical to those
    alone."""
    logits = torch.randn(3, 500, generator=torch.Generator().manual_seed(20))
    expected = token_logprobs(logits, [1, 2, 3], [2] * 3, kernels)
    logits[1, 400] = fault
    first, second, third = token_logprobs(logits, [1, 2, 3], [2] * 3, kernels)
    assert [first, third] == [expected[0], expected[2]] and second.logprob != second.logprob
    assert first == token_logprobs(logits[:1], [1], [2], kernels)[0]


@of_kernels
def test_logprobs_are_returned_only_if_requested(kernels: ServingKernels) -> None:
    asked = [SamplingParams(logprobs=num) for num in (None, 0, 2)]
    none, zero, two = sample(
        torch.randn(3, 20), [SamplerState(each) for each in asked], kernels=kernels
    )
    assert (
        none.logprob is None
        and zero.logprob
        and zero.logprob.top == ()
        and two.logprob
        and len(two.logprob.top) == 2
    )
