"""Recorded work, copies that are read later, and casts."""

import gc

import ml_dtypes
import numpy as np
import pytest

pytest.importorskip("numba_cuda", reason="numba-cuda is not installed (extra cuda)")

from twell_numba.device.gpu import empty, from_numpy, record_graph  # noqa: E402
from twell_numba.device.gpu.cast import cast  # noqa: E402
from twell_numba.device.gpu.pinned import HostCopy  # noqa: E402
from twell_numba.device.gpu.recorded import Recorded  # noqa: E402
from twell_numba.device.gpu.stream import Graph  # noqa: E402
from twell_numba.kernels.cuda_sums import add_into  # noqa: E402

EDGES = [0.0, -0.0, np.inf, -np.inf, 1e-30, 1e30, 1 / 3, 257, 259]
FLOATS = (np.float32, ml_dtypes.bfloat16, np.float16, np.float64)

# ---------------------------------------------------------------------- recorded work


def test_every_call_does_the_work_once(machine):
    total, one = machine.upload(np.zeros(3)), machine.upload(np.ones(3))
    calls = []

    def work():
        calls.append(1)
        add_into(total, one)

    step = Recorded(work, machine.gpu.stream)
    for count in range(1, 6):
        step()
        assert total.to_numpy().tolist() == [count] * 3
    assert len(calls) == 2, "done once as it is, recorded once, then replayed"


def test_replays_read_what_the_arrays_hold_then(machine):
    total, change = machine.upload(np.zeros(2)), machine.upload(np.ones(2))
    step = Recorded(lambda: add_into(total, change), machine.gpu.stream)
    for number in (1, 2, 4, 8):
        change.copy_from(np.full(2, number, np.float64))
        step()
    assert total.to_numpy().tolist() == [15, 15]


def test_what_fails_is_tried_again(machine):
    total, one = machine.upload(np.zeros(1)), machine.upload(np.ones(1))
    fails = [False, True, False, False]

    def work():
        add_into(total, one)
        if fails.pop(0):
            raise RuntimeError("as this test wants it")

    step = Recorded(work, machine.gpu.stream)
    step()
    with pytest.raises(RuntimeError, match="as this test wants it"):
        step()
    assert total.to_numpy()[0] == 1, "a recording does nothing"
    step()
    step()
    assert total.to_numpy()[0] == 3


# ---------------------------------------------------------------------- graphs


class Buffer:
    """Stands for a buffer of ``cuda.core``."""

    def __init__(self):
        self.closed_on = []

    def close(self, stream):
        self.closed_on.append(stream)


class IdleStream:
    """Stands for a stream."""

    core_stream = "the stream"
    capture = None


def test_memory_of_a_graph_goes_to_the_one_being_recorded():
    """Freeing it on a stream that is recording would become a step of the recording."""
    stream, buffer = IdleStream(), Buffer()
    old, new = Graph(stream), Graph(stream)
    old.buffers.append(buffer)
    stream.capture = new
    del old
    gc.collect()
    assert (buffer.closed_on, new.buffers) == ([], [buffer])
    stream.capture = None
    del new
    gc.collect()
    assert buffer.closed_on == ["the stream"]


@pytest.mark.gpu
def test_a_graph_is_destroyed_while_another_is_recorded(real_gpu, is_sanitized):
    if is_sanitized:
        # It notes where kernels are launched from, and never lets go of the frames of ``replay``,
        # which hold the graph.
        pytest.skip("compute-sanitizer keeps graphs alive that were replayed")
    stream = real_gpu.stream
    x, one = (from_numpy(np.full(1 << 20, number, np.float32), stream) for number in (0, 1))
    add_into(x, one)  # what is recorded must have been compiled before

    def record():
        with record_graph(stream) as graph:
            copy = empty(x.shape, x.dtype, stream)
            copy.copy_from(one)
            graphs.pop("old", None)
            gc.collect()
            add_into(x, copy)
        return graph

    graphs = {}
    graphs["old"] = record()
    graphs["old"].replay()
    buffers = len(graphs["old"].buffers)
    new = record()  # destroys the old one, and with it the array made in its recording
    assert len(new.buffers) == 1 + buffers
    for _ in range(3):
        new.replay()
    others = [from_numpy(np.full(1 << 20, 7, np.float32), stream) for _ in range(4)]
    new.replay()
    assert (x.to_numpy() == 6).all()
    assert all((other.to_numpy() == 7).all() for other in others)


# ---------------------------------------------------------------------- copies read later


@pytest.mark.parametrize("dtype", [np.float64, np.int32, ml_dtypes.bfloat16, np.bool_])
def test_a_copy_holds_what_was_there_when_requested(machine, dtype):
    array = machine.upload(np.array([[1, 0, 1], [0, 1, 1]], dtype))
    copy = HostCopy(array)
    copy.request()
    array.copy_from(np.zeros((2, 3), dtype))
    held = copy.read()
    assert (held.dtype, held.shape) == (dtype, (2, 3))
    assert held.astype(int).tolist() == [[1, 0, 1], [0, 1, 1]]
    assert copy.read().astype(int).tolist() == [[1, 0, 1], [0, 1, 1]], "still the last one"
    copy.request()
    assert not copy.read().astype(bool).any()
    assert held.astype(int).sum() == 4, "what was read is a copy of its own"


def test_a_copy_must_be_requested_first(machine):
    with pytest.raises(AssertionError, match="requested before it is read"):
        HostCopy(machine.upload(np.ones(1))).read()


def test_memory_of_the_host_is_given_back(machine):
    if machine.is_real:
        pytest.skip("the driver does not say")
    copy = HostCopy(machine.upload(np.ones(5)))
    assert len(machine.gpu._host_buffers) == 1
    del copy
    gc.collect()
    assert not machine.gpu._host_buffers


# ---------------------------------------------------------------------- casts


@pytest.mark.parametrize("wanted", FLOATS)
@pytest.mark.parametrize("given", FLOATS)
def test_rounds_to_nearest_even(rng, machine, given, wanted):
    for size in machine.shapes([0, 1, 70], [65537]):
        numbers = 300 * rng.standard_normal(size)
        numbers[: len(EDGES)] = EDGES[:size]
        with np.errstate(over="ignore"):
            array = numbers.astype(given)
            to_16_bits = np.dtype(wanted).itemsize == 2
            expected = (array.astype(np.float32) if to_16_bits else array).astype(wanted)
        result = cast(machine.upload(array), wanted)
        assert result.dtype == wanted
        np.testing.assert_array_equal(
            result.to_numpy().view(f"u{expected.dtype.itemsize}"),
            expected.view(f"u{expected.dtype.itemsize}"),
        )


def test_nan_stays_nan(machine):
    array = machine.upload(np.array([np.nan, -np.nan, 1], np.float32))
    for dtype in FLOATS:
        assert np.isnan(cast(array, dtype).to_numpy()).tolist() == [True, True, False]


def test_writes_to_an_array_that_is_given(machine):
    array = machine.upload(np.array([[1.0, 2.5]], np.float32))
    out = machine.upload(np.zeros((1, 2), np.float16))
    assert cast(array, np.float16, out) is out
    assert out.to_numpy().tolist() == [[1, 2.5]]
    with pytest.raises(ValueError, match=r"out of dtype float16 and shape \(1, 2\) given"):
        cast(array, np.float64, out)
    with pytest.raises(ValueError, match=r"shape \(1, 2\) given, .* and \(2,\) wanted"):
        cast(machine.upload(np.ones(2, np.float32)), np.float16, out)
