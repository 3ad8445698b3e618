"""DLPack capsules, with which libraries hand each other arrays without a copy.

See dlpack.h of https://github.com/dmlc/dlpack: a capsule named ``dltensor`` holds a pointer to a
``DLManagedTensor``. Who takes the tensor renames the capsule, and calls the deleter in the end.
"""

import ctypes
import sys
import weakref
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

CPU, CUDA, CUDA_MANAGED = 1, 2, 13  # DLDeviceType

_NAME, _USED_NAME = b"dltensor", b"used_dltensor"  # read by the capsules as long as they live

_INT, _UINT, _FLOAT, _BFLOAT, _BOOL = 0, 1, 2, 4, 6  # DLDataTypeCode
_CODES = {
    np.dtype(np.bool_): (_BOOL, 8),
    np.dtype(ml_dtypes.bfloat16): (_BFLOAT, 16),
    **{np.dtype(f"i{size}"): (_INT, 8 * size) for size in (1, 2, 4, 8)},
    **{np.dtype(f"u{size}"): (_UINT, 8 * size) for size in (1, 2, 4, 8)},
    **{np.dtype(f"f{size}"): (_FLOAT, 8 * size) for size in (2, 4, 8)},
}
_DTYPES = {code: dtype for dtype, code in _CODES.items()}


class _Tensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


_Deleter = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class _ManagedTensor(ctypes.Structure):
    _fields_ = (
        ("tensor", _Tensor),
        ("manager", ctypes.c_void_p),
        ("deleter", _Deleter),
    )


def _python_function(name: str, result: Any, *arguments: Any) -> Any:
    return ctypes.PYFUNCTYPE(result, *arguments)((name, ctypes.pythonapi))


_new_capsule = _python_function(
    "PyCapsule_New", ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p
)
_is_valid = _python_function("PyCapsule_IsValid", ctypes.c_int, ctypes.c_void_p, ctypes.c_char_p)
_pointer_of = _python_function(
    "PyCapsule_GetPointer", ctypes.c_void_p, ctypes.c_void_p, ctypes.c_char_p
)
_set_name = _python_function("PyCapsule_SetName", ctypes.c_int, ctypes.py_object, ctypes.c_char_p)

# What exported tensors refer to, by the tensor's address, until their deleter is called; and the
# capsule, until the tensor has been taken out of it.
_exported: dict[int, list[Any]] = {}


@_Deleter
def _forget_tensor(address: int) -> None:
    _exported.pop(address, None)


def drop_refused() -> None:
    """Forget tensors that nobody took out of their capsules, which are gone.

    Called at every export, instead of by the capsules: who refuses one drops it with an error
    pending, which a destructor written in Python would take for its own.
    """
    for address, export in list(_exported.items()):
        if export[-1] is None:
            continue
        if not _is_valid(id(export[-1]), _NAME):
            export[-1] = None  # taken: its deleter will be called
        elif _references(export) == _UNHELD:
            del _exported[address]


def _references(export: list[Any]) -> int:
    return sys.getrefcount(export[-1])


# How many references the list alone makes; versions of Python count differently.
_UNHELD = _references([object()])


@dataclass(frozen=True)
class Tensor:
    """What a capsule held.

    Attributes
    ----------
    pointer : int
    shape, strides : tuple of int
        Strides in elements; None where the tensor is C-contiguous by declaration.
    dtype : dtype
    device : tuple of int
        DLPack's device type, and which device of it.
    owner : object
        Keeps the memory alive.
    """

    pointer: int
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None
    dtype: np.dtype
    device: tuple[int, int]
    owner: Any


def to_capsule(
    pointer: int, shape: tuple[int, ...], dtype: np.dtype, device: tuple[int, int], owner: Any
) -> Any:
    """Return a capsule of a C-contiguous array, which keeps ``owner`` alive.

    If nobody takes the tensor, until the next export.

    Raises
    ------
    BufferError
        If DLPack has no such dtype.
    """
    if dtype not in _CODES:
        raise BufferError(f"dtype {dtype} given, which DLPack does not have")
    sizes = (ctypes.c_int64 * max(len(shape), 1))(*shape)
    steps = (ctypes.c_int64 * max(len(shape), 1))(*_contiguous_strides(shape))
    managed = _ManagedTensor()
    tensor = managed.tensor
    tensor.data = pointer or None
    tensor.device_type, tensor.device_id = device
    tensor.ndim = len(shape)
    tensor.code, tensor.bits = _CODES[dtype]
    tensor.lanes = 1
    tensor.shape = ctypes.cast(sizes, ctypes.POINTER(ctypes.c_int64))
    tensor.strides = ctypes.cast(steps, ctypes.POINTER(ctypes.c_int64))
    managed.deleter = _forget_tensor
    address = ctypes.addressof(managed)
    drop_refused()
    capsule = _new_capsule(address, _NAME, None)
    _exported[address] = [managed, sizes, steps, owner, capsule]
    return capsule


def from_capsule(capsule: Any) -> Tensor:
    """Take the tensor out of a capsule.

    Raises
    ------
    BufferError
        If the capsule is no DLPack tensor or was taken before, or its dtype is not known.
    """
    if not _is_valid(id(capsule), _NAME):
        raise BufferError("a capsule without a DLPack tensor given, one not yet taken wanted")
    address = _pointer_of(id(capsule), _NAME)
    managed = ctypes.cast(address, ctypes.POINTER(_ManagedTensor)).contents
    tensor = managed.tensor
    dtype = _DTYPES.get((tensor.code, tensor.bits))
    if dtype is None or tensor.lanes != 1:
        raise BufferError(
            f"a DLPack tensor of type code {tensor.code}, {tensor.bits} bits and {tensor.lanes} "
            "lanes given, which has no dtype here"
        )
    _set_name(capsule, _USED_NAME)
    dimensions = range(tensor.ndim)
    return Tensor(
        pointer=(tensor.data or 0) + tensor.byte_offset,
        shape=tuple(tensor.shape[i] for i in dimensions),
        strides=tuple(tensor.strides[i] for i in dimensions) if tensor.strides else None,
        dtype=dtype,
        device=(tensor.device_type, tensor.device_id),
        owner=_Owner(address, managed),
    )


class _Owner:
    """Calls a tensor's deleter when it is no longer referred to."""

    def __init__(self, address: int, managed: _ManagedTensor) -> None:
        if managed.deleter:
            weakref.finalize(self, managed.deleter, address).atexit = False


def _contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides = [1]
    for size in reversed(shape[1:]):
        strides.insert(0, strides[0] * size)
    return tuple(strides[: len(shape)])
