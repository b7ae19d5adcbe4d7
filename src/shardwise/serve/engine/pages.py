"""The KV cache in pages that are allocated on demand, so that memory holds tokens and not
reservations: PagedAttention (Kwon et al. 2023). Only the bookkeeping is here: pages are integers,
and the tensors of keys and values belong to the runner.

A page has space for the keys and values of `page_tokens` consecutive tokens of one sequence; the
list of a sequence's pages, in order, is its page table. Each page is in one of three states:

    used    in at least one page table
    cached  in no table, but indexed: the next prompt with the same prefix reuses it
    free    neither

A full page is indexed once its tokens have been computed. The key is (page before it, its tokens),
so a page is found only through the pages that its keys and values depend on. The key of the first
page of a sequence has the salt instead, a text that separates the prefix caches of clients who must
not learn of each other's prompts. The index is a dict, which compares keys when hashes agree: a
hash collision never returns another prefix.

Two invariants follow, which `audit` checks:

- The full pages of a table are always indexed: one that equals an indexed page is replaced by it.
- So a table that holds a page holds the one before it, and tables are released from their end: the
  least recently used cached page never has a cached successor. Evicting it strands no other.

Everything is O(1) per page, and deterministic. Imports no torch.
"""

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

Key = tuple[int | str, tuple[int, ...]]
"""Key of an indexed page: the page before it, or the salt if it is the first, and its tokens."""


@dataclass(frozen=True)
class PageCounts:
    """Number of pages in each state."""

    free: int
    used: int
    cached: int


class Pages:
    """Pages of the KV cache, reference-counted.

    A page table is a list that its sequence owns and that only these methods change.
    """

    def __init__(self, num_pages: int, page_tokens: int = 16) -> None:
        if num_pages < 1 or page_tokens < 1:
            raise ValueError(
                f"{num_pages} pages of {page_tokens} tokens hold nothing; 1 page of 1 token works"
            )
        self.num_pages = num_pages
        self.page_tokens = page_tokens
        self.ref_counts = [0] * num_pages
        self.free = list(reversed(range(num_pages)))
        self.cached: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self.index: dict[Key, int] = {}
        self.keys: list[Key | None] = [None] * num_pages  # None: not indexed

    @property
    def num_available(self) -> int:
        """Pages that can be allocated: free ones, and cached ones, which are then evicted."""
        return len(self.free) + len(self.cached)

    def counts(self) -> PageCounts:
        return PageCounts(len(self.free), self.num_pages - self.num_available, len(self.cached))

    def num_needed(self, num_tokens: int) -> int:
        """Return the number of pages that `num_tokens` tokens need."""
        return -(-num_tokens // self.page_tokens)

    def begin(self, tokens: Sequence[int], salt: str) -> list[int]:
        """Return the page table of a new sequence: the longest cached prefix of `tokens`, but never
        all of them, since at least the last must be computed to sample the next token.
        """
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

    def space(self, table: list[int], start: int) -> int:
        """Return how many tokens from position `start` on fit into the table's pages and those that
        can be allocated.
        """
        available = self.num_available - self.shared(table, start)  # a shared page is copied first
        return max(0, (len(table) + available) * self.page_tokens - start)

    def grow(self, table: list[int], start: int, stop: int) -> tuple[tuple[int, int], ...]:
        """Make the table ready for tokens at positions start to stop - 1, which must have space.

        If other tables share the page of `start`, this one gets a copy: copy-on-write. Returns the
        copies (source page, target page) to make before anything is written.
        """
        assert stop - start <= self.space(table, start)
        copies: tuple[tuple[int, int], ...] = ()
        if self.shared(table, start):
            number = start // self.page_tokens
            shared = table[number]
            copy = self.allocate()
            self.drop(shared)
            table[number] = copy
            copies = ((shared, copy),)
        while len(table) * self.page_tokens < stop:
            table.append(self.allocate())
        return copies

    def fork(self, table: list[int]) -> list[int]:
        """Return the table of another sequence with the same tokens so far, which shares all
        pages.
        """
        for page in table:
            self.hold(page)
        return list(table)

    def commit(
        self, table: list[int], tokens: Sequence[int], start: int, stop: int, salt: str
    ) -> None:
        """Record that the tokens at positions start to stop - 1 have been computed: index the pages
        that are full now.

        `tokens` are all tokens of the sequence. Where two sequences have computed the same page
        concurrently, both share the one that was indexed first.
        """
        size = self.page_tokens
        for number in range(start // size, stop // size):
            before: int | str = table[number - 1] if number else salt
            key = (before, tuple(tokens[number * size : (number + 1) * size]))
            page = table[number]
            indexed = self.index.setdefault(key, page)
            if indexed == page:
                self.keys[page] = key
            else:
                self.hold(indexed)
                table[number] = indexed
                self.drop(page)

    def release(self, table: list[int]) -> None:
        """Empty the table of a sequence that has ended or is preempted. Its indexed pages stay
        cached until evicted.
        """
        while table:
            self.drop(table.pop())

    def shared(self, table: list[int], position: int) -> bool:
        """Return True if other tables share the page of `position`."""
        number = position // self.page_tokens
        return number < len(table) and self.ref_counts[table[number]] > 1

    def allocate(self) -> int:
        """Return a page with one reference: a free one, or else the least recently used cached
        one.
        """
        if self.free:
            page = self.free.pop()
        else:
            page, _ = self.cached.popitem(last=False)
            key = self.keys[page]
            assert key is not None
            del self.index[key]
            self.keys[page] = None
        self.ref_counts[page] = 1
        return page

    def hold(self, page: int) -> None:
        """Add a reference to a page that is used or cached."""
        if not self.ref_counts[page]:
            del self.cached[page]
        self.ref_counts[page] += 1

    def drop(self, page: int) -> None:
        """Remove a reference; after the last, an indexed page is cached and any other is free."""
        self.ref_counts[page] -= 1
        if not self.ref_counts[page]:
            if self.keys[page] is None:
                self.free.append(page)
            else:
                self.cached[page] = None

    def audit(self, tables: Iterable[Sequence[int]]) -> None:
        """Assert that the bookkeeping is consistent with itself and with `tables`, which must be
        all page tables.
        """
        holders = Counter(page for table in tables for page in table)
        assert self.ref_counts == [holders[page] for page in range(self.num_pages)]
        assert sorted([*self.free, *self.cached, *holders]) == list(range(self.num_pages))
        assert all(self.keys[page] is None for page in self.free)
        assert all(self.keys[page] is not None for page in self.cached)
        indexed = {page: key for page, key in enumerate(self.keys) if key is not None}
        assert self.index == {key: page for page, key in indexed.items()}
        age = {page: number for number, page in enumerate(self.cached)}
        for page, (before, tokens) in indexed.items():
            assert len(tokens) == self.page_tokens
            if isinstance(before, int):
                assert before in indexed
                assert holders[before] >= holders[page]
                assert before not in age or age[before] > age[page]
