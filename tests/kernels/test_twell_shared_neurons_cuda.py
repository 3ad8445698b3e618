"""Products by blocks of tokens that share neurons, for Hopper GPUs, against NumPy in float64."""

import ml_dtypes
import numpy as np
import pytest

pytest.importorskip("numba_cuda", reason="numba-cuda is not installed (extra cuda)")

from twell_numba.device.gpu import empty, record_graph, zeros  # noqa: E402
from twell_numba.kernels.twell import cuda, shared_lists, shared_neurons  # noqa: E402
from twell_numba.kernels.twell.cuda_activations import DeviceActivations  # noqa: E402
from twell_numba.kernels.twell.entry_transpose import list_by_neuron  # noqa: E402
from twell_numba.kernels.twell.shared_lists import list_shared_neurons  # noqa: E402
from twell_numba.kernels.twell.token_groups import GROUPS, LearnedPattern  # noqa: E402

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
TOLERANCE = 8e-3

# M, D, F, entries a row, tile, slots
SMALL = [
    (1, 8, 9, 4, 4, 4),
    (130, 72, 600, 2, 256, 16),  # about a narrow part, more than one
    (130, 8, 40, 0, 64, 8),  # nothing fires
    (130, 264, 300, 20, 64, 20),  # more work than blocks, columns that are not whole tiles
]
LARGE = [
    (2000, 2048, 5632, 29, 256, 32),
    (3000, 264, 700, 100, 256, 200),
    (777, 2048, 5632, 60, 256, 64),
    (300, 4096, 1000, 29, 256, 64),
    (1000, 768, 3072, 9, 256, 32),
    (200, 8192, 600, 29, 256, 64),
]


def make_packed(rng, machine, problem):
    """Return packed activations, whose row 2 is in the tail, and relu(g) in float64."""
    rows, _, neurons, entries, tile, slots = problem
    tiles = -(-neurons // tile)
    fires = np.zeros((rows, tiles * tile), bool)
    fires[:, :neurons] = rng.random((rows, neurons)) < entries / neurons
    fires[2:3] = False
    fires = fires.reshape(rows, tiles, tile)
    fires &= np.cumsum(fires, axis=2) <= slots
    gate = np.where(fires, np.abs(rng.standard_normal(fires.shape)).astype(BFLOAT16), 0)
    gate = gate.astype(BFLOAT16)
    columns = np.argsort(~fires, axis=2, kind="stable")[..., :slots]
    columns = np.pad(columns, ((0, 0), (0, 0), (0, max(slots - tile, 0))))
    values = np.take_along_axis(gate, columns, axis=2)
    places = (rows, tiles * slots)
    counts = fires.sum(axis=2).astype(np.int32)
    past = np.arange(slots) >= counts[..., None]
    values[past], columns[past] = np.nan, 60000
    stream = machine.gpu.stream
    packed = DeviceActivations(
        neurons=neurons,
        tile=tile,
        slots=slots,
        gated=True,
        values=machine.upload(values.reshape(places)),
        columns=machine.upload(columns.astype(np.uint16).reshape(places)),
        counts=machine.upload(counts),
        up_values=empty(places, BFLOAT16, stream),
        tail_rows=empty(rows, np.int32, stream),
        tail_count=zeros(1, np.int32, stream),
        tail_values=empty((0, 0), BFLOAT16, stream),
        is_compact=True,
        row_nonzeros=empty(rows, np.int32, stream),
        row_absolute_sums=empty(rows, np.float32, stream),
        fired=zeros(neurons, np.bool_, stream),
        overflows=zeros(-(-rows // 32), np.int32, stream),
    )
    return packed, gate.reshape(rows, -1)[:, :neurons].astype(np.float64)


def make_matrices(rng, machine, problem):
    """Return x, dy and three matrices on the GPU, and in float64."""
    rows, width, neurons, *_ = problem
    host = [rng.standard_normal((rows, width)).astype(BFLOAT16) for _ in range(2)]
    host += [
        (rng.standard_normal((neurons, width)) * width**-0.5).astype(BFLOAT16) for _ in range(3)
    ]
    return [machine.upload(array) for array in host], [array.astype(np.float64) for array in host]


def room_for(neurons):
    return -(-neurons // 256) * 256


def make_order(rng, machine, rows):
    """Return tokens in any order, on the GPU, and as indices."""
    order = rng.permutation(rows)
    return machine.upload(order.astype(np.int32)), order


def make_groups(rng, machine, neurons):
    """Return groups of tokens by scores without meaning."""
    scores = rng.integers(0, 128, (neurons, GROUPS)).astype(np.uint8)
    return LearnedPattern(machine.upload(scores))


def check_lists(shared, gate):
    """Compare what is listed with the pattern, of which rows are in the order of the blocks."""
    blocks = -(-len(gate) // 128)
    unions = [np.flatnonzero((gate[128 * b : 128 * b + 128] != 0).any(0)) for b in range(blocks)]
    counts = shared.counts.to_numpy()
    np.testing.assert_array_equal(counts, [max(1, len(union)) for union in unions])
    unions = [union if union.size else np.zeros(1, int) for union in unions]  # any neuron
    for listed, union in zip(shared.neurons.to_numpy(), unions, strict=True):
        np.testing.assert_array_equal(listed[: len(union)], union)
    number, *items = shared.items.to_numpy().tolist()
    found = [
        (item >> 32, item >> 31 & 1, item >> 16 & 0x7FFF, item >> 9 & 0x7F, item & 0x1FF)
        for item in items[:number]
    ]
    number, *order = shared.order.to_numpy().tolist()
    by_size = sorted((-len(union), b) for b, union in enumerate(unions) if len(union))
    assert order[:number] == [b << 32 | -count for count, b in by_size]
    parts = [-(-max(1, len(union)) // 256) for union in unions]
    firing = (gate != 0).sum(1)
    entries = [firing[128 * b : 128 * b + 128].sum() for b in range(blocks)]
    sizes = [-(-max(1, len(union)) // n // 16) * 16 for union, n in zip(unions, parts, strict=True)]
    wanted = []
    costs = [s + e // n // 16 for s, e, n in zip(sizes, entries, parts, strict=True)]
    for _, b in sorted((-cost, b) for b, cost in enumerate(costs)):
        for part in range(parts[b]):
            low = sizes[b] * part
            here = min(sizes[b], max(1, len(unions[b])) - low)
            wanted.append((b, part == parts[b] - 1, low, part, here))
    assert found == wanted


def test_products_of_entries(rng, hopper_machine, relative_error):
    for problem in hopper_machine.shapes(SMALL, LARGE):
        packed, gate = make_packed(rng, hopper_machine, problem)
        (x, dy, gate_weight, up_weight, down_weight), exact = make_matrices(
            rng, hopper_machine, problem
        )
        tokens, order = make_order(rng, hopper_machine, problem[0])
        shared = list_shared_neurons(packed, tokens, room_for(problem[2]))
        check_lists(shared, gate[order])

        y = shared_neurons.forward_shared(x, up_weight, down_weight, packed, shared)
        up = (exact[0] @ exact[3].T).astype(BFLOAT16).astype(np.float64)
        hidden = gate * up
        assert relative_error(y, hidden @ exact[4]) <= TOLERANCE, problem
        np.testing.assert_array_equal(packed.row_nonzeros.to_numpy(), (hidden != 0).sum(1))
        np.testing.assert_array_equal(packed.fired.to_numpy(), (hidden != 0).any(0))
        assert relative_error(packed.row_absolute_sums, abs(hidden).sum(1)) <= TOLERANCE

        l1_scale = hopper_machine.upload(np.full(1, 0.25, np.float32))
        lists, entry_places = list_by_neuron(packed)
        panels = shared_neurons.backward_dots(
            dy, down_weight, packed, shared, l1_scale, entry_places, lists.coefficients
        )
        dx = shared_neurons.backward_sums(gate_weight, up_weight, shared, panels, dy.shape)
        fires = gate > 0
        d_hidden = (exact[1] @ exact[4].T + 0.25 * np.sign(hidden)) * fires
        terms = [d_hidden * up, d_hidden * gate]
        wanted = terms[0] @ exact[2] + terms[1] @ exact[3]
        assert relative_error(dx, wanted) <= TOLERANCE, problem
        neurons_of, rows_of = np.nonzero(fires.T)
        for coefficients, dense in zip(lists.coefficients, (hidden, *terms), strict=True):
            listed = coefficients.to_numpy()[: rows_of.size]
            assert relative_error(listed, dense[rows_of, neurons_of]) <= TOLERANCE


# M, D, F, entries a row, slots
LAYER_LARGE = [(1000, 512, 2100, 20, 32), (16384, 2048, 5632, 29, 32)]


def make_layer(rng, machine, problem):
    """Return a layer's arrays on the GPU: most rows fit their tiles, the first two do not."""
    rows, width, neurons, entries, slots = problem
    host = [rng.standard_normal((rows, width)) for _ in range(2)]
    host += [rng.standard_normal((neurons, width)) * width**-0.5 for _ in range(3)]
    host[0][:, 0] = 1
    host[2][:, 0] = -np.quantile(rng.standard_normal(10_000), 1 - entries / neurons)
    host[0][:2, 0] = -1  # nearly all neurons fire
    return [machine.upload(array.astype(BFLOAT16)) for array in host]


def run_layer(machine, arrays, slots, share):
    """Return what a layer computes, forward and backward, in NumPy."""
    x, dy, *weights = arrays
    groups = make_groups(np.random.default_rng(1), machine, len(weights[0])) if share else None
    y, activations = cuda.gated_ffn_forward(x, *weights, slots=slots, learned=groups)
    assert (activations.token_order is not None) == share
    gradients = [zeros(weight.shape, np.float32, x.stream) for weight in weights]
    dx = cuda.gated_ffn_backward(dy, x, *weights, activations, 0.25, *gradients)
    totals, fired = cuda.activation_statistics_on_gpu(activations)
    assert activations.tail_count.to_numpy()[0] >= 2
    return [array.to_numpy() for array in (y, dx, *gradients, totals, fired)]


def check_layer(machine, arrays, slots, relative_error):
    shared = run_layer(machine, arrays, slots, share=True)
    alone = run_layer(machine, arrays, slots, share=False)
    for result, wanted in zip(shared[:-1], alone[:-1], strict=True):
        assert relative_error(result, wanted.astype(np.float64)) <= TOLERANCE
    np.testing.assert_array_equal(shared[-1], alone[-1])


def test_a_layer_is_what_it_is_alone(rng, hopper_machine, relative_error):
    # emulated, the next test tries that, too
    for problem in hopper_machine.shapes([], LAYER_LARGE):
        arrays = make_layer(rng, hopper_machine, problem)
        check_layer(hopper_machine, arrays, problem[-1], relative_error)


def test_blocks_with_too_many_neurons_are_in_the_tail(
    rng, hopper_machine, relative_error, monkeypatch
):
    problem = (140, 8, 400, 14, 24)
    arrays = make_layer(rng, hopper_machine, problem)
    tails = []

    def list_and_keep(packed, order, room):
        shared = shared_lists.list_shared_neurons(packed, order, room)
        tails.append(np.unpackbits(packed.overflows.to_numpy().view(np.uint8)).sum())
        return shared

    monkeypatch.setattr(shared_neurons, "room_for", lambda neurons: 256)
    monkeypatch.setattr(shared_neurons, "list_shared_neurons", list_and_keep)
    check_layer(hopper_machine, arrays, problem[-1], relative_error)
    assert 128 <= tails[0] < 140


def test_nan_stays_in_its_row(rng, hopper_machine):
    rows, width, neurons, entries, slots = 130, 8, 300, 6, 40
    x, dy, *weights = make_layer(rng, hopper_machine, (rows, width, neurons, entries, slots))
    host = x.to_numpy()
    host[5, 3] = np.nan
    x = hopper_machine.upload(host)
    groups = make_groups(rng, hopper_machine, neurons)
    y, _ = cuda.gated_ffn_forward(x, *weights, slots=slots, learned=groups)
    is_nan = np.isnan(y.to_numpy().astype(np.float32))
    assert is_nan[5].all()
    assert not np.delete(is_nan, 5, axis=0).any()


def test_sharing_is_learned_where_it_is_faster(rng, hopper_machine, monkeypatch):
    monkeypatch.setattr(shared_neurons, "LEAST_NUMBERS", 1)
    monkeypatch.setattr(shared_neurons, "room_for", room_for)
    for firing, is_worth in ((2, False), (100, True)):
        packed, gate = make_packed(rng, hopper_machine, (128, 8, 300, firing, 256, 200))
        packed.row_nonzeros.copy_from((gate != 0).sum(1).astype(np.int32))
        groups, densest = shared_neurons.learn_to_share(packed, 8)
        assert (groups is not None) == is_worth
        assert densest == 0  # launches alone take longer than so small a dense layer
    monkeypatch.setattr(shared_neurons, "LAUNCHED", -1e6)
    most = 1.25 * (gate != 0).mean()  # of more nothing is known
    learned = shared_neurons.learn_to_share(packed, 8)
    assert learned.densest == pytest.approx(most)
    kept = shared_neurons.learn_to_share(packed, 8, learned.learned)
    assert (kept.learned is learned.learned, kept.densest) == (True, learned.densest)
    packed.tail_count.copy_from(np.array([3], np.int32))  # of 128
    assert shared_neurons.learn_to_share(packed, 8, groups) == (None, 0)
    packed.tail_count.fill_with_zeros()
    monkeypatch.setattr(shared_neurons, "LEAST_NUMBERS", 2000)
    assert shared_neurons.learn_to_share(packed, 8) == (None, 0)


# M, D, F, entries a row, neurons of a block, and the least of dense / shared forward and with
# backward, as measured on an H200 (skewed patterns, blocks about alike)
@pytest.mark.parametrize(
    ("tokens", "width", "neurons", "entries", "needed", "ratio"),
    [
        (16384, 2048, 5632, 60, 3114, 1.28),
        (16384, 2048, 5632, 150, 3817, 1.10),
        (16384, 2048, 5632, 150, 2860, 1.23),
        (16384, 2048, 5632, 250, 3876, 0.97),
        (16384, 768, 3072, 60, 1743, 1.08),
        (16384, 768, 3072, 90, 2147, 0.90),
        (16384, 768, 3072, 120, 1949, 0.85),
        (16384, 4096, 11008, 150, 5145, 1.44),
        (4096, 2048, 5632, 60, 2226, 1.18),
        (4096, 2048, 5632, 150, 3834, 0.93),
    ],
)
def test_sharing_is_reckoned_to_be_faster_than_dense_where_it_was(
    tokens, width, neurons, entries, needed, ratio
):
    def densest(blocks, in_tail=0, entries=entries):
        shape = (tokens, neurons)
        return shared_neurons.densest_sharing(blocks, tokens * entries, in_tail, shape, width)

    blocks = np.full(tokens // 128, needed)
    assert (entries / neurons < densest(blocks)) == (ratio > 1)
    assert densest(blocks, in_tail=tokens) == 0
    assert densest(np.full_like(blocks, 1), entries=1) == pytest.approx(1.25 / neurons)
    assert densest(np.full_like(blocks, 1), entries=250) <= 256 / neurons  # a row's, at most
    blocks[0] = shared_neurons.room_for(neurons)  # a block can have no more
    assert densest(blocks) <= entries / neurons


@pytest.mark.parametrize("two", [False, True], ids=["one", "two"])
def test_sums_compile(two):
    kinds = (
        "tensor_map", "tensor_map", "int64*", "bfloat16*", "bfloat16*", "int32*", "int64*",
        "int32*", "bfloat16*", *["int"] * 3,
    )  # fmt: skip
    code, _ = shared_neurons.sum_neurons(two).compile(kinds, "90a")
    assert code.startswith(b"\x7fELF")


def test_sums_stay_in_registers(rng, hopper_machine):
    if not hopper_machine.is_real:
        pytest.skip("of a real GPU alone")
    arrays = make_layer(rng, hopper_machine, LAYER_LARGE[0])
    run_layer(hopper_machine, arrays, 32, share=True)
    kernels = (shared_neurons.multiply_tokens, shared_neurons.multiply_tokens_backward)
    for kernel in (*kernels, *map(shared_neurons.sum_neurons, (False, True))):
        for loaded in kernel._loaded.values():
            local = loaded.attributes.local_size_bytes
            size = local(hopper_machine.gpu.id) if callable(local) else local
            assert size == 0, kernel.name


def test_same_bits_in_every_run_and_in_a_recording(rng, hopper_machine):
    if not hopper_machine.is_real:
        pytest.skip("of a real GPU alone")
    x, _, *weights = make_layer(rng, hopper_machine, LAYER_LARGE[0])
    groups, runs = make_groups(rng, hopper_machine, len(weights[0])), []
    for _ in range(2):
        y, _ = cuda.gated_ffn_forward(x, *weights, learned=groups)
        runs.append(y.to_numpy())
    with record_graph(x.stream) as graph:
        y, _ = cuda.gated_ffn_forward(x, *weights, learned=groups)
    for _ in range(2):
        graph.replay()
        runs.append(y.to_numpy())
    for run in runs[1:]:
        np.testing.assert_array_equal(run.view(np.uint16), runs[0].view(np.uint16))
