"""Launch: one call of attention on a Hopper GPU, from checked tensors to kernels in flight on torch's current stream."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
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
# A new pair comes from a thread of its own: a pool of memory, such as that of torch.compile's CUDA graphs, takes whatever
# the thread that entered it allocates, and would take the pair back.
_counters: dict[tuple[int, int], torch.Tensor] = {}


# (sizes, strides, dtype) -> memory on the current device; sizes and strides are tuples, no torch.Size. It is what code that
# inductor compiled calls: through the dispatcher an allocation takes twice as long on the host.
_empty_strided = getattr(torch._C._dynamo.guards, "_empty_strided_cuda", None) or (
    lambda sizes, strides, dtype: torch.empty_strided(sizes, strides, dtype=dtype, device="cuda")
)


def forward(q, k, v, softmax_scale: float, mask: tuple):
    """out (batch, seqlen_q, heads_q, head_dim_v) and lse (batch, heads_q, seqlen_q), fp32, of a dense call.

    Tensors are those of `api.flash_attn_func`, checked by `validate` and `support`; mask: (left, right, chunk) as in
    MaskSpec. A tensor that TMA cannot read as it lies is copied. The caller's device need not be current.
    """
    shapes, strides = (q.shape, k.shape, v.shape), (q.stride(), k.stride(), v.stride())
    return forward_launch(q.get_device(), q.dtype, mask, shapes, strides)(q, k, v, softmax_scale)


@lru_cache(maxsize=4096)
def forward_launch(device_index: int, dtype, mask: tuple, shapes: tuple, strides: tuple) -> Callable:
    """`forward` of all calls with these shapes and strides: (q, k, v, softmax_scale, needs_lse) -> out, lse. Loads the kernel.

    Where lse is not needed it is empty, which saves an allocation.
    """
    q_shape, _, v_shape = shapes
    batch, seqlen_q, heads_q, _ = q_shape
    num_sms = sm_count(device_index)
    kernel = None  # where there is no pair to score
    if 0 not in q_shape and 0 not in v_shape:
        plan = plan_of(dtype, q_shape, v_shape, mask, num_sms)
        if batch * heads_q * -(-seqlen_q // plan.tile.tile_m) > MAX_TILES:
            rule = f"at most {MAX_TILES} tiles of {plan.tile.tile_m} queries of one head"
            raise NotSupportedError(expected("q", rule, f"shape {tuple(q_shape)}", "Split the batch"))
        kernel = cache.load(plan)
    has_tma_strides = _all_have_tma_strides(dtype, shapes, strides)
    out_facts = *_contiguous(batch, seqlen_q, heads_q, v_shape[3]), dtype
    lse_facts = *_contiguous(batch, heads_q, seqlen_q), torch.float32
    no_lse = _empty_lse(device_index)

    def launch(q, k, v, softmax_scale: float, needs_lse: bool = True):
        if torch._C._cuda_getDevice() != device_index:
            with torch.cuda.device(device_index):
                return launch(q, k, v, softmax_scale, needs_lse)
        out, lse = _empty_strided(*out_facts), _empty_strided(*lse_facts) if needs_lse else no_lse
        if kernel is None:
            return out.zero_(), lse.fill_(-torch.inf)
        if not has_tma_strides:
            q, k, v = _as_tma_reads((q, k, v))
        results = out, lse, _counter(device_index), softmax_scale, num_sms
        try:
            kernel(q, k, v, *results)
        except ValueError:  # Before the launch: the kernel looks at addresses itself.
            kernel(*_as_tma_reads((q, k, v)), *results)
        return out, lse

    return launch


def _contiguous(*sizes: int) -> tuple[tuple, tuple]:
    """The sizes, and the strides that torch gives them; for empty tensors too."""
    return sizes, torch.empty(sizes, device="meta").stride()


def backward(inputs, results, gradients, softmax_scale: float, mask: tuple, is_deterministic: bool, needs: tuple):
    """dq, dk, dv of a dense call, each like its tensor and contiguous.

    inputs: q, k, v. results: out, lse, what `forward` gave for them. gradients: dout, like out with any strides, and dlse,
    like lse with any strides, or None. needs: three bools, at least one is True; where one is False the gradient is None.
    Takes workspace: an fp32 accumulator of dq where that is needed, padded to blocks of queries and to the compiled head_dim;
    two fp32 numbers a query; and int32 counters, one a query head, two an SM and, where the order is fixed, one a block of
    queries. The caller's device need not be current.
    """
    q = inputs[0]
    tensors = *inputs, results[0], gradients[0]
    shapes, strides = tuple(x.shape for x in tensors), tuple(x.stride() for x in tensors)
    launch = _backward_launch(q.get_device(), q.dtype, mask, shapes, strides, is_deterministic, needs)
    return launch(tensors, results[1], gradients[1], softmax_scale)


@lru_cache(maxsize=4096)
def _backward_launch(
    device_index: int, dtype, mask: tuple, shapes: tuple, strides: tuple, is_deterministic: bool, needs: tuple
) -> Callable:
    """`backward` of all calls with these shapes and strides: (q k v out dout, lse, dlse, softmax_scale) -> dq, dk, dv."""
    q_shape, _, v_shape, *_ = shapes
    batch, seqlen_q, heads_q, _ = q_shape
    num_sms = sm_count(device_index)
    gradient_facts = [(*_contiguous(*shape), dtype) if needed else None for shape, needed in zip(shapes, needs)]
    has_tma_strides = _all_have_tma_strides(dtype, shapes, strides)
    kernels = None  # where there is no pair to score
    if 0 not in q_shape and 0 not in v_shape:
        plan, before, after = backward_plans(problem_of(dtype, q_shape, v_shape, mask, is_deterministic), needs)
        kernels = tuple(map(cache.load, (before, plan, after) if plan.needs_dq else (before, plan)))
        num_heads, tile_m = batch * heads_q, plan.tile.tile_m
        num_blocks = num_heads * -(-seqlen_q // tile_m)
        statistics_facts = *_contiguous(num_blocks, 2, tile_m), torch.float32
        accumulator_facts = *_contiguous(num_blocks, tile_m * plan.tile.head_dim), torch.float32
        counters_facts = *_contiguous(plan.num_counters(num_heads, num_blocks, num_sms)), torch.int32

    def launch(tensors, lse, dlse, softmax_scale: float):
        if torch._C._cuda_getDevice() != device_index:
            with torch.cuda.device(device_index):
                return launch(tensors, lse, dlse, softmax_scale)
        gradients = tuple(facts and _empty_strided(*facts) for facts in gradient_facts)
        if kernels is None:
            return tuple(x if x is None else x.zero_() for x in gradients)
        if not has_tma_strides or any(x.data_ptr() % TMA_ALIGNMENT_BYTES for x in tensors):
            tensors = _as_tma_reads(tensors)
        *inputs, out, dout = tensors
        before, main, *after = kernels
        statistics, counters = _empty_strided(*statistics_facts), _empty_strided(*counters_facts)
        accumulator = _empty_strided(*accumulator_facts) if after else None
        has_dlse = dlse is not None
        before(out, dout, lse, dlse if has_dlse else lse, int(has_dlse), statistics, (accumulator, counters))
        main(tuple(inputs), dout, statistics, accumulator, counters, gradients, softmax_scale, num_sms)
        for kernel in after:
            kernel(accumulator, counters, gradients[0], softmax_scale, num_sms)
        return gradients

    return launch


def _as_tma_reads(tensors) -> list:
    """The tensors, with a contiguous copy in place of each that TMA cannot read as it lies."""
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
    if torch._C._cuda_isCurrentStreamCapturing():
        # A graph may be replayed beside anything else, so each of its launches clears two words of its own.
        return _zeros(device_index)
    # The same as torch.cuda.current_stream(device_index).cuda_stream, without an object.
    key = device_index, torch._C._cuda_getCurrentRawStream(device_index)
    counter = _counters.get(key)
    if counter is None:
        with ThreadPoolExecutor(1) as other_thread:
            counter = _counters[key] = other_thread.submit(_synchronized_zeros, device_index).result()
    return counter


def _empty_lse(device_index: int) -> torch.Tensor:
    return torch.empty((0, 0, 0), dtype=torch.float32, device=torch.device("cuda", device_index))


def _zeros(device_index: int) -> torch.Tensor:
    return torch.zeros(2, dtype=torch.int32, device=torch.device("cuda", device_index))


def _synchronized_zeros(device_index: int) -> torch.Tensor:
    """Zeros that are there for all streams when this returns."""
    zeros = _zeros(device_index)
    torch.cuda.current_stream(device_index).synchronize()
    return zeros
