"""Products of few rows, against NumPy."""

import numpy as np
import pytest

from twell_numba.device import set_thread_count, thread_count
from twell_numba.device.few_rows import (
    CHUNK,
    FEW_ROWS,
    add_scaled_rows,
    few_rows_combination,
    few_rows_product,
)
from twell_numba.device.vectors import register_lanes

LANES = register_lanes(np.dtype(np.float32))


@pytest.mark.parametrize(("dtype", "tolerance"), [(np.float32, 1e-6), (np.float64, 1e-14)])
@pytest.mark.parametrize("width", [0, 1, LANES - 1, LANES, LANES + 1, 70])
@pytest.mark.parametrize("neurons", [0, 1, 4, 7, 33])
def test_against_numpy(rng, neurons, width, dtype, tolerance):
    weight = rng.standard_normal((neurons, width)).astype(dtype)
    for rows in (0, 1, 2, 3, FEW_ROWS):
        x, y = rng.standard_normal((2, rows, width)).astype(dtype)
        product = few_rows_product(x, weight)
        assert product.dtype == dtype
        scale = 1 + np.abs(x) @ np.abs(weight.T)
        assert np.all(np.abs(product - x @ weight.T) <= tolerance * scale)
        # without the first and the last neuron
        start, stop = min(1, neurons), max(min(1, neurons), neurons - 1)
        wanted = y + product[:, start:stop] @ weight[start:stop]
        add_scaled_rows(product, weight, y, start, stop)
        scale = 1 + np.abs(wanted) + np.abs(product) @ np.abs(weight)
        assert np.all(np.abs(y - wanted) <= 4 * tolerance * scale)


@pytest.mark.parametrize(("dtype", "tolerance"), [(np.float32, 1e-6), (np.float64, 1e-14)])
@pytest.mark.parametrize(("neurons", "width"), [(0, 3), (5, 0), (CHUNK + 1, 33), (1000, 9)])
def test_combination_against_numpy(rng, neurons, width, dtype, tolerance):
    weight = rng.standard_normal((neurons, width)).astype(dtype)
    for rows in (0, 1, 2, 3):
        h = rng.standard_normal((rows, neurons)).astype(dtype)
        y = few_rows_combination(h, weight)
        assert y.dtype == dtype
        scale = 1 + np.abs(h) @ np.abs(weight)
        assert np.all(np.abs(y - h @ weight) <= tolerance * scale)


def test_writes_to_an_array_given(rng):
    x, weight = rng.standard_normal((2, 3)), rng.standard_normal((5, 3))
    out = np.full((2, 5), np.nan)
    assert few_rows_product(x, weight, out) is out
    np.testing.assert_allclose(out, x @ weight.T)


def test_the_same_bits_in_any_company(rng):
    x = rng.standard_normal((5, 703)).astype(np.float32)
    weight = rng.standard_normal((2049, 703)).astype(np.float32)
    threads = thread_count()
    whole = few_rows_product(x, weight)
    try:
        set_thread_count(3)
        np.testing.assert_array_equal(few_rows_product(x, weight), whole)
    finally:
        set_thread_count(threads)
    for row in range(5):
        np.testing.assert_array_equal(few_rows_product(x[row : row + 1], weight)[0], whole[row])


def test_a_nan_stays_in_its_row_and_neuron(rng):
    x, weight = np.ones((3, 20)), np.ones((6, 20))
    x[1, 3] = weight[4, 7] = np.nan
    is_nan = np.isnan(few_rows_product(x, weight))
    assert is_nan[1].all()
    assert is_nan[:, 4].all()
    assert is_nan.sum() == 3 + 6 - 1
