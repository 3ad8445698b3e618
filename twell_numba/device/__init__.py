"""The machine at hand: threads, BLAS and how kernels are compiled."""

from twell_numba.device.blas import add_matmul, matmul, single_threaded_blas
from twell_numba.device.threads import run_ranges, set_thread_count, thread_count

__all__ = [
    "add_matmul",
    "matmul",
    "run_ranges",
    "set_thread_count",
    "single_threaded_blas",
    "thread_count",
]
