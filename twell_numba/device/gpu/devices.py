"""Which GPU is used, and what it is.

A thread works with one GPU at a time, the driver's *current* one. :meth:`GPU.make_current` sees to
it before each use, so that threads and several GPUs need no care of the caller.
"""

import functools
import re
import threading
from typing import TYPE_CHECKING, Any

from twell_numba.device.gpu.driver import initialize
from twell_numba.device.gpu.packages import core
from twell_numba.device.nvidia import OLDEST_CAPABILITY
from twell_numba.errors import UsageError

if TYPE_CHECKING:
    from twell_numba.device.gpu.memory import MemoryPool
    from twell_numba.device.gpu.stream import Stream

# What the tests compile every kernel for.
TARGETS = ("75", "80", "86", "89", "90a", "100")

_thread = threading.local()
_gpus: dict[int, "GPU"] = {}
_gpus_lock = threading.Lock()


class GPU:
    """One GPU of this machine.

    Attributes
    ----------
    id : int
        As the driver counts, from 0.
    name : str
    capability : tuple of int
        Its compute capability, (9, 0) for instance.
    target : str
        What its kernels are compiled for: "86", "90a".
    multiprocessors : int
    """

    def __init__(self, device_id: int) -> None:
        self.id = device_id
        self._device: Any = core().Device(device_id)
        self._only_one = initialize() == 1
        self.make_current()
        capability = self._device.compute_capability
        self.capability = (int(capability[0]), int(capability[1]))
        self.name = str(self._device.name)
        if self.capability < OLDEST_CAPABILITY:
            raise UsageError(
                f"GPU {device_id} ({self.name}) of compute capability "
                f"{self.capability[0]}.{self.capability[1]} given, 7.5 or newer wanted; "
                "use --device cpu"
            )
        self.target = target_of(self.capability)
        self.multiprocessors = int(self._device.properties.multiprocessor_count)
        self.shared_memory_per_block = int(
            self._device.properties.max_shared_memory_per_block_optin
        )

    def __repr__(self) -> str:
        return f"GPU({self.id}: {self.name}, sm_{self.target})"

    @property
    def core_device(self) -> Any:
        """The ``cuda.core.Device``."""
        return self._device

    def make_current(self) -> None:
        """Let this thread's calls of the driver go to this GPU."""
        # With several GPUs another library of this process may have switched in between.
        if self._only_one and getattr(_thread, "gpu", None) == self.id:
            return
        self._device.set_current()
        _thread.gpu = self.id

    def synchronize(self) -> None:
        """Wait until all work given to this GPU is done."""
        from twell_numba.device.gpu.driver import call

        self.make_current()
        call("cuCtxSynchronize")

    @functools.cached_property
    def stream(self) -> "Stream":
        """The stream that work goes to unless another is asked for."""
        from twell_numba.device.gpu.stream import Stream

        return Stream(self)

    @functools.cached_property
    def memory(self) -> "MemoryPool":
        """The pool that arrays on this GPU come from."""
        from twell_numba.device.gpu.memory import MemoryPool

        return MemoryPool(self)


def target_of(capability: tuple[int, int]) -> str:
    """Return the name of what kernels for a GPU of this compute capability are compiled for.

    Machine code runs on the capability it is made for and newer ones of the same major number, code
    of names that end in "a" on that one capability alone.
    """
    major, minor = capability
    return f"{major}{minor}a" if capability == (9, 0) else f"{major}{minor}"


def gpu(device_id: int = 0) -> GPU:
    """Return a GPU by its number, the same object for the same number.

    Raises
    ------
    TwellError
        If a package or the driver is missing.
    UsageError
        If there is no GPU of this number, or it is too old.
    """
    found = _gpus.get(device_id)
    if found is not None:
        return found
    count = initialize()
    if not 0 <= device_id < count:
        there = "only GPU 0 is there" if count == 1 else f"GPUs 0 to {count - 1} are there"
        raise UsageError(f"GPU {device_id} given, but {there}")
    with _gpus_lock:
        if device_id not in _gpus:
            _gpus[device_id] = GPU(device_id)
        return _gpus[device_id]


def choose(device: str) -> GPU:
    """Return the GPU that ``cuda`` (the first) or ``cuda:N`` names.

    Raises
    ------
    TwellError, UsageError
        As :func:`gpu`; also if the name is another.
    """
    match = re.fullmatch(r"cuda(?::([0-9]{1,4}))?", device)
    if match is None:
        raise UsageError(f"device {device!r} given, cuda or cuda:N wanted")
    return gpu(int(match[1] or 0))
