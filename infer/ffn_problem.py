"""What the benchmarks of the feedforward layer share: inputs, the layer in NumPy, errors."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist
from typing import NamedTuple, Self

import ml_dtypes
import numpy as np

from twell_numba.device.arrays import Array, to_host
from twell_numba.errors import UsageError
from twell_numba.formats import BlockELLMatrix, CSRMatrix
from twell_numba.kernels.dense_ffn import reference
from twell_numba.layers.ffn import GatedFFN
from twell_numba.layers.parameter import Operand, Parameter, SparseParameter

DTYPES = {
    "float32": np.dtype(np.float32),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float16": np.dtype(np.float16),
}

# Of larger problems, errors are those of a sample: of so many tokens and neurons, drawn at random.
LARGEST_WHOLE = 2**22  # entries of h
SAMPLED_TOKENS, SAMPLED_NEURONS = 64, 16

# No neuron fires for more of the tokens, however popular.
_MOST_OFTEN = 0.95


@dataclass(frozen=True)
class FFNShape:
    """Sizes of a benchmark: M tokens, model width D, hidden width F, neurons firing a token."""

    tokens: int
    width: int
    neurons: int
    nonzeros: float


# What is measured unless other sizes are asked for: layers of a size that suits the machine.
DEFAULT_SIZES = {"cpu": (1024, 512, 2048), "cuda": (16384, 2048, 5632)}
DEFAULT_DENSITIES = (0.01, 0.05, 0.5)
DEFAULT_NONZEROS = (29, 60, 150, 911)  # and half of the neurons, on a GPU


def default_shape(
    device: str, tokens: int | None, width: int | None, neurons: int | None
) -> FFNShape:
    """Return the sizes asked for, and the device's where none is; half of the neurons fire."""
    sizes = DEFAULT_SIZES[device.partition(":")[0]]
    tokens, width, neurons = (
        given or default for given, default in zip((tokens, width, neurons), sizes, strict=True)
    )
    return FFNShape(tokens, width, neurons, neurons / 2)


def firing_neurons(
    device: str, neurons: int, densities: Sequence[float], nonzeros: Sequence[float]
) -> list[float]:
    """Return how many neurons fire for a token: those asked for, or else the device's choice.

    Raises
    ------
    UsageError
        If as many as there are, or more, are asked for.
    """
    for count in nonzeros:
        if count >= neurons:
            raise UsageError(f"--nonzeros {count:g} given, fewer than the {neurons} neurons wanted")
    wanted = [*nonzeros, *(density * neurons for density in densities)]
    if wanted:
        return wanted
    if device == "cpu":
        return [density * neurons for density in DEFAULT_DENSITIES]
    return [*(float(count) for count in DEFAULT_NONZEROS if 2 * count < neurons), neurons / 2]


def choose_dtype(device: str, dtype: str | None) -> str:
    """Return the dtype asked for, or else the device's.

    Raises
    ------
    UsageError
        If it is not float32 on the CPU.
    """
    if device != "cpu":
        return dtype or "bfloat16"
    if dtype not in (None, "float32"):
        raise UsageError(
            f"--dtype {dtype} given, but the CPU computes in float32; leave it out, or use "
            "--device cuda"
        )
    return "float32"


class Exact(NamedTuple):
    """Results in float64, for the sample's tokens (y, dx) and neurons (gradients) alone."""

    y: np.ndarray
    dx: np.ndarray
    gradients: list[np.ndarray]


class FFNProblem:
    """Random weights and inputs of which a chosen number of neurons fires for a token.

    The first input is 1 for every token and a neuron's gate weight there is minus the normal
    quantile that leaves the wanted fraction above 0.

    Parameters
    ----------
    shape : FFNShape
    seed : int
    dtype : {"float32", "bfloat16", "float16"}
        That everything is rounded to.
    device : str
        ``cpu`` or ``cuda:N``: where layers compute.
    skew : float
        How much more often some neurons fire than others: the n-th of them in proportion to
        n ** -skew, but for at most 95% of the tokens. 0: all alike.

    Attributes
    ----------
    x, dy : ndarray, shape (M, D)
    gate, up, down : ndarray, shape (F, D)
        In the host's memory. May be replaced, by weights of which some are zero, before layers are
        made of them.
    tokens, neurons : slice or ndarray of int
        The sample that errors are measured on.
    """

    def __init__(
        self,
        shape: FFNShape,
        seed: int,
        dtype: str = "float32",
        device: str = "cpu",
        skew: float = 0.0,
    ) -> None:
        self.shape, self.device, self.dtype, self.skew = shape, device, DTYPES[dtype], skew
        self.random = np.random.default_rng(seed)
        rows, width, neurons = shape.tokens, shape.width, shape.neurons
        x = self.random.standard_normal((rows, width), np.float32)
        dy = self.random.standard_normal((rows, width), np.float32)
        x[:, 0] = 1
        weights = self.random.standard_normal((3, neurons, width), np.float32)
        weights /= np.sqrt([width, width, neurons], dtype=np.float32)[:, None, None]
        self.x, self.dy = x.astype(self.dtype, copy=False), dy.astype(self.dtype, copy=False)
        self.gate, self.up, self.down = weights.astype(self.dtype, copy=False)
        self._ranks = self.random.permutation(neurons)
        self._choose_gate()
        self.tokens = self.neurons = slice(None)  # type: slice | np.ndarray
        if rows * neurons > LARGEST_WHOLE:
            self.tokens = _sample(self.random, rows, SAMPLED_TOKENS)
            self.neurons = _sample(self.random, neurons, SAMPLED_NEURONS)

    def with_nonzeros(self, nonzeros: float) -> Self:
        """Return the same problem with another number of neurons that fire for a token."""
        other = self._changed("exact")
        other.shape = replace(self.shape, nonzeros=nonzeros)
        other.gate = self.gate.copy()
        other._choose_gate()
        return other

    def with_inputs(self, x: np.ndarray, gate: np.ndarray, nonzeros: float) -> Self:
        """Return the same problem with another X and Wg, with which so many neurons fire."""
        other = self._changed("exact", "inputs")
        other.shape = replace(self.shape, nonzeros=nonzeros)
        other.x, other.gate = x, gate
        return other

    def with_neurons(self, kept: np.ndarray) -> Self:
        """Return the problem without all neurons but some, among them all that ever fire.

        Its Y and dX are the same.
        """
        other = self._changed("exact")
        other.shape = replace(self.shape, neurons=len(kept))
        other.gate, other.up, other.down = self.gate[kept], self.up[kept], self.down[kept]
        if not isinstance(self.neurons, slice):
            other.neurons = _sample(self.random, len(kept), SAMPLED_NEURONS)
        return other

    def with_weights_elsewhere(self) -> Self:
        """Return the same problem with its weights at other places in memory."""
        other = self._changed()
        other.gate, other.up, other.down = self.gate.copy(), self.up.copy(), self.down.copy()
        return other

    def _changed(self, *forgotten: str) -> Self:
        """Return a problem that shares all attributes but those computed anew when asked for."""
        other = type(self).__new__(type(self))
        other.__dict__.update(self.__dict__)
        for name in forgotten:
            other.__dict__.pop(name, None)
        return other

    def _choose_gate(self) -> None:
        fractions = _firing_fractions(self.shape, self.skew)
        thresholds = np.array([-NormalDist().inv_cdf(1 - p) for p in fractions], np.float32)
        self.gate[:, 0] = thresholds[self._ranks]

    @functools.cached_property
    def inputs(self) -> tuple[Array, Array]:
        """X and dY on the problem's device."""
        return self.place(self.x), self.place(self.dy)

    def place(self, array: np.ndarray) -> Array:
        """Return an array on the problem's device."""
        if self.device == "cpu":
            return array
        from twell_numba.device.gpu import choose, from_numpy

        return from_numpy(array, choose(self.device).stream)

    def layer(
        self, path: str, hold: Callable[[np.ndarray], CSRMatrix | BlockELLMatrix] | None = None
    ) -> GatedFFN:
        """Return a layer of these weights on the device, each as ``hold`` makes it, or dense."""

        def held(weight: np.ndarray) -> Operand:
            return self.place(weight) if hold is None else hold(weight).to(self.device)

        return GatedFFN("mlp", held(self.gate), held(self.up), held(self.down), path)

    @functools.cached_property
    def exact(self) -> Exact:
        """The results, computed from what the dtype holds in float64, for the sample."""
        y, dx, gradients = self._exact_part(self.tokens, slice(None))
        if not isinstance(self.tokens, slice):  # a neuron's gradients are sums over all tokens
            gradients = self._exact_part(slice(None), self.neurons).gradients
        return Exact(y, dx, gradients)

    def _exact_part(self, tokens: slice | np.ndarray, neurons: slice | np.ndarray) -> Exact:
        """Return the results of a layer of some neurons for some tokens."""
        x, dy = (array[tokens].astype(np.float64) for array in (self.x, self.dy))
        gate, up, down = (
            array[neurons].astype(np.float64) for array in (self.gate, self.up, self.down)
        )
        y, activations = reference.gated_ffn_forward(x, gate, up, down)
        gradients = [np.zeros_like(gate) for _ in range(3)]
        dx = reference.gated_ffn_backward(dy, x, gate, up, down, activations, 0.0, *gradients)
        return Exact(y, dx, gradients)


def _sample(random: np.random.Generator, size: int, count: int) -> slice | np.ndarray:
    """Return some indices, the last always among them: kernels err at edges."""
    chosen = random.choice(size, min(size, count), replace=False)
    chosen[0] = size - 1
    return np.unique(chosen)


def _firing_fractions(shape: FFNShape, skew: float) -> np.ndarray:
    """Return the fraction of the tokens that each neuron fires for, the most popular first."""
    popularity = np.arange(1, shape.neurons + 1, dtype=np.float64) ** -skew
    most = max(_MOST_OFTEN, shape.nonzeros / shape.neurons)
    low, high = 0.0, 1 / popularity[-1]
    for _ in range(100):  # bisection for the factor with which the sum is right
        factor = (low + high) / 2
        fractions = np.minimum(factor * popularity, most)
        low, high = (factor, high) if fractions.sum() < shape.nonzeros else (low, factor)
    return fractions


class NumPyFFN:
    """The gated FFN as a NumPy user would write it at best: BLAS products into kept buffers."""

    def __init__(self, problem: FFNProblem) -> None:
        self.problem = problem
        rows, neurons = problem.shape.tokens, problem.shape.neurons
        self.gate, self.up, self.hidden, self.d_hidden, self.d_gate = (
            np.empty((rows, neurons), np.float32) for _ in range(5)
        )
        self.y, self.dx, self.dx_gate = (np.empty_like(problem.x) for _ in range(3))
        self.gradients = [np.empty_like(problem.gate) for _ in range(3)]

    def run(self, backward: bool) -> Callable[[], object]:
        def both() -> None:
            self.forward()
            self.backward()

        return both if backward else self.forward

    def forward(self) -> None:
        problem = self.problem
        np.matmul(problem.x, problem.gate.T, out=self.gate)
        np.matmul(problem.x, problem.up.T, out=self.up)
        np.maximum(self.gate, 0, out=self.gate)
        np.multiply(self.gate, self.up, out=self.hidden)
        np.matmul(self.hidden, problem.down, out=self.y)

    def backward(self) -> None:
        problem, d_hidden, d_gate = self.problem, self.d_hidden, self.d_gate
        gate_gradient, up_gradient, down_gradient = self.gradients
        np.matmul(problem.dy, problem.down.T, out=d_hidden)
        np.multiply(d_hidden, self.up, out=d_gate)
        np.multiply(d_gate, self.gate > 0, out=d_gate)
        np.multiply(d_hidden, self.gate, out=d_hidden)
        np.matmul(self.hidden.T, problem.dy, out=down_gradient)
        np.matmul(d_hidden.T, problem.x, out=up_gradient)
        np.matmul(d_gate.T, problem.x, out=gate_gradient)
        np.matmul(d_hidden, problem.up, out=self.dx)
        np.matmul(d_gate, problem.gate, out=self.dx_gate)
        np.add(self.dx, self.dx_gate, out=self.dx)


def layer_run(layer: GatedFFN, problem: FFNProblem, backward: bool) -> Callable[[], object]:
    """Return a call of the layer on the problem's input, with ``backward`` also back."""
    x, dy = problem.inputs

    def forward() -> None:
        layer(x)

    def both() -> None:
        layer(x)[1](dy)

    return both if backward else forward


def error_of_layer(problem: FFNProblem, layer: GatedFFN, backward: bool) -> float:
    """Return the largest norm-wise error of y, and with ``backward`` of dx and the gradients.

    It is measured on the problem's sample. Of sparse weights, only gradients at stored entries are
    looked at: there are no others.
    """
    for parameter in layer.parameters():
        parameter.zero_grad()
    x, dy = problem.inputs
    exact = problem.exact
    y, backprop = layer(x)
    errors = [relative_error(to_host(y)[problem.tokens], exact.y)]
    if backward:
        errors.append(relative_error(to_host(backprop(dy))[problem.tokens], exact.dx))
        for parameter, gradient in zip(layer.parameters(), exact.gradients, strict=True):
            errors.append(_gradient_error(parameter, gradient, problem.neurons))
    return max(errors)


def _gradient_error(parameter: Parameter, exact: np.ndarray, neurons: slice | np.ndarray) -> float:
    given = to_host(parameter.grad_buffer())
    if isinstance(parameter, SparseParameter):
        matrix = parameter.on_host()
        assert isinstance(matrix, CSRMatrix | BlockELLMatrix)
        stored = matrix.with_values(np.ones_like(given)).to_dense()[neurons] != 0
        given = matrix.with_values(given).to_dense()[neurons]
        return relative_error(given, np.where(stored, exact, 0))
    return relative_error(given[neurons], exact)


def relative_error(result: np.ndarray, exact: np.ndarray) -> float:
    """Return the norm-wise error; 0 where both are all zeros (no neuron fired)."""
    difference = np.asarray(result, np.float64) - exact
    error, scale = np.linalg.norm(difference), np.linalg.norm(exact)
    return float(error / scale) if scale else float(error)
