"""The blocked algorithm against plain attention in float64: tiles, masks, empty rows, scores that need rescaling."""

import pytest
import torch

from cute_fa.core.mask_spec import MaskSpec
from cute_fa.reference.online import online_attention
from cute_fa.testing.plain import plain_attention

MASKS = {
    "full": (MaskSpec(), {}),
    "causal": (MaskSpec(right=0), {"causal": True}),
    "window": (MaskSpec(3, 2), {"window_size": (3, 2)}),
    "window-left": (MaskSpec(left=2), {"window_size": (2, -1)}),
    "chunk": (MaskSpec(chunk=5), {"attention_chunk": 5}),
    "causal-chunk": (MaskSpec(right=0, chunk=4), {"attention_chunk": 4, "causal": True}),
}


def inputs(seqlen_q, seqlen_k, head_dim=4, head_dim_v=3):
    generator = torch.Generator().manual_seed(0)
    sizes = ((seqlen_q, head_dim), (seqlen_k, head_dim), (seqlen_k, head_dim_v))
    return [torch.randn(size, generator=generator, dtype=torch.float64) for size in sizes]


def plain(q, k, v, scale, **mask):
    out, lse = plain_attention(*(x[None, :, None].double() for x in (q, k, v)), softmax_scale=scale, **mask)
    return out[0, :, 0], lse[0, 0]


def check(q, k, v, scale, mask="full", tolerance=1e-12, **tiles):
    out, lse = online_attention(q, k, v, scale, MASKS[mask][0], **tiles)
    wanted = plain(q, k, v, scale, **MASKS[mask][1])
    for got, value in zip((out, lse), wanted):
        torch.testing.assert_close(got.double(), value, rtol=tolerance, atol=tolerance)
    return out, lse


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("seqlens", [(12, 16), (11, 17), (13, 15), (3, 2), (17, 9)], ids=lambda s: f"{s[0]}x{s[1]}")
@pytest.mark.parametrize("tile", [(4, 8), (8, 4), (5, 3), (1, 1), (64, 128)], ids=lambda t: f"tile{t[0]}x{t[1]}")
def test_tiles_that_divide_and_do_not(tile, seqlens, mask):
    check(*inputs(*seqlens), 0.7, mask, tile_m=tile[0], tile_n=tile[1])


@pytest.mark.parametrize("lengths", [(130, 257), (64, 128)], ids=["ragged", "whole"])
def test_tiles_as_kernels_have_them(lengths):
    check(*inputs(*lengths), 0.7, "causal")


def test_rows_without_a_key():
    out, lse = check(*inputs(9, 4), 0.7, "causal", tile_m=4, tile_n=2)
    assert not out[:5].any(), "out of rows without a key is not 0"
    assert (lse[:5] == -torch.inf).all(), "lse of rows without a key is not -inf"
    assert torch.isfinite(lse[5:]).all(), "lse of rows with a key is not finite"


@pytest.mark.parametrize("seqlens", [(3, 0), (0, 3), (0, 0)], ids=["no-keys", "no-queries", "nothing"])
def test_empty_sequences(seqlens):
    out, lse = online_attention(*inputs(*seqlens), 0.7, MaskSpec())
    assert torch.equal(out, torch.zeros(seqlens[0], 3, dtype=torch.float64)), "out"
    assert torch.equal(lse, torch.full((seqlens[0],), -torch.inf, dtype=torch.float64)), "lse"


@pytest.mark.parametrize("step", [200.0, -200.0], ids=["growing", "falling"])
def test_scores_far_apart_survive_in_fp32(step):
    """Block after block is e^200 times (or one e^200th of) the last, where fp32 ends at e^88."""
    num_keys, tile_n = 24, 4
    block = torch.arange(num_keys) // tile_n
    q = torch.ones(3, 1)
    k = (step * block + torch.linspace(0, 1, tile_n).repeat(num_keys // tile_n))[:, None]
    v = torch.linspace(-1, 1, num_keys)[:, None] + block[:, None]
    out, lse = check(q, k, v, 1.0, tolerance=1e-5, tile_m=2, tile_n=tile_n)
    heaviest = v[-tile_n:] if step > 0 else v[:tile_n]
    assert heaviest.min() < out.min() and out.max() < heaviest.max(), "out is no average of the heaviest block"
    assert lse.min() > (1000 if step > 0 else 0), "lse is not that of the largest scores"


def test_negative_scores_beyond_the_exponent_of_fp32():
    """All exponentials would be 0 without the row's maximum."""
    q, k, v = torch.ones(2, 1), torch.full((6, 1), -500.0), torch.arange(6.0)[:, None]
    out, lse = check(q, k, v, 1.0, tolerance=1e-5, tile_n=4)
    assert (out == 2.5).all(), "equal scores average"


def test_one_key_is_its_value():
    q, k, v = inputs(5, 1)
    out, lse = check(q, k, v, 0.7)
    assert torch.equal(out, v.expand(5, -1)), "out"
    torch.testing.assert_close(lse, 0.7 * (q @ k.T)[:, 0], rtol=1e-14, atol=1e-14, msg="lse")


@pytest.mark.parametrize("tile_n", [3, 5, 64], ids=lambda n: f"tile{n}")
def test_equal_scores_average(tile_n):
    q, k, v = inputs(5, 10)
    out, lse = check(q, k[:1].expand(10, -1), v, 0.7, tile_n=tile_n)
    torch.testing.assert_close(out, v.mean(dim=0).expand(5, -1), rtol=1e-13, atol=1e-13, msg="out")
