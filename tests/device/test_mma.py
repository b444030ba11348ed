"""Products on a GPU against torch, with integers, whose sums are exact in fp32."""

import cuda.bindings.driver as cuda
import cutlass
import pytest
import torch
from cutlass import Float32, cute

from cute_fa.core.dtypes import KERNEL_DTYPES
from cute_fa.device import hopper, mma, view
from cute_fa.device.smem import tile_layout


def test_dtypes_are_those_of_kernels():
    assert tuple(mma.DTYPES) == KERNEL_DTYPES, "names"
    assert all(dtype.width == 16 for dtype in mma.DTYPES.values()), "operands of 16 bits"


@cute.kernel
def products_kernel(
    products: tuple[cute.TiledMma, cute.TiledMma, cute.TiledMma],
    operands: tuple[cute.Tensor, cute.Tensor, cute.Tensor, cute.Tensor],
    s: cute.Tensor,
    o: cute.Tensor,
    layouts: tuple[cute.ComposedLayout, cute.ComposedLayout, cute.ComposedLayout],
    num_warpgroups: cutlass.Constexpr,
):
    """s[..., 0] = Q K^T over NaN, with o += P V in flight behind it; then s[..., 1] = s[..., 0] + Q K^T."""
    thread = cute.arch.thread_idx()[0]
    warpgroup = cute.arch.make_warp_uniform(thread // 128)
    scores, scores_add, values = products
    q, k, vt, p = operands
    num_threads = 128 * num_warpgroups
    sQ, sK, sVt = allocate(layouts, q.element_type)
    for source, target in ((q, sQ), (k, sK), (vt, sVt)):
        copy_in(source, target, thread, num_threads)
    cute.arch.fence_proxy("async.shared", space="cta")  # SYNC: what was written above before what products read
    cute.arch.sync_threads()

    mma.accumulates(scores, False)
    mma.accumulates(scores_add, True)
    mma.accumulates(values, True)
    # Operands in shared memory are the warpgroup's, those in registers a thread's.
    group_S, group_O = scores.get_slice(warpgroup * 128), values.get_slice(warpgroup * 128)
    thread_S, thread_O = scores.get_slice(thread), values.get_slice(thread)
    tSrQ = scores.make_fragment_A(group_S.partition_A(sQ))[None, None, None, 0]
    tSrK = scores.make_fragment_B(group_S.partition_B(sK))[None, None, None, 0]
    tOrVt = values.make_fragment_B(group_O.partition_B(sVt))[None, None, None, 0]
    tOgP, tOgO = thread_O.partition_A(p), thread_O.partition_C(o)
    tOrP = thread_O.make_fragment_A(thread_O.partition_shape_A(p.shape))
    acc_S = thread_S.make_fragment_C(thread_S.partition_shape_C((p.shape[0], p.shape[1])))
    acc_O = thread_O.make_fragment_C(thread_O.partition_shape_C((o.shape[0], o.shape[1])))
    move(tOgP, tOrP)
    move(tOgO, acc_O)
    acc_S.fill(Float32(float("nan")))

    mma.issue(scores, scores_add, acc_S, tSrQ, tSrK)
    mma.issue(values, values, acc_O, tOrP, tOrVt)
    mma.wait(1)
    move(acc_S, thread_S.partition_C(s[None, None, 0]))
    mma.wait(0)
    move(acc_O, tOgO)
    mma.issue(scores_add, scores_add, acc_S, tSrQ, tSrK)
    mma.wait(0)
    move(acc_S, thread_S.partition_C(s[None, None, 1]))


def allocate(layouts, dtype):
    fields = {
        name: cute.struct.Align[cute.struct.MemRange[dtype, cute.cosize(layout)], 1024]
        for name, layout in zip("abc", layouts)
    }
    storage = hopper.SmemAllocator().allocate(cute.struct(type("Storage", (), {"__annotations__": fields})))
    return [getattr(storage, name).get_tensor(x.outer, swizzle=x.inner) for name, x in zip(fields, layouts)]


@cute.jit
def copy_in(source: cute.Tensor, target: cute.Tensor, thread: cutlass.Int32, num_threads: cutlass.Constexpr):
    """Global (row, column) to shared memory (row, column, one stage)."""
    columns: cutlass.Constexpr = source.shape[1]
    for i in range(thread, cute.size(source), num_threads):
        target[i // columns, i % columns, 0] = source[i // columns, i % columns]


def move(source, target):
    """Element by element, in the order of a thread's fragment."""
    for i in range(cute.size(target)):
        target[i] = source[i]


@cute.jit
def launch_products(
    q: cute.Tensor,
    k: cute.Tensor,
    v: cute.Tensor,
    p: cute.Tensor,
    s: cute.Tensor,
    o: cute.Tensor,
    num_warpgroups: cutlass.Constexpr,
    stream: cuda.CUstream,
):
    """Row-major matrices; s: (2, rows, keys)."""
    dtype, (tile_m, head_dim), tile_n = q.element_type, q.shape, k.shape[0]
    scores, values = mma.scores_mma(dtype, num_warpgroups, tile_n), mma.values_mma(dtype, num_warpgroups, head_dim)
    layouts = (
        tile_layout(dtype, tile_m, head_dim),
        tile_layout(dtype, tile_n, head_dim),
        hopper.make_smem_layout_b(hopper.COL_MAJOR, (tile_m, head_dim, tile_n), dtype, 1),
    )
    vt = cute.make_tensor(v.iterator, cute.select(v.layout, mode=(1, 0)))
    s_last = cute.make_tensor(s.iterator, cute.select(s.layout, mode=(1, 2, 0)))
    products_kernel((scores, scores, values), (q, k, vt, p), s_last, o, layouts, num_warpgroups).launch(
        grid=(1, 1, 1), block=(128 * num_warpgroups, 1, 1), stream=stream
    )


# (warpgroups, tile_n, head_dim, dtype).
SIZES = {
    "one-warpgroup-n64-d64-bf16": (1, 64, 64, "bfloat16"),
    "one-warpgroup-n128-d256-fp16": (1, 128, 256, "float16"),
    "two-warpgroups-n128-d96-fp16": (2, 128, 96, "float16"),
    "two-warpgroups-n64-d256-bf16": (2, 64, 256, "bfloat16"),
}


@pytest.fixture(scope="module", params=SIZES.values(), ids=SIZES)
def products(build, request):
    """(function, tile_m, tile_n, head_dim, torch dtype)."""
    num_warpgroups, tile_n, head_dim, name = request.param
    tile_m, dtype = 64 * num_warpgroups, mma.DTYPES[name]
    shapes = (tile_m, head_dim), (tile_n, head_dim), (tile_n, head_dim), (tile_m, tile_n)
    operands = [(dtype, shape) for shape in shapes]
    results = (Float32, (2, tile_m, tile_n)), (Float32, (tile_m, head_dim))
    return build(launch_products, *operands, *results, num_warpgroups), tile_m, tile_n, head_dim, getattr(torch, name)


def test_products_compile(products):
    assert callable(products[0]), "for sm_90a"


@pytest.mark.gpu
@pytest.mark.timeout(120)
def test_products(products):
    """The first product of S overwrites it, all others add; S can be read while O is in flight."""
    function, tile_m, tile_n, head_dim, dtype = products
    generator = torch.Generator().manual_seed(0)
    shapes = (tile_m, head_dim), (tile_n, head_dim), (tile_n, head_dim), (tile_m, tile_n), (tile_m, head_dim)
    q, k, v, p, start = (torch.randint(-4, 5, shape, generator=generator).double() for shape in shapes)
    s, o = torch.full((2, tile_m, tile_n), -7.0, device="cuda"), start.float().cuda()
    function(*(x.to(dtype).cuda() for x in (q, k, v, p)), s, o)
    wanted = q @ k.mT
    assert torch.equal(s[0].cpu().double(), wanted), "S = Q K^T"
    assert torch.equal(s[1].cpu().double(), 2 * wanted), "S += Q K^T"
    assert torch.equal(o.cpu().double(), start + p @ v), "O += P V"


@cute.kernel
def halves_kernel(
    products: tuple[cute.TiledMma, cute.TiledMma],
    operands: tuple[cute.Tensor, cute.Tensor],
    out: cute.Tensor,
    layouts: tuple[cute.ComposedLayout, cute.ComposedLayout],
    shape: cutlass.Constexpr,
    is_transposed: cutlass.Constexpr,
    has_a_in_registers: cutlass.Constexpr,
):
    """out[..., 0] = A B^T, out[..., 1] the first half of k alone, out[..., 2] the second half added to it.

    operands: as they lie in memory. is_transposed: of each, whether that is (k, rows).
    """
    thread = cute.arch.thread_idx()[0]
    warpgroup = cute.arch.make_warp_uniform(thread // 128)
    sA, sB = allocate(layouts, operands[0].element_type)
    for source, target in zip(operands, (sA, sB)):
        copy_in(source, target, thread, 256)
    cute.arch.fence_proxy("async.shared", space="cta")  # SYNC: what was written above before what products read
    cute.arch.sync_threads()

    overwriting, adding = mma.accumulates(products[0], False), mma.accumulates(products[1], True)
    group, of_thread = overwriting.get_slice(warpgroup * 128), overwriting.get_slice(thread)
    views = [view.transposed(x) if is_transposed[i] else x for i, x in enumerate((sA, sB))]
    tCrB = overwriting.make_fragment_B(group.partition_B(views[1]))[None, None, None, 0]
    if cutlass.const_expr(has_a_in_registers):
        tCrA = of_thread.make_fragment_A(of_thread.partition_shape_A((shape[0], shape[2])))
        move(of_thread.partition_A(operands[0]), tCrA)
    else:
        tCrA = overwriting.make_fragment_A(group.partition_A(views[0]))[None, None, None, 0]
    acc = of_thread.make_fragment_C(of_thread.partition_shape_C(shape[:2]))
    for i, half in enumerate((None, 0, 1)):
        if i < 2:
            acc.fill(Float32(float("nan")))
        mma.issue(overwriting, adding, acc, tCrA, tCrB, half)
        mma.wait(0)
        move(acc, of_thread.partition_C(out[None, None, i]))


@cute.jit
def launch_halves(
    a: cute.Tensor,
    b: cute.Tensor,
    out: cute.Tensor,
    warpgroups: cutlass.Constexpr,
    is_transposed: cutlass.Constexpr,
    has_a_in_registers: cutlass.Constexpr,
    stream: cuda.CUstream,
):
    """a, b: row-major, as they lie. out: (3, rows, columns)."""
    dtype, shape = a.element_type, (*out.shape[1:], b.shape[0 if is_transposed[1] else 1])
    columns = shape[1] // warpgroups[1]
    products = [mma.product(dtype, warpgroups, columns, *is_transposed, has_a_in_registers) for _ in range(2)]
    # In a transposed B, warpgroups share what lies in rows.
    layouts = tile_layout(dtype, *a.shape), tile_layout(dtype, *b.shape, 1, columns if is_transposed[1] else None)
    out_last = cute.make_tensor(out.iterator, cute.select(out.layout, mode=(1, 2, 0)))
    halves_kernel(tuple(products), (a, b), out_last, layouts, shape, is_transposed, has_a_in_registers).launch(
        grid=(1, 1, 1), block=(256, 1, 1), stream=stream
    )


# warpgroups that share rows and columns; rows, columns, k; whether A and B are transposed, A in registers; dtype
HALVES = {
    "registers-b-transposed-d96-bf16": ((2, 1), (128, 96, 64), (False, True), True, "bfloat16"),
    "registers-b-transposed-k80-fp16": ((2, 1), (128, 128, 80), (False, True), True, "float16"),
    "shared-b-transposed-columns-shared-d192-bf16": ((1, 2), (64, 192, 64), (False, True), False, "bfloat16"),
    "b-transposed-rows-shared-k128-bf16": ((2, 1), (128, 64, 128), (False, True), False, "bfloat16"),
    "a-transposed-rows-shared-k128-fp16": ((2, 1), (128, 64, 128), (True, False), False, "float16"),
    "both-transposed-columns-shared-d256-bf16": ((1, 2), (64, 256, 64), (True, True), False, "bfloat16"),
    "neither-columns-shared-fp16": ((1, 2), (64, 64, 192), (False, False), False, "float16"),
    "one-block-of-k-bf16": ((2, 1), (128, 64, 16), (False, False), False, "bfloat16"),
}


@pytest.fixture(scope="module", params=HALVES.values(), ids=HALVES)
def halves(build, request):
    """(function, (rows, columns, k), whether A and B are transposed, torch dtype)."""
    warpgroups, shape, is_transposed, has_a_in_registers, name = request.param
    lying = [(shape[2], rows) if is_t else (rows, shape[2]) for rows, is_t in zip(shape, is_transposed)]
    operands = [(mma.DTYPES[name], x) for x in lying]
    out, choices = (Float32, (3, *shape[:2])), (warpgroups, is_transposed, has_a_in_registers)
    return build(launch_halves, *operands, out, *choices), shape, is_transposed, getattr(torch, name)


def test_halves_compile(halves):
    assert callable(halves[0]), "for sm_90a"


@pytest.mark.gpu
@pytest.mark.timeout(120)
def test_transposed_operands_and_halves(halves):
    """The first half has the odd block of 16; both halves together are the whole."""
    function, (rows, columns, k), is_transposed, dtype = halves
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randint(-4, 5, (n, k), generator=generator).double() for n in (rows, columns))
    lying = [(x.mT if is_t else x).to(dtype).contiguous().cuda() for x, is_t in zip((a, b), is_transposed)]
    out = torch.full((3, rows, columns), -7.0, device="cuda")
    function(*lying, out)
    middle = 16 * ((k // 16 + 1) // 2)
    whole, first, both = out.cpu().double()
    assert torch.equal(whole, a @ b.mT), "A B^T"
    assert torch.equal(first, a[:, :middle] @ b[:, :middle].mT), "its first half overwrites"
    assert torch.equal(both, a @ b.mT), "its second half adds"
