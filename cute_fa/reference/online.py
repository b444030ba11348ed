"""The blocked algorithm that every kernel here runs, for one head, on one screen. For readers and as a test of the formulas.

A block of queries meets the keys block by block and keeps three things for each row: the largest score so far (m), the
sum of exponentials relative to it (l), and the unnormalised output (acc). When a block raises m, what was summed before
is scaled down by exp(m_old - m_new). No row of scores is ever held whole, and the result is exact.
Source: Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018; Dao, "FlashAttention-2", 2023, section 3.1.
"""

import torch

from cute_fa.core.mask_spec import MaskSpec


def online_attention(q, k, v, scale: float, mask: MaskSpec, tile_m: int = 64, tile_n: int = 128):
    """out (seqlen_q, d_v) and lse (seqlen_q,) of one head: q (seqlen_q, d), k (seqlen_k, d), v (seqlen_k, d_v)."""
    seqlen_q, seqlen_k = q.shape[0], k.shape[0]
    out, lse = q.new_zeros(seqlen_q, v.shape[1]), q.new_full((seqlen_q,), -torch.inf)
    for m_begin in range(0, seqlen_q, tile_m):
        rows = torch.arange(m_begin, min(m_begin + tile_m, seqlen_q))
        m, l = q.new_full((len(rows),), -torch.inf), q.new_zeros(len(rows))
        acc = q.new_zeros(len(rows), v.shape[1])
        for n_begin in range(0, seqlen_k, tile_n):
            columns = torch.arange(n_begin, min(n_begin + tile_n, seqlen_k))
            s = scale * q[rows] @ k[columns].T
            visible = mask.visible(rows[:, None], columns, seqlen_q, seqlen_k)
            s = s.masked_fill(~visible, -torch.inf)
            m_new = torch.maximum(m, s.amax(dim=1))
            # A row that has seen no key yet has m = -inf; relative to 0 its exponentials are 0, not NaN.
            reference = m_new.masked_fill(m_new == -torch.inf, 0)
            p = torch.exp(s - reference[:, None])
            rescale = torch.exp(m - reference)
            l = l * rescale + p.sum(dim=1)
            acc = acc * rescale[:, None] + p @ v[columns]
            m = m_new
        out[rows] = acc / l.clamp(min=torch.finfo(l.dtype).tiny)[:, None]
        lse[rows] = m + torch.log(l)
    return out, lse
