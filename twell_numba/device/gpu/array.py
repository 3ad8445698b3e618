"""Arrays in a GPU's memory."""

import math
from collections.abc import Sequence
from typing import Any, SupportsIndex

import ml_dtypes
import numpy as np
from numpy.typing import DTypeLike

from twell_numba.device.gpu import dlpack
from twell_numba.device.gpu.devices import gpu
from twell_numba.device.gpu.driver import call
from twell_numba.device.gpu.stream import LEGACY_DEFAULT, Stream

DTYPES = tuple(
    np.dtype(dtype)
    for dtype in (
        np.float64, np.float32, np.float16, ml_dtypes.bfloat16,
        np.int64, np.int32, np.uint16, np.uint8, np.bool_,
    )
)  # fmt: skip
_KINDS = {dtype: f"{dtype.name}*" for dtype in DTYPES}


class DeviceArray:
    """A C-contiguous array in a GPU's memory.

    Made by :func:`empty`, :func:`zeros`, :func:`from_numpy` and :func:`from_external`. It is handed
    to CuPy, JAX and others without a copy through ``__cuda_array_interface__`` and ``__dlpack__``.

    Attributes
    ----------
    pointer : int
        Address of the first element; 0 for an array without elements.
    shape : tuple of int
    dtype : dtype
        In native byte order.
    stream : Stream
        The work that fills the array is in it, and work with it goes to it.
    gpu : GPU
    owner : object
        Keeps the memory alive; None for an array without elements.
    kind : str
        How a kernel is told of it, ``float32*`` for instance.
    """

    __slots__ = (
        "__weakref__", "dtype", "gpu", "kind", "nbytes", "owner", "pointer", "shape", "size",
        "stream",
    )  # fmt: skip

    is_on_gpu = True

    def __init__(
        self,
        pointer: int,
        shape: tuple[int, ...],
        dtype: DTypeLike,
        stream: Stream,
        owner: Any,
    ) -> None:
        self.dtype = _accepted_dtype(dtype)
        self.shape = shape
        self.size = math.prod(shape)
        self.nbytes = self.size * self.dtype.itemsize
        self.pointer = pointer
        self.stream = stream
        self.gpu = stream.gpu
        self.owner = owner
        self.kind = _KINDS[self.dtype]

    # ------------------------------------------------------------------ description

    @property
    def ndim(self) -> int:
        """The number of dimensions."""
        return len(self.shape)

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("len() of an array without dimensions")
        return self.shape[0]

    def __repr__(self) -> str:
        return f"DeviceArray(shape={self.shape}, dtype={self.dtype}, GPU {self.gpu.id})"

    # ------------------------------------------------------------------ views

    def reshape(self, *shape: int | Sequence[int]) -> "DeviceArray":
        """Return a view of another shape; one size may be -1.

        Raises
        ------
        ValueError
            If it has another number of elements.
        """
        wanted = shape[0] if len(shape) == 1 and isinstance(shape[0], Sequence) else shape
        sizes = [int(size) for size in wanted]  # type: ignore[arg-type]
        if sizes.count(-1) == 1:
            known = -math.prod(sizes)
            if known > 0 and self.size % known == 0:
                sizes[sizes.index(-1)] = self.size // known
        if any(size < 0 for size in sizes) or math.prod(sizes) != self.size:
            raise ValueError(f"shape {tuple(sizes)} given for an array of shape {self.shape}")
        return DeviceArray(self.pointer, tuple(sizes), self.dtype, self.stream, self.owner)

    def __getitem__(self, rows: slice) -> "DeviceArray":
        """Return a view of a range of rows, ``array[start:stop]``."""
        if not isinstance(rows, slice) or rows.step not in (None, 1) or not self.shape:
            raise TypeError(f"index {rows!r} given, array[start:stop] wanted")
        start, stop, _ = rows.indices(self.shape[0])
        shape = (max(stop - start, 0), *self.shape[1:])
        row = math.prod(self.shape[1:]) * self.dtype.itemsize
        pointer = self.pointer + start * row if math.prod(shape) else 0
        return DeviceArray(pointer, shape, self.dtype, self.stream, self.owner)

    # ------------------------------------------------------------------ contents

    def to_numpy(self) -> np.ndarray:
        """Return a copy in the host's memory; waits for the array's stream."""
        self._require_no_recording()
        result = np.empty(self.shape, self.dtype)
        if self.size:
            self.gpu.make_current()
            call(
                "cuMemcpyDtoHAsync",
                result.ctypes.data,
                self.pointer,
                self.nbytes,
                self.stream.handle,
            )
            self.stream.synchronize()
        return result

    def copy(self) -> "DeviceArray":
        """Return a copy on the same GPU, in the same stream."""
        result = empty(self.shape, self.dtype, self.stream)
        result.copy_from(self)
        return result

    def copy_from(self, source: "DeviceArray | np.ndarray") -> None:
        """Overwrite the contents with those of an array of the same shape and dtype.

        Raises
        ------
        TypeError, ValueError
            If shape or dtype differ, or it is on another GPU.
        """
        if source.shape != self.shape:
            raise ValueError(f"an array of shape {source.shape} given, {self.shape} wanted")
        self.gpu.make_current()
        if isinstance(source, DeviceArray):
            if source.dtype != self.dtype:
                raise TypeError(f"an array of dtype {source.dtype} given, {self.dtype} wanted")
            require_same_gpu(self=self, source=source)
            if self.size:
                self._note_use(self, source)
                with _in_order(self.stream, source):
                    arguments = (self.pointer, source.pointer, self.nbytes, self.stream.handle)
                    call("cuMemcpyDtoDAsync", *arguments)
            return
        host = _native(source)
        if host.dtype != self.dtype:
            raise TypeError(f"an array of dtype {source.dtype} given, {self.dtype} wanted")
        if self.size:
            self._require_no_recording()
            # From memory that is not page-locked the driver takes its own copy before it returns.
            arguments = (self.pointer, host.ctypes.data, self.nbytes, self.stream.handle)
            call("cuMemcpyHtoDAsync", *arguments)

    def fill_with_zeros(self) -> None:
        """Set all elements to 0."""
        if self.size:
            self._note_use(self)
            self.gpu.make_current()
            call("cuMemsetD8Async", self.pointer, 0, self.nbytes, self.stream.handle)

    def _require_no_recording(self) -> None:
        """A replay would read or write memory of the host that is somebody else's by then."""
        if self.stream.capture is not None:
            raise RuntimeError(
                "a copy between the host and a GPU asked while its stream is recording, which "
                "cannot be replayed; copy before or after"
            )

    def _note_use(self, *arrays: "DeviceArray") -> None:
        """Let a graph that is being recorded keep the memory alive that its copies use."""
        graph = self.stream.capture
        if graph is not None:
            for array in arrays:
                graph.keep(array.owner)

    # ------------------------------------------------------------------ for other libraries

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        """Refuse what would copy to the host unseen: ``to_numpy`` does it."""
        raise TypeError("DeviceArray given, a NumPy array wanted; use to_numpy()")

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """Version 3 of the protocol that CuPy, Numba and PyTorch share."""
        if self.dtype == ml_dtypes.bfloat16:
            raise AttributeError("__cuda_array_interface__ has no bfloat16; use from_dlpack")
        return {
            "version": 3,
            "shape": self.shape,
            "typestr": self.dtype.str,
            "data": (self.pointer, False),
            "strides": None,
            "stream": self.stream.handle,
        }

    def __dlpack_device__(self) -> tuple[int, int]:
        """Return DLPack's number for CUDA, and the GPU's."""
        return dlpack.CUDA, self.gpu.id

    def __dlpack__(
        self,
        *,
        stream: int | None = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> Any:
        """Return a DLPack capsule; work given to ``stream`` from now on sees the contents.

        Raises
        ------
        BufferError
            If another device is asked for.
        """
        if dl_device is not None and tuple(dl_device) != self.__dlpack_device__():
            raise BufferError(f"DLPack device {dl_device} asked, the array is on GPU {self.gpu.id}")
        array = self.copy() if copy else self
        if stream != -1 and self.size:
            self.gpu.make_current()
            self.stream.hand_over_to_foreign(LEGACY_DEFAULT if stream is None else stream)
        return dlpack.to_capsule(
            array.pointer, array.shape, array.dtype, array.__dlpack_device__(), array
        )


def empty(
    shape: int | Sequence[int], dtype: DTypeLike, stream: Stream | None = None
) -> DeviceArray:
    """Return an array of any contents.

    Parameters
    ----------
    shape : int or sequence of int
    dtype : dtype
        One of ``DTYPES``.
    stream : Stream, optional
        Otherwise that of the first GPU.

    Raises
    ------
    TwellError
        If there is not so much memory free.
    """
    stream = gpu().stream if stream is None else stream
    sizes = (int(shape),) if isinstance(shape, SupportsIndex) else tuple(map(int, shape))
    if any(size < 0 for size in sizes):
        raise ValueError(f"shape {sizes} given, sizes of at least 0 wanted")
    nbytes = math.prod(sizes) * _accepted_dtype(dtype).itemsize
    if nbytes == 0:
        return DeviceArray(0, sizes, dtype, stream, None)
    memory = stream.gpu.memory.allocate(nbytes, stream)
    return DeviceArray(memory.pointer, sizes, dtype, stream, memory)


def zeros(
    shape: int | Sequence[int], dtype: DTypeLike, stream: Stream | None = None
) -> DeviceArray:
    """Return an array of zeros; otherwise as :func:`empty`."""
    array = empty(shape, dtype, stream)
    array.fill_with_zeros()
    return array


def view(array: DeviceArray, start: int, shape: tuple[int, ...], dtype: DTypeLike) -> DeviceArray:
    """Return a part of an array's memory, from byte ``start`` on, as numbers of another dtype."""
    return DeviceArray(array.pointer + start, shape, dtype, array.stream, array.owner)


def from_numpy(array: np.ndarray, stream: Stream | None = None) -> DeviceArray:
    """Return a copy of a host's array, which may be read-only, strided or big-endian.

    Raises
    ------
    TypeError
        If its dtype is not one of ``DTYPES``.
    """
    host = _native(array)
    result = empty(host.shape, host.dtype, stream)
    result.copy_from(host)
    return result


def from_external(array: Any, stream: Stream | None = None) -> DeviceArray:
    """Return an array of another library (CuPy, JAX, PyTorch) as one of this, without a copy.

    The memory stays that library's and is kept alive. Work of the result's stream waits for the
    work that fills the array.

    Parameters
    ----------
    array : object
        With ``__dlpack__`` or ``__cuda_array_interface__``, C-contiguous.
    stream : Stream, optional
        For work with the result; otherwise that of the array's GPU.

    Raises
    ------
    TypeError
        If it offers neither, is not on a GPU, or has a dtype that is not one of ``DTYPES``.
    ValueError
        If it is not C-contiguous, or ``stream`` is another GPU's.
    """
    if isinstance(array, DeviceArray):
        return array
    if hasattr(array, "__dlpack__") and hasattr(array, "__dlpack_device__"):
        return _from_dlpack(array, stream)
    if hasattr(array, "__cuda_array_interface__"):
        return _from_interface(array, stream)
    raise TypeError(
        f"{type(array).__name__} given, an array on a GPU with __dlpack__ or "
        "__cuda_array_interface__ wanted; from_numpy copies one from the host"
    )


def require_same_gpu(**arrays: DeviceArray) -> None:
    """Raise ValueError, which names both GPUs, unless all arrays are on one."""
    first_name, first = next(iter(arrays.items()))
    for name, array in arrays.items():
        if array.gpu is not first.gpu:
            raise ValueError(
                f"{name} on GPU {array.gpu.id} given beside {first_name} on GPU {first.gpu.id}, "
                "one GPU for all wanted"
            )


class _in_order:
    """Let a stream read an array of another stream, before that stream's later work."""

    def __init__(self, stream: Stream, array: DeviceArray) -> None:
        self._stream, self._other = stream, array.stream

    def __enter__(self) -> None:
        if self._other is not self._stream:
            self._stream.wait(self._other)

    def __exit__(self, *_: object) -> None:
        if self._other is not self._stream:
            self._other.wait(self._stream)


def _from_dlpack(array: Any, stream: Stream | None) -> DeviceArray:
    device_type, device_id = (int(number) for number in array.__dlpack_device__())
    if device_type not in (dlpack.CUDA, dlpack.CUDA_MANAGED):
        raise TypeError(
            f"{type(array).__name__} in the host's memory given, one on a GPU wanted; "
            "from_numpy copies one from the host"
        )
    stream = _stream_on(device_id, stream)
    tensor = dlpack.from_capsule(array.__dlpack__(stream=stream.handle))
    _require_contiguous(tensor.shape, tensor.strides)
    pointer = tensor.pointer if math.prod(tensor.shape) else 0
    return DeviceArray(pointer, tensor.shape, tensor.dtype, stream, tensor.owner)


def _from_interface(array: Any, stream: Stream | None) -> DeviceArray:
    interface = array.__cuda_array_interface__
    if not np.dtype(interface["typestr"]).isnative:
        raise TypeError(f"dtype {interface['typestr']} given, native byte order wanted")
    dtype = _accepted_dtype(interface["typestr"])
    shape = tuple(int(size) for size in interface["shape"])
    strides = interface.get("strides")
    if strides is not None:
        strides = tuple(int(step) // dtype.itemsize for step in strides)
    _require_contiguous(shape, strides)
    if interface.get("mask") is not None:
        raise TypeError("an array with a mask given, one without wanted")
    pointer = int(interface["data"][0])
    stream = _stream_on(_gpu_of(pointer), stream)
    producer = interface.get("stream")
    if producer is not None:
        stream.wait_for_foreign(int(producer))
    return DeviceArray(pointer if math.prod(shape) else 0, shape, dtype, stream, array)


def _stream_on(device_id: int, stream: Stream | None) -> Stream:
    if stream is None:
        return gpu(device_id).stream
    if stream.gpu.id != device_id:
        raise ValueError(
            f"an array on GPU {device_id} given with a stream of GPU {stream.gpu.id}, "
            "one GPU for both wanted"
        )
    return stream


def _gpu_of(pointer: int) -> int:
    if pointer == 0:
        return 0
    from twell_numba.device.gpu.driver import initialize
    from twell_numba.device.gpu.packages import bindings

    initialize()
    attribute = bindings().CUpointer_attribute.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL
    return int(call("cuPointerGetAttribute", attribute, pointer))


def _require_contiguous(shape: tuple[int, ...], strides: tuple[int, ...] | None) -> None:
    if strides is None or math.prod(shape) == 0:
        return
    step = 1
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        if size != 1 and stride != step:
            raise ValueError(
                f"an array of shape {shape} with strides {strides} (in elements) given, "
                "a C-contiguous one wanted"
            )
        step *= size


def _native(array: np.ndarray) -> np.ndarray:
    if not isinstance(array, np.ndarray):
        raise TypeError(f"{type(array).__name__} given, a NumPy array wanted")
    return np.asarray(array, _accepted_dtype(array.dtype), order="C")


def _accepted_dtype(dtype: DTypeLike) -> np.dtype:
    given = np.dtype(dtype)
    native = given if given.isnative else given.newbyteorder("=")
    if native not in _KINDS:
        names = ", ".join(wanted.name for wanted in DTYPES)
        raise TypeError(f"dtype {given} given, one of {names} wanted")
    return native
