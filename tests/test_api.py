"""The public functions: signatures, return types, no argument dropped or swapped, sizes of zero, dtypes, strides."""

import doctest
import inspect
import itertools

import pytest
import torch

import cute_fa
from cute_fa import api
from cute_fa.core.call import AttentionOptions, CacheUpdate, PackedSequences

# flash-attn 2.8: names, order and defaults.
SCORES = (
    "dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None, "
    "deterministic=False, return_attn_probs=False"
)
LENGTHS = "cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k"
FLASH_ATTN_2 = {
    "flash_attn_func": f"q, k, v, {SCORES}",
    "flash_attn_qkvpacked_func": f"qkv, {SCORES}",
    "flash_attn_kvpacked_func": f"q, kv, {SCORES}",
    "flash_attn_varlen_func": f"q, k, v, {LENGTHS}, {SCORES}, block_table=None",
    "flash_attn_varlen_qkvpacked_func": f"qkv, cu_seqlens, max_seqlen, {SCORES}",
    "flash_attn_varlen_kvpacked_func": f"q, kv, {LENGTHS}, {SCORES}",
    "flash_attn_with_kvcache": "q, k_cache, v_cache, k=None, v=None, rotary_cos=None, rotary_sin=None, "
    "cache_seqlens=None, cache_batch_idx=None, cache_leftpad=None, block_table=None, softmax_scale=None, causal=False, "
    "window_size=(-1, -1), softcap=0.0, rotary_interleaved=True, alibi_slopes=None, num_splits=0, "
    "return_softmax_lse=False",
}
# Ours, keyword-only behind them.
PACKED_EXTRAS = "return_lse=False, learnable_sink=None, attention_chunk=0"
EXTRAS = {
    "flash_attn_func": f"{PACKED_EXTRAS}, num_splits=0, pack_gqa=None",
    "flash_attn_qkvpacked_func": PACKED_EXTRAS,
    "flash_attn_kvpacked_func": PACKED_EXTRAS,
    "flash_attn_varlen_func": f"{PACKED_EXTRAS}, num_splits=0, pack_gqa=None, seqused_q=None, seqused_k=None",
    "flash_attn_varlen_qkvpacked_func": f"{PACKED_EXTRAS}, seqused=None",
    "flash_attn_varlen_kvpacked_func": f"{PACKED_EXTRAS}, seqused_q=None, seqused_k=None",
    "flash_attn_with_kvcache": "learnable_sink=None, attention_chunk=0, pack_gqa=None",
}
# Where a name of the call and the name it has further down differ.
PACKED_NAMES = {"cu_seqlens_q": "cu_seqlens", "cu_seqlens_k": "cu_seqlens", "max_seqlen_q": "max_seqlen",
                "max_seqlen_k": "max_seqlen", "seqused_q": "seqused", "seqused_k": "seqused",
                "return_lse": "return_softmax_lse"}  # fmt: skip
PACKED = [name for name in FLASH_ATTN_2 if "packed" in name]


@pytest.mark.parametrize("name", FLASH_ATTN_2)
def test_signature(name):
    signature = inspect.signature(getattr(cute_fa, name))
    assert str(signature) == f"({FLASH_ATTN_2[name]}, *, {EXTRAS[name]})", f"signature of {name}"


@pytest.fixture
def calls(monkeypatch):
    """What the public functions pass down, instead of computing it."""
    seen = []
    for room, name in ((api.attention, "dense"), (api.attention, "varlen"), (api.kvcache, "attend")):
        monkeypatch.setattr(room, name, lambda *arguments: seen.append(arguments))
    return seen


@pytest.mark.parametrize("name", FLASH_ATTN_2)
def test_every_argument_arrives_under_its_name(calls, name):
    """Each argument gets a value of its own, positional ones by position."""
    parameters = inspect.signature(getattr(cute_fa, name)).parameters.values()
    given = {p.name: torch.randn(4, 3, 2, 8) if p.name == "qkv" else object() for p in parameters}
    if "kv" in given:
        given["kv"] = torch.randn(4, 2, 2, 8)
    if name in PACKED and "varlen" not in name:
        given = {key: x[None] if torch.is_tensor(x) else x for key, x in given.items()}
    positional = [given[p.name] for p in parameters if p.kind is not p.KEYWORD_ONLY]
    getattr(cute_fa, name)(*positional, **{p.name: given[p.name] for p in parameters if p.kind is p.KEYWORD_ONLY})
    [arguments] = calls
    used = {key for key in ("q", "k", "v", "k_cache", "v_cache", "qkv", "kv") if key in given and "kvcache" not in name}
    for group in arguments:
        group = AttentionOptions(*group) if type(group) is tuple else group  # as `dense` takes them
        if isinstance(group, (AttentionOptions, PackedSequences, CacheUpdate)):
            fields = getattr(group, "__dataclass_fields__", {})
            defaults = getattr(group, "_field_defaults", {name: field.default for name, field in fields.items()})
            for field, default in defaults.items():
                source = field if field in given else PACKED_NAMES.get(field)
                value = getattr(group, field)
                assert value is (given[source] if source in given else default), f"{field} of {name}"
                used.add(source)
    if "kvcache" in name:
        assert arguments[:3] == tuple(given[key] for key in ("q", "k_cache", "v_cache")), "the tensors in order"
        used |= {"q", "k_cache", "v_cache"}
    assert given.keys() <= used, f"arguments that arrive nowhere: {given.keys() - used}"


@pytest.mark.parametrize("name", ["flash_attn_func", "flash_attn_varlen_func"])
def test_tensors_arrive_in_order(calls, name):
    given = [object() for _ in range(7)]
    getattr(cute_fa, name)(*given[: 3 if name == "flash_attn_func" else 7])
    assert calls[0][:3] == tuple(given[:3]), "q, k, v"


@pytest.mark.parametrize("name", PACKED)
def test_packed_tensors_are_read_through_views(calls, name):
    shape = (10, 2, 2, 8) if "kvpacked" in name and "qkv" not in name else (10, 3, 2, 8)
    packed = torch.randn(shape if "varlen" in name else (1, *shape))
    q = [object()] if shape[1] == 2 else []
    lengths = [object()] * (0 if "varlen" not in name else 4 if q else 2)
    getattr(cute_fa, name)(*q, packed, *lengths)
    parts = calls[0][len(q) : 3]
    assert calls[0][: len(q)] == tuple(q), "q is passed on"
    for index, part in enumerate(parts):
        wanted = packed.select(-3, index)
        assert part.data_ptr() == wanted.data_ptr() and part.stride() == wanted.stride(), f"part {index} is no view"
        assert part.shape == wanted.shape, f"shape of part {index}"


def leaves(*shapes, dtype=torch.float64):
    return [torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes]


def ints(*values):
    return torch.tensor(values, dtype=torch.int32)


# Every option at once, each with an effect on the result.
OPTIONS = dict(
    softmax_scale=0.7,
    causal=True,
    window_size=(4, 3),
    softcap=3.0,
    alibi_slopes=torch.tensor([0.5, -0.2]),
    learnable_sink=torch.tensor([0.3, -0.6]),
    attention_chunk=6,
    dropout_p=0.25,
    return_attn_probs=True,
)
CU_SEQLENS = dict(q=ints(0, 5, 9), k=ints(0, 6, 9))


def packed_and_unpacked(name):
    """The packed tensor with the rest of its call, and the unpacked function with its arguments."""
    if name == "flash_attn_qkvpacked_func":
        [qkv] = leaves((2, 9, 3, 2, 8))
        return [qkv], {}, cute_fa.flash_attn_func, qkv.unbind(2), {}
    if name == "flash_attn_kvpacked_func":
        q, kv = leaves((2, 5, 2, 8), (2, 9, 2, 2, 8))
        return [q, kv], {}, cute_fa.flash_attn_func, (q, *kv.unbind(2)), {}
    if name == "flash_attn_varlen_qkvpacked_func":
        [qkv] = leaves((9, 3, 2, 8))
        own = dict(cu_seqlens=CU_SEQLENS["q"], max_seqlen=6, seqused=ints(4, 3))
        both = {f"{key}_{side}": value for key, value in own.items() for side in "qk"}
        return [qkv], own, cute_fa.flash_attn_varlen_func, qkv.unbind(1), both
    q, kv = leaves((9, 2, 8), (9, 2, 2, 8))
    own = {f"cu_seqlens_{side}": value for side, value in CU_SEQLENS.items()}
    own |= dict(max_seqlen_q=5, max_seqlen_k=7, seqused_q=ints(4, 4), seqused_k=ints(6, 2))
    return [q, kv], own, cute_fa.flash_attn_varlen_func, (q, *kv.unbind(1)), own


@pytest.mark.parametrize("name", PACKED)
def test_packed_gives_exactly_what_unpacked_gives(name):
    inputs, own, unpacked, parts, rest = packed_and_unpacked(name)
    torch.manual_seed(5)
    found = getattr(cute_fa, name)(*inputs, **own, **OPTIONS)
    torch.manual_seed(5)
    wanted = unpacked(*parts, **rest, **OPTIONS)
    assert all(map(torch.equal, found, wanted)), "out, lse or probs differ"
    dout, dlse = torch.randn_like(found[0]), torch.randn_like(found[1])
    grads, wanted_grads = (torch.autograd.grad(outputs[:2], inputs, (dout, dlse)) for outputs in (found, wanted))
    for x, grad, wanted_grad in zip(inputs, grads, wanted_grads):
        assert grad.shape == x.shape and grad.abs().max() > 0, "the gradient comes back packed"
        assert torch.equal(grad, wanted_grad), "gradients differ"


@pytest.mark.parametrize("dropout_p", [0.0, 0.5], ids=["no-dropout", "dropout"])
@pytest.mark.parametrize("return_lse", [False, True], ids=["no-lse", "lse"])
@pytest.mark.parametrize("return_attn_probs", [False, True], ids=["no-probs", "probs"])
@pytest.mark.parametrize("name", [name for name in FLASH_ATTN_2 if name != "flash_attn_with_kvcache"])
def test_return_types(name, return_attn_probs, return_lse, dropout_p):
    dense = "varlen" not in name
    rows = (2, 6) if dense else (9,)
    qkv = torch.randn(*rows, 3, 4, 8)
    inputs = [qkv] if "qkvpacked" in name else [qkv[..., 0, :, :]]
    inputs += [qkv[..., 1:, :, :]] if "_kvpacked" in name else [] if "qkvpacked" in name else list(qkv.unbind(-3)[1:])
    lengths = [] if dense else [ints(0, 4, 9), 6] if "qkvpacked" in name else [ints(0, 4, 9)] * 2 + [6, 6]
    options = dict(dropout_p=dropout_p, return_attn_probs=return_attn_probs, return_lse=return_lse)
    found = getattr(cute_fa, name)(*inputs, *lengths, **options)
    shapes = [(*rows, 4, 8), (2, 4, 6) if dense else (4, 9), (2, 4, 6, 6) if dropout_p else (0,)]
    if not (return_attn_probs or return_lse):
        assert isinstance(found, torch.Tensor) and found.shape == shapes[0], "out alone"
        return
    assert type(found) is tuple, "a tuple"
    assert [tuple(x.shape) for x in found] == shapes[: 3 if return_attn_probs else 2], "each where asked for"


def test_return_types_of_the_cache():
    q, cache = torch.randn(2, 3, 4, 8), torch.randn(2, 6, 2, 8)
    out = cute_fa.flash_attn_with_kvcache(q, cache, cache)
    assert isinstance(out, torch.Tensor) and out.shape == (2, 3, 4, 8), "out alone"
    found = cute_fa.flash_attn_with_kvcache(q, cache, cache, return_softmax_lse=True)
    assert type(found) is tuple and [tuple(x.shape) for x in found] == [(2, 3, 4, 8), (2, 4, 3)], "out and lse"


ZERO_SIZES = {"batch": (0, 3, 4), "queries": (2, 0, 4), "keys": (2, 3, 0), "all": (0, 0, 0)}
ZERO_OPTIONS = {
    "plain": {},
    "every-option": dict(
        causal=True, window_size=(2, 1), softcap=2.0, alibi_slopes=torch.ones(4), attention_chunk=3, dropout_p=0.5
    ),
}


@pytest.mark.parametrize("options", ZERO_OPTIONS.values(), ids=ZERO_OPTIONS)
@pytest.mark.parametrize("sizes", ZERO_SIZES.values(), ids=ZERO_SIZES)
def test_zero_sizes_of_a_dense_call(sizes, options):
    batch, seqlen_q, seqlen_k = sizes
    inputs = leaves((batch, seqlen_q, 4, 8), (batch, seqlen_k, 2, 8), (batch, seqlen_k, 2, 5))
    out, lse, _ = cute_fa.flash_attn_func(*inputs, **options, return_attn_probs=True)
    assert torch.equal(out, torch.zeros(batch, seqlen_q, 4, 5, dtype=torch.float64)), "out is 0"
    assert torch.equal(lse, torch.full((batch, 4, seqlen_q), -torch.inf, dtype=torch.float64)), "lse is -inf"
    for x, grad in zip(inputs, torch.autograd.grad((out, lse), inputs, (torch.ones_like(out), torch.ones_like(lse)))):
        assert torch.equal(grad, torch.zeros_like(x)), "gradients are 0"


@pytest.mark.parametrize("options", ZERO_OPTIONS.values(), ids=ZERO_OPTIONS)
@pytest.mark.parametrize(
    "lengths_q, lengths_k",
    [([], []), ([0, 0], [0, 0]), ([3, 2], [0, 0]), ([0, 0], [4, 1])],
    ids=["no-sequences", "empty-sequences", "no-keys", "no-queries"],
)
def test_zero_sizes_of_a_packed_call(lengths_q, lengths_k, options):
    cu_seqlens = [ints(0, *itertools.accumulate(lengths)) for lengths in (lengths_q, lengths_k)]
    total_q, total_k = sum(lengths_q), sum(lengths_k)
    inputs = leaves((total_q, 4, 8), (total_k, 2, 8), (total_k, 2, 5))
    max_seqlens = [max(lengths, default=0) for lengths in (lengths_q, lengths_k)]
    out, lse, _ = cute_fa.flash_attn_varlen_func(*inputs, *cu_seqlens, *max_seqlens, **options, return_attn_probs=True)
    assert torch.equal(out, torch.zeros(total_q, 4, 5, dtype=torch.float64)), "out is 0"
    assert torch.equal(lse, torch.full((4, total_q), -torch.inf, dtype=torch.float64)), "lse is -inf"
    for x, grad in zip(inputs, torch.autograd.grad((out, lse), inputs, (torch.ones_like(out), torch.ones_like(lse)))):
        assert torch.equal(grad, torch.zeros_like(x)), "gradients are 0"


@pytest.mark.parametrize(
    "batch, seqlen_q, seqlen_cache, seqlen_new, held",
    [(0, 1, 4, 1, 2), (2, 0, 4, 1, 2), (2, 3, 4, 0, 0), (2, 3, 0, 0, 0), (0, 0, 0, 0, 0)],
    ids=["batch", "queries", "no-key-yet", "cache-without-rows", "all"],
)
def test_zero_sizes_of_a_cache_call(batch, seqlen_q, seqlen_cache, seqlen_new, held):
    q, k, v = (torch.randn(batch, size, heads, 8) for size, heads in ((seqlen_q, 4), (seqlen_new, 2), (seqlen_new, 2)))
    k_cache, v_cache = torch.randn(2, batch, seqlen_cache, 2, 8)
    lengths = torch.full((batch,), held, dtype=torch.int32)
    rest = dict(cache_seqlens=lengths, return_softmax_lse=True)
    out, lse = cute_fa.flash_attn_with_kvcache(q, k_cache, v_cache, k, v, **rest)
    assert torch.equal(out, torch.zeros(batch, seqlen_q, 4, 8)), "out is 0"
    assert torch.equal(lse, torch.full((batch, 4, seqlen_q), -torch.inf)), "lse is -inf"
    assert torch.equal(k_cache[:, held : held + seqlen_new], k), "keys are appended all the same"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("head_dim, head_dim_v", [(8, 8), (16, 8), (8, 24), (5, 3)], ids=str)
def test_dtypes_and_unequal_head_dims(dtype, head_dim, head_dim_v):
    inputs = leaves((2, 5, 4, head_dim), (2, 7, 2, head_dim), (2, 7, 2, head_dim_v), dtype=dtype)
    out, lse, probs = cute_fa.flash_attn_func(*inputs, 0.5, return_attn_probs=True)
    assert (out.dtype, out.shape) == (dtype, (2, 5, 4, head_dim_v)), "out"
    assert lse.dtype == (torch.float64 if dtype == torch.float64 else torch.float32), "lse is wide"
    assert probs.dtype == dtype, "probs"
    for x, grad in zip(inputs, torch.autograd.grad(out.sum(), inputs)):
        assert (grad.dtype, grad.shape) == (dtype, x.shape), "gradients are like their tensors"


STRIDES = {
    "heads-before-rows": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "features-first": lambda x: x.permute(3, 0, 1, 2).contiguous().permute(1, 2, 3, 0),
    "every-second-row": lambda x: x.repeat_interleave(2, dim=1)[:, ::2],
    "slice-of-wider-features": lambda x: torch.cat((x, x), dim=-1)[..., : x.shape[-1]],
    "storage-offset": lambda x: torch.cat((x, x))[x.shape[0] :],
}


@pytest.mark.parametrize("stride", STRIDES.values(), ids=STRIDES)
def test_strides_do_not_matter(stride):
    inputs = leaves((2, 5, 4, 8), (2, 7, 2, 8), (2, 7, 2, 8))
    strided = [stride(x) for x in inputs]
    found, wanted = (cute_fa.flash_attn_func(*x, causal=True, return_lse=True) for x in (strided, inputs))
    for ours, other in zip(found, wanted):
        torch.testing.assert_close(ours, other, rtol=1e-12, atol=1e-12)
    # A gradient with strides of its own, as transpose and expand leave it.
    dout = stride(torch.randn_like(found[0]))
    grads, wanted_grads = (torch.autograd.grad(x[0], inputs, dout) for x in (found, wanted))
    for ours, other in zip(grads, wanted_grads):
        torch.testing.assert_close(ours, other, rtol=1e-12, atol=1e-12)


def test_expanded_tensors():
    """Stride 0: one key-value head for all, one sequence for the batch."""
    q, k, v = leaves((1, 5, 4, 8), (1, 7, 1, 8), (1, 7, 1, 8))
    expanded = (q.expand(3, -1, -1, -1), k.expand(3, -1, 4, -1), v.expand(3, -1, 4, -1))
    found, wanted = (cute_fa.flash_attn_func(*x) for x in (expanded, [x.contiguous() for x in expanded]))
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
    dout = torch.ones(1, 1, 1, 1, dtype=torch.float64).expand_as(found)
    grads, wanted_grads = (torch.autograd.grad(x, (q, k, v), dout) for x in (found, wanted))
    for ours, other in zip(grads, wanted_grads):
        torch.testing.assert_close(ours, other, rtol=1e-12, atol=1e-12)


def test_inputs_are_not_written_to():
    inputs = leaves((2, 5, 4, 8), (2, 7, 2, 8), (2, 7, 2, 8))
    before = [x.detach().clone() for x in inputs]
    cute_fa.flash_attn_func(*inputs, causal=True, softcap=2.0, dropout_p=0.5).sum().backward()
    assert all(map(torch.equal, inputs, before)), "an input changed"


def test_examples_run():
    results = doctest.testmod(api, extraglobs={"torch": torch, "cute_fa": cute_fa})
    assert results.attempted >= 5, "the docstrings have examples"
    assert results.failed == 0, "an example fails"
