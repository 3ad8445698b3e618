"""Attention over keys and values in pages, in plain NumPy (Kwon et al., 2023).

Keys and values of many sequences share a pool of pages [pages, page size, G, w]. The t-th token of
a sequence stands in its page ``table[t // page size]``, at ``t % page size``; in the pool as a list
of tokens that is its slot, ``table[t // page size] * page size + t % page size``.

Sequence s has ``lengths[s]`` tokens stored. Its queries are its newest tokens, so that each sees
the keys up to its own position, as :mod:`twell_numba.kernels.attention` has it.
"""

import numpy as np

from twell_numba.kernels.attention.reference import causal_attention


def store_tokens(pages: np.ndarray, rows: np.ndarray, slots: np.ndarray) -> None:
    """Write rows (M, G, w) to slots (M,) of pages (P, page size, G, w), which change in place."""
    for row, slot in zip(rows, slots, strict=True):
        pages[slot // pages.shape[1], slot % pages.shape[1]] = row


def decode_attention(
    q: np.ndarray, keys: np.ndarray, values: np.ndarray, tables: np.ndarray, lengths: np.ndarray
) -> np.ndarray:
    """Return y (N, H, w) for q (N, H, w): one query a sequence, its newest token."""
    return prefill_attention(q, keys, values, tables, np.arange(len(q) + 1), lengths)


def prefill_attention(
    q: np.ndarray,
    keys: np.ndarray,
    values: np.ndarray,
    tables: np.ndarray,
    starts: np.ndarray,
    lengths: np.ndarray,
) -> np.ndarray:
    """Return y (M, H, w) for q (M, H, w), where rows starts[s] to starts[s + 1] are sequence s's.

    keys and values are (P, page size, G, w), tables (N, most pages), padded with anything.
    """
    y = np.empty_like(q)
    for s, (table, length) in enumerate(zip(tables, lengths, strict=True)):
        own = slice(starts[s], starts[s + 1])
        used = table[: -(-length // keys.shape[1])]
        k, v = (pages[used].reshape(-1, *pages.shape[2:])[:length] for pages in (keys, values))
        if length:
            y[own] = causal_attention(q[own][None], k[None], v[None])[0][0]
    return y
