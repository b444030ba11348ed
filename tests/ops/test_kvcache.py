"""The cache operator: torch's own checks, torch.compile, and a call's path from the public function to the backend."""

import pytest
import torch

import cute_fa
from cute_fa.ops.kvcache import Call
from cute_fa.testing.plain import plain_attention

KVCACHE = torch.ops.cute_fa.attention_kvcache.default

PLAIN = Call(
    cache_seqlens=torch.tensor([3, 5], dtype=torch.int32),
    k=None,
    v=None,
    rotary_cos=None,
    rotary_sin=None,
    cache_batch_idx=None,
    cache_leftpad=None,
    block_table=None,
    alibi_slopes=None,
    learnable_sink=None,
    rotary_interleaved=True,
    softmax_scale=0.4,
    window_left=None,
    window_right=0,
    attention_chunk=0,
    softcap=0.0,
)


def ints(*values):
    return torch.tensor(values, dtype=torch.int32)


def appended(dtype=torch.float32):
    """Two new rows for each sequence, and rotary tables for 6 of 8 features."""
    tables = dict(rotary_cos=torch.randn(12, 3), rotary_sin=torch.randn(12, 3))
    return dict(k=torch.randn(2, 2, 2, 8).to(dtype), v=torch.randn(2, 2, 2, 6).to(dtype), **tables)


CALLS = {
    "read": lambda dtype: {},
    "append": appended,
    "every-tensor": lambda dtype: dict(
        **appended(dtype),
        cache_batch_idx=ints(2, 0),
        cache_leftpad=ints(1, 0),
        alibi_slopes=torch.rand(4),
        learnable_sink=torch.rand(4),
        rotary_interleaved=False,
        window_left=4,
        attention_chunk=5,
        softcap=2.0,
    ),
    "pages": lambda dtype: dict(**appended(dtype), block_table=ints([1, 4], [0, 3])),
}
SHAPES = {"read": (2, 8), "append": (2, 8), "every-tensor": (3, 8), "pages": (5, 4)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", CALLS)
def test_opcheck(name, dtype):
    """Schema with the cache's mutation, fake against real, functionalisation with static and dynamic sizes."""
    q = torch.randn(2, 2, 4, 8).to(dtype)
    caches = (torch.randn(*SHAPES[name], 2, size).to(dtype) for size in (8, 6))
    torch.library.opcheck(KVCACHE, (q, *caches, *PLAIN._replace(**CALLS[name](dtype))))


def test_schema_says_what_is_written():
    arguments = {argument.name: argument for argument in KVCACHE._schema.arguments}
    written = {name for name, argument in arguments.items() if argument.alias_info and argument.alias_info.is_write}
    assert written == {"k_cache", "v_cache"}, "the caches and nothing else"


def decode(q, k_cache, v_cache, k, v, cache_seqlens):
    rest = dict(cache_seqlens=cache_seqlens, causal=True, return_softmax_lse=True)
    return cute_fa.flash_attn_with_kvcache(q, k_cache, v_cache, k, v, **rest)


def test_appends_in_place_and_attends_to_all():
    q, k, v = (torch.randn(2, 2, heads, 8) for heads in (4, 2, 2))
    caches = torch.randn(2, 2, 8, 2, 8)
    before = caches.clone()
    out, lse = decode(q, *caches, k, v, ints(3, 5))
    for b, held in enumerate((3, 5)):
        for cache, old, new in zip(caches, before, (k, v)):
            assert torch.equal(cache[b, held : held + 2], new[b]), f"rows appended to sequence {b}"
            assert torch.equal(cache[b, :held], old[b, :held]), f"rows before the append of sequence {b}"
            assert torch.equal(cache[b, held + 2 :], old[b, held + 2 :]), f"rows behind the append of sequence {b}"
        rows = [torch.cat((old[b, :held], new[b]))[None] for old, new in zip(before, (k, v))]
        wanted = plain_attention(q[b : b + 1], *rows, causal=True)
        torch.testing.assert_close(out[b : b + 1], wanted[0], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(lse[b : b + 1], wanted[1], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "given, equal",
    [
        pytest.param(5, ints(5, 5), id="int"),
        pytest.param(torch.tensor([5, 5]), ints(5, 5), id="int64"),
        pytest.param(None, ints(8, 8), id="none-is-the-whole-cache"),
    ],
)
def test_forms_of_cache_seqlens(given, equal):
    q, cache = torch.randn(2, 1, 4, 8), torch.randn(2, 8, 2, 8)
    found, wanted = (cute_fa.flash_attn_with_kvcache(q, cache, cache, cache_seqlens=x) for x in (given, equal))
    assert torch.equal(found, wanted), f"cache_seqlens {given}"


def test_no_option_is_dropped_on_the_way():
    """Each option changes the result of a call that has all the others."""
    q, k, v = torch.randn(2, 3, 4, 8), torch.randn(2, 1, 2, 8), torch.randn(2, 1, 2, 8)
    caches = torch.randn(2, 3, 8, 2, 8)
    options = dict(
        rotary_cos=torch.randn(12, 4),
        rotary_sin=torch.randn(12, 4),
        cache_batch_idx=ints(2, 0),
        cache_leftpad=ints(1, 2),
        softmax_scale=0.7,
        window_size=(3, 1),
        softcap=2.0,
        rotary_interleaved=False,
        alibi_slopes=torch.rand(4),
        learnable_sink=torch.rand(4),
        attention_chunk=3,
    )

    def call(**changes):
        given = {**options, **changes}
        return cute_fa.flash_attn_with_kvcache(q, *caches.clone(), k, v, cache_seqlens=ints(4, 5), **given)

    assert torch.equal(call(), call()), "the same call, the same result"
    assert not torch.equal(call(), call(rotary_cos=None, rotary_sin=None)), "rotary has no effect"
    changes = dict(cache_batch_idx=ints(0, 2), rotary_interleaved=True, causal=True, softcap=0.0, attention_chunk=0)
    changes |= dict.fromkeys(("cache_leftpad", "softmax_scale", "alibi_slopes", "learnable_sink"))
    for name, value in {**changes, "window_size": (1, 1)}.items():
        assert not torch.equal(call(), call(**{name: value})), f"{name} has no effect"


def test_compiled_decoding_writes_the_cache():
    """Three steps of decoding, compiled and eager: results and caches are equal, and one graph serves all steps."""
    compiled = torch.compile(decode, fullgraph=True, backend="aot_eager")
    eager_caches, compiled_caches = (torch.zeros(2, 2, 8, 2, 8) for _ in range(2))
    with torch.no_grad():
        for step in range(3):
            q, k, v = (torch.randn(2, 1, heads, 8) for heads in (4, 2, 2))
            lengths = ints(3 + step, 4 + step)
            results = compiled(q, *compiled_caches, k, v, lengths), decode(q, *eager_caches, k, v, lengths)
            assert all(map(torch.equal, *results)), f"step {step}: compiled and eager differ"
            assert torch.equal(compiled_caches, eager_caches), f"step {step}: the caches differ"


def test_no_gradient_is_recorded():
    """Under no_grad tensors that require gradients may be passed, and the cache stays a plain tensor."""
    q, cache = torch.randn(2, 1, 4, 8, requires_grad=True), torch.randn(2, 8, 2, 8)
    new = torch.randn(2, 1, 2, 8, requires_grad=True)
    with torch.no_grad():
        out = cute_fa.flash_attn_with_kvcache(q, cache, cache.clone(), new, new, cache_seqlens=3)
    assert not out.requires_grad and not cache.requires_grad, "a gradient was recorded"


def test_slots_without_a_sequence_stay():
    """Without cache_batch_idx sequence b uses slot b; a cache may have more slots."""
    q, k, v = (torch.randn(2, 1, heads, 8) for heads in (4, 2, 2))
    caches = torch.randn(2, 5, 8, 2, 8)
    before = caches.clone()
    found = decode(q, *caches, k, v, ints(3, 5))
    wanted = decode(q, *before[:, :2].clone(), k, v, ints(3, 5))
    assert all(map(torch.equal, found, wanted)), "the first two slots are those of the two sequences"
    assert torch.equal(caches[:, 2:], before[:, 2:]), "slots 2 to 4 are untouched"


def test_shared_pages_before_the_append():
    """A full page may serve two sequences while each appends to a page of its own."""
    q, k, v = (torch.randn(2, 1, heads, 8) for heads in (4, 2, 2))
    caches = torch.randn(2, 4, 4, 2, 8)
    rest = dict(cache_seqlens=ints(4, 4), block_table=torch.tensor([[0, 1], [0, 2]]), causal=True)
    out = cute_fa.flash_attn_with_kvcache(q, *caches, k, v, **rest)
    for b in range(2):
        rows = [torch.cat((cache[0], new[b]))[None] for cache, new in zip(caches, (k, v))]
        torch.testing.assert_close(out[b : b + 1], plain_attention(q[b : b + 1], *rows)[0], rtol=1e-5, atol=1e-5)


def test_autocast_leaves_a_float32_cache_alone():
    q, k, v = (torch.randn(2, 1, heads, 8) for heads in (4, 2, 2))
    caches = torch.randn(2, 2, 8, 2, 8)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out, _ = decode(q, *caches.clone(), k, v, 3)
    assert torch.equal(out, decode(q, *caches, k, v, 3)[0]), "as without autocast, in the dtype of the cache"
