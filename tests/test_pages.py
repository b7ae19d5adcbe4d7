"""Pages of the KV cache: whatever is begun, written, forked and given back, a table reads its own
sequence alone."""

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from examples import examples
from shardwise.serve.engine.pages import NO_PAGE, PageCounts, Pages, first_key

TOKENS = (0, 1, 2**40)
SALTS = ("a", "b")
Slot = tuple[str, tuple[int, ...]]
"""What a place in a page holds: the salt, and the tokens up to this place, on all of which keys and
values depend."""


@dataclass(eq=False)
class Written:
    """A sequence and its table."""

    tokens: list[int]
    salt: str
    table: list[int]
    num_computed: int


class PagesAndMemory(RuleBasedStateMachine):
    """Pages beside a memory of what was written where."""

    @initialize(
        num_pages=st.integers(2, 12),
        page_tokens=st.sampled_from([2, 3, 1]),
        window=st.sampled_from([None, None, 1, 2, 4, 5]),
    )
    def start(self, num_pages: int, page_tokens: int, window: int | None) -> None:
        self.pages = Pages(num_pages, page_tokens, window)
        self.memory: list[list[Slot | None]] = [[None] * page_tokens for _ in range(num_pages)]
        self.sequences: list[Written] = []

    def first_kept(self, num_tokens: int) -> int:
        """The first position of the pages that hold what the next token reads, and one full page
        at least."""
        size = self.pages.page_tokens
        if self.pages.window is None:
            return 0
        return max(0, num_tokens - max(size, self.pages.window - 1)) // size * size

    def findable(self) -> set[Slot]:
        """The last slot of each findable page says what can be found."""
        ends = [self.memory[page][-1] for page in self.pages.index.values()]
        return {end for end in ends if end is not None}

    @rule(
        prompt=st.lists(st.sampled_from(TOKENS), min_size=1, max_size=9),
        salt=st.sampled_from(SALTS),
    )
    def begin(self, prompt: list[int], salt: str) -> None:
        size = self.pages.page_tokens
        findable = self.findable()
        expected = 0
        for stop in range(size, len(prompt), size):
            ends = range(self.first_kept(stop) + size, stop + 1, size)
            if all((salt, tuple(prompt[:end])) in findable for end in ends):
                expected = stop
        table = self.pages.begin(prompt, salt)
        assert len(table) * size == expected < len(prompt)
        self.sequences.append(Written(prompt, salt, table, expected))

    @precondition(lambda self: self.sequences)
    @rule(data=st.data(), more=st.lists(st.sampled_from(TOKENS), min_size=1, max_size=4))
    def write(self, data: st.DataObject, more: list[int]) -> None:
        one = data.draw(st.sampled_from(self.sequences))
        if one.num_computed == len(one.tokens):
            one.tokens += more
        start = one.num_computed
        room = self.pages.space(one.table, one.num_computed)
        stop = min(len(one.tokens), start + room, start + data.draw(st.integers(1, 8)))
        if start == stop:
            assert self.pages.num_available == 0
            return
        available = self.pages.num_available
        before = list(one.table)
        for source, target in self.pages.grow(one.table, start, stop):
            assert source in before and target not in before
            self.memory[target] = list(self.memory[source])
        assert available - self.pages.num_available == len(set(one.table) - set(before))
        for position in range(start, stop):
            page = one.table[position // self.pages.page_tokens]
            assert self.pages.ref_counts[page] == 1 and page not in self.pages.index.values()
            self.memory[page][position % self.pages.page_tokens] = (
                one.salt,
                tuple(one.tokens[: position + 1]),
            )
        self.pages.commit(one.table, one.tokens, start, stop, one.salt)
        one.num_computed = stop

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        one = data.draw(st.sampled_from(self.sequences))
        available = self.pages.num_available
        self.sequences.append(
            Written(list(one.tokens), one.salt, self.pages.fork(one.table), one.num_computed)
        )
        assert self.pages.num_available == available

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        one = data.draw(st.sampled_from(self.sequences))
        self.sequences.remove(one)
        self.pages.release(one.table)
        assert not one.table

    @invariant()
    def everybody_reads_their_own(self) -> None:
        size = self.pages.page_tokens
        for one in self.sequences:
            for position in range(self.first_kept(one.num_computed), one.num_computed):
                slot = self.memory[one.table[position // size]][position % size]
                assert slot == (one.salt, tuple(one.tokens[: position + 1]))

    @invariant()
    def books_agree(self) -> None:
        self.pages.audit(one.table for one in self.sequences)
        counts = self.pages.counts()
        assert counts.free + counts.used + counts.cached == self.pages.num_pages
        held = {page for one in self.sequences for page in one.table if page != NO_PAGE}
        assert counts.used == len(held)
        findable = self.pages.index.values()
        size = self.pages.page_tokens
        for one in self.sequences:
            first = self.first_kept(one.num_computed) // size
            assert one.table[:first] == [NO_PAGE] * first and NO_PAGE not in one.table[first:]
            assert all(page in findable for page in one.table[first : one.num_computed // size])

    def teardown(self) -> None:
        for one in self.sequences:
            self.pages.release(one.table)
        self.pages.audit([])
        assert self.pages.counts().used == 0


PagesAndMemory.TestCase.settings = settings(
    max_examples=examples(100), stateful_step_count=40, deadline=None
)
TestPagesAndMemory = PagesAndMemory.TestCase


def computed(pages: Pages, tokens: Sequence[int], salt: str = "") -> list[int]:
    """The table of a sequence whose tokens have all been computed."""
    table = pages.begin(tokens, salt)
    start = len(table) * pages.page_tokens
    assert pages.grow(table, start, len(tokens)) == ()
    pages.commit(table, tokens, start, len(tokens), salt)
    return table


def test_a_prompt_finds_what_was_computed_but_never_all_of_itself() -> None:
    pages = Pages(8, 4)
    table = computed(pages, range(10))
    assert [pages.begin(range(stop), "") for stop in (4, 5, 8, 9, 10, 12)] == [
        [],
        table[:1],
        table[:1],
        table[:2],
        table[:2],
        table[:2],
    ]


def test_what_is_not_computed_yet_is_not_found() -> None:
    pages = Pages(8, 4)
    table = pages.begin(range(9), "")
    pages.grow(table, 0, 9)
    assert pages.begin(range(9), "") == []
    pages.commit(table, range(9), 0, 7, "")
    assert pages.begin(range(9), "") == table[:1]
    pages.commit(table, range(9), 7, 9, "")
    assert pages.begin(range(9), "") == table[:2]


def test_another_salt_or_another_beginning_finds_nothing() -> None:
    pages = Pages(8, 2)
    computed(pages, [1, 2, 3, 4], "one")
    assert pages.begin([1, 2, 3, 4, 5], "other") == []
    assert pages.begin([3, 4, 5], "one") == []
    assert pages.begin([9, 9, 3, 4, 5], "one") == []


def test_the_last_holder_of_a_shared_page_writes_it_without_a_copy() -> None:
    pages = Pages(8, 4)
    first = computed(pages, range(6))
    second = pages.fork(first)
    third = pages.fork(first)
    shared = first[1]
    assert pages.counts() == PageCounts(free=6, used=2, cached=0)
    assert pages.grow(first, 6, 7) == ((shared, first[1]),)
    assert pages.grow(second, 6, 7) == ((shared, second[1]),)
    assert pages.grow(third, 6, 7) == () and third[1] == shared
    assert len({first[1], second[1], third[1]}) == 3 and first[0] == second[0] == third[0]
    pages.audit([first, second, third])


def test_no_copy_where_the_next_token_starts_a_page() -> None:
    pages = Pages(8, 4)
    first = computed(pages, range(8))
    second = pages.fork(first)
    assert pages.grow(first, 8, 9) == pages.grow(second, 8, 9) == ()
    assert first[:2] == second[:2] and first[2] != second[2]


def test_of_two_equal_pages_computed_side_by_side_the_first_serves_both() -> None:
    pages = Pages(8, 4)
    tables: list[list[int]] = [pages.begin(range(9), ""), pages.begin(range(9), "")]
    for table in tables:
        pages.grow(table, 0, 9)
    assert pages.counts().used == 6
    for table in tables:
        pages.commit(table, range(9), 0, 9, "")
    assert tables[0][:2] == tables[1][:2] and tables[0][2] != tables[1][2]
    assert pages.counts() == PageCounts(free=4, used=4, cached=0)
    pages.audit(tables)


def test_least_recently_used_goes_first_and_each_chain_from_its_end() -> None:
    pages = Pages(6, 1)
    old = computed(pages, [1, 2, 3])
    new = computed(pages, [7, 8, 9])
    first = list(old)
    last = list(new)
    pages.release(old)
    pages.release(new)
    assert pages.counts() == PageCounts(free=0, used=0, cached=6)
    assert (
        pages.begin([1, 0], "") == first[:1]
    )  # used again: the newest of all once it is given back
    pages.release([first[0]])
    assert [pages.allocate() for _ in range(6)] == [first[2], first[1], *reversed(last), first[0]]
    assert pages.counts() == PageCounts(free=0, used=6, cached=0) and not pages.index


def test_cached_pages_are_taken_only_when_none_is_free() -> None:
    pages = Pages(4, 1)
    table = computed(pages, [1, 2])
    pages.release(table)
    assert pages.counts() == PageCounts(free=2, used=0, cached=2)
    computed(pages, [5, 6])
    assert len(pages.begin([1, 2, 3], "")) == 2


def test_room_is_what_grow_can_do() -> None:
    pages = Pages(3, 4)
    first = computed(pages, range(6))
    assert pages.space(first, 6) == 6
    second = pages.fork(first)
    assert pages.space(first, 6) == 2  # the free page is for the copy
    pages.grow(first, 6, 8)
    assert pages.space(first, 8) == 0 and pages.space(second, 6) == 2


@pytest.mark.parametrize(("num_pages", "page_tokens"), [(0, 16), (4, 0)])
def test_pages_that_hold_nothing_are_refused(num_pages: int, page_tokens: int) -> None:
    with pytest.raises(ValueError, match=f"{num_pages} pages of {page_tokens} tokens hold nothing"):
        Pages(num_pages, page_tokens)


@pytest.mark.parametrize("fault", ["holder", "lost", "key"])
def test_audit_tells_what_does_not_agree(fault: str) -> None:
    pages = Pages(8, 2)
    table = computed(pages, [1, 2, 3, 4, 5])
    pages.release(computed(pages, [7, 8, 9, 10]))
    pages.audit([table])
    if fault == "holder":
        pages.ref_counts[table[0]] += 1
    elif fault == "lost":
        pages.free.pop()
    else:
        pages.keys[pages.free[0]] = first_key("")
    with pytest.raises(AssertionError):
        pages.audit([table])


def test_a_sliding_window_keeps_what_the_next_token_reads() -> None:
    """A window of 7 tokens in pages of 2: after 12 tokens the next reads 6 to 12; a prompt needs 5
    pages at a time, computed two tokens at a time."""
    pages = Pages(8, 2, window=7)
    table = computed(pages, range(12))
    assert table[:3] == [NO_PAGE] * 3 and NO_PAGE not in table[3:]
    assert pages.counts() == PageCounts(free=2, used=3, cached=3)
    assert [pages.num_needed(tokens) for tokens in (1, 8, 10, 12, 1000)] == [1, 4, 5, 5, 5]
    pages.audit([table])


def test_a_prefix_is_found_without_the_pages_behind_its_window() -> None:
    pages = Pages(8, 2, window=4)
    table = computed(pages, range(12))
    pages.release(table)
    for _ in range(4):  # two that are free, then the third and the fourth of the prefix
        pages.allocate()
    assert pages.begin(range(13), "") == [*[NO_PAGE] * 4, *pages.begin(range(13), "")[4:]]
    assert len(pages.begin(range(13), "")) == 6
    assert len(pages.begin(range(9), "")) == 2


@pytest.mark.parametrize("window", [1, 2, 3, 16, 17, 33])
@pytest.mark.parametrize("page_tokens", [1, 2, 16])
def test_pages_needed_at_a_time_by_trying(page_tokens: int, window: int) -> None:
    """Two tokens at a time, from any number of tokens on."""
    pages = Pages(1000, page_tokens, window)
    worst = 0
    for start in range(1, 70):
        table = pages.begin([], "")
        position = 0
        for stop in [start, *range(start + 2, 101, 2)]:
            for part in range(position, stop, 2):
                end = min(part + 2, stop)
                pages.grow(table, part, end)
                worst = max(worst, len(table) - table.count(NO_PAGE))
                pages.commit(table, range(stop), part, end, str(start))
            position = stop
        pages.release(table)
    needed = pages.num_needed(101)
    assert worst <= needed <= worst + (page_tokens == 1)
