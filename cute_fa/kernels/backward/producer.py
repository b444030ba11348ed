"""Producer: the load warp. It brings K and V once, then Q with LSE and dO with delta for every block of queries."""

import cutlass
from cutlass import Int32, cute

from cute_fa.device import tma
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
    tQsQ, tQgQ = tma.partition(atoms.q, smem.sQ, _tiles(gmem.mQ, (tile.tile_m, tile.head_dim)))
    tdOsdO, tdOgdO = tma.partition(atoms.do, smem.sdO, _tiles(gmem.mdO, (tile.tile_m, tile.head_dim_v)))
    tKsK, tKgK = tma.partition(atoms.k, smem.sK, _tiles(gmem.mK, (tile.tile_n, tile.head_dim)))
    tVsV, tVgV = tma.partition(atoms.v, smem.sV, _tiles(gmem.mV, (tile.tile_n, tile.head_dim_v)))
    q_state, do_state = pipes.q.state(PRODUCER), pipes.do.state(PRODUCER)
    once = Int32(0), Int32(1)
    tma.load(atoms.k, tKgK[None, place.n_block, head_kv, batch_idx], tKsK, pipes.k, *once, k_bytes)
    if cutlass.const_expr(plan.needs_ds):
        tma.load(atoms.v, tVgV[None, place.n_block, head_kv, batch_idx], tVsV, pipes.v, *once, v_bytes)
    for g in cutlass.range(sizes.group, unroll=1):
        head = head_kv * sizes.group + g
        gLSE, gDelta = (
            cute.local_tile(x[None, head, batch_idx], (tile.tile_m,), (None,)) for x in (gmem.lse_log2, gmem.delta)
        )
        for m_block in cutlass.range(place.m_begin, place.m_end, unroll=1):
            gQ, gdO = tQgQ[None, m_block, head, batch_idx], tdOgdO[None, m_block, head, batch_idx]
            tma.load(atoms.q, gQ, tQsQ, pipes.q, q_state.index, q_state.phase, q_bytes + 4 * tile.tile_m)
            tma.load_vector(gLSE[None, m_block], smem.sLSE[None, q_state.index], pipes.q, q_state.index)
            q_state.advance()
            tma.load(atoms.do, gdO, tdOsdO, pipes.do, do_state.index, do_state.phase, do_bytes + 4 * tile.tile_m)
            tma.load_vector(gDelta[None, m_block], smem.sDelta[None, do_state.index], pipes.do, do_state.index)
            do_state.advance()


def _tiles(tensor, tile):
    """Tiles of a whole tensor, indexed by (block of rows, head, batch); head_dim is one tile wide."""
    return cute.local_tile(tensor, tile, (None, 0, None, None))
