"""JSON that every reader accepts: JSON has no NaN and no infinity, which Python's `json` writes."""

import json
import math
from collections.abc import Mapping
from typing import Any


def json_text(value: Any, **options: Any) -> str:
    """Return `value` as JSON, with null for each number that is not finite.

    `options` are those of `json.dumps`.
    """
    try:
        return json.dumps(value, allow_nan=False, **options)
    except ValueError:
        return json.dumps(finite(value), allow_nan=False, **options)


def finite(value: Any) -> Any:
    """Return `value` with None for each number that is not finite."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [finite(each) for each in value]
    return value
