"""Mainloop: what the words of a schedule (`tuning/schedule.py`) do, in a consumer warpgroup, for one block of queries."""

from typing import NamedTuple

from cutlass import Boolean, Int32, Int64, cute

from cute_fa.core.hardware import WARPGROUP_THREADS
from cute_fa.device import barriers, mask, mma, register
from cute_fa.device.pipeline import arrive
from cute_fa.kernels.backward.bundles import BackwardPipes, Consumer, dq_fragment
from cute_fa.kernels.backward.tiles import Place
from cute_fa.tuning.budget import BACKWARD_STAGES
from cute_fa.tuning.schedule import Step


class At(NamedTuple):
    """Where a step is: its number among the CTA's steps, and those of the tile's first and last one; the tile; its block of
    queries, in its head and among all.

    band: of the masked steps, None where every query sees every key of the tile.
    """

    number: Int32
    first: Int32
    last: Int32
    place: Place
    m_block: Int32
    block: Int32
    band: object


def run(w: Consumer, steps: tuple[Step, ...], at: At):
    """Emits the steps in their order."""
    for step in steps:
        _WORDS[step.word](w, at, step)


def _ring(ring, number):
    """(index, phase) of the stage that holds step `number`."""
    return number % ring.num_stages, (number // ring.num_stages) % 2


def _issue_scores(w: Consumer, index):
    mma.issue(w.mmas.scores, w.mmas.scores_add, w.acc_S, w.tSrK[None, None, None, 0], w.tSrQ[None, None, None, index])


def _scores(w, at, step):
    index, phase = _ring(w.pipes.q, at.number)
    w.pipes.q.wait_full(index, phase)
    _issue_scores(w, index)


def _next_scores(w, at, step):
    """Behind the last step: of whatever the stage holds, and never read. A branch round a product would serialise it."""
    index, phase = _ring(w.pipes.q, at.number + 1)
    _wait_full_if(at.number < at.last, w.pipes.q.full(index), phase)
    _issue_scores(w, index)


@cute.jit
def _wait_full_if(condition: Boolean, barrier: cute.Pointer, phase: Int32):
    if condition:
        cute.arch.mbarrier_wait(barrier, phase)


def _dp(w, at, step):
    index, phase = _ring(w.pipes.do, at.number)
    w.pipes.do.wait_full(index, phase)
    mma.issue(w.mmas.scores, w.mmas.scores_add, w.acc_dP, w.tdPrV[None, None, None, 0], w.tdPrdO[None, None, None, index])


def _dv(w, at, step):
    index, phase = _ring(w.pipes.do, at.number)
    if not w.plan.needs_ds:
        w.pipes.do.wait_full(index, phase)
    mma.issue(w.mmas.dv, w.mmas.dv, w.acc_dV, _operand(w, w.tdVrP, at), w.tdVrdO[None, None, None, index], step.half)


def _dk(w, at, step):
    index, _ = _ring(w.pipes.q, at.number)
    mma.issue(w.mmas.dk, w.mmas.dk, w.acc_dK, _operand(w, w.tdKrdS, at), w.tdKrQ[None, None, None, index], step.half)


def _operand(w, fragment, at):
    """P or dS as operand: registers, or the stage of this step in shared memory."""
    return fragment[None, None, None, _ds_stage(at)] if w.plan.tile.has_p_in_smem else fragment


def _ds_stage(at):
    return at.number % BACKWARD_STAGES


def _dq(w, at, step):
    stage = _ds_stage(at)
    stages = (0, stage) if w.plan.tile.dq.is_transposed else (stage, 0)
    a, b = (fragment[None, None, None, index] for fragment, index in zip((w.tdQrA, w.tdQrB), stages))
    mma.issue(w.mmas.dq, w.mmas.dq_add, w.acc_dQ, a, b)


def _wait(w, at, step):
    mma.wait(step.num_in_flight)


def _load_lse(w, at, step):
    index, _ = _ring(w.pipes.q, at.number)
    cute.autovec_copy(w.tLSE[None, None, index], w.rLSE)


def _load_next_lse(w, at, step):
    index, _ = _ring(w.pipes.q, at.number + 1)
    cute.autovec_copy(w.tLSE[None, None, index], w.rLSE)


def _load_delta(w, at, step):
    index, _ = _ring(w.pipes.do, at.number)
    cute.autovec_copy(w.tDelta[None, None, index], w.rDelta)


def _groups(w, half):
    """The groups of 8 queries of S^T that a half has; halves end where an operand of 16 queries does."""
    count = cute.size(w.acc_S) // 4
    middle = (count // 2 + 1) // 2 * 2
    return {None: (0, count), 0: (0, middle), 1: (middle, count)}[half]


def _probabilities(w, at, step):
    begin, end = _groups(w, step.half)
    for group, i, column in _elements(begin, end):
        w.acc_S[i] = w.acc_S[i] * w.sizes.scale_log2 - w.rLSE[column, group]
    if at.band is not None:
        # Behind the scale, which may be negative or 0.
        first_key = at.place.n_block * w.plan.tile.tile_n + w.first_row
        first_query = at.m_block * w.plan.tile.tile_m + w.first_column
        mask.mask_scores_transposed(w.acc_S, *mask.query_begins(at.band, first_key, first_query), begin, end)
    for _, i, _ in _elements(begin, end):
        w.acc_S[i] = cute.math.exp2(w.acc_S[i], fastmath=True)
    register.pack(w.acc_S, w.rP, mma.DTYPES[w.plan.dtype], begin, end)


def _ds(w, at, step):
    begin, end = _groups(w, step.half)
    dtype = mma.DTYPES[w.plan.dtype]
    for group, i, column in _elements(begin, end):
        difference = w.acc_dP[i] - w.rDelta[column, group]
        w.acc_dP[i] = difference if w.plan.has_16bit_ds else w.acc_S[i] * difference
    register.pack(w.acc_dP, w.rdS, dtype, begin, end)
    if w.plan.has_16bit_ds:
        p, ds = register.words_of(w.rP), register.words_of(w.rdS)
        for i in range(2 * begin, 2 * end):
            ds[i] = register.multiply_pairs(p[i], ds[i], dtype)


def _elements(begin, end):
    """(group, index, column of the group) of the elements of a thread in groups begin to end."""
    return [(i // 4, i, i % 2) for i in range(4 * begin, 4 * end)]


def _store_p(w, at, step):
    cute.copy(w.copy_dS, w.thread_dS.retile(w.rP), w.tsP[None, None, None, _ds_stage(at)])


def _store_ds(w, at, step):
    cute.copy(w.copy_dS, w.thread_dS.retile(w.rdS), w.tsdS[None, None, None, _ds_stage(at)])


def _sync(w, at, step):
    """SYNC: P and dS are visible to the products of both warpgroups. What they overwrite next is that of the step before,
    whose products each warpgroup has waited for."""
    cute.arch.fence_proxy("async.shared", space="cta")
    barriers.sync_consumers()


def _store_dq(w, at, step):
    count = cute.size(w.acc_dQ)
    values = cute.make_tensor(w.acc_dQ.iterator, cute.make_layout((4, count // 4)))
    thread = w.thread % WARPGROUP_THREADS
    if w.plan.tile.has_dq_staging:
        barriers.wait_buffer(barriers.BUFFER_FREE, w.warpgroup)
        cute.autovec_copy(values, dq_fragment(w.smem.dq, w.warpgroup, thread, w.plan.tile.dq))
        cute.arch.fence_proxy("async.shared", space="cta")  # SYNC: stores before what the bulk addition reads
        barriers.pass_buffer(barriers.BUFFER_FULL, w.warpgroup)
        return
    if w.plan.is_deterministic:
        turn = _ring(w.pipes.turns, at.number)
        w.pipes.turns.wait_full(*turn)
        w.pipes.turns.release(turn[0], w.lane)
    target = dq_fragment(w.gmem.accumulator[Int64(at.block), None].iterator, w.warpgroup, thread, w.plan.tile.dq)
    base = target.iterator.toint()
    for vector in range(count // 4):
        cute.arch.inline_ptx(
            "red.relaxed.gpu.global.add.v4.f32 [{$r0} + %d], {{$r1}, {$r2}, {$r3}, {$r4}};" % (4 * target.layout((0, vector))),
            read_only_args=[base] + [values[i, vector] for i in range(4)],
        )


def _landed(w, at, step):
    say_landed_if(at.number > at.first, w.pipes, at.number - 1, w.lane)


@cute.jit
def say_landed_if(condition: Boolean, pipes: BackwardPipes, number: Int32, lane: Int32):
    if condition:
        _say_landed(pipes, number, lane)


def _say_landed(pipes: BackwardPipes, number, lane):
    """What the consumer warp added from registers in step `number` has landed.

    PERF: said in the next step, while products run, and not before its additions: 3% less time with head_dim 256
    (H200, 2026-11-30, benchmarks/results/NOTES.md).
    """
    index, phase = _ring(pipes.landed, number)
    cute.arch.fence_acq_rel_gpu()  # SYNC: this thread's additions before the count
    pipes.landed.wait_empty(index, phase ^ 1)
    cute.arch.sync_warp()
    arrive(pipes.landed.full(index), lane)


def _free_q(w, at, step):
    w.pipes.q.release(_ring(w.pipes.q, at.number)[0], w.lane)


def _free_do(w, at, step):
    w.pipes.do.release(_ring(w.pipes.do, at.number)[0], w.lane)


_WORDS = {
    "S": _scores,
    "next_S": _next_scores,
    "dP": _dp,
    "dV": _dv,
    "dQ": _dq,
    "dK": _dk,
    "wait": _wait,
    "lse": _load_lse,
    "next_lse": _load_next_lse,
    "delta": _load_delta,
    "P": _probabilities,
    "dS": _ds,
    "store_P": _store_p,
    "store_dS": _store_ds,
    "sync": _sync,
    "store_dQ": _store_dq,
    "landed": _landed,
    "free_Q": _free_q,
    "free_dO": _free_do,
}
