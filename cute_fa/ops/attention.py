"""The operators `cute_fa::attention_forward` and `cute_fa::attention_backward`: dense and packed calls, with autograd.

`dense` and `varlen` are what `api` calls: cast under autocast, validate, check support, draw the dropout state, run the
operator. The operators take one flat list of arguments, `Call`, because a torch schema knows no groups.
"""

import dataclasses
from typing import NamedTuple, Optional, get_type_hints

import torch
from torch.autograd import forward_ad

from cute_fa.core.call import AttentionOptions, PackedSequences
from cute_fa.core.errors import NotSupportedError, expected
from cute_fa.core.mask_spec import MaskSpec
from cute_fa.core.problem import AttentionProblem, ScoreSpec
from cute_fa.host import launch, support, validate
from cute_fa.ops.library import autocast, define
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
    def mask(self) -> tuple:
        """As the arguments of MaskSpec."""
        return self.window_left, self.window_right, self.attention_chunk

    @property
    def scores(self) -> ScoreSpec:
        return ScoreSpec(self.softmax_scale, MaskSpec(*self.mask), self.softcap, self.dropout_p)

    @property
    def score_tensors(self) -> ScoreTensors:
        return ScoreTensors(self.alibi_slopes, self.learnable_sink, self.rng_state)


_NUM_CALL_TENSORS = Call._fields.index("max_seqlen_q")

# What the backward gives, each where it is needed, and the places of what these belong to among the forward's arguments.
_GRADIENTS = ("dq", "dk", "dv", "dsink")
_GRADIENT_OF = (0, 1, 2, 3 + Call._fields.index("learnable_sink"))
_needs = [(f"needs_{name}", bool) for name in _GRADIENTS]
BackwardCall = NamedTuple("BackwardCall", [*_needs, *get_type_hints(Call).items()])

# Dense calls that were checked, by all that checks and scalars depend on. Only calls without tensors beside q, k and v.
_checked: dict[tuple, Call] = {}
_MAX_CHECKED = 4096
_PLAIN_TYPES = frozenset((bool, int, float, tuple, type(None)))


def dense(q, k, v, options: AttentionOptions):
    """Attention on (batch, seqlen, heads, head_dim) tensors; returns what `options` asks for (see `api`).

    An eager call like an earlier one skips the checks.
    """
    q, k, v = autocast(q, k, v)
    is_eager = _is_eager(q, k, v)
    key = _key(q, k, v, options) if is_eager else None
    call = key and _checked.get(key)
    if call is None:
        call = _call(q, k, v, validate.dense(q, k, v, options), options, _DENSE)
        if key and call.rng_state is None:
            if len(_checked) >= _MAX_CHECKED:
                _checked.clear()
            _checked[key] = call
    if is_eager and q.is_cuda and not _needs_backward(q, k, v, options.learnable_sink):
        # The operator, which nothing would look at, takes as long on the host as the launch.
        results = (*_launch(q, k, v, call), q.new_empty(0) if options.return_attn_probs else None)
    else:
        results = torch.ops.cute_fa.attention_forward.default(q, k, v, *call)
    return _asked_for(results, options)


def _key(q, k, v, options: AttentionOptions):
    """What checks and scalars of a dense call depend on, or None where an option is no plain value.

    Types are in it because 1, 1.0 and True are equal, and not all of them legal.
    """
    types = tuple(map(type, options))
    if not _PLAIN_TYPES.issuperset(types) or type(options.window_size) is not tuple:
        return None
    types_of_window = tuple(map(type, options.window_size))
    if not _PLAIN_TYPES.issuperset(types_of_window):
        return None
    tensors = q.shape, k.shape, v.shape, q.dtype, k.dtype, v.dtype, q.device, k.device, v.device
    return (*tensors, options, types, types_of_window, torch.are_deterministic_algorithms_enabled())


def _is_eager(*tensors) -> bool:
    """Whether these are torch's own tensors and nothing looks on: no trace, no mode, no transform, no profiler."""
    return (
        not torch.compiler.is_compiling()
        and all((type(x) is Tensor or type(x) is torch.nn.Parameter) and not x.is_neg() for x in tensors)
        and torch._C._get_tracing_state() is None
        and not torch._C._len_torch_dispatch_stack()
        and not torch._C._len_torch_function_stack()
        and torch._C._functorch.maybe_current_level() is None
        and forward_ad._current_level < 0
        and not torch.autograd._profiler_enabled()
    )


def _needs_backward(*tensors) -> bool:
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)


def varlen(q, k, v, sequences: PackedSequences, options: AttentionOptions):
    """Attention on packed sequences; returns what `options` asks for (see `api`)."""
    q, k, v = autocast(q, k, v)
    problem = validate.varlen(q, k, v, sequences, options)
    if validate.has_values(q):
        validate.varlen_values(q, k, sequences)
    lengths = {"max_seqlen_q": problem.seqlen_q, "max_seqlen_k": problem.seqlen_k}  # ints, where tensors were given
    call = _call(q, k, v, problem, options, dataclasses.replace(sequences, **lengths))
    return _asked_for(torch.ops.cute_fa.attention_forward.default(q, k, v, *call), options)


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


def _asked_for(results, options: AttentionOptions):
    """Of out, lse and probs, what the call returns."""
    out, lse, probs = results
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
    return (*_launch(q, k, v, call), q.new_empty(0))


def _require_kernels(q, call: Call):
    """Raises what `support.require` would: a graph that was exported with CPU tensors comes without the checks of `dense`."""
    used = [name for name in Call._fields[:_NUM_CALL_TENSORS] if getattr(call, name) is not None]
    used += [name for name in ("attention_chunk", "softcap", "dropout_p") if getattr(call, name)]
    used += ["window_size"] * (call.window_left is not None or call.window_right not in (None, 0))
    if used:
        rule, advice = f"a CPU tensor for a call that uses {', '.join(used)}", "No GPU kernel does that yet"
        raise NotSupportedError(expected("q", rule, f"device {q.device}", advice))


def _launch(q, k, v, call: Call):
    return launch.forward(q, k, v, call.softmax_scale, call.mask)


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


def _setup_context(ctx, inputs, output):
    q, k, v, *flat = inputs
    out, lse, probs = output
    ctx.mark_non_differentiable(probs)
    ctx.set_materialize_grads(False)  # an lse outside the loss gives no dlse, and a kernel then skips that term
    ctx.save_for_backward(q, k, v, out, lse, *flat[:_NUM_CALL_TENSORS])
    ctx.scalars = flat[_NUM_CALL_TENSORS:]


def _autograd_backward(ctx, dout, dlse, _dprobs):
    q, k, v, out, lse, *tensors = ctx.saved_tensors
    if dout is None:
        dout = torch.zeros_like(out)
    needs = [ctx.needs_input_grad[index] for index in _GRADIENT_OF]
    arguments = dout, dlse, q, k, v, out, lse
    if q.is_cuda and not torch.is_grad_enabled() and _is_eager(q, k, v, dout):
        # As in `dense`, without the operator, which is there for who looks on and to refuse a second derivative.
        grads = _launch_backward(*arguments, needs, Call(*tensors, *ctx.scalars))
    else:
        grads = torch.ops.cute_fa.attention_backward.default(*arguments, *needs, *tensors, *ctx.scalars)
    by_input = {index: grad for index, grad, is_needed in zip(_GRADIENT_OF, grads, needs) if is_needed}
    return tuple(by_input.get(index) for index in range(3 + len(Call._fields)))


def _refuse_double_backward(ctx, *_grads):
    advice = "Differentiate plain torch attention twice instead, such as scaled_dot_product_attention with its math backend"
    raise NotSupportedError(expected("create_graph", "a first derivative", "the derivative of a gradient", advice))


define(
    "attention_forward",
    ("q", "k", "v"),
    Call,
    returns=3,
    cpu=_forward_cpu,
    cuda=_forward_cuda,
    fake=_forward_fake,
    backward=_autograd_backward,
    setup_context=_setup_context,
)
define(
    "attention_backward",
    ("dout", "dlse?", "q", "k", "v", "out", "lse"),
    BackwardCall,
    returns=len(_GRADIENTS),
    cpu=_backward_cpu,
    cuda=_backward_cuda,
    fake=_backward_fake,
    backward=_refuse_double_backward,
    setup_context=lambda ctx, inputs, output: None,
)
