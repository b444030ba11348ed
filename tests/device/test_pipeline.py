"""Ring on a GPU: blocks reach every consumer warpgroup whole and in order, whichever warp is the slow one."""

import cuda.bindings.driver as cuda
import cutlass
import pytest
import torch
from cutlass import Boolean, Int32, cute

from cute_fa.device import hopper, tma
from cute_fa.device.pipeline import CONSUMER, PRODUCER, Ring, arrive, has_passed

NUM_BLOCKS, NUM_STAGES = 7, 2  # the ring goes round more than three times, so each stage sees both phases twice
ROWS, COLUMNS = 128, 8  # of a block: a thread of a warpgroup reads one row
SLEEP_NS = 20000  # a multiple of what a block takes when nobody sleeps
NOBODY, LOAD_WARP, FIRST_CONSUMER_WARP = -1, 0, 4


def test_barriers_of_a_ring_fill_its_storage():
    """Addresses in units of one barrier, which is 8 bytes (PTX ISA, mbarrier)."""
    for num_stages in (1, 2, 3):
        ring = Ring(100, num_stages)
        found = [place(stage) for place in (ring.full, ring.empty) for stage in range(num_stages)]
        assert found == list(range(100, 100 + 2 * num_stages)), f"full, then empty barriers of {num_stages} stages"
        assert Ring.storage(num_stages).size_in_bytes == 8 * len(found), f"bytes for {num_stages} stages"


@cute.kernel
def pass_kernel(
    atom: cute.CopyAtom,
    coord_X: cute.Tensor,
    out: cute.Tensor,
    offsets: cute.Tensor,
    slow_warp: Int32,
    num_warpgroups: cutlass.Constexpr,
):
    """Warp 0 loads, warps 1 to 3 leave, the others consume. offsets: of the full and empty barriers, in bytes."""
    thread = cute.arch.thread_idx()[0]
    warp, role = cute.arch.make_warp_uniform(thread // 32), cute.arch.make_warp_uniform(thread // 128)
    layout = stages()
    fields = {
        "barriers": Ring.storage(NUM_STAGES),
        "blocks": cute.struct.Align[cute.struct.MemRange[Int32, cute.cosize(layout)], 128],
    }
    storage = hopper.SmemAllocator().allocate(cute.struct(type("Storage", (), {"__annotations__": fields})))
    ring, sX = Ring(storage.barriers.data_ptr(), NUM_STAGES), storage.blocks.get_tensor(layout)
    if warp == LOAD_WARP:
        with cute.arch.elect_one():
            ring.init(4 * num_warpgroups)
            for i in cutlass.range_constexpr(NUM_STAGES):
                offsets[0, i] = ring.full(i).toint() - ring.barriers.toint()
                offsets[1, i] = ring.empty(i).toint() - ring.barriers.toint()
    cute.arch.mbarrier_init_fence()
    cute.arch.sync_threads()
    if warp == LOAD_WARP:
        load_blocks(atom, coord_X, sX, ring, slow_warp == warp)
    elif role > 0:
        take_blocks(out, sX, ring, thread % 128, role - 1, slow_warp == warp)


@cute.jit
def load_blocks(atom: cute.CopyAtom, coord_X: cute.Tensor, sX: cute.Tensor, ring: Ring, is_slow: Boolean):
    tXsX, tXgX = tma.partition(atom, sX, cute.local_tile(coord_X, (ROWS, COLUMNS), (None, 0)))
    state = ring.state(PRODUCER)
    for block in cutlass.range(NUM_BLOCKS, unroll=1):
        sleep_if(is_slow)
        tma.load(atom, tXgX[None, block], tXsX, ring, state.index, state.phase, 4 * ROWS * COLUMNS)
        state.advance()


@cute.jit
def take_blocks(out: cute.Tensor, sX: cute.Tensor, ring: Ring, row: Int32, warpgroup: Int32, is_slow: Boolean):
    """out: (warpgroup, block, row, column)."""
    state = ring.state(CONSUMER)
    for block in cutlass.range(NUM_BLOCKS, unroll=1):
        ring.wait_full(state.index, state.phase)
        sleep_if(is_slow)
        for column in cutlass.range_constexpr(COLUMNS):
            out[warpgroup, block, row, column] = sX[row, column, state.index]
        cute.arch.sync_warp()  # SYNC: all lanes have read before one of them says so
        ring.release(state.index, row % 32)
        state.advance()


@cute.jit
def sleep_if(is_slow: Boolean):
    if is_slow:
        cute.arch.inline_ptx("nanosleep.u32 {$r0};", read_only_args=[Int32(SLEEP_NS)])


def stages():
    """Shared memory (row, column, stage), not swizzled."""
    return cute.make_layout((ROWS, COLUMNS, NUM_STAGES), stride=(COLUMNS, 1, ROWS * COLUMNS))


@cute.jit
def launch_pass(
    x: cute.Tensor,
    out: cute.Tensor,
    offsets: cute.Tensor,
    slow_warp: Int32,
    num_warpgroups: cutlass.Constexpr,
    stream: cuda.CUstream,
):
    """x: (rows of all blocks, column)."""
    pass_kernel(*tma.load_atom(x, stages(), (ROWS, COLUMNS)), out, offsets, slow_warp, num_warpgroups).launch(
        grid=(1, 1, 1), block=(128 * (1 + num_warpgroups), 1, 1), stream=stream
    )


@pytest.fixture(scope="module", params=[1, 2], ids=["one-consumer", "two-consumers"])
def pass_blocks(build, request):
    """(function, number of consumer warpgroups)."""
    shapes = (NUM_BLOCKS * ROWS, COLUMNS), (request.param, NUM_BLOCKS, ROWS, COLUMNS), (2, NUM_STAGES)
    return build(launch_pass, *((Int32, shape) for shape in shapes), Int32(0), request.param), request.param


def test_ring_compiles(pass_blocks):
    assert callable(pass_blocks[0]), "for sm_90a"


@pytest.mark.gpu
@pytest.mark.timeout(120)
def test_blocks_arrive_in_order(pass_blocks):
    """A slow consumer warp shows a stage that is filled too early, a slow load warp one that is read too early."""
    function, num_warpgroups = pass_blocks
    x = torch.arange(NUM_BLOCKS * ROWS * COLUMNS, dtype=torch.int32).view(-1, COLUMNS)
    wanted = x.view(1, NUM_BLOCKS, ROWS, COLUMNS).expand(num_warpgroups, -1, -1, -1)
    last_warp = FIRST_CONSUMER_WARP + 4 * num_warpgroups - 1
    for slow_warp in (NOBODY, LOAD_WARP, *range(FIRST_CONSUMER_WARP, last_warp + 1)):
        out = torch.full(wanted.shape, -7, dtype=torch.int32, device="cuda")
        offsets = torch.full((2, NUM_STAGES), -7, dtype=torch.int32, device="cuda")
        function(x.cuda(), out, offsets, slow_warp)
        assert torch.equal(out.cpu(), wanted), f"what each warpgroup saw, warp {slow_warp} being slow"
        assert offsets.tolist() == [[0, 8], [16, 24]], "bytes from the first barrier to the full and empty ones"


@cute.kernel
def look_kernel(seen: cute.Tensor):
    """Warp 1 looks at a barrier before and behind the arrival of warp 0."""
    thread = cute.arch.thread_idx()[0]
    warp, lane = cute.arch.make_warp_uniform(thread // 32), thread % 32
    fields = {"barriers": Ring.storage(1)}
    storage = hopper.SmemAllocator().allocate(cute.struct(type("Storage", (), {"__annotations__": fields})))
    barrier = storage.barriers.data_ptr()
    if thread == 0:
        cute.arch.mbarrier_init(barrier, 1)
    cute.arch.mbarrier_init_fence()
    cute.arch.sync_threads()
    if warp == 1:
        seen[0, lane] = has_passed(barrier)
    cute.arch.sync_threads()
    if warp == 0:
        arrive(barrier, lane)
    if warp == 1:
        while has_passed(barrier) == 0:
            pass
        seen[1, lane] = has_passed(barrier)


@cute.jit
def launch_look(seen: cute.Tensor, stream: cuda.CUstream):
    look_kernel(seen).launch(grid=(1, 1, 1), block=(64, 1, 1), stream=stream)


@pytest.fixture(scope="module")
def look(build):
    return build(launch_look, (Int32, (2, 32)))


def test_look_compiles(look):
    assert callable(look), "for sm_90a"


@pytest.mark.gpu
@pytest.mark.timeout(120)
def test_a_look_at_a_barrier_does_not_wait(look):
    """0 before its first arrivals, 1 behind them, in every lane."""
    seen = torch.full((2, 32), -1, dtype=torch.int32, device="cuda")
    look(seen)
    assert seen.cpu().tolist() == [[0] * 32, [1] * 32], "before, behind"
