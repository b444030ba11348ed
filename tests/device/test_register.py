"""Registers on a GPU: packing against torch's own rounding, and what the four lanes of a quad find together."""

import cuda.bindings.driver as cuda
import cutlass
import pytest
import torch
from cutlass import BFloat16, Float16, Float32, Int32, cute

from cute_fa.device import register

THREADS = 128
BLOCKS = 32
DTYPES = {"bf16": (BFloat16, torch.bfloat16), "fp16": (Float16, torch.float16)}

# Ties of both formats, the ends of their ranges, and numbers between their subnormals.
SPECIAL = (
    *(0.0, -0.0, torch.inf, -torch.inf, torch.nan),
    *(1 + 2.0**-8, 1 + 3 * 2.0**-8, 1 + 2.0**-8 + 2.0**-23, -1 - 2.0**-8),
    *(1 + 2.0**-11, 1 + 3 * 2.0**-11, 1 + 2.0**-11 + 2.0**-23),
    *(65504.0, 65519.99, 65520.0, 1e5, -65520.0),
    *(2.0**-14, 2.0**-24, 2.0**-25, 2.0**-25 + 2.0**-40, 3 * 2.0**-25),
    *(torch.finfo(torch.float32).max, torch.finfo(torch.bfloat16).max, 2.0**-133, 2.0**-126),
)


@cute.kernel
def pairs_kernel(x: cute.Tensor, out: cute.Tensor, dtype: cutlass.Constexpr):
    thread, block = cute.arch.thread_idx()[0], cute.arch.block_idx()[0]
    i = block * THREADS + thread
    out[i] = register.pack_pair(x[i, 0], x[i, 1], dtype)


@cute.jit
def launch_pairs(x: cute.Tensor, out: cute.Tensor, dtype: cutlass.Constexpr, stream: cuda.CUstream):
    pairs_kernel(x, out, dtype).launch(grid=(BLOCKS, 1, 1), block=(THREADS, 1, 1), stream=stream)


@pytest.fixture(scope="module", params=DTYPES)
def pairs(build, request):
    """(function, torch dtype): (n, 2) fp32 -> n words."""
    dtype, torch_dtype = DTYPES[request.param]
    n = BLOCKS * THREADS
    return build(launch_pairs, (Float32, (n, 2)), (Int32, (n,)), dtype), torch_dtype


def test_pack_pair_compiles(pairs):
    assert callable(pairs[0]), "for sm_90a"


@pytest.mark.gpu
@pytest.mark.timeout(120)
def test_pack_pair_rounds_as_torch_does(pairs):
    function, dtype = pairs
    n = BLOCKS * THREADS
    bits = torch.randint(-(2**31), 2**31, (2 * n,), generator=torch.Generator().manual_seed(0))
    x = bits.to(torch.int32).view(torch.float32)  # all exponents, NaN among them
    x[: len(SPECIAL)] = torch.tensor(SPECIAL)
    x = torch.stack((x[:n], x[n:]), 1)
    x[: len(SPECIAL), 1] = torch.tensor(SPECIAL).flip(0)
    out = torch.zeros(n, dtype=torch.int32, device="cuda")
    function(x.cuda(), out)
    found, wanted = out.cpu().view(dtype).view(n, 2), x.to(dtype)
    assert torch.equal(found.isnan(), wanted.isnan()), "NaN stays NaN, and nothing else becomes one"
    numbers = ~wanted.isnan()
    assert torch.equal(found.view(torch.int16)[numbers], wanted.view(torch.int16)[numbers]), "every bit, low half first"


@cute.kernel
def fragment_kernel(x: cute.Tensor, out: cute.Tensor, dtype: cutlass.Constexpr):
    thread = cute.arch.thread_idx()[0]
    count: cutlass.Constexpr = x.shape[1]
    fragment, operand = cute.make_rmem_tensor(count, Float32), cute.make_rmem_tensor(count, dtype)
    for i in cutlass.range_constexpr(count):
        fragment[i] = x[thread, i]
    register.pack(fragment, operand, dtype)
    for i in cutlass.range_constexpr(count):
        out[thread, i] = operand[i]


@cute.jit
def launch_fragment(x: cute.Tensor, out: cute.Tensor, dtype: cutlass.Constexpr, stream: cuda.CUstream):
    fragment_kernel(x, out, dtype).launch(grid=(1, 1, 1), block=(THREADS, 1, 1), stream=stream)


@pytest.fixture(scope="module", params=DTYPES)
def fragment(build, request):
    """(function, torch dtype): 8 elements a thread."""
    dtype, torch_dtype = DTYPES[request.param]
    return build(launch_fragment, (Float32, (THREADS, 8)), (dtype, (THREADS, 8)), dtype), torch_dtype


def test_pack_compiles(fragment):
    assert callable(fragment[0]), "for sm_90a"


@pytest.mark.gpu
@pytest.mark.timeout(120)
def test_pack_keeps_the_order(fragment):
    function, dtype = fragment
    x = torch.randn(THREADS, 8, generator=torch.Generator().manual_seed(1))
    out = torch.zeros(THREADS, 8, dtype=dtype, device="cuda")
    function(x.cuda(), out)
    assert torch.equal(out.cpu(), x.to(dtype)), "element by element"


@cute.kernel
def part_kernel(x: cute.Tensor, out: cute.Tensor, begin: cutlass.Constexpr, end: cutlass.Constexpr):
    """out keeps what it holds where nothing is packed."""
    thread = cute.arch.thread_idx()[0]
    count: cutlass.Constexpr = x.shape[1]
    fragment, operand = cute.make_rmem_tensor(count, Float32), cute.make_rmem_tensor(count, out.element_type)
    for i in cutlass.range_constexpr(count):
        fragment[i], operand[i] = x[thread, i], out[thread, i]
    register.pack(fragment, operand, out.element_type, begin, end)
    for i in cutlass.range_constexpr(count):
        out[thread, i] = operand[i]


@cute.jit
def launch_part(
    x: cute.Tensor, out: cute.Tensor, begin: cutlass.Constexpr, end: cutlass.Constexpr, stream: cuda.CUstream
):
    part_kernel(x, out, begin, end).launch(grid=(1, 1, 1), block=(THREADS, 1, 1), stream=stream)


# begin and end, in groups of 4 elements of 32; the end of all may be left open
PARTS = {"first-half": (0, 4), "second-half": (4, None), "middle": (2, 5), "all": (0, 8)}


@pytest.fixture(scope="module", params=PARTS.values(), ids=PARTS)
def part(build, request):
    """(function, begin, end): 32 elements a thread."""
    begin, end = request.param
    function = build(launch_part, (Float32, (THREADS, 32)), (BFloat16, (THREADS, 32)), begin, end)
    return function, 4 * begin, 4 * (end or 8)


def test_pack_of_a_part_compiles(part):
    assert callable(part[0]), "for sm_90a"


@pytest.mark.gpu
@pytest.mark.timeout(120)
def test_pack_of_a_part_leaves_the_rest(part):
    function, begin, end = part
    x = torch.randn(THREADS, 32, generator=torch.Generator().manual_seed(3))
    out = torch.full((THREADS, 32), 7.0, dtype=torch.bfloat16, device="cuda")
    function(x.cuda(), out)
    wanted = torch.full((THREADS, 32), 7.0, dtype=torch.bfloat16)
    wanted[:, begin:end] = x[:, begin:end].bfloat16()
    assert torch.equal(out.cpu(), wanted), "element by element"


@cute.kernel
def clear_kernel(x: cute.Tensor, out: cute.Tensor, begin: cutlass.Constexpr):
    thread = cute.arch.thread_idx()[0]
    operand = cute.make_rmem_tensor(x.shape[1], x.element_type)
    for i in cutlass.range_constexpr(cute.size(operand)):
        operand[i] = x[thread, i]
    register.clear_words(operand, begin)
    for i in cutlass.range_constexpr(cute.size(operand)):
        out[thread, i] = operand[i]


@cute.jit
def launch_clear(x: cute.Tensor, out: cute.Tensor, begin: cutlass.Constexpr, stream: cuda.CUstream):
    clear_kernel(x, out, begin).launch(grid=(1, 1, 1), block=(THREADS, 1, 1), stream=stream)


@pytest.fixture(scope="module", params=[0, 6, 16], ids=["all", "from-the-middle", "nothing"])
def clear(build, request):
    """(function, first pair that is cleared): 32 elements a thread."""
    return build(launch_clear, *[(BFloat16, (THREADS, 32))] * 2, request.param), request.param


def test_clear_words_compiles(clear):
    assert callable(clear[0]), "for sm_90a"


@pytest.mark.gpu
@pytest.mark.timeout(120)
def test_clear_words(clear):
    """NaN goes too."""
    function, begin = clear
    x = torch.randn(THREADS, 32, generator=torch.Generator().manual_seed(5)).bfloat16()
    x[3, 12:] = torch.nan
    wanted = x.clone()
    wanted[:, 2 * begin :] = 0.0
    out = torch.full((THREADS, 32), 7.0, dtype=torch.bfloat16, device="cuda")
    function(x.cuda(), out)
    torch.testing.assert_close(out.cpu(), wanted, rtol=0.0, atol=0.0, equal_nan=True)


@cute.kernel
def multiply_kernel(a: cute.Tensor, b: cute.Tensor, out: cute.Tensor):
    """Words of two neighbours, through fragments of 16."""
    i = cute.arch.block_idx()[0] * THREADS + cute.arch.thread_idx()[0]
    fragments = [cute.make_rmem_tensor(16, a.element_type) for _ in range(3)]
    for element in cutlass.range_constexpr(16):
        fragments[0][element], fragments[1][element] = a[i, element], b[i, element]
    x, y, product = (register.words_of(fragment) for fragment in fragments)
    for word in cutlass.range_constexpr(8):
        product[word] = register.multiply_pairs(x[word], y[word], a.element_type)
    for element in cutlass.range_constexpr(16):
        out[i, element] = fragments[2][element]


@cute.jit
def launch_multiply(a: cute.Tensor, b: cute.Tensor, out: cute.Tensor, stream: cuda.CUstream):
    multiply_kernel(a, b, out).launch(grid=(BLOCKS, 1, 1), block=(THREADS, 1, 1), stream=stream)


@pytest.fixture(scope="module", params=DTYPES)
def multiply(build, request):
    """(function, torch dtype): (n, 16) times (n, 16)."""
    dtype, torch_dtype = DTYPES[request.param]
    return build(launch_multiply, *[(dtype, (BLOCKS * THREADS, 16))] * 3), torch_dtype


def test_multiply_pairs_compiles(multiply):
    assert callable(multiply[0]), "for sm_90a"


@pytest.mark.gpu
@pytest.mark.timeout(120)
def test_multiply_pairs_rounds_as_torch_does(multiply):
    """The product is exact in fp64. All bit patterns of a against random ones of b; subnormal numbers count."""
    function, dtype = multiply
    n = BLOCKS * THREADS * 16
    assert n == 2**16, "as many as there are"
    bits = torch.arange(n) - 2**15, torch.randint(-(2**15), 2**15, (n,), generator=torch.Generator().manual_seed(4))
    a, b = (x.to(torch.int16).view(dtype).view(-1, 16) for x in bits)
    out = torch.zeros_like(a, device="cuda")
    function(a.cuda(), b.cuda(), out)
    found, wanted = out.cpu(), (a.double() * b.double()).to(dtype)
    assert torch.equal(found.isnan(), wanted.isnan()), "NaN stays NaN, and nothing else becomes one"
    numbers = ~wanted.isnan()
    assert torch.equal(found[numbers], wanted[numbers]), "every number, low half first"


@cute.kernel
def quads_kernel(x: cute.Tensor, maxima: cute.Tensor, sums: cute.Tensor):
    thread = cute.arch.thread_idx()[0]
    maxima[thread], sums[thread] = register.quad_max(x[thread]), register.quad_sum(x[thread])


@cute.jit
def launch_quads(x: cute.Tensor, maxima: cute.Tensor, sums: cute.Tensor, stream: cuda.CUstream):
    quads_kernel(x, maxima, sums).launch(grid=(1, 1, 1), block=(THREADS, 1, 1), stream=stream)


@pytest.fixture(scope="module")
def quads(build):
    return build(launch_quads, *[(Float32, (THREADS,))] * 3)


def test_quads_compile(quads):
    assert callable(quads), "for sm_90a"


@pytest.mark.gpu
@pytest.mark.timeout(120)
def test_all_lanes_of_a_quad_have_its_maximum_and_sum(quads):
    x = torch.randint(-1000, 1000, (THREADS,), generator=torch.Generator().manual_seed(2)).float()  # sums are exact
    x[4], x[9], x[12:16] = -torch.inf, torch.inf, -torch.inf
    maxima, sums = torch.zeros(2, THREADS, device="cuda")
    quads(x.cuda(), maxima, sums)
    rows = x.view(-1, 4)
    assert torch.equal(maxima.cpu().view(-1, 4), rows.amax(1, keepdim=True).expand(-1, 4)), "maximum of four lanes"
    assert torch.equal(sums.cpu().view(-1, 4), rows.sum(1, keepdim=True).expand(-1, 4)), "sum of four lanes"


@cute.kernel
def transpose_8x8_kernel(x: cute.Tensor, out: cute.Tensor):
    thread = cute.arch.thread_idx()[0]
    out[thread] = register.transpose_8x8(register.opaque(x[thread]))


@cute.jit
def launch_transpose_8x8(x: cute.Tensor, out: cute.Tensor, stream: cuda.CUstream):
    transpose_8x8_kernel(x, out).launch(grid=(1, 1, 1), block=(THREADS, 1, 1), stream=stream)


@pytest.fixture(scope="module")
def transpose_8x8(build):
    return build(launch_transpose_8x8, (Int32, (THREADS,)), (Int32, (THREADS,)))


def test_transpose_8x8_compiles(transpose_8x8):
    assert callable(transpose_8x8), "for sm_90a"


@pytest.mark.gpu
@pytest.mark.timeout(120)
def test_transpose_8x8(transpose_8x8):
    """A lane has two neighbours of a row of its warp's matrix, four lanes a row."""
    matrices = torch.arange(THREADS // 32 * 64, dtype=torch.int16).view(-1, 8, 8)
    words = matrices.contiguous().view(torch.int32).flatten().cuda()
    out = torch.zeros_like(words)
    transpose_8x8(words, out)
    found = out.cpu().view(torch.int16).view(-1, 8, 8)
    assert torch.equal(found, matrices.transpose(1, 2)), "rows are columns"
