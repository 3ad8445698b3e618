"""The bias of a linear layer, on the CPU.

    y += b,   db += the sum of dy over its rows            y, dy (M, K), b (K,)

Bound by memory, beside a product of N times the operations: NumPy's own loops do.

db is summed per chunk of CHUNK rows, then over the chunks in order, so its bits depend neither on
the number of threads nor on timing.
"""

import numpy as np

from twell_numba.device.threads import run_ranges
from twell_numba.kernels.checks import float_inputs, require_in_place, require_shape

# Rows of which db is summed before it is written.
CHUNK = 64
# Fewest numbers worth a thread of their own (100 us of work: waking a thread takes about as long).
GRAIN = 500_000


def add_bias(y: np.ndarray, bias: np.ndarray) -> None:
    """Add a bias to each row.

    Parameters
    ----------
    y : ndarray of float32 or float64, shape (M, K)
        C-contiguous; changed in place.
    bias : ndarray, shape (K,)
        Of y's dtype.

    Raises
    ------
    TypeError
        If the dtypes differ or are not float32 or float64.
    ValueError
        If the shapes do not fit together, or y cannot be changed in place.
    """
    (bias,) = float_inputs(bias=bias)
    require_shape("bias", bias, ("K",))
    require_in_place("y", y, ("M", bias.shape[0]), bias.dtype)

    def add_to_rows(start: int, stop: int) -> None:
        y[start:stop] += bias

    run_ranges(add_to_rows, y.shape[0], grain=1 + GRAIN // max(1, bias.shape[0]))


def bias_backward(dy: np.ndarray, bias_grad: np.ndarray) -> None:
    """Differentiate :func:`add_bias`; the gradient of what it was added to is dy itself.

    Parameters
    ----------
    dy : ndarray of float32 or float64, shape (M, K)
    bias_grad : ndarray, shape (K,)
        C-contiguous. Changed in place: the gradient of the bias is added.

    Raises
    ------
    TypeError, ValueError
        As :func:`add_bias`.
    """
    (dy,) = float_inputs(dy=dy)
    require_shape("dy", dy, ("M", "K"))
    rows, width = dy.shape
    require_in_place("bias_grad", bias_grad, (width,), dy.dtype)
    chunks = -(-rows // CHUNK)
    partial = np.empty((chunks, width), dy.dtype)

    def sum_chunks(start: int, stop: int) -> None:
        for chunk in range(start, stop):
            dy[chunk * CHUNK : (chunk + 1) * CHUNK].sum(axis=0, out=partial[chunk])

    run_ranges(sum_chunks, chunks, grain=1 + GRAIN // (CHUNK * max(1, width)))
    bias_grad += partial.sum(axis=0)
