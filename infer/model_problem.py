"""A model with random weights of which a chosen number of neurons fires for a token.

The first number of the residual stream is the same for every token and in every layer: all
embeddings have it, and nothing adds to it. What a gate multiplies it by is then an offset of its
pre-activation, which is set layer by layer until as many neurons fire as are wanted. All execution
paths compute the same model. All layers have the same random weights, but for these offsets: what
is measured does not depend on them, and drawing a billion numbers takes long.
"""

from collections.abc import Callable
from statistics import NormalDist
from typing import Any

import numpy as np

from twell_numba.device.arrays import is_on_gpu, to_host
from twell_numba.layers.parameter import Parameter
from twell_numba.models.config import ModelConfig
from twell_numba.models.initial import STANDARD_DEVIATION
from twell_numba.models.transformer import Transformer

# The constant number, beside embeddings with a standard deviation of 0.02.
CONSTANT = 1.0
CALIBRATIONS = 5
CALIBRATION_TOKENS = 1024
FIRST_OFFSET = -0.02
# Normal quantiles beyond these are not told apart by so many tokens.
SMALLEST_QUANTILE, LARGEST_QUANTILE = 0.05, 4.5


def sparse_model(config: ModelConfig, seed: int) -> Transformer:
    """Return a model whose first number of the residual stream is constant, on the CPU."""
    rng = np.random.default_rng(seed)
    drawn: dict[str, np.ndarray] = {}
    weights: dict[str, Any] = {}
    for name, shape in config.parameter_shapes().items():
        kind = name.split(".", 3)[-1] if ".layers." in name else name
        if kind not in drawn:
            drawn[kind] = _draw(rng, kind, shape, config.n_layers)
        # What training or an offset changes is each layer's own.
        weights[name] = drawn[kind].copy()
    return Transformer(config, weights, ffn_path="dense")


def set_nonzeros(
    model: Transformer, nonzeros: float, seed: int, changed: Callable[[], object] = lambda: None
) -> None:
    """Set the offsets of a model's gates so that so many neurons fire for a token, in all layers.

    Parameters
    ----------
    model : Transformer
        From :func:`sparse_model`; it may be on a GPU. Changed in place.
    nonzeros : float
        At least 1, and fewer than half of the neurons.
    seed : int
        Of the random tokens that this is measured with.
    changed : callable
        Called when weights have been changed.
    """
    config = model.config
    wanted = _quantile(nonzeros / config.d_ffn)
    length = min(CALIBRATION_TOKENS, config.context_length)
    tokens = np.random.default_rng(seed).integers(0, config.vocab_size, (1, length))
    offsets = np.full(config.n_layers, FIRST_OFFSET)
    path, model.ffn_path = model.ffn_path, "dense"
    for _ in range(CALIBRATIONS):
        for ffn, offset in zip(model.ffn_layers, offsets, strict=True):
            _set_first_column(ffn.parameters()[0], offset)
        changed()
        model.logits(tokens)
        quantiles = np.array([_quantile(ffn.statistics.density) for ffn in model.ffn_layers])
        # An offset is as many standard deviations of the pre-activation as it is large.
        offsets *= wanted / quantiles
    model.ffn_path = path


def _draw(rng: np.random.Generator, kind: str, shape: tuple[int, ...], layers: int) -> np.ndarray:
    if len(shape) == 1:
        return np.ones(shape, np.float32)
    value = rng.standard_normal(shape, np.float32)
    value *= STANDARD_DEVIATION
    if kind.endswith("o_proj.weight"):
        value /= np.sqrt(2 * layers, dtype=np.float32)
        value[0] = 0
    elif kind.endswith("down_proj.weight"):  # neuron-major, as all weights of the layer
        value /= np.sqrt(2 * layers, dtype=np.float32)
        value[:, 0] = 0
    elif kind == "model.embed_tokens.weight":
        value[:, 0] = CONSTANT
    return value


def _quantile(density: float) -> float:
    """Return how many standard deviations above the mean a pre-activation must be to be counted."""
    density = min(max(density, 1e-9), 1 - 1e-9)
    return float(np.clip(-NormalDist().inv_cdf(density), SMALLEST_QUANTILE, LARGEST_QUANTILE))


def _set_first_column(parameter: Parameter, value: float) -> None:
    host = to_host(parameter.value)
    host[:, 0] = value
    if is_on_gpu(parameter.value):
        parameter.value.copy_from(host)
