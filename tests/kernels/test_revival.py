"""Random pushes of dead neurons: their distribution, and the generator they come from."""

import numpy as np

from twell_numba.kernels.revival import reference, revive_rows


def test_the_generator_is_philox():
    """The known answers of its authors' library (Random123, ``kat_vectors``)."""
    cases = [
        ([0] * 4, [0, 0], [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        ([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            [0xA4093822, 0x299F31D0],
            [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
        ),
    ]
    for counter, key, expected in cases:
        words = reference.philox(tuple(map(np.uint64, counter)), tuple(key))
        assert [int(word) for word in words] == expected


def test_the_numbers_are_normal():
    normal = reference.standard_normal(np.arange(300), 1000, 1234567890123, 7)
    assert abs(normal.mean()) < 4 / normal.size**0.5
    assert abs(normal.std() - 1) < 4 / normal.size**0.5
    assert abs((normal**4).mean() - 3) < 0.1
    for shift in (1, 2, 4):  # neighbours know nothing of each other
        assert abs((normal[:, shift:] * normal[:, :-shift]).mean()) < 0.01
    assert abs((normal[1:] * normal[:-1]).mean()) < 0.01


def test_they_depend_on_seed_step_and_row_alone():
    rows = np.array([3, 8])
    first = reference.standard_normal(rows, 6, 5, 2)
    np.testing.assert_array_equal(reference.standard_normal(rows[1:], 9, 5, 2)[:, :6], first[1:])
    for seed, step in ((6, 2), (5, 3), (5 + 2**40, 2)):
        assert (reference.standard_normal(rows, 6, seed, step) != first).all()


def test_only_dead_rows_change(rng):
    gate, first, second = rng.standard_normal((3, 6, 10)).astype(np.float32)
    before = gate.copy(), first.copy(), second.copy()
    dead = np.array([False, True, False, False, True, False])
    revive_rows(gate, first, second, dead, 11, 3)
    for actual, old in zip((gate, first, second), before, strict=True):
        np.testing.assert_array_equal(actual[~dead], old[~dead])
    assert not first[dead].any()
    assert not second[dead].any()
    push = gate[dead] - 0.9 * before[0][dead]
    assert 0 < np.abs(push).max() < 6 * 0.002
