"""Epilogue: an fp32 accumulator as 16-bit rows of global memory, through shared memory and TMA or from registers.

Rows are multiplied by a factor of their own on the way. Order of the accumulator: `device/register.py`.
"""

import cutlass
from cutlass import Int32, cute
from cutlass.cute.nvgpu import warp

from cute_fa.device import barriers, tma
from cute_fa.device.mma import ROWS_PER_WARPGROUP
from cute_fa.device.register import pack_pair, select
from cute_fa.device.softmax import rescale


def box(num_columns: int):
    """(rows, columns) of one TMA store: as many columns as a swizzled row of shared memory holds."""
    return ROWS_PER_WARPGROUP, 64 if num_columns % 64 == 0 else 32


def store_staged(acc, factors, mma, thread, smem, atom, mTensor, place, warpgroup, is_first_warp):
    """Rows of one consumer warpgroup: registers -> smem (stmatrix) -> global memory (TMA), which is left in flight.

    acc: the accumulator, overwritten. mma: the product that it is of. thread: index among the consumers. smem: (rows of
    all warpgroups, columns). place: (m_block, head, batch). The warpgroup's first warp issues the store and, before the
    next one or before it leaves, waits for it (`wait_for_store`).
    """
    dtype, columns = smem.element_type, cute.size(smem, mode=[1])
    rescale(acc, factors)
    rows_16bit = cute.make_rmem_tensor_like(acc, dtype)
    rows_16bit.store(acc.load().to(dtype))
    to_smem = cute.make_tiled_copy_C(cute.make_copy_atom(warp.StMatrix8x8x16bOp(False, 4), dtype), mma)
    thread_copy = to_smem.get_slice(thread)
    tile = box(columns)
    tOsO, tOgO = tma.partition(
        atom, cute.local_tile(smem, tile, (None, None)), cute.local_tile(mTensor, tile, (None, None, None, None))
    )
    wait_for_store(is_first_warp)
    barriers.sync_warpgroup(warpgroup)  # SYNC: the last tile's store has read the buffer
    cute.copy(to_smem, thread_copy.retile(rows_16bit), thread_copy.partition_D(smem))
    cute.arch.fence_proxy("async.shared", space="cta")  # SYNC: stmatrix before what TMA reads
    barriers.sync_warpgroup(warpgroup)  # SYNC: all warps have written
    m_block, head, batch_idx = place
    row_block = m_block * (cute.size(smem, mode=[0]) // ROWS_PER_WARPGROUP) + warpgroup
    _store_boxes(atom, tOsO, tOgO, warpgroup, row_block, head, batch_idx, is_first_warp, columns // tile[1])


@cute.jit
def _store_boxes(
    atom: cute.CopyAtom,
    smem: cute.Tensor,
    gmem: cute.Tensor,
    warpgroup: Int32,
    row_block: Int32,
    head: Int32,
    batch_idx: Int32,
    is_first_warp: cutlass.Boolean,
    num_boxes: cutlass.Constexpr,
):
    if is_first_warp:
        for i in cutlass.range_constexpr(num_boxes):
            cute.copy(atom, smem[None, warpgroup, i], gmem[None, row_block, i, head, batch_idx])
        cute.arch.cp_async_bulk_commit_group()


@cute.jit
def wait_for_store(is_first_warp: cutlass.Boolean, is_read_enough: cutlass.Constexpr = True):
    """SYNC: the warp that issued a TMA store waits until its shared memory has been read, or until it is in memory."""
    if is_first_warp:
        cute.arch.cp_async_bulk_wait_group(0, read=is_read_enough)


@cute.jit
def store_direct(acc: cute.Tensor, factors: cute.Tensor, out: cute.Tensor, place, lane: Int32, dtype: cutlass.Constexpr):
    """A thread's two rows: 4x4 transposes in each quad turn pairs of columns into stores of 16 bytes.

    out: (rows, columns, head, batch), columns contiguous and a multiple of 8. place: (row of r = 0, head, batch).
    """
    row, head, batch_idx = place
    lane_of_quad = lane % 4
    is_odd, is_high = lane_of_quad % 2 == 1, lane_of_quad >= 2
    for r in cutlass.range_constexpr(2):
        base = (out.iterator + cute.crd2idx((row + 8 * r, 8 * lane_of_quad, head, batch_idx), out.layout)).toint()
        # The width of out that this lane may write, 0 behind the last row.
        width = out.shape[1] - 8 * lane_of_quad if row + 8 * r < out.shape[0] else Int32(0)
        for group in cutlass.range_constexpr(cute.size(acc) // 16):
            i = 16 * group + 2 * r
            words = [pack_pair(acc[i + 4 * y] * factors[r], acc[i + 4 * y + 1] * factors[r], dtype) for y in range(4)]
            store_16_bytes(base + 64 * group, transpose_quad(words, is_odd, is_high), Int32(32 * group < width))


def transpose_quad(words, is_odd, is_high):
    """Word y of lane x of a quad goes to word x of lane y: two rounds of exchanges with the neighbour at distance 1, 2."""
    for distance, is_upper in ((1, is_odd), (2, is_high)):
        moved = list(words)
        for low in range(4):
            high = low + distance
            if low & distance:
                continue
            other = cute.arch.shuffle_sync_bfly(select(is_upper, words[low], words[high]), distance)
            moved[low] = select(is_upper, other, words[low])
            moved[high] = select(is_upper, words[high], other)
        words = moved
    return words


def store_16_bytes(address, words, is_inside):
    cute.arch.inline_ptx(
        "{ .reg .pred p; setp.ne.s32 p, {$r5}, 0; @p st.global.v4.b32 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}}; }",
        read_only_args=[address, *words, is_inside],
    )
