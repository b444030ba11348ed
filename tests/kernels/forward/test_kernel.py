"""The forward kernel on a Hopper GPU against plain torch: every head_dim, dtype, ratio of heads and edge of a tile."""

import pytest
import torch

import cute_fa
from cute_fa.core.mask_spec import MaskSpec
from cute_fa.core.problem import AttentionProblem, ScoreSpec
from cute_fa.testing.compare import compare
from cute_fa.testing.plain import plain_attention
from cute_fa.tuning.heuristics import forward_plan

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

BF16, FP16 = torch.bfloat16, torch.float16
DTYPES = {"bf16": BF16, "fp16": FP16}
by_dtype = pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
by_mask = pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])


def tensors(seqlen_q, seqlen_k, head_dim, dtype, *, batch=1, heads=(2, 2), head_dim_v=None, seed=0):
    """q, k, v, normal random."""
    generator = torch.Generator("cuda").manual_seed(seed)
    shapes = (
        (batch, seqlen_q, heads[0], head_dim),
        (batch, seqlen_k, heads[1], head_dim),
        (batch, seqlen_k, heads[1], head_dim_v or head_dim),
    )
    return [torch.randn(shape, generator=generator, device="cuda").to(dtype) for shape in shapes]


def check(q, k, v, **option):
    """Runs a call and holds out and lse to the accuracy rule."""
    found = cute_fa.flash_attn_func(q, k, v, **option, return_lse=True)
    plain = plain_attention(q, k, v, **option)
    oracle = plain_attention(q.double(), k.double(), v.double(), **option)
    for name, *three in zip(("out", "lse"), found, plain, oracle):
        comparison = compare(*three)
        assert comparison.ok, f"{name}: {comparison}"
    return found


@by_mask
@by_dtype
@pytest.mark.parametrize("head_dim", range(8, 257, 8), ids="d{}".format)
def test_every_head_dim(head_dim, dtype, causal):
    check(*tensors(200, 333, head_dim, dtype), causal=causal)


@by_mask
@by_dtype
@pytest.mark.parametrize("ratio", [1, 4, 7, 8, "mqa"], ids="ratio-{}".format)
def test_fewer_kv_heads(ratio, dtype, causal):
    heads = (6, 1) if ratio == "mqa" else (2 * ratio, 2)
    check(*tensors(257, 257, 128, dtype, batch=2, heads=heads), causal=causal)


UNEQUAL = [(192, 128), (64, 256), (256, 64), (40, 72), (128, 192), (72, 8), (8, 200), (96, 128), (128, 96), (192, 256)]


@by_mask
@by_dtype
@pytest.mark.parametrize("head_dim, head_dim_v", UNEQUAL, ids="{}".format)
def test_unequal_head_dims(head_dim, head_dim_v, dtype, causal):
    check(*tensors(150, 190, head_dim, dtype, heads=(4, 2), head_dim_v=head_dim_v), causal=causal)


# One below, at and above every tile_m and tile_n, and the first lengths of all.
EDGES = sorted({edge + step for edge in (64, 80, 112, 128, 192, 256, 384) for step in (-1, 0, 1)} | {1, 2, 8, 16})


@by_mask
@pytest.mark.parametrize("head_dim", [64, 128, 192, 256], ids="d{}".format)
@pytest.mark.parametrize("seqlen", EDGES, ids="s{}".format)
def test_lengths_at_edges_of_tiles(seqlen, head_dim, causal):
    check(*tensors(seqlen, seqlen, head_dim, BF16), causal=causal)
    check(*tensors(seqlen, 300, head_dim, BF16), causal=causal)
    check(*tensors(300, seqlen, head_dim, BF16), causal=causal)  # more queries than keys: rows without a key


@by_dtype
@by_mask
def test_wide_tiles_of_head_dim_64(dtype, causal):
    """192 rows, three consumer warpgroups, which take a full grid and long sequences."""
    q, k, v = tensors(2305, 2305, 64, dtype, batch=2, heads=(12, 4))
    sizes = (2, 2305, 2305, 12, 4, 64, 64)
    mask = MaskSpec(right=0 if causal else None)
    plan = forward_plan(AttentionProblem("dense", "bfloat16", *sizes, ScoreSpec(1.0, mask)), num_sms=132)
    assert plan.tile.tile_m == 192, "the shape of this test takes wide tiles"
    check(q, k, v, causal=causal)
    check(*plateau(70.0, 900, (2305, 2305), 64, dtype, heads=(12, 4)), causal=causal, softmax_scale=1.0)


@by_mask
def test_rows_without_a_key(causal):
    q, k, v = tensors(300, 7, 64, BF16)
    out, lse = check(q, k, v, causal=causal)
    empty = 300 - 7 if causal else 0
    assert (out[:, :empty] == 0).all() and (lse[..., :empty] == -torch.inf).all(), "out 0, lse -inf"
    assert lse[..., empty:].isfinite().all(), "all other rows see a key"


@pytest.mark.parametrize("sizes", [(0, 5, 5), (2, 0, 5), (2, 5, 0)], ids=["batch-0", "no-queries", "no-keys"])
def test_empty_calls(sizes):
    batch, seqlen_q, seqlen_k = sizes
    q, k, v = tensors(seqlen_q, seqlen_k, 64, BF16, batch=batch)
    out, lse = cute_fa.flash_attn_func(q, k, v, return_lse=True)
    assert out.shape == q.shape and lse.shape == (batch, 2, seqlen_q), "shapes"
    assert (out == 0).all() and (lse == -torch.inf).all(), "no key: out 0, lse -inf"


SCALES = {"default": None, "negative": -0.2, "zero": 0.0, "large": 3.0, "tiny": 1e-30, "negative-large": -2.5}


@by_dtype
@by_mask
@pytest.mark.parametrize("scale", SCALES.values(), ids=SCALES)
def test_softmax_scale(scale, dtype, causal):
    check(*tensors(400, 700, 128, dtype), causal=causal, softmax_scale=scale)


# Blocks go from right to left. A tile is done again when a score exceeds its reference, which is from the tile's first
# block, by 64 log2 (44.36 nats) in bf16, by 15 log2 (10.40 nats) in fp16.


def ramp(step, seqlen, head_dim, dtype):
    """Scores that rise by `step` nats from each key to the one on its left."""
    q, k, v = tensors(seqlen, seqlen, head_dim, dtype)
    q, k = q * 0.01, k * 0.01
    q[..., 0] = 4.0
    k[..., 0] = (torch.arange(seqlen, 0, -1, device="cuda") * step / 4).to(dtype)[:, None]
    return q, k, v


def plateau(height, end, seqlens, head_dim, dtype, **options):
    """Scores of keys below `end` are `height` nats above all others; on either side they differ by a few nats."""
    q, k, v = tensors(*seqlens, head_dim, dtype, **options)
    q *= 1.5 * head_dim**-0.5
    q[..., 0], k[..., 0] = 4.0, 0.0
    k[:, :end, :, 0] = height / 4
    return q, k, v


STEPS = {"flat": 0.0, "within": 0.01, "around-fp16": 0.1, "around-bf16": 0.25, "beyond": 1.0, "falling": -0.5}


@by_dtype
@by_mask
@pytest.mark.parametrize("head_dim", [64, 128, 256], ids="d{}".format)
@pytest.mark.parametrize("step", STEPS.values(), ids=STEPS)
def test_scores_that_grow_past_the_guard(step, head_dim, dtype, causal):
    check(*ramp(step, 777, head_dim, dtype), causal=causal, softmax_scale=1.0)


@by_dtype
@by_mask
@pytest.mark.parametrize("height", [8.0, 10.0, 10.5, 11.0, 44.0, 44.5, 45.0, 80.0, 600.0], ids="{}-nats".format)
def test_one_high_score_in_the_last_block(height, dtype, causal):
    """Just below and above the guard: one key that every row favours, in the block that is visited last."""
    q, k, v = tensors(300, 900, 128, dtype)
    q, k = q * 0.01, k * 0.01
    q[..., 0], k[..., 0] = 1.0, 0.0
    k[:, 5, :, 0] = height
    check(q, k, v, causal=causal, softmax_scale=1.0)


# Warpgroups that skip blocks of their tile, that see no key, that have no row; tiles with one row.
UNEVEN = (
    *((129, 500), (193, 450), (200, 331), (320, 1000), (257, 290)),
    *((65, 650), (1, 400), (333, 300), (450, 200), (300, 7)),
)


@by_dtype
@by_mask
@pytest.mark.parametrize("head_dim", [64, 96, 128, 192, 256], ids="d{}".format)
@pytest.mark.parametrize("seqlens", UNEVEN, ids="{}".format)
def test_tiles_that_fail_at_uneven_lengths(seqlens, head_dim, dtype, causal):
    check(*plateau(70.0, seqlens[1] // 3, seqlens, head_dim, dtype), causal=causal, softmax_scale=1.0)


@by_dtype
@by_mask
def test_heads_that_fail_beside_heads_that_do_not(dtype, causal):
    """What is done again for one head leaves the others' bits alone."""
    q, k, v = plateau(70.0, 256, (600, 600), 128, dtype, batch=2, heads=(6, 3))
    calm = k.clone()
    calm[..., 0] = 0.0
    mixed = calm.clone()
    mixed[:, :, 1] = k[:, :, 1]
    option = {"causal": causal, "softmax_scale": 1.0}
    out, lse = check(q, mixed, v, **option)
    calm_out, calm_lse = cute_fa.flash_attn_func(q, calm, v, **option, return_lse=True)
    for head in (0, 1, 4, 5):
        assert torch.equal(out[:, :, head], calm_out[:, :, head]), f"out of head {head}"
        assert torch.equal(lse[:, head], calm_lse[:, head]), f"lse of head {head}"
    assert not torch.equal(lse[:, 2:4], calm_lse[:, 2:4]), "the heads that fail have other scores"


@by_dtype
@pytest.mark.parametrize("heights", [(20.0, 25.0), (60.0, 70.0), (88.0, 95.0)], ids="{}".format)
@pytest.mark.parametrize("head_dim", [64, 128, 256], ids="d{}".format)
def test_a_first_block_that_overflows_under_a_higher_masked_block(head_dim, heights, dtype):
    """Rows that see a part of their first block, in which a key is far above the 16 leftmost ones.

    The next block is masked too, and its maximum is higher still, so totals come back into range: O does not.
    """
    from cute_fa.host import launch

    q, k, v = tensors(64, 64, head_dim, dtype)
    tile_n = launch.plan_of(dtype, q.shape, v.shape, (None, 0, 0), 132).tile.tile_n
    q, k, v = tensors(64, tile_n + 32, head_dim, dtype)
    q, k, v = q * 0.01, k * 0.01, v * 8
    q[..., 0], k[..., 0] = 1.0, 0.0
    k[:, tile_n + 20, :, 0], k[:, 5, :, 0] = heights
    check(q, k, v, causal=True, softmax_scale=1.0)


@by_dtype
def test_a_first_block_that_overflows_on_a_diagonal_through_two_blocks(dtype):
    """The same with as many queries as keys, in blocks of 112 keys, which 64 rows do not divide."""
    q, k, v = tensors(256, 256, 192, dtype)
    q, k = q * 0.01, k * 0.01
    q[..., 0], k[..., 0] = 1.0, 0.0
    k[:, 245, :, 0], k[:, 200, :, 0] = 13.0, 11.0
    check(q, k, v, causal=True, softmax_scale=1.0)


@by_dtype
@by_mask
@pytest.mark.parametrize("scale", [2.0**12, 2.0**18, 2.0**24, -(2.0**24)], ids="{}".format)
def test_equal_scores_of_any_size(scale, dtype, causal):
    """The rounding of a large reference is larger than what 16 bits hold; it cancels only where both round alike."""
    q, k, v = tensors(300, 300, 128, dtype)
    out, _ = cute_fa.flash_attn_func(q.fill_(3.0), k.fill_(3.1), v, causal=causal, softmax_scale=scale, return_lse=True)
    wanted, _ = cute_fa.flash_attn_func(torch.zeros_like(q), k, v, causal=causal, return_lse=True)
    assert torch.allclose(out.float(), wanted.float(), atol=4e-3), "the mean of the values"


@by_dtype
@by_mask
@pytest.mark.parametrize("bias", [0.0, -20.0], ids=["near-zero", "very-low"])
@pytest.mark.parametrize("seqlens", [(40, 64), (128, 300), (64, 160)], ids="{}".format)
def test_leftmost_columns_of_the_first_block_are_hidden_by_infinity(seqlens, bias, dtype, causal):
    """Scores of -inf where a tile looks for its references; every row sees finite ones too."""
    q, k, v = tensors(*seqlens, 128, dtype)
    q[..., 0], k[..., 0] = 10.0, bias
    first_key = (seqlens[1] - 1) // 128 * 128
    k[:, first_key : first_key + 24, :, 0] = -torch.inf
    check(q, k, v, causal=causal, softmax_scale=1.0)


@by_dtype
@by_mask
def test_constant_rows(dtype, causal):
    """Equal scores: lse is log of the number of keys, out their mean."""
    q, k, v = tensors(520, 520, 128, dtype)
    out, lse = check(torch.zeros_like(q), k, v, causal=causal)
    count = torch.arange(1, 521, device="cuda").float() if causal else torch.full((520,), 520.0, device="cuda")
    assert torch.allclose(lse, count.log().expand_as(lse), atol=1e-5), "lse of equal scores"


@by_dtype
def test_very_low_scores(dtype):
    """All scores near -300 nats: nothing may vanish against a reference of 0 (causal rows that see no masked block)."""
    q, k, v = tensors(512, 512, 128, dtype)
    q, k = q * 0.01, k * 0.01
    q[..., 0], k[..., 0] = 10.0, -30.0
    check(q, k, v, causal=True, softmax_scale=1.0)
    k[..., 0] = -0.7  # between fp16's and bf16's smallest totals
    check(q, k, v, causal=True, softmax_scale=1.0)


@by_dtype
@pytest.mark.parametrize("score", [-0.7, -12.0, -17.0, -20.0, -60.0, -100.0, -300.0], ids="{}-nats".format)
@pytest.mark.parametrize("seqlens", [(128, 255), (2, 129), (256, 511), (64, 191)], ids="{}".format)
def test_first_key_in_an_unmasked_block(seqlens, score, dtype):
    """Causal lengths for which a tile's first row sees nothing of the masked block, and low scores in the next one."""
    for head_dim in (64, 128):
        q, k, v = tensors(*seqlens, head_dim, dtype)
        q, k = q * 0.01, k * 0.01
        q[..., 0], k[..., 0] = 10.0, score / 10
        check(q, k, v, causal=True, softmax_scale=1.0)


@by_dtype
def test_high_diagonal(dtype):
    """q = k: the first block has a maximum far above all else, which most of a row's threads do not hold."""
    _, k, v = tensors(1024, 1024, 128, dtype)
    check(k, k, v, causal=True)


@by_dtype
@by_mask
@pytest.mark.parametrize("scale", [None, -0.2], ids=["default", "negative"])
def test_infinite_scores(scale, dtype, causal):
    """+inf makes a row NaN as in torch, -inf hides a key; other rows of the tile stay right."""
    q, k, v = tensors(200, 500, 64, dtype)
    q[..., 0] = q[..., 0].abs() + 0.1
    q[:, ::3, :, 0] *= -1  # these rows see -inf, under a negative scale +inf
    option = {"causal": causal, "softmax_scale": scale}
    for key in (3, 250, 400, 498):
        infinite = k.clone()
        infinite[:, key, :, 0] = torch.inf
        out = cute_fa.flash_attn_func(q, infinite, v, **option)
        oracle, _ = plain_attention(q.double(), infinite.double(), v.double(), **option)
        assert torch.equal(out.isnan(), oracle.isnan()), f"rows with NaN, key {key}"
        seen = ~oracle.isnan()
        assert seen.any() and not seen.all(), "both kinds of rows are there"
        assert (out[seen] - oracle[seen]).abs().max() < 0.02, f"rows without NaN, key {key}"


@by_dtype
@pytest.mark.parametrize("head_dim", [64, 128, 256], ids="d{}".format)
def test_nan_in_a_key(head_dim, dtype):
    """Rows that see it are NaN, rows of the same tile that do not see it stay right."""
    q, k, v = tensors(200, 500, head_dim, dtype)
    for key in (310, 400, 499):
        broken = k.clone()
        broken[:, key, 0, 3] = torch.nan
        out, lse = cute_fa.flash_attn_func(q, broken, v, causal=True, return_lse=True)
        oracle, oracle_lse = plain_attention(q.double(), broken.double(), v.double(), causal=True)
        assert torch.equal(out.isnan(), oracle.isnan()) and torch.equal(lse.isnan(), oracle_lse.isnan()), f"key {key}"
        seen = ~oracle.isnan()
        assert seen.any() and not seen.all(), "both kinds of rows are there"
        assert (out[seen] - oracle[seen]).abs().max() < 0.02, f"rows without NaN, key {key}"


@by_dtype
def test_nan_stays_in_its_row(dtype):
    q, k, v = tensors(300, 300, 128, dtype)
    q[0, 17, 1, 5] = torch.nan
    out, lse = cute_fa.flash_attn_func(q, k, v, return_lse=True)
    assert out[0, 17, 1].isnan().all() and lse[0, 1, 17].isnan(), "the row is NaN"
    assert out.isnan().sum() == 128 and lse.isnan().sum() == 1, "and no other"


@by_mask
@pytest.mark.parametrize("head_dim", [64, 96, 128, 192, 256], ids="d{}".format)
def test_bitwise_repeatable(head_dim, causal):
    """More tiles than SMs, so that the schedule differs from run to run."""
    q, k, v = tensors(1000, 1000, head_dim, BF16, batch=4, heads=(16, 4))
    first = cute_fa.flash_attn_func(q, k, v, causal=causal, return_lse=True)
    for _ in range(20):
        again = cute_fa.flash_attn_func(q, k, v, causal=causal, return_lse=True)
        assert all(torch.equal(a, b) for a, b in zip(first, again)), "bitwise equal"


@by_dtype
@by_mask
@pytest.mark.parametrize("head_dim", [64, 128, 256], ids="d{}".format)
def test_bitwise_repeatable_where_tiles_fail(head_dim, causal, dtype):
    """Every tile that sees both sides of the plateau, of more tiles than SMs."""
    inputs = plateau(70.0, 300, (1000, 1000), head_dim, dtype, batch=2, heads=(16, 4))
    first = check(*inputs, causal=causal, softmax_scale=1.0)
    for _ in range(10):
        again = cute_fa.flash_attn_func(*inputs, causal=causal, softmax_scale=1.0, return_lse=True)
        assert all(torch.equal(a, b) for a, b in zip(first, again)), "bitwise equal"


@by_mask
@pytest.mark.parametrize("role", ["q", "k"])
def test_a_launch_waits_for_what_the_one_before_writes(role, causal):
    """out is q or k of the next call. A row takes few keys, and v changes from call to call: a stale row shows.

    As q, out keeps the scores of a row far apart, so that each launch ends with tiles that are done again.
    """
    steps = []
    for seed in range(4):
        q, k, v = plateau(70.0, 300, (1000, 1000), 128, BF16, batch=2, heads=(12, 12), seed=seed)
        q[..., 1:] *= 5
        v *= 2
        v[..., 0] = 4.0 if role == "q" else 0.0
        steps.append((q, k, v))

    def chain(pause):
        x = steps[3][2]
        for i in range(200):
            q, k, v = steps[i % 4]
            q, k = (x, k) if role == "q" else (q, x)
            x = cute_fa.flash_attn_func(q, k, v, causal=causal, softmax_scale=1.0)
            pause()
        return x

    expected = chain(torch.cuda.synchronize)
    for _ in range(3):
        assert torch.equal(chain(lambda: None), expected), "bitwise equal"


@by_mask
def test_kernels_of_torch_before_and_behind_a_launch(causal):
    """q, k and v are written right before, and out is read right after."""
    sources = [plateau(70.0, 300, (1000, 1000), 128, BF16, batch=2, heads=(12, 12), seed=seed) for seed in range(3)]
    option = {"causal": causal, "softmax_scale": 1.0}
    expected = []
    for source in sources:
        torch.cuda.synchronize()
        out = cute_fa.flash_attn_func(*source, **option)
        torch.cuda.synchronize()
        expected.append(out * 2)
    buffers = [torch.empty_like(x) for x in sources[0]]
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    for i in range(200):
        for buffer, x in zip(buffers, sources[i % 3]):
            torch.mul(x, 1.0, out=buffer)
        doubled = cute_fa.flash_attn_func(*buffers, **option) * 2
        wrong += (doubled != expected[i % 3]).sum()
    assert wrong.item() == 0, "bitwise equal"


def with_guard(shape, dtype, guard, lead=1024):
    """(whole buffer, view of `shape` in the middle of it); the buffer is filled with `guard`."""
    whole = torch.full((torch.Size(shape).numel() + 2 * lead,), guard, dtype=dtype, device="cuda")
    return whole, whole[lead:-lead].view(shape)


@by_mask
@pytest.mark.parametrize("head_dim", [40, 64, 80, 128, 136, 256], ids="d{}".format)
def test_nothing_outside_is_read_or_written(head_dim, causal):
    """NaN all round the inputs, a guard band round the outputs, for lengths and head dims that end inside a tile."""
    from cute_fa.host import cache, launch

    plain = tensors(197, 331, head_dim, BF16)
    inputs = []
    for x in plain:
        _, view = with_guard((1, x.shape[1], 2, 2 * head_dim), BF16, torch.nan)
        view[..., :head_dim] = x  # columns beside head_dim are NaN too
        inputs.append(view[..., :head_dim])
    out_buffer, out = with_guard((1, 197, 2, head_dim), BF16, 7.0)
    lse_buffer, lse = with_guard((1, 2, 197), torch.float32, 7.0)
    plan = launch.plan_of(BF16, plain[0].shape, plain[2].shape, (None, 0 if causal else None, 0), 132)
    counter = torch.zeros(2, dtype=torch.int32, device="cuda")
    cache.load(plan)(*inputs, out, lse, counter, head_dim**-0.5, 132)
    expected = cute_fa.flash_attn_func(*plain, causal=causal, return_lse=True)
    assert torch.equal(out, expected[0]) and torch.equal(lse, expected[1]), "NaN outside does not matter"
    for buffer in (out_buffer, lse_buffer):
        assert (buffer[:1024] == 7).all() and (buffer[-1024:] == 7).all(), "guard bands"
    assert (counter == 0).all(), "the counter is cleared for the next launch"


@by_mask
@pytest.mark.parametrize("height", [0.0, 70.0], ids=["no-tile-fails", "tiles-fail"])
def test_number_of_sms_does_not_matter(height, causal):
    """The persistent grid of an H20 (78 SMs) and of an H100 or H200 (132) give the same bits; so do 1 and 3 CTAs."""
    from cute_fa.host import cache, launch

    q, k, v = plateau(height, 256, (700, 700), 128, BF16, batch=3, heads=(8, 2))
    plan = launch.plan_of(BF16, q.shape, v.shape, (None, 0 if causal else None, 0), 132)
    results = []
    for num_sms in (1, 3, 78, 132):
        out, lse = torch.empty_like(q), torch.empty(3, 8, 700, device="cuda")
        counter = torch.zeros(2, dtype=torch.int32, device="cuda")
        cache.load(plan)(q, k, v, out, lse, counter, 1.0, num_sms)
        assert (counter == 0).all(), "the counter is cleared for the next launch"
        results.append((out, lse))
    assert all(torch.equal(a, b) for other in results[1:] for a, b in zip(results[0], other)), "bitwise equal"


def test_more_than_2_to_the_31_elements():
    """Rows of q and out beyond 2^31 elements; keys are few, so that it is quick."""
    q = torch.randn(1, 70000, 241, 128, device="cuda", dtype=BF16)
    assert q.numel() > 2**31, "the size that the test is about"
    _, k, v = tensors(1, 100, 128, BF16, heads=(1, 1))
    out, lse = cute_fa.flash_attn_func(q, k, v, return_lse=True)
    rows = slice(69900, 70000)
    tail_out, tail_lse = cute_fa.flash_attn_func(q[:, rows].contiguous(), k, v, return_lse=True)
    assert torch.equal(out[:, rows], tail_out) and torch.equal(lse[..., rows], tail_lse), "the last rows"


SANITIZED = """
import torch, cute_fa
torch.manual_seed(0)
for head_dim, seqlen, heads in ((64, 200, 2), (64, 2100, 12), (96, 200, 2), (128, 300, 2), (192, 200, 2), (256, 200, 2)):
    for causal in (False, True):
        q, k, v = (torch.randn(1, seqlen, heads, head_dim, device="cuda", dtype=torch.bfloat16) for _ in range(3))
        for _ in range(2):
            cute_fa.flash_attn_func(q, k, v, causal=causal)
        q[..., 0], k[:, : seqlen // 3, :, 0] = 40.0, 40.0  # tiles are done again
        cute_fa.flash_attn_func(q, k, v, causal=causal)
"""


@pytest.mark.timeout(600)
@pytest.mark.parametrize("tool", ["memcheck", "racecheck", "synccheck"])
def test_compute_sanitizer(tool, sanitized):
    """One small call of each schedule, two and three warpgroups, staged and direct stores, under NVIDIA's checker."""
    sanitized(tool, SANITIZED)
