"""Conversions: compiled against the reference, bit by bit."""

import ml_dtypes
import numpy as np
import pytest

from twell_numba.device import set_thread_count, thread_count
from twell_numba.formats import CSRMatrix, index_width
from twell_numba.kernels.conversion import cpu, reference

DTYPES = [np.float64, np.float32, np.float16, ml_dtypes.bfloat16]
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: np.dtype(dtype).name)
every_shape = pytest.mark.parametrize(
    "shape", [(0, 0), (0, 4), (3, 0), (1, 1), (7, 13), (33, 50), (300, 700)]
)
every_density = pytest.mark.parametrize("density", [0.0, 0.1, 1.0])

SEGMENTS = {
    "tiles": {"segment_width": 7, "slots": 3, "column_dtype": np.dtype(np.uint16)},
    "tiles of one": {"segment_width": 1, "slots": 1, "column_dtype": np.dtype(np.uint16)},
    "wide tile": {"segment_width": 1000, "slots": 100, "column_dtype": np.dtype(np.int32)},
}


def example(shape: tuple[int, int], density: float, dtype: type) -> np.ndarray:
    rng = np.random.default_rng(5)
    dense = rng.standard_normal(shape) * (rng.random(shape) < density)
    dense = np.where(rng.random(shape) < 0.05, -0.0, dense)
    if shape[0] > 2 and shape[1] > 2:
        dense[1] = 1.0
        dense[2, :3] = [np.nan, np.inf, -np.inf]
    return dense.astype(dtype)


def assert_same_bits(given: np.ndarray, wanted: np.ndarray) -> None:
    assert given.dtype == wanted.dtype
    assert given.shape == wanted.shape
    assert given.tobytes() == wanted.tobytes()


@every_dtype
@every_shape
@every_density
def test_dense_to_csr(dtype, shape, density):
    dense = example(shape, density, dtype)
    for pair in zip(cpu.dense_to_csr(dense), reference.dense_to_csr(dense), strict=True):
        assert_same_bits(*pair)


@every_dtype
@every_shape
@every_density
@pytest.mark.parametrize("segments", SEGMENTS.values(), ids=SEGMENTS)
def test_dense_to_segments(dtype, shape, density, segments):
    dense = example(shape, density, dtype)
    count = -(-shape[1] // segments["segment_width"])
    given = cpu.dense_to_segments(dense, segments_per_row=count, **segments)
    wanted = reference.dense_to_segments(dense, segments_per_row=count, **segments)
    assert given.keys() == wanted.keys()
    for name in given:
        assert_same_bits(given[name], wanted[name])


@every_dtype
@every_shape
@every_density
@pytest.mark.parametrize("block_size", [1, 3, 16])
def test_dense_to_block_ell(dtype, shape, density, block_size):
    dense = example(shape, density, dtype)
    given = cpu.dense_to_block_ell(dense, block_size)
    wanted = reference.dense_to_block_ell(dense, block_size)
    for pair in zip(given, wanted, strict=True):
        assert_same_bits(*pair)


@every_dtype
@every_shape
@every_density
def test_transpose_csr(dtype, shape, density):
    matrix = CSRMatrix.from_dense(example(shape, density, dtype))
    arguments = (matrix.data, matrix.indices, matrix.indptr, shape[1])
    given, wanted = cpu.transpose_csr(*arguments), reference.transpose_csr(*arguments)
    for pair in zip(given, wanted, strict=True):
        assert_same_bits(*pair)


def test_nan_keeps_its_payload():
    bits = np.array([[0x7FC12345, 0, 0xFFC00001, 0x80000000]], np.uint32)
    data, indices, _ = cpu.dense_to_csr(bits.view(np.float32))
    assert data.view(np.uint32).tolist() == [0x7FC12345, 0xFFC00001]
    assert indices.tolist() == [0, 2]


def test_pointers_do_not_wrap(monkeypatch):
    monkeypatch.setattr(index_width, "NARROW", np.dtype(np.int8))
    data, indices, indptr = cpu.dense_to_csr(np.ones((100, 100), np.float32))
    assert indptr.dtype == np.int64
    assert indices.dtype == np.int8
    assert indptr.tolist() == list(range(0, 10001, 100))
    assert [array.dtype for array in cpu.transpose_csr(data, indices, indptr, 100)] == [
        np.float32,
        np.int8,
        np.int64,
    ]


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_the_same_bits_with_any_number_of_threads(threads):
    dense = example((700, 900), 0.1, np.float32)
    before = thread_count()
    wanted = [*cpu.dense_to_csr(dense), *cpu.dense_to_block_ell(dense, 16)]
    set_thread_count(threads)
    try:
        given = [*cpu.dense_to_csr(dense), *cpu.dense_to_block_ell(dense, 16)]
    finally:
        set_thread_count(before)
    for pair in zip(given, wanted, strict=True):
        assert_same_bits(*pair)


def test_inputs_are_not_changed():
    dense = example((40, 50), 0.3, np.float32)
    before = dense.copy()
    dense.flags.writeable = False
    cpu.dense_to_csr(dense)
    cpu.dense_to_block_ell(dense, 3)
    assert_same_bits(dense, before)
