"""The order of causal tiles of the backward, in a list schedule on 132 SMs: each takes the next tile when it is done with one."""

import os

os.environ.setdefault("CUTE_DSL_ARCH", "sm_90a")  # the DSL reads it once, on import

import heapq

import pytest

from cute_fa.kernels.backward.bundles import BackwardSizes
from cute_fa.tuning.heuristics import build_backward_plan

# head_dim, keys, key-value heads, sequences, group: how much longer it may take than work that is shared equally.
SHAPES = {
    "d64-1024": ((64, 1024, 32, 16, 1), 0.02),
    "d128-1024": ((128, 1024, 16, 16, 1), 0.03),
    "d128-1025": ((128, 1025, 16, 16, 1), 0.03),
    "d256-1024": ((256, 1024, 8, 16, 1), 0.03),
    "d128-4096": ((128, 4096, 16, 4, 1), 0.02),
    "d128-16384": ((128, 16384, 16, 1, 1), 0.02),
    "d128-8192-32:8": ((128, 8192, 8, 1, 4), 0.02),
    "d128-8192-64:8": ((128, 8192, 8, 1, 8), 0.02),
    "d128-8192-32:4": ((128, 8192, 4, 1, 8), 0.03),
    "d128-32768-32:8": ((128, 32768, 8, 1, 4), 0.02),
}


@pytest.mark.parametrize("shape, bound", SHAPES.values(), ids=SHAPES)
def test_ctas_end_together(shape, bound):
    head_dim, seqlen, num_heads, batch, group = shape
    plan = build_backward_plan("bfloat16", head_dim, head_dim, True, False, (True, True, True))
    sizes = BackwardSizes(seqlen, seqlen, num_heads, batch, group, 1.0, 1.0, 132)
    order, band, free, work = sizes.order(plan, seqlen), sizes.band(plan), [0.0] * 132, 0.0
    for number in range(sizes.num_tiles(plan)):
        n_block, _, _ = order.locate(number)
        begin, end = band.m_blocks(n_block)
        time = group * (end - begin) + 1.5  # steps, and what a tile takes beside
        work += time
        heapq.heapreplace(free, free[0] + time)
    loss = max(free) * 132 / work - 1
    assert loss < bound, f"{loss:.1%}"


@pytest.mark.parametrize("seqlen_q", [1, 100, 2**20])
def test_sections_are_no_wider_than_all_heads(seqlen_q):
    """Tiles of a section have numbers of 32 bits."""
    plan = build_backward_plan("bfloat16", 64, 64, True, True, (True, True, True))
    sizes = BackwardSizes(seqlen_q, 2**22, 3, 2, 4, 1.0, 1.0, 132)
    order = sizes.order(plan, sizes.seqlen_k)
    assert 1 <= order.heads_per_section <= 3 * 2, "key-value heads of all batches"
