"""The accuracy rule: its formula, its edge, and that nothing that is not a number passes."""

import math

import pytest
import torch

from cute_fa.testing.compare import compare

EPS = {torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10, torch.float32: 2.0**-23, torch.float64: 2.0**-52}
INF, NAN = math.inf, math.nan


def f64(*values):
    return torch.tensor(values, dtype=torch.float64)


@pytest.mark.parametrize(("softcap", "multiple"), [(False, 2), (True, 3)], ids=["plain", "softcap"])
@pytest.mark.parametrize("dtype", EPS, ids=lambda dtype: str(dtype)[6:])
def test_bound_is_a_multiple_of_torchs_error_and_half_a_unit_of_rounding(dtype, softcap, multiple):
    oracle = f64(1.0, -4.0, 0.0)
    got = torch.tensor([1.0, -4.0, 0.5], dtype=dtype)
    plain = torch.tensor([1.25, -4.0, 0.125], dtype=dtype)
    found = compare(got, plain, oracle, softcap=softcap)
    assert found.error == 0.5, "largest error of ours"
    assert found.torch_error == 0.25, "largest error of plain torch"
    assert found.bound == multiple * 0.25 + EPS[dtype] / 2 * 4, "bound"
    assert found.share == 0.5 / found.bound, "share"
    assert found.ok, "0.5 is within twice 0.25"


def test_errors_at_the_bound_pass_and_above_miss():
    """Oracle 2 in float64, torch's error 0.25: the bound is 0.5 + 2^-52, which 1.5 - 2^-52 has."""
    oracle, plain = f64(2.0), f64(2.25)
    at = compare(f64(1.5 - 2.0**-52), plain, oracle)
    assert at.error == at.bound == 0.5 + 2.0**-52, "the case is not at the bound"
    assert at.ok and at.share == 1, "an error at the bound"
    above = compare(f64(1.5 - 2.0**-51), plain, oracle)
    assert not above.ok and above.share > 1, "an error one step above the bound"


def test_signs_of_errors_do_not_matter():
    for error in (0.75, -0.75):
        found = compare(f64(1.0 + error), f64(1.25), f64(1.0))
        assert found.error == 0.75 and not found.ok, f"{found}"


def test_the_largest_error_decides():
    assert not compare(f64(*[1.0] * 99, 2.0), f64(*[1.0] * 100), f64(*[1.0] * 100)).ok, "one miss among a hundred"


def test_exact_results_have_no_share_of_a_bound_of_zero():
    found = compare(f64(0.0, 0.0), f64(0.0, 0.0), f64(0.0, 0.0))
    assert found.bound == 0 and found.ok and found.share == 0, f"{found}"
    found = compare(f64(0.0, 1e-300), f64(0.0, 0.0), f64(0.0, 0.0))
    assert not found.ok and found.share == INF, f"{found}"


@pytest.mark.parametrize("plain", [1.0, 9.0, NAN, INF], ids=["right", "wrong", "nan", "infinite"])
@pytest.mark.parametrize("oracle", [1.0, INF, -INF], ids=["finite", "plus", "minus"])
def test_nan_is_a_miss_whatever_torch_does(oracle, plain):
    found = compare(f64(NAN, 2.0), f64(plain, 2.0), f64(oracle, 2.0))
    assert found.error == INF, f"error {found.error}"
    assert not found.ok and found.share == INF, f"{found}, share {found.share}"


@pytest.mark.parametrize("plain", ["right", "also-wrong"])
@pytest.mark.parametrize(
    ("got", "oracle"),
    [(INF, -INF), (-INF, INF), (1.0, -INF), (INF, 1.0), (-INF, 1.0)],
    ids=["plus-for-minus", "minus-for-plus", "finite-for-minus", "plus-for-finite", "minus-for-finite"],
)
def test_infinities_must_agree(got, oracle, plain):
    found = compare(f64(got, 2.0), f64(oracle if plain == "right" else got, 2.0), f64(oracle, 2.0))
    assert found.error == INF, f"error {found.error}"
    assert not found.ok and found.share == INF, f"{found}, share {found.share}"


def test_infinities_that_agree_are_exact():
    values = f64(-INF, INF, 1.0)
    found = compare(values, values, values)
    assert found.error == 0 and found.ok, f"{found}"
    assert found.bound == 2.0**-53, "infinities take no part in the largest value"


def test_a_correctly_rounded_result_passes_where_torch_is_exact():
    """The floor of the bound: fp16 near 1 has steps of 2^-10, and 1 + 2^-11 lies half way between two numbers."""
    oracle = f64(1 + 2.0**-11)
    rounded = oracle.half()
    assert (rounded.double() - oracle).abs().item() == 2.0**-11, "the case is not half a step off"
    exact = oracle.clone()
    assert compare(rounded, exact, oracle).ok, "the nearest fp16 number"
    assert not compare(rounded + 2.0**-9, exact, oracle).ok, "a number two steps away"


def test_errors_beside_infinities_count():
    found = compare(f64(-INF, 1.5), f64(-INF, 1.125), f64(-INF, 1.0))
    assert found.error == 0.5 and found.torch_error == 0.125, f"{found}"
    assert not found.ok, "0.5 is more than twice 0.125"


def test_only_infinities():
    values = f64(-INF, -INF)
    found = compare(values, values, values)
    assert found.ok and found.bound == 0 and found.share == 0, f"{found}"


def test_empty_tensors_are_exact():
    found = compare(*(torch.empty(0, 4, dtype=dtype) for dtype in (torch.bfloat16, torch.bfloat16, torch.float64)))
    assert found.error == found.torch_error == found.bound == 0 and found.ok and found.share == 0, f"{found}"


def test_fp32_rounding_of_what_cancels_counts_only_where_the_truth_is_0():
    got, zeros = torch.tensor([3e-6, 0.0], dtype=torch.float16), torch.zeros(2, dtype=torch.float16)
    found = compare(got, zeros, f64(0, 0), cancelled=32.0)
    assert found.bound == 32 * 2.0**-23 and found.ok, "fp32's unit of rounding"
    assert not compare(got, zeros, f64(0, 0), cancelled=16.0).ok, "beyond the bound"
    assert not compare(got, zeros, f64(0, 0)).ok, "nothing cancels"
    beside = compare(got, zeros, f64(0, 2.0**-20), cancelled=1e9)
    assert beside.bound == 2 * 2.0**-20 + 2.0**-11 * 2.0**-20, "the usual bound where the truth is not 0"
