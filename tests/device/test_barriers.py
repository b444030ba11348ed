"""Named barriers on a GPU: exchanges of two warpgroups, and a buffer between a warpgroup and a warp."""

import cuda.bindings.driver as cuda
import cutlass
import pytest
import torch
from cutlass import Boolean, Int32, cute

from cute_fa.device import barriers, hopper

THREADS = 256  # two warpgroups


NUM_STEPS = 9
SLEEP_NS = 20000  # a multiple of what a step takes when nobody sleeps
NOBODY, WRITER_WARP = -1, 1  # consumer warps are 4 to 11


@cute.kernel
def hand_over_kernel(out: cute.Tensor, slow_warp: Int32):
    """out: (step, warpgroup, thread). Each step, consumers exchange numbers, and warp 1 takes what they found."""
    thread = cute.arch.thread_idx()[0]
    warp, role = cute.arch.make_warp_uniform(thread // 32), cute.arch.make_warp_uniform(thread // 128)
    fields = {"exchange": cute.struct.MemRange[Int32, 2 * THREADS], "buffer": cute.struct.MemRange[Int32, THREADS]}
    storage = hopper.SmemAllocator().allocate(cute.struct(type("Storage", (), {"__annotations__": fields})))
    exchange = storage.exchange.get_tensor(cute.make_layout((128, 2, 2)))
    buffer = storage.buffer.get_tensor(cute.make_layout((128, 2)))
    if warp == WRITER_WARP:
        take(out, buffer, thread % 32, slow_warp == warp)
    elif role > 0:
        give(exchange, buffer, thread % 128, role - 1, slow_warp == warp)


@cute.jit
def give(exchange: cute.Tensor, buffer: cute.Tensor, thread: Int32, warpgroup: Int32, is_slow: Boolean):
    """Run by consumer warpgroups. exchange: (thread, warpgroup, stage)."""
    for step in cutlass.range(NUM_STEPS, unroll=1):
        sleep_if(is_slow)
        exchange[thread, warpgroup, step % 2] = 1000 * step + 128 * warpgroup + thread
        barriers.sync_consumers()
        found = exchange[127 - thread, 1 - warpgroup, step % 2]
        barriers.wait_buffer(barriers.BUFFER_FREE, warpgroup)
        sleep_if(is_slow)
        buffer[thread, warpgroup] = found
        barriers.pass_buffer(barriers.BUFFER_FULL, warpgroup)


@cute.jit
def take(out: cute.Tensor, buffer: cute.Tensor, lane: Int32, is_slow: Boolean):
    """Run by one warp."""
    for warpgroup in cutlass.range_constexpr(2):
        barriers.pass_buffer(barriers.BUFFER_FREE, warpgroup)
    for step in cutlass.range(NUM_STEPS, unroll=1):
        for warpgroup in cutlass.range_constexpr(2):
            barriers.wait_buffer(barriers.BUFFER_FULL, warpgroup)
            sleep_if(is_slow)
            for i in cutlass.range_constexpr(4):
                out[step, warpgroup, 32 * i + lane] = buffer[32 * i + lane, warpgroup]
            if step < NUM_STEPS - 1:  # no arrival is left over at exit
                barriers.pass_buffer(barriers.BUFFER_FREE, warpgroup)


@cute.jit
def sleep_if(is_slow: Boolean):
    if is_slow:
        cute.arch.inline_ptx("nanosleep.u32 {$r0};", read_only_args=[Int32(SLEEP_NS)])


@cute.jit
def launch_hand_over(out: cute.Tensor, slow_warp: Int32, stream: cuda.CUstream):
    hand_over_kernel(out, slow_warp).launch(grid=(1, 1, 1), block=(128 + THREADS, 1, 1), stream=stream)


@pytest.fixture(scope="module")
def hand_over(build):
    return build(launch_hand_over, (Int32, (NUM_STEPS, 2, 128)), Int32(0))


def test_hand_over_compiles(hand_over):
    assert callable(hand_over), "for sm_90a"


@pytest.mark.gpu
@pytest.mark.timeout(120)
def test_a_buffer_goes_to_and_fro(hand_over):
    """A slow consumer shows what is read too early, a slow writer a buffer that is written too early."""
    step = torch.arange(NUM_STEPS, dtype=torch.int32)[:, None, None]
    partner, mirrored = torch.tensor([1, 0])[:, None], 127 - torch.arange(128)
    wanted = (1000 * step + 128 * partner + mirrored).int()
    for slow_warp in (NOBODY, WRITER_WARP, *range(4, 12)):
        out = torch.full((NUM_STEPS, 2, 128), -7, dtype=torch.int32, device="cuda")
        hand_over(out, slow_warp)
        assert torch.equal(out.cpu(), wanted), f"numbers of the other warpgroup, warp {slow_warp} being slow"
