import ml_dtypes
import numpy as np
import pytest

pytest.importorskip("numba_cuda", reason="numba-cuda is not installed (extra cuda)")

from twell_numba.device.gpu import TARGETS  # noqa: E402
from twell_numba.kernels.twell import aligned_decode, cuda, cuda_decode, reference  # noqa: E402

BFLOAT16 = (np.dtype(ml_dtypes.bfloat16), 5e-3)
# (M, D, F, how many neurons fire): no token, one, several, none that fires, all
SMALL = [(0, 5, 7, 3), (1, 7, 9, 3), (3, 5, 11, 2), (6, 3, 5, 0), (2, 9, 70, 70)]
# rows that can be read eight numbers at a time: one chunk of 256, and a part of another
ALIGNED = [(1, 8, 9, 4), (1, 256, 5, 2), (3, 264, 8, 3)]
LARGE = [
    (1, 2040, 1001, 911),
    (8, 2040, 1001, 60),
    (17, 33, 65537, 40),
    (32, 8192, 70, 9),
    (5, 40, 7000, 7000),
    (2, 768, 6145, 6100),
    (3, 999, 1000, 30),
    (32, 256, 777, 20),
]
# rows that the kernels of aligned_decode take, if they are of 16-bit numbers; more neurons than
# small blocks look at in one turn
OF_256_COLUMNS = [
    (1, 256, 24, 7),
    (1, 512, 136, 50),
    (3, 256, 24, 5),
    (9, 512, 16, 0),
    (17, 256, 8, 4),
]
OF_256_COLUMNS += [(1, 256, 520, 300)]
# those of one token whose neurons small blocks take three a warp at most: some get fewer, or none
IN_ONE_WAVE = [(1, 512, 8, 8), (1, 512, 32, 10), (1, 1024, 16, 0), (1, 1024, 32, 20)]
LARGE_OF_256_COLUMNS = [
    (1, 2048, 5632, 29),
    (1, 2048, 5632, 1500),
    (1, 2048, 9000, 60),
    (1, 1024, 5000, 40),
    (1, 512, 8192, 500),
    (1, 4096, 72, 9),
    (3, 4096, 72, 9),
    (8, 768, 6152, 6100),
    (16, 1280, 1000, 40),
    (17, 256, 4096, 200),
    (32, 2048, 1408, 60),
]


def make_problem(rng, rows, width, neurons, firing, dtype, matrices=3):
    """Return x and weights in a dtype such that about ``firing`` neurons fire, and in float64."""
    x = rng.standard_normal((rows, width))
    weights = rng.standard_normal((matrices, neurons, width)) * width**-0.5
    x[:, 0] = 1
    if firing == 0:
        weights[0, :, 0] = -99
    elif firing >= neurons:
        weights[0, :, 0] = 99
    else:
        weights[0, :, 0] = -np.quantile(rng.standard_normal(10_000), 1 - firing / neurons)
    stored = [array.astype(dtype) for array in (x, *weights)]
    return stored, [array.astype(np.float64) for array in stored]


def forward(machine, stored, gated):
    x, *weights = map(machine.upload, stored)
    gate, up, down = weights if gated else (None, *weights)
    return cuda_decode.decode_forward(x, gate, up, down), (x, *weights)


def check_layer(machine, rng, problem, precision, relative_error, gated):
    dtype, tolerance = precision
    if dtype.itemsize == 2 and min(problem[1:3]) < 16:
        # g and u are rounded before they are multiplied, and a few such terms may cancel
        tolerance *= 4
    stored, exact = make_problem(rng, *problem, dtype, 3 if gated else 2)
    # there reference and kernel may decide differently: leave such rows out
    pattern = exact[0] @ exact[1].T
    kept = (np.abs(pattern) > 1e-5 * (np.abs(exact[0]) @ np.abs(exact[1]).T)).all(axis=1)
    stored[0], exact[0] = stored[0][kept], exact[0][kept]
    (y, packed), (x, *weights) = forward(machine, stored, gated)
    name = "gated_ffn" if gated else "ffn"
    wanted_y, wanted = getattr(reference, f"{name}_forward")(*exact, 8, 8)
    assert y.dtype == dtype
    assert relative_error(y, wanted_y) <= tolerance, problem
    pattern = packed.pattern()
    np.testing.assert_array_equal(
        pattern.to_dense() != 0, np.asarray(exact[0] @ exact[1].T > 0), str(problem)
    )
    nonzeros, absolute_sum, fired = cuda.activation_statistics(packed)
    wanted_nonzeros, wanted_sum, wanted_fired = reference.activation_statistics(wanted)
    assert nonzeros == wanted_nonzeros
    assert absolute_sum == pytest.approx(wanted_sum, rel=max(tolerance, 1e-12))
    np.testing.assert_array_equal(fired, wanted_fired)
    return stored, exact, y, packed, (x, *weights), wanted


def check_backward(machine, rng, problem, precision, relative_error, gated):
    dtype, tolerance = precision
    stored, exact, y, packed, arrays, wanted = check_layer(
        machine, rng, problem, precision, relative_error, gated
    )
    name = "gated_ffn" if gated else "ffn"
    dy = rng.standard_normal(stored[0].shape).astype(dtype)
    shape = stored[1].shape
    gradients = [machine.upload(np.ones(shape, dtype)) for _ in stored[1:]]
    wanted_gradients = [np.ones(shape) for _ in stored[1:]]
    dx = getattr(cuda, f"{name}_backward")(machine.upload(dy), *arrays, packed, 0.25, *gradients)
    wanted_dx = getattr(reference, f"{name}_backward")(
        dy.astype(np.float64), *exact, wanted, 0.25, *wanted_gradients
    )
    assert relative_error(dx, wanted_dx) <= 4 * tolerance, problem
    for gradient, wanted_gradient in zip(gradients, wanted_gradients, strict=True):
        assert relative_error(gradient, wanted_gradient) <= 4 * tolerance, problem


@pytest.mark.parametrize("gated", [True, False], ids=["gated", "two_matrices"])
def test_matches_the_reference(rng, machine, precision, relative_error, gated):
    problems = SMALL + ALIGNED
    if machine.is_real:
        # almost each has kernels of its own, which take most of the time to compile
        problems = machine.share(problems + machine.shapes([], LARGE), precision[0])[gated::2]
    for problem in problems:
        check_layer(machine, rng, problem, precision, relative_error, gated)


@pytest.fixture
def small_blocks(machine, monkeypatch):
    """Make the emulator's blocks small, and its GPU one with tensor cores."""
    kernels = (
        aligned_decode.hidden_in_one_wave,
        aligned_decode.hidden_of_token,
        aligned_decode.hidden_of_tokens,
        aligned_decode.outputs_of_tokens,
    )
    if not machine.is_real:
        machine.gpu.capability = (8, 0)
        sizes = {
            "TOKEN_THREADS": 64,
            "TOKEN_BLOCKS": 1,
            "WAVE_THREADS": 64,
            "WAVE_BLOCKS": 3,
            "OCTETS": 1,
            "WARPS_FOR_SIXTEEN": 2,
            "WARPS_FOR_MORE": 2,
        }
        for name, value in {**sizes, "OUTPUT_THREADS": 64}.items():
            monkeypatch.setattr(aligned_decode, name, value)
        for kernel in kernels:
            kernel.cache_clear()
    yield
    for kernel in kernels:
        kernel.cache_clear()


@pytest.mark.parametrize("gated", [True, False], ids=["gated", "two_matrices"])
def test_rows_of_256_columns(rng, machine, small_blocks, relative_error, gated):
    problems = OF_256_COLUMNS + IN_ONE_WAVE
    if machine.is_real:
        problems = (problems + machine.shapes([], LARGE_OF_256_COLUMNS))[gated::2]
    for problem in problems:
        check_layer(machine, rng, problem, BFLOAT16, relative_error, gated)
        if not machine.is_real:
            names = {name for name, _ in machine.gpu.launches}
            first = "hidden_of_token" if problem[0] == 1 else "hidden_of_tokens"
            if problem in IN_ONE_WAVE:
                first = "hidden_in_one_wave"
            assert {first, "outputs_of_tokens"} <= names, problem
            machine.gpu.launches.clear()


@pytest.mark.parametrize("gated", [True, False], ids=["gated", "two_matrices"])
def test_backward_pass_of_rows_of_256_columns(rng, machine, small_blocks, relative_error, gated):
    check_backward(machine, rng, (2, 256, 16, 4), BFLOAT16, relative_error, gated)


@pytest.mark.parametrize("gated", [True, False], ids=["gated", "two_matrices"])
def test_backward_pass_of_all_rows_in_the_tail(rng, machine, relative_error, gated):
    for problem in ((3, 5, 11, 4), (2, 40, 9, 3)):
        check_backward(machine, rng, problem, (np.dtype(np.float32), 1e-5), relative_error, gated)


FOR_EACH_KERNEL = pytest.mark.parametrize(
    ("rows", "width", "neurons", "dtype"),
    [
        (3, 5, 9, np.float32),
        (3, 40, 9, np.float32),
        (1, 256, 16, BFLOAT16[0]),
        (1, 1024, 16, BFLOAT16[0]),
        (3, 256, 16, BFLOAT16[0]),
    ],
)


@FOR_EACH_KERNEL
def test_nan_reaches_the_result(rng, machine, small_blocks, rows, width, neurons, dtype):
    stored, _ = make_problem(rng, rows, width, neurons, 4, dtype)
    stored[0][rows // 2, 2] = np.nan
    (y, _), _ = forward(machine, stored, gated=True)
    is_nan = np.isnan(y.to_numpy().astype(np.float32))
    assert is_nan.all(axis=1).tolist() == [row == rows // 2 for row in range(rows)]


@FOR_EACH_KERNEL
def test_rows_of_neurons_that_do_not_fire_are_not_used(
    rng, machine, small_blocks, rows, width, neurons, dtype
):
    stored, _ = make_problem(rng, rows, width, neurons, 2, dtype)
    (y, packed), _ = forward(machine, stored, gated=True)
    idle = ~packed.fired.to_numpy()
    assert idle.any()
    stored[2][idle] = stored[3][idle] = np.nan
    (again, _), _ = forward(machine, stored, gated=True)
    np.testing.assert_array_equal(again.to_numpy(), y.to_numpy())


@pytest.mark.parametrize(("width", "neurons"), [(0, 5), (4, 0)])
def test_nothing_to_compute(machine, width, neurons):
    x = machine.upload(np.ones((3, width), np.float32))
    weight = machine.upload(np.ones((neurons, width), np.float32))
    y, packed = cuda_decode.decode_forward(x, weight, weight, weight)
    np.testing.assert_array_equal(y.to_numpy(), np.zeros((3, width)))
    assert cuda.activation_statistics(packed)[:2] == (0, 0)


def test_refuses_more_tokens(machine):
    x = machine.upload(np.ones((33, 4), np.float32))
    with pytest.raises(ValueError, match="x of 33 rows given, at most 32 wanted"):
        cuda_decode.decode_forward(x, None, x, x)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("rows", "width", "neurons", "dtype"),
    [
        (1, 1024, 4096, BFLOAT16[0]),
        (1, 512, 8192, BFLOAT16[0]),
        (16, 512, 8192, BFLOAT16[0]),
        (3, 512, 8192, np.dtype(np.float32)),
    ],
    ids=str,
)
def test_can_be_recorded_with_the_same_bits_on_every_run(
    rng, real_gpu, rows, width, neurons, dtype
):
    from twell_numba.device.gpu import from_numpy, record_graph

    stored, _ = make_problem(rng, rows, width, neurons, 900, dtype)
    x, *weights = (from_numpy(array, real_gpu.stream) for array in stored)
    cuda_decode.decode_forward(x, *weights)
    with record_graph(real_gpu.stream) as graph:
        y, packed = cuda_decode.decode_forward(x, *weights)
    x.copy_from(stored[0][:, ::-1].copy())
    expected, _ = cuda_decode.decode_forward(x, *weights)
    for _ in range(20):
        graph.replay()
        np.testing.assert_array_equal(y.to_numpy(), expected.to_numpy())


def signatures(dtype, gated):
    array, counts, size = f"{dtype}*", "int32*", "int"
    sums = "float64*" if dtype == "float64" else "float32*"
    hidden = sums if gated else array
    layer = (*[array] * 5, hidden, "bool*")
    return {
        "warps": (*layer, *[size] * 4),
        "token": (*layer, size),
        "tokens": (*layer, size, size),
        "outputs": (array, hidden, array, counts, sums, *[counts] * 3, *[size] * 4),
    }


def compile_all(kernels, targets):
    for kernel, kinds in kernels.items():
        for target in targets:
            assert kernel.compile(kinds, target)[0].startswith(b"\x7fELF"), (kernel.name, target)


def general_kernels(dtype, gated, width, tokens):
    kinds = signatures(dtype, gated)
    return {
        cuda_decode.hidden_by_warps(width, gated, tokens): kinds["warps"],
        cuda_decode.outputs(width > 0, gated): kinds["outputs"],
    }


def test_kernels_compile_for_every_target():
    kinds = signatures("bfloat16", True)
    compile_all(general_kernels("bfloat16", True, 2048, 4), TARGETS)
    compile_all(
        {
            aligned_decode.hidden_in_one_wave(2048, True): kinds["token"],
            aligned_decode.hidden_of_token(2048, True): kinds["token"],
            aligned_decode.hidden_of_tokens(2048, True, 4): kinds["tokens"],
            aligned_decode.outputs_of_tokens(): kinds["outputs"],
        },
        TARGETS[1:],
    )


@pytest.mark.parametrize(
    ("dtype", "gated", "width"),
    [("float32", True, 8192), ("float16", False, 0), ("float64", True, 768)],
)
def test_other_kernels_compile(dtype, gated, width):
    compile_all(general_kernels(dtype, gated, width, 1), ["75"])


def test_aligned_kernels_of_two_matrices_compile():
    kinds = signatures("float16", False)
    compile_all(
        {
            aligned_decode.hidden_in_one_wave(1024, False): kinds["token"],
            aligned_decode.hidden_of_token(768, False): kinds["token"],
            aligned_decode.hidden_of_tokens(8192, False, 1): kinds["tokens"],
            aligned_decode.outputs_of_tokens(): kinds["outputs"],
        },
        ["80"],
    )
