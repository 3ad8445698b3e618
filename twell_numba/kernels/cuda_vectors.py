"""Numbers by eights, as kernels load and store them: 16 bytes or more at a time where they can.

Used inside kernels only. A lane of a warp takes eight adjacent numbers of a row, a warp 256.
"""

from llvmlite import ir

from twell_numba.device.gpu.language import (
    _arithmetic_type,
    _round_to_bfloat16,
    bfloat16,
    cuda,
    device_function,
    float16,
    intrinsic,
    load,
    number,
    store,
    types,
    warp_sum,
)

_i16, _i32, _f32 = ir.IntType(16), ir.IntType(32), ir.FloatType()


def _load_aligned(typing_context, pointer, index):
    element = pointer.dtype
    result = types.UniTuple(_arithmetic_type(pointer), 8)

    def generate(context, builder, signature, arguments):
        position = context.cast(builder, arguments[1], signature.args[1], types.int64)
        address = builder.gep(arguments[0], [position])
        if element in (bfloat16, float16):
            numbers = []
            for word in _load_words(builder, address, _i32, 4):
                low, high = _halves(builder, word, element)
                numbers += [low, high]
        else:
            numbers = _load_words(builder, address, context.get_data_type(element), 8)
        return context.make_tuple(builder, signature.return_type, numbers)

    return result(pointer, index), generate


def _load_words(builder, address, word, count):
    """Return ``count`` words from an address on."""
    vector = builder.bitcast(address, ir.VectorType(word, count).as_pointer())
    loaded = builder.load(vector, align=16)
    return [builder.extract_element(loaded, ir.Constant(_i32, i)) for i in range(count)]


def _halves(builder, word, element):
    """Return the two 16-bit floats of a word, as float32."""
    if element == bfloat16:
        low = builder.shl(word, ir.Constant(_i32, 16))
        high = builder.and_(word, ir.Constant(_i32, 0xFFFF0000))
        return builder.bitcast(low, _f32), builder.bitcast(high, _f32)
    bits = builder.trunc(word, _i16), builder.trunc(builder.lshr(word, ir.Constant(_i32, 16)), _i16)
    return tuple(builder.fpext(builder.bitcast(half, ir.HalfType()), _f32) for half in bits)


def _store_aligned(typing_context, pointer, index, numbers):
    element, wanted = pointer.dtype, _arithmetic_type(pointer)

    def generate(context, builder, signature, arguments):
        position = context.cast(builder, arguments[1], signature.args[1], types.int64)
        address = builder.gep(arguments[0], [position])
        given = signature.args[2].dtype
        values = [
            context.cast(builder, builder.extract_value(arguments[2], i), given, wanted)
            for i in range(8)
        ]
        if element in (bfloat16, float16):
            halves = [_half_of(builder, value, element) for value in values]
            values = [_word_of(builder, *halves[i : i + 2]) for i in range(0, 8, 2)]
        vector = ir.Constant(ir.VectorType(values[0].type, len(values)), ir.Undefined)
        for i, value in enumerate(values):
            vector = builder.insert_element(vector, value, ir.Constant(_i32, i))
        builder.store(vector, builder.bitcast(address, vector.type.as_pointer()), align=16)
        return context.get_dummy_value()

    return types.void(pointer, index, numbers), generate


def _half_of(builder, value, element):
    """Return the 16 bits of a float32 rounded to a 16-bit float."""
    if element == bfloat16:
        return _round_to_bfloat16(builder, value)
    return builder.bitcast(builder.fptrunc(value, ir.HalfType()), _i16)


def _word_of(builder, low, high):
    """Return two times 16 bits as a word."""
    shifted = builder.shl(builder.zext(high, _i32), ir.Constant(_i32, 16))
    return builder.or_(shifted, builder.zext(low, _i32))


def _store_one_by_one(pointer, index, numbers, definition=_store_aligned):
    """What store_aligned does; see below."""
    for i in range(8):
        store(pointer, index + i, numbers[i])


def _load_one_by_one(pointer, index, definition=_load_aligned):
    """What load_aligned does; see below."""
    return (
        load(pointer, index),
        load(pointer, index + 1),
        load(pointer, index + 2),
        load(pointer, index + 3),
        load(pointer, index + 4),
        load(pointer, index + 5),
        load(pointer, index + 6),
        load(pointer, index + 7),
    )


# Eight numbers from ``pointer[index]`` on, whose address is a multiple of 16 bytes, are read or
# written in as few steps as the GPU can: one by one they would take up to eight times as many
# instructions. The plain functions are what tests without a GPU run; they name the definitions as
# defaults so that these, too, are part of the fingerprint of the kernels that use them.
load_aligned = intrinsic(_load_aligned)
load_aligned.py_func = _load_one_by_one
store_aligned = intrinsic(_store_aligned)
store_aligned.py_func = _store_one_by_one


@device_function
def load_column(matrix, start, d, width):
    """Return number ``d`` of the row that begins at ``start``; 0 past its end."""
    value = number(matrix, 0)
    if d < width:
        value = load(matrix, start + d)
    return value


@device_function
def load_eight(matrix, start, d, width, is_aligned):
    """Return numbers ``d`` to ``d + 7`` of the row that begins at ``start``; 0 past its end."""
    zero = number(matrix, 0)
    numbers = (zero, zero, zero, zero, zero, zero, zero, zero)
    if is_aligned != 0:
        if d < width:
            numbers = load_aligned(matrix, start + d)
    else:
        numbers = (
            load_column(matrix, start, d, width),
            load_column(matrix, start, d + 1, width),
            load_column(matrix, start, d + 2, width),
            load_column(matrix, start, d + 3, width),
            load_column(matrix, start, d + 4, width),
            load_column(matrix, start, d + 5, width),
            load_column(matrix, start, d + 6, width),
            load_column(matrix, start, d + 7, width),
        )
    return numbers


@device_function
def add_scaled(sums, factor, numbers):
    """Return eight sums, each grown by ``factor`` times a number."""
    return (
        sums[0] + factor * numbers[0],
        sums[1] + factor * numbers[1],
        sums[2] + factor * numbers[2],
        sums[3] + factor * numbers[3],
        sums[4] + factor * numbers[4],
        sums[5] + factor * numbers[5],
        sums[6] + factor * numbers[6],
        sums[7] + factor * numbers[7],
    )


@device_function
def eight_zeros(matrix):
    """Return eight sums of nothing, of the type in which numbers of ``matrix`` are added."""
    zero = number(matrix, 0)
    return (zero, zero, zero, zero, zero, zero, zero, zero)


@device_function
def add_unless_zero(sums, factor, numbers):
    """Return eight sums, each grown by ``factor`` times a number; 0 times NaN adds nothing."""
    if factor != 0:
        sums = add_scaled(sums, factor, numbers)
    return sums


@device_function
def store_column(matrix, start, d, width, value):
    """Write number ``d`` of the row that begins at ``start``, unless it is past its end."""
    if d < width:
        store(matrix, start + d, value)


@device_function
def store_eight(matrix, start, d, width, numbers, is_aligned):
    """Write numbers ``d`` to ``d + 7`` of the row that begins at ``start``, as far as it goes."""
    if is_aligned != 0:
        if d < width:
            store_aligned(matrix, start + d, numbers)
    else:
        for i in range(8):
            store_column(matrix, start, d + i, width, numbers[i])


@device_function
def add_eight(matrix, start, d, width, numbers, is_aligned):
    """Add to numbers ``d`` to ``d + 7`` of a row, as far as it goes; no other thread has them."""
    old = load_eight(matrix, start, d, width, is_aligned)
    sums = add_scaled(old, number(matrix, 1), numbers)
    store_eight(matrix, start, d, width, sums, is_aligned)


@device_function
def warp_dot(result, first, first_start, second, second_start, width, is_aligned):
    """Return the product of two rows of ``width`` numbers, the same bits in each lane.

    It is added up in the type in which numbers of ``result`` are.
    """
    sums = eight_zeros(result)
    d = types.int64(cuda.threadIdx.x % 32) * 8
    while d < width:
        a = load_eight(first, first_start, d, width, is_aligned)
        b = load_eight(second, second_start, d, width, is_aligned)
        sums = (
            sums[0] + a[0] * b[0],
            sums[1] + a[1] * b[1],
            sums[2] + a[2] * b[2],
            sums[3] + a[3] * b[3],
            sums[4] + a[4] * b[4],
            sums[5] + a[5] * b[5],
            sums[6] + a[6] * b[6],
            sums[7] + a[7] * b[7],
        )
        d += 256
    total = ((sums[0] + sums[1]) + (sums[2] + sums[3])) + (
        (sums[4] + sums[5]) + (sums[6] + sums[7])
    )
    return warp_sum(total)


def _round_like(typing_context, pointer, value):
    element, wanted = pointer.dtype, _arithmetic_type(pointer)

    def generate(context, builder, signature, arguments):
        converted = context.cast(builder, arguments[1], signature.args[1], wanted)
        if element == bfloat16:
            bits = builder.zext(_round_to_bfloat16(builder, converted), _i32)
            return builder.bitcast(builder.shl(bits, ir.Constant(_i32, 16)), _f32)
        if element == float16:
            return builder.fpext(builder.fptrunc(converted, ir.HalfType()), _f32)
        return converted

    return wanted(pointer, value), generate


def _round_in_python(pointer, value, definition=_round_like):
    """What round_like does; see below."""
    return number(pointer, pointer.dtype.type(value))


# What ``load`` would return after ``store`` of a number, without going through memory.
round_like = intrinsic(_round_like)
round_like.py_func = _round_in_python
