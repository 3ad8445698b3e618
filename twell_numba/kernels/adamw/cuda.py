"""AdamW on a GPU, in one pass.

    g = grad * grad_scale
    m <- beta1 m + (1 - beta1) g,   v <- beta2 v + (1 - beta2) g^2
    w <- w (1 - learning_rate weight_decay) - (learning_rate / c1) m / (sqrt(v) / sqrt(c2) + eps)
    with c1 = 1 - beta1^t, c2 = 1 - beta2^t                           all arrays of one shape

Bound by memory: reads four arrays and writes three (and a copy of the values in 16 bits), once
each. A thread has eight numbers of each array. 100 million weights with a copy in 16 bits, one
H200: 0.86 ms, 3.5 TB/s; with blocks of 256 threads 0.97 ms, of 512 1.19 ms.

``sum_of_squares`` adds up in float64, over a number of threads that depends on the size alone: the
same bits in every run, on every GPU. A training step that is recorded has what changes from step to
step in arrays: see :func:`adamw_step_recorded` and :func:`clip_scale_on_gpu`.
"""

import math
from typing import Any

import ml_dtypes
import numpy as np

from twell_numba.device.gpu import DeviceArray, empty, kernel
from twell_numba.device.gpu.language import (
    cuda,
    device_function,
    global_thread,
    grid_threads,
    load,
    number,
    store,
    types,
)
from twell_numba.kernels.checks import require_shape
from twell_numba.kernels.cuda_scalars import sum_of_squares_on_gpu as sum_of_squares_on_gpu
from twell_numba.kernels.cuda_vectors import load_eight, store_eight
from twell_numba.kernels.device_checks import arithmetic_dtype, float_array, float_arrays

_COPIES = (np.dtype(ml_dtypes.bfloat16), np.dtype(np.float16))


def adamw_step(
    value: DeviceArray,
    grad: DeviceArray,
    first_moment: DeviceArray,
    second_moment: DeviceArray,
    *,
    learning_rate: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    step: int,
    grad_scale: float = 1.0,
) -> None:
    """Take one step of AdamW with decoupled weight decay (Loshchilov and Hutter, 2019).

    Parameters
    ----------
    value, first_moment, second_moment : DeviceArray
        float32 or float64, of one shape and dtype. Changed in place. The moments start as zeros.
    grad : DeviceArray
        Of the same shape; of the same dtype, bfloat16 or float16.
    learning_rate, beta1, beta2, eps, weight_decay : float
    step : int
        Counted from 1: it corrects the moments' bias towards their start at zero.
    grad_scale : float
        The gradient is multiplied by it first: gradient clipping without a pass of its own.

    Raises
    ------
    TypeError
        If a dtype does not fit.
    ValueError
        If the shapes differ, the arrays are on different GPUs, or step < 1.
    """
    if step < 1:
        raise ValueError(f"step {step} given, steps counted from 1 wanted")
    float_arrays(value=value, first_moment=first_moment, second_moment=second_moment)
    dtype = arithmetic_dtype(value.dtype)
    if value.dtype != dtype:
        raise TypeError(f"value of dtype {value.dtype} given, float32 or float64 wanted")
    wanted = grad.dtype if _is_shorter(grad, dtype) else dtype
    float_array("grad", grad, wanted, value)
    for name, array in (
        ("value", value),
        ("first_moment", first_moment),
        ("second_moment", second_moment),
    ):
        require_shape(name, array, grad.shape)  # type: ignore[arg-type]
    coefficients = [
        dtype.type(coefficient)
        for coefficient in (
            grad_scale,
            beta1,
            1 - beta1,
            beta2,
            1 - beta2,
            1 - learning_rate * weight_decay,
            learning_rate / (1 - beta1**step),
            (1 - beta2**step) ** -0.5,
            eps,
        )
    ]
    _step(
        _step.blocks(grad.size), value, grad, first_moment, second_moment, *coefficients, grad.size
    )


def sum_of_squares(grad: DeviceArray) -> float:
    """Return the sum of the squares of all entries, accumulated in float64; waits for the GPU.

    Parameters
    ----------
    grad : DeviceArray
        Of floats, of any shape.

    Raises
    ------
    TypeError
        If the dtype is another.
    """
    return float(sum_of_squares_on_gpu(grad).to_numpy()[0])


def adamw_step_recorded(
    value: DeviceArray,
    grad: DeviceArray,
    first_moment: DeviceArray,
    second_moment: DeviceArray,
    copy: DeviceArray | None,
    coefficients: DeviceArray,
    scale: DeviceArray,
) -> None:
    """Take one step of AdamW with what changes from step to step read from arrays.

    Parameters
    ----------
    value, first_moment, second_moment : DeviceArray of float32
        Of one shape. Changed in place.
    grad : DeviceArray of float32
        Of the same shape.
    copy : DeviceArray of bfloat16 or float16, or None
        Of the same shape. Overwritten with the new values, rounded.
    coefficients : DeviceArray of float32, shape (8,)
        beta1, 1 - beta1, beta2, 1 - beta2, eps, learning_rate * weight_decay, learning_rate / c1,
        1 / sqrt(c2).
    scale : DeviceArray of float32, shape (1,)
        The gradient is multiplied by it first. NaN: nothing is changed.

    Raises
    ------
    TypeError
        If a dtype does not fit.
    ValueError
        If a shape does not fit, or the arrays are on different GPUs.
    """
    single = np.dtype(np.float32)
    float_array("value", value, single, value)
    for name, array in (
        ("grad", grad),
        ("first_moment", first_moment),
        ("second_moment", second_moment),
    ):
        float_array(name, array, single, value)
        require_shape(name, array, value.shape)  # type: ignore[arg-type]
    for name, array, shape in (("coefficients", coefficients, (8,)), ("scale", scale, (1,))):
        float_array(name, array, single, value)
        require_shape(name, array, shape)  # type: ignore[arg-type]
    if copy is not None:
        if getattr(copy, "dtype", None) not in _COPIES:
            names = " or ".join(dtype.name for dtype in _COPIES)
            raise TypeError(f"copy of {getattr(copy, 'dtype', copy)!r} given, {names} wanted")
        float_array("copy", copy, copy.dtype, value)
        require_shape("copy", copy, value.shape)  # type: ignore[arg-type]
    narrow = value if copy is None else copy  # a pointer is wanted in any case
    arrays = (value, grad, first_moment, second_moment, narrow)
    is_aligned = int(all(array.pointer % 16 == 0 for array in arrays))
    _step_recorded(
        _step_recorded.blocks(-(-value.size // 8)), *arrays, int(copy is not None), coefficients,
        scale, value.size, is_aligned,
    )  # fmt: skip


def clip_scale_on_gpu(
    sum_of_squares: DeviceArray, loss_sum: DeviceArray, limit: float
) -> DeviceArray:
    """Return what to multiply gradients by for a norm of at most ``limit``.

    Parameters
    ----------
    sum_of_squares, loss_sum : DeviceArray of float64, shape (1,)
        Of all gradients, and of the losses.
    limit : float
        0: no limit.

    Returns
    -------
    DeviceArray of float32, shape (1,)
        NaN if one of both is not finite: the step is to be left out.

    Raises
    ------
    TypeError, ValueError
        If an array is of another dtype or shape, or they are on different GPUs.
    """
    for name, array in (("sum_of_squares", sum_of_squares), ("loss_sum", loss_sum)):
        float_array(name, array, np.dtype(np.float64), sum_of_squares)
        require_shape(name, array, (1,))  # type: ignore[arg-type]
    scale = empty(1, np.float32, sum_of_squares.stream)
    _clip(1, sum_of_squares, loss_sum, np.float64(limit), scale)
    return scale


def _is_shorter(grad: Any, dtype: np.dtype) -> bool:
    """Whether it is of one of the dtypes in 16 bits, for which values are kept in float32."""
    return getattr(grad, "dtype", dtype).itemsize == 2 and dtype == np.float32


@kernel()
def _step(
    value, grad, first_moment, second_moment,
    grad_scale, beta1, rest1, beta2, rest2, keep, rate, correction2, eps, size,
):  # fmt: skip
    i = global_thread()
    while i < size:
        g = load(grad, i) * grad_scale
        first = beta1 * load(first_moment, i) + rest1 * g
        second = beta2 * load(second_moment, i) + rest2 * g * g
        store(first_moment, i, first)
        store(second_moment, i, second)
        change = rate * first / (math.sqrt(second) * correction2 + eps)
        store(value, i, load(value, i) * keep - change)
        i += grid_threads()


@device_function
def _moments(moments, gradients, beta, rest):
    """Return eight means of what comes in: ``beta * moment + rest * gradient``."""
    return (
        beta * moments[0] + rest * gradients[0],
        beta * moments[1] + rest * gradients[1],
        beta * moments[2] + rest * gradients[2],
        beta * moments[3] + rest * gradients[3],
        beta * moments[4] + rest * gradients[4],
        beta * moments[5] + rest * gradients[5],
        beta * moments[6] + rest * gradients[6],
        beta * moments[7] + rest * gradients[7],
    )


@device_function
def _products(a, b):
    return (
        a[0] * b[0],
        a[1] * b[1],
        a[2] * b[2],
        a[3] * b[3],
        a[4] * b[4],
        a[5] * b[5],
        a[6] * b[6],
        a[7] * b[7],
    )


@device_function
def _changed(value, first, second, decay, rate, correction2, eps):
    return value - decay * value - rate * first / (math.sqrt(second) * correction2 + eps)


@kernel(threads=128)
def _step_recorded(
    value, grad, first_moment, second_moment, copy, has_copy, coefficients, scale, size, is_aligned
):  # fmt: skip
    beta1, rest1 = load(coefficients, 0), load(coefficients, 1)
    beta2, rest2 = load(coefficients, 2), load(coefficients, 3)
    eps, decay = load(coefficients, 4), load(coefficients, 5)
    rate, correction2 = load(coefficients, 6), load(coefficients, 7)
    factor = load(scale, 0)
    factors = (factor, factor, factor, factor, factor, factor, factor, factor)
    i = global_thread() * 8
    while i < size and factor == factor:
        whole = types.int64(i + 8 <= size) * is_aligned
        g = _products(load_eight(grad, 0, i, size, whole), factors)
        m = _moments(load_eight(first_moment, 0, i, size, whole), g, beta1, rest1)
        v = load_eight(second_moment, 0, i, size, whole)
        v = _moments(v, _products(g, g), beta2, rest2)
        w = load_eight(value, 0, i, size, whole)
        w = (
            _changed(w[0], m[0], v[0], decay, rate, correction2, eps),
            _changed(w[1], m[1], v[1], decay, rate, correction2, eps),
            _changed(w[2], m[2], v[2], decay, rate, correction2, eps),
            _changed(w[3], m[3], v[3], decay, rate, correction2, eps),
            _changed(w[4], m[4], v[4], decay, rate, correction2, eps),
            _changed(w[5], m[5], v[5], decay, rate, correction2, eps),
            _changed(w[6], m[6], v[6], decay, rate, correction2, eps),
            _changed(w[7], m[7], v[7], decay, rate, correction2, eps),
        )
        store_eight(first_moment, 0, i, size, m, whole)
        store_eight(second_moment, 0, i, size, v, whole)
        store_eight(value, 0, i, size, w, whole)
        if has_copy != 0:
            store_eight(copy, 0, i, size, w, whole)
        i += grid_threads() * 8


@kernel(threads=32)
def _clip(sum_of_squares, loss_sum, limit, scale):
    """For one block."""
    if cuda.threadIdx.x == 0:
        norm = math.sqrt(load(sum_of_squares, 0))
        loss = load(loss_sum, 0)
        factor = number(sum_of_squares, 1)
        if norm > limit and limit > 0:
            factor = limit / norm
        if not (norm < math.inf and -math.inf < loss < math.inf):
            factor = number(sum_of_squares, math.nan)
        store(scale, 0, factor)
