"""The plans that are compiled and checked: few, different, and enough for every problem; and those that are timed."""

import itertools

import pytest

from cute_fa.core.mask_spec import MaskSpec
from cute_fa.core.problem import AttentionProblem, ScoreSpec
from cute_fa.tuning.budget import ForwardTile
from cute_fa.tuning.candidates import checked_plans, forward_candidates
from cute_fa.tuning.heuristics import backward_plan, backward_plans, forward_plan
from cute_fa.tuning.plan import BackwardPlan, ForwardPlan, PostprocessPlan, PreprocessPlan
from cute_fa.tuning.winners import FORWARD_WINNERS

TILES = (64, 96, 128, 192, 256)
DTYPES = ("bfloat16", "float16")
MASKS = (None, 0)  # right


def of_kind(kind):
    return [plan for plan in checked_plans() if isinstance(plan, kind)]


def pair_of(plan) -> tuple[int, int]:
    return plan.tile.head_dim, plan.tile.head_dim_v


def needs_of(plan) -> tuple[bool, bool, bool]:
    return plan.needs_dq, plan.needs_dk, plan.needs_dv


def test_few_and_different():
    plans = checked_plans()
    assert len(plans) <= 270, f"{len(plans)} plans of two seconds each"
    assert len(set(plans)) == len(plans), "a plan comes twice"
    assert len({plan.name for plan in plans}) == len(plans), "two plans have one name"


def test_every_pair_of_tiles_with_each_dtype_and_mask():
    """Forward all four of each pair; backward those of unequal dims in bf16 only."""
    backward = [plan for plan in of_kind(BackwardPlan) if all(needs_of(plan)) and not plan.is_deterministic]
    for pair in itertools.product(TILES, TILES):
        forward = {(plan.dtype, plan.is_causal) for plan in of_kind(ForwardPlan) if pair_of(plan) == pair}
        assert forward == set(itertools.product(DTYPES, (False, True))), f"all four of {pair}, got {forward}"
        found = {(plan.dtype, plan.is_causal) for plan in backward if pair_of(plan) == pair}
        dtypes = DTYPES if pair[0] == pair[1] else ("bfloat16",)
        assert found == set(itertools.product(dtypes, (False, True))), f"{dtypes} of {pair}, got {found}"


def test_variants_of_three_dims():
    """fp16 has another schedule than bf16 where both dims are 64."""
    subsets = {needs for needs in itertools.product((False, True), repeat=3) if any(needs) and not all(needs)}
    of_all = (True, True, True)
    others = {(False, of_all, False), (True, of_all, False), (True, of_all, True)}
    plans = [plan for plan in of_kind(BackwardPlan) if plan.is_causal]
    dims = 64, 128, 256
    for dtype, *pair in (*itertools.product(("bfloat16",), dims, dims), ("float16", 64, 64)):
        of_pair = [plan for plan in plans if plan.dtype == dtype and pair_of(plan) == tuple(pair)]
        found = {(plan.is_deterministic, needs_of(plan), plan.is_persistent) for plan in of_pair}
        wanted = {(False, needs, True) for needs in subsets} | (others if pair[0] == pair[1] else set())
        assert found >= wanted, f"{dtype} {pair}: got {found}"


def test_kernels_before_and_after():
    before = {(plan.dtype, plan.head_dim_v) for plan in of_kind(PreprocessPlan)}
    assert before == set(itertools.product(DTYPES, TILES)), "one for each dtype and width of out"
    after = {(plan.dtype, plan.tile.head_dim) for plan in of_kind(PostprocessPlan)}
    assert after == set(itertools.product(DTYPES, TILES)), "some for each dtype and width of dq"


def problems_of(sizes, heads):
    head_dims, head_dims_v = (8, 64, 72, 128, 136, 256), (8, 64, 96, 104, 192, 256)
    grid = itertools.product(DTYPES, head_dims, head_dims_v, MASKS, sizes, heads)
    for dtype, head_dim, head_dim_v, right, (batch, seqlen_q, seqlen_k), heads in grid:
        facts = batch, seqlen_q, seqlen_k, heads, heads, head_dim, head_dim_v
        yield AttentionProblem("dense", dtype, *facts, ScoreSpec(1.0, MaskSpec(right=right)))


def test_what_forward_calls_get_is_checked():
    plans = set(checked_plans())
    sizes = ((1, 1, 1), (1, 1, 4096), (2, 300, 300), (4, 2048, 2048), (4, 2049, 2049), (1, 8192, 128), (9, 4096, 4096))
    for problem in problems_of(sizes, (1, 16)):
        for num_sms in (78, 132):
            plan = forward_plan(problem, num_sms)
            assert plan in plans, f"{plan.name} for {problem}"


def test_what_backward_calls_get_is_checked():
    bf16 = {plan.name.replace("fp16", "bf16") for plan in of_kind(BackwardPlan)}
    plans = set(checked_plans())
    for problem in problems_of([(2, 300, 300)], (16,)):
        main, before, after = backward_plans(problem)
        assert main == backward_plan(problem), "the main kernel is the first"
        assert main in plans or main.name.replace("fp16", "bf16") in bf16, f"{main.name}, or in bf16, for {problem}"
        assert before in plans and after in plans, f"{before.name} and {after.name} for {problem}"


def test_some_of_what_long_backward_calls_get_is_checked():
    plans = set(checked_plans())
    for head_dim in (64, 128, 256):
        for features in (frozenset(), frozenset({"deterministic"})):
            sizes = 1, 9000, 9000, 4, 2, head_dim, head_dim
            problem = AttentionProblem("dense", "bfloat16", *sizes, ScoreSpec(1.0, MaskSpec(right=0)), features)
            plan = backward_plan(problem)
            assert plan in plans and not plan.is_persistent, f"{plan.name} for {problem}"


# head_dim, head_dim_v: the fewest and the most candidates that make a tuning run worth its time. Blocks of 192 and more
# columns leave room for few.
PAIRS = {
    "d64": (64, 64, 20, 60),
    "d96": (96, 96, 20, 60),
    "d128": (128, 128, 20, 60),
    "d192-128": (192, 128, 20, 60),
    "d192": (192, 192, 10, 60),
    "d256": (256, 256, 4, 60),
}
EQUAL_AND_UNEQUAL = list(itertools.product((64, 128, 256), repeat=2))
by_mask = pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])


def todays_plans(head_dim, head_dim_v, is_causal):
    """What calls get that are short or long, with few heads or with many."""
    scores = ScoreSpec(1.0, MaskSpec(right=0 if is_causal else None))
    for seqlen, heads in itertools.product((1, 64, 1024, 2048, 2049, 4096, 100_000), (1, 4096)):
        sizes = 1, seqlen, seqlen, heads, heads, head_dim, head_dim_v
        yield forward_plan(AttentionProblem("dense", "bfloat16", *sizes, scores), 132)


@by_mask
@pytest.mark.parametrize("head_dim, head_dim_v, fewest, most", PAIRS.values(), ids=PAIRS)
def test_candidates_are_legal_and_different(head_dim, head_dim_v, fewest, most, is_causal):
    plans = forward_candidates("float16", head_dim, head_dim_v, is_causal)
    assert fewest <= len(plans) <= most, f"{len(plans)} candidates"
    assert len(set(plans)) == len({plan.name for plan in plans}) == len(plans), "each once, with a name of its own"
    for plan in plans:
        t = plan.tile
        assert (plan.dtype, pair_of(plan), plan.is_causal) == ("float16", (head_dim, head_dim_v), is_causal), plan.name
        assert t.fits and t.tile_m == 64 * t.num_consumer_warpgroups, plan.name
        assert t.tile_n % 16 == 0 and 64 <= t.tile_n <= 192, f"{plan.name}: keys"


@by_mask
@pytest.mark.parametrize("head_dim, head_dim_v", EQUAL_AND_UNEQUAL, ids="{}".format)
def test_candidates_use_the_room_that_there_is(head_dim, head_dim_v, is_causal):
    """Every block that fits is there, with turns and without, and only today's plans have fewer stages than fit."""
    plans = forward_candidates("bfloat16", head_dim, head_dim_v, is_causal)
    tiles_of_today = {plan.tile for plan in todays_plans(head_dim, head_dim_v, is_causal)}
    rooms = list(itertools.product((1, 2), (2, 3), (False, True)))
    for num_warpgroups, tile_n in itertools.product((2, 3), range(64, 193, 16)):
        sizes = head_dim, head_dim_v, 64 * num_warpgroups, tile_n, num_warpgroups
        fitting = {room for room in rooms if ForwardTile(*sizes, *room).fits}
        best = {room for room in fitting if not any(all(map(int.__ge__, a, room)) for a in fitting - {room})}
        tiles = [ForwardTile(*sizes, *room) for room in best]
        wanted = {
            ForwardPlan("bfloat16", tile, is_causal, has_turns)
            for tile, has_turns in itertools.product(tiles, (False, True))
        }
        blocks = num_warpgroups, tile_n
        found = {plan for plan in plans if (plan.tile.num_consumer_warpgroups, plan.tile.tile_n) == blocks}
        of_today = {plan for plan in found if plan.tile in tiles_of_today}
        assert wanted <= found <= wanted | of_today, f"{num_warpgroups} warpgroups, {tile_n} keys"


@by_mask
@pytest.mark.parametrize("head_dim, head_dim_v", EQUAL_AND_UNEQUAL, ids="{}".format)
def test_candidates_have_todays_plans_first(head_dim, head_dim_v, is_causal):
    plans = forward_candidates("bfloat16", head_dim, head_dim_v, is_causal)
    today = set(todays_plans(head_dim, head_dim_v, is_causal))
    assert set(plans[: len(today)]) == today, f"got {plans[0].name} first"


def test_every_winner_is_checked():
    plans = set(checked_plans())
    for row, dtype in itertools.product(FORWARD_WINNERS, DTYPES):
        assert row.plan(dtype) in plans, f"{row} in {dtype}"
