"""Times of the sparse formats' products and conversions against SciPy and dense NumPy."""

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


def benchmark_formats(shape: ProductShape, rounds: int, seed: int) -> Iterator[list[dict]]:
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
    blocks = (-(-shape.rows // shape.block_size), -(-shape.columns // shape.block_size))
    b = shape.block_size
    block_mask = np.repeat(np.repeat(random.random(blocks) < shape.density, b, 0), b, 1)
    entry_mask = random.random((shape.rows, shape.columns)) < shape.density
    wide = max(128, int(1.5 * shape.density * shape.columns))
    by_entries = _Problem(
        shape,
        random,
        entry_mask,
        "csr",
        {
            "csr": (CSRMatrix, {}),
            "hybrid_ell": (HybridELLMatrix, {"width": wide}),
            "twell": (TwELLMatrix, {"slots": min(256, max(32, int(2.5 * shape.density * 256)))}),
        },
    )
    by_blocks = _Problem(
        shape,
        random,
        block_mask[: shape.rows, : shape.columns],
        "bsr",
        {"block_ell": (BlockELLMatrix, {"block_size": b})},
    )
    for problem in (by_entries, by_blocks):
        yield from problem.measure(rounds)


class _Problem:
    """One matrix in NumPy, SciPy and some formats, and the operands of its products."""

    def __init__(
        self,
        shape: ProductShape,
        random: np.random.Generator,
        mask: np.ndarray,
        scipy_format: str,
        layouts: dict[str, tuple[type[SparseMatrix], dict[str, int]]],
    ) -> None:
        self.shape = shape
        self.dense = random.standard_normal(mask.shape, np.float32) * mask
        self.X = random.standard_normal((shape.columns, shape.right_columns), np.float32)
        self.Y = random.standard_normal((shape.rows, shape.right_columns), np.float32)
        self.left = np.ascontiguousarray(self.Y.T)
        self.scipy_format, self.layouts = scipy_format, layouts
        self.scipy_matrix = self._to_scipy()
        self.matrices = {
            name: cls.from_dense(self.dense, **layout) for name, (cls, layout) in layouts.items()
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
        if self.scipy_format == "csr" or any(size % b for size in self.dense.shape):
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
