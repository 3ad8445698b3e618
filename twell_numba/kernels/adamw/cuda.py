"""AdamW on a GPU, in one pass.

    g = grad * grad_scale
    m <- beta1 m + (1 - beta1) g,   v <- beta2 v + (1 - beta2) g^2
    w <- w (1 - learning_rate weight_decay) - (learning_rate / c1) m / (sqrt(v) / sqrt(c2) + eps)
    with c1 = 1 - beta1^t, c2 = 1 - beta2^t                           all arrays of one shape

``sum_of_squares`` adds up in float64, over a number of threads that depends on the size alone: the
same bits in every run, on every GPU.
"""

import math
from typing import Any

import numpy as np

from twell_numba.device.gpu import DeviceArray, empty, kernel
from twell_numba.device.gpu.language import (
    block_sum,
    cuda,
    global_thread,
    grid_threads,
    load,
    number,
    store,
    types,
)
from twell_numba.kernels.checks import require_shape
from twell_numba.kernels.device_checks import arithmetic_dtype, float_array, float_arrays

# Blocks among which sum_of_squares shares its numbers, at most.
MOST_PARTS = 1024


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


def sum_of_squares_on_gpu(grad: DeviceArray) -> DeviceArray:
    """Return what :func:`sum_of_squares` does as an array of one float64, without waiting."""
    float_arrays(grad=grad)
    parts = min(_sum_squares.blocks(grad.size), MOST_PARTS)
    partial = empty(parts, np.float64, grad.stream)
    total = empty(1, np.float64, grad.stream)
    _sum_squares(parts, grad, partial, grad.size)
    _sum_parts(1, partial, total, parts)
    return total


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


@kernel()
def _sum_squares(grad, partial, size):
    i = global_thread()
    total = number(partial, 0)
    while i < size:
        entry = types.float64(load(grad, i))
        total += entry * entry
        i += grid_threads()
    total = block_sum(total)
    if cuda.threadIdx.x == 0:
        store(partial, cuda.blockIdx.x, total)


@kernel()
def _sum_parts(partial, result, parts):
    total = number(partial, 0)
    i = types.int64(cuda.threadIdx.x)
    while i < parts:
        total += load(partial, i)
        i += cuda.blockDim.x
    total = block_sum(total)
    if cuda.threadIdx.x == 0:
        store(result, 0, total)
