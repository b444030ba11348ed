"""Candidates: the plans that are compiled and checked before they are trusted (`cute-fa inspect --all --check`)."""

from itertools import product

from cute_fa.core.dtypes import KERNEL_DTYPES
from cute_fa.tuning.heuristics import HEAD_DIM_TILES, build_forward_plan
from cute_fa.tuning.plan import ForwardPlan


def checked_plans() -> tuple[ForwardPlan, ...]:
    """Every plan that heuristics give."""
    masks = False, True
    narrow = product(KERNEL_DTYPES, HEAD_DIM_TILES, HEAD_DIM_TILES, masks, (2,))
    wide = product(KERNEL_DTYPES, (64,), (64,), masks, (3,))
    return tuple(build_forward_plan(*choices) for choices in (*wide, *narrow))
