"""Softmax cross entropy on a GPU.

    L_m = log sum_v exp(x_mv),  loss_m = L_m - x_m,target(m)              x [M, V], L, loss [M]
    dx_mv = (exp(x_mv - L_m) - [v = target(m)]) * scale

A block takes a row at a time. A target that is out of range, and was on the GPU already so that
nobody looked at it, gives a loss and a row of gradients of NaN.

What training uses is :func:`cross_entropy_in_place`, bound by memory: it reads each row once for
the sum of its exponentials, kept relative to the largest logit so far, and once more, from the
cache, to overwrite it with the gradient.

M 16384, V 49152, bfloat16, one H200 (bytes read once and written once):

| | ms | TB/s |
| --- | --- | --- |
| cross_entropy_in_place, 512 threads, 4 blocks a multiprocessor | 1.53 | 2.1 |
| the same, 512 threads, as many blocks as fit | 1.74 | 1.9 |
| the same, 256 / 768 / 1024 threads | 1.65 / 2.25 / 2.52 | 2.0 / 1.4 / 1.3 |
| cross_entropy alone, number by number | 4.45 | 0.4 |
| in place, 2048 rows of 50257: not aligned | 0.62 | 0.7 |
"""

import math

import numpy as np

from twell_numba.device.gpu import DeviceArray, empty, kernel
from twell_numba.device.gpu.language import (
    block_maximum,
    block_sum,
    cuda,
    device_function,
    load,
    number,
    store,
    types,
)
from twell_numba.kernels.checks import require_shape
from twell_numba.kernels.cuda_scalars import scalar_on_gpu
from twell_numba.kernels.cuda_vectors import eight_zeros, load_eight, store_eight
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


def cross_entropy_in_place(
    logits: DeviceArray, targets: DeviceArray | np.ndarray, scale: float | DeviceArray
) -> DeviceArray:
    """Return the losses of :func:`cross_entropy`, and overwrite the logits with their gradient.

    Parameters
    ----------
    logits : DeviceArray, shape (M, V)
        Overwritten with the gradient of the sum of the losses times ``scale``.
    targets : DeviceArray of int32 or int64 or ndarray of integers, shape (M,)
        In [0, V), or -1 for a row that does not count: its loss and its gradient are 0.
    scale : float or DeviceArray of float32, shape (1,)
        For a mean over N tokens, 1 / N.

    Returns
    -------
    losses : DeviceArray, shape (M,)
        float32, or float64 for logits of float64.

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
    factor = scalar_on_gpu("scale", scale, dtype, logits)
    losses = empty(rows, dtype, logits.stream)
    is_aligned = int(vocabulary % 8 == 0 and logits.pointer % 16 == 0)
    _in_place(rows, logits, targets, factor, losses, rows, vocabulary, is_aligned)
    return losses


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


@device_function
def _largest(maximum, a):
    """Return the largest of a number and eight; NaN is skipped."""
    for i in range(8):
        maximum = a[i] if a[i] > maximum else maximum
    return maximum


@device_function
def _cut(a, count, rest):
    """Return the first ``count`` of eight numbers, and ``rest`` for the others."""
    return (
        a[0],
        a[1] if count > 1 else rest,
        a[2] if count > 2 else rest,
        a[3] if count > 3 else rest,
        a[4] if count > 4 else rest,
        a[5] if count > 5 else rest,
        a[6] if count > 6 else rest,
        a[7] if count > 7 else rest,
    )


@device_function
def _exponentials(a, shift):
    return (
        math.exp(a[0] - shift),
        math.exp(a[1] - shift),
        math.exp(a[2] - shift),
        math.exp(a[3] - shift),
        math.exp(a[4] - shift),
        math.exp(a[5] - shift),
        math.exp(a[6] - shift),
        math.exp(a[7] - shift),
    )


@device_function
def _scaled(a, factor):
    return (
        a[0] * factor,
        a[1] * factor,
        a[2] * factor,
        a[3] * factor,
        a[4] * factor,
        a[5] * factor,
        a[6] * factor,
        a[7] * factor,
    )


@kernel(threads=512, blocks_per_multiprocessor=4)
def _in_place(logits, targets, scale, losses, rows, vocabulary, is_aligned):
    """A block takes a row, a thread eight of its numbers at a time."""
    first = types.int64(cuda.threadIdx.x) * 8
    step = types.int64(cuda.blockDim.x) * 8
    factor = number(logits, load(scale, 0))
    row = types.int64(cuda.blockIdx.x)
    while row < rows:
        start = row * vocabulary
        target = types.int64(load(targets, row))
        counts = 0 <= target < vocabulary
        # NaN is skipped here, and turns the sum below into NaN
        maximum = number(logits, -math.inf)
        total = number(logits, 0)
        v = first
        while counts and v < vocabulary:
            numbers = load_eight(logits, start, v, vocabulary, is_aligned)
            if is_aligned == 0:
                numbers = _cut(numbers, vocabulary - v, number(logits, -math.inf))
            larger = _largest(maximum, numbers)
            shift = larger
            if larger == -math.inf:
                shift = number(logits, 0)  # nothing but -inf so far: -inf - -inf would be NaN
            a = _exponentials(numbers, shift)
            total *= math.exp(maximum - shift)
            total += ((a[0] + a[1]) + (a[2] + a[3])) + ((a[4] + a[5]) + (a[6] + a[7]))
            maximum = larger
            v += step
        largest = number(logits, block_maximum(maximum))
        total = number(logits, block_sum(total * math.exp(maximum - largest)))
        normalizer = largest + math.log(total)
        of_target = number(logits, 0)
        if counts:
            of_target = load(logits, start + target)
        cuda.syncthreads()  # the logit of the target is about to be overwritten
        if cuda.threadIdx.x == 0:
            loss = normalizer - of_target
            if target == -1:
                loss = number(logits, 0)
            elif not counts:
                loss = number(logits, math.nan)
            store(losses, row, loss)
        v = first
        while v < vocabulary:
            gradients = eight_zeros(logits)
            if counts:
                numbers = load_eight(logits, start, v, vocabulary, is_aligned)
                gradients = _scaled(_exponentials(numbers, normalizer), factor)
            elif target != -1:
                gradients = _exponentials(gradients, number(logits, math.nan))
            store_eight(logits, start, v, vocabulary, gradients, is_aligned)
            if v <= target < v + 8 and counts:
                gradient = math.exp(of_target - normalizer) - number(logits, 1)
                store(logits, start + target, gradient * factor)
            v += step
        row += cuda.gridDim.x
