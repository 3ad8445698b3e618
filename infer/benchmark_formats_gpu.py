"""Times of the sparse formats' products and conversions on a GPU, against dense and cuSPARSE."""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np
import scipy.sparse

from twell_numba.device.arrays import to_host
from twell_numba.formats import SparseMatrix
from twell_numba.infer.benchmark_formats import Pattern, ProductShape, random_patterns
from twell_numba.infer.ffn_problem import DTYPES, relative_error
from twell_numba.infer.timing import time_in_turn_on_gpu

# Errors are those of so many columns (rows, for `X @ A` and `sampled`) of a result.
SAMPLED = 64


def benchmark_formats_on_gpu(
    shape: ProductShape, rounds: int, seed: int, device: str, dtype: str = "float32"
) -> Iterator[list[dict]]:
    """Time the products of every format, and its conversion from dense, on a GPU.

    The matrices are those of :func:`~twell_numba.infer.benchmark_formats.benchmark_formats`. Dense
    products are cuBLASLt's, of the same matrix with its zeros; for ``sampled`` it is the product of
    which the wanted entries would have to be taken, for ``from_dense`` a copy.

    Parameters
    ----------
    shape : ProductShape
    rounds : int
        Timed calls of each.
    seed : int
        Of the random matrices.
    device : str
        ``cuda:N``.
    dtype : {"float32", "bfloat16", "float16"}

    Yields
    ------
    list of dict
        One row a format, for one operation at a time, with the keys of ``twell bench --json``:
        ``dense_ms`` is the dense product's time, ``sparse_ms`` the format's. Products in float32
        that CuPy can do have its time too, ``cusparse_ms``, where it is installed; other rows lack
        that key. ``max_relative_error`` is norm-wise, against float64.
    """
    random = np.random.default_rng(seed)
    for pattern in random_patterns(shape, random):
        yield from _Problem(shape, random, pattern, device, dtype).measure(rounds)


class _Problem:
    """One matrix, dense and in some formats, and the operands of its products, on a GPU."""

    def __init__(
        self,
        shape: ProductShape,
        random: np.random.Generator,
        pattern: Pattern,
        device: str,
        dtype: str,
    ) -> None:
        from twell_numba.device.gpu import choose, from_numpy

        self.shape, self.layouts, self.device = shape, pattern.layouts, device
        self.dtype = DTYPES[dtype]
        self.stream = choose(device).stream

        def draw(*sizes: int) -> np.ndarray:
            return random.standard_normal(sizes, np.float32).astype(self.dtype, copy=False)

        self.dense = draw(*pattern.mask.shape) * pattern.mask.astype(self.dtype)
        self.X = draw(shape.columns, shape.right_columns)
        self.Y = draw(shape.rows, shape.right_columns)
        self.left = np.ascontiguousarray(self.Y.T)
        self.on_gpu = {
            name: from_numpy(getattr(self, name), self.stream)
            for name in ("dense", "X", "Y", "left")
        }
        self.matrices = {
            name: cls.from_dense(self.dense, **layout).to(device)
            for name, (cls, layout) in self.layouts.items()
        }
        self.density = float(np.count_nonzero(self.dense)) / self.dense.size
        self.columns = np.arange(min(SAMPLED, shape.right_columns))
        self.rows = np.sort(random.choice(shape.rows, min(SAMPLED, shape.rows), replace=False))

    def measure(self, rounds: int) -> Iterator[list[dict]]:
        from twell_numba.device.gpu.cusparse import cusparse_products
        from twell_numba.device.gpu.gemm import matmul

        dense, X, Y, left = (self.on_gpu[name] for name in ("dense", "X", "Y", "left"))
        matrices, columns, rows = self.matrices, self.columns, self.rows
        exact = scipy.sparse.csr_array(self.dense.astype(np.float64))
        exact_X, exact_Y = self.X.astype(np.float64), self.Y.astype(np.float64)
        cusparse: dict[str, Callable[[], object]] = {}
        if "csr" in matrices:
            csr: Any = matrices["csr"]
            cusparse = cusparse_products(csr.data, csr.indices, csr.indptr, csr.shape, X, Y, left)
        yield self._rows(
            "A @ X",
            rounds,
            lambda: matmul(dense, X),
            cusparse,
            {name: partial(A.matmul, X) for name, A in matrices.items()},
            lambda result: relative_error(to_host(result)[:, columns], exact @ exact_X[:, columns]),
        )
        transposed = exact.T @ exact_Y[:, columns]
        yield self._rows(
            "A.T @ X",
            rounds,
            lambda: matmul(dense, Y, transpose_a=True),
            cusparse,
            {name: partial(A.transposed_matmul, Y) for name, A in matrices.items()},
            lambda result: relative_error(to_host(result)[:, columns], transposed),
        )
        yield self._rows(
            "X @ A",
            rounds,
            lambda: matmul(left, dense),
            cusparse,
            {name: partial(A.left_matmul, left) for name, A in matrices.items()},
            lambda result: relative_error(to_host(result)[columns], transposed.T),
        )
        wanted = np.where(self.dense[rows] != 0, exact_Y[rows] @ exact_X.T, 0)
        yield self._rows(
            "sampled",
            rounds,
            lambda: matmul(Y, X, transpose_b=True),
            cusparse,
            {name: partial(A.sampled_product, Y, X) for name, A in matrices.items()},
            lambda result: relative_error(self._at_entries(result)[rows], wanted),
        )
        yield self._rows(
            "from_dense",
            rounds,
            dense.copy,
            cusparse,
            {
                name: partial(cls.from_dense, dense, **layout)
                for name, (cls, layout) in self.layouts.items()
            },
            lambda result: relative_error(self._at_entries(result), self.dense.astype(np.float64)),
            is_recorded=False,  # how much memory is needed, the host has to be told
        )

    def _at_entries(self, matrix: SparseMatrix) -> np.ndarray:
        """Return a result as a dense array, where the matrix is not zero."""
        return matrix.to("cpu").to_dense().astype(np.float64) * (self.dense != 0)

    def _rows(
        self,
        operation: str,
        rounds: int,
        dense: Callable[[], object],
        cusparse: Mapping[str, Callable[[], object]],
        formats: Mapping[str, Callable[[], Any]],
        error: Callable[[Any], float],
        *,
        is_recorded: bool = True,
    ) -> list[dict]:
        calls: dict[str, Callable[[], object]] = {"dense": dense, **formats}
        unrecorded = set() if is_recorded else set(formats)
        if operation in cusparse:
            calls["cusparse"] = cusparse[operation]
            unrecorded.add("cusparse")
        milliseconds = time_in_turn_on_gpu(calls, rounds, self.stream, unrecorded)
        rows = []
        for name, call in formats.items():
            row = {
                "operation": operation,
                "path": name,
                "device": self.device,
                "dtype": self.dtype.name,
                "shape": {
                    "M": self.shape.rows,
                    "K": self.shape.columns,
                    "N": self.shape.right_columns,
                },
                "density": self.density,
                "dense_ms": milliseconds["dense"],
                "sparse_ms": milliseconds[name],
                "speedup": milliseconds["dense"] / milliseconds[name],
                "max_relative_error": error(call()),
            }
            if "cusparse" in milliseconds:
                row["cusparse_ms"] = milliseconds["cusparse"]
                row["speedup_over_cusparse"] = milliseconds["cusparse"] / milliseconds[name]
            rows.append(row)
        return rows
