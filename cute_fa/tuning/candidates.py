"""Candidates: the plans that are compiled and checked before they are trusted (`cute-fa inspect --all --check`)."""

from itertools import product

from cute_fa.core.dtypes import BFLOAT16, FLOAT16, KERNEL_DTYPES
from cute_fa.tuning.heuristics import HEAD_DIM_TILES, build_backward_plan, build_forward_plan
from cute_fa.tuning.plan import BackwardPlan, ForwardPlan, Plan, PostprocessPlan, PreprocessPlan

MASKS = False, True  # is_causal
ALL_GRADIENTS = True, True, True
VARIANT_DIMS = 64, 128, 256


def checked_plans() -> tuple[Plan, ...]:
    """Every plan that heuristics give, but of those of the main backward kernel a part, for time.

    fp16 is there for equal head dims, because it differs by instructions of the same kind. What a call needs fewer
    gradients for, or adds in a fixed order, moves registers about: such variants are there in bf16, causal, for every pair
    of 64, 128 and 256, which have all kinds of tiles, and in fp16 for 64, which has a schedule of its own.
    """
    main = [build_backward_plan(*sizes, False, ALL_GRADIENTS) for sizes in _pairs_of_tiles()]
    checked = [plan for plan in main if plan.dtype == BFLOAT16.name or plan.tile.head_dim == plan.tile.head_dim_v]
    return *_forward_plans(), *checked, *_backward_variants(), *_plans_around(main)


def _pairs_of_tiles():
    return product(KERNEL_DTYPES, HEAD_DIM_TILES, HEAD_DIM_TILES, MASKS)


def _forward_plans() -> list[ForwardPlan]:
    wide = product(KERNEL_DTYPES, (64,), (64,), MASKS, (3,))
    narrow = ((*sizes, 2) for sizes in _pairs_of_tiles())
    return [build_forward_plan(*choices) for choices in (*wide, *narrow)]


def _backward_variants() -> list[BackwardPlan]:
    """Deterministic with all gradients, and each proper subset of the gradients."""
    subsets = [needs for needs in product((False, True), repeat=3) if 0 < sum(needs) < 3]
    variants = [(True, ALL_GRADIENTS), *((False, needs) for needs in subsets)]
    sizes = [*product((BFLOAT16.name,), VARIANT_DIMS, VARIANT_DIMS), (FLOAT16.name, 64, 64)]
    return [build_backward_plan(*size, True, *variant) for size, variant in product(sizes, variants)]


def _plans_around(main: list[BackwardPlan]) -> list[PreprocessPlan | PostprocessPlan]:
    """Of the kernels before and after these, each once."""
    before = {PreprocessPlan(plan.dtype, plan.tile.head_dim_v): None for plan in main}
    after = {PostprocessPlan(plan.dtype, plan.tile.dq): None for plan in main}
    return [*before, *after]
