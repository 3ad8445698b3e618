"""Feedforward layers: one set of weights, several execution paths that give the same numbers.

Weights held as dense arrays have the paths ``dense``, which multiplies everything, and ``twell``,
which packs the activations that are not zero and computes only with those; ``auto`` takes whichever
was faster at the density of the layer's last call. Weights of which most are zero can be held in a
sparse format, ``csr`` or ``block_ell``: that is then their path, and nothing of the size of the
dense weights is made on it.

For inference, dense weights of which few rows are read can be held as 8-bit floats
(:meth:`FeedForward.hold_float8`): then ``twell`` is the path.

All of that is for ReLU. SiLU leaves no exact zeros, so that ``dense`` is its only path; squared
ReLU leaves them, and has ``twell`` too on the CPU (see :data:`PATHS_OF_ACTIVATION`).
"""

import importlib
import operator
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any, ClassVar, NamedTuple

import numpy as np

from twell_numba.device.arrays import Array, is_on_gpu, to_host
from twell_numba.formats import BlockELLMatrix, CSRMatrix, SparseMatrix
from twell_numba.formats.block_ell import DEFAULT_BLOCK_SIZE
from twell_numba.kernels import block_ell, csr, dense_ffn, twell
from twell_numba.kernels.activation_functions import activation_number
from twell_numba.kernels.twell import float8
from twell_numba.kernels.twell.float8_weights import Float8Weights
from twell_numba.layers.parameter import Float8Parameter, Operand, Parameter, make_parameter

PATHS = ("auto", "dense", "twell", "csr", "block_ell")

# Which paths have an activation, and why not the others.
PATHS_OF_ACTIVATION = {
    "relu": PATHS,
    "silu": ("auto", "dense"),
    "relu2": ("auto", "dense", "twell"),
}
REASON_OF_ACTIVATION = {
    "silu": "SiLU has no exact zeros; `twell sparsify` makes a ReLU model of one with SiLU",
    "relu2": "squared ReLU runs with dense weights alone, and on a GPU on the dense path alone",
}

# How weights may be held, and which paths then compute with them.
PATHS_OF_FORMAT = {
    "dense": ("auto", "dense", "twell"),
    "csr": ("auto", "csr"),
    "block_ell": ("auto", "block_ell"),
}
WEIGHT_FORMATS = tuple(PATHS_OF_FORMAT)
# Of dense weights that are held as 8-bit floats where few rows are read.
FLOAT8_PATHS = ("auto", "twell")

_FAMILIES: dict[str, ModuleType] = {
    "dense": dense_ffn,
    "twell": twell,
    "csr": csr,
    "block_ell": block_ell,
}

# Below this fraction of neurons firing `auto` takes the TwELL path. Measured on 2 cores for D from
# 128 to 768: at 0.09 TwELL was 1.2 to 2.8 times as fast as dense, forward and with backward; both
# were even at 0.12 to 0.16 beside a BLAS with AVX-512, at 0.2 to 0.25 beside one with AVX2.
AUTO_DENSITY = 0.1
# The same on a GPU, where dense products are faster still beside what a sparse row takes. Measured
# on one H200 (M = 16384, F = 5632, bfloat16): for D = 2048 even at 0.0135 forward and 0.0147 with
# backward, for D = 768 at 0.0098 and 0.012. And only for so many multiplications in a dense product
# (M D F): below, the work is over before all of the GPU is busy, and the dense path is fewer
# kernels (M = 2048, D = 128, F = 512: up to four times as fast).
GPU_AUTO_DENSITY, GPU_AUTO_DENSITY_NARROW = 0.0125, 0.01
NARROW = 1024  # D below which the latter holds
GPU_AUTO_SIZE = 1e10
# Few tokens have kernels of their own on a GPU, whatever the size. Measured there (D = 2048,
# F = 5632, bfloat16): even at a density of 0.1 for one token, 0.07 for 4, 0.06 for 8. Other dtypes
# and widths are even earlier: hence only up to 8 tokens, and below 0.093, 0.047 and 0.028.
GPU_FEW_TOKENS = 8
GPU_FEW_TOKENS_DENSITY = 0.28  # divided by the tokens and two more

# Below these fractions of weights stored, a layer held in CSR or block-ELL is faster than the dense
# one. Measured (`twell bench weights`) on 2 cores at D = 512, F = 2048: for one token they are even
# at 0.08 to 0.1 and 0.23; for 1024 tokens at 0.21 to 0.4 and above 0.4, so that one token decides.
CSR_DENSITY = 0.08
BLOCK_ELL_DENSITY = 0.2
DENSITY_OF_FORMAT = {"csr": CSR_DENSITY, "block_ell": BLOCK_ELL_DENSITY}

# `auto` counts what fired once in so many tokens: at every call of a batch, but not for every token
# of a generated text, where counting would cost a tenth of the layer's time.
TOKENS_A_MEASUREMENT = 16
# The path that was taken last is kept until the limit is passed by so much: for another one, work
# that is recorded would be recorded anew, and a gradient that was computed ahead be thrown away.
GPU_KEPT = 1.05

# On a GPU, whether blocks of tokens share neurons is measured once in so many tokens and calls, in
# calls of at least FEWEST_SHARING tokens; it takes 2 to 4 ms. Where they do, the TwELL path can be
# faster at higher densities. That is tried out up to this density (0.044 was the highest at which
# it was even, one H200: see kernels/twell/README.md) and so many entries a row, more than which no
# block can have; the path is then taken up to the density that is reckoned. Tried in vain, a call
# takes up to five times as long as a dense one.
TOKENS_A_MEASUREMENT_OF_SHARING, CALLS_A_MEASUREMENT_OF_SHARING = 2**22, 256
FEWEST_SHARING = 4096
GPU_SHARING_DENSITY, GPU_SHARING_ENTRIES = 0.05, 256


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
        ``dense``, ``twell``, ``csr`` or ``block_ell``: the path that was taken.
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


class RecordedStatistics(NamedTuple):
    """The same on a GPU, not yet waited for.

    Attributes
    ----------
    tokens, neurons : int
    totals : DeviceArray of float64, shape (2,)
        Entries of h that are not 0, and the sum of |h|.
    fired : DeviceArray of bool, shape (F,)
    path : str
    """

    tokens: int
    neurons: int
    totals: Array
    fired: Array
    path: str

    def on_host(self) -> ActivationStatistics:
        """Wait for the GPU and return the numbers."""
        nonzeros, absolute_sum = self.totals.to_numpy()
        return ActivationStatistics(
            self.tokens,
            self.neurons,
            int(nonzeros),
            float(absolute_sum),
            self.fired.to_numpy(),
            self.path,
        )


class AutoState(NamedTuple):
    """What the next call's path and kernels are chosen by.

    Attributes
    ----------
    density : float or None
        Fraction of h that was not 0 when it was last measured; None before.
    unmeasured_tokens : int
        Tokens seen since then.
    learned : LearnedPattern or None
        By which, on a GPU, blocks of tokens share neurons on the path ``twell``, also where that
        path is set; None where they do not.
    sharing_tokens : int or None
        Tokens seen since that was last measured; None before.
    densest : float
        Density up to which ``auto`` takes the path ``twell`` because they share.
    took_twell : bool
        Whether a GPU's last call on ``auto`` took the path ``twell``.
    """

    density: float | None = None
    unmeasured_tokens: int = 0
    learned: Any = None
    sharing_tokens: int | None = None
    densest: float = 0.0
    took_twell: bool = False


class _LastCall(NamedTuple):
    path: str
    # Each family, on each device, has a class of its own, with a shape.
    activations: Any


class FeedForward:
    """What the gated and the two-matrix layer share: all but their weights and their formula.

    Parameters
    ----------
    path : {"auto", "dense", "twell", "csr", "block_ell"}
        One that the weights are held for, see :data:`PATHS_OF_FORMAT`, and that there is for the
        activation, see :data:`PATHS_OF_ACTIVATION`.
    activation : {"relu", "silu", "relu2"}
        f of the layer's formula, see :mod:`twell_numba.kernels.activation_functions`.

    Attributes
    ----------
    activation : str
    auto_state : AutoState
        Changed by calls on the path ``auto`` with dense weights, and on a GPU by those on the path
        ``twell``. Who puts it back to what it was gets the same paths and kernels again, and so the
        same rounding.

    Raises
    ------
    ValueError
        If the weights are not of one shape (F, D) and one format, or the path does not fit them
        or the activation, or there is no such activation.
    TypeError
        If a weight is neither an array, nor a CSRMatrix or BlockELLMatrix.
    """

    operation: ClassVar[str]
    """Name of the operation: ``{operation}_forward`` and ``_backward`` in each kernel family."""
    weight_names: ClassVar[tuple[str, ...]]
    """The attributes that hold the weights, in the order the kernels take them."""

    def __init__(self, path: str, activation: str = "relu") -> None:
        activation_number(activation)
        _require_alike(self.parameters())
        self.activation = activation
        self._require_format(self.weight_format)
        self.path = path
        self._last: _LastCall | None = None
        self._is_measured = True
        self._statistics: ActivationStatistics | None = None
        self._recorded: RecordedStatistics | None = None
        self.auto_state = AutoState()

    @property
    def path(self) -> str:
        """The execution path; may be changed at any time to another of the weights' format."""
        return self._path

    @path.setter
    def path(self, path: str) -> None:
        held = "8-bit floats" if self.is_float8 else self.weight_format
        paths = FLOAT8_PATHS if self.is_float8 else PATHS_OF_FORMAT[held]
        if path not in paths:
            raise ValueError(
                f"FFN path {path!r} given, one of {', '.join(paths)} wanted "
                f"for weights held as {held}; hold_weights changes how they are held"
            )
        paths = PATHS_OF_ACTIVATION[self.activation]
        if path not in paths:
            raise ValueError(
                f"FFN path {path!r} given, one of {', '.join(paths)} wanted for the activation "
                f"{self.activation}: {REASON_OF_ACTIVATION[self.activation]}"
            )
        self._path = path

    @property
    def weight_format(self) -> str:
        """How the weights are held: ``dense``, ``csr`` or ``block_ell``."""
        return _format_of(self.parameters()[0].operand)

    @property
    def block_size(self) -> int | None:
        """The size of the blocks that the weights are held in; None where they are not."""
        weights = self.parameters()[0].operand
        return weights.block_size if isinstance(weights, BlockELLMatrix) else None

    @property
    def weight_density(self) -> float:
        """Fraction of the weights that is not zero; 0 for a layer without neurons."""
        parameters = self.parameters()
        nonzeros = sum(parameter.count_nonzero() for parameter in parameters)
        return nonzeros / max(1, sum(parameter.size for parameter in parameters))

    def hold_weights(self, weight_format: str, block_size: int = DEFAULT_BLOCK_SIZE) -> None:
        """Hold the weights in another format, where zeros are left out.

        The parameters (``gate``, ``up``, ``down``, :meth:`parameters`) are new objects afterwards,
        with values of another shape and no gradient. The path becomes ``auto`` if it no longer
        fits. Nothing changes where the weights are held so already; then stored zeros stay stored.

        Parameters
        ----------
        weight_format : {"dense", "csr", "block_ell"}
        block_size : int
            b of ``block_ell``; at most D and F, or 1 for a layer without neurons.

        Raises
        ------
        ValueError
            If the format is not known, or not for this activation, or the blocks are larger than
            the weights.
        TypeError
            If block_size is no whole number.
        """
        if weight_format not in WEIGHT_FORMATS:
            raise ValueError(
                f"weight format {weight_format!r} given, one of {', '.join(WEIGHT_FORMATS)} wanted"
            )
        self._require_format(weight_format)
        if weight_format == "block_ell":
            _require_block_size(block_size, self.parameters()[0].shape)
        for name in self.weight_names:
            parameter = getattr(self, name)
            weights = _held_as(parameter.operand, weight_format, block_size)
            if weights is not parameter.operand:
                setattr(self, name, make_parameter(parameter.name, weights))
        if self.path not in PATHS_OF_FORMAT[weight_format]:
            self.path = "auto"

    @property
    def is_float8(self) -> bool:
        """Whether weights are held as 8-bit floats, see :meth:`hold_float8`."""
        return any(isinstance(parameter, Float8Parameter) for parameter in self.parameters())

    def hold_float8(self) -> None:
        """Hold as 8-bit floats all dense weights but those that decide which neurons fire.

        For inference: the backward pass is refused. Numbers are rounded, each row to a scale of its
        own; which neurons of this layer fire stays the same. The parameters are new objects, and
        the path becomes ``auto`` if it is ``dense``; ``auto`` is ``twell`` then. On a GPU only the
        rows of neurons that fire are read, at half the bytes of 16-bit weights. The CPU gains
        nothing but memory. ``hold_weights("dense")`` holds the rounded numbers as an array.

        Raises
        ------
        ValueError
            If the weights are held in a sparse format, or the activation is not ReLU.
        """
        if self.activation != "relu":
            raise ValueError(
                f"8-bit floats asked for with the activation {self.activation}, relu wanted: "
                f"{REASON_OF_ACTIVATION[self.activation]}"
            )
        if self.weight_format != "dense":
            raise ValueError(
                f"weights held as {self.weight_format} given, dense ones wanted to be held as "
                "8-bit floats; see hold_weights"
            )
        for name in self.weight_names[1:]:
            parameter = getattr(self, name)
            if not isinstance(parameter, Float8Parameter):
                weights = Float8Weights.from_dense(parameter.value)
                setattr(self, name, Float8Parameter(parameter.name, weights))
        if self.path not in FLOAT8_PATHS:
            self.path = "auto"

    def hold_fastest(self, block_size: int | None = None) -> None:
        """Hold the weights as :func:`fastest_format` says, for inference.

        They stay as they are if the activation is not ReLU: there are no other paths for it. Blocks
        are of the size that the weights are held in already, or 16 (less in a smaller layer), if
        none is given.

        Raises
        ------
        ValueError
            If the blocks are larger than the weights.
        TypeError
            If block_size is no whole number.
        """
        shape = self.parameters()[0].shape
        if block_size is None:
            block_size = self.block_size or min(DEFAULT_BLOCK_SIZE, _largest_block_size(shape))
        _require_block_size(block_size, shape)
        if self.activation != "relu":
            return
        operands = [parameter.operand for parameter in self.parameters()]
        self.hold_weights(fastest_format(operands, block_size), block_size)

    def count_activations(self) -> None:
        """Take the statistics of the last call, of which the activations are then no longer kept.

        On a GPU nothing waits for it: see :meth:`take_recorded_statistics`.
        """
        if self._last is None:
            return
        path, activations = self._last
        self._last = None
        tokens, neurons = activations.shape
        if is_on_gpu(activations):
            family = importlib.import_module(f"{_FAMILIES[path].__name__}.cuda")
            totals, fired = family.activation_statistics_on_gpu(activations)
            self._recorded = RecordedStatistics(tokens, neurons, totals, fired, path)
            self._statistics = None
        else:
            nonzeros, absolute_sum, fired = _FAMILIES[path].activation_statistics(activations)
            self._statistics = ActivationStatistics(
                tokens, neurons, nonzeros, absolute_sum, fired, path
            )

    @property
    def statistics(self) -> ActivationStatistics:
        """Statistics of the last call, computed when first asked for.

        Raises
        ------
        RuntimeError
            If the layer has not been called yet, or nothing is kept of its last call.
        """
        self.count_activations()
        if self._statistics is None and self._recorded is not None:
            self._statistics = self._recorded.on_host()
        if self._statistics is None:
            raise RuntimeError(
                "the FFN's statistics were asked for before its first call, or after one that was "
                "recorded, of which nothing is kept"
            )
        return self._statistics

    def take_recorded_statistics(self) -> "RecordedStatistics":
        """Return the last call's statistics, on the GPU, and keep nothing of that call."""
        self.count_activations()
        assert self._recorded is not None, "asked for after a call on a GPU"
        taken = self._recorded
        self.forget_last_call()
        return taken

    def forget_last_call(self) -> None:
        """Keep nothing of the last call: of one that was recorded, it would keep all memory."""
        self._last = self._statistics = self._recorded = None

    def __call__(
        self, x: Array, l1_scale: float | Array = 0.0
    ) -> tuple[Array, Callable[[Array], Array]]:
        """Return Y (M, D) for X (M, D), and the backward pass.

        The backward pass also adds the gradient of ``l1_scale`` times the sum of |h|. On a GPU the
        scale may be an array of one float32: it is then read when the work is done, which may be
        recorded.
        """
        path = self.next_path(len(x) if is_on_gpu(x) else None)
        parameters = self.parameters()
        # Other families than these two compute with ReLU alone.
        options = {} if self.activation == "relu" else {"activation": self.activation}
        is_float8 = self.is_float8
        family = float8 if is_float8 else _FAMILIES[path]
        forward = getattr(family, f"{self.operation}_forward")
        backward = getattr(_FAMILIES[path], f"{self.operation}_backward")
        weights = [parameter.operand for parameter in parameters]
        may_share = path == "twell" and is_on_gpu(x) and self._has_gate and not is_float8
        sharing = {"learned": self.auto_state.learned} if may_share else {}
        y, activations = forward(x, *weights, **options, **sharing)
        self._last = _LastCall(path, activations)
        if self._is_measured and not _is_recorded(x):
            if is_on_gpu(x) and self._can_share(len(x)):
                self._measure_sharing(activations if may_share else None, x)
            if self._chooses(is_on_gpu(x)):
                self._measure(len(x), took_twell=is_on_gpu(x) and path == "twell")

        def backprop(dy: Array) -> Array:
            gradients = [parameter.grad_buffer() for parameter in parameters]
            return backward(dy, x, *weights, activations, l1_scale, *gradients, **options)

        return y, backprop

    @contextmanager
    def computing_again(self, auto_state: AutoState) -> Iterator[None]:
        """In its ``with`` block, take the paths that calls took with this state.

        They measure nothing, and leave state and statistics as they are.
        """
        newer, last, self.auto_state = self.auto_state, self._last, auto_state
        self._is_measured = False
        try:
            yield
        finally:
            self.auto_state, self._last, self._is_measured = newer, last, True

    def parameters(self) -> list[Parameter]:
        """Return the parameters trained here, in the order the kernels take them."""
        return [getattr(self, name) for name in self.weight_names]

    def next_path(self, tokens_on_gpu: int | None = None) -> str:
        """Return the path that the next call takes.

        Parameters
        ----------
        tokens_on_gpu : int, optional
            M of a call on a GPU; none for one on the CPU.

        Raises
        ------
        ValueError
            If the path ``twell`` is set for squared ReLU, and the call is one on a GPU.
        """
        on_gpu = tokens_on_gpu is not None
        if self.path == "twell" and not has_sparse_path(self.activation, on_gpu=on_gpu):
            raise ValueError(
                "FFN path 'twell' given for the activation relu2 on a GPU, auto or dense wanted: "
                f"{REASON_OF_ACTIVATION['relu2']}"
            )
        if self.path != "auto":
            return self.path
        if self.is_float8:
            return "twell"
        if (held := self.weight_format) != "dense":
            return held
        if not self._chooses(on_gpu):
            return "dense"
        limit = AUTO_DENSITY if tokens_on_gpu is None else self._gpu_limit(tokens_on_gpu)
        density = self.auto_state.density
        return "twell" if density is not None and density < limit else "dense"

    def _chooses(self, on_gpu: bool) -> bool:
        """Return whether the path is chosen by the density of activations."""
        if self.path != "auto" or self.weight_format != "dense" or self.is_float8:
            return False
        return has_sparse_path(self.activation, on_gpu=on_gpu)

    def _require_format(self, weight_format: str) -> None:
        if weight_format != "dense" and self.activation != "relu":
            raise ValueError(
                f"weight format {weight_format!r} given, dense wanted for the activation "
                f"{self.activation}: {REASON_OF_ACTIVATION[self.activation]}"
            )

    @property
    def _has_gate(self) -> bool:
        return self.operation == "gated_ffn"

    def _gpu_limit(self, tokens: int) -> float:
        """Return the density below which ``auto`` takes the path ``twell`` on a GPU."""
        neurons, width = self.parameters()[0].shape
        limit = _gpu_auto_density(tokens, neurons, width)
        if limit > 0 and self._can_share(tokens):
            limit = max(limit, self._densest_sharing)
        return limit * GPU_KEPT if self.auto_state.took_twell else limit

    def _can_share(self, tokens: int) -> bool:
        """Return whether there are kernels by which blocks of so many tokens share neurons."""
        if tokens < FEWEST_SHARING or not self._has_gate or self.weight_format != "dense":
            return False
        family = importlib.import_module(f"{twell.__name__}.cuda")
        return bool(family.can_share(self.parameters()[0].operand, tokens))

    @property
    def _densest_sharing(self) -> float:
        """Density up to which blocks of tokens share neurons, or it has to be tried out."""
        state, neurons = self.auto_state, self.parameters()[0].shape[0]
        densest = 0.0 if state.learned is None else state.densest
        if state.sharing_tokens is not None:
            return densest
        return max(densest, min(GPU_SHARING_DENSITY, GPU_SHARING_ENTRIES / neurons))

    def _measure_sharing(self, activations: Any, x: Array) -> None:
        """Find out now and then whether blocks of tokens are to share neurons in the next call.

        Without activations, after a call that could not share any, only tokens are counted.
        """
        tokens, width = x.shape
        self.count_sharing_tokens(tokens)
        if self.auto_state.sharing_tokens is None and activations is not None:
            family = importlib.import_module(f"{twell.__name__}.cuda")
            learned, densest = family.learn_to_share(activations, width, self.auto_state.learned)
            self.auto_state = self.auto_state._replace(
                learned=learned, sharing_tokens=0, densest=densest
            )

    def measures_sharing(self, tokens: int) -> bool:
        """Return whether a call on the path ``twell`` of a GPU is to measure sharing."""
        return self.auto_state.sharing_tokens is None and self._can_share(tokens)

    def measure_sharing_anew(self) -> None:
        """Let the next call that can measure whether blocks of tokens share neurons."""
        self.auto_state = self.auto_state._replace(sharing_tokens=None)

    def count_sharing_tokens(self, tokens: int) -> None:
        """Count the tokens of a call; enough of them, and sharing is to be measured anew.

        Calls count for themselves, but for those that are replays of a recording.
        """
        seen = self.auto_state.sharing_tokens
        if seen is not None:
            seen += tokens
            calls = CALLS_A_MEASUREMENT_OF_SHARING
            is_due = seen >= max(TOKENS_A_MEASUREMENT_OF_SHARING, calls * tokens)
            self.auto_state = self.auto_state._replace(sharing_tokens=None if is_due else seen)

    def _measure(self, tokens: int, *, took_twell: bool) -> None:
        density, unmeasured_tokens, *_ = self.auto_state
        unmeasured_tokens += tokens
        if tokens and (density is None or unmeasured_tokens >= TOKENS_A_MEASUREMENT):
            density, unmeasured_tokens = self.statistics.density, 0
        self.auto_state = self.auto_state._replace(
            density=density, unmeasured_tokens=unmeasured_tokens, took_twell=took_twell
        )


class GatedFFN(FeedForward):
    """Y = (f(X Wg^T) * (X Wu^T)) Wd.

    Parameters
    ----------
    prefix : str
        Of the weights' names in a checkpoint: ``{prefix}.gate_proj.weight`` and so on.
    gate, up, down : array, CSRMatrix or BlockELLMatrix, shape (F, D)
        Neuron-major: row j belongs to neuron j. All of one format, held without a copy.
    path : {"auto", "dense", "twell", "csr", "block_ell"}
    activation : {"relu", "silu", "relu2"}
        f.
    """

    operation = "gated_ffn"
    weight_names = ("gate", "up", "down")

    def __init__(
        self,
        prefix: str,
        gate: Operand,
        up: Operand,
        down: Operand,
        path: str = "auto",
        activation: str = "relu",
    ) -> None:
        self.gate = make_parameter(f"{prefix}.gate_proj.weight", gate)
        self.up = make_parameter(f"{prefix}.up_proj.weight", up)
        self.down = make_parameter(f"{prefix}.down_proj.weight", down)
        super().__init__(path, activation)


class TwoMatrixFFN(FeedForward):
    """Y = f(X Wu^T) Wd.

    Parameters
    ----------
    prefix : str
        Of the weights' names in a checkpoint: ``{prefix}.up_proj.weight`` and so on.
    up, down : array, CSRMatrix or BlockELLMatrix, shape (F, D)
        Neuron-major: row j belongs to neuron j. Both of one format, held without a copy.
    path : {"auto", "dense", "twell", "csr", "block_ell"}
    activation : {"relu", "silu", "relu2"}
        f.
    """

    operation = "ffn"
    weight_names = ("up", "down")

    def __init__(
        self,
        prefix: str,
        up: Operand,
        down: Operand,
        path: str = "auto",
        activation: str = "relu",
    ) -> None:
        self.up = make_parameter(f"{prefix}.up_proj.weight", up)
        self.down = make_parameter(f"{prefix}.down_proj.weight", down)
        super().__init__(path, activation)


def has_sparse_path(activation: str, *, on_gpu: bool) -> bool:
    """Return whether an activation has the path ``twell``, on a GPU or on the CPU."""
    has_it = "twell" in PATHS_OF_ACTIVATION[activation]
    return has_it and not (on_gpu and activation == "relu2")


def fastest_format(weights: list[Operand], block_size: int = DEFAULT_BLOCK_SIZE) -> str:
    """Return the format in which a layer with these weights runs fastest.

    A sparse path's time grows with the weights it stores, and reaches that of the dense path at
    :data:`CSR_DENSITY` or :data:`BLOCK_ELL_DENSITY`. Of the formats that stay below, the one that
    stays below by the larger factor is taken: scattered weights go to CSR, weights that fill the
    blocks they lie in to block-ELL.

    Parameters
    ----------
    weights : list of ndarray or sparse matrix, each of shape (F, D)
    block_size : int
        b of the block-ELL format that is considered.
    """
    weights = [w.to_dense() if isinstance(w, Float8Weights) else w for w in weights]
    size = sum(weight.shape[0] * weight.shape[1] for weight in weights)
    if size == 0:
        return "dense"
    density = sum(_count_nonzero(weight) for weight in weights) / size
    if density >= max(CSR_DENSITY, BLOCK_ELL_DENSITY):
        return "dense"  # blocks can only store more
    stored = sum(stored_in_blocks(weight, block_size) for weight in weights)
    times = {
        "block_ell": stored / size / BLOCK_ELL_DENSITY,
        "csr": density / CSR_DENSITY,
        "dense": 1.0,
    }
    return min(times, key=times.__getitem__)


def stored_in_blocks(weights: Operand, block_size: int) -> int:
    """Return how many elements lie in b x b blocks that hold a nonzero: what block-ELL stores."""
    if isinstance(weights, BlockELLMatrix) and weights.block_size == block_size:
        return weights.nnz
    if isinstance(weights, SparseMatrix):
        return BlockELLMatrix.from_sparse(weights, block_size=block_size).nnz
    rows, columns = (np.arange(0, size, block_size) for size in weights.shape)
    filled = np.logical_or.reduceat(weights != 0, rows, axis=0)
    filled = np.logical_or.reduceat(filled, columns, axis=1)
    heights = np.diff(rows, append=weights.shape[0])
    widths = np.diff(columns, append=weights.shape[1])
    return int(heights @ filled @ widths)


def _count_nonzero(weights: Operand) -> int:
    if isinstance(weights, SparseMatrix):
        return weights.count_nonzero()
    return int(np.count_nonzero(to_host(weights)))


def _format_of(weights: Operand) -> str:
    return weights.format_name if isinstance(weights, SparseMatrix) else "dense"


def _held_as(weights: Operand, weight_format: str, block_size: int) -> Operand:
    """Return weights in another format; the same object where they are in it already."""
    if isinstance(weights, Float8Weights):
        weights = weights.to_dense()
    if _format_of(weights) == weight_format and not (
        isinstance(weights, BlockELLMatrix) and weights.block_size != block_size
    ):
        return weights
    if weight_format == "dense":
        assert isinstance(weights, SparseMatrix)
        return weights.to_dense()
    convert = "from_sparse" if isinstance(weights, SparseMatrix) else "from_dense"
    if weight_format == "csr":
        return getattr(CSRMatrix, convert)(weights)
    return getattr(BlockELLMatrix, convert)(weights, block_size=block_size)


def _largest_block_size(shape: tuple[int, ...]) -> int:
    return max(1, min(shape))


def _require_block_size(block_size: int, shape: tuple[int, ...]) -> None:
    try:
        operator.index(block_size)
    except TypeError:
        raise TypeError(f"block_size {block_size!r} given, a whole number wanted") from None
    largest = _largest_block_size(shape)
    if not 1 <= block_size <= largest:
        raise ValueError(
            f"block_size {block_size} given, 1 to {largest} wanted for weights of shape {shape}"
        )


def _require_alike(parameters: list[Parameter]) -> None:
    """Refuse weights of several shapes, formats or block sizes."""
    first = parameters[0]
    for parameter in parameters:
        if len(parameter.shape) != 2:
            raise ValueError(f"{parameter.name} of shape {parameter.shape} given, (F, D) wanted")
        if parameter.shape != first.shape:
            raise ValueError(
                f"{parameter.name} of shape {parameter.shape} given beside "
                f"{first.name} of shape {first.shape}; all FFN weights are (F, D), "
                "the down projection too"
            )
        if _kind(parameter.operand) != _kind(first.operand):
            raise ValueError(
                f"{parameter.name} held as {_kind(parameter.operand)} given beside {first.name} "
                f"held as {_kind(first.operand)}; all FFN weights of a layer are held alike"
            )


def _gpu_auto_density(tokens: int, neurons: int, width: int) -> float:
    """Return the density below which ``auto`` takes the TwELL path on a GPU."""
    if tokens <= GPU_FEW_TOKENS:
        return GPU_FEW_TOKENS_DENSITY / (tokens + 2)
    if tokens * neurons * width < GPU_AUTO_SIZE:
        return 0.0
    return GPU_AUTO_DENSITY_NARROW if width < NARROW else GPU_AUTO_DENSITY


def _is_recorded(x: Array) -> bool:
    """Whether work with x is recorded, so that nothing of it can be measured yet."""
    return is_on_gpu(x) and x.stream.capture is not None


def _kind(weights: Operand) -> str:
    if isinstance(weights, BlockELLMatrix):
        return f"block_ell with blocks of {weights.block_size}"
    return _format_of(weights)
