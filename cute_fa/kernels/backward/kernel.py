"""BackwardKernel: the main kernel of exact attention's gradients on sm_90a; dQ is left in fp32."""

import cuda.bindings.driver as cuda
import cutlass
from cutlass import Boolean, Float32, Int32, Int64, cute
from cutlass.cute.nvgpu import cpasync, warp
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream, make_fake_tensor

from cute_fa.core.hardware import WARPGROUP_THREADS
from cute_fa.device import barriers, epilogue, hopper, mma, register, softmax, tma, view
from cute_fa.device.pipeline import Ring
from cute_fa.device.smem import tile_layout
from cute_fa.kernels.backward import bundles, dq_rows, mainloop
from cute_fa.kernels.backward.bundles import (
    TURN_STAGES,
    BackwardGmem,
    BackwardMmas,
    BackwardPipes,
    BackwardSizes,
    BackwardSmem,
    BackwardTma,
    Consumer,
)
from cute_fa.kernels.backward.dq_writer import write_dq
from cute_fa.kernels.backward.mainloop import At
from cute_fa.kernels.backward.producer import load_tiles
from cute_fa.kernels.backward.tiles import NUM_SLOTS, TileSlots
from cute_fa.kernels.backward.turns import keep_turns
from cute_fa.tuning import schedule
from cute_fa.tuning.budget import (
    BACKWARD_STAGES,
    BACKWARD_WARPGROUPS,
    CHUNK_VECTORS,
    CONVERTERS,
    REGISTER_SPLITS,
    SMEM_ALIGNMENT,
)
from cute_fa.tuning.plan import BackwardPlan, symbol

WARPS_PER_WARPGROUP = WARPGROUP_THREADS // 32


class BackwardKernel:
    """One kernel for one plan; instances are compiled through `host/compile.py`.

    A tile is tile_n keys of one key-value head; K and V stay in shared memory, dK and dV in registers, while a CTA goes over
    the blocks of tile_m queries that see the keys, in all query heads of the group. In a persistent plan as many CTAs as
    there are SMs take one tile after another, else each has one. One step, for one block of queries:
        S^T = K Q^T    P^T = exp2(scale log2(e) S^T - LSE)    dV += P^T dO
        dP^T = V dO^T  dS^T = P^T (dP^T - delta)              dK += dS^T Q    dQ += dS K (in global memory)
    The schedule of the plan is the order of a step.

    Roles: warp 0 loads, warp 1 writes dQ, warps 2 and 3 turn complete dQ into rows in a persistent plan or keep turns in a
    deterministic one (24 registers), then 2 consumer warpgroups (240 registers). They share the keys, 64 each, and P and dS
    are operands from registers; or, for wide heads, they share the queries of S^T and the columns of dV, dK and dQ, and
    exchange P and dS through shared memory.

    Edges, producer -> consumer:
        tiles             load warp -> consumer warpgroups, dQ writer, keepers of turns: shared memory, a ring of NUM_SLOTS
        K, V              load warp -> consumer warpgroups: TMA, rings of one stage
        Q and LSE, dO and delta
                          load warp -> consumer warpgroups: TMA, two rings of BACKWARD_STAGES; all consumer warps free a stage
        dS (P)            consumer warpgroups -> each other: shared memory, BACKWARD_STAGES, one named barrier a step
        dQ                consumer warpgroup -> dQ writer: half of a staging buffer, fp32, two named barriers; or from registers
        complete dQ       dQ writers -> converters: counters in global memory
        turns, landings   keepers of turns <-> dQ writer, or consumers that add from registers: two rings of TURN_STAGES
        dK, dV            consumer warpgroups -> warp 4: through the buffers of dS and P, or of dQ, stored by TMA
    Limits: shared memory of plan.smem_bytes, one CTA an SM; head dims up to 256 in steps of 8; contiguous head_dim.

    What lies outside the sequences: TMA reads zeros; rows of queries have LSE = +inf, so P = 0; keys are masked.

    Delta comes from the 16-bit out, so where all of a row cancels, gradients keep an error of out's rounding.

    Source: Dao 2023 (FlashAttention-2), algorithm 2.
    """

    def __init__(self, plan: BackwardPlan):
        self.plan = plan
        self.dtype = mma.DTYPES[plan.dtype]
        self.registers = REGISTER_SPLITS[plan.tile.num_consumer_warpgroups]
        self.prologue, _ = schedule.steps(schedule.SHARED_PROLOGUE if plan.tile.has_p_in_smem else "")
        self.steps, left = schedule.steps(plan.schedule)
        assert not left, f"every product ends in its step, in flight behind it are {left}"

    @property
    def has_dk_in_dq(self) -> bool:
        """Whether the consumers take the staging buffer of dQ from the dQ writer for dK, and give it back."""
        return self.plan.has_dq_writer and self.plan.needs_dk and not self.plan.tile.has_room_for_both

    def fake_arguments(self):
        """Arguments of `__call__` for the compiler: dtypes, ranks, and the alignment that TMA needs, checked at each call."""
        plan, size, stride = self.plan, cute.sym_int32, cute.sym_int64
        batch, seqlen_q, seqlen_k, heads_q, heads_kv, head_dim, head_dim_v, num_blocks = (size() for _ in range(8))

        def rows(*shape):
            strides = (*(stride(divisibility=8) for _ in range(3)), 1)
            return make_fake_tensor(self.dtype, shape, stride=strides, assumed_align=16)

        def blocks(*shape):
            order = tuple(range(len(shape), -1, -1))
            return make_fake_compact_tensor(Float32, (num_blocks, *shape), stride_order=order, assumed_align=16)

        tile_m, q = plan.tile.tile_m, rows(batch, seqlen_q, heads_q, head_dim)
        k, v = rows(batch, seqlen_k, heads_kv, head_dim), rows(batch, seqlen_k, heads_kv, head_dim_v)
        return (
            (q, k, v),
            rows(batch, seqlen_q, heads_q, head_dim_v),
            blocks(2, tile_m),
            blocks(tile_m * plan.tile.head_dim) if plan.needs_dq else None,
            make_fake_compact_tensor(Int32, (size(),), assumed_align=4),
            tuple(rows(*x.shape) if needed else None for x, needed in zip((q, k, v), plan.needs)),
            Float32(1.0),
            Int32(1),
            make_fake_stream(use_tvm_ffi_env_stream=True),
        )

    @cute.jit
    def __call__(
        self,
        inputs: tuple,
        dout: cute.Tensor,
        statistics: cute.Tensor,
        accumulator: cute.Tensor | None,
        counters: cute.Tensor,
        gradients: tuple,
        softmax_scale: Float32,
        num_ctas: Int32,
        stream: cuda.CUstream,
    ):
        """inputs: q, k, v. gradients: dq, dk, dv. What the plan does not need is None.

        q, dout, dq: (batch, seqlen_q, heads_q, dim). k, v, dk, dv: (batch, seqlen_k, heads_kv, dim). statistics: (block, 2,
        tile_m), LSE and delta. accumulator: (block, tile_m * head_dim), zeros. counters: `BackwardPlan.num_counters` zeros.
        num_ctas: of a persistent grid. Blocks: `BackwardSizes.first_block`. What is not written of dq is left to the
        kernel behind."""
        plan, tile, (q, k, v), (dq, dk, dv) = self.plan, self.plan.tile, inputs, gradients
        sizes = BackwardSizes(
            seqlen_q=q.shape[1],
            seqlen_k=k.shape[1],
            num_heads=k.shape[2],
            batch=k.shape[0],
            group=q.shape[2] // k.shape[2],
            scale=softmax_scale,
            scale_log2=softmax_scale * softmax.LOG2_E,
            num_ctas=num_ctas,
        )
        layouts = self._smem_layouts()
        layout_K, layout_V, layout_Q, layout_dO, _ = layouts
        atom_q, mQ = tma.load_atom(view.rows_first(q), layout_Q, (tile.tile_m, tile.head_dim))
        atom_do, mdO = tma.load_atom(view.rows_first(dout), layout_dO, (tile.tile_m, tile.head_dim_v))
        atom_k, mK = tma.load_atom(view.rows_first(k), layout_K, (tile.tile_n, tile.head_dim))
        atom_v, mV = tma.load_atom(view.rows_first(v), layout_V, (tile.tile_n, tile.head_dim_v))
        rows = cute.make_layout((tile.tile_m, 2 * statistics.shape[0]), stride=(1, tile.tile_m))
        by_row = cute.make_tensor(statistics.iterator, rows)
        atom_statistics, mStatistics = tma.load_atom(by_row, self._statistics_layout(), (tile.tile_m, 1))
        atom_dk, mdK, atom_dv, mdV, atom_accumulator, mAccumulator = (None,) * 6
        if cutlass.const_expr(plan.has_converters):
            width = dq_rows.PAIR_BOX[0]
            rows = cute.make_layout((width, accumulator.shape[0] * (tile.tile_m * tile.head_dim // width)))
            by_row = cute.make_tensor(accumulator.iterator, rows)
            atom_accumulator, mAccumulator = tma.load_atom(by_row, self._chunks_layout(), dq_rows.PAIR_BOX)
        if cutlass.const_expr(plan.needs_dk):
            atom_dk, mdK = tma.store_atom(view.rows_first(dk), layout_K, (tile.tile_n, tile.head_dim))
        if cutlass.const_expr(plan.needs_dv):
            atom_dv, mdV = tma.store_atom(view.rows_first(dv), layout_V, (tile.tile_n, tile.head_dim_v))
        scores, dq_mma = bundles.scores_product(self.dtype, tile), bundles.dq_product(self.dtype, tile.dq)
        mmas = BackwardMmas(
            scores=scores,
            scores_add=scores,
            dv=bundles.values_product(self.dtype, tile, tile.head_dim_v),
            dk=bundles.values_product(self.dtype, tile, tile.head_dim),
            dq=dq_mma,
            dq_add=dq_mma,
        )
        self.kernel.set_name_prefix(symbol(plan), remove_cutlass_symbol=True, keep_mangled_name=False)
        self.kernel(
            BackwardTma(atom_q, atom_do, atom_k, atom_v, atom_statistics, atom_accumulator, atom_dk, atom_dv),
            BackwardGmem(mQ, mdO, mK, mV, mdK, mdV, mStatistics, accumulator, counters, dq, mAccumulator),
            mmas,
            sizes,
            *layouts,
        ).launch(
            grid=(num_ctas if cutlass.const_expr(plan.is_persistent) else sizes.num_tiles(plan), 1, 1),
            block=(WARPGROUP_THREADS * (BACKWARD_WARPGROUPS + 1), 1, 1),
            stream=stream,
            # Without it ptxas ignores setmaxnreg (C7508).
            min_blocks_per_mp=1,
        )

    @cute.kernel
    def kernel(
        self,
        atoms: BackwardTma,
        gmem: BackwardGmem,
        mmas: BackwardMmas,
        sizes: BackwardSizes,
        layout_K: cute.ComposedLayout,
        layout_V: cute.ComposedLayout,
        layout_Q: cute.ComposedLayout,
        layout_dO: cute.ComposedLayout,
        layout_dS: cute.ComposedLayout,
    ):
        plan = self.plan
        thread, _, _ = cute.arch.thread_idx()
        warp_idx, role = cute.arch.make_warp_uniform(thread // 32), cute.arch.make_warp_uniform(thread // WARPGROUP_THREADS)
        lane = thread % 32
        smem, pipes = self._allocate(layout_K, layout_V, layout_Q, layout_dO, layout_dS)
        if warp_idx == 0:
            for atom in (atoms.k, atoms.v, atoms.q, atoms.do, atoms.statistics):
                cpasync.prefetch_descriptor(atom)
            with cute.arch.elect_one():
                num_consumer_warps = WARPS_PER_WARPGROUP * BACKWARD_WARPGROUPS
                for ring in (pipes.q, pipes.do, pipes.k, pipes.v):
                    ring.init(num_consumer_warps)
                num_adders = 1 if plan.has_dq_writer else num_consumer_warps
                pipes.tiles.ring.init(num_consumer_warps + plan.has_dq_writer + 2 * plan.is_deterministic)
                pipes.chunks.init(1)
                pipes.turns.init(num_adders)
                pipes.landed.init(1, num_adders)
                cute.arch.mbarrier_init(smem.is_over, 1)
        cute.arch.mbarrier_init_fence()  # SYNC: barriers before the copy engine arrives at them
        cute.arch.sync_threads()  # SYNC: barriers before anyone waits at them
        if role == 0:
            cute.arch.setmaxregister_decrease(self.registers.producer)
            if warp_idx == 0:
                load_tiles(atoms, gmem, smem, pipes, sizes, lane, plan)
            if cutlass.const_expr(plan.has_dq_writer):
                if warp_idx == 1:
                    write_dq(gmem, smem, pipes, sizes, lane, plan)
            if cutlass.const_expr(plan.has_converters):
                if warp_idx >= 2:
                    dq_rows.convert(atoms, gmem, smem, pipes, sizes, warp_idx - 2, lane, plan)
            if cutlass.const_expr(plan.is_deterministic):
                if warp_idx == 2:
                    keep_turns(gmem, pipes, sizes, lane, False, plan)
                if warp_idx == 3:
                    keep_turns(gmem, pipes, sizes, lane, True, plan)
        else:
            cute.arch.setmaxregister_increase(self.registers.consumer)
            self.consume(atoms, gmem, mmas, smem, pipes, sizes, thread - WARPGROUP_THREADS, lane)

    @cute.jit
    def consume(
        self,
        atoms: BackwardTma,
        gmem: BackwardGmem,
        mmas: BackwardMmas,
        smem: BackwardSmem,
        pipes: BackwardPipes,
        sizes: BackwardSizes,
        thread: Int32,
        lane: Int32,
    ):
        """Run by every consumer warpgroup: all blocks of queries of a tile, then its dK and dV, tile after tile.

        thread: from 0."""
        plan = self.plan
        w = self._consumer(gmem, mmas, smem, pipes, sizes, thread, lane)
        is_first_warp = cute.arch.make_warp_uniform(thread // 32) == 0
        band, tile_number, number = sizes.band(plan), Int32(0), Int32(0)
        place = pipes.tiles.wait(tile_number)
        while place.n_block >= 0:
            w.acc_dK.fill(0.0)
            w.acc_dV.fill(0.0)
            pipes.k.wait_full(0, tile_number % 2)
            if cutlass.const_expr(plan.needs_ds):
                pipes.v.wait_full(0, tile_number % 2)
            epilogue.wait_for_store(is_first_warp)
            if cutlass.const_expr(self.has_dk_in_dq):
                _free_dq(is_first_warp and tile_number > 0)
            barriers.sync_consumers()  # SYNC: the last tile's dK and dV have been read, dS may be written
            first, last = number, number + sizes.group * (place.m_end - place.m_begin) - 1
            if cutlass.const_expr(len(self.prologue)):
                mainloop.run(w, self.prologue, At(number - 1, first, last, place, place.m_begin, Int32(0), None))
            for g in cutlass.range(sizes.group, unroll=1):
                first_block = sizes.first_block(place.head * sizes.group + g, place.batch_idx, plan)
                for m_block in cutlass.range(place.m_begin, place.m_unmasked, unroll=1):
                    mainloop.run(w, self.steps, At(number, first, last, place, m_block, first_block + m_block, band))
                    number += 1
                for m_block in cutlass.range(place.m_unmasked, place.m_end, unroll=1):
                    mainloop.run(w, self.steps, At(number, first, last, place, m_block, first_block + m_block, None))
                    number += 1
            pipes.k.release(0, lane)
            if cutlass.const_expr(plan.needs_ds):
                pipes.v.release(0, lane)
            self._store(atoms, w, pipes.tiles.read(tile_number), is_first_warp)
            if cutlass.const_expr(plan.is_deterministic and not plan.tile.has_dq_staging):
                mainloop.say_landed_if(number > first, pipes, number - 1, lane)
            pipes.tiles.release(tile_number, lane)
            tile_number += 1
            place = pipes.tiles.wait(tile_number)
        epilogue.wait_for_store(is_first_warp)

    @cute.jit
    def _store(self, atoms, w, place, is_first_warp):
        """dV and dK leave through buffers that nobody needs between two tiles, and not through those of K and V, which the next
        ones fill meanwhile; the stores are left in flight."""
        plan, tile, smem, gmem = self.plan, self.plan.tile, w.smem, w.gmem
        thread = register.opaque(w.thread)
        has_room = tile.has_room_for_both or tile.has_dq_staging
        if cutlass.const_expr(self.has_dk_in_dq):
            barriers.wait_buffer(barriers.BUFFER_FREE, w.warpgroup)
        if cutlass.const_expr(plan.needs_dk or plan.needs_dv):
            barriers.sync_consumers()  # SYNC: both warpgroups are done with dS and P, and may write to the buffer of dQ
        if cutlass.const_expr(plan.needs_dv):
            self._stage(w.mmas.dv, w.acc_dV, smem.sdV, thread)
            if cutlass.const_expr(plan.needs_dk and not has_room):
                self._store_staged(atoms.dv, smem.sdV, gmem.mdV, tile.head_dim_v, place, is_first_warp)
                epilogue.wait_for_store(is_first_warp)
                barriers.sync_consumers()  # SYNC: dV has been read
        if cutlass.const_expr(plan.needs_dk):
            for i in cutlass.range_constexpr(cute.size(w.acc_dK)):
                w.acc_dK[i] = w.acc_dK[i] * w.sizes.scale
            self._stage(w.mmas.dk, w.acc_dK, smem.sdK, thread)
            self._store_staged(atoms.dk, smem.sdK, gmem.mdK, tile.head_dim, place, is_first_warp)
        if cutlass.const_expr(plan.needs_dv and (has_room or not plan.needs_dk)):
            self._store_staged(atoms.dv, smem.sdV, gmem.mdV, tile.head_dim_v, place, is_first_warp)

    @cute.jit
    def _store_staged(self, atom, smem, mTensor, head_dim, place, is_first_warp):
        cute.arch.fence_proxy("async.shared", space="cta")  # SYNC: stmatrix before what TMA reads
        barriers.sync_consumers()  # SYNC: all warps have written
        if is_first_warp:
            source, target = tma.partition(atom, smem, view.row_tiles(mTensor, (self.plan.tile.tile_n, head_dim)))
            cute.copy(atom, source[None, 0], target[None, place.n_block, place.head, place.batch_idx])
            cute.arch.cp_async_bulk_commit_group()

    def _stage(self, tiled_mma, acc, smem, thread):
        rows_16bit = cute.make_rmem_tensor_like(acc, self.dtype)
        rows_16bit.store(acc.load().to(self.dtype))
        to_smem = cute.make_tiled_copy_C(cute.make_copy_atom(warp.StMatrix8x8x16bOp(False, 4), self.dtype), tiled_mma)
        thread_copy = to_smem.get_slice(thread)
        cute.copy(to_smem, thread_copy.retile(rows_16bit), thread_copy.partition_D(smem[None, None, 0]))

    def _consumer(self, gmem, mmas, smem, pipes, sizes, thread, lane) -> Consumer:
        tile, plan = self.plan.tile, self.plan
        for atom, value in ((mmas.scores, False), (mmas.scores_add, True), (mmas.dq, False), (mmas.dq_add, True)):
            mma.accumulates(atom, value)
        mma.accumulates(mmas.dv, True)
        mma.accumulates(mmas.dk, True)
        warpgroup = cute.arch.make_warp_uniform(thread // WARPGROUP_THREADS)
        thread_S, thread_dV, thread_dK, thread_dQ = (
            x.get_slice(warpgroup * WARPGROUP_THREADS) for x in (mmas.scores, mmas.dv, mmas.dk, mmas.dq)
        )
        acc_S, acc_dP = (thread_S.make_fragment_C(thread_S.partition_shape_C((tile.tile_n, tile.tile_m))) for _ in range(2))
        sKt, sdSt = view.transposed(smem.sK), view.transposed(smem.sdS)
        if tile.has_p_in_smem:
            rP, rdS = (cute.make_rmem_tensor_like(acc_S, self.dtype) for _ in range(2))
            tdVrP = mmas.dv.make_fragment_A(thread_dV.partition_A(smem.sP))
            tdKrdS = mmas.dk.make_fragment_A(thread_dK.partition_A(smem.sdS))
            dQ_operands = sdSt, sKt
        else:
            tdVrP = thread_dV.make_fragment_A(thread_dV.partition_shape_A((tile.tile_n, tile.tile_m)))
            tdKrdS = thread_dK.make_fragment_A(thread_dK.partition_shape_A((tile.tile_n, tile.tile_m)))
            # A 16-bit accumulator has the order of an A operand.
            rP, rdS = (cute.make_tensor(x.iterator, acc_S.layout) for x in (tdVrP, tdKrdS))
            dQ_operands = (sKt, smem.sdS) if tile.dq.is_transposed else (smem.sdS, sKt)
        dQ_shape = (tile.head_dim, tile.tile_m) if tile.dq.is_transposed else (tile.tile_m, tile.head_dim)
        warp_row = (thread // 32) % WARPS_PER_WARPGROUP * 16 + lane // 4
        # Of S^T, where a warpgroup has its own keys, or its own queries.
        row = warp_row if tile.has_p_in_smem else warpgroup * mma.ROWS_PER_WARPGROUP + warp_row
        num_columns = tile.tile_m // 2 if tile.has_p_in_smem else tile.tile_m
        column = 2 * (lane % 4) + (warpgroup * num_columns if tile.has_p_in_smem else 0)

        def statistics(x):
            layout = cute.make_layout((2, num_columns // 8, BACKWARD_STAGES), stride=(1, 8, tile.tile_m))
            return cute.make_tensor(x.iterator + column, layout)

        rLSE = cute.make_rmem_tensor((2, num_columns // 8), Float32)
        copy_dS = cute.make_tiled_copy_C(
            cute.make_copy_atom(warp.StMatrix8x8x16bOp(not tile.has_p_in_smem, 4), self.dtype), mmas.scores
        )
        thread_copy = copy_dS.get_slice(thread)
        return Consumer(
            mmas=mmas,
            tSrK=mmas.scores.make_fragment_A(thread_S.partition_A(smem.sK)),
            tSrQ=mmas.scores.make_fragment_B(thread_S.partition_B(smem.sQ)),
            tdPrV=mmas.scores.make_fragment_A(thread_S.partition_A(smem.sV)),
            tdPrdO=mmas.scores.make_fragment_B(thread_S.partition_B(smem.sdO)),
            tdVrP=tdVrP,
            tdVrdO=mmas.dv.make_fragment_B(thread_dV.partition_B(view.transposed(smem.sdO))),
            tdKrdS=tdKrdS,
            tdKrQ=mmas.dk.make_fragment_B(thread_dK.partition_B(view.transposed(smem.sQ))),
            tdQrA=mmas.dq.make_fragment_A(thread_dQ.partition_A(dQ_operands[0])),
            tdQrB=mmas.dq.make_fragment_B(thread_dQ.partition_B(dQ_operands[1])),
            acc_S=acc_S,
            acc_dP=acc_dP,
            acc_dQ=thread_dQ.make_fragment_C(thread_dQ.partition_shape_C(dQ_shape)),
            acc_dK=thread_dK.make_fragment_C(thread_dK.partition_shape_C((tile.tile_n, tile.head_dim))),
            acc_dV=thread_dV.make_fragment_C(thread_dV.partition_shape_C((tile.tile_n, tile.head_dim_v))),
            rP=rP,
            rdS=rdS,
            rLSE=rLSE,
            rDelta=cute.make_rmem_tensor((2, num_columns // 8), Float32) if tile.has_p_in_smem else rLSE,
            tLSE=statistics(smem.sLSE),
            tDelta=statistics(smem.sDelta),
            copy_dS=copy_dS,
            thread_dS=thread_copy,
            tsdS=thread_copy.partition_D(smem.sdS if tile.has_p_in_smem else sdSt),
            tsP=thread_copy.partition_D(smem.sP) if tile.has_p_in_smem else None,
            pipes=pipes,
            smem=smem,
            gmem=gmem,
            sizes=sizes,
            lane=lane,
            warpgroup=warpgroup,
            thread=thread,
            first_row=row,
            first_column=column,
            plan=plan,
        )

    def _smem_layouts(self):
        """Swizzled layouts of sK, sV, sQ, sdO and sdS, last mode the stage."""
        tile, dtype = self.plan.tile, self.dtype
        share = 2 if tile.has_p_in_smem else 1
        columns_K = min(bundles.dq_columns(tile.dq), tile.head_dim // share)
        ds_shape = (tile.tile_n, tile.tile_m) if tile.has_p_in_smem else (tile.tile_m, tile.tile_n)
        return (
            tile_layout(dtype, tile.tile_n, tile.head_dim, 1, columns_K),
            tile_layout(dtype, tile.tile_n, tile.head_dim_v, 1, tile.head_dim_v // share),
            tile_layout(dtype, tile.tile_m, tile.head_dim, BACKWARD_STAGES, tile.head_dim // share),
            tile_layout(dtype, tile.tile_m, tile.head_dim_v, BACKWARD_STAGES, tile.head_dim_v // share),
            tile_layout(dtype, *ds_shape, BACKWARD_STAGES),
        )

    def _statistics_layout(self):
        """Of sLSE and sDelta."""
        return cute.make_layout((self.plan.tile.tile_m, 1, BACKWARD_STAGES))

    def _chunks_layout(self):
        """Of what converters read: pairs of vectors."""
        return cute.make_layout((*dq_rows.PAIR_BOX, CONVERTERS * CHUNK_VECTORS // 2))

    def _allocate(self, layout_K, layout_V, layout_Q, layout_dO, layout_dS):
        """Shared memory as `BackwardTile.smem_bytes` counts it; buffers of tiles first, so that there are no gaps."""
        tile = self.plan.tile
        buffers = {"k": layout_K, "v": layout_V, "q": layout_Q, "do": layout_dO, "ds": layout_dS}
        if tile.has_p_in_smem:
            buffers["p"] = layout_dS
        stages = {"q": BACKWARD_STAGES, "do": BACKWARD_STAGES, "k": 1, "v": 1, "tiles": NUM_SLOTS}
        stages |= {"chunks": CONVERTERS, "turns": TURN_STAGES, "landed": TURN_STAGES}
        fields = {
            name: cute.struct.Align[cute.struct.MemRange[self.dtype, cute.cosize(layout)], SMEM_ALIGNMENT]
            for name, layout in buffers.items()
        }
        vectors = {"lse": tile.tile_m * BACKWARD_STAGES, "delta": tile.tile_m * BACKWARD_STAGES}
        if tile.has_dq_staging:
            vectors["dq"] = tile.tile_m * tile.head_dim
        if self.plan.has_converters:
            vectors["chunks"] = cute.size(self._chunks_layout())
        fields |= {name: cute.struct.Align[cute.struct.MemRange[Float32, count], 128] for name, count in vectors.items()}
        fields |= {f"{name}_barriers": Ring.storage(count) for name, count in stages.items()}
        fields["tiles"] = TileSlots.storage()
        fields["is_over"] = cute.struct.MemRange[Int64, 1]
        storage = hopper.SmemAllocator().allocate(cute.struct(type("BackwardStorage", (), {"__annotations__": fields})))
        tensors = {
            name: getattr(storage, name).get_tensor(layout.outer, swizzle=layout.inner) for name, layout in buffers.items()
        }
        sLSE, sDelta = (
            getattr(storage, name).get_tensor(self._statistics_layout()) for name in ("lse", "delta")
        )
        rings = {name: getattr(storage, f"{name}_barriers").data_ptr() for name in stages}
        pipes = BackwardPipes(
            *(Ring(rings[name], stages[name]) for name in ("q", "do", "k", "v")),
            TileSlots.at(storage.tiles.data_ptr(), rings["tiles"]),
            Ring(rings["chunks"], CONVERTERS),
            *(Ring(rings[name], TURN_STAGES) for name in ("turns", "landed")),
        )
        # dV in the place of dS; dK behind it, or in that of dQ, or in the same.
        place_of_dk = storage.ds.data_ptr() + (cute.cosize(layout_V) if tile.has_room_for_both else 0)
        if tile.has_dq_staging and not tile.has_room_for_both:
            place_of_dk = storage.dq.data_ptr()
        sdV, sdK = (
            cute.make_tensor(cute.recast_ptr(pointer, layout.inner, dtype=self.dtype), layout.outer)
            for pointer, layout in ((storage.ds.data_ptr(), layout_V), (place_of_dk, layout_K))
        )
        smem = BackwardSmem(
            tensors["k"],
            tensors["v"],
            tensors["q"],
            tensors["do"],
            sLSE,
            sDelta,
            tensors["ds"],
            tensors.get("p"),
            storage.dq.data_ptr() if tile.has_dq_staging else None,
            sdV,
            sdK,
            storage.chunks.get_tensor(self._chunks_layout()) if self.plan.has_converters else None,
            storage.is_over.data_ptr(),
        )
        return smem, pipes


@cute.jit
def _free_dq(condition: Boolean):
    """Run by every consumer warp: the first one, whose store has read the staging buffer, stands in for the dQ writer."""
    if condition:
        for warpgroup in cutlass.range_constexpr(BACKWARD_WARPGROUPS):
            barriers.pass_buffer(barriers.BUFFER_FREE, warpgroup)
