"""Activation-sparse layers with 8-bit weights, forward."""

import ml_dtypes
import numpy as np
import pytest

from twell_numba.kernels.twell import float8, reference
from twell_numba.kernels.twell.float8_weights import FLOAT8, LARGEST, Float8Weights

# (M, D, F, how many neurons fire, slots of a tile of 8): no row, a row, two warps, a part of a
# warp, no neuron that fires, a tail, rows that cannot be read sixteen numbers at a time
SMALL = [
    (0, 16, 9, 3, 4),
    (2, 512, 12, 5, 8),
    (1, 1024, 10, 10, 8),
    (2, 528, 9, 4, 8),
    (2, 16, 10, 0, 2),
    (3, 48, 30, 15, 4),
    (3, 7, 9, 4, 8),
]
LARGE = [
    (300, 2048, 5632, 29, 3),
    (40, 8192, 600, 600, 8),
    (65, 4096, 1000, 100, 8),
    (300, 768, 1001, 200, 8),
    (1, 2048, 5632, 29, 8),
    (20, 333, 900, 100, 4),
]
TILE = 8


def test_numbers_are_rounded_to_the_nearest(rng):
    matrix = rng.standard_normal((30, 50)).astype(np.float32)
    weights = Float8Weights.from_dense(matrix)
    np.testing.assert_allclose(weights.scales, np.abs(matrix).max(axis=1) / LARGEST, rtol=1e-6)
    every = np.arange(256, dtype=np.uint8).view(FLOAT8).astype(np.float64)
    every = every[np.isfinite(every)]
    nearest = np.abs(matrix[..., None] - weights.scales[:, None, None] * every).min(axis=2)
    error = np.abs(weights.to_dense(np.float64) - matrix)
    np.testing.assert_allclose(error, nearest, atol=1e-6 * np.abs(matrix).max())
    assert (
        error <= np.maximum(np.abs(matrix) / 16, weights.scales[:, None] * 2.0**-10) * 1.001
    ).all()
    assert weights.shape == (30, 50)
    assert weights.nbytes == 30 * 50 + 30 * 4
    assert weights.dtype == weights.to_dense().dtype == np.float32


def test_numbers_that_fit_are_kept():
    numbers = np.arange(256, dtype=np.uint8).view(FLOAT8)
    numbers = numbers[np.isfinite(numbers.astype(np.float32))]
    matrix = np.stack([numbers.astype(np.float32) * scale for scale in (1, 0.25, 2.0**-100)])
    np.testing.assert_array_equal(Float8Weights.from_dense(matrix).to_dense(), matrix)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_rows_of_zeros_and_of_tiny_and_huge_numbers(dtype):
    dtype = np.dtype(dtype if dtype != "bfloat16" else ml_dtypes.bfloat16)
    limits = ml_dtypes.finfo(dtype)
    large = min(float(limits.max), 3e38)
    matrix = np.array([[0, -0.0], [large, -large], [float(limits.smallest_normal), 0]]).astype(
        dtype
    )
    dense = Float8Weights.from_dense(matrix).to_dense().astype(np.float64)
    assert not dense[0].any()
    np.testing.assert_allclose(dense[1], matrix[1].astype(np.float64), rtol=1e-6)
    # where float32 has few bits left for the scale, or none
    assert abs(dense[2, 0] - float(matrix[2, 0])) <= max(4e-43, 1e-6 * float(matrix[2, 0]))
    assert dense[2, 1] == 0


@pytest.mark.parametrize("wrong", [np.nan, np.inf, -np.inf])
def test_a_row_that_is_not_finite_is_nan(rng, wrong):
    matrix = rng.standard_normal((4, 6))
    matrix[2, 3] = wrong
    dense = Float8Weights.from_dense(matrix).to_dense()
    assert np.isnan(dense[2]).all()
    assert np.isfinite(dense[[0, 1, 3]]).all()


def test_a_matrix_without_numbers():
    for shape in ((0, 5), (5, 0)):
        assert Float8Weights.from_dense(np.zeros(shape)).to_dense().shape == shape
    with pytest.raises(ValueError, match="matrix"):
        Float8Weights.from_dense(np.zeros(3))


def make_problem(rng, rows, width, neurons, firing, dtype, gated):
    """Return x, the weight that decides, what is held in 8 bits, and all in float64."""
    x = rng.standard_normal((rows, width))
    weights = rng.standard_normal((3, neurons, width)) * width**-0.5
    x[:, 0] = 1
    level = np.quantile(rng.standard_normal(10_000), 1 - firing / neurons)
    weights[0, :, 0] = -99 if firing == 0 else 99 if firing == neurons else -level
    x, pattern, *others = (array.astype(dtype) for array in (x, *weights))
    held = [Float8Weights.from_dense(array) for array in others[: 1 + gated]]
    exact = [array.astype(np.float64) for array in (x, pattern)]
    return x, pattern, held, [*exact, *(weights.to_dense(np.float64) for weights in held)]


def forward(x, pattern, held, slots, tile=TILE):
    function = float8.gated_ffn_forward if len(held) == 2 else float8.ffn_forward
    return function(x, pattern, *held, tile, slots)


def expected(exact, slots):
    function = reference.gated_ffn_forward if len(exact) == 4 else reference.ffn_forward
    return function(*exact, TILE, slots)


@pytest.mark.parametrize("gated", [True, False], ids=["gated", "two_matrices"])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_the_cpu_computes_with_the_rounded_weights(rng, relative_error, dtype, gated):
    for *shape, slots in SMALL:
        x, pattern, held, exact = make_problem(rng, *shape, dtype, gated)
        y, _ = forward(x, pattern, held, slots)
        assert y.dtype == dtype
        assert relative_error(y, expected(exact, slots)[0]) <= (
            1e-5 if dtype == np.float32 else 1e-13
        )


@pytest.mark.parametrize("gated", [True, False], ids=["gated", "two_matrices"])
def test_a_gpu_computes_with_the_rounded_weights(rng, machine, precision, relative_error, gated):
    from twell_numba.kernels.twell import cuda

    dtype, tolerance = precision
    for *shape, slots in machine.shapes(SMALL, LARGE):
        x, pattern, held, exact = make_problem(rng, *shape, dtype, gated)
        if dtype != np.float64:
            # there reference and kernel may decide differently: leave such rows out
            products = np.abs(exact[0] @ exact[1].T)
            clear = (products > 1e-5 * (np.abs(exact[0]) @ np.abs(exact[1]).T)).all(axis=1)
            x, exact[0] = x[clear], exact[0][clear]
        held = [weights.to(machine.gpu.stream) for weights in held]
        y, packed = forward(machine.upload(x), machine.upload(pattern), held, slots)
        wanted_y, wanted = expected(exact, slots)
        # x and h are rounded to float16, in 16 bits g, u and rows in the tail, too
        bound = {2: 4 * tolerance, 4: 2e-3, 8: tolerance}[dtype.itemsize]
        assert y.dtype == dtype
        assert relative_error(y, wanted_y) <= bound, (shape, slots)
        np.testing.assert_array_equal(packed.pattern().tail_rows, wanted.tail_rows)
        nonzeros, absolute_sum, fired = cuda.activation_statistics(packed)
        wanted_nonzeros, wanted_sum, wanted_fired = reference.activation_statistics(wanted)
        # u below the error of its sum in float16 may be 0, and then h is
        missing = wanted_nonzeros - nonzeros
        may_miss = gated and dtype != np.float64
        assert 0 <= missing <= (1e-4 * wanted_nonzeros if may_miss else 0)
        assert absolute_sum == pytest.approx(wanted_sum, rel=max(bound, 1e-12))
        assert wanted_fired[fired].all()
        assert wanted_fired.sum() - fired.sum() <= missing


def test_a_gpu_expands_the_same_numbers(rng, machine):
    matrix = rng.standard_normal((7, 37)).astype(ml_dtypes.bfloat16)
    matrix[2], matrix[3, 4] = 0, np.nan
    weights = Float8Weights.from_dense(machine.upload(matrix))
    assert weights.is_on_gpu
    on_host = weights.to("cpu")
    assert not on_host.is_on_gpu
    for dtype in (np.float32, np.dtype(ml_dtypes.bfloat16)):
        given = weights.to_dense(dtype).to_numpy().astype(np.float32)
        np.testing.assert_array_equal(given, on_host.to_dense(dtype).astype(np.float32))
    np.testing.assert_array_equal(Float8Weights.from_dense(matrix).numbers, on_host.numbers)


def test_nan_reaches_the_rows_that_need_it(rng, machine):
    x, gate, up, down = (rng.standard_normal((9, 512)).astype(np.float32) for _ in range(4))
    up[3, 5], down[7, 2] = np.nan, np.inf
    held = [Float8Weights.from_dense(array).to(machine.gpu.stream) for array in (up, down)]
    y, packed = forward(machine.upload(x[:4]), machine.upload(gate), held, 8)
    fires = packed.pattern().to_dense() != 0
    wanted = fires[:, 3] | fires[:, 7]
    assert wanted.any()
    assert not wanted.all()
    assert (np.isnan(y.to_numpy()) == wanted[:, None]).all()


@pytest.fixture
def short_lists(monkeypatch):
    """Let a few entries already take several lists in shared memory."""
    pytest.importorskip("numba_cuda", reason="numba-cuda is not installed (extra cuda)")
    from twell_numba.kernels.twell import float8_rows

    monkeypatch.setattr(float8_rows, "LIST", 32)
    float8_rows.forward_row.cache_clear()
    yield
    float8_rows.forward_row.cache_clear()


@pytest.mark.parametrize("gated", [True, False], ids=["gated", "two_matrices"])
def test_more_entries_than_a_list_holds(rng, short_lists, machine, relative_error, gated):
    x, pattern, held, exact = make_problem(rng, 2, 512, 75, 75, np.float32, gated)
    held = [weights.to(machine.gpu.stream) for weights in held]
    y, _ = forward(machine.upload(x), machine.upload(pattern), held, 8)
    assert relative_error(y, expected(exact, 8)[0]) <= 2e-3


@pytest.mark.parametrize("by_instruction", [True, False], ids=["by_instruction", "by_bits"])
@pytest.mark.parametrize("size", [1e-18, 1e5, 1e15])
def test_numbers_of_any_size(rng, machine, relative_error, monkeypatch, size, by_instruction):
    """Products are added up in float16, which has room for neither."""
    from twell_numba.kernels.twell import float8_rows

    if machine.is_real and machine.gpu.capability < float8_rows.INSTRUCTION_CAPABILITY:
        pytest.skip("needs compute capability 8.9")
    oldest = (0, 0) if by_instruction else (99, 0)
    monkeypatch.setattr(float8_rows, "INSTRUCTION_CAPABILITY", oldest)
    x, gate, held, exact = make_problem(rng, 1, 512, 9, 9, np.float32, True)
    x *= np.float32(size)
    x[0, 5] *= 100  # beside which the others are small
    exact[0] = x.astype(np.float64)
    held = [weights.to(machine.gpu.stream) for weights in held]
    y, _ = forward(machine.upload(x), machine.upload(gate), held, 8)
    assert relative_error(y, expected(exact, 8)[0]) <= 2e-3


@pytest.mark.parametrize("wrong", [np.nan, np.inf])
def test_a_row_of_x_that_is_not_finite_stays_alone(rng, machine, relative_error, wrong):
    x, gate, held, exact = make_problem(rng, 3, 512, 9, 9, np.float32, True)
    x[1, 7] = wrong
    held = [weights.to(machine.gpu.stream) for weights in held]
    y, _ = forward(machine.upload(x), machine.upload(gate), held, 8)
    y, wanted = y.to_numpy(), expected(exact, 8)[0]
    assert not np.isfinite(y[1]).any()
    assert relative_error(y[[0, 2]], wanted[[0, 2]]) <= 2e-3


@pytest.fixture
def by_both(machine, monkeypatch):
    """``by_both(x, pattern, held)``: y and what is packed, by the instruction and by bits."""
    from twell_numba.kernels.twell import float8_rows

    if machine.is_real and machine.gpu.capability < float8_rows.INSTRUCTION_CAPABILITY:
        pytest.skip("needs compute capability 8.9")

    def compute(x, pattern, held):
        held = [weights.to(machine.gpu.stream) for weights in held]
        results = []
        for oldest in ((0, 0), (99, 0)):
            monkeypatch.setattr(float8_rows, "INSTRUCTION_CAPABILITY", oldest)
            results.append(forward(machine.upload(x), machine.upload(pattern), held, TILE))
        return results

    return compute


@pytest.mark.parametrize("gated", [True, False], ids=["gated", "two_matrices"])
def test_the_instruction_and_the_bits_give_the_same(rng, machine, by_both, relative_error, gated):
    """To the last bit where no number is far smaller than the largest of its row."""
    for rows, width, neurons in machine.shapes([(1, 512, 12)], [(50, 2048, 700)]):
        x, pattern, held, _ = make_problem(rng, rows, width, neurons, neurons, np.float32, gated)
        x = np.copysign(np.maximum(np.abs(x), np.float32(0.01)), x)
        (y, packed), (y_by_bits, packed_by_bits) = by_both(x, pattern, held)
        if gated:  # some of h = g u are small
            u, u_by_bits = packed.up_values.to_numpy(), packed_by_bits.up_values.to_numpy()
            is_entry = np.arange(u.size).reshape(u.shape) % (packed.tiles * TILE) < neurons
            assert np.count_nonzero(u[is_entry]) > 0.99 * rows * neurons
            np.testing.assert_array_equal(u[is_entry], u_by_bits[is_entry])
            assert relative_error(y, y_by_bits.to_numpy()) <= 1e-5
        else:
            np.testing.assert_array_equal(y.to_numpy(), y_by_bits.to_numpy())


def test_the_bits_keep_more_of_small_numbers(rng, machine, by_both, relative_error):
    """Which the instruction's pairs round to multiples of 2^-24 of the largest."""
    x, pattern, held, exact = make_problem(rng, 1, 512, 12, 12, np.float32, True)
    x[0, 1:] *= np.float32(2**-17)
    exact[0] = x.astype(np.float64)
    held[0].numbers[:, 0] = 0  # the largest x has no part in u
    exact[2] = held[0].to_dense(np.float64)
    wanted = (exact[0] @ exact[2].T)[0]
    errors = []
    for _, packed in by_both(x, pattern, held):
        errors.append(relative_error(packed.up_values.to_numpy()[0, :12], wanted))
    by_instruction, by_bits = errors
    assert by_bits <= 1e-3
    assert by_bits < by_instruction <= 1e-2


@pytest.mark.gpu
def test_can_be_recorded_and_is_the_same_in_every_run(rng, real_gpu):
    from twell_numba.device.gpu import from_numpy, record_graph

    x, gate, held, _ = make_problem(rng, 100, 256, 300, 40, np.float32, True)
    arrays = [from_numpy(array, real_gpu.stream) for array in (x, gate)]
    held = [weights.to(real_gpu.stream) for weights in held]
    forward(*arrays, held, 4)
    with record_graph(real_gpu.stream) as graph:
        y, _ = forward(*arrays, held, 4)
    arrays[0].copy_from(rng.permutation(x) + np.float32(0.1))  # with another tail
    graph.replay()
    np.testing.assert_array_equal(y.to_numpy(), forward(*arrays, held, 4)[0].to_numpy())


def test_refuses_what_does_not_fit(rng, machine):
    x, gate, held, _ = make_problem(rng, 2, 16, 6, 3, np.float32, True)
    x, gate = map(machine.upload, (x, gate))
    held = [weights.to(machine.gpu.stream) for weights in held]
    with pytest.raises(TypeError, match="up_weight of type DeviceArray given, Float8Weights on a"):
        float8.gated_ffn_forward(x, gate, gate, held[1])
    with pytest.raises(
        TypeError, match="down_weight of type Float8Weights given, Float8Weights on"
    ):
        float8.ffn_forward(x, gate, held[1].to("cpu"))
    narrow = Float8Weights.from_dense(gate[:5])
    with pytest.raises(ValueError, match="down_weight"):
        float8.gated_ffn_forward(x, gate, held[0], narrow)
    with pytest.raises(ValueError, match="slots=9 given, 1 to tile=8 wanted"):
        forward(x, gate, held, 9)


def kinds(dtype):
    """Return the kinds of arguments of a row's kernel."""
    array = f"{dtype}*"
    held = ("uint8*", "float32*")
    packed = (array, "uint16*", "int32*", array)
    return (array, *held, *held, *packed, array, "int32*", "float32*", "bool*", *["int"] * 3)


@pytest.mark.parametrize(
    ("width", "gated", "dtype"),
    [(2048, True, "bfloat16"), (8192, True, "float32"), (48, False, "float16")],
)
def test_kernels_compile_for_every_target(width, gated, dtype):
    pytest.importorskip("numba_cuda", reason="numba-cuda is not installed (extra cuda)")
    from twell_numba.device.gpu import TARGETS
    from twell_numba.kernels.twell.float8_rows import forward_row

    for target in TARGETS if dtype == "bfloat16" else TARGETS[:1]:
        has_instruction = target not in ("75", "80", "86")
        code, _ = forward_row(width, gated, has_instruction).compile(kinds(dtype), target)
        assert code.startswith(b"\x7fELF"), target
