"""Python kernels made machine code of a GPU: the one file that knows numba-cuda's inner parts.

Works without a GPU and without a driver: typing and lowering by numba-cuda, code by NVVM, assembled
by nvJitLink. Kernels are compiled without fast-math: multiplications and additions are contracted,
as in ``device.jit``, but NaN, infinities, signed zeros and subnormal numbers keep their meaning,
and square roots and divisions are rounded correctly.
"""

import functools
import importlib.metadata
import platform
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FunctionType
from typing import Any

from twell_numba.device.gpu import cache
from twell_numba.device.gpu.fingerprint import fingerprint
from twell_numba.device.gpu.packages import compiler

# What is typed and lowered is the same for every target: it is done for the oldest.
_LOWERED_FOR = (7, 5)
_VERSIONS_OF = ("numba-cuda", "llvmlite", "nvidia-nvvm", "nvidia-nvjitlink", "cuda-core")

_lock = threading.RLock()  # numba-cuda's compiler is not made for several threads at once


@dataclass(frozen=True)
class Options:
    """How a kernel is compiled.

    Attributes
    ----------
    threads : int
        Of a block, at most: it bounds the registers a thread may have.
    blocks_per_multiprocessor : int
        That are to fit beside each other; 0 leaves it open.
    max_registers : int
        A thread's; 0 leaves it open.
    line_information : bool
        Whether profilers can name source lines.
    """

    threads: int = 256
    blocks_per_multiprocessor: int = 0
    max_registers: int = 0
    line_information: bool = False


def compile_kernel(
    function: FunctionType, argument_types: tuple[Any, ...], target: str, options: Options
) -> cache.Entry:
    """Return a kernel's machine code (a cubin) and the name of its entry.

    Parameters
    ----------
    function : function
        Of the subset of Python that Numba knows, returning nothing.
    argument_types : tuple of Numba types
        See :func:`twell_numba.device.gpu.language.argument_type`.
    target : str
        Compute capability: "75", "80", "90a".
    options : Options
    """
    key = "\n".join(
        (
            fingerprint(function),
            repr(tuple(map(str, argument_types))),
            target,
            repr(options),
            _versions(),
        )
    )
    return cache.lookup(key, lambda: _build(function, argument_types, target, options))


def _build(
    function: FunctionType, argument_types: tuple[Any, ...], target: str, options: Options
) -> cache.Entry:
    with _lock, _without_a_gpu():
        library = _lower(function, argument_types, options)
        # Linked as a whole: the assembler serialises wgmma, ignores setmaxnreg and uses more
        # registers in code that could still be linked with other code.
        library._lto = True
        cubin = library.get_cubin(cc=_capability(target))
        return bytes(cubin.code), library._entry_name


@functools.lru_cache(maxsize=64)
def _lower(function: FunctionType, argument_types: tuple[Any, ...], options: Options) -> Any:
    """Return numba-cuda's library of the kernel, which makes code for any target."""
    numba_compiler, nvvm = compiler("compiler"), compiler("cudadrv.nvvm")
    compiled = numba_compiler.compile_cuda(
        function,
        compiler("types").void,
        argument_types,
        cc=_LOWERED_FOR,
        lineinfo=options.line_information,
        nvvm_options={"opt": 3},
        max_registers=options.max_registers or None,
    )
    library = compiled.library
    kernel = library.get_function(compiled.fndesc.llvm_func_name)
    library._entry_name = kernel.name
    numba_compiler.kernel_fixup(kernel, False)
    bounds = (options.threads, options.blocks_per_multiprocessor)
    nvvm.set_launch_bounds(kernel, bounds if bounds[1] else bounds[:1])
    # A device function that is reached in two ways is there twice, and its shared memory then has
    # one name for two arrays.
    library._llvm_strs = list(dict.fromkeys(library.llvm_strs))
    return library


class _NoDevice:
    """Stands for the current GPU where numba-cuda asks one for its compute capability."""

    compute_capability = _LOWERED_FOR
    id = 0


@contextmanager
def _without_a_gpu() -> Iterator[None]:
    """Let device functions be compiled where there is no GPU, and for another than is there."""
    dispatcher, config = compiler("dispatcher"), compiler("core.config")
    original, forced = dispatcher.get_current_device, config.FORCE_CUDA_CC
    dispatcher.get_current_device = _NoDevice
    config.FORCE_CUDA_CC = None  # it would change the target behind the cache's back
    try:
        yield
    finally:
        dispatcher.get_current_device, config.FORCE_CUDA_CC = original, forced


def _capability(target: str) -> tuple[int, int] | tuple[int, int, str]:
    digits = target.rstrip("af")
    numbers = int(digits[:-1]), int(digits[-1])
    return numbers if digits == target else (*numbers, target[len(digits) :])


@functools.cache
def _versions() -> str:
    versions = [f"python {platform.python_version()}", "linked as a whole"]
    for package in _VERSIONS_OF:
        try:
            versions.append(f"{package} {importlib.metadata.version(package)}")
        except importlib.metadata.PackageNotFoundError:
            versions.append(f"{package} unknown")
    return ", ".join(versions)
