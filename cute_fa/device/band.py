"""Band: which tiles of the score matrix hold visible pairs and which of those need no mask, for both loop orders.

The integer geometry of a `core.mask_spec.MaskSpec` cut into tiles. Kernels ask it per work tile with Int32, tests with
ints: everything is +, -, //, min and max. `//` floors on both; Int32's `%` does not, so there is none. Each `if` here
is on what is known when the kernel is traced.

Why intervals are enough: the visible keys of a row are one interval whose two ends never move left from row to row, and
no gap opens between the intervals of two neighbours. So the rows of a tile together see one interval, from the first
row's first key to the last row's last key, and all of them see the one from the last row's first key to the first row's
last key. Seen from the keys the same holds for rows.

Rows without a key are the first rows (they stand at negative positions); their interval is empty and lies at 0, where
that of the first row with a key begins. The same holds for keys that no row sees. Padding (rows past seqlen_q in the
last m-block, keys past seqlen_k in the last n-block) never widens what is visited: the last row sees the last key,
whatever the mask.
"""

from dataclasses import dataclass

import cutlass
from cutlass import Int32

Index = int | Int32


@dataclass(frozen=True)
class Band:
    """Tiles of tile_m queries by tile_n keys over the visible band of one (batch, head).

    seqlen_q, seqlen_k: of this sequence; ints or Int32.
    left, right, chunk: as in MaskSpec. None (left, right) and 0 (chunk) are absent and cost nothing; any other value
        may be an int or an Int32. Each plus both seqlens must stay below 2^31.

    Every method returns a half-open interval of block indices; empty ones have begin = end. An end that depends on
    nothing dynamic stays an int. Arguments are blocks that exist: a block has at least one row or key.

    A block pair is unmasked if every row of the sequence in it sees all tile_n keys of its block:
    - Keys past seqlen_k are never visible, so the last n-block is masked unless seqlen_k fills it: such keys would
      enter row sums.
    - Rows past seqlen_q do not count: forward never stores them. Backward, which sums over rows, relies on their P
      being 0 (their lse reads as +inf), mask or no mask.
    """

    tile_m: int
    tile_n: int
    seqlen_q: Index
    seqlen_k: Index
    left: Index | None = None
    right: Index | None = None
    chunk: Index = 0

    def n_blocks(self, m_block: Index) -> tuple[Index, Index]:
        """The n-blocks from the first to the last that hold a visible pair of `m_block`.

        Forward: the producer warp loads K and V of these, the consumer warpgroups walk them.
        """
        first_row = m_block * self.tile_m
        begin, _ = self.keys_of(first_row)
        _, end = self.keys_of(first_row + self.tile_m - 1)
        return begin // self.tile_n, _ceil_div(end, self.tile_n)

    def unmasked_n_blocks(self, m_block: Index) -> tuple[Index, Index]:
        """The n-blocks that `m_block` sees whole, a part of its `n_blocks`; what lies on either side needs the mask.

        Forward: a consumer warpgroup splits its loop at these two ends. Without `left` and `chunk` the interval begins
        where `n_blocks` does, so a kernel without them needs masked steps on the right only.
        """
        first_row = m_block * self.tile_m
        last_row = cutlass.min(first_row + self.tile_m, self.seqlen_q) - 1
        begin, _ = self.keys_of(last_row)
        _, end = self.keys_of(first_row)
        end = end // self.tile_n
        return cutlass.min(_ceil_div(begin, self.tile_n), end), end

    def settled_n_blocks(self, m_block: Index) -> tuple[Index, Index]:
        """Those `unmasked_n_blocks` of `m_block` behind which, on the right, each row has seen a key.

        Forward: a consumer warpgroup, which comes from the right, has a reference for every row when it reaches them.
        """
        begin, end = self.unmasked_n_blocks(m_block)
        _, end_of_first_row = self.keys_of(m_block * self.tile_m)
        end = cutlass.min(end, cutlass.max(end_of_first_row - 1, 0) // self.tile_n)
        return cutlass.min(begin, end), end

    def m_blocks(self, n_block: Index) -> tuple[Index, Index]:
        """The m-blocks from the first to the last that hold a visible pair of `n_block`.

        Backward: the producer warp loads Q and dO of these, the consumer warpgroups walk them, and the dQ writer waits
        for as many.
        """
        first_key = n_block * self.tile_n
        begin, _ = self.rows_of(first_key)
        _, end = self.rows_of(first_key + self.tile_n - 1)
        return begin // self.tile_m, _ceil_div(end, self.tile_m)

    def unmasked_m_blocks(self, n_block: Index) -> tuple[Index, Index]:
        """The m-blocks that see all of `n_block`, a part of its `m_blocks`; what lies on either side needs the mask.

        Backward: a consumer warpgroup splits its loop at these two ends. Without `left` and `chunk` the interval ends
        where `m_blocks` does, so a kernel without them needs masked steps at the beginning only.
        """
        first_key = n_block * self.tile_n
        _, last_m_block = self.m_blocks(n_block)
        begin, _ = self.rows_of(first_key + self.tile_n - 1)
        _, end = self.rows_of(first_key)
        # 1 if the last m-block is cut by seqlen_q and its last row still sees first_key: then no row of it is missing.
        has_tail = _ceil_div(self.seqlen_q, self.tile_m) - self.seqlen_q // self.tile_m
        has_last_row = cutlass.max(end - self.seqlen_q + 1, 0)
        end = end // self.tile_m + has_tail * has_last_row
        # 1 if seqlen_k cuts this n-block: then every m-block needs the mask.
        is_cut = 1 - cutlass.min(self.seqlen_k // self.tile_n - n_block, 1)
        begin = cutlass.min(cutlass.max(_ceil_div(begin, self.tile_m), is_cut * last_m_block), last_m_block)
        return begin, cutlass.max(begin, end)

    @property
    def _is_chunked(self) -> bool:
        return not (isinstance(self.chunk, int) and self.chunk == 0)

    def keys_of(self, row: Index) -> tuple[Index, Index]:
        """The keys that `row` sees, with both ends cut to the sequence from the side they could leave it."""
        position = row + self.seqlen_k - self.seqlen_q
        begin, end = 0, self.seqlen_k
        if self.left is not None:
            begin = cutlass.max(begin, position - self.left)
        if self.right is not None:
            end = cutlass.min(end, position + self.right + 1)
        if self._is_chunked:
            chunk_begin = position // self.chunk * self.chunk
            begin, end = cutlass.max(begin, chunk_begin), cutlass.min(end, chunk_begin + self.chunk)
        return begin, cutlass.max(end, 0)

    def rows_of(self, key: Index) -> tuple[Index, Index]:
        """The rows that see `key`; `keys_of` solved for the row."""
        offset = self.seqlen_k - self.seqlen_q
        begin, end = 0, self.seqlen_q
        if self.right is not None:
            begin = cutlass.max(begin, key - self.right - offset)
        if self.left is not None:
            end = cutlass.min(end, key + self.left + 1 - offset)
        if self._is_chunked:
            chunk_begin = key // self.chunk * self.chunk - offset
            begin, end = cutlass.max(begin, chunk_begin), cutlass.min(end, chunk_begin + self.chunk)
        return begin, cutlass.max(end, 0)


def _ceil_div(value: Index, divisor: int) -> Index:
    return (value + divisor - 1) // divisor
