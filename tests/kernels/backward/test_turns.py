"""Who adds to a block of queries as the how manieth, where the order is fixed: tile by tile, with plain ints."""

import os

os.environ.setdefault("CUTE_DSL_ARCH", "sm_90a")  # the DSL reads it once, on import

import itertools

import pytest

from cute_fa.kernels.backward.bundles import BackwardSizes
from cute_fa.tuning.heuristics import build_backward_plan

LENGTHS = [(1, 1), (64, 64), (200, 333), (333, 200), (700, 130), (130, 700), (1025, 1025), (40, 9000), (9000, 40)]
HEAD_DIMS = {"d64": 64, "d128": 128, "d256": 256}  # 128 queries and keys, 64 and 128, 64 and 64


def sizes_of(seqlen_q, seqlen_k, num_heads, batch, group):
    return BackwardSizes(seqlen_q, seqlen_k, num_heads, batch, group, 1.0, 1.0, 132)


@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("head_dim", HEAD_DIMS.values(), ids=HEAD_DIMS)
def test_every_tile_has_a_turn_behind_tiles_that_have_begun(head_dim, is_causal):
    """A tile that waited for one with a larger number could wait for ever."""
    plan = build_backward_plan("bfloat16", head_dim, head_dim, is_causal, True, (True, True, True))
    for lengths, heads, batch, group in itertools.product(LENGTHS, (1, 5), (1, 2), (1, 4)):
        sizes = sizes_of(*lengths, heads, batch, group)
        order, band, visits = sizes.order(plan, lengths[1]), sizes.band(plan), {}
        for number in range(sizes.num_tiles(plan)):
            n_block, head, batch_idx = order.locate(number)
            for m_block in range(*band.m_blocks(n_block)):
                turn = sizes.turn(n_block, m_block, plan)
                visits.setdefault((head, batch_idx, m_block), []).append((turn, number))
        for block, turns in visits.items():
            assert [turn for turn, _ in turns] == list(range(len(turns))), f"{block} of {sizes}: {turns}"


def test_causal_tiles_come_to_a_block_of_queries_one_after_the_other():
    """Tiles that begin together at their first blocks, the last keys' first, never meet at one."""
    for head_dim in HEAD_DIMS.values():
        plan = build_backward_plan("bfloat16", head_dim, head_dim, True, True, (True, True, True))
        sizes = sizes_of(4096, 4096, 1, 1, 1)
        band = sizes.band(plan)
        for m_block in range(4096 // plan.tile.tile_m):
            step_of_turn = {}
            for n_block in range(4096 // plan.tile.tile_n):
                begin, end = band.m_blocks(n_block)
                if begin <= m_block < end:
                    step_of_turn[sizes.turn(n_block, m_block, plan)] = m_block - begin
            steps = [step for _, step in sorted(step_of_turn.items())]
            assert steps == sorted(set(steps)), f"head_dim {head_dim}, block {m_block}: {steps}"
