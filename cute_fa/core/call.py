"""The arguments of a call beside q, k and v, grouped as the user gave them. `api` fills them, `host/validate.py` checks them.

Tensor fields are None where a call has none; this room knows no torch, so they are typed `object`.
"""

from dataclasses import dataclass
from typing import NamedTuple


class AttentionOptions(NamedTuple):
    """What shapes the scores and what is returned, named, ordered and documented as in `api.flash_attn_func`.

    A tuple, because it is made and hashed in every call, where a dataclass costs several microseconds.
    """

    dropout_p: float = 0.0
    softmax_scale: float | None = None
    causal: bool = False
    window_size: tuple = (-1, -1)
    softcap: float = 0.0
    alibi_slopes: object = None
    deterministic: bool = False
    return_attn_probs: bool = False
    return_lse: bool = False
    learnable_sink: object = None
    attention_chunk: int = 0
    num_splits: int = 0
    pack_gqa: bool | None = None


@dataclass(frozen=True)
class PackedSequences:
    """Where the sequences of a packed call lie.

    cu_seqlens_q, cu_seqlens_k: (batch + 1,), first rows of the sequences and the end of the last. max_seqlen_q,
    max_seqlen_k: bounds on their lengths. seqused_q, seqused_k: (batch,), how many rows of each sequence count.
    block_table: (batch, pages per sequence); with it k and v are pages (num_pages, page_size, heads, head_dim), and
    cu_seqlens_k tells lengths only.
    """

    cu_seqlens_q: object
    cu_seqlens_k: object
    max_seqlen_q: int
    max_seqlen_k: int
    seqused_q: object = None
    seqused_k: object = None
    block_table: object = None


@dataclass(frozen=True)
class CacheUpdate:
    """What a call appends to its key-value cache, and where each sequence lies in it.

    k, v: (batch, seqlen_new, heads_kv, head_dim), appended at cache_seqlens. rotary_cos, rotary_sin: (seqlen_rotary,
    rotary_dim / 2). cache_seqlens: (batch,) or one int, keys held before the append, counted from row 0 of the slot;
    None means a full cache. cache_batch_idx: (batch,), slots of the sequences. cache_leftpad: (batch,), rows of the
    slot before its first key. block_table: (batch, pages per sequence); with it the caches are pages (num_pages,
    page_size, heads, head_dim).
    """

    k: object = None
    v: object = None
    rotary_cos: object = None
    rotary_sin: object = None
    cache_seqlens: object = None
    cache_batch_idx: object = None
    cache_leftpad: object = None
    block_table: object = None
    rotary_interleaved: bool = True
