"""The operator `cute_fa::attention_kvcache`: attention over a key-value cache, which it may extend in place. No autograd."""

import dataclasses
from typing import NamedTuple, Optional

import torch

from cute_fa.core.call import AttentionOptions, CacheUpdate
from cute_fa.core.mask_spec import MaskSpec
from cute_fa.core.problem import ScoreSpec
from cute_fa.host import support, validate
from cute_fa.ops.library import autocast, define
from cute_fa.reference import kvcache as reference_kvcache
from cute_fa.reference.dense import ScoreTensors, compute_dtype

Tensor = torch.Tensor
_CACHE_FIELDS = tuple(field.name for field in dataclasses.fields(CacheUpdate))


class Call(NamedTuple):
    """Everything beside q, k_cache and v_cache, in the order of the operator's schema."""

    cache_seqlens: Tensor
    k: Optional[Tensor]
    v: Optional[Tensor]
    rotary_cos: Optional[Tensor]
    rotary_sin: Optional[Tensor]
    cache_batch_idx: Optional[Tensor]
    cache_leftpad: Optional[Tensor]
    block_table: Optional[Tensor]
    alibi_slopes: Optional[Tensor]
    learnable_sink: Optional[Tensor]
    rotary_interleaved: bool
    softmax_scale: float
    window_left: Optional[int]
    window_right: Optional[int]
    attention_chunk: int
    softcap: float

    @property
    def cache(self) -> CacheUpdate:
        return CacheUpdate(**{name: getattr(self, name) for name in _CACHE_FIELDS})

    @property
    def scores(self) -> ScoreSpec:
        mask = MaskSpec(self.window_left, self.window_right, self.attention_chunk)
        return ScoreSpec(self.softmax_scale, mask, self.softcap)


def attend(q, k_cache, v_cache, cache: CacheUpdate, options: AttentionOptions):
    """Attention over a cache; returns (out, lse) or out as `options.return_lse` says (see `api`)."""
    if getattr(k_cache, "dtype", None) != torch.float32:  # autocast does not reach what the cache holds already
        q, k, v = autocast(q, cache.k, cache.v)
        cache = dataclasses.replace(cache, k=k, v=v)
    problem = validate.kvcache(q, k_cache, v_cache, cache, options)
    support.require(problem, q.device)
    lengths = cache.cache_seqlens
    if not isinstance(lengths, Tensor):
        held = problem.seqlen_k if lengths is None else int(lengths)
        lengths = torch.full((problem.batch,), held, dtype=torch.int32, device=q.device)
    cache = dataclasses.replace(cache, cache_seqlens=lengths)
    if validate.has_values(q):
        validate.kvcache_values(k_cache, cache, problem)
    call = Call(
        **{name: getattr(cache, name) for name in _CACHE_FIELDS},
        alibi_slopes=options.alibi_slopes,
        learnable_sink=options.learnable_sink,
        softmax_scale=problem.scores.scale,
        window_left=problem.scores.mask.left,
        window_right=problem.scores.mask.right,
        attention_chunk=problem.scores.mask.chunk,
        softcap=problem.scores.softcap,
    )
    out, lse = torch.ops.cute_fa.attention_kvcache(q, k_cache, v_cache, *call)
    return (out, lse) if options.return_lse else out


def _fake(q, k_cache, v_cache, *flat):
    batch, seqlen_q, num_heads, _ = q.shape
    out = q.new_empty(batch, seqlen_q, num_heads, v_cache.shape[-1])
    return out, q.new_empty((batch, num_heads, seqlen_q), dtype=compute_dtype(q.dtype))


def _cpu(q, k_cache, v_cache, *flat):
    call = Call(*flat)
    tensors = ScoreTensors(call.alibi_slopes, call.learnable_sink)
    return reference_kvcache.attend(q, k_cache, v_cache, call.cache, call.scores, tensors)


define("attention_kvcache", ("q", "k_cache!", "v_cache!"), Call, returns=2, cpu=_cpu, fake=_fake)
