"""In which order blocks of tokens and their parts are multiplied, on a GPU, against NumPy."""

import numpy as np
import pytest

pytest.importorskip("numba_cuda", reason="numba-cuda is not installed (extra cuda)")

from twell_numba.device.gpu import empty  # noqa: E402
from twell_numba.kernels.twell import shared_lists  # noqa: E402
from twell_numba.kernels.twell.shared_lists import finish_lists  # noqa: E402

# Blocks, parts that a block can have
SMALL = [(1, 1), (8, 3), (9, 2), (70, 128)]
LARGE = [(128, 17), (129, 17), (1024, 8), (1025, 128), (3000, 4)]


def make_blocks(rng, blocks, parts):
    """Return neurons and entries of blocks, many of them alike, and of some that do not share."""
    some = rng.integers(0, 256 * parts + 1, 5)
    counts = np.where(rng.random(blocks) < 0.5, rng.choice(some, blocks), 256 * parts)
    counts = np.where(rng.random(blocks) < 0.5, counts, rng.integers(1, 256 * parts + 1, blocks))
    entries = np.where(rng.random(blocks) < 0.5, 4000, rng.integers(0, 32769, blocks))
    return counts.astype(np.int32), entries


def wanted_items(counts, entries):
    """Return all parts, those first that are expected to take longest."""
    items = []
    for b in np.flatnonzero(counts):
        n = -(-counts[b] // 256)
        size = -(-counts[b] // n // 16) * 16
        cost = size + entries[b] // n // 16
        for part in range(n):
            here = min(size, counts[b] - size * part)
            code = int(b) << 32 | (part == n - 1) << 31 | int(size * part) << 16 | part << 9
            items.append((-cost, b, part, code | int(here)))
    return [code for *_, code in sorted(items)]


def test_what_takes_longest_comes_first(rng, hopper_machine, monkeypatch):
    if not hopper_machine.is_real:
        monkeypatch.setattr(shared_lists, "THREADS", 64)  # as many as there are emulated
    for blocks, parts in hopper_machine.shapes(SMALL, LARGE):
        counts, entries = make_blocks(rng, blocks, parts)
        starts = np.full((128 * blocks, parts + 1), -1, np.int32)
        starts[128 * np.arange(blocks) + 127, -(-counts // 256)] = entries
        is_in_tail = rng.random(128 * blocks) < 0.05
        marks = np.packbits(is_in_tail, bitorder="little").view(np.int32)
        stream = hopper_machine.gpu.stream
        items, order = (
            empty(1 + blocks * parts, np.int64, stream),
            empty(1 + blocks, np.int64, stream),
        )
        tail_rows, tail_count = (empty(size, np.int32, stream) for size in (128 * blocks, 1))
        finish_lists(
            -(-8 * blocks // shared_lists.THREADS) + 1, hopper_machine.upload(counts),
            hopper_machine.upload(starts), items, order, blocks, parts + 1,
            hopper_machine.upload(marks), tail_rows, tail_count, marks.size,
        )  # fmt: skip
        number, *found = items.to_numpy().tolist()
        assert found[:number] == wanted_items(counts, entries)
        number, *found = order.to_numpy().tolist()
        shared = np.flatnonzero(counts)
        in_order = shared[np.argsort(-counts[shared], kind="stable")]
        assert found[:number] == [int(b) << 32 | int(counts[b]) for b in in_order]
        rows = np.flatnonzero(is_in_tail)
        assert tail_count.to_numpy()[0] == rows.size
        np.testing.assert_array_equal(tail_rows.to_numpy()[: rows.size], rows)
