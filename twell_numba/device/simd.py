"""Vector instructions that Numba's own language does not reach, for CPU kernels.

Written in LLVM's portable vector types: LLVM lowers them to AVX-512, AVX2, NEON or plain code,
whatever the machine has.
"""

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

LANES = 16


@intrinsic
def positive_mask(typing_context: Any, matrix: Any, row: Any, column: Any) -> Any:
    """Return 16 bits: bit i is set where ``matrix[row, column + i]`` is greater than 0 or NaN.

    ``matrix`` is C-contiguous and has at least 16 entries from ``column`` on in that row.
    """
    signature = types.uint16(matrix, types.intp, types.intp)

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        array_type = signature.args[0]
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
        vector = ir.VectorType(context.get_data_type(array_type.dtype), LANES)
        # NumPy aligns arrays to their items only, so the load may not assume more.
        entries = builder.load(
            builder.bitcast(pointer, vector.as_pointer()), align=array_type.dtype.bitwidth // 8
        )
        # "Unordered or greater": true for NaN, which a plain x > 0 would drop.
        positive = builder.fcmp_unordered(">", entries, ir.Constant(vector, [0.0] * LANES))
        return builder.bitcast(positive, ir.IntType(LANES))

    return signature, generate


@intrinsic
def lowest_bit(typing_context: Any, mask: Any) -> Any:
    """Return the position of the lowest set bit of a 16-bit mask that is not 0."""
    signature = types.intp(types.uint16)

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        position = builder.cttz(arguments[0], ir.Constant(ir.IntType(1), 1))
        return builder.zext(position, ir.IntType(types.intp.bitwidth))

    return signature, generate
