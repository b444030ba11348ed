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
    wanted = {(True, (True, True, True)), *((False, needs) for needs in subsets)}
    plans = [plan for plan in of_kind(BackwardPlan) if plan.is_causal]
    dims = 64, 128, 256
    for dtype, *pair in (*itertools.product(("bfloat16",), dims, dims), ("float16", 64, 64)):
        of_pair = [plan for plan in plans if plan.dtype == dtype and pair_of(plan) == tuple(pair)]
        found = {(plan.is_deterministic, needs_of(plan)) for plan in of_pair}
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
