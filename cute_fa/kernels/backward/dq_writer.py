"""dQ writer: the warp that adds dQ of one block of queries after another to the fp32 accumulator in global memory."""

import cutlass
from cutlass import Int32, Int64, cute

from cute_fa.device import barriers, semaphore, tma
from cute_fa.kernels.backward.bundles import BackwardGmem, BackwardSizes, BackwardSmem, Place
from cute_fa.tuning.budget import BACKWARD_WARPGROUPS


@cute.jit
def add_dq(
    gmem: BackwardGmem, smem: BackwardSmem, sizes: BackwardSizes, place: Place, lane: Int32, plan: cutlass.Constexpr
):
    """Run by one whole warp. Each consumer warpgroup has half of the staging buffer, which it fills and this warp empties.

    Deterministic: the CTA of a head's n-th block of keys adds as the n-th one.
    """
    half = plan.tile.tile_m * plan.tile.head_dim // BACKWARD_WARPGROUPS
    for warpgroup in cutlass.range_constexpr(BACKWARD_WARPGROUPS):
        barriers.pass_buffer(barriers.BUFFER_FREE, warpgroup)
    num_left = sizes.group * (place.m_end - place.m_begin)
    for g in cutlass.range(sizes.group, unroll=1):
        first_block = sizes.first_block(place.head * sizes.group + g, place.batch_idx, plan)
        for m_block in cutlass.range(place.m_begin, place.m_end, unroll=1):
            block = first_block + m_block
            target = gmem.dq[Int64(block), None].iterator
            num_left -= 1
            for warpgroup in cutlass.range_constexpr(BACKWARD_WARPGROUPS):
                barriers.wait_buffer(barriers.BUFFER_FULL, warpgroup)
                # Groups of bulk copies belong to a thread, so it is always the same one.
                if lane == 0:
                    if cutlass.const_expr(plan.is_deterministic and warpgroup == 0):
                        semaphore.wait_for(gmem.semaphores.iterator + block, BACKWARD_WARPGROUPS * place.n_block)
                    tma.add_vector(smem.dq + warpgroup * half, target + warpgroup * half, half)
            for warpgroup in cutlass.range_constexpr(BACKWARD_WARPGROUPS):
                if lane == 0:
                    # SYNC: the buffer has been read.
                    cute.arch.cp_async_bulk_wait_group(BACKWARD_WARPGROUPS - 1 - warpgroup, read=True)
                cute.arch.sync_warp()
                if num_left > 0:  # no arrival is left over at exit
                    barriers.pass_buffer(barriers.BUFFER_FREE, warpgroup)
            if cutlass.const_expr(plan.is_deterministic):
                if lane == 0:
                    cute.arch.cp_async_bulk_wait_group(0, read=False)  # SYNC: the sums are in global memory
                    semaphore.count_up(gmem.semaphores.iterator + block, Int32(BACKWARD_WARPGROUPS))
