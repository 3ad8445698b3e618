"""What kernels for Hopper GPUs (compute capability 9.0) are written with, beside the language.

The *copy engine* copies a box of a matrix (:mod:`twell_numba.device.gpu.tensor_map`) to shared
memory while the threads do something else, and counts the bytes at a *barrier* in shared memory.
A *warpgroup* (four warps, the first a multiple of four) multiplies matrices in shared memory on
tensor cores, and goes on while they work. Blocks that are launched as a *cluster* run at the same
time and can reach each other's shared memory: the copy engine can write one box to all of them.

A barrier (8 bytes) has phases, numbered from 0. A phase ends once as many threads have arrived as
it was made for, and all bytes are there that were announced. A thread waits for the end of a phase
by its parity; before any phase has ended, a wait for parity 1 returns at once.

Addresses in shared memory are integers, from :func:`shared_address`. Used inside kernels only.
"""

from llvmlite import ir

from twell_numba.device.gpu.language import Storage16, device_function, intrinsic, types

_i16, _i32, _i64 = (ir.IntType(bits) for bits in (16, 32, 64))
_f32, _void = ir.FloatType(), ir.VoidType()

int32 = types.int32

# A product of a warpgroup: ROWS x COLUMNS numbers, each the sum of INNER products.
ROWS, COLUMNS, INNER = 64, 256, 64
# Numbers of it that each thread holds.
SUMS = ROWS * COLUMNS // 128
# Bytes of a row of an operand in shared memory, of INNER numbers.
ROW_BYTES = 2 * INNER

_INTEGERS = {16: (types.int16, "h"), 32: (types.int32, "r"), 64: (types.int64, "l")}


def _instruction(text, *widths, convergent=False):
    """Return how an instruction is written that takes integers and returns nothing.

    ``widths`` are the integers' bits, in the order of ``$0``, ``$1`` and on in the text.
    """
    kinds = [ir.IntType(width) for width in widths]
    constraints = ",".join([*(_INTEGERS[width][1] for width in widths), "~{memory}"])

    def generate(context, builder, signature, arguments):
        values = [
            context.cast(builder, value, given, _INTEGERS[width][0])
            for value, given, width in zip(arguments, signature.args, widths, strict=True)
        ]
        code = ir.InlineAsm(ir.FunctionType(_void, kinds), text, constraints, side_effect=True)
        builder.call(code, values, attrs=("convergent",) if convergent else ())
        return context.get_dummy_value()

    return generate


# ---------------------------------------------------------------------- shared memory and barriers


@intrinsic
def shared_address(typing_context, array):
    """Return the address of an array in shared memory."""
    if not isinstance(array, types.Array):
        return None

    def generate(context, builder, signature, arguments):
        data = context.make_array(signature.args[0])(context, builder, value=arguments[0]).data
        shared = builder.addrspacecast(data, ir.PointerType(data.type.pointee, addrspace=3))
        return builder.zext(builder.ptrtoint(shared, _i32), _i64)

    return types.int64(array), generate


def _load_words(text, count):
    """Return how words at an address in shared memory are read."""
    constraints = ",".join([*["=r"] * count, "r", "~{memory}"])

    def generate(context, builder, signature, arguments):
        address = context.cast(builder, arguments[0], signature.args[0], types.int32)
        result = _i32 if count == 1 else ir.LiteralStructType([_i32] * count)
        code = ir.InlineAsm(ir.FunctionType(result, [_i32]), text, constraints, side_effect=True)
        loaded = builder.call(code, [address])
        if count == 1:
            return loaded
        words = [builder.extract_value(loaded, i) for i in range(count)]
        return context.make_tuple(builder, signature.return_type, words)

    return generate


@intrinsic
def load_shared_word(typing_context, address):
    """Read a word of shared memory."""
    return types.int32(address), _load_words("ld.shared.b32 $0, [$1];", 1)


@intrinsic
def load_four_shared_words(typing_context, address):
    """Read four words of shared memory, at a multiple of 16 bytes."""
    return types.UniTuple(types.int32, 4)(address), _load_words(
        "ld.shared.v4.b32 {$0, $1, $2, $3}, [$4];", 4
    )


@intrinsic
def store_shared_word(typing_context, address, word):
    """Write a word of shared memory."""
    return types.void(address, word), _instruction("st.shared.b32 [$0], $1;", 32, 32)


@intrinsic
def store_two_shared_words(typing_context, address, first, second):
    """Write two words of shared memory, at a multiple of 8 bytes."""
    return types.void(address, first, second), _instruction(
        "st.shared.v2.b32 [$0], {$1, $2};", 32, 32, 32
    )


@intrinsic
def make_barrier(typing_context, barrier, arrivals):
    """Make a barrier of which a phase ends after so many arrivals."""
    return types.void(barrier, arrivals), _instruction(
        "mbarrier.init.shared::cta.b64 [$0], $1;", 32, 32
    )


@intrinsic
def publish_barriers(typing_context):
    """Let the cluster and the copy engine see the barriers made by this thread, once all met."""
    return types.void(), _instruction("fence.mbarrier_init.release.cluster;")


@intrinsic
def arrive(typing_context, barrier):
    """Arrive at a barrier of this block."""
    return types.void(barrier), _instruction("mbarrier.arrive.shared::cta.b64 _, [$0];", 32)


@intrinsic
def arrive_in_block(typing_context, barrier, block):
    """Arrive at the barrier that is at this address in a block of the cluster, by its number."""
    return types.void(barrier, block), _instruction(
        "{ .reg .b32 there; mapa.shared::cluster.u32 there, $0, $1; "
        "mbarrier.arrive.shared::cluster.b64 _, [there]; }",
        32,
        32,
    )


@intrinsic
def arrive_and_expect(typing_context, barrier, nbytes):
    """Arrive at a barrier, and announce bytes that the copy engine brings in this phase."""
    return types.void(barrier, nbytes), _instruction(
        "mbarrier.arrive.expect_tx.shared::cta.b64 _, [$0], $1;", 32, 32
    )


@intrinsic
def arrive_when_copied(typing_context, barrier):
    """Arrive at a barrier once all is there that this thread began to copy.

    By :func:`copy_sixteen_bytes`; the thread goes on. Whoever then waits for the phase calls
    :func:`show_to_tensor_cores`.
    """
    return types.void(barrier), _instruction(
        "cp.async.mbarrier.arrive.noinc.shared::cta.b64 [$0];", 32
    )


@intrinsic
def wait_for_phase(typing_context, barrier, parity):
    """Wait until the phase of this parity, 0 or 1, has ended."""
    return types.void(barrier, parity), _instruction(
        "{ .reg .pred ended; AGAIN_${:uid}: "
        "mbarrier.try_wait.parity.shared::cta.b64 ended, [$0], $1; "
        "@!ended bra AGAIN_${:uid}; }",
        32,
        32,
    )


@intrinsic
def wait_for_cluster(typing_context):
    """Wait until all threads of all blocks of the cluster are here."""
    return types.void(), _instruction(
        "barrier.cluster.arrive.release; barrier.cluster.wait.acquire;"
    )


# ------------------------------------------------------------------------------- the copy engine


@intrinsic
def write_tensor_map(typing_context, memory, index, words):
    """Write a tensor map to ``memory[index]`` and on, for this thread's copies; return its address.

    ``memory`` is a pointer to int64, at a multiple of 128 bytes. The thread's earlier copies by a
    map in the same place must have ended.
    """
    if not isinstance(memory, types.CPointer) or not isinstance(words, types.UniTuple):
        return None

    def generate(context, builder, signature, arguments):
        start = context.cast(builder, arguments[1], signature.args[1], types.int64)
        for i in range(words.count):
            place = builder.gep(arguments[0], [builder.add(start, ir.Constant(_i64, i))])
            builder.store(builder.extract_value(arguments[2], i), place)
        address = builder.ptrtoint(builder.gep(arguments[0], [start]), _i64)
        fence = _instruction(
            "fence.proxy.tensormap::generic.release.gpu; "
            "fence.proxy.tensormap::generic.acquire.gpu [$0], 128;",
            64,
        )
        fence(context, builder, types.void(types.int64), [address])
        return address

    return types.int64(memory, index, words), generate


@intrinsic
def copy_box(typing_context, target, tensor_map, column, row, barrier):
    """Begin to copy the box whose first number is at a column and a row, to shared memory."""
    return types.void(target, tensor_map, column, row, barrier), _instruction(
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
        "[$0], [$1, {$2, $3}], [$4];",
        32, 64, 32, 32, 32,
    )  # fmt: skip


@intrinsic
def copy_box_to_blocks(typing_context, target, tensor_map, column, row, barrier, blocks):
    """Do so in every block of the cluster whose bit is set; the bytes count at each one's barrier.

    ``target`` and ``barrier`` are at the same addresses in all of them.
    """
    return types.void(target, tensor_map, column, row, barrier, blocks), _instruction(
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
        ".multicast::cluster [$0], [$1, {$2, $3}], [$4], $5;",
        32, 64, 32, 32, 32, 16,
    )  # fmt: skip


# ---------------------------------------------------------------- copies that threads begin


@intrinsic
def address_of(typing_context, pointer, index):
    """Return where ``pointer[index]`` is in memory, in bytes."""
    if not isinstance(pointer, types.CPointer):
        return None

    def generate(context, builder, signature, arguments):
        position = context.cast(builder, arguments[1], signature.args[1], types.int64)
        return builder.ptrtoint(builder.gep(arguments[0], [position]), _i64)

    return types.int64(pointer, index), generate


@intrinsic
def row_address(typing_context, address, row, row_bytes):
    """Return ``address + row * row_bytes``, of two positive integers of 32 bits."""

    def generate(context, builder, signature, arguments):
        kinds = signature.args
        code = ir.InlineAsm(
            ir.FunctionType(_i64, [_i32, _i32, _i64]), "mad.wide.u32 $0, $1, $2, $3;", "=l,r,r,l"
        )
        operands = [
            context.cast(builder, arguments[i], kinds[i], kind)
            for i, kind in ((1, types.int32), (2, types.int32), (0, types.int64))
        ]
        return builder.call(code, operands)

    return types.int64(address, row, row_bytes), generate


@intrinsic
def load_four_integers(typing_context, pointer, index):
    """Return the four integers of 32 bits from ``pointer[index]`` on, a multiple of 16 bytes."""
    if not isinstance(pointer, types.CPointer) or pointer.dtype != types.int32:
        return None

    def generate(context, builder, signature, arguments):
        position = context.cast(builder, arguments[1], signature.args[1], types.int64)
        address = builder.gep(arguments[0], [position])
        kind = ir.VectorType(_i32, 4).as_pointer()
        vector = builder.load(builder.bitcast(address, kind), align=16)
        numbers = [builder.extract_element(vector, ir.Constant(_i32, i)) for i in range(4)]
        return context.make_tuple(builder, signature.return_type, numbers)

    return types.UniTuple(types.int32, 4)(pointer, index), generate


@intrinsic
def copy_sixteen_bytes(typing_context, target, address, row, rows):
    """Begin to copy 16 bytes of memory to shared memory, both at multiples of 16.

    Zeros unless ``row < rows``, integers of 32 bits; nothing is read then. For rows that do not lie
    side by side: the copy engine copies boxes.
    """
    return types.void(target, address, row, rows), _instruction(
        "{ .reg .pred left_out; setp.ge.s32 left_out, $2, $3; "
        "cp.async.cg.shared.global [$0], [$1], 16, left_out; }",
        32,
        64,
        32,
        32,
    )


@intrinsic
def show_to_tensor_cores(typing_context):
    """Let tensor cores see what threads wrote to shared memory, as far as this thread sees it."""
    return types.void(), _instruction("fence.proxy.async.shared::cta;")


# ------------------------------------------------------------------------------- tensor cores


@device_function
def operand(address):
    """Return how tensor cores are told of an operand in shared memory.

    Rows of 64 numbers as the copy engine writes them: 128-byte swizzle, eight rows in 1024 bytes.
    """
    return (1 << 62) | ((1024 >> 4) << 32) | (1 << 16) | ((address & 0x3FFFF) >> 4)


@device_function
def operand_by_rows(address):
    """Return how tensor cores are told of a right operand whose rows are what is summed over.

    INNER rows of 256 numbers, in four parts of 64 columns, one after the other; each part as the
    copy engine writes it.
    """
    return (
        (1 << 62)
        | ((1024 >> 4) << 32)
        | ((INNER * ROW_BYTES >> 4) << 16)
        | ((address & 0x3FFFF) >> 4)
    )


def _sums_of(context, builder, kind, array, count=SUMS):
    """Return the places of the first numbers of a local array."""
    data = context.make_array(kind)(context, builder, value=array).data
    return [builder.gep(data, [ir.Constant(_i64, i)]) for i in range(count)]


def _with_sums(builder, text, constraints, operands, places):
    """Run instructions that change sums: ``$0`` and on, other operands after them."""
    count = len(places)
    kinds = [operand.type for operand in operands] + [_f32] * count
    shape = ir.FunctionType(ir.LiteralStructType([_f32] * count), kinds)
    tied = [*["=f"] * count, *constraints, *map(str, range(count)), "~{memory}"]
    code = ir.InlineAsm(shape, text, ",".join(tied), side_effect=True)
    old = [builder.load(place) for place in places]
    new = builder.call(code, [*operands, *old], attrs=("convergent",))
    for i, place in enumerate(places):
        builder.store(builder.extract_value(new, i), place)


def _multiply_text(columns, by_rows):
    """Return the instructions of a product: for 16 numbers of each row, then the next 16."""
    count = ROWS * columns // 128
    sums = ", ".join(f"${i}" for i in range(count))
    left, right, keep = (f"${count + i}" for i in range(3))
    step = f"wgmma.mma_async.sync.aligned.m{ROWS}n{columns}k16.f32.bf16.bf16"
    # 32 bytes further, in units of 16; of rows 16 of 128 bytes
    further = 16 * ROW_BYTES // 16 if by_rows else 2
    lines = [
        "{ .reg .pred keep, always; .reg .b64 left, right;",
        f"setp.ne.b32 keep, {keep}, 0; setp.eq.b32 always, 0, 0;",
        f"mov.b64 left, {left}; mov.b64 right, {right};",
        "wgmma.fence.sync.aligned;",
    ]
    for i in range(INNER // 16):
        if i > 0:
            lines.append(f"add.u64 left, left, 2; add.u64 right, right, {further};")
        added = "always" if i else "keep"
        lines.append(f"{step} {{{sums}}}, left, right, {added}, 1, 1, 0, {by_rows};")
    lines.append("wgmma.commit_group.sync.aligned; }")
    return "\n".join(lines)


@intrinsic
def begin_product(typing_context, sums, left, right, keep, columns, by_rows):
    """Begin to add A B^T to the sums of a warpgroup, or to replace them if ``keep`` is 0.

    A has 64 rows and B ``columns``, a constant, a multiple of 8 up to 256, each of 64 bfloat16
    numbers, given as :func:`operand`. If ``by_rows``, a constant, is 1, A B is added, B having 64
    rows of 256 numbers, given as :func:`operand_by_rows`.

    ``sums`` is a local array of 128 float32, of which ``columns / 2`` are used. With ``lane =
    thread % 32`` and ``warp = thread // 32 % 4``, a thread's ``sums[4 j + 2 h + i]`` is the number
    in row ``16 warp + 8 h + lane // 4`` and column ``8 j + 2 (lane % 4) + i``. All threads of the
    warpgroup must come here together.
    """
    constants = (columns, by_rows)
    if not isinstance(sums, types.Array):
        return None
    if not all(isinstance(constant, types.IntegerLiteral) for constant in constants):
        return None
    count, is_by_rows = (constant.literal_value for constant in constants)

    def generate(context, builder, signature, arguments):
        kinds = signature.args
        places = _sums_of(context, builder, kinds[0], arguments[0], ROWS * count // 128)
        operands = [
            context.cast(builder, arguments[1], kinds[1], types.int64),
            context.cast(builder, arguments[2], kinds[2], types.int64),
            context.cast(builder, arguments[3], kinds[3], types.int32),
        ]
        text = _multiply_text(count, is_by_rows)
        _with_sums(builder, text, ["l", "l", "r"], operands, places)
        return context.get_dummy_value()

    return types.void(sums, left, right, keep, columns, by_rows), generate


@intrinsic
def wait_for_older_products(typing_context):
    """Wait until all products of this warpgroup but the newest have read their operands."""
    return types.void(), _instruction("wgmma.wait_group.sync.aligned 1;", convergent=True)


@intrinsic
def wait_for_sums(typing_context, sums):
    """Wait until all products of this warpgroup are in its sums."""
    if not isinstance(sums, types.Array):
        return None

    def generate(context, builder, signature, arguments):
        places = _sums_of(context, builder, signature.args[0], arguments[0])
        # as operands, so that no use of them is moved before the wait
        _with_sums(builder, "wgmma.wait_group.sync.aligned 0;", [], [], places)
        return context.get_dummy_value()

    return types.void(sums), generate


def _set_registers(direction):
    def define(typing_context, count):
        if not isinstance(count, types.IntegerLiteral):
            return None

        def generate(context, builder, signature, arguments):
            text = f"setmaxnreg.{direction}.sync.aligned.u32 {count.literal_value};"
            set_them = _instruction(text, convergent=True)
            return set_them(context, builder, types.void(), [])

        return types.void(count), generate

    return define


# Give registers of this warpgroup's threads away, down to a constant number of them each, or wait
# for as many as that. In kernels for which blocks_per_multiprocessor is given.
give_registers_away = intrinsic(_set_registers("dec"))
take_registers = intrinsic(_set_registers("inc"))


# ------------------------------------------------------------------------------- lanes and words


@intrinsic
def positive_word(typing_context, low, high):
    """Return two float32 numbers as a word of bfloat16, 0 instead of numbers below; NaN is kept."""

    def generate(context, builder, signature, arguments):
        code = ir.InlineAsm(
            ir.FunctionType(_i32, [_f32, _f32]), "cvt.rn.relu.bf16x2.f32 $0, $2, $1;", "=r,f,f"
        )
        return builder.call(code, arguments)

    return types.int32(types.float32, types.float32), generate


@intrinsic
def word_of_two(typing_context, low, high):
    """Return two float32 numbers as a word of bfloat16."""

    def generate(context, builder, signature, arguments):
        code = ir.InlineAsm(
            ir.FunctionType(_i32, [_f32, _f32]), "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f"
        )
        return builder.call(code, arguments)

    return types.int32(types.float32, types.float32), generate


@intrinsic
def number_of_half(typing_context, word):
    """Return the bfloat16 number in the low 16 bits of a word, as float32."""

    def generate(context, builder, signature, arguments):
        word = context.cast(builder, arguments[0], signature.args[0], types.int32)
        return builder.bitcast(builder.shl(word, ir.Constant(_i32, 16)), _f32)

    return types.float32(word), generate


@intrinsic
def positive_halves(typing_context, word):
    """Return which halves of a word, integers of 16 bits, are above 0, in bits 0 and 16.

    Of what :func:`positive_word` returns these are the numbers above 0 and NaN, which it makes
    without a sign.
    """

    def generate(context, builder, signature, arguments):
        code = ir.InlineAsm(
            ir.FunctionType(_i32, [_i32, _i32]), "min.relu.s16x2 $0, $1, $2;", "=r,r,r"
        )
        return builder.call(code, [arguments[0], ir.Constant(_i32, 0x10001)])

    return types.int32(types.int32), generate


@intrinsic
def store_low_half(typing_context, pointer, index, word):
    """Write the low 16 bits of a word to ``pointer[index]``, of 16 bits, as they are."""
    if not isinstance(pointer, types.CPointer):
        return None
    if not isinstance(pointer.dtype, Storage16) and pointer.dtype != types.uint16:
        return None

    def generate(context, builder, signature, arguments):
        position = context.cast(builder, arguments[1], signature.args[1], types.int64)
        bits = context.cast(builder, arguments[2], signature.args[2], types.int32)
        builder.store(builder.trunc(bits, _i16), builder.gep(arguments[0], [position]))
        return context.get_dummy_value()

    return types.void(pointer, index, word), generate
