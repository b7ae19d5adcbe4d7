"""The KV cache in pages that are allocated on demand, so that memory holds tokens and not
reservations: PagedAttention (Kwon et al. 2023). Only the bookkeeping is here: pages are integers,
and the tensors of keys and values belong to the runner.

A page has space for the keys and values of `page_tokens` consecutive tokens of one sequence; the
list of a sequence's pages, in order, is its page table. Each page is in one of three states:

    used    in at least one page table
    cached  in no table, but indexed: the next prompt with the same prefix reuses it
    free    neither

A full page is indexed once its tokens have been computed. Its key is a 256-bit digest of all that
its keys and values depend on: the key of the page before it, and its tokens. Before the first page
of a sequence stands the digest of its salt, a text that separates the prefix caches of clients who
must not learn of each other's prompts.

The full pages of a table are always indexed: one that equals an indexed page is replaced by it.
Tables are released from their end, so of one prefix the last pages are evicted first.

With a sliding window, pages that no later token reads are dropped from the table, which has
`NO_PAGE` in their place, and a prefix is found if the pages within its window are.

Everything is O(1) per page, and deterministic. Imports no torch.
"""

from array import array
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b

from shardwise.kv_pages import PAGE_TOKENS, first_kept_page, pages_per_sequence

Key = bytes
NO_PAGE = -1
"""Stands in a page table for a page behind the sliding window."""


def first_key(salt: str) -> Key:
    """Return the key that stands before the first page of a sequence."""
    return blake2b(salt.encode(errors="surrogatepass"), digest_size=32).digest()


def page_key(before: Key, tokens: Sequence[int]) -> Key:
    """Return the key of a full page from the key of the page before it."""
    return blake2b(before + array("q", tokens).tobytes(), digest_size=32).digest()


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

    def __init__(
        self, num_pages: int, page_tokens: int = PAGE_TOKENS, window: int | None = None
    ) -> None:
        """`window` is the sliding window of all layers; None if any layer attends to all tokens."""
        if num_pages < 1 or page_tokens < 1:
            raise ValueError(
                f"{num_pages} pages of {page_tokens} tokens hold nothing; 1 page of 1 token works"
            )
        self.num_pages = num_pages
        self.page_tokens = page_tokens
        self.window = window
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
        """Return the number of pages that `num_tokens` tokens need at a time."""
        return pages_per_sequence(num_tokens, self.page_tokens, self.window)

    def holds(self, num_tokens: int) -> bool:
        """Return True if all pages together can serve a sequence of `num_tokens` tokens."""
        return self.num_needed(num_tokens) <= self.num_pages

    def begin(self, tokens: Sequence[int], salt: str) -> list[int]:
        """Return the page table of a new sequence: the longest cached prefix of `tokens`, but never
        all of them, since at least the last must be computed to sample the next token.
        """
        found = self.find_prefix(tokens, salt)
        first = first_kept_page(len(found) * self.page_tokens, self.page_tokens, self.window)
        for page in found[first:]:
            self.hold(page)
        return [NO_PAGE] * first + found[first:]

    def find_prefix(self, tokens: Sequence[int], salt: str) -> list[int]:
        """Return the indexed pages of the longest prefix that can be continued, with `NO_PAGE` for
        any that is not indexed, which can only be one behind the window."""
        size = self.page_tokens
        key = first_key(salt)
        found: list[int] = []
        longest = 0
        first = 0  # of the indexed pages up to here, without a gap
        for start in range(0, len(tokens) - size, size):
            key = page_key(key, tokens[start : start + size])
            found.append(self.index.get(key, NO_PAGE))
            if found[-1] == NO_PAGE:
                if self.window is None:
                    break
                first = len(found)
            elif first <= first_kept_page(start + size, size, self.window):
                longest = len(found)
        return found[:longest]

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
            if page != NO_PAGE:
                self.hold(page)
        return list(table)

    def commit(
        self, table: list[int], tokens: Sequence[int], start: int, stop: int, salt: str
    ) -> None:
        """Record that the tokens at positions start to stop - 1 have been computed: index the pages
        that are full now, and drop those that are behind the window.

        `tokens` are all tokens of the sequence. Where two sequences have computed the same page
        concurrently, both share the one that was indexed first.
        """
        size = self.page_tokens
        for number in range(start // size, stop // size):
            before = self.keys[table[number - 1]] if number else first_key(salt)
            assert before is not None
            key = page_key(before, tokens[number * size : (number + 1) * size])
            page = table[number]
            indexed = self.index.setdefault(key, page)
            if indexed == page:
                self.keys[page] = key
            else:
                self.hold(indexed)
                table[number] = indexed
                self.drop(page)
        self.drop_behind(table, first_kept_page(stop, size, self.window))

    def drop_behind(self, table: list[int], first: int) -> None:
        """Drop the pages of a table before number `first`."""
        number = first - 1
        while number >= 0 and table[number] != NO_PAGE:
            self.drop(table[number])
            table[number] = NO_PAGE
            number -= 1

    def release(self, table: list[int]) -> None:
        """Empty the table of a sequence that has ended or is preempted. Its indexed pages stay
        cached until evicted.
        """
        while table:
            page = table.pop()
            if page != NO_PAGE:
                self.drop(page)

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
        holders = Counter(page for table in tables for page in table if page != NO_PAGE)
        assert self.ref_counts == [holders[page] for page in range(self.num_pages)]
        assert sorted([*self.free, *self.cached, *holders]) == list(range(self.num_pages))
        assert all(self.keys[page] is None for page in self.free)
        assert all(self.keys[page] is not None for page in self.cached)
        assert self.index == {key: page for page, key in enumerate(self.keys) if key is not None}
