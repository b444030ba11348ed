"""Candidates: the plans that are compiled and checked before they are trusted (`cute-fa inspect --all --check`)."""

from itertools import product

from cute_fa.core.dtypes import BFLOAT16, KERNEL_DTYPES
from cute_fa.tuning.heuristics import HEAD_DIM_TILES, build_backward_plan, build_forward_plan
from cute_fa.tuning.plan import BackwardPlan, ForwardPlan, Plan, PostprocessPlan, PreprocessPlan

MASKS = False, True  # is_causal
ALL_GRADIENTS = True, True, True


def checked_plans() -> tuple[Plan, ...]:
    """Every plan that heuristics give for calls that need all gradients, and a sample of the others.

    The sample is causal, in bf16, at a head_dim of each kind of tile: deterministic, and each proper subset of the
    gradients. A gradient that is not needed only takes words out of a schedule, a fixed order of adds is a wait before
    each, so what a variant does to registers shows in one plan of a kind; all of them would take ten minutes.
    """
    main = [build_backward_plan(*sizes, False, ALL_GRADIENTS) for sizes in _pairs_of_tiles()]
    return *_forward_plans(), *main, *_backward_variants(), *_plans_around(main)


def _pairs_of_tiles():
    return product(KERNEL_DTYPES, HEAD_DIM_TILES, HEAD_DIM_TILES, MASKS)


def _forward_plans() -> list[ForwardPlan]:
    wide = product(KERNEL_DTYPES, (64,), (64,), MASKS, (3,))
    narrow = ((*sizes, 2) for sizes in _pairs_of_tiles())
    return [build_forward_plan(*choices) for choices in (*wide, *narrow)]


def _backward_variants() -> list[BackwardPlan]:
    subsets = [needs for needs in product((False, True), repeat=3) if 0 < sum(needs) < 3]
    variants = [(True, ALL_GRADIENTS), *((False, needs) for needs in subsets)]
    sizes = product((64, 128, 256), variants)
    return [build_backward_plan(BFLOAT16.name, dim, dim, True, *variant) for dim, variant in sizes]


def _plans_around(main: list[BackwardPlan]) -> list[PreprocessPlan | PostprocessPlan]:
    """Of the kernels before and after these. Those after differ by less than their tiles: one name, one kernel."""
    before = {PreprocessPlan(plan.dtype, plan.tile.head_dim_v): None for plan in main}
    after = {plan.name: plan for plan in (PostprocessPlan(plan.dtype, plan.tile) for plan in main)}
    return [*before, *after.values()]
