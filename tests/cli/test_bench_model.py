"""``twell bench model`` and ``twell bench train``."""

import json

import pytest
from click.testing import CliRunner

from twell_numba.cli import bench_model, twell
from twell_numba.device import energy
from twell_numba.infer import benchmark_model
from twell_numba.train import benchmark_step

SMALL = ["--set", "d_model=16", "--set", "d_ffn=64", "--set", "n_layers=2", "--set", "n_heads=2"]
SMALL += ["--set", "context_length=16", "--set", "batch_size=2"]
COMMON_KEYS = {
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
    "tokens_per_ms",
    "dense_mj_per_token",
    "sparse_mj_per_token",
}


def run(*arguments):
    return CliRunner().invoke(twell, ["bench", *arguments, "--device", "cpu"])


@pytest.mark.parametrize("command", ["model", "train"])
def test_rows(command):
    result = run(command, *SMALL, "--nonzeros", "3", "--json")
    assert result.exit_code == 0, result.output
    rows = json.loads(result.stdout)
    assert [row["path"] for row in rows] == ["dense", "twell", "auto (twell)"]
    for row in rows:
        assert row.keys() >= COMMON_KEYS
        assert row["shape"] == {"M": 32, "D": 16, "F": 64, "L": 2}
        assert row["nonzeros_per_token"] == pytest.approx(3, rel=0.5)
        assert row["max_relative_error"] < 1e-5
        assert row["dense_ms"] == rows[0]["sparse_ms"] > 0
        assert row["dense_mj_per_token"] is row["sparse_mj_per_token"] is None
    assert "mJ/token not measured: it is counted for NVIDIA GPUs only\n" in result.stderr
    assert ("milliseconds_by_part" in rows[0]) == (command == "train")


@pytest.mark.parametrize("command", ["model", "train"])
def test_a_table(command):
    result = run(command, *SMALL)
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert lines[0] == "M = 32, D = 16, F = 64, L = 2, float32, cpu; milliseconds, medians"
    assert [line.split()[3] for line in lines[2:]] == ["dense", "twell", "auto"]


@pytest.mark.parametrize("command", ["model", "train"])
def test_energy(monkeypatch, command):
    """32 tokens take 64 mJ, on the path twell 16."""
    millijoules = {"dense": 64.0, "twell": 16.0, "auto": 16.0}
    monkeypatch.setattr(bench_model, "_energy_counter", lambda device: object())
    monkeypatch.setattr(benchmark_model, "energy_in_turn_on_gpu", lambda *given: millijoules)
    monkeypatch.setattr(
        benchmark_step,
        "energy_of",
        lambda step, *given: millijoules[step.__self__.model.ffn_path],
    )
    result = run(command, *SMALL, "--json")
    assert result.exit_code == 0, result.output
    rows = json.loads(result.stdout)
    assert [row["dense_mj_per_token"] for row in rows] == [2.0, 2.0, 2.0]
    assert [row["sparse_mj_per_token"] for row in rows] == [2.0, 0.5, 0.5]
    table = run(command, *SMALL)
    assert "dense mJ/token  this mJ/token" in table.stdout
    assert "2.000          0.500" in table.stdout


def test_why_no_energy_is_measured(monkeypatch, capsys):
    monkeypatch.setattr(energy, "load_library", lambda *names: None)
    assert bench_model._energy_counter("cuda:1") is None
    assert capsys.readouterr().err == (
        "mJ/token not measured: NVIDIA's management library (NVML) is not installed\n"
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--nonzeros", "32"], "fewer than half of the 64 neurons wanted"),
        (["--nonzeros", "0"], "0"),
        (["--set", "d_model=15"], "d_model=15"),
        (["--preset", "huge"], "huge"),
        (["--rounds", "3"], "20"),
    ],
)
@pytest.mark.parametrize("command", ["model", "train"])
def test_bad_requests_are_one_line(command, arguments, message):
    result = run(command, *SMALL, *arguments)
    assert result.exit_code == 2
    assert message in result.stderr
    assert "Traceback" not in result.output


@pytest.mark.parametrize("command", ["model", "train"])
def test_an_activation_without_a_sparse_path_is_refused(command):
    result = run(command, *SMALL, "--set", "activation=silu")
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.count("\n") == 1
    assert "activation=silu given, one with a sparse path on cpu wanted" in result.stderr


@pytest.mark.parametrize("command", ["model", "train"])
@pytest.mark.parametrize("count", ["nan", "inf", "32"])
def test_a_number_of_neurons_that_cannot_fire_is_refused(command, count):
    result = run(command, *SMALL, "--nonzeros", count)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.count("\n") == 1
    assert f"--nonzeros {count} given, fewer than half of the 64 neurons wanted" in result.stderr


def test_a_dtype_that_the_cpu_does_not_compute_in_is_one_line():
    result = run("model", *SMALL, "--dtype", "bfloat16")
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.count("\n") == 1
