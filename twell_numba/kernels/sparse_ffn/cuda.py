"""Feedforward layers with sparse weights of any format on a GPU.

Gated:       g = x Wg^T,  u = x Wu^T,  h = relu(g) * u,  y = h Wd
Two-matrix:  h = relu(x Wu^T),  y = h Wd

The formulas are those of :mod:`twell_numba.kernels.sparse_ffn.reference`. All is computed of
transposes, [F, M] and [D, M], so that the threads of a warp take tokens that lie side by side: then
products with a sparse matrix from the left read whole rows. g, u, h and their gradients are rounded
to x's dtype, as in the dense layers; sums are in float32 or wider. g, u and h are computed again in
the backward pass; nothing of F x M is kept between the two. A format may compute whole layers in
its own way instead (see :class:`WholeLayers`).
"""

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from twell_numba.device.gpu import DeviceArray, empty, kernel
from twell_numba.device.gpu.language import (
    block_sum,
    cuda,
    global_thread,
    grid_threads,
    load,
    number,
    store,
    types,
)
from twell_numba.kernels.checks import require_shape
from twell_numba.kernels.cuda_scalars import scalar_on_gpu
from twell_numba.kernels.cuda_statistics import add_statistics as add_statistics
from twell_numba.kernels.cuda_statistics import statistics_on_gpu
from twell_numba.kernels.cuda_sums import add_into
from twell_numba.kernels.device_checks import arithmetic_dtype, float_array, float_arrays
from twell_numba.kernels.transpose.cuda import transpose


@dataclass(frozen=True, slots=True)
class DeviceSparseActivations:
    """What was counted in h, on a GPU.

    Attributes
    ----------
    shape : tuple of int
        M and F.
    neuron_nonzeros : DeviceArray of int64, shape (F,)
        Entries of each neuron's h that are not 0.
    neuron_absolute_sums : DeviceArray of float64, shape (F,)
        Sum of |h| of each neuron.
    fired : DeviceArray of bool, shape (F,)
        Neurons that were not 0 for at least one token.
    kept : tuple of three DeviceArray, shape (M, F), or None
        g, u and h, where the backward pass does not compute them again.
    """

    is_on_gpu: ClassVar[bool] = True

    shape: tuple[int, int]
    neuron_nonzeros: DeviceArray
    neuron_absolute_sums: DeviceArray
    fired: DeviceArray
    kept: tuple[DeviceArray, DeviceArray, DeviceArray] | None = None


@dataclass(frozen=True)
class WholeLayers:
    """Layers that a format computes in its own way, for the arrays it has kernels for.

    Attributes
    ----------
    fit : callable
        ``fit(x, *weights)``: whether it can, for arguments that are right.
    forward : callable
        ``forward(x, gate, up, down)`` returns y and the activations; ``gate`` may be None.
    backward : callable
        ``backward(dy, x, gate, up, down, activations, l1_scale, gate_grad, up_grad, down_grad)``
        returns dx and adds the gradients in place; for activations with ``kept``.
    """

    fit: Callable[..., bool]
    forward: Callable[..., tuple[DeviceArray, DeviceSparseActivations]]
    backward: Callable[..., DeviceArray]


@dataclass(frozen=True)
class Products:
    """What a format offers to the layers of which it holds the weights.

    Attributes
    ----------
    wanted : type
        Of the weights.
    values : callable
        ``values(W)`` returns the array of the stored values.
    multiply, multiply_transposed : callable
        ``multiply(W, X, out)`` overwrites ``out`` with W @ X, ``multiply_transposed(W, X, out)``
        with W.T @ X; ``out`` may be of another dtype than X.
    add_sampled : callable
        ``add_sampled(W, left, right, gradient)`` adds ``left[j] . right[d]`` at each stored (j, d).
    whole_layers : WholeLayers, optional
        Taken instead of the products where it fits.
    """

    wanted: type[Any]
    values: Callable[[Any], DeviceArray]
    multiply: Callable[[Any, DeviceArray, DeviceArray], None]
    multiply_transposed: Callable[[Any, DeviceArray, DeviceArray], None]
    add_sampled: Callable[[Any, DeviceArray, DeviceArray, DeviceArray], None]
    whole_layers: WholeLayers | None = None

    def matmul(self, W: Any, X: DeviceArray) -> DeviceArray:
        """Return W @ X, of X's dtype."""
        out = empty((W.shape[0], X.shape[1]), X.dtype, X.stream)
        self.multiply(W, X, out)
        return out

    def transposed_matmul(self, W: Any, X: DeviceArray) -> DeviceArray:
        """Return W.T @ X, of the dtype in which it is added up."""
        out = empty((W.shape[1], X.shape[1]), arithmetic_dtype(X.dtype), X.stream)
        self.multiply_transposed(W, X, out)
        return out

    def layers_for(self, x: DeviceArray, *weights: Any) -> WholeLayers | None:
        """Return the format's own layers, where it has them for these arrays."""
        whole = self.whole_layers
        return whole if whole is not None and whole.fit(x, *weights) else None


def activation_statistics(activations: DeviceSparseActivations) -> tuple[int, float, np.ndarray]:
    """Return how sparse the activations are, as counted in the forward pass; waits for the GPU.

    Returns
    -------
    nonzeros : int
        Entries with h != 0.
    absolute_sum : float
        Sum of |h|.
    fired : ndarray of bool, shape (F,)
        Whether the neuron's h was not 0 for at least one row.
    """
    totals, fired = activation_statistics_on_gpu(activations)
    nonzeros, absolute_sum = totals.to_numpy()
    return int(nonzeros), float(absolute_sum), fired.to_numpy()


def activation_statistics_on_gpu(
    activations: DeviceSparseActivations,
) -> tuple[DeviceArray, DeviceArray]:
    """Return what :func:`activation_statistics` does, without waiting.

    Returns
    -------
    totals : DeviceArray of float64, shape (2,)
        The count of h != 0 and the sum of |h|.
    fired : DeviceArray of bool, shape (F,)
    """
    totals = statistics_on_gpu(activations.neuron_nonzeros, activations.neuron_absolute_sums)
    return totals, activations.fired


def gated_ffn_forward(
    x: DeviceArray, gate: Any, up: Any, down: Any, products: Products
) -> tuple[DeviceArray, DeviceSparseActivations]:
    """Return y (M, D) and the activations."""
    _require_weights(products, x, gate_weight=gate, up_weight=up, down_weight=down)
    whole = products.layers_for(x, gate, up, down)
    if whole is not None:
        return whole.forward(x, gate, up, down)
    columns = transpose(x)
    gate_values, up_values = products.matmul(gate, columns), products.matmul(up, columns)
    hidden, activations = _hidden(gate_values, up_values)
    return transpose(products.transposed_matmul(down, hidden), x.dtype), activations


def gated_ffn_backward(
    dy: DeviceArray,
    x: DeviceArray,
    gate: Any,
    up: Any,
    down: Any,
    activations: DeviceSparseActivations,
    l1_scale: float | DeviceArray,
    gate_grad: DeviceArray,
    up_grad: DeviceArray,
    down_grad: DeviceArray,
    products: Products,
) -> DeviceArray:
    """Return dx (M, D) and add the gradients of the weights' stored values in place."""
    _require_weights(products, x, gate_weight=gate, up_weight=up, down_weight=down)
    _require_backward(
        products,
        dy,
        x,
        activations,
        gate_grad=(gate, gate_grad),
        up_grad=(up, up_grad),
        down_grad=(down, down_grad),
    )
    whole = products.layers_for(x, gate, up, down)
    if whole is not None and activations.kept is not None:
        return whole.backward(
            dy, x, gate, up, down, activations, l1_scale, gate_grad, up_grad, down_grad
        )
    columns, d_columns = transpose(x), transpose(dy)
    gate_values, up_values = products.matmul(gate, columns), products.matmul(up, columns)
    hidden = _hidden(gate_values, up_values)[0]
    d_hidden = products.matmul(down, d_columns)
    products.add_sampled(down, hidden, d_columns, down_grad)
    _differentiate(d_hidden, gate_values, up_values, l1_scale)
    products.add_sampled(up, up_values, columns, up_grad)
    products.add_sampled(gate, gate_values, columns, gate_grad)
    dx = products.transposed_matmul(up, up_values)
    add_into(dx, products.transposed_matmul(gate, gate_values))
    return transpose(dx, x.dtype)


def ffn_forward(
    x: DeviceArray, up: Any, down: Any, products: Products
) -> tuple[DeviceArray, DeviceSparseActivations]:
    """Return y (M, D) and the activations."""
    _require_weights(products, x, up_weight=up, down_weight=down)
    whole = products.layers_for(x, up, down)
    if whole is not None:
        return whole.forward(x, None, up, down)
    columns = transpose(x)
    hidden, activations = _hidden(products.matmul(up, columns), None)
    return transpose(products.transposed_matmul(down, hidden), x.dtype), activations


def ffn_backward(
    dy: DeviceArray,
    x: DeviceArray,
    up: Any,
    down: Any,
    activations: DeviceSparseActivations,
    l1_scale: float | DeviceArray,
    up_grad: DeviceArray,
    down_grad: DeviceArray,
    products: Products,
) -> DeviceArray:
    """Return dx (M, D) and add the gradients of the weights' stored values in place."""
    _require_weights(products, x, up_weight=up, down_weight=down)
    _require_backward(
        products, dy, x, activations, up_grad=(up, up_grad), down_grad=(down, down_grad)
    )
    whole = products.layers_for(x, up, down)
    if whole is not None and activations.kept is not None:
        return whole.backward(
            dy, x, None, up, down, activations, l1_scale, None, up_grad, down_grad
        )
    columns, d_columns = transpose(x), transpose(dy)
    up_values = products.matmul(up, columns)
    hidden = _hidden(up_values, None)[0]
    d_hidden = products.matmul(down, d_columns)
    products.add_sampled(down, hidden, d_columns, down_grad)
    _differentiate(d_hidden, up_values, None, l1_scale)
    products.add_sampled(up, up_values, columns, up_grad)
    return transpose(products.transposed_matmul(up, up_values), x.dtype)


def _hidden(
    gate_values: DeviceArray, up_values: DeviceArray | None
) -> tuple[DeviceArray, DeviceSparseActivations]:
    """Return h (F, M), and what was counted in it."""
    (neurons, tokens), stream = gate_values.shape, gate_values.stream
    hidden = empty(gate_values.shape, gate_values.dtype, stream)
    nonzeros = empty(neurons, np.int64, stream)
    absolute_sums = empty(neurons, np.float64, stream)
    fired = empty(neurons, np.bool_, stream)
    gated = int(up_values is not None)
    up_values = gate_values if up_values is None else up_values
    statistics = (nonzeros, absolute_sums, fired)
    _gated_relu(neurons, gate_values, up_values, hidden, *statistics, neurons, tokens, gated)
    return hidden, DeviceSparseActivations((tokens, neurons), *statistics)


def _differentiate(
    d_hidden: DeviceArray,
    gate_values: DeviceArray,
    up_values: DeviceArray | None,
    l1_scale: float | DeviceArray,
) -> None:
    """Overwrite g with dg, and u with du."""
    gated = int(up_values is not None)
    up_values = gate_values if up_values is None else up_values
    scale = scalar_on_gpu("l1_scale", l1_scale, d_hidden.dtype, d_hidden)
    _gated_relu_backward(
        _gated_relu_backward.blocks(d_hidden.size),
        d_hidden, gate_values, up_values, scale, d_hidden.size, gated,
    )  # fmt: skip


def _require_weights(products: Products, x: DeviceArray, **weights: Any) -> None:
    for name, weight in weights.items():
        if not isinstance(weight, products.wanted):
            raise TypeError(
                f"{name} of type {type(weight).__name__} given, {products.wanted.__name__} wanted"
            )
    float_arrays(x=x, **{name: products.values(weight) for name, weight in weights.items()})
    require_shape("x", x, ("M", "D"))  # type: ignore[arg-type]
    shape = (next(iter(weights.values())).shape[0], x.shape[1])
    for name, weight in weights.items():
        if weight.shape != shape:
            raise ValueError(f"{name} of shape {weight.shape} given, shape {shape} wanted")
    sizes = {name: getattr(weight, "block_size", 0) for name, weight in weights.items()}
    if len(set(sizes.values())) > 1:
        given = ", ".join(f"{name} in blocks of {size}" for name, size in sizes.items())
        raise ValueError(f"{given} given, one block size for all wanted")


def _require_backward(
    products: Products,
    dy: DeviceArray,
    x: DeviceArray,
    activations: Any,
    **gradients: tuple[Any, DeviceArray],
) -> None:
    float_arrays(x=x, dy=dy)
    require_shape("dy", dy, x.shape)  # type: ignore[arg-type]
    first_weight, first = next(iter(gradients.values()))
    if not isinstance(activations, DeviceSparseActivations):
        raise TypeError(
            f"activations of type {type(activations).__name__} given, those that the forward pass "
            "returned wanted"
        )
    wanted = (x.shape[0], first_weight.shape[0])
    if activations.shape != wanted:
        raise ValueError(
            f"activations of shape {activations.shape} given, {wanted} "
            "wanted: those that the forward pass returned for this x"
        )
    wide = arithmetic_dtype(x.dtype)
    dtype = wide if getattr(first, "dtype", None) == wide else x.dtype
    for name, (weight, gradient) in gradients.items():
        float_array(name, gradient, dtype, x)
        require_shape(name, gradient, products.values(weight).shape)  # type: ignore[arg-type]
    for (_, one), (_, other) in itertools.combinations(gradients.values(), 2):
        if one.pointer == other.pointer and one.size:
            raise ValueError(
                f"one array given for several of {', '.join(gradients)}, one each wanted"
            )


@kernel()
def _gated_relu(gate, up, hidden, nonzeros, absolute_sums, fired, neurons, tokens, gated):
    neuron = types.int64(cuda.blockIdx.x)
    while neuron < neurons:
        count = 0
        total = types.float64(0)
        m = types.int64(cuda.threadIdx.x)
        while m < tokens:
            value = load(gate, neuron * tokens + m)
            if value <= 0:
                value = number(gate, 0)
            elif gated != 0:
                value *= load(up, neuron * tokens + m)
            store(hidden, neuron * tokens + m, value)
            if value != 0:
                count += 1
            total += abs(value)
            m += cuda.blockDim.x
        count_of_neuron = block_sum(count)
        total_of_neuron = block_sum(total)
        if cuda.threadIdx.x == 0:
            store(nonzeros, neuron, count_of_neuron)
            store(absolute_sums, neuron, total_of_neuron)
            store(fired, neuron, types.int64(count_of_neuron != 0))
        neuron += cuda.gridDim.x


@kernel()
def _gated_relu_backward(d_hidden, gate, up, l1_scale, size, gated):
    scale = number(gate, load(l1_scale, 0))
    i = global_thread()
    while i < size:
        gate_value = load(gate, i)
        d_gate = number(gate, 0)
        d_up = number(gate, 0)
        if not gate_value <= 0:
            hidden = gate_value
            if gated != 0:
                hidden *= load(up, i)
            gradient = load(d_hidden, i)
            if hidden > 0:
                gradient += scale
            elif hidden < 0:
                gradient -= scale
            elif hidden != 0:
                gradient += hidden  # NaN
            d_gate = gradient
            if gated != 0:
                d_gate = gradient * load(up, i)
                d_up = gradient * gate_value
        if gated != 0:
            store(up, i, d_up)
        store(gate, i, d_gate)
        i += grid_threads()
