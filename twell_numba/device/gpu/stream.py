"""Streams, events, and work recorded once and replayed as a graph.

Work given to one stream runs in order; streams run beside each other unless one waits for an event
of the other. Streams made here also keep in order with the *legacy default stream*, where CuPy and
others put their work unless told otherwise.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from twell_numba.device.gpu.devices import GPU, gpu
from twell_numba.device.gpu.driver import GPUError, call
from twell_numba.device.gpu.packages import bindings, core

LEGACY_DEFAULT, PER_THREAD_DEFAULT = 1, 2


class Event:
    """A point in a stream's work.

    Parameters
    ----------
    gpu : GPU
    timing : bool
        Whether it can be subtracted from another: costs a little.
    """

    def __init__(self, gpu: GPU, *, timing: bool = False) -> None:
        gpu.make_current()
        flags = bindings().CUevent_flags
        chosen = flags.CU_EVENT_DEFAULT if timing else flags.CU_EVENT_DISABLE_TIMING
        self.gpu = gpu
        self._event: Any = call("cuEventCreate", int(chosen))

    def __del__(self) -> None:
        event = getattr(self, "_event", None)
        if event is not None and not sys.is_finalizing():
            bindings().cuEventDestroy(event)

    @property
    def handle(self) -> Any:
        """The driver's event, destroyed with this object."""
        return self._event

    def synchronize(self) -> None:
        """Wait until the work before this event is done."""
        call("cuEventSynchronize", self._event)

    def milliseconds_since(self, earlier: "Event") -> float:
        """Return the time from ``earlier`` to this event; both made with ``timing``."""
        self.synchronize()
        return float(call("cuEventElapsedTime", earlier._event, self._event))


class Stream:
    """Work for one GPU, in order.

    Parameters
    ----------
    gpu : GPU
    handle : int, optional
        Of a stream that another library made and keeps alive (1 is the legacy default stream, 2
        the per-thread one). Without it, a stream is made.

    Attributes
    ----------
    handle : int
        The driver's handle, as other libraries want it.
    """

    def __init__(self, gpu: GPU, handle: int | None = None) -> None:
        gpu.make_current()
        self.gpu = gpu
        # The capture in progress, to which memory freed now belongs: see memory.py.
        self.capture: Graph | None = None
        if handle is None:
            options = core().StreamOptions(nonblocking=False)
            self._stream: Any = gpu.core_device.create_stream(options=options)
        else:
            self._stream = core().Stream.from_handle(handle)
        self.handle = int(self._stream.handle)

    def __repr__(self) -> str:
        return f"Stream({self.handle:#x} on GPU {self.gpu.id})"

    def __cuda_stream__(self) -> tuple[int, int]:
        """Return (protocol version, handle): NVIDIA's protocol for streams."""
        return 0, self.handle

    @property
    def core_stream(self) -> Any:
        """The ``cuda.core.Stream``, for launches."""
        return self._stream

    def synchronize(self) -> None:
        """Wait until all work of this stream is done.

        Raises
        ------
        GPUError
            If a kernel failed: after it no more work can be done on this GPU in this process.
        """
        self.gpu.make_current()
        try:
            call("cuStreamSynchronize", self.handle)
        except GPUError as error:
            raise GPUError(f"work on GPU {self.gpu.id} failed: {error}") from error

    def record(self, *, timing: bool = False) -> Event:
        """Return an event after the work given so far."""
        event = Event(self.gpu, timing=timing)
        call("cuEventRecord", event.handle, self.handle)
        return event

    def wait(self, other: "Event | Stream") -> None:
        """Let the work given from now on wait for an event, or for another stream's work so far."""
        event = other.record() if isinstance(other, Stream) else other
        self.gpu.make_current()
        call("cuStreamWaitEvent", self.handle, event.handle, 0)

    def wait_for_foreign(self, handle: int) -> None:
        """Let the work given from now on wait for that of another library's stream so far."""
        if handle != self.handle:
            event = Event(self.gpu)
            call("cuEventRecord", event.handle, handle)
            self.wait(event)

    def hand_over_to_foreign(self, handle: int) -> None:
        """Let later work of another library's stream wait for the work given so far."""
        if handle != self.handle:
            event = self.record()  # by name: an event without one is destroyed before the call
            call("cuStreamWaitEvent", handle, event.handle, 0)


class Graph:
    """Recorded work, replayed with one call: under 1 us of host time a kernel.

    Replays use the arrays the work was recorded with: write new inputs into those. The memory of
    all of them stays reserved as long as the graph lives; arrays made while recording hold what the
    last replay left in them.
    """

    def __init__(self, stream: Stream) -> None:
        self.stream = stream
        self._executable: Any = None
        # Buffers allocated while recording, or freed then: closed with the graph.
        self.buffers: list[Any] = []
        # Those of the former that were freed again, by size: free for later steps of the recording.
        self.free_buffers: dict[int, list[Any]] = {}
        # What else keeps memory alive that recorded work uses.
        self.owners: list[Any] = []

    def __del__(self) -> None:
        if sys.is_finalizing():
            return
        if getattr(self, "_executable", None) is not None:
            bindings().cuGraphExecDestroy(self._executable)
        recording = self.stream.capture
        if recording is not None:  # freeing must not become one of its steps
            recording.buffers += getattr(self, "buffers", ())
            return
        for buffer in getattr(self, "buffers", ()):
            buffer.close(self.stream.core_stream)  # after the last replay, which ran on it

    def keep(self, owner: Any) -> None:
        """Keep memory alive that recorded work uses: an array's owner."""
        if owner is not None and getattr(owner, "graph", None) is not self:
            self.owners.append(owner)

    def replay(self) -> None:
        """Give the recorded work to the stream it was recorded on."""
        if self._executable is None:
            raise RuntimeError("an unfinished recording given, a graph after its with block wanted")
        self.stream.gpu.make_current()
        call("cuGraphLaunch", self._executable, self.stream.handle)

    def _finish(self, recorded: Any) -> None:
        try:
            self._executable = call("cuGraphInstantiate", recorded, 0)
        finally:
            call("cuGraphDestroy", recorded)


@contextmanager
def record_graph(stream: Stream | None = None) -> Iterator[Graph]:
    """Record the work that the block gives to a stream, instead of doing it.

    ::

        with record_graph(stream) as graph:
            kernel(...)
        graph.replay()

    Waits for the work given to the stream before. Nothing may use the legacy default stream
    meanwhile. Copies to and from the host's memory cannot be recorded.

    Raises
    ------
    GPUError
        If something in the block cannot be recorded.
    """
    stream = gpu().stream if stream is None else stream
    stream.gpu.make_current()
    if stream.capture is not None:
        raise RuntimeError("a stream that is recording given, one recording at a time wanted")
    stream.synchronize()  # so that the recording takes memory that earlier work frees, not more
    graph = Graph(stream)
    mode = bindings().CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
    call("cuStreamBeginCapture", stream.handle, mode)
    stream.capture = graph
    try:
        yield graph
    except BaseException:
        stream.capture = None
        _, *recorded = bindings().cuStreamEndCapture(stream.handle)
        if recorded and int(recorded[0]):
            bindings().cuGraphDestroy(recorded[0])
        raise
    stream.capture = None
    graph._finish(call("cuStreamEndCapture", stream.handle))


def time_on_gpu(work: Callable[[], object], *, repeats: int = 20, warm_up: int = 3) -> list[float]:
    """Return the milliseconds that ``repeats`` calls of ``work`` kept the first GPU busy, each."""
    stream = gpu().stream
    for _ in range(warm_up):
        work()
    times = []
    for _ in range(repeats):
        before = stream.record(timing=True)
        work()
        times.append(stream.record(timing=True).milliseconds_since(before))
    return times
