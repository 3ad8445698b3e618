"""A linear layer without bias, on a GPU.

    y = x W^T,   dW = dy^T x,   dx = dy W            x (M, N), W (K, N), y (M, K)

The products are the library's (see :mod:`twell_numba.device.gpu.gemm`), which add in place too:
nothing here passes over the memory a second time. Beside operands in 16 bits the weight's gradient
may be in float32.
"""

from twell_numba.device.gpu import DeviceArray
from twell_numba.device.gpu.gemm import matmul
from twell_numba.kernels.checks import require_shape
from twell_numba.kernels.device_checks import float_arrays


def linear(x: DeviceArray, weight: DeviceArray) -> DeviceArray:
    """Return ``x @ weight.T``.

    Parameters
    ----------
    x : DeviceArray of floats, shape (M, N)
    weight : DeviceArray, shape (K, N)
        Of x's dtype.

    Returns
    -------
    DeviceArray, shape (M, K)

    Raises
    ------
    TypeError
        If the dtypes differ or are not floats.
    ValueError
        If the shapes do not fit together, or the arrays are on different GPUs.
    """
    float_arrays(x=x, weight=weight)
    require_shape("x", x, ("M", "N"))  # type: ignore[arg-type]
    require_shape("weight", weight, ("K", x.shape[1]))  # type: ignore[arg-type]
    return matmul(x, weight, transpose_b=True)


def linear_backward(
    dy: DeviceArray,
    x: DeviceArray,
    weight: DeviceArray,
    weight_grad: DeviceArray | None,
    dx: DeviceArray | None = None,
) -> DeviceArray:
    """Differentiate :func:`linear`.

    Parameters
    ----------
    dy : DeviceArray, shape (M, K)
    x, weight
        As given to the forward pass.
    weight_grad : DeviceArray, shape (K, N), or None
        Of x's dtype, or float32 for x in 16 bits. Changed in place: the gradient of the weight is
        added. None leaves that out.
    dx : DeviceArray, shape (M, N), optional
        Of x's dtype. The gradient of x is added to it in place.

    Returns
    -------
    dx : DeviceArray, shape (M, N)

    Raises
    ------
    TypeError, ValueError
        As :func:`linear`; also if an array that is changed shares memory with one that is read.
    """
    float_arrays(dy=dy, x=x, weight=weight)
    require_shape("x", x, ("M", "N"))  # type: ignore[arg-type]
    require_shape("weight", weight, ("K", x.shape[1]))  # type: ignore[arg-type]
    require_shape("dy", dy, (x.shape[0], weight.shape[0]))  # type: ignore[arg-type]
    if dx is not None:
        float_arrays(x=x, dx=dx)
        require_shape("dx", dx, x.shape)  # type: ignore[arg-type]
    if weight_grad is not None:
        require_shape("weight_grad", weight_grad, weight.shape)  # type: ignore[arg-type]
        matmul(dy, x, weight_grad, transpose_a=True, accumulate=True)
    return matmul(dy, weight, dx, accumulate=dx is not None)
