"""The optimizer against its definition and torch's own, and the learning rate as a function of the
step."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardwise.train.optim import AdamW, LearningRate, Schedule, adamw_naive

OPTIMIZERS = [AdamW(), AdamW(0.8, 0.999, 1e-6, 0.0), AdamW(0.0, 0.9, 1e-4, 0.5)]
RATES = [1e-2, 3e-3, 0.0, 5e-2, 1e-2]


def drawn(seed: int, size: int = 257) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("decayed", [True, False])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_fused_is_the_definition_and_torch(optimizer: AdamW, decayed: bool) -> None:
    """Weights within 2e-6 of their size, moments within 1e-6, over five steps of changing rate and
    gradient size."""
    fused = [drawn(0), torch.zeros(257), torch.zeros(257)]
    naive = [part.clone() for part in fused]
    parameter = torch.nn.Parameter(drawn(0))
    theirs = torch.optim.AdamW(
        [parameter],
        betas=(optimizer.beta1, optimizer.beta2),
        eps=optimizer.eps,
        weight_decay=optimizer.weight_decay if decayed else 0.0,
        foreach=False,
        fused=False,
    )
    for step, lr in enumerate(RATES, 1):
        grad = drawn(step) * 10.0 ** (step - 4)
        optimizer.update(fused[0], grad.clone(), fused[1], fused[2], step, lr, decayed)
        adamw_naive(optimizer, naive[0], grad.clone(), naive[1], naive[2], step, lr, decayed)
        parameter.grad = grad.clone()
        theirs.param_groups[0]["lr"] = lr
        theirs.step()
        for mine, other, tolerance in zip(fused, naive, (2e-6, 1e-6, 1e-6), strict=True):
            torch.testing.assert_close(
                mine, other, rtol=tolerance, atol=tolerance * float(other.abs().max())
            )
        torch.testing.assert_close(fused[0], parameter.detach(), rtol=2e-6, atol=2e-6)


def test_decay_applies_only_to_decayed_parameters() -> None:
    """With a zero gradient the step is the decay alone: 1 - lr x weight_decay, or nothing at
    all."""
    optimizer = AdamW(weight_decay=0.25)
    weights = drawn(1)
    for decayed, factor in ((True, 1 - 0.1 * 0.25), (False, 1.0)):
        w = weights.clone()
        optimizer.update(w, torch.zeros(257), torch.zeros(257), torch.zeros(257), 1, 0.1, decayed)
        torch.testing.assert_close(w, weights * factor, rtol=1e-7, atol=0)


def test_the_first_step_moves_every_weight_by_the_rate() -> None:
    """Of whatever size the gradient is (Kingma & Ba 2015, section 2.1)."""
    w = torch.zeros(257)
    AdamW(eps=0.0, weight_decay=0.0).update(
        w, drawn(2) * 1e-3, torch.zeros(257), torch.zeros(257), 1, 0.5, False
    )
    torch.testing.assert_close(w.abs(), torch.full((257,), 0.5), rtol=1e-5, atol=0)


SCHEDULES: list[Schedule] = ["cosine", "wsd", "constant"]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_warmup_rises_by_equal_steps_to_the_peak(schedule: Schedule) -> None:
    rate = LearningRate(2.0, 100, 4, schedule, 0.1, 10)
    assert [rate.at(step) for step in range(5)] == [0.5, 1.0, 1.5, 2.0, 2.0]


def test_cosine_values() -> None:
    rate = LearningRate(1.0, 110, 10, "cosine", 0.1)
    quarter = 0.1 + 0.9 * (1 + math.sqrt(0.5)) / 2
    for step, expected in (
        (10, 1.0),
        (35, quarter),
        (60, 0.55),
        (85, 1.1 - quarter),
        (110, 0.1),
        (500, 0.1),
    ):
        assert rate.at(step) == pytest.approx(expected, rel=1e-12)


def test_wsd_stays_then_decays_linearly() -> None:
    rate = LearningRate(1.0, 100, 10, "wsd", 0.2, 20)
    values = {9: 1.0, 50: 1.0, 80: 1.0, 85: 0.8, 90: 0.6, 99: 0.24, 100: 0.2, 300: 0.2}
    assert {step: pytest.approx(rate.at(step), rel=1e-12) for step in values} == values


def test_constant_stays_at_the_peak() -> None:
    rate = LearningRate(0.3, 100, 10, "constant", 0.2, 20)
    assert {rate.at(step) for step in range(10, 300)} == {0.3}


@given(
    st.sampled_from(SCHEDULES),
    st.integers(1, 60),
    st.integers(0, 80),
    st.integers(0, 80),
    st.floats(0, 1),
    st.integers(0, 100),
)
def test_rates_stay_between_final_and_peak(
    schedule: Schedule, steps: int, warmup: int, decay: int, final: float, step: int
) -> None:
    """For any lengths, even a warm-up or a decay longer than the run; after the warm-up it never
    rises."""
    rate = LearningRate(1.0, steps, warmup, schedule, final, decay)
    value = rate.at(step)
    assert 0 < value <= 1.0 + 1e-12 or (final == 0 and value == 0)
    if step >= warmup:
        assert final - 1e-12 <= value and rate.at(step + 1) <= value + 1e-12
    assert rate.at(step) == value
