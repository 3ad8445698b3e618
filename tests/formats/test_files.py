"""Saving and loading sparse matrices: exact, atomic, and never fooled by a bad file."""

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
from twell_numba.formats import HybridELLMatrix, SparseMatrix, TwELLMatrix, load
from twell_numba.formats.tensor_file import open_tensor_file, write_tensor_file

CLASSES = [TwELLMatrix, HybridELLMatrix]
every_class = pytest.mark.parametrize("cls", CLASSES)
every_dtype = pytest.mark.parametrize(
    "dtype",
    [np.float64, np.float32, np.float16, ml_dtypes.bfloat16],
    ids=lambda dtype: np.dtype(dtype).name,
)


def example(dtype: type = np.float32) -> np.ndarray:
    rng = np.random.default_rng(3)
    dense = rng.standard_normal((5, 300)) * (rng.random((5, 300)) < 0.05)
    dense[1] = 1.0
    dense[2, :3] = [np.nan, np.inf, -np.inf]
    return dense.astype(dtype)


def read_parts(path: Path) -> tuple[dict, bytes]:
    content = path.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    return json.loads(content[8 : 8 + length]), content[8 + length :]


def write_parts(path: Path, header: object, data: bytes) -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    path = tmp_path / "matrix.safetensors"
    TwELLMatrix.from_dense(example()).save(path)
    return path


# ---------------------------------------------------------------------- round trips


@every_class
@every_dtype
def test_round_trip(cls, dtype, tmp_path):
    matrix = cls.from_dense(example(dtype))
    matrix.save(tmp_path / "matrix.safetensors")
    for same in (load(tmp_path / "matrix.safetensors"), cls.load(tmp_path / "matrix.safetensors")):
        assert type(same) is cls
        assert same.dtype == matrix.dtype
        assert same.shape == matrix.shape
        for name in matrix.array_names:
            given, wanted = getattr(same, name), getattr(matrix, name)
            assert given.tobytes() == wanted.tobytes()
            assert given.shape == wanted.shape
            assert given.flags.writeable


@every_class
@pytest.mark.parametrize("shape", [(0, 0), (0, 5), (5, 0), (1, 1)])
def test_small_shapes_round_trip(cls, shape, tmp_path):
    matrix = cls.from_dense(np.ones(shape))
    matrix.save(str(tmp_path / "matrix"))
    assert load(str(tmp_path / "matrix")) == matrix


@every_class
def test_transposed_and_strided_arrays_round_trip(cls, tmp_path):
    matrix = cls.from_dense(np.asfortranarray(example()))
    for name in matrix.array_names:
        setattr(matrix, name, np.asfortranarray(getattr(matrix, name)))
    matrix.save(tmp_path / "matrix")
    assert load(tmp_path / "matrix") == cls.from_dense(example())


@every_class
def test_layout_survives(cls, tmp_path):
    layout = {"tile": 7, "slots": 3} if cls is TwELLMatrix else {"width": 3}
    cls.from_dense(example(), **layout).save(tmp_path / "matrix")
    same = load(tmp_path / "matrix")
    for name, value in layout.items():
        assert getattr(same, name) == value


@every_class
def test_subclasses_are_saved_and_loaded(cls, tmp_path):
    class Derived(cls):
        pass

    matrix = Derived.from_dense(example())
    matrix.save(tmp_path / "matrix")
    assert type(Derived.load(tmp_path / "matrix")) is Derived
    assert type(load(tmp_path / "matrix")) is cls
    assert load(tmp_path / "matrix") == matrix


@every_class
def test_contents_of_padding_stay_out_of_files(cls, tmp_path):
    matrix = cls.from_dense(example())
    matrix.save(tmp_path / "clean")
    matrix.values[~matrix.stored()] = np.nan
    matrix.columns[~matrix.stored()] = 1234
    matrix.save(tmp_path / "poisoned")
    assert (tmp_path / "clean").read_bytes() == (tmp_path / "poisoned").read_bytes()


@every_dtype
def test_other_tools_read_the_file(dtype, tmp_path):
    matrix = TwELLMatrix.from_dense(example(dtype))
    matrix.save(tmp_path / "matrix")
    with safe_open(tmp_path / "matrix", framework="numpy") as file:
        assert file.metadata() == {
            "format": "twell",
            "version": "1",
            "shape": "[5, 300]",
            "dtype": np.dtype(dtype).name,
            "tile": "256",
        }
        np.testing.assert_array_equal(file.get_tensor("counts"), matrix.counts)


def test_arrays_of_any_arrangement_are_written_in_c_order(tmp_path):
    array = np.arange(12, dtype=np.float32).reshape(3, 4)
    arrays = {
        "fortran": np.asfortranarray(array),
        "reversed": array[::-1, ::-1],
        "big-endian": array.astype(">f4"),
        "scalar": np.array(5, np.int64),
        "bits": array > 5,
    }
    write_tensor_file(tmp_path / "tensors", arrays, {})
    with safe_open(tmp_path / "tensors", framework="numpy") as file:
        for name, wanted in arrays.items():
            np.testing.assert_array_equal(file.get_tensor(name), wanted)
    with open_tensor_file(tmp_path / "tensors") as own:
        for name, wanted in arrays.items():
            np.testing.assert_array_equal(own.read(name), wanted)


def test_arrays_that_would_need_pickling_are_refused(tmp_path):
    with pytest.raises(TypeError, match="a of dtype object given, one of float64"):
        write_tensor_file(tmp_path / "tensors", {"a": np.array([None])}, {})
    assert list(tmp_path.iterdir()) == []


def test_invalid_matrices_are_not_saved(tmp_path):
    matrix = TwELLMatrix.from_dense(example())
    matrix.counts[3, 1] = 99
    with pytest.raises(ValueError, match="row 3, tile 1: count 99"):
        matrix.save(tmp_path / "matrix")
    assert list(tmp_path.iterdir()) == []


# ---------------------------------------------------------------------- atomic writing


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_an_interrupted_save_leaves_the_previous_file(saved, error, monkeypatch):
    before = saved.read_bytes()

    def interrupt(descriptor: int) -> None:
        raise error

    monkeypatch.setattr(os, "fsync", interrupt)
    wanted = TwellError if isinstance(error, OSError) else KeyboardInterrupt
    with pytest.raises(wanted):
        HybridELLMatrix.from_dense(np.eye(3)).save(saved)
    assert saved.read_bytes() == before
    assert list(saved.parent.iterdir()) == [saved]


@pytest.mark.skipif(sys.platform == "win32", reason="no limits on file sizes")
def test_a_full_disk_is_one_line_and_leaves_the_previous_file(saved):
    # A limit on the size of files stands for the full disk: writing fails half-way.
    program = """
import resource, sys
import numpy as np
from twell_numba.errors import TwellError
from twell_numba.formats import TwELLMatrix
resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000))
try:
    TwELLMatrix.from_dense(np.ones((100, 300))).save(sys.argv[1])
except TwellError as error:
    print(error)
"""
    before = saved.read_bytes()
    run = subprocess.run(
        [sys.executable, "-c", program, saved], check=True, capture_output=True, text=True
    )
    assert run.stdout.startswith(f"{saved}: cannot be written: ")
    assert run.stdout.count("\n") == 1
    assert saved.read_bytes() == before
    assert list(saved.parent.iterdir()) == [saved]


def test_saving_where_no_file_can_be(tmp_path):
    matrix = TwELLMatrix.from_dense(np.eye(3))
    (tmp_path / "folder").mkdir()
    for path in (tmp_path / "missing" / "matrix", tmp_path / "folder"):
        with pytest.raises(TwellError, match="cannot be written: ") as caught:
            matrix.save(path)
        assert str(caught.value).startswith(str(path))
    assert [entry.name for entry in tmp_path.iterdir()] == ["folder"]
    assert list((tmp_path / "folder").iterdir()) == []


@pytest.mark.skipif(sys.platform == "win32", reason="no named pipes in folders")
def test_pipes_and_devices_are_neither_replaced_nor_read(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(TwellError, match="cannot be written: it is not a regular file"):
        TwELLMatrix.from_dense(np.eye(3)).save(tmp_path / "pipe")
    assert (tmp_path / "pipe").is_fifo()
    with pytest.raises(TwellError, match="not a regular file"):
        load(os.devnull)


@pytest.mark.skipif(sys.platform == "win32", reason="symbolic links need a privilege")
def test_symbolic_links_are_followed(saved):
    link = saved.parent / "link"
    link.symlink_to(saved)
    HybridELLMatrix.from_dense(np.eye(3)).save(link)
    assert link.is_symlink()
    assert load(saved) == HybridELLMatrix.from_dense(np.eye(3))


@pytest.mark.skipif(sys.platform == "win32", reason="POSIX permissions")
def test_permissions_are_those_of_a_new_file(saved):
    plain = saved.parent / "plain"
    plain.write_bytes(b"")
    assert saved.stat().st_mode == plain.stat().st_mode


# ---------------------------------------------------------------------- bad files


def test_missing_files_and_folders(tmp_path):
    with pytest.raises(TwellError, match=r"missing: cannot be read: No such file"):
        load(tmp_path / "missing")
    with pytest.raises(TwellError, match="cannot be read|not a regular file"):
        load(tmp_path)


@pytest.mark.parametrize("kept", [0, 7, 8, 100, -1])
def test_truncated_files(saved, kept):
    saved.write_bytes(saved.read_bytes()[:kept])
    with pytest.raises(TwellError, match="truncated"):
        load(saved)


def test_files_with_something_behind_the_arrays(saved):
    saved.write_bytes(saved.read_bytes() + b"\0")
    with pytest.raises(TwellError, match="truncated or damaged: .* bytes given, .* wanted"):
        load(saved)


@pytest.mark.parametrize(
    "content", [b"\x93NUMPY" + bytes(100), b"PK\x03\x04" + bytes(100), b"text, not arrays" * 10]
)
def test_foreign_files(saved, content):
    saved.write_bytes(content)
    with pytest.raises(TwellError, match="not a safetensors file"):
        load(saved)


@pytest.mark.parametrize("header", [b"[1, 2]", b"{", b"\xff\xfe{}", b"[" * 100_000, b'{"a": 3}'])
def test_headers_that_are_no_headers(saved, header):
    write_parts(saved, header, b"")
    with pytest.raises(TwellError, match="not a safetensors file"):
        load(saved)


def test_safetensors_files_that_hold_no_matrix(saved):
    write_parts(saved, {"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}, bytes(8))
    with pytest.raises(TwellError, match="not a sparse matrix: format '' given, one of .*twell"):
        load(saved)


def lie(header: dict, *keys: str, value: object) -> None:
    for key in keys[:-1]:
        header = header[key]
    header[keys[-1]] = value


@pytest.mark.parametrize(
    ("keys", "value", "message"),
    [
        (["values", "shape"], [5, 2, 2**40], "damaged: array 'values' has .* bytes, .* wanted"),
        (["values", "shape"], [5, 2, -32], "damaged: sizes of array 'values'"),
        (["values", "shape"], [5, 2, 32.0], "damaged: sizes of array 'values'"),
        (["values", "shape"], 5, "entry 'values' is not an array"),
        (["values", "dtype"], "F128", "entry 'values' is not an array"),
        (["values", "dtype"], "F64", "damaged: array 'values' has"),
        (["values", "dtype"], "I32", "not valid: TwELLMatrix: values: dtype int32 given"),
        (["columns", "dtype"], "F16", "not valid: TwELLMatrix: columns of dtype float16 given"),
        (["counts", "data_offsets"], [0, 40], "damaged: its arrays overlap or leave gaps"),
        (["counts", "data_offsets"], [40, 0], "damaged: array 'counts' has -40 bytes"),
        (["__metadata__", "format"], "zip", "format 'zip' given, one of"),
        (["__metadata__", "format"], "hybrid_ell", "not valid: HybridELLMatrix: columns of dtype"),
        (["__metadata__", "version"], "2", "version '2' given, 1 wanted"),
        (["__metadata__", "shape"], "[5, 301]", "not valid: TwELLMatrix: tail_values of shape"),
        (["__metadata__", "shape"], f"[{10**30}, 300]", "not valid: TwELLMatrix: counts of shape"),
        (["__metadata__", "shape"], "[5]", "not valid: TwELLMatrix: shape"),
        (["__metadata__", "shape"], "five", "damaged: its shape or parameters are missing"),
        (["__metadata__", "tile"], "wide", "damaged: its shape or parameters are missing"),
        (["__metadata__", "tile"], "16", "not valid: TwELLMatrix: counts of shape"),
        (["__metadata__", "tile"], "100000", "not valid: TwELLMatrix: tile: 100000 given"),
        (["__metadata__", "dtype"], "float16", "dtype 'float16' recorded, 'float32' found"),
        (["__metadata__", "tile"], 256, "its metadata is not text"),
        (["__metadata__"], [], "its metadata is not text"),
        (["__metadata__"], {"format": "twell", "version": "1"}, "its shape or parameters"),
    ],
)
def test_lying_headers(saved, keys, value, message):
    header, data = read_parts(saved)
    lie(header, *keys, value=value)
    write_parts(saved, header, data)
    with pytest.raises(TwellError, match=message) as caught:
        load(saved)
    assert "\n" not in str(caught.value)


def test_sizes_beyond_64_bits_without_any_bytes(tmp_path):
    path = tmp_path / "matrix"
    HybridELLMatrix.from_dense(np.zeros((0, 3))).save(path)
    header, data = read_parts(path)
    lie(header, "tail_values", "shape", value=[0, 10**30])
    lie(header, "__metadata__", "shape", value=f"[0, {10**30}]")
    write_parts(path, header, data)
    with pytest.raises(TwellError, match="not valid"):
        load(path)


@pytest.mark.parametrize("change", ["missing", "unexpected"])
def test_files_with_other_arrays(saved, change):
    header, data = read_parts(saved)
    if change == "missing":
        assert header.pop("tail_rows")["data_offsets"]
        header["other"] = {"dtype": "I64", "shape": [1], "data_offsets": [0, 0]}
        header = {"__metadata__": header["__metadata__"]}
        data = b""
    else:
        header["other"] = {"dtype": "U8", "shape": [1], "data_offsets": [len(data), len(data) + 1]}
        data += b"\0"
    write_parts(saved, header, data)
    with pytest.raises(TwellError, match="damaged: arrays .* given, .* wanted"):
        load(saved)


def test_invalid_contents_are_named(saved):
    header, data = read_parts(saved)
    begin, _ = header["counts"]["data_offsets"]
    data = data[:begin] + struct.pack("<i", 77) + data[begin + 4 :]
    write_parts(saved, header, data)
    with pytest.raises(TwellError, match="row 0, tile 0: count 77 given, 0 to 32 wanted"):
        load(saved)


def test_loading_as_another_format(saved):
    with pytest.raises(TwellError, match="holds a TwELLMatrix, HybridELLMatrix wanted"):
        HybridELLMatrix.load(saved)
    assert isinstance(SparseMatrix.load(saved), TwELLMatrix)


def test_header_can_be_read_alone(saved):
    with open_tensor_file(saved) as file:
        assert file.metadata["format"] == "twell"
        assert file.arrays["values"].shape == (5, 2, 32)
        assert file.arrays["values"].dtype == np.float32
