"""Times of the sparse formats' products and conversions against SciPy and dense NumPy.

On the CPU; for a GPU see :mod:`twell_numba.infer.benchmark_formats_gpu`.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import scipy.sparse

from twell_numba.formats import (
    BlockELLMatrix,
    CSRMatrix,
    HybridELLMatrix,
    SparseMatrix,
    TwELLMatrix,
)
from twell_numba.infer.timing import time_in_turn

# Multiply-adds up to which gathered copies of both operands of a sampled product fit in memory.
LARGEST_GATHER = 64_000_000


@dataclass(frozen=True)
class ProductShape:
    """Sizes of a benchmark: A is M x K, with a fraction ``density`` of nonzeros; X is K x N."""

    rows: int
    columns: int
    right_columns: int
    density: float
    block_size: int = 16


# What is measured unless other sizes are asked for: M, K, N and the size of blocks.
DEFAULT_SIZES = {"cpu": (4096, 4096, 256, 16), "cuda": (8192, 8192, 2048, 32)}


def default_product_shape(
    device: str,
    rows: int | None,
    columns: int | None,
    right_columns: int | None,
    density: float,
    block_size: int | None,
) -> ProductShape:
    """Return the sizes asked for, and the device's where none is."""
    defaults = DEFAULT_SIZES[device.partition(":")[0]]
    m, k, n, b = (
        given or default
        for given, default in zip((rows, columns, right_columns, block_size), defaults, strict=True)
    )
    return ProductShape(m, k, n, density, b)


def benchmark_formats(
    shape: ProductShape, rounds: int, seed: int, device: str = "cpu", dtype: str = "float32"
) -> Iterator[list[dict]]:
    """Time the products of every format, and its conversion from dense, on any device.

    See :func:`benchmark_formats_on_cpu` and
    :func:`~twell_numba.infer.benchmark_formats_gpu.benchmark_formats_on_gpu`.
    """
    if device == "cpu":
        return benchmark_formats_on_cpu(shape, rounds, seed)
    from twell_numba.infer.benchmark_formats_gpu import benchmark_formats_on_gpu

    return benchmark_formats_on_gpu(shape, rounds, seed, device, dtype)


def benchmark_formats_on_cpu(shape: ProductShape, rounds: int, seed: int) -> Iterator[list[dict]]:
    """Time the products of every format in float32, and its conversion from dense.

    CSR, hybrid ELL and TwELL hold one matrix of which single entries are nonzero, at random places;
    block-ELL holds one of which whole blocks are. SciPy multiplies the same matrices as CSR and
    BSR; its sampled product is the faster of two: row by row, the wanted rows of X times a row of
    Y; and, where it fits in memory, the sum over products of gathered rows. NumPy multiplies the
    dense matrices; its sampled product is the dense product, of which the wanted entries are taken.

    Parameters
    ----------
    shape : ProductShape
    rounds : int
        Timed calls of each.
    seed : int
        Of the random matrices.

    Yields
    ------
    list of dict
        One row a format, for one operation at a time, with the keys of ``twell bench --json``:
        ``dense_ms`` is NumPy's time (for ``from_dense``: a copy of the dense matrix), ``sparse_ms``
        the format's, ``scipy_ms`` SciPy's. ``max_relative_error`` is norm-wise, against float64.
    """
    random = np.random.default_rng(seed)
    for pattern in random_patterns(shape, random):
        yield from _Problem(shape, random, pattern).measure(rounds)


@dataclass(frozen=True)
class Pattern:
    """Where a matrix is not zero, and the formats that hold it.

    Attributes
    ----------
    mask : ndarray of bool, shape (M, K)
    layouts : dict
        Format name to its class, and the keywords of its ``from_dense``.
    is_blocked : bool
        Whether whole blocks are not zero.
    """

    mask: np.ndarray
    layouts: dict[str, tuple[type[SparseMatrix], dict[str, int]]]
    is_blocked: bool


def random_patterns(shape: ProductShape, random: np.random.Generator) -> list[Pattern]:
    """Return a pattern of single entries and one of whole blocks."""
    b = shape.block_size
    blocks = (-(-shape.rows // b), -(-shape.columns // b))
    block_mask = np.repeat(np.repeat(random.random(blocks) < shape.density, b, 0), b, 1)
    entry_mask = random.random((shape.rows, shape.columns)) < shape.density
    wide = max(128, int(1.5 * shape.density * shape.columns))
    slots = min(256, max(32, int(2.5 * shape.density * 256)))
    return [
        Pattern(
            entry_mask,
            {
                "csr": (CSRMatrix, {}),
                "hybrid_ell": (HybridELLMatrix, {"width": wide}),
                "twell": (TwELLMatrix, {"slots": slots}),
            },
            is_blocked=False,
        ),
        Pattern(
            block_mask[: shape.rows, : shape.columns],
            {"block_ell": (BlockELLMatrix, {"block_size": b})},
            is_blocked=True,
        ),
    ]


class _Problem:
    """One matrix in NumPy, SciPy and some formats, and the operands of its products."""

    def __init__(self, shape: ProductShape, random: np.random.Generator, pattern: Pattern) -> None:
        self.shape = shape
        self.dense = random.standard_normal(pattern.mask.shape, np.float32) * pattern.mask
        self.X = random.standard_normal((shape.columns, shape.right_columns), np.float32)
        self.Y = random.standard_normal((shape.rows, shape.right_columns), np.float32)
        self.left = np.ascontiguousarray(self.Y.T)
        self.layouts, self.is_blocked = pattern.layouts, pattern.is_blocked
        self.scipy_matrix = self._to_scipy()
        self.matrices = {
            name: cls.from_dense(self.dense, **layout)
            for name, (cls, layout) in self.layouts.items()
        }
        self.places = np.nonzero(self.dense)
        self.exact_matrix = scipy.sparse.csr_array(self.dense.astype(np.float64))

    def measure(self, rounds: int) -> Iterator[list[dict]]:
        exact_X, exact_Y = self.X.astype(np.float64), self.Y.astype(np.float64)
        dense, sparse, X, Y, left = self.dense, self.scipy_matrix, self.X, self.Y, self.left
        matrices = self.matrices
        yield self._rows(
            "A @ X",
            rounds,
            {"numpy": lambda: dense @ X, "scipy": lambda: sparse @ X},
            {name: partial(A.matmul, X) for name, A in matrices.items()},
            self.exact_matrix @ exact_X,
        )
        yield self._rows(
            "A.T @ X",
            rounds,
            {"numpy": lambda: dense.T @ Y, "scipy": lambda: sparse.T @ Y},
            {name: partial(A.transposed_matmul, Y) for name, A in matrices.items()},
            self.exact_matrix.T @ exact_Y,
        )
        yield self._rows(
            "X @ A",
            rounds,
            {"numpy": lambda: left @ dense, "scipy": lambda: left @ sparse},
            {name: partial(A.left_matmul, left) for name, A in matrices.items()},
            (self.exact_matrix.T @ exact_Y).T,
        )
        yield self._rows(
            "sampled",
            rounds,
            {"numpy": lambda: (Y @ X.T)[self.places], **self._scipy_sampled_products()},
            {name: partial(A.sampled_product, Y, X) for name, A in matrices.items()},
            (exact_Y @ exact_X.T)[self.places],
        )
        yield self._rows(
            "from_dense",
            rounds,
            {"numpy": dense.copy, "scipy": self._to_scipy},
            {
                name: partial(cls.from_dense, dense, **layout)
                for name, (cls, layout) in self.layouts.items()
            },
            dense[self.places].astype(np.float64),
        )

    def _to_scipy(self) -> Any:
        b = self.shape.block_size
        if not self.is_blocked or any(size % b for size in self.dense.shape):
            return scipy.sparse.csr_array(self.dense)
        return scipy.sparse.bsr_array(self.dense, blocksize=(b, b))

    def _scipy_sampled_products(self) -> dict[str, Callable[[], object]]:
        """Return the ways in which a user of SciPy can compute a sampled product."""
        X, Y, (rows, columns) = self.X, self.Y, self.places
        pointers = self.exact_matrix.indptr
        values = np.empty(rows.size, np.float32)

        def row_by_row() -> None:
            for row in range(Y.shape[0]):
                start, stop = pointers[row], pointers[row + 1]
                np.matmul(X[columns[start:stop]], Y[row], out=values[start:stop])

        def gathered() -> None:
            np.einsum("nd,nd->n", Y[rows], X[columns])

        ways: dict[str, Callable[[], object]] = {"scipy row by row": row_by_row}
        if rows.size * X.shape[1] <= LARGEST_GATHER:
            ways["scipy gathered"] = gathered
        return ways

    def _rows(
        self,
        operation: str,
        rounds: int,
        others: Mapping[str, Callable[[], object]],
        formats: Mapping[str, Callable[[], Any]],
        exact: np.ndarray,
    ) -> list[dict]:
        milliseconds = time_in_turn({**others, **formats}, rounds)
        scipy_ms = min(milliseconds[name] for name in others if name.startswith("scipy"))
        dense_ms = milliseconds["numpy"]
        return [
            {
                "operation": operation,
                "path": name,
                "device": "cpu",
                "dtype": "float32",
                "shape": {
                    "M": self.shape.rows,
                    "K": self.shape.columns,
                    "N": self.shape.right_columns,
                },
                "density": self.places[0].size / self.dense.size,
                "dense_ms": dense_ms,
                "scipy_ms": scipy_ms,
                "sparse_ms": milliseconds[name],
                "speedup": dense_ms / milliseconds[name],
                "speedup_over_scipy": scipy_ms / milliseconds[name],
                "max_relative_error": self._error(call(), exact),
            }
            for name, call in formats.items()
        ]

    def _error(self, result: Any, exact: np.ndarray) -> float:
        if isinstance(result, SparseMatrix):
            result = result.to_dense()[self.places]
        norm = float(np.linalg.norm(exact))
        return float(np.linalg.norm(result - exact)) / norm if norm else 0.0
