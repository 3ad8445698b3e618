"""Memory of a GPU, from a pool that keeps in order with streams.

Allocating and freeing are themselves work of a stream: freed memory is handed out again at once to
work that comes later in the same stream, without waiting for the GPU.
"""

import gc
import weakref
from typing import TYPE_CHECKING, Any

from twell_numba.device.gpu.driver import call
from twell_numba.device.gpu.packages import bindings, core
from twell_numba.errors import TwellError

if TYPE_CHECKING:
    from twell_numba.device.gpu.devices import GPU
    from twell_numba.device.gpu.stream import Graph, Stream

# Blocks are rounded up to this many bytes, so that memory freed while recording finds takers.
GRANULE = 512


class Memory:
    """A block of a GPU's memory, given back to its pool when it is no longer referred to.

    Attributes
    ----------
    pointer : int
    nbytes : int
    """

    def __init__(self, pool: "MemoryPool", nbytes: int, stream: "Stream") -> None:
        size = -(-nbytes // GRANULE) * GRANULE
        buffer = pool.take(size, stream)
        self.pointer = int(buffer.handle)
        self.nbytes = nbytes
        # The graph whose recording allocated it, and to which it belongs; usually None.
        self.graph = stream.capture
        finalizer = weakref.finalize(self, _give_back, buffer, size, stream, self.graph)
        finalizer.atexit = False  # by then the driver may be gone, and the memory with it


class MemoryPool:
    """The memory of one GPU.

    Parameters
    ----------
    gpu : GPU
    """

    def __init__(self, gpu: "GPU") -> None:
        gpu.make_current()
        self.gpu = gpu
        self._resource: Any = core().DeviceMemoryResource(gpu.id)
        self._side_stream: Any = None
        # Keep freed memory instead of returning it to the driver whenever a stream is waited for.
        driver = bindings()
        call(
            "cuMemPoolSetAttribute",
            self._driver_pool(),
            driver.CUmemPool_attribute.CU_MEMPOOL_ATTR_RELEASE_THRESHOLD,
            driver.cuuint64_t(2**64 - 1),
        )

    def allocate(self, nbytes: int, stream: "Stream") -> Memory:
        """Return a block of ``nbytes`` bytes (at least 1), for work of ``stream``.

        Raises
        ------
        TwellError
            If there is not so much free.
        """
        return Memory(self, nbytes, stream)

    def take(self, size: int, stream: "Stream") -> Any:
        """Return a buffer of ``cuda.core``; :class:`Memory` gives it back."""
        self.gpu.make_current()
        try:
            return self._take(size, stream)
        except Exception as error:
            if not _is_out_of_memory(error):
                raise
        if stream.capture is None:
            gc.collect()  # what refers to itself lives until then
            self.trim()
            try:
                return self._take(size, stream)
            except Exception as error:
                if not _is_out_of_memory(error):
                    raise
            self.trim()  # of what the driver may have set aside in vain
        free, total = self.free_and_total()
        raise TwellError(
            f"GPU {self.gpu.id} is out of memory: {_in_units(size)} asked, {_in_units(free)} "
            f"of {_in_units(total)} free; use a smaller batch, context or model"
        )

    def trim(self) -> None:
        """Return the memory that no array holds to the driver, for other libraries and processes.

        Waits for the GPU's work, also for the freeing that is part of it; not while recording.
        """
        self.gpu.synchronize()
        call("cuMemPoolTrimTo", self._driver_pool(), 0)

    def free_and_total(self) -> tuple[int, int]:
        """Return the bytes that can still be allocated, and those of the whole GPU."""
        self.gpu.make_current()
        free, total = call("cuMemGetInfo")
        used = self._attribute(bindings().CUmemPool_attribute.CU_MEMPOOL_ATTR_USED_MEM_CURRENT)
        return int(free) + self.reserved() - used, int(total)

    def reserved(self) -> int:
        """Return the bytes that others cannot have, in use or kept for later use."""
        return self._attribute(bindings().CUmemPool_attribute.CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT)

    def peak(self) -> int:
        """Return the most bytes that were in use at once since the pool was made, or reset."""
        return self._attribute(bindings().CUmemPool_attribute.CU_MEMPOOL_ATTR_USED_MEM_HIGH)

    def reset_peak(self) -> None:
        """Let :meth:`peak` begin anew with what is in use now."""
        driver = bindings()
        call(
            "cuMemPoolSetAttribute",
            self._driver_pool(),
            driver.CUmemPool_attribute.CU_MEMPOOL_ATTR_USED_MEM_HIGH,
            driver.cuuint64_t(0),
        )

    def _take(self, size: int, stream: "Stream") -> Any:
        graph = stream.capture
        if graph is None:
            return self._resource.allocate(size, stream=stream.core_stream)
        freed = graph.free_buffers.get(size)
        if freed:
            return freed.pop()
        buffer = self._allocate_beside(size)
        graph.buffers.append(buffer)
        return buffer

    def _attribute(self, name: Any) -> int:
        return int(call("cuMemPoolGetAttribute", self._driver_pool(), name))

    def _driver_pool(self) -> Any:
        return bindings().CUmemoryPool(int(self._resource.handle))

    def _allocate_beside(self, size: int) -> Any:
        """Allocate while the stream is recording: that must not become a recorded step."""
        if self._side_stream is None:
            self._side_stream = self.gpu.core_device.create_stream(
                options=core().StreamOptions(nonblocking=True)
            )
        buffer = self._resource.allocate(size, stream=self._side_stream)
        self._side_stream.sync()
        return buffer


def _give_back(buffer: Any, size: int, stream: "Stream", graph: "Graph | None") -> None:
    recording = stream.capture
    if graph is not None:
        if recording is graph:
            graph.free_buffers.setdefault(size, []).append(buffer)
    elif recording is not None:
        recording.buffers.append(buffer)  # freeing it must not become a recorded step
    else:
        stream.gpu.make_current()
        buffer.close(stream.core_stream)


def _is_out_of_memory(error: Exception) -> bool:
    return isinstance(error, MemoryError) or "OUT_OF_MEMORY" in str(error).upper()


def _in_units(nbytes: int) -> str:
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if nbytes >= size:
            return f"{nbytes / size:.1f} {unit}"
    return f"{nbytes} bytes"
