"""Which plan a problem gets: the compiled tile of every head_dim, the rules on H20 and H200, and that all fit."""

import pytest

from cute_fa.core.mask_spec import MaskSpec
from cute_fa.core.problem import AttentionProblem, ScoreSpec
from cute_fa.tuning.heuristics import HEAD_DIM_TILES, build_forward_plan, forward_plan, head_dim_tile

HEAD_DIMS = range(8, 257, 8)
MASKS = {"full": MaskSpec(), "causal": MaskSpec(right=0)}
SMS = {"h20": 78, "h200": 132}


def plan_of(head_dim, head_dim_v=None, mask="full", seqlen=4096, heads=16, batch=4, num_sms=132):
    sizes = batch, seqlen, seqlen, heads, heads, head_dim, head_dim_v or head_dim
    return forward_plan(AttentionProblem("dense", "bfloat16", *sizes, ScoreSpec(1.0, MASKS[mask])), num_sms)


def smallest_tile(head_dim: int) -> int:
    return min(tile for tile in (64, 96, 128, 192, 256) if tile >= head_dim)


def every_plan():
    for dtype in ("bfloat16", "float16"):
        for head_dim in HEAD_DIM_TILES:
            for head_dim_v in HEAD_DIM_TILES:
                for is_causal in (False, True):
                    yield build_forward_plan(dtype, head_dim, head_dim_v, is_causal, 2)
    yield from (build_forward_plan("bfloat16", 64, 64, is_causal, 3) for is_causal in (False, True))


def test_every_head_dim_gets_the_smallest_tile_that_holds_it():
    assert head_dim_tile(1) == 64 and head_dim_tile(256) == 256, "the ends"
    for head_dim in HEAD_DIMS:
        for head_dim_v in HEAD_DIMS:
            tile = plan_of(head_dim, head_dim_v).tile
            wanted = smallest_tile(head_dim), smallest_tile(head_dim_v)
            assert (tile.head_dim, tile.head_dim_v) == wanted, f"head_dim {head_dim}, head_dim_v {head_dim_v}"


def test_a_tma_box_never_lies_wholly_outside_the_tensor():
    """A box has 64 columns, or 32 where 64 does not divide the tile; the last one still has a column of the tensor."""
    for head_dim in HEAD_DIMS:
        tile = plan_of(head_dim).tile.head_dim
        last_box = tile - (64 if tile % 64 == 0 else 32)
        assert last_box < head_dim <= tile, f"head_dim {head_dim}: the last box of {tile} begins at {last_box}"


def test_sides_of_tma_boxes():
    """PTX ISA: at most 256 elements each; an instruction's N is a multiple of 8, the next product's K of 16."""
    for plan in every_plan():
        tile = plan.tile
        assert tile.tile_m == 64 * tile.num_consumer_warpgroups <= 256, f"{plan.name}: 64 rows a warpgroup"
        assert tile.tile_n % 16 == 0 and tile.tile_n <= 256, f"{plan.name}: keys"


def test_every_plan_fits():
    """Shared memory of a block, 227 KiB, and registers of a consumer thread, of which 32 are for other things."""
    for plan in every_plan():
        t = plan.tile
        q, o = (2 * t.tile_m * dim for dim in (t.head_dim, t.head_dim_v))
        k, v = (2 * t.tile_n * dim for dim in (t.head_dim, t.head_dim_v))
        smem_bytes = t.num_q_stages * q + t.num_kv_stages * (k + v) + t.has_o_staging * o + 1024
        assert smem_bytes <= 227 * 1024, f"{plan.name}: {smem_bytes} bytes"
        s, o = t.tile_n / 2, t.head_dim_v / 2  # 64 rows over 128 threads
        most = {2: 240, 3: 160}[t.num_consumer_warpgroups] - 32
        assert s + s / 2 + o <= most, f"{plan.name}: S, P and O in {s + s / 2 + o} registers of {most}"
        assert t.num_kv_stages >= 2, f"{plan.name}: K of a block is loaded while that of the block before it is in use"


KEYS_A_BLOCK = {
    "d64-full": (64, 64, "full", 128),
    "d96-causal": (96, 96, "causal", 128),
    "d128-full": (128, 128, "full", 128),
    "d128-causal": (128, 128, "causal", 128),
    "d192-full": (192, 192, "full", 112),
    "d192-128-causal": (192, 128, "causal", 128),
    "d256-full": (256, 256, "full", 80),
    "d256-causal": (256, 256, "causal", 64),
    "d64-256-full": (64, 256, "full", 96),
    "d64-256-causal": (64, 256, "causal", 64),
    "d256-128-full": (256, 128, "full", 96),
}


@pytest.mark.parametrize("head_dim, head_dim_v, mask, tile_n", KEYS_A_BLOCK.values(), ids=KEYS_A_BLOCK)
def test_keys_a_block(head_dim, head_dim_v, mask, tile_n):
    """The most that fit of 128, 112, 96, 80 and 64; causal tiles whose head_dim_v is 256 take 64."""
    assert plan_of(head_dim, head_dim_v, mask, seqlen=256, batch=1).tile.tile_n == tile_n, "keys"


def test_room_goes_to_a_second_q_and_to_staging():
    for plan in every_plan():
        tile = plan.tile
        q, o = 2 * tile.tile_m * tile.head_dim, 2 * tile.tile_m * tile.head_dim_v
        one_of_each = 2 * tile.num_kv_stages * tile.tile_n * (tile.head_dim + tile.head_dim_v) + q + 1024
        has_room = one_of_each + q + o <= 227 * 1024
        assert (tile.num_q_stages, tile.has_o_staging) == ((2, True) if has_room else (1, False)), plan.name


@pytest.mark.parametrize("num_sms", SMS.values(), ids=SMS)
def test_wide_tiles_need_a_whole_wave(num_sms):
    """head_dim 64: 192 queries where their tiles are at least as many as the SMs, counted over heads and batch."""
    for seqlen, blocks in ((192, 1), (193, 2), (384, 2), (385, 3), (4096, 22)):
        for batch in (1, 2):
            for heads in (1, 3, num_sms // (blocks * batch), num_sms // (blocks * batch) + 1):
                tile = plan_of(64, seqlen=seqlen, heads=heads, batch=batch, num_sms=num_sms).tile
                wanted = 192 if blocks * heads * batch >= num_sms else 128
                assert tile.tile_m == wanted, f"{blocks} blocks of {heads} heads and {batch} sequences"


@pytest.mark.parametrize("num_sms", SMS.values(), ids=SMS)
@pytest.mark.parametrize(
    "mask, seqlen, tile_m",
    [("causal", 2048, 128), ("causal", 2049, 192), ("full", 2048, 192), ("full", 128, 192)],
    ids=["causal-to-2048", "causal-from-2049", "full-2048", "full-128"],
)
def test_short_causal_calls_take_narrow_tiles(num_sms, mask, seqlen, tile_m):
    assert plan_of(64, mask=mask, seqlen=seqlen, heads=64, num_sms=num_sms).tile.tile_m == tile_m, "queries of a tile"


def test_only_head_dim_64_has_wide_tiles():
    for head_dim, head_dim_v in ((64, 72), (72, 64), (128, 128), (256, 256)):
        assert plan_of(head_dim, head_dim_v, seqlen=16384, heads=64).tile.tile_m == 128, f"{head_dim}, {head_dim_v}"
    assert plan_of(8, 40).tile.tile_m == 192, "all that the tile of 64 holds"


TURNS_AND_SECTIONS = {
    "d64-full": (64, "full", False, 1),
    "d64-causal": (64, "causal", True, 32),
    "d96-full": (96, "full", True, 1),
    "d96-causal": (96, "causal", True, 32),
    "d128-full": (128, "full", True, 1),
    "d128-causal": (128, "causal", True, 16),
    "d192-causal": (192, "causal", True, 32),
    "d256-causal": (256, "causal", True, 32),
}


@pytest.mark.parametrize(
    "head_dim, mask, has_turns, heads_per_section", TURNS_AND_SECTIONS.values(), ids=TURNS_AND_SECTIONS
)
def test_turns_and_order(head_dim, mask, has_turns, heads_per_section):
    plan = plan_of(head_dim, mask=mask)
    assert (plan.has_turns, plan.heads_per_section) == (has_turns, heads_per_section), "ping-pong, heads side by side"


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_dtype_and_mask_are_the_problem_s(dtype):
    for mask in MASKS.values():
        problem = AttentionProblem("dense", dtype, 1, 100, 200, 8, 2, 128, 128, ScoreSpec(0.1, mask))
        plan = forward_plan(problem, 132)
        assert (plan.dtype, plan.is_causal) == (dtype, mask.right == 0), "as asked for"
