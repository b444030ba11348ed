"""Mask: sets the scores of invisible pairs to -inf, in the registers of an accumulator (order: `device/register.py`).

Forward holds S, whose rows are queries; backward holds S^T, whose rows are keys. In both, a row keeps an interval of columns.
"""

import cutlass
from cutlass import Float32, Int32, cute


@cute.jit
def mask_scores(acc_S: cute.Tensor, end_0: Int32, end_1: Int32, hidden: Float32 = -Float32.inf):
    """Keeps columns below end_0 in a thread's row r = 0 and below end_1 in r = 1, counted from the thread's first column.

    hidden: what the others become.
    """
    for row in cutlass.range_constexpr(2):
        end = end_1 if row else end_0
        for group in cutlass.range_constexpr(cute.size(acc_S) // 4):
            for element in cutlass.range_constexpr(2):
                i = 4 * group + 2 * row + element
                acc_S[i] = acc_S[i] if end > 8 * group + element else hidden


def key_ends(band, row, first_key):
    """(end_0, end_1) for `mask_scores`: rows `row` and `row` + 8, first_key the key of the thread's first column."""
    return tuple(band.keys_of(row + 8 * r)[1] - first_key for r in range(2))


@cute.jit
def mask_scores_transposed(
    acc_St: cute.Tensor, begin_0: Int32, begin_1: Int32, begin: cutlass.Constexpr, end: cutlass.Constexpr
):
    """Keeps columns from begin_0 in a thread's row r = 0 and from begin_1 in r = 1, counted from the thread's first column.

    begin, end: the groups of 8 columns that are looked at.
    """
    for row in cutlass.range_constexpr(2):
        first = begin_1 if row else begin_0
        for group in cutlass.range_constexpr(begin, end):
            for element in cutlass.range_constexpr(2):
                i = 4 * group + 2 * row + element
                acc_St[i] = acc_St[i] if first <= 8 * group + element else -cutlass.Float32.inf


def query_begins(band, key, first_query):
    """(begin_0, begin_1) for `mask_scores_transposed`: keys `key` and `key` + 8, first_query that of the thread's first column.

    Keys past seqlen_k are seen by no query. Their scores are 0 and not low, so their P might overflow.
    """
    return tuple(_first_query(band, key + 8 * r) - first_query for r in range(2))


@cute.jit
def _first_query(band, key: Int32) -> Int32:
    return band.rows_of(key)[0] if key < band.seqlen_k else Int32(2**30)
