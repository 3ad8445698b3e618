"""The GPU: arrays, memory, streams, graphs, and kernels compiled from Python.

Needs the extra ``cuda`` and a driver. Importing this package needs neither; what does raises a
:class:`twell_numba.errors.TwellError` that says what is missing.
"""

from twell_numba.device.gpu.array import (
    DeviceArray,
    empty,
    from_external,
    from_numpy,
    require_same_gpu,
    view,
    zeros,
)
from twell_numba.device.gpu.devices import GPU, TARGETS, choose, gpu
from twell_numba.device.gpu.driver import GPUError
from twell_numba.device.gpu.launch import Kernel, kernel
from twell_numba.device.gpu.stream import Event, Graph, Stream, record_graph, time_on_gpu

__all__ = [
    "GPU",
    "TARGETS",
    "DeviceArray",
    "Event",
    "GPUError",
    "Graph",
    "Kernel",
    "Stream",
    "choose",
    "empty",
    "from_external",
    "from_numpy",
    "gpu",
    "kernel",
    "record_graph",
    "require_same_gpu",
    "time_on_gpu",
    "view",
    "zeros",
]
