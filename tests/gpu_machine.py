"""What tests of the GPU share: a GPU (emulated, or real with ``-m gpu``), and comparisons.

With ``TWELL_TEST_SANITIZER=1`` in the environment tests fit NVIDIA's ``compute-sanitizer``, which
makes kernels many times slower and sees where each allocation ends: small shapes only, allocations
that are not rounded up, and dense products and attention by the kernels of this package.
"""

import importlib.util
import os
from pathlib import Path
from types import ModuleType
from typing import Any

import ml_dtypes
import numpy as np
import pytest

# dtype, and the relative error that is allowed (norm-wise, against float64)
FLOATS = [
    pytest.param((np.dtype(np.float32), 1e-5), id="float32"),
    pytest.param((np.dtype(ml_dtypes.bfloat16), 5e-3), id="bfloat16"),
    pytest.param((np.dtype(np.float16), 1e-3), id="float16"),
    pytest.param((np.dtype(np.float64), 1e-13), id="float64"),
]
MACHINES = ["emulated", pytest.param("real", marks=pytest.mark.gpu)]
IS_SANITIZED = os.environ.get("TWELL_TEST_SANITIZER", "0") not in ("", "0")


class Machine:
    """Where a test's arrays are."""

    def __init__(self, gpu: Any, *, is_real: bool) -> None:
        self.gpu = gpu
        self.is_real = is_real

    def upload(self, array: np.ndarray) -> Any:
        from twell_numba.device.gpu import from_numpy

        return from_numpy(array, self.gpu.stream)

    def shapes(self, small: list[Any], large: list[Any]) -> list[Any]:
        """Return the shapes to try: the emulator is about a million times slower than a GPU."""
        return small + large if self.is_real and not IS_SANITIZED else small

    def share(self, cases: list[Any], dtype: np.dtype) -> list[Any]:
        """Return those of many cases that fall to a dtype of ``FLOATS``, or none if emulated.

        The dtypes together try all cases: their references take most of the time.
        """
        dtypes = [param.values[0][0] for param in FLOATS]
        return cases[dtypes.index(dtype) :: len(dtypes)] if self.is_real else []


def machine(kind: str, monkeypatch: pytest.MonkeyPatch) -> Machine:
    """Return an emulated or a real GPU; skip the test where it cannot be had."""
    pytest.importorskip("numba_cuda", reason="numba-cuda is not installed (extra cuda)")
    if kind == "real":
        from twell_numba.device.gpu import cudnn, gemm, gpu, memory
        from twell_numba.errors import TwellError

        if IS_SANITIZED:
            monkeypatch.setattr(memory, "GRANULE", 1)
            monkeypatch.setattr(gemm, "default_path", lambda: "tiled")
            monkeypatch.setattr(cudnn, "OLDEST_CAPABILITY", (99, 0))
        try:
            return Machine(gpu(), is_real=True)
        except TwellError as error:
            pytest.skip(str(error))
    emulator = load_emulator()
    emulated = emulator.EmulatedGPU()
    emulator.install(monkeypatch, emulated)
    return Machine(emulated, is_real=False)


def hopper_machine(kind: str, monkeypatch: pytest.MonkeyPatch) -> Machine:
    """Return an emulated or a real Hopper GPU; skip the test where it cannot be had."""
    if kind == "real":
        real = machine(kind, monkeypatch)
        if real.gpu.capability != (9, 0):
            pytest.skip(f"{real.gpu.name} is no Hopper GPU")
        return real
    pytest.importorskip("numba_cuda", reason="numba-cuda is not installed (extra cuda)")
    return Machine(load_emulator("hopper_emulator").install(monkeypatch), is_real=False)


def load_emulator(name: str = "gpu_emulator") -> ModuleType:
    """Return tests/gpu_emulator.py, or another: the test folders are no packages."""
    path = Path(__file__).with_name(f"{name}.py")
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def relative_error(actual: Any, expected: np.ndarray, terms: np.ndarray | None = None) -> float:
    """Return the norm of the difference divided by that of what is expected.

    Where differences of much larger numbers are expected, divided by the norm of those ``terms``.
    """
    actual = actual.to_numpy() if hasattr(actual, "to_numpy") else actual
    assert actual.shape == expected.shape
    difference = np.asarray(actual, np.float64) - np.asarray(expected, np.float64)
    norm = float(np.linalg.norm(np.asarray(expected if terms is None else terms, np.float64)))
    return float(np.linalg.norm(difference)) / (norm or 1.0)


def rounded(array: np.ndarray, dtype: np.dtype) -> tuple[np.ndarray, np.ndarray]:
    """Return an array in a dtype, and the same numbers in float64."""
    stored = array.astype(dtype)
    return stored, stored.astype(np.float64)
