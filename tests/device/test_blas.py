"""Dense products: right for any shape and layout, and BLAS's threads left as they were."""

import os
import threading

import numpy as np
import pytest

from twell_numba.device import add_matmul, blas, matmul, single_threaded_blas


def blas_threads():
    return [library.num_threads for library in blas._blas_libraries()]


@pytest.mark.parametrize("shape", [(0, 3, 4), (1, 1, 1), (5, 0, 4), (700, 200, 300)])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_products(rng, shape, dtype):
    rows, inner, columns = shape
    a = rng.standard_normal((rows, inner)).astype(dtype)
    b = rng.standard_normal((columns, inner)).astype(dtype).T
    wanted = a.astype(np.float64) @ b
    tolerance = 1e-5 if dtype == np.float32 else 1e-12
    np.testing.assert_allclose(matmul(a, b), wanted, rtol=tolerance, atol=100 * tolerance)
    out = np.full((rows, columns), np.nan, dtype)
    assert matmul(a, b, out=out) is out
    np.testing.assert_allclose(out, wanted, rtol=tolerance, atol=100 * tolerance)
    add_matmul(a, b, out)
    np.testing.assert_allclose(out, 2 * wanted, rtol=tolerance, atol=200 * tolerance)


def test_blas_is_held_to_one_thread_and_released(rng):
    before = blas_threads()
    assert before, "no BLAS library was found"
    seen = []
    with single_threaded_blas():
        with single_threaded_blas():
            seen.append(blas_threads())
        thread = threading.Thread(target=lambda: matmul(np.ones((400, 400)), np.ones((400, 400))))
        thread.start()
        thread.join()
        seen.append(blas_threads())
    assert all(count == 1 for counts in seen for count in counts)
    assert blas_threads() == before


def test_another_thread_than_the_first_holds_blas_too():
    before = blas_threads()
    with single_threaded_blas():
        pass  # this thread was the first
    seen = []

    def hold():
        with single_threaded_blas():
            seen.append(blas_threads())
        seen.append(blas_threads())

    thread = threading.Thread(target=hold)
    thread.start()
    thread.join()
    assert seen == [[1] * len(before), before]


def test_the_last_of_overlapping_holders_releases():
    before = blas_threads()
    entered, may_leave = threading.Event(), threading.Event()

    def hold():
        with single_threaded_blas():
            entered.set()
            may_leave.wait(timeout=10)

    thread = threading.Thread(target=hold)
    with single_threaded_blas():
        thread.start()
        assert entered.wait(timeout=10)
    assert blas_threads() == [1] * len(before)
    may_leave.set()
    thread.join()
    assert blas_threads() == before


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this platform")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_child_forked_inside_the_block_is_not_held():
    before = blas_threads()
    with single_threaded_blas():
        child = os.fork()
        if child == 0:
            os._exit(0 if blas_threads() == before else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_blas_is_released_after_an_error():
    before = blas_threads()
    with pytest.raises(ValueError, match="mismatch"):
        matmul(np.ones((400, 400)), np.ones((300, 400)))
    assert blas_threads() == before
