"""TMA on a GPU: tiles of rows through swizzled shared memory, cut at the edges of their tensors, and plain vectors."""

import cuda.bindings.driver as cuda
import cutlass
import pytest
import torch
from cutlass import BFloat16, Float16, Float32, Int32, cute
from cutlass.cute.runtime import make_fake_tensor

from cute_fa.device import hopper, tma
from cute_fa.device.pipeline import CONSUMER, PRODUCER, Ring
from cute_fa.device.smem import tile_layout

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
    layout = tile_layout(dtype, TILE_M, tile_d, NUM_TILES)
    box_layout = tile_layout(dtype, *box)
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


NUM_VECTORS, ROWS_OF_VECTOR, COLUMNS = 5, 64, 64  # of blocks, each a tile and a number a row
NUM_STAGES = 2


@cute.kernel
def vectors_kernel(
    atoms: tuple, coords: tuple, seen: tuple[cute.Tensor, cute.Tensor], layout: cute.ComposedLayout
):
    """Warp 0 loads blocks, warps 1 and 2 write what they see: of tiles (row, column), of vectors (row,)."""
    thread = cute.arch.thread_idx()[0]
    warp = cute.arch.make_warp_uniform(thread // 32)
    fields = {
        "barriers": Ring.storage(NUM_STAGES),
        "tiles": cute.struct.Align[cute.struct.MemRange[BFloat16, cute.cosize(layout)], 1024],
        "vectors": cute.struct.Align[cute.struct.MemRange[Float32, ROWS_OF_VECTOR * NUM_STAGES], 128],
    }
    storage = hopper.SmemAllocator().allocate(cute.struct(type("Storage", (), {"__annotations__": fields})))
    ring = Ring(storage.barriers.data_ptr(), NUM_STAGES)
    sX = storage.tiles.get_tensor(layout.outer, swizzle=layout.inner)
    sVector = storage.vectors.get_tensor(cute.make_layout((ROWS_OF_VECTOR, 1, NUM_STAGES)))
    if warp == 0:
        with cute.arch.elect_one():
            ring.init(2)
    cute.arch.mbarrier_init_fence()
    cute.arch.sync_threads()
    if warp == 0:
        load_blocks(atoms, coords, sX, sVector, ring)
    else:
        see_blocks(seen, sX, sVector, ring, thread - 32)


@cute.jit
def load_blocks(atoms: tuple, coords: tuple, sX: cute.Tensor, sVector: cute.Tensor, ring: Ring):
    tXsX, tXgX = tma.partition(atoms[0], sX, cute.local_tile(coords[0], (ROWS_OF_VECTOR, COLUMNS), (None, 0)))
    tsVector, tgVector = tma.partition(atoms[1], sVector, cute.local_tile(coords[1], (ROWS_OF_VECTOR, 1), (0, None)))
    state = ring.state(PRODUCER)
    for block in cutlass.range(NUM_VECTORS, unroll=1):
        num_bytes = 2 * ROWS_OF_VECTOR * COLUMNS + 4 * ROWS_OF_VECTOR
        tma.load(atoms[0], tXgX[None, block], tXsX, ring, state.index, state.phase, num_bytes)
        tma.load_beside(atoms[1], tgVector[None, block], tsVector, ring, state.index)
        state.advance()


@cute.jit
def see_blocks(
    seen: tuple[cute.Tensor, cute.Tensor], sX: cute.Tensor, sVector: cute.Tensor, ring: Ring, row: Int32
):
    tiles, vectors = seen
    state = ring.state(CONSUMER)
    for block in cutlass.range(NUM_VECTORS, unroll=1):
        ring.wait_full(state.index, state.phase)
        vectors[block * ROWS_OF_VECTOR + row] = sVector[row, 0, state.index]
        for column in cutlass.range(COLUMNS):
            tiles[block * ROWS_OF_VECTOR + row, column] = sX[row, column, state.index]
        cute.arch.sync_warp()  # SYNC: all lanes have read before one of them says so
        ring.release(state.index, row % 32)
        state.advance()


@cute.jit
def launch_vectors(
    x: cute.Tensor, vector: cute.Tensor, tiles: cute.Tensor, vectors: cute.Tensor, stream: cuda.CUstream
):
    layout = tile_layout(BFloat16, ROWS_OF_VECTOR, COLUMNS, NUM_STAGES)
    columns = cute.make_tensor(vector.iterator, cute.make_layout((ROWS_OF_VECTOR, NUM_VECTORS)))
    layout_of_vector = cute.make_layout((ROWS_OF_VECTOR, 1, NUM_STAGES))
    atom_x, coord_X = tma.load_atom(x, layout, (ROWS_OF_VECTOR, COLUMNS))
    atom_vector, coord_vector = tma.load_atom(columns, layout_of_vector, (ROWS_OF_VECTOR, 1))
    vectors_kernel((atom_x, atom_vector), (coord_X, coord_vector), (tiles, vectors), layout).launch(
        grid=(1, 1, 1), block=(96, 1, 1), stream=stream
    )


@pytest.fixture(scope="module")
def load_vectors(build):
    rows = NUM_VECTORS * ROWS_OF_VECTOR
    return build(launch_vectors, *[(BFloat16, (rows, COLUMNS)), (Float32, (rows,))] * 2)


def test_load_beside_compiles(load_vectors):
    assert callable(load_vectors), "for sm_90a"


@pytest.mark.gpu
@pytest.mark.timeout(120)
def test_a_vector_comes_with_its_tile(load_vectors):
    """One barrier counts the bytes of both; each stage is filled more than twice."""
    rows = NUM_VECTORS * ROWS_OF_VECTOR
    generator = torch.Generator().manual_seed(2)
    x, vector = torch.randn(rows, COLUMNS, generator=generator).bfloat16(), torch.randn(rows, generator=generator)
    vector[3], vector[70] = torch.inf, -torch.inf
    tiles, vectors = (torch.full_like(tensor, -7.0, device="cuda") for tensor in (x, vector))
    load_vectors(x.cuda(), vector.cuda(), tiles, vectors)
    assert torch.equal(tiles.cpu(), x), "tiles"
    assert torch.equal(vectors.cpu(), vector), "vectors"


NUM_CTAS, COUNT = 200, 512


@cute.kernel
def add_kernel(x: cute.Tensor, out: cute.Tensor):
    """Each CTA adds the halves of its row of x to a place of its own parity in out, as two groups."""
    thread, cta = cute.arch.thread_idx()[0], cute.arch.block_idx()[0]
    fields = {"values": cute.struct.Align[cute.struct.MemRange[Float32, COUNT], 128]}
    storage = hopper.SmemAllocator().allocate(cute.struct(type("Storage", (), {"__annotations__": fields})))
    values = storage.values.get_tensor(cute.make_layout(COUNT))
    for i in range(thread, COUNT, THREADS):
        values[i] = x[cta, i]
    cute.arch.fence_proxy("async.shared", space="cta")  # SYNC: stores before what the bulk additions read
    cute.arch.sync_threads()
    if thread == 0:
        place = out.iterator + (4 + cta % 2 * (COUNT + 4))
        for half in cutlass.range_constexpr(2):
            tma.add_vector(values.iterator + half * (COUNT // 2), place + half * (COUNT // 2), COUNT // 2)
        cute.arch.cp_async_bulk_wait_group(0, read=False)  # SYNC: the sums are in global memory


@cute.jit
def launch_add(x: cute.Tensor, out: cute.Tensor, stream: cuda.CUstream):
    add_kernel(x, out).launch(grid=(NUM_CTAS, 1, 1), block=(THREADS, 1, 1), stream=stream)


@pytest.fixture(scope="module")
def add_vectors(build):
    return build(launch_add, (Float32, (NUM_CTAS, COUNT)), (Float32, (2 * COUNT + 12,)))


def test_add_vector_compiles(add_vectors):
    assert callable(add_vectors), "for sm_90a"


@pytest.mark.gpu
@pytest.mark.timeout(120)
def test_ctas_add_to_one_place(add_vectors):
    """Sums of integers, which no order changes; what lies before, between and behind keeps its value."""
    generator = torch.Generator().manual_seed(3)
    shapes = (NUM_CTAS, COUNT), (2 * COUNT + 12,)
    x, start = (torch.randint(-1000, 1001, shape, generator=generator) for shape in shapes)
    out = start.float().cuda()
    add_vectors(x.float().cuda(), out)
    wanted = start.clone()
    wanted[4 : 4 + COUNT] += x[::2].sum(0)
    wanted[COUNT + 8 : 2 * COUNT + 8] += x[1::2].sum(0)
    assert torch.equal(out.cpu(), wanted.float()), "all CTAs, once each"
