"""How much energy a GPU has taken, as NVIDIA's management library (NVML) counts it.

Asked through ctypes, as in :mod:`twell_numba.device.nvidia`: it comes with the driver.
"""

import ctypes
from typing import Any

from twell_numba.device.nvidia import NO_DRIVER, load_library
from twell_numba.errors import TwellError


class EnergyCounter:
    """The energy counter of one GPU: of all of it, whoever uses it.

    Parameters
    ----------
    number : int
        N of ``cuda:N``, as the driver counts GPUs.

    Raises
    ------
    TwellError
        If the energy of this GPU is not counted, or not for this process.
    """

    def __init__(self, number: int) -> None:
        library = load_library("nvml.dll", "libnvidia-ml.so.1")
        if library is None:
            raise TwellError("NVIDIA's management library (NVML) is not installed")
        library.nvmlErrorString.restype = ctypes.c_char_p
        self._library = library
        self._call("nvmlInit_v2")
        self._device = ctypes.c_void_p()
        address = _pci_address(number)
        self._call("nvmlDeviceGetHandleByPciBusId_v2", address, ctypes.byref(self._device))
        self.millijoules()

    def millijoules(self) -> int:
        """Return what the GPU has taken since its driver was loaded.

        The number changes every 20 to 100 ms: differences are those of seconds of work.
        """
        total = ctypes.c_ulonglong()
        self._call("nvmlDeviceGetTotalEnergyConsumption", self._device, ctypes.byref(total))
        return total.value

    def _call(self, function: str, *arguments: Any) -> None:
        code = getattr(self._library, function)(*arguments)
        if code != 0:
            reason = self._library.nvmlErrorString(code).decode(errors="replace")
            raise TwellError(f"{function} of NVIDIA's management library (NVML): {reason}")


def _pci_address(number: int) -> bytes:
    """Return where a GPU is: NVML counts GPUs in another order, and those of others too."""
    driver = load_library("nvcuda.dll", "libcuda.so.1", "libcuda.so")
    device, address = ctypes.c_int(), ctypes.create_string_buffer(32)
    if (
        driver is None
        or driver.cuInit(0) != 0
        or driver.cuDeviceGet(ctypes.byref(device), number) != 0
        or driver.cuDeviceGetPCIBusId(address, len(address), device) != 0
    ):
        raise TwellError(NO_DRIVER)
    return address.value
