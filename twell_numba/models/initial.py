"""Initial values of a model's parameters."""

import math

import numpy as np
from numpy.typing import DTypeLike

from twell_numba.models.config import ModelConfig

STANDARD_DEVIATION = 0.02


def initial_values(
    config: ModelConfig, rng: np.random.Generator, dtype: DTypeLike = np.float32
) -> dict[str, np.ndarray]:
    """Draw the values of every parameter, by name.

    Norms start as ones, biases as zeros and matrices as N(0, 0.02^2). Each block adds to the
    residual stream twice, so the two projections that do so are made smaller by sqrt(2 L): the
    stream's variance then does not grow with depth (as in GPT-2).
    """
    residual_scale = 1 / math.sqrt(2 * config.n_layers)
    values: dict[str, np.ndarray] = {}
    for name, shape in config.parameter_shapes().items():
        if len(shape) == 1:
            values[name] = np.full(shape, 0 if name.endswith(".bias") else 1, dtype)
            continue
        adds_to_residual = name.endswith(("o_proj.weight", "down_proj.weight"))
        value = rng.standard_normal(shape, np.float32)
        value *= STANDARD_DEVIATION * (residual_scale if adds_to_residual else 1.0)
        values[name] = value.astype(dtype, copy=False)
    return values
