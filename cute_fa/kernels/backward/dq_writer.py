"""dQ writer: the warp that adds dQ of one block of queries after another to the fp32 accumulator in global memory, and
counts tiles for the converters when that is done."""

import cutlass
from cutlass import Int32, Int64, cute

from cute_fa.device import barriers, semaphore, tma
from cute_fa.device.pipeline import arrive
from cute_fa.kernels.backward.bundles import TURN_STAGES, BackwardGmem, BackwardPipes, BackwardSizes, BackwardSmem
from cute_fa.tuning.budget import BACKWARD_WARPGROUPS


@cute.jit
def write_dq(
    gmem: BackwardGmem, smem: BackwardSmem, pipes: BackwardPipes, sizes: BackwardSizes, lane: Int32, plan: cutlass.Constexpr
):
    """Run by one whole warp, from the first tile to the last. Each consumer warpgroup has half of the staging buffer, which it
    fills and this warp empties."""
    half = plan.tile.tile_m * plan.tile.head_dim // BACKWARD_WARPGROUPS
    for warpgroup in cutlass.range_constexpr(BACKWARD_WARPGROUPS):
        barriers.pass_buffer(barriers.BUFFER_FREE, warpgroup)
    books, tile_number, step = sizes.counters(gmem.counters), Int32(0), Int32(0)
    place = pipes.tiles.wait(tile_number)
    while place.n_block >= 0:
        for g in cutlass.range(sizes.group, unroll=1):
            first_block = sizes.first_block(place.head * sizes.group + g, place.batch_idx, plan)
            for m_block in cutlass.range(place.m_begin, place.m_end, unroll=1):
                stage, phase = step % TURN_STAGES, step // TURN_STAGES % 2
                target = gmem.accumulator[Int64(first_block + m_block), None].iterator
                if cutlass.const_expr(plan.is_deterministic):
                    pipes.turns.wait_full(stage, phase)
                    pipes.turns.release(stage, lane)
                for warpgroup in cutlass.range_constexpr(BACKWARD_WARPGROUPS):
                    barriers.wait_buffer(barriers.BUFFER_FULL, warpgroup)
                    # Groups of bulk copies belong to a thread, so it is always the same one.
                    if lane == 0:
                        tma.add_vector(smem.dq + warpgroup * half, target + warpgroup * half, half)
                for warpgroup in cutlass.range_constexpr(BACKWARD_WARPGROUPS):
                    if lane == 0:
                        # SYNC: the buffer has been read.
                        cute.arch.cp_async_bulk_wait_group(BACKWARD_WARPGROUPS - 1 - warpgroup, read=True)
                    cute.arch.sync_warp()
                    barriers.pass_buffer(barriers.BUFFER_FREE, warpgroup)
                if cutlass.const_expr(plan.is_deterministic):
                    pipes.landed.wait_empty(stage, phase ^ 1)
                    if lane == 0:
                        cute.arch.cp_async_bulk_wait_group(0, read=False)  # SYNC: the sums are in global memory
                    arrive(pipes.landed.full(stage), lane)
                step += 1
        if cutlass.const_expr(plan.has_converters):
            if lane == 0:
                cute.arch.cp_async_bulk_wait_group(0, read=False)  # SYNC: the sums are in global memory
            cute.arch.sync_warp()
            first_head = (place.batch_idx * sizes.num_heads + place.head) * sizes.group
            for g in cutlass.range(lane, sizes.group, 32, unroll=1):
                semaphore.count_up(books.tiles_done(first_head + g), Int32(1))
        pipes.tiles.release(tile_number, lane)
        tile_number += 1
        place = pipes.tiles.wait(tile_number)
