"""Rotary position embedding of queries and appended keys, for the key-value cache.

Source: Su et al., "RoFormer", 2021. The first 2 * cos.shape[1] features are rotated pairwise, the rest stay.
"""

import torch
from einops import rearrange


def apply_rotary(x, cos, sin, positions, interleaved: bool):
    """x (seqlen, heads, d) rotated by cos and sin (seqlen_rotary, rotary_dim / 2) at `positions` (seqlen,).

    interleaved: features (0, 1), (2, 3), ... form the pairs (GPT-J); else feature i pairs with i + rotary_dim / 2
    (GPT-NeoX). Computed in fp32 or wider, returned in x's dtype.
    """
    rotary_dim = 2 * cos.shape[1]
    cos, sin = cos[positions][:, None], sin[positions][:, None]
    pairs = "s h (r two) -> two s h r" if interleaved else "s h (two r) -> two s h r"
    a, b = rearrange(x[..., :rotary_dim].to(torch.promote_types(x.dtype, torch.float32)), pairs, two=2)
    rotated = torch.stack((a * cos - b * sin, b * cos + a * sin))
    rotated = rearrange(rotated, " -> ".join(reversed(pairs.split(" -> "))))
    return torch.cat((rotated.to(x.dtype), x[..., rotary_dim:]), dim=-1)
