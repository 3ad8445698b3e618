"""Work that is done many times over, with little work for the host."""

from collections.abc import Callable

from twell_numba.device.gpu.stream import Graph, Stream, record_graph


class Recorded:
    """Does a piece of work: the first time as it is written, later as a replay of a recording.

    The first time lets everything be compiled that the work needs, which cannot be recorded.

    Parameters
    ----------
    work : callable
        Gives work to the stream, and does the same whenever it is called.
    stream : Stream
    """

    def __init__(self, work: Callable[[], object], stream: Stream) -> None:
        self._work = work
        self._stream = stream
        self._is_compiled = False
        self._graph: Graph | None = None

    def __call__(self) -> None:
        """Do the work."""
        if not self._is_compiled:
            self._work()
            self._is_compiled = True
            return
        if self._graph is None:
            with record_graph(self._stream) as graph:
                self._work()
            self._graph = graph
        self._graph.replay()
