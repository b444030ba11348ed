"""Semaphore on a GPU: CTAs take their turns in a fixed order, and each sees what all before it wrote."""

import cuda.bindings.driver as cuda
import pytest
import torch
from cutlass import Float32, Int32, cute

from cute_fa.device import hopper, semaphore, tma

# All run at once, one or more an SM, so any order of turns is possible; 78 is the least number of SMs.
NUM_CTAS = 64
THREADS, COUNT = 128, 256
REPEATS = 20


@cute.kernel
def turns_kernel(
    order: cute.Tensor, x: cute.Tensor, counter: cute.Tensor, number: cute.Tensor, sums: cute.Tensor, by: Int32
):
    """The CTA whose turn is order[cta] makes number 3 * number + cta, and adds row cta of x to sums by TMA."""
    thread, cta = cute.arch.thread_idx()[0], cute.arch.block_idx()[0]
    fields = {"values": cute.struct.Align[cute.struct.MemRange[Float32, COUNT], 128]}
    storage = hopper.SmemAllocator().allocate(cute.struct(type("Storage", (), {"__annotations__": fields})))
    values = storage.values.get_tensor(cute.make_layout(COUNT))
    for i in range(thread, COUNT, THREADS):
        values[i] = x[cta, i]
    cute.arch.fence_proxy("async.shared", space="cta")  # SYNC: stores before what the bulk addition reads
    cute.arch.sync_threads()
    if thread == 0:
        semaphore.wait_for(counter.iterator, by * order[cta])
        number[0] = 3 * number[0] + cta
        tma.add_vector(values.iterator, sums.iterator, COUNT)
        cute.arch.cp_async_bulk_wait_group(0, read=False)  # SYNC: the sums are in global memory
        semaphore.count_up(counter.iterator, by)


@cute.jit
def launch_turns(
    order: cute.Tensor,
    x: cute.Tensor,
    counter: cute.Tensor,
    number: cute.Tensor,
    sums: cute.Tensor,
    by: Int32,
    stream: cuda.CUstream,
):
    turns_kernel(order, x, counter, number, sums, by).launch(
        grid=(NUM_CTAS, 1, 1), block=(THREADS, 1, 1), stream=stream
    )


@pytest.fixture(scope="module")
def turns(build):
    shapes = (Int32, (NUM_CTAS,)), (Float32, (NUM_CTAS, COUNT)), (Int32, (1,)), (Int32, (1,)), (Float32, (COUNT,))
    return build(launch_turns, *shapes, Int32(1))


def test_turns_compile(turns):
    assert callable(turns), "for sm_90a"


@pytest.mark.gpu
@pytest.mark.timeout(120)
@pytest.mark.parametrize("by", [1, 2], ids=["by-one", "by-two"])
def test_ctas_take_turns(turns, by):
    """Neither 3 n + cta nor the fp32 sums of numbers of many sizes come out the same in another order."""
    for repeat in range(REPEATS):
        generator = torch.Generator().manual_seed(repeat)
        who = torch.randperm(NUM_CTAS, generator=generator)  # by turn
        order = torch.empty(NUM_CTAS, dtype=torch.int32)
        order[who] = torch.arange(NUM_CTAS, dtype=torch.int32)
        sizes = 10 ** (8 * torch.rand(NUM_CTAS, COUNT, generator=generator) - 4)
        x = torch.randn(NUM_CTAS, COUNT, generator=generator) * sizes
        number, sums = 1, torch.zeros(COUNT)
        for cta in who.tolist():
            number = (3 * number + cta) % 2**32
            sums += x[cta]
        assert not torch.equal(sums, x.double().sum(0).float()), "a sum that rounding shows the order of"
        counter, found = torch.zeros(1, dtype=torch.int32).cuda(), torch.ones(1, dtype=torch.int32).cuda()
        found_sums = torch.zeros(COUNT, device="cuda")
        turns(order.cuda(), x.cuda(), counter, found, found_sums, by)
        assert counter.item() == by * NUM_CTAS, "all have counted"
        assert found.item() % 2**32 == number, f"plain loads and stores, repeat {repeat}"
        assert torch.equal(found_sums.cpu(), sums), f"bulk additions, repeat {repeat}"


@cute.kernel
def pairs_kernel(numbers: cute.Tensor, counter: cute.Tensor):
    """Two threads of each CTA wait for one turn and count on their own; the second comes late."""
    thread, cta = cute.arch.thread_idx()[0], cute.arch.block_idx()[0]
    if thread % 32 == 0:
        if thread == 32:
            cute.arch.inline_ptx("nanosleep.u32 100000;")
        semaphore.wait_for(counter.iterator, 2 * cta)
        numbers[thread // 32] = 3 * numbers[thread // 32] + cta
        semaphore.count_up(counter.iterator, Int32(1))


@cute.jit
def launch_pairs(numbers: cute.Tensor, counter: cute.Tensor, stream: cuda.CUstream):
    pairs_kernel(numbers, counter).launch(grid=(8, 1, 1), block=(64, 1, 1), stream=stream)


@pytest.fixture(scope="module")
def pairs(build):
    return build(launch_pairs, (Int32, (2,)), (Int32, (1,)))


def test_pairs_compile(pairs):
    assert callable(pairs), "for sm_90a"


@pytest.mark.gpu
@pytest.mark.timeout(120)
def test_a_neighbour_may_have_counted_already(pairs):
    """Each CTA's first thread counts before the second looks; the second must not miss its turn."""
    numbers, counter = torch.ones(2, dtype=torch.int32).cuda(), torch.zeros(1, dtype=torch.int32).cuda()
    pairs(numbers, counter)
    wanted = 1
    for cta in range(8):
        wanted = 3 * wanted + cta
    assert numbers.tolist() == [wanted, wanted], "both in the order of their turns"
