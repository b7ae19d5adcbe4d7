"""Machine-readable output is JSON whatever the numbers are."""

import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from shardwise.measure.perplexity import Perplexity
from shardwise.train.metrics import Metrics, StepMetrics
from shardwise.writing.json_text import json_text

VALUES: Any = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.tuples(inner) | st.dictionaries(st.text(), inner),
    max_leaves=8,
)


def strict(text: str) -> Any:
    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    return json.loads(text, parse_constant=refuse)


def with_nulls(value: Any) -> Any:
    """Return what Python's own JSON gives, with null for the three constants that are not JSON."""
    return json.loads(json.dumps(value), parse_constant=lambda constant: None)


@given(value=VALUES)
def test_any_value_is_json_with_nulls_for_what_is_not_finite(value: Any) -> None:
    assert strict(json_text(value)) == with_nulls(value)
    assert strict(json_text(value, indent=1, ensure_ascii=False)) == with_nulls(value)


def test_what_is_finite_is_written_as_python_does() -> None:
    value = {"a": [1, 0.1, 1e300, "é\ud800"], "b": (None, True)}
    assert json_text(value) == json.dumps(value)


def test_a_step_that_diverged_is_a_line_of_json(tmp_path: Path) -> None:
    metrics = Metrics(tmp_path, 2, 0, tensorboard=False, active=True)
    metrics.step(StepMetrics(1, math.nan, math.inf, 0.1, 8, 3.5, 0.2, [7], {"dp": 4}))
    metrics.held_out(1, math.nan, {})
    metrics.close()
    step, held_out = map(strict, (tmp_path / "metrics.jsonl").read_text().splitlines())
    assert (step["loss"], step["grad_norm"], step["lr"]) == (None, None, 0.1)
    assert held_out["held_out_loss"] is None


def test_a_perplexity_without_a_number_is_json() -> None:
    assert strict(json_text(asdict(Perplexity(math.inf, 3, 800.0)))) == {
        "perplexity": None,
        "tokens": 3,
        "nll": 800.0,
    }
