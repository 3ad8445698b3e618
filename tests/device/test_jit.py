"""Compilation: NaN keeps its meaning, and a machine without a cache folder still works."""

import importlib
import math
import pkgutil

import numpy as np
import pytest
from numba.core import caching
from numba.core.dispatcher import Dispatcher

from twell_numba import kernels
from twell_numba.device.jit import jit


def total(values):
    result = values.dtype.type(0)
    for value in values:
        if not math.isnan(value):
            result += value
    return result


@pytest.mark.parametrize("cached", [True, False])
def test_nan_is_seen(monkeypatch, cached):
    if not cached:
        monkeypatch.setattr(caching.CacheImpl, "_locator_classes", [])
    compiled = jit(total)
    assert compiled(np.array([1.0, np.nan, 2.0])) == 3
    assert compiled.py_func is total


def test_options_are_passed_on():
    assert jit(forceinline=True)(total)(np.ones(3)) == 3


def test_no_kernel_closes_over_what_another_process_would_not_find_in_the_cache():
    """Numba keys its cache by what a closure holds: numbers are alike in all processes."""
    found = set()
    for module_info in pkgutil.walk_packages(kernels.__path__, "twell_numba.kernels."):
        if module_info.name.rpartition(".")[2] not in {"cpu", "ffn_strips", "rows"}:
            continue
        module = importlib.import_module(module_info.name)
        for name, value in vars(module).items():
            for compiled in value.values() if isinstance(value, dict) else [value]:
                if isinstance(compiled, Dispatcher):
                    found.add(compiled)
                    for cell in compiled.py_func.__closure__ or ():
                        held = cell.cell_contents
                        assert isinstance(held, int), f"{module_info.name}.{name} holds {held}"
    assert len(found) > 50
