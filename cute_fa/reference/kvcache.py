"""Attention over a key-value cache: append new keys and values in place, rotate, attend to what the cache then holds."""

import torch

from cute_fa.core.call import CacheUpdate
from cute_fa.core.problem import ScoreSpec
from cute_fa.reference import dense
from cute_fa.reference.dense import ScoreTensors
from cute_fa.reference.rotary import apply_rotary
from cute_fa.reference.varlen import paged_index


def cache_index(cache: CacheUpdate, i: int, positions, page_size: int):
    """Where `positions` (int64) of sequence i lie in k_cache and v_cache: (slot or page, row) for x[index]."""
    if cache.block_table is not None:
        return paged_index(cache.block_table[i], positions, page_size)
    slot = i if cache.cache_batch_idx is None else int(cache.cache_batch_idx[i])
    return slot, positions


def attend(q, k_cache, v_cache, cache: CacheUpdate, spec: ScoreSpec, tensors: ScoreTensors):
    """Appends to k_cache and v_cache in place, then attends with q (batch, seqlen_q, heads_q, d).

    cache.cache_seqlens must be given, as a tensor or a list of ints.
    Position p of a sequence is rotated by row p of rotary_cos and rotary_sin. Queries stand at positions cache_seqlens,
    cache_seqlens + 1, ... under a mask that knows positions (causal, window, chunk), else all at cache_seqlens.
    Returns out (batch, seqlen_q, heads_q, d_v) and lse (batch, heads_q, seqlen_q).
    """
    batch, seqlen_q, num_heads, _ = q.shape
    out = q.new_zeros(batch, seqlen_q, num_heads, v_cache.shape[-1])
    lse = torch.empty(batch, num_heads, seqlen_q, dtype=dense.compute_dtype(q.dtype))
    for i in range(batch):
        length, q_i = int(cache.cache_seqlens[i]), q[i]
        if cache.rotary_cos is not None:
            q_positions = length + (0 if spec.mask.is_full else 1) * torch.arange(seqlen_q)
            q_i = apply_rotary(q_i, cache.rotary_cos, cache.rotary_sin, q_positions, cache.rotary_interleaved)
        if cache.k is not None:
            positions = length + torch.arange(cache.k.shape[1])
            k_new = cache.k[i]
            if cache.rotary_cos is not None:
                k_new = apply_rotary(k_new, cache.rotary_cos, cache.rotary_sin, positions, cache.rotary_interleaved)
            index = cache_index(cache, i, positions, k_cache.shape[1])
            k_cache[index], v_cache[index] = k_new, cache.v[i]
            length += len(positions)
        first = 0 if cache.cache_leftpad is None else int(cache.cache_leftpad[i])
        index = cache_index(cache, i, torch.arange(first, length), k_cache.shape[1])
        k_i, v_i = k_cache[index], v_cache[index]
        out_i, lse_i, _ = dense.forward(q_i[None], k_i[None], v_i[None], spec, tensors, torch.tensor([i]))
        out[i], lse[i] = out_i[0], lse_i[0]
    return out, lse
