"""Attention of several sequences whose keys and values lie in pages, on a GPU.

    s = q k^T / sqrt(w),  p = softmax(s),  y = p v,  over the keys up to the query's position
    q, y [M, H, w],  keys, values [P, page size, G, w],  tables [N, most pages]

A block takes a query and a head, and goes through the keys 64 at a time: a thread a key, then a
thread a column of v, with the softmax taken as the keys go by. Simple, and the same for one query a
sequence and for many; long prompts would want tensor cores. Wider heads than 64 are computed 64
columns at a time, each with the scores anew.

Sums are in float32, or float64 for float64, in the order of the keys: what a query gets depends on
its own sequence alone, to the last bit.

Indices may be in the host's memory, where they are checked, or on the GPU, where nobody looks at
them: a slot that is not there is then left out, and so is a key whose page is not there.
"""

import math

import numpy as np

from twell_numba.device.gpu import DeviceArray, empty, from_numpy, kernel
from twell_numba.device.gpu.language import (
    arithmetic_type,
    cuda,
    global_thread,
    grid_threads,
    load,
    number,
    store,
    types,
)
from twell_numba.kernels.checks import index_input, require_shape
from twell_numba.kernels.device_checks import arithmetic_dtype, float_arrays, index_array

THREADS = 64
MOST_BLOCKS = 2**31 - 1

Indices = DeviceArray | np.ndarray


def store_tokens(pages: DeviceArray, rows: DeviceArray, slots: Indices) -> None:
    """Write keys or values of new tokens into their pages.

    Parameters
    ----------
    pages : DeviceArray of floats, shape (P, page size, G, w)
        Changed in place.
    rows : DeviceArray, shape (M, G, w)
        Of the same dtype.
    slots : ndarray of integers or DeviceArray of int64, shape (M,)
        Page times page size, plus the place in it; all different.

    Raises
    ------
    TypeError
        If the dtypes differ or are not floats, or slots are not integers.
    ValueError
        If the shapes do not fit, a slot in the host's memory is not in the pages, or the arrays are
        on different GPUs.
    """
    float_arrays(pages=pages, rows=rows)
    require_shape("pages", pages, ("P", "page size", "G", "w"))  # type: ignore[arg-type]
    count, groups, width = pages.shape[0] * pages.shape[1], *pages.shape[2:]
    require_shape("rows", rows, ("M", groups, width))  # type: ignore[arg-type]
    slots = _wide(index_array("slots", slots, rows.shape[0], 0, count, pages.stream))
    _store(_store.blocks(rows.size), pages, rows, slots, count, groups * width, rows.size)


def decode_attention(
    q: DeviceArray, keys: DeviceArray, values: DeviceArray, tables: Indices, lengths: Indices
) -> DeviceArray:
    """Attend from the newest token of each sequence to all its tokens.

    Parameters
    ----------
    q : DeviceArray of floats, shape (N, H, w)
    keys, values : DeviceArray, shape (P, page size, G, w)
        Of q's dtype. H divisible by G: head h reads group h // (H / G).
    tables : ndarray of integers or DeviceArray of int64, shape (N, most pages)
        The pages of each sequence in order; what is behind its last is not read.
    lengths : ndarray of integers or DeviceArray of int64, shape (N,)
        Tokens stored of each sequence, the newest included.

    Returns
    -------
    DeviceArray, shape (N, H, w)

    Raises
    ------
    TypeError
        If the dtypes differ or are not floats, or indices are not integers.
    ValueError
        If the shapes do not fit together, or the arrays are on different GPUs.
    """
    return _attention(q, keys, values, tables, None, lengths)


def prefill_attention(
    q: DeviceArray,
    keys: DeviceArray,
    values: DeviceArray,
    tables: Indices,
    starts: Indices,
    lengths: Indices,
) -> DeviceArray:
    """Attend from the newest tokens of each sequence, each to the tokens up to itself.

    Parameters
    ----------
    q : DeviceArray of floats, shape (M, H, w)
    keys, values, tables, lengths
        As for :func:`decode_attention`.
    starts : ndarray of integers or DeviceArray of int64, shape (N + 1,)
        Rows starts[s] to starts[s + 1] of q belong to sequence s; from 0 to M.

    Returns
    -------
    DeviceArray, shape (M, H, w)

    Raises
    ------
    TypeError, ValueError
        As :func:`decode_attention`.
    """
    return _attention(q, keys, values, tables, starts, lengths)


def _attention(
    q: DeviceArray,
    keys: DeviceArray,
    values: DeviceArray,
    tables: Indices,
    starts: Indices | None,
    lengths: Indices,
) -> DeviceArray:
    """Attend; without ``starts`` from one query of each sequence."""
    float_arrays(q=q, keys=keys, values=values)
    require_shape("q", q, ("M", "H", "w"))  # type: ignore[arg-type]
    rows, heads, width = q.shape
    require_shape("keys", keys, ("P", "page size", "G", width))  # type: ignore[arg-type]
    require_shape("values", values, keys.shape)  # type: ignore[arg-type]
    pages, page_size, groups = keys.shape[:3]
    if groups == 0 or heads % groups:
        raise ValueError(
            f"{heads} query heads and {groups} key/value heads given, "
            "query heads divisible by key/value heads wanted"
        )
    is_decoding = starts is None
    end = np.iinfo(np.int64).max
    count = rows if is_decoding else "N"
    lengths = _wide(index_array("lengths", lengths, count, 0, end, q.stream))
    sequences = lengths.shape[0]
    if starts is None:
        starts = empty(0, np.int64, q.stream)
    else:
        starts = _wide(index_array("starts", starts, sequences + 1, 0, rows + 1, q.stream))
    tables = _page_tables(tables, sequences, q)
    y = empty(q.shape, q.dtype, q.stream)
    chunks = -(-width // THREADS)
    items = rows * heads * chunks
    _attend(
        min(items, MOST_BLOCKS),
        q, keys, values, tables, starts, lengths, arithmetic_dtype(q.dtype).type(width**-0.5), y,
        int(is_decoding), sequences, tables.shape[1], pages, page_size, heads, groups, width,
        chunks, items,
    )  # fmt: skip
    return y


def _page_tables(tables: Indices, sequences: int, q: DeviceArray) -> DeviceArray:
    if not isinstance(tables, DeviceArray):
        tables = from_numpy(index_input("tables", tables), q.stream)
    require_shape("tables", tables, (sequences, "most pages"))  # type: ignore[arg-type]
    return _wide(tables)


def _wide(indices: DeviceArray) -> DeviceArray:
    if indices.dtype != np.int64:
        raise TypeError(f"indices of dtype {indices.dtype} given on the GPU, int64 wanted")
    return indices


@kernel()
def _store(pages, rows, slots, room, width, size):
    i = global_thread()
    while i < size:
        slot = load(slots, i // width)
        if 0 <= slot < room:
            store(pages, slot * width + i % width, load(rows, i))
        i += grid_threads()


@kernel(threads=THREADS)
def _attend(
    q, keys, values, tables, starts, lengths, scale, y,
    is_decoding, sequences, most_pages, pages, page_size, heads, groups, width, chunks, items,
):  # fmt: skip
    """A block takes a query, a head and up to THREADS columns of the result."""
    p = cuda.shared.array(THREADS, arithmetic_type(q))
    places = cuda.shared.array(THREADS, types.int64)
    thread = types.int64(cuda.threadIdx.x)
    item = types.int64(cuda.blockIdx.x)
    while item < items:
        column = item % chunks * THREADS + thread
        head = item // chunks % heads
        query = item // chunks // heads
        s = query
        later = types.int64(0)  # queries of the sequence behind this one
        if not is_decoding:
            s = types.int64(0)
            while s < sequences - 1 and load(starts, s + 1) <= query:
                s += 1
            later = load(starts, s + 1) - query - 1
        seen = min(load(lengths, s) - later, most_pages * page_size)
        row = (query * heads + head) * width
        group = head // (heads // groups)
        maximum = number(q, -math.inf)
        normalizer = number(q, 0)
        mixed = number(q, 0)
        key = types.int64(0)
        while key < seen:
            own = key + thread
            score = number(q, -math.inf)
            place = types.int64(-1)  # of the key's row in the pages
            if own < seen:
                page = load(tables, s * most_pages + own // page_size)
                if 0 <= page < pages:
                    place = ((page * page_size + own % page_size) * groups + group) * width
                    score = number(q, 0)
                    for d in range(width):
                        score += load(q, row + d) * load(keys, place + d)
                    score *= scale
            p[types.uint64(thread)] = score
            places[types.uint64(thread)] = place
            cuda.syncthreads()
            largest = maximum
            for j in range(THREADS):
                largest = p[types.uint64(j)] if p[types.uint64(j)] > largest else largest
            cuda.syncthreads()
            p[types.uint64(thread)] = math.exp(score - largest)
            cuda.syncthreads()
            factor = math.exp(maximum - largest)
            maximum = largest
            normalizer *= factor
            mixed *= factor
            for j in range(min(types.int64(THREADS), seen - key)):
                if places[types.uint64(j)] >= 0:
                    weight = p[types.uint64(j)]
                    normalizer += weight
                    if column < width:
                        mixed += weight * load(values, places[types.uint64(j)] + column)
            cuda.syncthreads()
            key += THREADS
        if column < width:
            store(y, row + column, mixed / normalizer)
        item += cuda.gridDim.x
