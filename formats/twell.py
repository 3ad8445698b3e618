"""TwELL: entries packed by row and tile of columns."""

from typing import Any, Self

import numpy as np

from twell_numba.formats.arrays import Array
from twell_numba.formats.csr import CSRMatrix
from twell_numba.formats.ell import ELLMatrix, pack_segments, whole_number

# Columns are held as 16-bit offsets inside their tile.
LARGEST_TILE = 65536
DEFAULT_TILE = 256
DEFAULT_COMPRESSION = 8


class TwELLMatrix(ELLMatrix):
    """A matrix cut into tiles of T columns, each row of a tile packed into a fixed number of slots.

    A kernel that computes a tile can pack it by itself, without knowing the rest of the row. A row
    of which any tile holds more nonzeros than slots is kept whole in the tail.

    Layout keywords of ``from_dense`` and the other conversions: ``tile`` (T, 1 to 65536, default
    256); ``slots`` of a tile (1 to T), or ``compression``, which makes them
    ``tile // compression`` (default 8).

    Parameters
    ----------
    values : array, shape (M, tiles, slots)
        float64, float32, float16 or bfloat16; tiles = ceil(F / T).
    columns : array of uint16, shape (M, tiles, slots)
        Offset inside the tile, ascending.
    counts : array of int32, shape (M, tiles)
        Used slots; the others may hold anything.
    shape : tuple of int
        (M, F).
    tile : int
        T, the number of columns of a tile.
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

    format_name = "twell"
    kernel_family = "ell_product"
    parameter_names = ("tile",)
    layout_names = ("tile", "slots", "compression")

    def __init__(
        self,
        values: Any,
        columns: Any,
        counts: Any,
        shape: tuple[int, int],
        *,
        tile: int,
        tail_rows: Any = None,
        tail_values: Any = None,
        validate: bool = True,
    ) -> None:
        self.tile = whole_number(tile, 1, LARGEST_TILE, "TwELLMatrix: tile")
        self._set_arrays(values, columns, counts, shape, tail_rows, tail_values)
        if validate:
            self.validate()

    @property
    def tiles(self) -> int:
        """Tiles of a row."""
        return -(-self.shape[1] // self.tile)

    @property
    def slots(self) -> int:
        """Slots of a tile."""
        return self.values.shape[-1]

    @classmethod
    def _pack(  # type: ignore[override]
        cls,
        rows: np.ndarray,
        columns: np.ndarray,
        values: np.ndarray,
        shape: tuple[int, int],
        *,
        tile: int = DEFAULT_TILE,
        compression: int | None = None,
        slots: int | None = None,
    ) -> Self:
        segments = _segments(shape, tile, compression, slots)
        arrays = pack_segments(rows, columns, values, shape, **segments)
        return cls(**arrays, shape=shape, tile=segments["segment_width"], validate=False)

    @classmethod
    def _pack_dense(  # type: ignore[override]
        cls,
        dense: Array,
        *,
        tile: int = DEFAULT_TILE,
        compression: int | None = None,
        slots: int | None = None,
    ) -> Self:
        from twell_numba.kernels.conversion import dense_to_segments

        shape = (dense.shape[0], dense.shape[1])
        segments = _segments(shape, tile, compression, slots)
        arrays = dense_to_segments(dense, **segments)
        return cls(**arrays, shape=shape, tile=segments["segment_width"], validate=False)

    @classmethod
    def _pack_rows(  # type: ignore[override]
        cls,
        entries: CSRMatrix,
        *,
        tile: int = DEFAULT_TILE,
        compression: int | None = None,
        slots: int | None = None,
    ) -> Self:
        from twell_numba.kernels.conversion.cuda import segments_of_rows

        segments = _segments(entries.shape, tile, compression, slots)
        arrays = segments_of_rows(entries, **segments)
        return cls(**arrays, shape=entries.shape, tile=segments["segment_width"], validate=False)

    def _layout(self) -> dict[str, int]:
        return {"tile": self.tile, "slots": self.slots}

    @property
    def segments_per_row(self) -> int:
        return self.tiles

    @property
    def segment_width(self) -> int:
        return self.tile

    @property
    def _column_dtype(self) -> np.dtype:
        return np.dtype(np.uint16)

    @property
    def _counts_shape(self) -> tuple[int, ...]:
        return (self.shape[0], self.tiles)

    def _place(self, segment: int) -> str:
        row, tile = divmod(segment, self.tiles)
        return f"row {row}, tile {tile}"

    def _validate_shapes(self) -> None:
        super()._validate_shapes()
        whole_number(self.slots, 1, self.tile, "TwELLMatrix: slots")


def _segments(
    shape: tuple[int, int], tile: int, compression: int | None, slots: int | None
) -> dict[str, Any]:
    """Return how a matrix is cut: a segment a tile."""
    tile = whole_number(tile, 1, LARGEST_TILE, "TwELLMatrix: tile")
    if slots is None:
        compression = DEFAULT_COMPRESSION if compression is None else compression
        compression = whole_number(compression, 1, None, "TwELLMatrix: compression")
        slots = max(tile // compression, 1)
    elif compression is not None:
        raise TypeError("TwELLMatrix: slots and compression given, one of them wanted")
    return {
        "segments_per_row": -(-shape[1] // tile),
        "segment_width": tile,
        "slots": whole_number(slots, 1, tile, "TwELLMatrix: slots"),
        "column_dtype": np.dtype(np.uint16),
    }
