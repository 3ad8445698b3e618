"""A GPU for tests where there is none: kernels run as plain Python, thread after thread.

What is emulated are memory, copies and launches; arrays, kernels' wrappers and the kernels' own
source are the real ones. Reading or writing outside of an array raises, new memory is all ones
(NaN, -1), and threads that wait for others which never come raise too. Blocks are smaller than on a
GPU.
"""

import ast
import ctypes
import functools
import inspect
import math
import sys
import textwrap
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import ml_dtypes
import numpy as np

from twell_numba.device.gpu import array as array_module
from twell_numba.device.gpu import gemm, language, launch, pinned, recorded, tensor_cores
from twell_numba.device.gpu.stream import Stream

MOST_THREADS = 64  # of a block; more only of kernels that lay out their shared memory themselves


class Memory:
    """A block of the host's memory, which stands for the GPU's."""

    def __init__(
        self, nbytes: int, graph: "EmulatedGraph | None" = None, given: np.ndarray | None = None
    ) -> None:
        self.bytes = np.full(nbytes + 64, 0xFF, np.uint8) if given is None else given
        self.pointer = self.bytes.ctypes.data
        self.nbytes = nbytes
        self.graph = graph


class EmulatedStream(Stream):
    """Does everything at once."""

    def __init__(self, gpu: "EmulatedGPU", handle: int = 77) -> None:
        self.gpu = gpu  # type: ignore[assignment]
        self.capture = None
        self.handle = handle
        self._stream = self
        self.waited_for: list[Any] = []
        self.handed_over_to: list[int] = []

    def synchronize(self) -> None:
        pass

    def record(self, *, timing: bool = False) -> "EmulatedEvent":  # type: ignore[override]
        return EmulatedEvent()

    def wait(self, other: Any) -> None:
        self.waited_for.append(other)

    def wait_for_foreign(self, handle: int) -> None:
        self.waited_for.append(handle)

    def hand_over_to_foreign(self, handle: int) -> None:
        self.handed_over_to.append(handle)


class EmulatedEvent:
    """Stands for ``twell_numba.device.gpu.Event``."""

    def synchronize(self) -> None:
        pass


class EmulatedGraph:
    """Stands for ``twell_numba.device.gpu.Graph``: a list of calls."""

    def __init__(self) -> None:
        self.calls: list[Callable[[], object]] = []
        self.owners: list[Any] = []
        # Memory allocated while recording, which stays as long as the graph, and what of it was
        # freed again, by size: for later steps of the recording.
        self.buffers: list[np.ndarray] = []
        self.free: dict[int, list[np.ndarray]] = {}

    def keep(self, owner: Any) -> None:
        if owner is not None and getattr(owner, "graph", None) is not self:
            self.owners.append(owner)

    def replay(self) -> None:
        for call in self.calls:
            call()


@contextmanager
def record_graph(stream: EmulatedStream) -> Iterator[EmulatedGraph]:
    """Stand for ``twell_numba.device.gpu.record_graph``."""
    assert stream.capture is None
    stream.capture = graph = EmulatedGraph()  # type: ignore[assignment]
    try:
        yield graph
    finally:
        stream.capture = None


class EmulatedGPU:
    """Stands for ``twell_numba.device.gpu.GPU``."""

    def __init__(self, device_id: int = 0) -> None:
        self.id = device_id
        self.name = "emulated"
        self.target = "75"
        self.shared_memory_per_block = 64 * 1024
        self.capability = (7, 5)
        self.multiprocessors = 2
        self.memory = self
        self.stream = EmulatedStream(self)
        self.regions: dict[int, int] = {}
        self.launches: list[tuple[str, int]] = []
        self._host_buffers: dict[int, np.ndarray] = {}

    def make_current(self) -> None:
        pass

    def allocate(self, nbytes: int, stream: Any) -> Memory:
        assert nbytes > 0, "an allocation of nothing"
        if stream.capture is not None:
            return self._allocate_for(stream.capture, nbytes, stream)
        memory = Memory(nbytes)
        self.regions[memory.pointer] = nbytes
        weakref.finalize(memory, self.regions.pop, memory.pointer)
        return memory

    def _allocate_for(self, graph: EmulatedGraph, nbytes: int, stream: Any) -> Memory:
        """Allocate while a graph is recorded: it hands freed memory out again."""
        free = graph.free.setdefault(nbytes, [])
        memory = Memory(nbytes, graph, free.pop() if free else None)
        if memory.pointer not in self.regions:
            graph.buffers.append(memory.bytes)
            self.regions[memory.pointer] = nbytes
            weakref.finalize(graph, self.regions.pop, memory.pointer)

        def give_back(buffer: np.ndarray) -> None:
            if stream.capture is graph:
                free.append(buffer)

        weakref.finalize(memory, give_back, memory.bytes)
        return memory

    def free_and_total(self) -> tuple[int, int]:
        return 1 << 30, 1 << 30

    def peak(self) -> int:
        return 1

    def region_of(self, address: int) -> tuple[int, int]:
        """Return where the block that holds an address begins and ends."""
        for start, nbytes in self.regions.items():
            if start <= address < start + nbytes:
                return start, start + nbytes
        raise MemoryError(f"address {address:#x} was never allocated")

    # ------------------------------------------------------------------ the driver

    def call(self, function: str, *arguments: Any) -> Any:
        """Stand for the driver's functions on memory."""
        if function == "cuMemHostAlloc":
            return self._allocate_host(arguments[0])
        if function == "cuMemFreeHost":
            del self._host_buffers[arguments[0]]
            return None
        graph = self.stream.capture
        if graph is not None:
            assert function in ("cuMemcpyDtoDAsync", "cuMemsetD8Async"), "this cannot be recorded"
            graph.calls.append(functools.partial(self._call, function, *arguments))
        else:
            self._call(function, *arguments)
        return None

    def _call(self, function: str, *arguments: Any) -> None:
        if function in ("cuMemcpyHtoDAsync", "cuMemcpyDtoHAsync", "cuMemcpyDtoDAsync"):
            target, source, nbytes, _ = arguments
            assert nbytes > 0, "a copy of nothing"
            ctypes.memmove(target, source, nbytes)
        elif function == "cuMemsetD8Async":
            target, value, nbytes, _ = arguments
            ctypes.memset(target, value, nbytes)
        else:
            raise NotImplementedError(function)

    def _allocate_host(self, nbytes: int) -> int:
        buffer = np.full(nbytes, 0xFF, np.uint8)
        self._host_buffers[buffer.ctypes.data] = buffer
        return buffer.ctypes.data

    def load(self, kernel: launch.Kernel, key: tuple[Any, ...], gpu: Any) -> Any:
        """Stand for ``Kernel._load``: return what :meth:`launch` runs."""
        return kernel, key[:-1]

    def launch(self, stream: Any, configuration: Any, loaded: Any, *values: Any) -> None:
        """Stand for ``cuda.core.launch``."""
        kernel, kinds = loaded
        blocks = configuration.grid[0]
        run = functools.partial(
            run_kernel, kernel, blocks, list(map(self._argument, kinds, values))
        )
        if stream.capture is not None:
            stream.capture.calls.append(run)
            return
        self.launches.append((kernel.name, blocks))
        run()

    def _argument(self, kind: str, value: Any) -> Any:
        if not kind.endswith("*"):
            return value
        if value == 0:
            return Pointer(0, 0, 0, np.dtype(np.uint8))
        name = kind[:-1]
        dtype = np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name)
        return Pointer(value, *self.region_of(value), dtype)


class Pointer:
    """A pointer that knows the block it points into."""

    def __init__(self, address: int, start: int, end: int, dtype: np.dtype) -> None:
        self.dtype = dtype
        self.arithmetic = np.float32 if dtype.itemsize == 2 and dtype.kind != "u" else dtype.type
        first, last = (start - address) // dtype.itemsize, (end - address) // dtype.itemsize
        assert first <= 0
        self._limit = last
        items = max(last, 0) if end else 0
        memory = (ctypes.c_char * (items * dtype.itemsize)).from_address(address)
        self._items = np.frombuffer(memory, dtype)

    def check(self, index: Any) -> int:
        index = int(index)
        if not 0 <= index < self._limit:
            raise IndexError(f"index {index} outside of an array of {self._limit}")
        return index

    def read(self, index: Any) -> Any:
        return self.arithmetic(self._items[self.check(index)])

    def write(self, index: Any, value: Any) -> None:
        with np.errstate(over="ignore"):
            self._items[self.check(index)] = self.arithmetic(value)


class Block:
    """The threads of a block, run in turn from one point where they meet to the next."""

    def __init__(self, index: int, blocks: int, threads: int, shared_memory: int = 0) -> None:
        self.index, self.blocks, self.threads = index, blocks, threads
        self.shared_memory = shared_memory
        self.thread = 0
        self.shared: dict[Any, np.ndarray] = {}

    def run(self, function: Any, arguments: list[Any]) -> None:
        """Run ``function``, a generator that yields where threads meet, as every thread."""
        running = [function(*arguments) for _ in range(self.threads)]
        answers: list[Any] = [None] * self.threads
        while True:
            requests: list[Any] = []
            for warp in range(0, self.threads, 32):
                requests += self._run_warp(running, answers, warp)
            if all(request is None for request in requests):
                return
            assert None not in requests, "threads wait at a barrier that others never reach"
            assert len({request[0] for request in requests}) == 1, "threads wait at two barriers"
            flag = any(request[1] for request in requests)
            answers = [flag] * self.threads

    def _run_warp(self, running: list[Any], answers: list[Any], warp: int) -> list[Any]:
        """Run a warp until all its threads are at a barrier of the block, or at their end."""
        lanes = range(warp, warp + 32)
        while True:
            requests = []
            for lane in lanes:
                self.thread = lane
                try:
                    requests.append(running[lane].send(answers[lane]))
                except StopIteration:
                    requests.append(None)
            if not any(request and request[0] in _OF_WARPS for request in requests):
                return requests
            assert None not in requests, "threads meet in a warp some of which have ended"
            assert len({request[::2] for request in requests}) == 1, "a warp at two places"
            what, _, distance = requests[0]
            if what == "multiply_add":
                _multiply_add([request[1] for request in requests])
                continue
            if what in ("load_matrices", "load_transposed_matrices"):
                answers[warp : warp + 32] = _load_matrices(
                    [request[1] for request in requests], what != "load_matrices"
                )
                continue
            for lane in lanes:
                answers[lane] = requests[(lane - warp) ^ distance][1]


def run_kernel(kernel: launch.Kernel, blocks: int, arguments: list[Any]) -> None:
    """Run all threads of all blocks, block after block."""
    function = _as_generator(kernel.function)
    for index in range(blocks):
        _Cuda.block = Block(index, blocks, _threads(kernel), kernel.shared_memory)
        with np.errstate(all="ignore"):
            _Cuda.block.run(function, arguments)


def _threads(kernel: launch.Kernel) -> int:
    threads = kernel.options.threads
    # Those for feedforward layers of one width have as many as their rows need.
    if kernel.shared_memory or threads <= 2 * MOST_THREADS:
        return threads
    return MOST_THREADS


class _Meetings(ast.NodeTransformer):
    """Turns calls in which threads meet into ``yield``, and device functions into generators."""

    def __init__(self, namespace: dict[str, Any]) -> None:
        self._namespace = namespace

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        self.generic_visit(node)
        node.decorator_list = []
        node.body.insert(0, ast.parse("if False: yield").body[0])  # a generator in any case
        return node

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        name = ast.unparse(node.func)
        if name in ("cuda.syncthreads", "cuda.syncthreads_or"):
            flag: ast.expr = node.args[0] if node.args else ast.Constant(False)
            return ast.Yield(ast.Tuple([ast.Constant(name), flag], ast.Load()))
        if name == "cuda.syncwarp":
            request = [ast.Constant("shuffle"), ast.Constant(0), ast.Constant(0)]
            return ast.Yield(ast.Tuple(request, ast.Load()))
        if name == "cuda.shfl_xor_sync":
            request = [ast.Constant("shuffle"), *node.args[1:]]
            return ast.Yield(ast.Tuple(request, ast.Load()))
        if name in _OF_WARPS:
            operands = ast.Tuple(node.args, ast.Load())
            request = [ast.Constant(name), operands, ast.Constant(0)]
            return ast.Yield(ast.Tuple(request, ast.Load()))
        if getattr(self._namespace.get(name), "py_func", None) is not None:
            return ast.YieldFrom(node)
        return node


@functools.cache
def _as_generator(function: Any) -> Any:
    """Return a function with what the GPU's language means replaced by its emulation."""
    source = ast.parse(textwrap.dedent(inspect.getsource(function)))
    tree = ast.fix_missing_locations(_Meetings(function.__globals__).visit(source))
    namespace = dict(function.__globals__)
    captured = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    namespace |= {name: cell.cell_contents for name, cell in captured}
    for name, value in function.__globals__.items():
        if name in _EMULATED and value in (
            getattr(language, name, None),
            getattr(tensor_cores, name, None),
        ):
            namespace[name] = _EMULATED[name]
        elif getattr(value, "py_func", None) is not None and name in function.__code__.co_names:
            namespace[name] = _as_generator(value.py_func)
        elif value is math:
            namespace[name] = _Math
    exec(compile(tree, inspect.getsourcefile(function) or "kernel", "exec"), namespace)
    return namespace[function.__name__]


class _Math:
    """Functions of ``math`` as a GPU has them: of the argument's type, NaN instead of errors."""

    nan, inf, pi = np.nan, np.inf, np.pi
    exp, log, sqrt = staticmethod(np.exp), staticmethod(np.log), staticmethod(np.sqrt)
    cos, sin = staticmethod(np.cos), staticmethod(np.sin)
    isnan = staticmethod(np.isnan)


class _Index:
    """``cuda.threadIdx`` and the like, in the one dimension used."""

    def __init__(self, read: Callable[[Block], int]) -> None:
        self._read = read

    @property
    def x(self) -> int:
        return self._read(_Cuda.block)


class _Shared:
    @staticmethod
    def array(size: int, dtype: Any) -> np.ndarray:
        frame = sys._getframe(1)
        place = (frame.f_code, frame.f_lasti)  # threads that come to one line share one array
        size = size or _Cuda.block.shared_memory // np.dtype(dtype).itemsize
        return _Cuda.block.shared.setdefault(place, np.full(size, -1).astype(dtype))


class _Local:
    @staticmethod
    def array(size: int, dtype: Any) -> np.ndarray:
        return np.full(size, -1).astype(dtype)


class _Cuda:
    block: Block
    threadIdx = _Index(lambda block: block.thread)
    blockIdx = _Index(lambda block: block.index)
    blockDim = _Index(lambda block: block.threads)
    gridDim = _Index(lambda block: block.blocks)
    shared = _Shared
    local = _Local


class _Types:
    """Numba's types, where they are used as casts and as dtypes of shared arrays."""

    int32, int64, uint32, uint64 = np.int32, np.int64, np.uint32, np.uint64
    uint16 = np.uint16
    float32, float64 = np.float32, np.float64


def _load(pointer: Pointer, index: Any) -> Any:
    return pointer.read(index)


def _store(pointer: Pointer, index: Any, value: Any) -> None:
    pointer.write(index, value)


def _number(pointer: Pointer, value: Any) -> Any:
    return pointer.arithmetic(value)


def _arithmetic_type(pointer: Pointer) -> Any:
    return pointer.arithmetic


def _words(pointer: Pointer, index: Any) -> tuple[Any, ...]:
    assert index % 8 == 0, "words that are not aligned"
    numbers = pointer._items[pointer.check(index) : pointer.check(index + 7) + 1]
    return tuple(numbers.view(np.uint32))


def _numbers_of(pointer: Pointer, words: Any) -> tuple[Any, ...]:
    words = np.array([int(word) & 0xFFFFFFFF for word in words], np.uint32)
    return tuple(words.view(pointer.dtype).astype(np.float32))


def _store_words(pointer: Pointer, index: Any, words: tuple[Any, ...]) -> None:
    assert index % 8 == 0, "words that are not aligned"
    for i, number in enumerate(_numbers_of(pointer, words)):
        pointer.write(index + i, number)


def _multiply_add(operands: list[Any]) -> None:
    """Do what a warp's lanes together do in ``tensor_cores.multiply_add``."""
    dtype = operands[0][0].dtype
    words = np.array([lane[3:] for lane in operands], np.uint32)
    # by group, place in the group, word, and half of the word
    numbers = words.view(dtype).astype(np.float32).reshape(8, 4, 6, 2)
    left, right = np.empty((16, 16), np.float32), np.empty((16, 8), np.float32)
    for word in range(4):
        rows = slice(word % 2 * 8, word % 2 * 8 + 8)
        columns = slice(word // 2 * 8, word // 2 * 8 + 8)
        left[rows, columns] = numbers[:, :, word].reshape(8, 8)
    for word in range(2):
        right[8 * word : 8 * word + 8] = numbers[:, :, 4 + word].reshape(8, 8).T
    product = (left @ right).reshape(2, 8, 4, 2)
    for lane, (_, sums, first, *_rest) in enumerate(operands):
        sums[first : first + 4] += product[:, lane // 4, lane % 4].reshape(4)


def _load_matrices(places: list[Any], is_transposed: bool) -> list[Any]:
    """Return what a warp's lanes get from ``tensor_cores.load_matrices``."""
    for words, index in places:
        assert index % 4 == 0, "words that are not aligned"
        assert 0 <= index <= len(words) - 4, "words outside of shared memory"
    rows = np.array([words[index : index + 4] for words, index in places], np.uint32)
    matrices = rows.view(np.uint16).reshape(4, 8, 8)
    if is_transposed:
        matrices = matrices.transpose(0, 2, 1)
    loaded = np.ascontiguousarray(matrices).reshape(4, 64).view(np.uint32)
    return [tuple(loaded[:, lane]) for lane in range(32)]


def _copy_ahead(words: np.ndarray, place: Any, pointer: Pointer, index: Any, is_there: Any) -> None:
    assert place % 4 == 0, "words that are not aligned"
    assert 0 <= place <= len(words) - 4, "words outside of shared memory"
    words[place : place + 4] = _words(pointer, index) if is_there else 0


# where the threads of a warp meet
_OF_WARPS = ("shuffle", "multiply_add", "load_matrices", "load_transposed_matrices")

_EMULATED = {
    "load_four_words": _words,
    "words_of": lambda pointer, *numbers: tuple(
        np.array(numbers, np.float32).astype(pointer.dtype).view(np.uint32)
    ),
    "store_four_words": _store_words,
    "eight_numbers_of": _numbers_of,
    "copy_ahead": _copy_ahead,
    "end_of_copies": lambda: None,
    "wait_for_copies": lambda: None,
    "wait_for_older_copies": lambda: None,
    "arithmetic_type": _arithmetic_type,
    "cuda": _Cuda,
    "types": _Types,
    "load": _load,
    "store": _store,
    "number": _number,
    "nanoseconds": time.perf_counter_ns,
}


def install(monkeypatch: Any, gpu: EmulatedGPU) -> None:
    """Let arrays and kernels use an emulated GPU until the test ends."""
    monkeypatch.setattr(array_module, "call", gpu.call)
    monkeypatch.setattr(pinned, "call", gpu.call)
    monkeypatch.setattr(array_module, "gpu", lambda device_id=0: gpu)
    monkeypatch.setattr(launch, "_launch", gpu.launch)
    monkeypatch.setattr(recorded, "record_graph", record_graph)
    monkeypatch.setattr(gemm, "default_path", lambda: "tiled")
    monkeypatch.setattr(launch.Kernel, "_load", lambda self, key, on: gpu.load(self, key, on))
    monkeypatch.setattr(launch.Kernel, "blocks", lambda self, n: -(-n // _threads(self)))
