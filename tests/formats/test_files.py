"""Saving and loading sparse matrices: exact, atomic, and never a wrong matrix."""

import json
import os
import struct
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors import safe_open

from twell_numba.errors import TwellError
from twell_numba.formats import (
    BlockELLMatrix,
    CSRMatrix,
    HybridELLMatrix,
    SparseMatrix,
    TwELLMatrix,
    load,
)
from twell_numba.formats.base import FORMATS
from twell_numba.formats.tensor_file import read_tensors

every_class = pytest.mark.parametrize("cls", FORMATS.values())
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


@pytest.mark.parametrize(
    ("cls", "layout"),
    [
        (TwELLMatrix, {"tile": 7, "slots": 3}),
        (HybridELLMatrix, {"width": 3}),
        (BlockELLMatrix, {"block_size": 3, "blocks_per_row": 100}),
    ],
)
def test_layout_survives(cls, layout, tmp_path):
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
    for name, padding in matrix._padding().items():
        getattr(matrix, name)[padding] = np.nan if name == "values" else 1234
    matrix.save(tmp_path / "poisoned")
    clean, poisoned = (read_tensors(tmp_path / name) for name in ("clean", "poisoned"))
    for name in matrix.array_names:
        assert clean[name].tobytes() == poisoned[name].tobytes()


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


# ---------------------------------------------------------------------- bad files


@pytest.mark.parametrize("kept", [0, 7, 8, 100, -1])
def test_truncated_files(saved, kept):
    saved.write_bytes(saved.read_bytes()[:kept])
    with pytest.raises(TwellError, match="truncated"):
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
        (["values", "dtype"], "I32", "not valid: TwELLMatrix: values: dtype int32 given"),
        (["columns", "dtype"], "F16", "not valid: TwELLMatrix: columns of dtype float16 given"),
        (["__metadata__", "format"], "zip", "format 'zip' given, one of"),
        (["__metadata__", "format"], "hybrid_ell", "not valid: HybridELLMatrix: columns of dtype"),
        (["__metadata__", "version"], "2", "version '2' given, 1 wanted"),
        (["__metadata__", "shape"], "[5, 301]", "not valid: TwELLMatrix: tail_values of shape"),
        (["__metadata__", "shape"], f"[{10**30}, 300]", "not valid: TwELLMatrix: shape"),
        (["__metadata__", "shape"], f"[{10**18}, 300]", "not valid: TwELLMatrix: counts of shape"),
        (["__metadata__", "shape"], "[5]", "not valid: TwELLMatrix: shape"),
        (["__metadata__", "shape"], "five", "damaged: its shape or parameters are missing"),
        (["__metadata__", "tile"], "wide", "damaged: its shape or parameters are missing"),
        (["__metadata__", "tile"], "16", "not valid: TwELLMatrix: counts of shape"),
        (["__metadata__", "tile"], "100000", "not valid: TwELLMatrix: tile: 100000 given"),
        (["__metadata__", "dtype"], "float16", "dtype 'float16' recorded, 'float32' found"),
        (["values", "shape"], [5, 2, 2**40], "cannot be read as safetensors"),
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


@pytest.mark.parametrize(
    ("matrix", "name", "place", "number", "message"),
    [
        (CSRMatrix.from_dense(np.eye(3)), "indptr", 1, -1, "row 0: ends at pointer -1 given"),
        (CSRMatrix.from_dense(np.eye(3)), "indptr", 3, 2, "row 2: ends at pointer 2 given"),
        (CSRMatrix.from_dense(np.eye(3)), "indices", 1, 3, "row 1: column 3 given, 0 to 2 wanted"),
        (
            BlockELLMatrix.from_dense(np.eye(4), block_size=2),
            "block_columns",
            1,
            2,
            "block row 1: block column 2 given, 0 to 1 wanted",
        ),
    ],
)
def test_wrong_indices_in_files_are_named(matrix, name, place, number, message, tmp_path):
    matrix.save(tmp_path / "matrix")
    header, data = read_parts(tmp_path / "matrix")
    begin = header[name]["data_offsets"][0] + 4 * place
    data = data[:begin] + struct.pack("<i", number) + data[begin + 4 :]
    write_parts(tmp_path / "matrix", header, data)
    with pytest.raises(TwellError, match=f"not valid: {type(matrix).__name__}: {message}"):
        load(tmp_path / "matrix")


def test_loading_as_another_format(saved):
    with pytest.raises(TwellError, match="holds a TwELLMatrix, HybridELLMatrix wanted"):
        HybridELLMatrix.load(saved)
    assert isinstance(SparseMatrix.load(saved), TwELLMatrix)
