"""Streams, graphs, memory and other libraries on a real GPU; run with ``-m gpu``."""

import gc
import subprocess
import sys
import threading
import time

import ml_dtypes
import numpy as np
import pytest

pytest.importorskip("numba_cuda", reason="numba-cuda is not installed (extra cuda)")

from twell_numba.device.gpu import (  # noqa: E402
    Stream,
    choose,
    empty,
    from_external,
    from_numpy,
    kernel,
    record_graph,
    time_on_gpu,
    zeros,
)
from twell_numba.device.gpu.driver import call  # noqa: E402
from twell_numba.device.gpu.language import (  # noqa: E402
    cuda,
    global_thread,
    grid_threads,
    load,
    number,
    store,
    types,
)
from twell_numba.errors import TwellError, UsageError  # noqa: E402

pytestmark = pytest.mark.gpu

SHARED = 96 * 1024


@kernel()
def add(x, amount, size):
    i = global_thread()
    while i < size:
        store(x, i, load(x, i) + amount)
        i += grid_threads()


@kernel(threads=32)
def nothing(x, size):
    pass


@kernel(threads=32)
def wait_and_set(x, value, milliseconds):
    for _ in range(2 * milliseconds):
        cuda.nanosleep(500_000)
    if cuda.threadIdx.x == 0:
        store(x, 0, value)


@kernel(threads=256, shared_memory=SHARED)
def reverse_through_shared_memory(x, y, size):
    buffer = cuda.shared.array(0, types.float32)
    i = types.int64(cuda.threadIdx.x)
    while i < size:
        buffer[i] = load(x, i)
        i += 256
    cuda.syncthreads()
    i = types.int64(cuda.threadIdx.x)
    while i < size:
        store(y, i, buffer[size - 1 - i])
        i += 256


@kernel(threads=32)
def convert(x, y, size):
    i = global_thread()
    if i < size:
        store(y, i, load(x, i))


@kernel(threads=32)
def special_values(x, y, size):
    i = global_thread()
    if i < size:
        value = load(x, i)
        is_nan = value != value
        store(y, 2 * i, number(y, 1 if is_nan else 0))
        store(y, 2 * i + 1, value * number(y, 1))


# ---------------------------------------------------------------------- numbers


def test_rounding_to_bfloat16_is_that_of_the_host(rng, real_gpu):
    bits = rng.integers(0, 2**32, 100_000, dtype=np.uint32)
    bits[:4] = [0x7F800000, 0xFF800000, 0x7FC00000, 0x7F800001]  # infinities and NaN
    bits[4:8] = [0x80000000, 0x7F7FFFFF, 1, 0x3F808000]  # -0, largest, smallest, a tie
    x = bits.view(np.float32)
    y = empty(x.size, ml_dtypes.bfloat16, real_gpu.stream)
    convert(convert.blocks(x.size), from_numpy(x, real_gpu.stream), y, x.size)
    with np.errstate(over="ignore", invalid="ignore"):
        expected = x.astype(ml_dtypes.bfloat16)
    actual = y.to_numpy()
    finite = ~np.isnan(x)
    np.testing.assert_array_equal(actual.view(np.uint16)[finite], expected.view(np.uint16)[finite])
    assert np.isnan(actual[~finite].astype(np.float32)).all()


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16])
def test_all_numbers_of_16_bits_are_read(real_gpu, dtype):
    x = np.arange(2**16, dtype=np.uint16).view(dtype)
    y = empty(x.size, np.float32, real_gpu.stream)
    convert(convert.blocks(x.size), from_numpy(x, real_gpu.stream), y, x.size)
    with np.errstate(invalid="ignore"):
        expected = x.astype(np.float32)
    np.testing.assert_array_equal(y.to_numpy(), expected)


def test_rounding_to_float16_is_that_of_the_host(rng, real_gpu):
    x = (rng.standard_normal(50_000) * 10.0 ** rng.integers(-9, 6, 50_000)).astype(np.float32)
    y = empty(x.size, np.float16, real_gpu.stream)
    convert(convert.blocks(x.size), from_numpy(x, real_gpu.stream), y, x.size)
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(y.to_numpy(), x.astype(np.float16))


def test_nan_infinity_subnormal_numbers_and_signed_zeros_survive(real_gpu):
    x = np.array([np.nan, np.inf, -np.inf, -0.0, 1e-42], np.float32)
    y = empty(2 * x.size, np.float32, real_gpu.stream)
    special_values(1, from_numpy(x, real_gpu.stream), y, x.size)
    is_nan, values = y.to_numpy().reshape(-1, 2).T
    assert is_nan.tolist() == [1, 0, 0, 0, 0]
    np.testing.assert_array_equal(values, x)
    assert np.signbit(values[3])


# ---------------------------------------------------------------------- launches


def test_shared_memory_above_48_kib(rng, real_gpu):
    x = rng.standard_normal(SHARED // 4).astype(np.float32)
    y = empty(x.size, np.float32, real_gpu.stream)
    reverse_through_shared_memory(1, from_numpy(x, real_gpu.stream), y, x.size)
    np.testing.assert_array_equal(y.to_numpy(), x[::-1])


def test_a_launch_takes_little_host_time(real_gpu):
    x = zeros(1, np.float32, real_gpu.stream)
    nothing(1, x, 1)
    rounds = []
    for _ in range(20):
        real_gpu.stream.synchronize()
        start = time.perf_counter()
        for _ in range(200):
            nothing(1, x, 1)
        rounds.append((time.perf_counter() - start) / 200)
    median = sorted(rounds)[10]
    print(f"host time of a launch: {median * 1e6:.2f} us (best {min(rounds) * 1e6:.2f})")
    assert median < 10e-6


def test_kernels_run_from_other_threads(real_gpu):
    results = []

    def work():
        x = zeros(100, np.float32, real_gpu.stream)
        add(1, x, np.float32(3), 100)
        results.append(x.to_numpy())

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 4
    assert all((result == 3).all() for result in results)


FAILING = """
import numpy as np
from twell_numba.device.gpu import GPUError, gpu, kernel, zeros
from twell_numba.device.gpu.language import store

@kernel(threads=32)
def write_far_away(x, place):
    store(x, place, 1)

x = zeros(4, np.float32)
write_far_away(1, x, 1 << 45)
try:
    x.to_numpy()
except GPUError as error:
    print("caught:", error)
"""


def test_a_kernel_that_fails_is_reported_in_one_line(tmp_path, real_gpu):
    program = tmp_path / "failing.py"  # kernels need a file to be read from
    program.write_text(FAILING)
    result = subprocess.run(
        [sys.executable, str(program)], capture_output=True, text=True, check=False, timeout=120
    )
    assert "caught: " in result.stdout, result.stderr
    assert "CUDA_ERROR_ILLEGAL_ADDRESS" in result.stdout
    assert result.stdout.count("\n") == 1


# ---------------------------------------------------------------------- streams and graphs


def test_streams_wait_for_each_other(real_gpu):
    first, second = Stream(real_gpu), Stream(real_gpu)
    x, y = zeros(1, np.float32, first), zeros(1, np.float32, second)
    for _ in range(5):
        x.fill_with_zeros()
        wait_and_set(1, x, np.float32(7), 10)
        y.copy_from(x)  # in the second stream
        assert y.to_numpy()[0] == 7


def test_a_kernel_may_take_arrays_of_two_streams(real_gpu):
    first, second = Stream(real_gpu), Stream(real_gpu)
    x, y = zeros(1, np.float32, first), zeros(1, np.float32, second)
    wait_and_set(1, x, np.float32(5), 10)
    convert(1, y, x, 0)  # in the second stream: writes nothing, waits for the first
    convert(1, x, y, 1)
    assert y.to_numpy()[0] == 5


def test_events_measure_time(real_gpu):
    x = zeros(1, np.float32, real_gpu.stream)
    before = real_gpu.stream.record(timing=True)
    wait_and_set(1, x, np.float32(1), 5)
    milliseconds = real_gpu.stream.record(timing=True).milliseconds_since(before)
    assert 1 < milliseconds < 1000
    assert all(t > 0 for t in time_on_gpu(lambda: nothing(1, x, 1), repeats=3))


def test_a_graph_replays_what_was_recorded(real_gpu):
    x = zeros(1000, np.float32, real_gpu.stream)
    add(4, x, np.float32(1), 1000)
    with record_graph(real_gpu.stream) as graph:
        for _ in range(10):
            add(4, x, np.float32(1), 1000)
    assert (x.to_numpy() == 1).all(), "recording must not run"
    for _ in range(3):
        graph.replay()
    assert (x.to_numpy() == 31).all()


def test_arrays_made_while_recording(real_gpu):
    x = from_numpy(np.full(1000, 2, np.float32), real_gpu.stream)
    with record_graph(real_gpu.stream) as graph:
        for _ in range(5):
            temporary = x.copy()  # its memory is used again by the next
            add(4, temporary, np.float32(1), 1000)
        result = temporary.copy()
    del temporary
    gc.collect()
    others = [from_numpy(np.full(1000, 9, np.float32), real_gpu.stream) for _ in range(20)]
    graph.replay()
    assert (result.to_numpy() == 3).all()
    x.copy_from(np.full(1000, 5, np.float32))
    graph.replay()
    assert (result.to_numpy() == 6).all()
    assert all((other.to_numpy() == 9).all() for other in others)
    assert len(graph.buffers) == 2, "memory freed while recording was not used again"


def test_a_graph_keeps_the_arrays_it_uses(real_gpu):
    x = zeros(1000, np.float32, real_gpu.stream)
    y = zeros(1000, np.float32, real_gpu.stream)
    convert(32, x, y, 1000)
    with record_graph(real_gpu.stream) as graph:
        add(4, x, np.float32(1), 1000)
        convert(32, x, y, 1000)
    del x
    gc.collect()
    others = [from_numpy(np.full(1000, 9, np.float32), real_gpu.stream) for _ in range(20)]
    graph.replay()
    graph.replay()
    assert (y.to_numpy() == 2).all()
    assert all((other.to_numpy() == 9).all() for other in others)


def test_an_error_while_recording_ends_the_recording(real_gpu):
    x = zeros(10, np.float32, real_gpu.stream)

    def record():
        with record_graph(real_gpu.stream):
            add(1, x, np.float32(1), 10)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        record()
    add(1, x, np.float32(1), 10)
    assert (x.to_numpy() == 1).all()


def test_a_replay_takes_little_host_time(real_gpu):
    x = zeros(1, np.float32, real_gpu.stream)
    nothing(1, x, 1)
    with record_graph(real_gpu.stream) as graph:
        for _ in range(100):
            nothing(1, x, 1)
    times = time_on_gpu(graph.replay)
    print(f"a kernel in a replayed graph: {sorted(times)[10] * 10:.2f} us")
    assert sorted(times)[10] * 10 < 5  # ms for 100 kernels, in us a kernel


# ---------------------------------------------------------------------- memory


def test_out_of_memory_says_what_was_asked_and_what_is_free(real_gpu):
    free, total = real_gpu.memory.free_and_total()
    assert 0 < free <= total
    with pytest.raises(TwellError, match=r"GPU 0 is out of memory: .* GiB asked, .* of .* free"):
        empty(2 * total, np.uint8, real_gpu.stream)
    assert (zeros(10, np.float32, real_gpu.stream).to_numpy() == 0).all()


def test_a_request_in_vain_sets_nothing_aside(real_gpu):
    real_gpu.memory.trim()
    before = real_gpu.memory.reserved()
    with pytest.raises(TwellError, match="out of memory"):
        empty(2 * real_gpu.memory.free_and_total()[1], np.uint8, real_gpu.stream)
    assert real_gpu.memory.reserved() == before


def test_trimming_leaves_freed_memory_to_others(real_gpu):
    x = empty(2**30, np.uint8, real_gpu.stream)
    kept = from_numpy(np.arange(100.0), real_gpu.stream)
    del x
    real_gpu.synchronize()
    before = real_gpu.memory.reserved()
    real_gpu.memory.trim()
    assert real_gpu.memory.reserved() <= before - 2**29
    assert kept.to_numpy().tolist() == list(range(100))


def test_freed_memory_is_used_again(real_gpu):
    def largest():
        return real_gpu.memory.peak()

    size = 2**28
    empty(size, np.uint8, real_gpu.stream)
    before = largest()
    for _ in range(20):
        empty(size, np.uint8, real_gpu.stream)
    assert largest() - before < size


def test_more_than_4_gib(real_gpu):
    size = 2**32 + 5
    x = zeros(size, np.uint8, real_gpu.stream)
    tail = x[size - 3 :]
    tail.copy_from(np.array([1, 2, 3], np.uint8))
    assert x[size - 4 :].to_numpy().tolist() == [0, 1, 2, 3]


def test_indices_above_2_31(real_gpu):
    size = 2**31 + 7
    x = zeros(size, np.uint8, real_gpu.stream)
    add(add.blocks(size), x, np.float32(3), size)
    assert x[size - 2 :].to_numpy().tolist() == [3, 3]
    assert x[:2].to_numpy().tolist() == [3, 3]


# ---------------------------------------------------------------------- devices


def test_device_choice(real_gpu):
    assert choose("cuda") is real_gpu
    assert choose("cuda:0") is real_gpu
    with pytest.raises(UsageError, match="GPU 999 given, but"):
        choose("cuda:999")


# ---------------------------------------------------------------------- other libraries


def test_cupy(rng, real_gpu):
    cupy = pytest.importorskip("cupy")
    host = rng.standard_normal((5, 7)).astype(np.float32)
    ours = from_external(cupy.asarray(host))
    np.testing.assert_array_equal(ours.to_numpy(), host)
    add(1, ours, np.float32(1), 35)
    theirs = cupy.from_dlpack(ours)
    assert theirs.data.ptr == ours.pointer
    np.testing.assert_array_equal(theirs.get(), host + np.float32(1))
    assert cupy.asarray(ours).data.ptr == ours.pointer


def test_cupy_on_a_stream_of_its_own(real_gpu):
    cupy = pytest.importorskip("cupy")
    with cupy.cuda.Stream(non_blocking=True):
        for value in range(20):
            ours = from_external(cupy.full(1_000_000, value, cupy.float32))
            assert (ours.to_numpy() == value).all()


def test_work_of_others_waits_for_ours(real_gpu):
    cupy = pytest.importorskip("cupy")
    ours = zeros(1, np.float32, real_gpu.stream)
    with cupy.cuda.Stream(non_blocking=True):
        for value in range(1, 6):
            wait_and_set(1, ours, np.float32(value), 10)
            assert (cupy.from_dlpack(ours) + 1).get()[0] == value + 1


def test_torch(rng, real_gpu):
    torch = pytest.importorskip("torch")
    theirs = torch.arange(10, dtype=torch.bfloat16, device="cuda")
    ours = from_external(theirs)
    assert ours.dtype == ml_dtypes.bfloat16
    assert ours.pointer == theirs.data_ptr()
    back = torch.from_dlpack(ours)
    assert back.data_ptr() == ours.pointer
    assert back.tolist() == list(range(10))


def test_jax(real_gpu):
    program = (
        "import os\n"
        "os.environ['XLA_PYTHON_CLIENT_PREALLOCATE'] = 'false'\n"
        "import jax, numpy as np\n"
        "from twell_numba.device.gpu import from_external, from_numpy\n"
        "theirs = jax.numpy.arange(10.0)\n"
        "print(from_external(theirs).to_numpy().tolist() == list(range(10)))\n"
        "ours = from_numpy(np.arange(5.0, dtype='f4'))\n"
        "print(np.asarray(jax.dlpack.from_dlpack(ours)).tolist())\n"
    )
    pytest.importorskip("jax")
    real_gpu.memory.trim()  # the other process needs some
    free = f"{call('cuMemGetInfo')[0] / 2**30:.1f} GiB free"
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=120
    )
    wanted = ["True", "[0.0, 1.0, 2.0, 3.0, 4.0]"]
    assert result.stdout.split("\n")[:2] == wanted, f"{free}; {result.stderr}"
