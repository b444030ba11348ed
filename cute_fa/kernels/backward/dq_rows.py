"""dQ rows: blocks of queries from the fp32 accumulator to rows of 16 bits in global memory.

Two warps of each CTA of the main kernel, the converters, do it with complete heads while others compute; the kernel behind
does what they left. A chunk is what a warpgroup adds to a block with four vectors a thread, 8 KB.
"""

import cutlass
from cutlass import Float32, Int32, cute

from cute_fa.core.hardware import WARPGROUP_THREADS
from cute_fa.device import epilogue, register, semaphore, tma
from cute_fa.device.pipeline import has_passed
from cute_fa.kernels.backward.bundles import BackwardGmem, BackwardPipes, BackwardSizes, BackwardSmem, BackwardTma, dq_columns
from cute_fa.tuning.budget import BACKWARD_WARPGROUPS, CHUNK_BYTES, CHUNK_VECTORS, CONVERTERS, DqTile

_WARPS = WARPGROUP_THREADS // 32
_PAIRS = CHUNK_VECTORS // 2  # of vectors: TMA copies two at a time
PAIR_BOX = 256, 2 * WARPGROUP_THREADS * 4 // 256


def num_vectors(tile: DqTile) -> int:
    """Of 4 numbers, that a thread adds to a block."""
    return tile.tile_m * tile.head_dim // (4 * BACKWARD_WARPGROUPS * WARPGROUP_THREADS)


def num_chunks(tile: DqTile) -> int:
    """Of a block: the first warpgroup's, then the second one's."""
    return BACKWARD_WARPGROUPS * -(-num_vectors(tile) // CHUNK_VECTORS)


@cute.jit
def convert(
    atoms: BackwardTma,
    gmem: BackwardGmem,
    smem: BackwardSmem,
    pipes: BackwardPipes,
    sizes: BackwardSizes,
    number: Int32,
    lane: Int32,
    plan: cutlass.Constexpr,
):
    """Run by converter `number` of a CTA, a warp, until the CTA has no tile left. Blocks go round among all converters."""
    books, tile = sizes.counters(gmem.counters), plan.tile.dq
    cta, _, _ = cute.arch.block_idx()
    converter = CONVERTERS * cta + number
    num_m_blocks, num_tiles = cute.ceil_div(sizes.seqlen_q, tile.tile_m), cute.ceil_div(sizes.seqlen_k, plan.tile.tile_n)
    tAsA, tAgA = tma.partition(atoms.accumulator, smem.chunks, cute.local_tile(gmem.mAccumulator, PAIR_BOX, (0, None)))
    chunk_layout = cute.make_layout((4, WARPGROUP_THREADS, CHUNK_VECTORS))
    vectors = cute.make_tensor(smem.chunks.iterator + number * cute.size(chunk_layout), chunk_layout)
    values = cute.make_rmem_tensor((4, CHUNK_VECTORS), Float32)
    num_done, is_over = Int32(0), Int32(0)  # chunks; little else is kept in registers, which hold 16 numbers at a time
    block = converter
    while is_over == 0 and block < register.opaque(num_m_blocks) * books.num_heads:
        chunk = num_done % num_chunks(tile)
        if chunk == 0:
            head = block // register.opaque(num_m_blocks)
            while is_over == 0 and semaphore.read(books.tiles_done(head)) < num_tiles:
                cute.arch.inline_ptx("nanosleep.u32 4000;")
                is_over = has_passed(smem.is_over)
            cute.arch.fence_acq_rel_gpu()  # SYNC: what landed before the count
            cute.arch.fence_proxy("async")  # SYNC: is visible to TMA
        if is_over == 0:
            warpgroup, first = _place(chunk, tile)
            first_pair = (block * BACKWARD_WARPGROUPS + warpgroup) * (num_vectors(tile) // 2) + first // 2
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(pipes.chunks.full(number), CHUNK_BYTES)
            for pair in cutlass.range_constexpr(_PAIRS):
                source, target = tAgA[None, first_pair + pair], tAsA[None, _PAIRS * number + pair]
                cute.copy(atoms.accumulator, source, target, tma_bar_ptr=pipes.chunks.full(number))
            pipes.chunks.wait_full(number, num_done % 2)
            for warp in cutlass.range(_WARPS, unroll=1):
                lane_again = register.opaque(lane)
                cute.autovec_copy(vectors[None, 32 * warp + lane_again, None], values)
                store_rows(values, sizes.scale, gmem.dq, block, chunk, warp, lane_again, tile)
            cute.arch.sync_warp()  # SYNC: all lanes have read the chunk
            num_done += 1
            is_over = has_passed(smem.is_over)
        block = converter + num_done // num_chunks(tile) * CONVERTERS * books.num_ctas
    if lane == 0:
        books.chunks_done(converter).store(num_done)


def _place(chunk, tile: DqTile):
    """(warpgroup, first vector) of a chunk of a block."""
    chunks_of_warpgroup = num_chunks(tile) // BACKWARD_WARPGROUPS
    warpgroup = chunk // chunks_of_warpgroup
    return warpgroup, CHUNK_VECTORS * (chunk - warpgroup * chunks_of_warpgroup)


def converter_of(block, num_ctas) -> tuple[Int32, Int32]:
    """Who turns a block into rows, and as its how manieth."""
    rank = block // (CONVERTERS * num_ctas)
    return block - rank * CONVERTERS * num_ctas, rank


@cute.jit
def load_vectors(block: cute.Pointer, values: cute.Tensor, chunk: Int32, thread: Int32, tile: cutlass.Constexpr):
    """A thread's vectors of a chunk, thread: in the warpgroup. What is behind the warpgroup's last vector is no part of it."""
    warpgroup, first = _place(chunk, tile)
    layout = cute.make_layout((4, num_vectors(tile)), stride=(1, 4 * WARPGROUP_THREADS))
    source = cute.make_tensor(block + (warpgroup * num_vectors(tile) * WARPGROUP_THREADS + thread) * 4, layout)
    for y in cutlass.range_constexpr(CHUNK_VECTORS):
        cute.autovec_copy(source[None, cutlass.min(first + y, num_vectors(tile) - 1)], values[None, y])


@cute.jit
def store_rows(
    values: cute.Tensor,
    scale: Float32,
    dq: cute.Tensor,
    block: Int32,
    chunk: Int32,
    warp: Int32,
    lane: Int32,
    tile: cutlass.Constexpr,
):
    """Run by a warp: what a warp of the warpgroup added of a chunk, times scale, to dq (batch, seqlen_q, heads, head_dim).

    values: (4, CHUNK_VECTORS).
    """
    warpgroup, first = _place(chunk, tile)
    lane_of_quad, heads_of_batch = lane % 4, register.opaque(dq.shape[2])
    num_m_blocks = cute.ceil_div(register.opaque(dq.shape[1]), tile.tile_m)
    head = block // num_m_blocks  # counted through the batches
    batch_idx, m_block = head // heads_of_batch, block - head * num_m_blocks
    # Of the first of the lane's two stores, and how far the second one is.
    if cutlass.const_expr(tile.is_transposed):
        row, column = 8 * (first + lane_of_quad) + lane // 4, 64 * warpgroup + 16 * warp
        to_second = 0, 8
    else:
        is_wide = tile.tile_m == 128
        row = 16 * warp + lane // 4 + (64 * warpgroup if is_wide else 0)
        column = 8 * (first + lane_of_quad) + (0 if is_wide else dq_columns(tile) * warpgroup)
        to_second = 8, 0
    row += m_block * tile.tile_m
    for second in cutlass.range_constexpr(2):
        words = _words(values, scale, second, dq.element_type, tile)
        words = epilogue.transpose_quad(words, lane_of_quad % 2 == 1, lane_of_quad >= 2)
        row_of, column_of = row + second * to_second[0], column + second * to_second[1]
        is_inside = first + lane_of_quad < num_vectors(tile) and row_of < dq.shape[1] and column_of < dq.shape[3]
        index = cute.crd2idx((batch_idx, row_of, head - batch_idx * heads_of_batch, column_of), dq.layout)
        epilogue.store_16_bytes((dq.iterator + index).toint(), words, Int32(is_inside))


def _words(values, scale, second, dtype, tile):
    """Pairs of neighbours in a row, of one half of each vector."""
    i = 2 * second
    words = [register.pack_pair(values[i, y] * scale, values[i + 1, y] * scale, dtype) for y in range(CHUNK_VECTORS)]
    return [register.transpose_8x8(word) for word in words] if tile.is_transposed else words
