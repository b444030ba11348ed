"""PostprocessKernel: dq from the fp32 accumulator, of the blocks that the main backward kernel left."""

import cuda.bindings.driver as cuda
import cutlass
from cutlass import Float32, Int32, cute
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream, make_fake_tensor

from cute_fa.core.hardware import WARPGROUP_THREADS
from cute_fa.device import mma
from cute_fa.kernels.backward import dq_rows
from cute_fa.kernels.backward.counters import Counters
from cute_fa.tuning.budget import BACKWARD_WARPGROUPS, CHUNK_VECTORS
from cute_fa.tuning.plan import PostprocessPlan, symbol


class PostprocessKernel:
    """One kernel for one plan; instances are compiled through `host/compile.py`.

    Bound by memory. A CTA has one block of queries, and nothing to do where the main kernel did it.
    """

    def __init__(self, plan: PostprocessPlan):
        self.plan = plan
        self.dtype = mma.DTYPES[plan.dtype]

    def fake_arguments(self):
        tile, size, stride = self.plan.tile, cute.sym_int32, cute.sym_int64
        shape, strides = (size(), tile.tile_m * tile.head_dim), (stride(divisibility=4), 1)
        accumulator = make_fake_tensor(Float32, shape, stride=strides, assumed_align=16)
        counters = make_fake_compact_tensor(Int32, (size(),), assumed_align=4)
        shape, strides = (size(), size(), size(), size()), (*(stride(divisibility=8) for _ in range(3)), 1)
        dq = make_fake_tensor(self.dtype, shape, stride=strides, assumed_align=16)
        return accumulator, counters, dq, Float32(1.0), Int32(1), make_fake_stream(use_tvm_ffi_env_stream=True)

    @cute.jit
    def __call__(
        self,
        accumulator: cute.Tensor,
        counters: cute.Tensor,
        dq: cute.Tensor,
        softmax_scale: Float32,
        num_ctas: Int32,
        stream: cuda.CUstream,
    ):
        """accumulator: (block, tile_m * head_dim), blocks as `BackwardSizes.first_block` numbers them. counters: as the main
        kernel with num_ctas CTAs left them. dq: (batch, seqlen_q, heads, head_dim), written."""
        self.kernel.set_name_prefix(symbol(self.plan), remove_cutlass_symbol=True, keep_mangled_name=False)
        books = Counters(counters, dq.shape[0] * dq.shape[2], num_ctas)
        self.kernel(accumulator, books, dq, softmax_scale).launch(
            grid=(accumulator.shape[0], 1, 1), block=(BACKWARD_WARPGROUPS * WARPGROUP_THREADS, 1, 1), stream=stream
        )

    @cute.kernel
    def kernel(self, accumulator: cute.Tensor, books: Counters, dq: cute.Tensor, softmax_scale: Float32):
        tile, chunks = self.plan.tile, dq_rows.num_chunks(self.plan.tile)
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        warp, lane = cute.arch.make_warp_uniform(thread % WARPGROUP_THREADS // 32), thread % 32
        warpgroup = cute.arch.make_warp_uniform(thread // WARPGROUP_THREADS)
        converter, rank = dq_rows.converter_of(block, books.num_ctas)
        num_done = books.chunks_done(converter).load() - rank * chunks
        chunks_of_warpgroup = chunks // BACKWARD_WARPGROUPS
        values = cute.make_rmem_tensor((4, CHUNK_VECTORS), Float32)
        for i in cutlass.range(chunks_of_warpgroup, unroll_full=True):
            chunk = warpgroup * chunks_of_warpgroup + i
            if chunk >= num_done:
                dq_rows.load_vectors(accumulator[block, None].iterator, values, chunk, 32 * warp + lane, tile)
                dq_rows.store_rows(values, softmax_scale, dq, block, chunk, warp, lane, tile)
