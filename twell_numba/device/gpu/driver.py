"""Calls of NVIDIA's driver, and its errors in one line."""

import functools
from typing import Any

from twell_numba.device.gpu.packages import bindings
from twell_numba.errors import TwellError


class GPUError(TwellError):
    """The driver refused what it was asked, or a kernel failed on the GPU."""


def call(function: str, *arguments: Any) -> Any:
    """Call a function of the driver's interface, ``cuMemcpyAsync`` for instance.

    Returns
    -------
    object
        What the function returns beside its status: None, a value or a tuple.

    Raises
    ------
    GPUError
        If its status is not success.
    """
    status, *values = getattr(bindings(), function)(*arguments)
    if int(status) != 0:
        raise GPUError(f"{function} failed: {describe(status)}")
    return None if not values else values[0] if len(values) == 1 else tuple(values)


def describe(status: Any) -> str:
    """Return the driver's name of a status and its own words for it."""
    name = getattr(status, "name", str(status))
    try:
        failed, text = bindings().cuGetErrorString(status)
    except Exception:  # the name must do where the driver has no words for it
        return str(name)
    words = text.decode(errors="replace") if int(failed) == 0 and text else ""
    return f"{name} ({words})" if words else str(name)


@functools.cache
def initialize() -> int:
    """Start the driver once and return the number of GPUs it offers, at least 1.

    Raises
    ------
    TwellError
        If there is no driver, or no GPU that this process may use.
    """
    try:
        status, *_ = bindings().cuInit(0)
    except (OSError, RuntimeError) as error:  # libcuda.so.1 is not there
        raise TwellError(
            "no NVIDIA driver found; install the driver of your GPU, or use --device cpu"
        ) from error
    if int(status) != 0:
        raise TwellError(
            f"the NVIDIA driver found no usable GPU: {describe(status)}; check nvidia-smi, "
            "CUDA_VISIBLE_DEVICES and whether this container was given the GPU"
        )
    count = int(call("cuDeviceGetCount"))
    if count == 0:
        raise TwellError("the NVIDIA driver offers no GPU; check nvidia-smi, CUDA_VISIBLE_DEVICES")
    return count
