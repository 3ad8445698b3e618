"""The backward pass of causal attention on a GPU.

    dv = p^T dy,  dp = dy v^T,  ds = p * (dp - sum_d(dy * y)) / sqrt(w),  dq = ds k,  dk = ds^T q

Tiles of p are computed anew from the scores and L, once for the queries' gradients and once for the
keys', whose block goes over all heads that share a group: nothing is added to by two blocks.
"""

import math

from twell_numba.device.gpu import kernel
from twell_numba.device.gpu.language import (
    arithmetic_type,
    cuda,
    global_thread,
    grid_threads,
    load,
    number,
    store,
    types,
    warp_sum,
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
    add_combinations,
    products,
    store_columns,
    take_columns,
)


@kernel()
def sum_rows(dy, y, row_sums, queries, heads, width, rows):
    """Write the sum of dy * y over the head width, (B, H, S), of arrays (B, S, H, w)."""
    lane = global_thread() % 32
    row = global_thread() // 32
    while row < rows:
        total = number(dy, 0)
        d = lane
        while d < width:
            total += load(dy, row * width + d) * load(y, row * width + d)
            d += 32
        total = warp_sum(total)
        if lane == 0:
            batch = row // heads // queries
            place = (batch * heads + row % heads) * queries + row // heads % queries
            store(row_sums, place, total)
        row += grid_threads() // 32


@kernel(threads=THREADS)
def backward_by_queries(
    dy, q, k, v, log_sum_exp, row_sums, scale, dq, queries, keys, heads, groups, width, items
):  # fmt: skip
    """Write dq: a block takes 32 queries of a head and goes over the keys they see."""
    left = cuda.shared.array(PANEL, arithmetic_type(q))
    right = cuda.shared.array(PANEL, arithmetic_type(q))
    d_s = cuda.shared.array(WEIGHTS, arithmetic_type(q))
    values = cuda.shared.array(VALUES, arithmetic_type(q))
    scores = cuda.local.array(PART, arithmetic_type(q))
    d_p = cuda.local.array(PART, arithmetic_type(q))
    sums = cuda.local.array(WIDE_PART, arithmetic_type(q))
    row = types.int64(cuda.threadIdx.x) // SIDE
    column = types.int64(cuda.threadIdx.x) % SIDE
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
        k_base = (batch * keys * groups + head // (heads // groups)) * width
        first = tile * TILE
        seen = keys - queries + first + 1  # by the first query
        end = min(keys, seen + TILE - 1)  # what the last one sees
        for i in range(WIDE_PART):
            sums[i] = 0
        first_key = types.int64(0)
        while first_key < end:
            products(
                q, q_base, heads * width, first, queries,
                k, k_base, groups * width, first_key, end, width, left, right, scores,
            )  # fmt: skip
            products(
                dy, q_base, heads * width, first, queries,
                v, k_base, groups * width, first_key, end, width, left, right, d_p,
            )  # fmt: skip
            for i in range(SHARE):
                query = row + i * SIDE
                visible = min(end, seen + query) if first + query < queries else types.int64(0)
                place = (batch * heads + head) * queries + min(first + query, queries - 1)
                normalizer = load(log_sum_exp, place)
                row_sum = load(row_sums, place)
                for j in range(SHARE):
                    key = column + j * SIDE
                    d_score = number(q, 0)
                    if first_key + key < visible:
                        p = math.exp(scores[i * SHARE + j] * scale - normalizer)
                        d_score = p * (d_p[i * SHARE + j] - row_sum) * scale
                    d_s[types.uint64(query * PITCH + key)] = d_score
            take_columns(k, k_base, groups * width, first_key, end, start, width, values)
            cuda.syncthreads()
            add_combinations(d_s, values, end - first_key, sums)
            cuda.syncthreads()
            first_key += TILE
        store_columns(sums, dq, q_base, heads * width, first, queries, start, width)
        item += cuda.gridDim.x


@kernel(threads=THREADS)
def backward_by_keys(
    dy, q, k, v, log_sum_exp, row_sums, scale, dk, dv, queries, keys, heads, groups, width, items
):  # fmt: skip
    """Write dk and dv: a block takes 32 keys of a group and goes over the queries that see them."""
    left = cuda.shared.array(PANEL, arithmetic_type(q))
    right = cuda.shared.array(PANEL, arithmetic_type(q))
    p = cuda.shared.array(WEIGHTS, arithmetic_type(q))
    d_s = cuda.shared.array(WEIGHTS, arithmetic_type(q))
    values = cuda.shared.array(VALUES, arithmetic_type(q))
    scores = cuda.local.array(PART, arithmetic_type(q))
    d_p = cuda.local.array(PART, arithmetic_type(q))
    dk_sums = cuda.local.array(WIDE_PART, arithmetic_type(q))
    dv_sums = cuda.local.array(WIDE_PART, arithmetic_type(q))
    row = types.int64(cuda.threadIdx.x) // SIDE
    column = types.int64(cuda.threadIdx.x) % SIDE
    tiles = (keys + TILE - 1) // TILE
    chunks = (width + COLUMNS - 1) // COLUMNS
    sharing = heads // groups
    item = types.int64(cuda.blockIdx.x)
    while item < items:
        start = item % chunks * COLUMNS
        first_key = item // chunks % tiles * TILE  # the first keys are seen by the most queries
        group = item // chunks // tiles
        batch = group // groups
        group -= batch * groups
        k_base = (batch * keys * groups + group) * width
        for i in range(WIDE_PART):
            dk_sums[i] = 0
            dv_sums[i] = 0
        # the first tile of queries of which one sees the first key
        first_query = max(types.int64(0), first_key - (keys - queries)) // TILE * TILE
        for head in range(group * sharing, (group + 1) * sharing):
            q_base = (batch * queries * heads + head) * width
            first = first_query
            while first < queries:
                products(
                    k, k_base, groups * width, first_key, keys,
                    q, q_base, heads * width, first, queries, width, left, right, scores,
                )  # fmt: skip
                products(
                    v, k_base, groups * width, first_key, keys,
                    dy, q_base, heads * width, first, queries, width, left, right, d_p,
                )  # fmt: skip
                for j in range(SHARE):
                    query = column + j * SIDE
                    seen = keys - queries + first + query + 1
                    visible = seen if first + query < queries else types.int64(0)
                    place = (batch * heads + head) * queries + min(first + query, queries - 1)
                    normalizer = load(log_sum_exp, place)
                    row_sum = load(row_sums, place)
                    for i in range(SHARE):
                        key = row + i * SIDE
                        weight = number(q, 0)
                        d_score = number(q, 0)
                        if first_key + key < visible:
                            weight = math.exp(scores[i * SHARE + j] * scale - normalizer)
                            d_score = weight * (d_p[i * SHARE + j] - row_sum) * scale
                        target = types.uint64(key * PITCH + query)
                        p[target] = weight
                        d_s[target] = d_score
                take_columns(dy, q_base, heads * width, first, queries, start, width, values)
                cuda.syncthreads()
                add_combinations(p, values, queries - first, dv_sums)
                cuda.syncthreads()
                take_columns(q, q_base, heads * width, first, queries, start, width, values)
                cuda.syncthreads()
                add_combinations(d_s, values, queries - first, dk_sums)
                cuda.syncthreads()
                first += TILE
        store_columns(dk_sums, dk, k_base, groups * width, first_key, keys, start, width)
        store_columns(dv_sums, dv, k_base, groups * width, first_key, keys, start, width)
        item += cuda.gridDim.x
