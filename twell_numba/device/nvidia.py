"""What NVIDIA's driver says about itself and its GPUs.

Its library is asked directly, through ctypes: nothing needs to be installed for the answer, and
where there is no driver, finding that out takes microseconds.
"""

import ctypes
import sys
from dataclasses import dataclass
from typing import Any

OLDEST_CAPABILITY = (7, 5)

NO_DRIVER = "no NVIDIA driver found; on a machine with an NVIDIA GPU, install its driver"
WHERE_TO_LOOK = (
    "check nvidia-smi, CUDA_VISIBLE_DEVICES and whether this container was given the GPU"
)

# CUdevice_attribute
_CAPABILITY_MAJOR, _CAPABILITY_MINOR = 75, 76


@dataclass(frozen=True)
class VisibleGPU:
    """A GPU that this process may use.

    Attributes
    ----------
    number : int
        As the driver counts, from 0: N of ``cuda:N``.
    name : str
    capability : tuple of int
        Its compute capability, (9, 0) for instance.
    memory_bytes : int
    """

    number: int
    name: str
    capability: tuple[int, int]
    memory_bytes: int

    @property
    def capability_text(self) -> str:
        """The compute capability as it is written, ``9.0``."""
        return f"{self.capability[0]}.{self.capability[1]}"

    @property
    def is_new_enough(self) -> bool:
        """Whether kernels of this package run on it."""
        return self.capability >= OLDEST_CAPABILITY


@dataclass(frozen=True)
class Driver:
    """What the driver says.

    Attributes
    ----------
    cuda_version : str or None
        The newest CUDA it supports; None without a driver or a GPU.
    gpus : tuple of VisibleGPU
    problem : str or None
        Why there is no GPU, and what to do.
    """

    cuda_version: str | None
    gpus: tuple[VisibleGPU, ...]
    problem: str | None


def ask_driver() -> Driver:
    """Return what the driver says; never raises."""
    library = load_library("nvcuda.dll", "libcuda.so.1", "libcuda.so")
    if library is None:
        return Driver(None, (), NO_DRIVER)
    code = library.cuInit(0)
    if code != 0:
        reason = f"the NVIDIA driver found no usable GPU (cuInit returned {code}); {WHERE_TO_LOOK}"
        return Driver(None, (), reason)
    version, count = ctypes.c_int(), ctypes.c_int()
    library.cuDriverGetVersion(ctypes.byref(version))
    library.cuDeviceGetCount(ctypes.byref(count))
    gpus = tuple(_gpu(library, number) for number in range(count.value))
    problem = None if gpus else f"the NVIDIA driver offers no GPU; {WHERE_TO_LOOK}"
    cuda_version = f"{version.value // 1000}.{version.value % 1000 // 10}"
    return Driver(cuda_version, gpus, problem)


def driver_version() -> str | None:
    """Return the driver's own version, 580.65.06 for instance; None where it does not say.

    Only its management library knows.
    """
    library = load_library("nvml.dll", "libnvidia-ml.so.1")
    if library is None or library.nvmlInit_v2() != 0:
        return None
    text = ctypes.create_string_buffer(96)
    code = library.nvmlSystemGetDriverVersion(text, len(text))
    library.nvmlShutdown()
    return text.value.decode(errors="replace") if code == 0 else None


def load_library(windows_name: str, *names: str) -> Any:
    """Return a library of the driver's under the first name that it is found by, or None."""
    for name in (windows_name,) if sys.platform == "win32" else names:
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    return None


def _gpu(library: Any, number: int) -> VisibleGPU:
    device = ctypes.c_int()
    library.cuDeviceGet(ctypes.byref(device), number)
    name = ctypes.create_string_buffer(256)
    library.cuDeviceGetName(name, len(name), device)
    major, minor, memory = ctypes.c_int(), ctypes.c_int(), ctypes.c_size_t()
    library.cuDeviceGetAttribute(ctypes.byref(major), _CAPABILITY_MAJOR, device)
    library.cuDeviceGetAttribute(ctypes.byref(minor), _CAPABILITY_MINOR, device)
    library.cuDeviceTotalMem_v2(ctypes.byref(memory), device)
    text = name.value.decode(errors="replace")
    return VisibleGPU(number, text, (major.value, minor.value), memory.value)
