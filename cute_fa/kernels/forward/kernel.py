"""ForwardKernel: exact attention forward on sm_90a, O = softmax(scale Q K^T + mask) V and its lse."""

from functools import partial

import cuda.bindings.driver as cuda
import cutlass
from cutlass import Boolean, Float32, Int32, cute
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

from cute_fa.core.hardware import WARPGROUP_THREADS
from cute_fa.device import barriers, epilogue, hopper, mma, register, scheduler, softmax, tma, view
from cute_fa.device.order import heads_side_by_side
from cute_fa.device.pipeline import CONSUMER, Ring
from cute_fa.device.scheduler import TileSlots
from cute_fa.device.smem import tile_layout
from cute_fa.kernels.forward import mainloop
from cute_fa.kernels.forward.bundles import (
    Consumer,
    ForwardGmem,
    ForwardMmas,
    ForwardPipes,
    ForwardSizes,
    ForwardSmem,
    ForwardTma,
    Work,
)
from cute_fa.kernels.forward.producer import load_tiles
from cute_fa.tuning.budget import REGISTER_SPLITS, SMEM_ALIGNMENT
from cute_fa.tuning.plan import ForwardPlan, symbol

WARPS_PER_WARPGROUP = WARPGROUP_THREADS // 32


class ForwardKernel:
    """One kernel for one plan; instances are compiled through `host/compile.py`.

    Roles: warp 0 loads (24 or 32 registers), warps 1 to 3 leave, then 2 or 3 consumer warpgroups of 64 query rows each
    (240 or 160 registers). Persistent: one CTA an SM takes tiles of tile_m queries of one head until none is left.

    Edges, producer -> consumer:
        Q, K, V     load warp -> consumer warpgroups: TMA, rings of num_q_stages, num_kv_stages, num_kv_stages; a stage is
                    freed by all consumer warps
        tile        load warp -> consumer warpgroups: a place and ranges of keys, 4 slots; a slot is freed by all consumer
                    warps, with their word whether the tile is done, or has to be done once more, with care
        turn        warpgroup -> next warpgroup: issue products now (ping-pong, plan.has_turns)
        O           warpgroup -> its first warp: staged in shared memory, stored by TMA; or from registers
    Timeline of a consumer warpgroup, n blocks from right to left:
        QK(n-1) | softmax | QK(n-2), PV(n-1) with softmax(n-2) under it | ... | QK(0), PV(1) with softmax(0) | PV(0) | store
    Softmax takes no maxima where it can do without, and the end of the tile tells whether it could (`device/softmax.py`).
    Limits: shared memory of plan.tile.smem_bytes, one CTA an SM; head dims up to 256 in steps of 8; contiguous head_dim;
    fewer than 2^31 tiles.

    Source: Dao 2023 (FlashAttention-2) for the algorithm, Shah et al. 2024 (FlashAttention-3) for warp specialisation,
    ping-pong and the overlap inside a warpgroup.
    """

    def __init__(self, plan: ForwardPlan):
        self.plan = plan
        self.dtype = mma.DTYPES[plan.dtype]
        self.registers = REGISTER_SPLITS[plan.tile.num_consumer_warpgroups]

    def fake_arguments(self):
        """Arguments of `__call__` for the compiler: dtypes, ranks, and the alignment that TMA needs, checked at each call."""
        size, stride = cute.sym_int32, cute.sym_int64
        batch, seqlen_q, seqlen_k, heads_q, heads_kv, head_dim, head_dim_v = (size() for _ in range(7))

        def rows(*shape):
            strides = (*(stride(divisibility=8) for _ in range(3)), 1)
            return make_fake_tensor(self.dtype, shape, stride=strides, assumed_align=16)

        return (
            rows(batch, seqlen_q, heads_q, head_dim),
            rows(batch, seqlen_k, heads_kv, head_dim),
            rows(batch, seqlen_k, heads_kv, head_dim_v),
            rows(batch, seqlen_q, heads_q, head_dim_v),
            # Sizes of its own, because it may be empty.
            make_fake_tensor(Float32, (size(), size(), size()), stride=(stride(), stride(), 1), assumed_align=4),
            make_fake_tensor(Int32, (2,), stride=(1,), assumed_align=8),
            Float32(1.0),
            Int32(1),
            make_fake_stream(use_tvm_ffi_env_stream=True),
        )

    @cute.jit
    def __call__(
        self,
        q: cute.Tensor,
        k: cute.Tensor,
        v: cute.Tensor,
        out: cute.Tensor,
        lse: cute.Tensor,
        counter: cute.Tensor,
        softmax_scale: Float32,
        num_sms: Int32,
        stream: cuda.CUstream,
    ):
        """q, out: (batch, seqlen_q, heads_q, dim). k, v: (batch, seqlen_k, heads_kv, dim). lse: (batch, heads_q, seqlen_q),
        or empty where nobody asks for it. counter: two zeros, zero again when the launch is over; no other launch may use
        it meanwhile."""
        tile, num_warpgroups = self.plan.tile, self.plan.tile.num_consumer_warpgroups
        mQ, mK, mO = (view.rows_first(x) for x in (q, k, out))
        mVt = view.reordered(v, (3, 1, 2, 0))
        batch, seqlen_q, num_heads, _ = q.shape
        _, seqlen_k, heads_kv, _ = k.shape
        group = num_heads // heads_kv
        key_bytes = (tile.head_dim + tile.head_dim_v) * self.dtype.width // 8
        sizes = ForwardSizes(
            seqlen_q=seqlen_q,
            seqlen_k=seqlen_k,
            num_heads=num_heads,
            batch=batch,
            group=group,
            heads_per_section=heads_side_by_side(key_bytes, seqlen_k, num_heads, batch, group),
            scale_log2=softmax_scale * softmax.LOG2_E,
        )
        layouts = self._smem_layouts()
        atom_q, coord_Q = tma.load_atom(mQ, layouts[0], (tile.tile_m, tile.head_dim))
        atom_k, coord_K = tma.load_atom(mK, layouts[1], (tile.tile_n, tile.head_dim))
        atom_v, coord_Vt = tma.load_atom(mVt, layouts[2], (tile.head_dim_v, tile.tile_n))
        box = epilogue.box(tile.head_dim_v)
        box_layout = tile_layout(self.dtype, *box)
        atom_o, coord_O = tma.store_atom(mO, box_layout, box)
        scores = mma.scores_mma(self.dtype, num_warpgroups, tile.tile_n)
        half = mma.scores_mma(self.dtype, num_warpgroups, tile.tile_n // 2)
        values = mma.values_mma(self.dtype, num_warpgroups, tile.head_dim_v)
        self.kernel.set_name_prefix(symbol(self.plan), remove_cutlass_symbol=True, keep_mangled_name=False)
        self.kernel(
            ForwardTma(atom_q, atom_k, atom_v, atom_o),
            ForwardGmem(coord_Q, coord_K, coord_Vt, coord_O, mO, view.reordered(lse, (2, 1, 0)), counter),
            ForwardMmas(scores, scores, half, half, values),
            sizes,
            *layouts,
        ).launch(
            grid=(cutlass.min(num_sms, sizes.num_tiles(self.plan)), 1, 1),
            block=(WARPGROUP_THREADS * (num_warpgroups + 1), 1, 1),
            stream=stream,
            # Without it ptxas ignores setmaxnreg (C7508).
            min_blocks_per_mp=1,
            # The next launch sets up under the end of this one; see `load_tiles` for what waits.
            use_pdl=True,
        )

    @cute.kernel
    def kernel(
        self,
        atoms: ForwardTma,
        gmem: ForwardGmem,
        mmas: ForwardMmas,
        sizes: ForwardSizes,
        layout_Q: cute.ComposedLayout,
        layout_K: cute.ComposedLayout,
        layout_Vt: cute.ComposedLayout,
        layout_O: cute.ComposedLayout,
    ):
        thread, _, _ = cute.arch.thread_idx()
        warp, role = cute.arch.make_warp_uniform(thread // 32), cute.arch.make_warp_uniform(thread // WARPGROUP_THREADS)
        lane = thread % 32
        smem, pipes = self._allocate(layout_Q, layout_K, layout_Vt, layout_O)
        if warp == 0:
            for atom in (atoms.q, atoms.k, atoms.v, atoms.out):
                cute.nvgpu.cpasync.prefetch_descriptor(atom)
            with cute.arch.elect_one():
                for ring in (pipes.q, pipes.k, pipes.v, pipes.tiles):
                    ring.init(WARPS_PER_WARPGROUP * self.plan.tile.num_consumer_warpgroups)
        cute.arch.mbarrier_init_fence()  # SYNC: barriers before the copy engine arrives at them
        cute.arch.sync_threads()  # SYNC: barriers before anyone waits at them
        if role == 0:
            cute.arch.setmaxregister_decrease(self.registers.producer)
            if warp == 0:
                load_tiles(atoms, gmem, smem, pipes, sizes, lane, self.plan)
        else:
            cute.arch.setmaxregister_increase(self.registers.consumer)
            self.consume(atoms, gmem, mmas, smem, pipes, sizes, thread - WARPGROUP_THREADS, warp, lane)

    @cute.jit
    def consume(
        self,
        atoms: ForwardTma,
        gmem: ForwardGmem,
        mmas: ForwardMmas,
        smem: ForwardSmem,
        pipes: ForwardPipes,
        sizes: ForwardSizes,
        thread: Int32,
        warp: Int32,
        lane: Int32,
    ):
        """Run by every consumer warpgroup: its 64 rows of each tile, until the load warp posts none. thread: from 0."""
        tile, num_warpgroups = self.plan.tile, self.plan.tile.num_consumer_warpgroups
        warpgroup = cute.arch.make_warp_uniform(thread // WARPGROUP_THREADS)
        is_first_warp = warp % WARPS_PER_WARPGROUP == 0
        w = self._consumer(mmas, smem, pipes, sizes, warpgroup, lane)
        inverse = cute.make_rmem_tensor(2, Float32)
        band = sizes.band(self.plan, mma.ROWS_PER_WARPGROUP)
        row_in_tile = warpgroup * mma.ROWS_PER_WARPGROUP + (warp % WARPS_PER_WARPGROUP) * 16 + lane // 4
        q_state, k_state, slot = pipes.q.state(CONSUMER), pipes.k.state(CONSUMER), pipes.tiles.consumer_state()
        if cutlass.const_expr(self.plan.has_turns):
            if warpgroup == num_warpgroups - 1:
                barriers.pass_turn(Int32(0))
        work = Work(*pipes.tiles.fetch(slot, warpgroup))
        v_index, v_phase = k_state.index, k_state.phase  # V(j) has the index and phase that K(j) had
        while work.m_block >= 0:
            row = work.m_block * tile.tile_m + row_in_tile
            for _ in cutlass.range(work.num_skipped, unroll=1):
                mainloop.skip_step(w, (k_state.index, k_state.phase))
                k_state.advance()
            q_index, n_block = q_state.index, work.num_n_blocks - 1
            k, q = (k_state.index, k_state.phase), (q_index, q_state.phase)
            # A masked step rescales the total, and would hide what a quick first step made too large.
            has_care = work.has_care != 0 or work.num_fast < n_block
            mainloop.first_step(w, band, n_block, row, work.first, has_care, k, q)
            v_index, v_phase = k_state.index, k_state.phase
            k_state.advance()
            n_block -= 1
            while n_block >= work.num_fast:
                mainloop.masked_step(w, band, n_block, row, (k_state.index, k_state.phase), (v_index, v_phase), q_index)
                v_index, v_phase = k_state.index, k_state.phase
                k_state.advance()
                n_block -= 1
            while n_block >= 0:
                mainloop.unmasked_step(w, (k_state.index, k_state.phase), (v_index, v_phase), q_index)
                v_index, v_phase = k_state.index, k_state.phase
                k_state.advance()
                n_block -= 1
            pipes.q.release(q_index, lane)
            q_state.advance()
            pipes.v.wait_full(v_index, v_phase)
            mainloop.issue_values(w, v_index)
            done = work
            has_failed = done.has_care == 0 and softmax.is_out_of_range(w.total, w.reference, w.largest)
            scheduler.settle(pipes.tiles, slot.index, lane, cute.arch.vote_any_sync(has_failed))
            slot.advance()
            work = Work(*pipes.tiles.fetch(slot, warpgroup))
            for r in cutlass.range_constexpr(2):
                inverse[r], lse = softmax.normalizer(w.total[r], w.reference[r])
                _store_lse(gmem.lse, lse, row + 8 * r, done.head, done.batch_idx, lane)
            mma.wait(0)
            pipes.v.release(v_index, lane)
            if cutlass.const_expr(tile.has_o_staging):
                _wait_for_first_store(is_first_warp, done.has_care != 0)
                place = done.m_block, done.head, done.batch_idx
                epilogue.store_staged(
                    w.acc_O, inverse, mmas.values, thread, smem.sO, atoms.out, gmem.mO, place, warpgroup, is_first_warp
                )
            else:
                epilogue.store_direct(w.acc_O, inverse, gmem.out, (row, done.head, done.batch_idx), lane, self.dtype)
        if cutlass.const_expr(tile.has_o_staging):
            epilogue.wait_for_store(is_first_warp)

    def _consumer(self, mmas, smem, pipes, sizes, warpgroup, lane) -> Consumer:
        tile = self.plan.tile
        mma.accumulates(mmas.scores, False)
        mma.accumulates(mmas.scores_add, True)
        mma.accumulates(mmas.half, False)
        mma.accumulates(mmas.half_add, True)
        mma.accumulates(mmas.values, True)
        thread_S = mmas.scores.get_slice(warpgroup * WARPGROUP_THREADS)
        thread_O = mmas.values.get_slice(warpgroup * WARPGROUP_THREADS)
        thread_half = mmas.half.get_slice(warpgroup * WARPGROUP_THREADS)
        sK_half = cute.local_tile(smem.sK, (tile.tile_n // 2, tile.head_dim), (0, 0, None))
        acc_half = thread_half.make_fragment_C(thread_half.partition_shape_C((tile.tile_m, tile.tile_n // 2)))
        pair, scale_log2 = partial(cute.make_rmem_tensor, 2, Float32), softmax.nonzero(sizes.scale_log2)
        is_last = warpgroup + 1 == tile.num_consumer_warpgroups
        return Consumer(
            mmas=mmas,
            tSrQ=mmas.scores.make_fragment_A(thread_S.partition_A(smem.sQ)),
            tSrK=mmas.scores.make_fragment_B(thread_S.partition_B(smem.sK)),
            tOrVt=mmas.values.make_fragment_B(thread_O.partition_B(smem.sVt)),
            tOrP=thread_O.make_fragment_A(thread_O.partition_shape_A((tile.tile_m, tile.tile_n))),
            tSrK_half=mmas.half.make_fragment_B(thread_half.partition_B(sK_half)),
            half_layout=acc_half.layout,
            acc_S=thread_S.make_fragment_C(thread_S.partition_shape_C((tile.tile_m, tile.tile_n))),
            acc_O=thread_O.make_fragment_C(thread_O.partition_shape_C((tile.tile_m, tile.head_dim_v))),
            reference=pair(),
            total=pair(),
            factors=pair(),
            largest=pair() if self.dtype is cutlass.Float16 else None,
            pipes=pipes,
            scale_log2=scale_log2,
            hidden_score=softmax.hidden_score(scale_log2),
            lane=lane,
            warpgroup=warpgroup,
            next_warpgroup=register.select(is_last, Int32(0), warpgroup + 1),
            plan=self.plan,
        )

    def _smem_layouts(self):
        """Swizzled layouts of sQ, sK, sVt and sO, last mode the stage."""
        tile, dtype = self.plan.tile, self.dtype
        values = (tile.tile_m, tile.head_dim_v, tile.tile_n)
        return (
            tile_layout(dtype, tile.tile_m, tile.head_dim, tile.num_q_stages),
            tile_layout(dtype, tile.tile_n, tile.head_dim, tile.num_kv_stages),
            hopper.make_smem_layout_b(hopper.COL_MAJOR, values, dtype, tile.num_kv_stages),
            tile_layout(dtype, tile.tile_m, tile.head_dim_v),
        )

    def _allocate(self, layout_Q, layout_K, layout_Vt, layout_O):
        """Shared memory as `ForwardTile.smem_bytes` counts it, barriers first."""
        tile = self.plan.tile
        buffers = {"q": layout_Q, "k": layout_K, "v": layout_Vt, "o": layout_O}
        if not tile.has_o_staging:
            del buffers["o"]
        stages = {"q": tile.num_q_stages, "k": tile.num_kv_stages, "v": tile.num_kv_stages, "slots": scheduler.NUM_SLOTS}
        fields = {f"{name}_barriers": Ring.storage(count) for name, count in stages.items()}
        fields["slot_words"] = TileSlots.storage()
        for name, layout in buffers.items():
            fields[name] = cute.struct.Align[cute.struct.MemRange[self.dtype, cute.cosize(layout)], SMEM_ALIGNMENT]
        storage = hopper.SmemAllocator().allocate(cute.struct(type("ForwardStorage", (), {"__annotations__": fields})))
        tensors = {
            name: getattr(storage, name).get_tensor(layout.outer, swizzle=layout.inner) for name, layout in buffers.items()
        }
        ring = {name: getattr(storage, f"{name}_barriers").data_ptr() for name in stages}
        pipes = ForwardPipes(
            *(Ring(ring[name], stages[name]) for name in ("q", "k", "v")),
            TileSlots.at(storage.slot_words.data_ptr(), ring["slots"]),
        )
        sO = tensors["o"][None, None, 0] if tile.has_o_staging else None
        return ForwardSmem(tensors["q"], tensors["k"], tensors["v"], sO), pipes


@cute.jit
def _wait_for_first_store(is_first_warp: Boolean, has_care: Boolean):
    """SYNC: what was stored for a tile that failed is in memory before the tile is stored again."""
    if has_care:
        epilogue.wait_for_store(is_first_warp, is_read_enough=False)


@cute.jit
def _store_lse(lse: cute.Tensor, value: Float32, row: Int32, head: Int32, batch_idx: Int32, lane: Int32):
    """Of a row that four lanes share."""
    if lane % 4 == 0 and row < lse.shape[0]:
        lse[row, head, batch_idx] = value
