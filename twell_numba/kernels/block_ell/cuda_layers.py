"""Feedforward layers with block-ELL weights on tensor cores, in 16 bits: the order of the kernels.

See :mod:`twell_numba.kernels.block_ell.cuda_tensor_cores`. The forward pass keeps g, u and h for
the backward pass, as the dense layers do. Zeros inside of a stored block are multiplied as any
number is (0 times NaN is NaN); what is in no block contributes nothing.
"""

from typing import Any

import ml_dtypes
import numpy as np

from twell_numba.device.gpu import DeviceArray, Kernel, empty
from twell_numba.device.gpu.tensor_cores import OLDEST_CAPABILITY
from twell_numba.formats import BlockELLMatrix
from twell_numba.kernels.block_ell import cuda_tensor_cores as kernels
from twell_numba.kernels.block_ell.cuda_arrays import by_column
from twell_numba.kernels.cuda_scalars import scalar_on_gpu
from twell_numba.kernels.sparse_ffn.cuda import DeviceSparseActivations

_16_BITS = (np.dtype(ml_dtypes.bfloat16), np.dtype(np.float16))
# Tokens of which one block of threads adds up a gradient, at least, and the most such parts.
FEWEST_TOKENS, MOST_PARTS = 1024, 8


def fit_tensor_cores(x: DeviceArray, *weights: BlockELLMatrix) -> bool:
    """Return whether the kernels here can compute a layer, for weights that fit x."""
    return (
        x.stream.gpu.capability >= OLDEST_CAPABILITY
        and x.dtype in _16_BITS
        and x.size > 0
        and x.stream.gpu.shared_memory_per_block >= kernels.SHARED_MEMORY
        and weights[0].block_size % 32 == 0
        and all(side % weights[0].block_size == 0 for side in weights[0].shape)
        and weights[0].shape[0] > 0
        and all(array.pointer % 16 == 0 for array in (x, *(w.values for w in weights)))
    )


def forward(
    x: DeviceArray, gate: BlockELLMatrix | None, up: BlockELLMatrix, down: BlockELLMatrix
) -> tuple[DeviceArray, DeviceSparseActivations]:
    """Return y (M, D) and the activations; without ``gate`` those of the two-matrix layer."""
    (rows, width), neurons, stream = x.shape, up.shape[0], x.stream
    gated = int(gate is not None)
    gate = up if gate is None else gate
    hidden = empty((rows, neurons), x.dtype, stream)
    kept = (hidden, hidden)
    if gated:
        kept = (empty(hidden.shape, x.dtype, stream), empty(hidden.shape, x.dtype, stream))
    parts = -(-rows // kernels.TOKENS)
    counts = empty((parts, neurons), np.int32, stream)
    sums = empty((parts, neurons), np.float32, stream)
    _launch(
        (kernels.hidden_forward_32, kernels.hidden_forward_64), up, rows, neurons,
        x, gate.values, gate.block_columns, gate.blocks_per_row,
        up.values, up.block_columns, up.blocks_per_row,
        hidden, *kept, counts, sums, rows, width, neurons, up.block_size, gated,
    )  # fmt: skip
    y = empty(x.shape, x.dtype, stream)
    _multiply_by_columns(y, (hidden, down))
    nonzeros = empty(neurons, np.int64, stream)
    absolute_sums = empty(neurons, np.float64, stream)
    fired = empty(neurons, np.bool_, stream)
    statistics = (nonzeros, absolute_sums, fired)
    kernels.add_counts(
        kernels.add_counts.blocks(32 * neurons), counts, sums, *statistics, parts, neurons
    )
    return y, DeviceSparseActivations((rows, neurons), *statistics, (*kept, hidden))


def backward(
    dy: DeviceArray,
    x: DeviceArray,
    gate: BlockELLMatrix | None,
    up: BlockELLMatrix,
    down: BlockELLMatrix,
    activations: DeviceSparseActivations,
    l1_scale: float | DeviceArray,
    gate_grad: DeviceArray | None,
    up_grad: DeviceArray,
    down_grad: DeviceArray,
) -> DeviceArray:
    """Return dx (M, D) and add the gradients of the blocks in place."""
    (rows, width), neurons, stream = x.shape, up.shape[0], x.stream
    gated = int(gate is not None)
    assert activations.kept is not None
    gate_values, up_values, hidden = activations.kept
    scale = scalar_on_gpu("l1_scale", l1_scale, np.float32, x)
    d_first = empty(hidden.shape, x.dtype, stream)
    d_up = empty(hidden.shape, x.dtype, stream) if gated else d_first
    _launch(
        (kernels.hidden_backward_32, kernels.hidden_backward_64), down, rows, neurons,
        dy, down.values, down.block_columns, down.blocks_per_row,
        gate_values, up_values, scale, d_first, d_up,
        rows, width, neurons, up.block_size, gated,
    )  # fmt: skip
    _add_sampled(down, hidden, dy, down_grad)
    _add_sampled(up, d_up, x, up_grad)
    dx = empty(x.shape, x.dtype, stream)
    if gate is None or gate_grad is None:
        _multiply_by_columns(dx, (d_up, up))
    else:
        _add_sampled(gate, d_first, x, gate_grad)
        _multiply_by_columns(dx, (d_up, up), (d_first, gate))
    return dx


def _strip(weight: BlockELLMatrix) -> int:
    """Return of how many columns or neurons the strips are."""
    return 64 if weight.block_size % 64 == 0 else 32


def _launch(
    by_strip: tuple[Kernel, Kernel], weight: BlockELLMatrix, rows: int, across: int, *arguments: Any
) -> None:
    """Launch the kernel for a weight's strips; its blocks take ROWS rows of a strip each."""
    strip = _strip(weight)
    by_strip[strip == 64](-(-rows // kernels.ROWS) * (across // strip), *arguments)


def _multiply_by_columns(out: DeviceArray, *products: tuple[DeviceArray, BlockELLMatrix]) -> None:
    """Overwrite ``out`` with the sum of one or two products ``left @ W``."""
    rows, width = out.shape
    operands = []
    for left, weight in products:
        starts, blocks = by_column(weight)
        b, columns = weight.block_size, weight.shape[1] // weight.block_size
        turned = empty((blocks.size, b, b), weight.dtype, out.stream)
        block_rows = empty(blocks.size, np.int32, out.stream)
        kernels.turn_blocks(
            blocks.size, weight.values, starts, blocks, turned, block_rows,
            columns, weight.blocks_per_row, b,
        )  # fmt: skip
        operands += [left, turned, block_rows, starts]
    operands *= 3 - len(products)
    inner, b = products[0][1].shape[0], products[0][1].block_size
    _launch(
        (kernels.sum_columns_32, kernels.sum_columns_64), products[0][1], rows, width,
        *operands, out, rows, inner, width, b, len(products),
    )  # fmt: skip


def _add_sampled(
    weight: BlockELLMatrix, left: DeviceArray, right: DeviceArray, gradient: DeviceArray
) -> None:
    """Add ``left.T @ right`` to a gradient at the weight's blocks."""
    (rows, neurons), b, slots = left.shape, weight.block_size, weight.blocks_per_row
    parts = max(1, min(MOST_PARTS, rows // FEWEST_TOKENS))
    partial = empty((parts, *weight.values.shape), np.float32, left.stream)
    starts, blocks = by_column(weight)
    strip = _strip(weight)
    kernel = kernels.sample_blocks_64 if strip == 64 else kernels.sample_blocks_32
    groups = -(-blocks.size * (b // strip) ** 2 * strip // kernels.SAMPLE_THREADS)
    kernel(
        parts * groups,
        left, right, starts, blocks, weight.block_columns, partial,
        rows, neurons, right.shape[1], slots, b, groups, parts,
        _whole(-(-rows // parts), kernels.STEP),
    )  # fmt: skip
    size = gradient.size
    kernels.add_parts(
        kernels.add_parts.blocks(size // 4),
        partial, weight.block_columns, gradient, size, b * b, parts,
    )  # fmt: skip


def _whole(count: int, step: int) -> int:
    """Return the smallest multiple of ``step`` that is not less than ``count``."""
    return -(-count // step) * step
