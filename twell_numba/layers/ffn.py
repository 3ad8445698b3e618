"""Feedforward layers: one set of weights, several execution paths that give the same numbers.

``dense`` multiplies everything; ``twell`` packs the activations that are not zero and computes only
with those; ``auto`` takes whichever was faster at the density of the layer's last call.
"""

from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import ClassVar, NamedTuple

import numpy as np

from twell_numba.kernels import dense_ffn, twell
from twell_numba.kernels.dense_ffn import DenseActivations
from twell_numba.kernels.twell import PackedActivations
from twell_numba.layers.parameter import Parameter

PATHS = ("auto", "dense", "twell")

_FAMILIES: dict[str, ModuleType] = {"dense": dense_ffn, "twell": twell}

# Below this fraction of neurons firing `auto` takes the TwELL path. Measured on 2 cores for D from
# 128 to 768: at 0.09 TwELL was 1.2 to 2.8 times as fast as dense, forward and with backward; both
# were even at 0.12 to 0.16 beside a BLAS with AVX-512, at 0.2 to 0.25 beside one with AVX2.
AUTO_DENSITY = 0.1

# `auto` counts what fired once in so many tokens: at every call of a batch, but not for every token
# of a generated text, where counting would cost a tenth of the layer's time.
TOKENS_A_MEASUREMENT = 16


@dataclass(frozen=True)
class ActivationStatistics:
    """How sparse h was in one call.

    Attributes
    ----------
    tokens, neurons : int
        M and F.
    nonzeros : int
        Entries of h that are not 0.
    absolute_sum : float
        Sum of |h|: the L1 term before its strength.
    fired : ndarray of bool, shape (F,)
        Neurons that were not 0 for at least one token.
    path : str
        ``dense`` or ``twell``: the path that was taken.
    """

    tokens: int
    neurons: int
    nonzeros: int
    absolute_sum: float
    fired: np.ndarray
    path: str

    @property
    def density(self) -> float:
        """Fraction of h that is not 0; NaN for no token."""
        entries = self.tokens * self.neurons
        return self.nonzeros / entries if entries else float("nan")


class AutoState(NamedTuple):
    """What ``auto`` chooses the next call's path by.

    Attributes
    ----------
    density : float or None
        Fraction of h that was not 0 when it was last measured; None before.
    unmeasured_tokens : int
        Tokens seen since then.
    """

    density: float | None = None
    unmeasured_tokens: int = 0


class _LastCall(NamedTuple):
    path: str
    activations: PackedActivations | DenseActivations


class FeedForward:
    """What the gated and the two-matrix layer share: all but their weights and their formula.

    Parameters
    ----------
    parameters : list of Parameter
        The weights in the order the kernels take them, each of the same shape (F, D).
    path : {"auto", "dense", "twell"}

    Attributes
    ----------
    auto_state : AutoState
        Changed by calls on the path ``auto``. Who puts it back to what it was gets the same paths
        again, and so the same rounding.

    Raises
    ------
    ValueError
        If the weights are not of one shape (F, D), or the path is not known.
    """

    operation: ClassVar[str]
    """Name of the operation: ``{operation}_forward`` and ``_backward`` in each kernel family."""

    def __init__(self, parameters: list[Parameter], path: str) -> None:
        shape = parameters[0].value.shape
        for parameter in parameters:
            if parameter.value.ndim != 2 or parameter.value.shape != shape:
                raise ValueError(
                    f"{parameter.name} of shape {parameter.value.shape} given beside "
                    f"{parameters[0].name} of shape {shape}; all FFN weights are (F, D), "
                    "the down projection too"
                )
        self._parameters = parameters
        self.path = path
        self._last: _LastCall | None = None
        self._statistics: ActivationStatistics | None = None
        self.auto_state = AutoState()

    @property
    def path(self) -> str:
        """The execution path; may be changed at any time."""
        return self._path

    @path.setter
    def path(self, path: str) -> None:
        if path not in PATHS:
            raise ValueError(f"FFN path {path!r} given, one of {', '.join(PATHS)} wanted")
        self._path = path

    @property
    def statistics(self) -> ActivationStatistics:
        """Statistics of the last call, computed when first asked for.

        Raises
        ------
        RuntimeError
            If the layer has not been called yet.
        """
        if self._last is not None:
            path, activations = self._last
            tokens, neurons = activations.shape
            nonzeros, absolute_sum, fired = _FAMILIES[path].activation_statistics(activations)
            self._statistics = ActivationStatistics(
                tokens, neurons, nonzeros, absolute_sum, fired, path
            )
            self._last = None
        if self._statistics is None:
            raise RuntimeError("the FFN's statistics were asked for before its first call")
        return self._statistics

    def __call__(
        self, x: np.ndarray, l1_scale: float = 0.0
    ) -> tuple[np.ndarray, Callable[[np.ndarray], np.ndarray]]:
        """Return Y (M, D) for X (M, D), and the backward pass.

        The backward pass also adds the gradient of ``l1_scale`` times the sum of |h|.
        """
        path = self._choose_path()
        forward = getattr(_FAMILIES[path], f"{self.operation}_forward")
        backward = getattr(_FAMILIES[path], f"{self.operation}_backward")
        weights = [parameter.read_only for parameter in self._parameters]
        y, activations = forward(x, *weights)
        self._last = _LastCall(path, activations)
        if self.path == "auto":
            self._measure(len(x))

        def backprop(dy: np.ndarray) -> np.ndarray:
            gradients = [parameter.grad_buffer() for parameter in self._parameters]
            return backward(dy, x, *weights, activations, l1_scale, *gradients)

        return y, backprop

    def parameters(self) -> list[Parameter]:
        """Return the parameters trained here."""
        return self._parameters

    def _choose_path(self) -> str:
        if self.path != "auto":
            return self.path
        density = self.auto_state.density
        return "twell" if density is not None and density < AUTO_DENSITY else "dense"

    def _measure(self, tokens: int) -> None:
        density, unmeasured_tokens = self.auto_state
        unmeasured_tokens += tokens
        if tokens and (density is None or unmeasured_tokens >= TOKENS_A_MEASUREMENT):
            density, unmeasured_tokens = self.statistics.density, 0
        self.auto_state = AutoState(density, unmeasured_tokens)


class GatedFFN(FeedForward):
    """Y = (relu(X Wg^T) * (X Wu^T)) Wd.

    Parameters
    ----------
    prefix : str
        Of the weights' names in a checkpoint: ``{prefix}.gate_proj.weight`` and so on.
    gate, up, down : ndarray, shape (F, D)
        Neuron-major: row j belongs to neuron j.
    path : {"auto", "dense", "twell"}
    """

    operation = "gated_ffn"

    def __init__(
        self, prefix: str, gate: np.ndarray, up: np.ndarray, down: np.ndarray, path: str = "auto"
    ) -> None:
        self.gate = Parameter(f"{prefix}.gate_proj.weight", gate)
        self.up = Parameter(f"{prefix}.up_proj.weight", up)
        self.down = Parameter(f"{prefix}.down_proj.weight", down)
        super().__init__([self.gate, self.up, self.down], path)


class TwoMatrixFFN(FeedForward):
    """Y = relu(X Wu^T) Wd.

    Parameters
    ----------
    prefix : str
        Of the weights' names in a checkpoint: ``{prefix}.up_proj.weight`` and so on.
    up, down : ndarray, shape (F, D)
        Neuron-major: row j belongs to neuron j.
    path : {"auto", "dense", "twell"}
    """

    operation = "ffn"

    def __init__(self, prefix: str, up: np.ndarray, down: np.ndarray, path: str = "auto") -> None:
        self.up = Parameter(f"{prefix}.up_proj.weight", up)
        self.down = Parameter(f"{prefix}.down_proj.weight", down)
        super().__init__([self.up, self.down], path)
