"""FLOPs and bytes of a call, against counts over single pairs and tensors."""

import pytest

from cute_fa.core.mask_spec import MaskSpec
from cute_fa.core.problem import AttentionProblem, ScoreSpec
from cute_fa.tuning.work import backward_work, forward_work


def problem(mask=MaskSpec(), **changes) -> AttentionProblem:
    sizes = dict(batch=2, seqlen_q=7, seqlen_k=7, num_heads_q=6, num_heads_kv=3, head_dim=16, head_dim_v=16)
    return AttentionProblem("dense", **{"dtype": "bfloat16", **sizes, **changes}, scores=ScoreSpec(0.25, mask))


def test_full_mask_counts_the_published_formula():
    work = forward_work(problem(batch=4, seqlen_q=4096, seqlen_k=4096, num_heads_q=16, head_dim=128, head_dim_v=128))
    assert work.flops == 4 * 4 * 16 * 4096**2 * 128, "4 B H S^2 D"


def test_causal_square_counts_half_of_the_full_mask():
    full, causal = (forward_work(problem(mask)) for mask in (MaskSpec(), MaskSpec(right=0)))
    assert causal.flops == full.flops / 2, "the convention leaves the half diagonal out"


@pytest.mark.parametrize(
    ("mask", "seqlen_q", "seqlen_k"),
    [
        (MaskSpec(right=0), 5, 9),
        (MaskSpec(right=0), 9, 5),
        (MaskSpec(right=0), 1, 9),
        (MaskSpec(left=2, right=0), 7, 7),
        (MaskSpec(left=1, right=2), 6, 8),
        (MaskSpec(right=0, chunk=3), 7, 7),
        (MaskSpec(chunk=3), 7, 7),
    ],
    ids=["causal-more-keys", "causal-more-queries", "decode", "causal-window", "window", "causal-chunk", "chunk"],
)
def test_other_masks_count_exact_pairs(mask, seqlen_q, seqlen_k):
    pairs = 0
    for query in range(seqlen_q):
        for key in range(seqlen_k):
            position = query + seqlen_k - seqlen_q
            pairs += (
                (mask.left is None or key >= position - mask.left)
                and (mask.right is None or key <= position + mask.right)
                and (not mask.chunk or key // mask.chunk == position // mask.chunk)
            )
    work = forward_work(problem(mask, seqlen_q=seqlen_q, seqlen_k=seqlen_k, head_dim_v=8))
    assert work.flops == 2 * 2 * 6 * pairs * (16 + 8), f"{pairs} visible pairs"


def test_backward_counts_five_products_for_two():
    call = problem(MaskSpec(left=3, right=1))
    assert backward_work(call).flops == forward_work(call).flops / 2 * 5, "S, dP, dV, dQ, dK against S, O"


@pytest.mark.parametrize(("dtype", "num_bytes"), [("bfloat16", 2), ("float16", 2), ("float32", 4)])
def test_bytes_are_every_tensor_once(dtype, num_bytes):
    call = problem(dtype=dtype, seqlen_q=5, seqlen_k=9, head_dim=24, head_dim_v=8)
    q, k = 2 * 5 * 6 * 24 * num_bytes, 2 * 9 * 3 * 24 * num_bytes
    v, out = 2 * 9 * 3 * 8 * num_bytes, 2 * 5 * 6 * 8 * num_bytes
    lse = 2 * 6 * 5 * 4
    assert forward_work(call).bytes == q + k + v + out + lse, "reads q, k, v, writes out, lse"
    read, written = q + k + v + out + out + lse, q + k + v
    assert backward_work(call).bytes == read + written, "reads q, k, v, out, dout, lse, writes dq, dk, dv"


def test_intensity_of_one_long_head():
    """4 S^2 D FLOPs over 4 S D elements of 2 bytes are S / 2; the lse makes it a little less."""
    sizes = dict(batch=1, seqlen_q=8192, seqlen_k=8192, num_heads_q=1, num_heads_kv=1, head_dim=128, head_dim_v=128)
    intensity = forward_work(problem(**sizes)).intensity
    assert intensity == pytest.approx(8192 / 2, rel=0.01), "FLOP per byte"
    assert intensity < 8192 / 2, "the lse is traffic too"
