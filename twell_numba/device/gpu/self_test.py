"""A small kernel for ``twell doctor``: whether what is compiled here runs on the GPU, and is right.

y = relu(x)
"""

from typing import Any

import numpy as np

from twell_numba.device.gpu.array import empty, from_numpy
from twell_numba.device.gpu.devices import GPU
from twell_numba.device.gpu.language import global_thread, grid_threads, load, number, store
from twell_numba.device.gpu.launch import kernel


def kernels_compute(gpu: GPU) -> bool:
    """Compile a kernel, run it on a GPU, and return whether its result is NumPy's.

    Raises
    ------
    TwellError
        If a package or the driver does not do its part.
    """
    x = np.arange(-500, 500, dtype=np.float32)
    on_gpu = from_numpy(x, gpu.stream)
    y = empty(x.shape, np.float32, gpu.stream)
    _relu(_relu.blocks(x.size), on_gpu, y, x.size)
    return np.array_equal(y.to_numpy(), np.maximum(x, 0))


@kernel()
def _relu(x: Any, y: Any, size: Any) -> None:
    i = global_thread()
    while i < size:
        value = load(x, i)
        if value < 0:
            value = number(x, 0)
        store(y, i, value)
        i += grid_threads()
