"""How the feedforward layers of the weight-sparse families are driven on the CPU.

A family's compiled code takes *strips* of tokens through all neurons. Here strips are shared out
among threads, and what they leave is put together:

- each strip writes rows of y or dx that are nobody else's;
- the gradients of the weights are sums over all tokens. At most ``GRADIENT_PARTS`` runs of strips
  add up their own, and those sums are added in order: the same bits every run, for any number of
  threads. Large gradients have fewer, as each costs writing and reading one more of their size.

g, u and h are computed again in the backward pass, strip by strip: two sparse products more (of
eight), but no two arrays of M x F to be written and read (16 MB at M = 1024, F = 2048).
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from twell_numba.device.threads import run_ranges
from twell_numba.kernels.checks import contiguous
from twell_numba.kernels.ffn_checks import TrainableMatrix, l1_scale_input
from twell_numba.kernels.sparse_ffn.activations import SparseWeightActivations

# Fewest multiply-adds worth a thread of their own.
GRAIN = 3_000_000
# Sums of the weights' gradients that are kept apart: as many threads can work on them.
GRADIENT_PARTS = 8
FEWEST_PARTS = 4
PARTS_BYTES = 8 * 1024 * 1024
# Strips of x, dy and dx together should stay in a second-level cache of 1 MB.
STRIPS_BYTES = 768 * 1024

Operands = tuple[Any, ...]


def read_only_arrays(weight: TrainableMatrix) -> Operands:
    """Return a weight's arrays as read-only views, of which one version is compiled."""
    arrays = [getattr(weight, name) for name in weight.array_names]
    return tuple([contiguous(array, array.dtype) for array in arrays])


def strip_registers(x: np.ndarray, lanes: int, most: int) -> int:
    """Return how many vector registers of tokens a strip should hold: 1, 2 or ``most``.

    Parameters
    ----------
    x : ndarray, shape (M, D)
        Where M is less than a strip holds, zeros fill the rest.
    lanes : int
        Tokens that one register, or one panel of registers, holds.
    most : int
    """
    rows, width = x.shape
    for registers in (most, 2):
        fits = 3 * width * registers * lanes * x.itemsize <= STRIPS_BYTES
        if fits and rows > registers * lanes // 2:
            return registers
    return 1


def run_forward(
    kernel: Callable[..., None],
    x: np.ndarray,
    weights: Sequence[Operands],
    neurons: int,
    strip_width: int,
    stored: int,
) -> tuple[np.ndarray, SparseWeightActivations]:
    """Run a compiled forward pass over all strips.

    Parameters
    ----------
    kernel : callable
        ``kernel(x, gate, up, down, y, nonzeros, absolute_sum, fired, strip_width, first, last)``.
    x : ndarray, shape (M, D)
    weights : three tuples of arrays
        Gate, up and down, as the kernel reads them; of a two-matrix layer, up stands in for the
        gate.
    neurons : int
        F.
    strip_width : int
        Tokens of a strip.
    stored : int
        Stored values of all weights, the multiply-adds of one token.
    """
    strips = -(-x.shape[0] // strip_width)
    y = np.empty_like(x)
    nonzeros, absolute_sum = np.zeros(strips, np.int64), np.zeros(strips, np.float64)
    fired = np.zeros(neurons, np.bool_)
    run_ranges(
        lambda first, last: kernel(
            x, *weights, y, nonzeros, absolute_sum, fired, strip_width, first, last
        ),
        strips,
        grain=1 + GRAIN // (1 + stored * strip_width),
    )
    activations = SparseWeightActivations(
        (x.shape[0], neurons), int(nonzeros.sum()), float(absolute_sum.sum()), fired
    )
    return y, activations


def run_one_token(
    kernel: Callable[..., tuple[int, float]],
    x: np.ndarray,
    weights: Sequence[Operands],
    neurons: int,
    gated: bool,
) -> tuple[np.ndarray, SparseWeightActivations]:
    """Run a compiled forward pass of one token, in the calling thread.

    Parameters
    ----------
    kernel : callable
        ``kernel(x, gate, up, down, y, fired, gated)`` returns nonzeros and absolute sum.
    x : ndarray, shape (1, D)
    weights, neurons
        As :func:`run_forward` takes them.
    """
    y = np.empty_like(x)
    fired = np.zeros(neurons, np.bool_)
    nonzeros, absolute_sum = kernel(x, *weights, y, fired, gated)
    return y, SparseWeightActivations((1, neurons), nonzeros, absolute_sum, fired)


def run_backward(
    kernel: Callable[..., None],
    dy: np.ndarray,
    x: np.ndarray,
    weights: Sequence[Operands],
    neurons: int,
    l1_scale: float,
    gradients: Sequence[np.ndarray],
    strip_width: int,
) -> tuple[np.ndarray, list[np.ndarray]]:
    """Run a compiled backward pass over all strips.

    Parameters
    ----------
    kernel : callable
        ``kernel(dy, x, gate, up, down, neurons, l1_scale, dx, gate_grad, up_grad, down_grad,
        strip_width, first, last)``.
    weights : three or two tuples of arrays
        Gate, up and down; of a two-matrix layer up and down, and up stands in for the gate.
    gradients : sequence of ndarray
        One for each weight; read for their shapes alone.

    Returns
    -------
    dx : ndarray, shape (M, D)
    parts : list of ndarray, shape (parts, *gradient.shape)
        The gradients, to be added up over their first axis.
    """
    strips = -(-x.shape[0] // strip_width)
    gradient_bytes = sum(gradient.nbytes for gradient in gradients)
    fitting = PARTS_BYTES // max(gradient_bytes, 1)
    count = min(strips, max(FEWEST_PARTS, min(fitting, GRADIENT_PARTS)))
    dx = np.empty_like(x)
    parts = [np.empty((count, *gradient.shape), x.dtype) for gradient in gradients]
    scale = l1_scale_input(l1_scale, x.dtype)
    if is_two_matrix := len(weights) == 2:
        weights = (weights[0], *weights)

    def work(start: int, stop: int) -> None:
        for number in range(start, stop):
            sums = [part[number] for part in parts]
            for gradient_sum in sums:
                gradient_sum.fill(0)
            if is_two_matrix:
                sums = [sums[0], *sums]
            first, last = strips * number // count, strips * (number + 1) // count
            kernel(dy, x, *weights, neurons, scale, dx, *sums, strip_width, first, last)

    stored = sum(gradient.size for gradient in gradients)
    tokens_of_part = -(-x.shape[0] // max(count, 1))
    run_ranges(work, count, grain=1 + GRAIN // (1 + 2 * stored * tokens_of_part))
    return dx, parts


def add_parts(parts: Sequence[np.ndarray], gradients: Sequence[np.ndarray]) -> None:
    """Add the sums of a backward pass into the gradients, in order."""
    for sums, gradient in zip(parts, gradients, strict=True):
        for gradient_sum in sums:
            gradient += gradient_sum
