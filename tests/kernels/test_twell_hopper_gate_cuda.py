"""The dense product with packing for Hopper GPUs, against NumPy in float64."""

import types

import ml_dtypes
import numpy as np
import pytest

pytest.importorskip("numba_cuda", reason="numba-cuda is not installed (extra cuda)")

from twell_numba.device.gpu import empty, from_numpy, record_graph, tensor_map  # noqa: E402
from twell_numba.kernels.twell import cuda, cuda_gate, hopper_gate  # noqa: E402

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
UNTOUCHED = {"values": -7, "columns": 60000, "counts": -5}

# M, D, F, neurons that fire for a row, slots
SMALL = [
    (1, 8, 1, 1, 1),
    (129, 72, 257, 9, 16),
    (130, 64, 255, 255, 256),  # everything fires
    (257, 136, 600, 300, 8),  # most tiles overflow, and more work than blocks
]
LARGE = [
    (1, 64, 256, 20, 32),
    (2, 8192, 255, 30, 32),
    (127, 2048, 257, 9, 16),
    (128, 128, 512, 512, 256),
    (129, 2048, 5000, 60, 32),
    (200, 64, 300, 0, 4),  # nothing fires
    (300, 8192, 257, 40, 32),
    (300, 328, 1000, 30, 1),
    (1000, 1032, 2100, 60, 32),
    (20000, 64, 255, 8, 8),
]


@pytest.fixture
def hopper(real_gpu):
    if real_gpu.capability != (9, 0):
        pytest.skip(f"{real_gpu.name} is no Hopper GPU")
    return real_gpu


def make_problem(rng, rows, width, neurons, firing):
    x = rng.standard_normal((rows, width))
    weight = rng.standard_normal((neurons, width)) * width**-0.5
    x[:, 0] = 1
    if firing == 0:
        weight[:, 0] = -99
    elif firing >= neurons:
        weight[:, 0] = 99
    else:
        weight[:, 0] = -np.quantile(rng.standard_normal(10_000), 1 - firing / neurons)
    return x.astype(BFLOAT16), weight.astype(BFLOAT16)


def packed_arrays(rows, neurons, slots, stream):
    tiles = -(-neurons // hopper_gate.TILE)
    return (
        empty((rows, tiles * slots), BFLOAT16, stream),
        empty((rows, tiles * slots), np.uint16, stream),
        empty((rows, tiles), np.int32, stream),
    )


def filled(gpu, rows, neurons, slots):
    """Return arrays in which it can be seen what was written, with a row to spare."""
    arrays = packed_arrays(rows + 1, neurons, slots, gpu.stream)
    for array, number in zip(arrays, UNTOUCHED.values(), strict=True):
        array.copy_from(from_numpy(np.full(array.shape, number, array.dtype), gpu.stream))
    return arrays


def pack(gpu, x, weight, slots):
    """Return values, columns and counts, in NumPy, by row and tile."""
    rows, neurons = len(x), len(weight)
    arrays = filled(gpu, rows, neurons, slots)
    operands = (from_numpy(array, gpu.stream) for array in (x, weight))
    hopper_gate.gate_pack(*operands, *(array[:rows] for array in arrays), slots)
    values, columns, counts = (array.to_numpy() for array in arrays)
    for array, number in zip((values, columns, counts), UNTOUCHED.values(), strict=True):
        assert (array[rows:] == number).all(), "written past the last row"
    places = (rows, counts.shape[1], slots)
    return values[:rows].reshape(places), columns[:rows].reshape(places), counts[:rows]


def by_tile(array, filling):
    """Return the columns of an array as tiles of 256."""
    rows, columns = array.shape
    tiles = -(-columns // 256)
    padding = ((0, 0), (0, tiles * 256 - columns))
    return np.pad(array, padding, constant_values=filling).reshape(rows, tiles, 256)


def check(packed, x, weight, slots):
    values, columns, counts = packed
    x, weight = x.astype(np.float64), weight.astype(np.float64)
    with np.errstate(invalid="ignore", over="ignore"):
        product = x @ weight.T
        # whether it fires depends on the order of sums
        is_open = np.abs(product) <= 3e-5 * (np.abs(x) @ np.abs(weight).T)
    is_open &= np.isfinite(product)
    product, is_open = by_tile(product, -1), by_tile(is_open, False)
    fires = ~(product <= 0)
    certain = ~is_open.any(axis=2)
    np.testing.assert_array_equal(counts[certain], fires.sum(axis=2)[certain])

    used = np.arange(slots) < counts[..., None]
    assert (columns[~used] == UNTOUCHED["columns"]).all(), "written past the entries"
    assert (values.astype(np.float32)[~used] == UNTOUCHED["values"]).all()
    # entries of a tile in order, the neurons that fire first
    wanted = np.argsort(~fires, axis=2, kind="stable")[..., :slots]
    wanted = np.pad(wanted, ((0, 0), (0, 0), (0, max(slots - 256, 0))))
    used &= certain[..., None]
    np.testing.assert_array_equal(columns[used], wanted[used])
    expected = np.take_along_axis(product, wanted, axis=2)[used]
    np.testing.assert_allclose(values.astype(np.float64)[used], expected, rtol=5e-3, atol=2e-3)


def test_packs_the_product(hopper_machine):
    for *sizes, slots in hopper_machine.shapes(SMALL, LARGE):
        x, weight = make_problem(np.random.default_rng(0), *sizes)
        check(pack(hopper_machine.gpu, x, weight, slots), x, weight, slots)


@pytest.mark.gpu
def test_random_shapes(hopper):
    rng = np.random.default_rng(1)
    for _ in range(10):
        rows, width, neurons = rng.integers(1, 700), 8 * rng.integers(1, 60), rng.integers(1, 1500)
        slots = int(rng.integers(1, 80))
        x, weight = make_problem(rng, rows, width, neurons, rng.integers(0, neurons + 1))
        check(pack(hopper, x, weight, slots), x, weight, slots)


def test_nan_and_infinity_are_entries(hopper_machine):
    rng = np.random.default_rng(2)
    x, weight = make_problem(rng, 130, 72, 300, 10)
    x[5, 71] = np.nan  # the whole row
    weight[7, 3] = np.nan  # the whole column
    weight[299, 0] = np.inf
    weight[298, 0] = -np.inf
    check(pack(hopper_machine.gpu, x, weight, 256), x, weight, 256)


def test_negative_zero_is_no_entry(hopper_machine):
    x = np.full((10, 64), 1e-30, BFLOAT16)
    weight = np.full((300, 64), -1e-30, BFLOAT16)  # their products are -0
    *_, counts = pack(hopper_machine.gpu, x, weight, 4)
    assert (counts == 0).all()


def test_the_smallest_and_the_largest_numbers_are_entries(hopper_machine):
    numbers = np.array([2.0**-126, -(2.0**-126), 2.0**127, 3.0e38, 2.0**-100, 0], BFLOAT16)
    x, weight = np.zeros((5, 8), BFLOAT16), np.zeros((6, 8), BFLOAT16)
    x[:, 0], weight[:, 0] = 1, numbers
    values, columns, counts = pack(hopper_machine.gpu, x, weight, 8)
    assert (counts == 4).all()
    np.testing.assert_array_equal(columns[:, 0, :4], np.tile([0, 2, 3, 4], (5, 1)))
    np.testing.assert_array_equal(values[:, 0, :4], np.tile(numbers[[0, 2, 3, 4]], (5, 1)))


@pytest.mark.gpu
def test_same_bits_in_every_run_and_in_a_recording(hopper):
    x, weight = make_problem(np.random.default_rng(3), 1000, 512, 2100, 300)
    stream, slots = hopper.stream, 16
    operands = [from_numpy(array, stream) for array in (x, weight)]
    runs = []
    for _ in range(2):
        arrays = filled(hopper, 1000, 2100, slots)
        hopper_gate.gate_pack(*operands, *arrays, slots)
        runs.append([array.to_numpy() for array in arrays])
    arrays = filled(hopper, 1000, 2100, slots)
    with record_graph(stream) as graph:
        hopper_gate.gate_pack(*operands, *arrays, slots)
    graph.replay()
    graph.replay()
    runs.append([array.to_numpy() for array in arrays])
    for run in runs[1:]:
        for first, other in zip(runs[0], run, strict=True):
            np.testing.assert_array_equal(first.view(np.uint8), other.view(np.uint8))


@pytest.mark.gpu
def test_sums_stay_in_registers(hopper):
    x, weight = make_problem(np.random.default_rng(4), 10, 64, 300, 10)
    pack(hopper, x, weight, 4)
    for loaded in hopper_gate.gate_and_pack._loaded.values():
        local = loaded.attributes.local_size_bytes  # a method or a number, as cuda.core is of age
        assert (local(hopper.id) if callable(local) else local) == 0


@pytest.mark.gpu
def test_nothing_to_do(hopper):
    weight = from_numpy(np.ones((300, 64), BFLOAT16), hopper.stream)
    x = from_numpy(np.ones((0, 64), BFLOAT16), hopper.stream)
    hopper_gate.gate_pack(x, weight, *packed_arrays(0, 300, 4, hopper.stream), 4)


# ------------------------------------------------------------------------------ without a GPU


def a_matrix(shape=(10, 64), dtype=BFLOAT16, pointer=1 << 40, capability=(9, 0)):
    size = int(np.prod(shape))
    gpu = types.SimpleNamespace(capability=capability)
    return types.SimpleNamespace(
        shape=shape, ndim=len(shape), size=size, dtype=np.dtype(dtype), pointer=pointer, gpu=gpu
    )


@pytest.mark.parametrize(
    ("changes", "does"),
    [
        ({}, True),
        ({"shape": (1, 8)}, True),
        ({"shape": (10, 63)}, False),
        ({"shape": (10, 68)}, False),  # rows of 136 bytes
        ({"shape": (0, 64)}, False),
        ({"pointer": (1 << 40) + 8}, False),
        ({"dtype": np.float16}, False),
        ({"capability": (8, 9)}, False),
        ({"capability": (10, 0)}, False),
    ],
    ids=str,
)
def test_what_fits(changes, does):
    assert hopper_gate.fits(a_matrix(**changes), a_matrix()) is does
    if "capability" not in changes:
        assert hopper_gate.fits(a_matrix(), a_matrix(**changes)) is does


@pytest.mark.parametrize(
    ("changes", "module"),
    [
        ({}, hopper_gate),
        ({"dtype": np.float16}, None),
        ({"capability": (8, 0)}, cuda_gate),
        ({"capability": (8, 9), "dtype": np.float16}, cuda_gate),
        ({"capability": (8, 0), "dtype": np.float32}, None),
        ({"capability": (8, 0), "shape": (10, 60)}, None),
        ({"capability": (8, 0), "pointer": (1 << 40) + 2}, None),
        ({"capability": (7, 5)}, None),
        ({"capability": (10, 0)}, None),
    ],
    ids=str,
)
def test_which_kernel_packs_the_product_that_it_computes(changes, module):
    x, weight = a_matrix(**changes), a_matrix(**changes)
    wanted = None if module is None else module.gate_pack
    assert cuda._fused_packing(x, (weight,), tile=256) is wanted
    assert cuda._fused_packing(x, (weight,), tile=128) is None


def test_no_two_accesses_of_a_warp_meet_in_a_bank():
    place = hopper_gate.word_address.py_func
    lanes = [(lane // 4, lane % 4) for lane in range(32)]
    for quarter in range(4):
        for column in range(0, 32, 8):  # written 8 bytes a lane, 16 lanes at a time
            written = [place(0, line, quarter, column ^ (2 * part)) for line, part in lanes]
            for half in written[:16], written[16:]:
                assert {int(address) // 8 % 16 for address in half} == set(range(16))
    for column in range(0, 32, 4):  # read 16 bytes a lane, 8 lanes at a time
        read = [place(0, line, part, column) for line, part in lanes]
        for i in range(0, 32, 8):
            assert {int(address) // 16 % 8 for address in read[i : i + 8]} == set(range(8))
    words = {place(0, *lane, column) for lane in lanes for column in range(32)}
    assert words == set(range(0, 4096, 4))


def test_a_tensor_map_is_refused():
    with pytest.raises(ValueError, match=r"shape \(10, 63\).*multiples of 16 bytes wanted"):
        tensor_map.TensorMap(a_matrix((10, 63)), 64)
    with pytest.raises(ValueError, match="boxes of 257 rows given, 1 to 256 wanted"):
        tensor_map.TensorMap(a_matrix(), 257)


def test_a_part_of_a_cluster_is_refused():
    with pytest.raises(ValueError, match="3 blocks given, a multiple of 2 wanted"):
        hopper_gate.gate_and_pack._configure(3)
