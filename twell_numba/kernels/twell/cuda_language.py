"""What the kernels of the activation-sparse layers share: used inside kernels only."""

from llvmlite import ir

from twell_numba.device.gpu.language import (
    FULL_WARP,
    cuda,
    device_function,
    intrinsic,
    load,
    store,
    types,
)

_i1, _i32 = ir.IntType(1), ir.IntType(32)

# Of blocks in which threads work together on a list.
MOST_THREADS = 256


def _ballot(typing_context, flag):
    def generate(context, builder, signature, arguments):
        zero = ir.Constant(arguments[0].type, 0)
        wanted = ir.FunctionType(_i32, [_i32, _i1])
        vote = builder.module.declare_intrinsic("llvm.nvvm.vote.ballot.sync", (), wanted)
        is_set = builder.icmp_signed("!=", arguments[0], zero)
        return builder.call(vote, [ir.Constant(_i32, -1), is_set])

    return types.int32(flag), generate


def _ballot_by_shuffles(flag, definition=_ballot):
    """What ballot does; see below."""
    bits = types.int64(flag != 0) << (cuda.threadIdx.x % 32)
    for step in range(5):
        bits |= cuda.shfl_xor_sync(FULL_WARP, bits, 1 << step)
    return bits


def _count_bits(typing_context, word):
    def generate(context, builder, signature, arguments):
        bits = context.cast(builder, arguments[0], signature.args[0], types.int32)
        return builder.ctpop(bits)

    return types.int32(word), generate


def _count_bits_in_text(word, definition=_count_bits):
    """What count_bits does; see below."""
    return bin(int(word) & 0xFFFFFFFF).count("1")


def _set_bit(typing_context, words, index, bit):
    def generate(context, builder, signature, arguments):
        position = context.cast(builder, arguments[1], signature.args[1], types.int64)
        shift = context.cast(builder, arguments[2], signature.args[2], types.int32)
        word = builder.shl(ir.Constant(_i32, 1), shift)
        builder.atomic_rmw("or", builder.gep(arguments[0], [position]), word, "monotonic")
        return context.get_dummy_value()

    return types.void(words, index, bit), generate


def _set_bit_alone(words, index, bit, definition=_set_bit):
    """What set_bit does; see below."""
    word = (int(load(words, index)) & 0xFFFFFFFF) | (1 << int(bit))
    store(words, index, word - (1 << 32) if word >= 1 << 31 else word)


# ballot(flag) returns a word whose bit i is set if lane i's integer is not 0; count_bits(word)
# counts set bits; set_bit(words, index, bit) sets one in an array of int32, whoever else does: the
# result does not depend on the order. The plain functions are what tests without a GPU run; they
# name the definitions as defaults so that these are part of the fingerprint of their kernels.
ballot = intrinsic(_ballot)
ballot.py_func = _ballot_by_shuffles
count_bits = intrinsic(_count_bits)
count_bits.py_func = _count_bits_in_text
set_bit = intrinsic(_set_bit)
set_bit.py_func = _set_bit_alone


@device_function
def bits_below(bit):
    """Return a word of which the bits below this one are set."""
    return (types.int64(1) << bit) - 1


@device_function
def lowest_bit(word):
    """Return which bit of a word, not negative and not 0, is the lowest that is set."""
    return types.int64(count_bits((word & -word) - 1))


@device_function
def is_bit_set(words, index):
    """Return bit ``index`` of an array of int32, 0 or 1."""
    return (load(words, index // 32) >> (index % 32)) & 1


@device_function
def warp_prefix(value):
    """Return the sum of an integer over the lanes before this one, and over the whole warp."""
    lane = cuda.threadIdx.x % 32
    before = types.int64(0)
    total = types.int64(value)
    for step in range(5):
        # so far total is over a group of 2^step lanes; other is that of the group beside it
        other = cuda.shfl_xor_sync(FULL_WARP, total, 1 << step)
        if (lane >> step) % 2 == 1:
            before += other
        total += other
    return before, total


@device_function
def warp_prefix_of_few(value):
    """Return the same of integers below 16, in fewer instructions."""
    below = bits_below(cuda.threadIdx.x % 32)
    before = types.int32(0)
    total = types.int32(0)
    for bit in range(4):
        lanes = ballot((value >> bit) & 1)
        before = types.int32(before + (count_bits(lanes & below) << bit))
        total = types.int32(total + (count_bits(lanes) << bit))
    return before, total


@device_function
def block_prefix(value):
    """Return the sum of an integer over the threads before this one, and over the whole block."""
    parts = cuda.shared.array(32, types.int64)
    before, total = warp_prefix(value)
    warp = cuda.threadIdx.x // 32
    if cuda.threadIdx.x % 32 == 0:
        parts[warp] = total
    cuda.syncthreads()
    total = types.int64(0)
    for i in range(cuda.blockDim.x // 32):
        if i < warp:
            before += parts[i]
        total += parts[i]
    cuda.syncthreads()  # the next prefix writes to the same place
    return before, total


@device_function
def prefix_of_block(value, parts):
    """Return the sum of an int32 over the threads before this one, and over the whole block.

    ``parts`` are 66 words of shared memory.
    """
    lane, warp = types.int32(cuda.threadIdx.x % 32), types.int32(cuda.threadIdx.x // 32)
    before, total = prefix_of_warp(value)
    if lane == 0:
        parts[warp] = total
    cuda.syncthreads()
    if warp == 0:
        of_warp = types.int32(0)
        if lane < cuda.blockDim.x // 32:
            of_warp = parts[lane]
        earlier, total = prefix_of_warp(of_warp)
        parts[33 + lane] = earlier
        if lane == 0:
            parts[32] = total
    cuda.syncthreads()
    before = types.int32(before + parts[33 + warp])
    total = parts[32]
    cuda.syncthreads()  # the next prefix writes to the same place
    return before, total


@device_function
def prefix_of_warp(value):
    """Return the sum of an int32 over the lanes before this one, and over the whole warp."""
    lane = types.int32(cuda.threadIdx.x % 32)
    before = types.int32(0)
    total = types.int32(value)
    for step in range(5):
        other = cuda.shfl_xor_sync(FULL_WARP, total, 1 << step)
        before = types.int32(before + (other if lane >> step & 1 == 1 else 0))
        total = types.int32(total + other)
    return before, total


@device_function
def sign(value, one):
    """Return -1, 0 or 1, of the type of ``one``; NaN stays NaN."""
    result = value
    if value > 0:
        result = one
    elif value < 0:
        result = -one
    return result
