"""The oracle against torch's own attention, against scalar loops, and its mask against literal conditions."""

import itertools
import math

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from cute_fa.testing.plain import plain_attention, plain_varlen, visible_keys


def inputs(seqlen_q, seqlen_k, heads_q=4, heads_kv=4, head_dim=3, head_dim_v=5, batch=2):
    generator = torch.Generator().manual_seed(0)
    sizes = ((seqlen_q, heads_q, head_dim), (seqlen_k, heads_kv, head_dim), (seqlen_k, heads_kv, head_dim_v))
    return [torch.randn(batch, *size, generator=generator, dtype=torch.float64).requires_grad_() for size in sizes]


def close(got, wanted, what):
    torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-12, msg=lambda text: f"{what}: {text}")


def check_against_sdpa(q, k, v, options, **sdpa):
    """out and the gradients of q, k, v."""
    out, _ = plain_attention(q, k, v, **options)
    wanted = scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), **sdpa).transpose(1, 2)
    close(out, wanted, "out")
    dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    grads = (torch.autograd.grad(x, (q, k, v), dout) for x in (out, wanted))
    for name, got, value in zip(("dq", "dk", "dv"), *grads):
        close(got, value, name)


@pytest.mark.parametrize("seqlens", [(5, 8), (7, 7), (9, 4)], ids=["fewer-queries", "equal", "more-queries"])
def test_full_is_sdpa(seqlens):
    check_against_sdpa(*inputs(*seqlens), {})


def test_causal_is_sdpa_for_equal_lengths():
    check_against_sdpa(*inputs(7, 7), {"causal": True}, is_causal=True)


@pytest.mark.parametrize(("heads_q", "heads_kv"), [(4, 2), (6, 1)], ids=["gqa", "mqa"])
def test_grouped_heads_are_sdpa(heads_q, heads_kv):
    check_against_sdpa(*inputs(5, 8, heads_q, heads_kv), {"causal": False}, enable_gqa=True)


def test_scale_is_sdpa():
    check_against_sdpa(*inputs(5, 8), {"softmax_scale": -0.7}, scale=-0.7)


@pytest.mark.parametrize(
    "mask",
    [{"causal": True}, {"window_size": (2, 1)}, {"window_size": (None, 2)}, {"attention_chunk": 3}],
    ids=["causal", "window", "window-right", "chunk"],
)
def test_masks_are_sdpa_with_a_boolean_mask(mask):
    visible = torch.tensor([[is_visible(i, j, 5, 8, **mask) for j in range(8)] for i in range(5)])
    assert visible.any(dim=1).all() and not visible.all(), "the case needs masked keys, but no empty row"
    check_against_sdpa(*inputs(5, 8), mask, attn_mask=visible)


def is_visible(i, j, seqlen_q, seqlen_k, causal=False, window_size=(-1, -1), attention_chunk=0):
    """The contract's conditions for one pair of integers."""
    position = i + seqlen_k - seqlen_q
    left, right = window_size
    if causal and j > position:
        return False
    if left not in (None, -1) and j < position - left:
        return False
    if right not in (None, -1) and j > position + right:
        return False
    return not attention_chunk or math.floor(j / attention_chunk) == math.floor(position / attention_chunk)


@pytest.mark.parametrize("attention_chunk", [0, 1, 3, 20], ids=lambda n: f"chunk{n}")
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_visible_keys_are_the_literal_conditions(causal, attention_chunk):
    for left, right in itertools.product((-1, None, 0, 1, 2, 9), repeat=2):
        for seqlen_q, seqlen_k in ((5, 8), (7, 7), (9, 4), (1, 6), (6, 1), (0, 3), (3, 0)):
            mask = dict(causal=causal, window_size=(left, right), attention_chunk=attention_chunk)
            got = visible_keys(seqlen_q, seqlen_k, **mask)
            assert got.shape == (seqlen_q, seqlen_k) and got.dtype == torch.bool, f"{tuple(got.shape)} {got.dtype}"
            for i in range(seqlen_q):
                for j in range(seqlen_k):
                    wanted = is_visible(i, j, seqlen_q, seqlen_k, **mask)
                    assert got[i, j].item() == wanted, f"({i}, {j}) of {seqlen_q} x {seqlen_k}, {mask}"


def test_positions_of_the_contract():
    """Two queries over four keys stand at keys 2 and 3; four queries over two keys begin at position -2."""
    assert visible_keys(2, 4, causal=True).int().tolist() == [[1, 1, 1, 0], [1, 1, 1, 1]], "bottom right"
    assert visible_keys(4, 2, causal=True).int().tolist() == [[0, 0], [0, 0], [1, 0], [1, 1]], "rows without a key"
    assert visible_keys(2, 4, window_size=(1, 0)).int().tolist() == [[0, 1, 1, 0], [0, 0, 1, 1]], "inclusive"
    assert visible_keys(3, 3, attention_chunk=2).int().tolist() == [[1, 1, 0], [1, 1, 0], [0, 0, 1]], "chunks"


def scalar_attention(q, k, v, keep=None, softmax_scale=1.0, softcap=0.0, dropout_p=0.0, slopes=None, sink=None, **mask):
    """out and lse of one batch by loops over Python floats; slopes and sink: one value a head."""
    q, k, v = (x[0].detach().tolist() for x in (q, k, v))
    seqlen_q, seqlen_k, heads = len(q), len(k), len(q[0])
    group = heads // len(k[0])
    outs, lses = [], []
    for h in range(heads):
        for i in range(seqlen_q):
            weights = {}
            for j in range(seqlen_k):
                if not is_visible(i, j, seqlen_q, seqlen_k, **mask):
                    continue
                score = softmax_scale * sum(a * b for a, b in zip(q[i][h], k[j][h // group]))
                if softcap:
                    score = softcap * math.tanh(score / softcap)
                if slopes:
                    score -= slopes[h] * abs(i + seqlen_k - seqlen_q - j)
                weights[j] = math.exp(score)
            total = sum(weights.values()) + (math.exp(sink[h]) if sink else 0)
            lses.append(math.log(total) if total else -math.inf)
            out = [0.0] * len(v[0][0])
            for j, weight in weights.items():
                factor = 1.0 if keep is None else keep[0, h, i, j].item() / (1 - dropout_p)
                out = [o + factor * weight / total * x for o, x in zip(out, v[j][h // group])]
            outs.append(out)
    shape = heads, seqlen_q
    out = torch.tensor(outs, dtype=torch.float64).view(*shape, -1).transpose(0, 1)[None]
    return out, torch.tensor(lses, dtype=torch.float64).view(1, *shape)


ALL = ("softcap", "slopes", "sink", "dropout")
SLOPES, SINK = [0.5, -0.1, 0.3, 1.0], [0.2, -1.0, 3.0, 0.0]


@pytest.mark.parametrize("mask", [{}, {"causal": True}, {"window_size": (1, 2)}], ids=["full", "causal", "window"])
@pytest.mark.parametrize("seqlens", [(4, 6), (6, 3)], ids=["fewer-queries", "more-queries"])
@pytest.mark.parametrize("names", [(), *((name,) for name in ALL), ALL], ids=lambda names: "-".join(names) or "plain")
def test_options_are_scalar_loops(names, seqlens, mask):
    q, k, v = inputs(*seqlens, heads_kv=2, batch=1)
    keep = torch.rand(1, 4, *seqlens, generator=torch.Generator().manual_seed(2)) > 0.3
    scalar, plain = {}, {}
    if "softcap" in names:
        scalar["softcap"] = plain["softcap"] = 0.7
    if "slopes" in names:
        scalar["slopes"], plain["alibi_slopes"] = SLOPES, torch.tensor(SLOPES, dtype=torch.float64)
    if "sink" in names:
        scalar["sink"], plain["learnable_sink"] = SINK, torch.tensor(SINK, dtype=torch.float64)
    if "dropout" in names:
        scalar |= dict(keep=keep, dropout_p=0.3)
        plain |= dict(keep=keep, dropout_p=0.3)
    out, lse = plain_attention(q, k, v, softmax_scale=0.6, **plain, **mask)
    wanted_out, wanted_lse = scalar_attention(q, k, v, softmax_scale=0.6, **scalar, **mask)
    close(out, wanted_out, "out")
    close(lse, wanted_lse, "lse")


def test_slopes_of_each_batch():
    q, k, v = inputs(4, 6)
    slopes = torch.tensor([SLOPES, SLOPES[::-1]], dtype=torch.float64)
    out, lse = plain_attention(q, k, v, alibi_slopes=slopes)
    for b in range(2):
        one = slice(b, b + 1)
        wanted = scalar_attention(q[one], k[one], v[one], softmax_scale=3**-0.5, slopes=slopes[b].tolist())
        close(out[one], wanted[0], f"out of batch {b}")
        close(lse[one], wanted[1], f"lse of batch {b}")


@pytest.mark.parametrize("sink", [None, torch.tensor(SINK, dtype=torch.float64)], ids=["plain", "sink"])
def test_rows_without_a_key_have_no_gradient(sink):
    q, k, v = inputs(6, 4)
    out, lse = plain_attention(q, k, v, causal=True, learnable_sink=sink)
    assert not out[:, :2].any(), "out"
    wanted = torch.full_like(lse[:, :, :2], -torch.inf) if sink is None else sink[None, :, None].expand(2, 4, 2)
    assert torch.equal(lse[:, :, :2], wanted), "lse"
    grads = torch.autograd.grad((out, lse), (q, k, v), (torch.ones_like(out), torch.ones_like(lse)))
    assert all(torch.isfinite(grad).all() for grad in grads), "a gradient is not finite"
    assert not grads[0][:, :2].any(), "dq of rows without a key"
    assert grads[0][:, 2:].any(), "dq of rows with a key"


@pytest.mark.parametrize("name", ["bfloat16", "float16", "float32", "float64"])
def test_dtypes_of_results(name):
    dtype = getattr(torch, name)
    out, lse = plain_attention(*(x.detach().to(dtype) for x in inputs(4, 6)))
    assert out.dtype == dtype, f"out is {out.dtype}"
    assert lse.dtype == (torch.float64 if dtype == torch.float64 else torch.float32), f"lse is {lse.dtype}"


def test_packed_sequences_are_one_call_each():
    """Rows 2 of q and 4 of k and v belong to none; sequence 1 is empty."""
    q, k, v = (x.detach()[0].requires_grad_() for x in inputs(8, 9))
    lengths_q, begins_q, lengths_k, begins_k = [2, 0, 5], [0, 2, 3], [4, 0, 4], [0, 4, 5]
    slopes = torch.tensor([SLOPES, SLOPES[::-1], SINK], dtype=torch.float64)
    out, lse = plain_varlen(q, k, v, lengths_q, lengths_k, begins_q, begins_k, causal=True, alibi_slopes=slopes)
    assert not out[2].any() and (lse[:, 2] == -torch.inf).all(), "the row of no sequence"
    for b, rows, keys in ((0, slice(0, 2), slice(0, 4)), (2, slice(3, 8), slice(5, 9))):
        wanted = scalar_attention(
            q[None, rows], k[None, keys], v[None, keys], softmax_scale=3**-0.5, slopes=slopes[b].tolist(), causal=True
        )
        close(out[None, rows], wanted[0], f"out of sequence {b}")
        close(lse[None, :, rows], wanted[1], f"lse of sequence {b}")
    dq, dk, dv = torch.autograd.grad((out, lse), (q, k, v), (torch.ones_like(out), torch.ones_like(lse)))
    assert not dq[2].any() and not dk[4].any() and not dv[4].any(), "gradients of rows of no sequence"
    assert dq[3:].any() and dk[5:].any() and dv[:4].any(), "no gradients of rows of sequences"
