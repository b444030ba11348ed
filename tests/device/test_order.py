"""Tile orders against lists written out loop by loop, for plain ints and for Int32 inside a compiled host function."""

import heapq
import itertools
import os

os.environ.setdefault("CUTE_DSL_ARCH", "sm_90a")  # the DSL reads it once, on import

import cutlass
import pytest
import torch
from cutlass import Int32, cute
from cutlass.cute.runtime import from_dlpack

from cute_fa.device.order import HeadAfterHead, LongestFirst, heads_side_by_side

GRIDS = [(blocks, heads, batch) for blocks in (1, 2, 3, 7) for heads in (1, 2, 3, 5, 8) for batch in (1, 2, 3)]
SECTIONS = (1, 2, 3, 4, 7, 16, 100)


def head_after_head(num_blocks: int, num_heads: int, batch: int) -> list:
    return [(block, h, b) for b in range(batch) for h in range(num_heads) for block in range(num_blocks)]


# Bytes of a key and its value, keys, query heads, sequences, group: heads of a section.
WIDTHS = {
    "eight-of-4-MiB": ((256, 16384, 32, 1, 1), 8),
    "seven-a-little-longer": ((256, 16385, 32, 1, 1), 7),
    "of-two-sequences": ((512, 4096, 9, 4, 1), 16),
    "all-that-there-are": ((512, 4096, 3, 4, 1), 12),
    "whole-groups": ((512, 32768, 32, 1, 4), 8),
    "a-group-that-does-not-fit": ((512, 2**20, 64, 1, 64), 64),
    "short-keys": ((1024, 1, 2**24, 127, 1), 32768),
    "the-longest": ((1024, 2**31 - 1, 1, 1, 1), 1),
}


@pytest.mark.parametrize("sizes, heads", WIDTHS.values(), ids=WIDTHS)
def test_heads_side_by_side(sizes, heads):
    """As many as have 32 MiB of keys and values."""
    assert heads_side_by_side(*sizes) == heads, "heads of a section"


def makespan(num_blocks: int, num_pairs: int, width: int) -> float:
    """Of a causal forward on 132 SMs that take tiles in order; a tile takes as long as it has blocks, and a third more."""
    free = [0.0] * 132
    order = LongestFirst(num_blocks, num_pairs, 1, width, is_last_longest=True)
    for tile in range(num_blocks * num_pairs):
        heapq.heapreplace(free, free[0] + order.locate(tile)[0] + 4 / 3)
    return max(free)


@pytest.mark.parametrize("key_bytes, bound", [(256, 0.005), (512, 0.01), (768, 0.025), (1024, 0.035)])
def test_sections_cost_little_balance(key_bytes, bound):
    """All heads side by side are the most that order can balance."""
    for seqlen, batch, num_heads in itertools.product((1025, 4097, 16384), (1, 4), (8, 11, 21)):
        num_blocks, pairs = -(-seqlen // 128), num_heads * batch
        width = heads_side_by_side(key_bytes, seqlen, num_heads, batch, 1)
        loss = makespan(num_blocks, pairs, width) / makespan(num_blocks, pairs, pairs) - 1
        assert loss < bound, f"{loss:.1%} with {width} of {pairs} heads, {seqlen} tokens"


@cute.jit
def write_width(out: cute.Tensor, seqlen_k: Int32, num_heads: Int32, batch: Int32, group: Int32):
    out[0] = heads_side_by_side(384, seqlen_k, num_heads, batch, group)


def test_widths_of_int32_are_those_of_ints():
    out = torch.empty(1, dtype=torch.int32)
    tensor = from_dlpack(out)
    compiled = cute.compile(write_width, tensor, *map(Int32, (1, 1, 1, 1)))
    for sizes in itertools.product((1, 1025, 4096, 2**31 - 1), (8, 2**20), (1, 7), (1, 8)):
        compiled(tensor, *map(Int32, sizes))
        assert out.item() == heads_side_by_side(384, *sizes), f"seqlen_k, heads, batch, group {sizes}"


def longest_first(num_blocks: int, num_heads: int, batch: int, heads_per_section: int, is_last_longest: bool) -> list:
    pairs = [(h, b) for b in range(batch) for h in range(num_heads)]
    blocks = list(range(num_blocks))
    if is_last_longest:
        blocks.reverse()
    num_sections = max(len(pairs) // heads_per_section, 1)  # the last one takes what is left
    begins = [section * heads_per_section for section in range(num_sections)]
    sections = [pairs[begin:end] for begin, end in zip(begins, [*begins[1:], None])]
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
