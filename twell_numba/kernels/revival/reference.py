"""Random pushes of the weights of dead neurons, in plain NumPy: few rows, now and then.

    w <- keep w + noise z,   m <- 0,   v <- 0      in the rows of dead neurons, z standard normal

The normal numbers are a function of seed, step, row and column alone: Philox 4x32-10 (Salmon et
al., 2011, "Parallel random numbers: as easy as 1, 2, 3") makes four words of 32 bits of the counter
(column // 4, row, step, 0) and the key (low and high word of the seed); each pair of words is made
two normal numbers (Box and Muller, 1958), in float64.
"""

import numpy as np

KEEP = 0.9
NOISE = 0.1 * 0.02
ROUNDS = 10
MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
KEY_STEPS = 0x9E3779B9, 0xBB67AE85
WORD = 0xFFFFFFFF


def revive_rows(
    gate: np.ndarray,
    first_moment: np.ndarray,
    second_moment: np.ndarray,
    dead: np.ndarray,
    seed: int,
    step: int,
    keep: float = KEEP,
    noise: float = NOISE,
) -> None:
    """Push the rows of dead neurons at random, and forget what the optimizer knows about them.

    Parameters
    ----------
    gate, first_moment, second_moment : ndarray, shape (F, D)
        Changed in place, in the rows of dead neurons only.
    dead : ndarray of bool, shape (F,)
    seed : int
        From 0 on, below 2^64; another for each layer.
    step : int
        From 0 on, below 2^32.
    keep, noise : float
    """
    rows = np.flatnonzero(dead)
    normal = standard_normal(rows, gate.shape[1], seed, step)
    gate[rows] = (keep * gate[rows] + noise * normal).astype(gate.dtype)
    first_moment[rows] = 0
    second_moment[rows] = 0


def standard_normal(rows: np.ndarray, width: int, seed: int, step: int) -> np.ndarray:
    """Return the normal numbers of these rows, float64 of shape (rows, width)."""
    fours = -(-width // 4)
    words = philox(
        (
            np.arange(fours, dtype=np.uint64)[None, :],
            np.asarray(rows, np.uint64)[:, None],
            np.array(step, np.uint64),
            np.zeros((), np.uint64),
        ),
        (seed & WORD, seed >> 32),
    )
    pairs = [_box_muller(*words[:2]), _box_muller(*words[2:])]
    normal = np.stack([number for pair in pairs for number in pair], axis=2)
    return normal.reshape(len(rows), 4 * fours)[:, :width]


def philox(counter: tuple[np.ndarray, ...], key: tuple[int, int]) -> tuple[np.ndarray, ...]:
    """Return four words of 32 bits, in uint64, for a counter of four and a key of two."""
    c0, c1, c2, c3 = np.broadcast_arrays(*counter)
    k0, k1 = key
    for _ in range(ROUNDS):
        p0, p1 = np.uint64(MULTIPLIERS[0]) * c0, np.uint64(MULTIPLIERS[1]) * c2
        c0 = (p1 >> np.uint64(32)) ^ c1 ^ np.uint64(k0)
        c2 = (p0 >> np.uint64(32)) ^ c3 ^ np.uint64(k1)
        c1, c3 = p1 & np.uint64(WORD), p0 & np.uint64(WORD)
        k0, k1 = (k0 + KEY_STEPS[0]) & WORD, (k1 + KEY_STEPS[1]) & WORD
    return c0, c1, c2, c3


def _box_muller(first: np.ndarray, second: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    radius = np.sqrt(-2 * np.log((first + 0.5) * 2.0**-32))
    angle = second * (2 * np.pi * 2.0**-32)
    return radius * np.cos(angle), radius * np.sin(angle)
