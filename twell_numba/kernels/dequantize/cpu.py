"""Blocks of GGUF files on the CPU; the reference says how they are made up.

Bound by memory: 4 bytes are written for each byte or half a byte read. NumPy takes 3 to 9 ns a
number in passes over small arrays, these kernels less than 1.
"""

import numpy as np

from twell_numba.device.jit import jit
from twell_numba.device.threads import run_ranges
from twell_numba.kernels.checks import contiguous
from twell_numba.kernels.dequantize.reference import (
    BLOCKS,
    float16_at,
    scales_of_q4_k,
    scales_of_q6_k,
)

# Fewest numbers worth a thread of their own.
GRAIN = 500_000


def dequantize(packed: np.ndarray, kind: str, out: np.ndarray) -> None:
    """Write the numbers of packed blocks to ``out``.

    Parameters
    ----------
    packed : ndarray of uint8, shape (blocks, bytes of a block)
    kind : {"Q8_0", "Q4_0", "Q4_1", "Q4_K", "Q6_K"}
    out : ndarray of float32, shape (blocks, numbers in a block)
        C-contiguous; overwritten. In Q4_1 and Q4_K a product and a sum may be rounded once.

    Raises
    ------
    TypeError, ValueError
        If dtypes or shapes do not fit.
    """
    if kind not in BLOCKS:
        raise ValueError(f"kind {kind!r} given, one of {', '.join(BLOCKS)} wanted")
    if packed.dtype != np.uint8 or out.dtype != np.float32:
        raise TypeError(f"packed {packed.dtype} and out {out.dtype} given, uint8, float32 wanted")
    numbers, nbytes = BLOCKS[kind]
    blocks = len(packed)
    if packed.shape != (blocks, nbytes) or out.shape != (blocks, numbers):
        raise ValueError(
            f"packed {packed.shape} and out {out.shape} given, shapes (blocks, {nbytes}) and "
            f"(blocks, {numbers}) wanted"
        )
    if not out.flags.c_contiguous:
        raise ValueError("out is not C-contiguous, but is to be written in place")
    packed = contiguous(packed, np.uint8)

    def unpack(start: int, stop: int) -> None:
        _unpack(packed[start:stop], kind, out[start:stop])

    run_ranges(unpack, blocks, grain=GRAIN // numbers)


def _unpack(packed: np.ndarray, kind: str, out: np.ndarray) -> None:
    if kind == "Q8_0":
        _q8_0(packed.view(np.int8), float16_at(packed, 0), out)
    elif kind == "Q4_0":
        scales = float16_at(packed, 0)
        _q4(packed, 2, scales, -8 * scales, out)
    elif kind == "Q4_1":
        _q4(packed, 4, float16_at(packed, 0), float16_at(packed, 2), out)
    elif kind == "Q4_K":
        _q4_k(packed, *scales_of_q4_k(packed), out)
    else:
        _q6_k(packed, scales_of_q6_k(packed), out)


@jit
def _q8_0(packed, scales, out):
    for block in range(packed.shape[0]):
        scale = scales[block]
        for i in range(32):
            out[block, i] = scale * np.float32(packed[block, 2 + i])


@jit
def _q4(packed, first, scales, minima, out):
    for block in range(packed.shape[0]):
        scale, minimum = scales[block], minima[block]
        for i in range(16):
            byte = packed[block, first + i]
            out[block, i] = scale * np.float32(byte & 15) + minimum
            out[block, 16 + i] = scale * np.float32(byte >> 4) + minimum


@jit
def _q4_k(packed, scales, minima, out):
    for block in range(packed.shape[0]):
        for pair in range(4):
            low_scale, high_scale = scales[block, 2 * pair], scales[block, 2 * pair + 1]
            low_minimum, high_minimum = minima[block, 2 * pair], minima[block, 2 * pair + 1]
            for i in range(32):
                byte = packed[block, 16 + 32 * pair + i]
                out[block, 64 * pair + i] = low_scale * np.float32(byte & 15) - low_minimum
                out[block, 64 * pair + 32 + i] = high_scale * np.float32(byte >> 4) - high_minimum


@jit
def _q6_k(packed, scales, out):
    for block in range(packed.shape[0]):
        for half in range(2):
            for i in range(32):
                first = np.int64(packed[block, 64 * half + i])
                second = np.int64(packed[block, 64 * half + 32 + i])
                high = np.int64(packed[block, 128 + 32 * half + i])
                place = 128 * half + i
                scale = 8 * half + i // 16
                # four numbers, 32 apart, whose upper two bits are in one byte
                number = (first & 15) | ((high & 3) << 4)
                out[block, place] = scales[block, scale] * np.float32(number - 32)
                number = (second & 15) | ((high >> 2 & 3) << 4)
                out[block, place + 32] = scales[block, scale + 2] * np.float32(number - 32)
                number = (first >> 4) | ((high >> 4 & 3) << 4)
                out[block, place + 64] = scales[block, scale + 4] * np.float32(number - 32)
                number = (second >> 4) | ((high >> 6) << 4)
                out[block, place + 96] = scales[block, scale + 6] * np.float32(number - 32)
