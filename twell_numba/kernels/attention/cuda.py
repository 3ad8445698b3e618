"""Causal attention with grouped key/value heads on a GPU: by cuDNN, or in kernels of our own.

    s = q k^T / sqrt(w),  L_i = log sum_j exp(s_ij),  p = exp(s - L),  y = p v   for j <= T - S + i

q, y [B, S, H, w],  k, v [B, T, G, w],  L [B, H, S]. cuDNN computes in tensor cores, for 16-bit
numbers and heads that it knows (see ``device.gpu.cudnn``). Everything else is done here, slower.

Our kernels go in tiles of 32 queries by 32 keys, with the softmax taken as the keys go by (Dao et
al., 2022): no S x T matrix is ever kept. They are bound by shared memory, from which each
multiply-add takes up to half a read. Wider heads than 64 are computed 64 columns at a time, each
with the scores anew.

Few queries (decoding) share out the keys instead, so that one query keeps more than one
multiprocessor busy: blocks of up to 256 keys, each with a softmax of its own, and a second kernel
that puts them together. This is bound by reading k and v: where the head width allows it, 16 bytes
at a time, by neighbouring lanes.

Sums are in float32, or float64 for float64, in an order that depends on the shape and alignment
alone and without atomics: the same bits in every run.
"""

import math

import numpy as np

from twell_numba.device.gpu import DeviceArray, cudnn, empty, kernel
from twell_numba.device.gpu.language import (
    FULL_WARP,
    arithmetic_type,
    cuda,
    device_function,
    global_thread,
    grid_threads,
    load,
    number,
    store,
    types,
)
from twell_numba.errors import TwellError
from twell_numba.kernels.attention.cuda_backward import (
    backward_by_keys,
    backward_by_queries,
    sum_rows,
)
from twell_numba.kernels.attention.cuda_tiles import (
    COLUMNS,
    PANEL,
    PART,
    PITCH,
    SHARE,
    SIDE,
    THREADS,
    TILE,
    VALUES,
    WEIGHTS,
    WIDE_PART,
    WIDE_SHARE,
    add_combinations,
    products,
    row_maximum,
    row_sum,
    store_columns,
    take_columns,
)
from twell_numba.kernels.checks import require_shape
from twell_numba.kernels.cuda_vectors import add_scaled, eight_zeros, load_aligned
from twell_numba.kernels.device_checks import arithmetic_dtype, float_array, float_arrays

# With fewer queries than this, most of a tile would be padding.
FEW_QUERIES = 8
# Keys of a query that one block goes through, when there are few queries.
KEYS_OF_A_PART = 256
EIGHTS = 8 * THREADS
MOST_BLOCKS = 2**31 - 1
PATHS = ("auto", "cudnn", "tiled")


def causal_attention(
    q: DeviceArray,
    k: DeviceArray,
    v: DeviceArray,
    *,
    length: int | DeviceArray | None = None,
    path: str = "auto",
) -> tuple[DeviceArray, DeviceArray]:
    """Attend from each query to the keys up to its own position.

    The last query stands at the last key: query i sees the keys j <= T - S + i. So S = T is
    training and prompt processing, and S = 1 is the next token after T - 1 cached ones.

    Parameters
    ----------
    q : DeviceArray of floats, shape (B, S, H, w)
    k, v : DeviceArray, shape (B, T, G, w)
        Of q's dtype. T >= S; H divisible by G: head h reads group h // (H / G).
    length : int or DeviceArray of int64, shape (1,), optional
        How many of the T keys are there, when k and v are a cache with room for T; the rest is not
        read. On the GPU it may change from one replay of a graph to the next: it is then taken to
        be in [S, T], which nobody checks.
    path : str
        ``cudnn``, ``tiled`` (our own kernels), or ``auto``: cuDNN where it can do it and there are
        not just a few queries. It cannot where ``length`` is on the GPU.

    Returns
    -------
    y : DeviceArray, shape (B, S, H, w)
    log_sum_exp : DeviceArray, shape (B, H, S)
        Of each query's scores; wanted by the backward pass. float32, or float64 for float64.

    Raises
    ------
    TypeError
        If the dtypes differ or are not floats.
    ValueError
        If the shapes do not fit together, or the arrays are on different GPUs.
    TwellError
        If ``path`` is ``cudnn`` and it is missing or cannot do it.

    Notes
    -----
    NaN and infinities in v spread to the tile of queries they are in, seen or not (0 * NaN).
    """
    float_arrays(q=q, k=k, v=v)
    _check_shapes(q, k, v)
    _check_path(path)
    batch, queries, heads, _ = q.shape
    keys, on_gpu = _key_count(length, q, k)
    if path == "cudnn" and keys < 0:
        raise ValueError("path 'cudnn' given with length on the GPU, path 'auto' wanted")
    y = empty(q.shape, q.dtype, q.stream)
    log_sum_exp = empty((batch, heads, queries), arithmetic_dtype(q.dtype), q.stream)
    if q.size == 0:
        return y, log_sum_exp
    if path == "cudnn" or (path == "auto" and keys >= 0 and queries >= FEW_QUERIES):
        obstacle = cudnn.forward(q, k, v, y, log_sum_exp, keys)
        if not obstacle:
            return y, log_sum_exp
        _forbid(obstacle, path, q, k)
    if queries < FEW_QUERIES:
        _attend_by_query(q, k, v, on_gpu, keys, y, log_sum_exp)
    else:
        items = _items(batch * heads, queries, q)
        _forward(
            min(items, MOST_BLOCKS),
            q, k, v, on_gpu, _scale(q), y, log_sum_exp, keys, *_sizes(q, k), items,
        )  # fmt: skip
    return y, log_sum_exp


def causal_attention_backward(
    dy: DeviceArray,
    q: DeviceArray,
    k: DeviceArray,
    v: DeviceArray,
    y: DeviceArray,
    log_sum_exp: DeviceArray,
    *,
    path: str = "auto",
) -> tuple[DeviceArray, DeviceArray, DeviceArray]:
    """Return the gradients of :func:`causal_attention`.

    Parameters
    ----------
    dy : DeviceArray, shape (B, S, H, w)
    q, k, v : DeviceArray
        The forward pass's inputs.
    y, log_sum_exp : DeviceArray
        The forward pass's results, by whatever path.
    path : str
        As there. cuDNN adds up in a fixed order, unless
        :mod:`twell_numba.device.gpu.determinism` does not require it.

    Returns
    -------
    dq : DeviceArray, shape (B, S, H, w)
    dk, dv : DeviceArray, shape (B, T, G, w)

    Raises
    ------
    TypeError, ValueError, TwellError
        As :func:`causal_attention`.
    """
    float_arrays(q=q, k=k, v=v, dy=dy, y=y)
    _check_shapes(q, k, v)
    _check_path(path)
    batch, queries, heads, width = q.shape
    keys, groups = k.shape[1:3]
    require_shape("dy", dy, q.shape)  # type: ignore[arg-type]
    require_shape("y", y, q.shape)  # type: ignore[arg-type]
    float_array("log_sum_exp", log_sum_exp, arithmetic_dtype(q.dtype), q)
    require_shape("log_sum_exp", log_sum_exp, (batch, heads, queries))  # type: ignore[arg-type]
    dq = empty(q.shape, q.dtype, q.stream)
    dk, dv = (empty(k.shape, k.dtype, k.stream) for _ in range(2))
    if q.size == 0:
        dk.fill_with_zeros()
        dv.fill_with_zeros()
        return dq, dk, dv
    if path == "cudnn" or (path == "auto" and queries >= FEW_QUERIES):
        obstacle = cudnn.backward(dy, q, k, v, y, log_sum_exp, dq, dk, dv)
        if not obstacle:
            return dq, dk, dv
        _forbid(obstacle, path, q, k)
    row_sums = empty(log_sum_exp.shape, log_sum_exp.dtype, q.stream)
    rows = batch * queries * heads
    sum_rows(sum_rows.blocks_of_warps(rows), dy, y, row_sums, queries, heads, width, rows)
    shared = (dy, q, k, v, log_sum_exp, row_sums, _scale(q))
    items = _items(batch * heads, queries, q)
    backward_by_queries(min(items, MOST_BLOCKS), *shared, dq, *_sizes(q, k), items)
    items = _items(batch * groups, keys, k)
    backward_by_keys(min(items, MOST_BLOCKS), *shared, dk, dv, *_sizes(q, k), items)
    return dq, dk, dv


def append_to_cache(cache: DeviceArray, rows: DeviceArray, position: int | DeviceArray) -> None:
    """Write the keys or values of new tokens into a cache of all of them.

    Parameters
    ----------
    cache : DeviceArray of floats, shape (B, T, G, w)
        With room for T tokens. Changed in place.
    rows : DeviceArray, shape (B, S, G, w)
        Of the cache's dtype.
    position : int or DeviceArray of int64, shape (1,)
        Of the first new token. On the GPU it may change from one replay of a graph to the next;
        what is past the cache's end is then left out.

    Raises
    ------
    TypeError
        If the dtypes differ or are not floats.
    ValueError
        If the shapes do not fit together, or there is no room.
    """
    float_arrays(cache=cache, rows=rows)
    require_shape("cache", cache, ("B", "T", "G", "w"))  # type: ignore[arg-type]
    batch, room, groups, width = cache.shape
    require_shape("rows", rows, (batch, "S", groups, width))  # type: ignore[arg-type]
    count = rows.shape[1]
    if isinstance(position, DeviceArray):
        _require_number("position", position)
        first, on_gpu = -1, position
    else:
        if not 0 <= position <= room - count:
            raise ValueError(
                f"position {position} given, 0 to {room - count} wanted for {count} tokens in a "
                f"cache with room for {room}"
            )
        first, on_gpu = int(position), empty(0, np.int64, cache.stream)
    _append(
        _append.blocks(rows.size),
        cache,
        rows,
        on_gpu,
        first,
        count,
        room,
        groups * width,
        rows.size,
    )


def _attend_by_query(
    q: DeviceArray,
    k: DeviceArray,
    v: DeviceArray,
    on_gpu: DeviceArray,
    keys: int,
    y: DeviceArray,
    log_sum_exp: DeviceArray,
) -> None:
    batch, queries, heads, width = q.shape
    rows = batch * queries * heads
    parts = -(-(k.shape[1] if keys < 0 else keys) // KEYS_OF_A_PART)
    dtype = log_sum_exp.dtype
    partial = empty((rows, parts, width), dtype, q.stream)
    maxima, normalizers = (empty((rows, parts), dtype, q.stream) for _ in range(2))
    lanes = _lanes_of_a_key(q, k, v)
    attend, items = _attend_parts, rows * parts * -(-width // COLUMNS)
    if lanes:
        attend, items = _attend_parts_by_eights, rows * parts
    attend(
        min(items, MOST_BLOCKS),
        q, k, v, on_gpu, _scale(q), partial, maxima, normalizers,
        keys, *_sizes(q, k), parts, KEYS_OF_A_PART, lanes, items,
    )  # fmt: skip
    _combine_parts(
        _combine_parts.blocks(rows * width),
        partial, maxima, normalizers, y, log_sum_exp, queries, heads, width, parts, rows,
    )  # fmt: skip


def _lanes_of_a_key(*arrays: DeviceArray) -> int:
    """Return how many lanes with eight numbers each have a row; 0 if they cannot share one."""
    lanes, rest = divmod(arrays[0].shape[3], 8)
    can_share = rest == 0 and lanes in (1, 2, 4, 8, 16, 32)
    return lanes if can_share and all(array.pointer % 16 == 0 for array in arrays) else 0


def _check_shapes(q: DeviceArray, k: DeviceArray, v: DeviceArray) -> None:
    require_shape("q", q, ("B", "S", "H", "w"))  # type: ignore[arg-type]
    batch, queries, heads, width = q.shape
    require_shape("k", k, (batch, "T", "G", width))  # type: ignore[arg-type]
    require_shape("v", v, k.shape)  # type: ignore[arg-type]
    keys, groups = k.shape[1:3]
    if keys < queries:
        raise ValueError(f"{keys} keys and {queries} queries given, as many keys at least wanted")
    if groups == 0 or heads % groups:
        raise ValueError(
            f"{heads} query heads and {groups} key/value heads given, "
            "query heads divisible by key/value heads wanted"
        )


def _check_path(path: str) -> None:
    if path not in PATHS:
        raise ValueError(f"path {path!r} given, one of {', '.join(PATHS)} wanted")


def _forbid(obstacle: str, path: str, q: DeviceArray, k: DeviceArray) -> None:
    """Raise the reason why cuDNN cannot do it, if it was asked for by name."""
    if path == "cudnn":
        raise TwellError(
            f"cuDNN cannot attend from q of shape {q.shape} to k of shape {k.shape} on GPU "
            f"{q.gpu.id}: {obstacle}; use path='auto'"
        )


def _key_count(
    length: int | DeviceArray | None, q: DeviceArray, k: DeviceArray
) -> tuple[int, DeviceArray]:
    """Return how many keys there are, or -1 and where on the GPU that is to be read."""
    queries, room = q.shape[1], k.shape[1]
    if isinstance(length, DeviceArray):
        _require_number("length", length)
        return -1, length
    if length is not None and not queries <= length <= room:
        raise ValueError(
            f"length {length} given, {queries} to {room} wanted for {queries} queries and "
            f"{room} keys"
        )
    return room if length is None else int(length), empty(0, np.int64, q.stream)


def _require_number(name: str, array: DeviceArray) -> None:
    if array.dtype != np.int64:
        raise TypeError(f"{name} of dtype {array.dtype} given, int64 wanted")
    require_shape(name, array, (1,))  # type: ignore[arg-type]


def _sizes(q: DeviceArray, k: DeviceArray) -> tuple[int, ...]:
    """Return S, T, H, G and w."""
    return q.shape[1], k.shape[1], q.shape[2], k.shape[2], q.shape[3]


def _items(heads: int, rows: int, array: DeviceArray) -> int:
    """Return the tiles of all heads, times the parts of the head width."""
    return heads * -(-rows // TILE) * -(-array.shape[3] // COLUMNS)


def _scale(q: DeviceArray) -> object:
    return arithmetic_dtype(q.dtype).type(max(q.shape[3], 1) ** -0.5)


@kernel(threads=THREADS)
def _forward(
    q, k, v, length, scale, y, log_sum_exp, keys, queries, room, heads, groups, width, items
):  # fmt: skip
    left = cuda.shared.array(PANEL, arithmetic_type(q))
    right = cuda.shared.array(PANEL, arithmetic_type(q))
    p = cuda.shared.array(WEIGHTS, arithmetic_type(q))
    values = cuda.shared.array(VALUES, arithmetic_type(q))
    scores = cuda.local.array(PART, arithmetic_type(q))
    mixed = cuda.local.array(WIDE_PART, arithmetic_type(q))
    maximum = cuda.local.array(SHARE, arithmetic_type(q))
    normalizer = cuda.local.array(SHARE, arithmetic_type(q))
    row = types.int64(cuda.threadIdx.x) // SIDE
    column = types.int64(cuda.threadIdx.x) % SIDE
    if keys < 0:
        keys = min(max(load(length, 0), queries), room)
    tiles = (queries + TILE - 1) // TILE
    chunks = (width + COLUMNS - 1) // COLUMNS
    item = types.int64(cuda.blockIdx.x)
    while item < items:
        start = item % chunks * COLUMNS
        tile = tiles - 1 - item // chunks % tiles  # those that see the most keys first
        head = item // chunks // tiles
        batch = head // heads
        head -= batch * heads
        q_base = (batch * queries * heads + head) * width
        k_base = (batch * room * groups + head // (heads // groups)) * width
        first = tile * TILE
        seen = keys - queries + first + 1  # by the first query
        end = min(keys, seen + TILE - 1)  # what the last one sees
        for i in range(SHARE):
            maximum[i] = -math.inf
            normalizer[i] = 0
        for i in range(WIDE_PART):
            mixed[i] = 0
        first_key = types.int64(0)
        while first_key < end:
            products(
                q, q_base, heads * width, first, queries,
                k, k_base, groups * width, first_key, end, width, left, right, scores,
            )  # fmt: skip
            for i in range(SHARE):
                query = row + i * SIDE
                largest = maximum[i]
                for j in range(SHARE):
                    score = scores[i * SHARE + j] * scale
                    if first_key + column + j * SIDE >= seen + query:
                        score = number(q, -math.inf)
                    scores[i * SHARE + j] = score
                    largest = score if score > largest else largest
                largest = row_maximum(largest)
                total = number(q, 0)
                for j in range(SHARE):
                    weight = math.exp(scores[i * SHARE + j] - largest)
                    p[types.uint64(query * PITCH + column + j * SIDE)] = weight
                    total += weight
                # a new maximum rescales what has been summed so far
                factor = math.exp(maximum[i] - largest)
                maximum[i] = largest
                normalizer[i] = normalizer[i] * factor + row_sum(total)
                for j in range(WIDE_SHARE):
                    mixed[i * WIDE_SHARE + j] *= factor
            take_columns(v, k_base, groups * width, first_key, end, start, width, values)
            cuda.syncthreads()
            add_combinations(p, values, end - first_key, mixed)
            cuda.syncthreads()
            first_key += TILE
        for i in range(SHARE):
            for j in range(WIDE_SHARE):
                mixed[i * WIDE_SHARE + j] /= normalizer[i]
            query = first + row + i * SIDE
            if query < queries and column == 0 and start == 0:
                place = (batch * heads + head) * queries + query
                store(log_sum_exp, place, maximum[i] + math.log(normalizer[i]))
        store_columns(mixed, y, q_base, heads * width, first, queries, start, width)
        item += cuda.gridDim.x


@kernel(threads=THREADS)
def _attend_parts(
    q, k, v, length, scale, partial, maxima, normalizers,
    keys, queries, room, heads, groups, width, parts, span, lanes, items,
):  # fmt: skip
    """One query and up to ``span`` keys: a thread a key, then a thread a column of v."""
    p = cuda.shared.array(THREADS, arithmetic_type(q))
    if keys < 0:
        keys = min(max(load(length, 0), queries), room)
    thread = types.int64(cuda.threadIdx.x)
    chunks = (width + COLUMNS - 1) // COLUMNS
    item = types.int64(cuda.blockIdx.x)
    while item < items:
        column = item % chunks * COLUMNS + thread
        part = item // chunks % parts
        row = item // chunks // parts  # of q, as (B S H, w)
        head = row % heads
        query = row // heads % queries
        batch = row // heads // queries
        k_base = (batch * room * groups + head // (heads // groups)) * width
        key = part * span
        end = min(keys - queries + query + 1, key + span)
        maximum = number(q, -math.inf)
        normalizer = number(q, 0)
        mixed = number(q, 0)
        while key < end:
            score = number(q, -math.inf)
            if key + thread < end:
                score = number(q, 0)
                place = k_base + (key + thread) * groups * width
                for d in range(width):
                    score += load(q, row * width + d) * load(k, place + d)
                score *= scale
            p[types.uint64(thread)] = score
            cuda.syncthreads()
            largest = maximum
            for j in range(THREADS):
                largest = p[j] if p[j] > largest else largest
            cuda.syncthreads()
            p[types.uint64(thread)] = math.exp(score - largest)
            cuda.syncthreads()
            factor = math.exp(maximum - largest)
            maximum = largest
            normalizer *= factor
            mixed *= factor
            for j in range(min(types.int64(THREADS), end - key)):
                weight = p[types.uint64(j)]
                normalizer += weight
                if column < width:
                    mixed += weight * load(v, k_base + (key + j) * groups * width + column)
            cuda.syncthreads()
            key += THREADS
        if column < width:
            store(partial, (row * parts + part) * width + column, mixed)
        if column == 0:
            store(maxima, row * parts + part, maximum)
            store(normalizers, row * parts + part, normalizer)
        item += cuda.gridDim.x


@kernel(threads=THREADS)
def _attend_parts_by_eights(
    q, k, v, length, scale, partial, maxima, normalizers,
    keys, queries, room, heads, groups, width, parts, span, lanes, items,
):  # fmt: skip
    """One query and up to ``span`` keys: ``lanes`` neighbours share a key, eight columns each.

    ``lanes`` is a power of two, and 8 * lanes the head width. Each such group takes every so many
    keys, with a softmax of its own, and their results are put together at the end.
    """
    group_maxima = cuda.shared.array(THREADS, arithmetic_type(q))
    group_normalizers = cuda.shared.array(THREADS, arithmetic_type(q))
    group_mixed = cuda.shared.array(EIGHTS, arithmetic_type(q))
    if keys < 0:
        keys = min(max(load(length, 0), queries), room)
    thread = types.int64(cuda.threadIdx.x)
    at_a_time = THREADS // lanes
    own = thread // lanes
    d = thread % lanes * 8
    item = types.int64(cuda.blockIdx.x)
    while item < items:
        part = item % parts
        row = item // parts  # of q, as (B S H, w)
        head = row % heads
        query = row // heads % queries
        batch = row // heads // queries
        k_base = (batch * room * groups + head // (heads // groups)) * width + d
        first = part * span
        end = min(keys - queries + query + 1, first + span)
        asked = load_aligned(q, row * width + d)
        maximum = number(q, -math.inf)
        normalizer = number(q, 0)
        mixed = eight_zeros(q)
        while first < end:
            place = k_base + min(first + own, end - 1) * groups * width
            offered = load_aligned(k, place)
            values = load_aligned(v, place)
            score = (
                (asked[0] * offered[0] + asked[1] * offered[1])
                + (asked[2] * offered[2] + asked[3] * offered[3])
                + (asked[4] * offered[4] + asked[5] * offered[5])
                + (asked[6] * offered[6] + asked[7] * offered[7])
            )
            distance = lanes // 2
            while distance > 0:
                score += cuda.shfl_xor_sync(FULL_WARP, score, distance)
                distance //= 2
            if first + own < end:
                score *= scale
                largest = score if score > maximum else maximum
                factor = math.exp(maximum - largest)
                weight = math.exp(score - largest)
                maximum = largest
                normalizer = normalizer * factor + weight
                mixed = add_scaled(scaled(mixed, factor), weight, values)
            first += at_a_time
        group_maxima[types.uint64(own)] = maximum
        group_normalizers[types.uint64(own)] = normalizer
        for i in range(8):
            group_mixed[types.uint64(own * width + d + i)] = mixed[i]
        cuda.syncthreads()
        largest = number(q, -math.inf)
        for group in range(at_a_time):
            other = group_maxima[types.uint64(group)]
            largest = other if other > largest else largest
        column = thread
        while column < width:
            normalizer = number(q, 0)
            total = number(q, 0)
            for group in range(at_a_time):
                if group_normalizers[types.uint64(group)] != 0:
                    factor = math.exp(group_maxima[types.uint64(group)] - largest)
                    normalizer += factor * group_normalizers[types.uint64(group)]
                    total += factor * group_mixed[types.uint64(group * width + column)]
            store(partial, (row * parts + part) * width + column, total)
            if column == 0:
                store(maxima, row * parts + part, largest)
                store(normalizers, row * parts + part, normalizer)
            column += THREADS
        cuda.syncthreads()
        item += cuda.gridDim.x


@device_function
def scaled(numbers, factor):
    """Return eight numbers times a factor."""
    return (
        numbers[0] * factor,
        numbers[1] * factor,
        numbers[2] * factor,
        numbers[3] * factor,
        numbers[4] * factor,
        numbers[5] * factor,
        numbers[6] * factor,
        numbers[7] * factor,
    )


@kernel()
def _combine_parts(
    partial, maxima, normalizers, y, log_sum_exp, queries, heads, width, parts, rows
):  # fmt: skip
    item = global_thread()
    while item < rows * width:
        row = item // width
        maximum = number(partial, -math.inf)
        for part in range(parts):
            other = load(maxima, row * parts + part)
            maximum = other if other > maximum else maximum
        normalizer = number(partial, 0)
        mixed = number(partial, 0)
        for part in range(parts):
            place = row * parts + part
            if load(normalizers, place) != 0:  # an earlier query sees fewer parts
                factor = math.exp(load(maxima, place) - maximum)
                normalizer += load(normalizers, place) * factor
                mixed += load(partial, place * width + item % width) * factor
        store(y, item, mixed / normalizer)
        if item % width == 0:
            batch = row // heads // queries
            place = (batch * heads + row % heads) * queries + row // heads % queries
            store(log_sum_exp, place, maximum + math.log(normalizer))
        item += grid_threads()


@kernel()
def _append(cache, rows, position, first, count, room, width, size):
    if first < 0:
        first = load(position, 0)
    i = global_thread()
    while i < size:
        batch = i // (count * width)
        place = i - batch * count * width
        token = first + place // width
        if 0 <= token < room:
            store(cache, (batch * room + token) * width + place % width, load(rows, i))
        i += grid_threads()
