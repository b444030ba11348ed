"""Mask: sets the scores of invisible keys to -inf, in the registers of an accumulator (order: `device/register.py`)."""

import cutlass
from cutlass import Int32, cute


@cute.jit
def mask_scores(acc_S: cute.Tensor, end_0: Int32, end_1: Int32):
    """Keeps columns below end_0 in a thread's row r = 0 and below end_1 in r = 1, counted from the thread's first column."""
    for row in cutlass.range_constexpr(2):
        end = end_1 if row else end_0
        for group in cutlass.range_constexpr(cute.size(acc_S) // 4):
            for element in cutlass.range_constexpr(2):
                i = 4 * group + 2 * row + element
                acc_S[i] = acc_S[i] if end > 8 * group + element else -cutlass.Float32.inf


def key_ends(band, row, first_key):
    """(end_0, end_1) for `mask_scores`: rows `row` and `row` + 8, first_key the key of the thread's first column."""
    return tuple(band.keys_of(row + 8 * r)[1] - first_key for r in range(2))
