"""Kernels, ready to be called: compiled for what they are given, then launched through cuda.core.

Launching costs host time at every call, so the path from a call to the driver is short: what is
decided by types alone is decided once and looked up.
"""

from collections.abc import Callable
from types import FunctionType
from typing import Any

import numpy as np

from twell_numba.device.gpu.array import DeviceArray
from twell_numba.device.gpu.compile import Options, compile_kernel
from twell_numba.device.gpu.devices import GPU
from twell_numba.device.gpu.driver import GPUError, call
from twell_numba.device.gpu.packages import bindings, core
from twell_numba.device.gpu.stream import Graph, Stream
from twell_numba.device.gpu.tensor_map import TensorMap

_MOST_BLOCKS = 2**31 - 1
_MOST_CONFIGURATIONS = 4096

_SCALARS = {int: "int", np.float32: "float32", np.float64: "float64"}


class Kernel:
    """A kernel, called as ``kernel(blocks, *arguments)``.

    Arguments are arrays (the kernel gets a pointer), tensor maps of arrays (it gets their words, a
    tuple of integers), ``int`` (64-bit), ``np.float32`` and ``np.float64``; a plain ``float`` is
    refused, because it would make float64 arithmetic of float32. The kernel runs in the stream of
    the first array. For each combination of dtypes and GPU it is compiled once.

    Parameters
    ----------
    function : function
        In the language of :mod:`twell_numba.device.gpu.language`.
    options : Options
    shared_memory : int
        Bytes of a block's dynamic shared memory.
    cluster : int
        Blocks that run at the same time and reach each other's shared memory.
    """

    def __init__(
        self,
        function: FunctionType,
        options: Options,
        shared_memory: int = 0,
        cluster: int = 1,
    ) -> None:
        self.function = function
        self.options = options
        self.shared_memory = shared_memory
        self.cluster = cluster
        self.name = function.__name__.lstrip("_")
        self._loaded: dict[tuple[Any, ...], Any] = {}
        self._configurations: dict[int, Any] = {}
        self.__doc__ = function.__doc__

    def __call__(self, blocks: int, *arguments: Any) -> None:
        """Run the kernel on ``blocks`` blocks of ``options.threads`` threads, whole clusters.

        Nothing happens for 0 blocks.

        Raises
        ------
        TypeError
            If an argument is of another kind.
        ValueError
            If arrays are on different GPUs, or there are too many blocks or a part of a cluster.
        GPUError
            If the kernel cannot be launched.
        """
        if blocks <= 0:
            return
        kinds, values, stream, others = [], [], None, None
        for argument in arguments:
            kind = type(argument)
            if kind is DeviceArray:
                kinds.append(argument.kind)
                values.append(argument.pointer)
                array = argument
            elif kind is TensorMap:
                kinds.append("tensor_map")
                values.extend(argument.words)
                array = argument.array
            else:
                kinds.append(_SCALARS.get(kind))
                values.append(argument)
                continue
            if array.stream is not stream:
                if stream is None:
                    stream = array.stream
                else:
                    others = [array.stream] if others is None else [*others, array.stream]
        if stream is None or None in kinds:
            raise TypeError(self._describe_wrong(arguments))
        gpu = stream.gpu
        kinds.append(gpu.id)
        kernel = self._loaded.get(tuple(kinds))
        if kernel is None:
            kernel = self._load(tuple(kinds), gpu)
        configuration = self._configurations.get(blocks)
        if configuration is None:
            configuration = self._configure(blocks)
        if others is not None:
            self._wait_for(stream, others)
        if stream.capture is not None:
            _keep_alive(stream.capture, arguments)
        gpu.make_current()
        try:
            _launch(stream._stream, configuration, kernel, *values)
        except Exception as error:
            reason = " ".join(str(error).split())
            raise GPUError(
                f"kernel {self.name} could not be launched on GPU {gpu.id} ({blocks} blocks of "
                f"{self.options.threads} threads, {self.shared_memory} bytes of shared memory): "
                f"{reason}"
            ) from error
        if others is not None:
            for other in others:
                other.wait(stream)

    def blocks(self, threads: int) -> int:
        """Return how many blocks have at least so many threads together."""
        return min(-(-threads // self.options.threads), _MOST_BLOCKS)

    def blocks_of_warps(self, warps: int) -> int:
        """Return how many blocks have at least so many warps together."""
        return self.blocks(32 * warps)

    def compile(self, kinds: tuple[str, ...], target: str) -> tuple[bytes, str]:
        """Return the machine code for arguments of these kinds and the name of its entry.

        Works without a GPU; see :func:`twell_numba.device.gpu.compile.compile_kernel`.
        """
        from twell_numba.device.gpu.language import argument_type

        types = tuple(argument_type(kind) for kind in kinds)
        return compile_kernel(self.function, types, target, self.options)

    def _load(self, key: tuple[Any, ...], gpu: GPU) -> Any:
        code, entry = self.compile(key[:-1], gpu.target)
        gpu.make_current()
        try:
            kernel = core().ObjectCode.from_cubin(code, name=self.name).get_kernel(entry)
            if self.shared_memory:  # a block gets 48 KiB unasked, with arrays of fixed size in it
                self._ask_for_shared_memory(kernel, gpu)
        except GPUError:
            raise
        except Exception as error:
            reason = " ".join(str(error).split())
            raise GPUError(
                f"kernel {self.name} could not be loaded on GPU {gpu.id}: {reason}"
            ) from error
        self._loaded[key] = kernel
        return kernel

    def _ask_for_shared_memory(self, kernel: Any, gpu: GPU) -> None:
        if self.shared_memory > gpu.shared_memory_per_block:
            raise GPUError(
                f"kernel {self.name} needs {self.shared_memory} bytes of shared memory a block, "
                f"GPU {gpu.id} has {gpu.shared_memory_per_block}"
            )
        driver = bindings()
        attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        device = driver.CUdevice(gpu.id)
        call("cuKernelSetAttribute", attribute, self.shared_memory, kernel.handle, device)

    def _configure(self, blocks: int) -> Any:
        if blocks > _MOST_BLOCKS:
            raise ValueError(f"kernel {self.name}: {blocks} blocks given, at most {_MOST_BLOCKS}")
        if blocks % self.cluster:
            raise ValueError(
                f"kernel {self.name}: {blocks} blocks given, a multiple of {self.cluster} wanted"
            )
        if len(self._configurations) >= _MOST_CONFIGURATIONS:
            self._configurations.clear()
        options: dict[str, int] = {"grid": blocks}
        if self.cluster > 1:
            options = {"grid": blocks // self.cluster, "cluster": self.cluster}
        configuration = core().LaunchConfig(
            **options, block=self.options.threads, shmem_size=self.shared_memory
        )
        self._configurations[blocks] = configuration
        return configuration

    def _wait_for(self, stream: Stream, others: list[Stream]) -> None:
        for other in others:
            if other.gpu is not stream.gpu:
                raise ValueError(
                    f"kernel {self.name}: arrays on GPU {stream.gpu.id} and GPU {other.gpu.id} "
                    "given, one GPU for all wanted"
                )
            stream.wait(other)

    def _describe_wrong(self, arguments: tuple[Any, ...]) -> str:
        given = ", ".join(type(argument).__name__ for argument in arguments)
        return (
            f"kernel {self.name}: arguments ({given}) given, at least one DeviceArray and "
            "otherwise int, np.float32 and np.float64 wanted"
        )


def kernel(
    *,
    threads: int = 256,
    blocks_per_multiprocessor: int = 0,
    max_registers: int = 0,
    shared_memory: int = 0,
    cluster: int = 1,
    line_information: bool = False,
) -> Callable[[Callable[..., None]], Kernel]:
    """Make a :class:`Kernel` of a function; a decorator.

    Parameters
    ----------
    threads : int
        Of each block, whole warps (multiples of 32).
    blocks_per_multiprocessor, max_registers, line_information
        See :class:`twell_numba.device.gpu.compile.Options`.
    shared_memory : int
        Bytes of a block's dynamic shared memory. It is asked of the driver.
    cluster : int
        Blocks that run at the same time and reach each other's shared memory; more than 1 from
        compute capability 9.0 on.
    """
    if threads % 32 or not 32 <= threads <= 1024:
        raise ValueError(f"{threads} threads given, a multiple of 32 up to 1024 wanted")
    options = Options(threads, blocks_per_multiprocessor, max_registers, line_information)

    def decorate(function: Callable[..., None]) -> Kernel:
        assert isinstance(function, FunctionType)
        return Kernel(function, options, shared_memory, cluster)

    return decorate


def _launch(stream: Any, configuration: Any, loaded: Any, *values: Any) -> None:
    """Stands for ``cuda.core.launch`` until that is imported, at the first launch."""
    global _launch
    _launch = core().launch
    _launch(stream, configuration, loaded, *values)


def _keep_alive(graph: Graph, arguments: tuple[Any, ...]) -> None:
    """Let the graph being recorded keep the memory alive that its kernels use."""
    for argument in arguments:
        if type(argument) is DeviceArray:
            graph.keep(argument.owner)
        elif type(argument) is TensorMap:
            graph.keep(argument.array.owner)
