"""Pictures of sparse matrices; the one place that uses matplotlib, an optional package."""

import io
import os
from typing import Any

import numpy as np

from twell_numba.atomic import write_file_atomically
from twell_numba.errors import TwellError
from twell_numba.formats import SparseMatrix

# Cells of the picture of a pattern, along each side at most.
LARGEST_PICTURE = 512
HISTOGRAM_BINS = 40


def plot_matrix(matrix: SparseMatrix, path: str | os.PathLike[str]) -> None:
    """Write a PNG picture of where a matrix has nonzeros, and how many its rows have.

    Parameters
    ----------
    matrix : SparseMatrix
    path : path
        Of the picture; overwritten.

    Raises
    ------
    TwellError
        If matplotlib is not installed, or the file cannot be written.
    """
    figure = _new_figure(figsize=(11, 5), layout="constrained")
    figure.suptitle(
        f"{type(matrix).__name__} {matrix.shape[0]} x {matrix.shape[1]}, "
        f"density {matrix.density:.4%}"
    )
    pattern_axes, histogram_axes = figure.subplots(1, 2)
    rows, columns, values = matrix.coordinates()
    nonzero = values != values.dtype.type(0)
    rows, columns = rows[nonzero], columns[nonzero]

    picture = pattern_picture(rows, columns, matrix.shape)
    image = pattern_axes.imshow(
        picture,
        cmap="Blues",
        vmin=0,
        vmax=max(float(picture.max(initial=0)), 1e-9),
        interpolation="nearest",
        aspect="auto",
        extent=(0, max(matrix.shape[1], 1), max(matrix.shape[0], 1), 0),
    )
    figure.colorbar(image, ax=pattern_axes, label="fraction of nonzeros")
    pattern_axes.set(title="pattern", xlabel="column", ylabel="row")

    lengths = np.bincount(rows, minlength=matrix.shape[0])
    # Every bar stands for as many lengths.
    longest = int(lengths.max(initial=0))
    width = 1 + longest // HISTOGRAM_BINS
    histogram_axes.hist(lengths, bins=np.arange(-0.5, longest + width, width))
    histogram_axes.set(
        title="rows by number of nonzeros", xlabel="nonzeros of a row", ylabel="rows"
    )

    encoded = io.BytesIO()
    figure.savefig(encoded, format="png", dpi=120)
    with write_file_atomically(path) as temporary:
        temporary.write_bytes(encoded.getvalue())


def pattern_picture(rows: np.ndarray, columns: np.ndarray, shape: tuple[int, int]) -> np.ndarray:
    """Return the fraction of nonzeros in each cell of a grid laid over a matrix.

    Parameters
    ----------
    rows, columns : ndarray of int64, shape (nnz,)
        Where the nonzeros are.
    shape : tuple of int

    Returns
    -------
    ndarray, shape (cells, cells)
        As many cells as rows and columns where those are few.
    """
    cells = [max(1, min(size, LARGEST_PICTURE)) for size in shape]
    # Whole numbers: cell c of a side holds the places p with p * cells // size == c.
    cell_rows = rows * cells[0] // max(shape[0], 1)
    cell_columns = columns * cells[1] // max(shape[1], 1)
    counts = np.bincount(cell_rows * cells[1] + cell_columns, minlength=cells[0] * cells[1])
    heights, widths = (
        np.bincount(np.arange(size) * count // max(size, 1), minlength=count)
        for size, count in zip(shape, cells, strict=True)
    )
    sizes = np.maximum(heights[:, np.newaxis] * widths, 1)
    return counts.reshape(cells) / sizes


def _new_figure(**options: Any) -> Any:
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise TwellError(
            "matplotlib is not installed, a plot needs it: pip install 'twell_numba[plot]'"
        ) from None
    return Figure(**options)
