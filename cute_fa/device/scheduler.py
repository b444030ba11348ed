"""Scheduler: hands tiles to CTAs as these get free (an atomic counter), and from the load warp to the consumers (slots).

The load warp of each CTA takes its block's index as its first tile, and the counter's values, behind the grid's size, as
the next ones. It locates a tile once (integer divisions) and posts its coordinates, and beside them what else a
warpgroup wants to know of the tile (details), so that consumer warps fetch numbers and begin.

Consumers may find that a tile cannot be done in the way that is tried first. They say so in its slot, which they hold until
then, and the load warp posts the tile once more, to be done with care. Whether this happens depends on the tile's
data alone, so results do not depend on timing.
"""

from dataclasses import dataclass

import cutlass
from cutlass import Boolean, Int32, cute

from cute_fa.device.pipeline import CONSUMER, PRODUCER, Ring

# So many tiles may be under way: loads run at most three tiles ahead of the slowest warp. At least two, because a tile is
# posted before the one in front of it has all its loads.
NUM_SLOTS = 4
NUM_DETAILS = 4
_BLOCK, _HEAD, _BATCH, _HAS_CARE, _TILE, _HAS_FAILED, _DETAILS = 0, 1, 2, 3, 4, 5, 8  # words of a slot, two unused
_WARPGROUPS = 4  # that may have details, each posted by a lane; a CTA has two or three of them
_WORDS = _DETAILS + NUM_DETAILS * _WARPGROUPS


@dataclass(frozen=True)
class TileSlots:
    """Tiles under way, in shared memory: words (24, slots), and the ring that guards them."""

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

    def init(self, num_consumer_warps: int):
        """As `Ring.init`."""
        self.ring.init(num_consumer_warps, _WARPGROUPS)

    def producer_state(self):
        return self.ring.state(PRODUCER)

    def consumer_state(self):
        return self.ring.state(CONSUMER)

    def fetch(self, state, warpgroup):
        """Run by a consumer warp: block, head, batch, has_care and the warpgroup's details of the next tile.

        The block is -1 behind the last tile.
        """
        self.ring.wait_full(state.index, state.phase)
        details = [_DETAILS + NUM_DETAILS * warpgroup + i for i in range(NUM_DETAILS)]
        words = (_BLOCK, _HEAD, _BATCH, _HAS_CARE, *details)
        return [cute.arch.make_warp_uniform(self.words[word, state.index]) for word in words]


@cute.jit
def settle(slots: TileSlots, index: Int32, lane: Int32, has_failed: Boolean):
    """Run by a consumer warp, once for every tile that it fetched: whether its rows have to be done again, with care."""
    if has_failed:
        if lane == 0:
            slots.words[_HAS_FAILED, index] = Int32(1)
    cute.arch.sync_warp()  # SYNC: all lanes have read the slot before one of them gives it back
    slots.ring.release(index, lane)


@cute.jit
def clear(slots: TileSlots, lane: Int32):
    """Run by the load warp before its first tile."""
    if lane < NUM_SLOTS:
        slots.words[_HAS_FAILED, lane] = Int32(0)
    cute.arch.sync_warp()  # SYNC: lanes read what others cleared


@cute.jit
def post(slots: TileSlots, index: Int32, lane: Int32, tile: Int32, place, has_care: Int32, details):
    """Run by the load warp: posts a tile in an empty slot. place: (block, head, batch). details: lane w has warpgroup w's."""
    if lane == 0:
        for word, value in (*zip((_BLOCK, _HEAD, _BATCH), place), (_HAS_CARE, has_care), (_TILE, tile)):
            slots.words[word, index] = value
    if lane < _WARPGROUPS:
        for i, value in enumerate(details):
            slots.words[_DETAILS + NUM_DETAILS * lane + i, index] = value
        cute.arch.mbarrier_arrive(slots.ring.full(index))


@cute.jit
def failed_tile(slots: TileSlots, index: Int32, phase: Int32, lane: Int32, num_waited: Int32) -> Int32:
    """Run by the load warp: waits for the next num_waited slots to be empty; a tile among theirs that failed, or -1.

    The tile is forgotten with this. All NUM_SLOTS are the tiles that are under way; their loads must have been issued.
    """
    tile = Int32(-1)
    for _ in cutlass.range(num_waited, unroll=1):
        slots.ring.wait_empty(index, phase)
        has_failed, tile_of_slot = slots.words[_HAS_FAILED, index], slots.words[_TILE, index]
        cute.arch.sync_warp()  # SYNC: all lanes have read before one of them writes, here or in `post`
        if tile < 0 and has_failed != 0:
            tile = tile_of_slot
            if lane == 0:
                slots.words[_HAS_FAILED, index] = Int32(0)
        index += 1
        if index == NUM_SLOTS:
            index = Int32(0)
            phase = phase ^ 1
    return tile


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
