import types

import ml_dtypes
import numpy as np
import pytest

pytest.importorskip("numba_cuda", reason="numba-cuda is not installed (extra cuda)")

from twell_numba.device.gpu import TARGETS, empty, zeros  # noqa: E402
from twell_numba.kernels.device_checks import arithmetic_dtype  # noqa: E402
from twell_numba.kernels.twell import entry_gradients, entry_transpose  # noqa: E402
from twell_numba.kernels.twell.cuda_activations import DeviceActivations  # noqa: E402
from twell_numba.kernels.twell.entry_gradients import add_weight_gradients  # noqa: E402
from twell_numba.kernels.twell.entry_transpose import list_by_neuron  # noqa: E402

# (M, F, D): no row, one, several chunks of rows, a chunk that is not full, strips that are not
SMALL = [(0, 5, 8), (1, 3, 8), (70, 9, 40)]
LARGE = [
    (16384, 5632, 2048),
    (3000, 301, 264),
    (700, 20000, 1032),
    (129, 57345, 40),
    (65537, 70, 256),
    (300, 600, 8192),
]


@pytest.fixture
def few_parts(machine, monkeypatch):
    """Let neurons with a few entries have several parts, in several ranges, with few blocks."""
    if not machine.is_real:
        monkeypatch.setattr(entry_transpose, "MOST_PARTS", 24)
        monkeypatch.setattr(entry_transpose, "FEWEST_ENTRIES", 16)
        monkeypatch.setattr(entry_transpose, "SHARED_WORDS", 7)
        monkeypatch.setattr(entry_gradients, "ADDING_BLOCKS", 1)


def make_pattern(rng, rows, neurons):
    """Return which neurons fire: one always, one never, some often, others rarely."""
    share = rng.choice([0.0, 0.005, 0.02, 0.2], neurons, p=[0.3, 0.5, 0.17, 0.03])
    if neurons < 16:
        share = rng.choice([0.05, 0.3], neurons)
    share[neurons // 2], share[-1] = 1, 0
    return rng.random((rows, neurons), np.float32) < share


def make_packed(machine, fires, dtype, gated=True):
    """Return packed activations of a pattern, without values, and entries' rows and neurons."""
    rows, neurons = fires.shape
    tile = 4 if neurons < 16 else 256
    tiles = -(-neurons // tile)
    entry_rows, entry_neurons = np.nonzero(fires)
    counts = np.zeros((rows, tiles), np.int32)
    np.add.at(counts, (entry_rows, entry_neurons // tile), 1)
    slots = int(counts.max(initial=1)) + 1
    starts = np.concatenate([[0], np.cumsum(counts.ravel())])
    slot = np.arange(len(entry_rows)) - starts[entry_rows * tiles + entry_neurons // tile]
    places = entry_neurons // tile * slots + slot
    columns = np.full((rows, tiles * slots), 65535, np.uint16)
    columns[entry_rows, places] = entry_neurons % tile
    stream, shape = machine.gpu.stream, columns.shape
    packed = DeviceActivations(
        neurons=neurons,
        tile=tile,
        slots=slots,
        gated=gated,
        values=empty(shape, dtype, stream),
        columns=machine.upload(columns),
        counts=machine.upload(counts),
        up_values=empty(shape if gated else (0, 0), dtype, stream),
        tail_rows=empty(rows, np.int32, stream),
        tail_count=zeros(1, np.int32, stream),
        tail_values=empty((0, 0), dtype, stream),
        is_compact=True,
        row_nonzeros=empty(rows, np.int32, stream),
        row_absolute_sums=empty(rows, arithmetic_dtype(dtype), stream),
        fired=zeros(neurons, np.bool_, stream),
    )
    return packed, (entry_rows, places)


def check_lists(rng, machine, rows, neurons):
    fires = make_pattern(rng, rows, neurons)
    packed, at = make_packed(machine, fires, np.float32)
    lists, entry_places = list_by_neuron(packed)
    wanted_neurons, wanted_rows = np.nonzero(fires.T)
    wanted_starts = np.concatenate([[0], np.cumsum(fires.sum(0))])
    np.testing.assert_array_equal(lists.neuron_starts.to_numpy(), wanted_starts)
    np.testing.assert_array_equal(lists.rows.to_numpy()[: wanted_rows.size], wanted_rows)
    wanted_places = np.empty(wanted_rows.size, np.int64)
    wanted_places[np.argsort(np.nonzero(fires)[1], kind="stable")] = np.arange(wanted_rows.size)
    np.testing.assert_array_equal(entry_places.to_numpy()[at], wanted_places)
    check_parts(lists, wanted_starts, neurons)


def check_parts(lists, neuron_starts, neurons):
    *part_starts, size = lists.part_starts.to_numpy()
    assert size >= entry_transpose.FEWEST_ENTRIES
    parts = np.maximum(1, -(-np.diff(neuron_starts) // size))
    np.testing.assert_array_equal(part_starts, np.concatenate([[0], np.cumsum(parts)]))
    part_neurons = lists.part_neurons.to_numpy()
    assert part_starts[-1] <= part_neurons.size
    np.testing.assert_array_equal(
        part_neurons[: part_starts[-1]], np.repeat(np.arange(neurons), parts)
    )
    split, *split_neurons = lists.split_neurons.to_numpy()
    np.testing.assert_array_equal(split_neurons[:split], np.flatnonzero(parts > 1))


def test_lists_are_those_of_a_stable_sort(rng, machine, few_parts):
    for rows, neurons, _ in machine.shapes(SMALL, LARGE):
        check_lists(rng, machine, rows, neurons)


def test_more_slots_than_32_bits_number_are_refused():
    packed = types.SimpleNamespace(values=types.SimpleNamespace(size=2**31))
    with pytest.raises(ValueError, match=r"2147483648 slots given, at most 2147483647 wanted"):
        list_by_neuron(packed)


def test_chunks_and_ranges_fit_in_shared_memory():
    for rows, words in ((1, 1), (4096, 2), (16384, 8), (10**6, 8)):
        assert entry_transpose.words_of_chunk(rows) == words
        assert entry_transpose.range_of_block(rows, 5632) * words * 4 <= 48 * 1024
    assert entry_transpose.range_of_block(16384, 5632) == 1408
    assert entry_transpose.range_of_block(1, 5632) == 5632


def run_gradients(machine, dy, x, fires, coefficients, gradients):
    """Add to gradients; coefficients are (M, F) each."""
    uploaded = [machine.upload(gradient) for gradient in gradients]
    packed, _ = make_packed(machine, fires, x.dtype, gated=len(coefficients) == 3)
    lists, _ = list_by_neuron(packed)
    for room, coefficient in zip(lists.coefficients, coefficients, strict=True):
        listed = np.zeros(room.shape, x.dtype)
        listed[: fires.sum()] = coefficient.T[fires.T]
        room.copy_from(listed)
    add_weight_gradients(machine.upload(dy), machine.upload(x), lists, tuple(uploaded))
    return uploaded


def check_gradients(
    rng, machine, shape, precision, relative_error, gradient_dtype=None, gated=True
):
    dtype, tolerance = precision
    rows, neurons, width = shape
    fires = make_pattern(rng, rows, neurons)
    dense = [rng.standard_normal(fires.shape, np.float32) for _ in range(3 if gated else 2)]
    coefficients = [(array * fires).astype(dtype) for array in dense]
    dy, x = (rng.standard_normal((rows, width)).astype(dtype) for _ in range(2))
    gradients = [np.ones((neurons, width), gradient_dtype or dtype) for _ in coefficients]
    given = (dy, x, fires, coefficients, gradients)
    results = run_gradients(machine, *given)
    again = run_gradients(machine, *given)
    for i, coefficient in enumerate(coefficients):
        terms = coefficient.astype(np.float64).T, (x if i else dy).astype(np.float64)
        assert results[i].dtype == gradients[i].dtype
        assert relative_error(results[i], 1 + terms[0] @ terms[1]) <= tolerance, shape
        np.testing.assert_array_equal(results[i].to_numpy(), again[i].to_numpy())


@pytest.mark.parametrize("gated", [True, False], ids=["gated", "two_matrices"])
def test_gradients_are_those_of_a_dense_product(
    rng, machine, few_parts, precision, relative_error, gated
):
    for shape in machine.shapes(SMALL, LARGE[1:4]):
        check_gradients(rng, machine, shape, precision, relative_error, gated=gated)


@pytest.mark.parametrize("gated", [True, False], ids=["gated", "two_matrices"])
def test_gradients_in_float32_of_16_bits(rng, machine, few_parts, relative_error, gated):
    precision = (np.dtype(ml_dtypes.bfloat16), 1e-5)
    for shape in machine.shapes([(33, 5, 264)], LARGE[1:]):
        check_gradients(rng, machine, shape, precision, relative_error, np.float32, gated)


def test_only_rows_of_entries_count(rng, machine, few_parts):
    """A row in which a neuron does not fire is not read for it, whatever it holds."""
    fires = make_pattern(rng, 40, 6)
    fires[7], fires[:, 1] = False, False
    coefficients = [rng.standard_normal(fires.shape).astype(np.float32) for _ in range(3)]
    dy, x = (rng.standard_normal((40, 16)).astype(np.float32) for _ in range(2))
    dy[7], x[7] = np.nan, np.inf
    gradients = [np.zeros((6, 16), np.float32) for _ in range(3)]
    for gradient in run_gradients(machine, dy, x, fires, coefficients, gradients):
        values = gradient.to_numpy()
        assert np.isfinite(values).all()
        assert not values[1].any()


def compile_kernels(dtype, gradient, targets):
    array, sums = f"{dtype}*", "float64*" if dtype == "float64" else "float32*"
    lists = (*["int32*"] * 3, "uint16*")
    kinds = (array, array, *lists, *[array] * 3, *[gradient] * 3, sums, *["int"] * 3)
    for gated in (True, False):
        for target in targets:
            code, entry = entry_gradients.sum_part(gated).compile(kinds, target)
            assert entry.encode() in code, target


def test_kernels_compile_for_the_targets():
    compile_kernels("bfloat16", "float32*", TARGETS)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float64"])
def test_kernels_compile_in_every_precision(dtype):
    compile_kernels(dtype, f"{dtype}*", ["75", "90a"])
