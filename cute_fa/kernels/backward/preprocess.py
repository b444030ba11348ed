"""PreprocessKernel: delta and LSE of all queries, as the main backward kernel reads them, and zeros for what it adds to."""

import cuda.bindings.driver as cuda
import cutlass
from cutlass import Float32, Int32, cute
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream, make_fake_tensor

from cute_fa.device import mma, softmax
from cute_fa.tuning.plan import PreprocessPlan, symbol

NUM_THREADS = 128
VECTOR = 8  # elements that a thread reads of a row, 16 bytes


class PreprocessKernel:
    """One kernel for one plan; instances are compiled through `host/compile.py`.

    Bound by memory: out and dout are read once. A row is read by a power of two of neighbouring lanes. Source: Dao 2023,
    algorithm 2, line 4: delta = rowsum(dO * O); a gradient of lse enters every dS like -delta, and is subtracted here.

    PERF: the accumulator of dQ is cleared on the way: 70 us for 16384 tokens, where a kernel of its own took 31 beside 42
    (H200, 2026-11-30, benchmarks/results/NOTES.md).
    """

    def __init__(self, plan: PreprocessPlan):
        self.plan = plan
        self.dtype = mma.DTYPES[plan.dtype]
        self.lanes_per_row = next(lanes for lanes in (8, 16, 32) if VECTOR * lanes >= plan.head_dim_v)

    def fake_arguments(self):
        size, stride = cute.sym_int32, cute.sym_int64
        batch, seqlen_q, heads, head_dim_v = (size() for _ in range(4))

        def rows():
            strides = (*(stride(divisibility=8) for _ in range(3)), 1)
            return make_fake_tensor(self.dtype, (batch, seqlen_q, heads, head_dim_v), stride=strides, assumed_align=16)

        def per_row():
            strides = stride(), stride(), stride()
            return make_fake_tensor(Float32, (batch, heads, seqlen_q), stride=strides, assumed_align=4)

        strides = stride(divisibility=4), stride(divisibility=4), 1
        statistics = make_fake_tensor(Float32, (size(), 2, size()), stride=strides, assumed_align=16)
        stream = make_fake_stream(use_tvm_ffi_env_stream=True)
        shape, strides = (size(), cute.sym_int32(divisibility=4)), (stride(divisibility=4), 1)
        accumulator = make_fake_tensor(Float32, shape, stride=strides, assumed_align=16)
        counters = make_fake_compact_tensor(Int32, (size(),), assumed_align=4)
        zeros = accumulator if self.plan.needs_dq else None, counters
        return rows(), rows(), per_row(), per_row(), Int32(0), statistics, zeros, stream

    @cute.jit
    def __call__(
        self,
        out: cute.Tensor,
        dout: cute.Tensor,
        lse: cute.Tensor,
        dlse: cute.Tensor,
        has_dlse: Int32,
        statistics: cute.Tensor,
        zeros: tuple,
        stream: cuda.CUstream,
    ):
        """out, dout: (batch, seqlen_q, heads, head_dim_v). lse, dlse: (batch, heads, seqlen_q); without has_dlse, dlse is not
        read. statistics: (block, 2, tile_m), written: LSE in units of log2, and delta; blocks as `BackwardSizes.first_block`
        numbers them. zeros: the main kernel's accumulator (block, numbers of a block), None where dq is not needed, and
        counters (words,), cleared.

        Rows without a key and padding have LSE = +inf, so that P = 0, and delta = 0."""
        self.kernel.set_name_prefix(symbol(self.plan), remove_cutlass_symbol=True, keep_mangled_name=False)
        rows_per_block = NUM_THREADS // self.lanes_per_row  # divides tile_m
        grid = (statistics.shape[0] * (statistics.shape[2] // rows_per_block), 1, 1)
        arguments = out, dout, lse, dlse, has_dlse, statistics, *zeros
        self.kernel(*arguments).launch(grid=grid, block=(NUM_THREADS, 1, 1), stream=stream)

    @cute.kernel
    def kernel(
        self,
        out: cute.Tensor,
        dout: cute.Tensor,
        lse: cute.Tensor,
        dlse: cute.Tensor,
        has_dlse: Int32,
        statistics: cute.Tensor,
        accumulator: cute.Tensor | None,
        counters: cute.Tensor,
    ):
        thread, _, _ = cute.arch.thread_idx()
        number, _, _ = cute.arch.block_idx()
        rows_per_block = NUM_THREADS // self.lanes_per_row
        tile_m = statistics.shape[2]
        parts = tile_m // rows_per_block
        block = number // parts
        row_of_block = (number - block * parts) * rows_per_block + thread // self.lanes_per_row
        num_m_blocks = cute.ceil_div(out.shape[1], tile_m)
        pair = block // num_m_blocks
        batch_idx = pair // out.shape[2]
        head, row = pair - batch_idx * out.shape[2], (block - pair * num_m_blocks) * tile_m + row_of_block
        lane = thread % self.lanes_per_row
        is_row = row < out.shape[1]
        rO, rdO = (cute.make_rmem_tensor(VECTOR, self.dtype) for _ in range(2))
        rO.fill(0.0)
        rdO.fill(0.0)
        if is_row and VECTOR * lane < out.shape[3]:
            for source, registers in ((out, rO), (dout, rdO)):
                vector = cute.local_tile(source[batch_idx, row, head, None], (VECTOR,), (lane,))
                cute.autovec_copy(vector, registers)
        if cutlass.const_expr(self.plan.needs_dq):
            clear(accumulator[block, None], number - block * parts, parts, thread)
        if number < cute.ceil_div(counters.shape[0], NUM_THREADS):  # else the next number might not fit into 32 bits
            word = number * NUM_THREADS + thread
            if word < counters.shape[0]:
                counters[word] = Int32(0)
        products = rO.load().to(Float32) * rdO.load().to(Float32)
        delta = products.reduce(cute.ReductionOp.ADD, Float32(0.0), 0)
        delta = cute.arch.warp_reduction_sum(delta, threads_in_group=self.lanes_per_row)
        if lane == 0:
            lse_log2 = Float32.inf
            has_key = cutlass.Boolean(False)
            if is_row:
                value = lse[batch_idx, head, row]
                if value != -Float32.inf:
                    lse_log2 = value * softmax.LOG2_E
                    has_key = cutlass.Boolean(True)
                if has_dlse != 0:
                    delta = delta - dlse[batch_idx, head, row]
            statistics[block, 0, row_of_block] = lse_log2
            statistics[block, 1, row_of_block] = delta if has_key else Float32(0.0)


@cute.jit
def clear(numbers: cute.Tensor, part: Int32, num_parts: Int32, thread: Int32):
    """Run by a CTA: zeros in one of num_parts equal parts of a vector whose parts are multiples of 4 numbers."""
    zero = cute.make_rmem_tensor(4, Float32)
    zero.fill(0.0)
    vectors = cute.size(numbers) // 4 // num_parts
    for i in cutlass.range(thread, vectors, NUM_THREADS, unroll=1):
        cute.autovec_copy(zero, cute.local_tile(numbers, (4,), (part * vectors + i,)))
