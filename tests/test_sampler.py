"""Sampling against definitions written for one row of plain Python numbers."""

import math
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from shardwise.serve.request import SamplingParams
from shardwise.serve.sampler import draw, generator_for, keep, pick

ROWS = st.lists(st.integers(-24, 24).map(lambda quarter: quarter / 4), min_size=1, max_size=12)
PARAMS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.25, 0.5, 1.0, 1.7]),
    top_k=st.sampled_from([-1, 0, 1, 2, 3, 5, 100]),
    top_p=st.sampled_from([1.0, 0.95, 0.7, 0.33, 0.01]),
    min_p=st.sampled_from([0.0, 0.04, 0.23, 0.9]),
)


def softmax(row: list[float]) -> list[float]:
    highest = max(row)
    weights = [math.exp(z - highest) for z in row]
    return [weight / sum(weights) for weight in weights]


def distribution(row: list[float], params: SamplingParams) -> tuple[list[float], float]:
    """The probabilities to draw from, in the order of definitions: temperature, min_p, top_k, top_p.

    Also how near the nearest probability came to a limit: too near is a matter of rounding.
    """
    row = [z / params.temperature for z in row]
    gaps = [1.0]

    def without(row: list[float], kept: Any) -> list[float]:
        return [z if index in kept else -math.inf for index, z in enumerate(row)]

    p = softmax(row)
    gaps += [abs(each - params.min_p * max(p)) for each in p if params.min_p > 0]
    row = without(row, {index for index, each in enumerate(p) if each >= params.min_p * max(p)})
    if params.top_k > 0:
        limit = sorted(row, reverse=True)[min(params.top_k, len(row)) - 1]
        row = without(row, {index for index, z in enumerate(row) if z >= limit})
    if params.top_p < 1:
        p, kept, total = softmax(row), set(), 0.0
        for index in sorted(range(len(row)), key=lambda index: (-row[index], index)):
            gaps.append(abs(total - params.top_p))
            if total < params.top_p:
                kept.add(index)
            total += p[index]
        row = without(row, kept)
    return softmax(row), min(gaps)


@given(rows=st.lists(st.tuples(ROWS, PARAMS), min_size=1, max_size=5))
@settings(max_examples=300)
def test_filters_by_definition(rows: list[tuple[list[float], SamplingParams]]) -> None:
    """In a batch of rows with different parameters: the same tokens stay, with probabilities within 1e-5."""
    width = max(len(row) for row, _ in rows)
    padded = [row + [-math.inf] * (width - len(row)) for row, _ in rows]
    answers = [distribution(row, params) for row, (_, params) in zip(padded, rows, strict=True)]
    assume(all(gap > 1e-6 for _, gap in answers))
    expected = torch.tensor([probabilities for probabilities, _ in answers])
    probabilities = keep(torch.tensor(padded), [params for _, params in rows]).softmax(-1)
    assert torch.equal(probabilities > 0, expected > 0)
    torch.testing.assert_close(probabilities, expected, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(("top_p", "spread"), [(0.3, 1.0), (0.95, 1.0), (0.999, 0.1), (0.9, 5.0)])
def test_top_p_of_a_large_vocabulary_with_ties(top_p: float, spread: float) -> None:
    """Few tokens or thousands stay, among many equal ones: as many as by definition, and of equals the lowest ids."""
    logits = (spread * torch.randn(3, 6000, generator=torch.Generator().manual_seed(8))).round(decimals=1)
    stays = keep(logits, [SamplingParams(top_p=top_p)] * 3).isfinite()
    for row, kept in zip(logits, stays, strict=True):
        order = row.argsort(descending=True, stable=True)
        before = row.double().softmax(-1)[order].cumsum(-1).roll(1)
        before[0] = 0
        num_kept = int((before < top_p).sum())
        assert abs(float(before[num_kept]) - top_p) > 1e-6, "too near to the limit to be told in fp32"
        assert torch.equal(kept.nonzero().flatten(), order[:num_kept].sort().values)


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(),
        SamplingParams(temperature=0.6),
        SamplingParams(temperature=1.5, top_k=5),
        SamplingParams(top_p=0.8),
        SamplingParams(min_p=0.15, temperature=0.9),
        SamplingParams(temperature=1.3, min_p=0.02, top_k=6, top_p=0.9),
    ],
    ids=str,
)
def test_frequencies(params: SamplingParams) -> None:
    """Chi-square of 40,000 draws from one generator; at most 7 degrees of freedom, 0.1 % critical value 24.3."""
    row = [1.0, -0.5, 0.25, 2.0, -2.0, 0.0, 1.5, -30.0]
    expected = [40_000 * each for each in distribution(row, params)[0]]
    generator = torch.Generator().manual_seed(0)
    drawn = torch.cat([pick(torch.tensor([row] * 400), [params] * 400, [generator] * 400)[0] for _ in range(100)])
    counts = drawn.bincount(minlength=len(row)).tolist()
    assert all(count == 0 for count, mean in zip(counts, expected, strict=True) if mean < 1e-6)
    likely = [(count, mean) for count, mean in zip(counts, expected, strict=True) if mean > 1]
    assert sum((count - mean) ** 2 / mean for count, mean in likely) < 24.3


def test_first_draws_of_many_seeds_have_the_frequencies_too() -> None:
    """Requests differ by seed alone; 4 degrees of freedom, 0.1 % critical value 18.5."""
    probabilities = torch.tensor([0.4, 0.3, 0.2, 0.08, 0.02])
    generators = [generator_for(SamplingParams(seed=seed)) for seed in range(5000)]
    tokens = draw(probabilities.log().expand(5000, 5), generators)
    means = 5000 * probabilities
    assert float(((tokens.bincount(minlength=5) - means) ** 2 / means).sum()) < 18.5


@given(seed=st.integers(-(2**63), 2**63 - 1), place=st.integers(0, 4), params=st.lists(PARAMS, min_size=5, max_size=5))
@settings(max_examples=50)
def test_a_seed_gives_the_same_tokens_in_any_company(seed: int, place: int, params: list[SamplingParams]) -> None:
    logits = 3 * torch.randn(6, 5, 50, generator=torch.Generator().manual_seed(1))
    mine = SamplingParams(temperature=1.2, top_p=0.95, seed=seed)
    alone, generator = [], generator_for(mine)
    for step in logits:
        alone.append(int(pick(step[place : place + 1], [mine], [generator])[0]))
    params[place] = mine
    generators = [generator_for(each) for each in params]
    company = [int(pick(step, params, generators)[0][place]) for step in logits]
    assert alone == company


def test_greedy_takes_the_lowest_id_of_the_largest_and_draws_nothing() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, 0.0], [2.0, 2.0, 2.0, 2.0], [-math.inf, -math.inf, 0.0, -1.0]])
    generator = torch.Generator().manual_seed(0)
    before = generator.get_state()
    tokens, _ = pick(logits, [SamplingParams(temperature=0, top_k=2)] * 3, [generator] * 3)
    assert tokens.tolist() == [1, 0, 2] and tokens.dtype == torch.int64
    assert torch.equal(generator.get_state(), before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_log_probabilities_are_of_the_logits_as_they_came(dtype: torch.dtype) -> None:
    """Against log_softmax in fp64 of the same (rounded) logits: within 1e-5."""
    logits = (5 * torch.randn(8, 1000, generator=torch.Generator().manual_seed(2))).to(dtype)
    given_logits = logits.clone()
    params = [SamplingParams(temperature=0.3 * row, top_k=row, top_p=0.9, seed=row) for row in range(8)]
    tokens, logprobs = pick(logits, params, [generator_for(each) for each in params])
    expected = logits.double().log_softmax(-1).gather(-1, tokens[:, None]).squeeze(-1)
    torch.testing.assert_close(logprobs.double(), expected, rtol=0, atol=1e-5)
    assert logprobs.dtype == torch.float32 and torch.equal(logits, given_logits)


@pytest.mark.parametrize("params", [{"temperature": 1e-30}, {"top_k": 1}, {"top_p": 1e-9}, {"min_p": 1.0}], ids=str)
def test_the_narrowest_settings_are_greedy(params: dict[str, Any]) -> None:
    logits = 20 * torch.randn(16, 300, generator=torch.Generator().manual_seed(3))
    tokens, logprobs = pick(logits, [SamplingParams(**params)] * 16, [None] * 16)
    assert torch.equal(tokens, logits.argmax(-1)) and logprobs.isfinite().all()


def test_tokens_without_probability_are_never_drawn() -> None:
    """Masked columns at both ends and between; 4 tokens stay, drawn 20,000 times at a temperature that flattens."""
    logits = torch.full((2000, 64), -math.inf)
    logits[:, [3, 20, 21, 60]] = torch.tensor([0.0, -1.0, -2.0, 1.0])
    generator = torch.Generator().manual_seed(4)
    for _ in range(10):
        tokens, _ = pick(logits, [SamplingParams(temperature=5.0)] * 2000, [generator] * 2000)
        assert set(tokens.tolist()) == {3, 20, 21, 60}


def test_rare_tokens_of_a_large_vocabulary_are_drawn() -> None:
    """One token has half of the probability, 200,000 share the rest; within 5 standard deviations of 400 draws."""
    logits = torch.zeros(1, 200_000)
    logits[0, 0] = math.log(199_999)
    generator = torch.Generator().manual_seed(5)
    drawn = [int(pick(logits, [SamplingParams()], [generator])[0]) for _ in range(400)]
    assert abs(drawn.count(0) - 200) < 50 and len(set(drawn)) > 150


def test_a_row_with_nan_leaves_the_others_alone() -> None:
    logits = torch.randn(3, 20, generator=torch.Generator().manual_seed(6))
    params = [SamplingParams(seed=7, top_p=0.9, top_k=10, min_p=0.01)] * 3
    tokens, _ = pick(logits, params, [generator_for(each) for each in params])
    logits[1, 4] = math.nan
    again, logprobs = pick(logits, params, [generator_for(each) for each in params])
    assert again[[0, 2]].tolist() == tokens[[0, 2]].tolist() and 0 <= int(again[1]) < 20
    assert logprobs.isnan().tolist() == [False, True, False]


def test_without_a_seed_requests_differ() -> None:
    assert generator_for(SamplingParams()).initial_seed() != generator_for(SamplingParams()).initial_seed()


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"temperature": -0.1}, "temperature is -0.1, but it must be 0"),
        ({"temperature": math.nan}, "temperature is nan"),
        ({"temperature": math.inf}, "temperature is inf"),
        ({"top_k": -2}, "top_k is -2"),
        ({"top_k": 1.5}, "top_k is 1.5"),
        ({"top_p": 0.0}, "top_p is 0.0, but it must be above 0"),
        ({"top_p": 1.01}, "top_p is 1.01"),
        ({"top_p": math.nan}, "top_p is nan"),
        ({"min_p": -0.1}, "min_p is -0.1"),
        ({"min_p": 1.1}, "min_p is 1.1"),
        ({"seed": 2**63}, "seed is 9223372036854775808"),
        ({"max_tokens": 0}, "max_tokens is 0"),
        ({"stop": ("a", "")}, "stop must be texts that are not empty"),
        ({"stop": [3]}, "stop must be texts that are not empty"),
    ],
)
def test_params_out_of_range_are_refused(fields: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        SamplingParams(**fields)


def test_stop_takes_one_text_or_several() -> None:
    assert SamplingParams(stop="\n").stop == ("\n",)  # type: ignore[arg-type]
    assert SamplingParams(stop=["a", "b"]).stop == ("a", "b")  # type: ignore[arg-type]
    assert SamplingParams().stop == ()
