"""Plans as keys, as names, and as what their kernels must be made of."""

import itertools
from dataclasses import FrozenInstanceError, replace

import pytest

from cute_fa.tuning.budget import BackwardTile, ForwardTile
from cute_fa.tuning.heuristics import HEAD_DIM_TILES, build_backward_plan
from cute_fa.tuning.plan import BackwardPlan, ForwardPlan, PostprocessPlan, PreprocessPlan, symbol

PLAN = ForwardPlan(
    dtype="bfloat16",
    tile=ForwardTile(128, 128, 128, 112, 2, num_q_stages=2),
    is_causal=True,
    has_turns=False,
)
# 192 rows of 192 and of 96 leave no room for a second Q and for O.
NARROW = ForwardTile(192, 96, 192, 64, 3, num_q_stages=1, has_o_staging=False)
UNEQUAL = replace(PLAN, dtype="float16", tile=NARROW, is_causal=False, has_turns=True)


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
    ],
    ids=["dtype", "q-stages", "kv-stages", "o-staging", "mask", "turns"],
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


UNUSUAL = {
    "one-q": ({"num_q_stages": 1}, {}, "-q1"),
    "three-kv": ({"num_kv_stages": 3}, {}, "-kv3"),
    "o-from-registers": ({"has_o_staging": False}, {}, "-direct"),
    "all": (
        {"num_q_stages": 1, "num_kv_stages": 3, "has_o_staging": False},
        {"has_turns": True},
        "-turns-q1-kv3-direct",
    ),
}


@pytest.mark.parametrize("of_tile, changes, words", UNUSUAL.values(), ids=UNUSUAL)
def test_name_says_what_is_not_usual(of_tile, changes, words):
    """128 rows with blocks of 112 keys of 128 have room for a second Q and for O."""
    plan = replace(PLAN, tile=replace(PLAN.tile, **of_tile), **changes)
    assert plan.name == f"forward-d128-bf16-causal-m128n112{words}", "after the order of issue"


def test_name_where_there_is_little_room():
    """One Q and O from registers are usual there."""
    name = "forward-d192-96-fp16-full-m192n64-turns"
    assert replace(UNEQUAL, tile=replace(NARROW, num_q_stages=2)).name == f"{name}-q2", "a second Q instead of O"
    assert replace(UNEQUAL, tile=replace(NARROW, has_o_staging=True)).name == f"{name}-staged", "O instead of it"


def test_required_opcodes():
    always = {"HGMMA", "UTMALDG", "USETMAXREG"}  # products, TMA loads, registers handed over
    assert set(PLAN.required_opcodes) == always | {"UTMASTG", "STSM"}, "O through shared memory and TMA"
    direct = replace(PLAN, tile=replace(PLAN.tile, has_o_staging=False))
    assert set(direct.required_opcodes) == always, "O from registers"


BACKWARD = BackwardPlan(
    dtype="bfloat16",
    tile=BackwardTile(128, 128, 64, 128),
    is_causal=True,
    is_deterministic=False,
    schedule="S dP",
    has_16bit_ds=False,
    needs_dq=True,
    needs_dk=True,
    needs_dv=True,
    is_persistent=False,
    heads_per_section=4,
)
BACKWARD_CHANGES = {
    "dtype": {"dtype": "float16"},
    "queries": {"tile": replace(BACKWARD.tile, tile_m=80)},
    "dq-staging": {"tile": replace(BACKWARD.tile, has_dq_staging=False)},
    "mask": {"is_causal": False},
    "deterministic": {"is_deterministic": True},
    "schedule": {"schedule": "dP S"},
    "arithmetic": {"has_16bit_ds": True},
    "dq": {"needs_dq": False},
    "dk": {"needs_dk": False},
    "dv": {"needs_dv": False},
    "section": {"heads_per_section": 8},
    "grid": {"is_persistent": True},
}


@pytest.mark.parametrize("changes", BACKWARD_CHANGES.values(), ids=BACKWARD_CHANGES)
def test_each_part_is_in_the_key_of_a_backward_plan(changes):
    other, again = replace(BACKWARD, **changes), replace(BACKWARD, tile=BackwardTile(128, 128, 64, 128))
    assert {BACKWARD: 1}[again] == 1, "hash and equality go by value"
    assert other != BACKWARD and repr(other) != repr(BACKWARD), "another kernel; files are keyed by the repr"


BACKWARD_NAMES = {
    "all": (BACKWARD, "backward-d128-bf16-causal-m64n128"),
    "dq-alone": (replace(BACKWARD, needs_dk=False, needs_dv=False), "backward-d128-bf16-causal-m64n128-dq"),
    "deterministic": (replace(BACKWARD, is_deterministic=True), "backward-d128-bf16-causal-m64n128-deterministic"),
    "both": (
        replace(BACKWARD, dtype="float16", is_causal=False, is_deterministic=True, needs_dk=False),
        "backward-d128-fp16-full-m64n128-deterministic-dq-dv",
    ),
    "unequal-dims": (replace(BACKWARD, tile=BackwardTile(192, 64, 64, 128)), "backward-d192-64-bf16-causal-m64n128"),
    "persistent": (replace(BACKWARD, is_persistent=True), "backward-d128-bf16-causal-m64n128-persistent"),
    "before": (PreprocessPlan("float16", 96, needs_dq=False), "preprocess-d96-fp16"),
    "before-dq": (PreprocessPlan("float16", 96, needs_dq=True), "preprocess-d96-fp16-zeros"),
    "after": (PostprocessPlan("bfloat16", BackwardTile(96, 64, 64, 128)), "postprocess-d96-bf16-m64"),
    "after-shared": (
        PostprocessPlan("bfloat16", BackwardTile(192, 192, 64, 64, has_p_in_smem=True)),
        "postprocess-d192-bf16-m64-shared",
    ),
}


@pytest.mark.parametrize("plan, name", BACKWARD_NAMES.values(), ids=BACKWARD_NAMES)
def test_names_of_a_backward_call(plan, name):
    assert plan.name == name, "direction, dims, dtype, mask, tile, order of sums, gradients"


def test_backward_names_tell_plans_apart():
    """Of every choice that heuristics have: two plans with one name would share a file and a function."""
    flags, subsets = (False, True), [needs for needs in itertools.product((True, False), repeat=3) if any(needs)]
    dims = HEAD_DIM_TILES, HEAD_DIM_TILES
    choices = itertools.product(("bfloat16", "float16"), *dims, flags, flags, subsets, flags)
    plans = {build_backward_plan(*choice) for choice in choices}
    # Order of sums only matters to dq, which four of seven subsets have.
    assert len(plans) == 2 * 25 * 2 * (7 + 4) * 2, "a plan for each choice"
    assert len({plan.name for plan in plans}) == len(plans), "and a name for each plan"


def test_required_opcodes_of_a_backward_call():
    always = {"HGMMA", "UTMALDG", "USETMAXREG"}
    stores = {"UTMASTG", "STSM"}  # dK and dV through shared memory and TMA
    assert set(BACKWARD.required_opcodes) == always | stores | {"UBLKRED"}, "dQ by bulk additions"
    direct = replace(BACKWARD, tile=replace(BACKWARD.tile, has_dq_staging=False))
    assert set(direct.required_opcodes) == always | stores | {"REDG"}, "dQ from registers"
    assert set(replace(BACKWARD, needs_dk=False, needs_dv=False).required_opcodes) == always | {"UBLKRED"}, "dQ alone"
    assert set(replace(BACKWARD, needs_dq=False, needs_dk=False).required_opcodes) == always | stores, "dV alone"
    for plan in (PreprocessPlan("bfloat16", 64, True), PostprocessPlan("bfloat16", BACKWARD.tile.dq)):
        assert plan.required_opcodes == (), "a kernel of plain loads and stores"


def test_shared_memory_of_a_backward_call():
    assert BACKWARD.smem_bytes == 198_656, "its tile's"
    assert replace(BACKWARD, is_persistent=True).smem_bytes == 198_656 + 2 * 8192, "and a chunk for each converter"
    for plan in (PreprocessPlan("bfloat16", 64, True), PostprocessPlan("bfloat16", BACKWARD.tile.dq)):
        assert plan.smem_bytes == 0, "rows stay in registers"


def test_counters_of_a_backward_call():
    """Tiles taken; of each head; of each converter of 132 CTAs; and of each block where sums have an order."""
    assert BACKWARD.num_counters(num_heads=6, num_blocks=30, num_ctas=132) == 1 + 6 + 2 * 132, "any order"
    in_order = replace(BACKWARD, is_deterministic=True)
    assert in_order.num_counters(num_heads=6, num_blocks=30, num_ctas=132) == 1 + 6 + 2 * 132 + 30, "in order"


def test_ds_is_what_dq_and_dk_come_from():
    for needs in itertools.product((True, False), repeat=3):
        plan = replace(BACKWARD, **dict(zip(("needs_dq", "needs_dk", "needs_dv"), needs)))
        assert plan.needs_ds == (needs[0] or needs[1]), f"dV = P^T dO has no dS; needs {needs}"


def test_symbol_is_a_c_identifier():
    assert symbol(UNEQUAL) == "cute_fa_forward_d192_96_fp16_full_m192n64_turns", symbol(UNEQUAL)
