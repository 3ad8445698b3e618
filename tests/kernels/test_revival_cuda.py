import numpy as np
import pytest

pytest.importorskip("numba_cuda", reason="numba-cuda is not installed (extra cuda)")

from twell_numba.kernels.revival import cuda, reference  # noqa: E402


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_matches_the_reference(rng, machine, dtype):
    small = [(0, 3), (1, 1), (5, 6), (3, 131)]
    for rows, width in machine.shapes(small, [(5632, 2048), (65537, 3)]):
        host = list(rng.standard_normal((3, rows, width)).astype(dtype))
        dead = rng.random(rows) < 0.5
        on_gpu = [machine.upload(array) for array in host]
        for seed in (3, 2**63 + 12345):
            reference.revive_rows(*host, dead, seed, 2**32 - 2)
            cuda.revive_rows(*on_gpu, machine.upload(dead), seed, 2**32 - 2)
        tolerance = 4 * np.finfo(dtype).eps
        for actual, expected in zip(on_gpu, host, strict=True):
            np.testing.assert_allclose(actual.to_numpy(), expected, rtol=0, atol=tolerance * 4)
            np.testing.assert_array_equal(actual.to_numpy()[~dead], expected[~dead])


def test_refuses_what_does_not_fit(machine):
    arrays = [machine.upload(array) for array in np.ones((3, 4, 5))]
    with pytest.raises(TypeError, match="dead of int64 given, a DeviceArray of bool wanted"):
        cuda.revive_rows(*arrays, machine.upload(np.ones(4, np.int64)), 0, 0)
    with pytest.raises(ValueError, match=r"dead of shape \(5,\) given, shape \(4,\) wanted"):
        cuda.revive_rows(*arrays, machine.upload(np.ones(5, np.bool_)), 0, 0)
    with pytest.raises(ValueError, match="first_moment of shape"):
        cuda.revive_rows(
            arrays[0], arrays[1][:2], arrays[2], machine.upload(np.ones(4, bool)), 0, 0
        )
