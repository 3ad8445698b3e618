"""``twell doctor`` and the description of the machine behind it."""

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import create_autospec

import numpy as np
import pytest
from click.testing import CliRunner, Result

import twell_numba
from twell_numba.cli import twell
from twell_numba.device import gpu_packages, machine, nvidia, thread_count
from twell_numba.device.nvidia import Driver, VisibleGPU
from twell_numba.errors import TwellError
from twell_numba.infer import gpu_report


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


GPU = VisibleGPU(0, "New", (9, 0), 2**37)


FITTING = {
    "numpy": "2.4.6",
    "numba-cuda": "0.30.4",
    "cuda-bindings": "13.4.4",
    "cuda-core": "1.2.2",
    "nvidia-nvvm": "13.0.88",
    "nvidia-nvjitlink": "13.0.88",
    "nvmath-python": "1.0.0",
    "nvidia-cublas": "13.0.2.14",
    "nvidia-cudnn-frontend": "1.28.0",
    "nvidia-cudnn-cu13": "9.19.0.56",
}


@pytest.fixture
def pretend(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """``pretend(driver, versions)`` is what the report finds; with a GPU, what is tried works."""

    def set_up(driver: Driver, versions: dict[str, str] | None = None) -> None:
        installed = FITTING if versions is None else versions
        monkeypatch.setattr(gpu_packages, "installed_version", installed.get)
        monkeypatch.setattr(gpu_report, "ask_driver", lambda: driver)
        monkeypatch.setattr(gpu_report, "driver_version", lambda: "580.65.06")
        monkeypatch.setattr(gpu_report, "_kernels", lambda device: True)
        monkeypatch.setattr(gpu_report, "_product_is_right", lambda device, path: True)
        monkeypatch.setattr(gpu_report, "_attention_is_right", lambda device: True)
        monkeypatch.delenv("NUMBA_ENABLE_CUDASIM", raising=False)

    return set_up


WITH_GPU = Driver("13.0", (GPU,), None)
WITHOUT_GPU = Driver(None, (), nvidia.NO_DRIVER)


def gpu_of_report(result: Result) -> dict[str, Any]:
    return json.loads(result.stdout)["gpu"]


def test_without_a_gpu_it_says_what_is_missing_and_succeeds(pretend: Callable[..., None]) -> None:
    pretend(WITHOUT_GPU, {"numpy": "2.5.0"})
    result = invoke()
    assert result.exit_code == 0
    assert "none that can be used" in result.stdout
    assert "GPU: no NVIDIA driver found; on a machine with an NVIDIA GPU, install" in result.stdout
    assert "without them no GPU is used; get them with: pip install 'twell_" in result.stdout
    assert "numpy 2.5.0 is installed" not in result.stdout
    gpu = gpu_of_report(invoke("--json"))
    assert gpu["devices"] == []
    assert gpu["auto"] == "cpu"
    assert gpu["kernels"]["works"] is gpu["products"]["works"] is gpu["attention"]["works"] is None
    assert {package["name"]: package["version"] for package in gpu["packages"]}["numpy"] == "2.5.0"
    assert len(gpu["problems"]) == 2


def test_a_gpu_where_all_works(pretend: Callable[..., None]) -> None:
    pretend(WITH_GPU)
    result = invoke()
    assert result.exit_code == 0
    for part in ("New, compute capability 9.0, 128.0 GiB", "580.65.06, for CUDA up to 13.0",
                 "by cuBLASLt", "by cuDNN", "means cuda:0 here"):  # fmt: skip
        assert part in result.stdout
    assert "GPU: " not in result.stdout
    gpu = gpu_of_report(invoke("--json"))
    assert gpu["problems"] == []
    assert all(package["fits"] for package in gpu["packages"])
    assert (gpu["products"]["path"], gpu["attention"]["path"]) == ("cublas", "cudnn")


def test_packages_that_only_make_it_faster(
    pretend: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend(WITH_GPU)

    def fail(device: str, path: str = "cublas") -> bool:
        if path == "cublas":
            raise TwellError("the library is not installed")
        return True

    monkeypatch.setattr(gpu_report, "_product_is_right", fail)
    monkeypatch.setattr(gpu_report, "_attention_is_right", fail)
    result = invoke()
    assert result.exit_code == 0
    assert "by our own kernel (slower)" in result.stdout
    assert "by our own kernels (slower)" in result.stdout
    assert result.stdout.count("are slower than they could be: the library is not inst") == 2


def test_a_gpu_without_its_packages(pretend: Callable[..., None]) -> None:
    pretend(WITH_GPU, {"numpy": "2.4.6"})
    result = invoke()
    assert result.exit_code == 0
    assert "means cpu here" in result.stdout
    assert "GPU packages" in result.stdout
    assert result.stdout.count("pip install") == 1


def test_versions_that_do_not_fit(pretend: Callable[..., None]) -> None:
    names = [package.name for package in gpu_packages.GPU_PACKAGES]
    pretend(WITH_GPU, dict.fromkeys(names, "9.0") | {"numpy": "2.5.1"})
    result = invoke()
    assert "2.5.1 (<2.5 WANTED)" in result.stdout
    assert "GPU: numpy 2.5.1 is installed, <2.5 wanted (arrays; numba-cuda fails" in result.stdout
    assert "GPU: numba-cuda 9.0 is installed, ==0.30.* wanted" in result.stdout


def test_an_old_gpu(pretend: Callable[..., None]) -> None:
    pretend(Driver("12.0", (VisibleGPU(0, "Old", (6, 1), 2**33),), None))
    result = invoke()
    assert result.exit_code == 0
    assert "compute capability 6.1, 8.0 GiB (TOO OLD)" in result.stdout
    assert "GPU: Computing on the CPU: GPU 0 (Old) has compute capability 6.1" in result.stdout


@pytest.mark.parametrize("answer", ["raises", "is wrong"])
def test_a_gpu_on_which_kernels_fail_is_a_failure(
    answer: str, pretend: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend(WITH_GPU)

    def kernels(device: str) -> bool:
        if answer == "raises":
            raise RuntimeError("no such\n image")
        return False

    monkeypatch.setattr(gpu_report, "_kernels", kernels)
    result = invoke()
    assert result.exit_code == 1
    reason = "RuntimeError: no such image" if answer == "raises" else "the result is wrong"
    assert f"GPU: kernels do not work on cuda:0, so nothing does: {reason}." in result.stdout
    gpu = gpu_of_report(invoke("--json"))
    assert gpu["kernels"]["works"] is False
    assert gpu["products"]["works"] is None


def test_what_is_tried_works(machine_with_gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import twell_numba.device.gpu as package

    monkeypatch.setattr(package, "choose", lambda device: machine_with_gpu.gpu)
    assert gpu_report._try(gpu_report._kernels, "cuda:0") == {"works": True, "problem": None}
    products = gpu_report._products("cuda:0")
    assert products["works"] is True
    if machine_with_gpu.is_real:
        assert products == {"path": gemm_path(), "works": True, "problem": products["problem"]}
        attention = gpu_report._attention("cuda:0")
        assert (attention["path"] == "own") == (attention["problem"] is not None)


@pytest.mark.parametrize("wrong", [None, "y", "dq", "dk", "dv"])
def test_attention_is_compared(
    wrong: str | None, machine_with_gpu: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    import twell_numba.device.gpu as package
    from twell_numba.device.gpu import cudnn
    from twell_numba.kernels.attention import reference

    def write(name: str, array: Any, expected: np.ndarray) -> None:
        assert array.shape == expected.shape
        array.copy_from(((1.1 if name == wrong else 1) * expected).astype(array.dtype))

    def on_host(*arrays: Any) -> list[np.ndarray]:
        return [array.to_numpy().astype(np.float32) for array in arrays]

    def forward(q: Any, k: Any, v: Any, y: Any, log_sum_exp: Any, keys: int) -> str:
        expected, log_sum_exp_expected = reference.causal_attention(*on_host(q, k, v))
        write("y", y, expected)
        write("L", log_sum_exp, log_sum_exp_expected)
        return ""

    def backward(
        dy: Any, q: Any, k: Any, v: Any, y: Any, log_sum_exp: Any, dq: Any, dk: Any, dv: Any
    ) -> str:
        arrays = on_host(dy, q, k, v)
        arrays += reference.causal_attention(*arrays[1:])
        expected = reference.causal_attention_backward(*arrays)
        for name, array, gradient in zip(("dq", "dk", "dv"), (dq, dk, dv), expected, strict=True):
            write(name, array, gradient)
        return ""

    monkeypatch.setattr(cudnn, "forward", create_autospec(cudnn.forward, side_effect=forward))
    monkeypatch.setattr(cudnn, "backward", create_autospec(cudnn.backward, side_effect=backward))
    monkeypatch.setattr(package, "choose", lambda device: machine_with_gpu.gpu)
    report = gpu_report._attention("cuda:0")
    expected = ("cudnn", None) if wrong is None else ("own", "the result is wrong")
    assert (report["path"], report["problem"]) == expected


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_an_obstacle_to_cudnn_is_told(
    direction: str, machine_with_gpu: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    import twell_numba.device.gpu as package
    from twell_numba.device.gpu import cudnn

    problem = "compute capability 7.5 given"
    monkeypatch.setattr(cudnn, "forward", lambda *arguments: "")
    monkeypatch.setattr(cudnn, direction, lambda *arguments: problem)
    monkeypatch.setattr(package, "choose", lambda device: machine_with_gpu.gpu)
    assert gpu_report._attention("cuda:0") == {"path": "own", "works": True, "problem": problem}


def gemm_path() -> str:
    from twell_numba.device.gpu import gemm

    return gemm.default_path()


@pytest.fixture
def machine_with_gpu(machine: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Emulated, cuBLASLt is out of reach, and stands for one that is not installed."""
    if not machine.is_real:
        from twell_numba.device.gpu import gemm

        def refuse(*arguments: Any, **options: Any) -> bool:
            raise TwellError("cuBLASLt cannot be loaded")

        monkeypatch.setattr(gemm.cublas, "product", refuse)
    return machine


@pytest.mark.parametrize("target", ["75", "90a", "100"])
def test_the_kernel_compiles(target: str) -> None:
    pytest.importorskip("numba_cuda", reason="numba-cuda is not installed (extra cuda)")
    from twell_numba.device.gpu import self_test

    code, _ = self_test._relu.compile(("float32*", "float32*", "int"), target)
    assert code.startswith(b"\x7fELF")


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


def test_without_threads_numba_has_nothing_to_report(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NUMBA_NUM_THREADS", "0")
    result = invoke()
    assert (result.exit_code, result.stdout) == (2, "")
    (line,) = result.stderr.splitlines()
    assert "NUMBA_NUM_THREADS='0' given" in line


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
