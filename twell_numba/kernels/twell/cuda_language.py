"""What the kernels of the activation-sparse layers share: used inside kernels only."""

from twell_numba.device.gpu.language import (
    FULL_WARP,
    cuda,
    device_function,
    load,
    number,
    store,
    types,
)

# The most threads of a block that block_prefix can serve.
MOST_THREADS = 256


@device_function
def warp_prefix(value):
    """Return the sum of an integer over the lanes before this one, and over the whole warp."""
    lane = cuda.threadIdx.x % 32
    before = types.int64(0)
    total = types.int32(value)
    for step in range(5):
        # so far total is over a group of 2^step lanes; other is that of the group beside it
        other = cuda.shfl_xor_sync(FULL_WARP, total, 1 << step)
        if (lane >> step) % 2 == 1:
            before += other
        total = types.int32(total + other)
    return before, types.int64(total)


@device_function
def block_prefix(value):
    """Return the sum of an integer over the threads before this one, and over the whole block."""
    parts = cuda.shared.array(MOST_THREADS, types.int64)
    parts[cuda.threadIdx.x] = value
    cuda.syncthreads()
    before = types.int64(0)
    for thread in range(cuda.threadIdx.x):
        before += parts[thread]
    total = before
    for thread in range(cuda.threadIdx.x, cuda.blockDim.x):
        total += parts[thread]
    cuda.syncthreads()  # the next prefix writes to the same place
    return before, total


@device_function
def sign(value, one):
    """Return -1, 0 or 1, of the type of ``one``; NaN stays NaN."""
    result = value
    if value > 0:
        result = one
    elif value < 0:
        result = -one
    return result


@device_function
def add(array, index, value):
    """Add to a number that no other thread touches."""
    store(array, index, number(array, load(array, index) + value))
