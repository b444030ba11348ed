"""Bundles: what the roles of the main backward kernel share. Frozen dataclasses cross kernels, functions and loops.

Letters: S raw scores, P normalised probabilities, dP and dS their gradients, LSE in units of log2. S^T, P^T, dP^T and
dS^T have keys as rows. Shapes are (rows, columns, ...) of the tile.
"""

from dataclasses import dataclass

import cutlass
from cutlass import Float32, Int32, cute

from cute_fa.device import mma, register
from cute_fa.device.band import Band
from cute_fa.device.order import L2_BYTES, HeadAfterHead, LongestFirst
from cute_fa.device.pipeline import Ring
from cute_fa.kernels.backward.counters import Counters
from cute_fa.kernels.backward.tiles import Place, TileSlots
from cute_fa.tuning.budget import BACKWARD_WARPGROUPS, BackwardTile, DqTile
from cute_fa.tuning.plan import BackwardPlan

TURN_STAGES = 2

_TILES_SIDE_BY_SIDE = 128  # about as many as there are SMs
# At least so many tiles are in a section, for CTAs to end together.
# PERF: 8 key-value heads of 4 query heads, 8192 tokens: two heads in a section instead of one, 128 tiles instead of 64, take
# 17% less time (H200, 2026-11-30, benchmarks/results/NOTES.md). A list schedule predicts 18%, and 1% more for 256 tiles.
_TILES_OF_SECTION = 256


@dataclass(frozen=True)
class BackwardGmem:
    """Whole tensors in global memory. The `m` tensors hold coordinates for TMA; what is not needed is None.

    mQ, mdO: (seqlen_q, dim, heads_q, batch). mK, mV, mdK, mdV: (seqlen_k, dim, heads_kv, batch).
    Of each block of queries, numbered by `BackwardSizes.first_block`:
    mStatistics: (tile_m, 2 * block + i), fp32: LSE with i = 0, delta with i = 1.
    accumulator: (block, tile_m * head_dim), fp32 zeros, to which CTAs add dQ; a block has the order of `dq_product`.
    counters: words of `counters.Counters`. dq: (batch, seqlen_q, heads_q, head_dim), of which converters write what they
    can. mAccumulator: the accumulator as (256, rows).
    """

    mQ: cute.Tensor
    mdO: cute.Tensor
    mK: cute.Tensor
    mV: cute.Tensor
    mdK: cute.Tensor | None
    mdV: cute.Tensor | None
    mStatistics: cute.Tensor
    accumulator: cute.Tensor | None
    counters: cute.Tensor
    dq: cute.Tensor | None
    mAccumulator: cute.Tensor | None


@dataclass(frozen=True)
class BackwardTma:
    """TMA descriptors."""

    q: cute.CopyAtom
    do: cute.CopyAtom
    k: cute.CopyAtom
    v: cute.CopyAtom
    statistics: cute.CopyAtom
    accumulator: cute.CopyAtom | None
    dk: cute.CopyAtom | None
    dv: cute.CopyAtom | None


@dataclass(frozen=True)
class BackwardMmas:
    """scores: S^T = K Q^T and dP^T = V dO^T. dv += P^T dO. dk += dS^T Q. dq = dS K, or dQ^T = K^T dS^T.

    What overwrites its accumulator comes twice, overwriting it and adding to it.
    """

    scores: cute.TiledMma
    scores_add: cute.TiledMma
    dv: cute.TiledMma
    dk: cute.TiledMma
    dq: cute.TiledMma
    dq_add: cute.TiledMma


def scores_product(dtype, tile: BackwardTile):
    """Warpgroups share keys; queries where they exchange P and dS through shared memory."""
    if tile.has_p_in_smem:
        return mma.product(dtype, (1, 2), tile.tile_m // 2)
    return mma.product(dtype, (2, 1), tile.tile_m)


def values_product(dtype, tile: BackwardTile, head_dim: int):
    """dV or dK; warpgroups share keys, or columns of the head where P and dS come from shared memory."""
    if tile.has_p_in_smem:
        return mma.product(dtype, (1, 2), head_dim // 2, has_b_transposed=True)
    return mma.product(dtype, (2, 1), head_dim, has_b_transposed=True, has_a_in_registers=True)


def dq_product(dtype, tile: DqTile):
    """dQ or dQ^T. The order of its accumulator is also that of the accumulator in global memory."""
    if tile.is_transposed:
        return mma.product(dtype, (2, 1), tile.tile_m, has_a_transposed=True)
    columns = dq_columns(tile)
    warpgroups = tile.tile_m // mma.ROWS_PER_WARPGROUP, tile.head_dim // columns
    return mma.product(dtype, warpgroups, columns, has_a_transposed=tile.has_p_in_smem, has_b_transposed=True)


def dq_columns(tile: DqTile) -> int:
    """Columns of the head that swizzled rows of shared memory may span: those of one warpgroup's part of dQ."""
    return tile.head_dim if tile.is_transposed or tile.tile_m == 128 else tile.head_dim // 2


def dq_fragment(block, warpgroup, thread_of_warpgroup, tile: DqTile):
    """A thread's part of a block of dQ in memory, as (4, vectors): neighbouring threads have neighbouring 16 bytes."""
    half = tile.tile_m * tile.head_dim // BACKWARD_WARPGROUPS
    layout = cute.make_layout((4, half // 512), stride=(1, 512))
    return cute.make_tensor(block + (warpgroup * half + thread_of_warpgroup * 4), layout)


@dataclass(frozen=True)
class BackwardSizes:
    """Numbers of one launch. num_heads: of keys and values. group: query heads of each of them. num_ctas: of a persistent
    grid."""

    seqlen_q: Int32
    seqlen_k: Int32
    num_heads: Int32
    batch: Int32
    group: Int32
    scale: Float32
    scale_log2: Float32
    num_ctas: Int32

    def band(self, plan: BackwardPlan) -> Band:
        right = 0 if plan.is_causal else None
        return Band(plan.tile.tile_m, plan.tile.tile_n, self.seqlen_q, self.seqlen_k, right=right)

    def num_tiles(self, plan: BackwardPlan):
        return cute.ceil_div(self.seqlen_k, plan.tile.tile_n) * self.num_heads * self.batch

    def first_block(self, head, batch_idx, plan: BackwardPlan) -> Int32:
        """The number of the first block of queries of a query head: blocks are numbered in each head, heads in each batch."""
        return (batch_idx * self.num_heads * self.group + head) * cute.ceil_div(self.seqlen_q, plan.tile.tile_m)

    def order(self, plan: BackwardPlan, seqlen_k):
        """Of tiles. A head's n blocks come in rising order, or in falling order if is_shortest_first.

        seqlen_k: that of the launch, or an opaque copy of it where registers are few."""
        blocks = cute.ceil_div(seqlen_k, plan.tile.tile_n)
        if plan.is_causal:
            # A section is counted in query heads, because their Q, dO and dQ are what its CTAs share in L2.
            heads = plan.heads_per_section
            if plan.is_shortest_first:
                # PERF: tiles that begin at different blocks of queries share them in L2 only if all of a section fits: 8 heads
                # of 128 and 16384 tokens take 23% longer than 4 (H200, 2026-11-30, benchmarks/results/NOTES.md).
                tile = plan.tile
                fitting = L2_BYTES // (2 * (tile.head_dim + tile.head_dim_v) + 4 * tile.head_dim) // self.seqlen_q
                heads = cutlass.min(fitting, self.num_heads * self.batch * self.group)
            heads = cutlass.max(cutlass.max(heads // self.group, _TILES_OF_SECTION // blocks), 1)
            return LongestFirst(blocks, self.num_heads, self.batch, heads, is_last_longest=plan.is_shortest_first)
        if plan.is_deterministic:
            # A tile is one step behind that of the keys before. With as many heads side by side as run together, the
            # tiles that follow find each other one step apart, and only the first ones have to wait.
            return LongestFirst(blocks, self.num_heads, self.batch, cutlass.max(_TILES_SIDE_BY_SIDE // blocks, 1), False)
        return HeadAfterHead(blocks, self.num_heads)

    def turn(self, n_block, m_block, plan: BackwardPlan):
        """How many tiles add to a block of queries before that of n_block, where the order is fixed: that of `order`."""
        if not plan.is_shortest_first:
            return n_block
        # CTAs that begin together at their diagonal blocks come to a block of queries one after the other, the last block of
        # keys first, so nobody waits.
        tile = plan.tile
        end = cute.ceil_div((m_block + 1) * tile.tile_m + self.seqlen_k - self.seqlen_q, tile.tile_n)
        return cutlass.min(end, cute.ceil_div(self.seqlen_k, tile.tile_n)) - 1 - n_block

    def counters(self, words: cute.Tensor) -> Counters:
        return Counters(words, self.batch * self.num_heads * self.group, self.num_ctas)

    def place(self, number, plan: BackwardPlan) -> Place:
        """The tile with a number."""
        n_block, head, batch_idx = self.order(plan, register.opaque(self.seqlen_k)).locate(number)
        band = self.band(plan)
        m_begin, m_end = band.m_blocks(n_block)
        m_unmasked, _ = band.unmasked_m_blocks(n_block)
        n_block = register.select(number < self.num_tiles(plan), n_block, Int32(-1))
        return Place(n_block, head, batch_idx, Int32(m_begin), Int32(m_unmasked), Int32(m_end))


@dataclass(frozen=True)
class BackwardSmem:
    """sK: (tile_n, head_dim). sV: (tile_n, head_dim_v). sQ: (tile_m, head_dim, stage).
    sdO: (tile_m, head_dim_v, stage). sLSE, sDelta: (tile_m, 1, stage), fp32. sdS, sP: (tile_m, tile_n, stage), keys contiguous;
    (tile_n, tile_m, stage), queries contiguous, where P is there too. dq: pointer to tile_m * head_dim fp32 numbers.
    sdV, sdK: like sV and sK, where dV and dK leave through: the memory of sdS and sP, one behind the other if both fit.
    chunks: (256, rows of a pair of vectors, pair), chunks of all converters. is_over: a barrier that passes when no tile is
    left to load."""

    sK: cute.Tensor
    sV: cute.Tensor
    sQ: cute.Tensor
    sdO: cute.Tensor
    sLSE: cute.Tensor
    sDelta: cute.Tensor
    sdS: cute.Tensor
    sP: cute.Tensor | None
    dq: cute.Pointer | None
    sdV: cute.Tensor
    sdK: cute.Tensor
    chunks: cute.Tensor | None
    is_over: cute.Pointer


@dataclass(frozen=True)
class BackwardPipes:
    """Rings from the load warp to the consumer warpgroups. Q brings LSE, dO brings delta; K and V have one stage. tiles: to
    all that follow tiles. chunks: from each converter to itself, a stage each. turns, landed: to and from who adds dQ in a
    fixed order (`turns.py`)."""

    q: Ring
    do: Ring
    k: Ring
    v: Ring
    tiles: TileSlots
    chunks: Ring
    turns: Ring
    landed: Ring


@dataclass(frozen=True)
class Consumer:
    """What a thread of a consumer warpgroup works with.

    tSr, tdPr, tdVr, tdKr, tdQr: operands of the products, in shared memory with the stage as last mode, or in registers.
    rP, rdS: 16-bit registers in the order of acc_S. rLSE, rDelta: (2, groups of 8 queries), of the thread's columns; one
    buffer for both where P and dS are registers, because there LSE is used up before delta is read.
    copy_dS, thread_dS: stmatrix of rdS and rP. first_row, first_column: of the thread in S^T.
    """

    mmas: BackwardMmas
    tSrK: cute.Tensor
    tSrQ: cute.Tensor
    tdPrV: cute.Tensor
    tdPrdO: cute.Tensor
    tdVrP: cute.Tensor
    tdVrdO: cute.Tensor
    tdKrdS: cute.Tensor
    tdKrQ: cute.Tensor
    tdQrA: cute.Tensor
    tdQrB: cute.Tensor
    acc_S: cute.Tensor
    acc_dP: cute.Tensor
    acc_dQ: cute.Tensor
    acc_dK: cute.Tensor
    acc_dV: cute.Tensor
    rP: cute.Tensor
    rdS: cute.Tensor
    rLSE: cute.Tensor
    rDelta: cute.Tensor
    tLSE: cute.Tensor
    tDelta: cute.Tensor
    copy_dS: cute.TiledCopy
    thread_dS: cutlass.Constexpr
    tsdS: cute.Tensor
    tsP: cute.Tensor | None
    pipes: BackwardPipes
    smem: BackwardSmem
    gmem: BackwardGmem
    sizes: BackwardSizes
    lane: Int32
    warpgroup: Int32
    thread: Int32
    first_row: Int32
    first_column: Int32
    plan: cutlass.Constexpr
