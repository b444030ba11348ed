"""PostprocessKernel: dq from the fp32 accumulator that the main backward kernel leaves."""

import cuda.bindings.driver as cuda
import cutlass
from cutlass import Float32, cute
from cutlass.cute.nvgpu import warp
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

from cute_fa.core.hardware import WARPGROUP_THREADS
from cute_fa.device import hopper, mma, tma, view
from cute_fa.device.smem import tile_layout
from cute_fa.kernels.backward.bundles import dq_columns, dq_fragment, dq_product
from cute_fa.tuning.budget import BACKWARD_WARPGROUPS, SMEM_ALIGNMENT
from cute_fa.tuning.plan import PostprocessPlan, symbol


class PostprocessKernel:
    """One kernel for one plan; instances are compiled through `host/compile.py`.

    Bound by memory. A CTA of two warpgroups takes one block of queries: each thread reads the accumulator that a thread of
    the main kernel added, and rows leave through shared memory and TMA.
    """

    def __init__(self, plan: PostprocessPlan):
        self.plan = plan
        self.dtype = mma.DTYPES[plan.dtype]

    def fake_arguments(self):
        tile, size, stride = self.plan.tile, cute.sym_int32, cute.sym_int64
        shape, strides = (size(), tile.tile_m * tile.head_dim), (stride(divisibility=4), 1)
        accumulator = make_fake_tensor(Float32, shape, stride=strides, assumed_align=16)
        shape, strides = (size(), size(), size(), size()), (*(stride(divisibility=8) for _ in range(3)), 1)
        dq = make_fake_tensor(self.dtype, shape, stride=strides, assumed_align=16)
        return accumulator, dq, Float32(1.0), make_fake_stream(use_tvm_ffi_env_stream=True)

    @cute.jit
    def __call__(self, accumulator: cute.Tensor, dq: cute.Tensor, softmax_scale: Float32, stream: cuda.CUstream):
        """accumulator: (block, tile_m * head_dim), blocks as `BackwardSizes.first_block` numbers them. dq: (batch, seqlen_q,
        heads, head_dim), written."""
        tile = self.plan.tile
        layout = tile_layout(self.dtype, tile.tile_m, tile.head_dim, 1, dq_columns(tile))
        atom, mdQ = tma.store_atom(view.rows_first(dq), layout, (tile.tile_m, tile.head_dim))
        self.kernel.set_name_prefix(symbol(self.plan), remove_cutlass_symbol=True, keep_mangled_name=False)
        self.kernel(dq_product(self.dtype, tile), accumulator, atom, mdQ, softmax_scale, layout).launch(
            grid=(accumulator.shape[0], 1, 1), block=(BACKWARD_WARPGROUPS * WARPGROUP_THREADS, 1, 1), stream=stream
        )

    @cute.kernel
    def kernel(
        self,
        product: cute.TiledMma,
        accumulator: cute.Tensor,
        atom: cute.CopyAtom,
        mdQ: cute.Tensor,
        softmax_scale: Float32,
        layout: cute.ComposedLayout,
    ):
        tile = self.plan.tile
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        num_m_blocks, heads = cute.ceil_div(mdQ.shape[0], tile.tile_m), mdQ.shape[2]
        pair = block // num_m_blocks
        batch_idx = pair // heads
        m_block, head = block - pair * num_m_blocks, pair - batch_idx * heads
        fields = {"dq": cute.struct.Align[cute.struct.MemRange[self.dtype, cute.cosize(layout)], SMEM_ALIGNMENT]}
        storage = hopper.SmemAllocator().allocate(cute.struct(type("PostprocessStorage", (), {"__annotations__": fields})))
        sdQ = storage.dq.get_tensor(layout.outer, swizzle=layout.inner)
        thread_dQ = product.get_slice(thread)
        shape = (tile.head_dim, tile.tile_m) if tile.is_transposed else (tile.tile_m, tile.head_dim)
        acc = thread_dQ.make_fragment_C(thread_dQ.partition_shape_C(shape))
        warpgroup = thread // WARPGROUP_THREADS
        source = dq_fragment(accumulator[block, None].iterator, warpgroup, thread % WARPGROUP_THREADS, tile)
        cute.autovec_copy(source, cute.make_tensor(acc.iterator, cute.make_layout((4, cute.size(acc) // 4))))
        rows_16bit = cute.make_rmem_tensor_like(acc, self.dtype)
        rows_16bit.store((acc.load() * softmax_scale).to(self.dtype))
        to_smem = cute.make_tiled_copy_C(cute.make_copy_atom(warp.StMatrix8x8x16bOp(tile.is_transposed, 4), self.dtype), product)
        thread_copy = to_smem.get_slice(thread)
        target = view.transposed(sdQ) if cutlass.const_expr(tile.is_transposed) else sdQ
        cute.copy(to_smem, thread_copy.retile(rows_16bit), thread_copy.partition_D(target[None, None, 0]))
        cute.arch.fence_proxy("async.shared", space="cta")  # SYNC: stmatrix before what TMA reads
        cute.arch.sync_threads()  # SYNC: all warps have written
        if cute.arch.make_warp_uniform(thread // 32) == 0:
            tdQsdQ, tdQgdQ = tma.partition(atom, sdQ, view.row_tiles(mdQ, (tile.tile_m, tile.head_dim)))
            cute.copy(atom, tdQsdQ[None, 0], tdQgdQ[None, m_block, head, batch_idx])
            cute.arch.cp_async_bulk_commit_group()
            cute.arch.cp_async_bulk_wait_group(0, read=True)
