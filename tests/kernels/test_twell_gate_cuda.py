"""The gate product that packs its result: on tensor cores, from compute capability 8.0 on."""

import ml_dtypes
import numpy as np
import pytest

pytest.importorskip("numba_cuda", reason="numba-cuda is not installed (extra cuda)")

from twell_numba.device.gpu import Kernel, compile  # noqa: E402
from twell_numba.device.gpu.driver import call  # noqa: E402
from twell_numba.device.gpu.language import argument_type  # noqa: E402
from twell_numba.device.gpu.packages import bindings, core  # noqa: E402
from twell_numba.kernels.twell import cuda_gate  # noqa: E402

DTYPES = [np.dtype(ml_dtypes.bfloat16), np.dtype(np.float16)]
# (M, D, F, slots): a number, a tile that is not whole, tiles beside and below each other
SMALL = [(1, 8, 1, 1), (130, 136, 260, 12)]
LARGE = [(129, 2048, 5632, 32), (1000, 72, 513, 8), (4096, 768, 1000, 256), (70, 32, 65536, 100)]


def make_integers(rng, shape, dtype):
    """Return numbers whose products and sums are exact in any order."""
    return rng.integers(-2, 3, shape).astype(np.float32).astype(dtype)


def expected_pack(gate, slots):
    """Return the values, columns and counts of a matrix whose tiles are packed, by tile."""
    rows, neurons = gate.shape
    tiles = -(-neurons // 256)
    padded = np.zeros((rows, tiles * 256), gate.dtype)
    padded[:, :neurons] = gate
    padded = padded.reshape(rows, tiles, 256)
    with np.errstate(invalid="ignore"):
        fires = ~(padded <= 0)
    # a stable sort brings a tile's entries to its front, in their order
    columns = np.argsort(~fires, axis=2, kind="stable")[..., :slots]
    return np.take_along_axis(padded, columns, 2), columns, fires.sum(2)


def check_pack(machine, x, weight, slots):
    """Compare with NumPy; return the counts and the arrays that were written."""
    rows, tiles = x.shape[0], -(-weight.shape[0] // 256)
    slots = min(slots, 256)
    untouched = np.full((rows, tiles * slots), 77, x.dtype)
    values = machine.upload(untouched)
    columns = machine.upload(untouched.astype(np.uint16))
    counts = machine.upload(np.full((rows, tiles), -1, np.int32))
    cuda_gate.gate_pack(machine.upload(x), machine.upload(weight), values, columns, counts, slots)
    with np.errstate(all="ignore"):
        gate = (x.astype(np.float32) @ weight.astype(np.float32).T).astype(x.dtype)
    wanted_values, wanted_columns, wanted_counts = expected_pack(gate, slots)
    np.testing.assert_array_equal(counts.to_numpy(), wanted_counts)
    is_entry = np.arange(slots) < wanted_counts[..., None]
    for array, wanted in ((values, wanted_values), (columns, wanted_columns)):
        written = array.to_numpy().reshape(rows, tiles, slots)
        np.testing.assert_array_equal(
            written.astype(np.float32), np.where(is_entry, wanted, 77).astype(np.float32)
        )
    return wanted_counts


def check_shapes(rng, machine, dtype, shapes):
    for rows, width, neurons, slots in shapes:
        x = make_integers(rng, (rows, width), dtype)
        weight = make_integers(rng, (neurons, width), dtype)
        weight[rng.random(neurons) < 0.8] = 0
        check_pack(machine, x, weight, slots)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_packs_the_product(rng, machine, dtype):
    check_shapes(rng, machine, dtype, machine.shapes(SMALL, LARGE))


def test_a_tile_holds_its_slots_and_overflows_beyond(rng, machine):
    x = np.ones((3, 8), DTYPES[0])
    weight = np.full((256, 8), -1, DTYPES[0])
    firing = rng.permutation(256)[:33]
    weight[firing] = np.arange(1, 34)[:, None]
    for slots in (32, 33):
        assert (check_pack(machine, x, weight, slots) == 33).all()


def test_all_fire(machine):
    ones = np.ones((2, 8), DTYPES[1])
    check_pack(machine, ones, np.ones((257, 8), DTYPES[1]), 256)


def test_keeps_nan_and_counts_no_neuron_that_is_not_there(machine):
    x = np.ones((4, 16), DTYPES[0])
    weight = -np.ones((270, 16), DTYPES[0])
    weight[3, 5], weight[269, 0], weight[7, 2] = np.nan, np.inf, -np.inf
    x[1, 15], x[2, 0], x[3] = np.nan, np.inf, 0
    counts = check_pack(machine, x, weight, 256)
    # a row of NaN, infinity times infinity, and zero times infinity or NaN
    assert counts.tolist() == [[1, 1], [256, 14], [1, 1], [2, 1]]


def test_an_entry_that_is_rounded_to_zero_is_none(machine):
    x = np.full((1, 8), 2.0**-14, DTYPES[1])
    weight = np.zeros((3, 8), DTYPES[1])
    weight[0, 0], weight[1, 0], weight[2, 0] = 2.0**-12, 2.0**-10, -(2.0**-12)
    assert check_pack(machine, x, weight, 2).tolist() == [[1]]


def test_nothing_to_compute(machine):
    empty = machine.upload(np.zeros((3, 0), DTYPES[0]))
    counts = machine.upload(np.full((3, 2), -1, np.int32))
    packed = [machine.upload(np.zeros((3, 16), dtype)) for dtype in (DTYPES[0], np.uint16)]
    weight = machine.upload(np.zeros((300, 0), DTYPES[0]))
    cuda_gate.gate_pack(empty, weight, *packed, counts, 8)
    np.testing.assert_array_equal(counts.to_numpy(), np.zeros((3, 2)))
    nothing = [machine.upload(np.zeros((0, 8), dtype)) for dtype in (DTYPES[0], np.uint16)]
    no_rows = machine.upload(np.zeros((0, 8), DTYPES[0]))
    weight = machine.upload(np.zeros((300, 8), DTYPES[0]))
    no_counts = machine.upload(np.zeros((0, 2), np.int32))
    cuda_gate.gate_pack(no_rows, weight, *nothing, no_counts, 4)


def kinds_of(dtype):
    return (*[f"{dtype}*"] * 3, "uint16*", "int32*", *["int"] * 5)


def text_for(target, kernel, kinds):
    """Return what is assembled of a kernel for a target, as text, and the name of its entry."""
    with compile._lock, compile._without_a_gpu():
        types = tuple(map(argument_type, kinds))
        library = compile._lower(kernel.function, types, kernel.options)
        library._lto = True  # linked as a whole, as compile.py does it
        text = library.get_lto_ptx(cc=compile._capability(target))
        return text.rstrip("\0"), library._entry_name


def test_fits_the_gpus_it_is_for():
    # 8.6 and 8.9 have 99 KiB for a block; 2 KiB count its entries
    assert cuda_gate.gate_pack_tiles.shared_memory + 2048 <= 99 * 1024
    text, entry = text_for("80", cuda_gate.gate_pack_tiles, kinds_of("bfloat16"))
    assert ".target sm_80" in text
    assert entry in text
    assert ".local" not in text  # all sums are in registers


@pytest.mark.gpu
@pytest.mark.parametrize("machine", ["real"], indirect=True)
def test_made_for_8_0(rng, machine, monkeypatch):
    """The driver makes this GPU's machine code of the text for 8.0, whatever the GPU is."""
    original, kinds = cuda_gate.gate_pack_tiles, kinds_of("bfloat16")
    kernel = Kernel(original.function, original.options, original.shared_memory)
    monkeypatch.setattr(cuda_gate, "gate_pack_tiles", kernel)
    text, entry = text_for("80", kernel, kinds)
    machine.gpu.make_current()
    loaded = core().ObjectCode.from_ptx(text.encode(), name=kernel.name).get_kernel(entry)
    kernel._ask_for_shared_memory(loaded, machine.gpu)
    kernel._loaded[(*kinds, machine.gpu.id)] = loaded
    check_shapes(rng, machine, DTYPES[0], LARGE)
    assert list(kernel._loaded.values()) == [loaded]  # no other was made
    attribute = bindings().CUfunction_attribute.CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES
    device = bindings().CUdevice(machine.gpu.id)
    assert call("cuKernelGetAttribute", attribute, loaded.handle, device) == 0  # no sums in memory


@pytest.mark.gpu
def test_same_bits_on_every_run(rng, real_gpu):
    from twell_numba.device.gpu import from_numpy

    stream = real_gpu.stream
    x, weight = (
        from_numpy(rng.standard_normal(shape).astype(DTYPES[0]), stream)
        for shape in ((500, 768), (3000, 768))
    )
    runs = []
    for _ in range(10):
        values = from_numpy(np.zeros((500, 12 * 200), DTYPES[0]), stream)
        columns = from_numpy(np.zeros((500, 12 * 200), np.uint16), stream)
        counts = from_numpy(np.zeros((500, 12), np.int32), stream)
        cuda_gate.gate_pack(x, weight, values, columns, counts, 200)
        runs.append([array.to_numpy().view(np.uint8) for array in (values, columns, counts)])
    for run in runs[1:]:
        for array, first in zip(run, runs[0], strict=True):
            np.testing.assert_array_equal(array, first)
