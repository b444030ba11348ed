"""Mainloop: a consumer warpgroup's walk over the key blocks of one tile, from right to left.

Every step but a tile's first issues S(j) = Q K(j) and behind it O += P(j + 1) V(j + 1), waits for S(j) alone, and runs
the softmax of S(j) under the second product. Masked and unmasked steps differ in their softmax (`device/softmax.py`):
in a tile that is done once more, with care, all steps are masked ones.
"""

from functools import partial

import cutlass
from cutlass import Boolean, Float32, Int32, cute

from cute_fa.device import barriers, mask, mma, register, softmax
from cute_fa.device.band import Band
from cute_fa.kernels.forward.bundles import LEFT_HALF, WHOLE, Consumer

# Of 8 columns, from the left: of which the first block of a try takes maxima. All columns would take as long as the
# exponentials; but fp16 has room for little that comes behind, and takes all (None).
FIRST_GROUPS = {cutlass.BFloat16: 2, cutlass.Float16: None}


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


def finish_values(w: Consumer, v_index):
    """Waits for O += P V, below the exponentials in the totals, and frees V's stage. P may be overwritten then."""
    register.hold(w.total[0] + w.total[1], w.pipes.tiles.words.iterator)
    mma.wait(0)
    w.pipes.v.release(v_index, w.lane)


def first_step(w: Consumer, band: Band, n_block, row, first, has_care, k, q):
    """A tile's first block, in which O is empty. first: WHOLE, MASKED or LEFT_HALF. k, q: (index, phase)."""
    w.pipes.q.wait_full(*q)
    w.pipes.k.wait_full(*k)
    w.acc_O.fill(0.0)
    if w.largest is not None:
        w.largest.fill(0.0)
    ends = _key_ends(w, band, n_block, row)
    _first_block(w, w.tOrP, w.reference, w.total, ends, first, has_care, k[0], q[0])
    w.pipes.k.release(k[0], w.lane)


def masked_step(w: Consumer, band: Band, n_block, row, k, v, q_index):
    """A block with invisible keys, or with care any block: maxima, and a rescale where one has risen far."""
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
    finish_values(w, v[0])
    _rescale_if(has_risen, w.acc_O, w.factors)
    pack_probabilities(w)


def unmasked_step(w: Consumer, k, v, q_index):
    """A block that all rows see, with a key behind them: no maxima. Totals tell later whether that was right.

    The wait for O stands half-way through the exponentials, where O is done, so that V's stage is freed early.
    """
    middle, total = cute.size(w.acc_S) // 8, [w.total[0], w.total[1]]
    exponentials = partial(softmax.exponentials, w.acc_S, scale_log2=w.scale_log2)
    issue_both(w, k, v, q_index)
    w.pipes.k.release(k[0], w.lane)
    for r in range(2):
        w.total[r] = w.total[r] + exponentials(r, w.reference[r], end=middle)
    finish_values(w, v[0])
    for r in range(2):
        w.total[r] = w.total[r] + exponentials(r, w.reference[r], begin=middle)
        if w.largest is not None:
            w.largest[r] = cute.arch.fmax(w.largest[r], w.total[r] - total[r])
    pack_probabilities(w)


def skip_step(w: Consumer, k):
    """A block that this warpgroup does not see, though others of the tile do. V comes in a stage of the same number."""
    w.pipes.k.wait_full(*k)
    w.pipes.k.release(k[0], w.lane)
    if w.plan.has_turns:
        barriers.wait_for_turn(w.warpgroup)
        barriers.pass_turn(w.next_warpgroup)
    w.pipes.v.wait_full(*k)
    w.pipes.v.release(k[0], w.lane)


def _key_ends(w: Consumer, band: Band, n_block, row):
    return mask.key_ends(band, row, n_block * band.tile_n + 2 * (w.lane % 4))


@cute.jit
def _first_block(
    w: Consumer,
    tOrP: cute.Tensor,
    reference: cute.Tensor,
    total: cute.Tensor,
    ends,
    first: Int32,
    has_care: Boolean,
    k_index: Int32,
    q_index: Int32,
):
    """S and P of a tile's first block. What a branch writes is an argument of its own, not reached through `w`."""
    dtype = mma.DTYPES[w.plan.dtype]
    tSrQ = w.tSrQ[None, None, None, q_index]
    if w.plan.has_half_blocks and first == LEFT_HALF:
        half_S = cute.make_rmem_tensor(w.half_layout, Float32)
        mma.issue(w.mmas.half, w.mmas.half_add, half_S, tSrQ, w.tSrK_half[None, None, None, k_index])
        mma.wait(0)
        mask.mask_scores(half_S, *ends, w.hidden_score)
        _first_softmax(w, half_S, reference, total, has_care)
        register.pack(half_S, tOrP, dtype)
        register.clear_words(tOrP, begin=cute.size(half_S) // 2)
    else:
        acc_S = cute.make_rmem_tensor(w.acc_S.layout, Float32)
        mma.issue(w.mmas.scores, w.mmas.scores_add, acc_S, tSrQ, w.tSrK[None, None, None, k_index])
        mma.wait(0)
        _mask_if(acc_S, first != WHOLE, *ends, w.hidden_score)
        _first_softmax(w, acc_S, reference, total, has_care)
        register.pack(acc_S, tOrP, dtype)


def _first_softmax(w: Consumer, acc_S, reference, total, has_care):
    scale_log2 = _take_maxima(acc_S, reference, has_care, w.scale_log2, FIRST_GROUPS[mma.DTYPES[w.plan.dtype]])
    for r in range(2):
        total[r] = softmax.exponentials(acc_S, r, softmax.finite(reference[r]), scale_log2)


@cute.jit
def _take_maxima(
    acc_S: cute.Tensor, reference: cute.Tensor, has_care: Boolean, scale_log2: Float32, num_groups: cutlass.Constexpr
) -> Float32:
    """References of a first block: the maxima of its leftmost columns; of all with care, or where those are all -inf.

    Returns the scale that S still lacks: scores that were scaled, and rounded as the maxima, differ from these exactly.
    """
    reference[0], reference[1] = softmax.row_maxima(acc_S, scale_log2=scale_log2, num_groups=num_groups)
    is_empty = reference[0] == -Float32.inf or reference[1] == -Float32.inf
    if has_care or cute.arch.vote_any_sync(is_empty):
        softmax.scale(acc_S, scale_log2)
        reference[0], reference[1] = softmax.row_maxima(acc_S)
        scale_log2 = Float32(1.0)
    return scale_log2


@cute.jit
def _mask_if(acc_S: cute.Tensor, is_needed: Boolean, end_0: Int32, end_1: Int32, hidden: Float32):
    if is_needed:
        mask.mask_scores(acc_S, end_0, end_1, hidden)


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
