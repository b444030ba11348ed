"""Which plan a problem gets: the compiled tile of every head_dim, the rules on H20 and H200, and that all fit."""

import itertools

import pytest

from cute_fa.core.mask_spec import MaskSpec
from cute_fa.core.problem import AttentionProblem, ScoreSpec
from cute_fa.tuning import heuristics, schedule
from cute_fa.tuning.heuristics import (
    HEAD_DIM_TILES,
    backward_plan,
    backward_plans,
    build_backward_plan,
    build_forward_plan,
    forward_plan,
    head_dim_tile,
)
from cute_fa.tuning.winners import ForwardWinner

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
                    yield build_forward_plan(dtype, head_dim, head_dim_v, is_causal)


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
    "d256-full": (256, 256, "full", 64),
    "d256-causal": (256, 256, "causal", 64),
    "d64-256-full": (64, 256, "full", 64),
    "d256-128-full": (256, 128, "full", 96),
}


@pytest.mark.parametrize("head_dim, head_dim_v, mask, tile_n", KEYS_A_BLOCK.values(), ids=KEYS_A_BLOCK)
def test_keys_a_block(head_dim, head_dim_v, mask, tile_n):
    """By the rules, the most that fit of 128, 112, 96, 80 and 64; tiles whose head_dim_v is 256 take 64."""
    assert build_forward_plan("bfloat16", head_dim, head_dim_v, mask == "causal").tile.tile_n == tile_n, "keys"


def test_room_goes_to_a_second_q_and_to_staging():
    for plan in every_plan():
        tile = plan.tile
        q, o = 2 * tile.tile_m * tile.head_dim, 2 * tile.tile_m * tile.head_dim_v
        one_of_each = 2 * tile.num_kv_stages * tile.tile_n * (tile.head_dim + tile.head_dim_v) + q + 1024
        has_room = one_of_each + q + o <= 227 * 1024
        assert (tile.num_q_stages, tile.has_o_staging) == ((2, True) if has_room else (1, False)), plan.name


@pytest.fixture
def wide_winners(monkeypatch):
    """Winners for head_dim 64 alone: 192 rows, but 128 for causal calls of up to 2048 keys."""
    rest = (2, 2, True, True, "a-run")
    rows = [(False, None, 3), (True, 2048, 2), (True, None, 3)]
    table = tuple(ForwardWinner(64, 64, *where, warpgroups, 128, *rest) for *where, warpgroups in rows)
    monkeypatch.setattr(heuristics, "FORWARD_WINNERS", table)


@pytest.mark.usefixtures("wide_winners")
@pytest.mark.parametrize("num_sms", SMS.values(), ids=SMS)
def test_wide_tiles_need_a_whole_wave(num_sms):
    """head_dim 64: 192 queries where their tiles are at least as many as the SMs, counted over heads and batch."""
    for seqlen, blocks in ((192, 1), (193, 2), (384, 2), (385, 3), (4096, 22)):
        for batch in (1, 2):
            for heads in (1, 3, num_sms // (blocks * batch), num_sms // (blocks * batch) + 1):
                tile = plan_of(64, seqlen=seqlen, heads=heads, batch=batch, num_sms=num_sms).tile
                wanted = 192 if blocks * heads * batch >= num_sms else 128
                assert tile.tile_m == wanted, f"{blocks} blocks of {heads} heads and {batch} sequences"


@pytest.mark.usefixtures("wide_winners")
@pytest.mark.parametrize("num_sms", SMS.values(), ids=SMS)
@pytest.mark.parametrize(
    "mask, seqlen, tile_m",
    [("causal", 2048, 128), ("causal", 2049, 192), ("full", 2048, 192), ("full", 128, 192)],
    ids=["causal-to-2048", "causal-from-2049", "full-2048", "full-128"],
)
def test_a_winner_holds_to_its_longest_sequence(num_sms, mask, seqlen, tile_m):
    assert plan_of(64, mask=mask, seqlen=seqlen, heads=64, num_sms=num_sms).tile.tile_m == tile_m, "queries of a tile"


@pytest.mark.usefixtures("wide_winners")
def test_a_winner_holds_for_its_tiles():
    """Both have to be those of the row; where there is none, rules give 128 rows."""
    for head_dim, head_dim_v in ((64, 72), (72, 64), (128, 128), (256, 256)):
        assert plan_of(head_dim, head_dim_v, seqlen=16384, heads=64).tile.tile_m == 128, f"{head_dim}, {head_dim_v}"
    assert plan_of(8, 40).tile.tile_m == 192, "all that the tile of 64 holds"


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("head_dim, has_turns", [(64, True), (96, True), (128, True), (192, True), (256, False)])
def test_turns(head_dim, has_turns, mask):
    assert build_forward_plan("bfloat16", head_dim, head_dim, mask == "causal").has_turns == has_turns, "ping-pong"


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_dtype_and_mask_are_the_problem_s(dtype):
    for mask in MASKS.values():
        problem = AttentionProblem("dense", dtype, 1, 100, 200, 8, 2, 128, 128, ScoreSpec(0.1, mask))
        plan = forward_plan(problem, 132)
        assert (plan.dtype, plan.is_causal) == (dtype, mask.right == 0), "as asked for"


ALL = (True, True, True)
SUBSETS = [needs for needs in itertools.product((True, False), repeat=3) if any(needs)]


def every_backward_plan(needs=ALL):
    flags = False, True
    for choice in itertools.product(("bfloat16", "float16"), HEAD_DIM_TILES, HEAD_DIM_TILES, flags, flags):
        for is_persistent in flags:
            yield build_backward_plan(*choice, needs, is_persistent)


def test_every_backward_plan_fits():
    """Shared memory of a block, 227 KiB, and registers of a consumer thread, of which 32 are for other things."""
    for plan in every_backward_plan():
        t = plan.tile
        k, v, q, do = (2 * n * d for n in (t.tile_n, t.tile_m) for d in (t.head_dim, t.head_dim_v))
        ds, dq = 2 * t.tile_m * t.tile_n, 4 * t.tile_m * t.head_dim * t.has_dq_staging
        # Two stages of lse, of delta; barriers of rings with 14 stages in all, and two tiles under way.
        others = 4 * 4 * t.tile_m + 8 * 28 + 4 * 12 + plan.has_converters * 2 * 8192
        smem_bytes = k + v + 2 * (q + do + ds * (1 + t.has_p_in_smem)) + dq + others
        assert smem_bytes <= plan.smem_bytes <= 227 * 1024, f"{plan.name}: {smem_bytes} bytes"
        s, dk, dv = (t.tile_n * columns / 256 for columns in (t.tile_m, t.head_dim, t.head_dim_v))
        products = dk + dv + max(2 * s, t.tile_m * t.head_dim / 256 + s * (not t.has_p_in_smem))
        assert products <= 240 - 32, f"{plan.name}: {products} registers"


def test_results_of_a_tile_leave_through_buffers_that_hold_them():
    """dV in those of dS and P; dK behind it, or in that of dQ, or when dV has left."""
    for plan in every_backward_plan():
        t = plan.tile
        dk, dv, dq = 2 * t.tile_n * t.head_dim, 2 * t.tile_n * t.head_dim_v, 4 * t.tile_m * t.head_dim
        buffers = 2 * 2 * t.tile_m * t.tile_n * (1 + t.has_p_in_smem)
        assert t.has_room_for_both == (dk + dv <= buffers), f"{plan.name}: both"
        assert dv <= buffers and dk <= (dq if t.has_dq_staging else buffers), f"{plan.name}: one"


def test_backward_tiles_are_what_products_take():
    """64 keys a warpgroup; with P in shared memory 64 keys for both, which share queries and columns of the head."""
    for plan in every_backward_plan():
        t = plan.tile
        assert (t.tile_n, t.num_consumer_warpgroups) == (64 if t.has_p_in_smem else 128, 2), f"{plan.name}: keys"
        assert t.tile_m == 64 or t.tile_m == 128 and not t.has_p_in_smem, f"{plan.name}: queries"
        columns = (t.head_dim, t.head_dim_v) if not t.has_p_in_smem else (t.head_dim // 2, t.head_dim_v // 2)
        assert all(count % 16 == 0 and count <= 256 for count in columns), f"{plan.name}: rows of 32 bytes or more"


# head_dim, head_dim_v: queries, keys, P in shared memory, staging of dQ, words of the schedule for bf16 and fp16
BLOCKS = {
    "d64": (64, 64, 128, 128, False, True, "HALF_DK", "DP_FIRST"),
    "d64-96": (64, 96, 64, 128, False, True, "HALF_DK", "HALF_DK"),
    "d96": (96, 96, 64, 128, False, True, "HALF_DK", "HALF_DK"),
    "d128": (128, 128, 64, 128, False, True, "HALF_DK", "HALF_DK"),
    "d192-64": (192, 64, 64, 128, False, True, "DP_FIRST", "DP_FIRST"),
    "d96-192": (96, 192, 64, 64, True, True, "SHARED", "SHARED"),
    "d128-192": (128, 192, 64, 64, True, True, "SHARED", "SHARED"),
    "d192-128": (192, 128, 64, 64, True, True, "SHARED", "SHARED"),
    "d192": (192, 192, 64, 64, True, True, "SHARED", "SHARED"),
    "d64-256": (64, 256, 64, 64, True, True, "SHARED", "SHARED"),
    "d256-64": (256, 64, 64, 64, True, True, "SHARED", "SHARED"),
    "d256": (256, 256, 64, 64, True, False, "SHARED", "SHARED"),
}


@pytest.mark.parametrize("block", BLOCKS.values(), ids=BLOCKS)
def test_blocks_and_schedule_of_backward(block):
    """fp16 has no 16-bit dS, which 128 queries need for the schedule that takes more registers."""
    head_dim, head_dim_v, *tile, bf16_words, fp16_words = block
    for dtype, words in (("bfloat16", bf16_words), ("float16", fp16_words)):
        plan = build_backward_plan(dtype, head_dim, head_dim_v, False, False, ALL)
        t = plan.tile
        assert [t.tile_m, t.tile_n, t.has_p_in_smem, t.has_dq_staging] == tile, f"{dtype}: block"
        assert plan.schedule == getattr(schedule, words).replace(" landed", ""), f"{dtype}: words"
        assert plan.has_16bit_ds == (dtype == "bfloat16" and head_dim == head_dim_v == 64), f"{dtype}: arithmetic"


# By hand: what is left of HALF_DK and of SHARED. Waits for what never ran may stay, they come to nothing.
LEFT = {
    "dv-alone": (128, (False, False, True), "S lse P:0 dV:0 P:1 dV:1 free_dO free_Q"),
    "dk-alone": (128, (False, True, False), "S lse dP P:0 P:1 delta dS:0 dK:0 dS:1 dK:1 free_dO free_Q"),
    "dq-alone": (
        128,
        (True, False, False),
        "S lse dP P:0 P:1 delta dS:0 dS:1 store_dS sync dQ free_dO store_dQ free_Q",
    ),
    "shared-dv-alone": (256, (False, False, True), "P store_P sync dV free_dO next_S next_lse free_Q"),
    "shared-dk-alone": (256, (False, True, False), "dP delta P dS store_dS sync dK free_dO next_S next_lse free_Q"),
    "shared-dq-alone": (
        256,
        (True, False, False),
        "dP delta P dS store_dS sync dQ free_dO next_S next_lse store_dQ free_Q",
    ),
}


@pytest.mark.parametrize("head_dim, needs, words", LEFT.values(), ids=LEFT)
def test_a_subset_of_gradients_has_a_shorter_schedule(head_dim, needs, words):
    plan = build_backward_plan("bfloat16", head_dim, head_dim, False, False, needs)
    found = " ".join(word for word in plan.schedule.split() if not word.startswith("wait"))
    assert found == words, "words but waits"
    assert (plan.needs_dq, plan.needs_dk, plan.needs_dv) == needs, "as asked for"
    assert plan.tile == build_backward_plan("bfloat16", head_dim, head_dim, False, False, ALL).tile, "the same blocks"


def test_landings_are_said_where_consumers_add_in_an_order():
    for plan in every_backward_plan():
        is_said = plan.is_deterministic and not plan.tile.has_dq_staging
        assert ("landed" in plan.schedule.split()) == is_said, plan.name


def test_very_short_and_long_tiles_are_a_cta_each():
    """And have no converters, which also need idle warps, and room."""
    for seqlen_k, is_persistent in ((1, False), (256, False), (257, True), (8191, True), (8192, False), (100_000, False)):
        for features in (frozenset(), frozenset({"deterministic"})):
            sizes = 2, 300, seqlen_k, 8, 2, 64, 64
            plan = backward_plan(AttentionProblem("dense", "bfloat16", *sizes, ScoreSpec(0.1, MASKS["causal"]), features))
            assert plan.is_persistent == is_persistent, f"{seqlen_k} keys"
            assert plan.has_converters == (is_persistent and not features), f"{seqlen_k} keys, {set(features)}"
    for head_dim, has_converters in ((64, True), (96, True), (128, True), (192, False), (256, False)):
        plan = build_backward_plan("bfloat16", head_dim, head_dim, False, False, ALL, True)
        assert plan.has_converters == has_converters, f"head_dim {head_dim}"
        dk_and_dv = build_backward_plan("bfloat16", head_dim, head_dim, False, False, (False, True, True), True)
        assert not dk_and_dv.has_converters, "no dQ"
    for plan in every_backward_plan():
        assert plan.tile.has_dq_staging or not plan.has_converters, f"{plan.name}: nobody tells that dQ is complete"
        assert not (plan.tile.has_p_in_smem and plan.has_converters), f"{plan.name}: would spill"


def test_only_dq_is_summed_in_an_order():
    for needs in SUBSETS:
        plan = build_backward_plan("bfloat16", 128, 128, True, True, needs)
        assert plan.is_deterministic == needs[0], f"dK and dV of a block of keys are one CTA's; needs {needs}"
        assert not build_backward_plan("bfloat16", 128, 128, True, False, needs).is_deterministic, "nobody asked"


def test_backward_plan_of_a_problem():
    """Smallest tiles that hold the head dims; sums in order where the problem asks for it; all gradients by default."""
    for head_dim, head_dim_v in itertools.product((8, 64, 72, 136, 256), (40, 96, 128, 200)):
        for dtype, (mask, features) in itertools.product(
            ("bfloat16", "float16"), itertools.product(MASKS.values(), (frozenset(), frozenset({"deterministic"})))
        ):
            sizes = 2, 300, 400, 8, 2, head_dim, head_dim_v
            problem = AttentionProblem("dense", dtype, *sizes, ScoreSpec(0.1, mask), features)
            plan = backward_plan(problem)
            tiles = smallest_tile(head_dim), smallest_tile(head_dim_v)
            assert (plan.tile.head_dim, plan.tile.head_dim_v) == tiles, f"{problem}"
            assert (plan.dtype, plan.is_causal) == (dtype, mask.right == 0), f"{problem}"
            assert plan.is_deterministic == bool(features), f"{problem}"
            assert plan.heads_per_section == (4 if mask.right == 0 else 1), f"{problem}"
            assert (plan.needs_dq, plan.needs_dk, plan.needs_dv) == ALL, f"{problem}"
            assert backward_plan(problem, (False, True, True)).needs_dq is False, f"{problem}"


def test_three_plans_of_a_backward_call():
    """The same choice of the main kernel; the others have the tile of dq, and that of out."""
    sizes, scores = (2, 300, 400, 8, 2, 190, 72), ScoreSpec(0.1, MASKS["causal"])
    problem = AttentionProblem("dense", "float16", *sizes, scores, frozenset({"deterministic"}))
    plan, before, after = backward_plans(problem)
    assert plan == backward_plan(problem) and plan.is_deterministic, "of this problem"
    assert (before.dtype, before.head_dim_v, before.needs_dq) == ("float16", 96, True), "rows of out and dout, zeros for dq"
    assert (after.dtype, after.tile) == ("float16", plan.tile.dq), "the accumulator of the main kernel"
    assert backward_plans(problem, (False, True, False))[0].needs_dq is False, "as asked for"
