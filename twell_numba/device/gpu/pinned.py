"""Copies of arrays in page-locked memory of the host, which the GPU writes while it goes on."""

import ctypes
import weakref

import numpy as np

from twell_numba.device.gpu.array import DeviceArray
from twell_numba.device.gpu.driver import call
from twell_numba.device.gpu.stream import Event


class HostCopy:
    """A copy in the host's memory, asked for at one point of a stream's work and read later.

    Parameters
    ----------
    array : DeviceArray
        Not empty.
    """

    def __init__(self, array: DeviceArray) -> None:
        self._array = array
        array.gpu.make_current()
        pointer = int(call("cuMemHostAlloc", array.nbytes, 0))
        memory = (ctypes.c_uint8 * array.nbytes).from_address(pointer)
        self._host = np.frombuffer(memoryview(memory), array.dtype).reshape(array.shape)
        self._event: Event | None = None
        finalizer = weakref.finalize(self, call, "cuMemFreeHost", pointer)
        finalizer.atexit = False  # by then the driver may be gone

    def request(self) -> None:
        """Let the GPU copy what the array holds after the work given so far."""
        array = self._array
        array.gpu.make_current()
        arguments = (self._host.ctypes.data, array.pointer, array.nbytes, array.stream.handle)
        call("cuMemcpyDtoHAsync", *arguments)
        self._event = array.stream.record()

    def read(self) -> np.ndarray:
        """Wait for what was requested last and return it: work given since is not waited for."""
        assert self._event is not None, "requested before it is read"
        self._event.synchronize()
        return self._host.copy()
