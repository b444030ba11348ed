"""The tile scheduler on a GPU: every tile reaches every consumer warp once, and the counter is left as it was found."""

import cuda.bindings.driver as cuda
import pytest
import torch
from cutlass import Boolean, Int32, cute
from cutlass.memory import SmemAllocator

from cute_fa.device import scheduler
from cute_fa.device.order import HeadAfterHead
from cute_fa.device.scheduler import NUM_SLOTS, TileSlots

NUM_CONSUMER_WARPS = 3


@cute.struct
class Storage:
    barriers: scheduler.Ring.storage(NUM_SLOTS)
    words: TileSlots.storage()


@cute.kernel
def hand_out_kernel(counter: cute.Tensor, seen: cute.Tensor, num_blocks: Int32, num_heads: Int32, batch: Int32):
    """Warp 0 is the load warp. Each consumer warp counts what it fetches in seen (warp, batch, head, block)."""
    thread = cute.arch.thread_idx()[0]
    warp, lane = cute.arch.make_warp_uniform(thread // 32), thread % 32
    storage = SmemAllocator().allocate(Storage)
    slots = TileSlots.at(storage.words.data_ptr(), storage.barriers.data_ptr())
    if warp == 0:
        with cute.arch.elect_one():
            slots.ring.init(NUM_CONSUMER_WARPS)
    cute.arch.mbarrier_init_fence()
    cute.arch.sync_threads()
    if warp == 0:
        hand_out(counter, slots, HeadAfterHead(num_blocks, num_heads), num_blocks * num_heads * batch, lane)
    else:
        count_tiles(seen, slots, warp - 1, lane)


@cute.jit
def hand_out(counter: cute.Tensor, slots: TileSlots, order: HeadAfterHead, num_tiles: Int32, lane: Int32):
    slot = slots.producer_state()
    num_ctas, tile = cute.arch.grid_dim()[0], cute.arch.block_idx()[0]
    is_last = Boolean(False)
    while not is_last:
        block, head, batch_idx = scheduler.locate(order, num_tiles, tile)
        scheduler.post(slots, slot.index, slot.phase, lane, block, head, batch_idx)
        slot.advance()
        is_last = block < 0
        if not is_last:
            tile = cute.arch.shuffle_sync(scheduler.next_tile(counter, num_ctas, lane), 0)
    scheduler.leave(counter, num_ctas, lane)


@cute.jit
def count_tiles(seen: cute.Tensor, slots: TileSlots, warp: Int32, lane: Int32):
    slot = slots.consumer_state()
    block, head, batch_idx = slots.fetch(slot, lane)
    slot.advance()
    while block >= 0:
        if lane == 0:
            cute.arch.atomic_add(seen.iterator + cute.crd2idx((warp, batch_idx, head, block), seen.layout), Int32(1))
        block, head, batch_idx = slots.fetch(slot, lane)
        slot.advance()


@cute.jit
def launch_hand_out(counter: cute.Tensor, seen: cute.Tensor, num_ctas: Int32, stream: cuda.CUstream):
    _, batch, num_heads, num_blocks = seen.shape
    hand_out_kernel(counter, seen, num_blocks, num_heads, batch).launch(
        grid=(num_ctas, 1, 1), block=(32 * (1 + NUM_CONSUMER_WARPS), 1, 1), stream=stream
    )


@pytest.fixture(scope="module")
def launch(build):
    batch, num_heads, num_blocks = (cute.sym_int32() for _ in range(3))
    return build(
        launch_hand_out, (Int32, (2,)), (Int32, (NUM_CONSUMER_WARPS, batch, num_heads, num_blocks)), Int32(1)
    )


def test_scheduler_compiles(launch):
    assert callable(launch), "for sm_90a"


@pytest.mark.gpu
@pytest.mark.timeout(120)
@pytest.mark.parametrize("num_ctas", [1, 7, 132, 1000], ids=["one-cta", "seven-ctas", "a-cta-an-sm", "queueing-ctas"])
def test_every_tile_is_handed_out_once(launch, num_ctas):
    """More CTAs than tiles and fewer, three launches on one counter, of which nobody clears it in between."""
    for grid in ((1, 1, 1), (1, 2, 3), (2, 11, 6), (3, 4, 11), (5, 16, 64)):
        counter = torch.zeros(2, dtype=torch.int32, device="cuda")
        seen = torch.zeros(NUM_CONSUMER_WARPS, *grid, dtype=torch.int32, device="cuda")
        for launches in (1, 2, 3):
            launch(counter, seen, num_ctas)
            assert (seen.cpu() == launches).all(), f"batch, heads, blocks {grid}, launch {launches}"
            assert counter.tolist() == [0, 0], f"the counter after batch, heads, blocks {grid}"
