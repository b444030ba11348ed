"""Eager calls: whether anything looks on, and a key by which an earlier call like this one is found again.

`ops/attention.py` asks in every call; each microsecond here is one of a small call's time on the host.
"""

from marshal import dumps

import torch
from torch._C import _get_tracing_state, _len_torch_dispatch_stack, _len_torch_function_stack
from torch._C._functorch import maybe_current_level
from torch.autograd import _profiler_enabled, forward_ad
from torch.compiler import is_compiling

from cute_fa.core.call import AttentionOptions

_OWN_TYPES = frozenset((torch.Tensor, torch.nn.Parameter))
_PLAIN_TYPES = frozenset((bool, int, float, type(None)))


def key_of(q, k, v, options: tuple):
    """What checks, scalars and launch of a dense call depend on; None where a call cannot be known by it.

    marshal tells 1, 1.0 and True apart, which are equal and not all of them legal. fp32 has no key, because autocast may
    cast it; what it is cast to has one.
    """
    if not (type(q) in _OWN_TYPES and type(k) in _OWN_TYPES and type(v) in _OWN_TYPES and _is_unobserved()):
        return None
    dtype = q.dtype
    # Only the imaginary part of a conjugate can be lazily negative, and no complex number is made of two bf16.
    if dtype is not torch.bfloat16 and (dtype is torch.float32 or q.is_neg() or k.is_neg() or v.is_neg()):
        return None
    try:
        plain = dumps(options, 2)  # version 2: the same bytes whatever else refers to the objects
    except ValueError:  # a tensor, or another object that marshal does not know
        return None
    return (
        q.shape, k.shape, v.shape, dtype, k.dtype, v.dtype, q.device, k.device, v.device,
        # Of contiguous tensors only strides of sizes 0 and 1 differ, which nothing depends on.
        q.is_contiguous() or q.stride(), k.is_contiguous() or k.stride(), v.is_contiguous() or v.stride(),
        plain, torch.are_deterministic_algorithms_enabled(),
    )  # fmt: skip


def are_plain(options: AttentionOptions) -> bool:
    """Whether marshal tells these from all others; of objects with a buffer, such as NumPy's numbers, it tells only bytes."""
    values = (*options._replace(window_size=None), *options.window_size)
    return _PLAIN_TYPES.issuperset(map(type, values))


def is_eager(*tensors) -> bool:
    """Whether these are torch's own tensors and nothing looks on."""
    return _is_unobserved() and all(type(x) in _OWN_TYPES and not x.is_neg() for x in tensors)


def _is_unobserved() -> bool:
    """No compilation, no trace, no mode, no transform, no profiler."""
    return (
        not is_compiling()
        and _get_tracing_state() is None
        and not _len_torch_dispatch_stack()
        and not _len_torch_function_stack()
        and maybe_current_level() is None
        and forward_ad._current_level < 0
        and not _profiler_enabled()
    )
