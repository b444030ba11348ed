"""dQ writer: the warp that adds dQ of one block of queries after another to the fp32 accumulator in global memory, and
counts tiles when that is done."""

import cutlass
from cutlass import Int32, Int64, cute

from cute_fa.device import barriers, semaphore, tma
from cute_fa.device.pipeline import arrive
from cute_fa.kernels.backward.bundles import TURN_STAGES, BackwardGmem, BackwardPipes, BackwardSizes, BackwardSmem
from cute_fa.kernels.backward.counters import Counters
from cute_fa.tuning.budget import BACKWARD_WARPGROUPS


@cute.jit
def write_dq(
    gmem: BackwardGmem, smem: BackwardSmem, pipes: BackwardPipes, sizes: BackwardSizes, lane: Int32, plan: cutlass.Constexpr
):
    """Run by one whole warp, from the first tile to the last. Each consumer warpgroup has half of the staging buffer, which it
    fills and this warp empties. Or consumers add dQ from registers, and this warp only counts, and tells them their turn.

    Deterministic: additions to a block come in the order of `BackwardSizes.turn`. Those of a step are counted in the next
    one, when they have landed without waiting.
    """
    if cutlass.const_expr(plan.tile.has_dq_staging):
        for warpgroup in cutlass.range_constexpr(BACKWARD_WARPGROUPS):
            barriers.pass_buffer(barriers.BUFFER_FREE, warpgroup)
    books, tile_number, step = sizes.counters(gmem.counters), Int32(0), Int32(0)
    place = pipes.tiles.wait(tile_number)
    while place.n_block >= 0:
        last_block = Int32(-1)
        for g in cutlass.range(sizes.group, unroll=1):
            first_block = sizes.first_block(place.head * sizes.group + g, place.batch_idx, plan)
            for m_block in cutlass.range(place.m_begin, place.m_end, unroll=1):
                block = first_block + m_block
                if cutlass.const_expr(plan.is_deterministic):
                    if lane == 0:
                        turn = sizes.turn(place.n_block, m_block, plan)
                        semaphore.wait_for(books.warpgroups_done(block), BACKWARD_WARPGROUPS * turn)
                if cutlass.const_expr(plan.tile.has_dq_staging):
                    _add_block(gmem, smem, books, block, last_block, lane, plan)
                elif cutlass.const_expr(plan.is_deterministic):
                    _let_add(pipes, books, step, last_block, lane)
                last_block = block
                step += 1
        _finish(books, last_block, lane, plan)
        first_head = (place.batch_idx * sizes.num_heads + place.head) * sizes.group
        for g in cutlass.range(lane, sizes.group, 32, unroll=1):
            semaphore.count_up(books.tiles_done(first_head + g), Int32(1))
        pipes.tiles.release(tile_number, lane)
        tile_number += 1
        place = pipes.tiles.wait(tile_number)


@cute.jit
def _add_block(
    gmem: BackwardGmem,
    smem: BackwardSmem,
    books: Counters,
    block: Int32,
    last_block: Int32,
    lane: Int32,
    plan: cutlass.Constexpr,
):
    """Adds what the consumers have for a block. Groups of bulk copies belong to a thread, so it is always the same one."""
    half = plan.tile.tile_m * plan.tile.head_dim // BACKWARD_WARPGROUPS
    target = gmem.accumulator[Int64(block), None].iterator
    for warpgroup in cutlass.range_constexpr(BACKWARD_WARPGROUPS):
        barriers.wait_buffer(barriers.BUFFER_FULL, warpgroup)
        if lane == 0:
            tma.add_vector(smem.dq + warpgroup * half, target + warpgroup * half, half)
    if cutlass.const_expr(plan.is_deterministic):
        if lane == 0 and last_block >= 0:
            cute.arch.cp_async_bulk_wait_group(BACKWARD_WARPGROUPS, read=False)  # SYNC: the last block's have landed
            semaphore.count_up(books.warpgroups_done(last_block), Int32(BACKWARD_WARPGROUPS))
    for warpgroup in cutlass.range_constexpr(BACKWARD_WARPGROUPS):
        if lane == 0:
            cute.arch.cp_async_bulk_wait_group(BACKWARD_WARPGROUPS - 1 - warpgroup, read=True)  # SYNC: the buffer has been read
        cute.arch.sync_warp()
        barriers.pass_buffer(barriers.BUFFER_FREE, warpgroup)


@cute.jit
def _let_add(pipes: BackwardPipes, books: Counters, step: Int32, last_block: Int32, lane: Int32):
    """Tells the consumers that it is their turn at a step, and counts what they added in the one before."""
    arrive(pipes.turns.full(step % TURN_STAGES), lane)
    if last_block >= 0:
        barriers.wait_for_additions()
        if lane == 0:
            semaphore.count_up(books.warpgroups_done(last_block), Int32(BACKWARD_WARPGROUPS))


@cute.jit
def _finish(books: Counters, last_block: Int32, lane: Int32, plan: cutlass.Constexpr):
    """SYNC: all additions of a tile have landed."""
    if cutlass.const_expr(plan.tile.has_dq_staging):
        if lane == 0:
            cute.arch.cp_async_bulk_wait_group(0, read=False)
    else:
        barriers.wait_for_additions()
    if cutlass.const_expr(plan.is_deterministic):
        if lane == 0 and last_block >= 0:
            semaphore.count_up(books.warpgroups_done(last_block), Int32(BACKWARD_WARPGROUPS))
    cute.arch.fence_proxy("async")  # SYNC: they are counted behind it
    cute.arch.sync_warp()
