"""What TwELL and hybrid ELL share: segments of fixed capacity, and a dense tail.

Each row is cut into segments of equal width (TwELL's tiles; hybrid ELL has one segment, the row).
A segment has slots for a fixed number of entries; a row of which any segment holds more is kept
whole in the tail. Segments are numbered through the matrix, row after row.
"""

from abc import abstractmethod
from typing import Any

import numpy as np

from twell_numba.formats.arrays import (
    Array,
    host_array,
    is_on_gpu,
    kernel_array,
    matrix_shape,
    value_dtype,
)
from twell_numba.formats.base import SparseMatrix, is_nonzero, on_host


class ELLMatrix(SparseMatrix):
    """A sparse matrix in padded segments, with a dense tail for rows that do not fit.

    Attributes
    ----------
    values : array, shape (..., slots)
    columns : array of integers, shape (..., slots)
        Counted from the segment's first column; they ascend.
    counts : array of int32, shape (...)
        How many slots of a segment are used, from the first on. The others are never read.
    tail_rows : array of int64, shape (R,)
        Rows kept in the tail, ascending. Their counts are 0.
    tail_values : array, shape (R, F)
        Those rows, dense.
    """

    array_names = ("values", "columns", "counts", "tail_rows", "tail_values")

    values: Array
    columns: Array
    counts: Array
    tail_rows: Array
    tail_values: Array

    def _set_arrays(
        self,
        values: Any,
        columns: Any,
        counts: Any,
        shape: Any,
        tail_rows: Any,
        tail_values: Any,
    ) -> None:
        """Set the attributes, without copying arrays that kernels can use as they are."""
        if (tail_rows is None) != (tail_values is None):
            raise ValueError(
                f"{type(self).__name__}: one of tail_rows and tail_values given, "
                "both or none wanted"
            )
        if tail_rows is None:
            columns_of_row = matrix_shape(shape, type(self).__name__)[1]
            values = kernel_array(values)
            tail_rows = _empty_beside(values, (0,), np.dtype(np.int64))
            tail_values = _empty_beside(values, (0, columns_of_row), values.dtype)
        self._hold(
            shape,
            values=values,
            columns=columns,
            counts=counts,
            tail_rows=tail_rows,
            tail_values=tail_values,
        )

    # ------------------------------------------------------------------ what a subclass provides

    @property
    @abstractmethod
    def segments_per_row(self) -> int: ...

    @property
    @abstractmethod
    def segment_width(self) -> int:
        """Columns of a segment; the last of a row may have fewer."""

    @property
    @abstractmethod
    def _column_dtype(self) -> np.dtype: ...

    @property
    @abstractmethod
    def _counts_shape(self) -> tuple[int, ...]: ...

    @abstractmethod
    def _place(self, segment: int) -> str:
        """Return how a message names a segment."""

    # ------------------------------------------------------------------ on a GPU

    def _entry_rows(self, *, with_zeros: bool) -> Any:
        from twell_numba.formats.csr import CSRMatrix
        from twell_numba.kernels.conversion.cuda import rows_of_segments

        return CSRMatrix(*rows_of_segments(self, with_zeros=with_zeros), self.shape, validate=False)

    def _dense_on_gpu(self) -> Array:
        from twell_numba.kernels.conversion.cuda import dense_of_segments

        return dense_of_segments(self)

    # ------------------------------------------------------------------ entries

    @property
    def dtype(self) -> np.dtype:
        """The dtype of the values."""
        return self.values.dtype

    @property
    def nnz(self) -> int:
        """Number of stored entries: all used slots, and what is not zero in the tail."""
        in_slots = int(host_array(self.counts).sum(dtype=np.int64))
        return in_slots + int(np.count_nonzero(is_nonzero(host_array(self.tail_values))))

    @on_host
    def coordinates(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the stored entries as (rows, columns, values), by row and then by column.

        Each has shape (nnz,); rows and columns are int64. They are copies, in the host's memory.
        Zeros in the tail are not entries.
        """
        stored = self.stored()
        segments = np.repeat(np.arange(self.counts.size), self.counts.ravel())
        rows, in_row = np.divmod(segments, max(self.segments_per_row, 1))
        columns = in_row * self.segment_width + self.columns[stored]
        values = self.values[stored]
        if self.tail_rows.size == 0:
            return rows, columns, values
        tail_places, tail_columns = np.nonzero(self.tail_values != self.dtype.type(0))
        rows = np.concatenate([rows, self.tail_rows[tail_places]])
        columns = np.concatenate([columns, tail_columns])
        values = np.concatenate([values, self.tail_values[tail_places, tail_columns]])
        # No row has entries in both parts, so a stable sort by row is all that is needed.
        order = np.argsort(rows, kind="stable")
        return rows[order], columns[order], values[order]

    def stored(self) -> np.ndarray:
        """Return which slots are used, a mask of the shape of ``values``."""
        if self.counts.size == 0:  # without rows, a file could claim any number of slots
            return np.zeros(self.values.shape, bool)
        return np.arange(self.values.shape[-1]) < host_array(self.counts)[..., np.newaxis]

    @on_host
    def values_as(self, dtype: np.dtype) -> np.ndarray:
        """Return a copy of ``values`` in ``dtype``, with zeros in place of padding."""
        stored = self.stored()
        clean = np.zeros(self.values.shape, dtype)
        clean[stored] = self.values[stored]
        return clean

    def _padding(self) -> dict[str, np.ndarray]:
        padding = ~self.stored()
        return {"values": padding, "columns": padding}

    def _notes(self) -> list[str]:
        return [f"tail rows {self.tail_rows.size}"] if self.tail_rows.size else []

    # ------------------------------------------------------------------ invariants

    @on_host
    def validate(self) -> None:
        """Check every invariant of the format; padding is not looked at.

        Raises
        ------
        ValueError
            If one does not hold, with the row, what was given and what is wanted.
        TypeError
            If an array has the wrong dtype.
        """
        self._validate_dtypes()
        self._validate_shapes()
        self._validate_counts()
        self._validate_columns()
        self._validate_tail()

    def _validate_dtypes(self) -> None:
        value_dtype(self.values.dtype, f"{type(self).__name__}: values")
        wanted = {
            "columns": self._column_dtype,
            "counts": np.dtype(np.int32),
            "tail_rows": np.dtype(np.int64),
            "tail_values": self.values.dtype,
        }
        for name, dtype in wanted.items():
            given = getattr(self, name).dtype
            if given != dtype:
                raise TypeError(
                    f"{type(self).__name__}: {name} of dtype {given.name} given, "
                    f"{dtype.name} wanted"
                )

    def _validate_shapes(self) -> None:
        slots = self.values.shape[-1] if self.values.ndim else 0
        tail_length = self.tail_rows.size
        wanted = {
            "counts": self._counts_shape,
            "values": (*self._counts_shape, slots),
            "columns": (*self._counts_shape, slots),
            "tail_rows": (tail_length,),
            "tail_values": (tail_length, self.shape[1]),
        }
        for name, shape in wanted.items():
            given = getattr(self, name).shape
            if given != shape:
                raise ValueError(
                    f"{type(self).__name__}: {name} of shape {given} given, {shape} wanted "
                    f"for a matrix of shape {self.shape}"
                )

    def _validate_counts(self) -> None:
        slots = self.values.shape[-1]
        counts = self.counts.ravel()
        wrong = np.flatnonzero((counts < 0) | (counts > slots))
        if wrong.size:
            segment = int(wrong[0])
            raise ValueError(
                f"{type(self).__name__}: {self._place(segment)}: "
                f"count {counts[segment]} given, 0 to {slots} wanted"
            )

    def _validate_columns(self) -> None:
        columns = self.columns[self.stored()].astype(np.int64)
        segments = np.repeat(np.arange(self.counts.size), self.counts.ravel())
        first = segments % max(self.segments_per_row, 1) * self.segment_width
        widths = np.minimum(self.segment_width, self.shape[1] - first)
        wrong = np.flatnonzero((columns < 0) | (columns >= widths))
        if wrong.size:
            entry = int(wrong[0])
            raise ValueError(
                f"{type(self).__name__}: {self._place(int(segments[entry]))}: "
                f"column {columns[entry]} given, 0 to {widths[entry] - 1} wanted"
            )
        descends = (columns[1:] <= columns[:-1]) & (segments[1:] == segments[:-1])
        wrong = np.flatnonzero(descends)
        if wrong.size:
            entry = int(wrong[0])
            raise ValueError(
                f"{type(self).__name__}: {self._place(int(segments[entry]))}: column "
                f"{columns[entry + 1]} given after {columns[entry]}, ascending columns wanted"
            )

    def _validate_tail(self) -> None:
        tail_rows = self.tail_rows
        wrong = np.flatnonzero((tail_rows < 0) | (tail_rows >= self.shape[0]))
        if wrong.size:
            raise ValueError(
                f"{type(self).__name__}: tail row {tail_rows[wrong[0]]} given, "
                f"0 to {self.shape[0] - 1} wanted"
            )
        wrong = np.flatnonzero(tail_rows[1:] <= tail_rows[:-1])
        if wrong.size:
            raise ValueError(
                f"{type(self).__name__}: tail row {tail_rows[wrong[0] + 1]} given after "
                f"{tail_rows[wrong[0]]}, ascending rows wanted"
            )
        counts = self.counts.reshape(self.shape[0], self.segments_per_row)[tail_rows]
        places, segments = np.nonzero(counts)
        if places.size:
            place, in_row = places[0], segments[0]
            segment = int(tail_rows[place]) * self.segments_per_row + int(in_row)
            raise ValueError(
                f"{type(self).__name__}: {self._place(segment)}: count {counts[place, in_row]} "
                "given for a row that is in the tail, 0 wanted"
            )


def _empty_beside(array: Array, shape: tuple[int, ...], dtype: np.dtype) -> Array:
    """Return an array without elements on the device of another."""
    if not is_on_gpu(array):
        return np.zeros(shape, dtype)
    from twell_numba.device.gpu import empty

    return empty(shape, dtype, array.stream)


def pack_segments(
    rows: np.ndarray,
    columns: np.ndarray,
    values: np.ndarray,
    shape: tuple[int, int],
    *,
    segments_per_row: int,
    segment_width: int,
    slots: int,
    column_dtype: np.dtype,
) -> dict[str, np.ndarray]:
    """Lay sorted nonzero entries out in segments and a tail.

    Parameters
    ----------
    rows, columns : arrays of int64, shape (nnz,)
        By row and then by column.
    values : array, shape (nnz,)

    Returns
    -------
    dict of arrays
        The arrays of :class:`ELLMatrix` by name, with ``values`` and ``columns`` of shape
        (rows, segments_per_row, slots) and ``counts`` of shape (rows, segments_per_row).
        Padding is zero.
    """
    row_count, width = shape
    segment_count = row_count * segments_per_row
    segments = rows * segments_per_row + columns // segment_width
    counts = np.bincount(segments, minlength=segment_count)

    tail_rows = np.unique(np.flatnonzero(counts > slots) // max(segments_per_row, 1))
    in_tail = np.isin(rows, tail_rows)
    tail_values = np.zeros((tail_rows.size, width), values.dtype)
    tail_places = np.searchsorted(tail_rows, rows[in_tail])
    tail_values[tail_places, columns[in_tail]] = values[in_tail]

    counts = counts.reshape(row_count, segments_per_row)
    counts[tail_rows] = 0
    segments, columns, values = segments[~in_tail], columns[~in_tail], values[~in_tail]
    first_of_segment = np.cumsum(counts) - counts.ravel()
    slot = np.arange(segments.size) - first_of_segment[segments]
    packed_values = np.zeros((segment_count, slots), values.dtype)
    packed_columns = np.zeros((segment_count, slots), column_dtype)
    packed_values[segments, slot] = values
    packed_columns[segments, slot] = columns % segment_width
    packed_shape = (row_count, segments_per_row, slots)
    return {
        "values": packed_values.reshape(packed_shape),
        "columns": packed_columns.reshape(packed_shape),
        "counts": counts.astype(np.int32),
        "tail_rows": tail_rows,
        "tail_values": tail_values,
    }


def whole_number(value: Any, smallest: int, largest: int | None, name: str) -> int:
    """Return a layout parameter as an integer after checking its range.

    Raises
    ------
    TypeError
        If it is not a whole number.
    ValueError
        If it is out of range.
    """
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise TypeError(f"{name}: {value!r} given, a whole number wanted")
    number = value.__index__()
    if number < smallest or (largest is not None and number > largest):
        wanted = f"at least {smallest}" if largest is None else f"{smallest} to {largest}"
        raise ValueError(f"{name}: {number} given, {wanted} wanted")
    return number
