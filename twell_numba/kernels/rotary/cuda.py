"""Rotary position embedding on a GPU.

    y1 = x1 cos - x2 sin,  y2 = x2 cos + x1 sin
    x, y [B, S, H, w] with halves x1, x2; cos, sin [S, w / 2]

Bound by memory: reads and writes every number once; the tables come from a cache. A thread takes
eight pairs of numbers at a time where halves are whole eights, otherwise a pair.

16384 positions of 2048 numbers (heads of 64 or 128), bfloat16, one H200: 0.042 ms, 3.2 TB/s; with
blocks of 256 threads 0.045 ms, of 512 0.048 ms.
"""

from twell_numba.device.gpu import DeviceArray, empty, kernel
from twell_numba.device.gpu.language import (
    device_function,
    global_thread,
    grid_threads,
    load,
    store,
)
from twell_numba.kernels.checks import require_shape
from twell_numba.kernels.cuda_vectors import (
    add_scaled,
    eight_zeros,
    load_aligned,
    store_aligned,
)
from twell_numba.kernels.device_checks import arithmetic_dtype, float_array, float_arrays
from twell_numba.kernels.rotary.reference import rotary_tables

__all__ = ["rotary", "rotary_backward", "rotary_tables"]


def rotary(
    x: DeviceArray, cos: DeviceArray, sin: DeviceArray, out: DeviceArray | None = None
) -> DeviceArray:
    """Turn each head's halves by the angles of its position.

    Parameters
    ----------
    x : DeviceArray, shape (B, S, H, w)
        w even.
    cos, sin : DeviceArray, shape (S, w / 2)
        From :func:`rotary_tables`; float32, or float64 for x of float64.
    out : DeviceArray, shape (B, S, H, w), optional
        Of x's dtype. Overwritten and returned; it may be x itself.

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
    return _turned("x", x, cos, sin, out, 1)


def rotary_backward(
    dy: DeviceArray, cos: DeviceArray, sin: DeviceArray, out: DeviceArray | None = None
) -> DeviceArray:
    """Return the gradient dx of :func:`rotary`: dy turned back.

    Parameters and errors are those of :func:`rotary`.
    """
    return _turned("dy", dy, cos, sin, out, -1)


def _turned(
    name: str,
    x: DeviceArray,
    cos: DeviceArray,
    sin: DeviceArray,
    out: DeviceArray | None,
    direction: int,
) -> DeviceArray:
    float_arrays(**{name: x})
    require_shape(name, x, ("B", "S", "H", "w"))  # type: ignore[arg-type]
    _, length, heads, width = x.shape
    if width % 2:
        raise ValueError(f"head width {width} given, an even one wanted: halves are rotated")
    dtype = arithmetic_dtype(x.dtype)
    half = width // 2
    for table_name, table in (("cos", cos), ("sin", sin)):
        float_array(table_name, table, dtype, x)
        require_shape(table_name, table, (length, half))  # type: ignore[arg-type]
    if out is None:
        out = empty(x.shape, x.dtype, x.stream)
    else:
        float_arrays(**{name: x, "out": out})
        require_shape("out", out, x.shape)  # type: ignore[arg-type]
    pairs = x.size // 2
    arguments = (x, cos, sin, dtype.type(direction), out)
    arrays = (x, cos, sin, out)
    if half % 8 == 0 and all(array.pointer % 16 == 0 for array in arrays):
        _turn_eights(_turn_eights.blocks(pairs // 8), *arguments, pairs // 8, length, heads, half)
    else:
        _turn(_turn.blocks(pairs), *arguments, pairs, length, heads, half)
    return out


@device_function
def _turned_eight(a, cos, b, sin):
    """Return ``a * cos + b * sin`` of eight numbers each."""
    return (
        a[0] * cos[0] + b[0] * sin[0],
        a[1] * cos[1] + b[1] * sin[1],
        a[2] * cos[2] + b[2] * sin[2],
        a[3] * cos[3] + b[3] * sin[3],
        a[4] * cos[4] + b[4] * sin[4],
        a[5] * cos[5] + b[5] * sin[5],
        a[6] * cos[6] + b[6] * sin[6],
        a[7] * cos[7] + b[7] * sin[7],
    )


@kernel(threads=128)
def _turn_eights(x, cos, sin, sign, y, eights, length, heads, half):
    item = global_thread()
    while item < eights:
        head = item // (half // 8)
        i = item % (half // 8) * 8
        angle = head // heads % length * half + i
        place = head * (2 * half) + i
        first, second = load_aligned(x, place), load_aligned(x, place + half)
        c = load_aligned(cos, angle)
        s = add_scaled(eight_zeros(cos), sign, load_aligned(sin, angle))
        minus_s = add_scaled(eight_zeros(cos), -sign, load_aligned(sin, angle))
        store_aligned(y, place, _turned_eight(first, c, second, minus_s))
        store_aligned(y, place + half, _turned_eight(second, c, first, s))
        item += grid_threads()


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
