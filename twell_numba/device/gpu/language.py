"""What kernels are written with, beside ``cuda`` itself.

Kernels take pointers and read and write through :func:`load` and :func:`store`, which convert:
float16 and bfloat16 are storage, arithmetic is in float32 (float64 for float64). Indices are
64-bit. Everything here may be used inside kernels only, except :func:`device_function` and
:func:`argument_type`.
"""

from collections.abc import Callable
from types import FunctionType
from typing import Any

from llvmlite import ir

from twell_numba.device.gpu.packages import compiler

cuda = compiler()
types = compiler("types")
_extending = compiler("extending")
_models = compiler("models")

intrinsic = _extending.intrinsic

_i16, _i32, _f32, _half = ir.IntType(16), ir.IntType(32), ir.FloatType(), ir.HalfType()

FULL_WARP = 0xFFFFFFFF


class Storage16(types.Type):  # type: ignore[name-defined]
    """A 16-bit float in memory; :func:`load` makes a float32 of it."""

    def __init__(self, name: str) -> None:
        super().__init__(name=f"{name}_storage")


bfloat16 = Storage16("bfloat16")
float16 = Storage16("float16")


@_extending.register_model(Storage16)
class _Storage16Model(_models.PrimitiveModel):  # type: ignore[name-defined]
    def __init__(self, manager: Any, numba_type: Any) -> None:
        super().__init__(manager, numba_type, _i16)


_ELEMENT_TYPES = {
    "bfloat16": bfloat16,
    "float16": float16,
    "float32": types.float32,
    "float64": types.float64,
    "int32": types.int32,
    "int64": types.int64,
    "uint8": types.uint8,
    "uint16": types.uint16,
    "bool": types.uint8,
}


def argument_type(kind: str) -> Any:
    """Return Numba's type of a kernel's argument.

    Parameters
    ----------
    kind : str
        ``int`` (64-bit), ``float32``, ``float64``, a dtype's name with a ``*``: a pointer to it, or
        ``tensor_map``: the integers of a :class:`twell_numba.device.gpu.tensor_map.TensorMap`.
    """
    if kind == "int":
        return types.int64
    if kind == "tensor_map":
        return types.UniTuple(types.int64, 16)
    if kind.endswith("*"):
        return types.CPointer(_ELEMENT_TYPES[kind[:-1]])
    return {"float32": types.float32, "float64": types.float64}[kind]


def device_function(function: Callable[..., Any]) -> Any:
    """Let kernels call a function."""
    assert isinstance(function, FunctionType)
    return cuda.jit(device=True)(function)


def _arithmetic_type(pointer: Any) -> Any:
    element = pointer.dtype
    return types.float32 if isinstance(element, Storage16) else element


@intrinsic
def load(typing_context, pointer, index):
    """Return the number at ``pointer[index]``, in its arithmetic type."""
    if not isinstance(pointer, types.CPointer) or not isinstance(index, types.Integer):
        return None
    element = pointer.dtype

    def generate(context, builder, signature, arguments):
        position = context.cast(builder, arguments[1], signature.args[1], types.int64)
        stored = builder.load(builder.gep(arguments[0], [position]))
        if element == bfloat16:
            bits = builder.shl(builder.zext(stored, _i32), ir.Constant(_i32, 16))
            return builder.bitcast(bits, _f32)
        if element == float16:
            return builder.fpext(builder.bitcast(stored, _half), _f32)
        return stored

    return _arithmetic_type(pointer)(pointer, index), generate


@intrinsic
def store(typing_context, pointer, index, value):
    """Write a number to ``pointer[index]``, rounded to nearest, ties to even; NaN stays NaN."""
    if not isinstance(pointer, types.CPointer) or not isinstance(index, types.Integer):
        return None
    if not isinstance(value, types.Number):
        return None
    element = pointer.dtype
    number = _arithmetic_type(pointer)

    def generate(context, builder, signature, arguments):
        position = context.cast(builder, arguments[1], signature.args[1], types.int64)
        converted = context.cast(builder, arguments[2], signature.args[2], number)
        if element == bfloat16:
            converted = _round_to_bfloat16(builder, converted)
        elif element == float16:
            converted = builder.bitcast(builder.fptrunc(converted, _half), _i16)
        builder.store(converted, builder.gep(arguments[0], [position]))
        return context.get_dummy_value()

    return types.void(pointer, index, value), generate


def _round_to_bfloat16(builder, value):
    """In integers, because GPUs before compute capability 8.0 have no instruction for it."""
    bits = builder.bitcast(value, _i32)
    odd = builder.and_(builder.lshr(bits, ir.Constant(_i32, 16)), ir.Constant(_i32, 1))
    rounded = builder.add(bits, builder.add(odd, ir.Constant(_i32, 0x7FFF)))
    # adding could carry a NaN's bits into an infinity: it is cut instead, and kept quiet
    quiet = builder.or_(bits, ir.Constant(_i32, 0x400000))
    is_nan = builder.fcmp_unordered("uno", value, value)
    chosen = builder.select(is_nan, quiet, rounded)
    return builder.trunc(builder.lshr(chosen, ir.Constant(_i32, 16)), _i16)


@intrinsic
def number(typing_context, pointer, value):
    """Return ``value`` in the arithmetic type of what ``pointer`` points to."""
    if not isinstance(pointer, types.CPointer) or not isinstance(value, types.Number):
        return None
    result = _arithmetic_type(pointer)

    def generate(context, builder, signature, arguments):
        return context.cast(builder, arguments[1], signature.args[1], result)

    return result(pointer, value), generate


@intrinsic
def arithmetic_type(typing_context, pointer):
    """Return the type in which there is computed with what ``pointer`` points to.

    For arrays: ``cuda.shared.array(SIZE, arithmetic_type(pointer))``.
    """
    if not isinstance(pointer, types.CPointer):
        return None

    def generate(context, builder, signature, arguments):
        return context.get_dummy_value()

    return types.DType(_arithmetic_type(pointer))(pointer), generate


@intrinsic
def nanoseconds(typing_context):
    """Return the GPU's clock: nanoseconds since a time of its own, in steps of up to 1000."""

    def generate(context, builder, signature, arguments):
        kind = ir.FunctionType(ir.IntType(64), [])
        clock = ir.InlineAsm(kind, "mov.u64 $0, %globaltimer;", "=l", side_effect=True)
        return builder.call(clock, [])

    return types.int64(), generate


@device_function
def global_thread():
    """Return this thread's number in the whole grid."""
    return cuda.blockIdx.x * types.int64(cuda.blockDim.x) + cuda.threadIdx.x


@device_function
def grid_threads():
    """Return the number of threads in the whole grid."""
    return cuda.gridDim.x * types.int64(cuda.blockDim.x)


@device_function
def warp_sum(value):
    """Return the sum over the warp's 32 threads, the same bits in each."""
    value += cuda.shfl_xor_sync(FULL_WARP, value, 16)
    value += cuda.shfl_xor_sync(FULL_WARP, value, 8)
    value += cuda.shfl_xor_sync(FULL_WARP, value, 4)
    value += cuda.shfl_xor_sync(FULL_WARP, value, 2)
    value += cuda.shfl_xor_sync(FULL_WARP, value, 1)
    return value


@device_function
def block_sum(value):
    """Return the sum over a block's threads (whole warps) in float64, the same bits in each."""
    parts = cuda.shared.array(32, types.float64)
    total = warp_sum(types.float64(value))
    if cuda.threadIdx.x % 32 == 0:
        parts[cuda.threadIdx.x // 32] = total
    cuda.syncthreads()
    total = 0.0
    for warp in range(cuda.blockDim.x // 32):
        total += parts[warp]
    cuda.syncthreads()  # the next sum writes to the same place
    return total


@device_function
def block_maximum(value):
    """Return the largest of a block's numbers in float64; none may be NaN."""
    parts = cuda.shared.array(32, types.float64)
    largest = types.float64(value)
    for shift in range(5):
        other = cuda.shfl_xor_sync(FULL_WARP, largest, 16 >> shift)
        largest = other if other > largest else largest
    if cuda.threadIdx.x % 32 == 0:
        parts[cuda.threadIdx.x // 32] = largest
    cuda.syncthreads()
    largest = parts[0]
    for warp in range(1, cuda.blockDim.x // 32):
        largest = parts[warp] if parts[warp] > largest else largest
    cuda.syncthreads()
    return largest
