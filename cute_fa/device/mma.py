"""MMA: the two products of attention as warpgroup MMAs, S = Q K^T and O += P V, each warpgroup with 64 rows of its own."""

import cutlass
from cutlass import Float32, cute
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup

from cute_fa.device.hopper import make_trivial_tiled_mma

ROWS_PER_WARPGROUP = 64

DTYPES = {"bfloat16": cutlass.BFloat16, "float16": cutlass.Float16}  # of operands, by the names of core/dtypes.py


def scores_mma(dtype, num_warpgroups: int, tile_n: int):
    """S = Q K^T with both operands in shared memory, head_dim contiguous."""
    sizes = (num_warpgroups, 1, 1), (ROWS_PER_WARPGROUP, tile_n)
    majors = OperandMajorMode.K, OperandMajorMode.K
    return make_trivial_tiled_mma(dtype, dtype, *majors, Float32, *sizes, warpgroup.OperandSource.SMEM)


def values_mma(dtype, num_warpgroups: int, head_dim_v: int):
    """O += P V with P in registers and V in shared memory as (head_dim_v, keys), head_dim_v contiguous."""
    sizes = (num_warpgroups, 1, 1), (ROWS_PER_WARPGROUP, head_dim_v)
    majors = OperandMajorMode.K, OperandMajorMode.MN
    return make_trivial_tiled_mma(dtype, dtype, *majors, Float32, *sizes, warpgroup.OperandSource.RMEM)


def accumulates(mma, value: bool):
    """`mma` made to add to its accumulator or to overwrite it. Once, before any loop: set in a loop, it would escape it."""
    mma.set(warpgroup.Field.ACCUMULATE, value)
    return mma


def issue(mma_first, mma_rest, accumulator, a, b):
    """Leaves accumulator (+)= A B in flight as one group of products; a, b: fragments (value, row or column, k).

    SYNC: the fence makes earlier writes of registers (accumulator, A) visible to the products. Whoever reads the
    accumulator, or overwrites A, waits for the group first.
    """
    warpgroup.fence()
    for k in range(cute.size(a, mode=[2])):
        cute.gemm(mma_rest if k else mma_first, accumulator, a[None, None, k], b[None, None, k], accumulator)
    warpgroup.commit_group()


def wait(num_in_flight: int):
    """SYNC: all groups of products but the latest num_in_flight are done, their accumulators can be read."""
    warpgroup.wait_group(num_in_flight)
