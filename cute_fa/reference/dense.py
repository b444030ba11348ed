"""Forward and backward of attention on dense batches, one line of code for each line of the formulas.

With S = scale q k^T (scores), T = S softcapped, plus ALiBi, minus infinity where masked, sink z, Z = keep / (1 - p):

    forward    lse = log(sum_j exp T_ij + exp z)      P = exp(T - lse)      out = (P * Z) v
    backward   dP = (dout v^T) * Z    delta = sum_j P_ij dP_ij    dT = P * (dP - delta + dlse)
               dS = dT * dT/dS        dq = scale dS k             dk = scale dS^T q      dv = (P * Z)^T dout
               dz = sum_i exp(z - lse_i) (dlse_i - delta_i)

delta equals rowsum(dout * out), the form that kernels use. dlse reaches every score because d lse / d T = P.
Source: Dao, "FlashAttention-2", 2023, sections 2.2 and 3.1; softcap, ALiBi, sink and lse are differentiated by hand here.
"""

from dataclasses import dataclass

import torch
from einops import einsum, reduce, repeat

from cute_fa.core.problem import ScoreSpec
from cute_fa.reference.dropout import keep_mask, keep_scale


@dataclass(frozen=True)
class ScoreTensors:
    """The tensors beside q, k and v that shape the probabilities; None where a call has none.

    alibi_slopes (heads,) or (batch, heads); learnable_sink (heads,); rng_state int64 (2,), seed and offset of dropout.
    """

    alibi_slopes: torch.Tensor | None = None
    learnable_sink: torch.Tensor | None = None
    rng_state: torch.Tensor | None = None


@dataclass(frozen=True)
class Probabilities:
    """What both directions need of the scores, (batch, heads, seqlen_q, seqlen_k) but for lse (batch, heads, seqlen_q).

    probs is normalised and knows no dropout; z is keep / (1 - p), None without dropout; cap_slope is dT/dS, None
    without softcap; visible may be broadcast.
    """

    probs: torch.Tensor
    lse: torch.Tensor
    visible: torch.Tensor
    z: torch.Tensor | None
    cap_slope: torch.Tensor | None


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """fp64 for fp64, fp32 for everything else: the dtype of all arithmetic here, and of lse."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def probabilities(q, k, spec: ScoreSpec, tensors: ScoreTensors, batch_indices) -> Probabilities:
    """Probabilities and lse of q (batch, seqlen_q, heads, d) against k (batch, seqlen_k, heads, d), in compute dtype."""
    (_, seqlen_q, num_heads, _), seqlen_k = q.shape, k.shape[1]
    scores = einsum(q, k, "b i h d, b j h d -> b h i j") * spec.scale
    cap_slope = None
    if spec.softcap:
        capped = torch.tanh(scores / spec.softcap)
        scores, cap_slope = spec.softcap * capped, 1 - capped * capped
    query, key = torch.arange(seqlen_q)[:, None], torch.arange(seqlen_k)
    if tensors.alibi_slopes is not None:
        distance = (query + seqlen_k - seqlen_q - key).abs().to(q.dtype)
        slopes = tensors.alibi_slopes.to(q.dtype)
        slopes = slopes[batch_indices] if slopes.ndim == 2 else slopes[None]
        scores = scores - slopes[:, :, None, None] * distance
    visible = spec.mask.visible(query, key, seqlen_q, seqlen_k)
    lse = torch.logsumexp(scores.masked_fill(~visible, -torch.inf), dim=-1)
    if tensors.learnable_sink is not None:
        lse = torch.logaddexp(lse, tensors.learnable_sink.to(q.dtype)[:, None])
    # Rows without a key have lse = -inf; masking after the exponential, not before, keeps their NaN out.
    probs = torch.exp(scores - lse[..., None]).masked_fill(~visible, 0)
    z = None
    if spec.dropout_p:
        keep = keep_mask(tensors.rng_state, spec.dropout_p, batch_indices, num_heads, seqlen_q, seqlen_k)
        z = keep.to(q.dtype) * keep_scale(spec.dropout_p)
    return Probabilities(probs, lse, visible, z, cap_slope)


def forward(q, k, v, spec: ScoreSpec, tensors: ScoreTensors, batch_indices=None):
    """Attention of q (batch, seqlen_q, heads_q, d) over k (batch, seqlen_k, heads_kv, d) and v (batch, seqlen_k, heads_kv, d_v).

    batch_indices: int64 (batch,), where the sequences stand in the whole batch (ALiBi slopes and dropout ask); None
    counts from 0. Returns out (batch, seqlen_q, heads_q, d_v) in q's dtype, lse (batch, heads_q, seqlen_q), and the
    normalised probabilities, negative where dropout removed them (flash-attn 2's S_dmask), in q's dtype.
    """
    dtype, (q, k, v) = q.dtype, _for_query_heads(q, k, v)
    found = probabilities(q, k, spec, tensors, _counted(batch_indices, q))
    weights = found.probs if found.z is None else found.probs * found.z
    out = einsum(weights, v, "b h i j, b j h d -> b i h d")
    signed = found.probs if found.z is None else torch.where(found.z > 0, found.probs, -found.probs)
    return out.to(dtype), found.lse, signed.to(dtype)


def backward(dout, dlse, q, k, v, spec: ScoreSpec, tensors: ScoreTensors, batch_indices=None):
    """Gradients of `forward` for dout (like out) and dlse (like lse, or None).

    Returns dq, dk, dv in the dtypes and shapes of q, k, v, and the gradient of the sink (heads_q,) or None.
    """
    inputs, num_heads_kv = (q, k, v), k.shape[2]
    q, k, v = _for_query_heads(q, k, v)
    found = probabilities(q, k, spec, tensors, _counted(batch_indices, q))
    dout = dout.to(q.dtype)
    weights, dprobs = found.probs, einsum(dout, v, "b i h d, b j h d -> b h i j")
    if found.z is not None:
        weights, dprobs = weights * found.z, dprobs * found.z
    delta = (found.probs * dprobs).sum(-1)
    dlse = torch.zeros_like(delta) if dlse is None else dlse.to(q.dtype)
    dscores = found.probs * (dprobs + (dlse - delta)[..., None])
    if found.cap_slope is not None:
        dscores = dscores * found.cap_slope
    dscores = dscores.masked_fill(~found.visible, 0)  # dlse of a row without a key may be anything
    dq = spec.scale * einsum(dscores, k, "b h i j, b j h d -> b i h d")
    dk = spec.scale * einsum(dscores, q, "b h i j, b i h d -> b j h d")
    dv = einsum(weights, dout, "b h i j, b i h d -> b j h d")
    dk, dv = (reduce(grad, "b j (hk g) d -> b j hk d", "sum", hk=num_heads_kv) for grad in (dk, dv))
    dsink = None
    if tensors.learnable_sink is not None:
        sink = tensors.learnable_sink.to(q.dtype)[:, None]
        # Only a sink of -inf leaves an lse of -inf, in rows without a key.
        dsink_rows = (torch.exp(sink - found.lse) * (dlse - delta)).masked_fill(found.lse == -torch.inf, 0)
        dsink = reduce(dsink_rows, "b h i -> h", "sum").to(tensors.learnable_sink.dtype)
    dq, dk, dv = (grad.to(of.dtype) for grad, of in zip((dq, dk, dv), inputs))
    return dq, dk, dv, dsink


def _for_query_heads(q, k, v):
    """q, k and v in compute dtype, every key-value head repeated for the query heads that share it."""
    group = q.shape[2] // k.shape[2]
    q, k, v = (x.to(compute_dtype(q.dtype)) for x in (q, k, v))
    return q, *(repeat(x, "b s h d -> b s (h g) d", g=group) if group > 1 else x for x in (k, v))


def _counted(batch_indices, q):
    return torch.arange(q.shape[0]) if batch_indices is None else batch_indices
