"""Order: in which sequence a grid works through its tiles, as a map from a tile's number to (block, head, batch).

Schedulers and producer warps call `locate`, with Int32, once per tile; tests with ints. A "block" is an m-block in
forward and an n-block in backward. Divisions by numbers that are known only at run time are slow, so one warp locates a
tile and hands the coordinates on.

Tiles that run at the same time should share operands in L2, and no long tile should start late.
- Full mask: all tiles of a head are equally long. HeadAfterHead: neighbours in time are blocks of one head and read the
  same K and V.
- Causal: the length of a tile grows with its block, so one head after another would put long tiles at the end of every
  head and of the grid. LongestFirst takes a section of neighbouring heads, narrow enough for their operands to stay in
  L2 (`heads_side_by_side`), and in it all heads' longest blocks before all heads' second longest, and so on. CTAs that run
  together then have nearly equal lengths, and the last tiles of the section are its shortest. Neighbouring query heads
  also share a K/V head.
"""

from dataclasses import dataclass

import cutlass
from cutlass import Int32

Index = int | Int32

# What K and V of a section's heads should not exceed, of the 50 MB that an H100 or H200 has for everything.
# PERF: causal, head_dim 64, 16384 tokens: 8 heads side by side, which have 32 MiB of K and V, take 9% less time than 32, and
# 16 take 6% less. head_dim 128, 4096 tokens: 16 heads, 32 MiB, take 4% less than 32 (H200, 2026-11-30,
# 20261130T143542Z-tune and 20261130T143635Z-tune). 16, 20 and 24 MiB are within 0.5% of 32 in the mean of nine shapes, 48 MiB
# take 3% longer in that of six (benchmarks/results/NOTES.md).
L2_BYTES = 32 * 2**20


@dataclass(frozen=True)
class HeadAfterHead:
    """Blocks in rising order, then heads, then batches. Tiles are numbered 0 to num_blocks * num_heads * batch - 1."""

    num_blocks: Index
    num_heads: Index

    def locate(self, tile: Index) -> tuple[Index, Index, Index]:
        """(block, head, batch) of tile number `tile`."""
        pair = tile // self.num_blocks
        batch_idx = pair // self.num_heads
        return tile - pair * self.num_blocks, pair - batch_idx * self.num_heads, batch_idx


def heads_side_by_side(key_bytes: int, seqlen_k: Index, num_heads: Index, batch: Index, group: Index) -> Index:
    """How wide sections are: as many (head, batch) pairs as have K and V for L2.

    key_bytes: of a key and its value in one head. num_heads: query heads; `group` of them share a key-value head, and no
    section parts them.
    """
    fitting = cutlass.min(L2_BYTES // key_bytes // seqlen_k, num_heads * batch // group)
    return cutlass.max(fitting, 1) * group


@dataclass(frozen=True)
class LongestFirst:
    """Sections of heads_per_section neighbouring (head, batch) pairs; in a section, longest blocks of all pairs first.

    What is left of pairs is the last section's, too: a narrow one of its own would end with long tiles. heads_per_section
    is at least 1 and may exceed the number of pairs.
    is_last_longest: known when the kernel is traced; True walks blocks downwards (forward: the last m-block sees the
        most keys), False upwards (backward: the first n-block is seen by the most queries).
    """

    num_blocks: Index
    num_heads: Index
    batch: Index
    heads_per_section: Index
    is_last_longest: bool

    def locate(self, tile: Index) -> tuple[Index, Index, Index]:
        """(block, head, batch) of tile number `tile`, from 0 to num_blocks * num_heads * batch - 1."""
        num_pairs = self.num_heads * self.batch
        last_section = cutlass.max(num_pairs // self.heads_per_section, 1) - 1
        tiles_per_section = self.heads_per_section * self.num_blocks
        section = cutlass.min(tile // tiles_per_section, last_section)
        first_pair = section * self.heads_per_section
        is_last = 1 - cutlass.min(last_section - section, 1)
        width = self.heads_per_section + is_last * (num_pairs - first_pair - self.heads_per_section)
        tile_in_section = tile - section * tiles_per_section
        rank = tile_in_section // width
        pair = first_pair + tile_in_section - rank * width
        batch_idx = pair // self.num_heads
        block = self.num_blocks - 1 - rank if self.is_last_longest else rank
        return block, pair - batch_idx * self.num_heads, batch_idx
