"""Weight gradients of neurons that fire for many tokens, on a GPU, against NumPy in float64."""

import ml_dtypes
import numpy as np
import pytest

pytest.importorskip("numba_cuda", reason="numba-cuda is not installed (extra cuda)")

from twell_numba.device.gpu import empty, record_graph, zeros  # noqa: E402
from twell_numba.kernels.twell import (  # noqa: E402
    cuda,
    entry_transpose,
    hot_neurons,
    shared_neurons,
)
from twell_numba.kernels.twell.cuda_activations import DeviceActivations  # noqa: E402
from twell_numba.kernels.twell.entry_gradients import add_weight_gradients  # noqa: E402
from twell_numba.kernels.twell.entry_transpose import list_by_neuron  # noqa: E402
from twell_numba.kernels.twell.token_groups import GROUPS, LearnedPattern  # noqa: E402

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)

# (M, F, D), how many neurons are hot: none, all, some in several turns, tokens of several blocks
SMALL = [((24, 5, 8), 0), ((24, 5, 8), 5), ((72, 9, 40), 7), ((2056, 3, 8), 2)]
LARGE = [
    ((16384, 5632, 2048), 448),
    ((16384, 5632, 2048), 1600),
    ((4104, 301, 264), 301),
    ((65544, 700, 72), 64),
]


@pytest.fixture
def few_at_once(hopper_machine, monkeypatch):
    """Let there be several turns, and parts of a few entries."""
    if not hopper_machine.is_real:
        monkeypatch.setattr(hot_neurons, "MOST_AT_ONCE", 4)
        monkeypatch.setattr(hot_neurons, "STEP", 2)
        monkeypatch.setattr(entry_transpose, "FEWEST_ENTRIES", 16)
        monkeypatch.setattr(entry_transpose, "MOST_PARTS", 24)


def make_pattern(rng, rows, neurons):
    """Return which neurons fire: one always, one never, others rarely or often."""
    share = rng.choice([0.005, 0.02, 0.3], neurons, p=[0.6, 0.3, 0.1])
    share[0], share[-1] = 1, 0
    return rng.random((rows, neurons), np.float32) < share


def make_packed(machine, fires):
    """Return packed activations of a pattern, without values."""
    rows, neurons = fires.shape
    tile = 256
    tiles = -(-neurons // tile)
    entry_rows, entry_neurons = np.nonzero(fires)
    cells = entry_rows * tiles + entry_neurons // tile
    counts = np.bincount(cells, minlength=rows * tiles)
    slots = int(counts.max(initial=1))
    slot = np.arange(len(cells)) - (np.cumsum(counts) - counts)[cells]
    columns = np.full((rows * tiles, slots), 65535, np.uint16)
    columns[cells, slot] = entry_neurons % tile
    stream, shape = machine.gpu.stream, (rows, tiles * slots)
    return DeviceActivations(
        neurons=neurons,
        tile=tile,
        slots=slots,
        gated=True,
        values=empty(shape, BFLOAT16, stream),
        columns=machine.upload(columns.reshape(shape)),
        counts=machine.upload(counts.reshape(rows, tiles).astype(np.int32)),
        up_values=empty(shape, BFLOAT16, stream),
        tail_rows=empty(rows, np.int32, stream),
        tail_count=zeros(1, np.int32, stream),
        tail_values=empty((0, 0), BFLOAT16, stream),
        is_compact=True,
        row_nonzeros=machine.upload(fires.sum(1).astype(np.int32)),
        row_absolute_sums=empty(rows, np.float32, stream),
        fired=zeros(neurons, np.bool_, stream),
        overflows=zeros(-(-len(fires) // 32), np.int32, stream),
    )


def fill_lists(lists, coefficients, fires):
    for room, coefficient in zip(lists.coefficients, coefficients, strict=True):
        listed = np.zeros(room.shape, BFLOAT16)
        listed[: fires.sum()] = coefficient.T[fires.T]
        room.copy_from(listed)


def add_gradients(machine, dy, x, fires, coefficients, hot, gradients):
    """Add to gradients on the GPU, and return them."""
    packed, stream = make_packed(machine, fires), machine.gpu.stream
    held = hot_neurons.hold_hot_neurons(hot, fires.shape[1], stream)
    lists, _ = list_by_neuron(packed, None if held is None else held.is_hot)
    fill_lists(lists, coefficients, fires)
    results = [machine.upload(gradient) for gradient in gradients]
    add_weight_gradients(dy, x, lists, tuple(results))
    if held is not None:
        hot_neurons.add_hot_gradients(dy, x, lists, held, tuple(results))
    return results


@pytest.mark.parametrize(
    ("gradient_dtype", "tolerance"), [(np.float32, 1e-5), (BFLOAT16, 5e-3)], ids=str
)
def test_gradients_are_those_of_a_dense_product(
    rng, hopper_machine, few_at_once, relative_error, gradient_dtype, tolerance
):
    for (rows, neurons, width), count in hopper_machine.shapes(SMALL, LARGE):
        fires = make_pattern(rng, rows, neurons)
        coefficients = [
            (rng.standard_normal(fires.shape, np.float32) * fires).astype(BFLOAT16)
            for _ in range(3)
        ]
        dy, x = (rng.standard_normal((rows, width)).astype(BFLOAT16) for _ in range(2))
        hot = np.sort(rng.permutation(neurons)[:count]).astype(np.int32)
        gradients = [np.ones((neurons, width), gradient_dtype) for _ in range(3)]
        on_gpu = hopper_machine.upload(dy), hopper_machine.upload(x)
        given = (hopper_machine, *on_gpu, fires, coefficients, hot, gradients)
        results, again = add_gradients(*given), add_gradients(*given)
        for i, coefficient in enumerate(coefficients):
            terms = coefficient.astype(np.float32).T, (x if i else dy).astype(np.float32)
            if rows * neurons < 2**20:
                terms = [term.astype(np.float64) for term in terms]
            assert relative_error(results[i], 1 + terms[0] @ terms[1]) <= tolerance
            np.testing.assert_array_equal(results[i].to_numpy(), again[i].to_numpy())


def test_neurons_that_are_left_out_have_one_part_which_is_nobodys(rng, machine, monkeypatch):
    if not machine.is_real:
        monkeypatch.setattr(entry_transpose, "FEWEST_ENTRIES", 4)
    for rows, neurons in machine.shapes([(40, 9)], [(16384, 5632)]):
        fires = make_pattern(rng, rows, neurons)
        hot = np.flatnonzero(rng.random(neurons) < 0.4).astype(np.int32)
        hot[:1] = 0  # fires always
        packed = make_packed(machine, fires)
        held = hot_neurons.hold_hot_neurons(hot, neurons, machine.gpu.stream)
        lists, _ = list_by_neuron(packed, held.is_hot)
        starts = np.concatenate([[0], np.cumsum(fires.sum(0))])
        np.testing.assert_array_equal(lists.neuron_starts.to_numpy(), starts)
        np.testing.assert_array_equal(lists.rows.to_numpy()[: starts[-1]], np.nonzero(fires.T)[1])
        *part_starts, size = lists.part_starts.to_numpy()
        parts = np.maximum(1, -(-np.diff(starts) // size))
        parts[hot] = 1
        np.testing.assert_array_equal(part_starts, np.concatenate([[0], np.cumsum(parts)]))
        whose = np.arange(neurons)
        whose[hot] = -1
        found = lists.part_neurons.to_numpy()[: part_starts[-1]]
        np.testing.assert_array_equal(found, np.repeat(whose, parts))
        split, *split_neurons = lists.split_neurons.to_numpy()
        np.testing.assert_array_equal(split_neurons[:split], np.flatnonzero(parts > 1))


def test_what_is_expected_to_be_faster_is_hot(monkeypatch):
    monkeypatch.setattr(hot_neurons, "default_path", lambda: "cublas")
    rows, width = 16384, 2048
    rare, often = np.full(5632, 20), np.full(5632, 20)
    often[7:700:7] = 8000  # 99 neurons
    assert hot_neurons.choose_hot_neurons(rare, rows, width).size == 0
    hot = hot_neurons.choose_hot_neurons(often, rows, width)
    np.testing.assert_array_equal(hot[np.isin(hot, np.arange(7, 700, 7))], np.arange(7, 700, 7))
    assert hot.size == 256
    assert (np.diff(hot) > 0).all()
    times = [hot_neurons.expected_microseconds(often, h, rows, width) for h in (hot[:0], hot)]
    assert times[1] < times[0] / 2
    assert hot_neurons.choose_hot_neurons(often[:5], rows, width).size == 0
    monkeypatch.setattr(hot_neurons, "default_path", lambda: "tiled")
    assert hot_neurons.choose_hot_neurons(often, rows, width).size == 0


def test_hot_neurons_are_learned_and_learned_anew(hopper_machine, monkeypatch):
    monkeypatch.setattr(shared_neurons, "LEAST_NUMBERS", 1)
    monkeypatch.setattr(shared_neurons, "room_for", lambda neurons: 256)
    monkeypatch.setattr(hot_neurons, "default_path", lambda: "cublas")
    monkeypatch.setattr(hot_neurons, "STEP", 2)
    monkeypatch.setattr(hot_neurons, "WRITTEN", 0.0)
    monkeypatch.setattr(hot_neurons, "READ", 0.0)
    monkeypatch.setattr(hot_neurons, "LAUNCHED", 0.0)
    fires = np.eye(128, 40, dtype=bool)  # for one token each
    fires[:, [3, 8, 31, 32]] = True
    packed = make_packed(hopper_machine, fires)
    learned, _ = shared_neurons.learn_to_share(packed, 8)
    np.testing.assert_array_equal(learned.hot.neurons.to_numpy(), [3, 8, 31, 32])
    np.testing.assert_array_equal(np.flatnonzero(learned.hot.is_hot.to_numpy()), [3, 8, 31, 32])
    assert shared_neurons.learn_to_share(packed, 8, learned).learned is learned
    # other neurons fire for as many tokens
    packed = make_packed(hopper_machine, fires[:, ::-1])
    again, _ = shared_neurons.learn_to_share(packed, 8, learned)
    np.testing.assert_array_equal(again.hot.neurons.to_numpy(), [7, 8, 31, 36])
    monkeypatch.setattr(hot_neurons, "LAUNCHED", 1e6)
    assert shared_neurons.learn_to_share(packed, 8).learned.hot is None


# M, D, F, entries a row
LAYER_SMALL = [(136, 8, 300, 10)]
LAYER_LARGE = [(16384, 2048, 5632, 29), (8200, 512, 2100, 20), (4099, 512, 2100, 20)]


def make_layer(rng, machine, problem):
    """Return a layer's arrays on the GPU; every eighth neuron fires often, others rarely."""
    rows, width, neurons, entries = problem
    host = [rng.standard_normal((rows, width)) for _ in range(2)]
    host += [rng.standard_normal((neurons, width)) * width**-0.5 for _ in range(3)]
    host[0][:, 0] = 1
    host[2][:, 0] = -np.quantile(rng.standard_normal(10_000), 1 - entries / neurons)
    host[2][::8, 0] = -1
    return [machine.upload(array.astype(BFLOAT16)) for array in host]


def make_scores(rng, machine, neurons):
    return machine.upload(rng.integers(0, 128, (neurons, GROUPS), np.uint8))


def run_layer(arrays, learned, gradients):
    """Return dx and gradients of a layer."""
    x, dy, *weights = arrays
    _, activations = cuda.gated_ffn_forward(x, *weights, slots=64, learned=learned)
    return cuda.gated_ffn_backward(dy, x, *weights, activations, 0.25, *gradients)


def test_a_layer_is_what_it_is_without_hot_neurons(
    rng, hopper_machine, relative_error, monkeypatch
):
    monkeypatch.setattr(hot_neurons, "FEWEST_TOKENS", 8)
    used = []

    def add_and_note(*arguments):
        used.append(arguments)
        add_hot_gradients(*arguments)

    add_hot_gradients = hot_neurons.add_hot_gradients
    monkeypatch.setattr(hot_neurons, "add_hot_gradients", add_and_note)
    for problem in hopper_machine.shapes(LAYER_SMALL, LAYER_LARGE):
        arrays = make_layer(rng, hopper_machine, problem)
        stream, neurons = hopper_machine.gpu.stream, problem[2]
        scores = make_scores(rng, hopper_machine, neurons)
        hot = np.arange(0, neurons, 8, dtype=np.int32)
        held = hot_neurons.hold_hot_neurons(hot, neurons, stream)
        results = []
        for learned in (LearnedPattern(scores), LearnedPattern(scores, held)):
            gradients = [zeros(weight.shape, np.float32, stream) for weight in arrays[2:]]
            dx = run_layer(arrays, learned, gradients)
            results.append([array.to_numpy() for array in (dx, *gradients)])
        assert len(used) == (problem[0] % 8 == 0), "other matrices' rows are not aligned"
        used.clear()
        for without, with_hot in zip(*results, strict=True):
            assert relative_error(with_hot, without.astype(np.float64)) <= 1e-4


def test_a_token_without_a_gradient_makes_those_of_hot_neurons_nan(
    rng, hopper_machine, monkeypatch
):
    monkeypatch.setattr(hot_neurons, "FEWEST_TOKENS", 8)
    x, dy, *weights = make_layer(rng, hopper_machine, LAYER_SMALL[0])
    stream, neurons, column = hopper_machine.gpu.stream, LAYER_SMALL[0][2], 3
    host = dy.to_numpy()
    host[5, column] = np.nan
    dy = hopper_machine.upload(host)
    hot = np.arange(0, neurons, 16, dtype=np.int32)
    held = hot_neurons.hold_hot_neurons(hot, neurons, stream)
    learned = LearnedPattern(make_scores(rng, hopper_machine, neurons), held)
    gradients = [zeros(weight.shape, np.float32, stream) for weight in weights]
    dx = run_layer((x, dy, *weights), learned, gradients).to_numpy().astype(np.float32)
    assert np.isnan(dx[5]).all()
    assert not np.isnan(np.delete(dx, 5, axis=0)).any()
    fires = x.to_numpy()[5].astype(np.float64) @ weights[0].to_numpy().astype(np.float64).T > 0
    is_nan = fires.copy()
    is_nan[hot] = True
    assert is_nan.sum() > fires.sum() > 0
    assert not is_nan.all()
    gate_grad, up_grad, down_grad = (gradient.to_numpy() for gradient in gradients)
    np.testing.assert_array_equal(np.isnan(down_grad[:, column]), is_nan)
    assert not np.isnan(np.delete(down_grad, column, axis=1)).any()
    for gradient in (gate_grad, up_grad):  # dh is NaN where the neuron fires
        np.testing.assert_array_equal(np.isnan(gradient).all(1), fires)


def test_same_bits_in_every_run_and_in_a_recording(rng, hopper_machine):
    if not hopper_machine.is_real:
        pytest.skip("of a real GPU alone")
    arrays = make_layer(rng, hopper_machine, LAYER_LARGE[0])
    stream, neurons = hopper_machine.gpu.stream, LAYER_LARGE[0][2]
    scores = make_scores(rng, hopper_machine, neurons)
    hot = np.arange(0, neurons, 8, dtype=np.int32)
    learned = LearnedPattern(scores, hot_neurons.hold_hot_neurons(hot, neurons, stream))
    gradients = [zeros(weight.shape, np.float32, stream) for weight in arrays[2:]]
    runs = []

    def run():
        for gradient in gradients:
            gradient.fill_with_zeros()
        run_layer(arrays, learned, gradients)

    for _ in range(2):
        run()
        runs.append([gradient.to_numpy() for gradient in gradients])
    with record_graph(stream) as graph:
        run()
    for _ in range(2):
        graph.replay()
        runs.append([gradient.to_numpy() for gradient in gradients])
    for later in runs[1:]:
        for first, other in zip(runs[0], later, strict=True):
            np.testing.assert_array_equal(first.view(np.uint32), other.view(np.uint32))
