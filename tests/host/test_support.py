"""The support matrix: what it says is so, and a call without a backend is refused by name before anything runs."""

from dataclasses import replace

import pytest
import torch
from torch._subclasses import FakeTensorMode

import cute_fa
from cute_fa.core.call import AttentionOptions, CacheUpdate, PackedSequences
from cute_fa.core.errors import DeviceError, NotSupportedError
from cute_fa.host import support, validate

# One call for each row of the matrix: the layout, and what it asks for.
CALLS = {
    "dense": ("dense", {}),
    "varlen": ("varlen", {}),
    "kvcache": ("kvcache", {}),
    "block_table": ("paged", {}),
    "gqa": ("dense", {"heads_kv": 1}),
    "head_dim_v": ("dense", {"head_dim_v": 24}),
    "causal": ("dense", {"causal": True}),
    "window": ("dense", {"window_size": (2, -1)}),
    "attention_chunk": ("dense", {"attention_chunk": 2}),
    "softcap": ("dense", {"softcap": 3.0}),
    "alibi_slopes": ("dense", {"alibi_slopes": torch.tensor([0.5, 0.25])}),
    "dropout": ("dense", {"dropout_p": 0.5}),
    "learnable_sink": ("dense", {"learnable_sink": torch.zeros(2)}),
    "seqused": ("varlen", {"seqused_k": torch.tensor([1, 2], dtype=torch.int32)}),
    "lse": ("dense", {"return_lse": True}),
    "return_attn_probs": ("dense", {"return_attn_probs": True}),
    "deterministic": ("dense", {"deterministic": True}),
}


def arguments(layout: str, heads_kv=2, head_dim_v=16, **options):
    """q, k, v of 2 sequences with 4 queries and 4 keys, 2 heads, and the rest by name."""
    rows = {"dense": (2, 4), "kvcache": (2, 4), "varlen": (8,), "paged": (3, 4)}[layout]
    q_rows = (8,) if layout == "paged" else rows
    shapes = ((*q_rows, 2, 16), (*rows, heads_kv, 16), (*rows, heads_kv, head_dim_v))
    q, k, v = (torch.randn(shape, requires_grad=layout != "kvcache") for shape in shapes)
    if layout in ("varlen", "paged"):
        cu_seqlens = torch.tensor([0, 4, 8], dtype=torch.int32)
        options |= dict(cu_seqlens_q=cu_seqlens, cu_seqlens_k=cu_seqlens, max_seqlen_q=4, max_seqlen_k=4)
    if layout == "paged":
        options["block_table"] = torch.tensor([[2], [0]], dtype=torch.int32)
    return q, k, v, options


def problem(layout: str, **changes):
    q, k, v, given = arguments(layout, **changes)
    packed = {name: given.pop(name) for name in list(given) if name in PackedSequences.__dataclass_fields__}
    if layout == "kvcache":
        return validate.kvcache(q, k, v, CacheUpdate(), AttentionOptions(**given))
    if packed:
        return validate.varlen(q, k, v, PackedSequences(**packed), AttentionOptions(**given))
    return validate.dense(q, k, v, AttentionOptions(**given))


@pytest.mark.parametrize("layout, changes", CALLS.values(), ids=CALLS)
def test_calls_are_named_by_rows(request, layout, changes):
    name = request.node.callspec.id
    features = problem(layout, **changes).features
    assert name in features, f"the call asks for {name}"
    assert features <= {feature.name for feature in support.FEATURES}, "a feature without a row"


def test_every_row_has_a_call():
    names = [feature.name for feature in support.FEATURES]
    assert sorted(names) == sorted(CALLS), "rows of the matrix and calls of this file differ"


def test_a_plain_call_asks_for_nothing_else():
    assert problem("dense").features == {"dense"}, "no option, no feature"
    unused = dict(window_size=(None, -1), softcap=0, dropout_p=0.0, alibi_slopes=None)
    assert problem("dense", **unused).features == {"dense"}, "defaults that are spelled out"


@pytest.mark.parametrize("feature", support.FEATURES, ids=lambda feature: feature.name)
def test_cpu_columns(feature):
    """The CPU backend computes the row's call, and differentiates it where the column says so."""
    layout, changes = CALLS[feature.name]
    q, k, v, given = arguments(layout, **changes)
    function = {"dense": cute_fa.flash_attn_func, "kvcache": cute_fa.flash_attn_with_kvcache}
    found = function.get(layout, cute_fa.flash_attn_varlen_func)(q, k, v, **given)
    out = found[0] if isinstance(found, tuple) else found
    assert out.isfinite().all(), f"{feature.name} is computed"
    assert out.requires_grad == feature.cpu_backward, f"cpu_backward of {feature.name}"
    if feature.cpu_backward:
        assert all(grad.abs().max() > 0 for grad in torch.autograd.grad(out.square().sum(), (q, k, v))), "gradients"


# What has kernels, forward and backward. Rows that join it here get tests of those kernels.
HOPPER = {"dense", "gqa", "head_dim_v", "causal", "lse", "return_attn_probs", "deterministic"}


def on_a_gpu(value):
    """A fake CUDA tensor like `value`, if it is a tensor; q, k and v, which have more than two modes, in bfloat16."""
    if not isinstance(value, torch.Tensor):
        return value
    dtype = torch.bfloat16 if value.dim() > 2 else value.dtype
    return torch.empty(value.shape, device="cuda", dtype=dtype)


@pytest.mark.parametrize("feature", support.FEATURES, ids=lambda feature: feature.name)
def test_hopper_columns(feature, monkeypatch):
    """A call of the row goes through on a Hopper GPU, or is refused by the row's name, as both columns say."""
    monkeypatch.setattr(support, "compute_capability", lambda device: (9, 0))
    assert feature.hopper_forward == feature.hopper_backward == (feature.name in HOPPER), "both columns"
    layout, changes = CALLS[feature.name]
    *tensors, given = arguments(layout, **changes)
    function = {"dense": cute_fa.flash_attn_func, "kvcache": cute_fa.flash_attn_with_kvcache}
    function = function.get(layout, cute_fa.flash_attn_varlen_func)
    with FakeTensorMode():
        q, k, v = map(on_a_gpu, tensors)
        given = {name: on_a_gpu(value) for name, value in given.items()}
        if feature.hopper_forward:
            found = function(q, k, v, **given)
            out = found[0] if isinstance(found, tuple) else found
            assert (out.device.type, out.shape) == ("cuda", (*q.shape[:-1], v.shape[-1])), "the operator's fake"
        else:
            with pytest.raises(NotSupportedError, match=rf"for a call that uses [\w, ]*\b{feature.name}\b"):
                function(q, k, v, **given)


NO_KERNEL = (
    "q: expected a CPU tensor for a call that uses {}, got device cuda:0. No GPU kernel does that yet; move q, k and "
    "v to the CPU, where the reference backend takes every option."
)


@pytest.fixture(params=[None, (9, 0)], ids=["no-driver", "hopper"])
def hopper(monkeypatch, request):
    """A Hopper GPU, or a machine where nobody can tell."""
    monkeypatch.setattr(support, "compute_capability", lambda device: request.param)


def test_dense_call_with_a_kernel(hopper):
    """Fake CUDA tensors give what real ones do: shapes, dtypes and device of out, lse and the empty probabilities."""
    with FakeTensorMode():
        q = torch.empty(2, 8, 4, 64, device="cuda", dtype=torch.bfloat16)
        k, v = (torch.empty(2, 9, 2, size, device="cuda", dtype=torch.bfloat16) for size in (64, 32))
        found = cute_fa.flash_attn_func(q, k, v, causal=True, deterministic=True, return_attn_probs=True)
        alone = cute_fa.flash_attn_func(q, k, v)
    facts = [(x.device.type, x.dtype, tuple(x.shape)) for x in (*found, alone)]
    out, lse = ("cuda", torch.bfloat16, (2, 8, 4, 32)), ("cuda", torch.float32, (2, 4, 8))
    assert facts == [out, lse, ("cuda", torch.bfloat16, (0,)), out], "out, lse, no probabilities without dropout; out"


def test_dense_call_without_a_kernel(hopper):
    with FakeTensorMode(), pytest.raises(NotSupportedError) as caught:
        q = torch.empty(1, 8, 2, 64, device="cuda", dtype=torch.bfloat16)
        cute_fa.flash_attn_func(q, q, q, dropout_p=0.5, softcap=2.0, causal=True)
    assert str(caught.value) == NO_KERNEL.format("softcap, dropout"), "what is missing, in the order of the matrix"


def test_packed_call_without_a_kernel():
    with FakeTensorMode(), pytest.raises(NotSupportedError) as caught:
        q = torch.empty(8, 2, 64, device="cuda", dtype=torch.float16)
        cu_seqlens = torch.empty(3, device="cuda", dtype=torch.int32)
        cute_fa.flash_attn_varlen_func(q, q, q, cu_seqlens, cu_seqlens, 8, 8)
    assert str(caught.value) == NO_KERNEL.format("varlen"), "message"


def test_cache_call_without_a_kernel():
    with FakeTensorMode(), pytest.raises(NotSupportedError) as caught:
        q = torch.empty(1, 8, 2, 64, device="cuda", dtype=torch.float16)
        cute_fa.flash_attn_with_kvcache(q, q, q, cache_seqlens=3)
    assert str(caught.value) == NO_KERNEL.format("kvcache"), "message"


@pytest.mark.parametrize("capability, found", [((8, 0), "8.0"), ((10, 0), "10.0")], ids=["ampere", "blackwell"])
def test_another_architecture(monkeypatch, capability, found):
    monkeypatch.setattr(support, "compute_capability", lambda device: capability)
    with FakeTensorMode(), pytest.raises(DeviceError) as caught:
        q = torch.empty(1, 8, 2, 64, device="cuda", dtype=torch.bfloat16)
        cute_fa.flash_attn_func(q, q, q)
    message = (
        f"q: expected a GPU of compute capability 9.0, got {found}. Use an H100, H200, H20 or GH200, or CPU tensors "
        "for the reference backend."
    )
    assert str(caught.value) == message, "message"


def test_call_is_refused_for_what_is_missing_alone(monkeypatch):
    """With a kernel for dense and causal, window is named and nothing else is."""
    have = [replace(f, hopper_forward=f.name in ("dense", "causal")) for f in support.FEATURES]
    monkeypatch.setattr(support, "FEATURES", have)
    monkeypatch.setattr(support, "compute_capability", lambda device: (9, 0))
    device = torch.device("cuda:0")
    support.require(problem("dense", causal=True), device)
    with pytest.raises(NotSupportedError) as caught:
        support.require(problem("dense", causal=True, window_size=(3, 0)), device)
    assert str(caught.value) == NO_KERNEL.format("window"), "message"


def test_another_kind_of_device():
    with pytest.raises(DeviceError) as caught:
        support.require(problem("dense"), torch.device("xpu", 0))
    message = (
        "q: expected a CPU or CUDA tensor, got device xpu:0. Move q, k and v to a Hopper GPU, or to the CPU for the "
        "reference backend."
    )
    assert str(caught.value) == message, "message"


def test_meta_tensors_give_shapes():
    q = torch.empty(2, 8, 4, 64, device="meta", dtype=torch.bfloat16)
    k, v = (torch.empty(2, 9, 2, size, device="meta", dtype=torch.bfloat16) for size in (64, 32))
    out, lse = cute_fa.flash_attn_func(q, k, v, return_lse=True)
    assert (out.device.type, out.dtype, out.shape) == ("meta", torch.bfloat16, (2, 8, 4, 32)), "out"
    assert (lse.device.type, lse.dtype, lse.shape) == ("meta", torch.float32, (2, 4, 8)), "lse"


def test_refused_call_draws_no_random_number():
    state = torch.get_rng_state()
    with FakeTensorMode(), pytest.raises(NotSupportedError):
        q = torch.empty(1, 8, 2, 64, device="cuda", dtype=torch.bfloat16)
        cute_fa.flash_attn_func(q, q, q, dropout_p=0.5)
    assert torch.equal(torch.get_rng_state(), state), "the generator moved on"


@pytest.mark.parametrize(
    "error, family",
    [(NotSupportedError, NotImplementedError), (DeviceError, RuntimeError)],
    ids=["not-supported", "device"],
)
def test_public_names_of_the_exceptions(error, family):
    assert getattr(cute_fa, error.__name__) is error, "the public name is the class that is raised"
    assert issubclass(error, family), f"code that catches {family.__name__} catches it"


def test_compute_capability_without_a_driver(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert support.compute_capability(torch.device("cuda")) is None, "nobody can tell"


def test_compute_capability_is_the_device_s(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: {0: (9, 0), 1: (8, 6)}[device.index])
    assert support.compute_capability(torch.device("cuda:1")) == (8, 6), "of the device asked for"


def test_markdown_table():
    lines = support.markdown_table().split("\n")
    assert len(lines) == 2 + len(support.FEATURES), "a head of two lines, then one a feature"
    assert {line.count("|") for line in lines} == {5}, "four columns in every line"
    for line, feature in zip(lines[2:], support.FEATURES):
        _, name, meaning, cpu, hopper, _ = (cell.strip() for cell in line.split("|"))
        assert (name, meaning) == (f"`{feature.name}`", feature.meaning), f"row {line}"
        assert cpu == f"yes / {'yes' if feature.cpu_backward else 'no'}", f"CPU cell of {feature.name}"
        words = ["yes" if has_kernel else "not yet" for has_kernel in (feature.hopper_forward, feature.hopper_backward)]
        assert hopper == " / ".join(words), f"Hopper cell of {feature.name}"
