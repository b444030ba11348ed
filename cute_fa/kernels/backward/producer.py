"""Producer: the load warp. It brings K and V once, then Q with LSE and dO with delta for every block of queries."""

import cutlass
from cutlass import Int32, cute

from cute_fa.device import tma, view
from cute_fa.device.pipeline import PRODUCER
from cute_fa.kernels.backward.bundles import BackwardGmem, BackwardPipes, BackwardSizes, BackwardSmem, BackwardTma, Place


@cute.jit
def load_tile(
    atoms: BackwardTma,
    gmem: BackwardGmem,
    smem: BackwardSmem,
    pipes: BackwardPipes,
    sizes: BackwardSizes,
    place: Place,
    plan: cutlass.Constexpr,
):
    """Run by one whole warp: blocks of queries in rising order, one query head of the group after another."""
    tile, head_kv, batch_idx = plan.tile, place.head, place.batch_idx
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
    once = Int32(0), Int32(1)
    tma.load(atoms.k, tKgK[None, place.n_block, head_kv, batch_idx], tKsK, pipes.k, *once, k_bytes)
    if cutlass.const_expr(plan.needs_ds):
        tma.load(atoms.v, tVgV[None, place.n_block, head_kv, batch_idx], tVsV, pipes.v, *once, v_bytes)
    for g in cutlass.range(sizes.group, unroll=1):
        head = head_kv * sizes.group + g
        first_block = sizes.first_block(head, batch_idx, plan)
        for m_block in cutlass.range(place.m_begin, place.m_end, unroll=1):
            gQ, gdO = tQgQ[None, m_block, head, batch_idx], tdOgdO[None, m_block, head, batch_idx]
            number = 2 * (first_block + m_block)
            tma.load(atoms.q, gQ, tQsQ, pipes.q, state.index, state.phase, q_bytes + 4 * tile.tile_m)
            tma.load_beside(atoms.statistics, tgStatistics[None, number], tsLSE, pipes.q, state.index)
            tma.load(atoms.do, gdO, tdOsdO, pipes.do, state.index, state.phase, do_bytes + 4 * tile.tile_m)
            tma.load_beside(atoms.statistics, tgStatistics[None, number + 1], tsDelta, pipes.do, state.index)
            state.advance()
