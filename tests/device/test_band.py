"""Tile geometry against brute force over single pairs, for plain ints and for Int32 inside a compiled host function."""

import math
import os

os.environ.setdefault("CUTE_DSL_ARCH", "sm_90a")  # the DSL reads it once, on import

import cutlass
import pytest
import torch
from cutlass import Int32, cute
from cutlass.cute.runtime import from_dlpack

from cute_fa.device.band import Band

# name: (left, right, chunk), with None and 0 for no bound.
MASKS = {
    "full": (None, None, 0),
    "causal": (None, 0, 0),
    "right-only": (None, 3, 0),
    "left-only": (2, None, 0),
    "left-only-zero": (0, None, 0),
    "left-only-wide": (9, None, 0),
    "causal-window-narrow": (1, 0, 0),
    "causal-window-one-tile": (4, 0, 0),
    "causal-window-wide": (11, 0, 0),
    "window-diagonal": (0, 0, 0),
    "window-narrow": (2, 1, 0),
    "window-wide": (6, 7, 0),
    "window-wider-than-keys": (40, 40, 0),
    "chunk-below-tile": (None, None, 3),
    "chunk-of-one-tile": (None, None, 4),
    "chunk-above-tiles": (None, None, 13),
    "chunk-causal": (None, 0, 5),
    "chunk-causal-two-tiles": (None, 0, 12),
    "chunk-window": (2, 6, 7),
    "chunk-left-only": (5, None, 8),
}
TILES = ((4, 4), (4, 6), (6, 4), (5, 3))


def around_multiples(tile: int) -> list[int]:
    """1, and one below, at and above one and three times `tile`."""
    return sorted({1, *(k * tile + d for k in (1, 3) for d in (-1, 0, 1))})


def sees(mask, query: int, key: int, seqlen_q: int, seqlen_k: int) -> bool:
    """The definition of the mask for one pair."""
    left, right, chunk = mask
    position = query + seqlen_k - seqlen_q
    return (
        (left is None or key >= position - left)
        and (right is None or key <= position + right)
        and (not chunk or math.floor(key / chunk) == math.floor(position / chunk))
    )


def block_maps(mask, tile_m: int, tile_n: int, seqlen_q: int, seqlen_k: int) -> tuple[list, list, list]:
    """[m_block][n_block] three times: a pair is visible; every row that exists sees all tile_n keys, which exist too;
    and besides that every row that exists sees a key in a block to the right."""
    rows = [
        sum(1 << key for key in range(seqlen_k) if sees(mask, query, key, seqlen_q, seqlen_k))
        for query in range(seqlen_q)
    ]
    columns = [((1 << tile_n) - 1) << first_key for first_key in range(0, seqlen_k, tile_n)]
    blocks = [rows[first_row : first_row + tile_m] for first_row in range(0, seqlen_q, tile_m)]
    touched = [[any(row & keys for row in block) for keys in columns] for block in blocks]
    whole = [[all(row & keys == keys for row in block) for keys in columns] for block in blocks]
    settled = [
        [whole[m][n] and all(row >> (n + 1) * tile_n for row in block) for n in range(len(columns))]
        for m, block in enumerate(blocks)
    ]
    return touched, whole, settled


def check_line(touched: list, whole: list, visited, unmasked, case: str) -> None:
    """Both intervals of one block against its row (forward) or column (backward) of the maps."""
    where = [block for block, is_touched in enumerate(touched) if is_touched]
    wanted = [block for block, is_whole in enumerate(whole) if is_whole]
    begin, end = visited
    assert (begin, end) == (where[0], where[-1] + 1) if where else begin == end, f"{visited}, not {where}: {case}"
    assert begin <= unmasked[0] <= unmasked[1] <= end, f"unmasked {unmasked} is no part of {visited}: {case}"
    assert list(range(*unmasked)) == wanted, f"unmasked {unmasked}, not {wanted}: {case}"


def check_all(mask, tile_m: int, tile_n: int, seqlen_q: int, seqlen_k: int, of_m_block, of_n_block) -> None:
    """of_m_block, of_n_block: block -> (interval to visit, interval without a mask); of_m_block the settled one too."""
    touched, whole, settled = block_maps(mask, tile_m, tile_n, seqlen_q, seqlen_k)
    case = f"mask {mask}, tile {tile_m}x{tile_n}, seqlens {seqlen_q}, {seqlen_k}"
    is_one_sided = mask[0] is None and not mask[2]
    for m_block in range(len(touched)):
        visited, unmasked, (begin, end) = of_m_block(m_block)
        wanted = [n_block for n_block, is_settled in enumerate(settled[m_block]) if is_settled]
        found = f"settled {begin, end}, not {wanted}: m_block {m_block}, {case}"
        assert begin <= end and list(range(begin, end)) == wanted, found
        check_line(touched[m_block], whole[m_block], visited, unmasked, f"m_block {m_block}, {case}")
        assert not is_one_sided or unmasked[0] == visited[0], f"masked blocks on the left of m_block {m_block}, {case}"
    for n_block in range(len(touched[0])):
        visited, unmasked = of_n_block(n_block)
        lines = ([row[n_block] for row in blocks] for blocks in (touched, whole))
        check_line(*lines, visited, unmasked, f"n_block {n_block}, {case}")
        assert not is_one_sided or unmasked[1] == visited[1], f"masked blocks at the end of n_block {n_block}, {case}"


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("tile", TILES, ids=lambda tile: f"tile{tile[0]}x{tile[1]}")
def test_intervals_of_ints_match_the_definition(name, tile):
    for seqlen_q in around_multiples(tile[0]):
        for seqlen_k in around_multiples(tile[1]):
            band = Band(*tile, seqlen_q, seqlen_k, *MASKS[name])
            check_all(
                MASKS[name], *tile, seqlen_q, seqlen_k,
                lambda m_block: [
                    method(m_block) for method in (band.n_blocks, band.unmasked_n_blocks, band.settled_n_blocks)
                ],
                lambda n_block: (band.m_blocks(n_block), band.unmasked_m_blocks(n_block)),
            )  # fmt: skip


@pytest.mark.parametrize("name", MASKS)
def test_intervals_of_one_row_and_one_key_match_the_definition(name):
    """Of rows and keys inside the sequences; ends may lie outside."""
    for seqlen_q, seqlen_k in ((1, 1), (9, 9), (5, 14), (14, 5), (1, 12), (12, 1)):
        band = Band(4, 4, seqlen_q, seqlen_k, *MASKS[name])
        case = f"seqlens {seqlen_q}, {seqlen_k}"
        for row in range(seqlen_q):
            begin, end = band.keys_of(row)
            wanted = [key for key in range(seqlen_k) if sees(MASKS[name], row, key, seqlen_q, seqlen_k)]
            assert [key for key in range(seqlen_k) if begin <= key < end] == wanted, f"keys of row {row}, {case}"
            assert begin >= 0 and 0 <= end <= seqlen_k, f"keys of row {row} from the side they are cut at, {case}"
        for key in range(seqlen_k):
            begin, end = band.rows_of(key)
            wanted = [row for row in range(seqlen_q) if sees(MASKS[name], row, key, seqlen_q, seqlen_k)]
            assert [row for row in range(seqlen_q) if begin <= row < end] == wanted, f"rows of key {key}, {case}"
            assert begin >= 0 and 0 <= end <= seqlen_q, f"rows of key {key} from the side they are cut at, {case}"


@pytest.mark.parametrize("seqlens", [(0, 5), (5, 0), (0, 0)], ids=["no-queries", "no-keys", "nothing"])
@pytest.mark.parametrize("name", ["full", "causal", "window-narrow", "chunk-window"])
def test_empty_sequences_visit_nothing(name, seqlens):
    band = Band(4, 4, *seqlens, *MASKS[name])
    for m_block in range(-(-seqlens[0] // 4)):
        intervals = band.n_blocks(m_block), band.unmasked_n_blocks(m_block), band.settled_n_blocks(m_block)
        assert intervals == ((0, 0),) * 3, f"m_block {m_block} visits keys"
    for n_block in range(-(-seqlens[1] // 4)):
        assert band.m_blocks(n_block) == band.unmasked_m_blocks(n_block) == (0, 0), f"n_block {n_block} visits rows"


NUM_BLOCKS = 16


@cute.jit
def write_intervals(of_m: cute.Tensor, of_n: cute.Tensor, band: Band):
    """of_m: (NUM_BLOCKS, 6), of_n: (NUM_BLOCKS, 4). The intervals of each block; the band survives a dynamic loop."""
    for m_block in cutlass.range((band.seqlen_q + band.tile_m - 1) // band.tile_m):
        of_m[m_block, 0], of_m[m_block, 1] = band.n_blocks(m_block)
        of_m[m_block, 2], of_m[m_block, 3] = band.unmasked_n_blocks(m_block)
        of_m[m_block, 4], of_m[m_block, 5] = band.settled_n_blocks(m_block)
    for n_block in cutlass.range((band.seqlen_k + band.tile_n - 1) // band.tile_n):
        of_n[n_block, 0], of_n[n_block, 1] = band.m_blocks(n_block)
        of_n[n_block, 2], of_n[n_block, 3] = band.unmasked_m_blocks(n_block)


@cute.jit
def dynamic_band(
    of_m: cute.Tensor,
    of_n: cute.Tensor,
    seqlen_q: Int32,
    seqlen_k: Int32,
    left: Int32 | None,
    right: Int32 | None,
    chunk: Int32,
    tile: cutlass.Constexpr,
    is_chunked: cutlass.Constexpr,
):
    write_intervals(of_m, of_n, Band(*tile, seqlen_q, seqlen_k, left, right, chunk if is_chunked else 0))


PRESENT = {
    "full": ["full"],
    "right": ["causal", "right-only"],
    "left": ["left-only", "left-only-zero"],
    "window": ["causal-window-one-tile", "window-narrow", "window-wide", "window-wider-than-keys"],
    "chunk": ["chunk-below-tile", "chunk-of-one-tile", "chunk-above-tiles"],
    "chunk-right": ["chunk-causal", "chunk-causal-two-tiles"],
    "chunk-window": ["chunk-window"],
}


@pytest.mark.parametrize("present", PRESENT)
@pytest.mark.parametrize("tile", [(4, 4), (4, 6)], ids=lambda tile: f"tile{tile[0]}x{tile[1]}")
def test_intervals_of_int32_match_the_definition(present, tile):
    """One compilation per set of bounds that are present; their values and the seqlens are dynamic."""
    of_m, of_n = (torch.empty(NUM_BLOCKS, width, dtype=torch.int32) for width in (6, 4))
    tensors = from_dlpack(of_m), from_dlpack(of_n)

    def arguments(mask, seqlen_q, seqlen_k):
        bounds = (None if bound is None else Int32(bound) for bound in mask)
        return *tensors, Int32(seqlen_q), Int32(seqlen_k), *bounds

    is_chunked = MASKS[PRESENT[present][0]][2] != 0
    compiled = cute.compile(dynamic_band, *arguments(MASKS[PRESENT[present][0]], 1, 1), tile, is_chunked)
    for mask in (MASKS[name] for name in PRESENT[present]):
        for seqlen_q in around_multiples(tile[0]):
            for seqlen_k in around_multiples(tile[1]):
                of_m.fill_(-1), of_n.fill_(-1)
                compiled(*arguments(mask, seqlen_q, seqlen_k))
                rows, columns = of_m.tolist(), of_n.tolist()
                check_all(
                    mask, *tile, seqlen_q, seqlen_k,
                    lambda m_block: (rows[m_block][:2], rows[m_block][2:4], rows[m_block][4:]),
                    lambda n_block: (columns[n_block][:2], columns[n_block][2:]),
                )  # fmt: skip
