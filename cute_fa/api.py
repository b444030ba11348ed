"""The public functions: flash-attn 2's names, argument order, defaults and return types, and keyword-only extras behind them.

No logic: each function groups its arguments, unpacks what is packed, and calls one operator. What all of them share is
told in `flash_attn_func`.
"""

from cute_fa.core.call import AttentionOptions, CacheUpdate, PackedSequences
from cute_fa.host.validate import unpack
from cute_fa.ops import attention, kvcache


def flash_attn_func(
    q,
    k,
    v,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    alibi_slopes=None,
    deterministic=False,
    return_attn_probs=False,
    *,
    return_lse=False,
    learnable_sink=None,
    attention_chunk=0,
    num_splits=0,
    pack_gqa=None,
):
    """Exact attention: softmax(softmax_scale * q @ k^T) @ v for each head, with gradients of q, k, v and learnable_sink.

    Query i sees key j when every rule in force allows it, with position p = i + seqlen_k - seqlen_q: causal, j <= p;
    window_size, p - left <= j <= p + right; attention_chunk, j // chunk == p // chunk. A row that sees no key has out 0,
    lse -inf (lse = sink with a sink), and gradients 0.

    Args:
        q: (batch, seqlen_q, heads_q, head_dim). CUDA: bfloat16 or float16, head_dim a multiple of 8 up to 256. CPU:
            also float32 and float64, any head_dim. Under torch.autocast, float32 is cast.
        k: (batch, seqlen_k, heads_kv, head_dim); heads_kv divides heads_q, and query head h reads key-value head
            h // (heads_q // heads_kv).
        v: (batch, seqlen_k, heads_kv, head_dim_v); head_dim_v may differ from head_dim.
        dropout_p: probability in [0, 1) of dropping an entry of the softmax, in steps of 2^-16; kept ones are scaled up.
            The mask comes from a counter-based generator, seeded by torch's generator of the device. 0 in evaluation.
        softmax_scale: factor on q @ k^T; None means head_dim ** -0.5.
        causal: mask aligned to the bottom right; it also sets the right side of window_size to 0.
        window_size: (left, right), both inclusive; -1 or None means no bound on that side.
        softcap: a value c > 0 turns scores s into c * tanh(s / c); 0 means none.
        alibi_slopes: (heads_q,) or (batch, heads_q); adds -slope * |p - j| after the softcap. Gets no gradient.
        deterministic: gradients bitwise equal from run to run; torch.use_deterministic_algorithms(True) sets it too.
        return_attn_probs: return (out, lse, probs) instead of out. probs, (batch, heads_q, seqlen_q, seqlen_k), is the
            normalised softmax, negative where dropout removed the entry, without gradient; an empty tensor when
            dropout_p is 0. For tests.
        return_lse: return (out, lse). lse, (batch, heads_q, seqlen_q) in float32 (float64 for float64 inputs), is the
            natural log of the sum of exponentials of the final scores, the sink included; it has a gradient.
        learnable_sink: (heads_q,), one more score in each row's softmax that has no value; has a gradient.
        attention_chunk: length of the chunks that positions are cut into; 0 means none.
        num_splits: pieces that the keys of a row are split into; 0 lets the package choose. Never changes what is computed.
        pack_gqa: whether query heads that share a key-value head share a tile; None lets the package choose. Likewise.

    Returns:
        out, (batch, seqlen_q, heads_q, head_dim_v) in q's dtype; or as return_attn_probs and return_lse say.

    Raises:
        TypeError, ValueError: an argument breaks a rule above; the message names it and says what to do.
        NotSupportedError: the device has no kernel for the call, or a derivative other than the first in reverse mode is
            asked for. DeviceError: the GPU is not a Hopper GPU.

    Example:
        >>> q, k, v = (torch.randn(2, 1024, 16, 64, requires_grad=True) for _ in range(3))
        >>> cute_fa.flash_attn_func(q, k, v, causal=True).sum().backward()

    Source: Dao, "FlashAttention-2: Faster Attention with Better Parallelism and Work Partitioning", 2023.
    """
    options = (
        dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs,
        return_lse, learnable_sink, attention_chunk, num_splits, pack_gqa,
    )  # fmt: skip
    return attention.dense(q, k, v, options)


def flash_attn_qkvpacked_func(
    qkv,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    alibi_slopes=None,
    deterministic=False,
    return_attn_probs=False,
    *,
    return_lse=False,
    learnable_sink=None,
    attention_chunk=0,
):
    """Self-attention of one packed tensor, read through views; all options as in `flash_attn_func`.

    Args:
        qkv: (batch, seqlen, 3, heads, head_dim). Its gradient comes back packed as well.

    Returns:
        out, (batch, seqlen, heads, head_dim); or more, as `flash_attn_func` says. Errors are the same too.

    Example:
        >>> out = cute_fa.flash_attn_qkvpacked_func(torch.randn(2, 1024, 3, 16, 64), causal=True)
    """
    options = (
        dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs,
        return_lse, learnable_sink, attention_chunk,
    )  # fmt: skip
    return attention.dense(*unpack("qkv", qkv, "(batch, seqlen, 3, heads, head_dim)"), options)


def flash_attn_kvpacked_func(
    q,
    kv,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    alibi_slopes=None,
    deterministic=False,
    return_attn_probs=False,
    *,
    return_lse=False,
    learnable_sink=None,
    attention_chunk=0,
):
    """Attention with keys and values in one packed tensor, read through views; all options as in `flash_attn_func`.

    Args:
        q: (batch, seqlen_q, heads_q, head_dim).
        kv: (batch, seqlen_k, 2, heads_kv, head_dim). Its gradient comes back packed as well.

    Returns:
        out, (batch, seqlen_q, heads_q, head_dim); or more, as `flash_attn_func` says. Errors are the same too.

    Example:
        >>> out = cute_fa.flash_attn_kvpacked_func(torch.randn(2, 128, 16, 64), torch.randn(2, 1024, 2, 4, 64))
    """
    options = (
        dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs,
        return_lse, learnable_sink, attention_chunk,
    )  # fmt: skip
    return attention.dense(q, *unpack("kv", kv, "(batch, seqlen_k, 2, heads_kv, head_dim)"), options)


def flash_attn_varlen_func(
    q,
    k,
    v,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    alibi_slopes=None,
    deterministic=False,
    return_attn_probs=False,
    block_table=None,
    *,
    return_lse=False,
    learnable_sink=None,
    attention_chunk=0,
    num_splits=0,
    pack_gqa=None,
    seqused_q=None,
    seqused_k=None,
):
    """Attention over sequences of different lengths, packed one behind the other; options as in `flash_attn_func`.

    Sequence b owns rows cu_seqlens[b] to cu_seqlens[b + 1]; it may be empty. Masks, positions, ALiBi and dropout count
    from each sequence's own start. Rows behind cu_seqlens[-1] or beyond seqused are never read (they may hold NaN);
    their outputs and gradients are 0 and their lse is -inf.

    Args:
        q: (total_q, heads_q, head_dim).
        k: (total_k, heads_kv, head_dim), or pages (num_pages, page_size, heads_kv, head_dim) with block_table.
        v: like k, with head_dim_v.
        cu_seqlens_q, cu_seqlens_k: (batch + 1,) int32 or int64, running sums of the lengths, beginning with 0.
        max_seqlen_q, max_seqlen_k: int or 0-d integer tensor, at least the longest sequence.
        block_table: (batch, pages per sequence) int32 or int64, the pages of each sequence in order; cu_seqlens_k then
            gives lengths only.
        seqused_q, seqused_k: (batch,) int32 or int64, how many rows of each sequence count; None means all.

    Returns:
        out, (total_q, heads_q, head_dim_v); lse is (heads_q, total_q), and probs (batch, heads_q, max_seqlen_q,
        max_seqlen_k). Errors as in `flash_attn_func`; on CPU tensors, outside of
        torch.compile, the values of the index tensors are checked as well.

    Example:
        >>> cu_seqlens = torch.tensor([0, 3, 3, 10], dtype=torch.int32)
        >>> q, k, v = (torch.randn(10, 8, 64) for _ in range(3))
        >>> out = cute_fa.flash_attn_varlen_func(q, k, v, cu_seqlens, cu_seqlens, 7, 7, causal=True)
    """
    options = AttentionOptions(
        dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs,
        return_lse, learnable_sink, attention_chunk, num_splits, pack_gqa,
    )  # fmt: skip
    sequences = PackedSequences(
        cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q, seqused_k, block_table
    )
    return attention.varlen(q, k, v, sequences, options)


def flash_attn_varlen_qkvpacked_func(
    qkv,
    cu_seqlens,
    max_seqlen,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    alibi_slopes=None,
    deterministic=False,
    return_attn_probs=False,
    *,
    return_lse=False,
    learnable_sink=None,
    attention_chunk=0,
    seqused=None,
):
    """Self-attention over packed sequences in one packed tensor; the rest as in `flash_attn_varlen_func`.

    Args:
        qkv: (total, 3, heads, head_dim). Its gradient comes back packed as well.
        cu_seqlens, max_seqlen: of queries and keys alike.
        seqused: (batch,), of queries and keys alike.

    Returns:
        out, (total, heads, head_dim); or more, as `flash_attn_varlen_func` says. Errors are the same too.

    Example:
        >>> cu_seqlens = torch.tensor([0, 3, 10], dtype=torch.int32)
        >>> out = cute_fa.flash_attn_varlen_qkvpacked_func(torch.randn(10, 3, 8, 64), cu_seqlens, 7, causal=True)
    """
    options = AttentionOptions(
        dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs,
        return_lse, learnable_sink, attention_chunk,
    )  # fmt: skip
    sequences = PackedSequences(cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, seqused, seqused)
    return attention.varlen(*unpack("qkv", qkv, "(total, 3, heads, head_dim)"), sequences, options)


def flash_attn_varlen_kvpacked_func(
    q,
    kv,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    alibi_slopes=None,
    deterministic=False,
    return_attn_probs=False,
    *,
    return_lse=False,
    learnable_sink=None,
    attention_chunk=0,
    seqused_q=None,
    seqused_k=None,
):
    """Attention over packed sequences with keys and values in one tensor; the rest as in `flash_attn_varlen_func`.

    Args:
        q: (total_q, heads_q, head_dim).
        kv: (total_k, 2, heads_kv, head_dim). Its gradient comes back packed as well.

    Returns:
        out, (total_q, heads_q, head_dim); or more, as `flash_attn_varlen_func` says. Errors are the same too.

    Example:
        >>> cu_seqlens = torch.tensor([0, 3, 10], dtype=torch.int32)
        >>> q, kv = torch.randn(10, 8, 64), torch.randn(10, 2, 4, 64)
        >>> out = cute_fa.flash_attn_varlen_kvpacked_func(q, kv, cu_seqlens, cu_seqlens, 7, 7)
    """
    options = AttentionOptions(
        dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs,
        return_lse, learnable_sink, attention_chunk,
    )  # fmt: skip
    sequences = PackedSequences(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q, seqused_k)
    return attention.varlen(q, *unpack("kv", kv, "(total_k, 2, heads_kv, head_dim)"), sequences, options)


def flash_attn_with_kvcache(
    q,
    k_cache,
    v_cache,
    k=None,
    v=None,
    rotary_cos=None,
    rotary_sin=None,
    cache_seqlens=None,
    cache_batch_idx=None,
    cache_leftpad=None,
    block_table=None,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    rotary_interleaved=True,
    alibi_slopes=None,
    num_splits=0,
    return_softmax_lse=False,
    *,
    learnable_sink=None,
    attention_chunk=0,
    pack_gqa=None,
):
    """Attention of new queries over a key-value cache; appends k and v to it in place first. Has no backward.

    The keys of sequence b are the rows cache_leftpad[b] to cache_seqlens[b] of its slot, then the appended ones. Masks
    are aligned to the last of them, as in `flash_attn_func`, where the options not named here are told.

    Args:
        q: (batch, seqlen_q, heads_q, head_dim).
        k_cache: (num_slots, seqlen_cache, heads_kv, head_dim), or pages (num_pages, page_size, heads_kv, head_dim) with
            block_table. Extended in place when k is given.
        v_cache: like k_cache, with head_dim_v.
        k, v: (batch, seqlen_new, heads_kv, head_dim) and head_dim_v, appended at row cache_seqlens of each sequence. Slots
            and pages that receive keys must belong to one sequence each.
        rotary_cos, rotary_sin: (seqlen_rotary, rotary_dim / 2). Row p rotates the key appended at row p; queries are
            rotated by rows cache_seqlens, cache_seqlens + 1, ... if causal, a window or chunks are set, else all by row
            cache_seqlens.
        cache_seqlens: int or (batch,) int32 or int64, rows held before the append; None means the whole cache.
        cache_batch_idx: (batch,) int32 or int64, the slot of each sequence; None means slot b.
        cache_leftpad: (batch,) int32 or int64, rows of each slot before its first key; None means 0.
        block_table: (batch, pages per sequence) int32 or int64; not together with the two above.
        rotary_interleaved: rotate features (0, 1), (2, 3), ...; else feature i with i + rotary_dim / 2.
        return_softmax_lse: return (out, lse).

    Returns:
        out, (batch, seqlen_q, heads_q, head_dim_v); with return_softmax_lse also lse, (batch, heads_q, seqlen_q).

    Raises:
        As `flash_attn_func`; NotSupportedError also when a tensor requires a gradient and gradients are enabled.

    Example:
        >>> k_cache, v_cache = (torch.zeros(2, 4096, 4, 64) for _ in range(2))
        >>> q, k, v = torch.randn(2, 1, 16, 64), torch.randn(2, 1, 4, 64), torch.randn(2, 1, 4, 64)
        >>> lengths = torch.tensor([0, 17], dtype=torch.int32)  # grows by 1 with each call
        >>> out = cute_fa.flash_attn_with_kvcache(q, k_cache, v_cache, k, v, cache_seqlens=lengths, causal=True)
    """
    options = AttentionOptions(
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=window_size,
        softcap=softcap,
        alibi_slopes=alibi_slopes,
        return_lse=return_softmax_lse,
        learnable_sink=learnable_sink,
        attention_chunk=attention_chunk,
        num_splits=num_splits,
        pack_gqa=pack_gqa,
    )
    cache = CacheUpdate(
        k, v, rotary_cos, rotary_sin, cache_seqlens, cache_batch_idx, cache_leftpad, block_table, rotary_interleaved
    )
    return kvcache.attend(q, k_cache, v_cache, cache, options)
