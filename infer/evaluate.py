"""How good and how sparse a model is on given text."""

import math
from typing import NamedTuple, TypedDict

import numpy as np

from twell_numba.device.arrays import to_host
from twell_numba.errors import TwellError
from twell_numba.kernels.cross_entropy import cross_entropy
from twell_numba.models.tokenizer import TextTokenizer
from twell_numba.models.transformer import Transformer

# Numbers of a batch's logits: where the vocabulary is large, they take most of the memory.
LARGEST_LOGITS = 1 << 27


class Evaluation(TypedDict):
    """Measured over all predicted tokens.

    ``loss`` is the mean cross entropy in nats a token, ``bits_per_byte`` the same for each byte of
    text, whatever the tokenizer. Zeros are counted in h, the hidden activations of the FFNs. A
    neuron is dead if it fired for none of the tokens. Sparsities and fractions are means over
    layers.
    """

    loss: float
    perplexity: float
    bits_per_byte: float
    ffn_activation_sparsity: float
    nonzeros_per_token: list[float]
    dead_neuron_fraction: float
    ffn_weight_sparsity: float


def evaluate(
    model: Transformer, windows: np.ndarray, tokenizer: TextTokenizer, batch_size: int = 8
) -> Evaluation:
    """Measure a model on windows of text.

    Parameters
    ----------
    model : Transformer
    windows : ndarray of integers, shape (N, S + 1)
        In each window, each of the last S tokens is predicted from those before it.
    tokenizer
        Says how many bytes the tokens stand for.
    batch_size : int
        Windows computed at once, fewer where their logits would take too much memory; the result
        depends on it by rounding alone.

    Raises
    ------
    ValueError
        If there is no token to predict.
    """
    if windows.ndim != 2 or windows.shape[0] == 0 or windows.shape[1] < 2:
        raise ValueError(
            f"windows of shape {windows.shape} given, (windows, tokens) with at least one window "
            f"of two tokens wanted"
        )
    total_loss, nonzeros, fired = _measure(model, windows, batch_size)
    targets = windows[:, 1:].reshape(-1)
    loss = total_loss / targets.size
    byte_count = len(tokenizer.decode_bytes(targets))
    nonzeros_per_token = nonzeros / targets.size
    return Evaluation(
        loss=loss,
        perplexity=perplexity(loss),
        bits_per_byte=total_loss / math.log(2) / byte_count,
        ffn_activation_sparsity=float(1 - nonzeros_per_token.mean() / model.config.d_ffn),
        nonzeros_per_token=[float(count) for count in nonzeros_per_token],
        dead_neuron_fraction=float(1 - fired.mean()),
        ffn_weight_sparsity=ffn_weight_sparsity(model),
    )


def fired_neurons(model: Transformer, windows: np.ndarray, batch_size: int = 8) -> np.ndarray:
    """Return which neurons fired for at least one token, bool of shape (L, F).

    Parameters
    ----------
    model, windows, batch_size
        As for :func:`evaluate`; the last token of a window is not looked at.
    """
    return _measure(model, windows, batch_size).fired


class _Measurement(NamedTuple):
    """Sums over all predicted tokens: of their losses, by layer and by layer and neuron."""

    total_loss: float
    nonzeros: np.ndarray
    fired: np.ndarray


def _measure(model: Transformer, windows: np.ndarray, batch_size: int) -> _Measurement:
    layers = model.ffn_layers
    total_loss = 0.0
    nonzeros = np.zeros(len(layers), np.int64)
    fired = np.zeros((len(layers), model.config.d_ffn), np.bool_)
    logits_of_window = (windows.shape[1] - 1) * model.config.vocab_size
    batch_size = max(1, min(batch_size, LARGEST_LOGITS // max(1, logits_of_window)))
    for start in range(0, len(windows), batch_size):
        batch = np.asarray(windows[start : start + batch_size], np.int64)
        logits = model.logits(batch[:, :-1])
        losses, _ = cross_entropy(logits, batch[:, 1:].reshape(-1))
        total_loss += float(to_host(losses).sum(dtype=np.float64))
        for layer, ffn in enumerate(layers):
            nonzeros[layer] += ffn.statistics.nonzeros
            fired[layer] |= ffn.statistics.fired
    return _Measurement(total_loss, nonzeros, fired)


def require_finite_weights(model: Transformer) -> None:
    """Refuse a model of which some weights are NaN or infinite: what it gives means nothing.

    Raises
    ------
    TwellError
        One line naming the first parameter with such weights.
    """
    for name, parameter in model.parameters().items():
        if not np.isfinite(to_host(parameter.value)).all():
            raise TwellError(
                f"{name} of the model holds weights that are not finite: the model has diverged, "
                f"use an earlier checkpoint"
            )


def perplexity(loss: float) -> float:
    """Return e to the loss; infinite where that is beyond a float."""
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf


def ffn_weight_sparsity(model: Transformer) -> float:
    """Return the fraction of exact zeros among the weights of all feedforward layers.

    Where they are held in a sparse format, what is not stored counts as zero.
    """
    # All layers are of one size.
    return float(np.mean(ffn_weight_sparsity_by_layer(model)))


def ffn_weight_sparsity_by_layer(model: Transformer) -> list[float]:
    """Return the fraction of exact zeros among the weights of each feedforward layer."""
    return [1 - ffn.weight_density for ffn in model.ffn_layers]
