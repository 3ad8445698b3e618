"""Compressed sparse rows: the entries of each row, one row after the other."""

from typing import Any, Self

import numpy as np

from twell_numba.formats.arrays import Array, host_array, value_dtype, values_of_pattern
from twell_numba.formats.base import SparseMatrix, is_nonzero, on_host
from twell_numba.formats.index_width import index_dtype, require_index_dtype


class CSRMatrix(SparseMatrix):
    """A matrix of which the entries of each row lie together, by column.

    Row ``i`` has the entries ``indptr[i]`` to ``indptr[i + 1] - 1`` of ``data`` and ``indices``.
    The transpose of a matrix in this form is the matrix by columns (CSC): ``A.T`` has for its rows
    the columns of ``A``.

    No layout keywords.

    Parameters
    ----------
    data : array, shape (nnz,)
        float64, float32, float16 or bfloat16. Zeros may be stored; conversions store none.
    indices : array of int32 or int64, shape (nnz,)
        Column numbers; in each row they ascend, without repetition.
    indptr : array of int32 or int64, shape (rows + 1,)
        Where the entries of each row begin, from 0 to nnz.
    shape : tuple of int
        Rows and columns.
    validate : bool
        Whether to check all invariants. Without it, wrong arrays lead to wrong memory accesses.

    Raises
    ------
    ValueError, TypeError
        If an array has the wrong shape, contents or dtype; see ``validate``.

    Notes
    -----
    Conversions choose the width of ``indices`` by the number of columns and that of ``indptr`` by
    nnz, each for itself.
    """

    format_name = "csr"
    kernel_family = "csr"
    array_names = ("data", "indices", "indptr")
    knows_nnz = True

    data: Array
    indices: Array
    indptr: Array

    def __init__(
        self,
        data: Any,
        indices: Any,
        indptr: Any,
        shape: tuple[int, int],
        *,
        validate: bool = True,
    ) -> None:
        self._hold(shape, data=data, indices=indices, indptr=indptr)
        if validate:
            self.validate()

    # ------------------------------------------------------------------ conversions

    @classmethod
    def _pack_dense(cls, dense: Array) -> Self:  # type: ignore[override]
        from twell_numba.kernels.conversion import dense_to_csr

        data, indices, indptr = dense_to_csr(dense)
        return cls(data, indices, indptr, dense.shape, validate=False)

    @classmethod
    def _pack(  # type: ignore[override]
        cls, rows: np.ndarray, columns: np.ndarray, values: np.ndarray, shape: tuple[int, int]
    ) -> Self:
        indptr = np.zeros(shape[0] + 1, index_dtype(values.size))
        np.cumsum(np.bincount(rows, minlength=shape[0]), out=indptr[1:])
        indices = columns.astype(index_dtype(shape[1]))
        return cls(values, indices, indptr, shape, validate=False)

    @classmethod
    def _pack_rows(cls, entries: "CSRMatrix") -> Self:  # type: ignore[override]
        return cls(entries.data, entries.indices, entries.indptr, entries.shape, validate=False)

    def _entry_rows(self, *, with_zeros: bool) -> "CSRMatrix":
        from twell_numba.kernels.conversion.cuda import rows_of_csr

        return CSRMatrix(*rows_of_csr(self, with_zeros=with_zeros), self.shape, validate=False)

    def _dense_on_gpu(self) -> Array:
        from twell_numba.kernels.conversion.cuda import dense_of_csr

        return dense_of_csr(self)

    def _layout(self) -> dict[str, int]:
        return {}

    @property
    def T(self) -> Self:
        """The transpose, a new CSR matrix: the entries of this one by columns (CSC).

        It is built anew each time, in O(nnz + columns), and takes as much memory as this matrix:
        keep it where it is used more than once. Stored zeros stay stored.
        """
        from twell_numba.kernels.conversion import transpose_csr

        rows, columns = self.shape
        data, indices, indptr = transpose_csr(self.data, self.indices, self.indptr, columns)
        return type(self)(data, indices, indptr, (columns, rows), validate=False)

    # ------------------------------------------------------------------ entries

    @property
    def dtype(self) -> np.dtype:
        """The dtype of the values."""
        return self.data.dtype

    @property
    def nnz(self) -> int:
        """Number of stored entries, stored zeros included."""
        return self.data.size

    @property
    def stored_values(self) -> Array:
        """The array of the values, ``data``, without a copy: what training changes."""
        return self.data

    def with_values(self, values: Any) -> Self:
        """Return a matrix of this pattern with other values; index arrays are shared.

        With them all that kernels make of the pattern once, such as its order by columns.

        Parameters
        ----------
        values : array, shape (nnz,)
            Held without a copy where a kernel can read it as it is. On the device of the matrix.

        Raises
        ------
        TypeError, ValueError
            If it has another shape, or a dtype that is not accepted.
        """
        values = values_of_pattern(values, self.data, type(self).__name__)
        return self._of_same_pattern(data=values)

    @on_host
    def coordinates(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the stored entries as (rows, columns, values), by row and then by column.

        Each has shape (nnz,); rows and columns are int64. They are copies, in the host's memory.
        """
        rows = np.repeat(np.arange(self.shape[0]), self.row_lengths())
        return rows, self.indices.astype(np.int64), self.data.copy()

    def count_nonzero(self) -> int:
        """Return the number of entries that are not zero (NaN is not zero)."""
        return int(np.count_nonzero(is_nonzero(host_array(self.data))))

    def row_lengths(self) -> np.ndarray:
        """Return the number of stored entries of each row, int64, shape (rows,)."""
        return np.diff(host_array(self.indptr).astype(np.int64))

    # ------------------------------------------------------------------ invariants

    @on_host
    def validate(self) -> None:
        """Check every invariant of the format.

        Raises
        ------
        ValueError
            If one does not hold, with the row, what was given and what is wanted.
        TypeError
            If an array has the wrong dtype.
        """
        self._validate_dtypes_and_shapes()
        self._validate_pointers()
        self._validate_columns()

    def _validate_dtypes_and_shapes(self) -> None:
        owner = type(self).__name__
        value_dtype(self.data.dtype, f"{owner}: data")
        require_index_dtype(self.indices, f"{owner}: indices")
        require_index_dtype(self.indptr, f"{owner}: indptr")
        wanted = {
            "data": (self.data.size,),
            "indices": (self.data.size,),
            "indptr": (self.shape[0] + 1,),
        }
        for name, shape in wanted.items():
            given = getattr(self, name).shape
            if given != shape:
                raise ValueError(
                    f"{owner}: {name} of shape {given} given, {shape} wanted "
                    f"for a matrix of shape {self.shape} with data of {self.data.size} values"
                )

    def _validate_pointers(self) -> None:
        owner, indptr = type(self).__name__, self.indptr
        if indptr[0] != 0:
            raise ValueError(f"{owner}: row 0: begins at pointer {indptr[0]}, 0 wanted")
        wrong = np.flatnonzero(indptr[1:] < indptr[:-1])
        if wrong.size:
            row = int(wrong[0])
            raise ValueError(
                f"{owner}: row {row}: ends at pointer {indptr[row + 1]} given, "
                f"at least {indptr[row]} wanted, where it begins"
            )
        if indptr[-1] != self.nnz:
            raise ValueError(
                f"{owner}: row {self.shape[0] - 1}: ends at pointer {indptr[-1]} given, "
                f"{self.nnz} wanted, the length of data and indices"
            )

    def _validate_columns(self) -> None:
        indices = self.indices
        wrong = np.flatnonzero((indices < 0) | (indices >= self.shape[1]))
        if wrong.size:
            entry = int(wrong[0])
            raise ValueError(
                f"{type(self).__name__}: row {self._row_of(entry)}: column {indices[entry]} "
                f"given, 0 to {self.shape[1] - 1} wanted"
            )
        descends = indices[1:] <= indices[:-1]
        # Between the last entry of a row and the first of the next, columns may descend.
        starts = self.indptr[1:-1]
        descends[starts[(starts > 0) & (starts < self.nnz)] - 1] = False
        wrong = np.flatnonzero(descends)
        if wrong.size:
            entry = int(wrong[0]) + 1
            raise ValueError(
                f"{type(self).__name__}: row {self._row_of(entry)}: column {indices[entry]} given "
                f"after {indices[entry - 1]}, ascending columns without repetition wanted"
            )

    def _row_of(self, entry: int) -> int:
        return int(np.searchsorted(self.indptr, entry, side="right")) - 1
