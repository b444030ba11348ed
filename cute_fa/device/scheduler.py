"""Scheduler: hands tiles to CTAs as these get free (an atomic counter), and from the load warp to the consumers (slots).

The load warp of each CTA takes its block's index as its first tile, and the counter's values, behind the grid's size, as
the next ones. It locates a tile once (integer divisions) and posts its coordinates; consumer warps fetch them.
"""

from dataclasses import dataclass

from cutlass import Int32, cute

from cute_fa.device.pipeline import CONSUMER, PRODUCER, Ring

NUM_SLOTS = 2
_WORDS = 4  # of a slot: block, head, batch, unused


@dataclass(frozen=True)
class TileSlots:
    """Coordinates of the next tiles in shared memory: words (4, 2), and the ring that guards them."""

    words: cute.Tensor
    ring: Ring

    @staticmethod
    def storage():
        """What a shared memory struct reserves for the words."""
        return cute.struct.MemRange[Int32, _WORDS * NUM_SLOTS]

    @staticmethod
    def at(pointer, barriers):
        words = cute.make_tensor(pointer, cute.make_layout((_WORDS, NUM_SLOTS)))
        return TileSlots(words, Ring(barriers, NUM_SLOTS))

    def producer_state(self):
        return self.ring.state(PRODUCER)

    def consumer_state(self):
        return self.ring.state(CONSUMER)

    def fetch(self, state, lane):
        """Run by a consumer warp: [block, head, batch] of the next tile; the block is -1 behind the last tile."""
        self.ring.wait_full(state.index, state.phase)
        tile = [cute.arch.make_warp_uniform(self.words[word, state.index]) for word in range(3)]
        cute.arch.sync_warp()  # SYNC: all lanes have read before one of them says so
        self.ring.release(state.index, lane)
        return tile


@cute.jit
def post(slots: TileSlots, index: Int32, phase: Int32, lane: Int32, block: Int32, head: Int32, batch_idx: Int32):
    """Run by the load warp: waits for an empty slot, then posts a tile."""
    slots.ring.wait_empty(index, phase)
    if lane == 0:
        slots.words[0, index], slots.words[1, index], slots.words[2, index] = block, head, batch_idx
        cute.arch.mbarrier_arrive(slots.ring.full(index))


@cute.jit
def next_tile(counter: cute.Tensor, num_ctas: Int32, lane: Int32) -> Int32:
    """Run by the load warp: asks for another tile's number, valid in lane 0 (`shuffle_sync` it where it is needed)."""
    tile = Int32(0)
    if lane == 0:
        tile = num_ctas + cute.arch.atomic_add(counter.iterator, Int32(1))
    return tile


@cute.jit
def leave(counter: cute.Tensor, num_ctas: Int32, lane: Int32):
    """Run by the load warp when it is done: the last CTA to leave clears the counter's two words for the next launch."""
    if lane == 0:
        if cute.arch.atomic_add(counter.iterator + 1, Int32(1)) == num_ctas - 1:
            cute.arch.atomic_exch(counter.iterator, Int32(0))
            cute.arch.atomic_exch(counter.iterator + 1, Int32(0))


@cute.jit
def locate(order, num_tiles: Int32, tile: Int32):
    """(block, head, batch) of a tile number; block -1 where there is no such tile."""
    block, head, batch_idx = order.locate(tile)
    return (block if tile < num_tiles else Int32(-1)), head, batch_idx
