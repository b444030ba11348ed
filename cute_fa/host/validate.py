"""Every rule on arguments, checked once per call: tensors and options in, an AttentionProblem or one worded error out.

Rules on the values inside index tensors are apart (`*_values`): reading them would stall a GPU and break a graph, so they
are for calls on CPU tensors that hold values (`has_values`).
"""

import math
from collections import Counter
from numbers import Integral, Real

import torch
from torch._subclasses import FakeTensor

from cute_fa.core.call import AttentionOptions, CacheUpdate, PackedSequences
from cute_fa.core.dtypes import KERNEL_DTYPES, REFERENCE_DTYPES
from cute_fa.core.errors import NotSupportedError, expected
from cute_fa.core.mask_spec import MaskSpec
from cute_fa.core.problem import AttentionProblem, ScoreSpec

MAX_HEAD_DIM = 256
MAX_LENGTH = 2**31 - 1  # No sequence is longer, so wider windows and chunks mean the same.


def dense(q, k, v, options: AttentionOptions) -> AttentionProblem:
    """Checks a call on (batch, seqlen, heads, head_dim) tensors."""
    _check_rank("q", q, "(batch, seqlen_q, heads_q, head_dim)")
    _check_rank("k", k, "(batch, seqlen_k, heads_kv, head_dim)")
    _check_rank("v", v, "(batch, seqlen_k, heads_kv, head_dim_v)")
    _check_heads(q, k, v)
    _check_equal("k", "batch size of q", k.shape[0], q.shape[0])
    _check_equal("v", "batch size of k", v.shape[0], k.shape[0])
    _check_equal("v", "seqlen of k", v.shape[1], k.shape[1])
    return _problem("dense", q, k, v, options, (q.shape[0], q.shape[1], k.shape[1]), {})


def varlen(q, k, v, sequences: PackedSequences, options: AttentionOptions) -> AttentionProblem:
    """Checks a call on packed sequences."""
    paged = sequences.block_table is not None
    rows_k = "(num_pages, page_size" if paged else "(total_k"
    _check_rank("q", q, "(total_q, heads_q, head_dim)")
    _check_rank("k", k, f"{rows_k}, heads_kv, head_dim)")
    _check_rank("v", v, f"{rows_k}, heads_kv, head_dim_v)")
    _check_heads(q, k, v)
    _check_equal("v", "rows of k", tuple(v.shape[:-2]), tuple(k.shape[:-2]))
    _check_index("cu_seqlens_q", sequences.cu_seqlens_q, q)
    batch = sequences.cu_seqlens_q.shape[0] - 1
    if batch < 0:
        raise ValueError(
            expected("cu_seqlens_q", "shape (batch + 1,)", "an empty tensor", "Begin it with 0, and end it with total_q")
        )
    _check_index("cu_seqlens_k", sequences.cu_seqlens_k, q, (batch + 1,))
    for name in ("seqused_q", "seqused_k"):
        if getattr(sequences, name) is not None:
            _check_index(name, getattr(sequences, name), q, (batch,))
    if paged:
        _check_block_table(sequences.block_table, "k", k, q, batch)
    for name in ("max_seqlen_q", "max_seqlen_k"):
        _check_count(name, getattr(sequences, name))
    sizes = (batch, int(sequences.max_seqlen_q), int(sequences.max_seqlen_k))
    seqused = sequences.seqused_q is not None or sequences.seqused_k is not None
    return _problem("varlen", q, k, v, options, sizes, {"seqused": seqused, "block_table": paged})


def kvcache(q, k_cache, v_cache, cache: CacheUpdate, options: AttentionOptions) -> AttentionProblem:
    """Checks a call on a key-value cache."""
    paged = cache.block_table is not None
    rows = "(num_pages, page_size" if paged else "(num_slots, seqlen_cache"
    _check_rank("q", q, "(batch, seqlen_q, heads_q, head_dim)")
    _check_rank("k_cache", k_cache, f"{rows}, heads_kv, head_dim)")
    _check_rank("v_cache", v_cache, f"{rows}, heads_kv, head_dim_v)")
    _check_heads(q, k_cache, v_cache, names=("q", "k_cache", "v_cache"))
    _check_equal("v_cache", "rows of k_cache", tuple(v_cache.shape[:2]), tuple(k_cache.shape[:2]))
    batch, seqlen_k = q.shape[0], k_cache.shape[1]
    if paged:
        _check_block_table(cache.block_table, "k_cache", k_cache, q, batch)
        seqlen_k = seqlen_k * cache.block_table.shape[1]
        for name in ("cache_batch_idx", "cache_leftpad"):
            if getattr(cache, name) is not None:
                advice = "Reorder the rows of block_table instead" if name == "cache_batch_idx" else "Drop one of the two"
                raise NotSupportedError(expected(name, "None together with block_table", "a tensor", advice))
    elif cache.cache_batch_idx is None and k_cache.shape[0] < batch:
        rule, got = f"a slot for each of {batch} sequences", f"{k_cache.shape[0]} slots"
        raise ValueError(expected("k_cache", rule, got, "Without cache_batch_idx, sequence b uses slot b"))
    for name in ("cache_batch_idx", "cache_leftpad"):
        if getattr(cache, name) is not None:
            _check_index(name, getattr(cache, name), q, (batch,))
    if isinstance(cache.cache_seqlens, torch.Tensor):
        _check_index("cache_seqlens", cache.cache_seqlens, q, (batch,))
    elif cache.cache_seqlens is not None:
        _check_count("cache_seqlens", cache.cache_seqlens)
    _check_appended(q, k_cache, v_cache, cache)
    _check_rotary(q, cache)
    problem = _problem("kvcache", q, k_cache, v_cache, options, (batch, q.shape[1], seqlen_k), {"block_table": paged})
    tensors = {"q": q, "k_cache": k_cache, "v_cache": v_cache, "learnable_sink": options.learnable_sink}
    tensors |= {name: getattr(cache, name) for name in ("k", "v", "rotary_cos", "rotary_sin")}
    for name, tensor in tensors.items() if torch.is_grad_enabled() else ():
        if tensor is not None and tensor.requires_grad:
            advice = "flash_attn_with_kvcache has no backward; call it under torch.no_grad()"
            raise NotSupportedError(expected(name, "a tensor that needs no gradient", "requires_grad=True", advice))
    return problem


def unpack(name: str, packed, layout: str):
    """Views of the tensors that lie side by side in `packed`; layout names its dimensions, the third-last is their number."""
    _check_rank(name, packed, layout)
    count = int(layout.split(", ")[-3].lstrip("("))
    if packed.shape[-3] != count:
        raise ValueError(expected(name, f"shape {layout}", tuple(packed.shape), "Stack the tensors in dimension -3"))
    return packed.unbind(-3)


def has_values(tensor) -> bool:
    """Whether the values inside a tensor may be read: on the CPU, and not while a graph is traced."""
    return tensor.device.type == "cpu" and not torch.compiler.is_compiling() and not isinstance(tensor, FakeTensor)


def varlen_values(q, k, sequences: PackedSequences) -> None:
    """Checks the values inside the index tensors of a packed call."""
    paged = sequences.block_table is not None
    for side, total in (("q", q.shape[0]), ("k", None if paged else k.shape[0])):
        name, cu_seqlens = f"cu_seqlens_{side}", getattr(sequences, f"cu_seqlens_{side}").tolist()
        lengths = [end - begin for begin, end in zip(cu_seqlens, cu_seqlens[1:])]
        if cu_seqlens[0] != 0:
            raise ValueError(expected(name, "a first element of 0", cu_seqlens[0], "Begin it with 0"))
        if lengths and min(lengths) < 0:
            raise ValueError(
                expected(name, "values that never decrease", cu_seqlens, "Pass the running sum of the sequence lengths")
            )
        if total is not None and cu_seqlens[-1] > total:
            advice = f"Pass all rows that {name} counts"
            raise ValueError(expected(side, f"at least the {cu_seqlens[-1]} rows of {name}", f"{total} rows", advice))
        if getattr(sequences, f"seqused_{side}") is not None:
            seqused = getattr(sequences, f"seqused_{side}").tolist()
            if not all(0 <= used <= length for used, length in zip(seqused, lengths)):
                rule = f"values between 0 and the lengths {lengths}"
                raise ValueError(expected(f"seqused_{side}", rule, seqused, "It counts the rows of each sequence that are used"))
            lengths = seqused
        max_seqlen = int(getattr(sequences, f"max_seqlen_{side}"))
        if lengths and max(lengths) > max_seqlen:
            rule = f"at least the longest sequence, {max(lengths)}"
            raise ValueError(expected(f"max_seqlen_{side}", rule, max_seqlen, "Pass a bound that holds for every sequence"))
        if side == "k" and paged:
            _check_pages(sequences.block_table, lengths, k)


def kvcache_values(k_cache, cache: CacheUpdate, problem: AttentionProblem) -> None:
    """Checks the values inside the index tensors of a call on a cache; cache.cache_seqlens must be a tensor."""
    seqlen_new = 0 if cache.k is None else cache.k.shape[1]
    capacity = k_cache.shape[1] * (1 if cache.block_table is None else cache.block_table.shape[1])
    lengths = cache.cache_seqlens.tolist()
    if not all(0 <= length <= capacity - seqlen_new for length in lengths):
        rule = f"values between 0 and {capacity - seqlen_new}, the cache's {capacity} rows less {seqlen_new} to append"
        raise ValueError(expected("cache_seqlens", rule, lengths, "Pass a longer cache, or fewer keys"))
    if cache.cache_batch_idx is not None:
        slots = cache.cache_batch_idx.tolist()
        if not all(0 <= slot < k_cache.shape[0] for slot in slots):
            rule = f"values between 0 and {k_cache.shape[0] - 1}"
            raise ValueError(expected("cache_batch_idx", rule, slots, "It names slots of k_cache"))
        if seqlen_new and len(set(slots)) < len(slots):
            raise ValueError(expected("cache_batch_idx", "different slots", slots, "Two appends would overwrite each other"))
    if cache.cache_leftpad is not None:
        leftpad = cache.cache_leftpad.tolist()
        if not all(0 <= pad <= length for pad, length in zip(leftpad, lengths)):
            rule = f"values between 0 and cache_seqlens {lengths}"
            raise ValueError(expected("cache_leftpad", rule, leftpad, "It counts the rows before the first key"))
    if cache.rotary_cos is not None:
        # Under a mask that knows positions queries have one each, else they share that of the first.
        num_positions = max(seqlen_new, 1 if problem.scores.mask.is_full else problem.seqlen_q)
        needed = max(lengths, default=0) + num_positions
        if cache.rotary_cos.shape[0] < needed:
            rows = f"{cache.rotary_cos.shape[0]} rows"
            raise ValueError(expected("rotary_cos", f"at least {needed} rows", rows, "Compute it for every position"))
    if cache.block_table is not None:
        _check_pages(cache.block_table, [length + seqlen_new for length in lengths], k_cache)
        _check_appended_pages(cache, k_cache.shape[1], lengths, seqlen_new)


def _problem(layout, q, k, v, options: AttentionOptions, sizes, features) -> AttentionProblem:
    """The problem of checked tensors; checks the options. features: option name -> used, of the layout's own options."""
    batch, seqlen_q, seqlen_k = sizes
    scores = _scores(q, options)
    _check_score_tensors(q, options, batch)
    mask = scores.mask
    used = {
        **features,
        layout: True,
        "gqa": q.shape[-2] != k.shape[-2],
        "head_dim_v": v.shape[-1] != q.shape[-1],
        "causal": mask.right == 0,
        "window": mask.left is not None or mask.right not in (None, 0),
        "attention_chunk": mask.chunk > 0,
        "softcap": scores.softcap > 0,
        "dropout": scores.dropout_p > 0,
        "alibi_slopes": options.alibi_slopes is not None,
        "learnable_sink": options.learnable_sink is not None,
        "lse": options.return_lse,
        "return_attn_probs": options.return_attn_probs,
        "deterministic": options.deterministic or torch.are_deterministic_algorithms_enabled(),
    }
    return AttentionProblem(
        layout=layout,
        dtype=_dtype_name(q),
        batch=batch,
        seqlen_q=seqlen_q,
        seqlen_k=seqlen_k,
        num_heads_q=q.shape[-2],
        num_heads_kv=k.shape[-2],
        head_dim=q.shape[-1],
        head_dim_v=v.shape[-1],
        scores=scores,
        features=frozenset(name for name, is_used in used.items() if is_used),
    )


def _scores(q, options: AttentionOptions) -> ScoreSpec:
    scale = q.shape[-1] ** -0.5 if options.softmax_scale is None else options.softmax_scale
    if not _is_number(scale) or not -math.inf < scale < math.inf:
        raise ValueError(expected("softmax_scale", "a finite number or None", scale, "None means head_dim ** -0.5"))
    if not _is_number(options.softcap) or not 0 <= options.softcap < math.inf:
        raise ValueError(expected("softcap", "a finite number >= 0", options.softcap, "0 means no softcap"))
    if not _is_number(options.dropout_p) or not 0 <= options.dropout_p < 1:
        raise ValueError(expected("dropout_p", "a probability in [0, 1)", options.dropout_p, "0 means no dropout"))
    _check_count("attention_chunk", options.attention_chunk, advice="0 means no chunks")
    _check_count("num_splits", options.num_splits, advice="0 lets the package choose")
    if options.pack_gqa not in (None, True, False):
        raise ValueError(expected("pack_gqa", "True, False or None", options.pack_gqa, "None lets the package choose"))
    left, right = _window(options.window_size)
    mask = MaskSpec(left, 0 if options.causal else right, min(int(options.attention_chunk), MAX_LENGTH))
    return ScoreSpec(float(scale), mask, float(options.softcap), float(options.dropout_p))


def _window(window_size):
    sides = tuple(window_size) if isinstance(window_size, (tuple, list)) else ()
    if len(sides) != 2 or not all(side is None or (_is_int(side) and side >= -1) for side in sides):
        rule = "(left, right), each an integer >= -1 or None"
        raise ValueError(expected("window_size", rule, window_size, "-1 and None mean no bound on that side"))
    return (None if side is None or side == -1 else min(int(side), MAX_LENGTH) for side in sides)


def _check_score_tensors(q, options: AttentionOptions, batch: int) -> None:
    heads = q.shape[-2]
    for name, shapes in (("alibi_slopes", ((heads,), (batch, heads))), ("learnable_sink", ((heads,),))):
        tensor = getattr(options, name)
        if tensor is None:
            continue
        _check_is_tensor(name, tensor)
        rule = " or ".join(str(shape) for shape in shapes)
        if tuple(tensor.shape) not in shapes:
            raise ValueError(expected(name, f"shape {rule}", tuple(tensor.shape), "It has one value for each query head"))
        _check_floating(name, tensor)
        _check_device(name, tensor, q)
    if options.alibi_slopes is not None and options.alibi_slopes.requires_grad and torch.is_grad_enabled():
        advice = "Detach it; use learnable_sink or a bias for trainable scores"
        raise NotSupportedError(expected("alibi_slopes", "a tensor that needs no gradient", "requires_grad=True", advice))


def _check_heads(q, k, v, names=("q", "k", "v")) -> None:
    """The rules that all layouts share: dtype, device, heads and head_dim, the last two dimensions of each tensor."""
    q_name, k_name, v_name = names
    on_cpu = q.device.type in ("cpu", "meta")
    allowed = REFERENCE_DTYPES if on_cpu else KERNEL_DTYPES
    if _dtype_name(q) not in allowed:
        rule = f"one of {', '.join(allowed)} on {q.device.type}"
        advice = "Cast it" if on_cpu else "Cast it, or call under torch.autocast"
        raise TypeError(expected(q_name, rule, _dtype_name(q), advice))
    for name, tensor in ((k_name, k), (v_name, v)):
        if tensor.dtype != q.dtype:
            raise TypeError(
                expected(name, f"the dtype of q, {_dtype_name(q)}", _dtype_name(tensor), "Cast one of them")
            )
        _check_device(name, tensor, q)
    for name, tensor in zip(names, (q, k, v)):
        if min(tensor.shape[-2:]) < 1:
            rule, got = "at least one head and a head_dim of at least 1", f"shape {tuple(tensor.shape)}"
            raise ValueError(expected(name, rule, got, "Only batch and seqlen may be 0"))
    _check_equal(k_name, "head_dim of q", k.shape[-1], q.shape[-1])
    _check_equal(v_name, f"number of heads of {k_name}", v.shape[-2], k.shape[-2])
    if q.shape[-2] % k.shape[-2]:
        rule = f"a number of heads that is a multiple of the {k.shape[-2]} heads of {k_name}"
        raise ValueError(expected(q_name, rule, q.shape[-2], "Each key-value head serves equally many query heads"))
    if not on_cpu:
        for name, head_dim in ((q_name, q.shape[-1]), (v_name, v.shape[-1])):
            if head_dim % 8 or head_dim > MAX_HEAD_DIM:
                rule = f"a head_dim that is a multiple of 8 up to {MAX_HEAD_DIM} on cuda"
                raise ValueError(expected(name, rule, head_dim, "Pad it with zeros"))


def _check_appended(q, k_cache, v_cache, cache: CacheUpdate) -> None:
    if (cache.k is None) != (cache.v is None):
        missing, given = ("k", "v") if cache.k is None else ("v", "k")
        raise ValueError(expected(missing, f"a tensor together with {given}", None, "Pass both, or neither"))
    if cache.k is None:
        return
    if cache.cache_seqlens is None:
        raise ValueError(expected("cache_seqlens", "a value together with k", None, "It says where k is appended"))
    for name, tensor, like in (("k", cache.k, k_cache), ("v", cache.v, v_cache)):
        _check_rank(name, tensor, "(batch, seqlen_new, heads_kv, head_dim)")
        shape = (q.shape[0], cache.k.shape[1], *like.shape[2:])
        if tuple(tensor.shape) != shape:
            raise ValueError(expected(name, f"shape {shape}", tuple(tensor.shape), f"It is appended to {name}_cache"))
        if tensor.dtype != q.dtype:
            raise TypeError(expected(name, f"the dtype of q, {_dtype_name(q)}", _dtype_name(tensor), "Cast one of them"))
        _check_device(name, tensor, q)


def _check_appended_pages(cache: CacheUpdate, page_size: int, lengths, seqlen_new: int) -> None:
    """A page that receives keys must serve one sequence alone: what others read there would depend on the schedule."""
    rows = [row[: -(-(length + seqlen_new) // page_size)] for row, length in zip(cache.block_table.tolist(), lengths)]
    num_users = Counter(page for row in rows for page in set(row))
    shared = {page for row, length in zip(rows, lengths) for page in row[length // page_size :] if num_users[page] > 1}
    if seqlen_new and shared:
        rule = "pages of its own for the keys that a sequence appends"
        raise ValueError(expected("block_table", rule, f"shared pages {sorted(shared)}", "Copy a page before it is extended"))


def _check_rotary(q, cache: CacheUpdate) -> None:
    if cache.rotary_cos is None and cache.rotary_sin is None:
        return
    if cache.k is None:
        raise ValueError(expected("k", "a tensor together with rotary_cos", None, "Rotary applies to appended keys"))
    for name in ("rotary_cos", "rotary_sin"):
        _check_rank(name, getattr(cache, name), "(seqlen_rotary, rotary_dim / 2)")
        _check_floating(name, getattr(cache, name))
        _check_device(name, getattr(cache, name), q)
    _check_equal("rotary_sin", "shape of rotary_cos", tuple(cache.rotary_sin.shape), tuple(cache.rotary_cos.shape))
    if 2 * cache.rotary_cos.shape[1] > q.shape[-1]:
        rule = f"a rotary_dim of at most head_dim {q.shape[-1]}"
        raise ValueError(expected("rotary_cos", rule, 2 * cache.rotary_cos.shape[1], "It holds rotary_dim / 2 columns"))


def _check_block_table(block_table, pages_name: str, pages, q, batch: int) -> None:
    _check_is_tensor("block_table", block_table)
    if block_table.ndim != 2 or block_table.shape[0] != batch:
        rule, got = f"shape ({batch}, pages per sequence)", tuple(block_table.shape)
        raise ValueError(expected("block_table", rule, got, "It has one row of page numbers for each sequence"))
    if not pages.shape[1]:
        raise ValueError(expected(pages_name, "a page_size of at least 1", 0, "Its shape is (num_pages, page_size, ...)"))
    _check_index_dtype("block_table", block_table)
    _check_device("block_table", block_table, q)


def _check_pages(block_table, lengths, pages) -> None:
    num_pages, page_size = pages.shape[:2]
    for row, length in zip(block_table.tolist(), lengths):
        if length > page_size * len(row):
            rule = f"at least {-(-length // page_size)} pages for a sequence of {length} keys"
            raise ValueError(expected("block_table", rule, f"{len(row)} pages", "Pass more columns"))
        used = row[: -(-length // page_size)]
        if not all(0 <= page < num_pages for page in used):
            raise ValueError(
                expected("block_table", f"values between 0 and {num_pages - 1}", used, "It names pages of the cache")
            )


def _check_index(name: str, tensor, q, shape=None) -> None:
    """A one-dimensional tensor of indices or lengths on q's device, of `shape` where given."""
    _check_is_tensor(name, tensor)
    if tensor.ndim != 1 or (shape is not None and tuple(tensor.shape) != shape):
        rule = "one dimension" if shape is None else f"shape {shape}"
        raise ValueError(expected(name, rule, f"shape {tuple(tensor.shape)}", "It belongs to the batch, one value a sequence"))
    _check_index_dtype(name, tensor)
    _check_device(name, tensor, q)


def _check_index_dtype(name: str, tensor) -> None:
    if tensor.dtype not in (torch.int32, torch.int64):
        raise TypeError(expected(name, "dtype int32 or int64", _dtype_name(tensor), "Cast it to int32"))


def _check_rank(name: str, tensor, layout: str) -> None:
    _check_is_tensor(name, tensor)
    rank = layout.count(",") + 1
    if tensor.ndim != rank:
        raise ValueError(
            expected(name, f"{rank} dimensions {layout}", f"{tensor.ndim}: {tuple(tensor.shape)}", "Reshape it")
        )


def _check_floating(name: str, tensor) -> None:
    if not tensor.dtype.is_floating_point:
        raise TypeError(expected(name, "a floating-point dtype", _dtype_name(tensor), "Use float32"))


def _check_is_tensor(name: str, tensor) -> None:
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(expected(name, "a torch.Tensor", type(tensor).__name__, "Pass a tensor"))


def _check_device(name: str, tensor, q) -> None:
    if tensor.device != q.device:
        raise ValueError(expected(name, f"the device of q, {q.device}", tensor.device, "Move one of them"))


def _check_equal(name: str, what: str, got, wanted) -> None:
    if got != wanted:
        raise ValueError(expected(name, f"the {what}, {wanted}", got, "Check the shapes"))


def _check_count(name: str, value, advice: str = "Pass a length") -> None:
    is_scalar = isinstance(value, torch.Tensor) and value.ndim == 0 and value.dtype in (torch.int32, torch.int64)
    if not (_is_int(value) or is_scalar) or value < 0:
        raise ValueError(expected(name, "an integer >= 0", value, advice))


def _is_int(value) -> bool:
    return isinstance(value, (int, torch.SymInt, Integral)) and not isinstance(value, bool)


def _is_number(value) -> bool:
    return isinstance(value, (int, float, torch.SymFloat, Real)) and not isinstance(value, bool)


def _dtype_name(tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
