"""Contestants on CPU tensors: the tensors that a run returns, and how many calls it makes."""

from dataclasses import replace

import pytest
import torch

from benchmarks import backends
from benchmarks.suites import CAUSAL, FULL, Case, dense


def case(direction="fwd", variant="default", mask=CAUSAL) -> Case:
    return Case("tiny", dense(2, 33, (4, 2), (16, 16), mask), direction, variant)


def oracle(case: Case, inputs: backends.Inputs):
    """out and the gradients in fp64, from the definition; (batch, seqlen, heads, head_dim)."""
    q, k, v = (x.double().requires_grad_() for x in (inputs.q, inputs.k, inputs.v))
    repeats = q.shape[2] // k.shape[2]
    keys, values = (x.repeat_interleave(repeats, dim=2) for x in (k, v))
    scores = torch.einsum("bihd,bjhd->bhij", q, keys) / q.shape[-1] ** 0.5
    if case.problem.scores.mask == CAUSAL:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:]).triu(1).bool(), float("-inf"))
    out = torch.einsum("bhij,bjhd->bihd", scores.softmax(-1), values)
    return out.detach(), torch.autograd.grad(out, (q, k, v), inputs.dout.double())


@pytest.mark.parametrize("mask", [FULL, CAUSAL], ids=["full", "causal"])
@pytest.mark.parametrize("setup", [backends.setup_cute_fa, backends.setup_fa2], ids=["cute_fa", "fa2"])
def test_both_directions_against_the_oracle(setup, mask):
    forward, backward = case("fwd", mask=mask), case("bwd", mask=mask)
    inputs = backends.make_inputs(forward.problem, "cpu")
    out, grads = oracle(forward, inputs)
    (got,) = setup(forward, inputs).run(2)
    torch.testing.assert_close(got.double(), out, atol=0.02, rtol=0.02)
    for got, wanted in zip(setup(backward, inputs).run(2), grads, strict=True):
        torch.testing.assert_close(got.double(), wanted, atol=0.06, rtol=0.06)
    assert not any(x.requires_grad for x in (inputs.q, inputs.k, inputs.v)), (
        "inputs stay as other contestants need them"
    )


def test_inputs_have_the_problems_sizes():
    problem = dense(3, 5, (4, 2), (8, 24), FULL)
    inputs = backends.make_inputs(problem, "cpu")
    assert inputs.q.shape == (3, 5, 4, 8) and inputs.k.shape == (3, 5, 2, 8), "queries and keys"
    assert inputs.v.shape == (3, 5, 2, 24) and inputs.dout.shape == (3, 5, 4, 24), "values and the output's gradient"
    assert inputs.q.dtype == torch.bfloat16 and inputs.q.is_contiguous(), "as the problem says"
    again = backends.make_inputs(problem, "cpu")
    assert torch.equal(inputs.q, again.q) and not torch.equal(inputs.q[0], inputs.q[1]), "random, and repeatable"


@pytest.mark.parametrize("direction", ["fwd", "bwd"])
def test_a_run_makes_as_many_calls_as_asked(direction):
    made = []

    class Attention(torch.autograd.Function):
        @staticmethod
        def forward(ctx, q, k, v):
            made.append("fwd")
            return q.clone()

        @staticmethod
        def backward(ctx, dout):
            made.append("bwd")
            return dout, dout, dout

    tensors = tuple(torch.randn(2, 3) for _ in range(3))
    run = backends.calls(case(direction), Attention.apply, tensors, torch.ones(2, 3))
    made.clear()
    run(7)
    assert made == [direction] * 7, "and none of the other direction"


def test_forward_runs_record_no_graph():
    def attention(q, k, v):
        return torch.full_like(q, torch.is_grad_enabled())

    run = backends.calls(case("fwd"), attention, tuple(torch.randn(2, 3) for _ in range(3)), torch.ones(2, 3))
    assert not run(1)[0].any(), "gradients are switched off"


def test_torchs_attention_has_no_deterministic_variant():
    wanted = case("bwd", "deterministic")
    for setup in (backends.setup_cudnn, backends.setup_fa2):
        entry = setup(wanted, backends.make_inputs(wanted.problem, "cpu"))
        assert entry.run is None and "deterministic" in entry.reason, "a reason instead of a number"


def test_cute_fa_passes_the_variant_on(monkeypatch):
    seen = []

    def attention(q, k, v, **options):
        seen.append(options)
        return q * 1

    monkeypatch.setattr("cute_fa.flash_attn_func", attention)
    for variant, mask in (("default", FULL), ("deterministic", CAUSAL)):
        wanted = case("bwd", variant, mask)
        backends.setup_cute_fa(wanted, backends.make_inputs(wanted.problem, "cpu"))
    assert seen == [{"causal": False, "deterministic": False}, {"causal": True, "deterministic": True}], "by the case"


def test_fa4_gets_its_own_argument_names(monkeypatch):
    """The peer's function, stood in for: it returns (out, lse), and the run returns out alone."""
    import sys
    from types import ModuleType

    seen = []

    def flash_attn_func(q, k, v, **options):
        seen.append(options)
        return 2 * q, torch.zeros(1)

    for name in ("flash_attn", "flash_attn.cute", "flash_attn.cute.interface"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setattr(sys.modules["flash_attn.cute.interface"], "flash_attn_func", flash_attn_func, raising=False)
    monkeypatch.setattr(backends.metadata, "version", lambda name: f"version of {name}")
    wanted = replace(case(), variant="deterministic")
    inputs = backends.make_inputs(wanted.problem, "cpu")
    entry = backends.setup_fa4(wanted, inputs)
    assert torch.equal(entry.run(1)[0], 2 * inputs.q), "out, not lse"
    assert seen == [{"causal": True, "deterministic": True}], "by name"
    assert entry.config == "flash-attn-4 version of flash-attn-4", "the row tells the version"
