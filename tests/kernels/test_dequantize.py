import numpy as np
import pytest

from twell_numba.kernels.dequantize import BLOCKS, cpu, reference

every_kind = pytest.mark.parametrize("kind", BLOCKS)
every_implementation = pytest.mark.parametrize("module", [cpu, reference])


def blocks_of(kind: str, count: int, rng: np.random.Generator) -> np.ndarray:
    """Return blocks of any bytes, but scales that are numbers of usual size."""
    numbers, nbytes = BLOCKS[kind]
    packed = rng.integers(0, 256, (count, nbytes)).astype(np.uint8)
    places = {"Q4_1": (0, 2), "Q4_K": (0, 2), "Q6_K": (208,)}.get(kind, (0,))
    for place in places:
        scales = rng.standard_normal((count, 1)).astype(np.float16)
        packed[:, place : place + 2] = scales.view(np.uint8)
    return packed


def unpacked(module, kind: str, packed: np.ndarray) -> np.ndarray:
    out = np.full((len(packed), BLOCKS[kind][0]), np.nan, np.float32)
    module.dequantize(packed, kind, out)
    return out


@every_kind
@every_implementation
@pytest.mark.parametrize("count", [0, 1, 2, 3, 1000, 40_000])
def test_numbers_are_those_of_the_gguf_package(module, kind, count, rng):
    gguf = pytest.importorskip("gguf")
    if count == 40_000 and BLOCKS[kind][0] > 32:
        count = 5_000  # as many numbers, enough for two threads
    packed = blocks_of(kind, count, rng)
    out = unpacked(module, kind, packed)
    if count:
        wide = packed.reshape(1, -1)
        expected = gguf.dequantize(wide, gguf.GGMLQuantizationType[kind]).reshape(out.shape)
        # the compiler may round a product and a sum once
        np.testing.assert_allclose(out, expected, rtol=1e-6, atol=1e-6 * np.abs(expected).max())


@every_kind
def test_any_bytes_give_what_the_reference_gives(kind, rng):
    """Scales that are infinite, NaN or subnormal too."""
    packed = rng.integers(0, 256, (2000, BLOCKS[kind][1])).astype(np.uint8)
    with np.errstate(all="ignore"):
        expected = unpacked(reference, kind, packed)
        out = unpacked(cpu, kind, packed)
    assert not np.isfinite(expected).all()
    np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-3)


@every_kind
def test_input_may_be_read_only_and_strided(kind, rng):
    packed = blocks_of(kind, 8, rng)
    expected = unpacked(cpu, kind, packed)
    packed.flags.writeable = False
    np.testing.assert_array_equal(unpacked(cpu, kind, packed), expected)
    np.testing.assert_array_equal(unpacked(cpu, kind, packed[::-2]), expected[::-2])


def test_known_numbers():
    """Two blocks by hand: the lower four bits of a byte come first."""
    half = np.array([2.0], np.float16).view(np.uint8)
    packed = np.concatenate([half, np.full(16, 0x90, np.uint8)])[None]
    expected = np.repeat(np.float32([2 * (0 - 8), 2 * (9 - 8)]), 16)[None]
    np.testing.assert_array_equal(unpacked(cpu, "Q4_0", packed), expected)
    packed = np.concatenate([half, np.arange(-16, 16, dtype=np.int8).view(np.uint8)])[None]
    expected = 2 * np.arange(-16, 16, dtype=np.float32)[None]
    np.testing.assert_array_equal(unpacked(cpu, "Q8_0", packed), expected)


@pytest.mark.parametrize(
    ("packed", "kind", "out", "error", "message"),
    [
        (np.zeros((2, 34), np.uint8), "Q5_0", np.zeros((2, 32), np.float32), ValueError, "kind"),
        (np.zeros((2, 34), np.int8), "Q8_0", np.zeros((2, 32), np.float32), TypeError, "uint8"),
        (np.zeros((2, 34), np.uint8), "Q8_0", np.zeros((2, 32)), TypeError, "float32"),
        (np.zeros((2, 33), np.uint8), "Q8_0", np.zeros((2, 32), np.float32), ValueError, "shapes"),
        (np.zeros((2, 34), np.uint8), "Q8_0", np.zeros((3, 32), np.float32), ValueError, "shapes"),
        (
            np.zeros((2, 34), np.uint8),
            "Q8_0",
            np.zeros((32, 2), np.float32).T,
            ValueError,
            "C-contiguous",
        ),
    ],
)
def test_what_does_not_fit_is_refused(packed, kind, out, error, message):
    with pytest.raises(error, match=message):
        cpu.dequantize(packed, kind, out)
