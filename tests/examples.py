"""The number of examples of a drawn test: few by default, ten times as many in `make test-long`."""

import hypothesis

LONG = "long"
TIMES_AS_MANY = 10


def examples(count: int) -> int:
    """Return `count`, or ten times as many under the hypothesis profile "long"."""
    is_long = hypothesis.settings.get_current_profile_name() == LONG
    return TIMES_AS_MANY * count if is_long else count
