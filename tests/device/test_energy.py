"""The energy counter of a GPU, with libraries that stand for the driver's."""

import pytest

from twell_numba.device import energy
from twell_numba.device.energy import EnergyCounter
from twell_numba.errors import TwellError


class FakeDriver:
    """Two GPUs, of which the second one is the first in NVML's order."""

    def cuInit(self, flags):
        return 0

    def cuDeviceGet(self, device, number):
        device._obj.value = number
        return 0 if number < 2 else 101

    def cuDeviceGetPCIBusId(self, address, size, device):
        address.value = [b"0000:81:00.0", b"0000:18:00.0"][device.value]
        return 0


class FakeManagement:
    """Stands for NVML; ``codes`` are those that functions return where it is not 0."""

    def __init__(self, codes):
        self.codes = codes
        self.nvmlErrorString = lambda code: b"Not Supported" if code == 3 else b"Other"

    def nvmlInit_v2(self):
        return self.codes.get("init", 0)

    def nvmlDeviceGetHandleByPciBusId_v2(self, address, device):
        device._obj.value = {b"0000:18:00.0": 1000, b"0000:81:00.0": 2000}[address]
        return 0

    def nvmlDeviceGetTotalEnergyConsumption(self, device, total):
        total._obj.value = 2**40 + device.value
        return self.codes.get("energy", 0)


@pytest.fixture
def libraries(monkeypatch):
    """``libraries(NVML, driver)`` is what can be loaded."""

    def offer(management, driver=None):
        def load(windows_name, *names):
            return management if "nvml" in windows_name else driver

        monkeypatch.setattr(energy, "load_library", load)

    return offer


@pytest.mark.parametrize(("number", "device"), [(0, 2000), (1, 1000)])
def test_the_gpu_of_a_number_is_asked(libraries, number, device):
    libraries(FakeManagement({}), FakeDriver())
    assert EnergyCounter(number).millijoules() == 2**40 + device


@pytest.mark.parametrize(
    ("management", "driver", "message"),
    [
        (None, FakeDriver(), "(NVML) is not installed"),
        (FakeManagement({}), None, "no NVIDIA driver found"),
        (FakeManagement({"init": 9}), FakeDriver(), "nvmlInit_v2 of NVIDIA's management library"),
        (FakeManagement({"energy": 3}), FakeDriver(), "(NVML): Not Supported"),
    ],
)
def test_a_missing_counter_has_its_reason(libraries, management, driver, message):
    libraries(management, driver)
    with pytest.raises(TwellError) as caught:
        EnergyCounter(0)
    assert message in str(caught.value)


def test_a_gpu_that_is_not_there(libraries):
    libraries(FakeManagement({}), FakeDriver())
    with pytest.raises(TwellError):
        EnergyCounter(2)


@pytest.mark.gpu
def test_a_real_gpu_takes_energy(real_gpu):
    """Where it is counted."""
    try:
        counter = EnergyCounter(real_gpu.id)
    except TwellError as error:
        pytest.skip(str(error))
    assert 0 < counter.millijoules() <= counter.millijoules()
