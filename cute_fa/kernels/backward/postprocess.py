"""PostprocessKernel: dq from the fp32 accumulator, of the blocks that the main backward kernel left."""

import cuda.bindings.driver as cuda
from cutlass import Float32, Int32, cute
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream, make_fake_tensor

from cute_fa.core.hardware import WARPGROUP_THREADS
from cute_fa.device import mma
from cute_fa.kernels.backward import dq_rows
from cute_fa.kernels.backward.counters import Counters
from cute_fa.tuning.budget import BACKWARD_WARPGROUPS
from cute_fa.tuning.plan import PostprocessPlan, symbol


class PostprocessKernel:
    """One kernel for one plan; instances are compiled through `host/compile.py`.

    Bound by memory. A CTA has one block of queries, and nothing to do where the main kernel took it.
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
        return accumulator, counters, dq, Int32(1), Float32(1.0), make_fake_stream(use_tvm_ffi_env_stream=True)

    @cute.jit
    def __call__(
        self,
        accumulator: cute.Tensor,
        counters: cute.Tensor,
        dq: cute.Tensor,
        unit: Int32,
        softmax_scale: Float32,
        stream: cuda.CUstream,
    ):
        """accumulator: (block, tile_m * head_dim), blocks as `BackwardSizes.first_block` numbers them. counters: as the main
        kernel left them, which took units of so many blocks. dq: (batch, seqlen_q, heads, head_dim), written."""
        self.kernel.set_name_prefix(symbol(self.plan), remove_cutlass_symbol=True, keep_mangled_name=False)
        books = Counters(counters, dq.shape[0] * dq.shape[2], cute.ceil_div(dq.shape[1], self.plan.tile.tile_m), unit)
        self.kernel(accumulator, books, dq, softmax_scale).launch(
            grid=(accumulator.shape[0], 1, 1), block=(BACKWARD_WARPGROUPS * WARPGROUP_THREADS, 1, 1), stream=stream
        )

    @cute.kernel
    def kernel(self, accumulator: cute.Tensor, books: Counters, dq: cute.Tensor, softmax_scale: Float32):
        tile = self.plan.tile
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        head, m_block, is_left = books.left_block(block)
        values = cute.make_rmem_tensor(dq_rows.registers(tile), Float32)
        dq_rows.load_if(is_left, accumulator, block, values, thread, tile)
        dq_rows.store_if(is_left, values, softmax_scale, dq, head, m_block, thread, tile)
