"""Blocks of GGUF files in plain NumPy. A block holds numbers of few bits and what to scale them by:

    Q8_0  d [1] f16, q [32] i8                                  w = d q
    Q4_0  d [1] f16, q [16] u8, two numbers each                w = d (q - 8)
    Q4_1  d [1] f16, m [1] f16, q [16] u8, two numbers each     w = d q + m
    Q4_K  d [1] f16, e [1] f16, s [12] u8, q [128] u8           w = d s_i q - e m_i
    Q6_K  l [128] u8, h [64] u8, s [16] i8, d [1] f16           w = d s_i (q - 32)

Of two numbers in a byte, the lower four bits are of a number in the first half of what they belong
to: the block, or 64 numbers in Q4_K, or 128 in Q6_K, whose bytes go by 64. Q4_K has a scale and a
minimum of 6 bits for each 32 numbers, Q6_K a scale of 8 bits for each 16.

Source: ggml-quants.c of the ggml project; the gguf package has the same in NumPy.
"""

import numpy as np

# Numbers in a block, and its bytes.
BLOCKS = {
    "Q8_0": (32, 34),
    "Q4_0": (32, 18),
    "Q4_1": (32, 20),
    "Q4_K": (256, 144),
    "Q6_K": (256, 210),
}


def dequantize(packed: np.ndarray, kind: str, out: np.ndarray) -> None:
    """Write the numbers of packed blocks to ``out``.

    Parameters
    ----------
    packed : ndarray of uint8, shape (blocks, bytes of a block)
    kind : {"Q8_0", "Q4_0", "Q4_1", "Q4_K", "Q6_K"}
    out : ndarray of float32, shape (blocks, numbers in a block)
        Overwritten.
    """
    out[...] = _BY_KIND[kind](packed)


def float16_at(packed: np.ndarray, place: int) -> np.ndarray:
    """Return the half floats that stand at a byte of each block, as float32 of shape (blocks,)."""
    two_bytes = np.ascontiguousarray(packed[:, place : place + 2])
    return two_bytes.view("<f2")[:, 0].astype(np.float32)


def scales_of_q4_k(packed: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the scales and minima, float32 of shape (blocks, 8).

    Of 12 bytes, the first four have the lower six bits of four scales and, above them, the upper
    two bits of four more; the next four the same of minima; the last four the lower four bits of
    those four scales and, above them, of those four minima.
    """
    first, second, third = packed[:, 4:8], packed[:, 8:12], packed[:, 12:16]
    scales = np.concatenate([first & 63, (third & 15) | ((first >> 6) << 4)], axis=1)
    minima = np.concatenate([second & 63, (third >> 4) | ((second >> 6) << 4)], axis=1)
    return (
        float16_at(packed, 0)[:, None] * scales.astype(np.float32),
        float16_at(packed, 2)[:, None] * minima.astype(np.float32),
    )


def scales_of_q6_k(packed: np.ndarray) -> np.ndarray:
    """Return the scales, float32 of shape (blocks, 16)."""
    scales = packed[:, 192:208].view(np.int8).astype(np.float32)
    return float16_at(packed, 208)[:, None] * scales


def _q8_0(packed: np.ndarray) -> np.ndarray:
    return float16_at(packed, 0)[:, None] * packed[:, 2:].view(np.int8).astype(np.float32)


def _q4_0(packed: np.ndarray) -> np.ndarray:
    return float16_at(packed, 0)[:, None] * (_halves(packed[:, 2:]).astype(np.float32) - 8)


def _q4_1(packed: np.ndarray) -> np.ndarray:
    numbers = _halves(packed[:, 4:]).astype(np.float32)
    return float16_at(packed, 0)[:, None] * numbers + float16_at(packed, 2)[:, None]


def _q4_k(packed: np.ndarray) -> np.ndarray:
    scales, minima = scales_of_q4_k(packed)
    numbers = _halves(packed[:, 16:].reshape(-1, 4, 32)).reshape(-1, 8, 32)
    return (scales[:, :, None] * numbers - minima[:, :, None]).reshape(-1, 256)


def _q6_k(packed: np.ndarray) -> np.ndarray:
    low = _halves(packed[:, :128].reshape(-1, 2, 64)).reshape(-1, 2, 4, 32)
    high = packed[:, 128:192].reshape(-1, 2, 1, 32) >> np.array([0, 2, 4, 6], np.uint8)[:, None]
    numbers = (low | ((high & 3) << 4)).astype(np.float32) - 32
    return (scales_of_q6_k(packed)[:, :, None] * numbers.reshape(-1, 16, 16)).reshape(-1, 256)


def _halves(packed: np.ndarray) -> np.ndarray:
    """Return the lower four bits of all bytes, then the upper four, along the last axis."""
    return np.concatenate([packed & 15, packed >> 4], axis=-1)


_BY_KIND = {"Q8_0": _q8_0, "Q4_0": _q4_0, "Q4_1": _q4_1, "Q4_K": _q4_k, "Q6_K": _q6_k}
