"""Tiles: the load warp of the main backward kernel locates tiles and posts them to the other warps of its CTA."""

from dataclasses import dataclass, fields

from cutlass import Int32, cute

from cute_fa.device.pipeline import Ring

NUM_SLOTS = 2  # the load warp runs less than a tile ahead


@dataclass(frozen=True)
class Place:
    """One block of keys of a head; n_block is -1 behind the last tile. m_begin to m_end: blocks of queries that see it, of
    every query head of the group; up to m_unmasked the mask is needed."""

    n_block: Int32
    head: Int32
    batch_idx: Int32
    m_begin: Int32
    m_unmasked: Int32
    m_end: Int32


_WORDS = len(fields(Place))


@dataclass(frozen=True)
class TileSlots:
    """Tiles under way, in shared memory, and the ring that guards them; warps that fetch count as its consumers."""

    words: cute.Tensor
    ring: Ring

    @staticmethod
    def storage():
        """What a shared memory struct reserves for the words."""
        return cute.struct.MemRange[Int32, _WORDS * NUM_SLOTS]

    @staticmethod
    def at(pointer, barriers):
        return TileSlots(cute.make_tensor(pointer, cute.make_layout((_WORDS, NUM_SLOTS))), Ring(barriers, NUM_SLOTS))

    def wait(self, number) -> Place:
        """Run by a warp: the CTA's tile of that number, from 0."""
        self.ring.wait_full(number % NUM_SLOTS, number // NUM_SLOTS % 2)
        return self.read(number)

    def read(self, number) -> Place:
        """The same tile again, which is not kept in registers meanwhile."""
        return Place(*[cute.arch.make_warp_uniform(self.words[word, number % NUM_SLOTS]) for word in range(_WORDS)])

    def release(self, number, lane):
        """Run by a warp that is done with a tile."""
        cute.arch.sync_warp()  # SYNC: all lanes have read
        self.ring.release(number % NUM_SLOTS, lane)


@cute.jit
def post(slots: TileSlots, number: Int32, lane: Int32, place: Place):
    """Run by the load warp: the CTA's tile of that number, from 0."""
    index = number % NUM_SLOTS
    slots.ring.wait_empty(index, number // NUM_SLOTS % 2 ^ 1)
    if lane == 0:
        for word, field in enumerate(fields(Place)):
            slots.words[word, index] = getattr(place, field.name)
        cute.arch.mbarrier_arrive(slots.ring.full(index))
