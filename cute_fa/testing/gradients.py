"""Forward and gradients of one call against plain torch on the same numbers, tensor by tensor.

The functions under test are handed in, because this room lies below the one that holds them.
"""

import torch

from cute_fa.testing.compare import Comparison, compare
from cute_fa.testing.inputs import Packing
from cute_fa.testing.plain import plain_attention, plain_varlen


def check_attention(attention, q, k, v, option: dict, generator: torch.Generator) -> dict[str, Comparison]:
    """Runs `attention(q, k, v, **option)`, like `cute_fa.flash_attn_func`, forward and backward: tensor name -> Comparison.

    lse takes part in the loss when the option asks for it. The dropout mask is read from the signs of the returned
    probabilities; its statistics are tested elsewhere.
    """
    return _check(attention, plain_attention, (q, k, v), option, generator)


def check_varlen(attention, q, k, v, packing: Packing, option: dict, generator: torch.Generator) -> dict[str, Comparison]:
    """The same for `cute_fa.flash_attn_varlen_func`, on q, k, v (batch, seqlen, heads, head_dim) packed by `packing`."""

    def ours(q, k, v, **option):
        return attention(q, packing.paged(k), packing.paged(v), **packing.arguments, **option)

    def plain(q, k, v, **option):
        return plain_varlen(q, k, v, **packing.places, **option)

    return _check(ours, plain, [x.flatten(0, 1) for x in (q, k, v)], option, generator)


def _check(attention, plain, tensors, option, generator):
    call = {**option, "return_lse": True, "return_attn_probs": bool(option.get("dropout_p"))}
    leaves = _leaves(tensors, option)
    out, lse, *probs = attention(*leaves[:3], **_with_sink(call, leaves))
    dout = torch.randn(out.shape, generator=generator).to(out)
    dlse = torch.randn(lse.shape, generator=generator).to(lse) * bool(option.get("return_lse"))
    results = [(out, lse, *_gradients(out, lse, dout, dlse, leaves))]
    formula = {name: value for name, value in option.items() if name != "return_lse"}
    if probs:
        formula["keep"] = ~torch.signbit(probs[0])
    for dtype in (tensors[0].dtype, torch.float64):
        leaves = _leaves([x.to(dtype) for x in tensors], option)
        out, lse = plain(*leaves[:3], **_with_sink(formula, leaves))
        results.append((out, lse, *_gradients(out, lse, dout, dlse, leaves)))
    names = ("out", "lse", "dq", "dk", "dv", "dsink")
    softcap = bool(option.get("softcap"))
    cancelled = cancelling_terms(*tensors, dout, option.get("softmax_scale"))
    return {name: compare(*three, softcap, cancelled.get(name, 0.0)) for name, three in zip(names, zip(*results))}


def cancelling_terms(q, k, v, dout, softmax_scale=None) -> dict[str, float]:
    """A bound on the sums of dq and dk with each term's absolute value.

    dS = P (dP - delta), and both |dP| = |dout . v| and |delta| are at most the product of the norms. With one key they are
    equal, so the gradients are 0 but for the rounding of two sums in different orders.
    """

    def norm(x):
        return x.double().norm(dim=-1).max().item() if x.numel() else 0.0

    scale = q.shape[-1] ** -0.5 if softmax_scale is None else abs(softmax_scale)
    terms = scale * norm(dout) * norm(v)
    return {"dq": terms * norm(k), "dk": terms * norm(q) * q.shape[-3]}


def _leaves(tensors, option):
    """Fresh leaves for q, k, v and the sink where there is one, which is float64 in the oracle."""
    sink = option.get("learnable_sink")
    if sink is not None and tensors[0].dtype == torch.float64:
        sink = sink.double()
    return [x.detach().clone().requires_grad_() for x in (*tensors, sink) if x is not None]


def _with_sink(option, leaves):
    return {**option, "learnable_sink": leaves[3]} if len(leaves) == 4 else option


def _gradients(out, lse, dout, dlse, leaves):
    # Rows without a key have lse = -inf and no gradient; they stay out of the loss, where 0 * inf would be NaN.
    finite_lse = lse.masked_fill(torch.isinf(lse), 0)
    loss = (out * dout.to(out)).sum().double() + (finite_lse * dlse.to(lse)).sum().double()
    return torch.autograd.grad(loss, leaves)
