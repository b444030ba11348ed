"""Candidates: the plans that are compiled and checked before they are trusted (`cute-fa inspect --all --check`)."""

from cute_fa.tuning.heuristics import HEAD_DIM_TILES, build_forward_plan
from cute_fa.tuning.plan import ForwardPlan


def checked_plans() -> tuple[ForwardPlan, ...]:
    """Every equal pair of head_dim tiles with each dtype, mask and number of warpgroups that heuristics give; every unequal
    pair twice, so that each dtype and each mask is there."""
    plans = [build_forward_plan(dtype, 64, 64, causal, 3) for dtype in ("bfloat16", "float16") for causal in (False, True)]
    for head_dim in HEAD_DIM_TILES:
        for head_dim_v in HEAD_DIM_TILES:
            for dtype in ("bfloat16", "float16"):
                for causal in (False, True):
                    if head_dim == head_dim_v or causal == (dtype == "bfloat16"):
                        plans.append(build_forward_plan(dtype, head_dim, head_dim_v, causal, 2))
    return tuple(plans)
