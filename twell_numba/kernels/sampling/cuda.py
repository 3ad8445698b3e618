"""Choosing tokens from logits, on a GPU, without sorting them.

What the reference finds in the sorted list is found by the logits' bits, which are put in the same
order as the logits and looked at from the highest on, four at a time: a thread adds up, for each of
16 digits, the weights (or the number) of its tokens of which the higher bits are known. The digit
is that at which the sum from the largest logit on gets to what is wanted, and in the end all bits
of one logit are known; of tokens with just this logit it is counted how many are wanted.

One block takes a row, with the same settings as all others. Bound by latency: each of up to three
searches (the k-th largest, the mass ``top_p``, the mass drawn) passes four (bfloat16) to eight
times over the row, which comes from a cache, eight logits a thread at once; temperature 0 takes one
pass. Sums are in float64 and in an order that depends on the size of the row alone: the same token
in every run, on every GPU.
"""

import math

import numpy as np
from llvmlite import ir

from twell_numba.device.gpu import DeviceArray, empty, kernel, require_same_gpu
from twell_numba.device.gpu.language import (
    block_maximum,
    block_sum,
    cuda,
    device_function,
    intrinsic,
    load,
    store,
    types,
    warp_sum,
)
from twell_numba.kernels.checks import require_shape
from twell_numba.kernels.cuda_vectors import load_eight, store_eight
from twell_numba.kernels.device_checks import float_array, float_arrays
from twell_numba.kernels.twell.cuda_language import block_prefix

THREADS = 1024
# Bits that a pass finds of a logit's 32, and how many different digits they make.
DIGIT_BITS = 4
DIGITS = 16
WARP_DIGITS = 32 * DIGITS
HIGHEST_KEY = 2**32
# Bits that say nothing, of a logit as float32; whole digits.
_UNUSED_BITS = {"float32": 0, "float16": 12, "bfloat16": 16}


def sample_token(
    logits: DeviceArray,
    uniform: DeviceArray,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
) -> DeviceArray:
    """Draw a token from softmax(logits / temperature) of each row, cut to its likeliest tokens.

    Parameters
    ----------
    logits : DeviceArray of float32, bfloat16 or float16, shape (V,) or (B, V)
        -inf forbids a token.
    uniform : DeviceArray of float64, shape (B,)
        In [0, 1), one number for each row.
    temperature : float
        0 takes the likeliest token (of equals, the first).
    top_k : int
        Keep the k likeliest tokens; 0 keeps all.
    top_p : float
        Then keep the fewest likeliest tokens that together have at least this probability. At
        least one is kept.
    min_p : float
        Then keep those that have at least this fraction of the likeliest token's probability.

    Returns
    -------
    DeviceArray of int64, shape (B,)
        -1 where no token can be chosen: a logit is NaN or +inf, or all are -inf.

    Raises
    ------
    TypeError
        If a dtype is another.
    ValueError
        If the shapes do not fit, or the arrays are on different GPUs.
    """
    float_arrays(logits=logits)
    if logits.dtype == np.float64:
        raise TypeError("logits of dtype float64 given, at most 32 bits wanted")
    if logits.ndim not in (1, 2) or logits.shape[-1] == 0:
        raise ValueError(f"logits of shape {logits.shape} given, (V,) or (B, V) wanted")
    rows, vocabulary = logits.size // logits.shape[-1], logits.shape[-1]
    float_array("uniform", uniform, np.dtype(np.float64), logits)
    require_shape("uniform", uniform, (rows,))  # type: ignore[arg-type]
    require_same_gpu(logits=logits, uniform=uniform)
    tokens = empty(rows, np.int64, logits.stream)
    weights = empty((rows, vocabulary), np.float64, logits.stream)
    settings = (np.float64(temperature), int(top_k), np.float64(top_p), np.float64(min_p))
    is_aligned = int(vocabulary % 8 == 0 and logits.pointer % 16 == 0)
    dropped = _UNUSED_BITS[logits.dtype.name]
    _sample(
        rows, logits, uniform, *settings, weights, tokens, vocabulary, is_aligned, dropped
    )  # fmt: skip
    return tokens


def _float_bits(typing_context, value):
    def generate(context, builder, signature, arguments):
        single = context.cast(builder, arguments[0], signature.args[0], types.float32)
        return builder.bitcast(single, ir.IntType(32))

    return types.int32(value), generate


def _float_bits_in_numpy(value, definition=_float_bits):
    """What float_bits does; see below."""
    return np.float32(value).view(np.int32)


# The bits of a float32, as an int32. The plain function is what tests without a GPU run; it names
# the definition as a default so that this is part of the fingerprint of the kernels that use it.
float_bits = intrinsic(_float_bits)
float_bits.py_func = _float_bits_in_numpy


@device_function
def _key(logit, dropped):
    """Return a number that grows with the logit; the same for 0 and -0.

    It has 32 bits less those that are ``dropped``, which tell no logits of a dtype apart.
    """
    bits = types.int64(float_bits(logit))
    key = bits | 0x80000000
    if logit == 0:
        key = types.int64(0x80000000)
    elif bits < 0:
        key = ~bits
    return (key & 0xFFFFFFFF) >> dropped


@device_function
def _sum_digits(sums, totals):
    """Write the block's sums of 16 numbers of each thread to an array in shared memory."""
    parts = cuda.shared.array(WARP_DIGITS, types.float64)
    warp = cuda.threadIdx.x // 32
    for digit in range(DIGITS):
        total = warp_sum(sums[digit])
        if cuda.threadIdx.x % 32 == 0:
            parts[warp * DIGITS + digit] = total
    cuda.syncthreads()
    if cuda.threadIdx.x < DIGITS:
        total = types.float64(0)
        for other in range(cuda.blockDim.x // 32):
            total += parts[other * DIGITS + cuda.threadIdx.x]
        totals[cuda.threadIdx.x] = total
    cuda.syncthreads()


@device_function
def _search(
    logits, weights, start, vocabulary, is_aligned, dropped, is_count, low, last, wanted, is_strict
):  # fmt: skip
    """Return the key at which the sum from the largest on gets to ``wanted``, and the sum before.

    Added up are the weights, or the numbers, of tokens whose key is above ``low``, or equal to it
    if the token is at most ``last``.
    """
    sums = cuda.local.array(DIGITS, types.float64)
    totals = cuda.shared.array(DIGITS, types.float64)
    found = types.int64(0)
    above = types.float64(0)
    steps = (32 - dropped) // DIGIT_BITS
    for step in range(steps):
        shift = DIGIT_BITS * (steps - 1 - step)
        for digit in range(DIGITS):
            sums[digit] = 0.0
        v = types.int64(cuda.threadIdx.x) * 8
        while v < vocabulary:
            numbers = load_eight(logits, start, v, vocabulary, is_aligned)
            for n in range(8):
                key = _key(numbers[n], dropped)
                is_kept = key > low or (key == low and v + n <= last)
                is_alike = (key >> shift) >> DIGIT_BITS == found
                if is_kept and is_alike and v + n < vocabulary:
                    weight = types.float64(1)
                    if is_count == 0:
                        weight = load(weights, start + v + n)
                    sums[(key >> shift) & (DIGITS - 1)] += weight
            v += types.int64(cuda.blockDim.x) * 8
        _sum_digits(sums, totals)
        # Where rounding keeps the sum below what is wanted, the last digit that there is.
        chosen, before = types.int64(0), above
        is_reached = False
        for i in range(DIGITS):
            digit = DIGITS - 1 - i
            total = totals[digit]
            if not is_reached and total > 0:
                chosen, before = types.int64(digit), above
                above += total
                is_reached = above > wanted or (is_strict == 0 and above >= wanted)
        cuda.syncthreads()  # the next sums are written to the same place
        above = before
        found = (found << DIGIT_BITS) | chosen
    return found, above


@device_function
def _place_of(logits, start, vocabulary, is_aligned, dropped, wanted_key, wanted):
    """Return the ``wanted``-th token with a key, from 1, or the last one if there are fewer."""
    place = cuda.shared.array(1, types.int64)
    threads = types.int64(cuda.blockDim.x)
    share = (vocabulary + 8 * threads - 1) // (8 * threads) * 8
    first = min(vocabulary, types.int64(cuda.threadIdx.x) * share)
    end = min(vocabulary, first + share)
    own = types.int64(0)
    v = first
    while v < end:
        numbers = load_eight(logits, start, v, vocabulary, is_aligned)
        for n in range(8):
            own += types.int64(v + n < end and _key(numbers[n], dropped) == wanted_key)
        v += 8
    before, count = block_prefix(own)
    wanted = min(wanted, count)
    if before < wanted <= before + own:
        for token in range(first, end):
            if _key(load(logits, start + token), dropped) == wanted_key:
                before += 1
                if before == wanted:
                    place[0] = token
    cuda.syncthreads()
    result = place[0]
    cuda.syncthreads()
    return result


@device_function
def _kept_sum(logits, weights, start, vocabulary, is_aligned, dropped, low, last):
    """Return the sum of the weights of the tokens that are kept."""
    total = types.float64(0)
    v = types.int64(cuda.threadIdx.x) * 8
    while v < vocabulary:
        numbers = load_eight(logits, start, v, vocabulary, is_aligned)
        masses = load_eight(weights, start, v, vocabulary, is_aligned)
        for n in range(8):
            key = _key(numbers[n], dropped)
            is_kept = key > low or (key == low and v + n <= last)
            if is_kept and v + n < vocabulary:
                total += masses[n]
        v += types.int64(cuda.blockDim.x) * 8
    return block_sum(total)


@device_function
def _weight_of(logits, weights, start, vocabulary, is_aligned, dropped, wanted_key):
    """Return the weight of the tokens with a key, which is the same for all of them."""
    weight = types.float64(0)
    v = types.int64(cuda.threadIdx.x) * 8
    while v < vocabulary:
        numbers = load_eight(logits, start, v, vocabulary, is_aligned)
        for n in range(8):
            if v + n < vocabulary and _key(numbers[n], dropped) == wanted_key:
                weight = load(weights, start + v + n)
        v += types.int64(cuda.blockDim.x) * 8
    return block_maximum(weight)


@device_function
def _lowest_key(logits, weights, start, vocabulary, is_aligned, dropped, least):
    """Return the lowest key of a token that weighs at least so much."""
    lowest = types.int64(HIGHEST_KEY)
    v = types.int64(cuda.threadIdx.x) * 8
    while v < vocabulary:
        numbers = load_eight(logits, start, v, vocabulary, is_aligned)
        masses = load_eight(weights, start, v, vocabulary, is_aligned)
        for n in range(8):
            if v + n < vocabulary and masses[n] >= least:
                lowest = min(lowest, _key(numbers[n], dropped))
        v += types.int64(cuda.blockDim.x) * 8
    return -types.int64(block_maximum(-lowest))


@device_function
def _last_wanted(
    logits, weights, start, vocabulary, is_aligned, dropped, is_count, low, last, wanted, is_strict
):  # fmt: skip
    """Return the key, and the token, at which the sum of weights or numbers gets to ``wanted``."""
    key, above = _search(
        logits, weights, start, vocabulary, is_aligned, dropped,
        is_count, low, last, wanted, is_strict,
    )  # fmt: skip
    weight = types.float64(1)
    if is_count == 0:
        weight = _weight_of(logits, weights, start, vocabulary, is_aligned, dropped, key)
    count = types.int64(1)
    if weight > 0:
        count = max(count, types.int64(min((wanted - above) / weight, 1e15)))
        while above + count * weight < wanted or (
            is_strict != 0 and above + count * weight == wanted
        ):
            count += 1
    token = _place_of(logits, start, vocabulary, is_aligned, dropped, key, count)
    if key == low and token > last:
        token = last
    return key, token


@device_function
def _weights_of(numbers, largest, temperature):
    return (
        math.exp((types.float64(numbers[0]) - largest) / temperature),
        math.exp((types.float64(numbers[1]) - largest) / temperature),
        math.exp((types.float64(numbers[2]) - largest) / temperature),
        math.exp((types.float64(numbers[3]) - largest) / temperature),
        math.exp((types.float64(numbers[4]) - largest) / temperature),
        math.exp((types.float64(numbers[5]) - largest) / temperature),
        math.exp((types.float64(numbers[6]) - largest) / temperature),
        math.exp((types.float64(numbers[7]) - largest) / temperature),
    )


@kernel(threads=THREADS)
def _sample(
    logits, uniform, temperature, top_k, top_p, min_p,
    weights, tokens, vocabulary, is_aligned, dropped,
):  # fmt: skip
    """A block takes a row."""
    row = types.int64(cuda.blockIdx.x)
    start = row * vocabulary
    step = types.int64(cuda.blockDim.x) * 8
    own_largest = types.float64(-math.inf)
    own_place = vocabulary
    is_wrong = types.int32(0)
    v = types.int64(cuda.threadIdx.x) * 8
    while v < vocabulary:
        numbers = load_eight(logits, start, v, vocabulary, is_aligned)
        for n in range(8):
            logit = types.float64(numbers[n])
            if v + n < vocabulary:
                if logit > own_largest:
                    own_largest = logit
                    own_place = v + n
                if not logit < math.inf:
                    is_wrong = types.int32(1)
        v += step
    largest = block_maximum(own_largest)
    if largest == -math.inf:
        is_wrong = types.int32(1)
    is_wrong = cuda.syncthreads_or(is_wrong)
    # Kept are tokens whose key is above ``low``, or equal to it if the token is at most ``last``.
    low, last = types.int64(-1), vocabulary
    if temperature > 0:
        v = types.int64(cuda.threadIdx.x) * 8
        while v < vocabulary:
            numbers = load_eight(logits, start, v, vocabulary, is_aligned)
            masses = _weights_of(numbers, largest, temperature)
            store_eight(weights, start, v, vocabulary, masses, is_aligned)
            v += step
    else:
        if own_largest != largest:
            own_place = vocabulary
        last = -types.int64(block_maximum(-own_place))
    # the first k, of these the first with a mass of p, of these one that weighs enough
    for stage in range(3):
        is_wanted = stage == 2
        if stage == 0:
            is_wanted = 0 < top_k < vocabulary
        elif stage == 1:
            is_wanted = top_p < 1
        if stage == 2 and min_p > 0 and not is_wrong and temperature > 0:
            key = _lowest_key(
                logits, weights, start, vocabulary, is_aligned, dropped, min_p
            )  # fmt: skip
            if key > low:
                low, last = key, vocabulary
        if is_wanted and not is_wrong and temperature > 0:
            wanted = types.float64(top_k)
            if stage > 0:
                wanted = top_p
                if stage == 2:
                    wanted = load(uniform, row)
                wanted *= _kept_sum(
                    logits, weights, start, vocabulary, is_aligned, dropped, low, last
                )
            is_count, is_strict = types.int64(stage == 0), types.int64(stage == 2)
            low, last = _last_wanted(
                logits, weights, start, vocabulary, is_aligned, dropped,
                is_count, low, last, wanted, is_strict,
            )  # fmt: skip
    if cuda.threadIdx.x == 0:
        if is_wrong:
            last = types.int64(-1)
        store(tokens, row, last)
