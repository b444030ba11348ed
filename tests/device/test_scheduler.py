"""The tile scheduler on a GPU: every tile reaches every consumer warp once, and once more if it failed.

The counter is left as it was found.
"""

from dataclasses import dataclass

import cuda.bindings.driver as cuda
import cutlass
import pytest
import torch
from cutlass import Int32, cute
from cutlass.memory import SmemAllocator

from cute_fa.device import register, scheduler
from cute_fa.device.order import HeadAfterHead
from cute_fa.device.scheduler import NUM_DETAILS, NUM_SLOTS, TileSlots

# A warpgroup is as many warps here as tell it from one warp.
NUM_WARPGROUPS, WARPS_PER_WARPGROUP = 3, 2
NUM_CONSUMER_WARPS = NUM_WARPGROUPS * WARPS_PER_WARPGROUP
SLEEP_NS = 3000  # a multiple of what a tile takes when nobody sleeps
NOBODY = -1


@dataclass(frozen=True)
class Fetched:
    """A tile as a consumer warp fetches it, with NUM_DETAILS numbers of its warpgroup."""

    block: Int32
    head: Int32
    batch_idx: Int32
    has_care: Int32
    of_block: Int32
    of_head: Int32
    of_batch: Int32
    of_care: Int32


@cute.struct
class Storage:
    barriers: scheduler.Ring.storage(NUM_SLOTS)
    words: TileSlots.storage()


@cute.kernel
def hand_out_kernel(
    counter: cute.Tensor, fails: cute.Tensor, seen: cute.Tensor, details: cute.Tensor, slow_warp: Int32
):
    """Warp 0 is the load warp. fails: (warp, batch, head, block), whether a consumer warp says that the tile failed.

    seen: (warp, has_care, batch, head, block), how often a warp fetched it. details: the same, then NUM_DETAILS.
    """
    thread = cute.arch.thread_idx()[0]
    warp, lane = cute.arch.make_warp_uniform(thread // 32), thread % 32
    storage = SmemAllocator().allocate(Storage)
    slots = TileSlots.at(storage.words.data_ptr(), storage.barriers.data_ptr())
    if warp == 0:
        with cute.arch.elect_one():
            slots.init(NUM_CONSUMER_WARPS)
    cute.arch.mbarrier_init_fence()
    cute.arch.sync_threads()
    _, batch, num_heads, num_blocks = fails.shape
    if warp == 0:
        hand_out(counter, slots, HeadAfterHead(num_blocks, num_heads), num_blocks * num_heads * batch, lane)
    else:
        take_tiles(fails, seen, details, slots, warp - 1, lane, slow_warp == warp - 1)


@cute.jit
def hand_out(counter: cute.Tensor, slots: TileSlots, order: HeadAfterHead, num_tiles: Int32, lane: Int32):
    slot = slots.producer_state()
    num_ctas, tile = cute.arch.grid_dim()[0], cute.arch.block_idx()[0]
    scheduler.clear(slots, lane)
    block, head, batch_idx = scheduler.locate(order, num_tiles, tile)
    place = block, head, batch_idx
    scheduler.post(slots, slot.index, lane, tile, place, Int32(0), details_of(place, lane, Int32(0)))
    slot.advance()
    asked, failed = Int32(0), Int32(-1)
    while block >= 0:
        if failed < 0:
            asked = scheduler.next_tile(counter, num_ctas, lane)
        tile = cute.arch.shuffle_sync(asked, 0)
        failed = scheduler.failed_tile(slots, slot.index, slot.phase, lane, Int32(1))
        tile = register.select(failed < 0, tile, failed)
        block, head, batch_idx = scheduler.locate(order, num_tiles, tile)
        if block < 0:
            failed = scheduler.failed_tile(slots, slot.index, slot.phase, lane, Int32(NUM_SLOTS))
            tile = register.select(failed < 0, tile, failed)
            block, head, batch_idx = scheduler.locate(order, num_tiles, tile)
        has_care, place = Int32(failed >= 0), (block, head, batch_idx)
        scheduler.post(slots, slot.index, lane, tile, place, has_care, details_of(place, lane, has_care))
        slot.advance()
    scheduler.leave(counter, num_ctas, lane)


def details_of(place, warpgroup, has_care):
    """Numbers that tell tiles and warpgroups apart."""
    return *(8 * x + warpgroup for x in place), 8 * has_care + warpgroup


@cute.jit
def take_tiles(
    fails: cute.Tensor,
    seen: cute.Tensor,
    details: cute.Tensor,
    slots: TileSlots,
    warp: Int32,
    lane: Int32,
    is_slow: cutlass.Boolean,
):
    slot = slots.consumer_state()
    warpgroup = cute.arch.make_warp_uniform(warp // WARPS_PER_WARPGROUP)
    tile = Fetched(*slots.fetch(slot, warpgroup))
    while tile.block >= 0:
        if is_slow:
            cute.arch.inline_ptx("nanosleep.u32 {$r0};", read_only_args=[Int32(SLEEP_NS)])
        if lane == 0:
            place = warp, tile.has_care, tile.batch_idx, tile.head, tile.block
            cute.arch.atomic_add(seen.iterator + cute.crd2idx(place, seen.layout), Int32(1))
            for i, value in enumerate((tile.of_block, tile.of_head, tile.of_batch, tile.of_care)):
                details[(*place, i)] = value
        has_failed = tile.has_care == 0 and fails[warp, tile.batch_idx, tile.head, tile.block] != 0
        scheduler.settle(slots, slot.index, lane, has_failed)
        slot.advance()
        tile = Fetched(*slots.fetch(slot, warpgroup))


@cute.jit
def launch_hand_out(
    counter: cute.Tensor,
    fails: cute.Tensor,
    seen: cute.Tensor,
    details: cute.Tensor,
    slow_warp: Int32,
    num_ctas: Int32,
    stream: cuda.CUstream,
):
    hand_out_kernel(counter, fails, seen, details, slow_warp).launch(
        grid=(num_ctas, 1, 1), block=(32 * (1 + NUM_CONSUMER_WARPS), 1, 1), stream=stream
    )


@pytest.fixture(scope="module")
def launch(build):
    grid = tuple(cute.sym_int32() for _ in range(3))
    tensors = (NUM_CONSUMER_WARPS, *grid), (NUM_CONSUMER_WARPS, 2, *grid), (NUM_CONSUMER_WARPS, 2, *grid, NUM_DETAILS)
    return build(launch_hand_out, (Int32, (2,)), *((Int32, shape) for shape in tensors), Int32(NOBODY), Int32(1))


def test_scheduler_compiles(launch):
    assert callable(launch), "for sm_90a"


# batch, heads, blocks
GRIDS = ((1, 1, 1), (1, 2, 3), (2, 11, 6), (3, 4, 11), (5, 16, 64))
by_ctas = pytest.mark.parametrize(
    "num_ctas", [1, 7, 132, 1000], ids=["one-cta", "seven-ctas", "a-cta-an-sm", "queueing-ctas"]
)


def wanted_details(grid):
    """(warp, has_care, batch, head, block, detail)."""
    batch, head, block = torch.meshgrid(*map(torch.arange, grid), indexing="ij")
    of_tile = torch.stack([torch.stack((block, head, batch, torch.full_like(block, care)), -1) for care in (0, 1)])
    warpgroup = torch.arange(NUM_CONSUMER_WARPS) // WARPS_PER_WARPGROUP
    return (8 * of_tile[None] + warpgroup.view(-1, 1, 1, 1, 1, 1)).int()


def check(launch, fails, num_ctas, launches, slow_warp=NOBODY):
    """Several launches on one counter, of which nobody clears it in between. fails: (warp, batch, head, block)."""
    grid = fails.shape[1:]
    case = f"batch, heads, blocks {tuple(grid)}, warp {slow_warp} being slow"
    counter = torch.zeros(2, dtype=torch.int32, device="cuda")
    seen = torch.zeros(NUM_CONSUMER_WARPS, 2, *grid, dtype=torch.int32, device="cuda")
    details = torch.full((NUM_CONSUMER_WARPS, 2, *grid, NUM_DETAILS), -7, dtype=torch.int32, device="cuda")
    has_failed = fails.any(0).expand(NUM_CONSUMER_WARPS, *grid)
    is_taken = torch.stack((torch.ones_like(has_failed), has_failed), 1)
    wanted = torch.where(is_taken[..., None], wanted_details(grid), -7)
    for number in range(1, launches + 1):
        launch(counter, fails.int().cuda(), seen, details, slow_warp, num_ctas)
        assert torch.equal(seen.cpu(), number * is_taken.int()), f"how often tiles were taken, {case}, launch {number}"
        assert torch.equal(details.cpu(), wanted), f"details of each warpgroup, {case}"
        assert counter.tolist() == [0, 0], f"the counter after {case}"


@pytest.mark.gpu
@pytest.mark.timeout(120)
@by_ctas
def test_every_tile_is_handed_out_once(launch, num_ctas):
    """More CTAs than tiles and fewer."""
    for grid in GRIDS:
        check(launch, torch.zeros(NUM_CONSUMER_WARPS, *grid, dtype=torch.bool), num_ctas, launches=3)


# (warp, tile) -> whether that warp says that the tile failed
FAILS = {
    "a-third-by-one-warp": lambda warp, tile, last: (tile % 3 == 0) & (warp == tile % NUM_CONSUMER_WARPS),
    "a-third-by-all-warps": lambda warp, tile, last: (tile % 3 == 0) & (warp >= 0),
    "all-by-some-warps": lambda warp, tile, last: (warp + tile) % 4 == 0,
    "all-by-all-warps": lambda warp, tile, last: (warp >= 0) & (tile >= 0),
    "first-by-two-warps": lambda warp, tile, last: (tile == 0) & ((warp == 1) | (warp == 4)),
    "last-by-one-warp": lambda warp, tile, last: (tile == last) & (warp == NUM_CONSUMER_WARPS - 1),
    "last-four-by-all-warps": lambda warp, tile, last: (tile > last - 4) & (warp >= 0),
}


@pytest.mark.gpu
@pytest.mark.timeout(120)
@by_ctas
@pytest.mark.parametrize("fails", FAILS.values(), ids=FAILS)
def test_a_tile_that_failed_is_handed_out_once_more(launch, fails, num_ctas):
    """To all warps, whoever it was that said so; a slow warp says so when the others are tiles ahead."""
    for grid in GRIDS:
        tile, warp = torch.arange(torch.Size(grid).numel()), torch.arange(NUM_CONSUMER_WARPS)[:, None]
        marks = fails(warp, tile, tile[-1]).view(-1, *grid)
        is_small = len(tile) < 1000
        for slow_warp in (NOBODY, 0, NUM_CONSUMER_WARPS - 1) if is_small else (NOBODY,):
            check(launch, marks, num_ctas, launches=2, slow_warp=slow_warp)
