"""Activation-sparse feedforward layers forward, with 8-bit weights where few rows are read.

The weights that decide which neurons fire are as in :mod:`twell_numba.kernels.twell`; the others
are :class:`~twell_numba.kernels.twell.float8_weights.Float8Weights`. On a GPU rows are read as they
are (:mod:`float8_rows`). On the CPU, where 8 bits save memory but no time, a call makes the dense
weights anew.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from twell_numba.kernels.dispatch import by_device
from twell_numba.kernels.twell import cpu
from twell_numba.kernels.twell.activations import PackedActivations
from twell_numba.kernels.twell.float8_weights import Float8Weights


def _by_device(cpu_function: Callable[..., Any]) -> Callable[..., Any]:
    return by_device(cpu_function, "twell_numba.kernels.twell.float8_rows")


@_by_device
def gated_ffn_forward(
    x: np.ndarray,
    gate_weight: np.ndarray,
    up_weight: Float8Weights,
    down_weight: Float8Weights,
    tile: int = 256,
    slots: int = 64,
) -> tuple[np.ndarray, PackedActivations]:
    """Compute y = (relu(x Wg^T) * (x Wu^T)) Wd.

    Parameters
    ----------
    x : array of floats, shape (M, D)
    gate_weight : array, shape (F, D)
        Of x's dtype.
    up_weight, down_weight : Float8Weights of shape (F, D)
    tile, slots : int
        TwELL's tile width and entries a tile.

    Returns
    -------
    y : array, shape (M, D)
    activations
        As without 8-bit weights; there is no backward pass.
    """
    up, down = up_weight.to_dense(x.dtype), down_weight.to_dense(x.dtype)
    return cpu.gated_ffn_forward(x, gate_weight, up, down, tile, slots)


@_by_device
def ffn_forward(
    x: np.ndarray,
    up_weight: np.ndarray,
    down_weight: Float8Weights,
    tile: int = 256,
    slots: int = 64,
) -> tuple[np.ndarray, PackedActivations]:
    """Compute y = relu(x Wu^T) Wd; parameters and returns as with a gate."""
    return cpu.ffn_forward(x, up_weight, down_weight.to_dense(x.dtype), tile, slots)
