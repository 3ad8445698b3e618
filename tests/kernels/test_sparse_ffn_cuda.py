"""Feedforward layers with sparse weights on a GPU, of both formats."""

import ml_dtypes
import numpy as np
import pytest

pytest.importorskip("numba_cuda", reason="numba-cuda is not installed (extra cuda)")

from twell_numba.formats import BlockELLMatrix, CSRMatrix  # noqa: E402
from twell_numba.kernels.block_ell import cuda as block_ell_cuda  # noqa: E402
from twell_numba.kernels.block_ell import reference as block_ell_reference  # noqa: E402
from twell_numba.kernels.csr import cuda as csr_cuda  # noqa: E402
from twell_numba.kernels.csr import reference as csr_reference  # noqa: E402

# (M, D, F)
SMALL = [(0, 3, 4), (1, 5, 7), (2, 4, 3), (3, 9, 8), (20, 3, 5)]
LARGE = [(65537, 17, 9), (3, 20, 65537), (300, 129, 257), (1, 1000, 1500)]


class CSR:
    """How tests make CSR weights."""

    kernels, reference = csr_cuda, csr_reference

    @staticmethod
    def make(dense, block_size):
        return CSRMatrix.from_dense(dense)

    @staticmethod
    def upload(A, stream):
        return A.to(stream)

    @staticmethod
    def exact(A):
        return CSRMatrix(A.data.astype(np.float64), A.indices, A.indptr, A.shape)


class BlockELL:
    """How tests make block-ELL weights: edge padding and slots without a block hold NaN."""

    kernels, reference = block_ell_cuda, block_ell_reference

    @staticmethod
    def make(dense, block_size):
        A = BlockELLMatrix.from_dense(dense, block_size=block_size)
        return BlockELLMatrix(poisoned(A), A.block_columns, A.shape, block_size=block_size)

    @staticmethod
    def upload(A, stream):
        return A.to(stream)

    @staticmethod
    def exact(A):
        values = A.values.astype(np.float64)
        return BlockELLMatrix(values, A.block_columns, A.shape, block_size=A.block_size)


def places(A):
    """Where an array of a matrix's stored values holds entries."""
    if isinstance(A, CSRMatrix):
        return np.ones(A.data.shape, bool)
    b = A.block_size
    rows = np.arange(A.values.shape[0])[:, None, None, None] * b + np.arange(b)[:, None]
    columns = A.block_columns[:, :, None, None] * b + np.arange(b)
    is_there = A.block_columns[:, :, None, None] >= 0
    return is_there & (rows < A.shape[0]) & (columns < A.shape[1])


def poisoned(A):
    values = A.values.copy()
    values[~places(A)] = np.nan
    return values


@pytest.fixture(params=[CSR, BlockELL], ids=["csr", "block_ell"])
def family(request):
    return request.param


def make_problem(rng, rows, width, neurons, dtype, family, matrices, block_size=None):
    x = rng.standard_normal((rows, width)).astype(dtype)
    block_size = int(rng.choice([3, 5, 16])) if block_size is None else block_size
    weights = []
    for _ in range(matrices):
        dense = rng.standard_normal((neurons, width)) * width**-0.5
        dense *= rng.random(dense.shape) < rng.choice([0.05, 0.4])
        if neurons > 2:
            dense[1] = 0
            dense[2] = rng.standard_normal(width)
        weights.append(family.make(dense.astype(dtype), block_size))
    return x, weights


def check_layer(
    machine, rng, problem, family, precision, relative_error, gated, wide=False, block_size=None
):
    dtype, tolerance = precision
    if dtype.itemsize == 2:
        tolerance *= 2  # g, u, h and their gradients are rounded too: little averages out here
    x, weights = make_problem(rng, *problem, dtype, family, 3 if gated else 2, block_size)
    exact = [family.exact(weight) for weight in weights]
    x64 = x.astype(np.float64)
    if x.size and dtype != np.float64:
        # where products that decide are close to 0, the order of sums decides: leave rows out
        dense = exact[0].to_dense()
        products = x64 @ dense.T
        close = (np.abs(products) <= 1e-5 * (np.abs(x64) @ np.abs(dense).T)) & (products != 0)
        x, x64 = x[~close.any(axis=1)], x64[~close.any(axis=1)]
    dy = rng.standard_normal(x.shape).astype(dtype)
    name = "gated_ffn" if gated else "ffn"
    on_gpu = [family.upload(weight, machine.gpu.stream) for weight in weights]
    y, activations = getattr(family.kernels, f"{name}_forward")(machine.upload(x), *on_gpu)
    wanted_y, wanted = getattr(family.reference, f"{name}_forward")(x64, *exact)
    assert y.dtype == dtype
    assert relative_error(y, wanted_y) <= tolerance, problem
    nonzeros, absolute_sum, fired = family.kernels.activation_statistics(activations)
    assert nonzeros == wanted.nonzeros
    assert absolute_sum == pytest.approx(wanted.absolute_sum, rel=max(tolerance, 1e-12))
    np.testing.assert_array_equal(fired, wanted.fired)

    gradient_dtype = np.float32 if wide else dtype
    shapes = [weight.stored_values.shape for weight in weights]
    gradients = [machine.upload(np.ones(shape, gradient_dtype)) for shape in shapes]
    wanted_gradients = [np.ones(shape) for shape in shapes]
    dx = getattr(family.kernels, f"{name}_backward")(
        machine.upload(dy), machine.upload(x), *on_gpu, activations, 0.25, *gradients
    )
    wanted_dx = getattr(family.reference, f"{name}_backward")(
        dy.astype(np.float64), x64, *exact, wanted, 0.25, *wanted_gradients
    )
    assert dx.dtype == dtype
    assert relative_error(dx, wanted_dx) <= tolerance, problem
    sizes = sizes_of_gradients(x64, dy.astype(np.float64), exact, 0.25)
    for gradient, wanted_gradient, size in zip(gradients, wanted_gradients, sizes, strict=True):
        assert relative_error(gradient, wanted_gradient, size) <= tolerance, problem
    return activations


def sizes_of_gradients(x, dy, weights, l1_scale):
    """How large a layer's gradients, added to ones, are if the signs of what is added are random.

    Of few entries and many tokens they may all be sums that cancel by accident, and rounding what
    is added to 16 bits leaves an error that is measured by the root of the sum of its squares.
    """
    *first, down = (weight.to_dense() for weight in weights)
    products = [x @ weight.T for weight in first]
    fires = products[0] > 0
    hidden = np.where(fires, np.prod(products, axis=0), 0)
    d_hidden = np.where(fires, dy @ down.T + l1_scale * np.sign(hidden), 0)
    others = [d_hidden * products[1], d_hidden * products[0]] if len(first) == 2 else [d_hidden]
    sizes = []
    for weight, left, right in zip(
        weights, [*others, hidden], [*[x] * len(first), dy], strict=True
    ):
        squares = weight.sampled_product(np.square(left.T), np.square(right.T)).stored_values
        sizes.append(np.where(places(weight), np.sqrt(1 + squares), 0))
    return sizes


def problems(rng, machine):
    random = [tuple(rng.integers(1, 150, 3)) for _ in range(200)] if machine.is_real else []
    return machine.shapes(SMALL, LARGE + random)


def test_gated_ffn_matches_the_reference(rng, machine, family, precision, relative_error):
    for problem in problems(rng, machine):
        check_layer(machine, rng, problem, family, precision, relative_error, gated=True)


def test_two_matrix_ffn_matches_the_reference(rng, machine, family, precision, relative_error):
    for problem in problems(rng, machine):
        check_layer(machine, rng, problem, family, precision, relative_error, gated=False)


def test_gradients_of_16_bits_may_be_added_in_float32(rng, machine, family, relative_error):
    precision = (np.dtype(ml_dtypes.bfloat16), 5e-3)
    check_layer(machine, rng, (20, 5, 6), family, precision, relative_error, True, wide=True)


@pytest.mark.parametrize("tokens", [136, 259], ids=["aligned", "not_aligned"])
def test_many_tokens(rng, machine, family, tokens, precision, relative_error):
    check_layer(machine, rng, (tokens, 3, 4), family, precision, relative_error, gated=True)


# (M, D, F, b): one token, blocks of one strip and of several, fewer tokens than a tile and more
ON_TENSOR_CORES = [(1, 32, 32, 32), (7, 64, 96, 32), (133, 64, 64, 64)]
LARGE_ON_TENSOR_CORES = [
    (48, 96, 96, 96),
    (129, 512, 1024, 32),
    (1025, 1024, 512, 128),
    (2049, 512, 1408, 64),
    (300, 2304, 352, 32),
]


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16])
@pytest.mark.parametrize("gated", [True, False], ids=["gated", "two_matrix"])
def test_tensor_cores(rng, machine, monkeypatch, gated, dtype, relative_error):
    with_tensor_cores(machine, monkeypatch)
    precision = (np.dtype(dtype), 5e-3 if dtype == ml_dtypes.bfloat16 else 1e-3)
    for *problem, b in machine.shapes(ON_TENSOR_CORES, LARGE_ON_TENSOR_CORES):
        activations = check_layer(
            machine, rng, problem, BlockELL, precision, relative_error, gated, True, b
        )
        assert activations.kept is not None, problem


def with_tensor_cores(machine, monkeypatch):
    """Let an emulated GPU have them."""
    if not machine.is_real:
        monkeypatch.setattr(machine.gpu, "capability", (8, 0))
        monkeypatch.setattr(machine.gpu, "shared_memory_per_block", 100 * 1024)
    if machine.gpu.capability < (8, 0):
        pytest.skip("a GPU without these tensor cores")


def test_same_bits_from_tensor_cores(rng, machine, monkeypatch):
    with_tensor_cores(machine, monkeypatch)
    problem = (3000, 256, 512) if machine.is_real else (5, 32, 32)
    x, weights = make_problem(rng, *problem, ml_dtypes.bfloat16, BlockELL, 3, 32)
    check_same_bits(machine, x, weights, BlockELL)


def test_l1_scale_may_be_on_the_gpu(rng, machine, family, monkeypatch):
    for has_tensor_cores in (False, True):
        if has_tensor_cores:
            with_tensor_cores(machine, monkeypatch)
        dtype = ml_dtypes.bfloat16
        x, weights = make_problem(rng, 3, 32, 32, dtype, family, 3, 32)
        on_gpu = [family.upload(weight, machine.gpu.stream) for weight in weights]
        x = machine.upload(x)
        _, activations = family.kernels.gated_ffn_forward(x, *on_gpu)
        results = []
        for scale in (0.25, machine.upload(np.array([0.25], np.float32)), 0.5):
            gradients = [
                machine.upload(np.zeros(weight.stored_values.shape, np.float32))
                for weight in weights
            ]
            family.kernels.gated_ffn_backward(x, x, *on_gpu, activations, scale, *gradients)
            results.append(gradients[0].to_numpy())
        np.testing.assert_array_equal(results[0], results[1])
        assert not np.array_equal(results[0], results[2])


def test_nan_is_kept(rng, machine, family):
    x, weights = make_problem(rng, 3, 4, 5, np.float32, family, 3)
    x[1] = np.nan
    on_gpu = [family.upload(weight, machine.gpu.stream) for weight in weights]
    y, activations = family.kernels.gated_ffn_forward(machine.upload(x), *on_gpu)
    wanted, _ = family.reference.gated_ffn_forward(x, *weights)
    np.testing.assert_array_equal(np.isnan(y.to_numpy()), np.isnan(wanted))
    assert np.isnan(wanted).any()
    assert np.isnan(family.kernels.activation_statistics(activations)[1])


def test_gradients_go_to_entries_alone(rng, machine):
    x, weights = make_problem(rng, 3, 4, 5, np.float32, BlockELL, 2)
    on_gpu = [BlockELL.upload(weight, machine.gpu.stream) for weight in weights]
    _, activations = block_ell_cuda.ffn_forward(machine.upload(x), *on_gpu)
    gradients = [machine.upload(np.full(weight.values.shape, 7, np.float32)) for weight in weights]
    block_ell_cuda.ffn_backward(
        machine.upload(x), machine.upload(x), *on_gpu, activations, 0.1, *gradients
    )
    for weight, gradient in zip(weights, gradients, strict=True):
        nothing = ~places(weight)
        assert nothing.any()
        assert (gradient.to_numpy()[nothing] == 7).all()


def test_blocks_of_several_sizes_are_refused(rng, machine):
    dense, x = rng.standard_normal((5, 4)).astype(np.float32), np.ones((2, 4), np.float32)
    weights = [BlockELL.upload(BlockELL.make(dense, size), machine.gpu.stream) for size in (2, 3)]
    with pytest.raises(ValueError, match="one block size for all wanted"):
        block_ell_cuda.ffn_forward(machine.upload(x), *weights)


def test_same_bits_on_every_run(rng, machine, family):
    problem = (500, 70, 90) if machine.is_real else (5, 4, 6)
    x, weights = make_problem(rng, *problem, np.float32, family, 3)
    check_same_bits(machine, x, weights, family)


def check_same_bits(machine, x, weights, family):
    on_gpu = [family.upload(weight, machine.gpu.stream) for weight in weights]
    x = machine.upload(x)
    runs = []
    for _ in range(20 if machine.is_real else 2):
        y, activations = family.kernels.gated_ffn_forward(x, *on_gpu)
        gradients = [
            machine.upload(np.zeros(weight.stored_values.shape, np.float32)) for weight in weights
        ]
        dx = family.kernels.gated_ffn_backward(x, x, *on_gpu, activations, 0.5, *gradients)
        runs.append([array.to_numpy() for array in (y, dx, *gradients)])
    for run in runs[1:]:
        for array, first in zip(run, runs[0], strict=True):
            np.testing.assert_array_equal(array, first)


def test_refuses_what_does_not_fit(rng, machine, family):
    x, weights = make_problem(rng, 3, 4, 5, np.float32, family, 2)
    on_gpu = [family.upload(weight, machine.gpu.stream) for weight in weights]
    x = machine.upload(x)
    with pytest.raises(TypeError, match="up_weight of type DeviceArray given, .*Matrix wanted"):
        family.kernels.ffn_forward(x, x, on_gpu[1])
    with pytest.raises(ValueError, match=r"up_weight of shape \(5, 4\) given, shape \(5, 3\)"):
        family.kernels.ffn_forward(machine.upload(np.ones((2, 3), np.float32)), *on_gpu)
    _, activations = family.kernels.ffn_forward(x, *on_gpu)
    gradient = machine.upload(np.zeros(weights[0].stored_values.shape, np.float32))
    with pytest.raises(ValueError, match=r"down_grad of shape \(3, 4\) given"):
        family.kernels.ffn_backward(x, x, *on_gpu, activations, 0.0, gradient, x)
    with pytest.raises(ValueError, match=r"activations of shape \(3, 5\) given, \(2, 5\) wanted"):
        family.kernels.ffn_backward(x[:2], x[:2], *on_gpu, activations, 0.0, gradient, gradient)
