"""Random rounding measures what the order of additions may change."""

import torch

from rounding import UNIT, rounding_errors


def test_the_error_of_a_sum_is_that_of_its_terms_not_of_its_value() -> None:
    """n roundings of a variance of UNIT^2 / 3 each at least; at most UNIT for each term."""
    terms = torch.randn(10_000, generator=torch.Generator().manual_seed(1)) + 3.0
    signs = torch.tensor([1.0, -1.0]).repeat(5_000)
    expected = UNIT * float((terms**2).sum() / 3) ** 0.5
    error = rounding_errors(lambda: {"sum": (terms * signs).sum()}, num_samples=16)["sum"]
    assert 0.5 * expected < error < UNIT * float(terms.abs().sum())


def test_views_and_copies_are_not_rounded() -> None:
    x = torch.randn(5, 7)
    assert rounding_errors(lambda: {"x": x.t()[1:].expand(6, 5)}) == {"x": 0.0}


def test_what_cannot_round_has_the_error_of_one_rounding() -> None:
    x = torch.ones(1_000)
    error = rounding_errors(lambda: {"x": x * 2.0}, num_samples=32)["x"]
    assert 0.5 < error / (2 * UNIT * (1_000 / 3) ** 0.5) < 2
