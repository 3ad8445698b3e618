"""The FFN benchmark: what it reports is there, is right, and comes from the paths it names."""

import json

import numpy as np
import pytest
from click.testing import CliRunner

from twell_numba.cli import twell
from twell_numba.infer import benchmark, timing
from twell_numba.infer.benchmark import benchmark_ffn, benchmark_one_token
from twell_numba.infer.benchmark_weights import benchmark_weights, break_even_density
from twell_numba.infer.ffn_problem import FFNProblem, FFNShape, NumPyFFN, layer_run

KEYS = {
    "operation",
    "path",
    "device",
    "dtype",
    "shape",
    "nonzeros_per_token",
    "dense_ms",
    "sparse_ms",
    "speedup",
    "max_relative_error",
}
KEYS_OF_ACTIVATIONS = KEYS | {"layers", "dense_peak_bytes", "sparse_peak_bytes"}


@pytest.fixture(autouse=True)
def no_pause(monkeypatch):
    monkeypatch.setattr(timing, "PAUSE_SECONDS", 0.0)


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize(("nonzeros", "auto"), [(2, "twell"), (100, "dense")])
def test_rows(backward, nonzeros, auto):
    problem = FFNProblem(FFNShape(64, 16, 200, nonzeros), seed=0)
    rows = benchmark_ffn(problem, rounds=2, backward=backward)
    assert [row["path"] for row in rows] == [f"auto ({auto})", "dense", "twell"]
    for row in rows:
        assert row.keys() == KEYS_OF_ACTIVATIONS
        assert (row["layers"], row["sparse_peak_bytes"]) == (1, None)
        assert row["operation"] == ("forward+backward" if backward else "forward")
        assert row["shape"] == {"M": 64, "D": 16, "F": 200}
        assert row["nonzeros_per_token"] == pytest.approx(nonzeros, rel=0.3)
        assert row["speedup"] == row["dense_ms"] / row["sparse_ms"] > 0
        assert 0 < row["max_relative_error"] < 1e-5


@pytest.mark.parametrize("backward", [False, True])
def test_layers_are_used_in_turn(monkeypatch, backward):
    """Each with weights of its own; the time is that of one."""
    used = []

    def take_no_time(device, calls, rounds):
        for call in calls.values():
            call()
        return dict.fromkeys(calls, 6.0)

    def watched(layer, problem, backward):
        run = layer_run(layer, problem, backward)
        return lambda: (used.append(layer.gate.value.ctypes.data), run())

    monkeypatch.setattr(benchmark, "time_where_it_runs", take_no_time)
    monkeypatch.setattr(benchmark, "layer_run", watched)
    problem = FFNProblem(FFNShape(1, 16, 40, 4), 0)
    rows = benchmark_ffn(problem, 1, backward, layers=3)
    assert len(used) == 3 * 3
    assert len(set(used)) == 3
    for row in rows:
        assert (row["layers"], row["sparse_ms"], row["dense_ms"]) == (3, 2.0, 2.0)
        assert row["max_relative_error"] < 1e-5


def test_compared_with_the_whole_layer(monkeypatch):
    compared = []
    monkeypatch.setattr(
        benchmark, "NumPyFFN", lambda problem: compared.append(problem) or NumPyFFN(problem)
    )
    whole = FFNProblem(FFNShape(4, 16, 40, 4), 0)
    part = whole.with_neurons(np.arange(30))
    rows = benchmark_ffn(part, 1, False, whole=whole)
    assert compared == [whole]
    assert all(row["shape"]["F"] == 30 for row in rows)


def test_one_token():
    rows = benchmark_one_token(FFNProblem(FFNShape(1, 16, 200, 4), 0), rounds=1)
    assert [row["operation"] for row in rows] == 3 * ["forward"] + 3 * ["forward after BLAS"]
    assert all(row["shape"]["M"] == 1 for row in rows)
    assert all(row["max_relative_error"] < 1e-5 for row in rows)


def test_no_neuron_firing_is_no_error():
    rows = benchmark_ffn(FFNProblem(FFNShape(1, 16, 40, 0.01), 0), rounds=1, backward=False)
    assert rows[0]["nonzeros_per_token"] == 0
    assert all(row["max_relative_error"] == 0 for row in rows)


@pytest.mark.parametrize("density", ["nan", "0", "1", "-0.1"])
def test_densities_that_are_refused(density):
    result = CliRunner().invoke(twell, ["bench", "ffn", "--density", density])
    assert result.exit_code == 2
    assert density in result.stderr


@pytest.mark.parametrize("as_json", [True, False])
def test_command(as_json):
    sizes = ["--tokens", "8", "--width", "8", "--hidden-width", "40", "--density", "0.1"]
    result = CliRunner().invoke(twell, ["bench", "ffn", *sizes, *(["--json"] if as_json else [])])
    assert result.exit_code == 0, result.output
    if as_json:
        assert len(json.loads(result.stdout)) == 12
    else:
        assert "speed-up" in result.stdout
        assert result.stdout.count("auto") == 4


def test_command_for_few_tokens():
    sizes = ["--tokens", "1", "--width", "8", "--hidden-width", "40", "--density", "0.1"]
    arguments = ["bench", "ffn", *sizes, "--layers", "2", "--device", "cpu", "--json"]
    result = CliRunner().invoke(twell, arguments)
    assert result.exit_code == 0, result.output
    rows = json.loads(result.stdout)
    assert [row["operation"] for row in rows[::3]] == ["forward", "forward+backward"]
    assert {(row["shape"]["M"], row["layers"]) for row in rows} == {(1, 2)}


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("tokens", [1, 64])
def test_rows_of_sparse_weights(backward, tokens):
    shape = FFNShape(tokens, 30, 200, 100)
    operation = "forward+backward" if backward else "forward"
    (rows,) = benchmark_weights(FFNProblem(shape, 0), 0.2, 8, rounds=1, operations=[operation])
    assert [row["path"] for row in rows] == ["csr", "block_ell"]
    for row in rows:
        assert row.keys() == KEYS - {"nonzeros_per_token"} | {"density"}
        assert row["operation"] == ("forward+backward" if backward else "forward")
        assert row["shape"] == {"M": tokens, "D": 30, "F": 200}
        assert row["density"] == pytest.approx(0.2, rel=0.3)
        assert row["speedup"] == row["dense_ms"] / row["sparse_ms"] > 0
        assert 0 < row["max_relative_error"] < 1e-5


def test_break_even_density():
    def rows(*points):
        return [{"density": density, "speedup": speedup} for density, speedup in points]

    assert break_even_density(rows((0.4, 0.5), (0.1, 2.0))) == pytest.approx(0.2)
    assert break_even_density(rows((0.1, 2.0), (0.4, 1.5))) is None
    assert break_even_density(rows((0.1, 0.9), (0.4, 0.5))) is None


@pytest.mark.parametrize("as_json", [True, False])
def test_command_for_sparse_weights(as_json):
    sizes = ["--tokens", "8", "--width", "8", "--hidden-width", "40", "--block-size", "8"]
    arguments = ["bench", "weights", *sizes, "--density", "0.1", "--density", "0.5"]
    result = CliRunner().invoke(twell, [*arguments, *(["--json"] if as_json else [])])
    assert result.exit_code == 0, result.output
    if as_json:
        assert len(json.loads(result.stdout)) == 12
    else:
        assert "faster than dense" in result.stdout
        assert result.stdout.count("block_ell") == 9


def test_blocks_larger_than_the_weights_are_refused():
    arguments = ["bench", "weights", "--width", "8", "--block-size", "9"]
    result = CliRunner().invoke(twell, arguments)
    assert result.exit_code == 2
    assert "--block-size 9 given, at most 8 wanted" in result.stderr
