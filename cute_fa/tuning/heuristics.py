"""Heuristics: problem -> plan. What the rules give on an H200 stands in `benchmarks/results/`."""

from cute_fa.core.problem import AttentionProblem
from cute_fa.tuning.budget import ForwardTile
from cute_fa.tuning.plan import ForwardPlan

# Compiled sizes of head_dim and head_dim_v. TMA fills what is missing with zeros and cuts what is too much. The widest
# TMA box is 64 columns (128 bytes, swizzled) where 64 divides the tile, else 32, so a tile never has a box that holds nothing.
HEAD_DIM_TILES = (64, 96, 128, 192, 256)

# Keys a block, best first: the more, the fewer barriers and rescales for the same work.
_TILE_NS = (128, 112, 96, 80, 64)


def head_dim_tile(head_dim: int) -> int:
    """The smallest compiled tile that holds head_dim."""
    return next(tile for tile in HEAD_DIM_TILES if head_dim <= tile)


def forward_plan(problem: AttentionProblem, num_sms: int) -> ForwardPlan:
    """The forward plan of a problem on a device with num_sms SMs."""
    head_dim, head_dim_v = head_dim_tile(problem.head_dim), head_dim_tile(problem.head_dim_v)
    mask = problem.scores.mask
    assert mask.is_full or mask.is_causal, f"no forward kernel has the mask {mask.name}"
    is_causal = mask.is_causal
    num_warpgroups = 2
    if head_dim == head_dim_v == 64:
        # 192 rows read K and V less often; 128 rows waste less of the diagonal and of the last wave.
        num_wide_tiles = -(-problem.seqlen_q // 192) * problem.num_heads_q * problem.batch
        if num_wide_tiles >= num_sms and not (is_causal and problem.seqlen_q <= 2048):
            num_warpgroups = 3
    return build_forward_plan(problem.dtype, head_dim, head_dim_v, is_causal, num_warpgroups)


def build_forward_plan(dtype: str, head_dim: int, head_dim_v: int, is_causal: bool, num_warpgroups: int) -> ForwardPlan:
    """The plan of one pair of compiled tiles: the rules for tile_n, stages, stores and order."""
    return ForwardPlan(
        dtype=dtype,
        tile=_forward_tile(head_dim, head_dim_v, is_causal, num_warpgroups),
        is_causal=is_causal,
        has_turns=is_causal or head_dim > 64,
        heads_per_section=(16 if head_dim_v == 128 else 32) if is_causal else 1,
    )


def _forward_tile(head_dim: int, head_dim_v: int, is_causal: bool, num_warpgroups: int) -> ForwardTile:
    """The largest block of keys that fits; then a second stage for Q and staging for O, where there is room for both."""
    # At 256 causal, 64 keys waste less of the diagonal than 80 save.
    tile_ns = (64,) if is_causal and head_dim_v == 256 else _TILE_NS
    for tile_n in tile_ns:
        sizes = (head_dim, head_dim_v, 64 * num_warpgroups, tile_n, num_warpgroups)
        for num_q_stages, has_o_staging in ((2, True), (1, False)):
            tile = ForwardTile(*sizes, num_q_stages=num_q_stages, has_o_staging=has_o_staging)
            if tile.fits:
                return tile
    raise AssertionError(f"no tile holds head_dim {head_dim} with head_dim_v {head_dim_v}")
