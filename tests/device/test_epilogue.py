"""The epilogue on a GPU: transposes inside quads, and stores that leave what lies around the output alone."""

import cuda.bindings.driver as cuda
import cutlass
import pytest
import torch
from cutlass import BFloat16, Float16, Float32, Int32, cute
from cutlass.cute.runtime import make_fake_tensor

from cute_fa.device import epilogue, mma

DTYPES = {"bf16": (BFloat16, torch.bfloat16), "fp16": (Float16, torch.float16)}
TILE_M = 64  # of one warpgroup
BATCH, HEADS, M_BLOCKS = 2, 3, 2


def test_box_is_a_swizzled_row_wide():
    """A swizzle of shared memory spans 128 or 64 bytes of a row; boxes divide the tile."""
    for num_columns, width in ((64, 64), (96, 32), (128, 64), (192, 64), (256, 64)):
        assert epilogue.box(num_columns) == (64, width), f"rows of a warpgroup and columns, of {num_columns}"


@cute.kernel
def transpose_kernel(x: cute.Tensor, out: cute.Tensor):
    lane = cute.arch.thread_idx()[0]
    lane_of_quad = lane % 4
    words = epilogue.transpose_quad([x[lane, y] for y in range(4)], lane_of_quad % 2 == 1, lane_of_quad >= 2)
    for y in cutlass.range_constexpr(4):
        out[lane, y] = words[y]


@cute.jit
def launch_transpose(x: cute.Tensor, out: cute.Tensor, stream: cuda.CUstream):
    transpose_kernel(x, out).launch(grid=(1, 1, 1), block=(32, 1, 1), stream=stream)


@pytest.fixture(scope="module")
def transpose(build):
    return build(launch_transpose, *[(Int32, (32, 4))] * 2)


def test_transpose_quad_compiles(transpose):
    assert callable(transpose), "for sm_90a"


@pytest.mark.gpu
@pytest.mark.timeout(120)
def test_transpose_quad(transpose):
    x = torch.arange(128, dtype=torch.int32).view(32, 4)
    out = torch.zeros(32, 4, dtype=torch.int32, device="cuda")
    transpose(x.cuda(), out)
    assert torch.equal(out.cpu().view(8, 4, 4), x.view(8, 4, 4).mT), "a 4x4 transpose in each of eight quads"


@cute.kernel
def store_kernel(
    product: cute.TiledMma,
    x: cute.Tensor,
    factor: cute.Tensor,
    out: cute.Tensor,
    tile_d: cutlass.Constexpr,
    dtype: cutlass.Constexpr,
):
    """x: (rows, columns, head, batch) of whole tiles, as out. factor: (rows,)."""
    thread, (m_block, head, batch_idx) = cute.arch.thread_idx()[0], cute.arch.block_idx()
    lane, warp = thread % 32, thread // 32
    tile = (TILE_M, tile_d)
    product_slice = product.get_slice(thread)
    tOgX = product_slice.partition_C(cute.local_tile(x, tile, (m_block, 0, head, batch_idx)))
    acc_O = product_slice.make_fragment_C(product_slice.partition_shape_C(tile))
    for i in cutlass.range(cute.size(acc_O), unroll_full=True):
        acc_O[i] = tOgX[i]
    row = m_block * TILE_M + warp * 16 + lane // 4
    factors = cute.make_rmem_tensor(2, Float32)
    factors[0], factors[1] = factor[row], factor[row + 8]
    epilogue.store_direct(acc_O, factors, out, (row, head, batch_idx), lane, dtype)


@cute.jit
def launch_store(
    x: cute.Tensor,
    factor: cute.Tensor,
    out: cute.Tensor,
    tile_d: cutlass.Constexpr,
    dtype: cutlass.Constexpr,
    stream: cuda.CUstream,
):
    """x: (batch, heads, rows, columns). out: (batch, rows, heads, columns)."""
    x_rows, out_rows = (
        cute.make_tensor(tensor.iterator, cute.select(tensor.layout, mode=modes))
        for tensor, modes in ((x, (2, 3, 1, 0)), (out, (1, 3, 2, 0)))
    )
    store_kernel(mma.values_mma(dtype, 1, tile_d), x_rows, factor, out_rows, tile_d, dtype).launch(
        grid=(M_BLOCKS, HEADS, BATCH), block=(128, 1, 1), stream=stream
    )


SIZES = {"d64-bf16": (64, "bf16"), "d96-fp16": (96, "fp16"), "d256-bf16": (256, "bf16")}


@pytest.fixture(scope="module", params=SIZES.values(), ids=SIZES)
def store(build, request):
    """(function, tile_d, torch dtype): M_BLOCKS tiles of every head, into an output of any size."""
    tile_d, name = request.param
    dtype, torch_dtype = DTYPES[name]
    rows, columns = cute.sym_int32(), cute.sym_int32()
    strides = (*(cute.sym_int64(divisibility=8) for _ in range(3)), 1)
    out = make_fake_tensor(dtype, (BATCH, rows, HEADS, columns), stride=strides, assumed_align=16)
    x, factor = (Float32, (BATCH, HEADS, M_BLOCKS * TILE_M, tile_d)), (Float32, (M_BLOCKS * TILE_M,))
    return build(launch_store, x, factor, out, tile_d, dtype), tile_d, torch_dtype


def test_store_direct_compiles(store):
    assert callable(store[0]), "for sm_90a"


@pytest.mark.gpu
@pytest.mark.timeout(120)
def test_store_direct(store):
    """Rows and columns behind the output's ends, and guard bands around all of it, keep what they hold."""
    function, tile_d, dtype = store
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(BATCH, HEADS, M_BLOCKS * TILE_M, tile_d, generator=generator)
    factor = torch.randn(M_BLOCKS * TILE_M, generator=generator)
    for rows in (1, 15, TILE_M, TILE_M + 9, M_BLOCKS * TILE_M):
        for columns in (8, tile_d - 24, tile_d - 8, tile_d):
            storage = torch.full((BATCH + 2, rows + 32, HEADS, columns + 32), -7.0, dtype=dtype, device="cuda")
            place = (slice(1, BATCH + 1), slice(16, rows + 16), slice(None), slice(16, columns + 16))
            function(x.cuda(), factor.cuda(), storage[place])
            wanted = torch.full_like(storage, -7.0, device="cpu")
            wanted[place] = (x * factor[:, None])[:, :, :rows, :columns].transpose(1, 2).to(dtype)
            assert torch.equal(storage.cpu(), wanted), f"{rows} rows, {columns} columns"
