"""Cutting off the smallest feedforward weights of a model: magnitude pruning.

Weights are changed in place and are held dense. A cut that would leave a whole matrix without a
weight is refused: the layer would then give nothing.
"""

import math

import numpy as np

from twell_numba.errors import TwellError
from twell_numba.infer import weight_cut
from twell_numba.models.transformer import Transformer


def cut_below(model: Transformer, threshold: float, *, block_size: int | None = None) -> None:
    """Set every feedforward weight of a smaller magnitude than ``threshold`` to zero.

    Parameters
    ----------
    model : Transformer
        With dense weights; changed in place.
    threshold : float
    block_size : int, optional
        Keep or cut whole blocks of this size instead, by the root of their mean square.

    Raises
    ------
    TwellError
        If nothing would be left of a matrix. The model's weights are changed all the same.
    """
    for parameter in model.ffn_parameters:
        held_any = parameter.value.any()
        largest = weight_cut.magnitudes(parameter.value, block_size or 1).max()
        left = weight_cut.cut_below(parameter.value, block_size or 1, threshold)
        if held_any and not left:
            what = "weight is" if block_size is None else "root mean square of a block is"
            raise TwellError(
                f"weight threshold {threshold:g} would leave nothing of {parameter.name}, of which "
                f"the largest {what} {largest:.4g}; give a smaller one"
            )


def cut_to_density(
    model: Transformer, density: float, *, per_layer: bool = False, block_size: int | None = None
) -> None:
    """Keep only the largest feedforward weights, so many that this fraction is left.

    The largest of each matrix stays in any case; see
    :func:`twell_numba.infer.weight_cut.cut_to_density`.

    Parameters
    ----------
    model : Transformer
        With dense weights; changed in place.
    density : float
        Above 0, at most 1.
    per_layer : bool
        Whether each matrix of each layer keeps this fraction; by default all share it, and a matrix
        keeps the more the larger its weights are.
    block_size : int, optional
        Keep or cut whole blocks of this size instead.

    Raises
    ------
    TwellError
        If not even one weight, or block, of each matrix may be left.
    """
    values = [parameter.value for parameter in model.ffn_parameters]
    _require_one_each(values, density, block_size)
    for group in [[value] for value in values] if per_layer else [values]:
        weight_cut.cut_to_density(group, block_size or 1, density)


def _require_one_each(values: list[np.ndarray], density: float, block_size: int | None) -> None:
    """Refuse a density that would leave a matrix, and so a whole layer, without a weight."""
    smallest = min(value.size for value in values)
    entries = min((block_size or 1) ** 2, smallest)
    if density * smallest < entries:
        what = "weight" if block_size is None else f"block of {block_size} x {block_size}"
        raise TwellError(
            f"target density {density:g} would leave less than one {what} of a matrix of "
            f"{' x '.join(map(str, values[0].shape))}, and a whole layer without any; give at "
            f"least {_sufficient_density(entries, smallest):.2g}"
        )


def _sufficient_density(entries: int, size: int) -> float:
    """Return the smallest number of two digits by which so many of ``size`` entries are left."""
    places = 1 - math.floor(math.log10(entries / size))
    density = round(entries / size, places)
    while density * size < entries:
        density = round(density + 10.0**-places, places)
    return density
