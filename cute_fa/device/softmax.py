"""Softmax over a stream of blocks of scores, in registers: exponentials against a reference, sums, and when to rescale.

Source: Milakov and Gimelshein 2018 (online softmax), Dao 2023 (FlashAttention-2: normalise once, at the end). A thread holds
two rows r of an accumulator (order: `device/register.py`) and keeps of each
- reference: a number in units of log2, near the largest scaled score so far; -inf where no key was visible yet,
- total: the thread's own part of sum p, with p = 2^(scale_log2 * S - reference).
O and total are sums over p, so any reference gives the same quotient as long as nothing overflows or vanishes. Hence a
tile is tried in a quick way, and done once more, with care, if that went wrong:
- Its first block takes references: with care the row maxima, in a try those of the leftmost columns alone, if no masked
  block follows. The leftmost are visible where any are.
- A masked block takes its row maxima. The reference moves to them, and O is rescaled, only when one rose by more than
  RAISE_LOG2 ("lazy rescale"). With care, all blocks do so.
- An unmasked block of a try takes no maxima. p is computed at once, with scale and reference in one fused multiply-add.

What the end of a try looks at (`is_out_of_range`), and why it is enough: p >= 0, so each p is at most its thread's sum over
the block. For bf16, with fp32's exponents, it is enough that totals stay finite by a margin, which O needs; fp16 ends at
65504, so sums over blocks are bounded, too (`largest`). Behind the first block a try rescales nothing but P that are at
most 2^RAISE_LOG2, so what overflowed stays in its total, as infinity and NaN do. Nothing vanishes: a reference is at
most the row's maximum so far, so the row's sum is 1 or more, but for the rounding of the reference, which counts only
where it is large.
"""

import cutlass
from cutlass import Boolean, Float32, cute

from cute_fa.device.register import quad_max, quad_sum

LOG2_E = 1.4426950408889634
LN_2 = 0.6931471805599453

RAISE_LOG2 = 8.0
MAX_TOTAL, MAX_REFERENCE = 2.0**64, 2.0**20  # of a try; half an ulp of the reference is at most 2^-5
MAX_SUM_FP16 = 2.0**15  # of a thread, over one block of a try


@cute.jit
def nonzero(scale_log2: Float32) -> Float32:
    """A scale that is not 0, so that it keeps an infinite score infinite; 0 becomes one that makes finite scores vanish."""
    return scale_log2 if scale_log2 != 0.0 else Float32(2e-38)


@cute.jit
def hidden_score(scale_log2: Float32) -> Float32:
    """The infinity that becomes -inf when it is scaled."""
    return -Float32.inf if scale_log2 > 0.0 else Float32.inf


@cute.jit
def finite(reference: Float32) -> Float32:
    """0 where a block's maximum is -inf, so that its exponentials are 2^-inf = 0 and not 2^(-inf + inf)."""
    return reference if reference != -Float32.inf else Float32(0.0)


def scale(acc_S, scale_log2):
    """S in units of log2. Before maxima are taken, so that a negative scale takes the right ones."""
    for i in range(cute.size(acc_S)):
        acc_S[i] = acc_S[i] * scale_log2


def row_maxima(acc_S, old=None, scale_log2=1.0, num_groups=None):
    """Maxima of scale_log2 * S in both rows, over the quad and `old` maxima; NaN does not count, it fails later in the sums.

    num_groups: of 8 columns, from the left; None for all.
    """
    maxima = []
    for row in range(2):
        # Four chains, for latency.
        chains = [None] * 4
        for group in range(num_groups or cute.size(acc_S) // 4):
            for element in range(2):
                value, chain = acc_S[4 * group + 2 * row + element] * scale_log2, 2 * (group % 2) + element
                chains[chain] = value if chains[chain] is None else cute.arch.fmax(chains[chain], value)
        top = cute.arch.fmax(cute.arch.fmax(chains[0], chains[1]), cute.arch.fmax(chains[2], chains[3]))
        maxima.append(quad_max(top if old is None else cute.arch.fmax(top, old[row])))
    return maxima


def exponentials(acc_S, row, reference, scale_log2=None, begin=0, end=None):
    """S -> p in place for one row and column groups begin to end; returns this thread's sum of them.

    scale_log2: None where S is scaled already, else scale and reference enter by one fused multiply-add.
    """
    chains = [None] * 4
    for group in range(begin, end or cute.size(acc_S) // 4):
        for element in range(2):
            i, chain = 4 * group + 2 * row + element, 2 * (group % 2) + element
            exponent = acc_S[i] - reference if scale_log2 is None else acc_S[i] * scale_log2 - reference
            acc_S[i] = cute.math.exp2(exponent, fastmath=True)
            chains[chain] = acc_S[i] if chains[chain] is None else chains[chain] + acc_S[i]
    return (chains[0] + chains[1]) + (chains[2] + chains[3])


def has_risen(reference, maxima):
    """Whether a maximum is so far above its reference that O has to be rescaled. -inf - -inf, a NaN, does not count."""
    return cute.arch.fmax(maxima[0] - reference[0], maxima[1] - reference[1]) > RAISE_LOG2


def move_reference(reference, total, factors, maxima):
    """Makes the maxima the references and rescales the totals; factors: by what O has to be rescaled (`rescale`)."""
    for row in range(2):
        factors[row] = cute.math.exp2(reference[row] - finite(maxima[row]), fastmath=True)
        reference[row] = maxima[row]
        total[row] = total[row] * factors[row]


def rescale(acc_O, factors):
    """Multiplies both rows of an accumulator by their factors."""
    for i in range(cute.size(acc_O)):
        acc_O[i] = acc_O[i] * factors[(i // 2) % 2]


@cute.jit
def is_out_of_range(total: cute.Tensor, reference: cute.Tensor, largest: cute.Tensor | None) -> Boolean:
    """Whether a try went wrong, for one thread's rows. largest: sums over one block; None where they do not matter."""
    answer = Boolean(False)
    for r in cutlass.range_constexpr(2):
        size = cute.arch.fmax(reference[r], -reference[r])
        if not (total[r] <= MAX_TOTAL and (size <= MAX_REFERENCE or reference[r] == -Float32.inf)):
            answer = Boolean(True)
        if cutlass.const_expr(largest is not None):
            if largest[r] > MAX_SUM_FP16:
                answer = Boolean(True)
    return answer


@cute.jit
def normalizer(total: Float32, reference: Float32):
    """(1 / sum p, lse in natural log) of a row, from all four threads' totals; (0, -inf) without a visible key."""
    row_sum = quad_sum(total)
    inverse = cute.arch.rcp_approx(row_sum) if row_sum > 0.0 else Float32(0.0)
    # Once a row, so the exact logarithm: lg2.approx alone is off by more than a unit of rounding of lse.
    return inverse, (reference + cute.math.log2(row_sum)) * LN_2
