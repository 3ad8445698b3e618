"""Dense feedforward layers on a GPU: the path to take while activations are not sparse.

    gated:       g = x Wg^T,  u = x Wu^T,  h = relu(g) * u,  y = h Wd
    two-matrix:  h = relu(x Wu^T),  y = h Wd

with x, y (M, D) and weights (F, D). Bound by the products, 3 (or 2) forward and 6 (or 4) backward,
which are the library's (see :mod:`twell_numba.device.gpu.gemm`); what lies between two of them is
one kernel. The statistics are added up in float64 over rows and columns in an order that depends on
the shape alone: the same bits in every run, on every GPU.
"""

from typing import NamedTuple

import numpy as np

from twell_numba.device.gpu import DeviceArray, Kernel, empty, kernel
from twell_numba.device.gpu.gemm import matmul
from twell_numba.device.gpu.language import (
    arithmetic_type,
    block_sum,
    cuda,
    global_thread,
    grid_threads,
    load,
    number,
    store,
    types,
)
from twell_numba.kernels.device_checks import arithmetic_dtype, float_arrays
from twell_numba.kernels.device_ffn_checks import backward_arrays, forward_arrays
from twell_numba.kernels.ffn_checks import l1_scale_input

# Rows of a column that one thread counts: at least, and at most so many chunks of them.
FEWEST_ROWS = 32
MOST_CHUNKS = 64
# Entries that a thread loads before it writes any: one at a time leaves the memory waiting.
AT_ONCE = 4


class DenseActivations(NamedTuple):
    """The activations of a dense forward pass, each (M, F).

    ``up`` is None in a two-matrix layer, where ``pattern`` is x Wu^T; in a gated layer ``pattern``
    is x Wg^T. ``hidden`` is h.
    """

    pattern: DeviceArray
    up: DeviceArray | None
    hidden: DeviceArray

    @property
    def shape(self) -> tuple[int, int]:
        """M and F."""
        rows, neurons = self.hidden.shape
        return rows, neurons


def gated_ffn_forward(
    x: DeviceArray, gate_weight: DeviceArray, up_weight: DeviceArray, down_weight: DeviceArray
) -> tuple[DeviceArray, DenseActivations]:
    """Compute y = (relu(x Wg^T) * (x Wu^T)) Wd.

    Parameters
    ----------
    x : DeviceArray of floats, shape (M, D)
    gate_weight, up_weight, down_weight : DeviceArray, shape (F, D)
        Neuron-major: row j belongs to neuron j. Of x's dtype.

    Returns
    -------
    y : DeviceArray, shape (M, D)
    activations : DenseActivations
        What :func:`gated_ffn_backward` needs.

    Raises
    ------
    TypeError
        If the dtypes differ or are not floats.
    ValueError
        If the shapes do not fit together, or the arrays are on different GPUs.
    """
    forward_arrays(x=x, gate_weight=gate_weight, up_weight=up_weight, down_weight=down_weight)
    gate = matmul(x, gate_weight, transpose_b=True)
    up = matmul(x, up_weight, transpose_b=True)
    hidden = empty(gate.shape, x.dtype, x.stream)
    _gated_relu(_blocks(_gated_relu, gate), gate, up, hidden, gate.size)
    return matmul(hidden, down_weight), DenseActivations(gate, up, hidden)


def gated_ffn_backward(
    dy: DeviceArray,
    x: DeviceArray,
    gate_weight: DeviceArray,
    up_weight: DeviceArray,
    down_weight: DeviceArray,
    activations: DenseActivations,
    l1_scale: float,
    gate_grad: DeviceArray,
    up_grad: DeviceArray,
    down_grad: DeviceArray,
) -> DeviceArray:
    """Differentiate :func:`gated_ffn_forward`.

    Parameters
    ----------
    dy : DeviceArray, shape (M, D)
    x, gate_weight, up_weight, down_weight
        As given to the forward pass.
    activations : DenseActivations
        From the forward pass.
    l1_scale : float
        dh grows by ``l1_scale * sign(h)``; lambda / (L M) for the L1 term of the loss.
    gate_grad, up_grad, down_grad : DeviceArray, shape (F, D)
        Of x's dtype, or float32 for x in 16 bits. Changed in place: the gradients are added.

    Returns
    -------
    dx : DeviceArray, shape (M, D)

    Raises
    ------
    TypeError, ValueError
        As :func:`gated_ffn_forward`; also if the activations are not of this x, or gradients share
        memory.
    """
    _, _, neurons = forward_arrays(
        x=x, gate_weight=gate_weight, up_weight=up_weight, down_weight=down_weight
    )
    backward_arrays(
        dy, x, neurons, activations, DenseActivations,
        gate_grad=gate_grad, up_grad=up_grad, down_grad=down_grad,
    )  # fmt: skip
    gate, up, hidden = activations
    assert up is not None, "activations of a gated layer wanted"
    scale = l1_scale_input(l1_scale, arithmetic_dtype(x.dtype))
    d_up = matmul(dy, down_weight, transpose_b=True)
    d_gate = empty(gate.shape, x.dtype, x.stream)
    _gated_relu_backward(
        _blocks(_gated_relu_backward, gate), d_up, gate, up, hidden, scale, d_gate, gate.size
    )
    dx = matmul(d_up, up_weight)
    matmul(d_gate, gate_weight, dx, accumulate=True)
    matmul(hidden, dy, down_grad, transpose_a=True, accumulate=True)
    matmul(d_up, x, up_grad, transpose_a=True, accumulate=True)
    matmul(d_gate, x, gate_grad, transpose_a=True, accumulate=True)
    return dx


def ffn_forward(
    x: DeviceArray, up_weight: DeviceArray, down_weight: DeviceArray
) -> tuple[DeviceArray, DenseActivations]:
    """Compute y = relu(x Wu^T) Wd; parameters and returns as :func:`gated_ffn_forward`."""
    forward_arrays(x=x, up_weight=up_weight, down_weight=down_weight)
    up = matmul(x, up_weight, transpose_b=True)
    hidden = empty(up.shape, x.dtype, x.stream)
    _relu(_blocks(_relu, up), up, hidden, up.size)
    return matmul(hidden, down_weight), DenseActivations(up, None, hidden)


def ffn_backward(
    dy: DeviceArray,
    x: DeviceArray,
    up_weight: DeviceArray,
    down_weight: DeviceArray,
    activations: DenseActivations,
    l1_scale: float,
    up_grad: DeviceArray,
    down_grad: DeviceArray,
) -> DeviceArray:
    """Differentiate :func:`ffn_forward`; parameters and returns as :func:`gated_ffn_backward`."""
    _, _, neurons = forward_arrays(x=x, up_weight=up_weight, down_weight=down_weight)
    backward_arrays(
        dy, x, neurons, activations, DenseActivations, up_grad=up_grad, down_grad=down_grad
    )
    up, _, hidden = activations
    scale = l1_scale_input(l1_scale, arithmetic_dtype(x.dtype))
    d_up = matmul(dy, down_weight, transpose_b=True)
    _relu_backward(_blocks(_relu_backward, up), d_up, up, scale, up.size)
    matmul(hidden, dy, down_grad, transpose_a=True, accumulate=True)
    matmul(d_up, x, up_grad, transpose_a=True, accumulate=True)
    return matmul(d_up, up_weight)


def activation_statistics(activations: DenseActivations) -> tuple[int, float, np.ndarray]:
    """Measure how sparse the activations are; waits for the GPU.

    Returns
    -------
    nonzeros : int
        Entries with h != 0.
    absolute_sum : float
        Sum of |h|, in float64.
    fired : ndarray of bool, shape (F,)
        Whether the neuron's h was not 0 for at least one row.
    """
    totals, fired = activation_statistics_on_gpu(activations)
    nonzeros, absolute_sum = totals.to_numpy()
    return int(nonzeros), float(absolute_sum), fired.to_numpy()


def activation_statistics_on_gpu(activations: DenseActivations) -> tuple[DeviceArray, DeviceArray]:
    """Return what :func:`activation_statistics` does, without waiting.

    Returns
    -------
    totals : DeviceArray of float64, shape (2,)
        The count of h != 0 and the sum of |h|.
    fired : DeviceArray of bool, shape (F,)
    """
    hidden = activations.hidden
    float_arrays(hidden=hidden)
    rows, neurons = hidden.shape
    chunk_rows = max(FEWEST_ROWS, -(-rows // MOST_CHUNKS))
    chunks = -(-rows // chunk_rows)
    partial = empty((2, chunks, neurons), np.float64, hidden.stream)
    by_neuron = empty((2, neurons), np.float64, hidden.stream)
    fired = empty(neurons, np.bool_, hidden.stream)
    totals = empty(2, np.float64, hidden.stream)
    _count_chunks(
        _count_chunks.blocks(chunks * neurons), hidden, partial, rows, neurons, chunk_rows
    )
    _count_neurons(_count_neurons.blocks(neurons), partial, by_neuron, fired, chunks, neurons)
    _count_all(1, by_neuron, totals, neurons)
    return totals, fired


def _blocks(elementwise: Kernel, array: DeviceArray) -> int:
    return elementwise.blocks(-(-array.size // AT_ONCE))


@kernel()
def _gated_relu(gate, up, hidden, size):
    gates = cuda.local.array(AT_ONCE, arithmetic_type(gate))
    ups = cuda.local.array(AT_ONCE, arithmetic_type(gate))
    step = types.int64(cuda.blockDim.x)
    first = cuda.blockIdx.x * step * AT_ONCE + cuda.threadIdx.x
    while first < size:
        for n in range(AT_ONCE):
            i = min(first + n * step, size - 1)
            gates[n] = load(gate, i)
            ups[n] = load(up, i)
        for n in range(AT_ONCE):
            if first + n * step < size:
                value = number(hidden, 0)
                if not gates[n] <= 0:  # NaN is kept
                    value = gates[n] * ups[n]
                store(hidden, first + n * step, value)
        first += cuda.gridDim.x * step * AT_ONCE


@kernel()
def _gated_relu_backward(d_hidden, gate, up, hidden, l1_scale, d_gate, size):
    """Write d_gate, and overwrite d_hidden with d_up."""
    gates = cuda.local.array(AT_ONCE, arithmetic_type(gate))
    ups = cuda.local.array(AT_ONCE, arithmetic_type(gate))
    gradients = cuda.local.array(AT_ONCE, arithmetic_type(gate))
    step = types.int64(cuda.blockDim.x)
    first = cuda.blockIdx.x * step * AT_ONCE + cuda.threadIdx.x
    while first < size:
        for n in range(AT_ONCE):
            i = min(first + n * step, size - 1)
            gates[n] = load(gate, i)
            ups[n] = load(up, i)
            gradients[n] = load(d_hidden, i)
            if l1_scale != 0:
                h = load(hidden, i)
                sign = h  # of 0 and NaN
                if h > 0:
                    sign = number(gate, 1)
                elif h < 0:
                    sign = number(gate, -1)
                gradients[n] += l1_scale * sign
        for n in range(AT_ONCE):
            if first + n * step < size:
                fires = not gates[n] <= 0
                d_gate_value = number(gate, 0)
                d_up_value = number(gate, 0)
                if fires:
                    d_gate_value = gradients[n] * ups[n]
                    d_up_value = gradients[n] * gates[n]
                store(d_gate, first + n * step, d_gate_value)
                store(d_hidden, first + n * step, d_up_value)
        first += cuda.gridDim.x * step * AT_ONCE


@kernel()
def _relu(up, hidden, size):
    ups = cuda.local.array(AT_ONCE, arithmetic_type(up))
    step = types.int64(cuda.blockDim.x)
    first = cuda.blockIdx.x * step * AT_ONCE + cuda.threadIdx.x
    while first < size:
        for n in range(AT_ONCE):
            ups[n] = load(up, min(first + n * step, size - 1))
        for n in range(AT_ONCE):
            if first + n * step < size:
                value = ups[n]
                if value <= 0:
                    value = number(up, 0)
                store(hidden, first + n * step, value)
        first += cuda.gridDim.x * step * AT_ONCE


@kernel()
def _relu_backward(d_hidden, up, l1_scale, size):
    """Overwrite d_hidden with d_up."""
    ups = cuda.local.array(AT_ONCE, arithmetic_type(up))
    gradients = cuda.local.array(AT_ONCE, arithmetic_type(up))
    step = types.int64(cuda.blockDim.x)
    first = cuda.blockIdx.x * step * AT_ONCE + cuda.threadIdx.x
    while first < size:
        for n in range(AT_ONCE):
            i = min(first + n * step, size - 1)
            ups[n] = load(up, i)
            gradients[n] = load(d_hidden, i)
        for n in range(AT_ONCE):
            if first + n * step < size:
                value = number(up, 0)
                if not ups[n] <= 0:
                    value = gradients[n] + l1_scale
                store(d_hidden, first + n * step, value)
        first += cuda.gridDim.x * step * AT_ONCE


@kernel()
def _count_chunks(hidden, partial, rows, neurons, chunk_rows):
    """Write the count of h != 0 and the sum of |h| of each neuron over each chunk of rows."""
    item = global_thread()
    items = (rows + chunk_rows - 1) // chunk_rows * neurons
    while item < items:
        neuron = item % neurons
        row = item // neurons * chunk_rows
        end = min(rows, row + chunk_rows)
        nonzeros = types.int64(0)
        absolute_sum = number(partial, 0)
        while row < end:
            h = load(hidden, row * neurons + neuron)
            if h != 0:
                nonzeros += 1
                absolute_sum += abs(h)
            row += 1
        store(partial, item, nonzeros)
        store(partial, items + item, absolute_sum)
        item += grid_threads()


@kernel()
def _count_neurons(partial, by_neuron, fired, chunks, neurons):
    neuron = global_thread()
    while neuron < neurons:
        nonzeros = number(partial, 0)
        absolute_sum = number(partial, 0)
        for chunk in range(chunks):
            nonzeros += load(partial, chunk * neurons + neuron)
            absolute_sum += load(partial, (chunks + chunk) * neurons + neuron)
        store(by_neuron, neuron, nonzeros)
        store(by_neuron, neurons + neuron, absolute_sum)
        store(fired, neuron, types.int64(nonzeros != 0))
        neuron += grid_threads()


@kernel()
def _count_all(by_neuron, totals, neurons):
    nonzeros = number(by_neuron, 0)
    absolute_sum = number(by_neuron, 0)
    neuron = types.int64(cuda.threadIdx.x)
    while neuron < neurons:
        nonzeros += load(by_neuron, neuron)
        absolute_sum += load(by_neuron, neurons + neuron)
        neuron += cuda.blockDim.x
    nonzeros = block_sum(nonzeros)
    absolute_sum = block_sum(absolute_sum)
    if cuda.threadIdx.x == 0:
        store(totals, 0, nonzeros)
        store(totals, 1, absolute_sum)
