"""Vectors in compiled code."""

import numpy as np
import pytest

from twell_numba.device import vectors
from twell_numba.device.jit import jit
from twell_numba.device.vectors import (
    add_products,
    add_scaled,
    any_positive,
    lanes_of,
    load,
    load_of,
    prefetch,
    register_lanes,
    store,
    sum_of,
    zeros,
    zeros_of,
)

REGISTERS = 3
every_dtype = pytest.mark.parametrize("dtype", [np.float32, np.float64])


@jit
def scaled_row(matrix, row, column, factor, out):
    total = zeros(matrix, REGISTERS)
    prefetch(matrix, row, column, REGISTERS)
    total = add_scaled(total, factor, load(matrix, row, column, REGISTERS))
    store(out, 0, 0, total)
    return lanes_of(matrix, REGISTERS)


@jit
def dot_of_rows(matrix):
    return sum_of(add_products(zeros(matrix, 4), load(matrix, 0, 0, 4), load(matrix, 1, 0, 4)))


@jit
def scaled_numbers(matrix, column, out):
    store(out, 0, 0, add_scaled(zeros_of(matrix, 4), out[0, 0], load_of(matrix, 1, column, 4)))


@jit
def is_any_positive(matrix):
    return any_positive(load(matrix, 0, 0, 2))


@every_dtype
def test_vectors_of_a_number_of_lanes(dtype):
    matrix = np.arange(20, dtype=dtype).reshape(2, 10)
    out = np.full((1, 6), 3, dtype)
    scaled_numbers(matrix, 5, out)
    np.testing.assert_array_equal(out[0], [45, 48, 51, 54, 3, 3])


@every_dtype
@pytest.mark.parametrize(
    ("number", "expected"), [(1e-30, True), (np.nan, True), (np.inf, True), (-1, False), (-0.0, 0)]
)
def test_a_positive_number_is_found_wherever_it_is(dtype, number, expected):
    lanes = 2 * register_lanes(np.dtype(dtype))
    for place in range(lanes):
        matrix = np.zeros((1, lanes + 1), dtype)
        matrix[0, place], matrix[0, lanes] = number, 1
        assert is_any_positive(matrix) == expected


@every_dtype
@pytest.mark.parametrize("offset", [0, 1])
def test_vectors_are_loaded_from_any_place_and_stored(dtype, offset):
    lanes = REGISTERS * register_lanes(np.dtype(dtype))
    matrix = np.arange(3 * (lanes + 5), dtype=dtype).reshape(3, lanes + 5)
    given = matrix[:, offset:]  # rows further apart than they are long
    out = np.full((1, lanes + 1), np.nan, dtype)
    assert scaled_row(given, 1, 2, dtype(0.5), out) == lanes
    np.testing.assert_array_equal(out[0, :lanes], 0.5 * given[1, 2 : 2 + lanes])
    assert np.isnan(out[0, lanes])


@every_dtype
def test_all_numbers_of_a_vector_are_added_up(dtype):
    lanes = 4 * register_lanes(np.dtype(dtype))
    matrix = np.random.default_rng(0).integers(-9, 9, (2, lanes)).astype(dtype)
    assert dot_of_rows(matrix) == matrix[0] @ matrix[1]


def test_registers_hold_whole_numbers():
    assert vectors.REGISTER_BYTES in (16, 32, 64)
    assert register_lanes(np.dtype(np.float32)) == 2 * register_lanes(np.dtype(np.float64))
