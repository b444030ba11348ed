"""The operators of dense and packed calls: `cute_fa::attention`, made of `attention_forward` or `attention_plain`, and
`attention_backward`.

`dense` and `varlen` are what `api` calls: cast under autocast, validate, check support, draw the dropout state, run the
operator. `attention` has the gradients; torch sees through it, so a compiled graph holds the others, which run below
autograd and cost the less on the host. Operators take one flat list of arguments, `Call`, because a torch schema knows no
groups; every argument costs on the way through torch's dispatcher, so the most frequent calls have an operator with few.
"""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple, Optional, get_type_hints

import torch
from torch._C._functorch import maybe_current_level
from torch.autograd import forward_ad
from torch.compiler import is_compiling

from cute_fa.core.call import AttentionOptions, PackedSequences
from cute_fa.core.errors import NotSupportedError, expected
from cute_fa.core.mask_spec import MaskSpec
from cute_fa.core.problem import AttentionProblem, ScoreSpec
from cute_fa.host import launch, support, validate
from cute_fa.ops.eager import are_plain, is_eager, key_of
from cute_fa.ops.library import REVISION, autocast, define, define_composite
from cute_fa.reference import dense as reference_dense
from cute_fa.reference import varlen as reference_varlen
from cute_fa.reference.dense import ScoreTensors

Tensor = torch.Tensor
_SEQUENCE_FIELDS = tuple(field.name for field in dataclasses.fields(PackedSequences))
_DENSE = PackedSequences(None, None, 0, 0)


class Call(NamedTuple):
    """Everything beside q, k and v, in the order of the operators' schemas. max_seqlens are 0 in a dense call."""

    alibi_slopes: Optional[Tensor]
    learnable_sink: Optional[Tensor]
    rng_state: Optional[Tensor]
    cu_seqlens_q: Optional[Tensor]
    cu_seqlens_k: Optional[Tensor]
    seqused_q: Optional[Tensor]
    seqused_k: Optional[Tensor]
    block_table: Optional[Tensor]
    max_seqlen_q: int
    max_seqlen_k: int
    softmax_scale: float
    window_left: Optional[int]
    window_right: Optional[int]
    attention_chunk: int
    softcap: float
    dropout_p: float
    deterministic: bool
    return_probs: bool

    @property
    def sequences(self) -> Optional[PackedSequences]:
        """None in a dense call."""
        if self.cu_seqlens_q is None:
            return None
        return PackedSequences(**{name: getattr(self, name) for name in _SEQUENCE_FIELDS})

    @property
    def plain(self) -> Optional["Plain"]:
        """None where that is not all of the call, as far as the forward looks."""
        is_dense = all(tensor is None for tensor in self[:_NUM_CALL_TENSORS])
        has_options = self.attention_chunk or self.softcap or self.dropout_p or self.return_probs
        return Plain(self.softmax_scale, self.window_left, self.window_right) if is_dense and not has_options else None

    @property
    def mask(self) -> tuple:
        """As the arguments of MaskSpec."""
        return self.window_left, self.window_right, self.attention_chunk

    @property
    def scores(self) -> ScoreSpec:
        return ScoreSpec(self.softmax_scale, MaskSpec(*self.mask), self.softcap, self.dropout_p)

    @property
    def score_tensors(self) -> ScoreTensors:
        return ScoreTensors(self.alibi_slopes, self.learnable_sink, self.rng_state)


class Plain(NamedTuple):
    """What a call has that is dense and without options, and the schema of its forward."""

    softmax_scale: float
    window_left: Optional[int]
    window_right: Optional[int]

    @property
    def call(self) -> Call:
        return Call(*[None] * _NUM_CALL_TENSORS, 0, 0, *self, 0, 0.0, 0.0, False, False)


_NUM_CALL_TENSORS = Call._fields.index("max_seqlen_q")

_GRADIENTS = ("dq", "dk", "dv", "dsink")  # what the backward gives, each where it is needed
_needs = [(f"needs_{name}", bool) for name in _GRADIENTS]
BackwardCall = NamedTuple("BackwardCall", [*_needs, *get_type_hints(Call).items()])


class Known(NamedTuple):
    """What a dense call that passed the checks comes to.

    launch: as `launch.forward_launch` gives it; None for CPU tensors and where the call cannot be remembered.
    """

    call: Call
    options: AttentionOptions
    launch: Optional[Callable]


# Dense calls that were checked, by all that checks, scalars and launch depend on (`eager.key_of`).
_known: dict[tuple, Known] = {}
_MAX_KNOWN = 4096


def dense(q, k, v, options: tuple):
    """Attention on (batch, seqlen, heads, head_dim) tensors; returns what `options`, the fields of AttentionOptions, asks
    for (see `api`).

    An eager call like an earlier one takes one lookup instead of checks, plan and layouts.
    """
    key = key_of(q, k, v, options)
    known = key and _known.get(key)
    if known is None:
        q, k, v = autocast(q, k, v)
        known = _checked(q, k, v, options)
    call, options, launch_known = known
    if launch_known is None:
        return _asked_for(*_run(q, k, v, call), options)
    # Without the operators, at which nothing would look: they take longer on the host than the launch.
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        out, lse = _apply_unobserved(q, k, v, None, call, launch_known)
    else:
        out, lse = launch_known(q, k, v, call.softmax_scale, options.return_lse or options.return_attn_probs)
    return _asked_for(out, lse, q.new_empty(0) if options.return_attn_probs else None, options)


def _checked(q, k, v, options: tuple) -> Known:
    """The known call, after the checks where it is new; remembered where it has a key."""
    key = key_of(q, k, v, options)
    known = key and _known.get(key)
    if known is None:
        named = AttentionOptions(*options)
        call = _call(q, k, v, validate.dense(q, k, v, named), named, _DENSE)
        if not key or not are_plain(named) or call.rng_state is not None:
            return Known(call, named, None)
        if len(_known) >= _MAX_KNOWN:
            _known.clear()
        known = _known[key] = Known(call, named, _launch_of(q, k, v, call))
    return known


def _launch_of(q, k, v, call: Call) -> Optional[Callable]:
    """The launch of calls like this one; None for CPU tensors."""
    if not q.is_cuda:
        return None
    shapes, strides = (q.shape, k.shape, v.shape), (q.stride(), k.stride(), v.stride())
    return launch.forward_launch(q.get_device(), q.dtype, call.mask, shapes, strides)


def varlen(q, k, v, sequences: PackedSequences, options: AttentionOptions):
    """Attention on packed sequences; returns what `options` asks for (see `api`)."""
    q, k, v = autocast(q, k, v)
    problem = validate.varlen(q, k, v, sequences, options)
    if validate.has_values(q):
        validate.varlen_values(q, k, sequences)
    lengths = {"max_seqlen_q": problem.seqlen_q, "max_seqlen_k": problem.seqlen_k}  # ints, where tensors were given
    call = _call(q, k, v, problem, options, dataclasses.replace(sequences, **lengths))
    return _asked_for(*_run(q, k, v, call), options)


def _call(q, k, v, problem: AttentionProblem, options: AttentionOptions, sequences: PackedSequences) -> Call:
    """The operator's arguments, once it is sure that something computes the checked problem."""
    support.require(problem, q.device)
    _refuse_forward_mode(q, k, v, options.learnable_sink)
    scores = problem.scores
    rng_state = None
    if scores.dropout_p:
        # Seed and offset come from torch's generator of the device, so manual_seed, fork_rng, checkpointing and graphs work.
        rng_state = torch.randint(2**63 - 1, (2,), dtype=torch.int64, device=q.device)
    return Call(
        alibi_slopes=options.alibi_slopes,
        learnable_sink=options.learnable_sink,
        rng_state=rng_state,
        **{name: getattr(sequences, name) for name in _SEQUENCE_FIELDS},
        softmax_scale=scores.scale,
        window_left=scores.mask.left,
        window_right=scores.mask.right,
        attention_chunk=scores.mask.chunk,
        softcap=scores.softcap,
        dropout_p=scores.dropout_p,
        deterministic="deterministic" in problem.features,
        return_probs=options.return_attn_probs and scores.dropout_p > 0,
    )


def _asked_for(out, lse, probs, options: AttentionOptions):
    """What the call returns of these."""
    if options.return_attn_probs:
        return out, lse, probs
    return (out, lse) if options.return_lse else out


def _refuse_forward_mode(*tensors):
    """The operators have no forward-mode derivative; without this, torch would take it to be zero."""
    if forward_ad._current_level < 0:
        return
    if any(x is not None and forward_ad.unpack_dual(x).tangent is not None for x in tensors):
        advice = "Use backward or torch.autograd.grad"
        raise NotSupportedError(expected("q", "reverse-mode differentiation", "a forward-mode tangent", advice))


def _probs_shape(q, k, call: Call):
    """The shape of the returned probabilities; (0,) where they are not asked for."""
    if not call.return_probs:
        return (0,)
    if call.cu_seqlens_q is None:
        return (q.shape[0], q.shape[2], q.shape[1], k.shape[1])
    return (call.cu_seqlens_q.shape[0] - 1, q.shape[1], call.max_seqlen_q, call.max_seqlen_k)


def _forward_fake(q, k, v, *flat):
    lse_shape = (*q.shape[:-3], q.shape[-2], q.shape[-3])
    out = q.new_empty((*q.shape[:-1], v.shape[-1]))
    lse = q.new_empty(lse_shape, dtype=reference_dense.compute_dtype(q.dtype))
    return out, lse, q.new_empty(_probs_shape(q, k, Call(*flat)))


def _forward_cpu(q, k, v, *flat):
    call = Call(*flat)
    if call.sequences is None:
        out, lse, probs = reference_dense.forward(q, k, v, call.scores, call.score_tensors)
    else:
        shape = _probs_shape(q, k, call) if call.return_probs else None
        out, lse, probs = reference_varlen.forward(q, k, v, call.sequences, call.scores, call.score_tensors, shape)
    return out.contiguous(), lse, probs if call.return_probs else q.new_empty(0)


def _forward_cuda(q, k, v, *flat):
    call = Call(*flat)
    _require_kernels(q, call)
    return (*launch.forward(q, k, v, call.softmax_scale, call.mask), q.new_empty(0))


def _plain_fake(q, k, v, *plain):
    return _forward_fake(q, k, v, *Plain(*plain).call)[:2]


def _plain_cpu(q, k, v, *plain):
    return _forward_cpu(q, k, v, *Plain(*plain).call)[:2]


def _plain_cuda(q, k, v, softmax_scale, window_left, window_right):
    if window_left is not None or window_right not in (None, 0):
        _require_kernels(q, Plain(softmax_scale, window_left, window_right).call)
    return launch.forward(q, k, v, softmax_scale, (window_left, window_right, 0))


def _require_kernels(q, call: Call):
    """Raises what `support.require` would: a graph that was exported with CPU tensors comes without the checks of `dense`."""
    used = [name for name in Call._fields[:_NUM_CALL_TENSORS] if getattr(call, name) is not None]
    used += [name for name in ("attention_chunk", "softcap", "dropout_p") if getattr(call, name)]
    used += ["window_size"] * (call.window_left is not None or call.window_right not in (None, 0))
    if used:
        rule, advice = f"a CPU tensor for a call that uses {', '.join(used)}", "No GPU kernel does that yet"
        raise NotSupportedError(expected("q", rule, f"device {q.device}", advice))


def _backward_fake(dout, dlse, q, k, v, out, lse, *flat):
    needs, call = _split(flat)
    inputs = zip((q, k, v, call.learnable_sink), needs)
    return _without_none(q, [x.new_empty(x.shape) if is_needed else None for x, is_needed in inputs])


def _backward_cpu(dout, dlse, q, k, v, out, lse, *flat):
    needs, call = _split(flat)
    if call.sequences is None:
        grads = reference_dense.backward(dout, dlse, q, k, v, call.scores, call.score_tensors)
    else:
        grads = reference_varlen.backward(dout, dlse, q, k, v, call.sequences, call.scores, call.score_tensors)
    return _without_none(q, [grad.contiguous() if is_needed else None for grad, is_needed in zip(grads, needs)])


def _backward_cuda(dout, dlse, q, k, v, out, lse, *flat):
    needs, call = _split(flat)
    _require_kernels(q, call)
    return _without_none(q, _launch_backward(dout, dlse, q, k, v, out, lse, needs, call))


def _launch_backward(dout, dlse, q, k, v, out, lse, needs, call: Call) -> tuple:
    """A gradient for each in `needs`, None where it is False; no kernel takes a sink."""
    tensors = (q, k, v), (out, lse), (dout.to(q.dtype), dlse)
    return *launch.backward(*tensors, call.softmax_scale, call.mask, call.deterministic, tuple(needs[:3])), None


def _split(flat) -> tuple[tuple, Call]:
    """The fields of a BackwardCall: which gradients are needed, and the call."""
    return flat[: len(_GRADIENTS)], Call(*flat[len(_GRADIENTS) :])


def _without_none(q, grads) -> tuple:
    """An operator returns tensors: an empty one stands for a gradient that is not needed."""
    return tuple(q.new_empty(0) if grad is None else grad for grad in grads)


class _Attention(torch.autograd.Function):
    """Gives a call its gradients. learnable_sink: that of the call, out of it, because an argument alone may have one."""

    generate_vmap_rule = True

    @staticmethod
    def forward(q, k, v, learnable_sink, call: Call, launch_known: Optional[Callable]):
        if launch_known is not None:
            return launch_known(q, k, v, call.softmax_scale)
        call = _with_sink(call, learnable_sink)
        if plain := call.plain:
            return torch.ops.cute_fa.attention_plain.default(q, k, v, *plain)
        return torch.ops.cute_fa.attention_forward.default(q, k, v, *call)

    @staticmethod
    def setup_context(ctx, inputs, output):
        q, k, v, learnable_sink, call, _ = inputs
        call = _with_sink(call, learnable_sink)
        out, lse, *probs = output
        ctx.mark_non_differentiable(*probs)
        ctx.set_materialize_grads(False)  # an lse outside the loss gives no dlse, and a kernel then skips that term
        ctx.save_for_backward(q, k, v, out, lse, *call[:_NUM_CALL_TENSORS])
        ctx.scalars = call[_NUM_CALL_TENSORS:]

    @staticmethod
    def backward(ctx, dout, dlse, *_dprobs):
        q, k, v, out, lse, *tensors = ctx.saved_tensors
        needs = ctx.needs_input_grad[: len(_GRADIENTS)]
        grads = _gradients(dout, dlse, (q, k, v, out, lse), needs, Call(*tensors, *ctx.scalars))
        return *(grad if is_needed else None for grad, is_needed in zip(grads, needs)), None, None


def _with_sink(call: Call, learnable_sink: Optional[Tensor]) -> Call:
    return call if learnable_sink is None else call._replace(learnable_sink=learnable_sink)


# `_Attention.apply` without what it does for torch.func, which takes several times as long as the rest.
_apply_unobserved = super(torch.autograd.Function, _Attention).apply


def _gradients(dout, dlse, saved, needs, call: Call) -> tuple:
    """A gradient for each in `needs`; anything where it is False. saved: q, k, v, out, lse."""
    q, k, v, out, _ = saved
    if dout is None:
        dout = torch.zeros_like(out)
    if q.is_cuda and not torch.is_grad_enabled() and is_eager(q, k, v, dout):
        return _launch_backward(dout, dlse, *saved, needs, call)  # as in `dense`
    return _Gradients.apply(dout, dlse, *saved, needs, call)


class _Gradients(torch.autograd.Function):
    """The backward operator, without derivatives of its own."""

    generate_vmap_rule = True

    @staticmethod
    def forward(dout, dlse, q, k, v, out, lse, needs, call: Call):
        return torch.ops.cute_fa.attention_backward.default(dout, dlse, q, k, v, out, lse, *needs, *call)

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, *_grads):
        advice = "Differentiate plain torch attention twice instead, such as scaled_dot_product_attention with its math backend"
        raise NotSupportedError(expected("create_graph", "a first derivative", "the derivative of a gradient", advice))


def _run(q, k, v, call: Call):
    """out, lse and probs through operators. torch.func differentiates an autograd function, but not inside of an operator."""
    if maybe_current_level() is not None and not is_compiling():
        return _differentiable(q, k, v, *call)
    return torch.ops.cute_fa.attention.default(q, k, v, *call, revision=REVISION)


def _differentiable(q, k, v, *flat):
    call = Call(*flat)
    out, lse, *probs = _Attention.apply(q, k, v, call.learnable_sink, call._replace(learnable_sink=None), None)
    return out, lse, *(probs or (q.new_empty(0),))


define_composite("attention", ("q", "k", "v"), Call, returns=3, function=_differentiable)
define(
    "attention_forward",
    ("q", "k", "v"),
    Call,
    returns=3,
    cpu=_forward_cpu,
    cuda=_forward_cuda,
    fake=_forward_fake,
)
define("attention_plain", ("q", "k", "v"), Plain, returns=2, cpu=_plain_cpu, cuda=_plain_cuda, fake=_plain_fake)
define(
    "attention_backward",
    ("dout", "dlse?", "q", "k", "v", "out", "lse"),
    BackwardCall,
    returns=len(_GRADIENTS),
    cpu=_backward_cpu,
    cuda=_backward_cuda,
    fake=_backward_fake,
)
