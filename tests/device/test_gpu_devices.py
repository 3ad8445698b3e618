"""Which GPU a number or a name stands for; the GPUs are stand-ins."""

import threading
import time

import pytest

from twell_numba.device.gpu import choose, devices, gpu
from twell_numba.errors import UsageError


class StandIn:
    def __init__(self, device_id):
        time.sleep(0.02)  # so that threads meet
        self.id = device_id


@pytest.fixture(autouse=True)
def two_gpus(monkeypatch):
    monkeypatch.setattr(devices, "initialize", lambda: 2)
    monkeypatch.setattr(devices, "GPU", StandIn)
    monkeypatch.setattr(devices, "_gpus", {})


def test_one_object_for_one_gpu():
    assert gpu() is gpu(0) is gpu(device_id=0) is choose("cuda") is choose("cuda:0")
    assert gpu(1) is choose("cuda:1") is not gpu()
    assert gpu(1).id == 1


def test_one_object_for_all_threads():
    found = []
    threads = [threading.Thread(target=lambda: found.append(gpu())) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4
    assert all(each is found[0] for each in found)


def test_refuses_a_gpu_that_is_not_there():
    with pytest.raises(UsageError, match="GPU 2 given, but GPUs 0 to 1 are there"):
        gpu(2)
    with pytest.raises(UsageError, match="device 'gpu' given, cuda or cuda:N wanted"):
        choose("gpu")
