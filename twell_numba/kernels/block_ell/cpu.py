"""Products of a block-ELL matrix, and feedforward layers of such weights, compiled for the CPU.

    A @ X:    Y[r] = sum over blocks (r, c) of A[r, c] X[c]       A (M, K), X (K, N), Y (M, N)
    A.T @ X:  Y[c] = sum over blocks (r, c) of A[r, c].T X[r]     A (M, K), X (M, N), Y (K, N)
    sampled:  V[r, c] = Y[r] X[c].T at every block (r, c)         Y (M, D), X (K, D)

where A[r, c] is a block of b x b, and Y[r], X[c] are b rows. Each number of a result is added up by
one thread in the order of A's rows and columns: the same bits every run, for any number of threads.

Bound by arithmetic. X is first copied into panels of as many columns as two vector registers hold
(one without AVX-512), which lie together in the second-level cache. Eight rows of the result by a
panel's width stay in registers across all blocks of a row of blocks: a step loads two vectors of X,
and multiplies each by eight numbers of A. Rows that are not eight (b below 8, the lower edge) are
computed one at a time.

Zeros of A must contribute nothing where X is NaN or infinite. While it copies X, the first step
sees whether there is such a number; only then rows are computed one at a time, skipping zeros.

Milliseconds for A 4096 x 4096 with 10% of its blocks stored and 256 columns of float32, on 2 cores
of an AMD EPYC (Zen 5); NumPy's dense product takes 19.0 ms with AVX-512 and 35 ms with AVX2:

=====  ===========  =====  =======  =======
b      SciPy's bsr  A @ X  A.T @ X  sampled
=====  ===========  =====  =======  =======
8      103          3.1    4.6      3.3
16     98           3.0    3.9      2.9
32     104          2.9    3.6      2.8
64     181          2.8    2.9      3.4
=====  ===========  =====  =======  =======

3.0 ms are 143 multiply-adds a nanosecond, where BLAS reaches 226 (AVX-512).

For the feedforward layers see :mod:`twell_numba.kernels.block_ell.ffn_strips`.
"""

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from twell_numba.device import run_ranges
from twell_numba.device.jit import jit, literally
from twell_numba.device.vectors import (
    MANY_REGISTERS,
    add_products,
    add_scaled,
    lanes_of,
    load,
    register_lanes,
    store,
    sum_of,
    zeros,
)
from twell_numba.formats import BlockELLMatrix
from twell_numba.kernels.block_ell import reference
from twell_numba.kernels.block_ell.ffn_strips import (
    REGISTERS,
    backward_kernel,
    forward_kernel,
    one_token,
)
from twell_numba.kernels.checks import contiguous
from twell_numba.kernels.ffn_checks import sparse_backward_inputs, sparse_forward_inputs
from twell_numba.kernels.sparse_ffn import SparseWeightActivations
from twell_numba.kernels.sparse_ffn import activation_statistics as activation_statistics
from twell_numba.kernels.sparse_ffn.cpu import (
    add_parts,
    read_only_arrays,
    run_backward,
    run_forward,
    run_one_token,
    strip_registers,
)
from twell_numba.kernels.sparse_operands import (
    Operands,
    left_product_operands,
    product_operands,
    require_same_pattern,
    sampled_operands,
    transposed_product_operands,
)

# Rows of the result that are kept in registers.
ROWS = 8
PANEL_REGISTERS = MANY_REGISTERS // ROWS
# Fewest multiply-adds worth a thread of their own.
GRAIN = 1_000_000
# Rows of blocks differ in their blocks, so threads that finish early take more.
PARTS_PER_THREAD = 4

# Panels of tokens, each of as many as ``REGISTERS`` hold, in a strip.
STRIP_PANELS = 4

_FORWARD = {gated: forward_kernel(gated) for gated in (True, False)}
_BACKWARD = {
    (gated, lanes): backward_kernel(gated, lanes)
    for gated in (True, False)
    for lanes in (1, 2, 4, 8, 16)
}


def block_ell_matmul(A: BlockELLMatrix, X: Any, out: np.ndarray | None = None) -> np.ndarray:
    """Return ``A @ X``.

    Zeros of ``A``, stored or not, contribute nothing, also where ``X`` is NaN or infinite.

    Parameters
    ----------
    A : BlockELLMatrix, shape (M, K)
    X : array, shape (K,) or (K, N)
        float64, float32, float16 or bfloat16, with any strides and byte order.
    out : array, shape (M,) or (M, N), optional
        Of the result's dtype, with any strides; it is overwritten and returned. It may share memory
        with ``X``.

    Returns
    -------
    array, shape (M,) or (M, N)
        Of the wider of the two dtypes (float32 for float16 with bfloat16), added up in float32 or
        wider. A sum too large for float16 becomes infinite with NumPy's ``RuntimeWarning``.

    Raises
    ------
    TypeError
        If an operand has the wrong type or dtype.
    ValueError
        If the shapes do not fit.
    """
    operands = product_operands(A, X, BlockELLMatrix, out)
    return _multiply(A, operands, _multiply_rows, A.block_rows)


def block_ell_transposed_matmul(
    A: BlockELLMatrix, X: Any, out: np.ndarray | None = None
) -> np.ndarray:
    """Return ``A.T @ X``, of shape (K,) or (K, N); otherwise as :func:`block_ell_matmul`."""
    operands = transposed_product_operands(A, X, BlockELLMatrix, out)
    return _multiply(A, operands, _multiply_columns, -(-A.shape[1] // A.block_size))


def block_ell_left_matmul(X: Any, A: BlockELLMatrix, out: np.ndarray | None = None) -> np.ndarray:
    """Return ``X @ A`` for ``X`` (M,) or (N, M); otherwise as :func:`block_ell_matmul`."""
    operands = left_product_operands(X, A, BlockELLMatrix, out)
    return _multiply(A, operands, _multiply_columns, -(-A.shape[1] // A.block_size))


def block_ell_sampled_product(
    A: BlockELLMatrix, Y: Any, X: Any, out: BlockELLMatrix | None = None
) -> BlockELLMatrix:
    """Return the values of ``Y @ X.T`` at all elements of A's blocks, zeros included.

    Parameters
    ----------
    A : BlockELLMatrix, shape (M, K)
        Its values are not looked at.
    Y : array, shape (M, D)
    X : array, shape (K, D)
        Both float64, float32, float16 or bfloat16, with any strides and byte order.
    out : BlockELLMatrix, optional
        Of A's pattern and the result's dtype; its values are overwritten and it is returned.

    Returns
    -------
    BlockELLMatrix
        Of the wider dtype of ``Y`` and ``X``. A new one shares ``block_columns`` with A.

    Raises
    ------
    TypeError
        If an operand has the wrong type or dtype.
    ValueError
        If the shapes or patterns do not fit.
    """
    Y, X, dtype = sampled_operands(A, Y, X, BlockELLMatrix)
    if out is not None:
        require_same_pattern(A, out, dtype, ("block_size", "block_columns"))
    values = np.zeros(A.values.shape, Y.dtype)
    if values.size and X.size:
        Y, X = _padded(Y, register_lanes(Y.dtype)), _padded(X, register_lanes(X.dtype))
        block_columns = contiguous(A.block_columns, A.block_columns.dtype)
        run_ranges(
            lambda start, stop: _sample_rows(block_columns, Y, X, values, start, stop),
            A.block_rows,
            grain=_grain(A, A.block_rows, X.shape[1]),
            parts_per_thread=PARTS_PER_THREAD,
        )
    converted = values.astype(dtype, copy=False)
    if out is not None:
        out.values[...] = converted
        return out
    return BlockELLMatrix(
        converted, A.block_columns, A.shape, block_size=A.block_size, validate=False
    )


def gated_ffn_forward(
    x: np.ndarray, gate: BlockELLMatrix, up: BlockELLMatrix, down: BlockELLMatrix
) -> tuple[np.ndarray, SparseWeightActivations]:
    """Compute y = (relu(x Wg^T) * (x Wu^T)) Wd with sparse weights.

    Weights that are zero contribute nothing, whatever they meet. NaN is kept by relu.

    Parameters
    ----------
    x : ndarray of float32 or float64, shape (M, D)
    gate, up, down : BlockELLMatrix, shape (F, D)
        Neuron-major, down too: row j belongs to neuron j. Of x's dtype.

    Returns
    -------
    y : ndarray, shape (M, D)
    activations : SparseWeightActivations
        What was counted in h; :func:`gated_ffn_backward` wants it.

    Raises
    ------
    TypeError, ValueError
        If formats, dtypes or shapes do not fit.
    """
    x = sparse_forward_inputs(BlockELLMatrix, x, gate_weight=gate, up_weight=up, down_weight=down)
    y, activations = _forward(x, gate, up, down, gated=True)
    # A zero inside a block makes NaN of an infinity, though it should contribute nothing. That
    # shows in h: then the plain definition takes over.
    if math.isfinite(activations.absolute_sum):
        return y, activations
    return reference.gated_ffn_forward(x, gate, up, down)


def gated_ffn_backward(
    dy: np.ndarray,
    x: np.ndarray,
    gate: BlockELLMatrix,
    up: BlockELLMatrix,
    down: BlockELLMatrix,
    activations: SparseWeightActivations,
    l1_scale: float,
    gate_grad: np.ndarray,
    up_grad: np.ndarray,
    down_grad: np.ndarray,
) -> np.ndarray:
    """Differentiate :func:`gated_ffn_forward`, for the weights at their stored entries alone.

    Parameters
    ----------
    dy : ndarray, shape (M, D)
    x, gate, up, down
        As given to the forward pass.
    activations : SparseWeightActivations
        From the forward pass.
    l1_scale : float
        dh grows by ``l1_scale * sign(h)``; lambda / (L M) for the L1 term of the loss.
    gate_grad, up_grad, down_grad : ndarray
        C-contiguous, of the shape and dtype of each weight's ``stored_values``; changed in place:
        the gradients are added. A stored zero has one as any other entry;
        places of ``values`` that hold no entry get nothing.

    Returns
    -------
    dx : ndarray, shape (M, D)

    Raises
    ------
    TypeError, ValueError
        If an argument does not fit the others.
    """
    x = sparse_forward_inputs(BlockELLMatrix, x, gate_weight=gate, up_weight=up, down_weight=down)
    dy = sparse_backward_inputs(
        dy,
        x,
        activations,
        gate_grad=(gate, gate_grad),
        up_grad=(up, up_grad),
        down_grad=(down, down_grad),
    )
    gradients = (gate_grad, up_grad, down_grad)
    dx, parts = _backward(dy, x, (gate, up, down), l1_scale, gradients, gated=True)
    if math.isfinite(activations.absolute_sum) and np.isfinite(dx).all():
        add_parts(parts, gradients)
        return dx
    return reference.gated_ffn_backward(
        dy, x, gate, up, down, activations, l1_scale, gate_grad, up_grad, down_grad
    )


def ffn_forward(
    x: np.ndarray, up: BlockELLMatrix, down: BlockELLMatrix
) -> tuple[np.ndarray, SparseWeightActivations]:
    """Compute y = relu(x Wu^T) Wd; parameters and returns as :func:`gated_ffn_forward`."""
    x = sparse_forward_inputs(BlockELLMatrix, x, up_weight=up, down_weight=down)
    y, activations = _forward(x, up, up, down, gated=False)
    if math.isfinite(activations.absolute_sum):
        return y, activations
    return reference.ffn_forward(x, up, down)


def ffn_backward(
    dy: np.ndarray,
    x: np.ndarray,
    up: BlockELLMatrix,
    down: BlockELLMatrix,
    activations: SparseWeightActivations,
    l1_scale: float,
    up_grad: np.ndarray,
    down_grad: np.ndarray,
) -> np.ndarray:
    """Differentiate :func:`ffn_forward`; parameters and returns as :func:`gated_ffn_backward`."""
    x = sparse_forward_inputs(BlockELLMatrix, x, up_weight=up, down_weight=down)
    dy = sparse_backward_inputs(
        dy, x, activations, up_grad=(up, up_grad), down_grad=(down, down_grad)
    )
    gradients = (up_grad, down_grad)
    dx, parts = _backward(dy, x, (up, down), l1_scale, gradients, gated=False)
    if math.isfinite(activations.absolute_sum) and np.isfinite(dx).all():
        add_parts(parts, gradients)
        return dx
    return reference.ffn_backward(dy, x, up, down, activations, l1_scale, up_grad, down_grad)


def _forward(
    x: np.ndarray, gate: BlockELLMatrix, up: BlockELLMatrix, down: BlockELLMatrix, *, gated: bool
) -> tuple[np.ndarray, SparseWeightActivations]:
    if x.shape[0] == 1:
        # Arrays as they are: for one token, nine read-only views would take a fifth of the time.
        given = [(weight.values, weight.block_columns) for weight in (gate, up, down)]
        return run_one_token(one_token, x, given, down.shape[0], gated)
    weights = [read_only_arrays(weight) for weight in (gate, up, down)]
    stored = gate.values.size + up.values.size + down.values.size
    return run_forward(_FORWARD[gated], x, weights, down.shape[0], _strip_width(x), stored)


def _backward(
    dy: np.ndarray,
    x: np.ndarray,
    weights: tuple[BlockELLMatrix, ...],
    l1_scale: float,
    gradients: tuple[np.ndarray, ...],
    *,
    gated: bool,
) -> tuple[np.ndarray, list[np.ndarray]]:
    # As many numbers of a block's row as fit a register, a power of 2.
    lanes = min(register_lanes(x.dtype), 1 << (weights[0].block_size.bit_length() - 1))
    return run_backward(
        _BACKWARD[gated, lanes],
        dy,
        x,
        [read_only_arrays(weight) for weight in weights],
        weights[0].shape[0],
        l1_scale,
        gradients,
        _strip_width(x),
    )


def _strip_width(x: np.ndarray) -> int:
    lanes = REGISTERS * register_lanes(x.dtype)
    return lanes * strip_registers(x, lanes, STRIP_PANELS)


def _multiply(
    A: BlockELLMatrix, operands: Operands, product: Callable[..., None], count: int
) -> np.ndarray:
    """Run a compiled product on ranges of rows (or columns) of blocks, ``count`` in all."""
    X, total = operands.X, operands.total
    if A.values.size == 0 or X.size == 0:
        total[...] = 0
        return operands.result()
    # Padding is converted too, but what comes of it is not read.
    with np.errstate(invalid="ignore"):
        values = contiguous(A.values, X.dtype)
    block_columns = contiguous(A.block_columns, A.block_columns.dtype)
    registers, lanes = _panel_width(X)
    firsts, panels, finite = _panels(X, lanes)
    wide = total if X.shape[1] >= lanes else np.empty((total.shape[0], lanes), X.dtype)
    compiled = product if registers == PANEL_REGISTERS else _NARROW[product]
    run_ranges(
        lambda start, stop: compiled(
            values, block_columns, firsts, panels, finite, wide, start, stop
        ),
        count,
        grain=_grain(A, count, panels.shape[0] * lanes),
        parts_per_thread=PARTS_PER_THREAD,
    )
    if wide is not total:
        total[...] = wide[:, : X.shape[1]]
    return operands.result()


def _grain(A: BlockELLMatrix, count: int, columns: int) -> int:
    return 1 + GRAIN * count // (A.values.size * columns)


def _panel_width(X: np.ndarray) -> tuple[int, int]:
    one = register_lanes(X.dtype)
    registers = PANEL_REGISTERS if X.shape[1] > one else 1
    return registers, registers * one


def _panels(X: np.ndarray, lanes: int) -> tuple[np.ndarray, np.ndarray, bool]:
    """Copy X, panel by panel.

    Returns
    -------
    firsts : ndarray of int64, shape (panels,)
        The first column of each panel. The last panel may overlap the one before.
    panels : ndarray, shape (panels, rows, lanes)
        Zeros fill the only panel of an X with fewer columns.
    finite : bool
        Whether no number of X is NaN or infinite.
    """
    rows, columns = X.shape
    firsts = np.arange(0, columns, lanes)
    firsts[-1] = max(columns - lanes, 0)
    if columns < lanes:
        X = _padded(X, lanes)
    panels = np.empty((firsts.size, rows, lanes), X.dtype)
    source = contiguous(X, X.dtype)
    not_finite = []

    def copy(start: int, stop: int) -> None:
        if not _copy_panels(source, firsts, panels, start, stop):
            not_finite.append(start)

    run_ranges(copy, rows, grain=1 + 100_000 // X.shape[1])
    return contiguous(firsts, np.int64), contiguous(panels, X.dtype), not not_finite


def _padded(X: np.ndarray, multiple: int) -> np.ndarray:
    """Return ``X`` with zero columns added up to a multiple."""
    columns = X.shape[1]
    if columns % multiple:
        padded = np.zeros((X.shape[0], columns + multiple - columns % multiple), X.dtype)
        padded[:, :columns] = X
        X = padded
    return contiguous(X, X.dtype)


# ---- Compiled code


@jit
def _copy_panels(X, firsts, panels, start, stop):
    """Copy rows ``start`` to ``stop`` and return whether all of their numbers are finite."""
    number = X.dtype.type
    nothing = number(0)
    for row in range(start, stop):
        for panel in range(firsts.size):
            source = X[row, firsts[panel] : firsts[panel] + panels.shape[2]]
            target = panels[panel, row]
            for n in range(target.size):
                target[n] = source[n]
                nothing += source[n] * number(0)  # NaN for NaN and infinities
    return nothing == 0


def _row_product(registers):
    @jit
    def multiply_rows(values, block_columns, firsts, panels, finite, out, start, stop):
        """Compute rows of blocks ``start`` to ``stop`` of A @ X."""
        b = values.shape[2]
        for panel in range(firsts.size):
            X, column = panels[panel], firsts[panel]
            for block_row in range(start, stop):
                first_row = block_row * b
                height = min(b, out.shape[0] - first_row)
                row_columns = block_columns[block_row]
                row_values = values[block_row]
                if finite and height >= ROWS:
                    for group in range(0, height, ROWS):
                        # The last group may overlap the one before: computed twice, alike.
                        i = min(group, height - ROWS)
                        eight_rows(
                            row_values, row_columns, i, X, out, first_row + i, column, registers
                        )
                else:
                    for i in range(height):
                        one_row(
                            row_values, row_columns, i, X, out, first_row + i, column, registers
                        )

    return multiply_rows


@jit(forceinline=True)
def eight_rows(values, block_columns, i, X, out, row, column, registers):
    literally(registers)
    b = values.shape[1]
    t0, t1, t2, t3 = (
        zeros(X, registers),
        zeros(X, registers),
        zeros(X, registers),
        zeros(X, registers),
    )
    t4, t5, t6, t7 = t0, t1, t2, t3
    for slot in range(block_columns.size):
        if block_columns[slot] < 0:
            break
        first = np.int64(block_columns[slot]) * b
        block = values[slot]
        r0, r1, r2, r3 = block[i], block[i + 1], block[i + 2], block[i + 3]
        r4, r5, r6, r7 = block[i + 4], block[i + 5], block[i + 6], block[i + 7]
        for k in range(min(b, X.shape[0] - first)):
            x = load(X, first + k, 0, registers)
            t0 = add_scaled(t0, r0[k], x)
            t1 = add_scaled(t1, r1[k], x)
            t2 = add_scaled(t2, r2[k], x)
            t3 = add_scaled(t3, r3[k], x)
            t4 = add_scaled(t4, r4[k], x)
            t5 = add_scaled(t5, r5[k], x)
            t6 = add_scaled(t6, r6[k], x)
            t7 = add_scaled(t7, r7[k], x)
    store(out, row, column, t0)
    store(out, row + 1, column, t1)
    store(out, row + 2, column, t2)
    store(out, row + 3, column, t3)
    store(out, row + 4, column, t4)
    store(out, row + 5, column, t5)
    store(out, row + 6, column, t6)
    store(out, row + 7, column, t7)


@jit
def one_row(values, block_columns, i, X, out, row, column, registers):
    literally(registers)
    b = values.shape[1]
    total = zeros(X, registers)
    for slot in range(block_columns.size):
        if block_columns[slot] < 0:
            break
        first = np.int64(block_columns[slot]) * b
        for k in range(min(b, X.shape[0] - first)):
            value = values[slot, i, k]
            if value != 0:
                total = add_scaled(total, value, load(X, first + k, 0, registers))
    store(out, row, column, total)


def _column_product(registers):
    @jit
    def multiply_columns(values, block_columns, firsts, panels, finite, out, start, stop):
        """Compute rows of blocks ``start`` to ``stop`` of A.T @ X."""
        b = values.shape[2]
        first_row = start * b
        height = min(stop * b, out.shape[0]) - first_row
        nothing = zeros(out, registers)
        # Eight rows at a time may go beyond the matrix in its last blocks.
        total = np.empty(((stop - start) * b, panels.shape[2]), out.dtype)
        for panel in range(firsts.size):
            X, column = panels[panel], firsts[panel]
            for row in range(total.shape[0]):
                store(total, row, 0, nothing)
            for block_row in range(block_columns.shape[0]):
                count = min(b, X.shape[0] - block_row * b)
                for slot in range(block_columns.shape[1]):
                    block_column = np.int64(block_columns[block_row, slot])
                    if block_column < 0 or block_column >= stop:
                        break
                    if block_column < start:
                        continue
                    block = values[block_row, slot]
                    target = block_column * b - first_row
                    width = min(b, height - target)
                    if finite and width >= ROWS:
                        done = 0
                        while done + ROWS <= width:
                            eight_columns(
                                block, done, count, X, block_row * b, total, target, registers
                            )
                            done += ROWS
                        for j in range(done, width):
                            one_column(block, j, count, X, block_row * b, total, target, registers)
                    else:
                        for j in range(width):
                            one_column(block, j, count, X, block_row * b, total, target, registers)
            for row in range(height):
                store(out, first_row + row, column, load(total, row, 0, registers))

    return multiply_columns


@jit(forceinline=True)
def eight_columns(block, j, count, X, first, total, target, registers):
    literally(registers)
    row = target + j
    t0, t1 = load(total, row, 0, registers), load(total, row + 1, 0, registers)
    t2, t3 = load(total, row + 2, 0, registers), load(total, row + 3, 0, registers)
    t4, t5 = load(total, row + 4, 0, registers), load(total, row + 5, 0, registers)
    t6, t7 = load(total, row + 6, 0, registers), load(total, row + 7, 0, registers)
    for i in range(count):
        x = load(X, first + i, 0, registers)
        numbers = block[i, j : j + ROWS]
        t0 = add_scaled(t0, numbers[0], x)
        t1 = add_scaled(t1, numbers[1], x)
        t2 = add_scaled(t2, numbers[2], x)
        t3 = add_scaled(t3, numbers[3], x)
        t4 = add_scaled(t4, numbers[4], x)
        t5 = add_scaled(t5, numbers[5], x)
        t6 = add_scaled(t6, numbers[6], x)
        t7 = add_scaled(t7, numbers[7], x)
    store(total, row, 0, t0)
    store(total, row + 1, 0, t1)
    store(total, row + 2, 0, t2)
    store(total, row + 3, 0, t3)
    store(total, row + 4, 0, t4)
    store(total, row + 5, 0, t5)
    store(total, row + 6, 0, t6)
    store(total, row + 7, 0, t7)


@jit
def one_column(block, j, count, X, first, total, target, registers):
    literally(registers)
    sums = load(total, target + j, 0, registers)
    for i in range(count):
        value = block[i, j]
        if value != 0:
            sums = add_scaled(sums, value, load(X, first + i, 0, registers))
    store(total, target + j, 0, sums)


_multiply_rows = _row_product(PANEL_REGISTERS)
_multiply_columns = _column_product(PANEL_REGISTERS)
_NARROW = {_multiply_rows: _row_product(1), _multiply_columns: _column_product(1)}


@jit
def _sample_rows(block_columns, Y, X, out, start, stop):
    b = out.shape[2]
    for block_row in range(start, stop):
        row = block_row * b
        height = min(b, Y.shape[0] - row)
        for slot in range(block_columns.shape[1]):
            if block_columns[block_row, slot] < 0:
                break
            column = np.int64(block_columns[block_row, slot]) * b
            width = min(b, X.shape[0] - column)
            block = out[block_row, slot]
            if height >= 4 and width >= 4:
                for group in range(0, height, 4):
                    i = min(group, height - 4)
                    for part in range(0, width, 4):
                        j = min(part, width - 4)
                        _sixteen_dots(Y, row + i, X, column + j, block[i : i + 4, j : j + 4])
            else:
                for i in range(height):
                    for j in range(width):
                        block[i, j] = _one_dot(Y, row + i, X, column + j)


@jit(forceinline=True)
def _sixteen_dots(Y, i, X, j, out):
    s00, s01, s02, s03 = zeros(X, 1), zeros(X, 1), zeros(X, 1), zeros(X, 1)
    s10, s11, s12, s13 = s00, s01, s02, s03
    s20, s21, s22, s23 = s00, s01, s02, s03
    s30, s31, s32, s33 = s00, s01, s02, s03
    for d in range(0, X.shape[1], lanes_of(X, 1)):
        x0, x1 = load(X, j, d, 1), load(X, j + 1, d, 1)
        x2, x3 = load(X, j + 2, d, 1), load(X, j + 3, d, 1)
        y = load(Y, i, d, 1)
        s00, s01 = add_products(s00, y, x0), add_products(s01, y, x1)
        s02, s03 = add_products(s02, y, x2), add_products(s03, y, x3)
        y = load(Y, i + 1, d, 1)
        s10, s11 = add_products(s10, y, x0), add_products(s11, y, x1)
        s12, s13 = add_products(s12, y, x2), add_products(s13, y, x3)
        y = load(Y, i + 2, d, 1)
        s20, s21 = add_products(s20, y, x0), add_products(s21, y, x1)
        s22, s23 = add_products(s22, y, x2), add_products(s23, y, x3)
        y = load(Y, i + 3, d, 1)
        s30, s31 = add_products(s30, y, x0), add_products(s31, y, x1)
        s32, s33 = add_products(s32, y, x2), add_products(s33, y, x3)
    out[0, 0], out[0, 1], out[0, 2], out[0, 3] = sum_of(s00), sum_of(s01), sum_of(s02), sum_of(s03)
    out[1, 0], out[1, 1], out[1, 2], out[1, 3] = sum_of(s10), sum_of(s11), sum_of(s12), sum_of(s13)
    out[2, 0], out[2, 1], out[2, 2], out[2, 3] = sum_of(s20), sum_of(s21), sum_of(s22), sum_of(s23)
    out[3, 0], out[3, 1], out[3, 2], out[3, 3] = sum_of(s30), sum_of(s31), sum_of(s32), sum_of(s33)


@jit
def _one_dot(Y, i, X, j):
    total = zeros(X, 1)
    for d in range(0, X.shape[1], lanes_of(X, 1)):
        total = add_products(total, load(Y, i, d, 1), load(X, j, d, 1))
    return sum_of(total)
