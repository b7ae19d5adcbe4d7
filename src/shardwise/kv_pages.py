"""Counts the pages of the KV cache that a sequence holds, for the planner and for the server.
Imports no torch.

A page holds the keys and values of `page_tokens` consecutive tokens, in all layers. If all layers
have a sliding window, a token behind it is never read again, so a sequence keeps only the pages
that its next tokens can read: a rolling KV cache (Mistral 7B, Jiang et al. 2023). A model in which
any layer attends to all tokens keeps all pages.
"""

PAGE_TOKENS = 16
"""Tokens of a page by default, as in vLLM."""


def first_kept_page(num_tokens: int, page_tokens: int, window: int | None) -> int:
    """Return the number of the first page that is kept once `num_tokens` tokens have been computed.

    The next token reads `window` tokens, itself included. At least one full page is kept.
    """
    if window is None:
        return 0
    return max(0, num_tokens - max(window - 1, page_tokens)) // page_tokens


def pages_per_sequence(num_tokens: int, page_tokens: int, window: int | None) -> int:
    """Return the most pages that a sequence of `num_tokens` tokens needs at a time, if with a
    sliding window it is computed two tokens at a time."""
    all_pages = -(-num_tokens // page_tokens)
    if window is None:
        return all_pages
    return min(all_pages, max(window - 1, page_tokens) // page_tokens + 2)


def cached_tokens(num_tokens: int, window: int | None) -> int:
    """Return the tokens in the KV cache of a sequence of `num_tokens` tokens."""
    return min(num_tokens, pages_per_sequence(num_tokens, PAGE_TOKENS, window) * PAGE_TOKENS)
