"""dQ rows: blocks of queries from the fp32 accumulator to rows of 16 bits, by single warps that need few registers.

Warps of the main kernel turn blocks of complete heads into rows while others compute; the kernel behind does what they
left. They take a block in pieces: what a warp reads with four vectors a lane, of what one consumer warp adds to the block.
"""

import cutlass
from cutlass import Boolean, Float32, Int32, Int64, cute

from cute_fa.core.hardware import WARPGROUP_THREADS
from cute_fa.device import epilogue, register
from cute_fa.kernels.backward import counters
from cute_fa.kernels.backward.bundles import BackwardGmem, BackwardSizes, BackwardSmem, dq_columns, dq_fragment
from cute_fa.kernels.backward.counters import CONVERTERS, Counters
from cute_fa.tuning.budget import BACKWARD_WARPGROUPS, DqTile

WARPS = BACKWARD_WARPGROUPS * WARPGROUP_THREADS // 32  # of the consumers
_VECTORS = 4  # of 8 columns or rows each


def pieces_of_warp(tile: DqTile) -> int:
    vectors = tile.tile_m * tile.head_dim // (4 * BACKWARD_WARPGROUPS * WARPGROUP_THREADS)
    return -(-vectors // _VECTORS)


def converter_of(block, num_ctas) -> tuple[Int32, Int32]:
    """Who turns a block into rows, and as its how manieth. Blocks go round, so all have the same work."""
    rank = block // (CONVERTERS * num_ctas)
    return block - rank * CONVERTERS * num_ctas, rank


@cute.jit
def convert(gmem: BackwardGmem, smem: BackwardSmem, sizes: BackwardSizes, number: Int32, lane: Int32, plan: cutlass.Constexpr):
    """Run by converter `number` of a CTA, a warp, until the CTA has no tile left."""
    books, tile = sizes.counters(gmem.counters), plan.tile.dq
    cta, _, _ = cute.arch.block_idx()
    converter = CONVERTERS * cta + number
    num_m_blocks, num_tiles = cute.ceil_div(sizes.seqlen_q, tile.tile_m), cute.ceil_div(sizes.seqlen_k, plan.tile.tile_n)
    block, num_blocks, num_pieces = converter, num_m_blocks * books.num_heads, Int32(0)
    while block < num_blocks:
        head = block // register.opaque(num_m_blocks)
        is_over = _is_over(smem)
        while is_over == 0 and _is_incomplete(books, head, num_tiles):
            cute.arch.inline_ptx("nanosleep.u32 1000;")
            is_over = _is_over(smem)
        for piece in cutlass.range(WARPS * pieces_of_warp(tile), unroll=1):
            if is_over == 0:
                convert_piece(gmem.accumulator, gmem.dq, sizes.scale, block, head, piece, lane, tile)
                num_pieces += 1
                is_over = _is_over(smem)
        block = register.select(is_over == 0, block + CONVERTERS * books.num_ctas, num_blocks)
    if lane == 0:
        books.pieces_done(converter).store(num_pieces)


def _is_over(smem) -> Int32:
    flag = cute.arch.inline_ptx("ld.volatile.shared.b32 {$w0}, [{$r0}];", write_only_types=[Int32], read_only_args=[smem.is_over.toint()])
    return cute.arch.make_warp_uniform(flag)


def _is_incomplete(books: Counters, head, num_tiles) -> Boolean:
    return cute.arch.make_warp_uniform(counters.load(books.tiles_done(head))) < num_tiles


@cute.jit
def convert_piece(
    accumulator: cute.Tensor,
    dq: cute.Tensor,
    scale: Float32,
    block: Int32,
    head: Int32,
    piece: Int32,
    lane: Int32,
    tile: cutlass.Constexpr,
):
    """Run by a warp: a piece of a block, times scale, to global memory. head: that of the block, counted through the batches.

    Little is kept in registers from before the loads to behind them, where 16 numbers are on their way.
    """
    pieces = pieces_of_warp(tile)
    warp_of_all, chunk = piece // pieces, piece % pieces
    warpgroup, warp = warp_of_all // (WARPS // BACKWARD_WARPGROUPS), warp_of_all % (WARPS // BACKWARD_WARPGROUPS)
    source = dq_fragment(accumulator[Int64(block), None].iterator, warpgroup, 32 * warp + lane, tile)
    num_vectors = cute.size(source, mode=[1])
    vectors = _load_vectors(source, chunk)
    lane_of_quad, heads_of_batch = lane % 4, register.opaque(dq.shape[2])
    batch_idx, m_block = head // heads_of_batch, block - head * cute.ceil_div(dq.shape[1], tile.tile_m)
    # Of the first of the lane's two stores, and how far the second one is.
    if cutlass.const_expr(tile.is_transposed):
        row, column = 8 * (_VECTORS * chunk + lane_of_quad) + lane // 4, 64 * warpgroup + 16 * warp
        to_second = 0, 8
    else:
        is_wide = tile.tile_m == 128
        row = 16 * warp + lane // 4 + (64 * warpgroup if is_wide else 0)
        column = 8 * (_VECTORS * chunk + lane_of_quad) + (0 if is_wide else dq_columns(tile) * warpgroup)
        to_second = 8, 0
    row += m_block * tile.tile_m
    is_part = _VECTORS * chunk + lane_of_quad < num_vectors
    for second in cutlass.range_constexpr(2):
        words = [register.pack_pair(v[2 * second] * scale, v[2 * second + 1] * scale, dq.element_type) for v in vectors]
        if cutlass.const_expr(tile.is_transposed):
            words = [register.transpose_8x8(word) for word in words]
        words = epilogue.transpose_quad(words, lane_of_quad % 2 == 1, lane_of_quad >= 2)
        row_of, column_of = row + second * to_second[0], column + second * to_second[1]
        is_inside = is_part and row_of < dq.shape[1] and column_of < dq.shape[3]
        index = cute.crd2idx((batch_idx, row_of, head - batch_idx * heads_of_batch, column_of), dq.layout)
        epilogue.store_16_bytes((dq.iterator + index).toint(), words, Int32(is_inside))


def _load_vectors(source, chunk):
    vectors, num_vectors = [], cute.size(source, mode=[1])
    for y in range(_VECTORS):
        number = _VECTORS * chunk + y
        if num_vectors % _VECTORS:
            number = cutlass.min(number, num_vectors - 1)  # read again, not written
        vectors.append(_load_vector((source.iterator + source.stride[1] * number).toint()))
    return vectors


def _load_vector(address):
    return cute.arch.inline_ptx(
        "ld.relaxed.gpu.global.v4.f32 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];",
        write_only_types=[Float32] * 4,
        read_only_args=[address],
    )
