"""Attention over a key-value cache against what it should hold: concatenated, rotated and attended to in the test."""

from dataclasses import dataclass, field

import pytest
import torch

import cute_fa
from cute_fa.testing.plain import plain_attention

BATCH, CAPACITY, HEADS, HEADS_KV, HEAD_DIM = 3, 14, 4, 2, 6
LENGTHS = [3, 9, 5]

MASKS = {
    "full": {},
    "causal": {"causal": True},
    "window": {"window_size": (3, 1)},
    "window-left": {"window_size": (2, -1)},
    "chunk": {"attention_chunk": 4},
    "causal-chunk": {"attention_chunk": 5, "causal": True},
}
# rotary_dim, interleaved
ROTARY = {
    "interleaved": (HEAD_DIM, True),
    "halves": (HEAD_DIM, False),
    "partial-interleaved": (4, True),
    "partial-halves": (4, False),
}


def random(*size, seed=0):
    return torch.randn(size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def close(got, wanted, what):
    torch.testing.assert_close(got, wanted, rtol=1e-11, atol=1e-11, msg=lambda text: f"{what}: {text}")


def same_bits(a, b):
    return torch.equal(a.contiguous().view(torch.int64), b.contiguous().view(torch.int64))


def rotated(x, angles, interleaved):
    """x (seqlen, heads, d) turned by angles (seqlen, rotary_dim / 2): products of complex numbers."""
    half = angles.shape[1]
    head, tail = x[..., : 2 * half], x[..., 2 * half :]
    real, imaginary = (head[..., 0::2], head[..., 1::2]) if interleaved else (head[..., :half], head[..., half:])
    turned = torch.complex(real, imaginary) * torch.exp(1j * angles)[:, None]
    real, imaginary = turned.real, turned.imag
    pairs = torch.stack((real, imaginary), dim=-1).flatten(-2) if interleaved else torch.cat((real, imaginary), dim=-1)
    return torch.cat((pairs, tail), dim=-1)


@dataclass
class Case:
    """A call and where its rows lie. slots and leftpad are the call's; pages is (block table, page size) or None."""

    lengths: list = field(default_factory=lambda: LENGTHS)
    seqlen_q: int = 2
    seqlen_new: int = 0
    slots: list | None = None
    num_slots: int = BATCH
    leftpad: list | None = None
    pages: tuple | None = None
    rotary: str | None = None
    head_dim_v: int = HEAD_DIM
    index_dtype: torch.dtype = torch.int32
    options: dict = field(default_factory=dict)

    @property
    def batch(self):
        return len(self.lengths)

    def place(self, i, position):
        """The first two indices of a row of sequence i in the caches."""
        if self.pages is None:
            return (self.slots[i] if self.slots else i), position
        table, page_size = self.pages
        return table[i][position // page_size], position % page_size

    def places(self, i, positions):
        slots, rows = zip(*(self.place(i, position) for position in positions)) if len(positions) else ((), ())
        return list(slots), list(rows)

    def held(self, i):
        return range(self.leftpad[i] if self.leftpad else 0, self.lengths[i])

    def added(self, i):
        return range(self.lengths[i], self.lengths[i] + self.seqlen_new)

    def caches(self):
        """k_cache and v_cache with NaN in every row that holds no key."""
        sizes = [(self.num_slots, self.pages[1] if self.pages else CAPACITY, HEADS_KV, HEAD_DIM)]
        sizes.append((*sizes[0][:3], self.head_dim_v))
        caches = [torch.full(size, torch.nan, dtype=torch.float64) for size in sizes]
        for i in range(self.batch):
            places = self.places(i, self.held(i))
            for seed, cache in enumerate(caches):
                cache[places] = random(*cache.shape, seed=seed)[places]
        return caches

    def inputs(self):
        """q, and k and v to append or None twice."""
        q = random(self.batch, self.seqlen_q, HEADS, HEAD_DIM, seed=2)
        if not self.seqlen_new:
            return q, None, None
        k = random(self.batch, self.seqlen_new, HEADS_KV, HEAD_DIM, seed=3)
        return q, k, random(self.batch, self.seqlen_new, HEADS_KV, self.head_dim_v, seed=4)

    def angles(self):
        return 2 * random(2 * CAPACITY, ROTARY[self.rotary][0] // 2, seed=5)

    def call(self, q, k_cache, v_cache, k, v, cache_seqlens="tensor"):
        """out and lse of the public function."""
        arguments = dict(self.options, k=k, v=v, return_softmax_lse=True)
        arguments["cache_seqlens"] = self.tensor(self.lengths) if cache_seqlens == "tensor" else cache_seqlens
        if self.slots:
            arguments["cache_batch_idx"] = self.tensor(self.slots)
        if self.leftpad:
            arguments["cache_leftpad"] = self.tensor(self.leftpad)
        if self.pages:
            arguments["block_table"] = self.tensor(self.pages[0])
        if self.rotary:
            arguments["rotary_cos"], arguments["rotary_sin"] = self.angles().cos(), self.angles().sin()
            arguments["rotary_interleaved"] = ROTARY[self.rotary][1]
        return cute_fa.flash_attn_with_kvcache(q, k_cache, v_cache, **arguments)

    def tensor(self, values):
        return torch.tensor(values, dtype=self.index_dtype)

    def expected(self, q, k_cache, v_cache, k, v):
        """out, lse, and both caches after the call."""
        k_after, v_after = k_cache.clone(), v_cache.clone()
        outs, lses = [], []
        for i in range(self.batch):
            places, q_i = self.places(i, self.held(i)), q[i]
            k_i, v_i = k_cache[places], v_cache[places]
            if self.rotary:
                step = 1 if self.knows_positions else 0
                positions = [self.lengths[i] + step * row for row in range(self.seqlen_q)]
                q_i = rotated(q_i, self.angles()[positions], ROTARY[self.rotary][1])
            if self.seqlen_new:
                k_new = k[i]
                if self.rotary:
                    k_new = rotated(k_new, self.angles()[list(self.added(i))], ROTARY[self.rotary][1])
                new_places = self.places(i, self.added(i))
                k_after[new_places], v_after[new_places] = k_new, v[i]
                k_i, v_i = torch.cat((k_i, k_new)), torch.cat((v_i, v[i]))
            own = dict(self.options)
            if own.get("alibi_slopes") is not None and own["alibi_slopes"].ndim == 2:
                own["alibi_slopes"] = own["alibi_slopes"][i : i + 1]
            out, lse = plain_attention(q_i[None], k_i[None], v_i[None], **own)
            outs.append(out), lses.append(lse)
        return torch.cat(outs), torch.cat(lses), k_after, v_after

    @property
    def knows_positions(self):
        return any(name in self.options for name in ("causal", "window_size", "attention_chunk"))

    def check(self, cache_seqlens="tensor"):
        q, k, v = self.inputs()
        k_cache, v_cache = self.caches()
        before = k_cache.clone(), v_cache.clone()
        wanted = self.expected(q, *before, k, v)
        out, lse = self.call(q, k_cache, v_cache, k, v, cache_seqlens)
        close(out, wanted[0], "out")
        close(lse, wanted[1], "lse")
        self.check_caches(before, (k_cache, v_cache), wanted[2:])

    def check_caches(self, before, after, wanted):
        """Appended rows hold what they should, every other row its old bits."""
        is_new = torch.zeros(before[0].shape[:2], dtype=torch.bool)
        for i in range(self.batch):
            is_new[self.places(i, self.added(i))] = True
        for name, old, new, value in zip(("k_cache", "v_cache"), before, after, wanted):
            assert same_bits(new[~is_new], old[~is_new]), f"{name}: a row was touched that nothing was appended to"
            close(new[is_new], value[is_new], f"rows appended to {name}")


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("seqlen_new", [0, 1, 4], ids=["nothing", "one", "several"])
def test_append(seqlen_new, mask):
    Case(seqlen_q=max(seqlen_new, 1), seqlen_new=seqlen_new, options=MASKS[mask]).check()


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("seqlen_new", [1, 4], ids=["one", "several"])
@pytest.mark.parametrize("rotary", ROTARY)
def test_rotary(rotary, seqlen_new, mask):
    Case(seqlen_q=seqlen_new, seqlen_new=seqlen_new, rotary=rotary, options=MASKS[mask]).check()


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize(("seqlen_q", "seqlen_new"), [(4, 1), (1, 4)], ids=["more-queries", "more-keys"])
def test_queries_and_appended_keys_of_different_lengths(seqlen_q, seqlen_new, mask):
    """Queries rotate from cache_seqlens on, while the mask is aligned to the last key."""
    Case(seqlen_q=seqlen_q, seqlen_new=seqlen_new, rotary="halves", options=MASKS[mask]).check()


def test_tables_of_rotary_must_reach_the_last_query():
    """Queries at rows 9, 10, 11 and one new key at row 9 need 12 rows; nothing is appended where they lack."""
    case = Case(seqlen_q=3, seqlen_new=1, rotary="halves", options={"causal": True})
    q, k, v = case.inputs()
    k_cache, v_cache = case.caches()
    before = k_cache.clone()
    tables = dict(rotary_cos=torch.ones(11, HEAD_DIM // 2), rotary_sin=torch.zeros(11, HEAD_DIM // 2))
    with pytest.raises(ValueError, match="rotary_cos: expected at least 12 rows, got 11 rows"):
        cute_fa.flash_attn_with_kvcache(
            q, k_cache, v_cache, k, v, cache_seqlens=torch.tensor(LENGTHS), causal=True, **tables
        )
    assert same_bits(k_cache, before), "the cache was extended by a call that raised"


@pytest.mark.parametrize("rotary", [None, "halves"], ids=["plain", "rotary"])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=["int32", "int64"])
@pytest.mark.parametrize("seqlen_new", [0, 2], ids=["nothing", "append"])
def test_slots(seqlen_new, dtype, rotary):
    """Permuted slots, two of five unused."""
    slots = dict(slots=[3, 0, 4], num_slots=5, index_dtype=dtype)
    Case(seqlen_new=seqlen_new, rotary=rotary if seqlen_new else None, options={"causal": True}, **slots).check()


def test_sequences_may_read_one_slot_together():
    Case(slots=[1, 1, 0], lengths=[6, 6, 4], options={"causal": True}).check()


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("seqlen_new", [0, 3], ids=["nothing", "append"])
def test_leftpad(seqlen_new, mask):
    """Keys begin at the padding's end, for masks too; rotary counts rows of the slot. One sequence is all padding."""
    rotary = "interleaved" if seqlen_new else None
    Case(seqlen_q=3, seqlen_new=seqlen_new, leftpad=[1, 4, 5], rotary=rotary, options=MASKS[mask]).check()


def test_leftpad_in_permuted_slots():
    Case(seqlen_new=2, leftpad=[2, 0, 3], slots=[2, 3, 0], num_slots=4, options={"causal": True}).check()


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=["int32", "int64"])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("seqlen_new", [0, 1, 4], ids=["nothing", "one", "several"])
def test_pages(seqlen_new, mask, dtype):
    """Pages of 4 in any order; the appended rows of sequences 0 and 1 cross from one page to the next."""
    pages = ([[6, 2, -1, -1], [0, 7, 5, 3], [4, 1, 8, -1]], 4)
    rotary = "partial-halves" if seqlen_new else None
    case = dict(pages=pages, num_slots=10, index_dtype=dtype, rotary=rotary)
    Case(seqlen_q=max(seqlen_new, 1), seqlen_new=seqlen_new, options=MASKS[mask], **case).check()


def test_pages_of_one_row():
    pages = ([[3, 0, 5, -1], [6, 1, 7, 2]], 1)
    Case(lengths=[2, 3], seqlen_new=1, pages=pages, num_slots=8, options={"causal": True}).check()


def test_sequences_may_read_pages_together():
    pages = ([[2, 0], [2, 1], [2, -1]], 4)
    Case(lengths=[7, 6, 4], pages=pages, num_slots=3, options={"causal": True}).check()


@pytest.mark.parametrize("seqlen_new", [0, 2], ids=["nothing", "append"])
@pytest.mark.parametrize("length", [0, 1, 5, 12])
def test_one_length_for_all(length, seqlen_new):
    Case(lengths=[length] * BATCH, seqlen_new=seqlen_new, options={"causal": True}).check(cache_seqlens=length)


def test_no_lengths_mean_a_full_cache():
    Case(lengths=[CAPACITY] * BATCH, options={"causal": True}).check(cache_seqlens=None)


def test_no_lengths_mean_full_pages():
    Case(lengths=[8, 8], pages=([[2, 0], [1, 3]], 4), num_slots=4).check(cache_seqlens=None)


@pytest.mark.parametrize("seqlen_new", [0, 2], ids=["nothing", "append"])
def test_empty_caches(seqlen_new):
    """Sequence 1 begins empty; without an append it has no key, so out 0 and lse -inf."""
    case = Case(lengths=[4, 0, 2], seqlen_new=seqlen_new)
    case.check()
    if not seqlen_new:
        q, k, v = case.inputs()
        out, lse = case.call(q, *case.caches(), k, v)
        assert not out[1].any() and (lse[1] == -torch.inf).all(), "a sequence without a key"


def test_appends_fill_the_cache_to_its_end():
    Case(lengths=[CAPACITY - 2, 0, 5], seqlen_new=2, options={"causal": True}).check()


OPTIONS = {
    "sink": {"learnable_sink": random(HEADS)},
    "softcap": {"softcap": 0.8},
    "alibi": {"alibi_slopes": random(HEADS)},
    "alibi-batch": {"alibi_slopes": random(BATCH, HEADS)},
    "scale": {"softmax_scale": -0.7},
}


@pytest.mark.parametrize("mask", ["full", "causal", "chunk"])
@pytest.mark.parametrize("name", OPTIONS)
def test_options(name, mask):
    leftpad, lengths = [1, 2, 0], [3, 9, 0]
    Case(lengths=lengths, seqlen_q=3, seqlen_new=2, leftpad=leftpad, options={**OPTIONS[name], **MASKS[mask]}).check()


@pytest.mark.parametrize("head_dim_v", [1, 10])
def test_head_dim_v(head_dim_v):
    Case(seqlen_new=2, head_dim_v=head_dim_v, rotary="halves", options={"causal": True}).check()


def test_lse_is_returned_only_when_asked_for():
    case = Case()
    q, _, _ = case.inputs()
    k_cache, v_cache = case.caches()
    out = cute_fa.flash_attn_with_kvcache(q, k_cache, v_cache, cache_seqlens=torch.tensor(LENGTHS))
    close(out, case.expected(q, k_cache, v_cache, None, None)[0], "out")


VIEWS = {
    # name: storage for a cache of shape (slots, rows, heads, d), and the view of it that is the cache
    "heads-first": (lambda s, r, h, d: (s, h, r, d), lambda storage: storage.transpose(1, 2)),
    "every-second-row": (lambda s, r, h, d: (s, 2 * r, h, d), lambda storage: storage[:, 1::2]),
    "one-layer": (lambda s, r, h, d: (2, s, r, h, d), lambda storage: storage[1]),
    "inside-features": (lambda s, r, h, d: (s, r, h, d + 3), lambda storage: storage[..., 1:-2]),
}


@pytest.mark.parametrize("paged", [False, True], ids=["slots", "pages"])
@pytest.mark.parametrize("name", VIEWS)
def test_views_are_extended_in_their_storage(name, paged):
    size_of, view_of = VIEWS[name]
    pages = dict(pages=([[5, 2], [0, 4], [3, 1]], 8), num_slots=6) if paged else {}
    case = Case(seqlen_new=3, head_dim_v=5, rotary="halves", options={"causal": True}, **pages)
    q, k, v = case.inputs()
    before = case.caches()
    storages = [torch.full(size_of(*cache.shape), torch.nan, dtype=torch.float64) for cache in before]
    views = [view_of(storage) for storage in storages]
    for view, cache in zip(views, before):
        view.copy_(cache)
    wanted = case.expected(q, *before, k, v)
    # The same storage as a call should leave it, written through the view.
    copies = [storage.clone() for storage in storages]
    for copy, cache in zip(copies, wanted[2:]):
        view_of(copy).copy_(cache)
    out, lse = case.call(q, *views, k, v)
    close(out, wanted[0], "out")
    close(lse, wanted[1], "lse")
    case.check_caches(before, views, wanted[2:])
    for name, storage, copy in zip(("k_cache", "v_cache"), storages, copies):
        torch.testing.assert_close(storage, copy, rtol=1e-11, atol=1e-11, equal_nan=True, msg=f"storage of {name}")


@pytest.mark.parametrize("name", ["bfloat16", "float16", "float32"])
def test_dtypes(name):
    """Rotation and attention are wider than 16 bits: queries, keys and out are rounded once each."""
    dtype = getattr(torch, name)
    case = Case(seqlen_new=2, rotary="interleaved", options={"causal": True})
    q, k, v = (x.to(dtype) for x in case.inputs())
    k_cache, v_cache = (x.to(dtype) for x in case.caches())
    wide = [x.double() for x in (q, k_cache, v_cache, k, v)]
    wanted = case.expected(*wide)
    out, lse = case.call(q, k_cache, v_cache, k, v)
    assert out.dtype == dtype, f"out is {out.dtype}"
    assert lse.dtype == torch.float32, f"lse is {lse.dtype}"
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(out.double(), wanted[0], rtol=2 * eps, atol=2 * eps, msg="out")
    torch.testing.assert_close(lse.double(), wanted[1], rtol=2 * eps, atol=2 * eps, msg="lse")
    torch.testing.assert_close(k_cache.double(), wanted[2], rtol=eps, atol=eps, equal_nan=True, msg="k_cache")
    assert torch.equal(v_cache.double().nan_to_num(nan=0), wanted[3].nan_to_num(nan=0)), "v_cache is not v bit for bit"
