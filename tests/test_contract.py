"""The numerical contract of the README, line by line, each against an expectation that the library has no part in."""

import math

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import cute_fa
from cute_fa.core.call import AttentionOptions
from cute_fa.core.errors import NotSupportedError
from cute_fa.host import validate
from cute_fa.testing.gradients import check_attention, check_varlen
from cute_fa.testing.inputs import SHAPES, packings
from cute_fa.testing.inputs import options as named_options
from cute_fa.testing.plain import plain_attention

NEG_INF = -torch.inf


def leaves(seqlen_q=6, seqlen_k=9, heads_q=4, heads_kv=2, dtype=torch.float64, batch=2, head_dim=8):
    """q, k, v that require gradients; v is narrower, so that a swap with k would not go unseen."""
    generator = torch.Generator().manual_seed(seqlen_q * 100 + seqlen_k)
    shapes = (
        (batch, seqlen_q, heads_q, head_dim),
        (batch, seqlen_k, heads_kv, head_dim),
        (batch, seqlen_k, heads_kv, head_dim - 3),
    )
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_() for shape in shapes]


def packed(q, k, v):
    """Dense leaves as leaves of a packed call: (batch * seqlen, heads, head_dim)."""
    return [x.detach().flatten(0, 1).requires_grad_() for x in (q, k, v)]


def ints(*values):
    return torch.tensor(values, dtype=torch.int32)


def cu_seqlens(*lengths):
    return ints(0, *lengths).cumsum(0, dtype=torch.int32)


def assert_same(found, wanted, what, tolerance=1e-10):
    """Equal dtypes, shapes and infinities; values within `tolerance`, 0 for every bit."""
    torch.testing.assert_close(found, wanted, rtol=tolerance, atol=tolerance, msg=lambda text: f"{what}: {text}")


def picture(seqlen_q, seqlen_k, **options):
    """What each query sees, read off uniform weights: one string a query, # where it sees the key."""
    q, k = torch.zeros(1, seqlen_q, 1, 8), torch.zeros(1, seqlen_k, 1, 8)
    v = torch.eye(seqlen_k)[None, :, None]
    out = cute_fa.flash_attn_func(q, k, v, **options)[0, :, 0]
    for row in out[out.any(dim=1)]:
        weights = row[row > 0]
        assert_same(weights, torch.full_like(weights, 1 / len(weights)), "uniform weights", 1e-6)
    return ["".join("#" if seen else "." for seen in row) for row in out > 0]


PICTURES = [
    pytest.param(3, 5, {"causal": True}, ["###..", "####.", "#####"], id="causal-more-keys"),
    pytest.param(5, 3, {"causal": True}, ["...", "...", "#..", "##.", "###"], id="causal-more-queries"),
    pytest.param(4, 4, {"causal": True}, ["#...", "##..", "###.", "####"], id="causal-square"),
    pytest.param(3, 5, {"window_size": (1, 0)}, [".##..", "..##.", "...##"], id="window-left-and-zero"),
    pytest.param(4, 4, {"window_size": (1, 1)}, ["##..", "###.", ".###", "..##"], id="window-both-sides"),
    pytest.param(3, 4, {"window_size": (0, 0)}, [".#..", "..#.", "...#"], id="window-diagonal"),
    pytest.param(3, 5, {"window_size": (1, -1)}, [".####", "..###", "...##"], id="window-left-alone"),
    pytest.param(3, 5, {"window_size": (1, None)}, [".####", "..###", "...##"], id="window-left-alone-none"),
    pytest.param(3, 5, {"window_size": (-1, 1)}, ["####.", "#####", "#####"], id="window-right-alone"),
    pytest.param(3, 5, {"window_size": (None, 1)}, ["####.", "#####", "#####"], id="window-right-alone-none"),
    pytest.param(2, 3, {"window_size": (None, -1)}, ["###", "###"], id="window-unbounded"),
    pytest.param(5, 2, {"window_size": (1, 1)}, ["..", "..", "#.", "##", "##"], id="window-more-queries"),
    pytest.param(3, 5, {"window_size": (1, 9), "causal": True}, [".##..", "..##.", "...##"], id="window-causal"),
    pytest.param(4, 4, {"attention_chunk": 3}, ["###.", "###.", "###.", "...#"], id="chunk"),
    pytest.param(3, 5, {"attention_chunk": 3, "causal": True}, ["###..", "...#.", "...##"], id="chunk-causal"),
]


@pytest.mark.parametrize("seqlen_q, seqlen_k, options, drawn", PICTURES)
def test_masks(seqlen_q, seqlen_k, options, drawn):
    assert picture(seqlen_q, seqlen_k, **options) == drawn, f"{options} of {seqlen_q} queries and {seqlen_k} keys"


@pytest.mark.parametrize("side", [-2, -7], ids=str)
def test_other_negative_windows_raise(side):
    for window in ((side, 0), (0, side)):
        with pytest.raises(ValueError, match="^window_size: expected"):
            cute_fa.flash_attn_func(*leaves(), window_size=window)


FORMULAS = {
    "full": {},
    "causal": {"causal": True},
    "window": {"window_size": (3, 1)},
    "window-left": {"window_size": (2, None)},
    "chunk": {"attention_chunk": 4},
    "scale": {"softmax_scale": 0.9},
    "scale-negative": {"softmax_scale": -0.7},
    "softcap": {"softcap": 1.5},
    "alibi": {"alibi_slopes": torch.tensor([0.5, 0.25, -0.1, 1.0], dtype=torch.float64)},
    "alibi-batch": {"alibi_slopes": torch.tensor([[0.5, 0.25, 0.1, 1.0], [0.3, 0.0, 2.0, 0.7]], dtype=torch.float64)},
    "all": {
        "causal": True,
        "window_size": (4, -1),
        "softcap": 2.0,
        "softmax_scale": 0.8,
        "alibi_slopes": torch.tensor([0.5, 0.25, -0.1, 1.0], dtype=torch.float64),
    },
}
LENGTHS = {"more-keys": (5, 9), "more-queries": (9, 5), "square": (7, 7), "one-query": (1, 6)}


@pytest.mark.parametrize("with_sink", [False, True], ids=["no-sink", "sink"])
@pytest.mark.parametrize("seqlen_q, seqlen_k", LENGTHS.values(), ids=LENGTHS)
@pytest.mark.parametrize("options", FORMULAS.values(), ids=FORMULAS)
def test_out_lse_and_gradients_are_the_formula(options, seqlen_q, seqlen_k, with_sink):
    """In float64, so that a wrong term cannot hide in rounding; grouped heads; lse takes part in the loss."""
    inputs = leaves(seqlen_q, seqlen_k)
    sink = {"learnable_sink": torch.tensor([0.5, -1.0, 2.0, 0.0]).double().requires_grad_()} if with_sink else {}
    found = list(cute_fa.flash_attn_func(*inputs, **options, **sink, return_lse=True))
    wanted = list(plain_attention(*inputs, **options, **sink))
    weights = [torch.randn_like(x) for x in found]
    inputs += sink.values()

    for results in (found, wanted):
        out, lse = results
        loss = (out * weights[0]).sum() + (lse.nan_to_num(neginf=0) * weights[1]).sum()
        results += torch.autograd.grad(loss, inputs)
    for name, ours, other in zip(("out", "lse", "dq", "dk", "dv", "dsink"), found, wanted):
        assert_same(ours, other, name)


def test_numbers_by_hand():
    """One query at position 2 of three keys: scale 0.5, softcap 2, then ALiBi -0.25 * |2 - j|, then the softmax."""
    q, k = torch.tensor([2.0, 0.0]).view(1, 1, 1, 2), torch.tensor([[1.0, 5], [3, 5], [-2, 5]]).view(1, 3, 1, 2)
    v = torch.tensor([[1.0], [10.0], [100.0]]).view(1, 3, 1, 1)
    options = dict(softmax_scale=0.5, softcap=2.0, alibi_slopes=torch.tensor([0.25]), return_lse=True)
    out, lse = cute_fa.flash_attn_func(*(x.double() for x in (q, k, v)), **options)
    scores = [2 * math.tanh(0.5 * s / 2) - 0.25 * distance for s, distance in ((2, 2), (6, 1), (-4, 0))]
    weights = [math.exp(score) for score in scores]
    assert lse.item() == pytest.approx(math.log(sum(weights)), rel=1e-12), "natural log of the sum of the final scores"
    wanted = sum(w * value for w, value in zip(weights, (1, 10, 100))) / sum(weights)
    assert out.item() == pytest.approx(wanted, rel=1e-12), "out"


def test_heads_share_keys_in_order():
    """Query head h reads key-value head h // group."""
    q, k = torch.zeros(1, 2, 6, 8), torch.zeros(1, 3, 2, 8)
    v = torch.tensor([10.0, 20.0]).view(1, 1, 2, 1).expand(1, 3, 2, 1)
    out = cute_fa.flash_attn_func(q, k, v)
    wanted = torch.tensor([10.0, 10, 10, 20, 20, 20])
    assert_same(out[0, 0, :, 0], wanted, "heads 0 to 2 read head 0, heads 3 to 5 head 1", 1e-6)


@pytest.mark.parametrize("seqlen_q, seqlen_k, nearest", [(2, 5, [3, 4]), (5, 2, [0, 0, 0, 0, 1]), (4, 4, [0, 1, 2, 3])],
                         ids=["more-keys", "more-queries", "square"])  # fmt: skip
def test_alibi_favours_the_nearest_key(seqlen_q, seqlen_k, nearest):
    """A steep positive slope leaves only the key nearest to i + seqlen_k - seqlen_q; a negative one the farthest."""
    q, k, v = torch.zeros(1, seqlen_q, 1, 8), torch.zeros(1, seqlen_k, 1, 8), torch.eye(seqlen_k)[None, :, None]
    out = cute_fa.flash_attn_func(q, k, v, alibi_slopes=torch.tensor([100.0]))
    assert out[0, :, 0].argmax(dim=-1).tolist() == nearest, "the nearest key"
    assert_same(out.amax(dim=-1), torch.ones(1, seqlen_q, 1), "no other key", 1e-6)
    if seqlen_q == seqlen_k:
        out = cute_fa.flash_attn_func(q, k, v, alibi_slopes=torch.tensor([-100.0]))
        assert out[0, [0, -1], 0].argmax(dim=-1).tolist() == [seqlen_k - 1, 0], "the farthest key"


# Rows without a key, beside rows with one: causal and a window with more queries than keys, and no keys at all.
EMPTY_ROWS = {
    "causal": (6, 4, {"causal": True}, [True, True, False, False, False, False]),
    "window": (6, 3, {"window_size": (0, 0)}, [True, True, True, False, False, False]),
    "no-keys": (3, 0, {}, [True, True, True]),
    "dropout": (6, 4, {"causal": True, "dropout_p": 0.5}, [True, True, False, False, False, False]),
    "softcap": (6, 4, {"causal": True, "softcap": 1.0}, [True, True, False, False, False, False]),
    "alibi": (6, 4, {"causal": True, "alibi_slopes": torch.ones(4)}, [True, True, False, False, False, False]),
}


@pytest.mark.parametrize("dlse", [None, 1.0, torch.inf, torch.nan], ids=["no-lse", "lse", "lse-inf", "lse-nan"])
@pytest.mark.parametrize("seqlen_q, seqlen_k, options, is_empty", EMPTY_ROWS.values(), ids=EMPTY_ROWS)
def test_rows_without_a_key(seqlen_q, seqlen_k, options, is_empty, dlse):
    """dlse is what the loss sends into lse at these rows; exp(lse), lse ** 2 and their like make it inf or NaN."""
    inputs, is_empty = leaves(seqlen_q, seqlen_k), torch.tensor(is_empty)
    out, lse = cute_fa.flash_attn_func(*inputs, **options, return_lse=True)
    assert (out[:, is_empty] == 0).all(), "out is 0"
    assert (lse[:, :, is_empty] == NEG_INF).all(), "lse is -inf"
    assert lse[:, :, ~is_empty].isfinite().all(), "rows with a key have a finite lse"
    grad_lse = torch.ones_like(lse).masked_fill(is_empty, 0.0 if dlse is None else dlse)
    dout = torch.ones_like(out)
    outputs, grads = ((out,), (dout,)) if dlse is None else ((out, lse), (dout, grad_lse))
    dq, dk, dv = torch.autograd.grad(outputs, inputs, grads, retain_graph=True)
    assert (dq[:, is_empty] == 0).all(), "their queries get no gradient"
    assert all(grad.isfinite().all() for grad in (dq, dk, dv)), "NaN or infinity in a gradient"
    # Nor do they reach the keys: without these rows the gradients of k and v are the same.
    clean = [torch.zeros_like(grads[0]), *(g.clone() for g in grads[1:])]
    clean[0][:, ~is_empty] = 1
    if dlse is not None:
        clean[1][..., is_empty] = 0
    for ours, other in zip((dk, dv), torch.autograd.grad(outputs, inputs[1:], clean)):
        assert_same(ours, other, "gradients of k and v")


def test_a_loss_of_exponentials_of_lse():
    inputs = leaves(6, 4)
    _, lse = cute_fa.flash_attn_func(*inputs, causal=True, return_lse=True)
    for grad in torch.autograd.grad((lse.square().sum() + torch.logaddexp(lse, lse).exp().sum()), inputs[:2]):
        assert grad.isfinite().all(), "rows with lse = -inf poison a gradient"


def test_rows_without_a_key_but_with_a_sink():
    inputs, sink = leaves(6, 4), torch.tensor([0.5, -1.0, 3.0, 0.0], dtype=torch.float64, requires_grad=True)
    out, lse = cute_fa.flash_attn_func(*inputs, causal=True, learnable_sink=sink, return_lse=True)
    assert (out[:, :2] == 0).all(), "out is 0"
    assert_same(lse[:, :, :2], sink[None, :, None].expand(2, 4, 2), "lse is the sink")
    chosen = torch.zeros_like(lse).index_fill(2, torch.tensor([0, 1]), 1)
    *grads, dsink = torch.autograd.grad(lse, (*inputs, sink), chosen)
    assert all((grad == 0).all() for grad in grads), "no key, no gradient"
    assert_same(dsink, torch.full_like(sink, 4), "lse = sink in 2 rows of 2 sequences")


def test_sink_takes_weight_and_has_no_value():
    """Equal scores 0 and a sink of log 2 beside two keys: half of the weight is the sink's."""
    q, k, v = torch.zeros(1, 1, 1, 8), torch.zeros(1, 2, 1, 8), torch.tensor([1.0, 3.0]).view(1, 2, 1, 1)
    sink = torch.tensor([math.log(2)])
    out, lse = cute_fa.flash_attn_func(q, k, v, learnable_sink=sink, return_lse=True)
    assert out.item() == pytest.approx(1.0), "(1 + 3) / 4"
    assert lse.item() == pytest.approx(math.log(4)), "the sink is part of lse"


def test_lse_of_packed_sequences():
    """(heads, total_q), the same numbers as sequence by sequence, and the same gradients."""
    q, k, v = leaves(6, 9)
    flat = packed(q, k, v)
    lengths = cu_seqlens(6, 6), cu_seqlens(9, 9)
    out, lse = cute_fa.flash_attn_varlen_func(*flat, *lengths, 6, 9, causal=True, return_lse=True)
    wanted_out, wanted_lse = plain_attention(q, k, v, causal=True)
    assert lse.shape == (4, 12), "heads first"
    assert_same(lse, torch.cat(wanted_lse.unbind(0), dim=1), "lse")
    assert_same(out, wanted_out.flatten(0, 1), "out")
    weights = torch.randn(12, dtype=torch.float64)
    grads = torch.autograd.grad((lse * weights).sum() + out.sum(), flat)
    wanted = torch.autograd.grad((wanted_lse * weights.view(2, 1, 6)).sum() + wanted_out.sum(), (q, k, v))
    for ours, other in zip(grads, wanted):
        assert_same(ours, other.flatten(0, 1), "gradient")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_lse_is_float32(dtype):
    inputs = leaves(dtype=dtype)
    _, lse = cute_fa.flash_attn_func(*inputs, return_lse=True)
    _, wanted = plain_attention(*(x.double() for x in inputs))
    assert lse.dtype == torch.float32, "not rounded to 16 bits"
    assert_same(lse, wanted.float(), "lse of exact products", 1e-5)


def poisoned(x, keep):
    """x with NaN outside the rows `keep`, as a new leaf."""
    bad = torch.full_like(x, torch.nan).detach()
    bad[keep] = x.detach()[keep]
    return bad.requires_grad_()


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"dropout_p": 0.5}], ids=["full", "causal", "dropout"])
@pytest.mark.parametrize("is_paged", [False, True], ids=["rows", "pages"])
def test_unused_rows_are_never_read(is_paged, options):
    """Behind cu_seqlens[-1] and beyond seqused all is NaN, dout and dlse as well; the used rows do not notice."""
    q, k, v = packed(*leaves(7, 9))
    used_q, used_k = [0, 1, 2, 5, 6, 7, 8], [0, 1, 2, 5, 6, 7, 8, 9]
    lengths = dict(cu_seqlens_q=cu_seqlens(5, 6), cu_seqlens_k=cu_seqlens(5, 6), max_seqlen_q=6, max_seqlen_k=6)
    lengths |= dict(seqused_q=ints(3, 4), seqused_k=ints(3, 5))
    if is_paged:  # 4 pages of 3 rows, page 1 in no sequence; the second sequence uses 2 rows of page 2
        lengths["block_table"] = ints([3, -1], [0, 2])
        used_k = [9, 10, 11, 0, 1, 2, 6, 7]
    found, reference = [], []
    for results, is_poisoned in ((found, True), (reference, False)):
        places = ((q, used_q), (k, used_k), (v, used_k))
        tensors = [poisoned(x, used) if is_poisoned else x for x, used in places]
        views = [tensors[0], *(x[:12].unflatten(0, (4, 3)) if is_paged else x for x in tensors[1:])]
        torch.manual_seed(3)
        out, lse = cute_fa.flash_attn_varlen_func(*views, **lengths, **options, return_lse=True)
        dout, dlse = torch.ones_like(out), torch.ones_like(lse)
        if is_poisoned:
            unused = [row for row in range(len(q)) if row not in used_q]
            dout[unused], dlse[:, unused] = torch.nan, torch.nan
        results += [out, lse.T, *torch.autograd.grad((out, lse), tensors, (dout, dlse))]
    for name, ours, other in zip(("out", "lse", "dq", "dk", "dv"), found, reference):
        used = used_k if name in ("dk", "dv") else used_q
        unused = [row for row in range(len(ours)) if row not in used]
        assert_same(ours[used], other[used], f"{name} of used rows", 0)
        assert (ours[used] != 0).any(), f"{name} of used rows is something"
        assert (ours[unused] == (NEG_INF if name == "lse" else 0)).all(), f"{name} of unused rows"


@pytest.mark.parametrize("is_paged", [False, True], ids=["slots", "pages"])
def test_unused_rows_of_a_cache_are_never_read(is_paged):
    generator = torch.Generator().manual_seed(0)
    shapes = ((2, 2, 4, 8), (3, 6, 2, 8), (3, 6, 2, 5))
    q, k_cache, v_cache = (torch.randn(shape, generator=generator) for shape in shapes)
    lengths = dict(cache_seqlens=ints(4, 5))
    if is_paged:  # 6 pages of 3 rows; sequence 0 uses 4 rows, sequence 1 five
        k_cache, v_cache = (x.view(6, 3, *x.shape[2:]) for x in (k_cache, v_cache))
        lengths["block_table"] = ints([5, 1], [2, 0])
        rows = [[(5, 0), (5, 1), (5, 2), (1, 0)], [(2, 0), (2, 1), (2, 2), (0, 0), (0, 1)]]
    else:
        lengths["cache_batch_idx"] = ints(2, 0)
        lengths["cache_leftpad"] = ints(1, 0)
        rows = [[(2, 1), (2, 2), (2, 3)], [(0, row) for row in range(5)]]
    used = tuple(torch.tensor(rows[0] + rows[1]).T)
    caches = [poisoned(x, used).detach() for x in (k_cache, v_cache)]
    out, lse = cute_fa.flash_attn_with_kvcache(q, *caches, **lengths, causal=True, return_softmax_lse=True)
    for b in range(2):
        index = tuple(torch.tensor(rows[b]).T)
        wanted = plain_attention(q[b : b + 1], k_cache[index][None], v_cache[index][None], causal=True)
        assert_same(out[b : b + 1], wanted[0], f"out of sequence {b}", 1e-5)
        assert_same(lse[b : b + 1], wanted[1], f"lse of sequence {b}", 1e-5)


GQA = next(shape for shape in SHAPES if shape.name == "gqa")
ACCURACY_SHAPES = [shape for shape in SHAPES if shape.name in ("one-token", "gqa", "d40-72")]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("option", named_options(SHAPES[0]))
@pytest.mark.parametrize("shape", ACCURACY_SHAPES, ids=lambda shape: shape.name)
def test_accuracy(shape, option, dtype):
    generator = torch.Generator().manual_seed(0)
    torch.manual_seed(0)
    tensors = shape.tensors(dtype, "cpu", generator)
    found = check_attention(cute_fa.flash_attn_func, *tensors, named_options(shape)[option], generator)
    for name, comparison in found.items():
        assert comparison.ok, f"{name}: {comparison}"


@pytest.mark.parametrize("option", ["causal", "softcap", "alibi-batch", "sink", "dropout", "lse"])
@pytest.mark.parametrize("packing", packings(GQA))
def test_accuracy_of_packed_calls(packing, option):
    generator = torch.Generator().manual_seed(0)
    torch.manual_seed(0)
    tensors = GQA.tensors(torch.bfloat16, "cpu", generator)
    found = check_varlen(
        cute_fa.flash_attn_varlen_func, *tensors, packings(GQA)[packing], named_options(GQA)[option], generator
    )
    for name, comparison in found.items():
        assert comparison.ok, f"{name}: {comparison}"


def gradients_of_many_sequences(dtype):
    """Of a sink, and of one page that all of 256 sequences share: sums of 256 parts, in `dtype`."""
    generator = torch.Generator().manual_seed(0)
    q, page, sink = (torch.randn(shape, generator=generator).bfloat16().to(dtype).requires_grad_()
                     for shape in ((1024, 1, 8), (1, 4, 1, 8), (1,)))  # fmt: skip
    lengths = cu_seqlens(*[4] * 256)
    rest = dict(block_table=torch.zeros(256, 1, dtype=torch.int32), learnable_sink=sink, return_lse=True)
    out, lse = cute_fa.flash_attn_varlen_func(q, page.detach(), page, lengths, lengths, 4, 4, **rest)
    return torch.autograd.grad((out, lse), (page, sink), (torch.ones_like(out), torch.ones_like(lse)))


def test_sums_over_sequences_are_not_rounded_on_the_way():
    """In bfloat16 a running sum that has reached 256 swallows addends below 1; only the last bit may be off."""
    for name, ours, exact in zip(("dv", "dsink"), *map(gradients_of_many_sequences, (torch.bfloat16, torch.float64))):
        error = ((ours.double() - exact).abs() / exact.abs()).max().item()
        assert error < torch.finfo(torch.bfloat16).eps, f"relative error of {name}"


@pytest.mark.parametrize("dropout_p", [0.0, 0.3], ids=["no-dropout", "dropout"])
def test_deterministic_gradients_are_bitwise_equal(dropout_p):
    inputs = leaves(70, 90, dtype=torch.bfloat16)
    runs = []
    for _ in range(2):
        torch.manual_seed(0)
        out = cute_fa.flash_attn_func(*inputs, dropout_p, causal=True, deterministic=True)
        runs.append(torch.autograd.grad(out, inputs, torch.ones_like(out)))
    assert all(map(torch.equal, *runs)), "two backward passes differ"


@pytest.fixture
def torch_deterministic():
    was_on = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(was_on)


def test_torch_switches_deterministic_on(torch_deterministic):
    problem = validate.dense(*leaves(), AttentionOptions())
    assert "deterministic" in problem.features, "torch.use_deterministic_algorithms(True) asks for it"
    q, k, v = leaves()
    cute_fa.flash_attn_varlen_func(*packed(q, k, v), cu_seqlens(12), cu_seqlens(18), 12, 18).sum().backward()


def test_deterministic_is_off_by_default():
    assert "deterministic" not in validate.dense(*leaves(), AttentionOptions()).features, "nobody asked"


def dropped(inputs, dropout_p=0.25, seed=None, **options):
    """out and the mask, True where an entry is kept."""
    if seed is not None:
        torch.manual_seed(seed)
    out, _, probs = cute_fa.flash_attn_func(*inputs, dropout_p, **options, return_attn_probs=True)
    return out, ~torch.signbit(probs)


def test_dropout_follows_the_seed():
    inputs = leaves(20, 30)
    first, second, other, again = (dropped(inputs, seed=seed)[0] for seed in (1, 1, 2, None))
    assert torch.equal(first, second), "the same seed, the same result"
    assert not torch.equal(first, other), "another seed, another mask"
    assert not torch.equal(other, again), "the next call, another mask"


def test_no_dropout_draws_nothing():
    state = torch.get_rng_state()
    cute_fa.flash_attn_func(*leaves(), 0.0, return_attn_probs=True)
    assert torch.equal(torch.get_rng_state(), state), "other random numbers of a program stay what they were"


def test_fork_rng_contains_dropout():
    inputs = leaves(20, 30)
    _, wanted = dropped(inputs, seed=1), dropped(inputs)[0]
    dropped(inputs, seed=1)
    with torch.random.fork_rng():
        dropped(inputs)
    assert torch.equal(dropped(inputs)[0], wanted), "the fork moved the generator"


@pytest.mark.parametrize("dropout_p", [0.25, 0.3, 0.9], ids=str)
def test_dropout_has_one_mask_forward_and_backward(dropout_p):
    """Kept entries are scaled by the exact probability of keeping, which comes in steps of 2^-16."""
    inputs = leaves(20, 30)
    out, keep = dropped(inputs, dropout_p, seed=1, causal=True)
    wanted, _ = plain_attention(*inputs, causal=True, keep=keep, dropout_p=round(dropout_p * 65536) / 65536)
    assert_same(out, wanted, "out", 1e-12)
    dout = torch.randn_like(out)
    grads, wanted_grads = (torch.autograd.grad(x, inputs, dout) for x in (out, wanted))
    for name, ours, other in zip(("dq", "dk", "dv"), grads, wanted_grads):
        assert_same(ours, other, name, 1e-12)


def test_returned_probabilities():
    """The normalised softmax, with a minus sign where dropout removed the entry; dv = (P keep / (1 - p))^T dout."""
    q, k, v = leaves(6, 9, heads_kv=4)
    torch.manual_seed(1)
    out, _, probs = cute_fa.flash_attn_func(q, k, v, 0.25, return_attn_probs=True)
    assert not probs.requires_grad, "probabilities are for tests and have no gradient"
    assert_same(probs.abs(), torch.softmax(torch.einsum("bihd,bjhd->bhij", q, k) * 8**-0.5, dim=-1).detach(), "softmax")
    weights, dout = probs * (probs > 0) / 0.75, torch.randn_like(out)
    assert_same(out, torch.einsum("bhij,bjhd->bihd", weights, v), "out")
    [dv] = torch.autograd.grad(out, v, dout)
    assert_same(dv, torch.einsum("bhij,bihd->bjhd", weights, dout), "dv")


def test_dropout_rate_and_expectation():
    """Deterministic by its seed; bounds are six standard deviations."""
    q, k, v = (x.detach()[:1].expand(2000, -1, -1, -1) for x in leaves(4, 5))
    out, keep = dropped((q, k, v), 0.3, seed=0)
    deviation = math.sqrt(0.3 * 0.7 / keep.numel())
    assert abs(keep.double().mean() - 0.7) < 6 * deviation, "share of kept entries"
    error = (out.mean(dim=0) - plain_attention(q[:1], k[:1], v[:1])[0][0]).abs()
    assert (error < 6 * out.std(dim=0) / math.sqrt(2000)).all(), "the mean over masks is attention without dropout"
    shares = keep.double().mean(dim=0)
    assert (shares - 0.7).abs().max() < 6 * math.sqrt(0.3 * 0.7 / 2000), "every entry of every head is dropped as often"


def test_dropout_counts_from_each_sequence():
    """The mask of an entry depends on batch, head, row and column alone: packed calls have the dense call's mask."""
    inputs = leaves(6, 9)
    out, _ = dropped(inputs, seed=4)
    torch.manual_seed(4)
    found = cute_fa.flash_attn_varlen_func(*packed(*inputs), cu_seqlens(6, 6), cu_seqlens(9, 9), 6, 9, 0.25)
    assert_same(found, out.flatten(0, 1), "out")


def test_checkpoint_recomputes_the_same_mask():
    inputs = leaves(20, 30)

    def attention(q, k, v):
        return cute_fa.flash_attn_func(q, k, v, 0.5, causal=True)

    torch.manual_seed(2)
    wanted = torch.autograd.grad(attention(*inputs).square().sum(), inputs)
    torch.manual_seed(2)
    found = torch.autograd.grad(checkpoint(attention, *inputs, use_reentrant=False).square().sum(), inputs)
    assert all(map(torch.equal, found, wanted)), "the recomputed forward has another mask"


AUTOCAST_CALLS = {
    "dense": lambda q, k, v: cute_fa.flash_attn_func(q, k, v, causal=True, return_lse=True),
    "varlen": lambda q, k, v: cute_fa.flash_attn_varlen_func(
        *(x.flatten(0, 1) for x in (q, k, v)), cu_seqlens(6, 6), cu_seqlens(9, 9), 6, 9, return_lse=True
    ),
    "kvpacked": lambda q, k, v: cute_fa.flash_attn_kvpacked_func(q, torch.stack((k, k.detach()), 2), return_lse=True),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32-is-cast", "bfloat16-stays"])
@pytest.mark.parametrize("call", AUTOCAST_CALLS.values(), ids=AUTOCAST_CALLS)
def test_autocast(call, dtype):
    """Exactly what a cast by hand gives: autocast reaches the inputs, not the arithmetic inside."""
    inputs = leaves(dtype=dtype)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out, lse = call(*inputs)
    wanted_out, wanted_lse = call(*(x.to(torch.bfloat16) for x in inputs))
    assert (out.dtype, lse.dtype) == (torch.bfloat16, torch.float32), "out is cast, lse is wide"
    assert_same(out, wanted_out, "out", 0)
    assert_same(lse, wanted_lse, "lse", 0)
    dout = torch.randn_like(out)
    for x, ours, other in zip(inputs, *(torch.autograd.grad(y, inputs[:2], dout) for y in (out, wanted_out))):
        assert ours.dtype == x.dtype, "leaves keep their dtype"
        assert_same(ours, other, "gradient", 0)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16], ids=["float64", "float16"])
def test_autocast_leaves_other_dtypes(dtype):
    inputs = leaves(dtype=dtype)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = cute_fa.flash_attn_func(*inputs, return_lse=True)
    for ours, other in zip(found, cute_fa.flash_attn_func(*inputs, return_lse=True)):
        assert_same(ours, other, f"{dtype} under autocast", 0)


def test_autocast_of_a_cache_call():
    q, k, v = (x.detach() for x in leaves(2, 2, dtype=torch.float32))
    results = []
    for dtype, is_on in ((torch.float32, True), (torch.bfloat16, False)):
        caches = [torch.ones(2, 8, 2, size, dtype=torch.bfloat16) for size in (8, 5)]
        new = dict(k=k.to(dtype), v=v.to(dtype), cache_seqlens=3, return_softmax_lse=True)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=is_on):
            results.append((*cute_fa.flash_attn_with_kvcache(q.to(dtype), *caches, **new), *caches))
    for name, ours, other in zip(("out", "lse", "k_cache", "v_cache"), *results):
        assert_same(ours, other, name, 0)


def test_autocast_switched_off_inside():
    inputs = leaves(dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.autocast("cpu", enabled=False):
        assert cute_fa.flash_attn_func(*inputs).dtype == torch.float32, "fp32 where autocast is off"


def test_second_derivative_is_refused():
    q, k, v = leaves()
    loss = cute_fa.flash_attn_func(q, k, v, causal=True).square().sum()
    [dq] = torch.autograd.grad(loss, q, create_graph=True)
    [wanted] = torch.autograd.grad(plain_attention(q, k, v, causal=True)[0].square().sum(), q)
    assert_same(dq.detach(), wanted, "the first derivative, with create_graph")
    with pytest.raises(NotSupportedError) as caught:
        dq.sum().backward()
    message = (
        "create_graph: expected a first derivative, got the derivative of a gradient. Differentiate plain torch "
        "attention twice instead, such as scaled_dot_product_attention with its math backend."
    )
    assert str(caught.value) == message, "message"
