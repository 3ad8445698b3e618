"""Causal attention with grouped key/value heads on the CPU.

    s = q k^T / sqrt(w),  L_i = log sum_j exp(s_ij),  p = exp(s - L),  y = p v   for j <= T - S + i
    q, y [B, S, H, w],  k, v [B, T, G, w],  L [B, H, S]

Bound by arithmetic: 2 products of S T w multiply-adds a head forward and 5 backward, half of them
skipped because of causality, and one exponential a score. Scores exist for one block of 64 x 64 at
a time (FlashAttention-2, Dao, 2023). What is added up is added by one thread in one order: the same
bits every run, for any number of threads.

Milliseconds forward and backward, least of 25 runs, float32, on 2 cores of an AMD EPYC (Zen 5):

=========================================  ===================  ==================
version                                    B 16, S 128, H 4,    B 4, S 512, H 8,
                                           w 32                 w 64
=========================================  ===================  ==================
this one                                   0.88, 2.0            8.8, 20
NumPy's BLAS on blocks of 128 queries,     1.20, 2.5            9.0, 21
softmax in Numba
the same on blocks of 64 queries           1.44, 4.7            10.6, 25
products with row lengths unknown to the   1.23, not tried      11.1, not tried
compiler
=========================================  ===================  ==================

One query (decoding) with 4 heads of 32 and 256 keys takes 12 us, in the calling thread.
"""

import numpy as np

from twell_numba.device.exponential import exponential
from twell_numba.device.jit import jit
from twell_numba.device.threads import run_ranges
from twell_numba.kernels.checks import float_inputs, require_shape

# Queries and keys handled together: the length of every inner loop, known when compiling.
BLOCK = 64
# With fewer queries than this, one at a time beats a block that is mostly padding.
FEW_QUERIES = 8
# Fewest multiply-adds worth a thread of their own (100 us of work: waking a thread takes about as
# long).
GRAIN = 4_000_000


def causal_attention(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Attend from each query to the keys up to its own position.

    The last query stands at the last key: query i sees the keys j <= T - S + i. So S = T is
    training and prompt processing, and S = 1 is the next token after T - 1 cached ones.

    Parameters
    ----------
    q : ndarray, shape (B, S, H, w)
        float32 or float64, as all arrays here.
    k, v : ndarray, shape (B, T, G, w)
        T >= S; H divisible by G: head h reads group h // (H / G).

    Returns
    -------
    y : ndarray, shape (B, S, H, w)
    log_sum_exp : ndarray, shape (B, H, S)
        Of each query's scores; wanted by the backward pass.

    Raises
    ------
    TypeError
        If the dtypes differ or are not float32 or float64.
    ValueError
        If the shapes do not fit together.

    Notes
    -----
    NaN and infinities in v spread to the block of queries they are in, seen or not (0 * NaN).
    """
    q, k, v = float_inputs(q=q, k=k, v=v)
    _check_shapes(q, k, v)
    batch, queries, heads, width = q.shape
    keys = k.shape[1]
    y = np.empty_like(q)
    log_sum_exp = np.empty((batch, heads, queries), q.dtype)
    if queries < FEW_QUERIES:
        run_ranges(
            lambda start, stop: _forward_by_query(q, k, v, y, log_sum_exp, start, stop),
            batch * heads,
            grain=1 + GRAIN // max(8 * queries * keys * width, 1),
        )
    else:
        run_ranges(
            lambda start, stop: _forward_by_block(q, k, v, y, log_sum_exp, start, stop),
            batch * heads * _blocks(queries),
            grain=1 + GRAIN // max(BLOCK * keys * width, 1),
            parts_per_thread=4,  # later blocks see more keys
        )
    return y, log_sum_exp


def causal_attention_backward(
    dy: np.ndarray,
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    y: np.ndarray,
    log_sum_exp: np.ndarray,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the gradients of :func:`causal_attention`.

    Parameters
    ----------
    dy : ndarray, shape (B, S, H, w)
    q, k, v : ndarray
        The forward pass's inputs.
    y, log_sum_exp : ndarray
        The forward pass's results.

    Returns
    -------
    dq : ndarray, shape (B, S, H, w)
    dk, dv : ndarray, shape (B, T, G, w)

    Raises
    ------
    TypeError, ValueError
        As :func:`causal_attention`.
    """
    dy, q, k, v, y, log_sum_exp = float_inputs(dy=dy, q=q, k=k, v=v, y=y, log_sum_exp=log_sum_exp)
    _check_shapes(q, k, v)
    batch, queries, heads, width = q.shape
    keys, groups = k.shape[1:3]
    require_shape("dy", dy, q.shape)
    require_shape("y", y, q.shape)
    require_shape("log_sum_exp", log_sum_exp, (batch, heads, queries))
    dq, dk, dv = np.zeros_like(q), np.empty_like(k), np.empty_like(v)
    # sum over d of dy * y, the same for every key
    row_sums = np.vecdot(dy, y)  # [B, S, H]
    run_ranges(
        lambda start, stop: _backward(dy, q, k, v, log_sum_exp, row_sums, dq, dk, dv, start, stop),
        batch * groups,
        grain=1 + GRAIN // max(queries * keys * width, 1),
    )
    return dq, dk, dv


def _check_shapes(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> None:
    require_shape("q", q, ("B", "S", "H", "w"))
    batch, queries, heads, width = q.shape
    require_shape("k", k, (batch, "T", "G", width))
    require_shape("v", v, k.shape)
    keys, groups = k.shape[1:3]
    if keys < queries:
        raise ValueError(f"{keys} keys and {queries} queries given, as many keys at least wanted")
    if groups == 0 or heads % groups:
        raise ValueError(
            f"{heads} query heads and {groups} key/value heads given, "
            "query heads divisible by key/value heads wanted"
        )


def _blocks(count: int) -> int:
    return -(-count // BLOCK)


@jit
def _forward_by_query(q, k, v, y, log_sum_exp, start, stop):
    _, queries, heads, width = q.shape
    keys, groups = k.shape[1:3]
    number = q.dtype.type
    scale = number(1) / np.sqrt(number(width))
    p = np.empty(keys, q.dtype)
    for item in range(start, stop):
        b, h = divmod(item, heads)
        g = h // (heads // groups)
        for i in range(queries):
            seen = keys - queries + i + 1
            query = q[b, i, h]
            maximum = number(-np.inf)
            for j in range(seen):
                total = number(0)
                for d in range(width):
                    total += query[d] * k[b, j, g, d]
                p[j] = total * scale
                maximum = max(maximum, p[j])
            normalizer = number(0)
            for j in range(seen):
                p[j] = exponential(p[j] - maximum)
                normalizer += p[j]
            log_sum_exp[b, h, i] = maximum + np.log(normalizer)
            mixed = y[b, i, h]
            mixed[:] = 0
            for j in range(seen):
                share = p[j] / normalizer
                for d in range(width):
                    mixed[d] += share * v[b, j, g, d]


# In the blocked kernels every inner loop runs over BLOCK neighbouring numbers of a buffer made in
# the kernel itself, whose row length the compiler therefore knows (the helpers are inlined for this
# reason): it keeps a 4 x 4 block of factors in registers and needs no checks for overlap. This is
# 50 to 60 multiply-adds a nanosecond and core where OpenBLAS reaches 60; with row lengths unknown
# it is 25. Widths and numbers of rows are padded with zeros to multiples of 4.


@jit(forceinline=True)
def products(rows, columns, count, out):
    """out[r, i] = sum_d rows[r, d] columns[d, i], for r < count."""
    for r in range(0, count, 4):
        out[r : r + 4] = 0
        for d in range(0, rows.shape[1], 4):
            a00, a01, a02, a03 = rows[r, d], rows[r, d + 1], rows[r, d + 2], rows[r, d + 3]
            r1, r2, r3 = r + 1, r + 2, r + 3
            a10, a11, a12, a13 = rows[r1, d], rows[r1, d + 1], rows[r1, d + 2], rows[r1, d + 3]
            a20, a21, a22, a23 = rows[r2, d], rows[r2, d + 1], rows[r2, d + 2], rows[r2, d + 3]
            a30, a31, a32, a33 = rows[r3, d], rows[r3, d + 1], rows[r3, d + 2], rows[r3, d + 3]
            for i in range(BLOCK):
                c0, c1, c2, c3 = (
                    columns[d, i],
                    columns[d + 1, i],
                    columns[d + 2, i],
                    columns[d + 3, i],
                )
                out[r, i] += (a00 * c0 + a01 * c1) + (a02 * c2 + a03 * c3)
                out[r1, i] += (a10 * c0 + a11 * c1) + (a12 * c2 + a13 * c3)
                out[r2, i] += (a20 * c0 + a21 * c1) + (a22 * c2 + a23 * c3)
                out[r3, i] += (a30 * c0 + a31 * c1) + (a32 * c2 + a33 * c3)


@jit(forceinline=True)
def add_combinations(rows, weights, count, out):
    """out[d, i] += sum_r rows[r, d] weights[r, i], over r < count."""
    for r in range(0, count, 4):
        for d in range(0, rows.shape[1], 4):
            d1, d2, d3 = d + 1, d + 2, d + 3
            a00, a01, a02, a03 = rows[r, d], rows[r + 1, d], rows[r + 2, d], rows[r + 3, d]
            a10, a11, a12, a13 = rows[r, d1], rows[r + 1, d1], rows[r + 2, d1], rows[r + 3, d1]
            a20, a21, a22, a23 = rows[r, d2], rows[r + 1, d2], rows[r + 2, d2], rows[r + 3, d2]
            a30, a31, a32, a33 = rows[r, d3], rows[r + 1, d3], rows[r + 2, d3], rows[r + 3, d3]
            for i in range(BLOCK):
                c0, c1, c2, c3 = (
                    weights[r, i],
                    weights[r + 1, i],
                    weights[r + 2, i],
                    weights[r + 3, i],
                )
                out[d, i] += (a00 * c0 + a01 * c1) + (a02 * c2 + a03 * c3)
                out[d1, i] += (a10 * c0 + a11 * c1) + (a12 * c2 + a13 * c3)
                out[d2, i] += (a20 * c0 + a21 * c1) + (a22 * c2 + a23 * c3)
                out[d3, i] += (a30 * c0 + a31 * c1) + (a32 * c2 + a33 * c3)


@jit
def _load(source, factor, rows):
    """rows[r, d] = source[r, d] * factor; the rest of rows is made zero."""
    count, width = source.shape
    rows[:] = 0
    for r in range(count):
        for d in range(width):
            rows[r, d] = source[r, d] * factor


@jit
def load_transposed(source, factor, columns):
    """columns[d, i] = source[i, d] * factor; the rest of columns is made zero."""
    count, width = source.shape
    columns[:] = 0
    for i in range(count):
        for d in range(width):
            columns[d, i] = source[i, d] * factor


@jit
def round_up(count):
    """Return the multiple of 4 from count on, as many rows as the products take at a time."""
    return (count + 3) // 4 * 4


@jit(forceinline=True)
def weigh(p, count, maximum, previous, normalizer, y_columns):
    """Turn scores into weights, p[r, i] = exp(p[r, i] - maximum[i]), for r < count.

    A new maximum of a column rescales what has been summed of it so far.
    """
    for i in range(BLOCK):
        previous[i] = maximum[i]
    for j in range(count):
        for i in range(BLOCK):
            maximum[i] = p[j, i] if p[j, i] > maximum[i] else maximum[i]
    for i in range(BLOCK):
        previous[i] = exponential(previous[i] - maximum[i])
        normalizer[i] *= previous[i]
    for d in range(y_columns.shape[0]):
        for i in range(BLOCK):
            y_columns[d, i] *= previous[i]
    for j in range(count):
        for i in range(BLOCK):
            p[j, i] = exponential(p[j, i] - maximum[i])
            normalizer[i] += p[j, i]


@jit
def _forward_by_block(q, k, v, y, log_sum_exp, start, stop):
    """Blocks of BLOCK queries; scores and weights are held transposed, a column a query."""
    _, queries, heads, width = q.shape
    keys, groups = k.shape[1:3]
    blocks = (queries + BLOCK - 1) // BLOCK
    number = q.dtype.type
    scale = number(1) / np.sqrt(number(width))
    padded_width = round_up(width)
    q_columns = np.empty((padded_width, BLOCK), q.dtype)
    y_columns = np.empty((padded_width, BLOCK), q.dtype)
    rows = np.empty((BLOCK, padded_width), q.dtype)
    p = np.empty((BLOCK, BLOCK), q.dtype)
    maximum = np.empty(BLOCK, q.dtype)
    previous = np.empty(BLOCK, q.dtype)
    normalizer = np.empty(BLOCK, q.dtype)
    for item in range(start, stop):
        head, block = divmod(item, blocks)
        b, h = divmod(head, heads)
        g = h // (heads // groups)
        first = block * BLOCK
        count = min(BLOCK, queries - first)
        seen_by_first = keys - queries + first + 1
        seen = seen_by_first + count - 1

        load_transposed(q[b, first : first + count, h], scale, q_columns)
        y_columns[:] = 0
        maximum[:] = -np.inf
        normalizer[:] = 0
        for first_key in range(0, seen, BLOCK):
            key_count = min(BLOCK, seen - first_key)
            padded_count = round_up(key_count)
            _load(k[b, first_key : first_key + key_count, g], number(1), rows)
            products(rows, q_columns, padded_count, p)
            for j in range(max(0, seen_by_first - first_key), padded_count):
                p[j, : min(BLOCK, first_key + j - seen_by_first + 1)] = -np.inf

            weigh(p, padded_count, maximum, previous, normalizer, y_columns)
            _load(v[b, first_key : first_key + key_count, g], number(1), rows)
            add_combinations(rows, p, padded_count, y_columns)

        for i in range(count):
            log_sum_exp[b, h, first + i] = maximum[i] + np.log(normalizer[i])
            factor = number(1) / normalizer[i]
            for d in range(width):
                y[b, first + i, h, d] = y_columns[d, i] * factor


@jit
def _backward(dy, q, k, v, log_sum_exp, row_sums, dq, dk, dv, start, stop):
    """Tiles of BLOCK queries (rows) by BLOCK keys (columns), as in FlashAttention-2 (Dao, 2023).

    A thread owns all heads of a group, so that dk and dv are summed in one order by one thread.
    """
    _, queries, heads, width = q.shape
    keys, groups = k.shape[1:3]
    heads_per_group = heads // groups
    offset = keys - queries
    number = q.dtype.type
    scale = number(1) / np.sqrt(number(width))
    padded_width = round_up(width)
    k_rows = np.empty((BLOCK, padded_width), q.dtype)
    q_rows = np.empty((BLOCK, padded_width), q.dtype)
    dy_rows = np.empty((BLOCK, padded_width), q.dtype)
    k_columns = np.empty((padded_width, BLOCK), q.dtype)
    v_columns = np.empty((padded_width, BLOCK), q.dtype)
    dk_columns = np.empty((padded_width, BLOCK), q.dtype)
    dv_columns = np.empty((padded_width, BLOCK), q.dtype)
    dq_columns = np.empty((padded_width, BLOCK), q.dtype)
    p = np.empty((BLOCK, BLOCK), q.dtype)
    ds = np.empty((BLOCK, BLOCK), q.dtype)
    ds_transposed = np.empty((BLOCK, BLOCK), q.dtype)
    for item in range(start, stop):
        b, g = divmod(item, groups)
        for first_key in range(0, keys, BLOCK):
            key_count = min(BLOCK, keys - first_key)
            _load(k[b, first_key : first_key + key_count, g], scale, k_rows)
            load_transposed(k[b, first_key : first_key + key_count, g], number(1), k_columns)
            load_transposed(v[b, first_key : first_key + key_count, g], number(1), v_columns)
            dk_columns[:] = 0
            dv_columns[:] = 0
            # the first block of queries of which one sees the first key
            first_block = max(0, first_key - offset) // BLOCK * BLOCK
            for h in range(g * heads_per_group, (g + 1) * heads_per_group):
                for first in range(first_block, queries, BLOCK):
                    count = min(BLOCK, queries - first)
                    padded_count = round_up(count)
                    _load(q[b, first : first + count, h], scale, q_rows)
                    _load(dy[b, first : first + count, h], number(1), dy_rows)
                    products(q_rows, k_columns, padded_count, p)
                    products(dy_rows, v_columns, padded_count, ds)
                    p[count:] = 0
                    ds[count:] = 0
                    for i in range(count):
                        normalizer = log_sum_exp[b, h, first + i]
                        row_sum = row_sums[b, first + i, h]
                        for j in range(BLOCK):
                            p[i, j] = exponential(p[i, j] - normalizer)
                        unseen = min(key_count, max(0, offset + first + i + 1 - first_key))
                        p[i, unseen:] = 0
                        for j in range(BLOCK):
                            ds[i, j] = p[i, j] * (ds[i, j] - row_sum)
                    add_combinations(dy_rows, p, padded_count, dv_columns)
                    add_combinations(q_rows, ds, padded_count, dk_columns)
                    for j in range(BLOCK):
                        for i in range(BLOCK):
                            ds_transposed[j, i] = ds[i, j]
                    dq_columns[:] = 0
                    add_combinations(k_rows, ds_transposed, round_up(key_count), dq_columns)
                    for i in range(count):
                        for d in range(width):
                            dq[b, first + i, h, d] += dq_columns[d, i]
            for j in range(key_count):
                for d in range(width):
                    dk[b, first_key + j, g, d] = dk_columns[d, j]
                    dv[b, first_key + j, g, d] = dv_columns[d, j]
