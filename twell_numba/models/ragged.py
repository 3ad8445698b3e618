"""One pass through a model for tokens of several sequences, each at its own position.

The tokens stand one behind the other, without padding: all but attention takes them as they are,
and attention finds each sequence's keys and values in its pages.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from twell_numba.device.arrays import Array
from twell_numba.kernels.embedding import embedding
from twell_numba.kernels.paged_attention import decode_attention, prefill_attention, store_tokens
from twell_numba.models.paged_cache import PagedKVCache
from twell_numba.models.transformer import Transformer


class Chunk(NamedTuple):
    """Tokens of a prompt that follow each other.

    Attributes
    ----------
    tokens : ndarray of int64, shape (S,)
        At least one.
    start : int
        Position of the first, and how many tokens of the sequence are in the cache already.
    table : ndarray of int64
        The sequence's pages, with room for these tokens.
    """

    tokens: np.ndarray
    start: int
    table: np.ndarray


def prefill_logits(
    model: Transformer, cache: PagedKVCache, chunks: Sequence[Chunk], wanted: Sequence[int]
) -> Array:
    """Take chunks of several prompts, and return logits of what follows some of them.

    Parameters
    ----------
    model : Transformer
    cache : PagedKVCache
        Changed in place: it then holds these tokens too.
    chunks : sequence of Chunk
        Of different sequences; at least one.
    wanted : sequence of int
        The chunks of whose last token the successor is wanted.

    Returns
    -------
    array, shape (len(wanted), V)

    Raises
    ------
    ValueError
        If a token is not in [0, V), or a table has no room for its sequence.
    """
    ends = np.cumsum([len(chunk.tokens) for chunk in chunks])
    return row_logits(model, cache, chunks, ends[np.asarray(wanted, np.int64)] - 1)


def row_logits(
    model: Transformer, cache: PagedKVCache, chunks: Sequence[Chunk], rows: np.ndarray
) -> Array:
    """As :func:`prefill_logits`, for any of the tokens.

    Parameters
    ----------
    rows : ndarray of int64, shape (R,)
        Of which tokens the successor is wanted, counted through all chunks.

    Returns
    -------
    array, shape (R, V)
    """
    counts = np.array([len(chunk.tokens) for chunk in chunks])
    before = np.array([chunk.start for chunk in chunks])
    starts = np.concatenate([[0], np.cumsum(counts)])
    sequence_of = np.repeat(np.arange(len(chunks)), counts)
    positions = np.arange(starts[-1]) + (before - starts[:-1])[sequence_of]
    tables = stacked([chunk.table for chunk in chunks])
    slots = _slots(cache, tables, sequence_of, positions)
    places = _Places(slots, tables, before + counts, starts)
    tokens = np.concatenate([chunk.tokens for chunk in chunks])
    return _logits(model, cache, tokens, positions, places, rows)


def decode_logits(
    model: Transformer,
    cache: PagedKVCache,
    tokens: np.ndarray,
    positions: np.ndarray,
    tables: np.ndarray,
) -> Array:
    """Take the next token of each of N sequences, and return the logits of its successor.

    Parameters
    ----------
    model : Transformer
    cache : PagedKVCache
        Changed in place: it then holds these tokens too.
    tokens, positions : ndarray of int64, shape (N,)
    tables : ndarray of int64, shape (N, most pages)
        See :func:`stacked`.

    Returns
    -------
    array, shape (N, V)

    Raises
    ------
    ValueError
        As :func:`prefill_logits`.
    """
    slots = _slots(cache, tables, np.arange(len(tokens)), positions)
    places = _Places(slots, tables, positions + 1)
    return _logits(model, cache, tokens, positions, places)


def stacked(tables: Sequence[np.ndarray]) -> np.ndarray:
    """Return page tables as the rows of one array, filled up with -1."""
    rows = np.full((len(tables), max(map(len, tables))), -1, np.int64)
    for row, table in zip(rows, tables, strict=True):
        row[: len(table)] = table
    return rows


class _Places(NamedTuple):
    """Where the tokens of a pass belong; see the kernels for each array."""

    slots: Array
    tables: Array
    lengths: Array
    starts: Array | None = None  # none: one token a sequence

    def on(self, stream: Any) -> "_Places":
        if stream is None:
            return self
        from twell_numba.device.gpu import from_numpy

        return _Places(*[None if a is None else from_numpy(a, stream) for a in self])


class _LayerPages(NamedTuple):
    """Keys and values of one layer, as attention wants a cache."""

    keys: Array
    values: Array
    places: _Places

    def attend(self, q: Array, k: Array, v: Array) -> Array:
        slots, tables, lengths, starts = self.places
        store_tokens(self.keys, k.reshape(k.shape[1:]), slots)
        store_tokens(self.values, v.reshape(v.shape[1:]), slots)
        queries = q.reshape(q.shape[1:])
        if starts is None:
            y = decode_attention(queries, self.keys, self.values, tables, lengths)
        else:
            y = prefill_attention(queries, self.keys, self.values, tables, starts, lengths)
        return y.reshape(q.shape)


def _slots(
    cache: PagedKVCache, tables: np.ndarray, sequence_of: np.ndarray, positions: np.ndarray
) -> np.ndarray:
    """Return where in a layer's pages, as a list of tokens, each token belongs."""
    needed = int(positions.max()) // cache.page_size + 1
    if needed > tables.shape[1]:
        raise ValueError(f"tables of {tables.shape[1]} pages given, {needed} wanted")
    pages = tables[sequence_of, positions // cache.page_size]
    return pages * cache.page_size + positions % cache.page_size


def _logits(
    model: Transformer,
    cache: PagedKVCache,
    tokens: np.ndarray,
    positions: np.ndarray,
    places: _Places,
    rows: np.ndarray | None = None,
) -> Array:
    if model.stream is None:
        cos, sin = model.rotary(positions)
    else:
        cos, sin = (embedding(positions, table) for table in model.rotary_on_gpu)
    places = places.on(model.stream)
    x, fed = model.embedding(tokens)[0], None
    for block, (keys, values) in zip(model.blocks, cache.layers, strict=True):
        x, fed = block.step(x, fed, 1, cos, sin, _LayerPages(keys, values, places))
    if rows is not None:
        x, fed = embedding(rows, x), embedding(rows, fed)
    return model.head(model.norm(x, fed)[1])[0]
