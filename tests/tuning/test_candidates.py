"""The plans that are compiled and checked: few, different, and enough for every problem."""

import itertools

from cute_fa.core.mask_spec import MaskSpec
from cute_fa.core.problem import AttentionProblem, ScoreSpec
from cute_fa.tuning.candidates import checked_plans
from cute_fa.tuning.heuristics import backward_plan, backward_plans, forward_plan
from cute_fa.tuning.plan import BackwardPlan, ForwardPlan, PostprocessPlan, PreprocessPlan

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
    assert len(plans) <= 260, f"{len(plans)} plans of two seconds each"
    assert len(set(plans)) == len(plans), "a plan comes twice"
    assert len({plan.name for plan in plans}) == len(plans), "two plans have one name"


def test_every_pair_of_tiles_with_each_dtype_and_mask():
    backward = [plan for plan in of_kind(BackwardPlan) if all(needs_of(plan)) and not plan.is_deterministic]
    for plans in (of_kind(ForwardPlan), backward):
        for pair in itertools.product(TILES, TILES):
            of_pair = {(plan.dtype, plan.is_causal) for plan in plans if pair_of(plan) == pair}
            assert of_pair == set(itertools.product(DTYPES, (False, True))), f"all four of {pair}, got {of_pair}"


def test_sample_of_other_backward_plans():
    """One for each of a tile with 128 queries, with P in registers, with P in shared memory."""
    subsets = {needs for needs in itertools.product((False, True), repeat=3) if any(needs) and not all(needs)}
    plans = [plan for plan in of_kind(BackwardPlan) if plan.dtype == "bfloat16" and plan.is_causal]
    for tile in (64, 128, 256):
        of_tile = {(plan.is_deterministic, needs_of(plan)) for plan in plans if pair_of(plan) == (tile, tile)}
        assert of_tile >= {(True, (True, True, True)), *((False, needs) for needs in subsets)}, f"{tile}: got {of_tile}"


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
    """Of the kernel after the main one, that of the same name: its tile has parts that it does not depend on."""
    plans = set(checked_plans())
    names = {plan.name for plan in plans}
    for problem in problems_of([(2, 300, 300)], (16,)):
        main, before, after = backward_plans(problem)
        assert main == backward_plan(problem), "the main kernel is the first"
        assert main in plans and before in plans and after.name in names, f"{main.name} for {problem}"
