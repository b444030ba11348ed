"""Backends: how each contestant is called. A backend is a name and a `setup(case, inputs)`, which gives an `Entry`.

A contestant's run makes a number of calls back to back and returns the tensors of the last one, so that what surrounds
calls (no_grad, the choice of a torch backend) is entered once a slice. All contestants of a case read the same tensors.
Peers are imported in their setup: an exception there becomes the reason of a row (`run.py`).
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from importlib import metadata

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.suites import Case
from cute_fa.core.problem import AttentionProblem
from cute_fa.tuning.heuristics import forward_plan

Tensor = torch.Tensor
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]
Run = Callable[[int], tuple[Tensor, ...]]


@dataclass(frozen=True)
class Inputs:
    """(batch, seqlen, heads, head_dim) tensors, contiguous."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor


@dataclass(frozen=True)
class Entry:
    """run: takes a number of calls, returns (out,) or (dq, dk, dv) of the last, (batch, seqlen, heads, head_dim).

    None where the backend has no such call, and `reason` says why. config: what tells this contestant from its other
    versions.
    """

    run: Run | None
    reason: str = ""
    config: str = ""


def make_inputs(problem: AttentionProblem, device: str) -> Inputs:
    """Normal random tensors, the same ones each time; zeros would draw less power and let the clock rise."""
    generator = torch.Generator(device).manual_seed(0)

    def normal(seqlen: int, heads: int, dim: int) -> Tensor:
        size = (problem.batch, seqlen, heads, dim)
        return torch.randn(size, generator=generator, device=device, dtype=getattr(torch, problem.dtype))

    return Inputs(
        q=normal(problem.seqlen_q, problem.num_heads_q, problem.head_dim),
        k=normal(problem.seqlen_k, problem.num_heads_kv, problem.head_dim),
        v=normal(problem.seqlen_k, problem.num_heads_kv, problem.head_dim_v),
        dout=normal(problem.seqlen_q, problem.num_heads_q, problem.head_dim_v),
    )


def setup_cute_fa(case: Case, inputs: Inputs) -> Entry:
    from cute_fa import flash_attn_func

    attention = partial(flash_attn_func, causal=is_causal(case), deterministic=case.variant == "deterministic")
    config = ""
    if case.direction == "fwd" and inputs.q.is_cuda:
        num_sms = torch.cuda.get_device_properties(inputs.q.device).multi_processor_count
        config = forward_plan(case.problem, num_sms).name
    return Entry(calls(case, attention, (inputs.q, inputs.k, inputs.v), inputs.dout), config=config)


def setup_fa4(case: Case, inputs: Inputs) -> Entry:
    """FlashAttention-4: flash_attn/cute/interface.py of flash-attn-4; it returns (out, lse)."""
    from flash_attn.cute.interface import flash_attn_func

    options = {"causal": is_causal(case), "deterministic": case.variant == "deterministic"}

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return flash_attn_func(q, k, v, **options)[0]

    config = f"flash-attn-4 {metadata.version('flash-attn-4')}"
    return Entry(calls(case, attention, (inputs.q, inputs.k, inputs.v), inputs.dout), config=config)


def setup_cudnn(case: Case, inputs: Inputs) -> Entry:
    config = f"cudnn {torch.backends.cudnn.version()}"
    return setup_sdpa(SDPBackend.CUDNN_ATTENTION, config, case, inputs)


def setup_fa2(case: Case, inputs: Inputs) -> Entry:
    return setup_sdpa(SDPBackend.FLASH_ATTENTION, "", case, inputs)


def setup_sdpa(backend: SDPBackend, config: str, case: Case, inputs: Inputs) -> Entry:
    """One backend of torch's attention, on (batch, heads, seqlen, head_dim) views; no other backend may take over."""
    if case.variant != "default":
        return Entry(None, f"scaled_dot_product_attention has no argument for {case.variant}", config)
    problem = case.problem
    options = {"is_causal": is_causal(case), "enable_gqa": problem.num_heads_q != problem.num_heads_kv}
    attention = partial(torch.nn.functional.scaled_dot_product_attention, **options)
    views = tuple(tensor.transpose(1, 2) for tensor in (inputs.q, inputs.k, inputs.v))
    chosen = partial(sdpa_kernel, backend)
    run = calls(case, attention, views, inputs.dout.transpose(1, 2), chosen)

    def run_transposed(num_calls: int) -> tuple[Tensor, ...]:
        return tuple(tensor.transpose(1, 2) for tensor in run(num_calls))

    return Entry(run_transposed, config=config)


def is_causal(case: Case) -> bool:
    """The suites have full and causal masks only, and all four backends agree on both where the lengths are equal."""
    return case.problem.scores.mask.is_causal


def calls(
    case: Case,
    attention: Attention,
    tensors: tuple[Tensor, ...],
    dout: Tensor,
    surrounding: Callable[[], AbstractContextManager] = nullcontext,
) -> Run:
    """The run of one direction of `attention`. A backward run goes through one graph again and again, recorded here."""
    if case.direction == "fwd":

        def run(num_calls: int) -> tuple[Tensor, ...]:
            with torch.no_grad(), surrounding():
                for _ in range(num_calls):
                    out = attention(*tensors)
            return (out,)

        return run

    leaves = tuple(tensor.detach().requires_grad_() for tensor in tensors)
    with surrounding():
        recorded = attention(*leaves)

    def run_backward(num_calls: int) -> tuple[Tensor, ...]:
        for _ in range(num_calls):
            grads = torch.autograd.grad(recorded, leaves, dout, retain_graph=True)
        return grads

    return run_backward


BACKENDS: dict[str, Callable[[Case, Inputs], Entry]] = {
    "cute_fa": setup_cute_fa,
    "fa4": setup_fa4,
    "cudnn": setup_cudnn,
    "fa2": setup_fa2,
}
