"""Kernels by where their arrays are: on the CPU, or on a GPU.

A family's ``cpu.py`` and ``cuda.py`` have the same functions. What the family's package offers goes
to the one or the other by its arguments, so that layers and models are written once.
"""

import functools
import importlib
from collections.abc import Callable
from typing import Any

from twell_numba.device.arrays import is_on_gpu


def by_device(cpu_function: Callable[..., Any], gpu_module: str) -> Callable[..., Any]:
    """Return a function that computes where its arguments are.

    Parameters
    ----------
    cpu_function : callable
        Computes with NumPy arrays.
    gpu_module : str
        Has a function of the same name, for arguments of which any is on a GPU, or is a list of
        what is. Imported when it is first needed: it wants the extra ``cuda``.
    """
    name = cpu_function.__name__
    gpu_function: Callable[..., Any] | None = None

    @functools.wraps(cpu_function)
    def compute(*arguments: Any, **options: Any) -> Any:
        nonlocal gpu_function
        for argument in arguments:
            if is_on_gpu(argument) or (type(argument) is list and any(map(is_on_gpu, argument))):
                if gpu_function is None:
                    gpu_function = getattr(importlib.import_module(gpu_module), name)
                return gpu_function(*arguments, **options)
        return cpu_function(*arguments, **options)

    return compute
