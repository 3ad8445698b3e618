import dataclasses
import itertools

import ml_dtypes
import numpy as np
import pytest

pytest.importorskip("numba_cuda", reason="numba-cuda is not installed (extra cuda)")

from twell_numba.device.gpu import from_numpy, zeros  # noqa: E402
from twell_numba.kernels.twell import cuda, reference  # noqa: E402

# (M, D, F, how many neurons fire, tile, slots): no row, one, tiles straddled, no entry, a tail
SMALL = [
    (0, 4, 9, 3, 4, 2),
    (1, 5, 9, 3, 4, 3),
    (2, 3, 7, 2, 8, 4),
    (3, 1, 8, 4, 8, 2),
    (5, 7, 10, 0, 4, 2),
    (4, 6, 9, 9, 4, 2),
]
# more columns than a warp takes at once, in rows that can be read eight numbers at a time and not
ALIGNED, WIDE = (3, 264, 6, 4, 4, 2), (2, 259, 6, 3, 4, 2)
# no entry, one strip that is not full, strips of several warps' loads, more than one strip
IN_STRIPS = [
    (2, 256, 5, 0, 4, 2),
    (2, 40, 9, 4, 4, 3),
    (2, 512, 5, 2, 8, 4),
    (2, 2312, 4, 2, 4, 2),
]
LARGE = [
    (7, 256, 300, 40, 256, 64),
    (300, 768, 1001, 60, 256, 64),
    (1, 2048, 777, 300, 256, 256),
    (300, 2048, 5632, 29, 256, 8),
    (40, 8192, 600, 600, 256, 256),
    (1, 2048, 5632, 29, 256, 64),
    (3, 40, 65537, 40, 256, 32),
    (65537, 33, 70, 9, 16, 4),
    (700, 257, 1000, 500, 256, 64),
    (513, 300, 2049, 60, 256, 8),
    (64, 40, 65536, 300, 65536, 299),
]


def random_problem(rng):
    rows, neurons = rng.integers([1, 16], 300)
    # few widths that eight divides: kernels are compiled for each
    width = rng.choice([40, 256, 2 * rng.integers(8, 150) + 1])
    tile = int(rng.choice([8, 32, 100, 256]))
    slots = int(rng.integers(1, tile + 1))
    return (int(rows), int(width), int(neurons), int(rng.integers(0, neurons + 1)), tile, slots)


def problems(rng, machine, dtype):
    random = machine.share([random_problem(rng) for _ in range(200)], dtype)
    return machine.shapes(SMALL, [ALIGNED, WIDE, *LARGE, *random])


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


def near_zero(x, weight):
    """Where the product that decides is so close to 0 that the order of sums decides its sign."""
    return np.abs(x @ weight.T) <= 1e-5 * (np.abs(x) @ np.abs(weight).T)


def check_layer(machine, rng, problem, precision, relative_error, gated, gradient_dtype=None):
    dtype, tolerance = precision
    rows, width, neurons, firing, tile, slots = problem
    if dtype.itemsize == 2 and min(width, neurons) < 16:
        # g and u are rounded before they are multiplied, and a few such terms may cancel
        tolerance *= 4
    count = 3 if gated else 2
    stored, exact = make_problem(rng, rows, width, neurons, firing, dtype, count)
    dy = rng.standard_normal((rows, width)).astype(dtype)
    if dtype != np.float64:
        # there reference and kernel may decide differently: leave such rows out
        rows_kept = ~near_zero(exact[0], exact[1]).any(axis=1)
        stored[0], exact[0], dy = stored[0][rows_kept], exact[0][rows_kept], dy[rows_kept]
    name = "gated_ffn" if gated else "ffn"
    x, *weights = map(machine.upload, stored)
    compact = bool(rng.integers(2))
    if rows <= cuda.MOST_TOKENS and (tile, slots) == (cuda.TILE, cuda.SLOTS):
        compact = True  # without it, few tokens have kernels of their own, tested elsewhere
    y, packed = getattr(cuda, f"{name}_forward")(x, *weights, tile, slots, compact_tail=compact)
    wanted_y, wanted = getattr(reference, f"{name}_forward")(*exact, tile, slots)
    assert y.dtype == dtype
    assert relative_error(y, wanted_y) <= tolerance, problem

    pattern = packed.pattern()
    pattern.validate()
    np.testing.assert_array_equal(pattern.counts, wanted.counts)
    np.testing.assert_array_equal(pattern.tail_rows, wanted.tail_rows)
    used = np.arange(slots) < pattern.counts[..., None]
    wanted_columns = wanted.pattern().columns
    np.testing.assert_array_equal(pattern.columns[used], wanted_columns[used])

    nonzeros, absolute_sum, fired = cuda.activation_statistics(packed)
    wanted_nonzeros, wanted_sum, wanted_fired = reference.activation_statistics(wanted)
    assert nonzeros == wanted_nonzeros
    assert absolute_sum == pytest.approx(wanted_sum, rel=max(tolerance, 1e-12))
    np.testing.assert_array_equal(fired, wanted_fired)

    gradient_dtype = gradient_dtype or dtype
    gradients = [machine.upload(np.ones((neurons, width), gradient_dtype)) for _ in weights]
    wanted_gradients = [np.ones((neurons, width)) for _ in weights]
    dx = getattr(cuda, f"{name}_backward")(
        machine.upload(dy), x, *weights, packed, 0.25, *gradients
    )
    wanted_dx = getattr(reference, f"{name}_backward")(
        dy.astype(np.float64), *exact, wanted, 0.25, *wanted_gradients
    )
    assert dx.dtype == dtype
    assert relative_error(dx, wanted_dx) <= tolerance, problem
    for gradient, wanted_gradient in zip(gradients, wanted_gradients, strict=True):
        assert gradient.dtype == gradient_dtype
        assert relative_error(gradient, wanted_gradient) <= tolerance, problem
    return packed


def test_gated_ffn_matches_the_reference(rng, machine, precision, relative_error):
    for problem in problems(rng, machine, precision[0]):
        check_layer(machine, rng, problem, precision, relative_error, gated=True)


def test_two_matrix_ffn_matches_the_reference(rng, machine, precision, relative_error):
    for problem in problems(rng, machine, precision[0]):
        check_layer(machine, rng, problem, precision, relative_error, gated=False)


@pytest.mark.parametrize("problem", [ALIGNED, WIDE], ids=["aligned", "not_aligned"])
def test_more_columns_than_a_warp_takes(rng, machine, problem, precision, relative_error):
    check_layer(machine, rng, problem, precision, relative_error, gated=True)


BFLOAT16 = (np.dtype(ml_dtypes.bfloat16), 5e-3)


@pytest.mark.parametrize("problem", IN_STRIPS, ids=lambda problem: f"D{problem[1]}")
def test_rows_in_strips(rng, machine, problem, relative_error):
    check_layer(machine, rng, problem, BFLOAT16, relative_error, True, np.dtype(np.float32))


@pytest.mark.parametrize("gated", [True, False], ids=["gated", "two_matrices"])
@pytest.mark.parametrize("slots", [63, 12], ids=["no_tail", "tail"])
def test_product_that_packs_itself(rng, machine, monkeypatch, relative_error, gated, slots):
    """The dense product does not reach memory, and the tail is computed anew."""
    if not machine.is_real:
        monkeypatch.setattr(machine.gpu, "capability", (8, 0))
    elif not (8, 0) <= machine.gpu.capability <= (9, 0):
        pytest.skip("needs compute capability 8 or 9")
    large = [(300, 768, 1000, 30, 256, slots), (777, 264, 2816, 40, 256, slots)]
    for problem in machine.shapes([(3, 16, 300, 20, 256, slots)], large):
        packed = check_layer(
            machine, rng, problem, BFLOAT16, relative_error, gated, np.dtype(np.float32)
        )
        assert packed.tail_source is not None
        assert (packed.pattern().tail_rows.size > 0) == (slots == 12)


def odd_and_even(array):
    """Return copies of a matrix in a GPU's memory at an odd address and at another one."""
    rows, width = array.shape
    flat = zeros(array.size + 1, array.dtype, array.stream)
    odd = flat[1:].reshape(rows, width)
    odd.copy_from(array)
    return odd, array.copy()


@pytest.mark.gpu
@pytest.mark.parametrize("size", [6, 40, 80], ids=["few_tokens", "no_tail", "tail"])
def test_arrays_at_odd_addresses(rng, real_gpu, relative_error, size):
    """Kernels that read eight numbers at a time are not given them, forward or backward."""
    dense = rng.standard_normal((5, size, 64)).astype(BFLOAT16[0])
    pairs = [odd_and_even(from_numpy(array, real_gpu.stream)) for array in dense]
    assert all(odd.pointer % 16 and not even.pointer % 16 for odd, even in pairs)
    odd, even = ([pair[i] for pair in pairs] for i in range(2))
    results = []
    for before, after in itertools.product((odd, even, (even[0], *odd[1:])), (odd, even)):
        y, packed = cuda.gated_ffn_forward(*before[:4])
        gradients = [zeros((size, 64), np.float32, real_gpu.stream) for _ in range(3)]
        if after is odd:
            gradients = [odd_and_even(gradient)[0] for gradient in gradients]
        dx = cuda.gated_ffn_backward(after[4], *after[:4], packed, 0.0, *gradients)
        results.append([array.to_numpy().astype(np.float64) for array in (y, dx, *gradients)])
    for result in results[1:]:
        for given, wanted in zip(result, results[0], strict=True):
            assert relative_error(given, wanted) <= 2 * BFLOAT16[1]  # both are rounded


def test_the_tail_computed_anew_is_of_aligned_arrays(rng, machine, monkeypatch):
    if not machine.is_real:
        monkeypatch.setattr(machine.gpu, "capability", (8, 0))
    elif not (8, 0) <= machine.gpu.capability <= (9, 0):
        pytest.skip("needs compute capability 8 or 9")
    stored, _ = make_problem(rng, 3, 16, 300, 20, BFLOAT16[0])
    arrays = [odd_and_even(machine.upload(array)) for array in stored]
    _, packed = cuda.gated_ffn_forward(*(even for _, even in arrays), 256, 12)
    assert packed.tail_source is not None
    given = []

    def spying(dy, x, weights, *_, **__):
        given.extend([dy, x, *weights])

    monkeypatch.setattr(cuda.dense_tail, "backward_of_tail", spying)
    gradients = [machine.upload(np.zeros((300, 16), np.float32)) for _ in range(3)]
    for i in range(4):
        mixed = [pair[i != j] for j, pair in enumerate(arrays)]
        cuda.gated_ffn_backward(mixed[0], *mixed, packed, 0.0, *gradients)
    assert len(given) == 4 * 5
    assert all(array.pointer % 16 == 0 for array in given)


@pytest.mark.parametrize(("width", "neurons"), [(0, 5), (4, 0)])
def test_nothing_to_compute(machine, width, neurons):
    x = machine.upload(np.ones((3, width), np.float32))
    weights = [machine.upload(np.ones((neurons, width), np.float32)) for _ in range(3)]
    y, packed = cuda.gated_ffn_forward(x, *weights)
    dx = cuda.gated_ffn_backward(x, x, *weights, packed, 0.5, *map(zeros_like(machine), weights))
    np.testing.assert_array_equal(y.to_numpy(), np.zeros((3, width)))
    np.testing.assert_array_equal(dx.to_numpy(), np.zeros((3, width)))
    assert cuda.activation_statistics(packed)[:2] == (0, 0)


def zeros_like(machine):
    return lambda array: machine.upload(np.zeros(array.shape, np.float32))


def test_gradients_of_16_bits_may_be_added_in_float32(rng, machine, relative_error):
    check_layer(machine, rng, SMALL[3], BFLOAT16, relative_error, True, np.dtype(np.float32))


def test_l1_scale_may_be_on_the_gpu(rng, machine):
    stored, _ = make_problem(rng, 3, 5, 9, 4, np.float32)
    x, *weights = map(machine.upload, stored)
    y, packed = cuda.gated_ffn_forward(x, *weights, 4, 3)
    results = []
    for scale in (0.5, machine.upload(np.array([0.5], np.float32))):
        gradients = [machine.upload(np.zeros((9, 5), np.float32)) for _ in range(3)]
        dx = cuda.gated_ffn_backward(y, x, *weights, packed, scale, *gradients)
        results.append([array.to_numpy() for array in (dx, *gradients)])
    for given, wanted in zip(*results, strict=True):
        np.testing.assert_array_equal(given, wanted)


@pytest.mark.parametrize("neurons", [256, 300, 312], ids=["one_tile", "not_aligned", "aligned"])
@pytest.mark.parametrize("firing", [31, 32, 33, 64, 256])
def test_a_tile_holds_its_slots_and_overflows_beyond(rng, machine, firing, neurons, precision):
    gate = -np.abs(rng.standard_normal((2, neurons))).astype(precision[0])
    gate[1, rng.choice(256, firing, replace=False)] *= -1
    packed = cuda.relu_pack(machine.upload(gate), 256, 32)
    pattern = packed.pattern()
    pattern.validate()
    assert pattern.tail_rows.tolist() == ([1] if firing > 32 else [])
    np.testing.assert_array_equal(pattern.to_dense(), np.maximum(gate, 0))
    assert cuda.activation_statistics(packed)[0] == firing


def test_packing_keeps_nan_and_leaves_negative_zeros_out(machine):
    gate = np.array([[np.nan, -0.0, 1, -1, 0, np.inf, -np.inf, np.nan]], np.float32)
    for tile, slots in ((8, 8), (8, 2), (256, 8), (256, 2)):
        pattern = cuda.relu_pack(machine.upload(gate), tile, slots).pattern()
        pattern.validate()
        np.testing.assert_array_equal(pattern.to_dense(), [[np.nan, 0, 1, 0, 0, np.inf, 0, np.nan]])
        assert not np.signbit(pattern.to_dense()[0, 1])


@pytest.mark.parametrize("slots", [4, 1])
def test_nan_reaches_the_result(rng, machine, slots):
    stored, _ = make_problem(rng, 3, 4, 4, 4, np.float32)
    stored[0][1, 2] = np.nan
    x, *weights = map(machine.upload, stored)
    y, packed = cuda.gated_ffn_forward(x, *weights, 4, slots)
    assert np.isnan(y.to_numpy()).all(axis=1).tolist() == [False, True, False]
    gradients = [machine.upload(np.zeros((4, 4), np.float32)) for _ in range(3)]
    dx = cuda.gated_ffn_backward(x, x, *weights, packed, 0.0, *gradients)
    assert np.isnan(dx.to_numpy()).any(axis=1).tolist() == [False, True, False]
    assert all(np.isnan(gradient.to_numpy()).any() for gradient in gradients)


@pytest.mark.parametrize("slots", [63, 4], ids=["no_tail", "tail"])
@pytest.mark.parametrize("packs_itself", [False, True], ids=["product_in_memory", "packs_itself"])
def test_nan_stays_in_its_row_of_aligned_arrays(rng, machine, monkeypatch, slots, packs_itself):
    """In strips, and in a tail read from the product or computed anew."""
    dtype = BFLOAT16[0] if packs_itself else np.dtype(np.float32)
    if packs_itself and not machine.is_real:
        monkeypatch.setattr(machine.gpu, "capability", (8, 0))
    stored, _ = make_problem(rng, 4, 16, 40, 12, dtype)
    stored[0][1, 2] = np.nan
    x, *weights = map(machine.upload, stored)
    y, packed = cuda.gated_ffn_forward(x, *weights, 256, slots)
    assert np.isnan(y.to_numpy().astype(float)).all(axis=1).tolist() == [False, True, False, False]
    dy = machine.upload(rng.standard_normal((4, 16)).astype(dtype))
    gradients = [machine.upload(np.zeros((40, 16), np.float32)) for _ in range(3)]
    dx = cuda.gated_ffn_backward(dy, x, *weights, packed, 0.0, *gradients)
    assert np.isnan(dx.to_numpy().astype(float)).any(axis=1).tolist() == [False, True, False, False]
    assert all(np.isnan(gradient.to_numpy()).any() for gradient in gradients)


def test_padding_is_not_read(rng, machine):
    stored, _ = make_problem(rng, 4, 5, 12, 4, np.float32)
    x, *weights = map(machine.upload, stored)
    dy = machine.upload(rng.standard_normal((4, 5)).astype(np.float32))

    def backward(packed):
        gradients = [machine.upload(np.zeros((12, 5), np.float32)) for _ in range(3)]
        dx = cuda.gated_ffn_backward(dy, x, *weights, packed, 0.5, *gradients)
        return [array.to_numpy() for array in (dx, *gradients)]

    _, packed = cuda.gated_ffn_forward(x, *weights, 4, 3)
    expected = backward(packed)
    padding = (np.arange(3) >= packed.counts.to_numpy()[..., None]).reshape(4, -1)
    assert padding.any()
    poison = {"values": np.nan, "up_values": np.nan, "columns": 65535}
    for name, value in poison.items():
        array = getattr(packed, name).to_numpy()
        array[padding] = value
        packed = dataclasses.replace(packed, **{name: machine.upload(array)})
    for array, wanted in zip(backward(packed), expected, strict=True):
        np.testing.assert_array_equal(array, wanted)


def test_same_bits_on_every_run(rng, machine):
    shape = (600, 70, 500, 60) if machine.is_real else (4, 5, 9, 3)
    stored, _ = make_problem(rng, *shape, np.float32)
    x, *weights = map(machine.upload, stored)
    runs = []
    for _ in range(20 if machine.is_real else 2):
        y, packed = cuda.gated_ffn_forward(x, *weights, 32, 5)
        gradients = [machine.upload(np.zeros(shape[2:0:-1], np.float32)) for _ in range(3)]
        dx = cuda.gated_ffn_backward(x, x, *weights, packed, 0.5, *gradients)
        runs.append([array.to_numpy() for array in (y, dx, *gradients)])
    for run in runs[1:]:
        for array, first in zip(run, runs[0], strict=True):
            np.testing.assert_array_equal(array, first)


@pytest.mark.gpu
def test_forward_and_backward_can_be_recorded(rng, real_gpu):
    from twell_numba.device.gpu import from_numpy, record_graph, zeros

    stream = real_gpu.stream
    stored, _ = make_problem(rng, 100, 32, 300, 40, np.float32)
    x, *weights = (from_numpy(array, stream) for array in stored)
    gradients = [zeros((300, 32), np.float32, stream) for _ in range(3)]

    def work():
        for gradient in gradients:
            gradient.fill_with_zeros()
        y, packed = cuda.gated_ffn_forward(x, *weights, 64, 8)
        return y, cuda.gated_ffn_backward(x, x, *weights, packed, 0.5, *gradients)

    work()
    with record_graph(stream) as graph:
        recorded = work()
    # another input, with other rows in the tail than when it was recorded
    other = rng.permutation(stored[0]) + np.float32(0.1)
    x.copy_from(other)
    graph.replay()
    replayed = [array.to_numpy() for array in (*recorded, *gradients)]
    expected = [array.to_numpy() for array in (*work(), *gradients)]
    for array, wanted in zip(replayed, expected, strict=True):
        np.testing.assert_array_equal(array, wanted)


def test_refuses_what_does_not_fit(rng, machine):
    stored, _ = make_problem(rng, 2, 4, 6, 3, np.float32)
    x, gate, up, down = map(machine.upload, stored)
    with pytest.raises(ValueError, match="slots=9 given, 1 to tile=8 wanted"):
        cuda.relu_pack(x, 8, 9)
    with pytest.raises(ValueError, match="tile=65537 given, 1 to 65536 wanted"):
        cuda.relu_pack(x, 65537)
    with pytest.raises(ValueError, match=r"down_weight of shape \(2, 4\) given, shape \(6, 4\)"):
        cuda.gated_ffn_forward(x, gate, up, x)
    y, packed = cuda.gated_ffn_forward(x, gate, up, down)
    gradients = [machine.upload(np.zeros((6, 4), np.float32)) for _ in range(3)]
    with pytest.raises(ValueError, match="activations of a layer with a gate given, with no gate"):
        cuda.ffn_backward(y, x, up, down, packed, 0.0, *gradients[:2])
    with pytest.raises(ValueError, match=r"activations of shape \(2, 6\) given, \(1, 6\) wanted"):
        cuda.gated_ffn_backward(y[:1], x[:1], gate, up, down, packed, 0.0, *gradients)
    with pytest.raises(ValueError, match="one array given for several of gate_grad, up_grad"):
        cuda.gated_ffn_backward(y, x, gate, up, down, packed, 0.0, gradients[0], *gradients[:2])
