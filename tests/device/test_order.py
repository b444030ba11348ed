"""Tile orders against lists written out loop by loop, for plain ints and for Int32 inside a compiled host function."""

import os

os.environ.setdefault("CUTE_DSL_ARCH", "sm_90a")  # the DSL reads it once, on import

import cutlass
import pytest
import torch
from cutlass import Int32, cute
from cutlass.cute.runtime import from_dlpack

from cute_fa.device.order import HeadAfterHead, LongestFirst, heads_in_l2

GRIDS = [(blocks, heads, batch) for blocks in (1, 2, 3, 7) for heads in (1, 2, 3, 5, 8) for batch in (1, 2, 3)]
SECTIONS = (1, 2, 3, 4, 7, 16, 100)


def head_after_head(num_blocks: int, num_heads: int, batch: int) -> list:
    return [(block, h, b) for b in range(batch) for h in range(num_heads) for block in range(num_blocks)]


@pytest.mark.parametrize(
    "key_bytes, seqlen_k, num_heads, batch, group, heads",
    [
        pytest.param(256, 16384, 32, 1, 1, 8, id="eight-of-4-MiB"),
        pytest.param(256, 16385, 32, 1, 1, 7, id="seven-a-little-longer"),
        pytest.param(512, 4096, 16, 4, 1, 16, id="sixteen-of-2-MiB"),
        pytest.param(512, 4096, 3, 4, 1, 12, id="no-more-than-there-are"),
        pytest.param(1024, 16384, 8, 1, 1, 4, id="four-of-16-MiB"),
        pytest.param(512, 2**20, 8, 1, 1, 4, id="four-where-none-fits"),
        pytest.param(512, 8192, 32, 1, 4, 32, id="groups-of-4-MiB"),
        pytest.param(512, 32768, 32, 1, 4, 8, id="two-groups-of-16-MiB"),
        pytest.param(512, 2**20, 64, 1, 64, 64, id="a-group-that-does-not-fit"),
        pytest.param(1024, 1, 2**24, 127, 1, 32768, id="short-keys"),
        pytest.param(1024, 2**31 - 1, 1, 1, 1, 4, id="the-longest"),
    ],
)
def test_heads_whose_keys_and_values_fit_into_l2(key_bytes, seqlen_k, num_heads, batch, group, heads):
    """32 MiB, but not less than four heads, which may be more than there are."""
    assert heads_in_l2(key_bytes, seqlen_k, num_heads, batch, group) == heads


def longest_first(num_blocks: int, num_heads: int, batch: int, heads_per_section: int, is_last_longest: bool) -> list:
    pairs = [(h, b) for b in range(batch) for h in range(num_heads)]
    blocks = list(range(num_blocks))
    if is_last_longest:
        blocks.reverse()
    sections = [pairs[first : first + heads_per_section] for first in range(0, len(pairs), heads_per_section)]
    return [(block, h, b) for section in sections for block in blocks for h, b in section]


def test_head_after_head_lists_every_tile_once():
    for grid in GRIDS:
        order = HeadAfterHead(*grid[:2])
        tiles = [order.locate(tile) for tile in range(grid[0] * grid[1] * grid[2])]
        assert tiles == head_after_head(*grid), f"blocks, heads, batch {grid}"


@pytest.mark.parametrize("is_last_longest", [True, False], ids=["downwards", "upwards"])
def test_longest_first_lists_every_tile_once(is_last_longest):
    for grid in GRIDS:
        for section in SECTIONS:
            order = LongestFirst(*grid, section, is_last_longest)
            tiles = [order.locate(tile) for tile in range(grid[0] * grid[1] * grid[2])]
            case = f"blocks, heads, batch {grid}, section {section}"
            assert tiles == longest_first(*grid, section, is_last_longest), case
            assert len(set(tiles)) == len(head_after_head(*grid)), f"a tile comes twice: {case}"


@cute.jit
def write_tiles(out: cute.Tensor, order, num_tiles: Int32):
    """Rows of (tiles, 3): block, head, batch; the order survives a dynamic loop."""
    for tile in cutlass.range(num_tiles):
        out[tile, 0], out[tile, 1], out[tile, 2] = order.locate(tile)


@cute.jit
def dynamic_order(
    out: cute.Tensor,
    num_blocks: Int32,
    num_heads: Int32,
    batch: Int32,
    section: Int32,
    is_last_longest: cutlass.Constexpr,
):
    """is_last_longest None: head after head."""
    if cutlass.const_expr(is_last_longest is None):
        write_tiles(out, HeadAfterHead(num_blocks, num_heads), num_blocks * num_heads * batch)
    else:
        order = LongestFirst(num_blocks, num_heads, batch, section, is_last_longest)
        write_tiles(out, order, num_blocks * num_heads * batch)


@pytest.mark.parametrize("is_last_longest", [None, True, False], ids=["head-after-head", "downwards", "upwards"])
def test_orders_of_int32_match_the_lists(is_last_longest):
    out = torch.empty(max(blocks * heads * batch for blocks, heads, batch in GRIDS), 3, dtype=torch.int32)
    tensor = from_dlpack(out)
    compiled = cute.compile(dynamic_order, tensor, *map(Int32, (1, 1, 1, 1)), is_last_longest)
    for grid in GRIDS:
        for section in SECTIONS:
            out.fill_(-1)
            compiled(tensor, *map(Int32, (*grid, section)))
            tiles = [tuple(row) for row in out.tolist()[: grid[0] * grid[1] * grid[2]]]
            if is_last_longest is None:
                wanted = head_after_head(*grid)
            else:
                wanted = longest_first(*grid, section, is_last_longest)
            assert tiles == wanted, f"blocks, heads, batch {grid}, section {section}"
