"""What the load warp tells each warpgroup of a tile, on the host, against the definition of the mask, pair by pair."""

import os

os.environ.setdefault("CUTE_DSL_ARCH", "sm_90a")  # the DSL reads it once, on import

import cutlass
import pytest
import torch
from cutlass import Float32, Int32, cute
from cutlass.cute.runtime import from_dlpack

from cute_fa.kernels.forward.bundles import LEFT_HALF, MASKED, WHOLE, ForwardSizes
from cute_fa.kernels.forward.producer import _details
from cute_fa.testing.plain import visible_keys
from cute_fa.tuning.budget import ForwardTile
from cute_fa.tuning.plan import ForwardPlan

ROWS = 64  # of a warpgroup
MAX_TILES = 8

# causal, warpgroups, keys of a block; halves are told apart in blocks of 128 keys
PLANS = {
    "full": (False, 2, 128),
    "full-three-warpgroups": (False, 3, 112),
    "causal-halves": (True, 2, 128),
    "causal-three-warpgroups": (True, 3, 128),
    "causal-odd-blocks": (True, 2, 80),
    "causal-narrow-blocks": (True, 2, 64),
}
LENGTHS_Q = (1, 64, 65, 128, 200, 257, 385)
LENGTHS_K = (1, 63, 64, 65, 128, 160, 256, 300, 513)


@cute.jit
def write_details(out: cute.Tensor, seqlen_q: Int32, seqlen_k: Int32, plan: cutlass.Constexpr):
    """out: (tile, warpgroup, has_care, 4)."""
    sizes = ForwardSizes(seqlen_q, seqlen_k, *[Int32(1)] * 4, Float32(1.0))
    for m_block in cutlass.range(sizes.num_m_blocks(plan)):
        for warpgroup in cutlass.range(plan.tile.num_consumer_warpgroups):
            for care in cutlass.range_constexpr(2):
                for i, value in enumerate(_details(sizes, m_block, warpgroup, Int32(care), plan)):
                    out[m_block, warpgroup, care, i] = value


def num_blocks(visible, tile_n: int) -> int:
    """Blocks from the left to the last one with a visible pair, at least one."""
    keys = visible.any(0).nonzero()
    return int(keys[-1]) // tile_n + 1 if len(keys) else 1


def wanted(of_tile, of_warpgroup, plan) -> tuple[int, int, int, int]:
    """The four numbers from visible pairs, (rows that exist, keys). Blocks without maxima follow the first block."""
    tile_n = plan.tile.tile_n
    count = num_blocks(of_warpgroup, tile_n)
    padded = torch.nn.functional.pad(of_warpgroup, (0, count * tile_n))  # keys that are not there are seen by nobody
    whole = [bool(padded[:, n * tile_n : (n + 1) * tile_n].all()) for n in range(count)]
    settled = [n for n in range(count - 1) if whole[n] and bool(padded[:, (n + 1) * tile_n :].any(1).all())]
    right_half = padded[:, (count - 1) * tile_n + tile_n // 2 :]
    first = WHOLE if whole[-1] else MASKED
    if plan.is_causal and tile_n == 128 and not right_half.any():
        first = LEFT_HALF
    return num_blocks(of_tile, tile_n) - count, count, len(settled), first


@pytest.mark.parametrize("is_causal, num_warpgroups, tile_n", PLANS.values(), ids=PLANS)
def test_details_by_the_definition(is_causal, num_warpgroups, tile_n):
    """A warpgroup that has no row works on one block, it does not matter how; its steps are as many as the others'."""
    tile = ForwardTile(64, 64, ROWS * num_warpgroups, tile_n, num_warpgroups, 1, 2, False)
    plan = ForwardPlan("bfloat16", tile, is_causal, has_turns=False)
    details = torch.empty(MAX_TILES, num_warpgroups, 2, 4, dtype=torch.int32)
    tensor = from_dlpack(details)
    write = cute.compile(write_details, tensor, Int32(1), Int32(1), plan)
    for seqlen_q in LENGTHS_Q:
        for seqlen_k in LENGTHS_K:
            details.fill_(-7)
            write(tensor, Int32(seqlen_q), Int32(seqlen_k))
            visible = visible_keys(seqlen_q, seqlen_k, causal=is_causal)
            for m_block, of_tile in enumerate(visible.split(plan.tile.tile_m)):
                steps = num_blocks(of_tile, plan.tile.tile_n)
                for warpgroup in range(num_warpgroups):
                    case = f"seqlens {seqlen_q}, {seqlen_k}, tile {m_block}, warpgroup {warpgroup}"
                    (skipped, count, fast, first), (*_, with_care, _) = details[m_block, warpgroup].tolist()
                    of_warpgroup = of_tile[ROWS * warpgroup : ROWS * (warpgroup + 1)]
                    assert with_care == 0, f"with care all blocks take maxima: {case}"
                    if len(of_warpgroup):
                        found = skipped, count, min(fast, count - 1), first
                        assert found == wanted(of_tile, of_warpgroup, plan), case
                    else:
                        assert (skipped, count) == (steps - 1, 1), f"no row: {case}"
