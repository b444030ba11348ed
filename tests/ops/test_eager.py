"""Eager calls: each that is like an earlier one is found again, none that is not, and never where something looks on."""

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import cute_fa
from cute_fa.core.errors import NotSupportedError
from cute_fa.ops import attention
from cute_fa.ops.attention import BackwardCall
from cute_fa.ops.eager import is_eager
from cute_fa.reference import dense as reference_dense
from cute_fa.testing.plain import plain_attention

DENSE = ((2, 5, 4, 8), (2, 7, 2, 8), (2, 7, 2, 6))
FORWARDS = torch.ops.cute_fa.attention_plain.default, torch.ops.cute_fa.attention_forward.default


def leaves():
    return [torch.randn(1, 3, heads, 8, dtype=torch.float64, requires_grad=True) for heads in (4, 2, 2)]


class Operators(TorchDispatchMode):
    """Counts runs of the forward operator, and keeps the arguments of the backward."""

    def __init__(self):
        super().__init__()
        self.num_forwards, self.backwards = 0, []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.num_forwards += function in FORWARDS
        if function is torch.ops.cute_fa.attention_backward.default:
            self.backwards.append(args)
        return function(*args, **(kwargs or {}))


@pytest.fixture
def fresh(monkeypatch):
    """No call has been checked yet; gives the memory of those that are."""
    monkeypatch.setattr(attention, "_known", {})
    return attention._known


def test_an_eager_call_is_checked_once(fresh, monkeypatch):
    checks, check = [], attention.validate.dense
    monkeypatch.setattr(attention.validate, "dense", lambda *arguments: checks.append(1) or check(*arguments))
    for _ in range(3):  # other numbers, the same shapes
        q, k, v = (torch.randn(shape, dtype=torch.float64) for shape in DENSE)
        out = cute_fa.flash_attn_func(q, k, v, causal=True)
        torch.testing.assert_close(out, plain_attention(q, k, v, causal=True)[0])
    assert len(checks) == 1, "the first of them alone"
    others = dict(causal=False, softcap=2.0, softmax_scale=0.5, window_size=(1, 0), deterministic=True)
    for name, value in others.items():
        cute_fa.flash_attn_func(q, k, v, **{name: value})
    cute_fa.flash_attn_func(q.half(), k.half(), v.half(), causal=True)
    cute_fa.flash_attn_func(q[:, 1:], k, v, causal=True)
    cute_fa.flash_attn_func(q.transpose(0, 2).contiguous().transpose(0, 2), k, v, causal=True)
    assert len(checks) == 9, "what differs is another call"


def test_fp32_is_checked_in_every_call(fresh):
    """Autocast may cast it, which no key tells; what it is cast to is known."""
    q, k, v = (torch.randn(shape) for shape in DENSE)
    for is_on in (False, True, False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=is_on):
            out = cute_fa.flash_attn_func(q, k, v)
        assert out.dtype == (torch.bfloat16 if is_on else torch.float32), f"autocast: {is_on}"
    assert [key[3] for key in fresh] == [torch.bfloat16], "the one call that is known"


@pytest.fixture
def launches(fresh, monkeypatch):
    """CPU tensors take the branch of CUDA tensors, with a launch that notes its arguments and what it was made for."""
    noted = []

    def forward_launch(device_index, dtype, mask, shapes, strides):
        def launched(q, k, v, scale, needs_lse=True):
            noted.append((q, (dtype, mask, shapes, strides), scale, needs_lse))
            out = torch.zeros(*shapes[0][:3], shapes[2][3], dtype=dtype)
            return out, torch.zeros(shapes[0][0], shapes[0][2], shapes[0][1])

        return launched

    def launch_of(q, k, v, call):
        shapes, strides = tuple(x.shape for x in (q, k, v)), tuple(x.stride() for x in (q, k, v))
        return forward_launch(-1, q.dtype, call.mask, shapes, strides)

    monkeypatch.setattr(attention, "_launch_of", launch_of)
    return noted


def test_an_eager_call_is_launched_without_the_operator(launches):
    q, k, v = (torch.randn(shape, dtype=torch.bfloat16) for shape in DENSE)
    with Operators() as operators:  # a mode, which looks on
        cute_fa.flash_attn_func(q, k, v)
    assert (operators.num_forwards, launches) == (1, []), "the operator, for who looks on"
    cute_fa.flash_attn_func(q, k, v)
    assert len(launches) == 1, "no operator"
    assert cute_fa.flash_attn_func(q.clone().requires_grad_(), k, v).requires_grad, "a gradient is asked for"
    with torch.no_grad():
        assert not cute_fa.flash_attn_func(torch.nn.Parameter(q), k, v).requires_grad, "nobody needs a gradient"
    assert len(launches) == 3, "with autograd or without"


def test_lse_is_computed_where_it_is_asked_for(launches):
    q, k, v = (torch.randn(shape, dtype=torch.bfloat16) for shape in DENSE)
    for options in ({}, {"return_lse": True}, {"return_attn_probs": True}):
        cute_fa.flash_attn_func(q, k, v, **options)
    cute_fa.flash_attn_func(q.requires_grad_(), k, v)
    assert [needs_lse for *_, needs_lse in launches] == [False, True, True, True], "for the caller or for the backward"


@pytest.fixture
def computed(fresh, monkeypatch):
    """As `launches`, with a launch that computes."""

    def launch_of(q, k, v, call):
        def launched(q, k, v, scale, needs_lse=True):
            assert scale == call.softmax_scale, "the scale of the known call"
            return reference_dense.forward(q, k, v, call.scores, call.score_tensors)[:2]

        return launched

    monkeypatch.setattr(attention, "_launch_of", launch_of)


def gradients(loss, inputs, **options):
    out, lse = cute_fa.flash_attn_func(*inputs, return_lse=True, **options)
    return torch.autograd.grad(loss(out, lse), [x for x in inputs if x.requires_grad])


LOSSES = {
    "out": lambda out, lse: out.square().sum(),
    "lse": lambda out, lse: lse.square().sum(),
    "both": lambda out, lse: out.square().sum() + lse.sum(),
}


@pytest.mark.parametrize("needs", [(1, 1, 1), (1, 0, 0), (0, 1, 0), (0, 0, 1), (1, 0, 1)], ids="{}".format)
@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
def test_gradients_of_a_launched_call_are_those_of_the_operator(needs, loss, computed):
    """With a mode on, which looks, the operator runs; without one it does not."""
    inputs = [x.detach().requires_grad_(bool(is_needed)) for x, is_needed in zip(leaves(), needs)]
    with Operators() as operators:
        wanted = gradients(loss, inputs, causal=True)
    found = gradients(loss, inputs, causal=True)
    assert operators.num_forwards == 1, "for who looks on"
    assert len(found) == sum(needs) and all(map(torch.equal, found, wanted)), "the same numbers"


def test_a_launched_call_has_a_node_of_its_own(computed):
    q, k, v = leaves()
    out = cute_fa.flash_attn_func(q, k, v)
    assert type(out.grad_fn).__name__ == "_AttentionBackward", "no operator"
    with torch.no_grad():
        assert cute_fa.flash_attn_func(q, k, v).grad_fn is None, "nothing to record"


def test_a_second_derivative_of_a_launched_call_is_refused(computed):
    q, k, v = leaves()
    (dq,) = torch.autograd.grad(cute_fa.flash_attn_func(q, k, v).square().sum(), q, create_graph=True)
    with pytest.raises(NotSupportedError, match="^create_graph: expected a first derivative"):
        dq.sum().backward()


def test_inputs_of_a_launched_call_must_not_change_before_its_gradient(computed):
    q, k, v = leaves()
    x = q * 1
    out = cute_fa.flash_attn_func(x, k, v)
    x.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


@pytest.mark.parametrize("use_reentrant", [False, True], ids=["saved-tensor-hooks", "reentrant"])
def test_a_launched_call_is_computed_again_by_checkpointing(use_reentrant, computed):
    inputs = leaves()

    def attend(q, k, v):
        return cute_fa.flash_attn_func(q * 1, k, v, causal=True)

    wanted = torch.autograd.grad(attend(*inputs).square().sum(), inputs)
    checkpoint(attend, *inputs, use_reentrant=use_reentrant).square().sum().backward()
    assert all(torch.equal(x.grad, grad) for x, grad in zip(inputs, wanted)), "bit for bit"


def test_what_is_launched_is_for_this_call(launches):
    """Calls in turns that differ in one thing each."""
    q, k, v = (torch.randn(shape, dtype=torch.bfloat16) for shape in DENSE)
    columns = q.transpose(2, 3).contiguous().transpose(2, 3)
    calls = [(q, {}), (columns, {}), (q[:, 1:], {}), (q, {"causal": True}), (q, {"softmax_scale": 0.25})]
    for _ in range(2):
        for x, options in calls:
            cute_fa.flash_attn_func(x, k, v, **options)
            given, (dtype, mask, shapes, strides), scale, _ = launches[-1]
            assert given is x and (shapes[0], strides[0]) == (x.shape, x.stride()), "this tensor's sizes and strides"
            assert mask == (None, 0 if "causal" in options else None, 0), "the mask of this call"
            assert scale == options.get("softmax_scale", 8**-0.5), "the scale of this call"
        halves = [x.half() for x in (q, k, v)]
        assert cute_fa.flash_attn_func(*halves).dtype == torch.float16, "the dtype of this call"


@pytest.mark.parametrize(
    "options, count",
    [({}, 1), ({"return_lse": True}, 2), ({"return_attn_probs": True}, 3)],
    ids=["out", "lse", "probs"],
)
def test_what_a_launched_call_returns(options, count, launches):
    q, k, v = (torch.randn(shape, dtype=torch.bfloat16) for shape in DENSE)
    for _ in range(2):
        found = cute_fa.flash_attn_func(q, k, v, **options)
        shapes = [x.shape for x in (found if count > 1 else [found])]
        assert shapes == [(2, 5, 4, 6), (2, 4, 5), (0,)][:count], "out, lse, no probabilities"
    assert len(launches) == 2, "the first call and the known one"


def test_calls_of_other_options_do_not_mix(fresh):
    """Each option by itself, alone and after all others: the same results."""
    q, k, v = (torch.randn(2, 5, 4, 8, dtype=torch.float64) for _ in range(3))
    options = [
        *(dict(), dict(causal=True), dict(window_size=(1, 0)), dict(window_size=[1, 1]), dict(window_size=(None, 2))),
        *(dict(softcap=2.0), dict(softmax_scale=0.5), dict(attention_chunk=2), dict(return_lse=True)),
        *(dict(return_attn_probs=True), dict(causal=True, return_lse=True), dict(deterministic=True)),
    ]

    def results(**given):
        found = cute_fa.flash_attn_func(q, k, v, **given)
        return found if isinstance(found, tuple) else (found,)

    alone = []
    for given in options:
        fresh.clear()
        alone.append(results(**given))
    for _ in range(2):
        for given, wanted in zip(options, alone):
            found = results(**given)
            assert len(found) == len(wanted) and all(map(torch.equal, found, wanted)), f"{given} after others"


def test_gradients_follow_the_mode_of_each_call(fresh):
    inputs = leaves()
    with torch.no_grad():
        assert not cute_fa.flash_attn_func(*inputs).requires_grad, "nothing is recorded"
    first = torch.autograd.grad(cute_fa.flash_attn_func(*inputs).sum(), inputs)
    assert not cute_fa.flash_attn_func(*(x.detach() for x in inputs)).requires_grad, "no input needs a gradient"
    with torch.inference_mode():
        assert cute_fa.flash_attn_func(*inputs).is_inference(), "an inference tensor"
    again = torch.autograd.grad(cute_fa.flash_attn_func(*inputs).sum(), inputs)
    assert all(grad.abs().max() > 0 for grad in (first[0], first[1], first[2])), "gradients"
    assert all(map(torch.equal, first, again)), "the same whatever was called in between"


def test_deterministic_algorithms_are_another_call(fresh, monkeypatch):
    inputs, operators = leaves(), Operators()
    for is_on, argument in ((False, False), (True, False), (False, False), (False, True)):
        monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: is_on)
        out = cute_fa.flash_attn_func(*inputs, deterministic=argument)
        with operators:
            out.sum().backward()
    assert sorted(known.call.deterministic for known in fresh.values()) == [False, True, True], "one call of each kind"
    index = 7 + BackwardCall._fields.index("deterministic")
    assert [args[index] for args in operators.backwards] == [False, True, False, True], "what the backward is told"


def test_dropout_is_drawn_in_every_call(fresh):
    q, k, v = (torch.randn(shape, dtype=torch.float64) for shape in DENSE)
    torch.manual_seed(5)
    first, second = (cute_fa.flash_attn_func(q, k, v, dropout_p=0.5) for _ in range(2))
    torch.manual_seed(5)
    again = cute_fa.flash_attn_func(q, k, v, dropout_p=0.5)
    assert torch.equal(again, first) and not torch.equal(second, first), "a mask of its own, from torch's generator"


def test_tensors_beside_q_k_and_v_are_not_remembered(fresh):
    q, k, v = (torch.randn(shape, dtype=torch.float64) for shape in DENSE)
    for name in ("alibi_slopes", "learnable_sink"):
        small, large = (cute_fa.flash_attn_func(q, k, v, **{name: torch.full((4,), value)}) for value in (0.1, 2.0))
        assert not torch.equal(small, large), f"{name} of the call itself"
    assert not fresh, "such calls are checked each time"


def test_memory_of_checked_calls_is_bounded(fresh, monkeypatch):
    monkeypatch.setattr(attention, "_MAX_KNOWN", 3)
    for seqlen in range(1, 9):
        q = torch.randn(1, seqlen, 2, 8, dtype=torch.float64)
        cute_fa.flash_attn_func(q, q, q)
        assert 1 <= len(fresh) <= 3, "calls"


@pytest.mark.parametrize(
    "name, value",
    [
        ("window_size", (-1.0, -1.0)),
        ("num_splits", 0.0),
        ("num_splits", False),
        ("dropout_p", False),
        ("attention_chunk", 0.0),
        ("num_splits", np.float64(0.0)),
        ("attention_chunk", np.zeros(1, np.int64)),
        ("softcap", [1.0]),
        ("window_size", ([1], 2)),
        ("num_splits", {}),
    ],
    ids=[
        *("window-of-floats", "float-splits", "bool-splits", "bool-dropout", "float-chunk", "numpy-splits", "array-chunk"),
        *("list-softcap", "list-in-window", "dict-splits"),
    ],
)
def test_an_earlier_call_makes_no_wrong_one_right(name, value, fresh):
    """Python takes 0.0, False and 0 for equal; the checks do not, and some wrong values cannot be looked up at all."""
    q = torch.randn(1, 3, 2, 8, dtype=torch.float64)
    cute_fa.flash_attn_func(q, q, q)
    cute_fa.flash_attn_func(q, q, q, num_splits=np.int64(0))  # the same bytes as np.float64(0.0)
    assert len(fresh) == 1, "NumPy's numbers are legal and not remembered"
    with pytest.raises((TypeError, ValueError), match=f"^{name}: expected "):
        cute_fa.flash_attn_func(q, q, q, **{name: value})


def test_length_in_a_tensor_is_read_in_every_call(fresh):
    q, k, v = (torch.randn(1, 8, 2, 8, dtype=torch.float64) for _ in range(3))
    chunk = torch.tensor(2)
    for length in (2, 8, 3):
        chunk.fill_(length)
        out = cute_fa.flash_attn_func(q, k, v, attention_chunk=chunk)
        assert torch.equal(out, cute_fa.flash_attn_func(q, k, v, attention_chunk=length)), f"chunks of {length}"


class Watched(torch.Tensor):
    pass


def test_who_looks_on():
    """Only where nobody does may the operator be left out."""
    q, k, v = (torch.randn(1, 4, 2, 8) for _ in range(3))
    assert is_eager(q, k, torch.nn.Parameter(v)), "torch's own tensors"
    assert not is_eager(q, q.as_subclass(Watched)), "a subclass"
    assert not is_eager(q, torch._neg_view(k)), "a view whose sign is not in memory"
    with FlopCounterMode(display=False):
        assert not is_eager(q), "a dispatch mode"
    with torch.device("cpu"):
        assert not is_eager(q), "a function mode"
    with torch.profiler.profile():
        assert not is_eager(q), "a profiler"
    seen = []
    torch.func.vmap(lambda x: seen.append(is_eager(x)) or x)(q)
    torch.jit.trace(lambda x: seen.append(is_eager(x)) or x + 1, q, check_trace=False)
    assert seen == [False, False], "a transform, a trace"
