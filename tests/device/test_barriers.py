"""Named barriers on a GPU: a vote of one warpgroup sees all its threads and none of another's."""

import cuda.bindings.driver as cuda
import pytest
import torch
from cutlass import Int32, cute

from cute_fa.device import barriers

THREADS = 256  # two warpgroups


@cute.kernel
def vote_kernel(condition: cute.Tensor, out: cute.Tensor):
    thread, block = cute.arch.thread_idx()[0], cute.arch.block_idx()[0]
    warpgroup = cute.arch.make_warp_uniform(thread // 128)
    out[block, thread] = Int32(barriers.any_in_warpgroup(warpgroup, condition[block, thread]))


@cute.jit
def launch_vote(condition: cute.Tensor, out: cute.Tensor, stream: cuda.CUstream):
    vote_kernel(condition, out).launch(grid=(condition.shape[0], 1, 1), block=(THREADS, 1, 1), stream=stream)


@pytest.fixture(scope="module")
def vote(build):
    size = cute.sym_int32()
    return build(launch_vote, *[(Int32, (size, THREADS))] * 2)


def test_any_in_warpgroup_compiles(vote):
    assert callable(vote), "for sm_90a"


@pytest.mark.gpu
@pytest.mark.timeout(120)
def test_any_in_warpgroup(vote):
    """A block a case: nobody, everybody, and each thread alone, with numbers that have no low bit among them."""
    alone = torch.eye(THREADS, dtype=torch.int32) * torch.tensor([1, 2, -4, 2**30]).repeat(THREADS // 4).int()
    nobody = torch.zeros(1, THREADS, dtype=torch.int32)
    condition = torch.cat((nobody, nobody + 1, alone))
    out = torch.full_like(condition, 7, device="cuda")
    vote(condition.cuda(), out)
    wanted = (condition != 0).view(-1, 2, 128).any(2, keepdim=True).expand(-1, 2, 128).reshape(-1, THREADS)
    assert torch.equal(out.cpu(), wanted.int()), "the answer in every thread"
