"""Launches: what a kernel may be given, and what it is told where it cannot run."""

import numpy as np
import pytest

pytest.importorskip("numba_cuda", reason="numba-cuda is not installed (extra cuda)")

from twell_numba.device.gpu import DeviceArray, GPUError, kernel, launch  # noqa: E402
from twell_numba.device.gpu.language import global_thread, grid_threads, load, store  # noqa: E402


@kernel(threads=64)
def add(x, amount, y, size):
    i = global_thread()
    while i < size:
        store(y, i, load(x, i) + amount)
        i += grid_threads()


def test_a_kernel_runs(machine):
    x, y = (machine.upload(np.arange(130, dtype=np.float32)) for _ in range(2))
    for blocks in (1, add.blocks(130), 7):
        add(blocks, x, np.float32(2), y, 130)
        np.testing.assert_array_equal(y.to_numpy(), np.arange(130) + 2)
        y.fill_with_zeros()


def test_nothing_is_launched_for_no_blocks(machine, monkeypatch):
    def fail(*_):
        raise AssertionError("launched")

    monkeypatch.setattr(launch, "_launch", fail)
    nothing = machine.upload(np.empty(0, np.float32))
    add(add.blocks(0), nothing, np.float32(2), nothing, 0)


@pytest.mark.parametrize("amount", [2.0, np.int32(2), "2", None, True])
def test_arguments_of_other_types_are_refused(machine, amount):
    x = machine.upload(np.ones(3, np.float32))
    with pytest.raises(TypeError, match=r"kernel add: arguments \(DeviceArray, .* wanted"):
        add(1, x, amount, x, 3)


def test_host_arrays_are_refused(machine):
    with pytest.raises(TypeError, match=r"kernel add: arguments \(ndarray"):
        add(1, np.ones(3, np.float32), np.float32(2), np.ones(3, np.float32), 3)


def test_a_failed_launch_is_one_clear_line(machine, monkeypatch):
    def fail(*_):
        raise RuntimeError("CUDA_ERROR_INVALID_VALUE:\n This indicates that ...")

    monkeypatch.setattr(launch, "_launch", fail)
    x = machine.upload(np.ones(3, np.float32))
    with pytest.raises(GPUError, match="kernel add could not be launched on GPU 0") as caught:
        add(5, x, np.float32(2), x, 3)
    assert "5 blocks of 64 threads, 0 bytes of shared memory" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_two_gpus_are_named(machine):
    class Second:
        id = 1

    class SecondStream:
        gpu = Second()
        capture = None

    x = machine.upload(np.ones(3, np.float32))
    y = DeviceArray(x.pointer, (3,), np.float32, SecondStream(), None)
    with pytest.raises(ValueError, match="kernel add: arrays on GPU 0 and GPU 1 given, one GPU"):
        add(1, x, np.float32(2), y, 3)


@pytest.mark.parametrize("threads", [0, 33, 1056])
def test_blocks_are_whole_warps(threads):
    with pytest.raises(ValueError, match=f"{threads} threads given, a multiple of 32"):
        kernel(threads=threads)


def test_blocks_cover_the_threads():
    assert [add.blocks(n) for n in (0, 1, 64, 65, 2**40)] == [0, 1, 1, 2, 2**31 - 1]
    assert add.blocks_of_warps(3) == 2
