"""Bundles: what the roles of the forward kernel share. Frozen dataclasses cross kernels, functions and dynamic loops.

Letters: S raw scores, P probabilities before the division by their sum. Shapes are (rows, columns, ...) of the tile.
"""

from dataclasses import dataclass

import cutlass
from cutlass import Float32, Int32, cute

from cute_fa.device.band import Band
from cute_fa.device.order import HeadAfterHead, LongestFirst
from cute_fa.device.pipeline import Ring
from cute_fa.device.scheduler import TileSlots
from cute_fa.tuning.plan import ForwardPlan


@dataclass(frozen=True)
class ForwardGmem:
    """Whole tensors in global memory. The four `m` tensors hold coordinates for TMA.

    mQ, mO: (seqlen_q, head_dim, heads_q, batch). mK: (seqlen_k, head_dim, heads_kv, batch). mVt: (head_dim_v, seqlen_k,
    heads_kv, batch). out: as mO, with addresses. lse: (seqlen_q, heads_q, batch). counter: two zeros.
    """

    mQ: cute.Tensor
    mK: cute.Tensor
    mVt: cute.Tensor
    mO: cute.Tensor
    out: cute.Tensor
    lse: cute.Tensor
    counter: cute.Tensor


@dataclass(frozen=True)
class ForwardTma:
    """TMA descriptors."""

    q: cute.CopyAtom
    k: cute.CopyAtom
    v: cute.CopyAtom
    out: cute.CopyAtom


@dataclass(frozen=True)
class ForwardMmas:
    """The same product S = Q K^T twice, overwriting S and adding to it; both with the left half of the keys; O += P V."""

    scores: cute.TiledMma
    scores_add: cute.TiledMma
    half: cute.TiledMma
    half_add: cute.TiledMma
    values: cute.TiledMma


@dataclass(frozen=True)
class ForwardSizes:
    """Numbers of one launch. scale_log2: softmax_scale * log2(e). group: query heads of a key-value head.
    heads_per_section: as in LongestFirst."""

    seqlen_q: Int32
    seqlen_k: Int32
    num_heads: Int32
    batch: Int32
    group: Int32
    heads_per_section: Int32
    scale_log2: Float32

    def band(self, plan: ForwardPlan, rows: int) -> Band:
        """In blocks of `rows` queries: those of a tile, or those of a warpgroup."""
        right = 0 if plan.is_causal else None
        return Band(rows, plan.tile.tile_n, self.seqlen_q, self.seqlen_k, right=right)

    def num_m_blocks(self, plan: ForwardPlan):
        return cute.ceil_div(self.seqlen_q, plan.tile.tile_m)

    def num_tiles(self, plan: ForwardPlan):
        return self.num_m_blocks(plan) * self.num_heads * self.batch

    def order(self, plan: ForwardPlan):
        blocks = self.num_m_blocks(plan)
        if plan.is_causal:
            return LongestFirst(blocks, self.num_heads, self.batch, self.heads_per_section, is_last_longest=True)
        return HeadAfterHead(blocks, self.num_heads)


@dataclass(frozen=True)
class ForwardSmem:
    """sQ: (tile_m, head_dim, stage). sK: (tile_n, head_dim, stage). sVt: (head_dim_v, tile_n, stage). sO: (tile_m,
    head_dim_v), None where O is stored from registers."""

    sQ: cute.Tensor
    sK: cute.Tensor
    sVt: cute.Tensor
    sO: cute.Tensor | None


@dataclass(frozen=True)
class ForwardPipes:
    """Rings of Q, K and V, and the coordinates of tiles, from the load warp to the consumer warpgroups."""

    q: Ring
    k: Ring
    v: Ring
    tiles: TileSlots


# What a warpgroup sees of the first block that it works on, the rightmost one.
WHOLE, MASKED, LEFT_HALF = 0, 1, 2


@dataclass(frozen=True)
class Work:
    """A tile as a consumer warpgroup fetches it (`device/scheduler.py`); the last four numbers are its own.

    m_block: -1 behind the last tile. has_care: whether it is done once more. num_skipped: n-blocks of the tile on the right
    that the warpgroup does not see. num_n_blocks: those from the left that it works on, at least one. num_fast: of these,
    from the left, how many need no maxima. first: WHOLE, MASKED or LEFT_HALF.
    """

    m_block: Int32
    head: Int32
    batch_idx: Int32
    has_care: Int32
    num_skipped: Int32
    num_n_blocks: Int32
    num_fast: Int32
    first: Int32


@dataclass(frozen=True)
class Consumer:
    """What a thread of a consumer warpgroup works with.

    tSrQ, tSrK, tOrVt: shared memory as operands, last mode the stage; tSrK_half: the left half of the keys. tOrP: P in
    registers. half_layout: of the left half of acc_S, which comes first. reference, total: of the thread's two rows
    (`device/softmax.py`); factors: of their rescale; largest: of their sums over one block, None where P cannot overflow.
    """

    mmas: ForwardMmas
    tSrQ: cute.Tensor
    tSrK: cute.Tensor
    tOrVt: cute.Tensor
    tOrP: cute.Tensor
    tSrK_half: cute.Tensor
    half_layout: cutlass.Constexpr
    acc_S: cute.Tensor
    acc_O: cute.Tensor
    reference: cute.Tensor
    total: cute.Tensor
    factors: cute.Tensor
    largest: cute.Tensor | None
    pipes: ForwardPipes
    scale_log2: Float32
    hidden_score: Float32
    lane: Int32
    warpgroup: Int32
    next_warpgroup: Int32
    plan: cutlass.Constexpr
