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
