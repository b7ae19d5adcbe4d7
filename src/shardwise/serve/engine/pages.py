"""The KV cache in pages, handed out on demand, so that memory holds tokens and not reservations:
PagedAttention (Kwon et al. 2023). Only the bookkeeping is here: pages are integers, and keys and
values are where attention has them.

A page has room for the keys and values of `page_tokens` tokens that follow each other in one
sequence; the list of a sequence's pages, in order, is its block table. Each page is in one of three
states:

    used    in at least one table
    cached  in no table, but findable: the next prompt that begins as its sequence did takes it as it is
    free    neither

A full page becomes findable when its tokens have been computed. What is looked up is (the page
before it, its tokens), so a page is found only through the very pages that its keys and values
depend on; the first page of a sequence is looked up under the salt, a text that keeps the caches of
those apart who must not learn of each other's prompts. The index is a dict, which compares what it
looks up whenever hashes agree: a collision serves nobody another's prefix.

Two rules follow, and `audit` holds them:

- The full pages of a table are always findable: one that turns out to be the same as a findable one gives way to it.
- So who holds a page holds the one before it, and a table is given back from its end: among cached pages the least
  recently used is never one that another still hangs on. Evicting that one strands no other.

Everything is O(1) a page, and deterministic. Imports no torch.
"""

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

Key = tuple[int | str, tuple[int, ...]]
"""What a findable page is looked up by: the page before it, or the salt if it is the first; and its
tokens."""


@dataclass(frozen=True)
class Counts:
    """How many pages are in which state; together they are all there are."""

    free: int
    used: int
    cached: int


class Pages:
    """Which page belongs to whom. A table is a list of pages that its sequence keeps and only these
    methods change."""

    def __init__(self, num_pages: int, page_tokens: int = 16) -> None:
        if num_pages < 1 or page_tokens < 1:
            raise ValueError(
                f"{num_pages} pages of {page_tokens} tokens hold nothing; 1 of 1 is the least"
            )
        self.num_pages = num_pages
        self.page_tokens = page_tokens
        self.num_holders = [0] * num_pages
        self.free = list(reversed(range(num_pages)))
        self.cached: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self.index: dict[Key, int] = {}
        self.keys: list[Key | None] = [
            None
        ] * num_pages  # of each page, what it is looked up by, if it is findable

    @property
    def num_available(self) -> int:
        """How many pages can be handed out."""
        return len(self.free) + len(self.cached)

    def counts(self) -> Counts:
        return Counts(len(self.free), self.num_pages - self.num_available, len(self.cached))

    def num_needed(self, num_tokens: int) -> int:
        """How many pages that many tokens fill, the last one perhaps in part."""
        return -(-num_tokens // self.page_tokens)

    def begin(self, tokens: Sequence[int], salt: str) -> list[int]:
        """The table of a new sequence: the longest findable prefix of `tokens`, but never all of
        them, since at least the last must be run to tell what comes next."""
        table: list[int] = []
        size = self.page_tokens
        before: int | str = salt
        for start in range(0, len(tokens) - size, size):
            page = self.index.get((before, tuple(tokens[start : start + size])))
            if page is None:
                break
            self.hold(page)
            table.append(page)
            before = page
        return table

    def room(self, table: list[int], start: int) -> int:
        """How many tokens from position `start` on have a place in the table's pages, or in such as
        can be taken."""
        available = self.num_available - self.shared(table, start)  # a shared page is copied first
        return max(0, (len(table) + available) * self.page_tokens - start)

    def grow(self, table: list[int], start: int, stop: int) -> tuple[tuple[int, int], ...]:
        """Make the table ready for tokens to be written at positions start to stop - 1, for which
        there must be room.

        If others share the page that `start` is in, the table gets one of its own: copy-on-write.
        Returns the copies (from page, to page) to be made before anything is written.
        """
        assert stop - start <= self.room(table, start)
        copies: tuple[tuple[int, int], ...] = ()
        if self.shared(table, start):
            number = start // self.page_tokens
            shared = table[number]
            own = self.take()
            self.drop(shared)
            table[number] = own
            copies = ((shared, own),)
        while len(table) * self.page_tokens < stop:
            table.append(self.take())
        return copies

    def fork(self, table: list[int]) -> list[int]:
        """The table of another sequence that has the same tokens so far and shares all their
        pages."""
        for page in table:
            self.hold(page)
        return list(table)

    def commit(
        self, table: list[int], tokens: Sequence[int], start: int, stop: int, salt: str
    ) -> None:
        """The tokens at positions start to stop - 1 have been computed: pages that are full now
        become findable.

        `tokens` are those of the whole sequence. Where two sequences have computed the same page
        side by side, the one that was first is kept and both share it.
        """
        size = self.page_tokens
        for number in range(start // size, stop // size):
            before: int | str = table[number - 1] if number else salt
            key = (before, tuple(tokens[number * size : (number + 1) * size]))
            page = table[number]
            first = self.index.setdefault(key, page)
            if first == page:
                self.keys[page] = key
            else:
                self.hold(first)
                table[number] = first
                self.drop(page)

    def release(self, table: list[int]) -> None:
        """The sequence has ended or gives way: its table is empty now. What is findable stays so
        until evicted."""
        while table:
            self.drop(table.pop())

    def shared(self, table: list[int], position: int) -> bool:
        """Whether others hold the page that `position` is in."""
        number = position // self.page_tokens
        return number < len(table) and self.num_holders[table[number]] > 1

    def take(self) -> int:
        """A page for one holder: a free one, or else the cached one that has not been used for
        longest."""
        if self.free:
            page = self.free.pop()
        else:
            page, _ = self.cached.popitem(last=False)
            key = self.keys[page]
            assert key is not None
            del self.index[key]
            self.keys[page] = None
        self.num_holders[page] = 1
        return page

    def hold(self, page: int) -> None:
        """One more holder of a page that is used or cached."""
        if not self.num_holders[page]:
            del self.cached[page]
        self.num_holders[page] += 1

    def drop(self, page: int) -> None:
        """One holder less; after the last, a findable page is cached and another is free."""
        self.num_holders[page] -= 1
        if not self.num_holders[page]:
            if self.keys[page] is None:
                self.free.append(page)
            else:
                self.cached[page] = None

    def audit(self, tables: Iterable[Sequence[int]]) -> None:
        """Assert that all of this agrees with itself and with `tables`, which must be all there
        are."""
        holders = Counter(page for table in tables for page in table)
        assert self.num_holders == [holders[page] for page in range(self.num_pages)]
        assert sorted([*self.free, *self.cached, *holders]) == list(range(self.num_pages))
        assert all(self.keys[page] is None for page in self.free)
        assert all(self.keys[page] is not None for page in self.cached)
        findable = {page: key for page, key in enumerate(self.keys) if key is not None}
        assert self.index == {key: page for page, key in findable.items()}
        age = {page: number for number, page in enumerate(self.cached)}
        for page, (before, tokens) in findable.items():
            assert len(tokens) == self.page_tokens
            if isinstance(before, int):
                assert before in findable
                assert holders[before] >= holders[page]
                assert before not in age or age[before] > age[page]
