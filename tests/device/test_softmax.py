"""The steps of the softmax on a GPU, each against a line of torch. A warp holds 16 rows, four lanes a row."""

import math

import cuda.bindings.driver as cuda
import cutlass
import pytest
import torch
from cutlass import Float32, Int32, cute

from cute_fa.device import softmax

ROWS, COLUMNS = 16, 96
GROUPS = COLUMNS // 8
SCALE = 0.375
# exp2 turns the rounding of its argument, up to 128 * 2^-24 here, into a relative error.
TOLERANCE = {"rtol": 1e-5, "atol": 1e-37}


def place(lane, i):
    """(row, column) of element i of a lane; the documented order of an accumulator."""
    return lane // 4 + 8 * ((i // 2) % 2), 8 * (i // 4) + 2 * (lane % 4) + i % 2


def load(x, lane):
    acc = cute.make_rmem_tensor(cute.size(x) // 32, Float32)
    for i in range(cute.size(acc)):
        acc[i] = x[place(lane, i)]
    return acc


def pair_of_rows(x, lane):
    values = cute.make_rmem_tensor(2, Float32)
    values[0], values[1] = x[lane // 4], x[lane // 4 + 8]
    return values


def lanes_of_quads(columns: int):
    """(lane % 4,) that holds each column."""
    return torch.arange(columns) // 2 % 4


def normal(*shape, seed: int = 0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@cute.kernel
def maxima_kernel(x: cute.Tensor, old: cute.Tensor, out: cute.Tensor, scale: Float32, kind: cutlass.Constexpr):
    lane = cute.arch.thread_idx()[0]
    acc = load(x, lane)
    if cutlass.const_expr(kind == "over-old"):
        maxima = softmax.row_maxima(acc, pair_of_rows(old, lane))
    else:
        maxima = softmax.row_maxima(acc, scale_log2=scale, num_groups=2 if kind == "leftmost" else None)
    for r in cutlass.range_constexpr(2):
        out[lane // 4 + 8 * r, lane % 4] = maxima[r]


@cute.jit
def launch_maxima(
    x: cute.Tensor,
    old: cute.Tensor,
    out: cute.Tensor,
    scale: Float32,
    kind: cutlass.Constexpr,
    stream: cuda.CUstream,
):
    maxima_kernel(x, old, out, scale, kind).launch(grid=(1, 1, 1), block=(32, 1, 1), stream=stream)


@pytest.fixture(scope="module", params=["alone", "over-old", "leftmost"])
def maxima(build, request):
    """(function, kind). over-old: scores that are scaled already. leftmost: of 16 columns alone."""
    arguments = (Float32, (ROWS, COLUMNS)), (Float32, (ROWS,)), (Float32, (ROWS, 4)), Float32(1.0), request.param
    return build(launch_maxima, *arguments), request.param


def test_row_maxima_compiles(maxima):
    assert callable(maxima[0]), "for sm_90a"


@pytest.mark.gpu
@pytest.mark.timeout(120)
@pytest.mark.parametrize("scale", [SCALE, -2.5], ids=["positive", "negative"])
def test_row_maxima(maxima, scale):
    """Each column is its row's maximum once; NaN does not count, an invisible row has -inf."""
    function, kind = maxima
    scale = 1.0 if kind == "over-old" else scale
    old = torch.full((ROWS,), 0.25)
    old[0], old[1] = 50.0, -torch.inf
    for column in range(COLUMNS):
        x = normal(ROWS, COLUMNS, seed=column)
        x[:, column] = (torch.arange(ROWS) + 10.0) / scale
        x[:, (column + 5) % COLUMNS] = torch.nan
        x[3], x[12] = -torch.inf / scale, -x[12]
        out = torch.zeros(ROWS, 4, device="cuda")
        function(x.cuda(), old.cuda(), out, scale)
        wanted = (x * scale).nan_to_num(-torch.inf, torch.inf, -torch.inf)
        wanted = (wanted[:, :16] if kind == "leftmost" else wanted).amax(1)
        wanted = torch.maximum(wanted, old) if kind == "over-old" else wanted
        assert torch.equal(out.cpu(), wanted[:, None].expand(-1, 4)), f"in all lanes of a row, column {column}"


@cute.kernel
def exponentials_kernel(
    x: cute.Tensor,
    reference: cute.Tensor,
    p: cute.Tensor,
    sums: cute.Tensor,
    scale: Float32,
    is_scaled: cutlass.Constexpr,
):
    """In two parts that together are all columns."""
    lane = cute.arch.thread_idx()[0]
    acc, references = load(x, lane), pair_of_rows(reference, lane)
    if cutlass.const_expr(is_scaled):
        softmax.scale(acc, scale)
    factor = None if is_scaled else scale
    for r in cutlass.range_constexpr(2):
        left = softmax.exponentials(acc, r, references[r], factor, end=GROUPS // 2)
        right = softmax.exponentials(acc, r, references[r], factor, begin=GROUPS // 2)
        sums[lane // 4 + 8 * r, lane % 4, 0], sums[lane // 4 + 8 * r, lane % 4, 1] = left, right
    for i in cutlass.range_constexpr(cute.size(acc)):
        p[place(lane, i)] = acc[i]


@cute.jit
def launch_exponentials(
    x: cute.Tensor,
    reference: cute.Tensor,
    p: cute.Tensor,
    sums: cute.Tensor,
    scale: Float32,
    is_scaled: cutlass.Constexpr,
    stream: cuda.CUstream,
):
    exponentials_kernel(x, reference, p, sums, scale, is_scaled).launch(grid=(1, 1, 1), block=(32, 1, 1), stream=stream)


@pytest.fixture(scope="module", params=[True, False], ids=["scaled", "fused"])
def exponentials(build, request):
    matrix, rows = (Float32, (ROWS, COLUMNS)), (Float32, (ROWS,))
    return build(launch_exponentials, matrix, rows, matrix, (Float32, (ROWS, 4, 2)), Float32(1.0), request.param)


def test_exponentials_compile(exponentials):
    assert callable(exponentials), "for sm_90a"


@pytest.mark.gpu
@pytest.mark.timeout(120)
def test_exponentials(exponentials):
    x, reference = 40 * normal(ROWS, COLUMNS), 5 * normal(ROWS, seed=1)
    x[:, ::7], x[4], reference[4] = -torch.inf, -torch.inf, 0.0  # masked keys, and a row without any
    p, sums = torch.zeros(ROWS, COLUMNS, device="cuda"), torch.zeros(ROWS, 4, 2, device="cuda")
    exponentials(x.cuda(), reference.cuda(), p, sums, SCALE)
    wanted = torch.exp2(x.double() * SCALE - reference.double()[:, None])
    torch.testing.assert_close(p.cpu().double(), wanted, **TOLERANCE)
    assert (p.cpu()[x == -torch.inf] == 0).all(), "exactly 0 where no key is visible"
    halves = wanted.view(ROWS, 2, COLUMNS // 2)
    for lane in range(4):
        of_lane = halves[:, :, lanes_of_quads(COLUMNS // 2) == lane].sum(2)
        torch.testing.assert_close(sums.cpu()[:, lane].double(), of_lane, **TOLERANCE)


@cute.kernel
def reference_kernel(
    acc_O: cute.Tensor,
    reference: cute.Tensor,
    total: cute.Tensor,
    maxima: cute.Tensor,
    moved: cute.Tensor,
    risen: cute.Tensor,
):
    """moved: (rows, columns of O, then reference and total)."""
    lane = cute.arch.thread_idx()[0]
    acc, factors = load(acc_O, lane), cute.make_rmem_tensor(2, Float32)
    old, totals, new = (pair_of_rows(tensor, lane) for tensor in (reference, total, maxima))
    risen[lane] = Int32(softmax.has_risen(old, new))
    softmax.move_reference(old, totals, factors, new)
    softmax.rescale(acc, factors)
    for i in cutlass.range_constexpr(cute.size(acc)):
        moved[place(lane, i)] = acc[i]
    for r in cutlass.range_constexpr(2):
        moved[lane // 4 + 8 * r, COLUMNS], moved[lane // 4 + 8 * r, COLUMNS + 1] = old[r], totals[r]


@cute.jit
def launch_reference(
    acc_O: cute.Tensor,
    reference: cute.Tensor,
    total: cute.Tensor,
    maxima: cute.Tensor,
    moved: cute.Tensor,
    risen: cute.Tensor,
    stream: cuda.CUstream,
):
    reference_kernel(acc_O, reference, total, maxima, moved, risen).launch(
        grid=(1, 1, 1), block=(32, 1, 1), stream=stream
    )


@pytest.fixture(scope="module")
def move_reference(build):
    rows, moved = (Float32, (ROWS,)), (Float32, (ROWS, COLUMNS + 2))
    return build(launch_reference, (Float32, (ROWS, COLUMNS)), rows, rows, rows, moved, (Int32, (32,)))


def test_move_reference_compiles(move_reference):
    assert callable(move_reference), "for sm_90a"


@pytest.mark.gpu
@pytest.mark.timeout(120)
def test_move_reference(move_reference):
    """Rows r and r + 8 belong to one thread, which asks for a rescale of O if one of them has risen by more than 8."""
    acc_O, reference, total = normal(ROWS, COLUMNS), normal(ROWS, seed=1).round(), normal(ROWS, seed=2).abs()
    rise = torch.tensor([0.0, 8.0, 8.5, 3.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 30.0, 1.0, 0.0, 0.0, 0.0])
    maxima = reference + rise
    reference[4], acc_O[4], total[4] = -torch.inf, 0.0, 0.0  # sees its first keys now
    reference[13], maxima[13], acc_O[13], total[13] = -torch.inf, -torch.inf, 0.0, 0.0  # has seen none, and sees none
    moved, risen = torch.zeros(ROWS, COLUMNS + 2, device="cuda"), torch.zeros(32, dtype=torch.int32, device="cuda")
    move_reference(*(tensor.cuda() for tensor in (acc_O, reference, total, maxima)), moved, risen)
    asked = torch.tensor([False, False, True, True, True, False, False, False])
    assert torch.equal(risen.cpu().view(8, 4), asked[:, None].expand(8, 4).int()), "rows 2, 11 and 4 have risen far"
    factor = torch.exp2(reference.double() - maxima.double().nan_to_num(neginf=0.0))
    wanted = torch.cat((factor[:, None] * acc_O, maxima[:, None], (factor * total)[:, None]), 1)
    torch.testing.assert_close(moved.cpu().double(), wanted, **TOLERANCE)


@cute.kernel
def range_kernel(rows: cute.Tensor, out: cute.Tensor, has_largest: cutlass.Constexpr):
    """rows: (thread, total and reference and largest sum, row)."""
    i = cute.arch.block_idx()[0] * 32 + cute.arch.thread_idx()[0]
    if i < out.shape[0]:
        total, reference, largest = (cute.make_rmem_tensor(2, Float32) for _ in range(3))
        for r in cutlass.range_constexpr(2):
            total[r], reference[r], largest[r] = rows[i, 0, r], rows[i, 1, r], rows[i, 2, r]
        out[i] = softmax.is_out_of_range(total, reference, largest if has_largest else None)


@cute.jit
def launch_range(rows: cute.Tensor, out: cute.Tensor, has_largest: cutlass.Constexpr, stream: cuda.CUstream):
    range_kernel(rows, out, has_largest).launch(
        grid=(cute.ceil_div(out.shape[0], 32), 1, 1), block=(32, 1, 1), stream=stream
    )


@pytest.fixture(scope="module", params=[False, True], ids=["totals", "blocks-too"])
def out_of_range(build, request):
    n = cute.sym_int32()
    return build(launch_range, (Float32, (n, 3, 2)), (Int32, (n,)), request.param), request.param


def test_is_out_of_range_compiles(out_of_range):
    assert callable(out_of_range[0]), "for sm_90a"


@pytest.mark.gpu
@pytest.mark.timeout(120)
def test_is_out_of_range(out_of_range):
    """Every pair of rows, for rows at, below and above each end."""
    function, has_largest = out_of_range
    total, reference, largest, just_over = 2.0**64, 2.0**20, 2.0**15, 1 + 2.0**-23
    low, high, nan = -torch.inf, torch.inf, torch.nan
    fine = (0.0, 0.0, 0.0), (total, reference, largest), (3.0, -reference, 1.0), (0.0, low, 0.0)
    bad_totals = (total * just_over, 0.0, 1.0), (high, 0.0, 1.0), (nan, 0.0, 1.0), (high, low, 1.0)
    bad_references = (1.0, reference * just_over, 1.0), (1.0, -reference * just_over, 1.0), (1.0, high, 1.0), (1.0, nan, 1.0)
    bad, large = bad_totals + bad_references, ((3.0, 0.0, largest * just_over), (3.0, 0.0, high))
    rows = [*((row, False) for row in fine), *((row, True) for row in bad), *((row, has_largest) for row in large)]
    cases = [(a, b) for a in rows for b in rows]
    wanted = torch.tensor([a or b for (_, a), (_, b) in cases]).int()
    out = torch.full((len(cases),), 7, dtype=torch.int32, device="cuda")
    function(torch.tensor([(a, b) for (a, _), (b, _) in cases], device="cuda").mT.contiguous(), out)
    wrong = [case for case, is_right in zip(cases, out.cpu() == wanted) if not is_right]
    assert not wrong, f"((total, reference, largest sum), is it bad) of both rows: {wrong}"


@cute.kernel
def normalizer_kernel(total: cute.Tensor, reference: cute.Tensor, inverse: cute.Tensor, lse: cute.Tensor):
    thread = cute.arch.thread_idx()[0]
    row, lane = thread // 4, thread % 4
    inverse[row, lane], lse[row, lane] = softmax.normalizer(total[row, lane], reference[row])


@cute.jit
def launch_normalizer(
    total: cute.Tensor, reference: cute.Tensor, inverse: cute.Tensor, lse: cute.Tensor, stream: cuda.CUstream
):
    normalizer_kernel(total, reference, inverse, lse).launch(grid=(1, 1, 1), block=(4 * ROWS, 1, 1), stream=stream)


@pytest.fixture(scope="module")
def normalizer(build):
    lanes = (Float32, (ROWS, 4))
    return build(launch_normalizer, lanes, (Float32, (ROWS,)), lanes, lanes)


def test_normalizer_compiles(normalizer):
    assert callable(normalizer), "for sm_90a"


@pytest.mark.gpu
@pytest.mark.timeout(120)
def test_normalizer(normalizer):
    total, reference = normal(ROWS, 4).abs() * torch.logspace(-6, 6, ROWS)[:, None], 20 * normal(ROWS, seed=1)
    total[3], total[7], reference[7] = 0.0, 0.0, -torch.inf  # no visible key, with either reference
    total[9, :3] = 0.0  # one lane alone has a part
    inverse, lse = torch.zeros(2, ROWS, 4, device="cuda")
    normalizer(total.cuda(), reference.cuda(), inverse, lse)
    row_sum = total.double().sum(1, keepdim=True).expand(-1, 4)
    wanted = torch.where(row_sum > 0, 1 / row_sum, 0.0)
    torch.testing.assert_close(inverse.cpu().double(), wanted, rtol=1e-6, atol=0.0)
    wanted = reference.double()[:, None] * math.log(2) + row_sum.log()
    torch.testing.assert_close(lse.cpu().double(), wanted, rtol=1e-6, atol=1e-5)


@cute.jit
def launch_finite(x: cute.Tensor, out: cute.Tensor, stream: cuda.CUstream):
    finite_kernel(x, out).launch(grid=(1, 1, 1), block=(4, 1, 1), stream=stream)


@cute.kernel
def finite_kernel(x: cute.Tensor, out: cute.Tensor):
    thread = cute.arch.thread_idx()[0]
    out[thread] = softmax.finite(x[thread])


@pytest.fixture(scope="module")
def finite(build):
    return build(launch_finite, *[(Float32, (4,))] * 2)


def test_finite_compiles(finite):
    assert callable(finite), "for sm_90a"


@pytest.mark.gpu
@pytest.mark.timeout(120)
def test_finite(finite):
    out = torch.ones(4, device="cuda")
    finite(torch.tensor([-torch.inf, torch.inf, -3.5, 0.0], device="cuda"), out)
    assert out.tolist() == [0.0, torch.inf, -3.5, 0.0], "-inf alone becomes 0"


@cute.kernel
def scales_kernel(scales: cute.Tensor, scores: cute.Tensor, out: cute.Tensor):
    """out: (scale, 3): the scale as it is used; a score times it; what hides a score, times it."""
    thread = cute.arch.thread_idx()[0]
    scale = softmax.nonzero(scales[thread])
    out[thread, 0], out[thread, 1] = scale, scores[thread] * scale
    out[thread, 2] = softmax.hidden_score(scale) * scale


@cute.jit
def launch_scales(scales: cute.Tensor, scores: cute.Tensor, out: cute.Tensor, stream: cuda.CUstream):
    scales_kernel(scales, scores, out).launch(grid=(1, 1, 1), block=(scales.shape[0], 1, 1), stream=stream)


@pytest.fixture(scope="module")
def scales(build):
    n = cute.sym_int32()
    return build(launch_scales, *[(Float32, (n,))] * 2, (Float32, (n, 3)))


def test_scales_compile(scales):
    assert callable(scales), "for sm_90a"


@pytest.mark.gpu
@pytest.mark.timeout(120)
def test_a_scale_hides_what_is_hidden(scales):
    """Whatever the scale's sign; with scale 0 finite scores, of which fp16 and bf16 rows give up to 1e30, vanish."""
    given = torch.tensor([0.0, -0.0, 1.5, -2.0, 1e-30, -1e-30])
    out = [torch.zeros(len(given), 3, device="cuda") for _ in range(2)]
    for score, result in zip((1e30, -torch.inf), out):
        scales(given.cuda(), torch.full_like(given, score).cuda(), result)
    finite, infinite = (x.cpu() for x in out)
    assert torch.equal(finite[2:, 0], given[2:]), "scales that are not 0 stay"
    assert (finite[:2, 1].abs() < 1e-7).all(), "finite scores vanish with scale 0"
    assert infinite[:, 1].isinf().all(), "infinite ones never do"
    assert (finite[:, 2] == -torch.inf).all(), "hidden"
