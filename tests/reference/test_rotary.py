"""Rotary embedding against products of complex numbers, and the properties that it is made for."""

import pytest
import torch

from cute_fa.reference.rotary import apply_rotary

SEQLEN, HEADS, HEAD_DIM, NUM_POSITIONS = 5, 2, 8, 20
LAYOUTS = pytest.mark.parametrize("interleaved", [True, False], ids=["interleaved", "halves"])


def random(*size, seed=0):
    return torch.randn(size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def as_complex(x, rotary_dim, interleaved):
    """The pairs of the first rotary_dim features as complex numbers (..., rotary_dim / 2)."""
    if interleaved:
        return torch.complex(x[..., 0:rotary_dim:2], x[..., 1:rotary_dim:2])
    return torch.complex(x[..., : rotary_dim // 2], x[..., rotary_dim // 2 : rotary_dim])


@LAYOUTS
@pytest.mark.parametrize("rotary_dim", [2, 4, 8], ids=["one-pair", "partial", "whole"])
@pytest.mark.parametrize("positions", [[0, 1, 2, 3, 4], [7] * 5, [19, 0, 3, 3, 11]], ids=["from-0", "all-at-7", "any"])
def test_pairs_are_multiplied_as_complex_numbers(positions, rotary_dim, interleaved):
    x, angles = random(SEQLEN, HEADS, HEAD_DIM), random(NUM_POSITIONS, rotary_dim // 2, seed=1)
    got = apply_rotary(x, angles.cos(), angles.sin(), torch.tensor(positions), interleaved)
    turned = as_complex(x, rotary_dim, interleaved) * torch.exp(1j * angles)[positions][:, None]
    torch.testing.assert_close(as_complex(got, rotary_dim, interleaved), turned, rtol=1e-13, atol=1e-13)
    assert torch.equal(got[..., rotary_dim:], x[..., rotary_dim:]), "features behind rotary_dim changed"
    assert got.shape == x.shape and got.dtype == x.dtype, f"{tuple(got.shape)} {got.dtype}"


@LAYOUTS
def test_one_pair_by_hand(interleaved):
    """A quarter turn takes (1, 0) to (0, 1) and (0, 1) to (-1, 0)."""
    cos, sin = torch.tensor([[0.0, 1.0]]), torch.tensor([[1.0, 0.0]])  # the second pair is not turned
    x = torch.tensor([[[1.0, 2.0, 3.0, 4.0]]])
    wanted = [-2.0, 1.0, 3.0, 4.0] if interleaved else [-3.0, 2.0, 1.0, 4.0]
    assert apply_rotary(x, cos, sin, torch.tensor([0]), interleaved)[0, 0].tolist() == wanted, "rotated vector"


@LAYOUTS
def test_products_depend_on_the_distance_alone(interleaved):
    angles = torch.arange(NUM_POSITIONS, dtype=torch.float64)[:, None] * torch.tensor([1.0, 0.3, 0.05, 0.01])
    q, k = random(1, HEADS, HEAD_DIM), random(1, HEADS, HEAD_DIM, seed=1)

    def turned(x, position):
        return apply_rotary(x, angles.cos(), angles.sin(), torch.tensor([position]), interleaved)

    def product(at_q, at_k):
        return (turned(q, at_q) * turned(k, at_k)).sum(-1)

    torch.testing.assert_close(product(3, 1), product(18, 16), rtol=1e-12, atol=1e-12, msg="distance 2")
    torch.testing.assert_close(product(9, 9), (q * k).sum(-1), rtol=1e-12, atol=1e-12, msg="distance 0")
    assert not torch.allclose(product(3, 1), product(3, 2)), "distances 2 and 1 agree"


@LAYOUTS
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
def test_sixteen_bits_are_rounded_once(dtype, interleaved):
    """cos and sin in x's dtype are taken as they are; the arithmetic is fp32's."""
    x, angles = random(64, 4, HEAD_DIM).to(dtype), random(64, HEAD_DIM // 2, seed=1)
    cos, sin, positions = angles.cos().to(dtype), angles.sin().to(dtype), torch.arange(64)
    got = apply_rotary(x, cos, sin, positions, interleaved)
    assert got.dtype == dtype, f"{got.dtype}"
    factor = torch.complex(cos.double(), sin.double())[:, None]
    turned = as_complex(x.double(), HEAD_DIM, interleaved) * factor
    got = as_complex(got.double(), HEAD_DIM, interleaved)
    for name, value, wanted in (("first", got.real, turned.real), ("second", got.imag, turned.imag)):
        # Half a unit of rounding, and fp32's own where the two products cancel.
        bound = 0.5 * torch.finfo(dtype).eps * wanted.abs() * 1.001 + 1e-6
        assert ((value - wanted).abs() <= bound).all(), f"{name} of the pairs: {(value - wanted).abs().max()}"


def test_wide_tables_keep_fp64():
    x, angles = random(SEQLEN, HEADS, HEAD_DIM), random(NUM_POSITIONS, 4, seed=1).float()
    got = apply_rotary(x, angles.cos(), angles.sin(), torch.arange(SEQLEN), True)
    factor = torch.complex(angles.cos().double(), angles.sin().double())[:SEQLEN, None]
    wanted = as_complex(x, HEAD_DIM, True) * factor
    torch.testing.assert_close(as_complex(got, HEAD_DIM, True), wanted, rtol=1e-13, atol=1e-13)
