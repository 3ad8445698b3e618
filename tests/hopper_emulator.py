"""A Hopper GPU for tests where there is none: what tests/gpu_emulator.py does not know of it.

Warps of a block are at different places of a kernel, and wait for each other at barriers in shared
memory; blocks of a cluster run at the same time; the copy engine swizzles what it copies; a
warpgroup multiplies what descriptors point to. Shared memory is bytes with addresses, as on a GPU.
Copies and products are done at once: what a kernel reads too late or writes too early goes
unnoticed, what it never waits for does not.
"""

import ast
import ctypes
import functools
import importlib.util
import inspect
import textwrap
import types
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from twell_numba.device.gpu import devices, hopper, language, tensor_cores, tensor_map
from twell_numba.device.gpu.launch import Kernel

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
# Where a block's shared memory begins: not where kernels may want it.
BASE = 1040


def _load_emulator() -> Any:
    path = Path(__file__).with_name("gpu_emulator.py")
    spec = importlib.util.spec_from_file_location("gpu_emulator_of_hopper", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


emulator = _load_emulator()


class EmulatedHopper(emulator.EmulatedGPU):  # type: ignore[name-defined, misc]
    """Stands for a GPU of compute capability 9.0."""

    def __init__(self) -> None:
        super().__init__()
        self.target = "90a"
        self.capability = (9, 0)
        self.shared_memory_per_block = 227 * 1024
        self.multiprocessors = 5

    def launch(self, stream: Any, configuration: Any, loaded: Any, *values: Any) -> None:
        kernel, kinds = loaded
        if "publish_barriers" not in kernel.function.__globals__:
            super().launch(stream, configuration, loaded, *values)
            return
        given, arguments = list(values), []
        for kind in kinds:
            if kind == "tensor_map":
                arguments.append(tuple(given[: tensor_map.WORDS]))
                del given[: tensor_map.WORDS]
            else:
                arguments.append(self._argument(kind, given.pop(0)))
        blocks = configuration.grid[0]
        run = functools.partial(self._run, kernel, blocks, arguments)
        if stream.capture is not None:
            stream.capture.calls.append(run)
            return
        self.launches.append((kernel.name, blocks))
        run()

    def _run(self, kernel: Kernel, blocks: int, arguments: list[Any]) -> None:
        assert kernel.shared_memory <= self.shared_memory_per_block
        function = _as_generator(kernel.function)
        for first in range(0, blocks, kernel.cluster):
            cluster: list[HopperBlock] = []
            for index in range(first, first + kernel.cluster):
                cluster.append(HopperBlock(index, blocks, kernel, self, cluster))
            with np.errstate(all="ignore"):
                _run_cluster(cluster, function, arguments)


class Barrier:
    """A barrier in shared memory."""

    def __init__(self, arrivals: int) -> None:
        self.arrivals, self.left, self.bytes, self.phase = arrivals, arrivals, 0, 0

    def arrive(self, count: int = 1) -> None:
        self.left -= count
        assert self.left >= 0, "more arrivals than a barrier was made for"
        self.end()

    def end(self) -> None:
        if self.left == 0 and self.bytes == 0:
            self.phase, self.left = self.phase + 1, self.arrivals

    def has_ended(self, parity: int) -> bool:
        return self.phase % 2 != parity


class HopperBlock:
    """The threads of a block, each run until it waits."""

    def __init__(
        self, index: int, blocks: int, kernel: Kernel, gpu: Any, cluster: list[Any]
    ) -> None:
        self.index, self.blocks, self.threads = index, blocks, kernel.options.threads
        self.gpu, self.cluster = gpu, cluster
        self.thread = 0
        self.bytes = np.full(kernel.shared_memory, 0xFF, np.uint8)
        self.barriers: dict[int, Barrier] = {}
        self.maps: dict[int, tuple[int, ...]] = {}
        self.running: list[Any] = []
        # what each thread waits for; None when it has ended
        self.requests: list[Any] = [("begin",)] * self.threads

    def run(self) -> bool:
        """Let all threads go on that may; return whether there were any."""
        emulator._Cuda.block = self
        progress = False
        for first, answers in self._ready():
            for thread, answer in enumerate(answers, first):
                self.answer(thread, answer)
            progress = True
        return progress

    def answer(self, thread: int, answer: Any = None) -> None:
        """Let a thread go on."""
        self.thread = thread
        try:
            self.requests[thread] = self.running[thread].send(answer)
        except StopIteration:
            self.requests[thread] = None

    def _ready(self) -> Any:
        """Yield threads that may go on: the first one, and what each gets."""
        for first in range(0, self.threads, 32):
            warp = self.requests[first : first + 32]
            kinds = {request and request[0] for request in warp}
            if kinds == {"shuffle"}:
                assert len({request[2] for request in warp}) == 1, "a warp at two places"
                yield first, [warp[lane ^ warp[0][2]][1] for lane in range(32)]
                continue
            for lane, request in enumerate(warp):
                if request is None or request[0] not in ("begin", "phase"):
                    continue
                if request[0] == "begin" or self.barrier(request[1]).has_ended(int(request[2])):
                    yield first + lane, [None]
        for first in range(0, self.threads, 128):
            group = self.requests[first : first + 128]
            kinds = {request and request[0] for request in group}
            if kinds == {"product"}:
                _multiply(self, [request[1:] for request in group])
                yield first, [None] * 128

    def barrier(self, address: Any) -> Barrier:
        return self.barriers[int(address)]

    def place(self, address: Any, nbytes: int, multiple: int) -> int:
        """Return where an address in shared memory is in the block's bytes."""
        address = int(address)
        assert address % multiple == 0, f"address {address} given, a multiple of {multiple} wanted"
        assert BASE <= address <= BASE + len(self.bytes) - nbytes, "outside of shared memory"
        return address - BASE


def _run_cluster(cluster: list[HopperBlock], function: Any, arguments: list[Any]) -> None:
    for block in cluster:
        block.running = [function(*arguments) for _ in range(block.threads)]
    while any(any(block.requests) for block in cluster):
        progress = [block.run() for block in cluster]
        waiting = [request for block in cluster for request in block.requests]
        if {request and request[0] for request in waiting} == {"cluster"}:
            for block in cluster:
                emulator._Cuda.block = block
                for thread in range(block.threads):
                    block.answer(thread)
        else:
            kinds = sorted({str(request)[:60] for request in waiting})
            assert any(progress), f"threads wait for ever: {kinds}"


def _swizzled(addresses: np.ndarray) -> np.ndarray:
    return addresses ^ (addresses >> 3 & 112)


def _copy_box(target: Any, there: Any, column: Any, row: Any, barrier: Any) -> None:
    block = emulator._Cuda.block
    _copy_box_to_blocks(target, there, column, row, barrier, 1 << block.cluster.index(block))


def _copy_box_to_blocks(
    target: Any, there: Any, column: Any, row: Any, barrier: Any, blocks: Any
) -> None:
    this = emulator._Cuda.block
    pointer, rows, columns, box_rows = this.maps[int(there)][:4]
    row, column = int(row), int(column)
    start, end = this.gpu.region_of(pointer)
    assert start <= pointer, "a map of what was freed"
    assert pointer + 2 * rows * columns <= end, "a map of more than there is"
    memory = (ctypes.c_char * (2 * rows * columns)).from_address(pointer)
    matrix = np.frombuffer(memory, np.uint16).reshape(rows, columns)
    box = np.zeros((box_rows, hopper.INNER), np.uint16)
    part = matrix[row : row + box_rows, column : column + hopper.INNER]
    box[: part.shape[0], : part.shape[1]] = part
    addresses = _swizzled(int(target) + np.arange(box.size)[:, None] * 2) + np.arange(2)
    for i, block in enumerate(this.cluster):
        if int(blocks) >> i & 1:
            block.place(target, 2 * box.size, 1024)
            block.bytes[addresses - BASE] = box.reshape(-1, 1).view(np.uint8)
            found = block.barrier(barrier)
            found.bytes -= 2 * box.size
            found.end()


def _arrive_and_expect(barrier: Any, nbytes: Any) -> None:
    found = emulator._Cuda.block.barrier(barrier)
    found.bytes += int(nbytes)
    found.arrive()


def _operand(block: HopperBlock, descriptor: Any, rows: int) -> np.ndarray:
    """Return the ``rows`` x INNER numbers that a descriptor points to."""
    word = int(descriptor) & (1 << 64) - 1
    start, stride = ((word >> shift & 0x3FFF) << 4 for shift in (0, 32))
    assert word >> 62 == 1, "another swizzle"
    row = np.arange(rows)[:, None]
    addresses = start + row // 8 * stride + row % 8 * 128 + np.arange(hopper.INNER) * 2
    return _numbers_at(block, _swizzled(addresses))


def _numbers_at(block: HopperBlock, addresses: np.ndarray) -> np.ndarray:
    block.place(addresses.min(), 2, 2)
    block.place(addresses.max(), 2, 2)
    pairs = block.bytes[(addresses - BASE)[..., None] + np.arange(2)]
    return pairs.view(np.uint16)[..., 0].view(BFLOAT16).astype(np.float32)


def _operand_by_rows(block: HopperBlock, descriptor: Any, columns: int) -> np.ndarray:
    """Return the ``columns`` x INNER numbers of an operand whose rows are INNER."""
    word = int(descriptor) & (1 << 64) - 1
    start, part, stride = ((word >> shift & 0x3FFF) << 4 for shift in (0, 16, 32))
    assert word >> 62 == 1, "another swizzle"
    row, column = np.arange(hopper.INNER), np.arange(columns)[:, None]
    addresses = start + column // 64 * part + column % 64 * 2 + row // 8 * stride + row % 8 * 128
    return _numbers_at(block, _swizzled(addresses))


def _multiply(block: HopperBlock, requests: list[Any]) -> None:
    """Do what a warpgroup's threads together do in ``hopper.begin_product``."""
    given = {tuple(map(int, request[1:])) for request in requests}
    assert len(given) == 1, "a warpgroup at two products"
    left, right, keep, columns, by_rows = given.pop()
    read = _operand_by_rows if by_rows else _operand
    product = (
        _operand(block, left, hopper.ROWS).astype(np.float64)
        @ read(block, right, columns).astype(np.float64).T
    )
    # by warp, half, lane // 4, j, lane % 4 and i
    parts = product.reshape(4, 2, 8, columns // 8, 4, 2)
    for thread, (sums, *_) in enumerate(requests):
        part = parts[thread // 32, :, thread % 32 // 4, :, thread % 4]  # half, j, i
        part = part.transpose(1, 0, 2).ravel()
        sums = sums[: part.size]
        sums[:] = sums + part if keep else part


def _write_tensor_map(memory: Any, index: Any, words: tuple[int, ...]) -> int:
    memory.check(index), memory.check(index + len(words) - 1)
    address = memory._items.ctypes.data + int(index) * 8
    emulator._Cuda.block.maps[address] = words
    return address


def _make_barrier(barrier: Any, arrivals: Any) -> None:
    block = emulator._Cuda.block
    block.place(barrier, 8, 8)
    block.barriers[int(barrier)] = Barrier(int(arrivals))


def _arrive_in_block(barrier: Any, block: Any) -> None:
    emulator._Cuda.block.cluster[int(block)].barrier(barrier).arrive()


def _int32(value: Any) -> int:
    """Return the low 32 bits of an integer, or of a bool."""
    return (int(value) + (1 << 31)) % (1 << 32) - (1 << 31)


class _Types(emulator._Types):  # type: ignore[name-defined, misc]
    int32 = staticmethod(_int32)


class _SharedWords:
    """Shared memory as an array of int32."""

    def __init__(self, memory: np.ndarray) -> None:
        self._words = memory[: len(memory) // 4 * 4].view(np.int32)

    def __getitem__(self, index: Any) -> int:
        return int(self._words[int(index)])

    def __setitem__(self, index: Any, word: Any) -> None:
        self._words[int(index)] = word


class _Shared:
    @staticmethod
    def array(size: int, dtype: Any) -> np.ndarray:
        assert size == 0, "shared memory whose size the launch gives"
        return _SharedWords(emulator._Cuda.block.bytes)


class _Local:
    @staticmethod
    def array(size: int, dtype: Any) -> Any:
        if dtype is np.int64:  # may be addresses
            return [None] * size
        return np.full(size, -1, np.int32 if dtype is _int32 else dtype)


class _Cuda(emulator._Cuda):  # type: ignore[name-defined, misc]
    shared, local = _Shared, _Local


def _positive_word(low: Any, high: Any) -> Any:
    numbers = np.array([low, high], np.float32)
    positive = np.where(numbers < 0, np.float32(0), numbers)  # NaN stays
    return int(positive.astype(BFLOAT16).view(np.int32)[0])


def _positive_halves(word: Any) -> Any:
    low, high = np.array([word], np.int32).view(np.int16) > 0
    return _int32(low | int(high) << 16)


def _store_low_half(pointer: Any, index: Any, word: Any) -> None:
    half = np.array([int(word) & 0xFFFF], np.uint16)
    pointer._items[pointer.check(index)] = half.view(pointer.dtype)[0]


class Address:
    """Where a number is in memory: what it is an index of, and that."""

    def __init__(self, pointer: Any, index: int) -> None:
        self.pointer, self.index = pointer, index

    def __add__(self, nbytes: int) -> "Address":
        return Address(self.pointer, self.index + int(nbytes) // self.pointer.dtype.itemsize)


def _copy_sixteen_bytes(target: Any, address: Address, row: Any, rows: Any) -> None:
    _words(target, 4)[:] = 0
    if row < rows:
        pointer, index = address.pointer, address.index
        assert index % 8 == 0, "words that are not aligned"
        first, last = pointer.check(index), pointer.check(index + 7)
        _words(target, 4)[:] = pointer._items[first : last + 1].view(np.int32)


def _word_of_two(low: Any, high: Any) -> int:
    return int(np.array([low, high], np.float32).astype(BFLOAT16).view(np.int32)[0])


def _number_of_half(word: Any) -> Any:
    return np.array([int(word) & 0xFFFF], np.uint16).view(BFLOAT16).astype(np.float32)[0]


def _store_shared_word(address: Any, word: Any) -> None:
    _words(address, 1)[0] = word


def _words(address: Any, count: int) -> np.ndarray:
    block = emulator._Cuda.block
    place = block.place(address, 4 * count, 4 * count)
    return block.bytes[place : place + 4 * count].view(np.int32)


def _store_two_shared_words(address: Any, first: Any, second: Any) -> None:
    _words(address, 2)[:] = first, second


_NOTHING = (
    *("wait_for_older_products", "wait_for_sums", "publish_barriers"),
    *("give_registers_away", "take_registers", "show_to_tensor_cores"),
)
_EMULATED = {
    **emulator._EMULATED,
    **dict.fromkeys(_NOTHING, lambda *_: None),
    "cuda": _Cuda,
    "types": _Types,
    "int32": _int32,
    "shared_address": lambda array: BASE,
    "make_barrier": _make_barrier,
    "arrive": lambda barrier: emulator._Cuda.block.barrier(barrier).arrive(),
    "arrive_when_copied": lambda barrier: emulator._Cuda.block.barrier(barrier).arrive(),
    "address_of": lambda pointer, index: Address(pointer, int(index)),
    "copy_sixteen_bytes": _copy_sixteen_bytes,
    "row_address": lambda address, row, row_bytes: address + int(row) * int(row_bytes),
    "load_four_integers": lambda pointer, index: tuple(pointer.read(index + i) for i in range(4)),
    "word_of_two": _word_of_two,
    "number_of_half": _number_of_half,
    "store_shared_word": _store_shared_word,
    "arrive_in_block": _arrive_in_block,
    "arrive_and_expect": _arrive_and_expect,
    "write_tensor_map": _write_tensor_map,
    "copy_box": _copy_box,
    "copy_box_to_blocks": _copy_box_to_blocks,
    "positive_word": _positive_word,
    "positive_halves": _positive_halves,
    "store_low_half": _store_low_half,
    "store_two_shared_words": _store_two_shared_words,
    "load_shared_word": lambda address: int(_words(address, 1)[0]),
    "load_four_shared_words": lambda address: tuple(_words(address, 4).tolist()),
}
_MODULES = (language, tensor_cores, hopper)


class _Meetings(ast.NodeTransformer):
    """Turns calls in which threads wait into ``yield``, and device functions into generators."""

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
        request: list[ast.expr] | None = None
        if name == "cuda.syncwarp":
            request = [ast.Constant("shuffle"), ast.Constant(0), ast.Constant(0)]
        elif name == "cuda.shfl_xor_sync":
            request = [ast.Constant("shuffle"), *node.args[1:]]
        elif name == "wait_for_phase":
            request = [ast.Constant("phase"), *node.args]
        elif name == "wait_for_cluster":
            request = [ast.Constant("cluster")]
        elif name == "begin_product":
            request = [ast.Constant("product"), *node.args]
        if request is not None:
            return ast.Yield(ast.Tuple(request, ast.Load()))
        is_function = getattr(self._namespace.get(name), "py_func", None) is not None
        if is_function and name not in _EMULATED:
            return ast.YieldFrom(node)
        return node


@functools.cache
def _as_generator(function: Any) -> Any:
    source = ast.parse(textwrap.dedent(inspect.getsource(function)))
    tree = ast.fix_missing_locations(_Meetings(function.__globals__).visit(source))
    namespace = dict(function.__globals__)
    captured = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    namespace |= {name: cell.cell_contents for name, cell in captured}
    for name, value in function.__globals__.items():
        if name in _EMULATED and any(value is getattr(it, name, None) for it in _MODULES):
            namespace[name] = _EMULATED[name]
        elif getattr(value, "py_func", None) is not None and name in function.__code__.co_names:
            namespace[name] = _as_generator(value.py_func)
    exec(compile(tree, inspect.getsourcefile(function) or "kernel", "exec"), namespace)
    return namespace[function.__name__]


def _configure(kernel: Kernel, blocks: int) -> Any:
    assert blocks % kernel.cluster == 0, "a part of a cluster"
    return types.SimpleNamespace(grid=(blocks, 1, 1))


def install(monkeypatch: Any) -> EmulatedHopper:
    """Let arrays and kernels use an emulated Hopper GPU until the test ends; return it."""
    gpu = EmulatedHopper()
    emulator.install(monkeypatch, gpu)
    monkeypatch.setattr(tensor_map, "_encode", lambda *sizes: (*sizes, *[0] * (16 - len(sizes))))
    monkeypatch.setattr(Kernel, "_configure", _configure)
    monkeypatch.setattr(devices, "gpu", lambda device_id=0: gpu)
    return gpu
