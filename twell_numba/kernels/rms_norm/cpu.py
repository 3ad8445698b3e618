"""RMSNorm on the CPU.

    r_m = 1 / sqrt(mean_d(x_md^2) + eps),  y_md = x_md r_m w_d        x, y [M, D], w [D], r [M]
    dw_d = sum_m dy_md x_md r_m,  dx_md = r_m (dy_md w_d - x_md r_m mean_d(dy_md w_d x_md r_m))

Bound by memory: forward reads and writes M D numbers once (the second pass over a row finds it in
cache), backward reads 2 M D and writes M D. What a residual stream adds, before the norm or to its
gradient, is added in the same pass: M D numbers more to read.

dweight is summed per chunk of CHUNK rows, then over the chunks in order, so its bits depend neither
on the number of threads nor on timing.
"""

import numpy as np

from twell_numba.device.jit import jit
from twell_numba.device.threads import run_ranges
from twell_numba.kernels.checks import float_inputs, require_in_place, require_shape

# Rows of which dweight is summed before it is written.
CHUNK = 64
# Fewest numbers worth a thread of their own (100 us of work: waking a thread takes about as long).
GRAIN = 500_000


def rms_norm(x: np.ndarray, weight: np.ndarray, eps: float) -> tuple[np.ndarray, np.ndarray]:
    """Normalize each row by its root mean square.

    Parameters
    ----------
    x : ndarray, shape (M, D)
        float32 or float64, as all arrays here.
    weight : ndarray, shape (D,)
    eps : float

    Returns
    -------
    y : ndarray, shape (M, D)
    inverse_rms : ndarray, shape (M,)
        Wanted by the backward pass.

    Raises
    ------
    TypeError
        If the dtypes differ or are not float32 or float64.
    ValueError
        If the shapes do not fit together.
    """
    x, weight = float_inputs(x=x, weight=weight)
    require_shape("x", x, ("M", "D"))
    rows, width = x.shape
    require_shape("weight", weight, (width,))
    y = np.empty_like(x)
    inverse_rms = np.empty(rows, x.dtype)
    eps = x.dtype.type(eps)
    run_ranges(
        lambda start, stop: _forward(x, weight, eps, y, inverse_rms, start, stop),
        rows,
        grain=1 + GRAIN // max(width, 1),
    )
    return y, inverse_rms


def add_rms_norm(
    x: np.ndarray, addend: np.ndarray, weight: np.ndarray, eps: float
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Add two arrays and normalize each row of the sum.

    Parameters
    ----------
    x, addend : ndarray, shape (M, D)
    weight : ndarray, shape (D,)
    eps : float

    Returns
    -------
    total : ndarray, shape (M, D)
        x + addend.
    y : ndarray, shape (M, D)
    inverse_rms : ndarray, shape (M,)

    Raises
    ------
    TypeError, ValueError
        As :func:`rms_norm`.
    """
    x, addend, weight = float_inputs(x=x, addend=addend, weight=weight)
    require_shape("x", x, ("M", "D"))
    rows, width = x.shape
    require_shape("addend", addend, (rows, width))
    require_shape("weight", weight, (width,))
    total, y = np.empty_like(x), np.empty_like(x)
    inverse_rms = np.empty(rows, x.dtype)
    eps = x.dtype.type(eps)
    run_ranges(
        lambda start, stop: _add_forward(
            x, addend, weight, eps, total, y, inverse_rms, start, stop
        ),
        rows,
        grain=1 + GRAIN // max(width, 1),
    )
    return total, y, inverse_rms


def rms_norm_backward(
    dy: np.ndarray,
    x: np.ndarray,
    weight: np.ndarray,
    inverse_rms: np.ndarray,
    weight_grad: np.ndarray,
    residual: np.ndarray | None = None,
) -> np.ndarray:
    """Differentiate :func:`rms_norm`, or :func:`add_rms_norm` with its total as ``x``.

    Parameters
    ----------
    dy : ndarray, shape (M, D)
    x : ndarray, shape (M, D)
    weight : ndarray, shape (D,)
    inverse_rms : ndarray, shape (M,)
        As returned by the forward pass.
    weight_grad : ndarray, shape (D,)
        C-contiguous. Changed in place: the gradient of the weight is added.
    residual : ndarray, shape (M, D), optional
        Added to the result: the gradient that comes to x from elsewhere.

    Returns
    -------
    dx : ndarray, shape (M, D)

    Raises
    ------
    TypeError, ValueError
        As :func:`rms_norm`, and if ``weight_grad`` cannot be changed in place.
    """
    has_residual = residual is not None
    addend = x if residual is None else residual
    dy, x, weight, inverse_rms, addend = float_inputs(
        dy=dy, x=x, weight=weight, inverse_rms=inverse_rms, residual=addend
    )
    require_shape("x", x, ("M", "D"))
    rows, width = x.shape
    require_shape("dy", dy, (rows, width))
    require_shape("residual", addend, (rows, width))
    require_shape("weight", weight, (width,))
    require_shape("inverse_rms", inverse_rms, (rows,))
    require_in_place("weight_grad", weight_grad, (width,), x.dtype)
    dx = np.empty_like(x)
    chunks = -(-rows // CHUNK)
    partial = np.empty((chunks, width), x.dtype)
    run_ranges(
        lambda start, stop: _backward(
            dy, x, weight, inverse_rms, addend, has_residual, dx, partial, start, stop
        ),
        chunks,
        grain=1 + GRAIN // (CHUNK * max(width, 1)),
    )
    weight_grad += partial.sum(axis=0)
    return dx


@jit
def _forward(x, weight, eps, y, inverse_rms, start, stop):
    width = x.shape[1]
    for m in range(start, stop):
        total = x.dtype.type(0)
        for d in range(width):
            total += x[m, d] * x[m, d]
        scale = x.dtype.type(1) / np.sqrt(total / x.dtype.type(width) + eps)
        inverse_rms[m] = scale
        for d in range(width):
            y[m, d] = x[m, d] * scale * weight[d]


@jit
def _add_forward(x, addend, weight, eps, total, y, inverse_rms, start, stop):
    width = x.shape[1]
    for m in range(start, stop):
        squares = x.dtype.type(0)
        for d in range(width):
            value = x[m, d] + addend[m, d]
            total[m, d] = value
            squares += value * value
        scale = x.dtype.type(1) / np.sqrt(squares / x.dtype.type(width) + eps)
        inverse_rms[m] = scale
        for d in range(width):
            y[m, d] = total[m, d] * scale * weight[d]


@jit
def _backward(
    dy, x, weight, inverse_rms, residual, has_residual, dx, partial, first_chunk, last_chunk
):
    rows, width = x.shape
    for chunk in range(first_chunk, last_chunk):
        dweight = partial[chunk]
        dweight[:] = 0
        for m in range(chunk * CHUNK, min(rows, (chunk + 1) * CHUNK)):
            scale = inverse_rms[m]
            total = x.dtype.type(0)
            for d in range(width):
                total += dy[m, d] * weight[d] * x[m, d]
            # x * mean(dy w x) r^3, with the rest of the row's constants taken together
            projection = total * scale * scale / x.dtype.type(width)
            for d in range(width):
                dx[m, d] = scale * (dy[m, d] * weight[d] - x[m, d] * projection)
            if has_residual:
                for d in range(width):
                    dx[m, d] += residual[m, d]
            for d in range(width):
                dweight[d] += dy[m, d] * x[m, d] * scale
