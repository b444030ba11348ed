"""Producer: the load warp. It takes tiles, and brings K and V of each, then Q with LSE and dO with delta block by block."""

import cutlass
from cutlass import Int32, cute

from cute_fa.device import tma, view
from cute_fa.device.pipeline import PRODUCER, arrive
from cute_fa.kernels.backward import counters, tiles
from cute_fa.kernels.backward.bundles import BackwardGmem, BackwardPipes, BackwardSizes, BackwardSmem, BackwardTma


@cute.jit
def load_tiles(
    atoms: BackwardTma,
    gmem: BackwardGmem,
    smem: BackwardSmem,
    pipes: BackwardPipes,
    sizes: BackwardSizes,
    lane: Int32,
    plan: cutlass.Constexpr,
):
    """Run by one whole warp, from the first tile to the last: blocks of queries in rising order, one query head of the group
    after another.

    The next tile is asked for before the last block, so that tiles go to CTAs as these get free. Where tiles wait for others,
    those with smaller numbers, a CTA asks for its first tile, too: then they have begun.
    """
    tile = plan.tile
    q_bytes, do_bytes = (2 * tile.tile_m * dim for dim in (tile.head_dim, tile.head_dim_v))
    k_bytes, v_bytes = (2 * tile.tile_n * dim for dim in (tile.head_dim, tile.head_dim_v))
    tQsQ, tQgQ = tma.partition(atoms.q, smem.sQ, view.row_tiles(gmem.mQ, (tile.tile_m, tile.head_dim)))
    tdOsdO, tdOgdO = tma.partition(atoms.do, smem.sdO, view.row_tiles(gmem.mdO, (tile.tile_m, tile.head_dim_v)))
    tKsK, tKgK = tma.partition(atoms.k, smem.sK, view.row_tiles(gmem.mK, (tile.tile_n, tile.head_dim)))
    tVsV, tVgV = tma.partition(atoms.v, smem.sV, view.row_tiles(gmem.mV, (tile.tile_n, tile.head_dim_v)))
    gStatistics = cute.local_tile(gmem.mStatistics, (tile.tile_m, 1), (0, None))
    tsLSE, tgStatistics = tma.partition(atoms.statistics, smem.sLSE, gStatistics)
    tsDelta, _ = tma.partition(atoms.statistics, smem.sDelta, gStatistics)
    state = pipes.q.state(PRODUCER)  # both rings move in step
    books, tile_number = sizes.counters(gmem.counters), Int32(0)
    asked, _, _ = cute.arch.block_idx()
    if cutlass.const_expr(plan.is_persistent or plan.is_deterministic):
        asked = counters.take_tile(books, lane)
    place = sizes.place(cute.arch.shuffle_sync(asked, 0), plan)
    tiles.post(pipes.tiles, tile_number, lane, place)
    while place.n_block >= 0:
        kv = Int32(0), tile_number % 2 ^ 1
        tma.load(atoms.k, tKgK[None, place.n_block, place.head, place.batch_idx], tKsK, pipes.k, *kv, k_bytes)
        if cutlass.const_expr(plan.needs_ds):
            tma.load(atoms.v, tVgV[None, place.n_block, place.head, place.batch_idx], tVsV, pipes.v, *kv, v_bytes)
        num_left = sizes.group * (place.m_end - place.m_begin)
        asked = Int32(sizes.num_tiles(plan))
        if cutlass.const_expr(plan.is_persistent):
            if num_left == 0:
                asked = counters.take_tile(books, lane)
        for g in cutlass.range(sizes.group, unroll=1):
            head = place.head * sizes.group + g
            first_block = sizes.first_block(head, place.batch_idx, plan)
            for m_block in cutlass.range(place.m_begin, place.m_end, unroll=1):
                if cutlass.const_expr(plan.is_persistent):
                    if num_left == 1:
                        asked = counters.take_tile(books, lane)
                    num_left -= 1
                gQ, gdO = tQgQ[None, m_block, head, place.batch_idx], tdOgdO[None, m_block, head, place.batch_idx]
                number = 2 * (first_block + m_block)
                tma.load(atoms.q, gQ, tQsQ, pipes.q, state.index, state.phase, q_bytes + 4 * tile.tile_m)
                tma.load_beside(atoms.statistics, tgStatistics[None, number], tsLSE, pipes.q, state.index)
                tma.load(atoms.do, gdO, tdOsdO, pipes.do, state.index, state.phase, do_bytes + 4 * tile.tile_m)
                tma.load_beside(atoms.statistics, tgStatistics[None, number + 1], tsDelta, pipes.do, state.index)
                state.advance()
        place = sizes.place(cute.arch.shuffle_sync(asked, 0), plan)
        tile_number += 1
        tiles.post(pipes.tiles, tile_number, lane, place)
    arrive(smem.is_over, lane)
