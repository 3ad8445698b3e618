"""How sparse activations are, added up on a GPU over what was counted for each row or neuron."""

import numpy as np

from twell_numba.device.gpu import DeviceArray, empty, kernel
from twell_numba.device.gpu.language import block_sum, cuda, load, number, store, types


def statistics_on_gpu(nonzeros: DeviceArray, absolute_sums: DeviceArray) -> DeviceArray:
    """Return the sums of both arrays: float64, shape (2,)."""
    totals = empty(2, np.float64, nonzeros.stream)
    add_statistics(1, nonzeros, absolute_sums, totals, nonzeros.size)
    return totals


@kernel()
def add_statistics(nonzeros, absolute_sums, totals, size):
    """Add up two arrays in float64; for one block."""
    count = number(totals, 0)
    absolute_sum = number(totals, 0)
    i = types.int64(cuda.threadIdx.x)
    while i < size:
        count += load(nonzeros, i)
        absolute_sum += load(absolute_sums, i)
        i += cuda.blockDim.x
    count = block_sum(count)
    absolute_sum = block_sum(absolute_sum)
    if cuda.threadIdx.x == 0:
        store(totals, 0, count)
        store(totals, 1, absolute_sum)
