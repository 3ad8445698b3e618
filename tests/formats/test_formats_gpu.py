"""Sparse matrices on a GPU against those in the host's memory."""

import copy
import pickle

import ml_dtypes
import numpy as np
import pytest

pytest.importorskip("numba_cuda", reason="numba-cuda is not installed (extra cuda)")

from twell_numba.device import gpu as gpu_package  # noqa: E402
from twell_numba.device.gpu import DeviceArray  # noqa: E402
from twell_numba.formats import (  # noqa: E402
    BlockELLMatrix,
    CSRMatrix,
    HybridELLMatrix,
    TwELLMatrix,
    load,
)

LAYOUTS = [
    (CSRMatrix, {}),
    (BlockELLMatrix, {"block_size": 3}),
    (BlockELLMatrix, {"block_size": 16}),
    (TwELLMatrix, {"tile": 4, "slots": 2}),
    (TwELLMatrix, {"tile": 5, "slots": 5}),
    (HybridELLMatrix, {"width": 3}),
    (HybridELLMatrix, {"width": 64}),
]
IDS = [f"{cls.format_name}-{'-'.join(map(str, k.values()))}" for cls, k in LAYOUTS]
every_layout = pytest.mark.parametrize("layout", LAYOUTS, ids=IDS)

# no row or column; one; tiles and blocks straddled; more columns than a warp, and than a block
SMALL = [(0, 3), (3, 0), (1, 1), (5, 7), (9, 4), (3, 70), (35, 6)]
LARGE = [(65537, 20), (70, 65537), (1000, 1001), (2, 300000)]


def patterned(rng, rows, columns, dtype=np.float32, density=0.3):
    """Return a dense matrix with empty and full rows, NaN, infinity and zeros of both signs."""
    dense = rng.standard_normal((rows, columns)) * (rng.random((rows, columns)) < density)
    if rows > 2:
        dense[1] = -0.0
        dense[2] = rng.standard_normal(columns)
    if rows and columns:
        dense[rows - 1, columns - 1] = np.nan
        dense[rows // 2, columns // 2] = np.inf
        dense[0, 0] = -0.0
    return dense.astype(dtype)


def cases(rng, machine, dtype=np.float32):
    random = [tuple(map(int, rng.integers(1, 200, 2))) for _ in range(40)]
    large = LARGE if dtype == np.float32 else []
    return machine.shapes(SMALL, large + machine.share(random, np.dtype(dtype)))


@pytest.fixture(autouse=True)
def devices(request, monkeypatch):
    """Let "cuda" name the emulated GPU."""
    machine = request.getfixturevalue("machine") if "machine" in request.fixturenames else None
    if machine is not None and not machine.is_real:
        monkeypatch.setattr(gpu_package, "choose", lambda device: machine.gpu)


def bits(array):
    """Return an array whose elements are equal only if all bits are."""
    return np.ascontiguousarray(array).view(f"u{array.dtype.itemsize}")


def assert_same(on_gpu, expected, *, any_nan=False):
    """Check that a matrix on a GPU has the arrays of one in the host's memory, padding aside.

    With ``any_nan`` one NaN is as good as another.
    """
    assert on_gpu.is_on_gpu
    actual = on_gpu.to("cpu")
    assert type(actual) is type(expected)
    actual.validate()
    assert actual.shape == expected.shape
    given, wanted = actual._arrays_to_save(), expected._arrays_to_save()
    for name in wanted:
        assert given[name].dtype == wanted[name].dtype, name
        assert given[name].shape == wanted[name].shape, name
        values, wanted_values = given[name], wanted[name]
        if any_nan:
            is_nan = np.isnan(wanted_values)
            np.testing.assert_array_equal(np.isnan(values), is_nan, err_msg=name)
            values, wanted_values = values[~is_nan], wanted_values[~is_nan]
        np.testing.assert_array_equal(bits(values), bits(wanted_values), err_msg=name)


# ---- Where it is


@every_layout
def test_there_and_back(rng, machine, layout):
    cls, keywords = layout
    A = cls.from_dense(patterned(rng, 9, 14), **keywords)
    on_gpu = A.to("cuda")
    assert on_gpu.device == "cuda:0"
    assert on_gpu.is_on_gpu
    assert on_gpu.to("cuda") is on_gpu
    assert on_gpu.to(machine.gpu.stream) is on_gpu
    assert_same(on_gpu, A)
    assert (on_gpu.shape, on_gpu.dtype, on_gpu.nbytes) == (A.shape, A.dtype, A.nbytes)
    assert (on_gpu.nnz, on_gpu.count_nonzero(), on_gpu.density) == (
        A.nnz,
        A.count_nonzero(),
        A.density,
    )
    np.testing.assert_array_equal(on_gpu.row_lengths(), A.row_lengths())
    for given, wanted in zip(on_gpu.coordinates(), A.coordinates(), strict=True):
        np.testing.assert_array_equal(given, wanted)
    assert on_gpu == A
    assert on_gpu == on_gpu.copy()
    assert (on_gpu.to_scipy() != A.to_scipy()).nnz == 1  # NaN
    on_gpu.validate()
    assert "on cuda:0" in repr(on_gpu)


@every_layout
def test_copies_share_nothing(rng, machine, layout):
    cls, keywords = layout
    A = cls.from_dense(patterned(rng, 9, 14), **keywords).to("cuda")
    own = A.copy()
    for name in A.array_names:
        first, second = getattr(A, name), getattr(own, name)
        assert first.pointer != second.pointer or first.size == 0
    for refused in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(TypeError, match=r"on cuda:0 given, .* wanted; use .to\('cpu'\)"):
            refused(A)


@every_layout
def test_files(rng, machine, layout, tmp_path):
    cls, keywords = layout
    A = cls.from_dense(patterned(rng, 9, 14), **keywords)
    A.to("cuda").save(tmp_path / "matrix.safetensors")
    assert load(tmp_path / "matrix.safetensors") == A


@every_layout
def test_checks_what_is_on_the_gpu(rng, machine, layout):
    cls, keywords = layout
    A = cls.from_dense(patterned(rng, 9, 14), **keywords).to("cuda")
    index = {"csr": "indptr", "block_ell": "block_columns"}.get(cls.format_name, "counts")
    wrong = getattr(A, index).to_numpy()
    wrong.reshape(-1)[0] = 99
    arrays = {name: getattr(A, name) for name in A.array_names}
    arrays[index] = machine.upload(wrong)
    parameters = {name: getattr(A, name) for name in A.parameter_names}
    with pytest.raises(ValueError, match="wanted"):
        cls(**arrays, shape=A.shape, **parameters)
    arrays[index] = wrong
    with pytest.raises(TypeError, match=rf"{index} on cpu.* given, one device for all wanted"):
        cls(**arrays, shape=A.shape, **parameters)


@every_layout
def test_numpy_never_sees_arrays_of_the_gpu(rng, machine, layout):
    cls, keywords = layout
    host = cls.from_dense(patterned(rng, 9, 14), **keywords)
    A = host.to("cuda")
    with pytest.raises(
        TypeError, match=r"on cuda:0 given, a NumPy array wanted; use \.to\('cpu'\)"
    ):
        np.asarray(A)
    with pytest.raises(TypeError, match="use .to"):
        A.aslinearoperator()
    x = np.ones((14, 2), np.float32)
    with pytest.raises(TypeError, match="X of type ndarray given, a DeviceArray wanted"):
        A @ x
    with pytest.raises(TypeError, match="X of type ndarray given, a DeviceArray wanted"):
        x[:9].T @ A
    with pytest.raises(TypeError, match="A in the host's memory given beside arrays on a GPU"):
        host @ machine.upload(x)
    with pytest.raises(TypeError, match="A in the host's memory given beside arrays on a GPU"):
        machine.upload(x[:9].T.copy()) @ host
    with pytest.raises(TypeError, match="out of type ndarray given, a DeviceArray wanted"):
        A.matmul(machine.upload(x), np.zeros((9, 2), np.float32))
    with pytest.raises(TypeError, match="DeviceArray in a GPU's memory given"):
        cls.from_coordinates([0], [0], machine.upload(x), (3, 3))


def test_values_of_another_place_are_refused(rng, machine):
    host = CSRMatrix.from_dense(patterned(rng, 4, 5))
    A = host.to("cuda")
    with pytest.raises(TypeError, match="ndarray given for a matrix on a GPU"):
        A.with_values(host.data)
    with pytest.raises(TypeError, match="DeviceArray in a GPU's memory given"):
        host.with_values(A.data)
    with pytest.raises(ValueError, match="shape"):
        A.with_values(A.data[:1])


# ---- Conversions


@every_layout
@pytest.mark.parametrize(
    "dtype", [np.float32, np.float64, np.float16, ml_dtypes.bfloat16], ids=lambda d: d.__name__
)
def test_dense_there_and_back(rng, machine, layout, dtype):
    cls, keywords = layout
    for rows, columns in cases(rng, machine, dtype):
        dense = patterned(rng, rows, columns, dtype)
        expected = cls.from_dense(dense, **keywords)
        on_gpu = cls.from_dense(machine.upload(dense), **keywords)
        assert_same(on_gpu, expected)
        back = on_gpu.to_dense()
        assert isinstance(back, DeviceArray)
        np.testing.assert_array_equal(bits(back.to_numpy()), bits(expected.to_dense()))


@every_layout
@pytest.mark.parametrize("source", LAYOUTS[::2], ids=IDS[::2])
def test_from_sparse(rng, machine, layout, source):
    cls, keywords = layout
    other, other_keywords = source
    for rows, columns in machine.shapes([(7, 35), (0, 3), (3, 0)], [(300, 1001), (1001, 300)]):
        A = other.from_dense(patterned(rng, rows, columns), **other_keywords)
        if rows > 2 and columns > 2:  # a stored zero, which is left out
            places = np.flatnonzero(A._arrays_to_save()[A.array_names[0]])
            if places.size:
                getattr(A, A.array_names[0]).reshape(-1)[places[0]] = -0.0
        assert_same(cls.from_sparse(A.to("cuda"), **keywords), cls.from_sparse(A, **keywords))


@every_layout
def test_transpose(rng, machine, layout):
    cls, keywords = layout
    for rows, columns in cases(rng, machine):
        A = cls.from_dense(patterned(rng, rows, columns), **keywords)
        assert_same(A.to("cuda").T, A.T)


@every_layout
def test_astype(rng, machine, layout):
    cls, keywords = layout
    dense = patterned(rng, 9, 14)
    dense[3, 3:6] = 1e-30  # 0 in float16
    A = cls.from_dense(dense, **keywords)
    for dtype in (np.float16, ml_dtypes.bfloat16, np.float64, np.float32):
        # rounding to 16 bits makes another NaN of a NaN on a GPU
        assert_same(A.to("cuda").astype(dtype), A.astype(dtype), any_nan=True)
    with pytest.raises(TypeError, match="int32 given"):
        A.to("cuda").astype(np.int32)


def test_stored_zeros_stay_in_the_transpose(machine):
    A = CSRMatrix(np.array([0.0, 2.0]), np.array([1, 0]), np.array([0, 1, 2]), (2, 3))
    assert_same(A.to("cuda").T, A.T)
    twell = TwELLMatrix(
        np.array([[[0.0]], [[3.0]]]), np.array([[[1]], [[0]]], np.uint16),
        np.array([[1], [1]], np.int32), (2, 2), tile=2,
    )  # fmt: skip
    assert_same(twell.to("cuda").T, twell.T)


def test_nan_keeps_its_payload(machine):
    dense = np.array([[0x7FC01234, 0xFFC00001, 0x7F800001]], np.uint32).view(np.float32)
    for cls in (CSRMatrix, BlockELLMatrix, TwELLMatrix, HybridELLMatrix):
        back = cls.from_dense(machine.upload(dense)).to_dense().to_numpy()
        np.testing.assert_array_equal(bits(back), bits(dense))


def test_refuses_too_few_blocks(machine):
    dense = machine.upload(np.ones((2, 9), np.float32))
    with pytest.raises(ValueError, match="holds 3 blocks, blocks_per_row 2 given, at least 3"):
        BlockELLMatrix.from_dense(dense, block_size=3, blocks_per_row=2)
    wide = BlockELLMatrix.from_dense(dense, block_size=3, blocks_per_row=5)
    wide.validate()
    assert wide.blocks_per_row == 5


def test_refuses_what_is_no_matrix_of_floats(machine):
    with pytest.raises(ValueError, match="1 dimensions given, 2 wanted"):
        CSRMatrix.from_dense(machine.upload(np.ones(3, np.float32)))
    with pytest.raises(TypeError, match="dtype int32 given"):
        CSRMatrix.from_dense(machine.upload(np.ones((3, 3), np.int32)))


# ---- Products


@every_layout
def test_products(rng, machine, layout, precision, relative_error, rounded):
    cls, keywords = layout
    dtype, tolerance = precision
    small = [(0, 3, 2), (3, 0, 2), (9, 14, 3), (5, 11, 17)]
    random = [tuple(map(int, rng.integers(1, 150, 3))) for _ in range(20)]
    for rows, columns, width in machine.shapes(small, [(3000, 700, 130), *random]):
        dense = np.nan_to_num(patterned(rng, rows, columns), posinf=2.0).astype(dtype)
        dense64 = dense.astype(np.float64)
        A = cls.from_dense(machine.upload(dense), **keywords)
        operands = {
            name: rounded(rng.standard_normal(shape), dtype)
            for name, shape in (
                ("x", (columns, width)),
                ("y", (rows, width)),
                ("z", (width, rows)),
            )
        }
        x, y, z = (machine.upload(stored) for stored, _ in operands.values())
        x64, y64, z64 = (exact for _, exact in operands.values())
        for actual, expected in (
            (A @ x, dense64 @ x64),
            (A.transposed_matmul(y), dense64.T @ y64),
            (A.T @ y, dense64.T @ y64),
            (z @ A, z64 @ dense64),
        ):
            assert isinstance(actual, DeviceArray)
            assert actual.dtype == dtype
            assert relative_error(actual, expected) <= tolerance, (rows, columns, width)
        sampled = A.sampled_product(y, x).to("cpu")
        sampled.validate()
        pattern = cls.from_dense(dense, **keywords)
        expected = pattern.sampled_product(y64, x64).to_dense()
        assert relative_error(sampled.to_dense(), expected) <= tolerance


@every_layout
def test_products_into_out(rng, machine, layout):
    cls, keywords = layout
    dense = np.nan_to_num(patterned(rng, 9, 9), posinf=2.0)
    A = cls.from_dense(dense, **keywords).to("cuda")
    x = machine.upload(rng.standard_normal((9, 9)).astype(np.float32))
    out = machine.upload(np.zeros((9, 9), np.float32))
    for product in (A.matmul, A.transposed_matmul, A.left_matmul):
        expected = product(x).to_numpy()
        assert product(x, out) is out
        np.testing.assert_array_equal(out.to_numpy(), expected)
    expected = A.sampled_product(x, x)
    assert A.sampled_product(x, x, A) is A
    assert expected == A
    with pytest.raises(ValueError, match="other"):
        A.sampled_product(x, x, A.copy())


@every_layout
def test_stored_zeros_annihilate(machine, layout):
    cls, keywords = layout
    dense = np.zeros((4, 12), np.float32)
    dense[0] = 1
    dense[1, 3] = 1
    A = cls.from_dense(dense, **keywords)
    if isinstance(A, CSRMatrix):
        A.data[...] = 0
    else:
        A.values[...] = 0
    expected = A.transposed_matmul(np.full((4, 3), np.nan, np.float32))
    actual = A.to("cuda").transposed_matmul(machine.upload(np.full((4, 3), np.nan, np.float32)))
    np.testing.assert_array_equal(actual.to_numpy(), expected)
    for width in (3, 20):
        x = np.full((12, width), np.nan, np.float32)
        product = A.to("cuda") @ machine.upload(x)
        np.testing.assert_array_equal(product.to_numpy(), A @ x)


@every_layout
@pytest.mark.parametrize("width", [264, 259])
def test_more_columns_than_a_warp_takes(rng, machine, layout, width, relative_error):
    cls, keywords = layout
    dense = np.nan_to_num(patterned(rng, 5, 6), posinf=2.0)
    x = rng.standard_normal((6, width)).astype(np.float32)
    actual = cls.from_dense(dense, **keywords).to("cuda") @ machine.upload(x)
    assert relative_error(actual, dense.astype(np.float64) @ x) < 1e-6


def test_values_can_change_between_products(rng, machine, relative_error):
    dense = np.nan_to_num(patterned(rng, 9, 14), posinf=2.0)
    A = TwELLMatrix.from_dense(machine.upload(dense), tile=4, slots=2)
    x = machine.upload(rng.standard_normal((14, 2)).astype(np.float32))
    y = machine.upload(rng.standard_normal((9, 2)).astype(np.float32))
    first, transposed = (A @ x).to_numpy(), A.transposed_matmul(y).to_numpy()
    for array in (A.values, A.tail_values):
        array.copy_from(array.to_numpy() * 2)
    assert relative_error(A @ x, 2 * first) < 1e-6
    assert relative_error(A.transposed_matmul(y), 2 * transposed) < 1e-6


@pytest.mark.parametrize("cls", [CSRMatrix, BlockELLMatrix])
def test_matrices_of_a_pattern_share_what_is_made_of_it(rng, machine, cls):
    A = cls.from_dense(np.nan_to_num(patterned(rng, 9, 14), posinf=2.0)).to("cuda")
    y = machine.upload(rng.standard_normal((9, 2)).astype(np.float32))
    other = A.with_values(A.stored_values.copy())
    expected = A.transposed_matmul(y).to_numpy()
    launches = len(machine.gpu.launches) if not machine.is_real else 0
    np.testing.assert_array_equal(other.transposed_matmul(y).to_numpy(), expected)
    if not machine.is_real:
        names = [name for name, _ in machine.gpu.launches[launches:]]
        assert "count_digits" not in names
    assert other.derived is A.derived


@every_layout
def test_same_bits_on_every_run(rng, machine, layout):
    cls, keywords = layout
    rows, columns = (3000, 60) if machine.is_real else (5, 6)
    dense = machine.upload(np.nan_to_num(patterned(rng, rows, columns, density=0.1), posinf=2.0))
    y = machine.upload(rng.standard_normal((rows, 5)).astype(np.float32))
    runs = []
    for _ in range(20 if machine.is_real else 2):
        A = cls.from_dense(dense, **keywords)
        runs.append([A.T.to_dense().to_numpy(), A.transposed_matmul(y).to_numpy()])
    for run in runs[1:]:
        for array, first in zip(run, runs[0], strict=True):
            np.testing.assert_array_equal(array, first)


# ---- What only a GPU can show


@pytest.mark.gpu
def test_products_can_be_recorded(rng, real_gpu, relative_error):
    from twell_numba.device.gpu import from_numpy, record_graph

    dense = np.nan_to_num(patterned(rng, 90, 140), posinf=2.0)
    y = from_numpy(rng.standard_normal((90, 7)).astype(np.float32))
    expected = dense.T.astype(np.float64) @ y.to_numpy()
    for cls, keywords in LAYOUTS:
        A = cls.from_dense(dense, **keywords).to("cuda")
        A.transposed_matmul(y)  # makes what is made once
        with record_graph(real_gpu.stream) as graph:
            result = A.transposed_matmul(y)
        graph.replay()
        assert relative_error(result, expected) < 1e-5
