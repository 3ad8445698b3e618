"""Rotary position embedding on a GPU.

    y1 = x1 cos - x2 sin,  y2 = x2 cos + x1 sin
    x, y [B, S, H, w] with halves x1, x2; cos, sin [S, w / 2]

A thread takes a pair of numbers at a time.
"""

from twell_numba.device.gpu import DeviceArray, empty, kernel
from twell_numba.device.gpu.language import global_thread, grid_threads, load, store
from twell_numba.kernels.checks import require_shape
from twell_numba.kernels.device_checks import arithmetic_dtype, float_array, float_arrays
from twell_numba.kernels.rotary.reference import rotary_tables

__all__ = ["rotary", "rotary_backward", "rotary_tables"]


def rotary(x: DeviceArray, cos: DeviceArray, sin: DeviceArray) -> DeviceArray:
    """Turn each head's halves by the angles of its position.

    Parameters
    ----------
    x : DeviceArray, shape (B, S, H, w)
        w even.
    cos, sin : DeviceArray, shape (S, w / 2)
        From :func:`rotary_tables`; float32, or float64 for x of float64.

    Returns
    -------
    DeviceArray, shape (B, S, H, w)

    Raises
    ------
    TypeError
        If a dtype does not fit.
    ValueError
        If the shapes do not fit together, or the arrays are on different GPUs.
    """
    return _turned("x", x, cos, sin, 1)


def rotary_backward(dy: DeviceArray, cos: DeviceArray, sin: DeviceArray) -> DeviceArray:
    """Return the gradient dx of :func:`rotary`: dy turned back.

    Parameters and errors are those of :func:`rotary`.
    """
    return _turned("dy", dy, cos, sin, -1)


def _turned(
    name: str, x: DeviceArray, cos: DeviceArray, sin: DeviceArray, direction: int
) -> DeviceArray:
    float_arrays(**{name: x})
    require_shape(name, x, ("B", "S", "H", "w"))  # type: ignore[arg-type]
    _, length, heads, width = x.shape
    if width % 2:
        raise ValueError(f"head width {width} given, an even one wanted: halves are rotated")
    dtype = arithmetic_dtype(x.dtype)
    for table_name, table in (("cos", cos), ("sin", sin)):
        float_array(table_name, table, dtype, x)
        require_shape(table_name, table, (length, width // 2))  # type: ignore[arg-type]
    y = empty(x.shape, x.dtype, x.stream)
    pairs = x.size // 2
    sign = dtype.type(direction)
    _turn(_turn.blocks(pairs), x, cos, sin, sign, y, pairs, length, heads, width // 2)
    return y


@kernel()
def _turn(x, cos, sin, sign, y, pairs, length, heads, half):
    pair = global_thread()
    while pair < pairs:
        i = pair % half
        head = pair // half
        angle = head // heads % length * half + i
        place = head * (2 * half) + i
        first, second = load(x, place), load(x, place + half)
        c, s = load(cos, angle), load(sin, angle) * sign
        store(y, place, first * c - second * s)
        store(y, place + half, second * c + first * s)
        pair += grid_threads()
