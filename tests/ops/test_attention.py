"""The operators of dense and packed calls under torch's own checks, torch.compile and torch.export."""

import itertools

import pytest
import torch
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import cute_fa
from cute_fa.core.errors import NotSupportedError
from cute_fa.ops import attention
from cute_fa.ops.attention import Call
from cute_fa.testing.plain import plain_attention

ATTENTION = torch.ops.cute_fa.attention.default  # with gradients; made of the others
PLAIN_FORWARD = torch.ops.cute_fa.attention_plain.default
FORWARD = torch.ops.cute_fa.attention_forward.default
BACKWARD = torch.ops.cute_fa.attention_backward.default

PLAIN = Call(
    alibi_slopes=None,
    learnable_sink=None,
    rng_state=None,
    cu_seqlens_q=None,
    cu_seqlens_k=None,
    seqused_q=None,
    seqused_k=None,
    block_table=None,
    max_seqlen_q=0,
    max_seqlen_k=0,
    softmax_scale=0.4,
    window_left=None,
    window_right=None,
    attention_chunk=0,
    softcap=0.0,
    dropout_p=0.0,
    deterministic=False,
    return_probs=False,
)


def ints(*values):
    return torch.tensor(values, dtype=torch.int32)


EVERY_SCORE = dict(
    alibi_slopes=torch.tensor([0.5, 0.25, 0.1, 1.0]),
    rng_state=torch.tensor([7, 11]),
    window_left=3,
    window_right=0,
    attention_chunk=4,
    softcap=2.0,
    dropout_p=0.5,
    return_probs=True,
)
LENGTHS = dict(cu_seqlens_q=ints(0, 2, 5), cu_seqlens_k=ints(0, 4, 7), max_seqlen_q=3, max_seqlen_k=4)
USED = dict(seqused_q=ints(2, 1), seqused_k=ints(0, 3))

DENSE = ((2, 5, 4, 8), (2, 7, 2, 8), (2, 7, 2, 6))
VARLEN = ((6, 4, 8), (9, 2, 8), (9, 2, 6))
PAGED = ((6, 4, 8), (4, 3, 2, 8), (4, 3, 2, 6))
CALLS = {
    "dense": (DENSE, {}),
    "dense-every-score": (DENSE, EVERY_SCORE),
    "dense-no-rows": (((2, 0, 4, 8), (2, 7, 2, 8), (2, 7, 2, 6)), {"window_right": 0}),
    "varlen": (VARLEN, LENGTHS),
    "varlen-every-score": (VARLEN, {**LENGTHS, **USED, **EVERY_SCORE, "deterministic": True}),
    "paged": (PAGED, {**LENGTHS, "block_table": ints([3, 1], [0, 2]), "window_right": 0}),
}
DTYPES = [torch.float32, torch.bfloat16]


def arguments(shapes, changes, dtype, requires_grad=True):
    """q, k, v, then the call; with a sink where the call has every score."""
    tensors = [torch.randn(shape).to(dtype).requires_grad_(requires_grad) for shape in shapes]
    sink = torch.tensor([0.5, -1.0, 2.0, 0.0], requires_grad=requires_grad) if "softcap" in changes else None
    return (*tensors, *PLAIN._replace(**changes, learnable_sink=sink))


def backward_arguments(inputs, out, lse, dout, dlse=None, needs=None):
    """Of the operator, after a forward on `inputs`. needs: of dq, dk, dv and dsink; None for all that there are."""
    has_sink = Call(*inputs[3:]).learnable_sink is not None
    return (dout, dlse, *inputs[:3], out, lse, *(needs or (True, True, True, has_sink)), *inputs[3:])


class Recorder(TorchDispatchMode):
    """Keeps the arguments of each run of the backward operator, and counts those of the forward."""

    def __init__(self):
        super().__init__()
        self.backwards, self.num_forwards = [], 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.num_forwards += function in (PLAIN_FORWARD, FORWARD)
        if function is BACKWARD:
            self.backwards.append(args)
        return function(*args, **(kwargs or {}))

    def needs(self):
        """Those of dq, dk, dv and dsink that the only run was asked for."""
        [args] = self.backwards
        return [name for name, is_needed in zip(("q", "k", "v", "sink"), args[7:11]) if is_needed]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shapes, changes", CALLS.values(), ids=CALLS)
def test_opcheck_forward(shapes, changes, dtype):
    """Schema, autograd registration, fake against real, and the traced backward with static and dynamic sizes."""
    torch.library.opcheck(ATTENTION, arguments(shapes, changes, dtype))
    torch.library.opcheck(FORWARD, arguments(shapes, changes, dtype, requires_grad=False))


@pytest.mark.parametrize("window", [(None, None), (None, 0), (3, 2)], ids=["full", "causal", "window"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_opcheck_plain(dtype, window):
    """It gives what the operator with all arguments gives."""
    tensors = [torch.randn(shape).to(dtype) for shape in DENSE]
    torch.library.opcheck(PLAIN_FORWARD, (*tensors, 0.4, *window))
    call = PLAIN._replace(window_left=window[0], window_right=window[1])
    wanted = FORWARD(*tensors, *call)
    assert all(map(torch.equal, PLAIN_FORWARD(*tensors, 0.4, *window), wanted[:2])), "the same numbers"
    found = ATTENTION(*tensors, *call)
    assert all(map(torch.equal, found[:2], wanted[:2])) and found[2].shape == (0,), "and no probabilities"


@pytest.mark.parametrize("changes", [{}, *({name: value} for name, value in {**EVERY_SCORE, **LENGTHS}.items())], ids=str)
def test_which_calls_are_plain(changes):
    """Those with nothing but a scale and a window, whether gradients are deterministic or not."""
    call = PLAIN._replace(**changes, deterministic=True)
    is_plain = set(changes) <= {"window_left", "window_right", "max_seqlen_q", "max_seqlen_k"}
    assert (call.plain is not None) == is_plain, "plain"
    if is_plain:
        assert call.plain == (0.4, call.window_left, call.window_right), "scale and window"


@pytest.mark.parametrize("has_dlse", [False, True], ids=["no-dlse", "dlse"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shapes, changes", CALLS.values(), ids=CALLS)
def test_opcheck_backward(shapes, changes, dtype, has_dlse):
    inputs = arguments(shapes, changes, dtype, requires_grad=False)
    out, lse, _ = FORWARD(*inputs)
    dlse = torch.randn_like(lse) if has_dlse else None
    torch.library.opcheck(BACKWARD, backward_arguments(inputs, out, lse, torch.randn_like(out), dlse))


# Which of dq, dk, dv and dsink: at least one.
SUBSETS = {
    "-".join(itertools.compress(("dq", "dk", "dv", "dsink"), needs)): needs
    for needs in itertools.product((True, False), repeat=4)
    if any(needs)
}


@pytest.mark.parametrize("name", ["dq", "dk", "dv", "dk-dv", "dq-dv", "dsink"])
def test_opcheck_backward_of_some_gradients(name):
    inputs = arguments(DENSE, EVERY_SCORE, torch.bfloat16, requires_grad=False)
    out, lse, _ = FORWARD(*inputs)
    torch.library.opcheck(BACKWARD, backward_arguments(inputs, out, lse, torch.randn_like(out), needs=SUBSETS[name]))


@pytest.mark.parametrize("layout", ["dense", "varlen"])
@pytest.mark.parametrize("needs", SUBSETS.values(), ids=SUBSETS)
def test_some_gradients_are_those_of_all(needs, layout):
    """The same numbers, and an empty tensor for each that is not needed; the fake gives the same shapes and strides."""
    inputs = arguments(*CALLS[f"{layout}-every-score"], torch.bfloat16, requires_grad=False)
    out, lse, _ = FORWARD(*inputs)
    dout, dlse = torch.randn_like(out), torch.randn_like(lse)
    every = BACKWARD(*backward_arguments(inputs, out, lse, dout, dlse))
    some = backward_arguments(inputs, out, lse, dout, dlse, needs)
    fakes = BACKWARD(*(x.to("meta") if isinstance(x, torch.Tensor) else x for x in some))
    for found, fake, whole, is_needed in zip(BACKWARD(*some), fakes, every, needs):
        assert torch.equal(found, whole) if is_needed else found.shape == (0,), f"needed: {is_needed}"
        assert (fake.shape, fake.dtype, fake.stride()) == (found.shape, found.dtype, found.stride()), "fake and real"


@pytest.mark.parametrize("shapes, changes", CALLS.values(), ids=CALLS)
def test_fakes_tell_what_comes(shapes, changes):
    """Shapes, dtypes and strides on meta tensors are those of the real results."""
    inputs = arguments(shapes, changes, torch.bfloat16, requires_grad=False)
    meta = [x.to("meta") if isinstance(x, torch.Tensor) else x for x in inputs]
    out, lse, _ = real = FORWARD(*inputs)
    real += BACKWARD(*backward_arguments(inputs, out, lse, out))
    out, lse, _ = fake = FORWARD(*meta)
    fake += BACKWARD(*backward_arguments(meta, out, lse, out))
    for ours, other in zip(fake, real):
        found, wanted = ((x.shape, x.dtype, x.stride()) for x in (ours, other))
        assert found == wanted, "fake and real differ"


def test_cuda_tensors_reach_the_launch(monkeypatch):
    """With the scores of the call; the third result is the empty tensor of a call without probabilities."""
    q, k, v = (torch.randn(shape) for shape in DENSE)
    given, out, lse = [], torch.randn(2, 5, 4, 6), torch.randn(2, 4, 5)
    monkeypatch.setattr(attention.launch, "forward", lambda *arguments: given.append(arguments) or (out, lse))
    found = attention._forward_cuda(q, k, v, *PLAIN._replace(window_right=0))
    plain = attention._plain_cuda(q, k, v, 0.4, None, 0)
    assert given == [(q, k, v, 0.4, (None, 0, 0))] * 2, "tensors, scale and mask"
    assert found[0] is out and found[1] is lse and found[2].shape == (0,), "what the launch gave"
    assert plain[0] is out and plain[1] is lse and len(plain) == 2, "and that alone"


@pytest.mark.parametrize("needs", [(True, True, True), (True, False, False), (False, True, True)], ids=["all", "q", "kv"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["same-dtype", "cast"])
def test_cuda_gradients_reach_the_launch(dtype, needs, monkeypatch):
    """With dout in q's dtype, and an empty tensor for each gradient that the launch did not compute."""
    q, k, v = (torch.randn(shape, dtype=torch.bfloat16) for shape in DENSE)
    out, lse = torch.randn(2, 5, 4, 6, dtype=torch.bfloat16), torch.randn(2, 4, 5)
    dout, dlse = torch.randn(2, 5, 4, 6).bfloat16().to(dtype), torch.randn(2, 4, 5)
    grads = tuple(torch.ones_like(x) if is_needed else None for x, is_needed in zip((q, k, v), needs))
    given = []
    monkeypatch.setattr(attention.launch, "backward", lambda *arguments: given.append(arguments) or grads)
    call = PLAIN._replace(window_right=0, deterministic=True)
    found = attention._backward_cuda(dout, dlse, q, k, v, out, lse, *needs, False, *call)
    [(inputs, results, (dout_given, dlse_given), scale, mask, is_deterministic, needs_given)] = given
    assert dout_given.dtype == torch.bfloat16 and torch.equal(dout_given, dout.bfloat16()), "dout"
    tensors = *inputs, *results, dlse_given
    assert all(a is b for a, b in zip(tensors, (q, k, v, out, lse, dlse), strict=True)), "the tensors themselves"
    assert (scale, mask, is_deterministic, needs_given) == (0.4, (None, 0, 0), True, needs), "scalars"
    for ours, grad in zip(found, (*grads, None), strict=True):
        assert ours.shape == (0,) if grad is None else ours is grad, "what the launch gave"


def test_what_runs_on_cuda_tensors():
    for name in ("attention_plain", "attention_forward", "attention_backward"):
        assert torch._C._dispatch_has_kernel_for_dispatch_key(f"cute_fa::{name}", "CUDA"), f"{name} has kernels"


def test_results_share_no_memory_with_inputs():
    inputs = arguments(DENSE, EVERY_SCORE, torch.float64, requires_grad=False)
    out, lse, probs = FORWARD(*inputs)
    results = (out, lse, probs, *BACKWARD(*backward_arguments(inputs, out, lse, out)))
    places = [x.untyped_storage().data_ptr() for x in (*results, *(x for x in inputs if isinstance(x, torch.Tensor)))]
    assert len(set(places)) == len(places), "an operator returns tensors of its own"


@pytest.mark.parametrize("which", ["out", "lse", "both"])
def test_unused_results_cost_no_gradient(which):
    """A loss of one of the two equals a loss of both with the other's weight 0."""
    inputs = arguments(DENSE, {}, torch.float64)
    weights = {"out": (1.0, 0.0), "lse": (0.0, 1.0), "both": (1.0, 1.0)}[which]
    found = ATTENTION(*inputs)[:2]
    parts = [x.square().sum() for x, weight in zip(found, weights) if weight]
    whole = sum(x.square().sum() * weight for x, weight in zip(ATTENTION(*inputs)[:2], weights))
    grads, wanted = (torch.autograd.grad(loss, inputs[:3], allow_unused=True) for loss in (sum(parts), whole))
    for ours, other in zip(grads, wanted):
        torch.testing.assert_close(ours, other, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("needs", SUBSETS.values(), ids=SUBSETS)
def test_gradients_go_where_they_are_asked_for(needs):
    """The operator computes those alone, and they are those of plain torch."""
    tensors = [*(torch.randn(shape, dtype=torch.float64) for shape in DENSE), torch.randn(4)]
    wanted = list(itertools.compress(("q", "k", "v", "sink"), needs))
    grads = []
    with Recorder() as recorder:
        for attend in (cute_fa.flash_attn_func, lambda *inputs, **options: plain_attention(*inputs, **options)[0]):
            q, k, v, sink = inputs = [x.clone().requires_grad_(is_needed) for x, is_needed in zip(tensors, needs)]
            attend(q, k, v, causal=True, learnable_sink=sink).square().sum().backward()
            grads.append([x.grad for x in inputs])
    assert recorder.needs() == wanted, "what the operator was asked for"
    for ours, plain, is_needed in zip(*grads, needs):
        assert (ours is not None) == is_needed, "which inputs have a gradient"
        if is_needed:
            torch.testing.assert_close(ours, plain, rtol=1e-6, atol=1e-6)


def test_gradients_of_shared_pages_add_up():
    """Two sequences with the first page in common, against a gather under autograd."""
    q, k, v = (torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in ((6, 4, 8), *PAGED[1:]))
    table = ints([3, 1], [3, 0])
    lengths = dict(cu_seqlens_q=ints(0, 3, 6), cu_seqlens_k=ints(0, 6, 12), max_seqlen_q=3, max_seqlen_k=6)
    out = cute_fa.flash_attn_varlen_func(q, k, v, **lengths, block_table=table, causal=True)
    gathered = (x[table.long()].flatten(1, 2) for x in (k, v))
    wanted = plain_attention(q.unflatten(0, (2, 3)), *gathered, causal=True)[0].flatten(0, 1)
    torch.testing.assert_close(out, wanted, rtol=1e-12, atol=1e-12)
    dout = torch.randn_like(out)
    for ours, other in zip(*(torch.autograd.grad(x, (q, k, v), dout) for x in (out, wanted))):
        torch.testing.assert_close(ours, other, rtol=1e-12, atol=1e-12)


def test_probabilities_have_no_gradient():
    *_, probs = ATTENTION(*arguments(DENSE, EVERY_SCORE, torch.float64))
    assert not probs.requires_grad, "marked non-differentiable"


def test_double_backward_is_refused():
    inputs = arguments(DENSE, {}, torch.float64)
    out, lse, _ = ATTENTION(*inputs)
    for x in (out, lse):
        [dq] = torch.autograd.grad(x.square().sum(), inputs[0], create_graph=True)
        with pytest.raises(NotSupportedError, match="^create_graph: expected a first derivative, got the derivative"):
            torch.autograd.grad(dq.sum(), inputs[0])


def test_function_transforms():
    """torch.func's gradients, and those of a batch of queries one by one, are autograd's."""
    q, k, v = (torch.randn(shape, dtype=torch.float64) for shape in DENSE)
    sink = torch.randn(4, dtype=torch.float64)

    def loss(q, k, v, sink):
        return cute_fa.flash_attn_func(q, k, v, causal=True, learnable_sink=sink).square().sum()

    def gradients(*inputs):
        inputs = [x.clone().requires_grad_() for x in inputs]
        return torch.autograd.grad(loss(*inputs), inputs)

    every = torch.func.grad(loss, argnums=(0, 1, 2, 3))
    for ours, wanted in zip(every(q, k, v, sink), gradients(q, k, v, sink), strict=True):
        torch.testing.assert_close(ours, wanted)
    of_two = torch.func.vmap(torch.func.grad(loss), in_dims=(0, None, None, None))(torch.stack((q, -q)), k, v, sink)
    for ours, queries in zip(of_two, (q, -q)):
        torch.testing.assert_close(ours, gradients(queries, k, v, sink)[0])
    value, pullback = torch.func.vjp(loss, q, k, v, sink)
    for ours, wanted in zip(pullback(torch.ones_like(value)), gradients(q, k, v, sink), strict=True):
        torch.testing.assert_close(ours, wanted)
    torch.testing.assert_close(torch.func.jacrev(loss)(q, k, v, sink), gradients(q, k, v, sink)[0])


def leaves(batch, seqlen_q, seqlen_k):
    shapes = ((batch, seqlen_q, 4, 8), (batch, seqlen_k, 2, 8), (batch, seqlen_k, 2, 8))
    return [torch.randn(shape, requires_grad=True) for shape in shapes]


def gradients(function, inputs, *rest):
    out, lse = function(*inputs, *rest)
    wanted = [x for x in inputs if x.requires_grad]
    return (out, lse, *torch.autograd.grad(out.square().sum() + lse.sum(), wanted))


def dense_call(q, k, v):
    return cute_fa.flash_attn_func(q, k, v, causal=True, window_size=(9, 0), softcap=3.0, return_lse=True)


@pytest.mark.parametrize("frozen", ["", "q", "k", "v", "qk", "kv"], ids=lambda names: names or "none")
def test_compiled_dense_call_with_dynamic_lengths(frozen):
    """One graph without breaks serves all lengths, forward and backward; inputs without a gradient cost none."""
    graphs = []

    def keep(graph, _):
        graphs.append(graph)
        return make_boxed_func(graph.forward)

    backend = aot_autograd(fw_compiler=keep, bw_compiler=keep)
    compiled = torch.compile(dense_call, fullgraph=True, dynamic=True, backend=backend)
    for seqlen_q, seqlen_k in ((16, 24), (17, 31), (40, 12)):
        inputs = leaves(2, seqlen_q, seqlen_k)
        for name, x in zip("qkv", inputs):
            x.requires_grad_(name not in frozen)
        found, wanted = (gradients(call, inputs) for call in (compiled, dense_call))
        assert len(found) == 5 - len(frozen) and all(map(torch.equal, found, wanted)), f"{seqlen_q} queries, {seqlen_k} keys"
    assert len(graphs) == 2, "a forward and a backward"
    targets = [node.target for graph in graphs for node in graph.graph.nodes]
    assert FORWARD in targets and ATTENTION not in targets, "what runs has no autograd to go through"
    [node] = [node for graph in graphs for node in graph.graph.nodes if node.target is BACKWARD]
    assert node.args[7:11] == (*(name not in frozen for name in "qkv"), False), "asked for in the graph"


def test_a_compiled_plain_call_runs_an_operator_of_few_arguments():
    graphs = []
    backend = aot_autograd(fw_compiler=lambda graph, _: graphs.append(graph) or make_boxed_func(graph.forward))
    compiled = torch.compile(lambda *inputs: cute_fa.flash_attn_func(*inputs, causal=True), fullgraph=True, backend=backend)
    inputs = [x.detach() for x in leaves(1, 5, 7)]
    assert torch.equal(compiled(*inputs), cute_fa.flash_attn_func(*inputs, causal=True)), "compiled and eager"
    [node] = [node for graph in graphs for node in graph.graph.nodes if node.op == "call_function" and "cute_fa" in str(node.target)]
    assert node.target is PLAIN_FORWARD and node.args[3:] == (8**-0.5, None, 0), "scale and window"


def varlen_call(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k):
    lengths = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    return cute_fa.flash_attn_varlen_func(q, k, v, *lengths, causal=True, return_lse=True)


def test_compiled_packed_call_with_dynamic_lengths():
    """Totals and maxima change from step to step, as they do in training on packed batches."""
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(varlen_call, fullgraph=True, backend=counter)
    for lengths_q, lengths_k in (((5, 7), (6, 9)), ((8, 3), (2, 11)), ((4, 9), (10, 7))):
        inputs = [torch.randn(sum(lengths), heads, 8, requires_grad=True)
                  for lengths, heads in ((lengths_q, 4), (lengths_k, 2), (lengths_k, 2))]  # fmt: skip
        for x in inputs:
            torch._dynamo.mark_dynamic(x, 0)
        rest = (*(ints(0, *itertools.accumulate(x)) for x in (lengths_q, lengths_k)), max(lengths_q), max(lengths_k))
        for found, wanted in zip(gradients(compiled, inputs, *rest), gradients(varlen_call, inputs, *rest)):
            assert torch.equal(found, wanted), f"compiled and eager differ at lengths {lengths_q}, {lengths_k}"
    assert counter.frame_count <= 2, f"{counter.frame_count} graphs for three batches: more than one recompile"


def test_compiled_dropout_has_one_mask():
    """The compiled forward and backward agree on what was dropped: dv of a one-hot v is the sum of the weights."""

    def call(q, k, v):
        return cute_fa.flash_attn_func(q, k, v, 0.5)

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    q, k = (x.detach() for x in leaves(1, 6, 8)[:2])
    v = torch.eye(8).view(1, 8, 1, 8).expand(1, 8, 2, 8).contiguous().requires_grad_()
    out = compiled(q, k, v)
    assert (out == 0).any() and (out != 0).any(), "some weights are dropped"
    [dv] = torch.autograd.grad(out, v, torch.ones_like(out))
    weights = out.detach().unflatten(2, (2, 2)).sum(dim=(1, 3))
    torch.testing.assert_close(dv[..., 0].transpose(1, 2), weights, rtol=1e-5, atol=1e-5)
    assert not torch.equal(compiled(q, k, v), out), "the next call has another mask"


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = torch.nn.Linear(16, 48), torch.nn.Linear(16, 16)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 8)).unbind(2)
        return self.out(cute_fa.flash_attn_func(q, k, v, causal=True).flatten(-2))


def test_export():
    """An exported module holds the operator itself, takes other lengths, and can be trained."""
    block, seqlen = Block().eval(), torch.export.Dim("seqlen", min=2, max=64)
    exported = torch.export.export(block, (torch.randn(2, 10, 16),), dynamic_shapes={"x": {1: seqlen}})
    targets = [str(node.target) for node in exported.graph.nodes]
    assert "cute_fa.attention.default" in targets, "the operator is one node"
    x = torch.randn(2, 33, 16)
    found, wanted = exported.module()(x), block(x)
    assert torch.equal(found, wanted), "exported and eager differ"
    weights = list(block.parameters())
    grads, expected = torch.autograd.grad(found.sum(), weights), torch.autograd.grad(wanted.sum(), weights)
    assert all(map(torch.equal, grads, expected)), "gradients of the same weights"


@pytest.mark.parametrize("use_reentrant", [False, True], ids=["saved-tensor-hooks", "reentrant"])
def test_activation_checkpointing(use_reentrant):
    """The forward runs once more in the backward, and the gradients are the same bit for bit."""
    block, x = Block(), torch.randn(2, 9, 16, requires_grad=True)
    weights = [x, *block.parameters()]
    runs = {"plain": block, "checkpointed": lambda x: checkpoint(block, x, use_reentrant=use_reentrant)}
    grads, num_forwards = {}, {}
    for name, run in runs.items():
        with Recorder() as recorder:
            run(x).square().sum().backward()
        grads[name], num_forwards[name] = [weight.grad for weight in weights], recorder.num_forwards
        for weight in weights:
            weight.grad = None
    assert num_forwards == {"plain": 1, "checkpointed": 2}, "runs of the forward"
    assert all(map(torch.equal, grads["plain"], grads["checkpointed"])), "gradients"


@pytest.mark.parametrize("name", ["q", "k", "v", "learnable_sink"])
def test_forward_mode_is_refused(name):
    """Without the refusal torch takes the derivative of an operator to be zero."""
    tensors = dict(zip("qkv", (x.detach() for x in leaves(1, 3, 3))), learnable_sink=torch.zeros(4))

    def loss(x):
        return cute_fa.flash_attn_func(**{**tensors, name: x}).sum()

    message = "^q: expected reverse-mode differentiation, got a forward-mode tangent. Use backward or torch.autograd.grad.$"
    with pytest.raises(NotSupportedError, match=message):
        torch.func.jvp(loss, (tensors[name],), (torch.ones_like(tensors[name]),))
    with torch.autograd.forward_ad.dual_level(), pytest.raises(NotSupportedError, match=message):
        loss(torch.autograd.forward_ad.make_dual(tensors[name], torch.ones_like(tensors[name])))


def test_lse_outside_the_loss_gives_no_dlse():
    """Backward kernels skip the term; torch would make a tensor of zeros by default."""
    inputs = leaves(1, 3, 3)
    out, lse = cute_fa.flash_attn_func(*inputs, return_lse=True)
    with Recorder() as recorder:
        torch.autograd.grad(out.sum(), inputs, retain_graph=True)
        torch.autograd.grad(lse.sum(), inputs)
    dlse_of_out, dlse_of_lse = (args[1] for args in recorder.backwards)
    assert dlse_of_out is None and torch.equal(dlse_of_lse, torch.ones_like(lse)), "dlse of out alone, and of lse alone"


def test_compiled_scalars_may_change():
    """A second head_dim, scale or softcap makes torch treat them as symbols; checks must be traceable with these too."""

    def call(q, k, v, scale, softcap):
        return cute_fa.flash_attn_func(q, k, v, softmax_scale=scale, softcap=softcap)

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    for head_dim, scale, softcap in ((8, None, 0.0), (16, None, 0.0), (16, 0.5, 2.0), (16, 0.25, 3.0), (24, 0.75, 4.0)):
        q, k, v = (torch.randn(1, 5, 2, head_dim) for _ in range(3))
        found, wanted = (function(q, k, v, scale, softcap) for function in (compiled, call))
        assert torch.equal(found, wanted), f"compiled and eager differ at {head_dim}, {scale}, {softcap}"


LACKING = {
    "softcap": {"softcap": 1.0},
    "attention_chunk": {"attention_chunk": 3},
    "window_size": {"window_left": 0},
    "window_size-right": {"window_right": 2},
    "learnable_sink": {"learnable_sink": torch.zeros(4)},
    "cu_seqlens_q": {"cu_seqlens_q": torch.zeros(2, dtype=torch.int32)},
}


@pytest.mark.parametrize("name", LACKING)
def test_operators_on_cuda_tensors_refuse_what_kernels_lack(name, monkeypatch):
    """As in a graph that was exported with CPU tensors and moved."""
    for direction in ("forward", "backward"):
        monkeypatch.setattr(attention.launch, direction, lambda *arguments: pytest.fail("launched"))
    q, k, v = (torch.randn(shape) for shape in DENSE)
    out, lse = torch.randn(2, 5, 4, 6), torch.randn(2, 4, 5)
    call = PLAIN._replace(**LACKING[name])
    message = f"^q: expected a CPU tensor for a call that uses {name.split('-')[0]}, got"
    with pytest.raises(NotSupportedError, match=message):
        attention._forward_cuda(q, k, v, *call)
    if call.plain:
        with pytest.raises(NotSupportedError, match=message):
            attention._plain_cuda(q, k, v, *call.plain)
    with pytest.raises(NotSupportedError, match=message):
        attention._backward_cuda(out, None, q, k, v, out, lse, True, True, True, False, *call)


def test_compiled_graphs_of_an_earlier_version_are_not_found(monkeypatch, tmp_path):
    """torch.compile keeps graphs on disk by the names and arguments of the operators that were called."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    tensors = [torch.randn(shape) for shape in DENSE]

    def misses_and_hits():
        torch._dynamo.reset()
        counters.clear()
        torch.compile(cute_fa.flash_attn_func, fullgraph=True)(*tensors)
        found = counters["aot_autograd"]
        return found["autograd_cache_miss"], found["autograd_cache_hit"]

    assert [misses_and_hits(), misses_and_hits()] == [(1, 0), (0, 1)], "kept, and found again"
    monkeypatch.setattr(attention, "REVISION", attention.REVISION + 1)
    assert misses_and_hits() == (1, 0), "not the graph of other sources"
