"""How far a sequence has got that is being served. Imports no torch."""

from dataclasses import dataclass, field


@dataclass(slots=True, eq=False)
class Request:
    """One sequence from its prompt to its last token, or n of them that share a prompt, which they
    are one until its end. What is asked comes first; the rest is the scheduler's.

    id: the first of n ids in a row, one for each sequence; higher than all that were added before.
    tokens: the prompt, in a list that is the request's own; then also what was picked, each token
    once it is known. priority: lower goes first. salt: requests find each other's pages only if
    their salts are equal. scores: the log-probabilities of the prompt are wanted too, with those of
    so many others at each place; so all of it is run. If the request is preempted while in its
    prompt, some are given twice. num_found: tokens of the prompt whose keys and values were there
    already when it was first taken in.
    """

    id: int
    tokens: list[int]
    max_tokens: int
    priority: int = 0
    salt: str = ""
    n: int = 1
    scores: int | None = None
    ids: range = field(init=False)
    place: tuple[int, int] = field(init=False)
    num_prompt: int = field(init=False)
    num_sequences: int = field(init=False)  # n until it forks, then 1
    num_computed: int = field(
        default=0, init=False
    )  # its first tokens, whose keys and values are in its pages
    num_ever_run: int = field(default=0, init=False)
    num_found: int = field(default=0, init=False)
    pages: list[int] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        self.ids = range(self.id, self.id + self.n)
        self.place = (self.priority, self.id)
        self.num_prompt = len(self.tokens)
        self.num_sequences = self.n

    @property
    def num_pending(self) -> int:
        """Tokens that are to be run before the next is picked."""
        return len(self.tokens) - self.num_computed

    @property
    def scoring(self) -> bool:
        return self.scores is not None and len(self.tokens) == self.num_prompt

    @property
    def num_tokens_left(self) -> int:
        """Tokens that are still to be run at most."""
        generated = len(self.tokens) - self.num_prompt
        return self.num_pending + self.num_sequences * (self.max_tokens - generated - 1)
