"""The plans that are compiled and checked: few, different, and enough for every problem."""

import itertools

from cute_fa.core.mask_spec import MaskSpec
from cute_fa.core.problem import AttentionProblem, ScoreSpec
from cute_fa.tuning.candidates import checked_plans
from cute_fa.tuning.heuristics import forward_plan

TILES = (64, 96, 128, 192, 256)
DTYPES = ("bfloat16", "float16")


def pair_of(plan) -> tuple[int, int]:
    return plan.tile.head_dim, plan.tile.head_dim_v


def test_few_and_different():
    plans = checked_plans()
    assert len(plans) <= 150, f"{len(plans)} plans of two or three seconds each"
    assert len(set(plans)) == len(plans), "a plan comes twice"
    assert len({plan.name for plan in plans}) == len(plans), "two plans have one name"


def test_every_pair_of_tiles_with_each_dtype_and_mask():
    plans = checked_plans()
    for pair in itertools.product(TILES, TILES):
        of_pair = {(plan.dtype, plan.is_causal) for plan in plans if pair_of(plan) == pair}
        assert of_pair == set(itertools.product(DTYPES, (False, True))), f"all four of {pair}, got {of_pair}"


def test_what_problems_get_is_checked():
    plans = set(checked_plans())
    sizes = ((1, 1, 1), (1, 1, 4096), (2, 300, 300), (4, 2048, 2048), (4, 2049, 2049), (1, 8192, 128), (9, 4096, 4096))
    head_dims, head_dims_v = (8, 64, 72, 128, 136, 256), (8, 64, 96, 104, 192, 256)
    grid = itertools.product(DTYPES, head_dims, head_dims_v, (None, 0), sizes, (1, 16), (78, 132))
    for dtype, head_dim, head_dim_v, right, (batch, seqlen_q, seqlen_k), heads, num_sms in grid:
        facts = batch, seqlen_q, seqlen_k, heads, heads, head_dim, head_dim_v
        problem = AttentionProblem("dense", dtype, *facts, ScoreSpec(1.0, MaskSpec(right=right)))
        plan = forward_plan(problem, num_sms)
        assert plan in plans, f"{plan.name} for {problem}"
