"""Fixtures that all tests share."""

import importlib.util
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest


@pytest.fixture(autouse=True, scope="session")
def signals_are_not_ignored() -> None:
    """As they are under ``nohup``, and in the background jobs of a shell script."""
    for name in ("SIGINT", "SIGTERM", "SIGHUP"):
        number = getattr(signal, name, None)
        if number is not None and signal.getsignal(number) is signal.SIG_IGN:
            by_default = signal.default_int_handler if name == "SIGINT" else signal.SIG_DFL
            signal.signal(number, by_default)


@pytest.fixture
def rng() -> np.random.Generator:
    """Random numbers, the same in every run and for every test."""
    return np.random.default_rng(20260323)


@pytest.fixture(scope="session")
def away_from_kinks() -> Callable[..., None]:
    """``away_from_kinks(rng, x, weights)`` redraws rows of x until no x W^T is close to 0.

    There a ReLU or an absolute value has a kink, and a finite difference across it means nothing.
    The first column of x is left as it is.
    """

    def redraw(rng: np.random.Generator, x: np.ndarray, weights: Sequence[np.ndarray]) -> None:
        for row in x:
            while min(np.abs(weight @ row).min() for weight in weights) < 2e-3:
                row[1:] = rng.standard_normal(row.size - 1)

    return redraw


@pytest.fixture(scope="session")
def gradient_check() -> Callable[..., None]:
    """``gradient_check(function, parameters, gradients, rng)``, see tests/gradient_check.py."""
    # the test folders are no packages, so the file is loaded by its path
    path = Path(__file__).with_name("gradient_check.py")
    spec = importlib.util.spec_from_file_location("gradient_check", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.check_gradients


def _load() -> ModuleType:
    # the test folders are no packages, so the file is loaded by its path
    path = Path(__file__).with_name("gpu_machine.py")
    spec = importlib.util.spec_from_file_location("gpu_machine", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


gpu_machine = _load()


@pytest.fixture(params=gpu_machine.MACHINES)
def machine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A GPU: emulated, and with ``-m gpu`` the real one."""
    return gpu_machine.machine(request.param, monkeypatch)


@pytest.fixture(params=gpu_machine.MACHINES)
def hopper_machine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A Hopper GPU: emulated, and with ``-m gpu`` a real one."""
    return gpu_machine.hopper_machine(request.param, monkeypatch)


@pytest.fixture(scope="session")
def is_sanitized() -> bool:
    """Whether the tests run under NVIDIA's ``compute-sanitizer``."""
    return bool(gpu_machine.IS_SANITIZED)


@pytest.fixture
def real_gpu(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The real GPU, for tests marked ``gpu``."""
    return gpu_machine.machine("real", monkeypatch).gpu


@pytest.fixture(params=gpu_machine.FLOATS)
def precision(request: pytest.FixtureRequest) -> Any:
    """``(dtype, relative error allowed)``."""
    return request.param


@pytest.fixture(scope="session")
def relative_error() -> Any:
    """``relative_error(actual, expected)``, norm-wise."""
    return gpu_machine.relative_error


@pytest.fixture(scope="session")
def rounded() -> Any:
    """``rounded(array, dtype)`` returns it in the dtype, and the same numbers in float64."""
    return gpu_machine.rounded
