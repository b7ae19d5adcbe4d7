"""Sampling against definitions written for one row of plain Python numbers."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import RepetitionPenaltyLogitsProcessor

from examples import examples
from shardwise.kernels.native.library import instruction_sets
from shardwise.kernels.reference.serving import REFERENCE
from shardwise.kernels.registry import native_kernels
from shardwise.kernels.serving_interface import SamplingRow, ServingKernels
from shardwise.serve.request import Logprob, SamplingParams, check_ids
from shardwise.serve.sampling.filters import apply_filters, sample_from_logits
from shardwise.serve.sampling.penalties import Draws, SamplerState
from shardwise.serve.sampling.sampler import sample_by_row, sample_together, sample_tokens

ROWS = st.lists(st.integers(-24, 24).map(lambda quarter: quarter / 4), min_size=1, max_size=12)
PARAMS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.25, 0.5, 1.0, 1.7]),
    top_k=st.sampled_from([-1, 0, 1, 2, 3, 5, 100]),
    top_p=st.sampled_from([1.0, 0.95, 0.7, 0.33, 0.01]),
    min_p=st.sampled_from([0.0, 0.04, 0.23, 0.9]),
)

KERNELS = [REFERENCE, *map(native_kernels, instruction_sets())]


@pytest.fixture(params=KERNELS, ids=lambda kernels: kernels.name)
def kernels(request: pytest.FixtureRequest) -> ServingKernels:
    found: ServingKernels = request.param
    return found


def draw_at(params: SamplingParams, point: float) -> SamplingRow:
    return SamplingRow(params.temperature, params.min_p, params.top_k, params.top_p, point)


class Sampled(NamedTuple):
    """The token of one row, and its log-probability if it was requested."""

    token: int | None
    logprob: Logprob | None = None


def sample(
    logits: Tensor,
    samplers: Sequence[SamplerState],
    masks: Sequence[Tensor | None] | None = None,
    kernels: ServingKernels = REFERENCE,
) -> list[Sampled]:
    tokens, logprobs = sample_tokens(logits, samplers, masks, kernels)
    return [Sampled(token, logprobs.get(row)) for row, token in enumerate(tokens)]


def tokens_of(picked: list[Sampled]) -> list[int | None]:
    return [each.token for each in picked]


def softmax(row: list[float]) -> list[float]:
    highest = max(row)
    weights = [math.exp(z - highest) for z in row]
    return [weight / sum(weights) for weight in weights]


def distribution(row: list[float], params: SamplingParams) -> tuple[list[float], float]:
    """The probabilities to draw from, in the order of definitions: temperature, min_p, top_k,
    top_p.

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
        p = softmax(row)
        kept = set()
        total = 0.0
        for index in sorted(range(len(row)), key=lambda index: (-row[index], index)):
            gaps.append(abs(total - params.top_p))
            if total < params.top_p:
                kept.add(index)
            total += p[index]
        row = without(row, kept)
    return softmax(row), min(gaps)


@given(rows=st.lists(st.tuples(ROWS, PARAMS), min_size=1, max_size=5))
@settings(max_examples=examples(300))
def test_filters_match_definition(rows: list[tuple[list[float], SamplingParams]]) -> None:
    """In a batch of rows with different parameters the same tokens are kept, with probabilities
    within 1e-5."""
    width = max(len(row) for row, _ in rows)
    padded = [row + [-math.inf] * (width - len(row)) for row, _ in rows]
    answers = [distribution(row, params) for row, (_, params) in zip(padded, rows, strict=True)]
    assume(all(gap > 1e-6 for _, gap in answers))
    expected = torch.tensor([probabilities for probabilities, _ in answers])
    probabilities = apply_filters(torch.tensor(padded), [params for _, params in rows]).softmax(-1)
    assert torch.equal(probabilities > 0, expected > 0)
    torch.testing.assert_close(probabilities, expected, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(("top_p", "spread"), [(0.3, 1.0), (0.95, 1.0), (0.999, 0.1), (0.9, 5.0)])
def test_top_p_of_a_large_vocabulary_with_ties(top_p: float, spread: float) -> None:
    """A few tokens or thousands are kept, among many equal ones: as many as in the definition, and
    of equal ones the lowest ids."""
    logits = (spread * torch.randn(3, 6000, generator=torch.Generator().manual_seed(8))).round(
        decimals=1
    )
    stays = apply_filters(logits, [SamplingParams(top_p=top_p)] * 3).isfinite()
    for row, kept in zip(logits, stays, strict=True):
        order = row.argsort(descending=True, stable=True)
        before = row.double().softmax(-1)[order].cumsum(-1).roll(1)
        before[0] = 0
        num_kept = int((before < top_p).sum())
        assert abs(float(before[num_kept]) - top_p) > 1e-6, (
            "too near to the limit to be told in fp32"
        )
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
def test_sampling_frequencies(kernels: ServingKernels, params: SamplingParams) -> None:
    """Chi-square of 4,000 draws from one generator; at most 7 degrees of freedom, 0.1 % critical
    value 24.3."""
    row = [1.0, -0.5, 0.25, 2.0, -2.0, 0.0, 1.5, -30.0]
    expected = [4_000 * each for each in distribution(row, params)[0]]
    sampling = SamplerState(replace(params, seed=0))
    drawn = [
        token or 0
        for _ in range(10)
        for token in tokens_of(sample(torch.tensor([row] * 400), [sampling] * 400, kernels=kernels))
    ]
    counts = torch.tensor(drawn).bincount(minlength=len(row)).tolist()
    assert all(count == 0 for count, mean in zip(counts, expected, strict=True) if mean < 1e-6)
    likely = [(count, mean) for count, mean in zip(counts, expected, strict=True) if mean > 1]
    assert sum((count - mean) ** 2 / mean for count, mean in likely) < 24.3


def test_first_draws_of_many_seeds_have_the_frequencies() -> None:
    """Requests differ by seed alone; 4 degrees of freedom, 0.1 % critical value 18.5."""
    probabilities = torch.tensor([0.4, 0.3, 0.2, 0.08, 0.02])
    points = [SamplerState(SamplingParams(seed=seed)).uniform() for seed in range(5000)]
    tokens = sample_from_logits(probabilities.log().expand(5000, 5), points)
    means = 5000 * probabilities
    assert float(((tokens.bincount(minlength=5) - means) ** 2 / means).sum()) < 18.5


@given(
    rows=st.lists(st.tuples(ROWS, PARAMS), min_size=1, max_size=5),
    point=st.floats(0, 1, exclude_max=True),
)
@settings(max_examples=examples(200))
def test_cpu_kernels_match_batched_filters(
    rows: list[tuple[list[float], SamplingParams]], point: float
) -> None:
    """The reference and the native kernels match filters.py, which the tests above compare with the
    definition."""
    assume(all(distribution(row, params)[1] > 1e-6 for row, params in rows))
    for row, params in rows:
        logits = torch.tensor([row])
        expected = int(sample_from_logits(apply_filters(logits.clone(), [params]), [point])[0])
        for kernels in KERNELS:
            assert kernels.sample([logits[0]], [draw_at(params, point)]) == [expected], kernels.name


@pytest.mark.parametrize("spread", [0.3, 2.0, 6.0])
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"top_k": 50},
        {"top_k": 900},
        {"top_p": 0.9},
        {"top_p": 0.999},
        {"min_p": 0.01, "top_k": 30, "top_p": 0.8},
    ],
    ids=str,
)
def test_cpu_kernels_match_batched_filters_for_a_large_vocabulary(
    kernels: ServingKernels, spread: float, fields: dict[str, Any]
) -> None:
    """20,011 tokens (which blocks do not divide), with ties; 40 uniform numbers, 0 and almost 1
    among them."""
    params = SamplingParams(temperature=0.9, **fields)
    random = torch.Generator().manual_seed(9)
    logits = (spread * torch.randn(20_011, generator=random)).round(decimals=2)
    points = [0.0, 1 - 2**-53, *torch.rand(38, generator=random, dtype=torch.float64).tolist()]
    filtered = apply_filters(logits[None].clone(), [params])
    expected = sample_from_logits(filtered.expand(40, -1), points).tolist()
    assert kernels.sample([logits] * 40, [draw_at(params, point) for point in points]) == expected


ANY_PARAMS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.6, 1.0]),
    top_k=st.sampled_from([0, 3, 40]),
    top_p=st.sampled_from([1.0, 0.9]),
    min_p=st.sampled_from([0.0, 0.05]),
    repetition_penalty=st.sampled_from([1.0, 1.3, 0.8]),
    frequency_penalty=st.sampled_from([0.0, 0.5, -1.5]),
    presence_penalty=st.sampled_from([0.0, 0.7, -0.3]),
    logit_bias=st.dictionaries(
        st.integers(0, 6), st.sampled_from([-100.0, -1.5, 2.0, 100.0]), max_size=3
    ),
    logprobs=st.sampled_from([None, 0, 3]),
)


def changed_by_definition(
    row: list[float], params: SamplingParams, prompt: list[int], answer: list[int]
) -> list[float]:
    row = list(row)
    for id, bias in params.logit_bias.items():
        row[id] += bias
    for id in {*prompt, *answer}:
        row[id] = (
            row[id] / params.repetition_penalty
            if row[id] > 0
            else row[id] * params.repetition_penalty
        )
    for id in set(answer):
        row[id] -= params.frequency_penalty * answer.count(id) + params.presence_penalty
    return row


TOKENS = st.lists(st.integers(0, 6), max_size=8)


@given(
    row=st.lists(st.integers(-12, 12).map(float), min_size=7, max_size=7),
    params=ANY_PARAMS,
    prompt=TOKENS,
    answer=TOKENS,
)
@settings(max_examples=examples(300))
def test_penalties_match_definition(
    row: list[float], params: SamplingParams, prompt: list[int], answer: list[int]
) -> None:
    """Results are within 1e-5, also after a fork, whose tokens change only its own penalties."""
    sampling = SamplerState(params, prompt)
    for token in answer:
        sampling.add(token)
    other = sampling.fork(1)
    other.add(3)
    for each, tokens in ((sampling, answer), (other, [*answer, 3])):
        logits = torch.tensor(row)
        each.change(logits)
        expected = changed_by_definition(row, params, prompt, tokens)
        torch.testing.assert_close(logits, torch.tensor(expected), rtol=1e-6, atol=1e-5)
        assert each.changes or logits.tolist() == row


def test_repetition_penalty_matches_transformers() -> None:
    logits = 4 * torch.randn(3, 60, generator=torch.Generator().manual_seed(10))
    ids = torch.randint(60, (3, 40), generator=torch.Generator().manual_seed(11))
    expected = RepetitionPenaltyLogitsProcessor(1.7)(ids, logits)
    for row, tokens, theirs in zip(logits.clone(), ids.tolist(), expected, strict=True):
        sampling = SamplerState(SamplingParams(repetition_penalty=1.7), tokens[:25])
        for token in tokens[25:]:
            sampling.add(token)
        sampling.change(row)
        assert torch.equal(row, theirs)


def run_on(
    steps: Tensor, samplings: list[SamplerState], masks: list[Tensor | None]
) -> list[list[Sampled]]:
    """The tokens of each row, step by step."""
    told: list[list[Sampled]] = [[] for _ in samplings]
    for logits in steps:
        for row, picked in enumerate(sample(logits, samplings, masks)):
            told[row].append(picked)
            samplings[row].add(picked.token or 0)
    return told


@pytest.mark.parametrize("vocab_size", [49, 1001, 4096])
@given(
    seed=st.integers(-(2**63), 2**63 - 1),
    params=st.lists(ANY_PARAMS, min_size=5, max_size=5),
    masked=st.booleans(),
)
@settings(max_examples=examples(25))
def test_rows_are_batch_invariant(
    vocab_size: int, seed: int, params: list[SamplingParams], masked: bool
) -> None:
    """Tokens and the bits of log-probabilities, at widths that leave tails of vectors, and with one
    thread or two."""
    steps = 3 * torch.randn(4, 5, vocab_size, generator=torch.Generator().manual_seed(1))
    params = [replace(each, seed=seed) for each in params]
    masks: list[Tensor | None] = [None] * 5
    if masked:
        masks[2] = torch.full((-(-vocab_size // 32),), 0x55555555, dtype=torch.int32)

    def fresh() -> list[SamplerState]:
        return [SamplerState(each, [1, 2, 2]) for each in params]

    company = run_on(steps, fresh(), masks)
    for row in range(5):
        assert run_on(steps[:, row : row + 1], fresh()[row : row + 1], masks[row : row + 1]) == [
            company[row]
        ]
    pair = run_on(steps[:, [3, 1]], [fresh()[3], fresh()[1]], [masks[3], masks[1]])
    assert pair == [company[3], company[1]]


@given(
    params=st.lists(ANY_PARAMS, min_size=4, max_size=4),
    fault=st.sampled_from([0.0, math.nan, math.inf]),
)
@settings(max_examples=examples(60))
def test_batched_sampling_matches_row_by_row(params: list[SamplingParams], fault: float) -> None:
    """The batched path of GPUs, with penalties, masks and a failing row, matches the row-by-row
    path of CPUs."""
    logits = 3 * torch.randn(4, 300, generator=torch.Generator().manual_seed(17))
    logits[2, 7] += fault
    masks = [None, torch.full((10,), 0x77777777, dtype=torch.int32), None, None]

    def fresh() -> list[SamplerState]:
        return [SamplerState(replace(each, seed=row), [1, 2, 2]) for row, each in enumerate(params)]

    assert sample_together(logits, fresh(), masks) == sample_by_row(logits, fresh(), masks)


@pytest.mark.parametrize("threads", [2, 3])
def test_threads_do_not_change_rows(kernels: ServingKernels, threads: int) -> None:
    """With several threads torch splits the sum of a single row over them, but not those of many
    rows."""
    logits = 3 * torch.randn(5, 70_001, generator=torch.Generator().manual_seed(12))
    params = [
        SamplingParams(seed=1, logprobs=2, top_p=0.9, temperature=0.1 * row) for row in range(5)
    ]
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        company = sample(logits, [SamplerState(each) for each in params], kernels=kernels)
        alone = [
            sample(logits[row : row + 1], [SamplerState(params[row])], kernels=kernels)[0]
            for row in range(5)
        ]
    finally:
        torch.set_num_threads(before)
    assert alone == company


def test_greedy_takes_the_lowest_id_and_draws_nothing(kernels: ServingKernels) -> None:
    logits = torch.tensor(
        [[1.0, 3.0, 3.0, 0.0], [2.0, 2.0, 2.0, 2.0], [-math.inf, -math.inf, 0.0, -1.0]]
    )
    sampling = SamplerState(SamplingParams(temperature=0, top_k=2))
    assert tokens_of(sample(logits, [sampling] * 3, kernels=kernels)) == [1, 0, 2]
    assert sampling.draws.num_drawn == 0


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 1e-30},
        {"temperature": 1e-300},
        {"top_k": 1},
        {"top_p": 1e-9},
        {"min_p": 1.0},
    ],
    ids=str,
)
def test_the_narrowest_settings_are_greedy(kernels: ServingKernels, params: dict[str, Any]) -> None:
    logits = 20 * torch.randn(16, 300, generator=torch.Generator().manual_seed(3))
    expected = logits.argmax(-1).tolist()
    assert (
        tokens_of(sample(logits, [SamplerState(SamplingParams(**params))] * 16, kernels=kernels))
        == expected
    )
    assert (
        sample_from_logits(
            apply_filters(logits, [SamplingParams(**params)] * 16), [0.999] * 16
        ).tolist()
        == expected
    )


def test_masked_tokens_are_never_drawn(kernels: ServingKernels) -> None:
    """Columns are masked at both ends and between; 4 tokens are left, drawn 20,000 times at a high
    temperature."""
    logits = torch.full((1, 1000), -math.inf)
    logits[:, [3, 20, 621, 960]] = torch.tensor([0.0, -1.0, -2.0, 1.0])
    sampling = SamplerState(SamplingParams(temperature=5.0, seed=4))
    assert set(
        tokens_of(sample(logits.expand(10_000, -1), [sampling] * 10_000, kernels=kernels))
    ) == {3, 20, 621, 960}
    points = torch.rand(10_000, dtype=torch.float64).tolist()
    assert set(
        sample_from_logits(
            apply_filters(logits, [sampling.params]).expand(10_000, -1), points
        ).tolist()
    ) == {3, 20, 621, 960}
    ends = [draw_at(sampling.params, point) for point in (0.0, 1 - 2**-53)]
    assert kernels.sample([logits[0]] * 2, ends) == [3, 960]


def test_rare_tokens_of_a_large_vocabulary_are_drawn(kernels: ServingKernels) -> None:
    """One token has half of the probability, 200,000 share the rest; within 5 standard deviations
    of 400 draws."""
    logits = torch.zeros(1, 200_000)
    logits[0, 0] = math.log(199_999)
    sampling = SamplerState(SamplingParams(seed=5))
    drawn = [tokens_of(sample(logits, [sampling], kernels=kernels))[0] for _ in range(400)]
    assert abs(drawn.count(0) - 200) < 50 and len(set(drawn)) > 150


@pytest.mark.parametrize(
    "fields", [{"temperature": 0}, {}, {"top_p": 0.9, "top_k": 10, "min_p": 0.01}], ids=str
)
@pytest.mark.parametrize("changes", [{}, {"logit_bias": {7: 0.5}}, {"logprobs": 2}], ids=str)
@pytest.mark.parametrize(
    "fault", [[(4, math.nan)], [(4, math.inf)], [(id, -math.inf) for id in range(20)]], ids=str
)
def test_row_without_finite_logits_fails_alone(
    kernels: ServingKernels,
    fields: dict[str, Any],
    changes: dict[str, Any],
    fault: list[tuple[int, float]],
) -> None:
    logits = torch.randn(3, 20, generator=torch.Generator().manual_seed(6))
    params = SamplingParams(seed=7, **fields, **changes)
    expected = sample(logits, [SamplerState(params) for _ in range(3)], kernels=kernels)
    for place, value in fault:
        logits[1, place] = value
    picked = sample(logits, [SamplerState(params) for _ in range(3)], kernels=kernels)
    assert picked == [expected[0], Sampled(None), expected[2]] and None not in tokens_of(expected)


def bits(ids: set[int], vocab_size: int) -> Tensor:
    words = [
        sum(1 << id % 32 for id in ids if id // 32 == word) for word in range(-(-vocab_size // 32))
    ]
    return torch.tensor(words, dtype=torch.int64).to(torch.int32)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_only_allowed_tokens_are_sampled(kernels: ServingKernels, temperature: float) -> None:
    """One row allows few tokens, one only a single token, one none, one has no mask."""
    logits = torch.randn(4, 100, generator=torch.Generator().manual_seed(15))
    logits[:, 50] = 60.0
    params = SamplingParams(temperature=temperature, logprobs=0)
    masks = [bits({0, 31, 63, 64, 99}, 100), bits({31}, 100), bits(set(), 100), None]
    picked = sample(logits, [SamplerState(params) for _ in masks], masks, kernels=kernels)
    assert picked[0].token in {0, 31, 63, 64, 99}
    assert (picked[1].token, picked[2], picked[3].token) == (31, Sampled(None), 50)
    assert picked[0].logprob and picked[0].logprob.logprob < -50, "told of the logits as they came"


def test_completions_of_one_request_have_different_seeds() -> None:
    """Completion 0 is that of n = 1; no completion of one seed is a completion of another."""
    steps = torch.randn(12, 1, 400, generator=torch.Generator().manual_seed(16))

    def answer(seed: int, index: int, forked: bool) -> list[int | None]:
        params = SamplingParams(seed=seed)
        sampling = SamplerState(params).fork(index) if forked else SamplerState(params, index=index)
        return tokens_of(run_on(steps, [sampling], [None])[0])

    answers = [answer(seed, index, True) for seed in (-3, 4, 5) for index in range(4)]
    assert answers == [answer(seed, index, False) for seed in (-3, 4, 5) for index in range(4)]
    assert answers[0] == tokens_of(
        run_on(steps, [SamplerState(SamplingParams(seed=-3))], [None])[0]
    )
    assert len({tuple(each) for each in answers}) == 12


def test_without_a_seed_requests_differ() -> None:
    for index in (0, 1):
        assert Draws.of(SamplingParams(), index).next() != Draws.of(SamplingParams(), index).next()


def test_every_bit_of_a_seed_counts() -> None:
    """The index of a sample is no part of the seed: seed 1, sample 0 is not seed 0, sample 1."""
    seeds = [0, -1, -(2**63), *(1 << bit for bit in range(63))]
    firsts = [Draws(seed, index).next() for seed in seeds for index in (0, 1, 2)]
    assert len(set(firsts)) == len(firsts)


def test_draws_are_uniform() -> None:
    """Mean, variance and the share of each tenth of 20,000 numbers, within 4 standard errors."""
    draws = Draws(7, 0)
    values = torch.tensor([draws.next() for _ in range(20_000)], dtype=torch.float64)
    assert values.min() >= 0 and values.max() < 1
    assert abs(values.mean() - 1 / 2) < 4 * (1 / 12 / 20_000) ** 0.5
    assert abs(values.var() - 1 / 12) < 4 * (1 / 180 / 20_000) ** 0.5
    tenths = torch.histc(values, 10, 0, 1) / 20_000
    assert (tenths - 0.1).abs().max() < 4 * (0.09 / 20_000) ** 0.5
    pairs = torch.corrcoef(torch.stack((values[:-1], values[1:])))
    assert abs(pairs[0, 1]) < 4 / 20_000**0.5


@pytest.mark.parametrize(
    "fields", [{"logit_bias": {50: 1.0}}, {"stop_token_ids": [3, 50]}, {"stop_token_ids": [-1]}]
)
def test_tokens_outside_the_vocabulary_are_refused(fields: dict[str, Any]) -> None:
    name = next(iter(fields))
    id = -1 if -1 in next(iter(fields.values())) else 50
    with pytest.raises(
        ValueError, match=f"^{name} must contain token ids from 0 to 49, but has {id}$"
    ):
        check_ids(name, fields[name], 50)
    with pytest.raises(ValueError, match=f"^{name} "):
        SamplingParams(**fields).check_vocabulary(50)
    SamplingParams(logit_bias={49: 1.0}, stop_token_ids=(0,)).check_vocabulary(50)
