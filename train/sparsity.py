"""The L1 term on activations, what is counted about them, and the revival of dead neurons.

The term is ``strength`` times the mean over layers of the mean over tokens of the sum over neurons
of |h|. A layer knows only its own tokens, so it is handed ``strength / (L * M)`` and multiplies the
plain sum of |h| by it; M counts the tokens of the whole step, however many micro-batches they come
in.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from twell_numba.layers.ffn import ActivationStatistics

REVIVAL_KEEP = 0.9
REVIVAL_NOISE = 0.1 * 0.02


def l1_scale(strength: float, layers: int, tokens: int) -> float:
    """Return the factor of the plain sum of |h| in one layer: strength / (L M)."""
    return strength / (layers * tokens)


class StepStatistics:
    """Sums of what the FFN layers counted over the micro-batches of one step.

    Attributes
    ----------
    tokens : int
        Tokens seen so far.
    nonzeros : ndarray of int64, shape (L,)
    absolute_sum : ndarray of float64, shape (L,)
    fired : ndarray of bool, shape (L, F)
        Which neurons fired for at least one token.
    paths : list of str
        The execution path each layer took last.
    """

    def __init__(self, layers: int, neurons: int) -> None:
        self.tokens = 0
        self.nonzeros = np.zeros(layers, np.int64)
        self.absolute_sum = np.zeros(layers, np.float64)
        self.fired = np.zeros((layers, neurons), np.bool_)
        self.paths = [""] * layers

    def add(self, statistics: Sequence[ActivationStatistics]) -> None:
        """Add one forward pass, given its statistics by layer."""
        self.tokens += statistics[0].tokens
        for layer, counted in enumerate(statistics):
            self.nonzeros[layer] += counted.nonzeros
            self.absolute_sum[layer] += counted.absolute_sum
            self.fired[layer] |= counted.fired
            self.paths[layer] = counted.path

    def nonzeros_per_token(self) -> list[float]:
        """Return the mean number of nonzero neurons of a token, by layer."""
        return [float(count) / max(1, self.tokens) for count in self.nonzeros]

    def activation_sparsity(self) -> float:
        """Return the fraction of zeros of h, mean over layers."""
        return 1.0 - float(np.mean(self.nonzeros_per_token())) / self.fired.shape[1]


class DeadNeurons:
    """Tells which neurons have fired for no token in the last ``window`` steps.

    Parameters
    ----------
    layers, neurons : int
        L and F.
    window : int
        Steps. Before that many have been counted, a neuron is dead if it has never fired.

    Attributes
    ----------
    last_fired : ndarray of int64, shape (L, F)
        The step in which a neuron last fired; 0 for never.
    """

    def __init__(self, layers: int, neurons: int, window: int) -> None:
        self._window = window
        self.step = 0
        self.last_fired = np.zeros((layers, neurons), np.int64)

    def add_step(self, fired: np.ndarray) -> None:
        """Count one step, given ``fired``, bool of shape (L, F)."""
        self.step += 1
        self.last_fired[fired] = self.step

    def dead(self) -> np.ndarray:
        """Return which neurons are dead, bool of shape (L, F)."""
        return self.last_fired <= max(0, self.step - self._window)

    def fraction(self) -> float:
        """Return the fraction of neurons that are dead, mean over layers."""
        return float(self.dead().mean())

    def window_is_full(self) -> bool:
        """Whether a whole window has been seen, so that dead neurons have had their chance."""
        return self.step >= self._window

    def state_dict(self) -> dict[str, Any]:
        """Return the counts, made of numbers that JSON can hold."""
        return {"step": self.step, "last_fired": self.last_fired.tolist()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on counting from where :meth:`state_dict` was taken.

        Raises
        ------
        KeyError, TypeError, ValueError
            If it is damaged, or was taken of another number of layers or neurons.
        """
        step = state["step"]
        if type(step) is not int or step < 0:
            raise ValueError(f"counts of {step!r} steps given, a number of steps wanted")
        last_fired = np.array(state["last_fired"])
        if last_fired.shape != self.last_fired.shape:
            raise ValueError(
                f"counts of shape {last_fired.shape} given, {self.last_fired.shape} wanted"
            )
        if last_fired.dtype.kind != "i" or ((last_fired < 0) | (last_fired > step)).any():
            raise ValueError(f"neurons given that fired in no step from 0 to {step}")
        self.step = step
        self.last_fired = last_fired.astype(np.int64)


def revive_dead(
    gate: np.ndarray,
    first_moment: np.ndarray,
    second_moment: np.ndarray,
    dead: np.ndarray,
    rng: np.random.Generator,
) -> None:
    """Replace each dead neuron's gate row by 0.9 of itself + 0.1 N(0, 0.02^2) (arXiv 2603.23198).

    Its optimizer moments are set to zero. All three arrays are changed in place, in dead rows only:
    living neurons and what the optimizer knows about them stay as they are.

    Parameters
    ----------
    gate, first_moment, second_moment : ndarray, shape (F, D)
        The matrix that decides whether a neuron fires: the gate, or up in a two-matrix FFN.
    dead : ndarray of bool, shape (F,)
    rng : numpy.random.Generator
    """
    rows = np.flatnonzero(dead)
    noise = rng.standard_normal((len(rows), gate.shape[1]))
    gate[rows] = (REVIVAL_KEEP * gate[rows] + REVIVAL_NOISE * noise).astype(gate.dtype)
    first_moment[rows] = 0
    second_moment[rows] = 0
