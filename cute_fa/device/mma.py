"""MMA: the products of attention as warpgroup MMAs, in which each warpgroup has 64 rows of its own."""

import cutlass
from cutlass import Float32, cute
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup

from cute_fa.device.hopper import make_trivial_tiled_mma

ROWS_PER_WARPGROUP = 64

DTYPES = {"bfloat16": cutlass.BFloat16, "float16": cutlass.Float16}  # of operands, by the names of core/dtypes.py


def scores_mma(dtype, num_warpgroups: int, tile_n: int):
    """S = Q K^T with both operands in shared memory, head_dim contiguous."""
    return product(dtype, (num_warpgroups, 1), tile_n)


def values_mma(dtype, num_warpgroups: int, head_dim_v: int):
    """O += P V with P in registers and V in shared memory as (head_dim_v, keys), head_dim_v contiguous."""
    return product(dtype, (num_warpgroups, 1), head_dim_v, has_b_transposed=True, has_a_in_registers=True)


def product(
    dtype, warpgroups, num_columns, has_a_transposed=False, has_b_transposed=False, has_a_in_registers=False
):
    """A product A B^T with fp32 accumulators, A (rows, k) and B (columns, k).

    warpgroups: how many share the rows, how many the columns; each has ROWS_PER_WARPGROUP by num_columns.
    has_a_transposed, has_b_transposed: whether the operand's k is not the contiguous mode in shared memory.
    """
    majors = [OperandMajorMode.MN if is_transposed else OperandMajorMode.K for is_transposed in (has_a_transposed, has_b_transposed)]
    source = warpgroup.OperandSource.RMEM if has_a_in_registers else warpgroup.OperandSource.SMEM
    sizes = (*warpgroups, 1), (ROWS_PER_WARPGROUP, num_columns)
    return make_trivial_tiled_mma(dtype, dtype, *majors, Float32, *sizes, source)


def accumulates(mma, value: bool):
    """`mma` made to add to its accumulator or to overwrite it. Once, before any loop: set in a loop, it would escape it."""
    mma.set(warpgroup.Field.ACCUMULATE, value)
    return mma


def issue(mma_first, mma_rest, accumulator, a, b, half=None):
    """Leaves accumulator (+)= A B in flight as one group of products; a, b: fragments (value, row or column, k).

    half: None for the whole, 0 or 1 for the first or second half of k.

    SYNC: the fence makes earlier writes of registers (accumulator, A) visible to the products. Whoever reads the
    accumulator, or overwrites A, waits for the group first. Reading A in registers meanwhile is done by the backward
    (dS is stored, P multiplied); PTX leaves it undefined, ptxas 13.4 makes plain reads of it and no remark.
    """
    warpgroup.fence()
    num_k = cute.size(a, mode=[2])
    middle = (num_k + 1) // 2
    for k in {None: range(num_k), 0: range(middle), 1: range(middle, num_k)}[half]:
        cute.gemm(mma_rest if k else mma_first, accumulator, a[None, None, k], b[None, None, k], accumulator)
    warpgroup.commit_group()


def wait(num_in_flight: int):
    """SYNC: all groups of products but the latest num_in_flight are done, their accumulators can be read."""
    warpgroup.wait_group(num_in_flight)
