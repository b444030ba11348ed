"""TMA on a GPU: tiles of rows through swizzled shared memory, cut at the right and lower edge of their tensors."""

import cuda.bindings.driver as cuda
import cutlass
import pytest
import torch
from cutlass import BFloat16, Float16, cute
from cutlass.cute.runtime import make_fake_tensor

from cute_fa.device import hopper, tma
from cute_fa.device.pipeline import Ring

TILE_M, NUM_TILES = 128, 2  # a CTA's tiles, each in a stage of its own
BATCH, HEADS, ROWS = 2, 3, TILE_M * NUM_TILES
BOX_ROWS = 64  # of a store
THREADS = TILE_M


@cute.kernel
def copy_kernel(
    atom_in: cute.CopyAtom,
    coord_X: cute.Tensor,
    atom_out: cute.CopyAtom,
    coord_Y: cute.Tensor,
    seen: cute.Tensor,
    layout: cute.ComposedLayout,
    tile_d: cutlass.Constexpr,
    box: cutlass.Constexpr,
):
    """Warp 0 loads the tiles of X and stores them to Y; every thread writes a row of each to seen.

    seen: (batch, head, row, column), of whole tiles.
    """
    thread, (head, batch_idx, _) = cute.arch.thread_idx()[0], cute.arch.block_idx()
    warp, dtype = cute.arch.make_warp_uniform(thread // 32), seen.element_type
    fields = {
        "barriers": Ring.storage(NUM_TILES),
        "tiles": cute.struct.Align[cute.struct.MemRange[dtype, cute.cosize(layout)], 1024],
    }
    storage = hopper.SmemAllocator().allocate(cute.struct(type("Storage", (), {"__annotations__": fields})))
    ring = Ring(storage.barriers.data_ptr(), NUM_TILES)
    sX = storage.tiles.get_tensor(layout.outer, swizzle=layout.inner)
    if warp == 0:
        with cute.arch.elect_one():
            ring.init(1)
    cute.arch.mbarrier_init_fence()
    cute.arch.sync_threads()
    tXsX, tXgX = tma.partition(atom_in, sX, cute.local_tile(coord_X, (TILE_M, tile_d), (None, 0, head, batch_idx)))
    gY = cute.local_tile(coord_Y, box, (None, None, head, batch_idx))
    if warp == 0:
        for i in cutlass.range_constexpr(NUM_TILES):
            tma.load(atom_in, tXgX[None, i], tXsX, ring, i, 1, 2 * TILE_M * tile_d)
    for i in cutlass.range_constexpr(NUM_TILES):
        ring.wait_full(i, 0)
        for column in range(tile_d):
            seen[batch_idx, head, i * TILE_M + thread, column] = sX[thread, column, i]
        tYsY, tYgY = tma.partition(atom_out, cute.local_tile(sX[None, None, i], box, (None, None)), gY)
        if warp == 0:
            for r in cutlass.range_constexpr(TILE_M // BOX_ROWS):
                for c in cutlass.range_constexpr(tile_d // box[1]):
                    cute.copy(atom_out, tYsY[None, r, c], tYgY[None, i * (TILE_M // BOX_ROWS) + r, c])
    if warp == 0:
        cute.arch.cp_async_bulk_commit_group()
        cute.arch.cp_async_bulk_wait_group(0, read=True)  # SYNC: shared memory has been read before the CTA leaves


@cute.jit
def launch_copy(
    x: cute.Tensor,
    y: cute.Tensor,
    seen: cute.Tensor,
    tile_d: cutlass.Constexpr,
    width: cutlass.Constexpr,
    stream: cuda.CUstream,
):
    """x, y: (batch, rows, heads, columns). width: of a box."""
    dtype, box = x.element_type, (BOX_ROWS, width)
    mX, mY = (cute.make_tensor(t.iterator, cute.select(t.layout, mode=(1, 3, 2, 0))) for t in (x, y))
    layout = hopper.make_smem_layout_epi(dtype, hopper.ROW_MAJOR, (TILE_M, tile_d), NUM_TILES)
    box_layout = hopper.make_smem_layout_epi(dtype, hopper.ROW_MAJOR, box, 1)
    copy_kernel(
        *tma.load_atom(mX, layout, (TILE_M, tile_d)), *tma.store_atom(mY, box_layout, box), seen, layout, tile_d, box
    ).launch(grid=(HEADS, BATCH, 1), block=(THREADS, 1, 1), stream=stream)


# (tile_d, columns of a swizzled row, dtypes).
SIZES = {
    "d64-box64-bf16": (64, 64, BFloat16, torch.bfloat16),
    "d96-box32-fp16": (96, 32, Float16, torch.float16),
}


@pytest.fixture(scope="module", params=SIZES.values(), ids=SIZES)
def copy(build, request):
    """(function, tile_d, torch dtype): x and y of any size up to ROWS and tile_d."""
    tile_d, width, dtype, torch_dtype = request.param

    def rows():
        strides = (*(cute.sym_int64(divisibility=8) for _ in range(3)), 1)
        shape = (BATCH, cute.sym_int32(), HEADS, cute.sym_int32())
        return make_fake_tensor(dtype, shape, stride=strides, assumed_align=16)

    seen = dtype, (BATCH, HEADS, ROWS, tile_d)
    return build(launch_copy, rows(), rows(), seen, tile_d, width), tile_d, torch_dtype


def framed(rows, columns, value, dtype):
    """(storage, place): a tensor (BATCH, rows, HEADS, columns) at `place` of a storage full of `value`."""
    storage = torch.full((BATCH + 2, rows + 32, HEADS, columns + 32), value, dtype=dtype, device="cuda")
    return storage, (slice(1, BATCH + 1), slice(16, rows + 16), slice(None), slice(16, columns + 16))


def edges(tile_d):
    """(rows, columns): inside the first tile (head_dim 40 of 64, 80 of 96), one behind its end, and whole tiles."""
    short = {64: 40, 96: 80}[tile_d]
    return (1, 8), (70, short), (TILE_M, tile_d - 8), (TILE_M + 1, short), (ROWS, tile_d)


def test_load_and_store_compile(copy):
    assert callable(copy[0]), "for sm_90a"


@pytest.mark.gpu
@pytest.mark.timeout(120)
def test_load_fills_with_zeros_behind_the_edge(copy):
    """NaN lies around the tensor; the last tile is partly or wholly behind its end."""
    function, tile_d, dtype = copy
    for rows, columns in edges(tile_d):
        x, place = framed(rows, columns, torch.nan, dtype)
        values = torch.randn(BATCH, rows, HEADS, columns, generator=torch.Generator().manual_seed(0)).to(dtype)
        x[place] = values.cuda()
        wanted = torch.zeros(BATCH, HEADS, ROWS, tile_d, dtype=dtype)
        wanted[:, :, :rows, :columns] = values.transpose(1, 2)
        seen = torch.full_like(wanted, -7.0, device="cuda")
        function(x[place], torch.zeros_like(x[place]), seen)
        assert torch.equal(seen.cpu(), wanted), f"{rows} rows, {columns} columns"


@pytest.mark.gpu
@pytest.mark.timeout(120)
def test_store_leaves_what_lies_behind_the_edge(copy):
    """Whole tiles into a smaller tensor, in a frame that keeps what it holds."""
    function, tile_d, dtype = copy
    x = torch.randn(BATCH, ROWS, HEADS, tile_d, generator=torch.Generator().manual_seed(1)).to(dtype)
    for rows, columns in edges(tile_d):
        y, place = framed(rows, columns, -7.0, dtype)
        wanted = torch.full_like(y, -7.0, device="cpu")
        wanted[place] = x[:, :rows, :, :columns]
        function(x.cuda(), y[place], torch.zeros(BATCH, HEADS, ROWS, tile_d, dtype=dtype, device="cuda"))
        assert torch.equal(y.cpu(), wanted), f"{rows} rows, {columns} columns"
