"""Candidates: the plans that are compiled and checked before they are trusted (`cute-fa inspect --all --check`), and
those among which the fastest is sought (`python -m benchmarks.tune`)."""

from collections.abc import Iterator
from itertools import product

from cute_fa.core.dtypes import BFLOAT16, FLOAT16, KERNEL_DTYPES
from cute_fa.tuning.budget import REGISTER_SPLITS, ForwardTile
from cute_fa.tuning.heuristics import HEAD_DIM_TILES, build_backward_plan, build_forward_plan
from cute_fa.tuning.plan import (
    BackwardPlan,
    ForwardPlan,
    Plan,
    PostprocessPlan,
    PreprocessPlan,
)
from cute_fa.tuning.winners import FORWARD_WINNERS

MASKS = False, True  # is_causal
ALL_GRADIENTS = True, True, True
VARIANT_DIMS = 64, 128, 256

# Keys a block: 192 leave a head_dim_v of 128 just the registers that it needs.
TILE_NS = range(64, 193, 16)


def checked_plans() -> tuple[Plan, ...]:
    """Every plan that heuristics give, but of those of the main backward kernel a part, for time.

    fp16 is there for equal head dims, because it differs by instructions of the same kind. What a call needs fewer
    gradients for moves registers about: such variants are there in bf16, causal, for every pair of 64, 128 and 256, which
    have all kinds of tiles, and in fp16 for 64, which has a schedule of its own. Plans that are not persistent, and of sums in a
    fixed order, do less or other work in the warps beside: they are there where both dims are equal.
    """
    main = [build_backward_plan(*sizes, False, ALL_GRADIENTS, is_persistent=True) for sizes in _pairs_of_tiles()]
    checked = [plan for plan in main if plan.dtype == BFLOAT16.name or plan.tile.head_dim == plan.tile.head_dim_v]
    return *_forward_plans(), *checked, *_backward_variants(), *_plans_around(main)


def _pairs_of_tiles():
    return product(KERNEL_DTYPES, HEAD_DIM_TILES, HEAD_DIM_TILES, MASKS)


def _forward_plans() -> list[ForwardPlan]:
    """Of every measured winner, and of the rules, which serve where no winner holds."""
    winners = [row.plan(dtype) for dtype, row in product(KERNEL_DTYPES, FORWARD_WINNERS)]
    rules = [build_forward_plan(*sizes) for sizes in _pairs_of_tiles()]
    return list(dict.fromkeys([*winners, *rules]))


def forward_candidates(dtype: str, head_dim: int, head_dim_v: int, is_causal: bool) -> tuple[ForwardPlan, ...]:
    """Plans of one pair of compiled tiles, each once: today's first, then all that fit and may be faster.

    Room in shared memory is used: no candidate has less of stages and staging than another one of its blocks and turns.
    """
    plans = list(_todays_plans(dtype, head_dim, head_dim_v, is_causal))
    for num_warpgroups, tile_n, has_turns in product(REGISTER_SPLITS, TILE_NS, (True, False)):
        for tile in _tiles_without_waste(head_dim, head_dim_v, num_warpgroups, tile_n):
            plans.append(ForwardPlan(dtype, tile, is_causal, has_turns))
    return tuple(dict.fromkeys(plans))


def _todays_plans(dtype: str, head_dim: int, head_dim_v: int, is_causal: bool) -> Iterator[ForwardPlan]:
    """What `forward_plan` gives for any lengths and numbers of heads."""
    sizes = (head_dim, head_dim_v, is_causal)
    for row in FORWARD_WINNERS:
        if sizes == (row.head_dim, row.head_dim_v, row.is_causal):
            yield row.plan(dtype)
    yield build_forward_plan(dtype, *sizes)


def _tiles_without_waste(head_dim: int, head_dim_v: int, num_warpgroups: int, tile_n: int) -> list[ForwardTile]:
    """Those that fit and have no other one beside them with at least as many stages and as much staging."""
    sizes = (head_dim, head_dim_v, 64 * num_warpgroups, tile_n, num_warpgroups)
    choices = [rooms for rooms in product((1, 2), (2, 3), (False, True)) if ForwardTile(*sizes, *rooms).fits]
    return [
        ForwardTile(*sizes, *rooms)
        for rooms in choices
        if not any(other != rooms and all(a >= b for a, b in zip(other, rooms)) for other in choices)
    ]


def _backward_variants() -> list[BackwardPlan]:
    """Each proper subset of the gradients; and all, a CTA a tile, and deterministic."""
    subsets = [(False, needs, True) for needs in product((False, True), repeat=3) if 0 < sum(needs) < 3]
    others = [(False, ALL_GRADIENTS, False), (True, ALL_GRADIENTS, False), (True, ALL_GRADIENTS, True)]
    sizes = [*product((BFLOAT16.name,), VARIANT_DIMS, VARIANT_DIMS), (FLOAT16.name, 64, 64)]
    equal = [size for size in sizes if size[1] == size[2]]
    chosen = [*product(sizes, subsets), *product(equal, others)]
    return [build_backward_plan(*size, True, *variant) for size, variant in chosen]


def _plans_around(main: list[BackwardPlan]) -> list[PreprocessPlan | PostprocessPlan]:
    """Of the kernels before and after these, each once."""
    before = {PreprocessPlan(plan.dtype, plan.tile.head_dim_v, plan.needs_dq): None for plan in main}
    after = {PostprocessPlan(plan.dtype, plan.tile.dq): None for plan in main}
    return [*before, *after]
