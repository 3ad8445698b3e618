"""Vectors of several numbers as values in CPU kernels: what a register-blocked product is made of.

Numba has no such type, and LLVM's automatic vectorizer keeps no accumulators in registers across an
inner loop. A vector here is one of LLVM's: ``lanes`` neighbouring numbers, any number of them. LLVM
splits it over the machine's registers, so that 64 lanes of float32 are four AVX-512 registers or
eight of AVX2 or sixteen of NEON.

Write ``lanes`` as a constant that the compiler knows: a literal, a global or a variable of an
enclosing function.
"""

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic, models, register_model


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


@intrinsic(prefer_literal=True)
def zeros(typing_context: Any, array: Any, lanes: Any) -> Any:
    """Return ``lanes`` zeros of the dtype of ``array``."""
    vector = VectorType(array.dtype, lanes.literal_value)

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return ir.Constant(context.get_value_type(vector), [0.0] * vector.lanes)

    return vector(array, lanes), generate


@intrinsic(prefer_literal=True)
def load(typing_context: Any, matrix: Any, row: Any, column: Any, lanes: Any) -> Any:
    """Return ``matrix[row, column : column + lanes]``, which lies in memory without gaps."""
    vector = VectorType(matrix.dtype, lanes.literal_value)
    signature = vector(matrix, types.intp, types.intp, lanes)

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        pointer = _pointer(context, builder, signature.args[0], arguments, vector)
        return builder.load(pointer, align=_alignment(vector))

    return signature, generate


@intrinsic
def store(typing_context: Any, matrix: Any, row: Any, column: Any, vector: Any) -> Any:
    """Write a vector to ``matrix[row, column : column + lanes]``, which has no gaps either."""
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
def sum_of(typing_context: Any, vector: Any) -> Any:
    """Return the sum of a vector's numbers, added up pairwise."""
    signature = vector.dtype(vector)

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        numbers = arguments[0]
        lanes, number = numbers.type.count, numbers.type.element
        while lanes > 1:
            lanes //= 2
            mask = ir.VectorType(ir.IntType(32), lanes)
            low, high = (
                builder.shuffle_vector(
                    numbers,
                    ir.Constant(numbers.type, ir.Undefined),
                    ir.Constant(mask, list(range(first, first + lanes))),
                )
                for first in (0, lanes)
            )
            numbers = builder.fadd(low, high)
        return builder.extract_element(numbers, ir.Constant(ir.IntType(32), 0))

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


def _alignment(vector: VectorType) -> int:
    # NumPy aligns arrays to their items only, so an access may not assume more.
    return vector.dtype.bitwidth // 8


def _broadcast(builder: Any, number: Any, vector: Any) -> Any:
    one = builder.insert_element(
        ir.Constant(vector, ir.Undefined), number, ir.Constant(ir.IntType(32), 0)
    )
    mask = ir.Constant(ir.VectorType(ir.IntType(32), vector.count), [0] * vector.count)
    return builder.shuffle_vector(one, ir.Constant(vector, ir.Undefined), mask)
