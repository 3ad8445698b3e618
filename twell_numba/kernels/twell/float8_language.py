"""What kernels for 8-bit weights compute with: pairs of float16 in a word. Inside kernels only.

An e4m3 number fits a float16, whose products and sums a GPU computes two at a time. A *pair* is a
uint32 that holds two float16.
"""

import numpy as np
from llvmlite import ir

from twell_numba.device.gpu.language import intrinsic, load, types
from twell_numba.kernels.twell.float8_weights import FLOAT8

# From here on there is an instruction that makes pairs of e4m3 numbers.
INSTRUCTION_CAPABILITY = (8, 9)
# Without it pairs hold numbers divided by this: moving their bits leaves the exponent's bias alone.
DIVISOR = 256

_i16, _i32, _f32, _half = ir.IntType(16), ir.IntType(32), ir.FloatType(), ir.HalfType()
_CONVERT = (
    "{ .reg .b16 low, high; mov.b32 {low, high}, $2; "
    "cvt.rn.f16x2.e4m3x2 $0, low; cvt.rn.f16x2.e4m3x2 $1, high; }"
)


def _constant(value):
    return ir.Constant(_i32, value)


def _pairs_by_instruction(builder, word):
    """Return a word's four numbers as two pairs."""
    shape = ir.FunctionType(ir.LiteralStructType([_i32, _i32]), [_i32])
    pairs = builder.call(ir.InlineAsm(shape, _CONVERT, "=r,=r,r"), [word])
    return [builder.extract_value(pairs, i) for i in range(2)]


def _pairs_by_bits(builder, word):
    """Return the same divided by 256: sign, exponent and fraction moved to where float16 has them.

    NaN becomes a number, but there is none among weights.
    """
    permute = ir.InlineAsm(
        ir.FunctionType(_i32, [_i32] * 3), "prmt.b32 $0, $1, $2, $3;", "=r,r,r,r"
    )
    pairs = []
    for selector in (0x1404, 0x3424):  # a byte each in the upper half of 16 bits
        apart = builder.call(permute, [word, _constant(0), _constant(selector)])
        sign = builder.and_(apart, _constant(0x80008000))
        rest = builder.and_(builder.lshr(apart, _constant(1)), _constant(0x3F803F80))
        pairs.append(builder.or_(sign, rest))
    return pairs


def _load_pairs(pairs_of):
    """Return the definition of a load after which each word becomes two pairs."""

    def load_pairs(typing_context, pointer, index):
        result = types.UniTuple(types.uint32, 8)

        def generate(context, builder, signature, arguments):
            position = context.cast(builder, arguments[1], signature.args[1], types.int64)
            address = builder.gep(arguments[0], [position])
            vector = builder.bitcast(address, ir.VectorType(_i32, 4).as_pointer())
            loaded = builder.load(vector, align=16)
            words = [builder.extract_element(loaded, _constant(i)) for i in range(4)]
            pairs = [pair for word in words for pair in pairs_of(builder, word)]
            return context.make_tuple(builder, result, pairs)

        return result(pointer, index), generate

    return load_pairs


_load_pairs_by_instruction = _load_pairs(_pairs_by_instruction)
_load_pairs_by_bits = _load_pairs(_pairs_by_bits)


def _load_pairs_in_python(pointer, index, definition=_load_pairs_by_instruction):
    """What load_pairs does; see below."""
    bits = np.array([load(pointer, index + i) for i in range(16)], np.uint8)
    return tuple(bits.view(FLOAT8).astype(np.float16).view(np.uint32))


def _load_divided_pairs_in_python(pointer, index, definition=_load_pairs_by_bits):
    """What load_divided_pairs does; see below."""
    bits = np.array([load(pointer, index + i) for i in range(16)], np.uint8)
    numbers = bits.view(FLOAT8).astype(np.float16) / np.float16(DIVISOR)
    return tuple(numbers.view(np.uint32))


def _load_number(typing_context, pointer, index):
    def generate(context, builder, signature, arguments):
        position = context.cast(builder, arguments[1], signature.args[1], types.int64)
        byte = builder.load(builder.gep(arguments[0], [position]))
        pair, _ = _pairs_by_bits(builder, builder.zext(byte, _i32))
        return builder.fmul(_low_half(builder, pair), ir.Constant(_f32, float(DIVISOR)))

    return types.float32(pointer, index), generate


def _load_number_in_python(pointer, index, definition=_load_number):
    """What load_number does; see below."""
    return np.array([load(pointer, index)], np.uint8).view(FLOAT8).astype(np.float32)[0]


def _low_half(builder, pair):
    bits = builder.trunc(pair, _i16)
    return builder.fpext(builder.bitcast(bits, _half), _f32)


def _multiply_add_pairs(typing_context, a, b, c):
    def generate(context, builder, signature, arguments):
        pairs = [
            context.cast(builder, pair, kind, types.uint32)
            for pair, kind in zip(arguments, signature.args, strict=True)
        ]
        shape = ir.FunctionType(_i32, [_i32] * 3)
        code = ir.InlineAsm(shape, "fma.rn.f16x2 $0, $1, $2, $3;", "=r,r,r,r")
        return builder.call(code, pairs)

    return types.uint32(a, b, c), generate


def _multiply_add_pairs_in_python(a, b, c, definition=_multiply_add_pairs):
    """What multiply_add_pairs does; see below."""
    a, b, c = np.array([a, b, c], np.uint32).view(np.float16).reshape(3, 2).astype(np.float64)
    return (a * b + c).astype(np.float16).view(np.uint32)[0]


def _numbers_of_pair(typing_context, pair):
    result = types.UniTuple(types.float32, 2)

    def generate(context, builder, signature, arguments):
        pair = context.cast(builder, arguments[0], signature.args[0], types.uint32)
        high = builder.lshr(pair, _constant(16))
        numbers = [_low_half(builder, pair), _low_half(builder, high)]
        return context.make_tuple(builder, result, numbers)

    return result(pair), generate


def _numbers_of_pair_in_python(pair, definition=_numbers_of_pair):
    """What numbers_of_pair does; see below."""
    return tuple(np.array([pair], np.uint32).view(np.float16).astype(np.float32))


def _pair_of(typing_context, low, high):
    def generate(context, builder, signature, arguments):
        halves = []
        for value, kind in zip(arguments, signature.args, strict=True):
            number = context.cast(builder, value, kind, types.float32)
            bits = builder.bitcast(builder.fptrunc(number, _half), _i16)
            halves.append(builder.zext(bits, _i32))
        return builder.or_(halves[0], builder.shl(halves[1], _constant(16)))

    return types.uint32(low, high), generate


def _pair_of_in_python(low, high, definition=_pair_of):
    """What pair_of does; see below."""
    return np.array([low, high], np.float32).astype(np.float16).view(np.uint32)[0]


def _power_to_one(typing_context, number):
    def generate(context, builder, signature, arguments):
        value = context.cast(builder, arguments[0], signature.args[0], types.float32)
        bits = builder.lshr(builder.bitcast(value, _i32), _constant(23))
        exponent = builder.and_(bits, _constant(255))
        for limit, is_past in ((_constant(16), "<"), (_constant(253), ">")):
            past = builder.icmp_signed(is_past, exponent, limit)
            exponent = builder.select(past, limit, exponent)
        exponent = builder.sub(_constant(254), exponent)
        return builder.bitcast(builder.shl(exponent, _constant(23)), _f32)

    return types.float32(number), generate


def _power_to_one_in_python(number, definition=_power_to_one):
    """What power_to_one does; see below."""
    exponent = int(np.array([number], np.float32).view(np.uint32)[0] >> 23) & 255
    return np.float32(2.0 ** (127 - min(max(exponent, 16), 253)))


# load_pairs(pointer, index): sixteen e4m3 numbers, from a multiple of 16 on, as eight pairs; from
# INSTRUCTION_CAPABILITY on. load_divided_pairs: the same divided by DIVISOR, on any GPU.
# load_number(pointer, index): one of them, as float32.
# multiply_add_pairs(a, b, c): a * b + c, rounded once. numbers_of_pair(pair): two float32.
# pair_of(low, high): two float32 rounded.
# power_to_one(number): the power of two that brings a number, not negative, to 1 or more, and below
# 2; at most 2^111, so that it and 256 times it are finite, and at least 2^-126.
# The plain functions are what tests without a GPU run; they name the definitions as defaults so
# that these, too, are part of the fingerprint of the kernels that use them.
load_pairs = intrinsic(_load_pairs_by_instruction)
load_pairs.py_func = _load_pairs_in_python
load_divided_pairs = intrinsic(_load_pairs_by_bits)
load_divided_pairs.py_func = _load_divided_pairs_in_python
load_number = intrinsic(_load_number)
load_number.py_func = _load_number_in_python
multiply_add_pairs = intrinsic(_multiply_add_pairs)
multiply_add_pairs.py_func = _multiply_add_pairs_in_python
numbers_of_pair = intrinsic(_numbers_of_pair)
numbers_of_pair.py_func = _numbers_of_pair_in_python
pair_of = intrinsic(_pair_of)
pair_of.py_func = _pair_of_in_python
power_to_one = intrinsic(_power_to_one)
power_to_one.py_func = _power_to_one_in_python
