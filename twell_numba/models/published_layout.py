"""Weights named as in published sparse models: ``mlp.gate_weight`` for ``mlp.gate_proj.weight``.

They are matrices without a convention that says which axis the neurons are on, so their shape has
to say it: a model with as many neurons as it is wide is refused, rather than computed from weights
that may stand the wrong way round.
"""

import re

import numpy as np

from twell_numba.errors import TwellError

_NAME = re.compile(r"(.*\.mlp\.)(gate|up|down)_weight")


def parameter_name(stored_name: str) -> str:
    """Return the name of the parameter that a tensor of a file holds, in any layout."""
    match = _NAME.fullmatch(stored_name)
    return f"{match[1]}{match[2]}_proj.weight" if match else stored_name


def neuron_major(stored_name: str, stored: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Return a view of a matrix with a neuron a row.

    Parameters
    ----------
    stored_name : str
    stored : ndarray
    shape : tuple of int
        (F, D).

    Raises
    ------
    TwellError
        If the matrix has another shape, or it cannot be told which axis is which.
    """
    if stored.shape not in (shape, shape[::-1]):
        raise TwellError(
            f"{stored_name} of shape {stored.shape}, {shape} or {shape[::-1]} wanted by the "
            f"config.json beside it"
        )
    if shape[0] == shape[1]:
        raise TwellError(
            f"{stored_name} with as many neurons as the model is wide ({shape[0]}), so that "
            f"nothing says which axis is which: save it with gate_proj, up_proj and down_proj"
        )
    return stored if stored.shape == shape else stored.T
