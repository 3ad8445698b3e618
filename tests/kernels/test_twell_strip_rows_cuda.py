import numpy as np
import pytest

pytest.importorskip("numba_cuda", reason="numba-cuda is not installed (extra cuda)")

from twell_numba.device.gpu import TARGETS, empty, zeros  # noqa: E402
from twell_numba.kernels.device_checks import arithmetic_dtype  # noqa: E402
from twell_numba.kernels.twell import strip_rows  # noqa: E402
from twell_numba.kernels.twell.cuda_activations import DeviceActivations  # noqa: E402
from twell_numba.kernels.twell.entry_transpose import list_by_neuron  # noqa: E402

# (M, D, F, entries a row, tile, slots): no row, one, a strip that is not full, several strips,
# more entries than a warp has lanes, more tiles than that
SMALL = [
    (0, 8, 9, 3, 4, 3),
    (1, 8, 9, 4, 4, 4),
    (5, 40, 90, 40, 8, 8),
    (3, 264, 70, 5, 2, 2),
]
LARGE = [
    (16384, 2048, 5632, 29, 256, 32),
    (3000, 264, 700, 100, 256, 200),
    (777, 2048, 5632, 60, 256, 64),
    (300, 4096, 1000, 29, 256, 64),
    (200, 8192, 600, 29, 256, 64),
]


def make_packed(rng, machine, problem, dtype, gated):
    """Return packed activations, whose row 2 is in the tail, and which neurons fire in each row."""
    rows, _, neurons, entries, tile, slots = problem
    tiles = -(-neurons // tile)
    fires = rng.random((rows, neurons)) < entries / neurons
    fires[2:3] = False
    counts = np.zeros((rows, tiles), np.int32)
    columns = np.zeros((rows, tiles, slots), np.uint16)
    values = np.full((rows, tiles, slots), np.nan)
    gate = np.abs(rng.standard_normal((rows, neurons))).astype(dtype)
    for row, neuron in zip(*np.nonzero(fires), strict=True):
        t, slot = neuron // tile, counts[row, neuron // tile]
        if slot == slots:
            fires[row, neuron] = False
            continue
        columns[row, t, slot], values[row, t, slot] = neuron % tile, gate[row, neuron]
        counts[row, t] += 1
    gate[~fires] = 0
    places = (rows, tiles * slots)
    stream = machine.gpu.stream
    packed = DeviceActivations(
        neurons=neurons,
        tile=tile,
        slots=slots,
        gated=gated,
        values=machine.upload(values.astype(dtype).reshape(places)),
        columns=machine.upload(columns.reshape(places)),
        counts=machine.upload(counts),
        up_values=empty(places if gated else (0, 0), dtype, stream),
        tail_rows=empty(rows, np.int32, stream),
        tail_count=zeros(1, np.int32, stream),
        tail_values=empty((0, 0), dtype, stream),
        is_compact=True,
        row_nonzeros=empty(rows, np.int32, stream),
        row_absolute_sums=empty(rows, arithmetic_dtype(dtype), stream),
        fired=zeros(neurons, np.bool_, stream),
    )
    return packed, gate.astype(np.float64)


def make_matrices(rng, machine, problem, dtype):
    """Return x, dy and three matrices in a dtype on the GPU, and in float64."""
    rows, width, neurons, *_ = problem
    host = [rng.standard_normal((rows, width)).astype(dtype) for _ in range(2)]
    host += [(rng.standard_normal((neurons, width)) * width**-0.5).astype(dtype) for _ in range(3)]
    return [machine.upload(array) for array in host], [array.astype(np.float64) for array in host]


def check_forward(rng, machine, problem, precision, relative_error, gated):
    dtype, tolerance = precision
    packed, gate = make_packed(rng, machine, problem, dtype, gated)
    (x, _, _, up_weight, down_weight), exact = make_matrices(rng, machine, problem, dtype)
    y = strip_rows.forward_entries(x, up_weight, down_weight, packed)
    # u is rounded before it is multiplied
    up = (exact[0] @ exact[3].T).astype(dtype).astype(np.float64) if gated else 1.0
    hidden = gate * up
    assert relative_error(y, hidden @ exact[4]) <= 2 * tolerance, problem
    if gated:
        np.testing.assert_array_equal(packed.row_nonzeros.to_numpy(), (hidden != 0).sum(1))
        np.testing.assert_array_equal(packed.fired.to_numpy(), (hidden != 0).any(0))
        assert relative_error(packed.row_absolute_sums, abs(hidden).sum(1)) <= 2 * tolerance


def check_backward(rng, machine, problem, precision, relative_error, gated):
    dtype, tolerance = precision
    packed, gate = make_packed(rng, machine, problem, dtype, gated)
    (x, dy, gate_weight, up_weight, down_weight), exact = make_matrices(
        rng, machine, problem, dtype
    )
    if gated:
        strip_rows.forward_entries(x, up_weight, down_weight, packed)
    l1_scale = machine.upload(np.full(1, 0.25, arithmetic_dtype(dtype)))
    lists, entry_places = list_by_neuron(packed)
    of_entries = (entry_places, lists.coefficients)
    row_lists = strip_rows.backward_dots(dy, down_weight, packed, l1_scale, *of_entries)
    inputs = (gate_weight, up_weight)
    dx = row_lists.sum_two(*inputs) if gated else row_lists.sum_one(up_weight)
    up = (exact[0] @ exact[3].T).astype(dtype).astype(np.float64) if gated else np.ones((1, 1))
    hidden = gate * up
    fires = gate > 0
    d_hidden = (exact[1] @ exact[4].T + 0.25 * np.sign(hidden)) * fires
    terms = [d_hidden * up, d_hidden * gate]
    wanted = terms[0] @ exact[2] + terms[1] @ exact[3] if gated else terms[0] @ exact[3]
    assert relative_error(dx, wanted) <= 2 * tolerance, problem
    neurons_of, rows_of = np.nonzero(fires.T)
    np.testing.assert_array_equal(lists.rows.to_numpy()[: rows_of.size], rows_of)
    for coefficients, dense in zip(lists.coefficients, (hidden, *terms), strict=False):
        listed = coefficients.to_numpy()[: rows_of.size]
        assert relative_error(listed, dense[rows_of, neurons_of]) <= 2 * tolerance


@pytest.fixture
def many_rows(monkeypatch):
    """Let rows be too many to be cut into narrow strips."""
    monkeypatch.setattr(strip_rows, "FEW_ROWS", 0)


@pytest.mark.parametrize("gated", [True, False], ids=["gated", "two_matrices"])
def test_forward_is_a_dense_product(rng, machine, many_rows, precision, relative_error, gated):
    for problem in machine.shapes(SMALL, LARGE):
        check_forward(rng, machine, problem, precision, relative_error, gated)


@pytest.mark.parametrize("gated", [True, False], ids=["gated", "two_matrices"])
def test_backward_is_a_dense_product(rng, machine, many_rows, precision, relative_error, gated):
    for problem in machine.shapes(SMALL, LARGE):
        check_backward(rng, machine, problem, precision, relative_error, gated)


@pytest.mark.parametrize("gated", [True, False], ids=["gated", "two_matrices"])
def test_few_rows_are_cut_into_narrow_strips(rng, machine, relative_error, gated):
    precision = (np.dtype(np.float32), 1e-5)
    for problem in machine.shapes(SMALL[2:], []):
        check_forward(rng, machine, problem, precision, relative_error, gated)
        check_backward(rng, machine, problem, precision, relative_error, gated)


def test_backward_adds_to_the_gradients(rng, machine, many_rows, relative_error):
    precision = np.dtype(np.float32)
    problem = (40, 264, 9, 3, 4, 4)
    packed, gate = make_packed(rng, machine, problem, precision, True)
    (x, dy, *weights), exact = make_matrices(rng, machine, problem, precision)
    strip_rows.forward_entries(x, *weights[1:], packed)
    gradients = tuple(machine.upload(np.ones((9, 264), np.float32)) for _ in range(3))
    l1_scale = machine.upload(np.full(1, 0.25, np.float32))
    strip_rows.backward_entries(dy, x, tuple(weights), packed, l1_scale, gradients)
    up = exact[0] @ exact[3].T
    d_hidden = (exact[1] @ exact[4].T + 0.25 * np.sign(up)) * (gate > 0)
    wanted = [
        1 + (d_hidden * up).T @ exact[0],
        1 + (d_hidden * gate).T @ exact[0],
        1 + (gate * up).T @ exact[1],
    ]
    for gradient, expected in zip(gradients, wanted, strict=True):
        assert relative_error(gradient, expected) <= 1e-5


def compile_kernels(dtype, targets):
    array, sums = f"{dtype}*", "float64*" if dtype == "float64" else "float32*"
    counts, lists, sizes = "int32*", "uint16*", ["int"] * 6
    dots = (*strip_rows.dots_options(1000, 2048), True)
    kinds = {
        strip_rows.multiply_rows(*dots): (array, array, counts, lists, sums, *sizes[:3]),
        strip_rows.multiply_forward(*dots): (
            array, array, array, "uint16*", counts, array, counts, lists, lists, array, counts,
            sums, "bool*", *sizes[:5],
        ),
        strip_rows.multiply_backward(*dots): (
            array, array, "uint16*", counts, array, array, sums, counts, counts, lists, lists,
            *[array] * 5, *sizes,
        ),
        strip_rows.sum_rows(*strip_rows.SUMS, False, True): (
            array, array, counts, lists, *[array] * 3, *sizes[:3],
        ),
        strip_rows.sum_rows(*strip_rows.SUMS_OF_TWO, True, True): (
            array, array, counts, lists, *[array] * 3, *sizes[:3],
        ),
    }  # fmt: skip
    for kernel, kinds_of_kernel in kinds.items():
        for target in targets:
            code, entry = kernel.compile(kinds_of_kernel, target)
            assert entry.encode() in code, target


def test_kernels_compile_for_the_targets():
    compile_kernels("bfloat16", TARGETS)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float64"])
def test_kernels_compile_in_every_precision(dtype):
    compile_kernels(dtype, ["75", "90a"])
