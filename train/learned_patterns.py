"""What feedforward layers have learned of their tokens on a GPU, in a checkpoint.

By it blocks of tokens share neurons (:mod:`twell_numba.kernels.twell.token_groups`); other blocks
would round differently. For each layer that has learned anything, beside the optimizer's arrays:

    ffn_learned.LAYER.scores       uint8 (F, 128)
    ffn_learned.LAYER.hot_neurons  int32 (H,)
"""

from typing import Any, NamedTuple

import numpy as np

from twell_numba.models.transformer import Transformer

_SCORES, _HOT_NEURONS = "ffn_learned.{}.scores", "ffn_learned.{}.hot_neurons"


class PatternOnHost(NamedTuple):
    """A layer's LearnedPattern in the host's memory.

    Attributes
    ----------
    scores : ndarray of uint8, shape (F, 128)
    hot_neurons : ndarray of int32, shape (H,)
        Ascending.
    """

    scores: np.ndarray
    hot_neurons: np.ndarray


def pattern_arrays(model: Transformer) -> dict[str, np.ndarray]:
    """Return, by name, what the layers have learned."""
    arrays = {}
    for layer, ffn in enumerate(model.ffn_layers):
        learned = ffn.auto_state.learned
        if learned is not None:
            hot = np.empty(0, np.int32) if learned.hot is None else learned.hot.neurons.to_numpy()
            arrays[_SCORES.format(layer)] = learned.scores.to_numpy()
            arrays[_HOT_NEURONS.format(layer)] = hot
    return arrays


def take_patterns(arrays: dict[str, np.ndarray], model: Transformer) -> dict[int, PatternOnHost]:
    """Take out of a checkpoint's arrays, by layer, what was learned.

    Raises
    ------
    ValueError
        If an array is not of the form that is written.
    """
    patterns, neurons = {}, model.config.d_ffn
    for layer in range(model.config.n_layers):
        scores_name, hot_name = _SCORES.format(layer), _HOT_NEURONS.format(layer)
        if scores_name not in arrays:
            continue
        scores, hot = arrays.pop(scores_name), arrays.pop(hot_name, np.zeros(0))
        if scores.dtype != np.uint8 or scores.shape != (neurons, 128) or scores.max() > 127:
            raise ValueError(f"{scores_name} is not what a run saves")
        is_list = hot.dtype == np.int32 and hot.ndim == 1
        if not is_list or np.any(np.diff(hot, prepend=-1, append=neurons) <= 0):
            raise ValueError(f"{hot_name} is not what a run saves")
        patterns[layer] = PatternOnHost(scores, hot)
    return patterns


def put_patterns(model: Transformer, patterns: dict[int, PatternOnHost], stream: Any) -> None:
    """Let layers on a GPU go by what was learned."""
    from twell_numba.device.gpu import from_numpy
    from twell_numba.kernels.twell.hot_neurons import hold_hot_neurons
    from twell_numba.kernels.twell.token_groups import LearnedPattern

    for layer, (scores, hot) in patterns.items():
        ffn = model.ffn_layers[layer]
        held = hold_hot_neurons(hot, len(scores), stream)
        learned = LearnedPattern(from_numpy(scores, stream), held)
        ffn.auto_state = ffn.auto_state._replace(learned=learned)
