"""Counters: what CTAs of the main backward kernel tell each other through global memory.

A grid of as many CTAs as there are SMs takes tiles by their numbers. A tile is counted at each of its query heads when its
part of dQ has landed. Whoever counts the last tile of a head puts the head in the queue of complete ones, from which
CTAs take units of blocks, to turn their dQ into rows between two tiles. What nobody took is left to the kernel behind.
"""

from dataclasses import dataclass

import cutlass
from cutlass import Int32, cute

_TILES, _UNITS, _HEADS, _WORDS = 0, 1, 2, 3


@dataclass(frozen=True)
class Unit:
    """count blocks of queries of a head, counted through the batches; block: the first one, of all heads; m_block: of its own."""

    count: Int32
    head: Int32
    block: Int32
    m_block: Int32


@dataclass(frozen=True)
class Counters:
    """words: int32, zeros at the start, as many as `BackwardPlan.num_counters`: how many tiles and units are taken, and how
    many heads are complete; of every query head, counted through the batches, how many tiles are done; the complete
    heads in their order, plus one; of every block whether it is the first of a unit that is taken; and, in deterministic
    plans, how many warpgroups have added to it.

    num_heads: of all batches. num_blocks: of queries in a head. unit: so many blocks are taken together.
    """

    words: cute.Tensor
    num_heads: Int32
    num_blocks: Int32
    unit: Int32

    def _at(self, index) -> cute.Pointer:
        return self.words.iterator + index

    def _tiles_done(self, head) -> cute.Pointer:
        return self._at(_WORDS + head)

    def _complete(self, place) -> cute.Pointer:
        return self._at(_WORDS + self.num_heads + place)

    def _is_taken(self, block) -> cute.Pointer:
        return self._at(_WORDS + 2 * self.num_heads + block)

    def warpgroups_done(self, block) -> cute.Pointer:
        return self._is_taken(self.num_heads * self.num_blocks + block)

    def left_block(self, block) -> tuple[Int32, Int32, Int32]:
        """(head, block in its head, whether nobody took it), behind the kernel that takes units."""
        head = block // self.num_blocks
        m_block = block - head * self.num_blocks
        return head, m_block, self._is_taken(block - m_block % self.unit).load() == 0


@cute.jit
def take_tile(counters: Counters, lane: Int32) -> Int32:
    """Run by a warp: the number of another tile, valid in lane 0."""
    number = Int32(0)
    if lane == 0:
        number = cute.arch.atomic_add(counters._at(_TILES), Int32(1))
    return number


@cute.jit
def count_tile(counters: Counters, head: Int32, num_tiles: Int32):
    """Run by one thread: one more of a head's num_tiles tiles is done. SYNC: what the thread saw landed is visible to who
    takes a unit of the head."""
    cute.arch.fence_acq_rel_gpu()
    if cute.arch.atomic_add(counters._tiles_done(head), Int32(1)) == num_tiles - 1:
        cute.arch.fence_acq_rel_gpu()
        place = cute.arch.atomic_add(counters._at(_HEADS), Int32(1))
        cute.arch.store(counters._complete(place), head + 1, sem="release", scope="gpu")


@cute.jit
def take_unit(counters: Counters) -> Unit:
    """Run by one thread: a unit, whose count is 0 where there is none.

    A unit is looked for before it is taken, so that none is taken too early, and left to the kernel behind, but in a race.
    """
    unit = Unit(Int32(0), Int32(0), Int32(0), Int32(0))
    units_of_head = cute.ceil_div(counters.num_blocks, counters.unit)
    if _complete_head(counters, cute.arch.load(counters._at(_UNITS), Int32, sem="relaxed", scope="gpu") // units_of_head) >= 0:
        number = cute.arch.atomic_add(counters._at(_UNITS), Int32(1))
        head = _complete_head(counters, number // units_of_head)
        if head >= 0:
            m_block = number % units_of_head * counters.unit
            block = head * counters.num_blocks + m_block
            counters._is_taken(block).store(Int32(1))
            unit = Unit(cutlass.min(counters.num_blocks - m_block, counters.unit), head, block, m_block)
    return unit


@cute.jit
def _complete_head(counters: Counters, place: Int32) -> Int32:
    """The head that was the place-th to be complete, -1 where there is none yet."""
    head = Int32(-1)
    if place < counters.num_heads:
        head = cute.arch.load(counters._complete(place), Int32, sem="acquire", scope="gpu") - 1
    return head
