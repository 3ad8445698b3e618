"""Which device computes: what ``--device auto|cpu|cuda[:N]`` means on this machine.

Cheap where there is no GPU: then nothing but the driver's library is looked for.
"""

import os
import re
from typing import NamedTuple

from twell_numba.device.gpu_packages import EXTRA, missing_packages
from twell_numba.device.nvidia import Driver, VisibleGPU, ask_driver
from twell_numba.errors import TwellError, UsageError

_WANTED = "auto, cpu, cuda or cuda:N wanted"
_INSTEAD = "or use --device cpu"


class DeviceChoice(NamedTuple):
    """A device, and what its user should know of the choice.

    Attributes
    ----------
    device : str
        ``cpu`` or ``cuda:N``.
    note : str or None
        One line, where ``auto`` took a GPU or left one idle.
    """

    device: str
    note: str | None = None


def is_device_name(text: str) -> bool:
    """Return whether this is ``auto``, ``cpu``, ``cuda`` or ``cuda:N``."""
    return re.fullmatch(r"auto|cpu|cuda(:[0-9]{1,4})?", text) is not None


def choose_device(wanted: str) -> DeviceChoice:
    """Return the device that a name stands for here.

    ``auto`` is the first GPU that can be used, otherwise the CPU. It is not opened: that takes
    time, which whoever computes spends once.

    Parameters
    ----------
    wanted : str
        ``auto``, ``cpu``, ``cuda`` (the first GPU) or ``cuda:N``.

    Raises
    ------
    UsageError
        If the name is another, or there is no GPU of this number, or it is too old.
    TwellError
        If a GPU is asked for and the driver or packages are missing.
    """
    if not is_device_name(wanted):
        raise UsageError(f"device {wanted!r} given, {_WANTED}")
    if wanted == "cpu":
        return DeviceChoice("cpu")
    driver = ask_driver()
    if wanted == "auto":
        return best_device(driver)
    _require_gpu(wanted, driver)
    return DeviceChoice(f"cuda:{_number(wanted)}")


def best_device(driver: Driver) -> DeviceChoice:
    """Return what ``auto`` stands for, given what the driver says."""
    if not driver.gpus:
        return DeviceChoice("cpu")
    usable = [gpu for gpu in driver.gpus if gpu.is_new_enough]
    if not usable:
        return DeviceChoice("cpu", f"Computing on the CPU: {_describe_old(driver.gpus[0])}")
    gpu = usable[0]
    reason = _missing_software()
    if reason is not None:
        return DeviceChoice("cpu", f"Computing on the CPU, not on the {gpu.name}: {reason}")
    note = f"Computing on GPU {gpu.number}, {gpu.name} (--device cpu for the CPU)"
    return DeviceChoice(f"cuda:{gpu.number}", note)


def _require_gpu(wanted: str, driver: Driver) -> None:
    if driver.problem is not None:
        raise TwellError(f"--device {wanted} given, but {driver.problem}, {_INSTEAD}")
    number = _number(wanted)
    if number >= len(driver.gpus):
        last = len(driver.gpus) - 1
        there = "only GPU 0 is there" if last == 0 else f"GPUs 0 to {last} are there"
        raise UsageError(f"--device {wanted} given, but {there}; use one of them, {_INSTEAD}")
    gpu = driver.gpus[number]
    if not gpu.is_new_enough:
        raise UsageError(f"--device {wanted} given, but {_describe_old(gpu)}; use --device cpu")
    reason = _missing_software()
    if reason is not None:
        raise TwellError(f"--device {wanted} given, but {reason}, {_INSTEAD}")


def _missing_software() -> str | None:
    """Return what keeps every GPU from being used, and what to do."""
    if os.environ.get("NUMBA_ENABLE_CUDASIM", "0") not in ("", "0"):
        return "NUMBA_ENABLE_CUDASIM is set, with which no kernel is compiled; unset it"
    missing = missing_packages()
    if not missing:
        return None
    are = "is" if len(missing) == 1 else "are"
    return f"{', '.join(missing)} {are} not installed; install what a GPU needs with: {EXTRA}"


def _describe_old(gpu: VisibleGPU) -> str:
    return (
        f"GPU {gpu.number} ({gpu.name}) has compute capability {gpu.capability_text}, "
        "7.5 or newer wanted"
    )


def _number(device: str) -> int:
    return int(device.partition(":")[2] or 0)
