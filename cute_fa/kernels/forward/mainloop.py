"""Mainloop: a consumer warpgroup's walk over the key blocks of one tile, from right to left.

Every step but a tile's first issues S(j) = Q K(j) and behind it O += P(j + 1) V(j + 1), waits for S(j) alone, and runs
the softmax of S(j) under the second product. Masked and unmasked steps differ in their softmax (`device/softmax.py`).
"""

from functools import partial

import cutlass
from cutlass import Boolean, Float32, Int32, cute

from cute_fa.device import barriers, mask, mma, register, softmax
from cute_fa.device.band import Band
from cute_fa.kernels.forward.bundles import Consumer


def issue_scores(w: Consumer, k_index, q_index):
    """Leaves S = Q K in flight."""
    tSrK, tSrQ = w.tSrK[None, None, None, k_index], w.tSrQ[None, None, None, q_index]
    mma.issue(w.mmas.scores, w.mmas.scores_add, w.acc_S, tSrQ, tSrK)


def issue_values(w: Consumer, v_index):
    """Leaves O += P V in flight."""
    mma.issue(w.mmas.values, w.mmas.values, w.acc_O, w.tOrP, w.tOrVt[None, None, None, v_index])


def pack_probabilities(w: Consumer):
    register.pack(w.acc_S, w.tOrP, mma.DTYPES[w.plan.dtype])


def issue_both(w: Consumer, k, v, q_index):
    """S(j) and, behind it, O += P V(j + 1), in this warpgroup's turn; then waits for S(j) alone. k, v: (index, phase)."""
    w.pipes.k.wait_full(*k)
    if w.plan.has_turns:
        barriers.wait_for_turn(w.warpgroup)
    issue_scores(w, k[0], q_index)
    w.pipes.v.wait_full(*v)
    issue_values(w, v[0])
    if w.plan.has_turns:
        barriers.pass_turn(w.next_warpgroup)
    mma.wait(1)


def finish_values(w: Consumer, v_index, sums):
    """Waits for O += P V, below the exponentials that add up to `sums`, and frees V's stage. P may be overwritten then."""
    register.hold(sums, w.pipes.tiles.words.iterator)
    mma.wait(0)
    w.pipes.v.release(v_index, w.lane)


def first_step(w: Consumer, band: Band, n_block, row, num_unmasked, k, q):
    """A tile's first block, in which O is empty. k, q: (index, phase)."""
    w.pipes.q.wait_full(*q)
    w.pipes.k.wait_full(*k)
    issue_scores(w, k[0], q[0])
    w.acc_O.fill(0.0)
    mma.wait(0)
    w.pipes.k.release(k[0], w.lane)
    softmax.scale(w.acc_S, w.scale_log2)
    _mask_if(w.acc_S, num_unmasked <= n_block, *_key_ends(w, band, n_block, row))
    maxima = softmax.row_maxima(w.acc_S)
    for r in range(2):
        w.reference[r] = maxima[r]
        w.total[r] = softmax.exponentials(w.acc_S, r, softmax.finite(maxima[r]))
    pack_probabilities(w)


def masked_step(w: Consumer, band: Band, n_block, row, k, v, q_index):
    """A block with invisible keys: maxima, and a rescale where one has risen far."""
    issue_both(w, k, v, q_index)
    w.pipes.k.release(k[0], w.lane)
    softmax.scale(w.acc_S, w.scale_log2)
    mask.mask_scores(w.acc_S, *_key_ends(w, band, n_block, row))
    maxima = softmax.row_maxima(w.acc_S, w.reference)
    # A warp owns its rows, so it may decide alone; what it decides must not contain a wait, which is the warpgroup's.
    has_risen = cute.arch.vote_any_sync(softmax.has_risen(w.reference, maxima))
    _move_reference_if(has_risen, w.reference, w.total, w.factors, maxima[0], maxima[1])
    for r in range(2):
        w.total[r] = w.total[r] + softmax.exponentials(w.acc_S, r, softmax.finite(w.reference[r]))
    finish_values(w, v[0], w.total[0] + w.total[1])
    _rescale_if(has_risen, w.acc_O, w.factors)
    pack_probabilities(w)


def unmasked_step(w: Consumer, k, v, q_index):
    """A block that all rows see: no maxima.

    The wait for O stands half-way through the exponentials, where O is done, so that V's stage is freed early.
    """
    num_groups = cute.size(w.acc_S) // 4
    exponentials = partial(softmax.exponentials, w.acc_S, scale_log2=w.scale_log2)
    issue_both(w, k, v, q_index)
    for r in range(2):
        w.partial[r] = exponentials(r, w.reference[r], end=num_groups // 2)
    finish_values(w, v[0], w.partial[0] + w.partial[1])
    for r in range(2):
        w.partial[r] = w.partial[r] + exponentials(r, w.reference[r], begin=num_groups // 2)
    pack_probabilities(w)
    # No product is in flight here: ptxas serialises them where a branch contains another one (C7515).
    _repeat_if_out_of_range(w, w.acc_S, w.acc_O, w.tOrP, w.reference, w.total, w.factors, w.partial, k[0], q_index)
    w.pipes.k.release(k[0], w.lane)


def _key_ends(w: Consumer, band: Band, n_block, row):
    return mask.key_ends(band, row, n_block * band.tile_n + 2 * (w.lane % 4))


@cute.jit
def _mask_if(acc_S: cute.Tensor, is_needed: Boolean, end_0: Int32, end_1: Int32):
    if is_needed:
        mask.mask_scores(acc_S, end_0, end_1)


@cute.jit
def _move_reference_if(
    has_risen: Boolean, reference: cute.Tensor, total: cute.Tensor, factors: cute.Tensor, max_0: Float32, max_1: Float32
):
    if has_risen:
        softmax.move_reference(reference, total, factors, (max_0, max_1))


@cute.jit
def _rescale_if(has_risen: Boolean, acc_O: cute.Tensor, factors: cute.Tensor):
    if has_risen:
        softmax.rescale(acc_O, factors)


@cute.jit
def _repeat_if_out_of_range(
    w: Consumer,
    acc_S: cute.Tensor,
    acc_O: cute.Tensor,
    tOrP: cute.Tensor,
    reference: cute.Tensor,
    total: cute.Tensor,
    factors: cute.Tensor,
    partial: cute.Tensor,
    k_index: Int32,
    q_index: Int32,
):
    """Computes the block again, with maxima, for the whole warpgroup (products are the warpgroup's) if any thread asks.

    K's stage is still held. What the branch writes is an argument of its own, not reached through `w`.
    """
    is_bad = softmax.is_out_of_range(partial, mma.DTYPES[w.plan.dtype])
    if barriers.any_in_warpgroup(w.warpgroup, is_bad):
        issue_scores(w, k_index, q_index)
        mma.wait(0)
        softmax.scale(acc_S, w.scale_log2)
        softmax.move_reference(reference, total, factors, softmax.row_maxima(acc_S, reference))
        softmax.rescale(acc_O, factors)
        for r in cutlass.range_constexpr(2):
            partial[r] = softmax.exponentials(acc_S, r, softmax.finite(reference[r]))
        register.pack(acc_S, tOrP, mma.DTYPES[w.plan.dtype])
    for r in cutlass.range_constexpr(2):
        total[r] = total[r] + partial[r]
