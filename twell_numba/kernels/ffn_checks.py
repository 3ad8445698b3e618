"""Checks of what a feedforward layer's kernels are handed, the same on every path."""

import itertools
import math
from numbers import Real
from typing import Any

import numpy as np

from twell_numba.formats import BlockELLMatrix, CSRMatrix, SparseMatrix
from twell_numba.kernels.checks import float_inputs, require_in_place, require_shape
from twell_numba.kernels.sparse_ffn.activations import SparseWeightActivations

# The formats that a layer's weights can be held and trained in.
TrainableMatrix = CSRMatrix | BlockELLMatrix


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
            raise ValueError(
                f"{name} of shape {weight.shape} given beside x of shape {x.shape}, "
                f"shape {shape} wanted"
            )
    return (x, *weights)


def sparse_forward_inputs(
    wanted: type[SparseMatrix], x: np.ndarray, **weights: SparseMatrix
) -> np.ndarray:
    """Return x ready for a kernel, after checking it and the weights.

    Parameters
    ----------
    wanted : type
        The format that all weights must have.
    x : ndarray, shape (M, D)
    **weights : matrix
        All of one shape (F, D) and of x's dtype.

    Raises
    ------
    TypeError, ValueError
        If formats, dtypes or shapes do not fit.
    """
    (x,) = float_inputs(x=x)
    if x.ndim != 2:
        require_shape("x", x, ("M", "D"))
    shape = None
    for name, weight in weights.items():
        if not isinstance(weight, wanted):
            raise TypeError(
                f"{name} of type {type(weight).__name__} given, {wanted.__name__} wanted"
            )
        shape = shape or (weight.shape[0], x.shape[1])
        if weight.shape != shape:
            raise ValueError(f"{name} of shape {weight.shape} given, shape {shape} wanted")
        if weight.dtype != x.dtype:
            raise TypeError(
                f"{name} of dtype {weight.dtype} given beside x of {x.dtype}, "
                "one dtype for all wanted"
            )
    _require_one_block_size(weights)
    return x


def _require_one_block_size(weights: dict[str, SparseMatrix]) -> None:
    sizes = {
        name: weight.block_size
        for name, weight in weights.items()
        if isinstance(weight, BlockELLMatrix)
    }
    if len(set(sizes.values())) > 1:
        given = ", ".join(f"{name} in blocks of {size}" for name, size in sizes.items())
        raise ValueError(f"{given} given, one block size for all wanted")


def sparse_backward_inputs(
    dy: np.ndarray,
    x: np.ndarray,
    activations: Any,
    **gradients: tuple[TrainableMatrix, np.ndarray],
) -> np.ndarray:
    """Return dy ready for a kernel, after checking it, the activations and the gradients.

    Parameters
    ----------
    dy : ndarray, shape (M, D)
    x : ndarray, shape (M, D)
        As returned by :func:`sparse_forward_inputs`.
    activations
        From the forward pass.
    **gradients : (matrix, ndarray)
        Each weight, and the array that the gradient of its ``stored_values`` is added to.

    Raises
    ------
    TypeError, ValueError
        As :func:`backward_inputs`.
    """
    _, dy = float_inputs(x=x, dy=dy)
    require_shape("dy", dy, x.shape)
    neurons = next(iter(gradients.values()))[0].shape[0]
    _require_activations(activations, SparseWeightActivations, (x.shape[0], neurons))
    for name, (weight, gradient) in gradients.items():
        require_in_place(name, gradient, weight.stored_values.shape, x.dtype)
    weights = [weight.stored_values for weight, _ in gradients.values()]
    _require_separate(
        {name: gradient for name, (_, gradient) in gradients.items()}, [x, dy, *weights]
    )
    return dy


def backward_inputs(
    dy: np.ndarray,
    x: np.ndarray,
    weights: tuple[np.ndarray, ...],
    activations: Any,
    wanted: type[Any],
    **gradients: np.ndarray,
) -> np.ndarray:
    """Return dy ready for a kernel, after checking it, the activations and the gradients.

    Raises
    ------
    TypeError, ValueError
        If the activations are not of the type ``wanted`` or not of this x, a gradient cannot be
        added to in place, or shares memory with another, a weight, x or dy.
    """
    _, dy = float_inputs(x=x, dy=dy)
    require_shape("dy", dy, x.shape)
    shape = weights[0].shape
    _require_activations(activations, wanted, (x.shape[0], shape[0]))
    for name, gradient in gradients.items():
        require_in_place(name, gradient, shape, x.dtype)
    _require_separate(gradients, [x, dy, *weights])
    return dy


def l1_scale_input(l1_scale: float, dtype: np.dtype) -> np.floating:
    """Return the L1 term's scale in a dtype.

    Raises
    ------
    TypeError
        If it is not a number.
    ValueError
        If it is NaN or infinite; one too large for the dtype becomes infinite, and so do gradients.
    """
    if isinstance(l1_scale, bool) or not isinstance(l1_scale, Real):
        raise TypeError(f"l1_scale {l1_scale!r} given, a number wanted")
    if not math.isfinite(l1_scale):
        raise ValueError(f"l1_scale {l1_scale} given, a finite number wanted")
    return dtype.type(l1_scale)


def _require_activations(activations: Any, wanted: type[Any], shape: tuple[int, int]) -> None:
    if not isinstance(activations, wanted):
        raise TypeError(
            f"activations of type {type(activations).__name__} given, those that the forward pass "
            "returned wanted"
        )
    if activations.shape != shape:
        raise ValueError(
            f"activations of shape {activations.shape} given, {shape} "
            "wanted: those that the forward pass returned for this x"
        )


def _require_separate(gradients: dict[str, np.ndarray], inputs: list[np.ndarray]) -> None:
    """Refuse gradients that are one array, or lie in what they are computed from."""
    for pair in itertools.combinations(gradients.values(), 2):
        if np.may_share_memory(*pair):
            raise ValueError(
                f"one array given for several of {', '.join(gradients)}, one each wanted"
            )
    for name, gradient in gradients.items():
        if any(np.may_share_memory(gradient, array) for array in inputs):
            raise ValueError(
                f"{name} shares memory with a weight, x or dy, an array of its own wanted"
            )
