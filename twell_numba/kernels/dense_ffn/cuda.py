"""Dense feedforward layers on a GPU: the path to take while activations are not sparse.

    gated:       g = x Wg^T,  u = x Wu^T,  h = f(g) * u,  y = h Wd
    two-matrix:  h = f(x Wu^T),  y = h Wd

with x, y (M, D), weights (F, D) and f one of
:mod:`~twell_numba.kernels.activation_functions`. Bound by the products, 3 (or 2) forward and 6 (or
4) backward, which are the library's (see :mod:`twell_numba.device.gpu.gemm`); what lies between two
of them is one kernel (:mod:`twell_numba.kernels.dense_ffn.cuda_activations`). The statistics are
added up in float64 over rows and columns in an order that depends on the shape alone: the same bits
in every run, on every GPU.

M 16384, F 5632, bfloat16, one H200:

| | ms | TB/s |
| --- | --- | --- |
| relu(g) * u, blocks of 256 / 128 / 512 threads | 0.142 / 0.139 / 0.146 | 3.9 |
| its backward pass, blocks of 256 / 128 / 512 threads | 0.222 / 0.230 / 0.228 | 4.2 |
| the same with the gradient of an L1 term | 0.232 | 4.0 |
| statistics, at most 128 / 64 / 256 chunks of rows | 0.096 / 0.152 / 0.106 | 1.9 |
"""

from typing import NamedTuple

import numpy as np

from twell_numba.device.gpu import DeviceArray, Kernel, empty, kernel
from twell_numba.device.gpu.gemm import matmul
from twell_numba.device.gpu.language import (
    block_sum,
    cuda,
    device_function,
    global_thread,
    grid_threads,
    load,
    number,
    store,
    types,
)
from twell_numba.kernels.activation_functions import activation_number
from twell_numba.kernels.cuda_vectors import eight_zeros, load_eight, store_eight
from twell_numba.kernels.dense_ffn.cuda_activations import (
    activate,
    activate_backward,
    activate_gated,
    activate_gated_backward,
)
from twell_numba.kernels.device_checks import float_arrays
from twell_numba.kernels.device_ffn_checks import (
    backward_arrays,
    forward_arrays,
    l1_scale_on_gpu,
)

# Rows of a column that one thread counts: at least, and at most so many chunks of them.
FEWEST_ROWS = 32
MOST_CHUNKS = 128
# Of the blocks that sum over chunks: 32 columns each, and so many chunks at once.
SUM_THREADS = 1024


class DenseActivations(NamedTuple):
    """The activations of a dense forward pass, each (M, F).

    ``up`` is None in a two-matrix layer, where ``pattern`` is x Wu^T; in a gated layer ``pattern``
    is x Wg^T. ``hidden`` is h.
    """

    pattern: DeviceArray
    up: DeviceArray | None
    hidden: DeviceArray

    @property
    def is_on_gpu(self) -> bool:
        """True: kernels are chosen by it."""
        return True

    @property
    def shape(self) -> tuple[int, int]:
        """M and F."""
        rows, neurons = self.hidden.shape
        return rows, neurons


def gated_ffn_forward(
    x: DeviceArray,
    gate_weight: DeviceArray,
    up_weight: DeviceArray,
    down_weight: DeviceArray,
    activation: str = "relu",
) -> tuple[DeviceArray, DenseActivations]:
    """Compute y = (f(x Wg^T) * (x Wu^T)) Wd.

    Parameters
    ----------
    x : DeviceArray of floats, shape (M, D)
    gate_weight, up_weight, down_weight : DeviceArray, shape (F, D)
        Neuron-major: row j belongs to neuron j. Of x's dtype.
    activation : {"relu", "silu", "relu2"}
        f.

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
        If the shapes do not fit together, the arrays are on different GPUs, or there is no such
        activation.
    """
    function = activation_number(activation)
    forward_arrays(x=x, gate_weight=gate_weight, up_weight=up_weight, down_weight=down_weight)
    gate = matmul(x, gate_weight, transpose_b=True)
    up = matmul(x, up_weight, transpose_b=True)
    hidden = empty(gate.shape, x.dtype, x.stream)
    blocks, is_aligned = _blocks(activate_gated, gate), _is_aligned(gate, up, hidden)
    activate_gated(blocks, function, gate, up, hidden, gate.size, is_aligned)
    return matmul(hidden, down_weight), DenseActivations(gate, up, hidden)


def gated_ffn_backward(
    dy: DeviceArray,
    x: DeviceArray,
    gate_weight: DeviceArray,
    up_weight: DeviceArray,
    down_weight: DeviceArray,
    activations: DenseActivations,
    l1_scale: float | DeviceArray,
    gate_grad: DeviceArray,
    up_grad: DeviceArray,
    down_grad: DeviceArray,
    activation: str = "relu",
) -> DeviceArray:
    """Differentiate :func:`gated_ffn_forward`.

    Parameters
    ----------
    dy : DeviceArray, shape (M, D)
    x, gate_weight, up_weight, down_weight
        As given to the forward pass.
    activations : DenseActivations
        From the forward pass.
    l1_scale : float or DeviceArray of float32, shape (1,)
        dh grows by ``l1_scale * sign(h)``; lambda / (L M) for the L1 term of the loss.
    gate_grad, up_grad, down_grad : DeviceArray, shape (F, D)
        Of x's dtype, or float32 for x in 16 bits. Changed in place: the gradients are added.
    activation : str
        As given to the forward pass.

    Returns
    -------
    dx : DeviceArray, shape (M, D)

    Raises
    ------
    TypeError, ValueError
        As :func:`gated_ffn_forward`; also if the activations are not of this x, or gradients share
        memory.
    """
    function = activation_number(activation)
    forward_arrays(x=x, gate_weight=gate_weight, up_weight=up_weight, down_weight=down_weight)
    backward_arrays(
        dy, x, (gate_weight, up_weight, down_weight), activations, DenseActivations,
        gate_grad=gate_grad, up_grad=up_grad, down_grad=down_grad,
    )  # fmt: skip
    gate, up, hidden = activations
    assert up is not None, "activations of a gated layer wanted"
    scale = l1_scale_on_gpu(l1_scale, x.stream)
    d_up = matmul(dy, down_weight, transpose_b=True)
    d_gate = empty(gate.shape, x.dtype, x.stream)
    is_aligned = _is_aligned(d_up, gate, up, d_gate)
    blocks = _blocks(activate_gated_backward, gate)
    arguments = (d_up, gate, up, scale, d_gate, gate.size, is_aligned)
    activate_gated_backward(blocks, function, *arguments)
    dx = matmul(d_up, up_weight)
    matmul(d_gate, gate_weight, dx, accumulate=True)
    matmul(hidden, dy, down_grad, transpose_a=True, accumulate=True)
    matmul(d_up, x, up_grad, transpose_a=True, accumulate=True)
    matmul(d_gate, x, gate_grad, transpose_a=True, accumulate=True)
    return dx


def ffn_forward(
    x: DeviceArray, up_weight: DeviceArray, down_weight: DeviceArray, activation: str = "relu"
) -> tuple[DeviceArray, DenseActivations]:
    """Compute y = f(x Wu^T) Wd; parameters and returns as :func:`gated_ffn_forward`."""
    function = activation_number(activation)
    forward_arrays(x=x, up_weight=up_weight, down_weight=down_weight)
    up = matmul(x, up_weight, transpose_b=True)
    hidden = empty(up.shape, x.dtype, x.stream)
    activate(_blocks(activate, up), function, up, hidden, up.size, _is_aligned(up, hidden))
    return matmul(hidden, down_weight), DenseActivations(up, None, hidden)


def ffn_backward(
    dy: DeviceArray,
    x: DeviceArray,
    up_weight: DeviceArray,
    down_weight: DeviceArray,
    activations: DenseActivations,
    l1_scale: float | DeviceArray,
    up_grad: DeviceArray,
    down_grad: DeviceArray,
    activation: str = "relu",
) -> DeviceArray:
    """Differentiate :func:`ffn_forward`; parameters and returns as :func:`gated_ffn_backward`."""
    function = activation_number(activation)
    forward_arrays(x=x, up_weight=up_weight, down_weight=down_weight)
    gradients = {"up_grad": up_grad, "down_grad": down_grad}
    weights = (up_weight, down_weight)
    backward_arrays(dy, x, weights, activations, DenseActivations, **gradients)
    up, _, hidden = activations
    scale = l1_scale_on_gpu(l1_scale, x.stream)
    d_up = matmul(dy, down_weight, transpose_b=True)
    blocks, is_aligned = _blocks(activate_backward, up), _is_aligned(d_up, up)
    activate_backward(blocks, function, d_up, up, scale, up.size, is_aligned)
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
    is_aligned = int(neurons % 8 == 0 and hidden.pointer % 16 == 0)
    blocks = _count_chunks.blocks(chunks * -(-neurons // 8))
    _count_chunks(blocks, hidden, partial, rows, neurons, chunk_rows, is_aligned)
    _count_neurons(-(-neurons // 32), partial, by_neuron, fired, chunks, neurons)
    _count_all(1, by_neuron, totals, neurons)
    return totals, fired


def _blocks(elementwise: Kernel, array: DeviceArray) -> int:
    return elementwise.blocks(-(-array.size // 8))


def _is_aligned(*arrays: DeviceArray) -> int:
    return int(all(array.pointer % 16 == 0 for array in arrays))


@device_function
def _counted(counts, h):
    """Return eight counts, each grown by 1 if its number is not 0."""
    return (
        counts[0] + (h[0] != 0),
        counts[1] + (h[1] != 0),
        counts[2] + (h[2] != 0),
        counts[3] + (h[3] != 0),
        counts[4] + (h[4] != 0),
        counts[5] + (h[5] != 0),
        counts[6] + (h[6] != 0),
        counts[7] + (h[7] != 0),
    )


@device_function
def _summed(sums, h):
    return (
        sums[0] + abs(h[0]),
        sums[1] + abs(h[1]),
        sums[2] + abs(h[2]),
        sums[3] + abs(h[3]),
        sums[4] + abs(h[4]),
        sums[5] + abs(h[5]),
        sums[6] + abs(h[6]),
        sums[7] + abs(h[7]),
    )


@kernel()
def _count_chunks(hidden, partial, rows, neurons, chunk_rows, is_aligned):
    """Write the count of h != 0 and the sum of |h| of each neuron over each chunk of rows.

    A thread takes eight neurons.
    """
    item = global_thread()
    groups = (neurons + 7) // 8
    chunks = (rows + chunk_rows - 1) // chunk_rows
    while item < groups * chunks:
        neuron = item % groups * 8
        chunk = item // groups
        counts = eight_zeros(partial)
        sums = eight_zeros(partial)
        for row in range(chunk * chunk_rows, min(rows, (chunk + 1) * chunk_rows)):
            h = load_eight(hidden, row * neurons, neuron, neurons, is_aligned)
            counts = _counted(counts, h)
            sums = _summed(sums, h)
        store_eight(partial, chunk * neurons, neuron, neurons, counts, is_aligned)
        store_eight(partial, (chunks + chunk) * neurons, neuron, neurons, sums, is_aligned)
        item += grid_threads()


@kernel(threads=SUM_THREADS)
def _count_neurons(partial, by_neuron, fired, chunks, neurons):
    """A block takes 32 neurons, a warp of it every so many chunks."""
    counts = cuda.shared.array(SUM_THREADS, types.float64)
    sums = cuda.shared.array(SUM_THREADS, types.float64)
    lane = types.int64(cuda.threadIdx.x % 32)
    warp = types.int64(cuda.threadIdx.x // 32)
    warps = types.int64(cuda.blockDim.x // 32)
    neuron = cuda.blockIdx.x * types.int64(32) + lane
    nonzeros, absolute_sum = number(partial, 0), number(partial, 0)
    if neuron < neurons:
        for chunk in range(warp, chunks, warps):
            nonzeros += load(partial, chunk * neurons + neuron)
            absolute_sum += load(partial, (chunks + chunk) * neurons + neuron)
    counts[cuda.threadIdx.x] = nonzeros
    sums[cuda.threadIdx.x] = absolute_sum
    cuda.syncthreads()
    if warp == 0 and neuron < neurons:
        for other in range(1, warps):
            nonzeros += counts[other * 32 + lane]
            absolute_sum += sums[other * 32 + lane]
        store(by_neuron, neuron, nonzeros)
        store(by_neuron, neurons + neuron, absolute_sum)
        store(fired, neuron, types.int64(nonzeros != 0))


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
