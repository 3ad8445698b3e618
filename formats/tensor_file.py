"""Named arrays in a safetensors file: written whole or not at all, read without trust.

A safetensors file is the header's length (8 bytes, little-endian), the header (JSON) and the
arrays' bytes (little-endian, C order). The header gives each array's dtype, shape and place, and
may hold text metadata. Equal arrays give equal files, byte for byte.

A header is believed only where it agrees with the size of the file, so no more memory is taken than
the file itself holds. Nothing is pickled.
"""

import json
import math
import os
import secrets
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from os import PathLike
from typing import Any, BinaryIO

import numpy as np

from twell_numba.errors import TwellError
from twell_numba.formats.arrays import BFLOAT16

LARGEST_HEADER = 100_000_000
DTYPES = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": BFLOAT16,
    "I64": np.dtype(np.int64),
    "I32": np.dtype(np.int32),
    "I16": np.dtype(np.int16),
    "I8": np.dtype(np.int8),
    "U64": np.dtype(np.uint64),
    "U32": np.dtype(np.uint32),
    "U16": np.dtype(np.uint16),
    "U8": np.dtype(np.uint8),
    "BOOL": np.dtype(np.bool_),
}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


# ---------------------------------------------------------------------- writing


def write_tensor_file(
    path: str | PathLike[str], arrays: Mapping[str, np.ndarray], metadata: Mapping[str, str]
) -> None:
    """Write arrays of any strides and byte order, and text metadata, to a safetensors file.

    Raises
    ------
    TwellError
        If the file cannot be written; what stood there before is then untouched.
    TypeError
        If an array's dtype is none of :data:`DTYPES`.
    """
    # The widest elements first, so that every array is aligned to its element size.
    names = sorted(arrays, key=lambda name: (-arrays[name].dtype.itemsize, name))
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    offset = 0
    for name in names:
        array = arrays[name]
        dtype = array.dtype.newbyteorder("=")
        if dtype not in DTYPE_NAMES:
            raise TypeError(
                f"{name} of dtype {dtype.name} given, one of "
                f"{', '.join(accepted.name for accepted in DTYPE_NAMES)} wanted"
            )
        header[name] = {
            "dtype": DTYPE_NAMES[dtype],
            "shape": list(array.shape),
            "data_offsets": [offset, offset + array.nbytes],
        }
        offset += array.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with write_file_atomically(path) as file:
        file.write(len(text).to_bytes(8, "little"))
        file.write(text)
        for name in names:
            file.write(_little_endian_bytes(arrays[name]).data)


def _little_endian_bytes(array: np.ndarray) -> np.ndarray:
    """Return an array's elements in C order, as bytes."""
    native = np.ascontiguousarray(array, array.dtype.newbyteorder("="))
    # As unsigned integers, which have a byte order; bfloat16 has none in NumPy.
    unsigned = np.dtype(f"=u{native.dtype.itemsize}")
    little = native.reshape(-1).view(unsigned).astype(unsigned.newbyteorder("<"), copy=False)
    return little.view(np.uint8)


@contextmanager
def write_file_atomically(path: str | PathLike[str]) -> Iterator[BinaryIO]:
    """Yield a new file to write; when the block ends well, it is synced and renamed to ``path``.

    Whenever this is interrupted, ``path`` holds either what it held before or the whole new file;
    a killed process leaves at most a hidden ``.<random>.tmp`` beside it. A symbolic link is
    followed, not replaced.

    Raises
    ------
    TwellError
        If the file cannot be written.
    """
    target = os.path.realpath(path)
    if os.path.lexists(target) and not os.path.isfile(target):
        # Renaming would put a file in the place of a device or a pipe.
        raise TwellError(f"{os.fspath(path)}: cannot be written: it is not a regular file")
    folder = os.path.dirname(target)
    temporary = os.path.join(folder, f".{secrets.token_hex(8)}.tmp")
    try:
        with open(temporary, "xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
        _sync_folder(folder)
    except OSError as error:
        reason = error.strerror or str(error)
        raise TwellError(f"{os.fspath(path)}: cannot be written: {reason}") from error
    finally:
        with suppress(OSError):
            os.remove(temporary)


def _sync_folder(path: str) -> None:
    """Force a renaming in a folder to the disk; Windows cannot and need not."""
    if os.name == "nt":
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# ---------------------------------------------------------------------- reading


class WrongFileError(TwellError):
    """What is wrong with a file."""


@dataclass(frozen=True)
class StoredArray:
    """Where an array lies in a safetensors file."""

    dtype: np.dtype
    shape: tuple[int, ...]
    offset: int


@contextmanager
def open_tensor_file(path: str | PathLike[str]) -> Iterator["TensorFile"]:
    """Yield a safetensors file for reading.

    Raises
    ------
    TwellError
        If the file is missing, truncated or not a safetensors file. A :class:`WrongFileError`
        raised inside the block becomes one that names the file.
    """
    try:
        with open(path, "rb") as file:
            yield TensorFile(file)
    except WrongFileError as error:
        raise TwellError(f"{os.fspath(path)}: {error}") from error
    except OSError as error:
        raise TwellError(f"{os.fspath(path)}: cannot be read: {error.strerror}") from error


class TensorFile:
    """An open safetensors file.

    Attributes
    ----------
    arrays : dict of StoredArray
    metadata : dict of str
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.arrays, self.metadata = _read_header(file)

    def read(self, name: str) -> np.ndarray:
        """Return an array of the file, in native byte order and writable."""
        stored = self.arrays[name]
        size = math.prod(stored.shape)
        unsigned = np.dtype(f"<u{stored.dtype.itemsize}")
        self._file.seek(stored.offset)
        data = np.fromfile(self._file, unsigned, size)
        if data.size != size:
            raise WrongFileError("truncated while it was read")
        native = data.astype(unsigned.newbyteorder("="), copy=False)
        return native.view(stored.dtype).reshape(stored.shape)


def _read_header(file: BinaryIO) -> tuple[dict[str, StoredArray], dict[str, str]]:
    status = os.fstat(file.fileno())
    if not stat.S_ISREG(status.st_mode):
        raise WrongFileError("not a regular file")
    length = int.from_bytes(file.read(8), "little")
    if status.st_size < 8 or length > min(status.st_size - 8, LARGEST_HEADER):
        raise WrongFileError("truncated, or not a safetensors file")
    entries = _parse_json(file.read(length))
    metadata = entries.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise WrongFileError("not a safetensors file: its metadata is not text")
    arrays = {}
    ranges = []
    for name, entry in entries.items():
        dtype, shape, begin, end = _parse_entry(name, entry)
        arrays[name] = StoredArray(dtype, shape, 8 + length + begin)
        ranges.append((begin, end))
    end_so_far = 0
    for begin, end in sorted(ranges):
        if begin != end_so_far:
            raise WrongFileError("damaged: its arrays overlap or leave gaps")
        end_so_far = end
    if 8 + length + end_so_far != status.st_size:
        raise WrongFileError(
            f"truncated or damaged: {status.st_size} bytes given, "
            f"{8 + length + end_so_far} wanted by its header"
        )
    return arrays, metadata


def _parse_json(text: bytes) -> dict[str, Any]:
    try:
        parsed = json.loads(text)
    except (ValueError, RecursionError):
        raise WrongFileError("not a safetensors file: its header is not JSON") from None
    if not isinstance(parsed, dict):
        raise WrongFileError("not a safetensors file: its header is not a JSON object")
    return parsed


def _parse_entry(name: str, entry: Any) -> tuple[np.dtype, tuple[int, ...], int, int]:
    """Return dtype, shape and byte range of an array after checking them against each other."""
    try:
        dtype = DTYPES[entry["dtype"]]
        shape = tuple(entry["shape"])
        begin, end = entry["data_offsets"]
        numbers = (*shape, begin, end)
    except (KeyError, TypeError, ValueError):
        raise WrongFileError(
            f"not a safetensors file: its entry {name!r} is not an array"
        ) from None
    if not all(type(number) is int and number >= 0 for number in numbers):
        raise WrongFileError(f"damaged: sizes of array {name!r} are not whole numbers")
    if end - begin != math.prod(shape) * dtype.itemsize:
        raise WrongFileError(
            f"damaged: array {name!r} has {end - begin} bytes, "
            f"{math.prod(shape) * dtype.itemsize} wanted for its shape"
        )
    return dtype, shape, begin, end
