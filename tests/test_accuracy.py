"""The order of the literature, on a small model trained here: methods that look at a text are no
worse than rounding to nearest, 3 bits are worse than 4 and those than 8, and larger groups are
worse than smaller ones.

What is compared is KL to the unquantized model on text that neither training nor calibration has
seen. It is worked out from whole distributions, so it tells ways apart whose perplexities differ by
chance. Tolerances are for that chance.
"""

import math
from itertools import pairwise
from statistics import mean

import pytest
import torch
import torch.nn.functional as F
from accuracy import GROUPS, Row, Task, measure, measure_cache, schemes, small, train_small

from shardwise.kernels.reference.attention import causal_attention
from shardwise.kernels.reference.serving import REFERENCE
from shardwise.measure.perplexity import compare_with_reference, perplexity
from shardwise.model.layers import Causal
from shardwise.model.transformer import Transformer

BITS = ("int3", "int4")
Rows = dict[tuple[str, str | None], Row]


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Task:
    """A model trained for about 20 seconds."""
    folder = tmp_path_factory.mktemp("small")
    return small(train_small(folder, steps=320), 8192, 4096)


@pytest.fixture(scope="module")
def rows(task: Task) -> Rows:
    return {(row.scheme, row.method): row for row in measure(task, schemes(task))}


def kl(rows: Rows, bits: int, group: int, method: str) -> float:
    return rows[f"int{bits}-g{group}", method].comparison.kl


def test_the_model_has_learned_something(task: Task, rows: Rows) -> None:
    """Compared with guessing among 512 tokens."""
    plain = rows["none", None].comparison
    assert plain.perplexity < 0.1 * task.model.config.vocab_size
    assert plain.kl == 0 and plain.top1 == 1
    assert len(rows) == 2 + 2 * 3 * len(GROUPS)


def test_calibrated_methods_are_no_worse_than_rounding(rows: Rows) -> None:
    """The tolerance is 5 % of KL and 0.5 % of perplexity; GPTQ is better by 20 % of KL for every
    scheme."""
    for bits in (4, 3):
        for group in GROUPS:
            rounded = kl(rows, bits, group, "rtn")
            assert kl(rows, bits, group, "awq") <= 1.05 * rounded
            assert kl(rows, bits, group, "gptq") <= 0.8 * rounded
            for method in ("gptq", "awq"):
                mine, nearest = (
                    rows[f"int{bits}-g{group}", each].comparison for each in (method, "rtn")
                )
                assert mine.perplexity <= 1.005 * nearest.perplexity
                assert mine.top1 >= nearest.top1 - 0.01


def test_fewer_bits_are_worse(rows: Rows) -> None:
    """One bit less doubles the step and quadruples the squared error: at least twice the KL."""
    for method in ("rtn", "gptq", "awq"):
        for group in GROUPS:
            assert kl(rows, 3, group, method) > 2 * kl(rows, 4, group, method)
            assert kl(rows, 4, group, method) > 5 * rows["int8", "rtn"].comparison.kl
            assert (
                rows[f"int3-g{group}", method].comparison.top1
                < rows[f"int4-g{group}", method].comparison.top1
            )
    three, four = (
        mean(each.comparison.perplexity for each in rows.values() if name in each.scheme)
        for name in BITS
    )
    assert three > four > rows["none", None].comparison.perplexity


def test_larger_groups_are_worse(rows: Rows) -> None:
    """KL grows from each size to the next within 10 %, from the smallest to the largest by at least
    5 %."""
    for method in ("rtn", "gptq", "awq"):
        for bits in (4, 3):
            found = [kl(rows, bits, group, method) for group in GROUPS]
            assert all(larger >= 0.9 * smaller for smaller, larger in pairwise(found))
            assert found[-1] > 1.05 * found[0]


def test_a_cache_in_8_bits_costs_less_than_weights_in_4(task: Task, rows: Rows) -> None:
    """An int8 KV cache costs a tenth of it, and less than fp8, whose steps are coarse for large
    values. All cases use paged attention."""
    integers, floats = (row.comparison for row in measure_cache(task))
    least = min(row.comparison.kl for row in rows.values() if row.scheme.startswith("int4"))
    assert 0 < 10 * integers.kl < least and integers.kl < floats.kl < least
    assert integers.perplexity < 1.001 * rows["none", None].comparison.perplexity


def test_bits_per_weight(rows: Rows) -> None:
    """Bits per weight include 16 bits of scale per group."""
    assert all(
        rows[f"int{bits}-g{group}", "awq"].bits == bits + 16 / group
        for bits in (3, 4)
        for group in GROUPS
    )


def test_comparison_follows_its_formulas(task: Task) -> None:
    """KL over all logits in doubles, and perplexity as in `shardwise eval`."""
    tokens = task.held_out[:301]
    model = task.model
    other = {
        name: weight * 1.05 if name == "blocks.1.down" else weight
        for name, weight in model.weights.items()
    }
    changed = type(model)(model.config, other, model.tokenizer, model.dtype, model.device)
    found = compare_with_reference(changed.logits, model.logits, tokens, 100)
    assert found.tokens == 300
    assert found.perplexity == pytest.approx(
        perplexity(changed.logits, tokens, 100, 100, lambda _: None).perplexity, rel=1e-6
    )
    ids = torch.tensor(tokens)
    inputs = ids[:300].view(3, 100)
    positions = torch.arange(100)[None]
    q, p = (
        Transformer(model.config, REFERENCE)
        .forward(weights, inputs, positions, Causal(model.config, causal_attention))
        .double()
        .log_softmax(-1)
        for weights in (other, model.weights)
    )
    assert found.kl == pytest.approx(
        float(F.kl_div(q, p, reduction="sum", log_target=True)) / 300, rel=1e-3
    )
    assert found.top1 == pytest.approx(float((q.argmax(-1) == p.argmax(-1)).double().mean()))
    assert found.kl > 0 and math.isfinite(found.kl)
