"""Packed and paged attention against per-sequence calls of plain torch, with NaN wherever nothing may be read."""

import itertools

import pytest
import torch

from cute_fa.core.call import PackedSequences
from cute_fa.core.mask_spec import MaskSpec
from cute_fa.core.problem import ScoreSpec
from cute_fa.reference import dense, varlen
from cute_fa.reference.dense import ScoreTensors
from cute_fa.reference.dropout import keep_mask
from cute_fa.testing.plain import plain_attention, plain_varlen

HEADS, HEADS_KV, HEAD_DIM, HEAD_DIM_V, SCALE = 4, 2, 3, 5, 0.6
RNG_STATE = torch.tensor([31, 4])

# name: lengths of the queries, lengths of the keys.
LENGTHS = {
    "one": ([5], [7]),
    "mixed": ([3, 6, 1], [4, 2, 9]),
    "empty-at-the-beginning": ([0, 4, 3], [0, 3, 5]),
    "empty-in-the-middle": ([4, 0, 3], [3, 0, 5]),
    "empty-at-the-end": ([4, 3, 0], [3, 5, 0]),
    "no-queries": ([4, 0, 2], [3, 6, 2]),
    "no-keys": ([4, 3, 2], [3, 0, 2]),
    "all-empty": ([0, 0], [0, 0]),
    "no-sequences": ([], []),
}
# name: the specification, and the same as arguments of plain_attention.
SCORES = {
    "full": ({"mask": MaskSpec()}, {}),
    "causal": ({"mask": MaskSpec(right=0)}, {"causal": True}),
    "window-softcap": ({"mask": MaskSpec(2, 1), "softcap": 0.8}, {"window_size": (2, 1), "softcap": 0.8}),
    "chunk": ({"mask": MaskSpec(chunk=3)}, {"attention_chunk": 3}),
}


def close(got, wanted, what):
    torch.testing.assert_close(got, wanted, rtol=1e-10, atol=1e-10, msg=lambda text: f"{what}: {text}")


def offsets(lengths):
    return [0, *itertools.accumulate(lengths)]


def sequences_of(lengths_q, lengths_k, dtype=torch.int32, **more):
    cu_seqlens = (torch.tensor(offsets(lengths), dtype=dtype) for lengths in (lengths_q, lengths_k))
    return PackedSequences(*cu_seqlens, max(lengths_q, default=0), max(lengths_k, default=0), **more)


def random(*size):
    return torch.randn(size, generator=torch.Generator().manual_seed(sum(size)), dtype=torch.float64)


def inputs(rows_q, *rows_k):
    """q, k, v, dout, dlse for that many rows of queries, and rows (or pages and rows) of keys."""
    sizes = ((rows_q, HEADS, HEAD_DIM), (*rows_k, HEADS_KV, HEAD_DIM), (*rows_k, HEADS_KV, HEAD_DIM_V))
    return *(random(*size) for size in sizes), random(rows_q, HEADS, HEAD_DIM_V), random(HEADS, rows_q)


def spoiled(x, used, dim=0):
    """x with NaN in all places along `dim` that are not in `used`."""
    unused = torch.ones(x.shape[dim], dtype=torch.bool)
    unused[list(used)] = False
    return x.clone().index_fill_(dim, unused.nonzero()[:, 0], torch.nan)


def expected(q, k, v, dout, dlse, cut, options):
    """out, lse, dq, dk, dv by autograd of plain_attention on each sequence; cut: its (rows of q, index of k and v)."""
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    out = torch.zeros_like(dout)
    lse = torch.full_like(dlse, -torch.inf)
    grads = [torch.zeros_like(x) for x in leaves]
    for rows, index in cut:
        q_i, k_i, v_i = leaves[0][rows][None], leaves[1][index][None], leaves[2][index][None]
        out_i, lse_i = plain_attention(q_i, k_i, v_i, softmax_scale=SCALE, **options)
        out[rows], lse[:, rows] = out_i[0].detach(), lse_i[0].detach()
        upstream = dout[rows][None], dlse[:, rows][None]
        for total, grad in zip(grads, torch.autograd.grad((out_i, lse_i), leaves, upstream)):
            total += grad
    return out, lse, *grads


def check(tensors, sequences, cut, scores="full"):
    """Runs both directions and compares with `expected`; every input may hold NaN outside `cut`."""
    q, k, v, dout, dlse = tensors
    spec = ScoreSpec(SCALE, **SCORES[scores][0])
    out, lse, probs = varlen.forward(q, k, v, sequences, spec, ScoreTensors())
    dq, dk, dv, _ = varlen.backward(dout, dlse, q, k, v, sequences, spec, ScoreTensors())
    assert probs is None, "probabilities that nobody asked for"
    clean = [x.nan_to_num(nan=0.0) for x in tensors]
    wanted = expected(*clean, cut, SCORES[scores][1])
    for name, got, value in zip(("out", "lse", "dq", "dk", "dv"), (out, lse, dq, dk, dv), wanted):
        close(got, value, name)


def cut_of(lengths_q, lengths_k, used_q=None, used_k=None):
    """The rows of each sequence as lists, of which seqused may take the first few only."""
    used_q, used_k = used_q or lengths_q, used_k or lengths_k
    begins = zip(offsets(lengths_q), offsets(lengths_k))
    return [
        (list(range(begin_q, begin_q + length_q)), list(range(begin_k, begin_k + length_k)))
        for (begin_q, begin_k), length_q, length_k in zip(begins, used_q, used_k)
    ]


def rows_of(cut, side):
    return [row for rows in cut for row in rows[side]]


@pytest.mark.parametrize("scores", SCORES)
@pytest.mark.parametrize("name", LENGTHS)
def test_sequences_match_one_call_each(name, scores):
    lengths_q, lengths_k = LENGTHS[name]
    tensors = inputs(sum(lengths_q), sum(lengths_k))
    check(tensors, sequences_of(lengths_q, lengths_k), cut_of(lengths_q, lengths_k), scores)


@pytest.mark.parametrize("scores", SCORES)
def test_sequences_match_the_packed_oracle(scores):
    lengths_q, lengths_k = [3, 0, 6, 1], [4, 2, 3, 0]
    q, k, v, dout, dlse = inputs(10, 9)
    sequences, spec = sequences_of(lengths_q, lengths_k), ScoreSpec(SCALE, **SCORES[scores][0])
    out, lse, _ = varlen.forward(q, k, v, sequences, spec, ScoreTensors())
    grads = varlen.backward(dout, dlse, q, k, v, sequences, spec, ScoreTensors())[:3]
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    begins = offsets(lengths_q)[:-1], offsets(lengths_k)[:-1]
    wanted = plain_varlen(*leaves, lengths_q, lengths_k, *begins, softmax_scale=SCALE, **SCORES[scores][1])
    close(out, wanted[0].detach(), "out")
    close(lse, wanted[1].detach(), "lse")
    for name, got, value in zip(("dq", "dk", "dv"), grads, torch.autograd.grad(wanted, leaves, (dout, dlse))):
        close(got, value, name)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=["int32", "int64"])
def test_rows_behind_the_last_sequence_are_not_read(dtype):
    lengths_q, lengths_k = [3, 2], [4, 5]
    cut = cut_of(lengths_q, lengths_k)
    q, k, v, dout, dlse = inputs(8, 11)
    q, dout, dlse = (spoiled(x, range(5), dim) for x, dim in ((q, 0), (dout, 0), (dlse, 1)))
    k, v = (spoiled(x, range(9)) for x in (k, v))
    check((q, k, v, dout, dlse), sequences_of(lengths_q, lengths_k, dtype), cut, "causal")


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=["int32", "int64"])
@pytest.mark.parametrize("side", ["q", "k", "both"])
def test_rows_beyond_seqused_are_not_read(side, dtype):
    lengths_q, lengths_k = [4, 3, 2, 0], [5, 6, 3, 1]
    used_q = [2, 0, 2, 0] if side != "k" else lengths_q
    used_k = [5, 1, 0, 1] if side != "q" else lengths_k
    cut = cut_of(lengths_q, lengths_k, used_q, used_k)
    q, k, v, dout, dlse = inputs(9, 15)
    q, dout, dlse = (spoiled(x, rows_of(cut, 0), dim) for x, dim in ((q, 0), (dout, 0), (dlse, 1)))
    k, v = (spoiled(x, rows_of(cut, 1)) for x in (k, v))
    seqused = {}
    if side != "k":
        seqused["seqused_q"] = torch.tensor(used_q, dtype=dtype)
    if side != "q":
        seqused["seqused_k"] = torch.tensor(used_k, dtype=dtype)
    check((q, k, v, dout, dlse), sequences_of(lengths_q, lengths_k, dtype, **seqused), cut, "causal")


def test_keys_without_queries_get_no_gradient():
    """seqused_q of 0 leaves keys that nobody sees."""
    q, k, v, dout, dlse = inputs(4, 6)
    sequences = sequences_of([2, 2], [3, 3], seqused_q=torch.tensor([2, 0]))
    _, dk, dv, _ = varlen.backward(dout, dlse, q, k, v, sequences, ScoreSpec(SCALE, MaskSpec()), ScoreTensors())
    assert not dk[3:].any() and not dv[3:].any(), "gradient of unseen keys"
    assert dk[:3].any() and dv[:3].any(), "no gradient of seen keys"


# name: page size, lengths of the keys, block table (-1 in places that no key reaches), number of pages.
PAGES = {
    "shuffled": (4, [7, 4, 10], [[5, 2, -1], [0, -1, -1], [3, 6, 1]], 8),
    "shared": (3, [5, 3, 7], [[2, 4, -1], [2, -1, -1], [2, 0, 4]], 5),
    "one-page-twice": (2, [4, 3], [[1, 1], [1, 0]], 2),
    "size-one": (1, [3, 0, 2], [[4, 0, 2], [-1, -1, -1], [3, 1, -1]], 6),
    "size-above-lengths": (16, [5, 1], [[1], [0]], 3),
    "whole-pages": (2, [4, 2], [[3, 0], [1, -1]], 4),
}


def cut_of_pages(lengths_q, lengths_k, table, page_size):
    """As cut_of, with the index of keys a pair of lists: pages and rows in them."""
    cut = []
    for begin, length_q, length_k, pages in zip(offsets(lengths_q), lengths_q, lengths_k, table):
        positions = range(length_k)
        index = ([pages[p // page_size] for p in positions], [p % page_size for p in positions])
        cut.append((list(range(begin, begin + length_q)), index))
    return cut


def spoiled_pages(x, cut):
    """x with NaN in every row that no sequence reaches."""
    spoilt = torch.full_like(x, torch.nan)
    for _, index in cut:
        spoilt[index] = x[index]
    return spoilt


@pytest.mark.parametrize("scores", ["full", "causal"])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=["int32", "int64"])
@pytest.mark.parametrize("name", PAGES)
def test_pages(name, dtype, scores):
    """Every row of the pages beyond a length is NaN; gradients of shared pages add up."""
    page_size, lengths_k, table, num_pages = PAGES[name]
    lengths_q = [3, 4, 2][: len(lengths_k)]
    cut = cut_of_pages(lengths_q, lengths_k, table, page_size)
    q, k, v, dout, dlse = inputs(sum(lengths_q), num_pages, page_size)
    k, v = (spoiled_pages(x, cut) for x in (k, v))
    sequences = sequences_of(lengths_q, lengths_k, dtype, block_table=torch.tensor(table, dtype=dtype))
    check((q, k, v, dout, dlse), sequences, cut, scores)


def test_pages_with_seqused():
    page_size, lengths_k, table, num_pages = PAGES["shared"]
    used_q, used_k = [2, 3, 0], [4, 0, 6]
    cut = cut_of_pages([2, 3, 1], used_k, table, page_size)
    cut[2] = ([], cut[2][1])
    q, k, v, dout, dlse = inputs(6, num_pages, page_size)
    q, dout, dlse = (spoiled(x, range(5), dim) for x, dim in ((q, 0), (dout, 0), (dlse, 1)))
    k, v = (spoiled_pages(x, cut) for x in (k, v))
    seqused = dict(seqused_q=torch.tensor(used_q), seqused_k=torch.tensor(used_k))
    check((q, k, v, dout, dlse), sequences_of([2, 3, 1], lengths_k, block_table=torch.tensor(table), **seqused), cut)


def test_slopes_of_each_sequence():
    lengths_q, lengths_k = [3, 0, 4], [4, 2, 3]
    slopes = random(3, HEADS)
    q, k, v, dout, dlse = inputs(7, 9)
    sequences, spec, tensors = (
        sequences_of(lengths_q, lengths_k),
        ScoreSpec(SCALE, MaskSpec()),
        ScoreTensors(alibi_slopes=slopes),
    )
    out, lse, _ = varlen.forward(q, k, v, sequences, spec, tensors)
    grads = varlen.backward(dout, dlse, q, k, v, sequences, spec, tensors)[:3]
    for i, (rows, keys) in enumerate(cut_of(lengths_q, lengths_k)):
        leaves = [x[None].clone().requires_grad_() for x in (q[rows], k[keys], v[keys])]
        wanted = plain_attention(*leaves, softmax_scale=SCALE, alibi_slopes=slopes[i])
        close(out[rows], wanted[0][0].detach(), f"out of sequence {i}")
        close(lse[:, rows], wanted[1][0].detach(), f"lse of sequence {i}")
        wanted_grads = torch.autograd.grad(wanted, leaves, (dout[rows][None], dlse[:, rows][None]))
        for x, where, value in zip(grads, (rows, keys, keys), wanted_grads):
            close(x[where], value[0], f"gradients of sequence {i}")


def test_gradients_of_the_sink_add_up():
    lengths_q, lengths_k, sink = [3, 2, 4], [4, 0, 3], random(HEADS)
    q, k, v, dout, dlse = inputs(9, 7)
    sequences, spec, tensors = (
        sequences_of(lengths_q, lengths_k),
        ScoreSpec(SCALE, MaskSpec()),
        ScoreTensors(learnable_sink=sink),
    )
    out, lse, _ = varlen.forward(q, k, v, sequences, spec, tensors)
    *grads, dsink = varlen.backward(dout, dlse, q, k, v, sequences, spec, tensors)
    leaves = [x.clone().requires_grad_() for x in (q, k, v, sink)]
    begins = offsets(lengths_q)[:-1], offsets(lengths_k)[:-1]
    wanted = plain_varlen(*leaves[:3], lengths_q, lengths_k, *begins, softmax_scale=SCALE, learnable_sink=leaves[3])
    values = (*(x.detach() for x in wanted), *torch.autograd.grad(wanted, leaves, (dout, dlse)))
    for name, got, value in zip(("out", "lse", "dq", "dk", "dv", "dsink"), (out, lse, *grads, dsink), values):
        close(got, value, name)


def test_no_dlse_is_a_dlse_of_zero():
    q, k, v, dout, dlse = inputs(5, 7)
    arguments = (q, k, v, sequences_of([2, 3], [4, 3]), ScoreSpec(SCALE, MaskSpec()), ScoreTensors())
    without, with_zero = (varlen.backward(dout, x, *arguments)[:3] for x in (None, torch.zeros_like(dlse)))
    assert all(torch.equal(a, b) for a, b in zip(without, with_zero)), "gradients differ"


def test_dropout_is_that_of_a_padded_batch():
    """Sequence b drops what batch index b of a dense call drops, whatever the padding; probabilities tell by signs."""
    lengths_q, lengths_k, p = [3, 0, 20, 5], [4, 2, 17, 0], 0.25
    q, k, v, dout, dlse = inputs(28, 23)
    sequences, spec = sequences_of(lengths_q, lengths_k), ScoreSpec(SCALE, MaskSpec(), dropout_p=p)
    tensors, shape = ScoreTensors(rng_state=RNG_STATE), (4, HEADS, 24, 32)
    out, lse, probs = varlen.forward(q, k, v, sequences, spec, tensors, shape)
    grads = varlen.backward(dout, dlse, q, k, v, sequences, spec, tensors)[:3]
    keep = keep_mask(RNG_STATE, p, torch.arange(4), HEADS, 24, 32)
    dense_signed = dense.forward(random(4, 24, HEADS, 3), *(random(4, 32, HEADS_KV, 3) for _ in "kv"), spec, tensors)[2]
    assert torch.equal(torch.signbit(dense_signed), ~keep), "a padded dense call drops other entries"
    wanted_grads = [torch.zeros_like(x) for x in (q, k, v)]
    for i, (rows, keys) in enumerate(cut_of(lengths_q, lengths_k)):
        keep_i = keep[i : i + 1, :, : len(rows), : len(keys)]
        leaves = [x[None].clone().requires_grad_() for x in (q[rows], k[keys], v[keys])]
        out_i, lse_i = plain_attention(*leaves, softmax_scale=SCALE, keep=keep_i, dropout_p=p)
        close(out[rows], out_i[0].detach(), f"out of sequence {i}")
        close(lse[:, rows], lse_i[0].detach(), f"lse of sequence {i}")
        got = probs[i, :, : len(rows), : len(keys)]
        assert torch.equal(torch.signbit(got), ~keep_i[0]), f"signs of sequence {i}"
        assert probs[i].count_nonzero() == got.count_nonzero(), f"probabilities of the padding of sequence {i}"
        grads_i = torch.autograd.grad((out_i, lse_i), leaves, (dout[rows][None], dlse[:, rows][None]))
        for total, where, grad in zip(wanted_grads, (rows, keys, keys), grads_i):
            total[where] = grad[0]
    for name, got, value in zip(("dq", "dk", "dv"), grads, wanted_grads):
        close(got, value, name)


@pytest.mark.parametrize("name", ["bfloat16", "float16", "float32"])
def test_dtypes_of_results(name):
    dtype = getattr(torch, name)
    q, k, v, dout, _ = (x.to(dtype) for x in inputs(5, 7))
    sequences, spec = sequences_of([2, 3], [4, 3]), ScoreSpec(SCALE, MaskSpec())
    out, lse, probs = varlen.forward(q, k, v, sequences, spec, ScoreTensors(), (2, HEADS, 3, 4))
    grads = varlen.backward(dout, torch.ones_like(lse), q, k, v, sequences, spec, ScoreTensors())[:3]
    assert lse.dtype == torch.float32, f"lse is {lse.dtype}"
    for name, got, like in zip(("out", "probs", "dq", "dk", "dv"), (out, probs, *grads), (dout, probs, q, k, v)):
        assert got.dtype == dtype, f"{name} is {got.dtype}"
        assert got.shape == like.shape, f"{name} has shape {tuple(got.shape)}"
