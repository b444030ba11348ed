"""Counters: what CTAs of the main backward kernel tell each other, and the kernel behind, through global memory.

In persistent and in deterministic plans CTAs ask for the numbers of their tiles. For converters, a tile is counted at each of
its query heads when its part of dQ has landed; a head that all its tiles are counted at is complete.
"""

from dataclasses import dataclass

from cutlass import Int32, cute

from cute_fa.tuning.budget import CONVERTERS


@dataclass(frozen=True)
class Counters:
    """words: int32, zeros at the start, as many as `BackwardPlan.num_counters`: how many tiles are taken; of every query head,
    counted through the batches, how many tiles are done; of every converter how many chunks it has turned into rows;
    and, in deterministic plans, of every block of queries how many warpgroups have added to it.

    num_heads: of all batches. num_ctas: of a persistent grid; it also tells where words lie in other plans.
    """

    words: cute.Tensor
    num_heads: Int32
    num_ctas: Int32

    @property
    def tiles_taken(self) -> cute.Pointer:
        return self.words.iterator

    def tiles_done(self, head) -> cute.Pointer:
        return self.words.iterator + (1 + head)

    def chunks_done(self, converter) -> cute.Pointer:
        return self.words.iterator + (1 + self.num_heads + converter)

    def warpgroups_done(self, block) -> cute.Pointer:
        return self.words.iterator + (1 + self.num_heads + CONVERTERS * self.num_ctas + block)


@cute.jit
def take_tile(counters: Counters, lane: Int32) -> Int32:
    """Run by a warp: the number of another tile, valid in lane 0."""
    number = Int32(0)
    if lane == 0:
        number = cute.arch.atomic_add(counters.tiles_taken, Int32(1))
    return number
