"""``twell doctor`` and the description of the machine behind it."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from click.testing import CliRunner, Result

import twell_numba
from twell_numba.cli import twell
from twell_numba.device import machine, thread_count


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(twell, ["doctor", *arguments], prog_name="twell")


def test_the_report_as_json_names_what_is_used() -> None:
    result = invoke("--json")
    assert result.exit_code == 0
    report = json.loads(result.stdout)
    assert report["twell_numba"] == twell_numba.__version__
    assert None not in report["packages"].values()
    assert report["cpu"]["threads"] == thread_count()
    assert report["kernels"]["works"] is True
    assert report["blas"], "NumPy's BLAS is not seen"


def test_the_report_as_text_shows_the_same() -> None:
    result = invoke()
    assert result.exit_code == 0
    for part in ("numba", "BLAS", "compiled kernels", "kernel cache", "GPU"):
        assert part in result.stdout


def test_a_kernel_that_does_not_work_fails_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> None:
        raise RuntimeError("cannot cache function:\n no locator available")

    monkeypatch.setattr(machine, "_self_test_kernel", refuse)
    result = invoke()
    assert result.exit_code == 1
    assert "Kernels: RuntimeError: cannot cache function: no locator available." in result.stdout


def test_a_kernel_with_a_wrong_result_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_self_test_kernel", lambda: lambda x: -1.0)
    check = machine.check_compilation()
    assert check["works"] is False
    assert "wrong sum" in check["problem"]


def test_a_cache_that_cannot_be_written_is_found(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    in_the_way = tmp_path / "file"
    in_the_way.touch()

    class Kernel:
        stats = SimpleNamespace(cache_path=str(in_the_way / "cache"))

        def __call__(self, x: object) -> float:
            return 36.0

    monkeypatch.setattr(machine, "_self_test_kernel", Kernel)
    check = machine.check_compilation()
    assert check["works"] is True
    assert check["cache_writable"] is False
    assert "NUMBA_CACHE_DIR" in check["problem"]


def test_no_gpu_driver_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_load_cuda_driver", lambda: None)
    gpu = machine.describe_gpu()
    assert gpu["devices"] == []
    assert "install its driver" in gpu["problem"]


def test_a_driver_without_a_gpu_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = SimpleNamespace(cuInit=lambda flags: 100)
    monkeypatch.setattr(machine, "_load_cuda_driver", lambda: driver)
    assert "cuInit returned 100" in machine.describe_gpu()["problem"]


def test_settings_that_change_the_speed_are_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENBLAS_CORETYPE", "Haswell")
    monkeypatch.setenv("TWELL_SOMETHING", "1")
    settings = machine.settings_in_environment()
    assert settings["OPENBLAS_CORETYPE"] == "Haswell"
    assert settings["TWELL_SOMETHING"] == "1"
    assert "PATH" not in settings


def test_a_wrong_number_of_threads_is_a_problem_in_the_report(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("twell_numba.device.threads._thread_count", None)
    monkeypatch.setenv("TWELL_NUM_THREADS", "many")
    result = invoke()
    assert result.exit_code == 1
    assert "threads" in result.stdout
    assert "NOT usable" in result.stdout
    assert "Threads: TWELL_NUM_THREADS='many' given" in result.stdout
    assert result.stderr == ""
    report = json.loads(invoke("--json").stdout)
    assert report["cpu"]["threads"] is None
    assert "TWELL_NUM_THREADS='many'" in report["cpu"]["problem"]


def test_no_compilation_is_a_problem_in_the_report(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("numba.core.config.DISABLE_JIT", 1)
    result = invoke()
    assert result.exit_code == 1
    assert "DO NOT WORK" in result.stdout
    assert "Kernels: NUMBA_DISABLE_JIT is set" in result.stdout
    assert "unset it" in result.stdout
    assert "plain Python" not in result.stdout


def test_no_folder_for_the_cache_says_what_follows(monkeypatch: pytest.MonkeyPatch) -> None:
    class Kernel:
        stats = SimpleNamespace(cache_path=None)

        def __call__(self, x: object) -> float:
            return 36.0

    monkeypatch.setattr(machine, "_self_test_kernel", Kernel)
    result = invoke()
    assert result.exit_code == 0
    assert "None" not in result.stdout.split("GPU")[0]
    assert "compiled anew in each process" in result.stdout
    assert "set NUMBA_CACHE_DIR" in result.stdout
