"""Producer: the load warp. It takes tiles, tells the consumers which, and keeps the rings of Q, K and V full."""

import cutlass
from cutlass import Int32, cute

from cute_fa.device import scheduler, tma, view
from cute_fa.device.pipeline import PRODUCER
from cute_fa.kernels.forward.bundles import ForwardGmem, ForwardPipes, ForwardSizes, ForwardSmem, ForwardTma


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
    V(j + 1) after K(j), in the order of use. The next tile is asked for when a tile begins, and posted before its last V.
    """
    tile = plan.tile
    tQsQ, tQgQ = tma.partition(atoms.q, smem.sQ, view.row_tiles(gmem.mQ, (tile.tile_m, tile.head_dim)))
    tKsK, tKgK = tma.partition(atoms.k, smem.sK, view.row_tiles(gmem.mK, (tile.tile_n, tile.head_dim)))
    gVt = cute.local_tile(gmem.mVt, (tile.head_dim_v, tile.tile_n), (0, None, None, None))
    tVsV, tVgV = tma.partition(atoms.v, smem.sVt, gVt)
    q_bytes, k_bytes, v_bytes = 2 * tile.tile_m * tile.head_dim, 2 * tile.tile_n * tile.head_dim, 2 * tile.tile_n * tile.head_dim_v
    q_state, k_state, v_state = pipes.q.state(PRODUCER), pipes.k.state(PRODUCER), pipes.v.state(PRODUCER)
    slot = pipes.tiles.producer_state()
    band, order, num_tiles = sizes.band(plan), sizes.order(plan), sizes.num_tiles(plan)
    num_ctas, _, _ = cute.arch.grid_dim()
    first_tile, _, _ = cute.arch.block_idx()

    m_block, head, batch_idx = scheduler.locate(order, num_tiles, first_tile)
    scheduler.post(pipes.tiles, slot.index, slot.phase, lane, m_block, head, batch_idx)
    slot.advance()
    while m_block >= 0:
        num_n_blocks = cutlass.max(band.n_blocks(m_block)[1], 1)  # one masked block where no key is visible
        head_kv = head // sizes.group
        asked = scheduler.next_tile(gmem.counter, num_ctas, lane)
        gK, gV = tKgK[None, None, head_kv, batch_idx], tVgV[None, None, head_kv, batch_idx]
        tma.load(atoms.k, gK[None, num_n_blocks - 1], tKsK, pipes.k, k_state.index, k_state.phase, k_bytes)
        k_state.advance()
        tma.load(atoms.q, tQgQ[None, m_block, head, batch_idx], tQsQ, pipes.q, q_state.index, q_state.phase, q_bytes)
        q_state.advance()
        for i in cutlass.range(1, num_n_blocks, unroll=1):
            tma.load(atoms.k, gK[None, num_n_blocks - 1 - i], tKsK, pipes.k, k_state.index, k_state.phase, k_bytes)
            k_state.advance()
            tma.load(atoms.v, gV[None, num_n_blocks - i], tVsV, pipes.v, v_state.index, v_state.phase, v_bytes)
            v_state.advance()
        m_block, head, next_batch_idx = scheduler.locate(order, num_tiles, cute.arch.shuffle_sync(asked, 0))
        scheduler.post(pipes.tiles, slot.index, slot.phase, lane, m_block, head, next_batch_idx)
        slot.advance()
        tma.load(atoms.v, gV[None, 0], tVsV, pipes.v, v_state.index, v_state.phase, v_bytes)
        v_state.advance()
        batch_idx = next_batch_idx
    scheduler.leave(gmem.counter, num_ctas, lane)
