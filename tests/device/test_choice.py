"""What ``--device`` means on a machine, for every kind of thing that may be missing."""

import ctypes
import subprocess
import sys
from configparser import ConfigParser
from pathlib import Path
from types import SimpleNamespace

import pytest

from twell_numba.device import choice, gpu_packages, nvidia
from twell_numba.device.choice import choose_device
from twell_numba.device.gpu_packages import GPU_PACKAGES, version_fits
from twell_numba.device.nvidia import Driver, VisibleGPU, ask_driver, driver_version
from twell_numba.errors import TwellError, UsageError

OLD = VisibleGPU(0, "Old", (6, 1), 2**33)
NEW = VisibleGPU(1, "New", (9, 0), 2**37)


@pytest.fixture
def machine(monkeypatch):
    """``machine(gpus, missing)`` stands for another machine; GPUs are told by their names."""

    def pretend(gpus=(), missing=(), problem=None):
        problem = problem or (None if gpus else nvidia.NO_DRIVER)
        driver = Driver("13.0" if gpus else None, tuple(gpus), problem)
        monkeypatch.setattr(choice, "ask_driver", lambda: driver)
        monkeypatch.setattr(choice, "missing_packages", lambda: list(missing))
        monkeypatch.delenv("NUMBA_ENABLE_CUDASIM", raising=False)

    return pretend


def test_auto_takes_the_first_gpu_that_can_be_used(machine):
    machine([OLD, NEW])
    device, note = choose_device("auto")
    assert device == "cuda:1"
    assert "Computing on GPU 1, New" in note
    assert "--device cpu" in note
    machine([NEW])
    assert choose_device("cuda").device == "cuda:0"


@pytest.mark.parametrize("wanted", ["auto", "cpu"])
def test_without_a_gpu_the_cpu_is_taken_in_silence(machine, wanted):
    machine()
    assert choose_device(wanted) == ("cpu", None)
    machine(problem="the driver found no usable GPU")
    assert choose_device(wanted) == ("cpu", None)


def test_the_cpu_is_taken_without_asking_the_driver(monkeypatch):
    monkeypatch.setattr(choice, "ask_driver", None)
    assert choose_device("cpu") == ("cpu", None)


def test_auto_says_why_a_gpu_is_left_idle(machine, monkeypatch):
    machine([NEW], missing=["numba-cuda", "cuda-core"])
    device, note = choose_device("auto")
    assert device == "cpu"
    assert "not on the New: numba-cuda, cuda-core are not installed" in note
    assert "pip install 'twell_numba[cuda]'" in note
    machine([OLD])
    device, note = choose_device("auto")
    assert device == "cpu"
    assert "compute capability 6.1, 7.5 or newer wanted" in note
    machine([NEW])
    monkeypatch.setenv("NUMBA_ENABLE_CUDASIM", "1")
    device, note = choose_device("auto")
    assert device == "cpu"
    assert "NUMBA_ENABLE_CUDASIM is set" in note


@pytest.mark.parametrize(
    ("there", "wanted", "message"),
    [
        ({}, "cuda", "--device cuda given, but no NVIDIA driver found; on a machine with"),
        ({"problem": "no GPU is there"}, "cuda:0", "--device cuda:0 given, but no GPU is there"),
        ({"gpus": [NEW], "missing": ["numba-cuda"]}, "cuda:0",
         "numba-cuda is not installed; install what a GPU needs with: pip install 'twell_numba"),
        ({"gpus": [NEW]}, "cuda:1", "--device cuda:1 given, but only GPU 0 is there"),
        ({"gpus": [NEW, NEW]}, "cuda:7", "--device cuda:7 given, but GPUs 0 to 1 are there"),
        ({"gpus": [OLD]}, "cuda", "compute capability 6.1, 7.5 or newer wanted"),
        ({}, "gpu", "device 'gpu' given, auto, cpu, cuda or cuda:N wanted"),
        ({}, "cuda:", "device 'cuda:' given"),
    ],
)  # fmt: skip
def test_what_is_missing_for_a_gpu_is_named(machine, there, wanted, message):
    machine(**there)
    with pytest.raises(TwellError) as caught:
        choose_device(wanted)
    assert message in str(caught.value)
    if wanted.startswith("cuda:0"):
        assert "or use --device cpu" in str(caught.value)


class FakeDriver:
    """Stands for the driver's library."""

    def __init__(self, gpus, code=0):
        self.gpus, self.code = gpus, code

    def cuInit(self, flags):
        return self.code

    def cuDriverGetVersion(self, version):
        version._obj.value = 13010

    def cuDeviceGetCount(self, count):
        count._obj.value = len(self.gpus)

    def cuDeviceGet(self, device, number):
        device._obj.value = 100 + number

    def cuDeviceGetName(self, name, size, device):
        name.value = self.gpus[device.value - 100].name.encode()

    def cuDeviceGetAttribute(self, value, attribute, device):
        capability = self.gpus[device.value - 100].capability
        value._obj.value = capability[{75: 0, 76: 1}[attribute]]

    def cuDeviceTotalMem_v2(self, memory, device):
        memory._obj.value = self.gpus[device.value - 100].memory_bytes


class FakeManagement:
    """Stands for the driver's management library."""

    def nvmlInit_v2(self):
        return 0

    def nvmlSystemGetDriverVersion(self, text, size):
        text.value = b"580.65.06"
        return 0

    def nvmlShutdown(self):
        return 0


@pytest.fixture
def libraries(monkeypatch):
    """``libraries(driver)`` is what can be loaded."""

    def offer(driver):
        def load(name):
            if "ml" in name:
                return FakeManagement()
            if driver is None:
                raise OSError(f"{name}: not there")
            return driver

        monkeypatch.setattr(nvidia, "ctypes", SimpleNamespace(**vars(ctypes) | {"CDLL": load}))

    return offer


def test_the_driver_is_asked(libraries):
    libraries(FakeDriver([OLD, NEW]))
    assert ask_driver() == Driver("13.1", (OLD, NEW), None)
    assert driver_version() == "580.65.06"
    libraries(FakeDriver([], code=100))
    assert "cuInit returned 100); check nvidia-smi" in ask_driver().problem
    libraries(FakeDriver([]))
    assert "offers no GPU; check nvidia-smi" in ask_driver().problem
    libraries(None)
    assert ask_driver() == Driver(None, (), nvidia.NO_DRIVER)


def test_choosing_imports_no_package_of_the_gpu():
    program = (
        "import sys\n"
        "from twell_numba.device.choice import choose_device\n"
        "choose_device('auto')\n"
        "print({'numba', 'numba_cuda', 'cuda', 'nvmath', 'cudnn'} & sys.modules.keys())\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert result.stdout == "set()\n"


@pytest.mark.parametrize(
    ("version", "wanted", "fits"),
    [
        ("0.30.4", "==0.30.*", True),
        ("0.31.0", "==0.30.*", False),
        ("0.3", "==0.30.*", False),
        ("13.4.4", "==13.*", True),
        ("2.4.6", "<2.5", True),
        ("2.5", "<2.5", False),
        ("2.5.0rc1", "<2.5", False),
        ("1.2.2", ">=1.0,<2", True),
        ("2.0.0", ">=1.0,<2", False),
        ("0.9", ">=1.0,<2", False),
        ("1", ">=1.0,<2", True),
        ("1.0.post1", ">=1.0", True),
        ("anything", "", True),
    ],
)
def test_versions(version, wanted, fits):
    assert version_fits(version, wanted) is fits


def test_only_known_clauses_are_read():
    with pytest.raises(ValueError, match="version clause '~=1.0' given"):
        version_fits("1.0", "~=1.0")


def test_packages_and_versions_are_those_of_the_extra():
    config = ConfigParser(interpolation=None)
    config.read(Path(__file__).resolve().parents[2] / "setup.cfg")
    extras = config["options.extras_require"]
    wanted = {}
    for line in f"{extras['cuda-compile']}\n{extras['cuda']}".splitlines():
        requirement = line.strip()
        name = requirement.partition("[")[0]
        name = name[: min((name.find(sign) for sign in "=<>" if sign in name), default=None)]
        if name:
            wanted[name] = requirement[len(name) :].rpartition("]")[2]
    described = {package.name: package.wanted for package in GPU_PACKAGES}
    brought_by_others = {"cuda-bindings", "nvidia-nvvm"}
    # packages that only say which others are wanted
    for meta, versions in (("twell_numba", ""), ("cuda-toolkit", "==13.0.*"),
                           ("cuda-python", described["cuda-bindings"])):  # fmt: skip
        assert wanted.pop(meta) == versions
    assert {name: described[name] for name in described.keys() - brought_by_others} == wanted


def test_missing_packages_are_the_required_ones(monkeypatch):
    there = {"numpy": "2.4.6", "cuda-core": "1.0"}
    monkeypatch.setattr(gpu_packages, "installed_version", there.get)
    missing = gpu_packages.missing_packages()
    assert "numba-cuda" in missing
    assert "nvmath-python" not in missing
    assert not there.keys() & set(missing)


def test_a_number_out_of_range_is_wrong_use(machine):
    machine([NEW])
    with pytest.raises(UsageError):
        choose_device("cuda:1")
