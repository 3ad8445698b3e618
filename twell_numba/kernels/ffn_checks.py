"""Checks of what a feedforward layer's kernels are handed, the same on every path."""

import itertools
from typing import Any

import numpy as np

from twell_numba.kernels.checks import float_inputs, require_in_place, require_shape


def forward_inputs(**arrays: np.ndarray) -> tuple[np.ndarray, ...]:
    """Return x and the weights ready for a kernel; weights that are so already pass at once.

    Parameters
    ----------
    **arrays : ndarray
        x of shape (M, D), then the weights, all of one shape (F, D).

    Raises
    ------
    TypeError, ValueError
        If dtypes or shapes do not fit.
    """
    x, *weights = float_inputs(**arrays)
    if x.ndim != 2:
        require_shape("x", x, ("M", "D"))
    shape = (weights[0].shape[0], x.shape[1])
    for name, weight in zip(list(arrays)[1:], weights, strict=True):
        if weight.shape != shape:
            require_shape(name, weight, shape)
    return (x, *weights)


def backward_inputs(
    dy: np.ndarray,
    x: np.ndarray,
    weight: np.ndarray,
    activations: Any,
    wanted: type[Any],
    **gradients: np.ndarray,
) -> np.ndarray:
    """Return dy ready for a kernel, after checking it, the activations and the gradients.

    Raises
    ------
    TypeError, ValueError
        If the activations are not of the type ``wanted`` or not of this x, a gradient cannot be
        added to in place, or two gradients are one array.
    """
    _, dy = float_inputs(x=x, dy=dy)
    require_shape("dy", dy, x.shape)
    if not isinstance(activations, wanted):
        raise TypeError(
            f"activations of type {type(activations).__name__} given, those that the forward pass "
            "returned wanted"
        )
    if activations.shape != (x.shape[0], weight.shape[0]):
        raise ValueError(
            f"activations of shape {activations.shape} given, {(x.shape[0], weight.shape[0])} "
            "wanted: those that the forward pass returned for this x"
        )
    for name, gradient in gradients.items():
        require_in_place(name, gradient, weight.shape, x.dtype)
    for pair in itertools.combinations(gradients.values(), 2):
        if np.may_share_memory(*pair):
            raise ValueError(
                f"one array given for several of {', '.join(gradients)}, one each wanted"
            )
    return dy
