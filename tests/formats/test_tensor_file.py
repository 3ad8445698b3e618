"""Arrays in safetensors files: exact in any arrangement, and never fooled by a bad file."""

import json
import os
import struct
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors import safe_open

from twell_numba.errors import TwellError
from twell_numba.formats.tensor_file import (
    DTYPES,
    open_tensor_file,
    read_tensors,
    write_tensors,
)


def write_raw(path: Path, header: object, data: bytes = b"") -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def entry(dtype: str = "F32", shape: object = (2,), begin: int = 0, end: int = 8) -> dict:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def refused(path: Path, message: str) -> None:
    with pytest.raises(TwellError, match=message) as caught:
        read_tensors(path)
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith(str(path))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "tensors.safetensors"


# ---------------------------------------------------------------------- round trips


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
def test_every_dtype_comes_back(path, dtype):
    array = np.arange(6).astype(dtype).reshape(2, 3)
    write_tensors(path, {"x": array})
    read = read_tensors(path)["x"]
    assert read.dtype == dtype
    assert read.tobytes() == array.tobytes()
    read[:] = 0  # writable


@pytest.mark.parametrize(
    "array",
    [
        np.arange(6.0).reshape(2, 3).T,
        np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        np.arange(6.0)[::-2],
        np.arange(12.0).reshape(3, 4)[:, 1:3],
        np.broadcast_to(np.arange(3.0), (2, 3)),
        np.arange(6, dtype=">f4"),
        np.arange(6, dtype=np.float32).astype(ml_dtypes.bfloat16).reshape(2, 3).T,
        np.zeros((0, 3), np.float32),
        np.array(5, np.int64),
    ],
    ids=[
        "transposed",
        "fortran",
        "reversed",
        "sliced",
        "broadcast",
        "big-endian",
        "bfloat16",
        "empty",
        "scalar",
    ],
)
def test_any_memory_layout_is_written_in_c_order(path, array):
    before = array.copy()
    write_tensors(path, {"x": array})
    with safe_open(path, framework="numpy") as file:
        by_other_tools = file.get_tensor("x")
    for read in (read_tensors(path)["x"], by_other_tools):
        assert read.shape == array.shape
        assert read.tolist() == array.tolist() == before.tolist()


def test_metadata_and_headers_are_read_without_the_arrays(path):
    write_tensors(path, {"x": np.zeros((2, 3), np.float16)}, {"format": "pt", "é": "ü\n"})
    with open_tensor_file(path) as file:
        assert file.metadata == {"format": "pt", "é": "ü\n"}
        assert (file.tensors["x"].shape, file.tensors["x"].dtype) == ((2, 3), "F16")
    write_tensors(path, {})
    with open_tensor_file(path) as file:
        assert (file.metadata, file.tensors) == ({}, {})


def test_equal_arrays_give_equal_files_in_whatever_order_they_are_named(path):
    arrays = {"b": np.ones(3), "a": np.ones(2, np.int8), "c": np.ones(1)}
    contents = set()
    for names in ("abc", "cba", "bca"):
        write_tensors(path, {name: arrays[name] for name in names}, {"format": "pt"})
        contents.add(path.read_bytes())
    assert len(contents) == 1


@pytest.mark.parametrize("array", [np.array([None]), np.array(["text"]), np.zeros(2, "M8[s]")])
def test_arrays_that_would_need_pickling_are_refused(path, array):
    with pytest.raises(TypeError, match="x of dtype .* given, one of float64, .* wanted"):
        write_tensors(path, {"x": array})
    assert list(path.parent.iterdir()) == []


@pytest.mark.skipif(sys.platform == "win32", reason="POSIX permissions")
def test_permissions_are_those_of_a_new_file(path):
    write_tensors(path, {"x": np.ones(3)})
    plain = path.with_name("plain")
    plain.touch()
    assert path.stat().st_mode == plain.stat().st_mode


@pytest.mark.skipif(sys.platform == "win32", reason="no limits on file sizes")
def test_a_full_disk_is_one_line_and_leaves_the_previous_file(path):
    # A limit on the size of files stands for the full disk: writing fails half-way.
    program = """
import resource, sys
import numpy as np
from twell_numba.errors import TwellError
from twell_numba.formats.tensor_file import write_tensors
resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000))
try:
    write_tensors(sys.argv[1], {"x": np.ones(10_000)})
except TwellError as error:
    print(error)
"""
    write_tensors(path, {"x": np.ones(3)})
    run = subprocess.run(
        [sys.executable, "-c", program, path], check=True, capture_output=True, text=True
    )
    assert run.stdout.startswith(f"cannot write {path}: ")
    assert "File too large" in run.stdout
    assert run.stdout.count("\n") == 1
    assert read_tensors(path)["x"].tolist() == [1, 1, 1]
    assert list(path.parent.iterdir()) == [path]


# ---------------------------------------------------------------------- bad files


def test_missing_files_folders_and_devices(path):
    refused(path, "is missing: a safetensors file wanted")
    refused(path.parent, "is not a regular file: a safetensors file wanted")
    refused(Path(os.devnull), "is not a regular file")


@pytest.mark.skipif(sys.platform == "win32", reason="no named pipes in folders")
def test_a_pipe_is_not_waited_for(path):
    os.mkfifo(path)
    refused(path, "is not a regular file")


@pytest.mark.parametrize("kept", [0, 7, 8, 50, -1])
def test_truncated_files(path, kept):
    write_tensors(path, {"x": np.ones(30)})
    path.write_bytes(path.read_bytes()[:kept])
    refused(path, "cannot be read as safetensors: .*; it may be truncated")


@pytest.mark.parametrize(
    "content", [b"\x93NUMPY" + bytes(100), b"PK\x03\x04" + bytes(100), b"text, not arrays" * 10]
)
def test_foreign_files(path, content):
    path.write_bytes(content)
    refused(path, "cannot be read as safetensors: .* of another kind")


@pytest.mark.parametrize(
    "header",
    [
        b"",
        b"[1, 2]",
        b"{",
        b"\xff\xfe{}",
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b'{"a": 3}',
        {"x": entry(shape=[2**40])},
        {"x": entry(shape=[2**62 + 2])},
        {"x": entry(shape=[2**40, 2**40, 0], end=0)},
        {"x": entry(shape=[-2])},
        {"x": entry(shape=[2.0])},
        {"x": entry(shape=2)},
        {"x": entry("F64")},
        {"x": entry("F128")},
        {"x": entry(begin=8, end=16)},
        {"x": entry(begin=8, end=0)},
        {"x": entry(end=2**63)},
        {"x": entry(), "y": entry()},
        {"x": entry(), "y": entry(begin=4, end=12)},
        {"x": entry(shape=[1], end=4)},
        {"x": {"dtype": "F32", "shape": [2]}},
        {"x": entry(), "__metadata__": {"tile": 256}},
        {"x": entry(), "__metadata__": []},
    ],
    ids=lambda header: str(header)[:60],
)
def test_lying_headers(path, header):
    write_raw(path, header, bytes(8))
    refused(path, "cannot be read as safetensors")


@pytest.mark.parametrize("shape", [[0, 2**62], [1] * 100 + [0]], ids=["huge", "deep"])
def test_shapes_that_numpy_cannot_hold(path, shape):
    write_raw(path, {"x": entry(shape=shape, end=0)})
    refused(path, "damaged: NumPy holds no array 'x' of shape")


def test_dtypes_that_numpy_does_not_have(path):
    write_raw(path, {"x": entry("F8_E4M3", [8])}, bytes(8))
    refused(path, "array 'x' of dtype F8_E4M3 given, one of float64, .* wanted")


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="memory measured through /proc")
def test_no_memory_is_taken_for_what_a_header_claims(path):
    program = """
import resource, sys
from pathlib import Path
from twell_numba.errors import TwellError
from twell_numba.formats.tensor_file import read_tensors
pages = int(Path("/proc/self/statm").read_text().split()[0])
limit = pages * resource.getpagesize() + (16 << 20)
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
for path in sys.argv[1:]:
    try:
        read_tensors(path)
    except TwellError:
        print("refused")
"""
    paths = [path.with_name(name) for name in ("shape", "offsets", "header")]
    write_raw(paths[0], {"x": entry(shape=[2**28])}, bytes(8))
    write_raw(paths[1], {"x": entry(shape=[2**28], end=2**30)}, bytes(8))
    paths[2].write_bytes(struct.pack("<Q", 99_000_000) + b'{"x": ')
    run = subprocess.run(
        [sys.executable, "-c", program, *paths], check=True, capture_output=True, text=True
    )
    assert run.stdout.split() == ["refused"] * 3


def test_a_file_that_may_not_be_read_is_called_so(tmp_path, monkeypatch):
    path = tmp_path / "tensors.safetensors"
    write_tensors(path, {"a": np.ones(3)})

    def refuse(*arguments):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("builtins.open", refuse)
    with pytest.raises(TwellError, match="cannot be read: Permission denied; make it readable"):
        read_tensors(path)
