"""Attention over packed sequences: cut each sequence out by `cu_seqlens`, run `dense` on it, put the rows back.

Rows outside the used part of every sequence are never read; their outputs and gradients are 0 and their lse is -inf.
"""

from dataclasses import replace

import torch

from cute_fa.core.call import PackedSequences
from cute_fa.core.problem import ScoreSpec
from cute_fa.reference import dense
from cute_fa.reference.dense import ScoreTensors


def sequence_indices(sequences: PackedSequences, page_size: int):
    """For each sequence, the indices of its rows in q, and in k and v: an int64 tensor and a tuple of them, for x[index]."""
    begins_q, lengths_q = _begins_and_lengths(sequences.cu_seqlens_q, sequences.seqused_q)
    begins_k, lengths_k = _begins_and_lengths(sequences.cu_seqlens_k, sequences.seqused_k)
    for i, length_k in enumerate(lengths_k):
        q_rows = torch.arange(begins_q[i], begins_q[i] + lengths_q[i])
        if sequences.block_table is None:
            yield q_rows, (torch.arange(begins_k[i], begins_k[i] + length_k),)
        else:
            yield q_rows, paged_index(sequences.block_table[i], torch.arange(length_k), page_size)


def paged_index(pages, positions, page_size):
    """Where `positions` (int64) of a sequence lie in a paged cache: its page numbers are `pages`; (page, row) tensors."""
    return pages.long()[positions // page_size], positions % page_size


def _begins_and_lengths(cu_seqlens, seqused):
    return cu_seqlens[:-1].tolist(), (cu_seqlens.diff() if seqused is None else seqused).tolist()


def forward(q, k, v, sequences: PackedSequences, spec: ScoreSpec, tensors: ScoreTensors, probs_shape=None):
    """Attention of packed q (total_q, heads_q, d) over k and v, (total_k, heads_kv, d) or pages.

    probs_shape: (batch, heads_q, max_seqlen_q, max_seqlen_k) to return the signed probabilities, else None.
    Returns out (total_q, heads_q, d_v), lse (heads_q, total_q), and the probabilities or None.
    """
    total_q, num_heads, _ = q.shape
    out = q.new_zeros(total_q, num_heads, v.shape[-1])
    lse = torch.full((num_heads, total_q), -torch.inf, dtype=dense.compute_dtype(q.dtype))
    probs = None if probs_shape is None else q.new_zeros(probs_shape)
    for i, (rows, index) in enumerate(sequence_indices(sequences, page_size=k.shape[1])):
        out_i, lse_i, probs_i = dense.forward(
            q[rows][None], k[index][None], v[index][None], spec, tensors, torch.tensor([i])
        )
        out[rows], lse[:, rows] = out_i[0], lse_i[0]
        if probs is not None:
            probs[i, :, : probs_i.shape[2], : probs_i.shape[3]] = probs_i[0]
    return out, lse, probs


def backward(dout, dlse, q, k, v, sequences: PackedSequences, spec: ScoreSpec, tensors: ScoreTensors):
    """Gradients of `forward`: dq, dk, dv like q, k, v, and the sink's gradient or None. Shared pages add up."""
    # Shared pages and the sink are sums over sequences, so all is held in compute dtype and rounded once, at the end.
    dtype, sink = q.dtype, tensors.learnable_sink
    q, k, v = (x.to(dense.compute_dtype(dtype)) for x in (q, k, v))
    tensors = replace(tensors, learnable_sink=None if sink is None else sink.to(q.dtype))
    dq, dk, dv = (x.new_zeros(x.shape) for x in (q, k, v))
    dsink = None if sink is None else torch.zeros_like(tensors.learnable_sink)
    for i, (rows, index) in enumerate(sequence_indices(sequences, page_size=k.shape[1])):
        dlse_i = None if dlse is None else dlse[None, :, rows]
        inputs = (q[rows][None], k[index][None], v[index][None])
        dq_i, dk_i, dv_i, dsink_i = dense.backward(
            dout[rows][None], dlse_i, *inputs, spec, tensors, torch.tensor([i])
        )
        dq[rows] = dq_i[0]
        dk.index_put_(index, dk_i[0], accumulate=True)
        dv.index_put_(index, dv_i[0], accumulate=True)
        if dsink is not None:
            dsink += dsink_i
    dq, dk, dv = (grad.to(dtype) for grad in (dq, dk, dv))
    return dq, dk, dv, None if dsink is None else dsink.to(sink.dtype)
