"""Sums that grow from one micro-batch to the next."""

import numpy as np
import pytest

pytest.importorskip("numba_cuda", reason="numba-cuda is not installed (extra cuda)")

from twell_numba.kernels import cuda_sums  # noqa: E402


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.int64])
def test_adds_an_array_to_another(rng, machine, dtype):
    for size in machine.shapes([0, 1, 70], [65537, 1_000_003]):
        target, source = (rng.integers(-99, 99, size).astype(dtype) for _ in range(2))
        on_gpu = machine.upload(target)
        cuda_sums.add_into(on_gpu, machine.upload(source))
        np.testing.assert_array_equal(on_gpu.to_numpy(), target + source)


def test_rounds_a_sum_of_two_dtypes_once(rng, machine):
    target = rng.standard_normal(70).astype(np.float16)
    source = rng.standard_normal(70).astype(np.float32) * np.float32(1e-3)
    on_gpu = machine.upload(target)
    cuda_sums.add_into(on_gpu, machine.upload(source))
    assert on_gpu.dtype == np.float16
    np.testing.assert_array_equal(on_gpu.to_numpy(), (target + source).astype(np.float16))


def test_sets_what_is_true_in_another(rng, machine):
    for size in machine.shapes([0, 1, 70], [65537, 1_000_003]):
        target, source = (rng.random(size) < 0.5 for _ in range(2))
        on_gpu = machine.upload(target)
        cuda_sums.or_into(on_gpu, machine.upload(source))
        np.testing.assert_array_equal(on_gpu.to_numpy(), target | source)


def test_adds_the_time_in_nanoseconds(machine):
    totals = [machine.upload(np.zeros(1)) for _ in range(2)]
    cuda_sums.add_time(totals[0])
    cuda_sums.add_time(totals[1])
    first, second = (float(total.to_numpy()[0]) for total in totals)
    assert 0 < first <= second < first + 60e9
    cuda_sums.add_time(totals[0])
    assert float(totals[0].to_numpy()[0]) >= first + second


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_adds_the_sums_of_columns(rng, machine, dtype):
    for rows, width in machine.shapes([(0, 3), (1, 1), (5, 33), (140, 40)], [(129, 65537)]):
        # halves: no sum of them is rounded
        partial = (rng.integers(-99, 99, (rows, width)) / 2).astype(dtype)
        on_gpu = machine.upload(np.ones(width, np.float32))
        cuda_sums.add_column_sums(machine.upload(partial), on_gpu)
        np.testing.assert_array_equal(on_gpu.to_numpy(), 1 + partial.sum(axis=0))
