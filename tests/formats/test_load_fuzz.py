"""``load`` on 20,000 damaged files: an error of one line, or the matrix that the file does hold."""

import contextlib
import json
import re
import struct
import time
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from twell_numba.errors import TwellError
from twell_numba.formats import SparseMatrix, load
from twell_numba.formats.base import FORMATS
from twell_numba.formats.tensor_file import DTYPES

FILES_PER_FORMAT = 5000
INTERESTING = [0, 1, 2, 3, 5, 7, 255, 65537, 2**31 - 1, 2**31, 2**32, 10**9, 2**62, 2**63, 10**30]
INTERESTING += [-number for number in INTERESTING]

every_format = pytest.mark.parametrize("cls", FORMATS.values(), ids=FORMATS)


def originals(cls: type[SparseMatrix], folder: Path) -> list[bytes]:
    """Return small valid files of a format."""
    rng = np.random.default_rng(21)
    contents = []
    for shape, dtype in [
        ((3, 7), np.float32),
        ((5, 20), ml_dtypes.bfloat16),
        ((2, 3), np.float64),
        ((0, 4), np.float32),
        ((4, 0), np.float16),
    ]:
        dense = (rng.standard_normal(shape) * (rng.random(shape) < 0.4)).astype(dtype)
        if shape[0] > 2:
            dense[1] = 1
        cls.from_dense(dense).save(folder / "original")
        contents.append((folder / "original").read_bytes())
    return contents


def split(content: bytes) -> tuple[bytes, bytes]:
    (length,) = struct.unpack("<Q", content[:8])
    return content[8 : 8 + length], content[8 + length :]


def join(header: bytes, data: bytes) -> bytes:
    return struct.pack("<Q", len(header)) + header + data


# ---------------------------------------------------------------------- kinds of damage


def other_bytes(rng: np.random.Generator, content: bytes) -> bytes:
    damaged = bytearray(content)
    for _ in range(rng.integers(1, 5)):
        damaged[rng.integers(len(damaged))] = rng.integers(256)
    return bytes(damaged)


def other_length(rng: np.random.Generator, content: bytes) -> bytes:
    if rng.integers(2):
        return content[: rng.integers(len(content))]
    return content + rng.bytes(rng.integers(1, 64))


def moved_part(rng: np.random.Generator, content: bytes) -> bytes:
    begin, end = np.sort(rng.integers(0, len(content), 2))
    part = content[begin:end]
    if rng.integers(2):
        return content[:begin] + content[end:]
    place = rng.integers(len(content))
    return content[:place] + part + content[place:]


def other_header_size(rng: np.random.Generator, content: bytes) -> bytes:
    (length,) = struct.unpack("<Q", content[:8])
    size = (length + int(rng.integers(-64, 65)), 2 ** int(rng.integers(64)))[rng.integers(2)]
    return struct.pack("<Q", size % 2**64) + content[8:]


def other_header_number(rng: np.random.Generator, content: bytes) -> bytes:
    header, data = split(content)
    numbers = list(re.finditer(rb"\d+", header))
    chosen = numbers[rng.integers(len(numbers))]
    number = str(INTERESTING[rng.integers(len(INTERESTING))]).encode()
    return join(header[: chosen.start()] + number + header[chosen.end() :], data)


def other_header_word(rng: np.random.Generator, content: bytes) -> bytes:
    header, data = split(content)
    words = list(re.finditer(rb"[A-Za-z_]\w*", header))
    chosen, other = words[rng.integers(len(words))], words[rng.integers(len(words))]
    return join(header[: chosen.start()] + other.group() + header[chosen.end() :], data)


def other_shapes(rng: np.random.Generator, content: bytes) -> bytes:
    """Lie consistently: sizes of the matrix and of all its arrays, most of which become empty."""
    header_text, data = split(content)
    header = json.loads(header_text)
    sizes = [0, 0, 1, 2, 3, 16, 10**9, 2**40]
    shape = [sizes[place] for place in rng.integers(0, len(sizes), 2)]
    header["__metadata__"]["shape"] = json.dumps(shape)
    for name, array in header.items():
        if name != "__metadata__":
            array["shape"] = [
                [*shape, size, *array["shape"]][rng.integers(3 + len(array["shape"]))]
                for size in rng.choice(sizes, len(array["shape"])).tolist()
            ]
            if np.prod(array["shape"], dtype=object) == 0:
                array["data_offsets"][1] = array["data_offsets"][0]
    offset = 0
    for array in header.values():
        if "data_offsets" in array:
            begin, end = array["data_offsets"]
            array["data_offsets"] = [offset, offset + end - begin]
            offset += end - begin
    return join(json.dumps(header).encode(), data[:offset])


def other_integer(rng: np.random.Generator, content: bytes) -> bytes:
    header, data = split(content)
    if len(data) < 8:
        return other_bytes(rng, content)
    width, code = ((2, "<H"), (4, "<i"), (8, "<q"))[rng.integers(3)]
    place = int(rng.integers(len(data) // width)) * width
    number = INTERESTING[rng.integers(len(INTERESTING))] % 2 ** (8 * width - 1)
    if code != "<H" and rng.integers(2):
        number = -number
    return join(header, data[:place] + struct.pack(code, number) + data[place + width :])


DAMAGES: list[Callable[[np.random.Generator, bytes], bytes]] = [
    other_bytes,
    other_length,
    moved_part,
    other_header_size,
    other_header_number,
    other_header_word,
    other_shapes,
    other_integer,
]


def damaged_files(cls: type[SparseMatrix], folder: Path, count: int) -> Iterator[bytes]:
    rng = np.random.default_rng(22)
    contents = originals(cls, folder)
    for number in range(count):
        content = contents[rng.integers(len(contents))]
        damaged = DAMAGES[number % len(DAMAGES)](rng, content)
        if rng.integers(4) == 0:
            damaged = DAMAGES[rng.integers(len(DAMAGES))](rng, content)
        yield damaged


# ---------------------------------------------------------------------- what comes of it


def write(path: Path, content: bytes) -> None:
    path.unlink(missing_ok=True)  # some file systems write a file shortened in place at once
    path.write_bytes(content)


def load_or_message(path: Path) -> SparseMatrix | str:
    try:
        return load(path)
    except TwellError as error:
        return str(error)


def assert_is_what_the_file_holds(matrix: SparseMatrix, content: bytes) -> None:
    """Compare a loaded matrix with the file, read here without the library."""
    header_text, data = split(content)
    header = json.loads(header_text)
    metadata = header.pop("__metadata__")
    assert type(matrix) is FORMATS[metadata["format"]]
    assert list(matrix.shape) == json.loads(metadata["shape"])
    assert matrix.dtype.name == metadata["dtype"]
    for name in matrix.parameter_names:
        assert getattr(matrix, name) == int(metadata[name])
    assert set(header) == set(matrix.array_names)
    for name, described in header.items():
        array = getattr(matrix, name)
        begin, end = described["data_offsets"]
        assert list(array.shape) == described["shape"]
        assert array.dtype == DTYPES[described["dtype"]]
        assert array.tobytes() == data[begin:end]
    matrix.validate()
    rows, columns, values = matrix.coordinates()
    assert ((rows >= 0) & (rows < max(matrix.shape[0], 1))).all()
    assert ((columns >= 0) & (columns < max(matrix.shape[1], 1))).all()
    assert ((np.diff(rows) > 0) | ((np.diff(rows) == 0) & (np.diff(columns) > 0))).all()
    assert matrix.nnz == rows.size == values.size
    if max(matrix.shape) < 1000:
        dense = np.zeros(matrix.shape, matrix.dtype)
        dense[rows, columns] = values
        assert dense.tobytes() == matrix.to_dense().tobytes()


@every_format
def test_damaged_files(cls, tmp_path):
    path = tmp_path / "damaged"
    accepted = 0
    for content in damaged_files(cls, tmp_path, FILES_PER_FORMAT):
        write(path, content)
        start = time.perf_counter()
        matrix = load_or_message(path)
        assert time.perf_counter() - start < 5
        if isinstance(matrix, str):
            assert "\n" not in matrix
        else:
            accepted += 1
            assert_is_what_the_file_holds(matrix, content)
    # Damage to values makes another matrix, which cannot be told from a right one.
    assert 0 < accepted < FILES_PER_FORMAT // 2


@every_format
def test_damaged_files_take_no_more_memory_than_their_size_asks_for(cls, tmp_path):
    path = tmp_path / "damaged"
    originals(cls, tmp_path)
    load(tmp_path / "original")
    tracemalloc.start()
    try:
        for content in damaged_files(cls, tmp_path, 1000):
            write(path, content)
            tracemalloc.reset_peak()
            before, _ = tracemalloc.get_traced_memory()
            with contextlib.suppress(TwellError):
                load(path)
            _, peak = tracemalloc.get_traced_memory()
            assert peak - before < 20 * len(content) + 100_000
    finally:
        tracemalloc.stop()
