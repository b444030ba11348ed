"""The named shapes, options and packings: what they cover, and that the public functions take every pair of them."""

import pytest
import torch

import cute_fa
from cute_fa.testing.inputs import LAYOUTS, SHAPES, Packing, options, packings


def test_names_are_unique_and_enough():
    names = [shape.name for shape in SHAPES]
    assert len(names) >= 12, f"{len(names)} shapes"
    assert len(set(names)) == len(names), f"a name twice: {names}"


@pytest.mark.parametrize(
    "covers",
    [
        lambda s: s.seqlen_q == 1 and s.seqlen_k > 1,
        lambda s: s.seqlen_k == 1 and s.seqlen_q > 1,
        lambda s: s.seqlen_q == s.seqlen_k == 127,
        lambda s: s.seqlen_q == s.seqlen_k == 128,
        lambda s: s.seqlen_q == s.seqlen_k == 129,
        lambda s: 1 < s.seqlen_q < s.seqlen_k,
        lambda s: 1 < s.seqlen_k < s.seqlen_q,
        lambda s: 1 < s.heads_kv < s.heads_q,
        lambda s: s.heads_kv == 1 and s.heads_q > 2,
        lambda s: s.head_dim == 256,
        lambda s: s.head_dim > s.head_dim_v,
        lambda s: s.head_dim < s.head_dim_v,
        lambda s: s.batch > 1,
    ],
    ids=[
        "one-query", "one-key", "below-a-tile", "a-tile", "above-a-tile", "more-keys", "more-queries",
        "gqa", "mqa", "largest-head-dim", "smaller-v", "larger-v", "batches",
    ],
)  # fmt: skip
def test_some_shape_covers(covers):
    assert any(map(covers, SHAPES)), "no shape"


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_shapes_are_those_that_kernels_could_take(shape):
    assert shape.heads_q % shape.heads_kv == 0, "query heads are no multiple of key-value heads"
    assert shape.head_dim % 8 == 0 and shape.head_dim_v % 8 == 0, "head_dim is no multiple of 8"
    assert max(shape.head_dim, shape.head_dim_v) <= 256, "head_dim above 256"


@pytest.mark.parametrize("name", ["bfloat16", "float16", "float32"])
def test_tensors_are_normal_numbers_of_the_sizes_named(name):
    dtype = getattr(torch, name)
    shape = next(shape for shape in SHAPES if shape.name == "d40-72")
    q, k, v = tensors = shape.tensors(dtype, "cpu", torch.Generator().manual_seed(3))
    sizes = [(1, 48, 4, 40), (1, 50, 4, 40), (1, 50, 4, 72)]
    assert [tuple(x.shape) for x in tensors] == sizes, "shapes"
    assert all(x.dtype == dtype for x in tensors), "dtypes"
    for x in tensors:
        assert abs(x.double().mean()) < 0.05 and abs(x.double().std() - 1) < 0.05, f"mean {x.mean()}, std {x.std()}"
    again = shape.tensors(dtype, "cpu", torch.Generator().manual_seed(3))
    assert all(map(torch.equal, tensors, again)), "the same seed gave other numbers"
    other = shape.tensors(dtype, "cpu", torch.Generator().manual_seed(4))
    assert not any(map(torch.equal, tensors, other)), "another seed gave the same numbers"
    assert not torch.equal(k, v[..., :40]), "k and v are alike"


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_every_option_is_accepted(shape):
    q, k, v = shape.tensors(torch.bfloat16, "cpu", torch.Generator().manual_seed(0))
    for name, option in options(shape).items():
        found = cute_fa.flash_attn_func(q, k, v, **option)
        out = found[0] if option.get("return_lse") else found
        assert out.shape == (*q.shape[:3], shape.head_dim_v), f"{name}: out has shape {tuple(out.shape)}"
        assert torch.isfinite(out).all(), f"{name}: out is not finite"


def test_every_option_changes_the_result():
    """On one shape, no two options compute the same but the plain one and the one that returns more."""
    shape = next(shape for shape in SHAPES if shape.name == "gqa")
    q, k, v = shape.tensors(torch.float32, "cpu", torch.Generator().manual_seed(0))
    found = options(shape)
    outs = {name: cute_fa.flash_attn_func(q, k, v, **found[name]) for name in found if name != "lse"}
    for a in outs:
        for b in outs:
            assert a == b or not torch.allclose(outs[a], outs[b], atol=1e-3), f"{a} computes what {b} does"


def test_options_have_one_name_for_every_option_of_the_scores():
    shape = next(shape for shape in SHAPES if shape.name == "gqa")
    arguments = {argument for option in options(shape).values() for argument in option}
    wanted = {"causal", "window_size", "attention_chunk", "softmax_scale", "softcap", "alibi_slopes", "learnable_sink"}
    assert arguments == wanted | {"dropout_p", "return_lse"}, f"{arguments}"
    slopes = [options(shape)[name]["alibi_slopes"].shape for name in ("alibi", "alibi-batch")]
    assert slopes == [(shape.heads_q,), (shape.batch, shape.heads_q)], f"shapes of the slopes {slopes}"


def test_windows_are_bounded_on_the_sides_that_they_name():
    found = options(next(shape for shape in SHAPES if shape.name == "gqa"))
    windows = {name: option["window_size"] for name, option in found.items() if "window" in name}
    bounded = {name: tuple(side not in (None, -1) for side in window) for name, window in windows.items()}
    both, left, right = (True, True), (True, False), (False, True)
    assert bounded == {"window": both, "window-left": left, "window-right": right, "window-causal": both}, f"{bounded}"


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
@pytest.mark.parametrize("name", packings(SHAPES[0]))
def test_packings_lie_where_they_say(name, shape):
    """Keys that hold their own row number: the rows named by `places` are those that the arguments lead to."""
    packing = packings(shape)[name]
    rows_q, rows_k = shape.batch * shape.seqlen_q, shape.batch * shape.seqlen_k
    keys = torch.arange(1.0, rows_k + 1)[:, None, None]
    held = packing.paged(keys).flatten(0, -3)[:, 0, 0] if name == "block_table" else keys[:, 0, 0]
    arguments, places = packing.arguments, packing.places
    for b in range(shape.batch):
        length = (arguments.get("seqused_k") if name == "seqused" else arguments["cu_seqlens_k"].diff())[b].item()
        if name == "block_table":
            pages = arguments["block_table"][b].tolist()
            rows = [page * packing.page_size + row for page in pages for row in range(packing.page_size)][:length]
        else:
            rows = [arguments["cu_seqlens_k"][b].item() + row for row in range(length)]
        wanted = range(places["begins_k"][b] + 1, places["begins_k"][b] + places["lengths_k"][b] + 1)
        assert held[rows].tolist() == list(wanted), f"keys of sequence {b}"
        length_q = (arguments.get("seqused_q") if name == "seqused" else arguments["cu_seqlens_q"].diff())[b].item()
        begin_q = arguments["cu_seqlens_q"][b].item()
        assert (begin_q, length_q) == (places["begins_q"][b], places["lengths_q"][b]), f"queries of sequence {b}"
    assert arguments["cu_seqlens_q"][-1] <= rows_q, "rows beyond q"
    assert arguments["max_seqlen_q"] >= max(places["lengths_q"]), "max_seqlen_q"
    assert arguments["max_seqlen_k"] >= max(places["lengths_k"]), "max_seqlen_k"


def test_packings_cover_unequal_lengths_and_unused_rows():
    shape = next(shape for shape in SHAPES if shape.name == "gqa")
    for name, packing in packings(shape).items():
        assert len(set(packing.places["lengths_k"])) == shape.batch, f"{name}: equal lengths"
        assert sum(packing.places["lengths_q"]) < shape.batch * shape.seqlen_q, f"{name}: no unused row"


def test_pages_are_cut_differentiably():
    x = torch.arange(10.0)[:, None, None].requires_grad_()
    pages = Packing({}, {}, seqlen_k=5, page_size=2).paged(x)
    rows = [[9, 0], [7, 8], [5, 6], [4, 0], [2, 3], [0, 1]]  # reversed; a sequence of 5 fills 2 pages and half of one
    assert pages[..., 0, 0].tolist() == rows, "pages"
    pages.sum().backward()
    assert (x.grad == 1).all(), "gradient"
    assert Packing({}, {}, seqlen_k=5).paged(x) is x, "without pages"


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_every_packing_is_accepted(shape):
    q, k, v = (x.flatten(0, 1) for x in shape.tensors(torch.bfloat16, "cpu", torch.Generator().manual_seed(0)))
    for name, packing in packings(shape).items():
        out = cute_fa.flash_attn_varlen_func(q, packing.paged(k), packing.paged(v), **packing.arguments)
        assert out.shape == (*q.shape[:2], shape.head_dim_v), f"{name}: out has shape {tuple(out.shape)}"
        assert torch.isfinite(out).all(), f"{name}: out is not finite"


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_hold_the_same_numbers_elsewhere(layout):
    x = torch.randn(2, 5, 3, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    laid = LAYOUTS[layout](x)
    assert torch.equal(laid, x), "the same numbers"
    assert not laid.is_contiguous() or laid.data_ptr() % 16, "not where a copy would put them"
