"""Attention as a few lines of plain torch under autograd: the oracle in float64, and "torch's own error" in 16 bits.

Nothing here comes from the code under test: the mask, the softmax and the gradients are torch's or written again from the
numerical contract. Argument names are those of the public functions.
"""

import torch


def visible_keys(seqlen_q, seqlen_k, causal=False, window_size=(-1, -1), attention_chunk=0, device="cpu"):
    """bool (seqlen_q, seqlen_k): the contract's rules on (i, j), read literally."""
    i = torch.arange(seqlen_q, device=device)[:, None] + seqlen_k - seqlen_q
    j = torch.arange(seqlen_k, device=device)[None, :]
    left, right = (None if side in (None, -1) else side for side in window_size)
    visible = torch.ones(seqlen_q, seqlen_k, dtype=torch.bool, device=device)
    if causal:
        visible &= j <= i
    if left is not None:
        visible &= i - left <= j
    if right is not None:
        visible &= j <= i + right
    if attention_chunk:
        chunk_begin = i - torch.remainder(i, attention_chunk)
        visible &= (chunk_begin <= j) & (j < chunk_begin + attention_chunk)
    return visible


def plain_attention(
    q,
    k,
    v,
    *,
    softmax_scale=None,
    softcap=0.0,
    alibi_slopes=None,
    learnable_sink=None,
    keep=None,
    dropout_p=0.0,
    **mask,
):
    """out (batch, seqlen_q, heads_q, head_dim_v) and lse (batch, heads_q, seqlen_q) of dense tensors, in q's dtype.

    mask: causal, window_size, attention_chunk. keep: bool (batch, heads_q, seqlen_q, seqlen_k) of a dropout with dropout_p.
    """
    group = q.shape[2] // k.shape[2]
    k, v = k.repeat_interleave(group, dim=2), v.repeat_interleave(group, dim=2)
    seqlen_q, seqlen_k = q.shape[1], k.shape[1]
    scale = q.shape[3] ** -0.5 if softmax_scale is None else softmax_scale
    scores = torch.einsum("bihd,bjhd->bhij", q * scale, k)
    if softcap:
        scores = torch.tanh(scores / softcap) * softcap
    if alibi_slopes is not None:
        i, j = torch.arange(seqlen_q, device=q.device), torch.arange(seqlen_k, device=q.device)
        distance = (i[:, None] + seqlen_k - seqlen_q - j[None, :]).abs()
        scores = scores - (alibi_slopes.expand(q.shape[0], -1)[:, :, None, None] * distance).to(scores.dtype)
    visible = visible_keys(seqlen_q, seqlen_k, device=q.device, **mask)
    scores = scores.masked_fill(~visible, -torch.inf)
    if learnable_sink is not None:
        sink = learnable_sink.to(scores.dtype)[None, :, None, None].expand(*scores.shape[:3], 1)
        scores = torch.cat((scores, sink), dim=-1)
    has_key = visible.any(dim=-1)
    if learnable_sink is None:
        # A softmax over nothing is NaN in value and gradient; such rows get a stand-in, then their contract.
        scores = scores.masked_fill(~has_key[:, None], 0)
    lse = torch.logsumexp(scores.float() if scores.dtype.itemsize < 4 else scores, dim=-1)
    probs = torch.softmax(scores, dim=-1)[..., :seqlen_k]
    if learnable_sink is None:
        probs = probs.masked_fill(~has_key[:, None], 0)
        lse = lse.masked_fill(~has_key, -torch.inf)
    if keep is not None:
        probs = probs * keep / (1 - dropout_p)
    return torch.einsum("bhij,bjhd->bihd", probs.to(v.dtype), v), lse


def plain_varlen(q, k, v, lengths_q, lengths_k, begins_q, begins_k, **options):
    """out (total_q, heads_q, head_dim_v) and lse (heads_q, total_q) of packed tensors; rows of no sequence get 0 and -inf.

    lengths and begins: lists of ints, one a sequence. options as in `plain_attention`; alibi_slopes (batch, heads) and keep are cut.
    """
    out = q.new_zeros(q.shape[0], q.shape[1], v.shape[2])
    lse = q.new_full((q.shape[1], q.shape[0]), -torch.inf, dtype=torch.promote_types(q.dtype, torch.float32))
    for b, (length_q, length_k) in enumerate(zip(lengths_q, lengths_k)):
        own = dict(options)
        if own.get("alibi_slopes") is not None and own["alibi_slopes"].ndim == 2:
            own["alibi_slopes"] = own["alibi_slopes"][b : b + 1]
        if own.get("keep") is not None:
            own["keep"] = own["keep"][b : b + 1, :, :length_q, :length_k]
        rows_q, rows_k = (slice(begin[b], begin[b] + length) for begin, length in ((begins_q, length_q), (begins_k, length_k)))
        out_b, lse_b = plain_attention(q[None, rows_q], k[None, rows_k], v[None, rows_k], **own)
        out = torch.cat((out[: begins_q[b]], out_b[0], out[begins_q[b] + length_q :]))
        lse = torch.cat((lse[:, : begins_q[b]], lse_b[0], lse[:, begins_q[b] + length_q :]), dim=1)
    return out, lse
