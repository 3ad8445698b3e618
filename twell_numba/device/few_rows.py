"""Products of few rows with a large matrix, as in decoding: bound by reading the matrix once.

    y = x W^T,   y += h W            x (M, N), W (K, N), h (M, K)

BLAS is made for many rows. For 2 to 16 it rearranges W first, which takes several times as long as
reading it, and products that are split by rows leave all but one thread idle. Here W is read where
it lies, four of its rows at a time, which are in the first cache when the next rows of x come to
them, and its rows are shared out among the threads. A row of y has the same bits whatever rows are
beside it, and at any number of threads.

A gated feedforward layer in float32 on 2 threads (AMD EPYC with AVX-512, weights not in a cache),
milliseconds; the last line is what :mod:`twell_numba.kernels.dense_ffn.cpu` does:

| | M = 1 | 2 | 4 | 8 | 16 |
| --- | --- | --- | --- | --- | --- |
| D = 2048, F = 5632: BLAS, rows of x shared out | 6.2 | 24.9 | 25.4 | 27.9 | 33.5 |
| BLAS, rows of W shared out | 4.2 | 12.5 | 12.8 | 14.0 | 16.9 |
| these kernels | 4.4 | 4.6 | 5.9 | 7.7 | 12.3 |
| D = 576, F = 1536: BLAS, rows of x shared out | 0.84 | 1.78 | 1.80 | 1.99 | 2.35 |
| BLAS, rows of W shared out | 0.43 | 0.87 | 0.91 | 1.02 | 1.22 |
| these kernels | 0.50 | 0.53 | 0.68 | 0.82 | 1.09 |

From 32 rows on BLAS is as fast on 2 threads, and faster on one.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np

from twell_numba.device.jit import jit
from twell_numba.device.threads import run_ranges
from twell_numba.device.vectors import (
    add_products,
    add_scaled,
    lanes_of,
    load,
    store,
    sum_of,
    zeros,
)

FEW_ROWS = 31
"""Up to so many rows these are faster than BLAS."""
# Fewest numbers of a matrix worth a thread of their own (100 us of reading, from memory: waking a
# thread takes a third of it).
GRAIN = 400_000
# Rows of a matrix of which a sum is written, to be added up with those of the others.
CHUNK = 128


def few_rows_product(
    x: np.ndarray, weight: np.ndarray, out: np.ndarray | None = None
) -> np.ndarray:
    """Return ``x @ weight.T``, computed by all threads.

    Parameters
    ----------
    x : ndarray of float32 or float64, shape (M, N)
        C-contiguous, as all arrays here, and of one dtype. M should be at most ``FEW_ROWS``.
    weight : ndarray, shape (K, N)
    out : ndarray, shape (M, K), optional
        Overwritten with the product.
    """
    if out is None:
        out = np.empty((x.shape[0], weight.shape[0]), x.dtype)
    run_ranges(
        lambda start, stop: dots_with_rows(x, weight, out, start, stop),
        weight.shape[0],
        grain=1 + GRAIN // max(1, weight.shape[1]),
    )
    return out


def few_rows_combination(h: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """Return ``h @ weight``, computed by all threads.

    Parameters
    ----------
    h : ndarray of float32 or float64, shape (M, K)
        C-contiguous, as all arrays here, and of one dtype. M should be at most ``FEW_ROWS``.
    weight : ndarray, shape (K, N)
    """
    return sum_over_chunks(_combine_chunks, (h, weight), len(h), weight)


def sum_over_chunks(
    kernel: Callable[..., None],
    arguments: tuple[Any, ...],
    rows: int,
    weight: np.ndarray,
    weights: int = 1,
) -> np.ndarray:
    """Return the sum of what chunks of a matrix's rows contribute, added up in their order.

    So its bits do not depend on the number of threads, which meet once.

    Parameters
    ----------
    kernel : callable
        ``kernel(*arguments, bounds, partial, start, stop)`` writes to ``partial[chunk]``, for each
        chunk from ``start`` to ``stop``, what rows ``bounds[chunk]`` to ``bounds[chunk + 1]``
        contribute.
    arguments : tuple
    rows : int
        M.
    weight : ndarray, shape (K, N)
    weights : int
        How many such matrices the kernel reads.

    Returns
    -------
    ndarray, shape (M, N)
    """
    neurons, width = weight.shape
    bounds = _chunk_bounds(neurons)
    chunks = len(bounds) - 1
    partial = np.empty((chunks, rows, width), weight.dtype)
    run_ranges(
        lambda start, stop: kernel(*arguments, bounds, partial, start, stop),
        chunks,
        grain=1 + GRAIN // max(1, weights * CHUNK * width),
    )
    return partial.sum(axis=0)


@cache
def _chunk_bounds(rows: int) -> np.ndarray:
    """Return the row that each chunk begins with, and the number of rows.

    Kernels read bounds from this array. Where they compute them, LLVM's check that arrays do not
    overlap takes in a chunk too many, and a loop is not vectorized if one array follows another.
    """
    bounds = np.append(np.arange(0, rows, CHUNK), rows)
    bounds.flags.writeable = False
    return bounds


@jit
def _combine_chunks(h, weight, bounds, partial, start, stop):
    for chunk in range(start, stop):
        partial[chunk] = 0
        add_scaled_rows(h, weight, partial[chunk], bounds[chunk], bounds[chunk + 1])


@jit
def dots_with_rows(x, weight, y, start, stop):
    """y[:, start:stop] = x @ weight[start:stop].T."""
    rows = x.shape[0]
    paired = rows - rows % 2
    grouped = start + (stop - start) // 4 * 4
    for j in range(start, grouped, 4):
        for m in range(0, paired, 2):
            _eight_dots(x, weight, y, j, m)
        for m in range(paired, rows):
            _four_dots(x, weight, y, j, m)
    for j in range(grouped, stop):
        for m in range(rows):
            y[m, j] = _dot(x, weight, j, m)


@jit
def _eight_dots(x, weight, y, j, m):
    """Write the dots of rows m and m + 1 of x with rows j to j + 3 of the weight."""
    width, lanes, whole = _columns(x)
    a0, a1, a2, a3 = zeros(x, 1), zeros(x, 1), zeros(x, 1), zeros(x, 1)
    b0, b1, b2, b3 = zeros(x, 1), zeros(x, 1), zeros(x, 1), zeros(x, 1)
    for k in range(0, whole, lanes):
        a, b = load(x, m, k, 1), load(x, m + 1, k, 1)
        w0, w1 = load(weight, j, k, 1), load(weight, j + 1, k, 1)
        w2, w3 = load(weight, j + 2, k, 1), load(weight, j + 3, k, 1)
        a0, a1 = add_products(a0, a, w0), add_products(a1, a, w1)
        a2, a3 = add_products(a2, a, w2), add_products(a3, a, w3)
        b0, b1 = add_products(b0, b, w0), add_products(b1, b, w1)
        b2, b3 = add_products(b2, b, w2), add_products(b3, b, w3)
    y[m, j] = sum_of(a0) + _last_dot(x, weight, j, m)
    y[m, j + 1] = sum_of(a1) + _last_dot(x, weight, j + 1, m)
    y[m, j + 2] = sum_of(a2) + _last_dot(x, weight, j + 2, m)
    y[m, j + 3] = sum_of(a3) + _last_dot(x, weight, j + 3, m)
    y[m + 1, j] = sum_of(b0) + _last_dot(x, weight, j, m + 1)
    y[m + 1, j + 1] = sum_of(b1) + _last_dot(x, weight, j + 1, m + 1)
    y[m + 1, j + 2] = sum_of(b2) + _last_dot(x, weight, j + 2, m + 1)
    y[m + 1, j + 3] = sum_of(b3) + _last_dot(x, weight, j + 3, m + 1)


@jit
def _four_dots(x, weight, y, j, m):
    """Write the dots of row m of x with rows j to j + 3 of the weight."""
    width, lanes, whole = _columns(x)
    a0, a1, a2, a3 = zeros(x, 1), zeros(x, 1), zeros(x, 1), zeros(x, 1)
    for k in range(0, whole, lanes):
        a = load(x, m, k, 1)
        a0 = add_products(a0, a, load(weight, j, k, 1))
        a1 = add_products(a1, a, load(weight, j + 1, k, 1))
        a2 = add_products(a2, a, load(weight, j + 2, k, 1))
        a3 = add_products(a3, a, load(weight, j + 3, k, 1))
    y[m, j] = sum_of(a0) + _last_dot(x, weight, j, m)
    y[m, j + 1] = sum_of(a1) + _last_dot(x, weight, j + 1, m)
    y[m, j + 2] = sum_of(a2) + _last_dot(x, weight, j + 2, m)
    y[m, j + 3] = sum_of(a3) + _last_dot(x, weight, j + 3, m)


@jit
def _dot(x, weight, j, m):
    """Return the dot of row m of x with row j of the weight."""
    width, lanes, whole = _columns(x)
    total = zeros(x, 1)
    for k in range(0, whole, lanes):
        total = add_products(total, load(x, m, k, 1), load(weight, j, k, 1))
    return sum_of(total) + _last_dot(x, weight, j, m)


@jit
def _last_dot(x, weight, j, m):
    """Return the part of a dot that the columns past the last whole vector make up."""
    width, lanes, whole = _columns(x)
    dot = x.dtype.type(0)
    for k in range(whole, width):
        dot += x[m, k] * weight[j, k]
    return dot


@jit
def _columns(x):
    """Return a row's width, the lanes of a vector, and the columns that whole vectors cover."""
    width, lanes = x.shape[1], lanes_of(x, 1)
    return width, lanes, width - width % lanes


@jit
def add_scaled_rows(h, weight, y, start, stop):
    """y += h[:, start:stop] @ weight[start:stop]."""
    rows, width = y.shape
    paired = rows - rows % 2
    grouped = start + (stop - start) // 4 * 4
    for j in range(start, grouped, 4):
        for m in range(0, paired, 2):
            _add_four_rows_twice(h, weight, y, j, m)
        for m in range(paired, rows):
            _add_four_rows(h, weight, y, j, m)
    for j in range(grouped, stop):
        for m in range(rows):
            for k in range(width):
                y[m, k] += h[m, j] * weight[j, k]


@jit
def _add_four_rows_twice(h, weight, y, j, m):
    """Add rows j to j + 3 of the weight to rows m and m + 1 of y."""
    width, lanes, whole = _columns(y)
    a0, a1, a2, a3 = h[m, j], h[m, j + 1], h[m, j + 2], h[m, j + 3]
    b0, b1, b2, b3 = h[m + 1, j], h[m + 1, j + 1], h[m + 1, j + 2], h[m + 1, j + 3]
    for k in range(0, whole, lanes):
        w0, w1 = load(weight, j, k, 1), load(weight, j + 1, k, 1)
        w2, w3 = load(weight, j + 2, k, 1), load(weight, j + 3, k, 1)
        a = add_scaled(add_scaled(load(y, m, k, 1), a0, w0), a1, w1)
        b = add_scaled(add_scaled(load(y, m + 1, k, 1), b0, w0), b1, w1)
        store(y, m, k, add_scaled(add_scaled(a, a2, w2), a3, w3))
        store(y, m + 1, k, add_scaled(add_scaled(b, b2, w2), b3, w3))
    for k in range(whole, width):
        w0, w1, w2, w3 = weight[j, k], weight[j + 1, k], weight[j + 2, k], weight[j + 3, k]
        y[m, k] += (a0 * w0 + a1 * w1) + (a2 * w2 + a3 * w3)
        y[m + 1, k] += (b0 * w0 + b1 * w1) + (b2 * w2 + b3 * w3)


@jit
def _add_four_rows(h, weight, y, j, m):
    """Add rows j to j + 3 of the weight to row m of y."""
    width, lanes, whole = _columns(y)
    a0, a1, a2, a3 = h[m, j], h[m, j + 1], h[m, j + 2], h[m, j + 3]
    for k in range(0, whole, lanes):
        a = add_scaled(load(y, m, k, 1), a0, load(weight, j, k, 1))
        a = add_scaled(a, a1, load(weight, j + 1, k, 1))
        a = add_scaled(a, a2, load(weight, j + 2, k, 1))
        store(y, m, k, add_scaled(a, a3, load(weight, j + 3, k, 1)))
    for k in range(whole, width):
        a01 = a0 * weight[j, k] + a1 * weight[j + 1, k]
        y[m, k] += a01 + (a2 * weight[j + 2, k] + a3 * weight[j + 3, k])
