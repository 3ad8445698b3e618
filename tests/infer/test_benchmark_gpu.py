"""The benchmarks on a GPU: emulated, where times are made up, and with ``-m gpu`` real."""

import json

import numpy as np
import pytest
from click.testing import CliRunner
from scipy.sparse import csr_array

from twell_numba.cli import bench, twell
from twell_numba.infer import benchmark, benchmark_formats_gpu
from twell_numba.infer.benchmark import benchmark_ffn
from twell_numba.infer.benchmark_formats import ProductShape, benchmark_formats
from twell_numba.infer.benchmark_pattern import benchmark_pattern
from twell_numba.infer.benchmark_weights import benchmark_weights
from twell_numba.infer.ffn_problem import (
    FFNProblem,
    FFNShape,
    choose_dtype,
    default_shape,
    firing_neurons,
)
from twell_numba.layers import ffn

TOLERANCE = {"float32": 1e-5, "bfloat16": 1e-2, "float16": 2e-3}


def count_peak(gpu, monkeypatch):
    """Let an emulated GPU know the most memory that was in use at once."""
    allocate, peak = gpu.allocate, [0]

    def in_use():
        return sum(gpu.regions.values())

    def counting(nbytes, stream):
        memory = allocate(nbytes, stream)
        peak[0] = max(peak[0], in_use())
        return memory

    monkeypatch.setattr(gpu, "allocate", counting)
    monkeypatch.setattr(gpu, "reset_peak", lambda: peak.__setitem__(0, in_use()), raising=False)
    monkeypatch.setattr(gpu, "peak", lambda: peak[0])
    monkeypatch.setattr(gpu, "synchronize", lambda: None, raising=False)


@pytest.fixture
def device(machine, monkeypatch):
    """The name of a GPU; an emulated one takes no time."""
    import twell_numba.device.gpu as package

    if not machine.is_real:
        monkeypatch.setattr(package, "choose", lambda name: machine.gpu)
        count_peak(machine.gpu, monkeypatch)
        monkeypatch.setattr(bench, "ONE_TOKEN_LAYERS", 2)

        def take_no_time(calls, rounds, stream, unrecorded=()):
            for call in calls.values():
                call()
            return dict.fromkeys(calls, 1.0)

        for module in (benchmark, benchmark_formats_gpu):
            monkeypatch.setattr(module, "time_in_turn_on_gpu", take_no_time)
    return "cuda:0"


@pytest.mark.parametrize(
    ("dtype", "nonzeros", "path"),
    [("float32", 0.05, "twell"), ("bfloat16", 12, "dense"), ("float16", 0.05, "twell")],
)
def test_rows(device, monkeypatch, dtype, nonzeros, path):
    monkeypatch.setattr(ffn, "GPU_AUTO_SIZE", 0)
    problem = FFNProblem(FFNShape(3, 8, 24, nonzeros), 0, dtype, device)
    for backward in (False, True):
        rows = benchmark_ffn(problem, rounds=1, backward=backward)
        assert [row["path"] for row in rows] == [f"auto ({path})", "dense", "twell"]
        for row in rows:
            assert row["device"] == device
            assert row["dtype"] == dtype
            assert row["shape"] == {"M": 3, "D": 8, "F": 24}
            assert row["speedup"] == row["dense_ms"] / row["sparse_ms"] > 0
            assert row["max_relative_error"] < TOLERANCE[dtype]
        assert rows[1]["speedup"] == 1


def test_rows_of_8_bit_weights(device):
    """Forward alone; what fires is the same, and weights are off by a few percent."""
    problem = FFNProblem(FFNShape(3, 16, 24, 12), 0, "bfloat16", device)
    rows = benchmark_ffn(problem, rounds=1, backward=False, layers=2, float8=True)
    assert [row["path"] for row in rows] == ["auto (dense)", "dense", "twell", "twell_float8"]
    twell, float8 = rows[2:]
    assert float8.keys() == twell.keys()
    assert float8["nonzeros_per_token"] == twell["nonzeros_per_token"]
    assert TOLERANCE["bfloat16"] < float8["max_relative_error"] < 6e-2
    assert float8["layers"] == 2
    assert float8["sparse_peak_bytes"] > 0
    assert len(benchmark_ffn(problem, rounds=1, backward=True, float8=True)) == 3


def test_peak_memory(device):
    """Inputs, weights, their gradients in float32, and at least what is returned."""
    shape = FFNShape(3, 8, 24, 0.05)
    weights, activations = 3 * 24 * 8, 3 * 8
    for backward, least in (
        (False, 2 * weights + 2 * 2 * activations),
        (True, (2 + 4) * weights + 2 * 4 * activations),
    ):
        rows = benchmark_ffn(FFNProblem(shape, 0, "bfloat16", device), 1, backward)
        for row in rows:
            assert least < row["sparse_peak_bytes"]
            assert row["dense_peak_bytes"] == rows[1]["sparse_peak_bytes"]


def test_a_pattern(device):
    rng = np.random.default_rng(0)
    fires = rng.random((6, 24)) < 0.1
    fires[:, ::2], fires[0, 23] = False, True
    pattern = csr_array(fires.astype(np.float32))
    problem = FFNProblem(FFNShape(6, 16, 24, 12), 0, "bfloat16", device)
    parts = list(benchmark_pattern(problem, "p", pattern, 1, remove_dead=True, float8=True))
    assert [len(part) for part in parts] == [4, 4, 3, 3]
    assert [part[0]["shape"]["F"] for part in parts[:2]] == [24, fires.any(axis=0).sum()]
    for row in (row for part in parts for row in part):
        assert row["nonzeros_per_token"] == pytest.approx(fires.sum() / 6)
        is_float8 = row["path"] == "twell_float8"
        assert row["max_relative_error"] < (6e-2 if is_float8 else TOLERANCE["bfloat16"])
    peaks = [part[1]["dense_peak_bytes"] for part in parts]
    assert peaks[0] == peaks[1]  # that of the layer with all neurons


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rows_of_sparse_weights(device, dtype):
    problem = FFNProblem(FFNShape(2, 8, 12, 6), 0, dtype, device)
    for rows in benchmark_weights(problem, 0.3, 4, rounds=1):
        assert [row["path"] for row in rows] == ["csr", "block_ell"]
        for row in rows:
            assert (row["device"], row["dtype"]) == (device, dtype)
            assert row["density"] == pytest.approx(0.3, rel=0.7)
            assert 0 < row["max_relative_error"] < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rows_of_formats(device, dtype):
    shape = ProductShape(9, 10, 4, 0.3, block_size=4)
    rows = [row for part in benchmark_formats(shape, 1, 0, device, dtype) for row in part]
    assert {(row["path"], row["operation"]) for row in rows} == {
        (path, operation)
        for path in ("csr", "hybrid_ell", "twell", "block_ell")
        for operation in ("A @ X", "A.T @ X", "X @ A", "sampled", "from_dense")
    }
    for row in rows:
        assert (row["device"], row["dtype"]) == (device, dtype)
        assert row["max_relative_error"] < TOLERANCE[dtype]


def test_a_wrong_result_is_seen(device, monkeypatch):
    """Also where only a sample is looked at."""
    monkeypatch.setattr("twell_numba.infer.ffn_problem.LARGEST_WHOLE", 0)
    problem = FFNProblem(FFNShape(4, 8, 12, 6), 0, "float32", device)
    assert isinstance(problem.tokens, np.ndarray)
    assert 3 in problem.tokens
    assert 11 in problem.neurons
    wrong = problem.place(2 * problem.down)
    make = problem.layer

    def layer(path, hold=None):
        made = make(path, hold)
        made.down.value = wrong
        return made

    right = benchmark_ffn(problem, rounds=1, backward=True)
    monkeypatch.setattr(problem, "layer", layer)
    for row in right:
        assert row["max_relative_error"] < 1e-5
    for row in benchmark_ffn(problem, rounds=1, backward=False):
        assert row["max_relative_error"] > 0.5


def test_a_sample_has_the_exact_results_of_the_whole(monkeypatch):
    shape = FFNShape(300, 8, 100, 40)
    whole = FFNProblem(shape, 0).exact
    monkeypatch.setattr("twell_numba.infer.ffn_problem.LARGEST_WHOLE", 1000)
    problem = FFNProblem(shape, 0)
    np.testing.assert_allclose(problem.exact.y, whole.y[problem.tokens])
    np.testing.assert_allclose(problem.exact.dx, whole.dx[problem.tokens])
    for part, gradient in zip(problem.exact.gradients, whole.gradients, strict=True):
        assert len(part) == 16
        np.testing.assert_allclose(part, gradient[problem.neurons])


@pytest.mark.parametrize("skew", [0.0, 1.0])
@pytest.mark.parametrize("nonzeros", [2, 30, 198])
def test_as_many_neurons_fire_as_wanted(skew, nonzeros):
    problem = FFNProblem(FFNShape(2000, 256, 200, 50), 0, skew=skew).with_nonzeros(nonzeros)
    fires = problem.x @ problem.gate.T > 0
    assert fires.sum(axis=1).mean() == pytest.approx(nonzeros, rel=0.05)
    busiest = np.sort(fires.sum(axis=0))[-20:].sum() / fires.sum()
    assert busiest > 0.3 if skew and nonzeros < 50 else busiest < 0.2


def test_sizes_and_densities_of_each_machine():
    assert default_shape("cpu", None, None, None) == FFNShape(1024, 512, 2048, 1024)
    assert default_shape("cuda:1", None, 64, None) == FFNShape(16384, 64, 5632, 2816)
    assert firing_neurons("cpu", 100, (), ()) == pytest.approx([1, 5, 50])
    assert firing_neurons("cuda:0", 5632, (), ()) == [29, 60, 150, 911, 2816]
    assert firing_neurons("cuda:0", 200, (), ()) == [29, 60, 100]
    assert firing_neurons("cuda:0", 200, (0.5,), (3,)) == [3, 100]
    assert choose_dtype("cpu", None) == "float32"
    assert choose_dtype("cuda:0", None) == "bfloat16"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["ffn", "--dtype", "bfloat16"], "--dtype bfloat16 given, but the CPU computes in float32"),
        (["weights", "--dtype", "float16"], "--dtype float16 given"),
        (["formats", "--dtype", "float16"], "--dtype float16 given"),
        (["ffn", "--hidden-width", "10", "--nonzeros", "10"], "fewer than the 10 neurons wanted"),
        (["ffn", "--nonzeros", "0"], "0"),
        (["ffn", "--nonzeros", "nan"], "nan"),
        (["ffn", "--float8"], "--float8 given on the CPU, a GPU wanted"),
    ],
)
def test_what_cannot_be_measured_is_refused(arguments, message):
    result = CliRunner().invoke(twell, ["bench", *arguments, "--device", "cpu"])
    assert (result.exit_code, result.stdout) == (2, "")
    assert message in result.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ["ffn", "--tokens", 2, "--width", 4, "--hidden-width", 8, "--nonzeros", 4],
        ["weights", "--tokens", 2, "--width", 4, "--hidden-width", 6, "--block-size", 2,
         "--density", 0.3],
        ["formats", "--rows", 5, "--columns", 6, "--right-columns", 2, "--block-size", 2,
         "--density", 0.4],
    ],
    ids=lambda arguments: arguments[0],
)  # fmt: skip
def test_commands(device, arguments, monkeypatch):
    monkeypatch.setattr("twell_numba.device.choice.choose_device", lambda wanted: (device, None))
    result = CliRunner().invoke(twell, ["bench", *map(str, arguments), "--device", "cuda"])
    assert result.exit_code == 0, result.output
    assert "dense" in result.stdout
    assert "NumPy" not in result.stdout
    assert ("float32" if arguments[0] == "formats" else "bfloat16") in result.stdout


@pytest.mark.parametrize("float8", [False, True], ids=["16_bits", "8_bits"])
def test_command_with_json(device, monkeypatch, float8):
    monkeypatch.setattr("twell_numba.device.choice.choose_device", lambda wanted: (device, None))
    sizes = ["--tokens", "2", "--width", "4", "--hidden-width", "8", "--nonzeros", "4"]
    command = ["bench", "ffn", *sizes, "--device", "cuda", "--dtype", "float16", "--json"]
    result = CliRunner().invoke(twell, command + ["--float8"] * float8)
    assert result.exit_code == 0, result.output
    rows = json.loads(result.stdout)
    many, one = 6 + float8, 3 + float8
    assert [row["shape"]["M"] for row in rows] == [2] * many + [1] * one
    assert [row["layers"] for row in rows] == [1] * many + [bench.ONE_TOKEN_LAYERS] * one
    assert [row["path"] for row in rows].count("twell_float8") == 2 * float8
    assert {(row["device"], row["dtype"]) for row in rows} == {(device, "float16")}
