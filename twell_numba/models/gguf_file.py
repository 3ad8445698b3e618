"""The header of a GGUF file: metadata, and where each tensor stands.

A file begins with ``GGUF``, a version, how many tensors and how many keys there are, the keys with
their values, and then for each tensor its name, shape, type and place. Strings and arrays come with
their length in front. All of it is little-endian here. No length is believed before the file is
seen to be that long, so that a damaged or hostile file costs neither time nor memory.

Source: docs/gguf.md of the ggml project.
"""

import math
import mmap
import os
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from twell_numba.errors import TwellError, shown
from twell_numba.models.gguf_types import TensorType, tensor_type
from twell_numba.models.reading import GGUF_MAGIC, is_file, unreadable

VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
# Far beyond any model there is.
MOST_TENSORS = MOST_KEYS = 1 << 17
MOST_TEXTS = 1 << 24
MOST_DIMENSIONS = 4

_BOOL, _STRING, _ARRAY = 7, 8, 9
_NUMBERS = {
    0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", _BOOL: "|b1",
    10: "<u8", 11: "<i8", 12: "<f8",
}  # fmt: skip


@dataclass(frozen=True)
class GGUFTensor:
    """Where a tensor stands in a file.

    Attributes
    ----------
    name : str
    shape : tuple of int
        Rows first, as NumPy has it; the file has it the other way round.
    type : TensorType
    offset, nbytes : int
        Of its data, from the file's first byte on.
    """

    name: str
    shape: tuple[int, ...]
    type: TensorType
    offset: int
    nbytes: int

    @property
    def row_nbytes(self) -> int:
        """The bytes of a row; a vector is one row."""
        return self.shape[-1] // self.type.block_size * self.type.block_nbytes


@dataclass(frozen=True)
class GGUFFile:
    """What the header of a file says.

    Attributes
    ----------
    path : Path
    metadata : dict
        Numbers, truth values, texts, lists of texts, and arrays of numbers by their key.
    tensors : dict of str to GGUFTensor
    """

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, GGUFTensor]

    def text(self, key: str, default: str | None = None) -> str:
        """Return a text, the default where the key is missing."""
        return self._value(key, default, "a text", lambda value: isinstance(value, str))

    def flag(self, key: str, default: bool | None = None) -> bool:
        """Return a truth value, the default where the key is missing."""
        return self._value(key, default, "true or false", lambda value: isinstance(value, bool))

    def integer(self, key: str, default: int | None = None) -> int:
        """Return a whole number; of an array of equal ones, one for each layer, that one."""
        value = self.metadata.get(key)
        if isinstance(value, np.ndarray) and value.size and (value == value[0]).all():
            value = value[0].item()
            return self._checked(key, value, "a whole number", _is_integer)
        return self._value(key, default, "a whole number", _is_integer)

    def number(self, key: str, default: float | None = None) -> float:
        """Return a number, the default where the key is missing."""
        return float(
            self._value(
                key,
                default,
                "a number",
                lambda value: isinstance(value, int | float) and not isinstance(value, bool),
            )
        )

    def texts(self, key: str) -> list[str]:
        """Return a list of texts."""
        return self._value(key, None, "a list of texts", lambda value: isinstance(value, list))

    def numbers(self, key: str) -> np.ndarray:
        """Return an array of numbers."""
        return self._value(
            key, None, "an array of numbers", lambda value: isinstance(value, np.ndarray)
        )

    def _value(self, key: str, default: Any, wanted: str, is_right: Callable[[Any], bool]) -> Any:
        if key not in self.metadata:
            if default is None:
                raise TwellError(f"{self.path} has no {key}, which a model's description needs")
            return default
        return self._checked(key, self.metadata[key], wanted, is_right)

    def _checked(self, key: str, value: Any, wanted: str, is_right: Callable[[Any], bool]) -> Any:
        if not is_right(value):
            raise TwellError(f"{self.path} has {key} {shown(value)}, {wanted} wanted")
        return value


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def open_gguf(path: str | os.PathLike[str]) -> GGUFFile:
    """Read the header of a GGUF file.

    Raises
    ------
    TwellError
        If the file is missing, of another kind, damaged or truncated, or has tensors of a type that
        is not known: one line.
    """
    path = Path(path)
    if not is_file(path):
        raise TwellError(f"{path} is missing: a GGUF file wanted, check the path")
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            if file.read(len(GGUF_MAGIC)) != GGUF_MAGIC:
                raise TwellError(f"{path} is not a GGUF file: give another, or fetch it again")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
                return _read_header(path, content, size)
    except OSError as error:
        raise unreadable(path, error) from error
    except _Damage as error:
        raise TwellError(f"{path} is damaged or truncated: {error}; fetch it again") from error


class _Damage(Exception):
    """What is wrong with a file."""


class _Cursor:
    """A place in a file, from which values are read one after the other."""

    def __init__(self, content: mmap.mmap, size: int, place: int) -> None:
        self._content = content
        self._size = size
        self.place = place

    def require(self, count: int, item_nbytes: int, what: str) -> None:
        """Refuse to go on if the rest of the file has no room for so many items."""
        if count * item_nbytes > self._size - self.place:
            raise _Damage(f"{what} {count} at byte {self.place} do not fit into {self._size} bytes")

    def take(self, count: int, what: str) -> bytes:
        self.require(count, 1, what)
        taken = self._content[self.place : self.place + count]
        self.place += count
        return taken

    def integer(self, code: str) -> int:
        width = struct.calcsize(code)
        return struct.unpack(code, self.take(width, "bytes of a number"))[0]

    def text(self) -> str:
        length = self.integer("<Q")
        # Some vocabularies have tokens that are no text; they must not fail the rest.
        return self.take(length, "bytes of a text").decode("utf-8", "replace")

    def texts(self, count: int) -> list[str]:
        """Return so many texts: as :meth:`text`, in a loop that is as short as can be."""
        self.require(count, 8, "texts")
        if count > MOST_TEXTS:
            raise _Damage(f"a list of {count} texts, at most {MOST_TEXTS} are read")
        texts: list[str] = []
        content, place, size = self._content, self.place, self._size
        length_at = struct.Struct("<Q").unpack_from
        for _ in range(count):
            if place + 8 > size:
                raise _Damage(f"a list of {count} texts ends at text {len(texts)}")
            start = place + 8
            place = start + length_at(content, place)[0]
            if place > size:
                raise _Damage(f"text {len(texts)} of a list goes beyond the file's end")
            texts.append(content[start:place].decode("utf-8", "replace"))
        self.place = place
        return texts


def _read_header(path: Path, content: mmap.mmap, size: int) -> GGUFFile:
    cursor = _Cursor(content, size, len(GGUF_MAGIC))
    version = cursor.integer("<I")
    if version not in VERSIONS:
        swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
        reason = "big-endian" if swapped in VERSIONS else f"of version {version}"
        raise TwellError(
            f"{path} is {reason}, little-endian of version {' or '.join(map(str, VERSIONS))} "
            f"wanted; convert the model again"
        )
    tensor_count, key_count = cursor.integer("<Q"), cursor.integer("<Q")
    # A key takes at least its length, its type and a byte; a tensor its length, rank, type, place.
    cursor.require(key_count, 13, "keys")
    cursor.require(tensor_count, 24, "tensors")
    if key_count > MOST_KEYS or tensor_count > MOST_TENSORS:
        raise _Damage(f"{key_count} keys and {tensor_count} tensors")
    metadata: dict[str, Any] = {}
    for _ in range(key_count):
        key = cursor.text()
        if key in metadata:
            raise _Damage(f"the key {shown(key)} occurs twice")
        metadata[key] = _read_value(cursor, cursor.integer("<I"), key)
    file = GGUFFile(path, metadata, {})
    alignment = file.integer("general.alignment", DEFAULT_ALIGNMENT)
    if not 1 <= alignment <= 1 << 20 or alignment & (alignment - 1):
        raise _Damage(f"alignment {alignment}, a power of two wanted")
    descriptions = [_read_description(cursor) for _ in range(tensor_count)]
    start = -(-cursor.place // alignment) * alignment
    tensors: dict[str, GGUFTensor] = {}
    for name, shape, number, offset in descriptions:
        if name in tensors:
            raise _Damage(f"the tensor {shown(name)} occurs twice")
        tensors[name] = _placed(name, shape, number, start + offset, size)
    return GGUFFile(path, metadata, tensors)


def _read_value(cursor: _Cursor, kind: int, key: str) -> Any:
    if kind == _STRING:
        return cursor.text()
    if kind in _NUMBERS:
        number = _read_numbers(cursor, kind, 1)[0]
        # 1e-05, not the 9.99999974738e-06 that stands for it in float32
        return float(str(number)) if number.dtype == np.float32 else number.item()
    if kind != _ARRAY:
        raise _Damage(f"{shown(key)} is of type {kind}, which GGUF does not have")
    item_kind, count = cursor.integer("<I"), cursor.integer("<Q")
    if item_kind == _STRING:
        return cursor.texts(count)
    if item_kind not in _NUMBERS:
        raise _Damage(f"{shown(key)} is an array of type {item_kind}, numbers or texts wanted")
    return _read_numbers(cursor, item_kind, count)


def _read_numbers(cursor: _Cursor, kind: int, count: int) -> np.ndarray:
    dtype = np.dtype(_NUMBERS[kind])
    cursor.require(count, dtype.itemsize, "numbers")
    data = cursor.take(count * dtype.itemsize, "numbers")
    if kind == _BOOL:
        return np.frombuffer(data, np.uint8) != 0
    return np.frombuffer(data, dtype)


def _read_description(cursor: _Cursor) -> tuple[str, tuple[int, ...], int, int]:
    name = cursor.text()
    rank = cursor.integer("<I")
    if not 1 <= rank <= MOST_DIMENSIONS:
        raise _Damage(f"the tensor {shown(name)} has {rank} dimensions")
    shape = tuple(cursor.integer("<Q") for _ in range(rank))[::-1]
    return name, shape, cursor.integer("<I"), cursor.integer("<Q")


def _placed(name: str, shape: tuple[int, ...], number: int, offset: int, size: int) -> GGUFTensor:
    kind = tensor_type(number)
    if kind is None:
        raise TwellError(
            f"the tensor {shown(name)} is of type {number}, which is not known: fetch the model in "
            f"another type, Q8_0 for example, or install a newer gguf package"
        )
    if 0 in shape or shape[-1] % kind.block_size:
        raise _Damage(f"the tensor {shown(name)} of type {kind.name} has the shape {shape}")
    nbytes = math.prod(shape) // kind.block_size * kind.block_nbytes
    if offset + nbytes > size:
        raise _Damage(
            f"the tensor {shown(name)} ends at byte {offset + nbytes}, the file at byte {size}"
        )
    return GGUFTensor(name, shape, kind, offset, nbytes)
