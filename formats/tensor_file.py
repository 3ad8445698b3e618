"""Named arrays in a safetensors file: written whole or not at all, read without trust.

The one place that uses the safetensors library, which checks a file's header against the size of
the file before any array is read: no more memory is taken than the file itself holds. Nothing is
pickled. Arrays lie in the file by element size, then by name; the library writes metadata in any
order.
"""

import json
import math
import os
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from os import PathLike

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from twell_numba.atomic import write_file_atomically
from twell_numba.errors import TwellError
from twell_numba.formats.arrays import BFLOAT16

# By the names that safetensors gives them.
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
_ACCEPTED = ", ".join(dtype.name for dtype in DTYPES.values())


def write_tensors(
    path: str | PathLike[str],
    tensors: Mapping[str, np.ndarray],
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write arrays of any strides and byte order, and text metadata, to a safetensors file.

    Raises
    ------
    TwellError
        If the file cannot be written; what stood there before is then untouched.
    TypeError
        If an array's dtype is none of :data:`DTYPES`.
    """
    laid_out = {name: _laid_out(name, array) for name, array in tensors.items()}
    with write_file_atomically(path) as temporary:
        try:
            save_file(laid_out, temporary, dict(metadata) if metadata else None)
        except SafetensorError as error:
            raise OSError(_reason(error)) from error


def read_tensors(path: str | PathLike[str]) -> dict[str, np.ndarray]:
    """Read every array of a safetensors file into memory, as :meth:`TensorFile.read` does.

    Raises
    ------
    TwellError
        As :func:`open_tensor_file`.
    """
    with open_tensor_file(path) as file:
        return {name: file.read(name) for name in file.tensors}


class WrongFileError(TwellError):
    """What is wrong with a file; :func:`open_tensor_file` puts the file's name before it."""


@contextmanager
def open_tensor_file(path: str | PathLike[str]) -> Iterator["TensorFile"]:
    """Open a safetensors file for reading in a ``with`` block.

    Raises
    ------
    TwellError
        If the file is missing, truncated or not a safetensors file. A :class:`WrongFileError`
        raised inside the block becomes one that names the file.
    """
    if not os.path.isfile(path):
        given = "is not a regular file" if os.path.exists(path) else "is missing"
        raise TwellError(f"{os.fspath(path)} {given}: a safetensors file wanted, check the path")
    try:
        # The library calls a file that may not be read missing.
        open(path, "rb").close()
    except OSError as error:
        raise TwellError(
            f"{os.fspath(path)} cannot be read: {error.strerror}; make it readable"
        ) from error
    try:
        with safe_open(path, framework="numpy") as file:
            yield TensorFile(file, path)
    except (SafetensorError, OSError) as error:
        raise TwellError(
            f"{os.fspath(path)} cannot be read as safetensors: {_reason(error)}; "
            f"it may be truncated or of another kind, fetch or save it again"
        ) from error
    except WrongFileError as error:
        raise TwellError(f"{os.fspath(path)}: {error}") from error


@dataclass(frozen=True)
class StoredTensor:
    """What a file's header says of an array; ``dtype`` is safetensors' name, such as ``F32``."""

    shape: tuple[int, ...]
    dtype: str


class TensorFile:
    """An open safetensors file.

    Attributes
    ----------
    tensors : dict of str to StoredTensor
    metadata : dict of str to str
    """

    def __init__(self, file: safe_open, path: str | PathLike[str]) -> None:
        self._file = file
        self._path = path
        self.metadata: dict[str, str] = file.metadata() or {}
        slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
        self.tensors = {
            name: StoredTensor(tuple(part.get_shape()), part.get_dtype())
            for name, part in slices.items()
        }

    def read(self, name: str) -> np.ndarray:
        """Return an array of the file: C-contiguous, writable, in native byte order."""
        dtype, shape = self._dtype(name), self.tensors[name].shape
        try:
            if sys.byteorder == "big":
                return np.require(self._file.get_tensor(name), requirements=["C", "W"])
            array = np.empty(shape, dtype)
        except ValueError as error:
            raise WrongFileError(
                f"damaged: NumPy holds no array {name!r} of shape {shape}"
            ) from error
        # Through the library the file's memory would count as this process's beside the array's.
        with open(self._path, "rb") as file:
            file.seek(self._offsets[name])
            if file.readinto(array.reshape(-1).view(np.uint8).data) != array.nbytes:
                raise WrongFileError(f"truncated while it was read, in array {name!r}")
        return array

    def map(self, name: str) -> np.ndarray:
        """Return an array whose memory is the file's: only what is used of it is ever read.

        It is C-contiguous, and stays valid when the file is closed or replaced by another. What is
        written into it is kept in memory alone. An array that does not lie in the file as NumPy
        needs it (an odd address, another byte order) is read instead.
        """
        dtype, shape = self._dtype(name), self.tensors[name].shape
        size = math.prod(shape) * dtype.itemsize
        if size == 0 or sys.byteorder == "big":
            return self.read(name)
        start = self._offsets[name]
        array = self._content[start : start + size]
        if array.ctypes.data % dtype.itemsize:
            return self.read(name)
        return array.view(dtype).reshape(shape)

    @cached_property
    def _content(self) -> np.ndarray:
        return np.asarray(np.memmap(self._path, np.uint8, mode="c"))

    @cached_property
    def _offsets(self) -> dict[str, int]:
        """Where each array begins in the file, which the library has found to be sound.

        A file is the length of a header in 8 bytes, the header in JSON, and the arrays.
        """
        with open(self._path, "rb") as file:
            header_size = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(header_size))
        return {
            name: 8 + header_size + entry["data_offsets"][0]
            for name, entry in header.items()
            if name != "__metadata__"
        }

    def _dtype(self, name: str) -> np.dtype:
        stored = self.tensors[name]
        if stored.dtype not in DTYPES:
            raise WrongFileError(
                f"array {name!r} of dtype {stored.dtype} given, one of {_ACCEPTED} wanted"
            )
        return DTYPES[stored.dtype]


def _laid_out(name: str, array: np.ndarray) -> np.ndarray:
    """Return an array in native byte order and C order.

    safetensors 0.8 writes any other array in the order of its memory, which scrambles it.
    """
    native = array.dtype.newbyteorder("=")
    if native not in DTYPES.values():
        raise TypeError(f"{name} of dtype {native.name} given, one of {_ACCEPTED} wanted")
    return np.asarray(array, native, order="C")


def _reason(error: Exception) -> str:
    """Shorten "Error while serializing: I/O error: No space left on device (os error 28)"."""
    text = " ".join(str(error).split())
    return re.sub(r"^Error while (de)?serializing( header)?: ", "", text)
