"""Turns: two warps of the main backward kernel that see to the order of additions to dQ, in deterministic plans.

Whoever adds, the dQ writer or the consumers, waits for its turn at a block of queries (ring turns) and says when its
additions have landed (ring landed). Both warps go through all steps of the CTA's tiles: one looks for turns ahead of them, one
counts behind them, so that neither a look at global memory nor a fence is in their way.
"""

import cutlass
from cutlass import Int32, cute

from cute_fa.device import semaphore
from cute_fa.device.pipeline import arrive
from cute_fa.kernels.backward.bundles import TURN_STAGES, BackwardGmem, BackwardPipes, BackwardSizes
from cute_fa.tuning.budget import BACKWARD_WARPGROUPS


@cute.jit
def keep_turns(
    gmem: BackwardGmem,
    pipes: BackwardPipes,
    sizes: BackwardSizes,
    lane: Int32,
    counts: cutlass.Constexpr,
    plan: cutlass.Constexpr,
):
    """Run by a whole warp, from the first tile to the last: looks for turns, or counts what has landed.

    SYNC: who sees its turn adds behind those before it. Additions come in the order of `BackwardSizes.turn`.
    """
    books, tile_number, step = sizes.counters(gmem.counters), Int32(0), Int32(0)
    place = pipes.tiles.wait(tile_number)
    while place.n_block >= 0:
        for g in cutlass.range(sizes.group, unroll=1):
            first_block = sizes.first_block(place.head * sizes.group + g, place.batch_idx, plan)
            for m_block in cutlass.range(place.m_begin, place.m_end, unroll=1):
                done, stage, phase = books.warpgroups_done(first_block + m_block), step % TURN_STAGES, step // TURN_STAGES % 2
                if cutlass.const_expr(counts):
                    pipes.landed.wait_full(stage, phase)
                    if lane == 0:
                        semaphore.count_up(done, Int32(BACKWARD_WARPGROUPS))
                    pipes.landed.release(stage, lane)
                else:
                    pipes.turns.wait_empty(stage, phase ^ 1)
                    if lane == 0:
                        semaphore.wait_for(done, BACKWARD_WARPGROUPS * sizes.turn(place.n_block, m_block, plan))
                    arrive(pipes.turns.full(stage), lane)
                step += 1
        pipes.tiles.release(tile_number, lane)
        tile_number += 1
        place = pipes.tiles.wait(tile_number)
