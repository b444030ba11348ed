"""Heuristics: problem -> plan, by measured winners (`tuning/winners.py`) and, where nobody measured, by rules.

What both give on an H200 stands in `benchmarks/results/`.
"""

from cute_fa.core.dtypes import BFLOAT16
from cute_fa.core.problem import AttentionProblem
from cute_fa.tuning import schedule
from cute_fa.tuning.budget import BackwardTile, ForwardTile
from cute_fa.tuning.plan import (
    BackwardPlan,
    ForwardPlan,
    PostprocessPlan,
    PreprocessPlan,
    usual_forward_tile,
)
from cute_fa.tuning.winners import FORWARD_WINNERS, ForwardWinner

# Compiled sizes of head_dim and head_dim_v. TMA fills what is missing with zeros and cuts what is too much. The widest
# TMA box is 64 columns (128 bytes, swizzled) where 64 divides the tile, else 32, so no box of the forward holds nothing.
HEAD_DIM_TILES = (64, 96, 128, 192, 256)

# With so many keys, a CTA of the backward takes one tile after another: the shorter tiles are, the more it counts that the next
# K and V come while dK and dV leave, and what the kernels around take. Why that turns round with 256 keys was not looked for.
# PERF: 128 tokens: -8%; 256: -3 to +1%; 1024: +3 to +12%; 4096: -1 to +4%; 16384: -1 to -4% (H200, 2026-11-30,
# benchmarks/results/NOTES.md).
PERSISTENT_SEQLENS = range(257, 8192)

FORWARD_WARPGROUPS = 2  # consumers, where no winner says otherwise

# Keys a block, best first: the more, the fewer barriers for the same work.
_TILE_NS = (128, 112, 96, 80, 64)


def head_dim_tile(head_dim: int) -> int:
    """The smallest compiled tile that holds head_dim."""
    return next(tile for tile in HEAD_DIM_TILES if head_dim <= tile)


def forward_plan(problem: AttentionProblem, num_sms: int) -> ForwardPlan:
    """The plan of a problem on a device with num_sms SMs: that of the first winner that holds, else the rules'."""
    head_dim, head_dim_v = head_dim_tile(problem.head_dim), head_dim_tile(problem.head_dim_v)
    mask = problem.scores.mask
    assert mask.is_full or mask.is_causal, f"no forward kernel has the mask {mask.name}"
    for row in FORWARD_WINNERS:
        if row.holds(head_dim, head_dim_v, mask.is_causal, problem.seqlen_k) and _fills(row, problem, num_sms):
            return row.plan(problem.dtype)
    return build_forward_plan(problem.dtype, head_dim, head_dim_v, mask.is_causal)


def _fills(row: ForwardWinner, problem: AttentionProblem, num_sms: int) -> bool:
    """Whether every SM gets a tile, as it did when the winner was measured. Nothing is narrower than 128 rows."""
    num_tiles = -(-problem.seqlen_q // row.tile_m) * problem.num_heads_q * problem.batch
    return row.num_consumer_warpgroups == 2 or num_tiles >= num_sms


def build_forward_plan(dtype: str, head_dim: int, head_dim_v: int, is_causal: bool) -> ForwardPlan:
    """The plan of one pair of compiled tiles where no winner holds: the rules for tile_n, stages, stores and order."""
    return ForwardPlan(
        dtype=dtype,
        tile=_forward_tile(head_dim, head_dim_v),
        is_causal=is_causal,
        # PERF: at 256, where products take longer than softmax, turns cost 0 to 3% (H200, 2026-11-30, 20261130T124523Z-tune).
        has_turns=head_dim_v < 256,
    )


def _forward_tile(head_dim: int, head_dim_v: int) -> ForwardTile:
    """The largest block of keys that fits; then a second stage for Q and staging for O, where there is room for both."""
    # PERF: at 256, 64 keys are 0 to 5% faster than 80, full and causal (H200, 2026-11-30, 20261130T124523Z-tune).
    for tile_n in (64,) if head_dim_v == 256 else _TILE_NS:
        tile = usual_forward_tile(head_dim, head_dim_v, FORWARD_WARPGROUPS, tile_n)
        if tile.fits:
            return tile
    raise AssertionError(f"no tile holds head_dim {head_dim} with head_dim_v {head_dim_v}")


def backward_plan(problem: AttentionProblem, needs: tuple[bool, bool, bool] = (True, True, True)) -> BackwardPlan:
    """The plan of the main backward kernel. needs: which of dq, dk and dv are asked for, at least one."""
    mask = problem.scores.mask
    assert mask.is_full or mask.is_causal, f"no backward kernel has the mask {mask.name}"
    dims = head_dim_tile(problem.head_dim), head_dim_tile(problem.head_dim_v)
    is_persistent = problem.seqlen_k in PERSISTENT_SEQLENS
    return build_backward_plan(problem.dtype, *dims, mask.is_causal, "deterministic" in problem.features, needs, is_persistent)


def backward_plans(
    problem: AttentionProblem, needs: tuple[bool, bool, bool] = (True, True, True)
) -> tuple[BackwardPlan, PreprocessPlan, PostprocessPlan]:
    """The plans of a whole backward call: the main kernel, the one before and the one after it, which only dq needs."""
    plan = backward_plan(problem, needs)
    return plan, PreprocessPlan(plan.dtype, plan.tile.head_dim_v, plan.needs_dq), PostprocessPlan(plan.dtype, plan.tile.dq)


def build_backward_plan(
    dtype: str,
    head_dim: int,
    head_dim_v: int,
    is_causal: bool,
    is_deterministic: bool,
    needs: tuple[bool, bool, bool],
    is_persistent: bool = False,
) -> BackwardPlan:
    """The plan of one pair of compiled tiles: the rules for blocks, schedule and arithmetic."""
    needs_dq, needs_dk, needs_dv = needs
    # fp16 without dQ spills in blocks of 128 queries.
    tile = _backward_tile(head_dim, head_dim_v, 128 if dtype == BFLOAT16.name or needs_dq else 64)
    # 16-bit dS leaves registers for dV to run under it. fp16 does without: a large dP would overflow.
    has_16bit_ds = dtype == BFLOAT16.name and tile.tile_m == 128
    if tile.has_p_in_smem:
        words = schedule.SHARED
    elif tile.has_tight_registers and not has_16bit_ds:
        words = schedule.DP_FIRST
    else:
        words = schedule.HALF_DK
    return BackwardPlan(
        dtype=dtype,
        tile=tile,
        is_causal=is_causal,
        is_deterministic=is_deterministic and needs_dq,
        schedule=schedule.without(words, *needs, tile.has_p_in_smem, is_deterministic and not tile.has_dq_staging),
        has_16bit_ds=has_16bit_ds,
        needs_dq=needs_dq,
        needs_dk=needs_dk,
        needs_dv=needs_dv,
        is_persistent=is_persistent,
        heads_per_section=4 if is_causal else 1,
    )


def _backward_tile(head_dim: int, head_dim_v: int, max_tile_m: int) -> BackwardTile:
    """128 keys with P and dS in registers where dK and dV leave room for them, else 64 keys."""
    # A wider block of queries takes fewer turns, but with 64 and 96 it spills.
    tile = BackwardTile(head_dim, head_dim_v, max_tile_m if head_dim == head_dim_v == 64 else 64, 128)
    if tile.fits:
        return tile
    for has_dq_staging in (True, False):
        tile = BackwardTile(head_dim, head_dim_v, 64, 64, has_p_in_smem=True, has_dq_staging=has_dq_staging)
        if tile.fits:
            return tile
    raise AssertionError(f"no tile holds head_dim {head_dim} with head_dim_v {head_dim_v}")
