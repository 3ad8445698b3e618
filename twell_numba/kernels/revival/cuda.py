"""Random pushes of the weights of dead neurons, on a GPU.

    w <- keep w + noise z,   m <- 0,   v <- 0      in the rows of dead neurons, z standard normal

The normal numbers are those of the reference, which says how they are made: they need no state and
no order, so that every thread makes its own. A warp takes a row, and leaves one at once whose
neuron lives: what is read and written are the rows of dead neurons.
"""

import math

import numpy as np

from twell_numba.device.gpu import DeviceArray, kernel, require_same_gpu
from twell_numba.device.gpu.language import (
    cuda,
    device_function,
    global_thread,
    grid_threads,
    load,
    store,
    types,
)
from twell_numba.kernels.checks import require_shape
from twell_numba.kernels.device_checks import float_arrays
from twell_numba.kernels.revival.reference import (
    KEEP,
    KEY_STEPS,
    MULTIPLIERS,
    NOISE,
    ROUNDS,
    WORD,
)


def revive_rows(
    gate: DeviceArray,
    first_moment: DeviceArray,
    second_moment: DeviceArray,
    dead: DeviceArray,
    seed: int,
    step: int,
    keep: float = KEEP,
    noise: float = NOISE,
) -> None:
    """Push the rows of dead neurons at random, and forget what the optimizer knows about them.

    Parameters
    ----------
    gate, first_moment, second_moment : DeviceArray of floats, shape (F, D)
        Changed in place, in the rows of dead neurons only.
    dead : DeviceArray of bool, shape (F,)
    seed : int
        From 0 on, below 2^64; another for each layer.
    step : int
        From 0 on, below 2^32.
    keep, noise : float

    Raises
    ------
    TypeError, ValueError
        If dtypes or shapes do not fit, or the arrays are on different GPUs.
    """
    arrays = {"gate": gate, "first_moment": first_moment, "second_moment": second_moment}
    float_arrays(**arrays)
    require_shape("gate", gate, ("F", "D"))  # type: ignore[arg-type]
    for name, array in arrays.items():
        require_shape(name, array, gate.shape)  # type: ignore[arg-type]
    if not isinstance(dead, DeviceArray) or dead.dtype != np.bool_:
        given = getattr(dead, "dtype", type(dead).__name__)
        raise TypeError(f"dead of {given} given, a DeviceArray of bool wanted")
    rows, width = gate.shape
    require_shape("dead", dead, (rows,))  # type: ignore[arg-type]
    require_same_gpu(gate=gate, dead=dead)
    _revive(
        _revive.blocks_of_warps(rows), *arrays.values(), dead, np.float64(keep), np.float64(noise),
        seed & WORD, seed >> 32, step, rows, width,
    )  # fmt: skip


@kernel()
def _revive(
    gate, first_moment, second_moment, dead, keep, noise, seed_low, seed_high, step, rows, width
):  # fmt: skip
    row = global_thread() // 32
    while row < rows:
        if load(dead, row) != 0:
            d = types.int64(cuda.threadIdx.x % 32) * 4
            while d < width:
                words = _philox(d // 4, row, step, types.int64(0), seed_low, seed_high)
                first, second = _box_muller(words[0], words[1])
                third, fourth = _box_muller(words[2], words[3])
                normal = (first, second, third, fourth)
                for i in range(4):
                    if d + i < width:
                        place = row * width + d + i
                        pushed = keep * types.float64(load(gate, place)) + noise * normal[i]
                        store(gate, place, pushed)
                        store(first_moment, place, 0)
                        store(second_moment, place, 0)
                d += 128
        row += grid_threads() // 32


@device_function
def _philox(c0, c1, c2, c3, k0, k1):
    """Return four words of 32 bits, in int64: a product's high word may come with a sign."""
    for _ in range(ROUNDS):
        p0 = c0 * MULTIPLIERS[0]
        p1 = c2 * MULTIPLIERS[1]
        c0 = ((p1 >> 32) & WORD) ^ c1 ^ k0
        c2 = ((p0 >> 32) & WORD) ^ c3 ^ k1
        c1 = p1 & WORD
        c3 = p0 & WORD
        k0 = (k0 + KEY_STEPS[0]) & WORD
        k1 = (k1 + KEY_STEPS[1]) & WORD
    return c0, c1, c2, c3


@device_function
def _box_muller(first, second):
    radius = math.sqrt(-2.0 * math.log((types.float64(first) + 0.5) * 2.0**-32))
    angle = types.float64(second) * (2.0 * math.pi * 2.0**-32)
    return radius * math.cos(angle), radius * math.sin(angle)
