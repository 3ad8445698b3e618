"""Dense matrix products with NumPy's BLAS, in this package's own threads.

After a multi-threaded call, a BLAS library's idle threads spin for a while (OpenBLAS: 105 ms)
and slow down whatever runs next on their cores. So large products are split by rows over the
threads of :mod:`twell_numba.device.threads` with BLAS held to one thread, which is as fast (4.8
against 4.7 ms for 1024 x 512 x 2048 on 2 cores) and leaves nothing spinning behind.
"""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import numpy as np
from threadpoolctl import ThreadpoolController

from twell_numba.device.threads import run_ranges

# Below this many multiply-adds a product takes less time than waking a second thread.
SMALL_PRODUCT = 2_000_000

_lock = threading.Lock()
_holders = 0
_previous_counts: list[int] = []


@contextmanager
def single_threaded_blas() -> Iterator[None]:
    """Hold NumPy's BLAS to one thread inside the ``with`` block.

    The setting is the process's. Blocks may nest and overlap in several threads; the last exit puts
    back what was found.
    """
    global _holders, _previous_counts
    libraries = _blas_libraries()
    with _lock:
        if _holders == 0:
            _previous_counts = [library.num_threads for library in libraries]
            _set_threads([1] * len(libraries))
        _holders += 1
    try:
        yield
    finally:
        with _lock:
            _holders -= 1
            if _holders == 0:
                _set_threads(_previous_counts)


def matmul(a: np.ndarray, b: np.ndarray, out: np.ndarray | None = None) -> np.ndarray:
    """Return ``a @ b`` for two matrices, computed by all threads.

    Parameters
    ----------
    a : ndarray, shape (M, K)
    b : ndarray, shape (K, N)
    out : ndarray, shape (M, N), optional
        Overwritten with the product.
    """
    if out is None:
        out = np.empty((a.shape[0], b.shape[1]), np.result_type(a, b))
    if a.shape[0] * a.shape[1] * b.shape[1] < SMALL_PRODUCT:
        return np.matmul(a, b, out=out)
    with single_threaded_blas():
        run_ranges(
            lambda start, stop: np.matmul(a[start:stop], b, out=out[start:stop]),
            a.shape[0],
            grain=16,
        )
    return out


def add_matmul(a: np.ndarray, b: np.ndarray, out: np.ndarray) -> None:
    """Add ``a @ b`` into ``out``, computed by all threads: a gradient added to what is there.

    Parameters
    ----------
    a : ndarray, shape (M, K)
    b : ndarray, shape (K, N)
    out : ndarray, shape (M, N)
        Changed in place.
    """

    def add_rows(start: int, stop: int) -> None:
        out[start:stop] += a[start:stop] @ b

    if a.shape[0] * a.shape[1] * b.shape[1] < SMALL_PRODUCT:
        add_rows(0, a.shape[0])
        return
    with single_threaded_blas():
        run_ranges(add_rows, a.shape[0], grain=16)


@cache
def _blas_libraries() -> list:
    return ThreadpoolController().select(user_api="blas").lib_controllers


def _set_threads(counts: list[int]) -> None:
    """Set each library's number of threads, from whichever thread this is.

    threadpoolctl 3.8 lets only the first thread that sets OpenBLAS's number set it again, and
    ignores all others without a word. The number is the process's, and this module's lock already
    keeps threads apart, so that rule is lifted around each change.
    """
    for library, count in zip(_blas_libraries(), counts, strict=True):
        lift_rule = getattr(library, "clear_controlling_thread", None)
        if lift_rule is not None:
            lift_rule(force=True)
        library.set_num_threads(count)
        if lift_rule is not None:
            lift_rule(force=True)


def _release_after_fork() -> None:
    """A forked child has none of the threads that held BLAS in its parent."""
    global _lock, _holders
    _lock = threading.Lock()
    if _holders:
        _holders = 0
        _set_threads(_previous_counts)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_release_after_fork)
