"""dQ rows: blocks of queries from the fp32 accumulator to rows of 16 bits in global memory.

The main kernel turns blocks of complete heads into rows between two tiles, while the next K and V arrive; the kernel
behind it does what it left. A warp has the part of a block that one consumer warp adds.
"""

import cutlass
from cutlass import Float32, Int32, Int64, cute

from cute_fa.core.hardware import WARPGROUP_THREADS
from cute_fa.device import epilogue, register
from cute_fa.kernels.backward.bundles import dq_columns, dq_fragment
from cute_fa.tuning.budget import BACKWARD_WARPGROUPS, DqTile

_CHUNK = 4  # vectors, which are stored together


def registers(tile: DqTile) -> int:
    """Of a thread, for its part of a block."""
    return tile.tile_m * tile.head_dim // (BACKWARD_WARPGROUPS * WARPGROUP_THREADS)


@cute.jit
def load_if(
    condition: cutlass.Boolean, accumulator: cute.Tensor, block: Int32, values: cute.Tensor, thread: Int32, tile: cutlass.Constexpr
):
    """Leaves the loads of a thread's part in flight. SYNC: of what others added, past no cache of the SM."""
    if condition:
        warpgroup, thread_of_warpgroup = thread // WARPGROUP_THREADS, thread % WARPGROUP_THREADS
        source = dq_fragment(accumulator[Int64(block), None].iterator, warpgroup, thread_of_warpgroup, tile)
        base = source.iterator.toint()
        for vector in cutlass.range_constexpr(cute.size(source, mode=[1])):
            found = cute.arch.inline_ptx(
                "ld.relaxed.gpu.global.v4.f32 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0} + %d];" % (4 * source.layout((0, vector))),
                write_only_types=[Float32] * 4,
                read_only_args=[base],
            )
            for i in cutlass.range_constexpr(4):
                values[4 * vector + i] = found[i]


@cute.jit
def store_if(
    condition: cutlass.Boolean,
    values: cute.Tensor,
    scale: Float32,
    dq: cute.Tensor,
    head: Int32,
    m_block: Int32,
    thread: Int32,
    tile: cutlass.Constexpr,
):
    """A thread's part, times scale, to dq (batch, seqlen_q, heads, head_dim). head: counted through the batches."""
    if condition:
        lane, warp, warpgroup = thread % 32, thread % WARPGROUP_THREADS // 32, thread // WARPGROUP_THREADS
        lane_of_quad, batch_idx = lane % 4, head // dq.shape[2]
        is_wide = tile.tile_m == 128
        # Of the first of the lane's two stores of a chunk; from one to the other; and from chunk to chunk.
        if cutlass.const_expr(tile.is_transposed):
            row, column = 8 * lane_of_quad + lane // 4, 64 * warpgroup + 16 * warp
            by_second, by_chunk = (0, 8), (8 * _CHUNK, 0)
        else:
            row = 16 * warp + lane // 4 + (64 * warpgroup if is_wide else 0)
            column = 8 * lane_of_quad + (0 if is_wide else dq_columns(tile) * warpgroup)
            by_second, by_chunk = (8, 0), (0, 8 * _CHUNK)
        row += m_block * tile.tile_m
        num_vectors = registers(tile) // 4
        for chunk in cutlass.range_constexpr(-(-num_vectors // _CHUNK)):
            for second in cutlass.range_constexpr(2):
                words = _words(values, scale, chunk, second, dq.element_type, tile)
                words = epilogue.transpose_quad(words, lane_of_quad % 2 == 1, lane_of_quad >= 2)
                row_of, column_of = (
                    first + second * a + chunk * b for first, a, b in zip((row, column), by_second, by_chunk)
                )
                is_inside = row_of < dq.shape[1] and column_of < dq.shape[3] and _CHUNK * chunk + lane_of_quad < num_vectors
                index = cute.crd2idx((batch_idx, row_of, head - batch_idx * dq.shape[2], column_of), dq.layout)
                epilogue.store_16_bytes((dq.iterator + index).toint(), words, Int32(is_inside))


def _words(values, scale, chunk, second, dtype, tile):
    """Pairs of neighbours, in columns of rows, of one half of the vectors of a chunk; a vector that is none gives a zero."""
    words = []
    for vector in range(_CHUNK * chunk, _CHUNK * (chunk + 1)):
        i = 4 * vector + 2 * second
        word = register.pack_pair(values[i] * scale, values[i + 1] * scale, dtype) if i < registers(tile) else Int32(0)
        words.append(register.transpose_8x8(word) if tile.is_transposed else word)
    return words
