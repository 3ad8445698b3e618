import ml_dtypes
import numpy as np
import pytest

pytest.importorskip("numba_cuda", reason="numba-cuda is not installed (extra cuda)")

from twell_numba.device.gpu.tensor_cores import OLDEST_CAPABILITY  # noqa: E402
from twell_numba.kernels.twell import dense_tail  # noqa: E402

BFLOAT16, FLOAT16 = np.dtype(ml_dtypes.bfloat16), np.dtype(np.float16)
FLOATS = [pytest.param(BFLOAT16, id="bfloat16"), pytest.param(FLOAT16, id="float16")]
GATED = pytest.mark.parametrize("gated", [True, False], ids=["gated", "two_matrices"])

# (M, D, F, rows in the tail): few rows (parts of a tile, one neuron, more terms than eight warps
# take at a time), then more
SMALL = [(5, 16, 70, 3), (3, 8, 1, 1), (4, 72, 64, 4), (2, 520, 8, 2), (17, 8, 520, 16)]
SMALL.append((19, 16, 70, 17))
LARGE = [
    (300, 776, 1001, 299),
    (300, 776, 1001, 16),
    (40, 2048, 2816, 9),
    (300, 1024, 2816, 250),
    (2500, 264, 511, 2100),
    (40, 8192, 600, 17),
    (16384, 40, 130, 16384),
]


@pytest.fixture(autouse=True)
def has_tensor_cores(request):
    if "machine" in request.fixturenames:
        machine = request.getfixturevalue("machine")
        if machine.is_real and machine.gpu.capability < OLDEST_CAPABILITY:
            pytest.skip("tensor cores with these instructions are missing")


class Problem:
    """Inputs of which all sums before a rounding are exact in float32, and what is wanted."""

    def __init__(self, machine, rng, shape, dtype, gated, gradient_dtype=np.float32):
        rows, width, neurons, count = shape
        self.machine, self.dtype, self.gated, self.count = machine, dtype, gated, count

        def draw(*shape):
            return rng.integers(-2, 3, shape).astype(dtype)

        self.x, self.dy = draw(rows, width), draw(rows, width)
        # small enough for y and dx to stay below 65504, which float16 ends at
        self.weights = [draw(neurons, width) / dtype.type(16) for _ in range(3)]
        self.tail = np.sort(rng.choice(rows, count, replace=False))
        listed = np.full(rows, -7, np.int32)
        listed[:count] = self.tail
        upload = machine.upload
        self.arrays = upload(self.x), tuple(map(upload, self.weights))
        self.list = (
            upload(listed),
            upload(np.array([count], np.int32)),
            upload(np.zeros(2, np.int32)),
        )
        self.y, self.dx = (upload(np.full((rows, width), 9, dtype)) for _ in range(2))
        self.gradients = tuple(
            upload(np.ones((neurons, width), gradient_dtype)) for _ in self.weights
        )
        self.statistics = (
            upload(np.full(rows, -1, np.int32)),
            upload(np.full(rows, -1, np.float32)),
            upload(np.zeros(neurons, np.bool_)),
        )

    def run(self):
        x, weights = self.arrays
        dense_tail.forward_of_tail(
            x, weights, *self.list, self.y, self.statistics, gated=self.gated
        )
        scale = self.machine.upload(np.array([0.5], np.float32))
        dense_tail.backward_of_tail(
            self.machine.upload(self.dy),
            x,
            weights,
            *self.list,
            scale,
            self.dx,
            self.gradients,
            gated=self.gated,
        )
        return [array.to_numpy() for array in (self.y, self.dx, *self.gradients)]

    def round(self, array):
        with np.errstate(over="ignore"):
            return array.astype(self.dtype).astype(np.float64)

    def wanted(self):
        """Return h, y, dx of the tail's rows and the gradients."""
        x, dy = (array[self.tail].astype(np.float64) for array in (self.x, self.dy))
        gate, up, down = (weight.astype(np.float64) for weight in self.weights)
        g = np.maximum(self.round(x @ gate.T), 0)
        u = self.round(x @ up.T) if self.gated else np.ones_like(g)
        h = self.round(g * u)
        d_hidden = dy @ down.T + 0.5 * np.sign(h)
        d_gate, d_up = self.round(d_hidden * u * (g > 0)), self.round(d_hidden * g * self.gated)
        dx = d_gate @ gate + d_up @ up
        return h, h @ down, dx, (1 + d_gate.T @ x, 1 + d_up.T @ x, 1 + h.T @ dy)


def check(problem, relative_error, tolerance):
    y, dx, *gradients = problem.run()
    h, wanted_y, wanted_dx, wanted_gradients = problem.wanted()
    assert relative_error(y[problem.tail], wanted_y) <= tolerance
    assert relative_error(dx[problem.tail], wanted_dx) <= tolerance
    for gradient, wanted in zip(gradients, wanted_gradients, strict=True):
        assert relative_error(gradient, wanted) <= tolerance
    nonzeros, sums, fired = (array.to_numpy() for array in problem.statistics)
    np.testing.assert_array_equal(nonzeros[problem.tail], (h != 0).sum(axis=1))
    np.testing.assert_allclose(sums[problem.tail], np.abs(h).sum(axis=1), rtol=1e-5)
    np.testing.assert_array_equal(fired, (h != 0).any(axis=0))

    others = np.setdiff1d(np.arange(len(y)), problem.tail)
    assert (y[others] == 9).all()
    assert (dx[others] == 9).all()
    assert (nonzeros[others] == -1).all()
    assert (sums[others] == -1).all()
    assert problem.list[2].to_numpy().tolist() == [0, 0]


@GATED
@pytest.mark.parametrize("dtype", FLOATS)
def test_matches_a_dense_layer(rng, machine, dtype, gated, relative_error):
    small, large = (SMALL, LARGE) if dtype == BFLOAT16 else (SMALL[::5], LARGE[:2])
    for shape in machine.shapes(small, large):
        check(Problem(machine, rng, shape, dtype, gated), relative_error, 3e-3)


@GATED
def test_more_rows_than_there_is_workspace_for(rng, machine, gated, relative_error, monkeypatch):
    monkeypatch.setattr(dense_tail, "PASS_ROWS", 128)
    check(Problem(machine, rng, (140, 8, 9, 133), BFLOAT16, gated), relative_error, 3e-3)


def test_gradients_may_have_16_bits(rng, machine, relative_error):
    problem = Problem(machine, rng, (5, 16, 70, 3), BFLOAT16, True, BFLOAT16)
    check(problem, relative_error, 5e-3)


def test_gradients_may_be_at_odd_addresses(rng, machine, monkeypatch, relative_error):
    """The kernels that read and write eight of their numbers at a time are not taken then."""
    problem = Problem(machine, rng, (5, 16, 70, 3), BFLOAT16, True)
    problem.gradients = tuple(
        machine.upload(np.ones(70 * 16 + 1, np.float32))[1:].reshape(70, 16) for _ in range(3)
    )
    assert all(gradient.pointer % 16 != 0 for gradient in problem.gradients)
    few_rows, kernel = [], dense_tail.tail_backward

    def spying(blocks, *arguments):
        few_rows.append(arguments[-2])
        kernel(blocks, *arguments)

    monkeypatch.setattr(dense_tail, "tail_backward", spying)
    check(problem, relative_error, 3e-3)
    assert few_rows == [0]


@pytest.mark.parametrize("shape", [(5, 8, 9, 0), (0, 8, 9, 0), (3, 8, 0, 0)])
def test_nothing_is_written_without_a_tail(rng, machine, shape):
    problem = Problem(machine, rng, shape, BFLOAT16, True)
    y, dx, *gradients = problem.run()
    assert (y == 9).all()
    assert (dx == 9).all()
    assert all((gradient == 1).all() for gradient in gradients)
    assert not problem.statistics[2].to_numpy().any()


@pytest.mark.parametrize("count", [3, 17])
def test_nan_stays_in_its_row(rng, machine, count):
    problem = Problem(machine, rng, (20, 16, 70, count), BFLOAT16, True)
    x = problem.x.copy()
    x[problem.tail[1], 3] = np.nan
    problem.arrays = (machine.upload(x), problem.arrays[1])
    y, dx, *gradients = problem.run()
    for array in (y, dx):
        is_nan = np.isnan(array.astype(np.float32))
        assert is_nan[problem.tail[1]].all()
        assert is_nan.any(axis=1).sum() == 1
    assert all(np.isnan(gradient).any() for gradient in gradients)
    counts = problem.statistics[0].to_numpy()[problem.tail]
    assert counts[1] == 70
    assert (np.delete(counts, 1) < 70).all()


@GATED
@pytest.mark.parametrize("count", [3, 17])
def test_what_decided_can_be_had(rng, machine, gated, count):
    problem = Problem(machine, rng, (20, 16, 70, count), BFLOAT16, gated)
    x, (weight, *_) = problem.arrays
    positive = dense_tail.positive_rows(x, weight, *problem.list, problem.count).to_numpy()
    products = problem.x[problem.tail].astype(np.float64) @ problem.weights[0].T.astype(np.float64)
    np.testing.assert_array_equal(
        positive[:, :70].astype(np.float64), problem.round(np.maximum(products, 0))
    )
    assert (positive[:, 70:] == 0).all()
    assert dense_tail.positive_rows(x, weight, *problem.list, 0).shape[0] == 0


@pytest.mark.parametrize("count", [3, 2500])
def test_same_bits_on_every_run(rng, machine, count):
    shape = (3000, 264, 700, count) if machine.is_real else (19, 8, 9, min(count, 17))
    problem = Problem(machine, rng, shape, BFLOAT16, True)
    for name in ("x", "dy"):
        array = rng.standard_normal(shape[:2]).astype(BFLOAT16)
        setattr(problem, name, array)
    problem.arrays = (machine.upload(problem.x), problem.arrays[1])
    runs = []
    for _ in range(20 if machine.is_real else 2):
        for gradient in problem.gradients:
            gradient.fill_with_zeros()
        runs.append(problem.run())
    for run in runs[1:]:
        for array, first in zip(run, runs[0], strict=True):
            np.testing.assert_array_equal(array, first)


@pytest.mark.gpu
def test_recorded_for_a_tail_of_any_length(rng, real_gpu, relative_error):
    from twell_numba.device.gpu import from_numpy, record_graph

    class OnGPU:
        is_real, gpu = True, real_gpu

        @staticmethod
        def upload(array):
            return from_numpy(array, real_gpu.stream)

    problem = Problem(OnGPU, rng, (1500, 64, 300, 1200), BFLOAT16, True)
    x, weights = problem.arrays

    def work():
        dense_tail.forward_of_tail(
            x, weights, *problem.list, problem.y, problem.statistics, gated=True
        )

    work()
    with record_graph(real_gpu.stream) as graph:
        work()
    for count in (0, 1, 1200, 16, 300):
        problem.y.copy_from(np.full(problem.x.shape, 9, BFLOAT16))
        problem.list[1].copy_from(np.array([count], np.int32))
        graph.replay()
        y = problem.y.to_numpy()
        _, wanted, *_ = problem.wanted()
        assert relative_error(y[problem.tail[:count]], wanted[:count]) <= 3e-3
        assert (y[problem.tail[count:]] == 9).all()
