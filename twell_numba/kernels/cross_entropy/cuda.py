"""Softmax cross entropy on a GPU.

    L_m = log sum_v exp(x_mv),  loss_m = L_m - x_m,target(m)              x [M, V], L, loss [M]
    dx_mv = (exp(x_mv - L_m) - [v = target(m)]) * scale

A block takes a row at a time. A target that is out of range, and was on the GPU already so that
nobody looked at it, gives a loss and a row of gradients of NaN.
"""

import math

import numpy as np

from twell_numba.device.gpu import DeviceArray, empty, kernel
from twell_numba.device.gpu.language import (
    block_maximum,
    block_sum,
    cuda,
    load,
    number,
    store,
    types,
)
from twell_numba.kernels.checks import require_shape
from twell_numba.kernels.device_checks import (
    arithmetic_dtype,
    float_array,
    float_arrays,
    index_array,
)


def cross_entropy(
    logits: DeviceArray, targets: DeviceArray | np.ndarray
) -> tuple[DeviceArray, DeviceArray]:
    """Return the cross entropy of each row of logits with its target.

    Parameters
    ----------
    logits : DeviceArray, shape (M, V)
    targets : DeviceArray of int32 or int64 or ndarray of integers, shape (M,)
        In [0, V), or -1 for a row that does not count: its loss is 0.

    Returns
    -------
    losses : DeviceArray, shape (M,)
        float32, or float64 for logits of float64.
    log_sum_exp : DeviceArray, shape (M,)
        Of each row; wanted by the backward pass. A row with a NaN has a loss of NaN.

    Raises
    ------
    TypeError
        If the logits are not of floats, or the targets are not integers.
    ValueError
        If a target in the host's memory is out of range, or the shapes do not fit together.
    """
    float_arrays(logits=logits)
    require_shape("logits", logits, ("M", "V"))  # type: ignore[arg-type]
    rows, vocabulary = logits.shape
    targets = index_array("targets", targets, rows, -1, vocabulary, logits.stream)
    dtype = arithmetic_dtype(logits.dtype)
    losses = empty(rows, dtype, logits.stream)
    log_sum_exp = empty(rows, dtype, logits.stream)
    _forward(rows, logits, targets, losses, log_sum_exp, rows, vocabulary)
    return losses, log_sum_exp


def cross_entropy_backward(
    logits: DeviceArray, targets: DeviceArray | np.ndarray, log_sum_exp: DeviceArray, scale: float
) -> DeviceArray:
    """Return the gradient of the sum of the losses times ``scale``.

    Parameters
    ----------
    logits : DeviceArray, shape (M, V)
    targets : DeviceArray of int32 or int64 or ndarray of integers, shape (M,)
    log_sum_exp : DeviceArray, shape (M,)
        As returned by :func:`cross_entropy`.
    scale : float
        For a mean over N tokens, 1 / N.

    Returns
    -------
    DeviceArray, shape (M, V)
        Of the logits' dtype. Rows that do not count are 0.

    Raises
    ------
    TypeError, ValueError
        As :func:`cross_entropy`.
    """
    float_arrays(logits=logits)
    require_shape("logits", logits, ("M", "V"))  # type: ignore[arg-type]
    rows, vocabulary = logits.shape
    targets = index_array("targets", targets, rows, -1, vocabulary, logits.stream)
    dtype = arithmetic_dtype(logits.dtype)
    float_array("log_sum_exp", log_sum_exp, dtype, logits)
    require_shape("log_sum_exp", log_sum_exp, (rows,))  # type: ignore[arg-type]
    dlogits = empty(logits.shape, logits.dtype, logits.stream)
    _backward(rows, logits, targets, log_sum_exp, dtype.type(scale), dlogits, rows, vocabulary)
    return dlogits


@kernel()
def _forward(logits, targets, losses, log_sum_exp, rows, vocabulary):
    row = types.int64(cuda.blockIdx.x)
    while row < rows:
        start = row * vocabulary
        # NaN is skipped here, and turns the sum below into NaN
        maximum = number(logits, -math.inf)
        v = types.int64(cuda.threadIdx.x)
        while v < vocabulary:
            logit = load(logits, start + v)
            maximum = logit if logit > maximum else maximum
            v += cuda.blockDim.x
        maximum = number(logits, block_maximum(maximum))
        total = number(logits, 0)
        v = types.int64(cuda.threadIdx.x)
        while v < vocabulary:
            total += math.exp(load(logits, start + v) - maximum)
            v += cuda.blockDim.x
        normalizer = maximum + number(logits, math.log(block_sum(total)))
        if cuda.threadIdx.x == 0:
            target = types.int64(load(targets, row))
            loss = number(logits, math.nan)
            if target == -1:
                loss = number(logits, 0)
            elif 0 <= target < vocabulary:
                loss = normalizer - load(logits, start + target)
            store(losses, row, loss)
            store(log_sum_exp, row, normalizer)
        row += cuda.gridDim.x


@kernel()
def _backward(logits, targets, log_sum_exp, scale, dlogits, rows, vocabulary):
    row = types.int64(cuda.blockIdx.x)
    while row < rows:
        start = row * vocabulary
        target = types.int64(load(targets, row))
        normalizer = load(log_sum_exp, row)
        out_of_range = target < -1 or target >= vocabulary
        v = types.int64(cuda.threadIdx.x)
        while v < vocabulary:
            gradient = number(logits, 0)
            if out_of_range:
                gradient = number(logits, math.nan)
            elif target >= 0:
                gradient = math.exp(load(logits, start + v) - normalizer)
                if v == target:
                    gradient -= number(logits, 1)
            store(dlogits, start + v, gradient * scale)
            v += cuda.blockDim.x
        row += cuda.gridDim.x
