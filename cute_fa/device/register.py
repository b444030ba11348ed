"""Register: conversions and orderings of registers that the compiler has to be told about.

Fragments: element 4 y + 2 r + e of a wgmma accumulator (r, e in 0, 1) is row lane / 4 + 8 r of the warp's 16 rows and
column 8 y + 2 (lane % 4) + e; the four lanes of a quad share their rows.
"""

import cutlass
from cutlass import Float32, Int32, cute

_PAIR = {cutlass.BFloat16: "bf16x2", cutlass.Float16: "f16x2"}


def pack_pair(low, high, dtype) -> Int32:
    """Two fp32 as two 16-bit numbers, rounded to nearest.

    WORKAROUND(nvidia-cutlass-dsl, 4.8.1): inline PTX, because a plain conversion is moved to its use, past the next
    product, where the fp32 values then live beside the next scores (spills, C7512). Remove when P survives as 16 bits.
    """
    return cute.arch.inline_ptx(
        f"cvt.rn.{_PAIR[dtype]}.f32 {{$w0}}, {{$r1}}, {{$r0}};", write_only_types=[Int32], read_only_args=[low, high]
    )


def pack(fragment, operand, dtype, begin=0, end=None):
    """fp32 accumulator -> 16-bit A operand of the next product; both have the same order of elements (Hopper, 16 bits).

    begin, end: the groups of 4 elements (8 columns) that are packed.
    """
    words = words_of(operand)
    for i in range(2 * begin, 2 * (end or cute.size(fragment) // 4)):
        words[i] = pack_pair(fragment[2 * i], fragment[2 * i + 1], dtype)


def clear_words(operand, begin: int):
    """Zeros in a 16-bit operand from pair `begin` on."""
    words = words_of(operand)
    for i in range(begin, cute.size(words)):
        words[i] = Int32(0)


def words_of(fragment):
    """A 16-bit fragment as pairs of neighbours, in one mode."""
    return cute.make_tensor(cute.recast_tensor(fragment, Int32).iterator, cute.make_layout(cute.size(fragment) // 2))


def transpose_8x8(word: Int32) -> Int32:
    """Run by a whole warp: transposes 8x8 numbers of 16 bits. A lane has row lane / 4, columns 2 (lane % 4) and the next."""
    return cute.arch.inline_ptx(
        "movmatrix.sync.aligned.m8n8.trans.b16 {$w0}, {$r0};", write_only_types=[Int32], read_only_args=[word]
    )


def multiply_pairs(a, b, dtype) -> Int32:
    """Elementwise product of two pairs of 16-bit numbers."""
    return cute.arch.inline_ptx(f"mul.rn.{_PAIR[dtype]} {{$w0}}, {{$r0}}, {{$r1}};", write_only_types=[Int32], read_only_args=[a, b])


def hold(value: Float32, scratch):
    """Keeps what follows, such as a wait, below the instructions that make `value`, a number that is never negative.

    WORKAROUND(ptxas, 13.4): a wait for a product is hoisted above the arithmetic that should run under it. The store to
    scratch (shared memory) depends on `value` and never happens. ptxas must not know that: it sees that a sum of
    exponentials is not negative and drops the store, but not of a sum that a loop carries.
    """
    cute.arch.inline_ptx(
        "{ .reg .pred p; setp.lt.f32 p, {$r0}, 0f00000000; @p st.volatile.shared.u32 [{$r1}], {$r2}; }",
        read_only_args=[value, scratch.toint(), Int32(0)],
    )


def opaque(value: Int32) -> Int32:
    """The same value, of which the compiler knows nothing.

    WORKAROUND(ptxas, 13.4): what is made of a value that a loop does not change is made before the loop, and registers hold
    it throughout, where there are none to spare (spills).
    """
    return cute.arch.inline_ptx("mov.b32 {$w0}, {$r0};", write_only_types=[Int32], read_only_args=[value])


def quad_max(value: Float32) -> Float32:
    """The maximum over the four lanes that share a row."""
    for distance in (2, 1):
        value = cute.arch.fmax(value, cute.arch.shuffle_sync_bfly(value, distance))
    return value


def quad_sum(value: Float32) -> Float32:
    """The sum over the four lanes that share a row."""
    for distance in (2, 1):
        value = value + cute.arch.shuffle_sync_bfly(value, distance)
    return value


@cute.jit
def select(condition: cutlass.Boolean, if_true: Int32, if_false: Int32) -> Int32:
    return if_true if condition else if_false
