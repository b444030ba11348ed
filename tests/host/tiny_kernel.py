"""A kernel that compiles in 0.1 s, in place of the registry's; as a program, the processes that test_cache.py needs."""

import os
import re
import signal
import sys
from pathlib import Path

import pytest

from cute_fa.tuning.heuristics import build_forward_plan

LOG = "TINY_KERNEL_LOG"  # environment variable: a file that gets a line for each compilation in any process
REGISTRY = "cute_fa.kernels.registry"


def plan_of(head_dim: int, is_causal: bool = False):
    return build_forward_plan("bfloat16", head_dim, head_dim, is_causal)


def kernel_of(plan):
    """A kernel that copies as many floats as the plan's head_dim."""
    import cutlass
    from cutlass import cute
    from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream

    size = plan.tile.head_dim

    class Copy:
        @cute.jit
        def __call__(self, source: cute.Tensor, target: cute.Tensor, stream):
            self.copy(source, target).launch(grid=(1, 1, 1), block=(size, 1, 1), stream=stream)

        @cute.kernel
        def copy(self, source: cute.Tensor, target: cute.Tensor):
            index, _, _ = cute.arch.thread_idx()
            target[index] = source[index]

        def fake_arguments(self):
            tensors = (make_fake_compact_tensor(cutlass.Float32, (size,)) for _ in range(2))
            return *tensors, make_fake_stream(use_tvm_ffi_env_stream=True)

    with open(os.environ[LOG], "a") as log:
        log.write(f"{plan.name}\n")
    return Copy()


def size_of(function) -> int:
    """How many floats a loaded function copies, as its check of the arguments tells."""
    import torch

    with pytest.raises(ValueError, match="expected device_type=cuda") as refused:
        function(torch.zeros(1), torch.zeros(1))
    return int(re.search(r"source: Tensor\(\[(\d+)\], float32\)", str(refused.value))[1])


def race(num_processes: int, head_dims: list[int]) -> None:
    """Processes that load the same plans at the same time. Forked when all is imported, so that they start together."""
    from cute_fa.host import cache, compile

    compile.import_dsl()
    wait, go = os.pipe()
    children = []
    for _ in range(num_processes):
        child = os.fork()
        if not child:
            os.close(go)
            os.read(wait, 1)
            sizes = [size_of(cache.load(plan_of(head_dim))) for head_dim in head_dims]
            os._exit(sizes != head_dims)
        children.append(child)
    os.close(go)
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    assert not any(codes), f"exit codes {codes}"


def die(head_dim: int) -> None:
    """Is killed with a whole entry written, before the rename."""
    from cute_fa.host import cache

    os.replace = lambda source, target: os.kill(os.getpid(), signal.SIGKILL)
    cache.fill(plan_of(head_dim), Path(os.environ["CUTE_FA_CACHE_DIR"]))


if __name__ == "__main__":
    sys.modules[REGISTRY] = sys.modules[__name__]
    role, *numbers = sys.argv[1:]
    if role == "race":
        race(int(numbers[0]), [int(head_dim) for head_dim in numbers[1:]])
    else:
        die(int(numbers[0]))
