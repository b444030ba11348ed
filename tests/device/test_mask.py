"""The mask of an accumulator against the definition: pair by pair for its bounds, and a whole matrix on a GPU."""

import os

os.environ.setdefault("CUTE_DSL_ARCH", "sm_90a")  # the DSL reads it once, on import

import cuda.bindings.driver as cuda
import cutlass
import pytest
import torch
from cutlass import BFloat16, Float32, Int32, cute
from cutlass.cute.runtime import from_dlpack

from cute_fa.device import mask, mma
from cute_fa.device.band import Band

TILE_M = 64  # of one warpgroup
M_BLOCKS, N_BLOCKS = 2, 3


def is_visible(query: int, key: int, seqlen_q: int, seqlen_k: int, right) -> bool:
    return 0 <= key < seqlen_k and (right is None or key <= query + seqlen_k - seqlen_q + right)


by_right = pytest.mark.parametrize("right", [None, 0], ids=["full", "causal"])
LENGTHS = {
    "square": (64, 64),
    "tail": (64, 63),
    "more-keys": (63, 65),
    "one-query": (1, 129),
    "fewer-keys": (100, 7),
    "many-keys": (20, 200),
}


@by_right
@pytest.mark.parametrize("seqlen_q, seqlen_k", LENGTHS.values(), ids=LENGTHS)
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


@cute.jit
def write_begins(out: cute.Tensor, seqlen_q: Int32, seqlen_k: Int32, first_query: Int32, right: cutlass.Constexpr):
    """out: (key, 2)."""
    band = Band(32, TILE_M, seqlen_q, seqlen_k, right=right)
    for key in cutlass.range(out.shape[0]):
        out[key, 0], out[key, 1] = mask.query_begins(band, key, first_query)


@by_right
def test_query_begins_by_the_definition(right):
    """Column c of a thread's first query on is kept if and only if c is not below its row's begin, in the sequence.

    Keys behind the end are not kept for any query; queries behind the end are nobody's concern, their P is 0.
    """
    begins = torch.empty(2 * TILE_M, 2, dtype=torch.int32)
    tensor = from_dlpack(begins)
    write = cute.compile(write_begins, tensor, *map(Int32, (1, 1, 1)), right)
    for seqlen_q, seqlen_k in LENGTHS.values():
        for first_query in range(0, seqlen_q, 7):
            begins.fill_(-1)
            write(tensor, *map(Int32, (seqlen_q, seqlen_k, first_query)))
            columns = range(min(32, seqlen_q - first_query))
            for key, both in enumerate(begins.tolist()):
                for r, begin in enumerate(both):
                    kept = [begin <= column for column in columns]
                    seen = [is_visible(first_query + c, key + 8 * r, seqlen_q, seqlen_k, right) for c in columns]
                    case = f"seqlens {seqlen_q}, {seqlen_k}, key {key} + {8 * r}, from query {first_query}"
                    assert kept == seen, case
                    assert key + 8 * r < seqlen_k or begin >= 32, f"columns past the queries too; {case}"


@cute.kernel
def mask_kernel(
    product: cute.TiledMma,
    x: cute.Tensor,
    out: cute.Tensor,
    seqlen_q: Int32,
    seqlen_k: Int32,
    hidden: Float32,
    tile_n: cutlass.Constexpr,
    right: cutlass.Constexpr,
    has_hidden: cutlass.Constexpr,
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
    ends = mask.key_ends(band, row, n_block * tile_n + 2 * (lane % 4))
    mask.mask_scores(acc_S, *ends, *((hidden,) if has_hidden else ()))
    for i in cutlass.range_constexpr(cute.size(acc_S)):
        tSgOut[i] = acc_S[i]


@cute.jit
def launch_mask(
    x: cute.Tensor,
    out: cute.Tensor,
    seqlen_q: Int32,
    seqlen_k: Int32,
    hidden: Float32,
    tile_n: cutlass.Constexpr,
    right: cutlass.Constexpr,
    has_hidden: cutlass.Constexpr,
    stream: cuda.CUstream,
):
    product = mma.scores_mma(BFloat16, 1, tile_n)
    mask_kernel(product, x, out, seqlen_q, seqlen_k, hidden, tile_n, right, has_hidden).launch(
        grid=(M_BLOCKS, N_BLOCKS, 1), block=(128, 1, 1), stream=stream
    )


# tile_n, right, and whether the caller says what the invisible scores become
MASKED = {
    "full-n80": (80, None, False),
    "causal-n112": (112, 0, False),
    "causal-n80": (80, 0, False),
    "causal-n64-hidden": (64, 0, True),
}


@pytest.fixture(scope="module", params=MASKED.values(), ids=MASKED)
def masked(build, request):
    """(function, tile_n, right, has_hidden): whole matrices of M_BLOCKS by N_BLOCKS tiles."""
    tile_n, right, has_hidden = request.param
    shape = (M_BLOCKS * TILE_M, N_BLOCKS * tile_n)
    function = build(
        launch_mask, *[(Float32, shape)] * 2, Int32(1), Int32(1), Float32(0.0), tile_n, right, has_hidden
    )
    return function, *request.param


def test_mask_scores_compiles(masked):
    assert callable(masked[0]), "for sm_90a"


@pytest.mark.gpu
@pytest.mark.timeout(120)
def test_mask_scores(masked):
    """In every thread of the accumulator; NaN where no key is visible does not survive."""
    function, tile_n, right, has_hidden = masked
    rows, columns = M_BLOCKS * TILE_M, N_BLOCKS * tile_n
    i, j = torch.arange(rows)[:, None], torch.arange(columns)
    for seqlen_q in (1, 40, TILE_M, TILE_M + 1, rows):
        for seqlen_k in (1, tile_n - 1, tile_n, tile_n + 1, 2 * tile_n + 3, columns):
            limit = seqlen_k if right is None else (i + seqlen_k - seqlen_q + right + 1).clamp(max=seqlen_k)
            visible = (j < limit).expand(rows, columns)
            x = torch.randn(rows, columns, generator=torch.Generator().manual_seed(0)).masked_fill(~visible, torch.nan)
            out = torch.zeros(rows, columns, device="cuda")
            for hidden in (torch.inf, -torch.inf):
                function(x.cuda(), out, seqlen_q, seqlen_k, hidden)
                wanted = x.masked_fill(~visible, hidden if has_hidden else -torch.inf)
                assert torch.equal(out.cpu(), wanted), f"seqlens {seqlen_q} and {seqlen_k}, hidden {hidden}"


@cute.kernel
def transposed_kernel(
    product: cute.TiledMma,
    x: cute.Tensor,
    out: cute.Tensor,
    seqlens: tuple[Int32, Int32],
    tile: cutlass.Constexpr,
    right: cutlass.Constexpr,
    groups: cutlass.Constexpr,
):
    """x, out: (keys, queries). tile: (queries, keys). groups: begin and end of those that are masked."""
    thread, (n_block, m_block, _) = cute.arch.thread_idx()[0], cute.arch.block_idx()
    lane, warp = thread % 32, thread // 32
    tile_m, tile_n = tile
    product_slice = product.get_slice(thread)
    tSgX, tSgOut = (
        product_slice.partition_C(cute.local_tile(tensor, (tile_n, tile_m), (n_block, m_block))) for tensor in (x, out)
    )
    acc_St = product_slice.make_fragment_C(product_slice.partition_shape_C((tile_n, tile_m)))
    for i in cutlass.range(cute.size(acc_St), unroll_full=True):
        acc_St[i] = tSgX[i]
    band = Band(tile_m, tile_n, *seqlens, right=right)
    key = n_block * tile_n + warp * 16 + lane // 4
    mask.mask_scores_transposed(acc_St, *mask.query_begins(band, key, m_block * tile_m + 2 * (lane % 4)), *groups)
    for i in cutlass.range(cute.size(acc_St), unroll_full=True):
        tSgOut[i] = acc_St[i]


@cute.jit
def launch_transposed(
    x: cute.Tensor,
    out: cute.Tensor,
    seqlen_q: Int32,
    seqlen_k: Int32,
    tile_m: cutlass.Constexpr,
    right: cutlass.Constexpr,
    groups: cutlass.Constexpr,
    stream: cuda.CUstream,
):
    """Two warpgroups share the keys of a tile."""
    tile = tile_m, 2 * TILE_M
    product = mma.product(BFloat16, (2, 1), tile_m)
    transposed_kernel(product, x, out, (seqlen_q, seqlen_k), tile, right, groups).launch(
        grid=(M_BLOCKS, N_BLOCKS, 1), block=(256, 1, 1), stream=stream
    )


# queries of a tile, right, begin and end of the groups of 8 queries that are masked
TRANSPOSED = {
    "full-m64": (64, None, (0, 8)),
    "causal-m128": (128, 0, (0, 16)),
    "causal-m64-first-half": (64, 0, (0, 4)),
    "causal-m80-second-half": (80, 0, (6, 10)),
}


@pytest.fixture(scope="module", params=TRANSPOSED.values(), ids=TRANSPOSED)
def masked_transposed(build, request):
    """(function, tile_m, right, groups): whole matrices of M_BLOCKS tiles of keys by N_BLOCKS tiles of queries."""
    tile_m, right, groups = request.param
    shape = (M_BLOCKS * 2 * TILE_M, N_BLOCKS * tile_m)
    function = build(launch_transposed, *[(Float32, shape)] * 2, Int32(1), Int32(1), tile_m, right, groups)
    return function, tile_m, right, groups


def test_mask_scores_transposed_compiles(masked_transposed):
    assert callable(masked_transposed[0]), "for sm_90a"


@pytest.mark.gpu
@pytest.mark.timeout(120)
def test_mask_scores_transposed(masked_transposed):
    """In every thread of the accumulator; NaN does not survive, and columns of other groups stay as they are."""
    function, tile_m, right, (first_group, end_group) = masked_transposed
    keys, queries = M_BLOCKS * 2 * TILE_M, N_BLOCKS * tile_m
    j, i = torch.arange(keys)[:, None], torch.arange(queries)
    is_looked_at = (i % tile_m >= 8 * first_group) & (i % tile_m < 8 * end_group)
    for seqlen_q in (1, tile_m - 1, tile_m, tile_m + 1, queries):
        for seqlen_k in (1, 8, 2 * TILE_M - 1, 2 * TILE_M, 2 * TILE_M + 1, keys):
            visible = (j < seqlen_k) & (i < queries)
            if right is not None:
                visible = visible & (j <= i + seqlen_k - seqlen_q + right)
            lost = ~visible & is_looked_at
            x = torch.randn(keys, queries, generator=torch.Generator().manual_seed(0)).masked_fill(lost, torch.nan)
            out = torch.zeros(keys, queries, device="cuda")
            function(x.cuda(), out, seqlen_q, seqlen_k)
            assert torch.equal(out.cpu(), x.masked_fill(lost, -torch.inf)), f"seqlens {seqlen_q} and {seqlen_k}"
