"""Block-ELL: square blocks, as many in every row of blocks."""

from typing import Any, NamedTuple, Self

import numpy as np

from twell_numba.formats.arrays import (
    Array,
    host_array,
    kernel_array,
    refuse_gpu,
    value_array,
    value_dtype,
    values_of_pattern,
)
from twell_numba.formats.base import SparseMatrix, on_host, widened_for_scipy
from twell_numba.formats.csr import CSRMatrix
from twell_numba.formats.ell import whole_number
from twell_numba.formats.index_width import index_dtype, require_index_dtype

DEFAULT_BLOCK_SIZE = 16
# A matrix without blocks could claim any size.
LARGEST_BLOCK_SIZE = 65536
NO_BLOCK = -1


class BlockedELLArrays(NamedTuple):
    """The arguments of cuSPARSE's ``cusparseCreateBlockedEll``, in its order and layout.

    Attributes
    ----------
    rows, columns : int
        cuSPARSE's matrix ends with whole blocks, so these are rounded up to multiples of b.
    block_size : int
        ``ellBlockSize``, b.
    ell_columns : int
        ``ellCols``, blocks_per_row * b.
    column_indices : array of int32 or int64, shape (block_rows, blocks_per_row)
        ``ellColInd``, counted from 0, with -1 where there is no block.
    values : array, shape (rows, ell_columns)
        ``ellValue``: each row holds that row of all its blocks, one block after the other (so a
        block is not contiguous, as it is in ``BlockELLMatrix.values``).
    """

    rows: int
    columns: int
    block_size: int
    ell_columns: int
    column_indices: np.ndarray
    values: np.ndarray


class BlockELLMatrix(SparseMatrix):
    """A matrix of which only the b x b blocks that hold an entry are stored, each as a whole.

    The matrix is cut into rows of blocks from its upper left corner. Where its shape is not a
    multiple of b, the blocks at the right and lower edge reach beyond it; what they hold there is
    *edge padding*: it may be anything, is never read and never counted.

    Layout keywords of ``from_dense`` and the other conversions: ``block_size`` (b, 1 to 65536,
    default 16); ``blocks_per_row`` (default: as many as the fullest row of blocks holds; fewer are
    refused).

    Parameters
    ----------
    values : array, shape (block_rows, blocks_per_row, b, b)
        float64, float32, float16 or bfloat16; block_rows = ceil(rows / b). Each block in C order.
    block_columns : array of int32 or int64, shape (block_rows, blocks_per_row)
        The number of each block's column of blocks, 0 to ceil(columns / b) - 1; in each row they
        ascend, without repetition, and are followed by -1 where there is no block. The values of a
        block that is not there may be anything.
    shape : tuple of int
        Rows and columns.
    block_size : int
        b.
    validate : bool
        Whether to check all invariants. Without it, wrong arrays lead to wrong memory accesses.

    Raises
    ------
    ValueError, TypeError
        If an array has the wrong shape, contents or dtype; see ``validate``.

    Notes
    -----
    The entries of a matrix in this format are all elements of its blocks inside the matrix, zeros
    among them: ``nnz`` counts them, ``count_nonzero`` does not, and conversions to other formats
    leave zeros out.
    """

    format_name = "block_ell"
    kernel_family = "block_ell"
    array_names = ("values", "block_columns")
    parameter_names = ("block_size",)
    layout_names = ("block_size", "blocks_per_row")

    values: Array
    block_columns: Array

    def __init__(
        self,
        values: Any,
        block_columns: Any,
        shape: tuple[int, int],
        *,
        block_size: int,
        validate: bool = True,
    ) -> None:
        self.block_size = whole_number(
            block_size, 1, LARGEST_BLOCK_SIZE, f"{type(self).__name__}: block_size"
        )
        self._hold(shape, values=values, block_columns=block_columns)
        if validate:
            self.validate()

    # ------------------------------------------------------------------ conversions

    @classmethod
    def _pack_dense(  # type: ignore[override]
        cls,
        dense: Array,
        *,
        block_size: int = DEFAULT_BLOCK_SIZE,
        blocks_per_row: int | None = None,
    ) -> Self:
        from twell_numba.kernels.conversion import dense_to_block_ell

        block_size = whole_number(block_size, 1, LARGEST_BLOCK_SIZE, "BlockELLMatrix: block_size")
        values, block_columns = dense_to_block_ell(dense, block_size, blocks_per_row)
        return cls(values, block_columns, dense.shape, block_size=block_size, validate=False)

    @classmethod
    def _pack(  # type: ignore[override]
        cls,
        rows: np.ndarray,
        columns: np.ndarray,
        values: np.ndarray,
        shape: tuple[int, int],
        *,
        block_size: int = DEFAULT_BLOCK_SIZE,
        blocks_per_row: int | None = None,
    ) -> Self:
        block_size = whole_number(block_size, 1, LARGEST_BLOCK_SIZE, "BlockELLMatrix: block_size")
        # Entries in the order of their blocks. Ranks instead of numbers made of both coordinates,
        # which could pass 64 bits.
        block_rows, block_columns = rows // block_size, columns // block_size
        order = np.lexsort((block_columns, block_rows))
        block_rows, block_columns = block_rows[order], block_columns[order]
        is_first = np.ones(order.size, bool)
        is_first[1:] = (block_rows[1:] != block_rows[:-1]) | (
            block_columns[1:] != block_columns[:-1]
        )
        first = np.flatnonzero(is_first)
        slots, block_columns = place_blocks(
            block_rows[first], block_columns[first], shape, block_size, blocks_per_row
        )
        packed = np.zeros((*block_columns.shape, block_size, block_size), values.dtype)
        entry_slots = slots[np.cumsum(is_first) - 1]
        rows, columns = rows[order] % block_size, columns[order] % block_size
        packed[block_rows, entry_slots, rows, columns] = values[order]
        return cls(packed, block_columns, shape, block_size=block_size, validate=False)

    @classmethod
    def _pack_rows(  # type: ignore[override]
        cls,
        entries: CSRMatrix,
        *,
        block_size: int = DEFAULT_BLOCK_SIZE,
        blocks_per_row: int | None = None,
    ) -> Self:
        from twell_numba.kernels.conversion.cuda import blocks_of_rows

        block_size = whole_number(block_size, 1, LARGEST_BLOCK_SIZE, "BlockELLMatrix: block_size")
        arrays = blocks_of_rows(entries, block_size, blocks_per_row)
        return cls(*arrays, entries.shape, block_size=block_size, validate=False)

    def _entry_rows(self, *, with_zeros: bool) -> CSRMatrix:
        from twell_numba.kernels.conversion.cuda import rows_of_blocks

        return CSRMatrix(*rows_of_blocks(self, with_zeros=with_zeros), self.shape, validate=False)

    def _dense_on_gpu(self) -> Array:
        from twell_numba.kernels.conversion.cuda import dense_of_blocks

        return dense_of_blocks(self)

    def _layout(self) -> dict[str, int]:
        return {"block_size": self.block_size}

    def to_dense(self) -> Array:
        """Return the matrix as a C-contiguous array of shape ``shape`` and the same dtype.

        Of a matrix on a GPU it is an array there.
        """
        if self.is_on_gpu:
            return self._dense_on_gpu()
        b = self.block_size
        block_rows, slots = self._blocks()
        block_columns = self.block_columns[block_rows, slots]
        dense = np.zeros((self.block_rows * b, self._block_column_count * b), self.dtype)
        blocks = dense.reshape(self.block_rows, b, self._block_column_count, b)
        blocks[block_rows, :, block_columns, :] = self.values[block_rows, slots]
        return np.ascontiguousarray(dense[: self.shape[0], : self.shape[1]])

    @on_host
    def to_scipy(self, format: str = "csr") -> Any:
        """Return the matrix as a SciPy sparse array; see :meth:`SparseMatrix.to_scipy`.

        As ``"bsr"``, it keeps its blocks if its shape is a multiple of the block size; SciPy knows
        no other, and chooses a block size of its own for them.
        """
        b = self.block_size
        if format != "bsr" or self.shape[0] % b or self.shape[1] % b:
            return super().to_scipy(format)
        import scipy.sparse

        block_rows, slots = self._blocks()
        indptr = np.zeros(self.block_rows + 1, np.int64)
        np.cumsum(np.bincount(block_rows, minlength=self.block_rows), out=indptr[1:])
        values = widened_for_scipy(self.values[block_rows, slots])
        columns = self.block_columns[block_rows, slots]
        return scipy.sparse.bsr_array((values, columns, indptr), self.shape, blocksize=(b, b))

    @property
    def T(self) -> Self:
        """The transpose, a new matrix of the same format and block size.

        It is built anew each time, in O(nnz + blocks log blocks): keep it where it is used more
        than once. Every block stays stored, also one of zeros.
        """
        if self.is_on_gpu:
            from twell_numba.kernels.conversion.cuda import transposed_blocks

            arrays = transposed_blocks(self)
            shape = (self.shape[1], self.shape[0])
            return type(self)(*arrays, shape, block_size=self.block_size, validate=False)
        block_rows, slots = self._blocks()
        old_columns = self.block_columns[block_rows, slots]
        # Block rows ascend already, and still do among equal columns after a stable sort.
        order = np.argsort(old_columns, kind="stable")
        block_rows, slots, new_rows = block_rows[order], slots[order], old_columns[order]
        shape = (self.shape[1], self.shape[0])
        new_slots, new_columns = place_blocks(new_rows, block_rows, shape, self.block_size, None)
        b = self.block_size
        values = np.zeros((*new_columns.shape, b, b), self.dtype)
        values[new_rows, new_slots] = self.values[block_rows, slots].transpose(0, 2, 1)
        return type(self)(values, new_columns, shape, block_size=b, validate=False)

    @on_host
    def to_blocked_ell_arrays(self) -> BlockedELLArrays:
        """Return copies of the arrays in the layout of cuSPARSE's Blocked-ELL, padding zero."""
        b = self.block_size
        values = self._arrays_to_save()["values"]
        block_rows, blocks_per_row = self.block_columns.shape
        rows, ell_columns = block_rows * b, blocks_per_row * b
        return BlockedELLArrays(
            rows,
            self._block_column_count * b,
            b,
            ell_columns,
            self.block_columns.copy(),
            values.transpose(0, 2, 1, 3).reshape(rows, ell_columns),
        )

    @classmethod
    def from_blocked_ell_arrays(
        cls,
        column_indices: Any,
        values: Any,
        shape: tuple[int, int],
        *,
        block_size: int,
    ) -> Self:
        """Build a matrix from arrays in the layout of cuSPARSE's Blocked-ELL, which are copied.

        Parameters
        ----------
        column_indices : array of int32 or int64, shape (block_rows, blocks_per_row)
            ``ellColInd``, counted from 0; in any order, with -1 in any place.
        values : array, shape (block_rows * b, blocks_per_row * b)
            ``ellValue``; see :class:`BlockedELLArrays`.
        shape : tuple of int
            Rows and columns; may end inside the last blocks.
        block_size : int
            b.

        Raises
        ------
        TypeError, ValueError
            As the constructor: among others, if a row of blocks has two in one column.
        """
        owner = f"{cls.__name__}.from_blocked_ell_arrays"
        b = whole_number(block_size, 1, LARGEST_BLOCK_SIZE, f"{owner}: block_size")
        refuse_gpu(column_indices, f"{owner}: column_indices")
        indices = kernel_array(column_indices)
        require_index_dtype(indices, f"{owner}: column_indices")
        given = kernel_array(value_array(values, f"{owner}: values"))
        if indices.ndim != 2 or given.shape != (indices.shape[0] * b, indices.shape[1] * b):
            raise ValueError(
                f"{owner}: column_indices of shape {indices.shape} and values of shape "
                f"{given.shape} given, (block_rows, blocks_per_row) and both times {b} wanted"
            )
        blocks = given.reshape(indices.shape[0], b, indices.shape[1], b).transpose(0, 2, 1, 3)
        last = np.where(indices == NO_BLOCK, np.iinfo(indices.dtype).max, indices)
        order = np.argsort(last, axis=1, kind="stable")
        return cls(
            np.take_along_axis(blocks, order[:, :, np.newaxis, np.newaxis], axis=1),
            np.take_along_axis(indices, order, axis=1),
            shape,
            block_size=b,
        )

    # ------------------------------------------------------------------ entries

    @property
    def dtype(self) -> np.dtype:
        """The dtype of the values."""
        return self.values.dtype

    @property
    def block_rows(self) -> int:
        """Number of rows of blocks."""
        return -(-self.shape[0] // self.block_size)

    @property
    def blocks_per_row(self) -> int:
        """Blocks that every row of blocks has room for."""
        return self.block_columns.shape[1]

    @property
    def blocks(self) -> int:
        """Number of stored blocks."""
        return int(np.count_nonzero(host_array(self.block_columns) != NO_BLOCK))

    @property
    def nnz(self) -> int:
        """Number of elements of stored blocks inside the matrix, zeros included."""
        block_columns = host_array(self.block_columns)
        block_rows, slots = np.nonzero(block_columns != NO_BLOCK)
        heights = self._inside(block_rows, self.shape[0])
        widths = self._inside(block_columns[block_rows, slots], self.shape[1])
        return int((heights * widths).sum())

    @property
    def stored_values(self) -> Array:
        """The array of the blocks, ``values``, without a copy: what training changes."""
        return self.values

    def with_values(self, values: Any) -> Self:
        """Return a matrix of this pattern with other values; ``block_columns`` is shared.

        With it all that kernels make of the pattern once, such as its order by columns.

        Parameters
        ----------
        values : array, shape (block_rows, blocks_per_row, b, b)
            Held without a copy where a kernel can read it as it is. On the device of the matrix.

        Raises
        ------
        TypeError, ValueError
            If it has another shape, or a dtype that is not accepted.
        """
        values = values_of_pattern(values, self.values, type(self).__name__)
        return self._of_same_pattern(values=values)

    @on_host
    def stored_places(self) -> np.ndarray:
        """Return which elements of ``values`` are entries of the matrix, bool of its shape.

        The others are padding: blocks that are not there, and what reaches beyond the matrix.
        """
        return ~self._padding()["values"]

    @on_host
    def coordinates(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the stored entries as (rows, columns, values), by row and then by column.

        Each has shape (nnz,); rows and columns are int64. They are copies, in the host's memory.
        Zeros inside the stored blocks are among them.
        """
        b = self.block_size
        block_rows, slots = self._blocks()
        within = np.arange(b)
        block_columns = self.block_columns[block_rows, slots].astype(np.int64)
        wanted = (block_rows.size, b, b)
        rows = np.broadcast_to((block_rows[:, np.newaxis] * b + within)[:, :, np.newaxis], wanted)
        columns = np.broadcast_to(
            (block_columns[:, np.newaxis] * b + within)[:, np.newaxis, :], wanted
        )
        inside = (rows < self.shape[0]) & (columns < self.shape[1])
        rows, columns = rows[inside], columns[inside]
        values = self.values[block_rows, slots][inside]
        # Blocks of a row ascend by column, so a stable sort by row is all that is needed.
        order = np.argsort(rows, kind="stable")
        return rows[order], columns[order], values[order]

    def _blocks(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the row of blocks and the slot of each stored block, in order."""
        block_rows, slots = np.nonzero(self.block_columns != NO_BLOCK)
        return block_rows, slots

    @property
    def _block_column_count(self) -> int:
        return -(-self.shape[1] // self.block_size)

    def _inside(self, blocks: np.ndarray, size: int) -> np.ndarray:
        """Return how many rows (or columns) of blocks lie inside a matrix with ``size`` of them."""
        return np.minimum(self.block_size, size - blocks.astype(np.int64) * self.block_size)

    def _padding(self) -> dict[str, np.ndarray]:
        b = self.block_size
        within = np.arange(b)
        rows = np.arange(self.block_rows)[:, np.newaxis] * b + within
        columns = self.block_columns.astype(np.int64)[:, :, np.newaxis] * b + within
        stored = self.block_columns != NO_BLOCK
        inside = (
            stored[:, :, np.newaxis, np.newaxis]
            & (rows < self.shape[0])[:, np.newaxis, :, np.newaxis]
            & (columns < self.shape[1])[:, :, np.newaxis, :]
        )
        return {"values": ~inside}

    def _notes(self) -> list[str]:
        return [] if self.is_on_gpu else [f"{self.blocks} blocks"]

    # ------------------------------------------------------------------ invariants

    @on_host
    def validate(self) -> None:
        """Check every invariant of the format; padding is not looked at.

        Raises
        ------
        ValueError
            If one does not hold, with the row of blocks, what was given and what is wanted.
        TypeError
            If an array has the wrong dtype.
        """
        self._validate_dtypes_and_shapes()
        self._validate_block_columns()

    def _validate_dtypes_and_shapes(self) -> None:
        owner = type(self).__name__
        value_dtype(self.values.dtype, f"{owner}: values")
        require_index_dtype(self.block_columns, f"{owner}: block_columns")
        blocks_per_row = self.block_columns.shape[-1] if self.block_columns.ndim else 0
        wanted = {
            "block_columns": (self.block_rows, blocks_per_row),
            "values": (self.block_rows, blocks_per_row, self.block_size, self.block_size),
        }
        for name, shape in wanted.items():
            given = getattr(self, name).shape
            if given != shape:
                raise ValueError(
                    f"{owner}: {name} of shape {given} given, {shape} wanted for a matrix of "
                    f"shape {self.shape} in blocks of {self.block_size} x {self.block_size}"
                )

    def _validate_block_columns(self) -> None:
        owner, given, count = type(self).__name__, self.block_columns, self._block_column_count
        rows, slots = np.nonzero((given < NO_BLOCK) | (given >= count))
        if rows.size:
            raise ValueError(
                f"{owner}: block row {rows[0]}: block column {given[rows[0], slots[0]]} given, "
                f"0 to {count - 1} wanted, or {NO_BLOCK} for no block"
            )
        before, after = given[:, :-1], given[:, 1:]
        rows, slots = np.nonzero((after != NO_BLOCK) & (after <= before))
        if rows.size:
            row, slot = int(rows[0]), int(slots[0])
            raise ValueError(
                f"{owner}: block row {row}: block column {after[row, slot]} given after "
                f"{before[row, slot]}, ascending columns without repetition wanted"
            )
        rows, slots = np.nonzero((after != NO_BLOCK) & (before == NO_BLOCK))
        if rows.size:
            row, slot = int(rows[0]), int(slots[0])
            raise ValueError(
                f"{owner}: block row {row}: block column {after[row, slot]} given after "
                f"{NO_BLOCK}, blocks before the slots without one wanted"
            )


def place_blocks(
    block_rows: np.ndarray,
    block_columns: np.ndarray,
    shape: tuple[int, int],
    block_size: int,
    blocks_per_row: int | None,
) -> tuple[np.ndarray, np.ndarray]:
    """Give blocks their slots.

    Parameters
    ----------
    block_rows, block_columns : arrays of int64, shape (blocks,)
        Sorted by row and then by column.
    blocks_per_row : int or None
        None: as many as the fullest row of blocks needs.

    Returns
    -------
    slots : array of int64, shape (blocks,)
    block_columns : array, shape (block_rows, blocks_per_row)
        As in :class:`BlockELLMatrix`.

    Raises
    ------
    ValueError
        If a row of blocks holds more than ``blocks_per_row``.
    """
    counts = np.bincount(block_rows, minlength=-(-shape[0] // block_size))
    blocks_per_row = enough_blocks_per_row(counts, blocks_per_row)
    slots = np.arange(block_rows.size) - (np.cumsum(counts) - counts)[block_rows]
    dtype = index_dtype(-(-shape[1] // block_size))
    placed = np.full((counts.size, blocks_per_row), NO_BLOCK, dtype)
    placed[block_rows, slots] = block_columns
    return slots, placed


def enough_blocks_per_row(counts: np.ndarray, blocks_per_row: int | None) -> int:
    """Return ``blocks_per_row``, or the largest count where it is None.

    Raises
    ------
    ValueError
        If it is less than a row of blocks holds: nothing is dropped.
    """
    largest = int(counts.max(initial=0))
    if blocks_per_row is None:
        return largest
    blocks_per_row = whole_number(blocks_per_row, 0, None, "BlockELLMatrix: blocks_per_row")
    if blocks_per_row < largest:
        raise ValueError(
            f"BlockELLMatrix: block row {int(counts.argmax())} holds {largest} blocks, "
            f"blocks_per_row {blocks_per_row} given, at least {largest} wanted"
        )
    return blocks_per_row
