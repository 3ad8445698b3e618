"""What kernels share that hold rows by eights of numbers in arrays of a thread: in its registers.

Used inside kernels only.
"""

from twell_numba.device.gpu.language import (
    FULL_WARP,
    cuda,
    device_function,
)
from twell_numba.kernels.cuda_vectors import eight_zeros, load_aligned, store_aligned


@device_function
def load_if(mine, matrix, index):
    """Return eight numbers from ``index`` on, of a thread that has columns; otherwise 0."""
    numbers = eight_zeros(matrix)
    if mine:
        numbers = load_aligned(matrix, index)
    return numbers


@device_function
def store_if(mine, matrix, index, numbers):
    """Write eight numbers from ``index`` on, for a thread that has columns."""
    if mine:
        store_aligned(matrix, index, numbers)


@device_function
def keep(own, first, numbers):
    """Write eight numbers to an array."""
    own[first] = numbers[0]
    own[first + 1] = numbers[1]
    own[first + 2] = numbers[2]
    own[first + 3] = numbers[3]
    own[first + 4] = numbers[4]
    own[first + 5] = numbers[5]
    own[first + 6] = numbers[6]
    own[first + 7] = numbers[7]


@device_function
def kept(own, first):
    """Return eight numbers of an array."""
    return (
        own[first],
        own[first + 1],
        own[first + 2],
        own[first + 3],
        own[first + 4],
        own[first + 5],
        own[first + 6],
        own[first + 7],
    )


@device_function
def keep_added(sums, first, numbers):
    """Let eight sums of an array grow by a number each."""
    for i in range(8):
        sums[first + i] += numbers[i]


@device_function
def add_kept(matrix, index, sums, first):
    """Add eight sums of an array to numbers that no other thread touches."""
    keep_added(sums, first, load_aligned(matrix, index))
    store_aligned(matrix, index, kept(sums, first))


@device_function
def add_scaled_to(sums, first, factor, numbers):
    """Let eight sums of an array grow by ``factor`` times a number."""
    sums[first] += factor * numbers[0]
    sums[first + 1] += factor * numbers[1]
    sums[first + 2] += factor * numbers[2]
    sums[first + 3] += factor * numbers[3]
    sums[first + 4] += factor * numbers[4]
    sums[first + 5] += factor * numbers[5]
    sums[first + 6] += factor * numbers[6]
    sums[first + 7] += factor * numbers[7]


@device_function
def dot_eight(own, first, numbers):
    """Return the product of eight numbers of an array and eight others."""
    return (
        (own[first] * numbers[0] + own[first + 1] * numbers[1])
        + (own[first + 2] * numbers[2] + own[first + 3] * numbers[3])
    ) + (
        (own[first + 4] * numbers[4] + own[first + 5] * numbers[5])
        + (own[first + 6] * numbers[6] + own[first + 7] * numbers[7])
    )


@device_function
def fold(numbers, pairs, step):
    """Add pairs of numbers up over pairs of lanes, so that each lane has the sums of one of two."""
    for i in range(pairs):
        kept_here, sent = numbers[2 * i], numbers[2 * i + 1]
        if cuda.threadIdx.x & step != 0:
            kept_here, sent = sent, kept_here
        numbers[i] = kept_here + cuda.shfl_xor_sync(FULL_WARP, sent, step)
