"""Freed memory is kept: in a process of its own, for the setting stays."""

import subprocess
import sys

import pytest

PROGRAM = """
import resource
import numpy as np
from twell_numba.device.memory import keep_freed_memory

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(20):
        arrays = [np.ones((1 << 20) * size) for size in (1, 2, 3)]
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

if {keep} and not keep_freed_memory():
    print("not glibc")
else:
    faults()
    print(faults())
"""


def count_faults(keep):
    result = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(keep=keep)],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
        env={"NUMPY_MADVISE_HUGEPAGE": "0"},
    )
    if "not glibc" in result.stdout:
        pytest.skip("the C library is not glibc")
    return int(result.stdout)


@pytest.mark.skipif(sys.platform != "linux", reason="glibc only")
def test_the_second_round_of_arrays_costs_no_page_faults():
    assert count_faults(keep=True) < count_faults(keep=False) / 10
