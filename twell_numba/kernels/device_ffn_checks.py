"""Checks of what a feedforward layer's GPU kernels are handed, the same on every path."""

import itertools
from typing import Any

import numpy as np

from twell_numba.device.gpu import DeviceArray, Stream, require_same_gpu
from twell_numba.kernels.checks import require_shape
from twell_numba.kernels.cuda_scalars import filled
from twell_numba.kernels.device_checks import arithmetic_dtype, float_array, float_arrays
from twell_numba.kernels.ffn_checks import l1_scale_input


def forward_arrays(**arrays: Any) -> tuple[int, int, int]:
    """Check x and the weights, and return M, D and F.

    Parameters
    ----------
    **arrays : DeviceArray
        x of shape (M, D), then the weights, all of one shape (F, D).

    Raises
    ------
    TypeError, ValueError
        If dtypes or shapes do not fit, or the arrays are on different GPUs.
    """
    float_arrays(**arrays)
    x, first, *_ = arrays.values()
    require_shape("x", x, ("M", "D"))
    neurons = first.shape[0] if first.ndim else 0
    for name, weight in list(arrays.items())[1:]:
        require_shape(name, weight, (neurons, x.shape[1]))
    return x.shape[0], x.shape[1], neurons


def backward_arrays(
    dy: Any,
    x: DeviceArray,
    weights: tuple[DeviceArray, ...],
    activations: Any,
    wanted: type[Any],
    **gradients: Any,
) -> None:
    """Check what the backward pass gets beside the forward pass's inputs.

    Parameters
    ----------
    dy : DeviceArray, shape (M, D)
        Of x's dtype.
    x : DeviceArray, shape (M, D)
    weights : tuple of DeviceArray, shape (F, D) each
    activations
        From the forward pass; it has a ``shape``, (M, F).
    wanted : type
        What the activations must be.
    **gradients : DeviceArray, shape (F, D)
        Of x's dtype, or float32 for x in 16 bits. The gradients are added to them.

    Raises
    ------
    TypeError, ValueError
        If dtypes or shapes do not fit, the activations are not of the type ``wanted`` or not of
        this x, arrays are on different GPUs, or a gradient shares memory with another, a weight, x
        or dy.
    """
    neurons = weights[0].shape[0]
    float_arrays(x=x, dy=dy)
    require_shape("dy", dy, x.shape)
    if not isinstance(activations, wanted):
        raise TypeError(
            f"activations of type {type(activations).__name__} given, those that the forward pass "
            "returned wanted"
        )
    if activations.shape != (x.shape[0], neurons):
        raise ValueError(
            f"activations of shape {activations.shape} given, {(x.shape[0], neurons)} "
            "wanted: those that the forward pass returned for this x"
        )
    for name, gradient in gradients.items():
        float_array(name, gradient, _gradient_dtype(gradient, x.dtype), x)
        require_shape(name, gradient, (neurons, x.shape[1]))
    require_same_gpu(x=x, **gradients)
    for first, second in itertools.combinations(gradients.values(), 2):
        if _share_memory(first, second):
            raise ValueError(
                f"one array given for several of {', '.join(gradients)}, one each wanted"
            )
    for name, gradient in gradients.items():
        if any(_share_memory(gradient, array) for array in (x, dy, *weights)):
            raise ValueError(
                f"{name} that shares memory with a weight, x or dy given, memory of its own wanted"
            )


def l1_scale_on_gpu(l1_scale: float | DeviceArray, stream: Stream) -> DeviceArray:
    """Return the L1 term's scale as kernels read it: float32, shape (1,).

    Parameters
    ----------
    l1_scale : float or DeviceArray of float32, shape (1,)
        A float is rounded, and written by a kernel, so that the call can be recorded. An array is
        returned as it is; it may hold another number at each replay.
    stream : Stream
        Of the work in which it is wanted.

    Raises
    ------
    TypeError
        If it is not a number, or an array of another dtype.
    ValueError
        If it is NaN or infinite, or an array of another shape or on another GPU.
    """
    if not isinstance(l1_scale, DeviceArray):
        return filled(float(l1_scale_input(l1_scale, np.dtype(np.float32))), np.float32, stream)
    if l1_scale.dtype != np.float32:
        raise TypeError(f"l1_scale of dtype {l1_scale.dtype} given, float32 wanted")
    require_shape("l1_scale", l1_scale, (1,))  # type: ignore[arg-type]
    if l1_scale.gpu is not stream.gpu:
        raise ValueError(
            f"l1_scale on GPU {l1_scale.gpu.id} given beside x on GPU {stream.gpu.id}, "
            "one GPU for all wanted"
        )
    return l1_scale


def _gradient_dtype(gradient: Any, dtype: np.dtype) -> np.dtype:
    wider = arithmetic_dtype(dtype)
    return wider if getattr(gradient, "dtype", None) == wider else dtype


def _share_memory(first: DeviceArray, second: DeviceArray) -> bool:
    start = max(first.pointer, second.pointer)
    return start < min(first.pointer + first.nbytes, second.pointer + second.nbytes)
