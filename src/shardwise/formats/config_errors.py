"""One-sentence errors for malformed model configs."""

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def reading(source: str) -> Iterator[None]:
    """Whatever is wrong with the values of a config, say it in a sentence that begins with the
    file."""
    try:
        yield
    except KeyError as missing:
        raise ValueError(
            f"{source}: {missing.args[0]} is missing, so the model's shape is unknown"
        ) from None
    except ValueError as error:
        raise ValueError(f"{source}: {error}") from None
    except (TypeError, AttributeError, ArithmeticError, RecursionError) as error:
        raise ValueError(f"{source} is malformed: {error}") from None
