"""Who gets a GPU's memory, and when it is given back; the GPU's pool is a stand-in."""

import gc
import types

import pytest

from twell_numba.device.gpu import memory
from twell_numba.device.gpu.memory import GRANULE, MemoryPool
from twell_numba.device.gpu.stream import Graph
from twell_numba.errors import TwellError

FREE, TOTAL, RESERVED, USED = 3 * 2**30, 8 * 2**30, 2**30, 2**29


class Buffer:
    """Stands for a buffer of ``cuda.core``."""

    def __init__(self, number):
        self.handle = number
        self.closed_on = None

    def close(self, stream):
        self.closed_on = stream


class Resource:
    """Stands for the memory resource of ``cuda.core``, and notes what it is asked."""

    def __init__(self, failures):
        self.handle = 1
        self.failures = list(failures)
        self.asked = []
        self.buffers = []

    def allocate(self, size, *, stream):
        self.asked.append(size)
        if self.failures:
            raise self.failures.pop()
        self.buffers.append(Buffer(1000 + len(self.buffers)))
        return self.buffers[-1]


class Pool(MemoryPool):
    """The real pool, on such a resource."""

    def __init__(self, failures=()):
        self._resource = Resource(failures)
        self.asked, self.buffers = self._resource.asked, self._resource.buffers
        self.gpu = types.SimpleNamespace(
            id=0, make_current=lambda: None, synchronize=lambda: self.asked.append("wait")
        )
        self._side_stream = types.SimpleNamespace(sync=lambda: None)


@pytest.fixture
def stream():
    return types.SimpleNamespace(
        capture=None,
        core_stream=types.SimpleNamespace(name="the driver's stream"),
        gpu=types.SimpleNamespace(make_current=lambda: None),
    )


@pytest.fixture(autouse=True)
def trims(monkeypatch):
    """Answers what is free and what the pool holds; notes what trimming left to the pool."""
    trims = []
    names = types.SimpleNamespace(
        CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT=RESERVED, CU_MEMPOOL_ATTR_USED_MEM_CURRENT=USED
    )
    bindings = types.SimpleNamespace(CUmemPool_attribute=names, CUmemoryPool=int)
    answers = {
        "cuMemGetInfo": lambda: (FREE, TOTAL),
        "cuMemPoolGetAttribute": lambda pool, name: name,
        "cuMemPoolTrimTo": lambda pool, kept: trims.append(kept),
    }
    monkeypatch.setattr(memory, "bindings", lambda: bindings)
    monkeypatch.setattr(memory, "call", lambda name, *arguments: answers[name](*arguments))
    return trims


def test_memory_is_given_back_to_its_stream(stream):
    pool = Pool()
    block = pool.allocate(GRANULE + 1, stream)
    assert (block.pointer, block.nbytes) == (1000, GRANULE + 1)
    assert pool.asked == [2 * GRANULE]
    del block
    gc.collect()
    assert pool.buffers[0].closed_on is stream.core_stream


def test_out_of_memory_says_what_was_asked_and_what_is_free(stream):
    error = RuntimeError("CUDA_ERROR_OUT_OF_MEMORY: The API call failed because ...")
    pool = Pool([error, error])
    with pytest.raises(TwellError) as caught:
        pool.allocate(5 * 2**30, stream)
    assert str(caught.value) == (
        "GPU 0 is out of memory: 5.0 GiB asked, 3.5 GiB of 8.0 GiB free; "
        "use a smaller batch, context or model"
    )


def test_it_waits_for_memory_that_is_about_to_come_free(stream, trims):
    pool = Pool([RuntimeError("CUDA_ERROR_OUT_OF_MEMORY")])
    assert pool.allocate(GRANULE, stream).pointer == 1000
    assert pool.asked == [GRANULE, "wait", GRANULE]
    assert trims == [0]


def test_a_request_in_vain_leaves_nothing_set_aside(stream, trims):
    pool = Pool([MemoryError(), MemoryError()])
    with pytest.raises(TwellError):
        pool.allocate(GRANULE, stream)
    assert pool.asked == [GRANULE, "wait", GRANULE, "wait"]
    assert trims == [0, 0]


def test_nothing_is_waited_for_while_recording(stream, trims):
    pool = Pool([MemoryError()])
    stream.capture = Graph(stream)
    with pytest.raises(TwellError, match="out of memory"):
        pool.allocate(GRANULE, stream)
    assert pool.asked == [GRANULE]
    assert trims == []


def test_other_errors_are_passed_on(stream):
    with pytest.raises(RuntimeError, match="CUDA_ERROR_ILLEGAL_ADDRESS"):
        Pool([RuntimeError("CUDA_ERROR_ILLEGAL_ADDRESS")]).allocate(GRANULE, stream)


def test_memory_freed_while_recording_is_used_again_in_the_same_recording(stream):
    pool = Pool()
    graph = stream.capture = Graph(stream)
    first = pool.allocate(GRANULE, stream).pointer  # free again at once
    gc.collect()
    second = pool.allocate(GRANULE, stream)
    assert second.pointer == first
    assert pool.allocate(GRANULE, stream).pointer != first
    assert pool.allocate(2 * GRANULE, stream).pointer != first
    assert len(graph.buffers) == 3


def test_memory_of_a_graph_is_given_back_with_the_graph(stream):
    pool = Pool()
    before = pool.allocate(GRANULE, stream)
    graph = stream.capture = Graph(stream)
    during = pool.allocate(GRANULE, stream)
    del before  # work recorded before may use it
    stream.capture = None
    after = pool.allocate(GRANULE, stream)
    assert after.pointer not in (1000, 1001)
    del during
    gc.collect()
    assert [buffer.closed_on for buffer in pool.buffers[:2]] == [None, None]
    del graph
    gc.collect()
    assert all(buffer.closed_on is stream.core_stream for buffer in pool.buffers[:2])
    assert pool.buffers[2].closed_on is None


def test_a_graph_keeps_what_it_did_not_allocate(stream):
    pool = Pool()
    before = pool.allocate(GRANULE, stream)
    graph = stream.capture = Graph(stream)
    during = pool.allocate(GRANULE, stream)
    for owner in (before, during, None, "another library's array"):
        graph.keep(owner)
    assert graph.owners == [before, "another library's array"]
