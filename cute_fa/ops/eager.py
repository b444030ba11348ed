"""Eager calls: whether anything looks on, and a key by which an earlier call like this one is found again.

`ops/attention.py` asks in every call; each microsecond here is one of a small call's time on the host.
"""

import marshal

import torch
from torch.autograd import forward_ad

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
    # Only the imaginary part of a conjugate can be lazily negative, and no complex number is made of two bf16.
    if q.dtype is not torch.bfloat16 and (q.dtype is torch.float32 or q.is_neg() or k.is_neg() or v.is_neg()):
        return None
    try:
        plain = marshal.dumps(options, 2)  # version 2: the same bytes whatever else refers to the objects
    except ValueError:  # a tensor, or another object that marshal does not know
        return None
    return (
        q.shape, k.shape, v.shape, q.stride(), k.stride(), v.stride(), q.dtype, k.dtype, v.dtype,
        q.device, k.device, v.device, plain, torch.are_deterministic_algorithms_enabled(),
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
        not torch.compiler.is_compiling()
        and torch._C._get_tracing_state() is None
        and not torch._C._len_torch_dispatch_stack()
        and not torch._C._len_torch_function_stack()
        and torch._C._functorch.maybe_current_level() is None
        and forward_ad._current_level < 0
        and not torch.autograd._profiler_enabled()
    )
