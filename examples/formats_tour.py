"""The four sparse formats on one matrix: what each takes, and how long it needs.

Of the matrix's 16 x 16 blocks nine in ten are empty, and half of each of the others is zero.

Run it with:  python examples/formats_tour.py
"""

import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from twell_numba.formats import (
    BlockELLMatrix,
    CSRMatrix,
    HybridELLMatrix,
    SparseMatrix,
    TwELLMatrix,
    load,
)

SIZE, BLOCK, RIGHT_COLUMNS = 2048, 16, 128


def milliseconds(function: Callable[[], object]) -> float:
    """Return the best time of three, after one call that compiles."""
    function()
    times = []
    for _ in range(3):
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return min(times) * 1e3


random = np.random.default_rng(0)
blocks = np.kron(random.random((SIZE // BLOCK, SIZE // BLOCK)) < 0.1, np.ones((BLOCK, BLOCK)))
kept = (blocks > 0) & (random.random((SIZE, SIZE)) < 0.5)
dense = np.where(kept, random.standard_normal((SIZE, SIZE), np.float32), np.float32(0))
X = random.standard_normal((SIZE, RIGHT_COLUMNS), np.float32)
wanted = dense @ X

print(f"{'format':<16} {'kB':>7} {'of dense':>9} {'from dense':>11} {'A @ X':>9}")
print(f"{'dense':<16} {dense.nbytes / 1e3:>7.0f} {1:>9.1%} {'':>11} ", end="")
print(f"{milliseconds(lambda: dense @ X):>6.2f} ms")

layouts: dict[type[SparseMatrix], dict] = {
    CSRMatrix: {},
    BlockELLMatrix: {"block_size": BLOCK},
    TwELLMatrix: {"tile": 256, "slots": 48},
    HybridELLMatrix: {"width": 160},
}
matrices = []
for cls, layout in layouts.items():
    matrix = cls.from_dense(dense, **layout)
    matrices.append(matrix)
    conversion = milliseconds(lambda cls=cls, layout=layout: cls.from_dense(dense, **layout))
    product = milliseconds(lambda matrix=matrix: matrix @ X)
    print(
        f"{cls.__name__:<16} {matrix.nbytes / 1e3:>7.0f} {matrix.nbytes / dense.nbytes:>9.1%} "
        f"{conversion:>8.2f} ms {product:>6.2f} ms"
    )
    assert np.allclose(matrix @ X, wanted, atol=1e-3)

# Each becomes any other, and they are equal by value.
csr, block_ell, twell, hybrid_ell = matrices
assert CSRMatrix.from_sparse(twell) == csr == BlockELLMatrix.from_sparse(hybrid_ell)

# Nothing is lost where a row does not fit its slots: it is kept whole in the tail.
narrow = HybridELLMatrix.from_sparse(csr, width=100)
print(f"\n{narrow}")
assert narrow == csr

# How full the rows are.
lengths = csr.row_lengths()
print(f"entries a row: {lengths.min()} to {lengths.max()}, {lengths.mean():.1f} on average")

# One file a matrix, of any format.
with tempfile.TemporaryDirectory() as folder:
    path = Path(folder) / "matrix.safetensors"
    block_ell.save(path)
    print(f"saved in {path.stat().st_size / 1e3:.0f} kB: {load(path)}")
    assert load(path) == csr
