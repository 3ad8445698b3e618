"""Products on tensor cores, for kernels: 16-bit numbers by 16-bit numbers, added in float32.

    C (16 x 8) += A (16 x 16) @ B (16 x 8)

computed by a warp, from compute capability 8.0 on: PTX's ``mma.sync.m16n8k16``. Each lane holds
its part of the three matrices in registers, a *word* (uint32) being two adjacent 16-bit numbers.
With ``group = lane // 4`` and ``place = lane % 4``, lane holds

    a0, a1, a2, a3    A[group, k], A[group + 8, k], A[group, k + 8], A[group + 8, k + 8]
    b0, b1            B[k, group], B[k + 8, group]
    c0, c1            C[group, 2 place], C[group, 2 place + 1]
    c2, c3            C[group + 8, 2 place], C[group + 8, 2 place + 1]

each a and b for ``k = 2 place`` (low half) and ``k = 2 place + 1`` (high half). Which number of a
matrix in memory stands at which k is open, if it is the same for A and B: kernels choose it such
that a lane finds its numbers side by side.

Operands come from memory word by word, or pass through shared memory: :func:`copy_ahead` fills it
while the warp computes, :func:`load_matrices` reads fragments from it.

Used inside kernels only, on pointers to bfloat16 or float16.
"""

from llvmlite import ir

from twell_numba.device.gpu.language import Storage16, bfloat16, cuda, intrinsic, types

OLDEST_CAPABILITY = (8, 0)

_i16, _i32, _f32 = ir.IntType(16), ir.IntType(32), ir.FloatType()
_MULTIPLY_ADD = (
    "mma.sync.aligned.m16n8k16.row.col.f32.{0}.{0}.f32 "
    "{{$0,$1,$2,$3}}, {{$4,$5,$6,$7}}, {{$8,$9}}, {{$0,$1,$2,$3}};"
)


def inlined(function):
    """Let kernels call a function that becomes part of them: their local arrays stay registers."""
    return cuda.jit(device=True, forceinline=True)(function)


def _is_16_bits(pointer):
    return isinstance(pointer, types.CPointer) and isinstance(pointer.dtype, Storage16)


@intrinsic
def multiply_add(typing_context, pointer, sums, first, a0, a1, a2, a3, b0, b1):
    """Add A @ B to the four numbers ``sums[first]`` to ``sums[first + 3]`` of each lane.

    ``pointer`` says what A and B are made of, bfloat16 or float16; ``sums`` is a local array of
    float32. The whole warp must come here together.
    """
    if not _is_16_bits(pointer) or not isinstance(sums, types.Array):
        return None
    name = "bf16" if pointer.dtype == bfloat16 else "f16"

    def generate(context, builder, signature, arguments):
        array = context.make_array(signature.args[1])(context, builder, value=arguments[1])
        start = context.cast(builder, arguments[2], signature.args[2], types.int64)
        places = [
            builder.gep(array.data, [builder.add(start, ir.Constant(start.type, i))])
            for i in range(4)
        ]
        words = [
            context.cast(builder, word, kind, types.uint32)
            for word, kind in zip(arguments[3:], signature.args[3:], strict=True)
        ]
        shape = ir.FunctionType(ir.LiteralStructType([_f32] * 4), [_i32] * 6 + [_f32] * 4)
        code = ir.InlineAsm(
            shape, _MULTIPLY_ADD.format(name), "=f,=f,=f,=f,r,r,r,r,r,r,0,1,2,3", side_effect=False
        )
        old = [builder.load(place) for place in places]
        new = builder.call(code, words + old, attrs=("convergent",))
        for i, place in enumerate(places):
            builder.store(builder.extract_value(new, i), place)
        return context.get_dummy_value()

    return types.void(pointer, sums, first, a0, a1, a2, a3, b0, b1), generate


@intrinsic
def load_four_words(typing_context, pointer, index):
    """Return the eight numbers from ``pointer[index]`` on, a multiple of 16 bytes, as words."""
    if not _is_16_bits(pointer):
        return None

    def generate(context, builder, signature, arguments):
        position = context.cast(builder, arguments[1], signature.args[1], types.int64)
        address = builder.gep(arguments[0], [position])
        vector = builder.load(
            builder.bitcast(address, ir.VectorType(_i32, 4).as_pointer()), align=16
        )
        words = [builder.extract_element(vector, ir.Constant(_i32, i)) for i in range(4)]
        return context.make_tuple(builder, signature.return_type, words)

    return types.UniTuple(types.uint32, 4)(pointer, index), generate


def _shared_address(context, builder, kind, array, index, index_type):
    """Return the 32-bit address of a word of an array in shared memory."""
    data = context.make_array(kind)(context, builder, value=array).data
    base = builder.addrspacecast(data, ir.PointerType(_i32, addrspace=3))
    place = context.cast(builder, index, index_type, types.int32)
    return builder.add(builder.ptrtoint(base, _i32), builder.shl(place, ir.Constant(_i32, 2)))


@intrinsic
def copy_ahead(typing_context, words, place, pointer, index, is_there):
    """Begin to copy eight numbers to ``words[place]`` and on, in shared memory: 16 bytes, aligned.

    Zeros where ``is_there`` is false; nothing is read then.
    """
    if not _is_16_bits(pointer) or not isinstance(words, types.Array):
        return None

    def generate(context, builder, signature, arguments):
        kinds = signature.args
        target = _shared_address(context, builder, kinds[0], arguments[0], arguments[1], kinds[1])
        position = context.cast(builder, arguments[3], kinds[3], types.int64)
        source = builder.ptrtoint(builder.gep(arguments[2], [position]), ir.IntType(64))
        flag = context.cast(builder, arguments[4], kinds[4], types.boolean)
        nbytes = builder.select(flag, ir.Constant(_i32, 16), ir.Constant(_i32, 0))
        shape = ir.FunctionType(ir.VoidType(), [_i32, ir.IntType(64), _i32])
        text = "cp.async.cg.shared.global [$0], [$1], 16, $2;"
        code = ir.InlineAsm(shape, text, "r,l,r,~{memory}", side_effect=True)
        builder.call(code, [target, source, nbytes])
        return context.get_dummy_value()

    return types.void(words, place, pointer, index, is_there), generate


def _instruction(text):
    """Return an intrinsic of one instruction without operands."""

    def generate(context, builder, signature, arguments):
        shape = ir.FunctionType(ir.VoidType(), [])
        builder.call(ir.InlineAsm(shape, text, "~{memory}", side_effect=True), [])
        return context.get_dummy_value()

    return types.void(), generate


@intrinsic
def end_of_copies(typing_context):
    """Make a group of the copies begun since the last one."""
    return _instruction("cp.async.commit_group;")


@intrinsic
def wait_for_copies(typing_context):
    """Wait for all groups of copies of this thread but the newest."""
    return _instruction("cp.async.wait_group 1;")


@intrinsic
def wait_for_older_copies(typing_context):
    """Wait for all groups of copies of this thread but the two newest."""
    return _instruction("cp.async.wait_group 2;")


def _load_matrices(text, words, index):
    if not isinstance(words, types.Array):
        return None

    def generate(context, builder, signature, arguments):
        kinds = signature.args
        address = _shared_address(context, builder, kinds[0], arguments[0], arguments[1], kinds[1])
        shape = ir.FunctionType(ir.LiteralStructType([_i32] * 4), [_i32])
        code = ir.InlineAsm(shape, text, "=r,=r,=r,=r,r,~{memory}", side_effect=True)
        four = builder.call(code, [address], attrs=("convergent",))
        items = [builder.extract_value(four, i) for i in range(4)]
        return context.make_tuple(builder, signature.return_type, items)

    return types.UniTuple(types.uint32, 4)(words, index), generate


@intrinsic
def load_matrices(typing_context, words, index):
    """Return each lane's word of four 8 x 8 matrices of 16-bit numbers in shared memory.

    Lane ``8 m + r`` gives where row r of matrix m lies, 16 bytes, aligned. Lane gets of each matrix
    ``[lane // 4, 2 (lane % 4)]`` and the number beside it. The whole warp must come here together.
    """
    return _load_matrices(
        "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {$0,$1,$2,$3}, [$4];", words, index
    )


@intrinsic
def load_transposed_matrices(typing_context, words, index):
    """Do as :func:`load_matrices`, and transpose each: lane gets ``[2 (lane % 4), lane // 4]``."""
    return _load_matrices(
        "ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {$0,$1,$2,$3}, [$4];", words, index
    )


@intrinsic
def words_of(typing_context, pointer, a, b, c, d, e, f, g, h):
    """Return eight numbers as four words, rounded to 16 bits as ``pointer`` says."""
    if not _is_16_bits(pointer):
        return None
    name = "bf16x2" if pointer.dtype == bfloat16 else "f16x2"

    def generate(context, builder, signature, arguments):
        values = [
            context.cast(builder, value, kind, types.float32)
            for value, kind in zip(arguments[1:], signature.args[1:], strict=True)
        ]
        code = ir.InlineAsm(
            ir.FunctionType(_i32, [_f32, _f32]), f"cvt.rn.{name}.f32 $0, $2, $1;", "=r,f,f"
        )
        words = [builder.call(code, values[2 * i : 2 * i + 2]) for i in range(4)]
        return context.make_tuple(builder, signature.return_type, words)

    return types.UniTuple(types.uint32, 4)(pointer, a, b, c, d, e, f, g, h), generate


@intrinsic
def store_four_words(typing_context, pointer, index, words):
    """Write eight numbers, as words, from ``pointer[index]`` on, a multiple of 16 bytes."""
    if not _is_16_bits(pointer):
        return None

    def generate(context, builder, signature, arguments):
        position = context.cast(builder, arguments[1], signature.args[1], types.int64)
        address = builder.gep(arguments[0], [position])
        vector = ir.Constant(ir.VectorType(_i32, 4), ir.Undefined)
        for i in range(4):
            word = builder.extract_value(arguments[2], i)
            vector = builder.insert_element(vector, word, ir.Constant(_i32, i))
        builder.store(vector, builder.bitcast(address, vector.type.as_pointer()), align=16)
        return context.get_dummy_value()

    return types.void(pointer, index, words), generate


@intrinsic
def eight_numbers_of(typing_context, pointer, words):
    """Return the eight numbers in four words, as float32."""
    if not _is_16_bits(pointer):
        return None
    is_bfloat16 = pointer.dtype == bfloat16

    def generate(context, builder, signature, arguments):
        numbers = []
        for i in range(4):
            word = builder.extract_value(arguments[1], i)
            if is_bfloat16:
                halves = [
                    builder.shl(word, ir.Constant(_i32, 16)),
                    builder.and_(word, ir.Constant(_i32, 0xFFFF0000)),
                ]
                numbers += [builder.bitcast(half, _f32) for half in halves]
            else:
                halves = [word, builder.lshr(word, ir.Constant(_i32, 16))]
                numbers += [
                    builder.fpext(builder.bitcast(builder.trunc(half, _i16), ir.HalfType()), _f32)
                    for half in halves
                ]
        return context.make_tuple(builder, signature.return_type, numbers)

    return types.UniTuple(types.float32, 8)(pointer, words), generate
