"""check_attention and check_varlen pass what is right and catch small faults, in the tensors where they show."""

import pytest
import torch

from cute_fa import flash_attn_func, flash_attn_varlen_func
from cute_fa.testing.gradients import cancelling_terms, check_attention, check_varlen
from cute_fa.testing.inputs import SHAPES, Shape, options, packings

SHAPE = Shape("small-gqa", batch=2, seqlen_q=33, seqlen_k=40, heads_q=4, heads_kv=2, head_dim=32, head_dim_v=16)
BFLOAT16, FLOAT16, FLOAT32 = torch.bfloat16, torch.float16, torch.float32
DTYPES = pytest.mark.parametrize("dtype", [BFLOAT16, FLOAT16, FLOAT32], ids=["bfloat16", "float16", "float32"])
# In fp32 the reference and plain torch are equally exact, so which of them is twice as close to the oracle is chance.
SIXTEEN_BITS = pytest.mark.parametrize("dtype", [BFLOAT16, FLOAT16], ids=["bfloat16", "float16"])


def run(attention, dtype, option, shape=SHAPE):
    generator = torch.Generator().manual_seed(0)
    torch.default_generator.manual_seed(0)
    return check_attention(attention, *shape.tensors(dtype, "cpu", generator), option, generator)


def run_varlen(attention, dtype, packing, option):
    generator = torch.Generator().manual_seed(0)
    torch.default_generator.manual_seed(0)
    return check_varlen(attention, *SHAPE.tensors(dtype, "cpu", generator), packings(SHAPE)[packing], option, generator)


def missed(found):
    return {name for name, comparison in found.items() if not comparison.ok}


@SIXTEEN_BITS
@pytest.mark.parametrize("name", options(SHAPE))
def test_the_library_passes(name, dtype):
    found = run(flash_attn_func, dtype, options(SHAPE)[name])
    assert set(found) == {"out", "lse", "dq", "dk", "dv"} | ({"dsink"} if name == "sink" else set()), f"{set(found)}"
    assert not missed(found), f"{ {tensor: found[tensor] for tensor in missed(found)} }"


@pytest.mark.parametrize("name", ["one-token", "more-queries", "mqa"])
def test_the_library_passes_on_a_shape_of_the_list(name):
    """more-queries with a causal mask has rows without a key."""
    shape = next(shape for shape in SHAPES if shape.name == name)
    found = run(flash_attn_func, BFLOAT16, {"causal": True}, shape)
    assert not missed(found), f"{ {tensor: found[tensor] for tensor in missed(found)} }"


class Altered(torch.autograd.Function):
    """Passes a tensor on; its gradient comes back times `factor`."""

    @staticmethod
    def forward(ctx, x, factor):
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.factor, None


def wrong_scale(q, k, v, **call):
    return flash_attn_func(q, k, v, **{**call, "softmax_scale": 1.01 * q.shape[3] ** -0.5})


def mask_off_by_one(q, k, v, causal, **call):
    return flash_attn_func(q, k, v, window_size=(-1, 1), **call)


def altered(index, factor):
    """flash_attn_func with the gradient of q, k or v (by index) times a factor."""

    def wrong(*qkv, **call):
        qkv = [Altered.apply(x, factor) if i == index else x for i, x in enumerate(qkv)]
        return flash_attn_func(*qkv, **call)

    return wrong


def no_gradient_of_lse(q, k, v, **call):
    out, lse, *probs = flash_attn_func(q, k, v, **call)
    return out, lse.detach(), *probs


def lse_in_log2(q, k, v, **call):
    out, lse, *probs = flash_attn_func(q, k, v, **call)
    return out, lse / torch.log(torch.tensor(2.0)), *probs


def nan_in_one_place(q, k, v, **call):
    out, lse, *probs = flash_attn_func(q, k, v, **call)
    return out.index_put((torch.tensor(0),) * 4, torch.tensor(torch.nan, dtype=out.dtype)), lse, *probs


# name: the wrong function, the option it is called with, the tensors that must miss at least
FAULTS = {
    "scale-1-percent-off": (wrong_scale, {}, {"lse"}),
    "mask-off-by-one": (mask_off_by_one, {"causal": True}, {"out", "lse", "dq", "dk", "dv"}),
    "dk-zero": (altered(1, 0), {}, {"dk"}),
    "dv-3-percent-off": (altered(2, 1.03), {}, {"dv"}),
    "dq-negated": (altered(0, -1), {}, {"dq"}),
    "dq-nan": (altered(0, torch.nan), {}, {"dq"}),
    "lse-without-gradient": (no_gradient_of_lse, {"return_lse": True}, {"dq", "dk"}),
    "lse-in-log2": (lse_in_log2, {}, {"lse"}),
    "one-nan": (nan_in_one_place, {}, {"out"}),
}


@DTYPES
@pytest.mark.parametrize("name", FAULTS)
def test_faults_are_caught(name, dtype):
    wrong, option, tensors = FAULTS[name]
    found = run(wrong, dtype, option)
    assert tensors <= missed(found), f"only {missed(found)} missed: {found}"


@pytest.mark.parametrize("name", ["dk-zero", "dv-3-percent-off", "dq-negated"])
def test_a_wrong_gradient_misses_alone(name):
    wrong, option, tensors = FAULTS[name]
    assert missed(run(wrong, FLOAT32, option)) == tensors, "another tensor misses too"


def test_a_scale_1_percent_off_misses_everywhere_in_fp32():
    assert missed(run(wrong_scale, FLOAT32, {})) == {"out", "lse", "dq", "dk", "dv"}, "a tensor passed"


def test_a_wrong_sink_gradient_is_caught():
    def wrong(q, k, v, learnable_sink, **call):
        return flash_attn_func(q, k, v, learnable_sink=Altered.apply(learnable_sink, 1.05), **call)

    assert missed(run(wrong, FLOAT32, options(SHAPE)["sink"])) == {"dsink"}, "only the sink's gradient is wrong"


def test_dropout_without_its_factor_is_caught():
    """The mask comes from the call; what the call does with it does not."""

    def wrong(q, k, v, dropout_p, **call):
        out, *rest = flash_attn_func(q, k, v, dropout_p=dropout_p, **call)
        return out * (1 - dropout_p), *rest

    found = missed(run(wrong, FLOAT32, {"dropout_p": 0.25}))
    assert {"out", "dq", "dk", "dv"} <= found, f"only {found} missed"


@SIXTEEN_BITS
@pytest.mark.parametrize("packing", packings(SHAPE))
@pytest.mark.parametrize("name", options(SHAPE))
def test_the_library_passes_packed(name, packing, dtype):
    found = run_varlen(flash_attn_varlen_func, dtype, packing, options(SHAPE)[name])
    assert set(found) == {"out", "lse", "dq", "dk", "dv"} | ({"dsink"} if name == "sink" else set()), f"{set(found)}"
    assert not missed(found), f"{ {tensor: found[tensor] for tensor in missed(found)} }"


def one_key_less(q, k, v, cu_seqlens_k, **call):
    """The last sequence loses its last key."""
    shorter = cu_seqlens_k.clone()
    shorter[-1] -= 1
    return flash_attn_varlen_func(q, k, v, cu_seqlens_k=shorter, **call)


def other_page(q, k, v, block_table, **call):
    return flash_attn_varlen_func(q, k, v, block_table=block_table.flip(0), **call)


def seqused_ignored(q, k, v, seqused_k, **call):
    return flash_attn_varlen_func(q, k, v, **call)


def unused_rows_written(q, k, v, **call):
    out, lse, *rest = flash_attn_varlen_func(q, k, v, **call)
    end = call["cu_seqlens_q"][-1]
    return torch.cat((out[:end], torch.ones_like(out[end:]))), lse, *rest


@DTYPES
@pytest.mark.parametrize(
    ("wrong", "packing", "tensors"),
    [
        (one_key_less, "varlen", {"out", "lse", "dq", "dk", "dv"}),
        (one_key_less, "block_table", {"out", "lse", "dq", "dk", "dv"}),
        (other_page, "block_table", {"out", "lse", "dq", "dk", "dv"}),
        (seqused_ignored, "seqused", {"out", "lse", "dq", "dk", "dv"}),
        (unused_rows_written, "varlen", {"out"}),
    ],
    ids=["one-key-less", "one-key-less-in-pages", "other-page", "seqused-ignored", "unused-rows-written"],
)
def test_faults_of_packed_calls_are_caught(wrong, packing, tensors, dtype):
    found = run_varlen(wrong, dtype, packing, {})
    assert tensors <= missed(found), f"only {missed(found)} missed: {found}"


def test_cancelling_terms_bound_the_sums_of_absolute_terms():
    """Of one key, where P = 1: dq_i = scale (dP_i - delta_i) k and dk = scale sum_i (dP_i - delta_i) q_i."""
    generator = torch.Generator().manual_seed(0)
    q, dout = (torch.randn(1, 5, 1, dim, generator=generator).double() for dim in (8, 16))
    k, v = (torch.randn(1, 1, 1, dim, generator=generator).double() for dim in (8, 16))
    dp = (dout * v).sum(-1, keepdim=True).abs()
    found = cancelling_terms(q, k, v, dout, -0.5)
    sums = {"dq": (0.5 * dp * k.abs()).max(), "dk": (0.5 * dp * q.abs()).sum(1).max()}
    for name, largest in sums.items():
        assert largest <= found[name] <= 50 * largest, f"{name}: {found[name]} for {largest}"
    default = cancelling_terms(q, k, v, dout)
    assert default["dq"] == pytest.approx(2 * 8**-0.5 * found["dq"]), "the scale of flash_attn_func"
