"""Vectors of several numbers as values in CPU kernels: what a register-blocked product is made of.

Numba has no such type, and LLVM's automatic vectorizer keeps no accumulators in registers across an
inner loop. A vector here is one of LLVM's, of as many neighbouring numbers as fill a given number
of the machine's vector registers (AVX-512 has 32 registers of 64 bytes, AVX2 16 of 32 bytes).

Write ``registers`` as a constant that the compiler knows: a literal, a global or a variable of an
enclosing function.
"""

from collections.abc import Iterable
from typing import Any

import llvmlite.binding
import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic, models, register_model

_FEATURES = llvmlite.binding.get_host_cpu_features()
REGISTER_BYTES = 64 if _FEATURES.get("avx512f") else 32 if _FEATURES.get("avx2") else 16
"""Size of the machine's vector registers."""
MANY_REGISTERS = 16 if _FEATURES.get("avx512f") else 8
"""How many accumulators a kernel can keep in registers beside its operands: half of them."""


CACHE_LINE = 64


def register_lanes(dtype: np.dtype) -> int:
    """Return how many numbers of a dtype one vector register holds."""
    return REGISTER_BYTES // dtype.itemsize


class VectorType(types.Type):
    """The type of a vector in compiled code."""

    def __init__(self, dtype: Any, lanes: int) -> None:
        self.dtype = dtype
        self.lanes = lanes
        super().__init__(name=f"vector({dtype}, {lanes})")


@register_model(VectorType)
class _VectorModel(models.PrimitiveModel):
    def __init__(self, manager: Any, vector: VectorType) -> None:
        number = manager[vector.dtype].get_value_type()
        super().__init__(manager, vector, ir.VectorType(number, vector.lanes))


def _vector_of(array: Any, registers: Any) -> VectorType:
    return VectorType(
        array.dtype, 8 * registers.literal_value * REGISTER_BYTES // array.dtype.bitwidth
    )


@intrinsic(prefer_literal=True)
def zeros(typing_context: Any, array: Any, registers: Any) -> Any:
    """Return a vector of zeros of the dtype of ``array``."""
    vector = _vector_of(array, registers)

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return ir.Constant(context.get_value_type(vector), [0.0] * vector.lanes)

    return vector(array, registers), generate


@intrinsic(prefer_literal=True)
def load(typing_context: Any, matrix: Any, row: Any, column: Any, registers: Any) -> Any:
    """Return the vector that begins at ``matrix[row, column]``, in a row without gaps."""
    vector = _vector_of(matrix, registers)
    signature = vector(matrix, types.intp, types.intp, registers)

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        pointer = _pointer(context, builder, signature.args[0], arguments, vector)
        return builder.load(pointer, align=_alignment(vector))

    return signature, generate


@intrinsic(prefer_literal=True)
def zeros_of(typing_context: Any, array: Any, lanes: Any) -> Any:
    """Return a vector of ``lanes`` zeros, a constant, of the dtype of ``array``."""
    vector = VectorType(array.dtype, lanes.literal_value)

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return ir.Constant(context.get_value_type(vector), [0.0] * vector.lanes)

    return vector(array, lanes), generate


@intrinsic(prefer_literal=True)
def load_of(typing_context: Any, matrix: Any, row: Any, column: Any, lanes: Any) -> Any:
    """Return what :func:`load` would, as a vector of ``lanes`` numbers, a constant."""
    vector = VectorType(matrix.dtype, lanes.literal_value)
    signature = vector(matrix, types.intp, types.intp, lanes)

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        pointer = _pointer(context, builder, signature.args[0], arguments, vector)
        return builder.load(pointer, align=_alignment(vector))

    return signature, generate


@intrinsic(prefer_literal=True)
def prefetch(typing_context: Any, matrix: Any, row: Any, column: Any, registers: Any) -> Any:
    """Ask for what :func:`load` would read, to have it in the cache by then.

    Nothing is read yet: a row that does not exist does no harm.
    """
    vector = _vector_of(matrix, registers)
    signature = types.void(matrix, types.intp, types.intp, registers)

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        number, byte = ir.IntType(32), ir.IntType(8).as_pointer()
        pointer = builder.bitcast(
            _pointer(context, builder, signature.args[0], arguments, vector), byte
        )
        kind = ir.FunctionType(ir.VoidType(), [byte, number, number, number])
        instruction = builder.module.declare_intrinsic("llvm.prefetch", [byte], kind)
        read, first_level, data = (ir.Constant(number, value) for value in (0, 3, 1))
        for offset in range(0, vector.lanes * vector.dtype.bitwidth // 8, CACHE_LINE):
            line = builder.gep(pointer, [ir.Constant(ir.IntType(64), offset)])
            builder.call(instruction, [line, read, first_level, data])
        return context.get_dummy_value()

    return signature, generate


@intrinsic(prefer_literal=True)
def lanes_of(typing_context: Any, array: Any, registers: Any) -> Any:
    """Return how many numbers of the dtype of ``array`` a vector holds."""
    vector = _vector_of(array, registers)

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return context.get_constant(types.intp, vector.lanes)

    return types.intp(array, registers), generate


@intrinsic
def store(typing_context: Any, matrix: Any, row: Any, column: Any, vector: Any) -> Any:
    """Write a vector to where :func:`load` would read it."""
    signature = types.void(matrix, types.intp, types.intp, vector)

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        pointer = _pointer(context, builder, signature.args[0], arguments, vector)
        builder.store(arguments[3], pointer, align=_alignment(vector))
        return context.get_dummy_value()

    return signature, generate


@intrinsic
def add_scaled(typing_context: Any, total: Any, factor: Any, vector: Any) -> Any:
    """Return ``total + factor * vector``, rounded once where the machine can; factor a number."""
    signature = total(total, total.dtype, vector)

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        sums, factor, numbers = arguments
        return builder.fadd(
            sums,
            builder.fmul(_broadcast(builder, factor, sums.type), numbers, flags=("contract",)),
            flags=("contract",),
        )

    return signature, generate


@intrinsic
def add_products(typing_context: Any, total: Any, first: Any, second: Any) -> Any:
    """Return ``total + first * second`` for three vectors, rounded once where the machine can."""
    signature = total(total, first, second)

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        sums, first, second = arguments
        product = builder.fmul(first, second, flags=("contract",))
        return builder.fadd(sums, product, flags=("contract",))

    return signature, generate


@intrinsic
def any_positive(typing_context: Any, vector: Any) -> Any:
    """Return whether one of a vector's numbers is greater than 0, or NaN."""
    signature = types.boolean(vector)

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        numbers = arguments[0]
        nothing = ir.Constant(numbers.type, [0.0] * numbers.type.count)
        # "Unordered or greater": true for NaN, which a plain x > 0 would drop.
        positive = builder.fcmp_unordered(">", numbers, nothing)
        bits = builder.bitcast(positive, ir.IntType(numbers.type.count))
        return builder.icmp_unsigned("!=", bits, ir.Constant(bits.type, 0))

    return signature, generate


@intrinsic
def sum_of(typing_context: Any, vector: Any) -> Any:
    """Return the sum of a vector's numbers, added up pairwise; their number is a power of 2."""
    if vector.lanes & (vector.lanes - 1):
        raise TypeError(f"sum_of: {vector.lanes} numbers given, a power of 2 wanted")
    signature = vector.dtype(vector)

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        numbers = arguments[0]
        lanes = numbers.type.count
        while lanes > 1:
            lanes //= 2
            low, high = (
                _shuffled(builder, numbers, numbers, range(first, first + lanes))
                for first in (0, lanes)
            )
            numbers = builder.fadd(low, high)
        return builder.extract_element(numbers, ir.Constant(ir.IntType(32), 0))

    return signature, generate


@intrinsic
def transpose_tile(typing_context: Any, X: Any, i: Any, j: Any, Y: Any, k: Any, m: Any) -> Any:
    """Write ``X[i : i + n, j : j + n].T`` to ``Y[k : k + n, m : m + n]``; a register holds n."""
    signature = types.void(X, types.intp, types.intp, Y, types.intp, types.intp)
    vector = VectorType(X.dtype, 8 * REGISTER_BYTES // X.dtype.bitwidth)
    count, half = vector.lanes, vector.lanes // 2

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        X, i, j, Y, k, m = arguments
        first_type, second_type = signature.args[0], signature.args[3]

        def row(start: Any, number: int) -> Any:
            return builder.add(start, ir.Constant(start.type, number))

        def interleaved(first: Any, second: Any, start: int) -> Any:
            places = [start + lane // 2 + count * (lane % 2) for lane in range(count)]
            return _shuffled(builder, first, second, places)

        rows = [
            builder.load(
                _pointer(context, builder, first_type, (X, row(i, number), j), vector),
                align=_alignment(vector),
            )
            for number in range(count)
        ]
        # Interleaving the first half of the rows with the second, log2(n) times, transposes.
        for _ in range(half.bit_length()):
            rows = [
                interleaved(rows[number // 2], rows[number // 2 + half], number % 2 * half)
                for number in range(count)
            ]
        for number, numbers in enumerate(rows):
            pointer = _pointer(context, builder, second_type, (Y, row(k, number), m), vector)
            builder.store(numbers, pointer, align=_alignment(vector))
        return context.get_dummy_value()

    return signature, generate


def _pointer(
    context: Any, builder: Any, array_type: Any, arguments: Any, vector: VectorType
) -> Any:
    array = context.make_array(array_type)(context, builder, arguments[0])
    pointer = cgutils.get_item_pointer2(
        context,
        builder,
        array.data,
        cgutils.unpack_tuple(builder, array.shape),
        cgutils.unpack_tuple(builder, array.strides),
        array_type.layout,
        [arguments[1], arguments[2]],
    )
    return builder.bitcast(pointer, context.get_value_type(vector).as_pointer())


def _shuffled(builder: Any, first: Any, second: Any, places: Iterable[int]) -> Any:
    """Return the numbers at these places of two vectors, the second's counted after the first's."""
    chosen = list(places)
    mask = ir.Constant(ir.VectorType(ir.IntType(32), len(chosen)), chosen)
    return builder.shuffle_vector(first, second, mask)


def _alignment(vector: VectorType) -> int:
    # NumPy aligns arrays to their items only, so an access may not assume more.
    return vector.dtype.bitwidth // 8


def _broadcast(builder: Any, number: Any, vector: Any) -> Any:
    one = builder.insert_element(
        ir.Constant(vector, ir.Undefined), number, ir.Constant(ir.IntType(32), 0)
    )
    mask = ir.Constant(ir.VectorType(ir.IntType(32), vector.count), [0] * vector.count)
    return builder.shuffle_vector(one, ir.Constant(vector, ir.Undefined), mask)
