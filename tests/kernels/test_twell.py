"""The activation-sparse feedforward kernels against their plain NumPy reference."""

import numpy as np
import pytest

from twell_numba.device import set_thread_count, thread_count
from twell_numba.kernels.dense_ffn import cpu as dense_cpu
from twell_numba.kernels.twell import cpu, reference

TILE, SLOTS = 16, 4
# (M, D, F, how many neurons fire): tiles straddled, no row, no entry, every tile overflowing.
PROBLEMS = [
    (0, 8, 40, 4),
    (1, 8, 40, 4),
    (2, 5, TILE - 1, 2),
    (3, 17, TILE, 3),
    (33, 16, TILE + 1, 3),
    (50, 24, 70, 6),
    (50, 24, 70, 0),
    (5, 24, 70, 35),
    (40, 24, 70, 35),
    (300, 64, 500, 20),
]
TOLERANCE = {np.float32: 1e-5, np.float64: 1e-13}

every_activation = pytest.mark.parametrize("activation", ["relu", "relu2"])


def make_problem(rng, rows, width, neurons, firing, dtype=np.float64):
    """Return x, gate, up, down such that about ``firing`` neurons fire for a token."""
    x = rng.standard_normal((rows, width))
    x[:, 0] = 1
    weights = rng.standard_normal((3, neurons, width)) * width**-0.5
    threshold = np.quantile(rng.standard_normal(10_000), 1 - firing / neurons) if firing else 99
    weights[0, :, 0] = -threshold
    return [array.astype(dtype) for array in (x, *weights)]


def assert_close(actual, wanted, dtype):
    assert actual.dtype == dtype
    error = np.linalg.norm(actual - wanted)
    assert error <= TOLERANCE[dtype] * max(np.linalg.norm(wanted), 1e-30)


def assert_same_packing(packed, wanted):
    packed.pattern().validate()
    packed.hidden().validate()
    np.testing.assert_allclose(
        packed.hidden().to_dense(), wanted.hidden().to_dense(), rtol=1e-3, atol=1e-4
    )
    np.testing.assert_array_equal(packed.counts, wanted.counts)
    np.testing.assert_array_equal(packed.tail_rows, wanted.tail_rows)
    stored = ~padding_of(packed)
    np.testing.assert_array_equal(packed.columns[stored], wanted.columns[stored])


def padding_of(packed):
    return (np.arange(packed.slots) >= packed.counts[..., None]).reshape(packed.values.shape)


def poison_padding(packed):
    padding = padding_of(packed)
    packed.values[padding] = np.nan
    packed.columns[padding] = 65535
    if packed.up_values is not None:
        packed.up_values[padding] = np.nan


@pytest.fixture
def poisoned_memory(monkeypatch):
    """Fill what np.empty returns with NaN, so that an output nobody wrote is seen."""
    empty, empty_like = np.empty, np.empty_like

    def poison(array):
        if array.dtype.kind == "f":
            array.fill(np.nan)
        else:
            array.fill(99)
        return array

    monkeypatch.setattr(np, "empty", lambda *a, **k: poison(empty(*a, **k)))
    monkeypatch.setattr(np, "empty_like", lambda *a, **k: poison(empty_like(*a, **k)))


@pytest.fixture(scope="module", autouse=True)
def compiled_kernels():
    """Compile before np.empty is patched: Numba looks it up by identity."""
    rng = np.random.default_rng(0)
    for dtype in (np.float32, np.float64):
        x, gate, up, down = make_problem(rng, 4, 8, 40, 4, dtype)
        gradients = np.zeros((3, *gate.shape), dtype)
        _, packed = cpu.gated_ffn_forward(x, gate, up, down, TILE, SLOTS)
        cpu.gated_ffn_backward(x, x, gate, up, down, packed, 0.0, *gradients)
        _, packed = cpu.ffn_forward(x, up, down, TILE, SLOTS)
        cpu.ffn_backward(x, x, up, down, packed, 0.0, *gradients[:2])
        cpu.relu_pack(x)


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@every_activation
@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
def test_gated_ffn(rng, problem, activation, dtype):
    x, gate, up, down = make_problem(rng, *problem, dtype)
    dy = rng.standard_normal(x.shape).astype(dtype)
    y, packed = cpu.gated_ffn_forward(x, gate, up, down, TILE, SLOTS, activation)
    wanted_y, wanted = reference.gated_ffn_forward(x, gate, up, down, TILE, SLOTS, activation)
    assert_same_packing(packed, wanted)
    assert_close(y, wanted_y, dtype)
    poison_padding(packed)
    gradients = np.ones((3, *gate.shape), dtype)
    wanted_gradients = gradients.copy()
    dx = cpu.gated_ffn_backward(dy, x, gate, up, down, packed, 0.3, *gradients, activation)
    wanted_dx = reference.gated_ffn_backward(
        dy, x, gate, up, down, wanted, 0.3, *wanted_gradients, activation
    )
    assert_close(dx, wanted_dx, dtype)
    for gradient, wanted_gradient in zip(gradients, wanted_gradients, strict=True):
        assert_close(gradient, wanted_gradient, dtype)


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@every_activation
@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
def test_two_matrix_ffn(rng, problem, activation, dtype):
    x, up, _, down = make_problem(rng, *problem, dtype)
    dy = rng.standard_normal(x.shape).astype(dtype)
    y, packed = cpu.ffn_forward(x, up, down, TILE, SLOTS, activation)
    wanted_y, wanted = reference.ffn_forward(x, up, down, TILE, SLOTS, activation)
    assert_same_packing(packed, wanted)
    assert_close(y, wanted_y, dtype)
    poison_padding(packed)
    gradients = np.ones((2, *up.shape), dtype)
    wanted_gradients = gradients.copy()
    dx = cpu.ffn_backward(dy, x, up, down, packed, 0.3, *gradients, activation)
    wanted_dx = reference.ffn_backward(dy, x, up, down, wanted, 0.3, *wanted_gradients, activation)
    assert_close(dx, wanted_dx, dtype)
    for gradient, wanted_gradient in zip(gradients, wanted_gradients, strict=True):
        assert_close(gradient, wanted_gradient, dtype)


@pytest.mark.parametrize("gated", [True, False])
@every_activation
def test_reference_gradients(rng, activation, gated, gradient_check, away_from_kinks):
    x, gate, up, down = make_problem(rng, 6, 8, 40, 12)
    away_from_kinks(rng, x, [gate, up])
    dy = rng.standard_normal(x.shape)
    weights = [gate, up, down] if gated else [gate, down]
    forward = reference.gated_ffn_forward if gated else reference.ffn_forward
    backward = reference.gated_ffn_backward if gated else reference.ffn_backward

    def loss():
        y, packed = forward(x, *weights, TILE, SLOTS, activation)
        return np.sum(y * dy) + 0.3 * np.abs(packed.hidden().to_dense()).sum()

    gradients = [np.zeros_like(weight) for weight in weights]
    _, packed = forward(x, *weights, TILE, SLOTS, activation)
    dx = backward(dy, x, *weights, packed, 0.3, *gradients, activation)
    gradient_check(loss, [x, *weights], [dx, *gradients], rng)


@pytest.mark.parametrize("count", [0, 1, SLOTS, SLOTS + 1, TILE])
def test_relu_pack_keeps_everything(rng, count):
    # 0, 1, slots, slots + 1 and all entries of the middle tile, beside a tile with one entry.
    gate = -np.ones((3, 2 * TILE + 5))
    gate[1, TILE : TILE + count] = rng.random(count) + 1
    gate[:, 2] = 7
    packed = cpu.relu_pack(gate, TILE, SLOTS)
    assert_same_packing(packed, reference.relu_pack(gate, TILE, SLOTS))
    assert list(packed.tail_rows) == ([1] if count > SLOTS else [])
    poison_padding(packed)
    np.testing.assert_array_equal(packed.pattern().to_dense(), np.maximum(gate, 0))
    assert packed.pattern().nnz == 3 + count


def test_relu_pack_of_special_values():
    gate = np.full((2, TILE + 3), -1.0)
    gate[0, [0, 3, 5, 16]] = [np.nan, -0.0, np.inf, np.nan]
    gate[1, [1, 18]] = [0.0, -np.inf]
    packed = cpu.relu_pack(gate, TILE, SLOTS)
    dense = packed.pattern().to_dense()
    wanted = np.zeros_like(gate)
    wanted[0, [0, 5, 16]] = [np.nan, np.inf, np.nan]
    np.testing.assert_array_equal(dense, wanted)
    assert packed.counts.tolist() == [[2, 1], [0, 0]]
    assert not np.signbit(dense).any()


@pytest.mark.parametrize("neurons", [65535, 65536, 65537, 70000])
def test_more_neurons_than_16_bits_can_count(rng, neurons):
    x, gate, up, down = make_problem(rng, 3, 4, neurons, 8)
    gate[-1] = 9, 0, 0, 0
    for tile in (256, 65536):
        y, packed = cpu.gated_ffn_forward(x, gate, up, down, tile, 64)
        assert_close(y, reference.gated_ffn_forward(x, gate, up, down, tile, 64)[0], np.float64)
        assert packed.pattern().to_dense()[:, -1].tolist() == [9, 9, 9]


@pytest.mark.parametrize("activation", ["relu", "relu2"])
def test_same_numbers_as_the_dense_path(rng, activation):
    x, gate, up, down = make_problem(rng, 40, 24, 70, 12)
    dy = rng.standard_normal(x.shape)
    results = []
    for family, options in ((dense_cpu, {}), (cpu, {"tile": TILE, "slots": SLOTS})):
        gradients = np.zeros((3, *gate.shape))
        options["activation"] = activation
        y, activations = family.gated_ffn_forward(x, gate, up, down, **options)
        arguments = (dy, x, gate, up, down, activations, 0.3, *gradients)
        dx = family.gated_ffn_backward(*arguments, activation=activation)
        results.append((y, dx, *gradients))
    for actual, wanted in zip(*results, strict=True):
        assert_close(actual, wanted, np.float64)


def test_every_row_may_overflow(rng):
    x, gate, up, down = make_problem(rng, 3000, 4, 40, 20)
    y, packed = cpu.gated_ffn_forward(x, gate, up, down, TILE, 1)
    assert packed.tail_rows.size > 2900
    assert_close(y, reference.gated_ffn_forward(x, gate, up, down, TILE, 1)[0], np.float64)


@every_activation
def test_nan_is_kept_through_forward_and_backward(rng, activation):
    x, gate, up, down = make_problem(rng, 5, 8, 40, 4)
    x[2, 3] = np.nan
    y, packed = cpu.gated_ffn_forward(x, gate, up, down, TILE, SLOTS, activation)
    assert np.isnan(y[2]).all()
    assert np.isfinite(np.delete(y, 2, axis=0)).all()
    gradients = np.zeros((3, *gate.shape))
    dx = cpu.gated_ffn_backward(y, x, gate, up, down, packed, 0.0, *gradients, activation)
    assert np.isnan(dx[2]).all()
    assert np.isnan(gradients).any()


def test_layouts_of_the_inputs(rng):
    x, gate, up, down = make_problem(rng, 20, 8, 40, 6)
    wanted, _ = reference.gated_ffn_forward(x, gate, up, down, TILE, SLOTS)
    x.flags.writeable = False
    variants = [
        (np.asfortranarray(x), gate, up, down),
        (x[::-1].copy()[::-1], gate, up, down),
        (x.astype(">f8"), gate, up, down),
        (x, np.asfortranarray(gate), np.repeat(up, 2, axis=0)[::2], down[:, ::-1].copy()[:, ::-1]),
    ]
    for arguments in variants:
        y, _ = cpu.gated_ffn_forward(*arguments, TILE, SLOTS)
        assert_close(y, wanted, np.float64)


def test_same_bits_on_every_run(rng):
    x, gate, up, down = make_problem(rng, 700, 64, 500, 20, np.float32)
    results = []
    for _ in range(3):
        y, packed = cpu.gated_ffn_forward(x, gate, up, down, TILE, SLOTS)
        gradients = np.zeros((3, *gate.shape), np.float32)
        dx = cpu.gated_ffn_backward(y, x, gate, up, down, packed, 0.1, *gradients)
        results.append((y, dx, *gradients))
    for result in results[1:]:
        for array, first in zip(result, results[0], strict=True):
            np.testing.assert_array_equal(array, first)


@pytest.mark.parametrize("threads", [1, 3])
def test_number_of_threads_changes_rounding_at_most(rng, threads):
    x, gate, up, down = make_problem(rng, 300, 64, 500, 20)
    before = thread_count()
    set_thread_count(threads)
    try:
        y, packed = cpu.gated_ffn_forward(x, gate, up, down, TILE, SLOTS)
        gradients = np.zeros((3, *gate.shape))
        dx = cpu.gated_ffn_backward(y, x, gate, up, down, packed, 0.1, *gradients)
    finally:
        set_thread_count(before)
    wanted_gradients = np.zeros((3, *gate.shape))
    wanted_y, wanted = reference.gated_ffn_forward(x, gate, up, down, TILE, SLOTS)
    wanted_dx = reference.gated_ffn_backward(y, x, gate, up, down, wanted, 0.1, *wanted_gradients)
    assert_close(y, wanted_y, np.float64)
    assert_close(dx, wanted_dx, np.float64)
    assert_close(gradients, wanted_gradients, np.float64)


def test_hidden_never_computes_with_padding(rng):
    x, gate, up, down = make_problem(rng, 60, 16, 70, 7, np.float32)
    _, packed = cpu.gated_ffn_forward(x, gate, up, down, TILE, SLOTS)
    padding = padding_of(packed)
    packed.values[padding] = np.finfo(np.float32).max
    packed.up_values[padding] = np.finfo(np.float32).max
    wanted = np.maximum(x @ gate.T, 0) * (x @ up.T)
    np.testing.assert_allclose(packed.hidden().to_dense(), wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("gated", [True, False])
def test_statistics(rng, gated):
    x, gate, up, down = make_problem(rng, 60, 16, 70, 12)
    up[5] = 0  # its neurons fire, but h is 0
    if gated:
        packed = cpu.gated_ffn_forward(x, gate, up, down, TILE, SLOTS)[1]
    else:
        packed = cpu.ffn_forward(x, gate, down, TILE, SLOTS)[1]
    assert packed.tail_rows.size
    nonzeros, absolute_sum, fired = cpu.activation_statistics(packed)
    wanted = reference.activation_statistics(packed)
    assert nonzeros == wanted[0]
    assert absolute_sum == pytest.approx(wanted[1], rel=1e-12)
    np.testing.assert_array_equal(fired, wanted[2])


def test_wrong_arguments_are_refused(rng):
    x, gate, up, down = make_problem(rng, 4, 8, 40, 4)
    with pytest.raises(
        ValueError, match=r"down_weight of shape \(8, 40\) given beside x.*\(40, 8\)"
    ):
        cpu.gated_ffn_forward(x, gate, up, down.T)
    with pytest.raises(TypeError, match="float32 or float64 wanted"):
        cpu.gated_ffn_forward(x.astype(np.float16), gate, up, down)
    with pytest.raises(TypeError, match="one dtype"):
        cpu.ffn_forward(x.astype(np.float32), up, down)
    with pytest.raises(ValueError, match="activation 'silu' given, one of relu, relu2 wanted"):
        cpu.gated_ffn_forward(x, gate, up, down, activation="silu")
    with pytest.raises(ValueError, match="activation 'silu' given, one of relu, relu2 wanted"):
        reference.ffn_forward(x, up, down, activation="silu")
    with pytest.raises(ValueError, match="tile=65537 given"):
        cpu.relu_pack(x, tile=65537)
    with pytest.raises(ValueError, match="slots=0 given"):
        cpu.relu_pack(x, slots=0)
    _, packed = cpu.ffn_forward(x, up, down)
    with pytest.raises(ValueError, match="down_grad"):
        cpu.ffn_backward(x, x, up, down, packed, 0.0, np.zeros_like(up), np.zeros_like(up).T)
    gradients = np.zeros((2, *up.shape))
    with pytest.raises(ValueError, match=r"activations of shape \(4, 40\) given, \(2, 40\) wanted"):
        cpu.ffn_backward(x[:2], x[:2], up, down, packed, 0.0, *gradients)
    with pytest.raises(TypeError, match="activations of type NoneType given"):
        cpu.ffn_backward(x, x, up, down, None, 0.0, *gradients)
    with pytest.raises(ValueError, match="one array given for several of up_grad, down_grad"):
        cpu.ffn_backward(x, x, up, down, packed, 0.0, gradients[0], gradients[0])
    with pytest.raises(ValueError, match="dy of shape"):
        cpu.ffn_backward(x[:2], x, up, down, packed, 0.0, np.zeros_like(up), np.zeros_like(up))
