"""What is run in one step of serving: the next tokens of each sequence in it, and the pages they
are written to.

Made by the scheduler, run by the runner, broadcast by rank 0 under tensor parallel. Imports no
torch.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Part:
    """The next tokens of one sequence, at positions `start`, `start + 1`, ...

    pages: its block table, long enough for start + len(tokens) tokens; position p is in pages[p //
    page_tokens]. samples: how many next tokens are picked after the last of `tokens`: 0 while its
    prefill goes on; 1; n where it forks into n sequences. scores: how many of the most probable
    tokens are told beside each of its own, with log-probabilities; None: those are not wanted. Each
    follows from the token before it, so those of all tokens but the first are given; parts of one
    prompt overlap by a token, so that together they leave out only the first of the prompt.
    """

    id: int
    tokens: tuple[int, ...]
    start: int
    pages: tuple[int, ...]
    samples: int
    scores: int | None


@dataclass(frozen=True, slots=True)
class Batch:
    """The parts of one step, those of a single token first. Before they are run, pages are copied
    (from page, to page): in this order, or all read before any is written."""

    parts: tuple[Part, ...]
    copies: tuple[tuple[int, int], ...]
