"""Hybrid ELL: entries packed by row to one width, and a dense tail."""

from typing import Any, Self

import numpy as np

from twell_numba.formats.arrays import Array
from twell_numba.formats.csr import CSRMatrix
from twell_numba.formats.ell import ELLMatrix, pack_segments, whole_number
from twell_numba.formats.index_width import index_dtype

DEFAULT_WIDTH = 128
# Counts are held in 32 bits.
LARGEST_WIDTH = 2**31 - 1


class HybridELLMatrix(ELLMatrix):
    """A matrix of which each row is packed into ``width`` slots; longer rows are kept in the tail.

    Layout keyword of ``from_dense`` and the other conversions: ``width`` (at least 1, default 128).

    Parameters
    ----------
    values : array, shape (M, width)
        float64, float32, float16 or bfloat16.
    columns : array of int32, shape (M, width)
        Column numbers, ascending; int64 where F is over 2^31 - 1.
    counts : array of int32, shape (M,)
        Used slots; the others may hold anything.
    shape : tuple of int
        (M, F).
    tail_rows : array of int64, shape (R,), optional
        Rows kept in the tail, ascending; their counts are 0.
    tail_values : array, shape (R, F), optional
        Those rows, dense.
    validate : bool
        Whether to check all invariants. Without it, wrong arrays lead to wrong memory accesses.

    Raises
    ------
    ValueError, TypeError
        If an array has the wrong shape, contents or dtype; see ``validate``.
    """

    format_name = "hybrid_ell"
    kernel_family = "ell_product"
    layout_names = ("width",)

    def __init__(
        self,
        values: Any,
        columns: Any,
        counts: Any,
        shape: tuple[int, int],
        *,
        tail_rows: Any = None,
        tail_values: Any = None,
        validate: bool = True,
    ) -> None:
        self._set_arrays(values, columns, counts, shape, tail_rows, tail_values)
        if validate:
            self.validate()

    @property
    def width(self) -> int:
        """Slots of a row."""
        return self.values.shape[-1]

    @classmethod
    def _pack(  # type: ignore[override]
        cls,
        rows: np.ndarray,
        columns: np.ndarray,
        values: np.ndarray,
        shape: tuple[int, int],
        *,
        width: int = DEFAULT_WIDTH,
    ) -> Self:
        return cls._from_segments(
            pack_segments(rows, columns, values, shape, **_segments(shape, width)), shape
        )

    @classmethod
    def _pack_dense(  # type: ignore[override]
        cls, dense: Array, *, width: int = DEFAULT_WIDTH
    ) -> Self:
        from twell_numba.kernels.conversion import dense_to_segments

        shape = (dense.shape[0], dense.shape[1])
        return cls._from_segments(dense_to_segments(dense, **_segments(shape, width)), shape)

    @classmethod
    def _pack_rows(  # type: ignore[override]
        cls, entries: CSRMatrix, *, width: int = DEFAULT_WIDTH
    ) -> Self:
        from twell_numba.kernels.conversion.cuda import segments_of_rows

        arrays = segments_of_rows(entries, **_segments(entries.shape, width))
        return cls._from_segments(arrays, entries.shape)

    @classmethod
    def _from_segments(cls, arrays: dict[str, Array], shape: tuple[int, int]) -> Self:
        # without the one segment a row
        arrays["values"] = arrays["values"].reshape(shape[0], arrays["values"].shape[2])
        arrays["columns"] = arrays["columns"].reshape(arrays["values"].shape)
        arrays["counts"] = arrays["counts"].reshape(shape[0])
        return cls(**arrays, shape=shape, validate=False)

    def _layout(self) -> dict[str, int]:
        return {"width": self.width}

    @property
    def segments_per_row(self) -> int:
        return 1

    @property
    def segment_width(self) -> int:
        return max(self.shape[1], 1)

    @property
    def _column_dtype(self) -> np.dtype:
        return index_dtype(self.shape[1])

    @property
    def _counts_shape(self) -> tuple[int, ...]:
        return (self.shape[0],)

    def _place(self, segment: int) -> str:
        return f"row {segment}"

    def _validate_shapes(self) -> None:
        super()._validate_shapes()
        whole_number(self.width, 1, LARGEST_WIDTH, "HybridELLMatrix: width")


def _segments(shape: tuple[int, int], width: int) -> dict[str, Any]:
    """Return how a matrix is cut: one segment a row."""
    return {
        "segments_per_row": 1,
        "segment_width": max(shape[1], 1),
        "slots": whole_number(width, 1, LARGEST_WIDTH, "HybridELLMatrix: width"),
        "column_dtype": index_dtype(shape[1]),
    }
