import numpy as np
import pytest

pytest.importorskip("numba_cuda", reason="numba-cuda is not installed (extra cuda)")

from twell_numba.kernels.rotary import cuda, reference  # noqa: E402

SMALL = [(0, 3, 2, 4), (2, 0, 1, 2), (1, 1, 1, 2), (2, 5, 3, 6), (3, 2, 1, 64), (2, 3, 2, 16)]
LARGE = [(2, 2048, 32, 64), (65537, 1, 1, 2), (1, 65536, 1, 4), (3, 77, 5, 128)]


def test_matches_the_reference(rng, machine, precision, relative_error, rounded):
    dtype, tolerance = precision
    table_dtype = np.float64 if dtype == np.float64 else np.float32
    for shape in machine.shapes(SMALL, LARGE):
        (x, x64), (dy, dy64) = (rounded(rng.standard_normal(shape), dtype) for _ in range(2))
        tables = cuda.rotary_tables(np.arange(shape[1]), shape[3], 10000.0, table_dtype)
        on_gpu = [machine.upload(table) for table in tables]
        exact = [table.astype(np.float64) for table in tables]
        y = cuda.rotary(machine.upload(x), *on_gpu)
        dx = cuda.rotary_backward(machine.upload(dy), *on_gpu)
        assert relative_error(y, reference.rotary(x64, *exact)) <= tolerance, shape
        assert relative_error(dx, reference.rotary_backward(dy64, *exact)) <= tolerance, shape


@pytest.mark.parametrize("width", [6, 16])
def test_in_place(rng, machine, width):
    x = rng.standard_normal((2, 3, 2, width)).astype(np.float32)
    tables = map(machine.upload, cuda.rotary_tables(np.arange(3), width, 10000.0))
    cos, sin = tables
    on_gpu = machine.upload(x)
    for turn in (cuda.rotary, cuda.rotary_backward):
        expected = turn(on_gpu, cos, sin).to_numpy()
        assert turn(on_gpu, cos, sin, on_gpu) is on_gpu
        np.testing.assert_array_equal(on_gpu.to_numpy(), expected)
    np.testing.assert_allclose(on_gpu.to_numpy(), x, atol=1e-6)  # turned back
    with pytest.raises(ValueError, match="out of shape"):
        cuda.rotary(on_gpu, cos, sin, cos)


def test_refuses_what_does_not_fit(machine):
    x = machine.upload(np.ones((1, 2, 1, 3), np.float32))
    table = machine.upload(np.ones((2, 1), np.float32))
    with pytest.raises(ValueError, match="head width 3 given, an even one wanted"):
        cuda.rotary(x, table, table)
    x = machine.upload(np.ones((1, 2, 1, 4), np.float32))
    with pytest.raises(ValueError, match=r"cos of shape \(2, 1\) given, shape \(2, 2\) wanted"):
        cuda.rotary(x, table, table)
    with pytest.raises(TypeError, match="cos of dtype float64 given, float32 wanted"):
        cuda.rotary(x, machine.upload(np.ones((2, 2))), table)
