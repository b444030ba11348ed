"""How operators are defined: the schema from a NamedTuple, registration, and what autocast does to inputs."""

import threading
from typing import NamedTuple, Optional

import pytest
import torch
from torch._subclasses import FakeTensorMode

from cute_fa.ops.library import autocast, define, define_composite, schema_of


class EveryKind(NamedTuple):
    table: torch.Tensor
    slopes: Optional[torch.Tensor]
    length: int
    bound: Optional[int]
    scale: float
    is_causal: bool


def test_schema_of_every_kind():
    wanted = (
        "(Tensor q, Tensor? dlse, Tensor(c!) cache, Tensor table, Tensor? slopes, SymInt length, SymInt? bound, "
        "float scale, bool is_causal) -> (Tensor, Tensor)"
    )
    assert schema_of(("q", "dlse?", "cache!"), EveryKind, returns=2) == wanted, "one argument a field, in order"


def test_written_tensors_have_aliases_of_their_own():
    class Empty(NamedTuple):
        pass

    assert schema_of(("a!", "b!"), Empty, returns=1) == "(Tensor(a!) a, Tensor(b!) b) -> (Tensor)", "two alias sets"


def test_schema_with_a_keyword():
    wanted = "(Tensor x, float factor, *, int n=0) -> (Tensor)"
    assert schema_of(("x",), Factor, returns=1, keywords=("int n=0",)) == wanted, "behind the rest, by name only"


def test_unknown_kinds_are_refused():
    class Unknown(NamedTuple):
        name: str

    with pytest.raises(KeyError):
        schema_of(("q",), Unknown, returns=1)


class Factor(NamedTuple):
    factor: float


class Times(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, factor):
        ctx.factor = factor
        return torch.ops.cute_fa.times_for_test(x, factor)

    @staticmethod
    def backward(ctx, dout):
        return dout * ctx.factor, None


def test_a_defined_operator_runs_and_fakes_and_a_composite_differentiates():
    fake = torch.empty_like
    define("times_for_test", ("x",), Factor, 1, cpu=lambda x, factor: x * factor, fake=lambda x, factor: fake(x))
    define_composite("composite_for_test", ("x",), Factor, 1, function=Times.apply)
    x = torch.randn(3, 4, requires_grad=True)
    with torch.no_grad():
        assert torch.equal(torch.ops.cute_fa.times_for_test(x, 3.0), x * 3), "the CPU implementation"
    out = torch.ops.cute_fa.composite_for_test(x, 3.0)
    assert torch.equal(out, x * 3), "what it is made of"
    assert torch.equal(torch.autograd.grad(out.sum(), x)[0], torch.full_like(x, 3)), "with its derivative"
    for operator in (torch.ops.cute_fa.times_for_test, torch.ops.cute_fa.composite_for_test):
        assert operator(x.detach().to("meta"), 3.0).shape == x.shape, "the fake"
    torch.library.opcheck(torch.ops.cute_fa.times_for_test.default, (x.detach(), 3.0))
    torch.library.opcheck(torch.ops.cute_fa.composite_for_test.default, (x, 3.0))


def test_an_operator_runs_on_cuda_tensors_where_it_has_an_implementation():
    def copy(x, factor):
        return x.clone()

    define("here_for_test", ("x",), Factor, 1, cpu=copy, fake=copy)
    define("there_for_test", ("x",), Factor, 1, cpu=copy, cuda=copy, fake=copy)
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    assert has_kernel("cute_fa::there_for_test", "CUDA"), "given"
    assert not has_kernel("cute_fa::here_for_test", "CUDA"), "not given"
    assert all(has_kernel(f"cute_fa::{name}_for_test", "CPU") for name in ("here", "there")), "the CPU has both"


def test_autocast_is_off_inside_and_untouched_outside():
    """Also in another thread that enters while the first is inside: what it restores is its own."""
    seen, inside, leave = {}, threading.Event(), threading.Event()

    def cpu(x, factor):
        seen[factor] = torch.is_autocast_enabled("cpu")
        if factor == 1.0:
            inside.set()
            leave.wait(timeout=60)
        return x.clone()

    define("autocast_for_test", ("x",), Factor, 1, cpu=cpu, fake=lambda x, factor: torch.empty_like(x))

    def under_autocast():
        with torch.autocast("cpu", dtype=torch.bfloat16):
            torch.ops.cute_fa.autocast_for_test(torch.ones(2), 1.0)
            seen["after"] = torch.is_autocast_enabled("cpu")

    thread = threading.Thread(target=under_autocast)
    thread.start()
    inside.wait(timeout=60)
    torch.ops.cute_fa.autocast_for_test(torch.ones(2), 2.0)
    leave.set()
    thread.join(timeout=60)
    assert seen == {1.0: False, 2.0: False, "after": True}, "off in both calls, on again behind the first"


INPUTS = [torch.ones(2, dtype=dtype) for dtype in (torch.float32, torch.float64, torch.float16, torch.int64)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast_casts_float32_alone(dtype):
    with torch.autocast("cpu", dtype=dtype):
        found = autocast(*INPUTS, None)
    assert [x.dtype for x in found[:4]] == [dtype, torch.float64, torch.float16, torch.int64], "float32 is cast"
    assert found[1] is INPUTS[1] and found[4] is None, "all else is handed through"


def test_without_autocast_nothing_changes():
    assert all(found is given for found, given in zip(autocast(*INPUTS), INPUTS)), "the same tensors"


def test_autocast_asks_the_device_of_the_tensors():
    with FakeTensorMode(), torch.autocast("cpu", dtype=torch.bfloat16):
        x = torch.empty(2, device="cuda")
        assert autocast(x) == (x,), "the CPU's autocast is none of CUDA's business"


@pytest.mark.parametrize("given", [[1.0], "q", None], ids=["list", "string", "none"])
def test_no_tensor_is_left_to_validation(given):
    assert autocast(given) == (given,), "handed through"
