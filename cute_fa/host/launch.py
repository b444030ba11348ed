"""Launch: one call of attention on a Hopper GPU, from checked tensors to kernels in flight on torch's current stream."""

from functools import lru_cache

import torch

from cute_fa.core.errors import NotSupportedError, expected
from cute_fa.core.mask_spec import MaskSpec
from cute_fa.core.problem import AttentionProblem, ScoreSpec
from cute_fa.host import cache
from cute_fa.tuning.heuristics import backward_plans, forward_plan
from cute_fa.tuning.plan import ForwardPlan

MAX_TILES = 2**31 - 2**16  # their numbers have 32 bits, and every CTA asks for one behind the last

TMA_ALIGNMENT_BYTES = 16  # of addresses and strides; PTX ISA, "tensor maps"

# One pair of zeros for each stream of each device. Launches on one stream follow each other and leave zeros behind, so
# they share it; launches on different streams may run together and must not. Streams are told apart by their handles, so
# a handle must name one stream: an external stream is not destroyed with a launch in flight, nor is it the per-thread one.
_counters: dict[tuple[int, int], torch.Tensor] = {}


def forward(q, k, v, softmax_scale: float, mask: tuple):
    """out (batch, seqlen_q, heads_q, head_dim_v) and lse (batch, heads_q, seqlen_q), fp32, of a dense call.

    Tensors are those of `api.flash_attn_func`, checked by `validate` and `support`; mask: (left, right, chunk) as in
    MaskSpec. A tensor that TMA cannot read as it lies is copied. The caller's device need not be current.
    """
    device_index = q.get_device()
    if device_index != torch.cuda.current_device():
        with torch.cuda.device(device_index):
            return forward(q, k, v, softmax_scale, mask)
    q_shape, v_shape = q.shape, v.shape
    strides = q.stride(), k.stride(), v.stride()
    plan, num_sms, has_tma_strides = _prepare(device_index, q.dtype, mask, (q_shape, k.shape, v_shape), strides)
    out = q.new_empty((*q_shape[:3], v_shape[3]))
    lse = q.new_empty((q_shape[0], q_shape[2], q_shape[1]), dtype=torch.float32)
    if plan is None:
        return out.zero_(), lse.fill_(-torch.inf)
    q, k, v = _as_tma_reads((q, k, v), has_tma_strides)
    cache.load(plan)(q, k, v, out, lse, _counter(device_index), softmax_scale, num_sms)
    return out, lse


@lru_cache(maxsize=4096)
def _prepare(device_index: int, dtype, mask: tuple, shapes: tuple, strides: tuple):
    """(plan, SMs of the device, whether TMA takes the strides as they are); plan None where there is no pair to score."""
    num_sms = sm_count(device_index)
    q_shape, _, v_shape = shapes
    has_pairs = 0 not in q_shape and 0 not in v_shape
    plan = plan_of(dtype, q_shape, v_shape, mask, num_sms) if has_pairs else None
    if plan and q_shape[0] * q_shape[2] * -(-q_shape[1] // plan.tile.tile_m) > MAX_TILES:
        rule = f"at most {MAX_TILES} tiles of {plan.tile.tile_m} queries of one head"
        raise NotSupportedError(expected("q", rule, f"shape {tuple(q_shape)}", "Split the batch"))
    return plan, num_sms, _all_have_tma_strides(dtype, shapes, strides)


def backward(inputs, results, gradients, softmax_scale: float, mask: tuple, is_deterministic: bool, needs: tuple):
    """dq, dk, dv of a dense call, each like its tensor and contiguous.

    inputs: q, k, v. results: out, lse, what `forward` gave for them. gradients: dout, like out with any strides, and dlse,
    like lse with any strides, or None. needs: three bools, at least one is True; where one is False the gradient is None.
    Takes workspace: an fp32 accumulator of dq where that is needed, padded to blocks of queries and to the compiled head_dim;
    two fp32 numbers a query; and where the order is fixed, one int32 a block.
    """
    q, k, v = inputs
    device_index = q.get_device()
    if device_index != torch.cuda.current_device():
        with torch.cuda.device(device_index):
            return backward(inputs, results, gradients, softmax_scale, mask, is_deterministic, needs)
    (out, lse), (dout, dlse) = results, gradients
    tensors = q, k, v, out, dout
    shapes, strides = tuple(x.shape for x in tensors), tuple(x.stride() for x in tensors)
    plans, has_tma_strides = _prepare_backward(q.dtype, mask, shapes, strides, is_deterministic, needs)
    dq, dk, dv = (x.new_empty(x.shape) if needed else None for x, needed in zip(inputs, needs))
    if plans is None:
        return tuple(x if x is None else x.zero_() for x in (dq, dk, dv))
    plan, before, after = plans
    q, k, v, out, dout = _as_tma_reads(tensors, has_tma_strides)
    tile_m, head_dim = plan.tile.tile_m, plan.tile.head_dim
    num_blocks = q.shape[0] * q.shape[2] * -(-q.shape[1] // tile_m)
    fp32 = {"dtype": torch.float32, "device": q.device}
    statistics = torch.empty((num_blocks, 2, tile_m), **fp32)
    accumulator = torch.zeros((num_blocks, tile_m * head_dim), **fp32) if plan.needs_dq else None
    semaphores = torch.zeros(num_blocks + 1, dtype=torch.int32, device=q.device) if plan.is_deterministic else None
    has_dlse = dlse is not None
    cache.load(before)(out, dout, lse, dlse if has_dlse else lse, int(has_dlse), statistics)
    cache.load(plan)((q, k, v), dout, statistics, accumulator, (dk, dv), semaphores, softmax_scale)
    if plan.needs_dq:
        cache.load(after)(accumulator, dq, softmax_scale)
    return dq, dk, dv


@lru_cache(maxsize=4096)
def _prepare_backward(dtype, mask: tuple, shapes: tuple, strides: tuple, is_deterministic: bool, needs: tuple):
    """(plans of the main kernel, of the one before and of the one after it, whether TMA takes the strides as they are);
    plans None where there is no pair to score."""
    q_shape, _, v_shape, *_ = shapes
    has_pairs = 0 not in q_shape and 0 not in v_shape
    plans = backward_plans(problem_of(dtype, q_shape, v_shape, mask, is_deterministic), needs) if has_pairs else None
    return plans, _all_have_tma_strides(dtype, shapes, strides)


def _as_tma_reads(tensors, has_tma_strides: bool):
    """The tensors, with a contiguous copy in place of each that TMA cannot read as it lies."""
    addresses = 0
    for x in tensors:
        addresses |= x.data_ptr()
    if has_tma_strides and not addresses % TMA_ALIGNMENT_BYTES:
        return tensors
    return [x if is_tma_readable(x) else x.clone(memory_format=torch.contiguous_format) for x in tensors]


def is_tma_readable(x) -> bool:
    """Whether rows are contiguous, and the address and every stride that counts are multiples of 16 bytes."""
    return x.data_ptr() % TMA_ALIGNMENT_BYTES == 0 and _has_tma_strides(x.itemsize, x.shape, x.stride())


def _all_have_tma_strides(dtype, shapes: tuple, strides: tuple) -> bool:
    return all(_has_tma_strides(dtype.itemsize, *pair) for pair in zip(shapes, strides))


def _has_tma_strides(itemsize: int, shape, strides) -> bool:
    step = TMA_ALIGNMENT_BYTES // itemsize
    return strides[-1] == 1 and all(size == 1 or stride % step == 0 for size, stride in zip(shape[:-1], strides))


def sm_count(device_index: int) -> int:
    return torch.cuda.get_device_properties(device_index).multi_processor_count


def plan_of(dtype, q_shape, v_shape, mask: tuple, num_sms: int) -> ForwardPlan:
    """The forward plan of a dense call on a device with num_sms SMs."""
    return forward_plan(problem_of(dtype, q_shape, v_shape, mask), num_sms)


def problem_of(dtype, q_shape, v_shape, mask: tuple, is_deterministic: bool = False) -> AttentionProblem:
    """A dense call as far as plans depend on it; they do not depend on the scale, for which 1 stands."""
    batch, seqlen_q, heads_q, head_dim = q_shape
    _, seqlen_k, heads_kv, head_dim_v = v_shape
    sizes = batch, seqlen_q, seqlen_k, heads_q, heads_kv, head_dim, head_dim_v
    features = frozenset({"deterministic"} if is_deterministic else ())
    name = str(dtype).removeprefix("torch.")
    return AttentionProblem("dense", name, *sizes, ScoreSpec(1.0, MaskSpec(*mask)), features)


def _counter(device_index: int) -> torch.Tensor:
    """Two zeros that no other launch uses while this one runs."""
    if torch.cuda.is_current_stream_capturing():
        # A graph may be replayed beside anything else, so each of its launches clears two words of its own.
        return _zeros(device_index)
    # The same as torch.cuda.current_stream(device_index).cuda_stream, without an object.
    key = device_index, torch._C._cuda_getCurrentRawStream(device_index)
    counter = _counters.get(key)
    if counter is None:
        counter = _counters[key] = _zeros(device_index)
    return counter


def _zeros(device_index: int) -> torch.Tensor:
    return torch.zeros(2, dtype=torch.int32, device=torch.device("cuda", device_index))
