"""Every rule on arguments: its whole message, what is legal at its edge, and that a refused call changes nothing."""

import math
import re

import numpy
import pytest
import torch
from torch._subclasses import FakeTensorMode

import cute_fa
from cute_fa.core.call import AttentionOptions, CacheUpdate, PackedSequences
from cute_fa.core.errors import NotSupportedError
from cute_fa.core.mask_spec import MaskSpec
from cute_fa.core.problem import AttentionProblem, ScoreSpec
from cute_fa.host import validate


def zeros(*shape, dtype=torch.float32, **kwargs):
    return torch.zeros(shape, dtype=dtype, **kwargs)


def ints(*values, dtype=torch.int32):
    return torch.tensor(values, dtype=dtype)


def dense_arguments():
    """Batch 2, 4 queries on 6 keys, 4 heads on 2, head_dim 16."""
    return dict(q=zeros(2, 4, 4, 16), k=zeros(2, 6, 2, 16), v=zeros(2, 6, 2, 16))


def varlen_arguments():
    """Queries 3 + 4, keys 4 + 5; 4 heads on 2, head_dim 16."""
    lengths = dict(cu_seqlens_q=ints(0, 3, 7), cu_seqlens_k=ints(0, 4, 9), max_seqlen_q=4, max_seqlen_k=5)
    return dict(q=zeros(7, 4, 16), k=zeros(9, 2, 16), v=zeros(9, 2, 16), **lengths)


def paged_arguments():
    """The same lengths, keys on 5 pages of 4 rows."""
    pages = dict(k=zeros(5, 4, 2, 16), v=zeros(5, 4, 2, 16), block_table=ints([0, 1], [2, 3]))
    return {**varlen_arguments(), **pages}


def cache_arguments():
    """3 + 1 and 5 + 1 keys in 2 slots of 8 rows; rotary tables of 8 rows for all 16 features."""
    caches = dict(k_cache=torch.ones(2, 8, 2, 16), v_cache=torch.ones(2, 8, 2, 16))
    new = dict(k=zeros(2, 1, 2, 16), v=zeros(2, 1, 2, 16), cache_seqlens=ints(3, 5))
    return dict(q=zeros(2, 1, 4, 16), **caches, **new, rotary_cos=zeros(8, 8), rotary_sin=zeros(8, 8))


def paged_cache_arguments():
    """The same lengths on 5 pages of 4 rows."""
    caches = dict(k_cache=torch.ones(5, 4, 2, 16), v_cache=torch.ones(5, 4, 2, 16))
    return {**cache_arguments(), **caches, "block_table": ints([0, 1], [2, 3])}


FUNCTIONS = {
    dense_arguments: cute_fa.flash_attn_func,
    varlen_arguments: cute_fa.flash_attn_varlen_func,
    paged_arguments: cute_fa.flash_attn_varlen_func,
    cache_arguments: cute_fa.flash_attn_with_kvcache,
    paged_cache_arguments: cute_fa.flash_attn_with_kvcache,
}

# Cases are name: (what is changed in the legal arguments, the error's class, its whole message).
SHAPES = {
    "not-a-tensor": ({"q": [1.0]}, TypeError, "q: expected a torch.Tensor, got list. Pass a tensor."),
    "missing-tensor": ({"v": None}, TypeError, "v: expected a torch.Tensor, got NoneType. Pass a tensor."),
    "rank-q": ({"q": zeros(4, 4, 16)}, ValueError,
        "q: expected 4 dimensions (batch, seqlen_q, heads_q, head_dim), got 3: (4, 4, 16). Reshape it."),
    "rank-k": ({"k": zeros(1, 2, 6, 2, 16)}, ValueError,
        "k: expected 4 dimensions (batch, seqlen_k, heads_kv, head_dim), got 5: (1, 2, 6, 2, 16). Reshape it."),
    "rank-v": ({"v": zeros(2, 16)}, ValueError,
        "v: expected 4 dimensions (batch, seqlen_k, heads_kv, head_dim_v), got 2: (2, 16). Reshape it."),
    "dtype-integer": ({"q": zeros(2, 4, 4, 16, dtype=torch.int64)}, TypeError,
        "q: expected one of bfloat16, float16, float32, float64 on cpu, got int64. Cast it."),
    "dtype-mixed-k": ({"k": zeros(2, 6, 2, 16, dtype=torch.float64)}, TypeError,
        "k: expected the dtype of q, float32, got float64. Cast one of them."),
    "dtype-mixed-v": ({"v": zeros(2, 6, 2, 16, dtype=torch.bfloat16)}, TypeError,
        "v: expected the dtype of q, float32, got bfloat16. Cast one of them."),
    "device-mixed": ({"k": zeros(2, 6, 2, 16, device="meta")}, ValueError,
        "k: expected the device of q, cpu, got meta. Move one of them."),
    "batch-k": ({"k": zeros(3, 6, 2, 16)}, ValueError, "k: expected the batch size of q, 2, got 3. Check the shapes."),
    "batch-v": ({"v": zeros(1, 6, 2, 16)}, ValueError, "v: expected the batch size of k, 2, got 1. Check the shapes."),
    "seqlen-v": ({"v": zeros(2, 5, 2, 16)}, ValueError, "v: expected the seqlen of k, 6, got 5. Check the shapes."),
    "head-dim-k": ({"k": zeros(2, 6, 2, 8)}, ValueError, "k: expected the head_dim of q, 16, got 8. Check the shapes."),
    "heads-v": ({"v": zeros(2, 6, 1, 16)}, ValueError,
        "v: expected the number of heads of k, 2, got 1. Check the shapes."),
    "heads-not-a-multiple": ({"q": zeros(2, 4, 5, 16)}, ValueError,
        "q: expected a number of heads that is a multiple of the 2 heads of k, got 5. "
        "Each key-value head serves equally many query heads."),
    "heads-fewer-than-kv": ({"q": zeros(2, 4, 1, 16)}, ValueError,
        "q: expected a number of heads that is a multiple of the 2 heads of k, got 1. "
        "Each key-value head serves equally many query heads."),
    "zero-heads-q": ({"q": zeros(2, 4, 0, 16)}, ValueError,
        "q: expected at least one head and a head_dim of at least 1, got shape (2, 4, 0, 16). "
        "Only batch and seqlen may be 0."),
    "zero-heads-k": ({"k": zeros(2, 6, 0, 16)}, ValueError,
        "k: expected at least one head and a head_dim of at least 1, got shape (2, 6, 0, 16). "
        "Only batch and seqlen may be 0."),
    "zero-head-dim-v": ({"v": zeros(2, 6, 2, 0)}, ValueError,
        "v: expected at least one head and a head_dim of at least 1, got shape (2, 6, 2, 0). "
        "Only batch and seqlen may be 0."),
}  # fmt: skip

WINDOW = ("window_size: expected (left, right), each an integer >= -1 or None, got {}. "
          "-1 and None mean no bound on that side.")  # fmt: skip
SCALE = "softmax_scale: expected a finite number or None, got {}. None means head_dim ** -0.5."
SOFTCAP = "softcap: expected a finite number >= 0, got {}. 0 means no softcap."
DROPOUT = "dropout_p: expected a probability in [0, 1), got {}. 0 means no dropout."
OPTIONS = {
    "window-negative-left": ({"window_size": (-2, 0)}, ValueError, WINDOW.format("(-2, 0)")),
    "window-negative-right": ({"window_size": (0, -5)}, ValueError, WINDOW.format("(0, -5)")),
    "window-short": ({"window_size": (3,)}, ValueError, WINDOW.format("(3,)")),
    "window-long": ({"window_size": [1, 2, 3]}, ValueError, WINDOW.format("[1, 2, 3]")),
    "window-number": ({"window_size": 4}, ValueError, WINDOW.format("4")),
    "window-none": ({"window_size": None}, ValueError, WINDOW.format("None")),
    "window-float": ({"window_size": (1.0, 2)}, ValueError, WINDOW.format("(1.0, 2)")),
    "window-bool": ({"window_size": (True, 2)}, ValueError, WINDOW.format("(True, 2)")),
    "dropout-above-one": ({"dropout_p": 1.5}, ValueError, DROPOUT.format("1.5")),
    "dropout-one": ({"dropout_p": 1.0}, ValueError, DROPOUT.format("1.0")),
    "dropout-negative": ({"dropout_p": -0.1}, ValueError, DROPOUT.format("-0.1")),
    "dropout-nan": ({"dropout_p": math.nan}, ValueError, DROPOUT.format("nan")),
    "dropout-none": ({"dropout_p": None}, ValueError, DROPOUT.format("None")),
    "softcap-negative": ({"softcap": -1.0}, ValueError, SOFTCAP.format("-1.0")),
    "softcap-nan": ({"softcap": math.nan}, ValueError, SOFTCAP.format("nan")),
    "softcap-inf": ({"softcap": math.inf}, ValueError, SOFTCAP.format("inf")),
    "scale-nan": ({"softmax_scale": math.nan}, ValueError, SCALE.format("nan")),
    "scale-inf": ({"softmax_scale": -math.inf}, ValueError, SCALE.format("-inf")),
    "scale-bool": ({"softmax_scale": True}, ValueError, SCALE.format("True")),
    "scale-string": ({"softmax_scale": "auto"}, ValueError, SCALE.format("auto")),
    "chunk-negative": ({"attention_chunk": -1}, ValueError,
        "attention_chunk: expected an integer >= 0, got -1. 0 means no chunks."),
    "chunk-float": ({"attention_chunk": 2.0}, ValueError,
        "attention_chunk: expected an integer >= 0, got 2.0. 0 means no chunks."),
    "splits-negative": ({"num_splits": -1}, ValueError,
        "num_splits: expected an integer >= 0, got -1. 0 lets the package choose."),
    "pack-gqa-number": ({"pack_gqa": 3}, ValueError,
        "pack_gqa: expected True, False or None, got 3. None lets the package choose."),
    "alibi-shape": ({"alibi_slopes": zeros(2)}, ValueError,
        "alibi_slopes: expected shape (4,) or (2, 4), got (2,). It has one value for each query head."),
    "alibi-batch": ({"alibi_slopes": zeros(1, 4)}, ValueError,
        "alibi_slopes: expected shape (4,) or (2, 4), got (1, 4). It has one value for each query head."),
    "alibi-dtype": ({"alibi_slopes": ints(1, 2, 3, 4)}, TypeError,
        "alibi_slopes: expected a floating-point dtype, got int32. Use float32."),
    "alibi-device": ({"alibi_slopes": zeros(4, device="meta")}, ValueError,
        "alibi_slopes: expected the device of q, cpu, got meta. Move one of them."),
    "alibi-gradient": ({"alibi_slopes": zeros(4, requires_grad=True)}, NotSupportedError,
        "alibi_slopes: expected a tensor that needs no gradient, got requires_grad=True. "
        "Detach it; use learnable_sink or a bias for trainable scores."),
    "alibi-list": ({"alibi_slopes": [0.5] * 4}, TypeError,
        "alibi_slopes: expected a torch.Tensor, got list. Pass a tensor."),
    "sink-shape": ({"learnable_sink": zeros(2, 4)}, ValueError,
        "learnable_sink: expected shape (4,), got (2, 4). It has one value for each query head."),
    "sink-dtype": ({"learnable_sink": ints(1, 2, 3, 4)}, TypeError,
        "learnable_sink: expected a floating-point dtype, got int32. Use float32."),
}  # fmt: skip

LENGTHS = {
    "rank-q": ({"q": zeros(1, 7, 4, 16)}, ValueError,
        "q: expected 3 dimensions (total_q, heads_q, head_dim), got 4: (1, 7, 4, 16). Reshape it."),
    "rank-k": ({"k": zeros(9, 16)}, ValueError,
        "k: expected 3 dimensions (total_k, heads_kv, head_dim), got 2: (9, 16). Reshape it."),
    "rows-v": ({"v": zeros(8, 2, 16)}, ValueError, "v: expected the rows of k, (9,), got (8,). Check the shapes."),
    "cu-seqlens-decrease": ({"cu_seqlens_k": ints(0, 9, 4)}, ValueError,
        "cu_seqlens_k: expected values that never decrease, got [0, 9, 4]. "
        "Pass the running sum of the sequence lengths."),
    "cu-seqlens-begin": ({"cu_seqlens_q": ints(1, 3, 7)}, ValueError,
        "cu_seqlens_q: expected a first element of 0, got 1. Begin it with 0."),
    "cu-seqlens-exceed-q": ({"cu_seqlens_q": ints(0, 3, 8), "max_seqlen_q": 5}, ValueError,
        "q: expected at least the 8 rows of cu_seqlens_q, got 7 rows. Pass all rows that cu_seqlens_q counts."),
    "cu-seqlens-exceed-k": ({"cu_seqlens_k": ints(0, 4, 11), "max_seqlen_k": 7}, ValueError,
        "k: expected at least the 11 rows of cu_seqlens_k, got 9 rows. Pass all rows that cu_seqlens_k counts."),
    "cu-seqlens-dtype": ({"cu_seqlens_q": zeros(3)}, TypeError,
        "cu_seqlens_q: expected dtype int32 or int64, got float32. Cast it to int32."),
    "cu-seqlens-rank": ({"cu_seqlens_q": ints([0, 3, 7])}, ValueError,
        "cu_seqlens_q: expected one dimension, got shape (1, 3). It belongs to the batch, one value a sequence."),
    "cu-seqlens-list": ({"cu_seqlens_k": [0, 4, 9]}, TypeError,
        "cu_seqlens_k: expected a torch.Tensor, got list. Pass a tensor."),
    "cu-seqlens-device": ({"cu_seqlens_q": zeros(3, dtype=torch.int32, device="meta")}, ValueError,
        "cu_seqlens_q: expected the device of q, cpu, got meta. Move one of them."),
    "cu-seqlens-empty": ({"cu_seqlens_q": ints()}, ValueError,
        "cu_seqlens_q: expected shape (batch + 1,), got an empty tensor. Begin it with 0, and end it with total_q."),
    "cu-seqlens-other-batch": ({"cu_seqlens_k": ints(0, 4, 6, 9)}, ValueError,
        "cu_seqlens_k: expected shape (3,), got shape (4,). It belongs to the batch, one value a sequence."),
    "max-seqlen-q-small": ({"max_seqlen_q": 3}, ValueError,
        "max_seqlen_q: expected at least the longest sequence, 4, got 3. Pass a bound that holds for every sequence."),
    "max-seqlen-k-small": ({"max_seqlen_k": 4}, ValueError,
        "max_seqlen_k: expected at least the longest sequence, 5, got 4. Pass a bound that holds for every sequence."),
    "max-seqlen-negative": ({"max_seqlen_k": -1}, ValueError,
        "max_seqlen_k: expected an integer >= 0, got -1. Pass a length."),
    "max-seqlen-none": ({"max_seqlen_q": None}, ValueError,
        "max_seqlen_q: expected an integer >= 0, got None. Pass a length."),
    "seqused-negative": ({"seqused_q": ints(-1, 2)}, ValueError,
        "seqused_q: expected values between 0 and the lengths [3, 4], got [-1, 2]. "
        "It counts the rows of each sequence that are used."),
    "seqused-long": ({"seqused_k": ints(4, 6)}, ValueError,
        "seqused_k: expected values between 0 and the lengths [4, 5], got [4, 6]. "
        "It counts the rows of each sequence that are used."),
    "seqused-shape": ({"seqused_k": ints(4, 5, 1)}, ValueError,
        "seqused_k: expected shape (2,), got shape (3,). It belongs to the batch, one value a sequence."),
    "seqused-dtype": ({"seqused_q": ints(1, 2, dtype=torch.int16)}, TypeError,
        "seqused_q: expected dtype int32 or int64, got int16. Cast it to int32."),
}  # fmt: skip

PAGES = {
    "pages-rank": ({"k": zeros(20, 2, 16)}, ValueError,
        "k: expected 4 dimensions (num_pages, page_size, heads_kv, head_dim), got 3: (20, 2, 16). Reshape it."),
    "pages-of-v": ({"v": zeros(5, 3, 2, 16)}, ValueError,
        "v: expected the rows of k, (5, 4), got (5, 3). Check the shapes."),
    "block-table-rank": ({"block_table": ints(0, 1)}, ValueError,
        "block_table: expected shape (2, pages per sequence), got (2,). "
        "It has one row of page numbers for each sequence."),
    "block-table-batch": ({"block_table": ints([0, 1])}, ValueError,
        "block_table: expected shape (2, pages per sequence), got (1, 2). "
        "It has one row of page numbers for each sequence."),
    "block-table-dtype": ({"block_table": zeros(2, 2)}, TypeError,
        "block_table: expected dtype int32 or int64, got float32. Cast it to int32."),
    "block-table-list": ({"block_table": [[0, 1], [2, 3]]}, TypeError,
        "block_table: expected a torch.Tensor, got list. Pass a tensor."),
    "block-table-empty-pages": ({"k": zeros(5, 0, 2, 16), "v": zeros(5, 0, 2, 16)}, ValueError,
        "k: expected a page_size of at least 1, got 0. Its shape is (num_pages, page_size, ...)."),
    "block-table-page-too-high": ({"block_table": ints([0, 1], [2, 5])}, ValueError,
        "block_table: expected values between 0 and 4, got [2, 5]. It names pages of the cache."),
    "block-table-page-negative": ({"block_table": ints([-1, 1], [2, 3])}, ValueError,
        "block_table: expected values between 0 and 4, got [-1]. It names pages of the cache."),
    "block-table-few-columns": ({"block_table": ints([0], [2])}, ValueError,
        "block_table: expected at least 2 pages for a sequence of 5 keys, got 1 pages. Pass more columns."),
}  # fmt: skip

NO_GRADIENT = ("{}: expected a tensor that needs no gradient, got requires_grad=True. "
               "flash_attn_with_kvcache has no backward; call it under torch.no_grad().")  # fmt: skip
CACHE = {
    "not-a-tensor": ({"q": "q"}, TypeError, "q: expected a torch.Tensor, got str. Pass a tensor."),
    "k-not-a-tensor": ({"k": [1.0]}, TypeError, "k: expected a torch.Tensor, got list. Pass a tensor."),
    "rank-k-cache": ({"k_cache": zeros(8, 2, 16)}, ValueError,
        "k_cache: expected 4 dimensions (num_slots, seqlen_cache, heads_kv, head_dim), got 3: (8, 2, 16). Reshape it."),
    "dtype-k-cache": ({"k_cache": zeros(2, 8, 2, 16, dtype=torch.float16)}, TypeError,
        "k_cache: expected the dtype of q, float32, got float16. Cast one of them."),
    "rows-v-cache": ({"v_cache": zeros(2, 9, 2, 16)}, ValueError,
        "v_cache: expected the rows of k_cache, (2, 8), got (2, 9). Check the shapes."),
    "heads-not-a-multiple": ({"q": zeros(2, 1, 3, 16)}, ValueError,
        "q: expected a number of heads that is a multiple of the 2 heads of k_cache, got 3. "
        "Each key-value head serves equally many query heads."),
    "fewer-slots-than-sequences": ({"k_cache": zeros(1, 8, 2, 16), "v_cache": zeros(1, 8, 2, 16)}, ValueError,
        "k_cache: expected a slot for each of 2 sequences, got 1 slots. Without cache_batch_idx, sequence b uses slot b."),
    "k-without-v": ({"v": None}, ValueError, "v: expected a tensor together with k, got None. Pass both, or neither."),
    "v-without-k": ({"k": None}, ValueError, "k: expected a tensor together with v, got None. Pass both, or neither."),
    "k-without-cache-seqlens": ({"cache_seqlens": None}, ValueError,
        "cache_seqlens: expected a value together with k, got None. It says where k is appended."),
    "k-shape": ({"k": zeros(2, 1, 1, 16)}, ValueError,
        "k: expected shape (2, 1, 2, 16), got (2, 1, 1, 16). It is appended to k_cache."),
    "v-shape": ({"v": zeros(2, 2, 2, 16)}, ValueError,
        "v: expected shape (2, 1, 2, 16), got (2, 2, 2, 16). It is appended to v_cache."),
    "k-dtype": ({"k": zeros(2, 1, 2, 16, dtype=torch.float64)}, TypeError,
        "k: expected the dtype of q, float32, got float64. Cast one of them."),
    "cache-too-short": ({"cache_seqlens": ints(3, 8)}, ValueError,
        "cache_seqlens: expected values between 0 and 7, the cache's 8 rows less 1 to append, got [3, 8]. "
        "Pass a longer cache, or fewer keys."),
    "cache-seqlens-negative": ({"cache_seqlens": ints(-1, 2)}, ValueError,
        "cache_seqlens: expected values between 0 and 7, the cache's 8 rows less 1 to append, got [-1, 2]. "
        "Pass a longer cache, or fewer keys."),
    "cache-seqlens-shape": ({"cache_seqlens": ints(1, 2, 3)}, ValueError,
        "cache_seqlens: expected shape (2,), got shape (3,). It belongs to the batch, one value a sequence."),
    "cache-seqlens-float": ({"cache_seqlens": 2.0}, ValueError,
        "cache_seqlens: expected an integer >= 0, got 2.0. Pass a length."),
    "cache-seqlens-int-too-long": ({"cache_seqlens": 8}, ValueError,
        "cache_seqlens: expected values between 0 and 7, the cache's 8 rows less 1 to append, got [8, 8]. "
        "Pass a longer cache, or fewer keys."),
    "batch-idx-out-of-range": ({"cache_batch_idx": ints(0, 2)}, ValueError,
        "cache_batch_idx: expected values between 0 and 1, got [0, 2]. It names slots of k_cache."),
    "batch-idx-negative": ({"cache_batch_idx": ints(-1, 0)}, ValueError,
        "cache_batch_idx: expected values between 0 and 1, got [-1, 0]. It names slots of k_cache."),
    "batch-idx-double": ({"cache_batch_idx": ints(1, 1)}, ValueError,
        "cache_batch_idx: expected different slots, got [1, 1]. Two appends would overwrite each other."),
    "leftpad-beyond-length": ({"cache_leftpad": ints(0, 6)}, ValueError,
        "cache_leftpad: expected values between 0 and cache_seqlens [3, 5], got [0, 6]. "
        "It counts the rows before the first key."),
    "leftpad-negative": ({"cache_leftpad": ints(-1, 0)}, ValueError,
        "cache_leftpad: expected values between 0 and cache_seqlens [3, 5], got [-1, 0]. "
        "It counts the rows before the first key."),
    "rotary-without-k": ({"k": None, "v": None}, ValueError,
        "k: expected a tensor together with rotary_cos, got None. Rotary applies to appended keys."),
    "rotary-without-sin": ({"rotary_sin": None}, TypeError,
        "rotary_sin: expected a torch.Tensor, got NoneType. Pass a tensor."),
    "rotary-integers": ({"rotary_sin": ints(*[[1] * 8] * 8)}, TypeError,
        "rotary_sin: expected a floating-point dtype, got int32. Use float32."),
    "rotary-short": ({"rotary_cos": zeros(5, 8), "rotary_sin": zeros(5, 8)}, ValueError,
        "rotary_cos: expected at least 6 rows, got 5 rows. Compute it for every position."),
    "rotary-short-for-queries": ({"q": zeros(2, 4, 4, 16), "causal": True}, ValueError,
        "rotary_cos: expected at least 9 rows, got 8 rows. Compute it for every position."),
    "rotary-wide": ({"rotary_cos": zeros(8, 9), "rotary_sin": zeros(8, 9)}, ValueError,
        "rotary_cos: expected a rotary_dim of at most head_dim 16, got 18. It holds rotary_dim / 2 columns."),
    "rotary-unequal": ({"rotary_sin": zeros(8, 7)}, ValueError,
        "rotary_sin: expected the shape of rotary_cos, (8, 8), got (8, 7). Check the shapes."),
    "gradient-q": ({"q": zeros(2, 1, 4, 16, requires_grad=True)}, NotSupportedError, NO_GRADIENT.format("q")),
    "gradient-k": ({"k": zeros(2, 1, 2, 16, requires_grad=True)}, NotSupportedError, NO_GRADIENT.format("k")),
    "gradient-sink": ({"learnable_sink": zeros(4, requires_grad=True)}, NotSupportedError,
        NO_GRADIENT.format("learnable_sink")),
    "gradient-rotary": ({"rotary_cos": zeros(8, 8, requires_grad=True)}, NotSupportedError,
        NO_GRADIENT.format("rotary_cos")),
}  # fmt: skip

CACHE_PAGES = {
    "batch-idx-with-block-table": ({"cache_batch_idx": ints(0, 1)}, NotSupportedError,
        "cache_batch_idx: expected None together with block_table, got a tensor. "
        "Reorder the rows of block_table instead."),
    "leftpad-with-block-table": ({"cache_leftpad": ints(0, 1)}, NotSupportedError,
        "cache_leftpad: expected None together with block_table, got a tensor. Drop one of the two."),
    "block-table-page": ({"block_table": ints([0, 9], [2, 7])}, ValueError,
        "block_table: expected values between 0 and 4, got [2, 7]. It names pages of the cache."),
    "appends-to-a-shared-page": ({"block_table": ints([2, 1], [2, 3])}, ValueError,
        "block_table: expected pages of its own for the keys that a sequence appends, got shared pages [2]. "
        "Copy a page before it is extended."),
    "pages-too-few-for-append": ({"cache_seqlens": ints(8, 5)}, ValueError,
        "cache_seqlens: expected values between 0 and 7, the cache's 8 rows less 1 to append, got [8, 5]. "
        "Pass a longer cache, or fewer keys."),
}  # fmt: skip

CASES = [
    pytest.param(arguments, *case, id=f"{room}-{name}")
    for room, arguments, cases in (
        ("dense", dense_arguments, {**SHAPES, **OPTIONS}),
        ("varlen", varlen_arguments, LENGTHS),
        ("paged", paged_arguments, PAGES),
        ("cache", cache_arguments, CACHE),
        ("cache", paged_cache_arguments, CACHE_PAGES),
    )
    for name, case in cases.items()
]


@pytest.mark.parametrize("arguments, changes, error, message", CASES)
def test_message(arguments, changes, error, message):
    with pytest.raises(Exception) as caught:
        FUNCTIONS[arguments](**{**arguments(), **changes})
    assert type(caught.value) is error, f"{caught.value!r} is of another class"
    assert str(caught.value) == message, "message"
    assert re.fullmatch(r"\w+: expected .+, got .+\. .+\.", message), "argument: expected rule, got value. Advice."


@pytest.mark.parametrize("arguments, changes, error, message", [case for case in CASES if "cache" in case.id])
def test_refused_call_leaves_the_cache(arguments, changes, error, message):
    given = {**arguments(), **changes}
    caches = given["k_cache"], given["v_cache"]
    before = [cache.clone() for cache in caches]
    with pytest.raises(error):
        FUNCTIONS[arguments](**given)
    assert all(map(torch.equal, caches, before)), "the cache was written to"


@pytest.mark.parametrize("arguments, changes, error, message", [case for case in CASES if "cache" not in case.id])
def test_refused_call_draws_no_random_number(arguments, changes, error, message):
    state = torch.get_rng_state()
    with pytest.raises(error):
        FUNCTIONS[arguments](**{**arguments(), "dropout_p": 0.5, **changes})
    assert torch.equal(torch.get_rng_state(), state), "the generator moved on"


LEGAL = {
    "as-given": (dense_arguments, {}),
    "no-batch": (dense_arguments, dict(q=zeros(0, 4, 4, 16), k=zeros(0, 6, 2, 16), v=zeros(0, 6, 2, 16))),
    "head-dim-not-a-multiple-of-8": (dense_arguments, dict(q=zeros(2, 4, 4, 13), k=zeros(2, 6, 2, 13))),
    "head-dim-257": (dense_arguments, dict(q=zeros(2, 4, 4, 257), k=zeros(2, 6, 2, 257), v=zeros(2, 6, 2, 257))),
    "head-dim-1": (dense_arguments, dict(q=zeros(2, 4, 4, 1), k=zeros(2, 6, 2, 1), v=zeros(2, 6, 2, 1))),
    "window-zero": (dense_arguments, {"window_size": (0, 0)}),
    "window-none-and-list": (dense_arguments, {"window_size": [None, 3]}),
    "dropout-zero": (dense_arguments, {"dropout_p": 0}),
    "dropout-below-one": (dense_arguments, {"dropout_p": 1 - 1e-9}),
    "scale-zero": (dense_arguments, {"softmax_scale": 0}),
    "alibi-gradient-not-recorded": (dense_arguments, {"alibi_slopes": zeros(4, requires_grad=True)}),
    "splits-and-pack-gqa": (dense_arguments, {"num_splits": 7, "pack_gqa": True}),
    "cu-seqlens-int64": (varlen_arguments, {"cu_seqlens_q": ints(0, 3, 7, dtype=torch.int64)}),
    "rows-behind-the-last-sequence": (varlen_arguments, {"cu_seqlens_q": ints(0, 0, 4)}),
    "no-sequences": (varlen_arguments, {"cu_seqlens_q": ints(0), "cu_seqlens_k": ints(0)}),
    "max-seqlen-tensor": (varlen_arguments, {"max_seqlen_q": torch.tensor(4), "max_seqlen_k": torch.tensor(5)}),
    "max-seqlen-of-used-rows": (varlen_arguments, {"seqused_k": ints(4, 3), "max_seqlen_k": 4}),
    "seqused-at-both-ends": (varlen_arguments, {"seqused_q": ints(0, 4)}),
    "unused-pages-name-anything": (paged_arguments, {"block_table": ints([0, -1], [2, 3])}),
    "pages-shared": (paged_arguments, {"block_table": ints([0, 1], [0, 1])}),
    "cache-filled-to-the-end": (cache_arguments, {"cache_seqlens": ints(0, 7)}),
    "cache-seqlens-int": (cache_arguments, {"cache_seqlens": 7}),
    "leftpad-at-length": (cache_arguments, {"cache_leftpad": ints(3, 0)}),
    "rotary-just-long-enough": (cache_arguments, dict(rotary_cos=zeros(6, 8), rotary_sin=zeros(6, 8))),
    "slot-read-twice": (cache_arguments,
        dict(k=None, v=None, rotary_cos=None, rotary_sin=None, cache_batch_idx=ints(1, 1))),
    "cache-pages-filled-to-the-end": (paged_cache_arguments, {"cache_seqlens": ints(7, 7)}),
}  # fmt: skip


@pytest.mark.parametrize("arguments, changes", LEGAL.values(), ids=LEGAL)
def test_legal_at_the_edge(arguments, changes):
    given = {**arguments(), **changes}
    with torch.no_grad():
        out = FUNCTIONS[arguments](**given)
    v = given.get("v_cache", given["v"])
    assert out.shape == (*given["q"].shape[:-1], v.shape[-1]), "shape of out"


CUDA = {
    "float32": (torch.float32, 64, 64,
        TypeError, "q: expected one of bfloat16, float16 on cuda, got float32. Cast it, or call under torch.autocast."),
    "float64": (torch.float64, 64, 64,
        TypeError, "q: expected one of bfloat16, float16 on cuda, got float64. Cast it, or call under torch.autocast."),
    "head-dim-not-a-multiple-of-8": (torch.bfloat16, 60, 64,
        ValueError, "q: expected a head_dim that is a multiple of 8 up to 256 on cuda, got 60. Pad it with zeros."),
    "head-dim-above-256": (torch.float16, 264, 64,
        ValueError, "q: expected a head_dim that is a multiple of 8 up to 256 on cuda, got 264. Pad it with zeros."),
    "head-dim-v-not-a-multiple-of-8": (torch.float16, 64, 100,
        ValueError, "v: expected a head_dim that is a multiple of 8 up to 256 on cuda, got 100. Pad it with zeros."),
}  # fmt: skip


@pytest.mark.parametrize("dtype, head_dim, head_dim_v, error, message", CUDA.values(), ids=CUDA)
def test_message_of_kernel_limits(dtype, head_dim, head_dim_v, error, message):
    with FakeTensorMode():
        q, k, v = (zeros(1, 8, 2, size, dtype=dtype, device="cuda") for size in (head_dim, head_dim, head_dim_v))
        with pytest.raises(error) as caught:
            cute_fa.flash_attn_func(q, k, v)
    assert str(caught.value) == message, "message"


def test_values_of_index_tensors_are_not_read_on_cuda():
    """Fake tensors have no values; reading one raises, as it would stall a GPU."""
    options, kwargs = AttentionOptions(), dict(dtype=torch.float16, device="cuda")
    with FakeTensorMode():
        sizes = ((3,), (2,), (2, 4))
        cu_seqlens, lengths, table = (torch.empty(size, dtype=torch.int32, device="cuda") for size in sizes)
        q, pages = zeros(7, 4, 64, **kwargs), zeros(5, 4, 2, 64, **kwargs)
        packed = PackedSequences(cu_seqlens, cu_seqlens, 4, 5, seqused_q=lengths, block_table=table)
        assert validate.varlen(q, pages, pages, packed, options).seqlen_k == 5, "the declared maximum"
        cache = CacheUpdate(cache_seqlens=lengths, block_table=table)
        q = zeros(2, 1, 4, 64, **kwargs)
        assert validate.kvcache(q, pages, pages, cache, options).seqlen_k == 16, "4 pages of 4 rows"


@pytest.mark.parametrize("arguments", [varlen_arguments, paged_arguments, cache_arguments], ids=lambda f: f.__name__)
def test_values_of_fake_tensors_are_not_read(arguments):
    """On the CPU too: a call under FakeTensorMode gives a shape."""
    with FakeTensorMode() as mode, torch.no_grad():
        given = {key: mode.from_tensor(x) if isinstance(x, torch.Tensor) else x for key, x in arguments().items()}
        assert FUNCTIONS[arguments](**given).shape == (*given["q"].shape[:-1], 16), "shape of out"


def test_problem_of_a_dense_call():
    given = {**dense_arguments(), "v": zeros(2, 6, 2, 24)}
    options = AttentionOptions(0.25, 2, causal=True, window_size=(3, 9), softcap=5, attention_chunk=7)
    features = {"dense", "gqa", "head_dim_v", "causal", "window", "attention_chunk", "softcap", "dropout"}
    scores = ScoreSpec(2.0, MaskSpec(left=3, right=0, chunk=7), softcap=5.0, dropout_p=0.25)
    wanted = AttentionProblem("dense", "float32", 2, 4, 6, 4, 2, 16, 24, scores, frozenset(features))
    assert validate.dense(*given.values(), options) == wanted, "facts of the call"


def test_problem_of_a_packed_call():
    q, k, v, *rest = paged_arguments().values()
    cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, block_table = rest
    packed = PackedSequences(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, block_table=block_table)
    features = frozenset({"varlen", "block_table", "gqa"})
    wanted = AttentionProblem("varlen", "float32", 2, 4, 5, 4, 2, 16, 16, ScoreSpec(0.25, MaskSpec()), features)
    assert validate.varlen(q, k, v, packed, AttentionOptions()) == wanted, "facts of the call"


def test_problem_of_a_cache_call():
    q, k_cache, v_cache = (paged_cache_arguments()[name] for name in ("q", "k_cache", "v_cache"))
    cache = CacheUpdate(cache_seqlens=3, block_table=ints([0, 1], [2, 3]))
    features = frozenset({"kvcache", "block_table", "gqa"})
    wanted = AttentionProblem("kvcache", "float32", 2, 1, 8, 4, 2, 16, 16, ScoreSpec(0.25, MaskSpec()), features)
    assert validate.kvcache(q, k_cache, v_cache, cache, AttentionOptions()) == wanted, "facts of the call"


@pytest.mark.parametrize(
    "options, mask",
    [
        pytest.param({}, MaskSpec(), id="none"),
        pytest.param({"window_size": (None, None)}, MaskSpec(), id="window-none"),
        pytest.param({"causal": True}, MaskSpec(right=0), id="causal"),
        pytest.param({"causal": True, "window_size": (-1, 5)}, MaskSpec(right=0), id="causal-sets-the-right-side"),
        pytest.param({"window_size": (-1, 0)}, MaskSpec(right=0), id="window-that-is-causal"),
        pytest.param({"window_size": (2, None)}, MaskSpec(left=2), id="left"),
        pytest.param({"window_size": (0, 4)}, MaskSpec(0, 4), id="both"),
        pytest.param({"attention_chunk": 3}, MaskSpec(chunk=3), id="chunk"),
    ],
)
def test_mask_of_the_options(options, mask):
    assert validate.dense(*dense_arguments().values(), AttentionOptions(**options)).scores.mask == mask, f"{options}"


@pytest.mark.parametrize(
    "name, layout",
    [("qkv", "(batch, seqlen, 3, heads, head_dim)"), ("kv", "(total_k, 2, heads_kv, head_dim)")],
    ids=["dense", "packed"],
)
def test_unpack_gives_views(name, layout):
    packed = torch.randn(*(3 if size == "3" else 2 for size in layout.split(", ")))
    parts = validate.unpack(name, packed, layout)
    for index, part in enumerate(parts):
        assert torch.equal(part, packed.select(-3, index)), f"part {index} of {name}"
        assert part.untyped_storage().data_ptr() == packed.untyped_storage().data_ptr(), f"part {index} was copied"


PACKED = {
    "qkv": (cute_fa.flash_attn_qkvpacked_func, dict(qkv=zeros(2, 4, 2, 4, 16)),
        "qkv: expected shape (batch, seqlen, 3, heads, head_dim), got (2, 4, 2, 4, 16). "),
    "kv": (cute_fa.flash_attn_kvpacked_func, dict(q=zeros(2, 4, 4, 16), kv=zeros(2, 6, 3, 2, 16)),
        "kv: expected shape (batch, seqlen_k, 2, heads_kv, head_dim), got (2, 6, 3, 2, 16). "),
    "varlen-qkv": (cute_fa.flash_attn_varlen_qkvpacked_func,
        dict(qkv=zeros(7, 1, 4, 16), cu_seqlens=ints(0, 7), max_seqlen=7),
        "qkv: expected shape (total, 3, heads, head_dim), got (7, 1, 4, 16). "),
    "varlen-kv": (cute_fa.flash_attn_varlen_kvpacked_func,
        {**varlen_arguments(), "kv": zeros(9, 4, 2, 16), "k": None, "v": None},
        "kv: expected shape (total_k, 2, heads_kv, head_dim), got (9, 4, 2, 16). "),
}  # fmt: skip


@pytest.mark.parametrize("function, given, message", PACKED.values(), ids=PACKED)
def test_message_of_packed_tensors(function, given, message):
    with pytest.raises(ValueError) as caught:
        function(**{name: value for name, value in given.items() if value is not None})
    assert str(caught.value) == message + "Stack the tensors in dimension -3.", "message"


def test_message_of_packed_rank():
    with pytest.raises(ValueError) as caught:
        cute_fa.flash_attn_qkvpacked_func(zeros(2, 4, 3, 16))
    message = "qkv: expected 5 dimensions (batch, seqlen, 3, heads, head_dim), got 4: (2, 4, 3, 16). Reshape it."
    assert str(caught.value) == message, "message"


def test_numpy_scalars_are_numbers():
    q = torch.randn(4, 2, 8)
    cu_seqlens = ints(0, 4)

    def call(integer, number):
        lengths = (cu_seqlens, cu_seqlens, integer(4), integer(4))
        window = (integer(1), integer(0))
        rest = dict(window_size=window, softmax_scale=number(0.5), attention_chunk=integer(3))
        return cute_fa.flash_attn_varlen_func(q, q, q, *lengths, **rest)

    assert torch.equal(call(numpy.int64, numpy.float32), call(int, float)), "NumPy's scalars are taken as Python's"


@pytest.mark.parametrize("options", [{"window_size": (2**70, 2**70)}, {"attention_chunk": 2**70}], ids=["window", "chunk"])
def test_bounds_wider_than_any_sequence(options):
    q = torch.randn(1, 4, 2, 8)
    found = cute_fa.flash_attn_func(q, q, q, **options)
    torch.testing.assert_close(found, cute_fa.flash_attn_func(q, q, q))
