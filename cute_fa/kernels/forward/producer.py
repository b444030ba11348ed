"""Producer: the load warp. It takes tiles, tells the consumers which, and keeps the rings of Q, K and V full."""

import cutlass
from cutlass import Int32, cute

from cute_fa.device import register, scheduler, tma, view
from cute_fa.device.mma import ROWS_PER_WARPGROUP
from cute_fa.device.pipeline import PRODUCER
from cute_fa.kernels.forward.bundles import (
    LEFT_HALF,
    MASKED,
    WHOLE,
    ForwardGmem,
    ForwardPipes,
    ForwardSizes,
    ForwardSmem,
    ForwardTma,
)


@cute.jit
def load_tiles(
    atoms: ForwardTma,
    gmem: ForwardGmem,
    smem: ForwardSmem,
    pipes: ForwardPipes,
    sizes: ForwardSizes,
    lane: Int32,
    plan: cutlass.Constexpr,
):
    """Run by one whole warp, from the first tile to the last.

    Blocks of keys go from right to left. K comes before Q, so that it is fetched while Q's buffer is still in use, and
    V(j + 1) after K(j), in the order of use. The next tile is asked for before the last K and posted behind the last V. A
    tile that failed is posted again before another one; behind the last tile, when all are done that are under way.

    SYNC: no memory that others write is touched, and no tile given to the warps that store, before the kernels in front of
    this one are done (programmatic dependent launch). The next kernel may be set up once every CTA has its last tile.
    """
    tile, band = plan.tile, sizes.band(plan, plan.tile.tile_m)
    tQsQ, tQgQ = tma.partition(atoms.q, smem.sQ, view.row_tiles(gmem.mQ, (tile.tile_m, tile.head_dim)))
    tKsK, tKgK = tma.partition(atoms.k, smem.sK, view.row_tiles(gmem.mK, (tile.tile_n, tile.head_dim)))
    gVt = cute.local_tile(gmem.mVt, (tile.head_dim_v, tile.tile_n), (0, None, None, None))
    tVsV, tVgV = tma.partition(atoms.v, smem.sVt, gVt)
    q_bytes, k_bytes, v_bytes = 2 * tile.tile_m * tile.head_dim, 2 * tile.tile_n * tile.head_dim, 2 * tile.tile_n * tile.head_dim_v
    q_state, k_state, v_state = pipes.q.state(PRODUCER), pipes.k.state(PRODUCER), pipes.v.state(PRODUCER)
    slot = pipes.tiles.producer_state()
    order, num_tiles = sizes.order(plan), sizes.num_tiles(plan)
    num_ctas, _, _ = cute.arch.grid_dim()
    first_tile, _, _ = cute.arch.block_idx()

    scheduler.clear(pipes.tiles, lane)
    m_block, head, batch_idx = scheduler.locate(order, num_tiles, first_tile)
    details = _details(sizes, m_block, lane, Int32(0), plan)
    cute.arch.griddepcontrol_wait()
    scheduler.post(pipes.tiles, slot.index, lane, first_tile, (m_block, head, batch_idx), Int32(0), details)
    slot.advance()
    asked, failed = Int32(0), Int32(-1)
    while m_block >= 0:
        num_n_blocks = cutlass.max(band.n_blocks(m_block)[1], 1)  # one masked block where no key is visible
        head_kv = head // sizes.group
        gK, gV = tKgK[None, None, head_kv, batch_idx], tVgV[None, None, head_kv, batch_idx]
        gQ = tQgQ[None, m_block, head, batch_idx]
        for i in cutlass.range(num_n_blocks, unroll=1):
            # PERF: asked for here and not when a tile begins, tiles go to CTAs in the order in which these get free. Causal,
            # head_dim 256, 16384 tokens: 3% less time (H200, 2026-11-30, benchmarks/results/NOTES.md).
            if i == num_n_blocks - 1 and failed < 0:
                asked = scheduler.next_tile(gmem.counter, num_ctas, lane)
            tma.load(atoms.k, gK[None, num_n_blocks - 1 - i], tKsK, pipes.k, k_state.index, k_state.phase, k_bytes)
            k_state.advance()
            if i == 0:
                tma.load(atoms.q, gQ, tQsQ, pipes.q, q_state.index, q_state.phase, q_bytes)
                q_state.advance()
            else:
                tma.load(atoms.v, gV[None, num_n_blocks - i], tVsV, pipes.v, v_state.index, v_state.phase, v_bytes)
                v_state.advance()
        next_tile = cute.arch.shuffle_sync(asked, 0)
        failed = scheduler.failed_tile(pipes.tiles, slot.index, slot.phase, lane, Int32(1))
        next_tile = register.select(failed < 0, next_tile, failed)
        m_block, head, batch_idx = scheduler.locate(order, num_tiles, next_tile)
        tma.load(atoms.v, gV[None, 0], tVsV, pipes.v, v_state.index, v_state.phase, v_bytes)
        v_state.advance()
        if m_block < 0:
            cute.arch.griddepcontrol_launch_dependents()
            failed = scheduler.failed_tile(pipes.tiles, slot.index, slot.phase, lane, Int32(scheduler.NUM_SLOTS))
            next_tile = register.select(failed < 0, next_tile, failed)
            m_block, head, batch_idx = scheduler.locate(order, num_tiles, next_tile)
        has_care = Int32(failed >= 0)
        details = _details(sizes, m_block, lane, has_care, plan)
        scheduler.post(pipes.tiles, slot.index, lane, next_tile, (m_block, head, batch_idx), has_care, details)
        slot.advance()
    scheduler.leave(gmem.counter, num_ctas, lane)


@cute.jit
def _details(sizes: ForwardSizes, m_block: Int32, warpgroup: Int32, has_care: Int32, plan: cutlass.Constexpr):
    """The last four numbers of a warpgroup's `Work`."""
    tile_band, band = sizes.band(plan, plan.tile.tile_m), sizes.band(plan, ROWS_PER_WARPGROUP)
    row_block = m_block * plan.tile.num_consumer_warpgroups + warpgroup
    first_row = row_block * ROWS_PER_WARPGROUP
    num_n_blocks = Int32(1)
    if first_row < sizes.seqlen_q:
        num_n_blocks = cutlass.max(band.n_blocks(row_block)[1], 1)
    num_skipped = cutlass.max(tile_band.n_blocks(m_block)[1], 1) - num_n_blocks
    num_fast = register.select(has_care != 0, Int32(0), band.settled_n_blocks(row_block)[1])
    first = register.select(band.unmasked_n_blocks(row_block)[1] < num_n_blocks, Int32(MASKED), Int32(WHOLE))
    if cutlass.const_expr(plan.has_half_blocks):
        _, end = band.keys_of(first_row + ROWS_PER_WARPGROUP - 1)
        middle = (num_n_blocks - 1) * band.tile_n + band.tile_n // 2
        first = register.select(end <= middle, Int32(LEFT_HALF), first)
    return num_skipped, num_n_blocks, num_fast, first
