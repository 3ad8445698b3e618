"""What is said where a package, the driver or a GPU is missing."""

import subprocess
import sys

import pytest

from twell_numba.device.gpu import driver, packages
from twell_numba.errors import TwellError


def run(program):
    return subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )


def test_importing_needs_no_package_and_no_driver():
    program = (
        "import sys\n"
        "for name in ('numba_cuda', 'cuda', 'cuda.core', 'cuda.bindings'):\n"
        "    sys.modules[name] = None\n"
        "import twell_numba.device.gpu\n"
    )
    result = run(program)
    assert result.returncode == 0, result.stderr


def test_a_missing_package_names_the_extra():
    program = (
        "import sys\n"
        "sys.modules['numba_cuda'] = None\n"
        "from twell_numba.errors import TwellError\n"
        "try:\n"
        "    import twell_numba.kernels.rms_norm.cuda\n"
        "except TwellError as error:\n"
        "    print(error)\n"
    )
    message = run(program).stdout
    assert "numba-cuda, which is not installed" in message
    assert "pip install 'twell_numba[cuda]'" in message
    assert message.count("\n") == 1


def test_a_package_that_cannot_be_loaded_is_told_so(monkeypatch):
    def fail(_):
        raise ImportError("libnvvm.so: no such\nfile")

    monkeypatch.setattr(packages.importlib, "import_module", fail)
    with pytest.raises(TwellError, match="cannot be loaded: libnvvm.so: no such file; install"):
        packages.import_package("numba_cuda_of_a_test", "numba-cuda")


class NoDriver:
    """Stands for ``cuda.bindings.driver``."""

    def __init__(self, answer):
        self.answer = answer

    def cuInit(self, _):
        if isinstance(self.answer, Exception):
            raise self.answer
        return (self.answer,)

    def cuGetErrorString(self, _):
        return (0, b"no CUDA-capable device is detected")

    def cuDeviceGetCount(self):
        return (0, 0)


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (RuntimeError("libcuda.so.1"), "no NVIDIA driver found; install the driver"),
        (100, r"no usable GPU: 100 \(no CUDA-capable device is detected\); check nvidia-smi"),
        (0, "the NVIDIA driver offers no GPU"),
    ],
)
def test_no_driver_or_no_gpu(monkeypatch, answer, message):
    monkeypatch.setattr(driver, "bindings", lambda: NoDriver(answer))
    with pytest.raises(TwellError, match=message):
        driver.initialize.__wrapped__()


def test_a_failed_call_names_function_and_reason(monkeypatch):
    fake = NoDriver(0)
    fake.cuMemcpyAsync = lambda *_: (700,)
    monkeypatch.setattr(driver, "bindings", lambda: fake)
    with pytest.raises(driver.GPUError, match=r"cuMemcpyAsync failed: 700 \(no CUDA-capable"):
        driver.call("cuMemcpyAsync", 1, 2)
