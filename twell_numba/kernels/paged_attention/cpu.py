"""Attention of several sequences whose keys and values lie in pages, on the CPU.

    s = q k^T / sqrt(w),  p = softmax(s),  y = p v,  over the keys up to the query's position
    q, y [M, H, w],  keys, values [P, page size, G, w],  tables [N, most pages]

Decoding, one query a sequence, is bound by reading keys and values: they are read once for all
heads of a group. Prefill, many queries a sequence, is bound by arithmetic: blocks of 64 pairs of a
query and a head of a group share each key and value that is loaded (see ``attention.cpu``, whose
products these are). Threads share out sequences and groups.

What a query gets depends on its own sequence alone, to the last bit: sums go over keys in the order
of their positions, and no number of another query, sequence or block enters them.
"""

import numpy as np

from twell_numba.device.exponential import exponential
from twell_numba.device.jit import jit
from twell_numba.device.threads import run_ranges
from twell_numba.device.vectors import (
    add_products,
    add_scaled,
    lanes_of,
    load,
    prefetch,
    store,
    sum_of,
    zeros,
)
from twell_numba.kernels.attention.cpu import (
    BLOCK,
    add_combinations,
    load_transposed,
    products,
    round_up,
    weigh,
)
from twell_numba.kernels.checks import (
    float_inputs,
    index_input,
    require_in_place,
    require_shape,
)

# Fewest multiply-adds worth a thread of their own (100 us of work), where they wait for memory, and
# where they do not.
DECODE_GRAIN = 1_500_000
PREFILL_GRAIN = 4_000_000


def store_tokens(pages: np.ndarray, rows: np.ndarray, slots: np.ndarray) -> None:
    """Write keys or values of new tokens into their pages.

    Parameters
    ----------
    pages : ndarray, shape (P, page size, G, w)
        C-contiguous. Changed in place.
    rows : ndarray, shape (M, G, w)
        Of the same dtype.
    slots : ndarray of integers, shape (M,)
        Page times page size, plus the place in it; all different.

    Raises
    ------
    TypeError
        If the dtypes differ.
    ValueError
        If the shapes do not fit, or a slot is not in the pages.
    """
    require_in_place("pages", pages, ("P", "page size", "G", "w"), rows.dtype)
    (rows,), slots = float_inputs(rows=rows), index_input("slots", slots)
    room = pages.shape[0] * pages.shape[1]
    require_shape("slots", slots, ("M",))
    require_shape("rows", rows, (slots.size, *pages.shape[2:]))
    width = pages.shape[2] * pages.shape[3]
    wrong = _store(pages.reshape(room, width), rows.reshape(slots.size, width), slots)
    if wrong >= 0:
        raise ValueError(f"slot {slots[wrong]} given, 0 to {room - 1} wanted")


@jit
def _store(pages, rows, slots):
    """Return the first token whose slot is not there, before anything is written; -1 if none."""
    for m in range(slots.size):
        if not 0 <= slots[m] < pages.shape[0]:
            return m
    for m in range(slots.size):
        pages[slots[m]] = rows[m]
    return -1


def decode_attention(
    q: np.ndarray, keys: np.ndarray, values: np.ndarray, tables: np.ndarray, lengths: np.ndarray
) -> np.ndarray:
    """Attend from the newest token of each sequence to all its tokens.

    Parameters
    ----------
    q : ndarray, shape (N, H, w)
        float32 or float64, as all arrays of numbers here.
    keys, values : ndarray, shape (P, page size, G, w)
        H divisible by G: head h reads group h // (H / G).
    tables : ndarray of integers, shape (N, most pages)
        The pages of each sequence in order; what is behind its last is not read.
    lengths : ndarray of integers, shape (N,)
        Tokens stored of each sequence, the newest included.

    Returns
    -------
    ndarray, shape (N, H, w)

    Raises
    ------
    TypeError
        If the dtypes differ or are not float32 or float64.
    ValueError
        If the shapes do not fit together, or a table lacks a page that is needed.
    """
    q, keys, values = float_inputs(q=q, keys=keys, values=values)
    tables, lengths = index_input("tables", tables), index_input("lengths", lengths)
    _check(q, keys, values, tables, lengths)
    require_shape("lengths", lengths, (len(q),))
    _require_pages(tables, lengths, np.ones_like(lengths), keys)
    y = np.empty_like(q)
    page_size, groups, width = keys.shape[1:]
    matrices = [array.reshape(-1, width) for array in (q, keys, values)]
    out = y.reshape(-1, width)
    work = int(lengths.sum()) * q.shape[1] * width * 2
    items = len(q) * groups
    run_ranges(
        lambda start, stop: _decode(
            *matrices, tables, lengths, page_size, groups, out, start, stop
        ),
        items,
        grain=1 + DECODE_GRAIN * items // max(work, 1),
        parts_per_thread=4,  # sequences are of different lengths
    )
    return y


def prefill_attention(
    q: np.ndarray,
    keys: np.ndarray,
    values: np.ndarray,
    tables: np.ndarray,
    starts: np.ndarray,
    lengths: np.ndarray,
) -> np.ndarray:
    """Attend from the newest tokens of each sequence, each to the tokens up to itself.

    Parameters
    ----------
    q : ndarray, shape (M, H, w)
        float32 or float64, as all arrays of numbers here.
    keys, values, tables, lengths
        As for :func:`decode_attention`.
    starts : ndarray of integers, shape (N + 1,)
        Rows starts[s] to starts[s + 1] of q belong to sequence s; from 0 to M.

    Returns
    -------
    ndarray, shape (M, H, w)

    Raises
    ------
    TypeError, ValueError
        As :func:`decode_attention`.
    """
    q, keys, values = float_inputs(q=q, keys=keys, values=values)
    tables, lengths = index_input("tables", tables), index_input("lengths", lengths)
    starts = index_input("starts", starts)
    _check(q, keys, values, tables, lengths)
    require_shape("starts", starts, (len(lengths) + 1,))
    counts = np.diff(starts)
    if starts[0] != 0 or starts[-1] != len(q) or (counts < 0).any():
        raise ValueError(f"starts {starts} given, rising from 0 to the {len(q)} rows of q wanted")
    _require_pages(tables, lengths, counts, keys)
    y = np.empty_like(q)
    groups, width = keys.shape[2:]
    # A block is of up to 64 columns: the pairs of a query and a head of a group.
    columns = counts * (q.shape[1] // max(groups, 1))
    blocks = (columns + BLOCK - 1) // BLOCK
    sequence_of = np.repeat(np.arange(len(lengths)), blocks)
    first_of = (np.arange(len(sequence_of)) - np.repeat(np.cumsum(blocks) - blocks, blocks)) * BLOCK
    work = 2 * BLOCK * width * int((blocks * lengths).sum()) * groups
    items = len(sequence_of) * groups
    run_ranges(
        lambda start, stop: _prefill(
            q, keys, values, tables, starts, lengths, sequence_of, first_of, y, start, stop
        ),
        items,
        grain=1 + PREFILL_GRAIN * items // max(work, 1),
        parts_per_thread=4,  # later blocks see more keys
    )
    return y


def _check(
    q: np.ndarray, keys: np.ndarray, values: np.ndarray, tables: np.ndarray, lengths: np.ndarray
) -> None:
    require_shape("q", q, ("M", "H", "w"))
    heads, width = q.shape[1:]
    require_shape("keys", keys, ("P", "page size", "G", width))
    require_shape("values", values, keys.shape)
    require_shape("lengths", lengths, ("N",))
    require_shape("tables", tables, (len(lengths), "most pages"))
    groups = keys.shape[2]
    if groups == 0 or heads % groups:
        raise ValueError(
            f"{heads} query heads and {groups} key/value heads given, "
            "query heads divisible by key/value heads wanted"
        )


def _require_pages(
    tables: np.ndarray, lengths: np.ndarray, counts: np.ndarray, keys: np.ndarray
) -> None:
    pages, page_size = keys.shape[:2]
    wrong = _first_wrong(tables, lengths, counts, pages, page_size)
    if wrong < 0:
        return
    length, room = lengths[wrong], tables.shape[1] * page_size
    if length < counts[wrong]:
        raise ValueError(
            f"{counts[wrong]} queries and {length} tokens of sequence {wrong} given, as many "
            f"tokens at least wanted"
        )
    if length > room:
        raise ValueError(f"tables for {room} tokens given, {length} wanted for sequence {wrong}")
    raise ValueError(
        f"pages {tables[wrong].min()} to {tables[wrong].max()} given in the table of sequence "
        f"{wrong}, 0 to {pages - 1} wanted"
    )


@jit
def _first_wrong(tables, lengths, counts, pages, page_size):
    """Return the first sequence that lacks a token, or a page that its tokens need; -1 if none."""
    for s in range(lengths.size):
        needed = (lengths[s] + page_size - 1) // page_size
        if lengths[s] < counts[s] or needed > tables.shape[1]:
            return s
        for i in range(needed):
            if not 0 <= tables[s, i] < pages:
                return s
    return -1


@jit
def _decode(q, keys, values, tables, lengths, page_size, groups, y, start, stop):
    """Items are pairs of a sequence and a group. Keys and values are matrices of (slot, group)."""
    sharing = q.shape[0] // (len(lengths) * groups)
    number = q.dtype.type
    scale = number(1) / np.sqrt(number(q.shape[1]))
    p = np.empty((sharing, page_size * tables.shape[1]), q.dtype)
    for item in range(start, stop):
        s, g = divmod(item, groups)
        length = lengths[s]
        first_head = item * sharing
        for first in range(0, length, page_size):
            row = tables[s, first // page_size] * page_size * groups + g
            count = min(page_size, length - first)
            _prefetch_page(tables, s, first + page_size, length, page_size, groups, g, keys)
            for h in range(sharing):
                _scores(q, first_head + h, keys, row, groups, p, h, first, count)
        for h in range(sharing):
            _softmax(p, h, length, scale)
            y[first_head + h] = 0
        for first in range(0, length, page_size):
            row = tables[s, first // page_size] * page_size * groups + g
            count = min(page_size, length - first)
            _prefetch_page(tables, s, first + page_size, length, page_size, groups, g, values)
            for h in range(sharing):
                _add_mixed(p, h, first, count, values, row, groups, y, first_head + h)


@jit(forceinline=True)
def _prefetch_page(tables, s, first, length, page_size, groups, g, rows):
    if first < length:
        row = tables[s, first // page_size] * page_size * groups + g
        lanes = lanes_of(rows, 1)
        for i in range(min(page_size, length - first)):
            for d in range(0, rows.shape[1], lanes):
                prefetch(rows, row + i * groups, d, 1)


@jit(forceinline=True)
def _scores(q, query, keys, row, step, p, h, first, count):
    """p[h, first + i] = the product of a query and the key in row + i step."""
    width, lanes = q.shape[1], lanes_of(q, 1)
    whole = width // lanes * lanes
    for i in range(count):
        key = row + i * step
        total = zeros(q, 1)
        for d in range(0, whole, lanes):
            total = add_products(total, load(q, query, d, 1), load(keys, key, d, 1))
        score = sum_of(total)
        for d in range(whole, width):
            score += q[query, d] * keys[key, d]
        p[h, first + i] = score


@jit(forceinline=True)
def _softmax(p, h, length, scale):
    number = p.dtype.type
    maximum = number(-np.inf)
    for j in range(length):
        p[h, j] *= scale
        maximum = p[h, j] if p[h, j] > maximum else maximum
    normalizer = number(0)
    for j in range(length):
        p[h, j] = exponential(p[h, j] - maximum)
        normalizer += p[h, j]
    factor = number(1) / normalizer
    for j in range(length):
        p[h, j] *= factor


@jit(forceinline=True)
def _add_mixed(p, h, first, count, values, row, step, y, head):
    """y[head] += the sum of p[h, first + i] times the value in row + i step."""
    width, lanes = y.shape[1], lanes_of(y, 1)
    whole = width // lanes * lanes
    for d in range(0, whole, lanes):
        total = load(y, head, d, 1)
        for i in range(count):
            total = add_scaled(total, p[h, first + i], load(values, row + i * step, d, 1))
        store(y, head, d, total)
    for d in range(whole, width):
        total = y[head, d]
        for i in range(count):
            total += p[h, first + i] * values[row + i * step, d]
        y[head, d] = total


@jit
def _load_rows(pages, table, group, first, count, rows):
    """rows[r, d] = what the token first + r has in a group; the rest of rows is made zero."""
    page_size, width = pages.shape[1], pages.shape[3]
    rows[:] = 0
    for r in range(count):
        page, place = table[(first + r) // page_size], (first + r) % page_size
        for d in range(width):
            rows[r, d] = pages[page, place, group, d]


@jit
def _prefill(q, keys, values, tables, starts, lengths, sequence_of, first_of, y, start, stop):
    """Blocks of BLOCK columns, each a query and a head of a group; rows of p are keys."""
    groups, width = keys.shape[2:]
    sharing = q.shape[1] // groups
    number = q.dtype.type
    scale = number(1) / np.sqrt(number(width))
    padded_width = round_up(width)
    asked = np.empty((BLOCK, width), q.dtype)
    q_columns = np.empty((padded_width, BLOCK), q.dtype)
    y_columns = np.empty((padded_width, BLOCK), q.dtype)
    rows = np.empty((BLOCK, padded_width), q.dtype)
    p = np.empty((BLOCK, BLOCK), q.dtype)
    maximum = np.empty(BLOCK, q.dtype)
    previous = np.empty(BLOCK, q.dtype)
    normalizer = np.empty(BLOCK, q.dtype)
    for item in range(start, stop):
        block, g = divmod(item, groups)
        s, first = sequence_of[block], first_of[block]
        queries = starts[s + 1] - starts[s]
        count = min(BLOCK, queries * sharing - first)
        seen_by_first = lengths[s] - queries + first // sharing + 1
        seen = lengths[s] - queries + (first + count - 1) // sharing + 1

        for i in range(count):
            query, head = divmod(first + i, sharing)
            asked[i] = q[starts[s] + query, g * sharing + head]
        load_transposed(asked[:count], scale, q_columns)
        y_columns[:] = 0
        maximum[:] = -np.inf
        normalizer[:] = 0
        for first_key in range(0, seen, BLOCK):
            key_count = min(BLOCK, seen - first_key)
            padded_count = round_up(key_count)
            _load_rows(keys, tables[s], g, first_key, key_count, rows)
            products(rows, q_columns, padded_count, p)
            for j in range(max(0, seen_by_first - first_key), padded_count):
                # the first column of a query that sees this key
                sees = (first // sharing + first_key + j - seen_by_first + 1) * sharing - first
                p[j, : min(BLOCK, sees)] = -np.inf

            weigh(p, padded_count, maximum, previous, normalizer, y_columns)
            _load_rows(values, tables[s], g, first_key, key_count, rows)
            add_combinations(rows, p, padded_count, y_columns)

        for i in range(count):
            query, head = divmod(first + i, sharing)
            factor = number(1) / normalizer[i]
            for d in range(width):
                y[starts[s] + query, g * sharing + head, d] = y_columns[d, i] * factor
