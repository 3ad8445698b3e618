"""Compilation: NaN keeps its meaning, and a machine without a cache folder still works."""

import math

import numpy as np
import pytest
from numba.core import caching

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
