"""Forward plans as keys, as names, and as what their kernels must be made of."""

from dataclasses import FrozenInstanceError, replace

import pytest

from cute_fa.tuning.budget import ForwardTile
from cute_fa.tuning.plan import ForwardPlan

PLAN = ForwardPlan(
    dtype="bfloat16",
    tile=ForwardTile(128, 128, 128, 112, 2, num_q_stages=2),
    is_causal=True,
    has_turns=False,
    heads_per_section=16,
)
UNEQUAL = replace(PLAN, dtype="float16", tile=ForwardTile(192, 96, 192, 64, 3), is_causal=False, has_turns=True)


def test_equal_plans_are_one_key():
    again = replace(PLAN, tile=ForwardTile(128, 128, 128, 112, 2, num_q_stages=2))
    assert again is not PLAN and {PLAN: 1}[again] == 1, "hash and equality go by value"
    with pytest.raises(FrozenInstanceError):
        PLAN.dtype = "float16"


@pytest.mark.parametrize(
    "changes",
    [
        {"dtype": "float16"},
        {"tile": replace(PLAN.tile, num_q_stages=1)},
        {"tile": replace(PLAN.tile, num_kv_stages=3)},
        {"tile": replace(PLAN.tile, has_o_staging=False)},
        {"is_causal": False},
        {"has_turns": True},
        {"heads_per_section": 32},
    ],
    ids=["dtype", "q-stages", "kv-stages", "o-staging", "mask", "turns", "section"],
)
def test_each_part_is_in_the_key(changes):
    other = replace(PLAN, **changes)
    assert other != PLAN and repr(other) != repr(PLAN), "another kernel; files are keyed by the repr"


@pytest.mark.parametrize(
    "plan, name",
    [
        (PLAN, "forward-d128-bf16-causal-m128n112"),
        (replace(PLAN, has_turns=True), "forward-d128-bf16-causal-m128n112-turns"),
        (UNEQUAL, "forward-d192-96-fp16-full-m192n64-turns"),
    ],
    ids=["causal", "turns", "unequal-dims"],
)
def test_name(plan, name):
    assert plan.name == name, "direction, dims, dtype, mask, tile, order of issue"


def test_required_opcodes():
    always = {"HGMMA", "UTMALDG", "USETMAXREG"}  # products, TMA loads, registers handed over
    assert set(PLAN.required_opcodes) == always | {"UTMASTG", "STSM"}, "O through shared memory and TMA"
    direct = replace(PLAN, tile=replace(PLAN.tile, has_o_staging=False))
    assert set(direct.required_opcodes) == always, "O from registers"
