"""dq, dk, dv on a Hopper GPU against plain torch: head_dims, dtypes, ratios of heads, edges of tiles, order of adds."""

from functools import partial

import pytest
import torch

import cute_fa
from cute_fa.testing.compare import compare
from cute_fa.testing.gradients import cancelling_terms
from cute_fa.testing.plain import plain_attention

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

BF16, FP16 = torch.bfloat16, torch.float16
DTYPES = {"bf16": BF16, "fp16": FP16}
by_dtype = pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
by_mask = pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])

ours = partial(cute_fa.flash_attn_func, return_lse=True)
NAMES = ("dq", "dk", "dv")


def randn(*shape, dtype=torch.float32, seed=0):
    return torch.randn(shape, generator=torch.Generator("cuda").manual_seed(seed), device="cuda").to(dtype)


def tensors(seqlen_q, seqlen_k, head_dim, dtype, *, batch=1, heads=(2, 2), head_dim_v=None):
    """q, k, v, normal random."""
    q = randn(batch, seqlen_q, heads[0], head_dim, dtype=dtype, seed=1)
    k = randn(batch, seqlen_k, heads[1], head_dim, dtype=dtype, seed=2)
    return q, k, randn(batch, seqlen_k, heads[1], head_dim_v or head_dim, dtype=dtype, seed=3)


def dout_of(q, v):
    return randn(*q.shape[:3], v.shape[3], dtype=q.dtype, seed=4)


def gradients(attention, q, k, v, dout, dlse=None, **option):
    """dq, dk, dv of a loss that dout and dlse are the gradients of; None is no part in it."""
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    results = attention(*leaves, **option)
    pairs = [(x, dx.to(x.dtype)) for x, dx in zip(results, (dout, dlse)) if dx is not None]
    outputs, grad_outputs = zip(*pairs)
    return torch.autograd.grad(outputs, leaves, grad_outputs, materialize_grads=True)


def check(q, k, v, *, loss="out", size=1.0, deterministic=False, **option):
    """Holds the gradients to the accuracy rule and returns them. loss: what has a part in it. size: of dout."""
    dout = dout_of(q, v) * size if "out" in loss else None
    dlse = randn(q.shape[0], q.shape[2], q.shape[1], seed=5) if "lse" in loss else None
    found = gradients(ours, q, k, v, dout, dlse, deterministic=deterministic, **option)
    plain = gradients(plain_attention, q, k, v, dout, dlse, **option)
    oracle = gradients(plain_attention, q.double(), k.double(), v.double(), dout, dlse, **option)
    cancelled = {} if dout is None else cancelling_terms(q, k, v, dout, option.get("softmax_scale"))
    for name, *three in zip(NAMES, found, plain, oracle):
        comparison = compare(*three, cancelled=cancelled.get(name, 0.0))
        assert comparison.ok and comparison.bound < torch.inf, f"{name}: {comparison}"
    return found


def are_equal(found, wanted):
    """Bitwise, tensor by tensor."""
    return all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


@by_mask
@by_dtype
@pytest.mark.parametrize("head_dim", range(8, 257, 8), ids="d{}".format)
def test_every_head_dim(head_dim, dtype, causal):
    check(*tensors(200, 333, head_dim, dtype), causal=causal)


@by_mask
@by_dtype
@pytest.mark.parametrize("head_dim", [64, 128, 256], ids="d{}".format)
@pytest.mark.parametrize("ratio", [1, 4, 7, 8, "mqa"], ids="ratio-{}".format)
def test_fewer_kv_heads(ratio, head_dim, dtype, causal):
    heads = (6, 1) if ratio == "mqa" else (2 * ratio, 2)
    check(*tensors(257, 257, head_dim, dtype, batch=2, heads=heads), causal=causal)


UNEQUAL = [(192, 128), (64, 256), (256, 64), (40, 72), (128, 192), (72, 8), (8, 200), (96, 128), (128, 96), (192, 256)]
UNEQUAL += [(192, 64), (64, 192), (96, 192), (256, 8)]


@by_mask
@by_dtype
@pytest.mark.parametrize("head_dim, head_dim_v", UNEQUAL, ids="{}".format)
def test_unequal_head_dims(head_dim, head_dim_v, dtype, causal):
    check(*tensors(150, 190, head_dim, dtype, heads=(4, 2), head_dim_v=head_dim_v), causal=causal)


# One below, at and above every tile_m and tile_n and the first pairs of tiles, and the first lengths of all.
EDGES = sorted({edge + step for edge in (64, 80, 128, 160, 192, 256) for step in (-1, 0, 1)} | {1, 2, 8, 16})


@by_mask
@pytest.mark.parametrize("head_dim", [64, 128, 192, 256], ids="d{}".format)
@pytest.mark.parametrize("seqlen", EDGES, ids="s{}".format)
def test_lengths_at_edges_of_tiles(seqlen, head_dim, causal):
    for seqlens in ((seqlen, seqlen), (seqlen, 300), (300, seqlen)):
        check(*tensors(*seqlens, head_dim, BF16), causal=causal)


@by_mask
@by_dtype
@pytest.mark.parametrize("seqlens", [(700, 1500), (1500, 700), (300, 7)], ids="{}".format)
def test_unequal_lengths(seqlens, dtype, causal):
    """Where there are more queries than keys, causal rows without a key come first: their dq is 0."""
    for head_dim in (64, 128, 256):
        dq, _, _ = check(*tensors(*seqlens, head_dim, dtype, heads=(4, 2)), causal=causal)
        empty = max(seqlens[0] - seqlens[1], 0) if causal else 0
        assert not dq[:, :empty].any() and dq[:, empty + 1 :].any(), "zero where there is no key, and only there"


@by_mask
@pytest.mark.parametrize("deterministic", [False, True], ids=["any-order", "deterministic"])
@pytest.mark.parametrize("head_dim", [64, 96, 128, 192, 256], ids="d{}".format)
def test_more_keys_than_a_persistent_grid_takes(head_dim, deterministic, causal):
    """A tile is a CTA then, as it is with less than 257 keys. With 8191 keys CTAs have several."""
    for seqlens in ((300, 8300), (130, 8191)):
        check(*tensors(*seqlens, head_dim, BF16, heads=(4, 2)), causal=causal, deterministic=deterministic)


@pytest.mark.parametrize("head_dim", [64, 128, 256], ids="d{}".format)
def test_rows_without_a_key_are_out_of_the_loss(head_dim):
    """Whatever dout and dlse say of them."""
    q, k, v = tensors(300, 130, head_dim, BF16)
    dout, dlse = dout_of(q, v), randn(1, 2, 300, seed=5)
    call = partial(gradients, ours, q, k, v, causal=True, deterministic=True)
    wanted = call(dout, dlse)
    dout[:, :170], dlse[..., :170] = 1e4, -torch.inf
    assert all(x.isfinite().all() for x in wanted), "no gradient is NaN"
    assert are_equal(call(dout, dlse), wanted), "bitwise equal"


@by_mask
@by_dtype
@pytest.mark.parametrize("loss", ["out and lse", "lse"])
@pytest.mark.parametrize("head_dim", [64, 128, 256], ids="d{}".format)
def test_lse_in_the_loss(head_dim, loss, dtype, causal):
    check(*tensors(270, 410, head_dim, dtype, heads=(4, 2)), loss=loss, causal=causal)
    _, _, dv = check(*tensors(410, 270, head_dim, dtype), loss=loss, causal=causal)
    assert dv.any() == ("out" in loss), "lse does not depend on v"


SCALES = {"default": None, "negative": -0.2, "zero": 0.0, "large": 3.0, "tiny": 1e-30, "negative-large": -2.5}


@by_dtype
@by_mask
@pytest.mark.parametrize("scale", SCALES.values(), ids=SCALES)
def test_softmax_scale(scale, dtype, causal):
    check(*tensors(400, 700, 128, dtype), causal=causal, softmax_scale=scale)


@by_dtype
@by_mask
@pytest.mark.parametrize("score", [-300.0, -100.0, -60.0, 60.0, 300.0], ids="{}-nats".format)
@pytest.mark.parametrize("head_dim", [64, 128, 192, 256], ids="d{}".format)
def test_scores_far_from_those_of_padding(head_dim, score, dtype, causal):
    """Padding scores 0, which exp2 makes infinite next to an lse of -300 unless it is masked.

    q has the large number, because rounding errors of dS, whose sum is 0, enter dq multiplied by k; and dout is small,
    because dk is multiplied by q, and fp16 ends at 65504.
    """
    for seqlens in ((200, 333), (333, 200), (130, 130), (1, 65)):
        q, k, v = tensors(*seqlens, head_dim, dtype)
        q, k = q * 0.01, k * 0.1
        k[..., 0] = score / 30000
        for every in (1, 2):  # all rows; every second one, so that a tile has both kinds
            q[..., 0] = 0.0
            q[:, ::every, :, 0] = 30000.0
            check(q, k, v, size=0.02, causal=causal, softmax_scale=1.0)


@by_dtype
@by_mask
def test_high_diagonal(dtype, causal):
    """q near k: most of a row's probability lies on one key."""
    _, k, v = tensors(600, 600, 128, dtype)
    check(k * 0.75, k, v, causal=causal)


@by_dtype
@by_mask
def test_constant_rows(dtype, causal):
    """q = 0: equal probabilities, and dk is 0."""
    q, k, v = tensors(520, 520, 128, dtype)
    _, dk, _ = check(torch.zeros_like(q), k, v, causal=causal)
    assert not dk.any(), "dk is a sum of multiples of q"


@by_mask
@pytest.mark.parametrize("size", [1e-3, 1e3], ids="{}".format)
@pytest.mark.parametrize("head_dim", [64, 128, 256], ids="d{}".format)
def test_size_of_dout_in_fp16(head_dim, size, causal):
    """Gradients fit in fp16, whose largest number is 65504; so must all that is rounded to it on the way."""
    q, k, v = tensors(300, 300, head_dim, FP16)
    check(q, k, v * 0.5, size=size, causal=causal)


@by_dtype
@pytest.mark.parametrize("head_dim", [64, 128, 256], ids="d{}".format)
def test_nan_stays_in_its_row_of_dq(head_dim, dtype):
    """dk and dv are sums over queries, so they are NaN, as in torch."""
    q, k, v = tensors(300, 300, head_dim, dtype)
    call = partial(gradients, ours, k=k, v=v, dout=dout_of(q, v), deterministic=True)
    wanted, _, _ = call(q=q)
    q[0, 17, 1, 5] = torch.nan
    dq, dk, dv = call(q=q)
    assert dq[0, 17, 1].isnan().all() and dk[:, :, 1].isnan().all() and dv[:, :, 1].isnan().all(), "NaN is not lost"
    dq[0, 17, 1], wanted[0, 17, 1] = 0, 0
    # The forward computes blocks with NaN in another way, so other rows may be rounded otherwise.
    assert (dq - wanted).abs().max() < 0.02 * wanted.abs().max(), "all other rows are as without it"


@by_mask
@pytest.mark.parametrize("names", ["q", "k", "v", "qk", "qv", "kv", "qkv"])
@pytest.mark.parametrize("head_dim", [64, 128, 256], ids="d{}".format)
def test_only_the_gradients_asked_for(head_dim, names, causal):
    tensors_by_name = dict(zip("qkv", tensors(260, 390, head_dim, BF16, heads=(4, 2))))
    q, _, v = values = list(tensors_by_name.values())
    dout = dout_of(q, v)
    whole = dict(zip("qkv", gradients(ours, *values, dout, causal=causal)))
    leaves = {name: x.clone().requires_grad_(name in names) for name, x in tensors_by_name.items()}
    cute_fa.flash_attn_func(**leaves, causal=causal).backward(dout)
    assert [name for name in "qkv" if leaves[name].grad is not None] == list(names), "these and no others"
    for name in set(names) - {"q"}:
        assert torch.equal(leaves[name].grad, whole[name]), f"d{name} is bitwise that of a call for all three"
    if "q" in names:
        plain, _, _ = gradients(plain_attention, *values, dout, causal=causal)
        oracle, _, _ = gradients(plain_attention, *(x.double() for x in values), dout, causal=causal)
        comparison = compare(leaves["q"].grad, plain, oracle)
        assert comparison.ok, f"dq: {comparison}"


def many_tiles(head_dim):
    """q, k, v, dout with more tiles than SMs, so that the order in which they end differs from run to run."""
    q, k, v = tensors(1000, 1000, head_dim, BF16, batch=4, heads=(32, 8))
    return q, k, v, dout_of(q, v)


@by_mask
@pytest.mark.parametrize("head_dim", [64, 96, 128, 192, 256], ids="d{}".format)
def test_dk_and_dv_are_always_repeatable(head_dim, causal):
    inputs = many_tiles(head_dim)
    _, *first = gradients(ours, *inputs, causal=causal)
    for _ in range(20):
        _, *again = gradients(ours, *inputs, causal=causal)
        assert are_equal(again, first), "bitwise equal"


@by_mask
@pytest.mark.parametrize("head_dim", [64, 128, 256], ids="d{}".format)
def test_deterministic(head_dim, causal):
    inputs = many_tiles(head_dim)
    first = gradients(ours, *inputs, causal=causal, deterministic=True)
    for _ in range(50):
        again = gradients(ours, *inputs, causal=causal, deterministic=True)
        assert are_equal(again, first), "bitwise equal"


@by_mask
@pytest.mark.parametrize("head_dim", [64, 96, 128, 192, 256], ids="d{}".format)
def test_deterministic_is_accurate(head_dim, causal):
    for seqlens in ((1, 1), (200, 333), (700, 500)):
        check(*tensors(*seqlens, head_dim, BF16, heads=(4, 2)), causal=causal, deterministic=True)


@pytest.mark.parametrize("head_dim", [64, 128, 256], ids="d{}".format)
def test_deterministic_by_the_switch_of_torch(head_dim):
    """The switch also fills new tensors with NaN, so no workspace is read before it is written."""
    inputs = many_tiles(head_dim)
    wanted = gradients(ours, *inputs, causal=True, deterministic=True)
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.utils.deterministic.fill_uninitialized_memory, "torch's default"
        found = gradients(ours, *inputs, causal=True)
    finally:
        torch.use_deterministic_algorithms(False)
    assert are_equal(found, wanted), "bitwise equal"


@by_mask
@pytest.mark.parametrize("head_dim", [40, 64, 128, 256], ids="d{}".format)
def test_workspace_may_hold_anything(head_dim, causal):
    """torch hands out memory that was NaN before."""
    torch.cuda.empty_cache()
    torch.full((2**26,), torch.nan, device="cuda")
    check(*tensors(997, 1003, head_dim, BF16, heads=(4, 2)), causal=causal)


def with_guard(x, columns=0):
    """A view that equals x, NaN all round: before, behind, and `columns` between its rows."""
    shape = torch.Size((*x.shape[:-1], x.shape[-1] + columns))
    whole = x.new_full((shape.numel() + 2048,), torch.nan)
    view = whole[1024:-1024].view(shape)[..., : x.shape[-1]]
    view.copy_(x)
    return view


@by_mask
@pytest.mark.parametrize("head_dim", [40, 64, 80, 128, 136, 192, 256], ids="d{}".format)
def test_nothing_outside_is_read(head_dim, causal):
    """NaN all round the inputs, for lengths and head dims that end inside a tile."""
    from cute_fa.host import launch

    q, k, v = tensors(197, 331, head_dim, BF16)
    dout, dlse, (out, lse) = dout_of(q, v), randn(1, 2, 197, seed=5), ours(q, k, v, causal=causal)
    guarded = [with_guard(x, columns=head_dim) for x in (dout, q, k, v)]
    dense = [with_guard(x) for x in (dlse, out, lse)]
    mask, needs = (None, 0 if causal else None, 0), (True, True, True)

    def call(dout, q, k, v, dlse, out, lse, is_deterministic):
        return launch.backward((q, k, v), (out, lse), (dout, dlse), head_dim**-0.5, mask, is_deterministic, needs)

    wanted = call(dout, q, k, v, dlse, out, lse, True)
    assert are_equal(call(*guarded, *dense, True), wanted), "NaN outside does not matter"
    dq, *dk_dv = call(*guarded, *dense, False)
    assert are_equal(dk_dv, wanted[1:]), "nor to dk and dv where dq is added in any order"
    assert torch.allclose(dq, wanted[0], rtol=2**-6, atol=1e-3), "nor to dq"


WRITERS = {
    "copied": lambda source, late: late.copy_(source),
    "computed": lambda source, late: torch.mul(source, 1.0, out=late),
}


@pytest.mark.parametrize("writer", WRITERS.values(), ids=WRITERS)
@pytest.mark.parametrize("is_side", [False, True], ids=["default-stream", "side-stream"])
def test_dout_written_late(is_side, writer):
    """2000 times: NaN, a wait, dout by another kernel, and the backward right behind it, with no stop in between."""
    from cute_fa.host import launch

    q, k, v = tensors(500, 500, 64, BF16, heads=(8, 2))
    dout, (out, lse) = dout_of(q, v), ours(q, k, v, causal=True)
    late, num_wrong = torch.empty_like(dout), torch.zeros((), dtype=torch.int64, device="cuda")

    def call(dout):
        return launch.backward((q, k, v), (out, lse), (dout, None), 0.125, (None, 0, 0), True, (True, True, True))

    wanted = call(dout)
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream() if is_side else torch.cuda.default_stream()):
        for _ in range(2000):
            late.fill_(torch.nan)
            torch.cuda._sleep(100_000)
            writer(dout, late)
            for found, x in zip(call(late), wanted):
                num_wrong += (found != x).sum()
    torch.cuda.synchronize()
    assert num_wrong == 0, "bitwise equal each time"


def test_more_than_2_to_the_31_elements():
    """Rows of q, out, dout and dq beyond 2^31 elements; the last ones alone are in the loss."""
    q = randn(1, 70000, 241, 128, dtype=BF16)
    assert q.numel() > 2**31, "the size that the test is about"
    _, k, v = tensors(1, 100, 128, BF16, heads=(1, 1))
    rows, dout = slice(69900, 70000), torch.zeros_like(q)
    tail = q[:, rows].contiguous()
    dout[:, rows] = dout_of(tail, v)
    dq, dk, dv = gradients(ours, q, k, v, dout)
    wanted = gradients(ours, tail, k, v, dout[:, rows].contiguous())
    for name, found, x in zip(NAMES, (dq[:, rows], dk, dv), wanted):
        assert x.any() and (found - x).abs().max() <= 2**-6 * x.abs().max(), f"{name} of the last rows"
    assert not dq[:, : rows.start].any(), "dq of rows outside the loss"


@by_mask
@pytest.mark.parametrize("sizes", [(0, 5, 5), (2, 0, 5), (2, 5, 0)], ids=["batch-0", "no-queries", "no-keys"])
def test_empty_calls(sizes, causal):
    batch, seqlen_q, seqlen_k = sizes
    q, k, v = tensors(seqlen_q, seqlen_k, 64, BF16, batch=batch, heads=(4, 2), head_dim_v=128)
    dlse = randn(batch, 4, seqlen_q)
    for found, x in zip(gradients(ours, q, k, v, dout_of(q, v), dlse, causal=causal), (q, k, v)):
        assert found.shape == x.shape and not found.any(), "no pair: no gradient"


SANITIZED = """
import torch, cute_fa
torch.manual_seed(0)
for head_dim, seqlen in ((64, 300), (96, 300), (128, 200), (128, 300), (192, 300), (256, 200), (256, 300)):
    for causal in (False, True):
        for deterministic in (False, True):
            shape = (1, seqlen, 2, head_dim)
            q, k, v = (torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
            for _ in range(2):
                out = cute_fa.flash_attn_func(q, k, v, causal=causal, deterministic=deterministic)
                torch.autograd.grad(out, (q, k, v), torch.ones_like(out))
"""


@pytest.mark.timeout(900)
@pytest.mark.parametrize("tool", ["memcheck", "racecheck", "synccheck"])
def test_compute_sanitizer(tool, sanitized):
    """One small step of each schedule, dq added in any order and in one, under NVIDIA's checker.

    300 keys are for a persistent grid, 200 for a CTA a tile.
    """
    sanitized(tool, SANITIZED)
