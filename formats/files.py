"""Sparse matrices in files: one safetensors file a matrix.

The arrays are stored by their names. The file's metadata holds:

=============== ==================================================================
``format``      the format's name, such as ``twell``
``version``     of this layout of the file, ``1``
``shape``       JSON, ``[rows, columns]``
``dtype``       of the values, such as ``bfloat16``
others          the format's whole-number parameters by name, such as ``tile``
=============== ==================================================================
"""

import json
from collections.abc import Callable
from os import PathLike
from typing import TypeVar

from twell_numba.formats.base import FORMATS, SparseMatrix
from twell_numba.formats.tensor_file import (
    TensorFile,
    WrongFileError,
    open_tensor_file,
    write_tensors,
)

VERSION = 1

Matrix = TypeVar("Matrix", bound=SparseMatrix)


def save(matrix: SparseMatrix, path: str | PathLike[str]) -> None:
    """Write a matrix to ``path``, whole or not at all.

    Raises
    ------
    TwellError
        If the file cannot be written; what stood there before is then untouched.
    ValueError, TypeError
        If the matrix is not valid.
    """
    matrix = matrix.to("cpu")
    matrix.validate()
    metadata = {
        "format": matrix.format_name,
        "version": str(VERSION),
        "shape": json.dumps(matrix.shape),
        "dtype": matrix.dtype.name,
    }
    metadata |= {name: str(getattr(matrix, name)) for name in matrix.parameter_names}
    write_tensors(path, matrix._arrays_to_save(), metadata)


def load(path: str | PathLike[str]) -> SparseMatrix:
    """Read a matrix of any format from a file that its ``save`` wrote.

    Raises
    ------
    TwellError
        If the file is missing, truncated, not a matrix or not valid.
    """
    return load_as(SparseMatrix, path)  # type: ignore[type-abstract]


def load_as(cls: type[Matrix], path: str | PathLike[str]) -> Matrix:
    """Read a matrix as ``load`` does, of the format of ``cls`` (any, for ``SparseMatrix``)."""
    with open_tensor_file(path) as file:
        return _read_matrix(file, _matrix_class(file.metadata, cls))


def _matrix_class(metadata: dict[str, str], wanted: type[Matrix]) -> type[Matrix]:
    """Return the class to build: that of the file's format, or ``wanted`` where it is derived."""
    name = metadata.get("format", "")
    if name not in FORMATS:
        known = ", ".join(sorted(FORMATS))
        raise WrongFileError(f"not a sparse matrix: format {name!r} given, one of {known} wanted")
    version = metadata.get("version", "")
    if version != str(VERSION):
        raise WrongFileError(
            f"version {version!r} given, {VERSION} wanted; use a newer twell_numba"
        )
    stored = FORMATS[name]
    if issubclass(stored, wanted):
        return stored
    if issubclass(wanted, stored):
        return wanted
    raise WrongFileError(f"holds a {stored.__name__}, {wanted.__name__} wanted")


def _read_matrix(file: TensorFile, cls: type[Matrix]) -> Matrix:
    if set(file.tensors) != set(cls.array_names):
        given, wanted = sorted(file.tensors), sorted(cls.array_names)
        raise WrongFileError(f"damaged: arrays {given} given, {wanted} wanted")
    try:
        shape = tuple(json.loads(file.metadata["shape"]))
        parameters = {name: int(file.metadata[name]) for name in cls.parameter_names}
    except (KeyError, TypeError, ValueError, RecursionError):
        raise WrongFileError("damaged: its shape or parameters are missing or no numbers") from None
    try:
        arrays = {name: file.read(name) for name in cls.array_names}
        construct: Callable[..., Matrix] = cls
        matrix = construct(**arrays, shape=shape, **parameters)
    except (ValueError, TypeError, OverflowError) as error:
        raise WrongFileError(f"not valid: {error}") from error
    if matrix.dtype.name != file.metadata.get("dtype"):
        raise WrongFileError(
            f"damaged: dtype {file.metadata.get('dtype')!r} recorded, {matrix.dtype.name!r} found"
        )
    return matrix
