"""The mask of an accumulator against the definition: key by key for ints, and a whole matrix on a GPU."""

import cuda.bindings.driver as cuda
import cutlass
import pytest
import torch
from cutlass import BFloat16, Float32, Int32, cute

from cute_fa.device import mask, mma
from cute_fa.device.band import Band

TILE_M = 64  # of one warpgroup
M_BLOCKS, N_BLOCKS = 2, 3


def is_visible(query: int, key: int, seqlen_q: int, seqlen_k: int, right) -> bool:
    return 0 <= key < seqlen_k and (right is None or key <= query + seqlen_k - seqlen_q + right)


@pytest.mark.parametrize("right", [None, 0], ids=["full", "causal"])
@pytest.mark.parametrize(
    "seqlen_q, seqlen_k",
    [(64, 64), (64, 63), (63, 65), (1, 129), (100, 7), (20, 200)],
    ids=["square", "tail", "more-keys", "one-query", "fewer-keys", "many-keys"],
)
def test_key_ends_by_the_definition(seqlen_q, seqlen_k, right):
    """Column c of a thread's first key on is kept if and only if c is below its row's end."""
    band = Band(TILE_M, 32, seqlen_q, seqlen_k, right=right)
    for row in range(0, seqlen_q, 3):
        for first_key in range(0, seqlen_k, 5):
            ends = mask.key_ends(band, row, first_key)
            for r, end in enumerate(ends):
                kept = [end > column for column in range(32)]
                seen = [is_visible(row + 8 * r, first_key + c, seqlen_q, seqlen_k, right) for c in range(32)]
                assert kept == seen, f"row {row} + {8 * r}, from key {first_key}"


@cute.kernel
def mask_kernel(
    product: cute.TiledMma,
    x: cute.Tensor,
    out: cute.Tensor,
    seqlen_q: Int32,
    seqlen_k: Int32,
    tile_n: cutlass.Constexpr,
    right: cutlass.Constexpr,
):
    thread, (m_block, n_block, _) = cute.arch.thread_idx()[0], cute.arch.block_idx()
    lane, warp = thread % 32, thread // 32
    tile, block = (TILE_M, tile_n), (m_block, n_block)
    product_slice = product.get_slice(thread)
    tSgX, tSgOut = (product_slice.partition_C(cute.local_tile(tensor, tile, block)) for tensor in (x, out))
    acc_S = product_slice.make_fragment_C(product_slice.partition_shape_C(tile))
    for i in cutlass.range_constexpr(cute.size(acc_S)):
        acc_S[i] = tSgX[i]
    band = Band(TILE_M, tile_n, seqlen_q, seqlen_k, right=right)
    row = m_block * TILE_M + warp * 16 + lane // 4
    mask.mask_scores(acc_S, *mask.key_ends(band, row, n_block * tile_n + 2 * (lane % 4)))
    for i in cutlass.range_constexpr(cute.size(acc_S)):
        tSgOut[i] = acc_S[i]


@cute.jit
def launch_mask(
    x: cute.Tensor,
    out: cute.Tensor,
    seqlen_q: Int32,
    seqlen_k: Int32,
    tile_n: cutlass.Constexpr,
    right: cutlass.Constexpr,
    stream: cuda.CUstream,
):
    product = mma.scores_mma(BFloat16, 1, tile_n)
    mask_kernel(product, x, out, seqlen_q, seqlen_k, tile_n, right).launch(
        grid=(M_BLOCKS, N_BLOCKS, 1), block=(128, 1, 1), stream=stream
    )


@pytest.fixture(scope="module", params=[(80, None), (112, 0), (80, 0)], ids=["full-n80", "causal-n112", "causal-n80"])
def masked(build, request):
    """(function, tile_n, right): whole matrices of M_BLOCKS by N_BLOCKS tiles."""
    tile_n, right = request.param
    shape = (M_BLOCKS * TILE_M, N_BLOCKS * tile_n)
    return build(launch_mask, *[(Float32, shape)] * 2, Int32(1), Int32(1), tile_n, right), tile_n, right


def test_mask_scores_compiles(masked):
    assert callable(masked[0]), "for sm_90a"


@pytest.mark.gpu
@pytest.mark.timeout(120)
def test_mask_scores(masked):
    """In every thread of the accumulator; NaN where no key is visible does not survive."""
    function, tile_n, right = masked
    rows, columns = M_BLOCKS * TILE_M, N_BLOCKS * tile_n
    i, j = torch.arange(rows)[:, None], torch.arange(columns)
    for seqlen_q in (1, 40, TILE_M, TILE_M + 1, rows):
        for seqlen_k in (1, tile_n - 1, tile_n, tile_n + 1, 2 * tile_n + 3, columns):
            limit = seqlen_k if right is None else (i + seqlen_k - seqlen_q + right + 1).clamp(max=seqlen_k)
            visible = (j < limit).expand(rows, columns)
            x = torch.randn(rows, columns, generator=torch.Generator().manual_seed(0)).masked_fill(~visible, torch.nan)
            out = torch.zeros(rows, columns, device="cuda")
            function(x.cuda(), out, seqlen_q, seqlen_k)
            wanted = x.masked_fill(~visible, -torch.inf)
            assert torch.equal(out.cpu(), wanted), f"seqlens {seqlen_q} and {seqlen_k}"
