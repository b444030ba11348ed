"""Ring: the mbarriers of a buffer with several stages, which a load warp fills and consumer warps empty.

Every stage has a full barrier (one arrival of the load warp, or more, and the bytes of its copies) and an empty barrier (one
arrival of each consumer warp). Whoever uses a ring carries its own index and phase, so two rings that move in step, such
as K and V one block behind it, share one pair of integers. Consumers begin with phase 0; the load warp begins with phase
1, which an empty barrier that nobody has arrived at lets pass.
"""

from dataclasses import dataclass

import cutlass
from cutlass import Int32, Int64, cute, pipeline

PRODUCER, CONSUMER = pipeline.PipelineUserType.Producer, pipeline.PipelineUserType.Consumer


@dataclass(frozen=True)
class Ring:
    """barriers: shared memory of `Ring.storage`. The full barriers come first."""

    barriers: cute.Pointer
    num_stages: cutlass.Constexpr

    @staticmethod
    def storage(num_stages: int):
        """What a shared memory struct reserves for the barriers."""
        return cute.struct.MemRange[Int64, 2 * num_stages]

    def full(self, index):
        return self.barriers + index

    def empty(self, index):
        return self.barriers + self.num_stages + index

    def init(self, num_consumer_warps: int, num_producer_lanes: int = 1):
        """Run by one thread, before the barrier after which others use the ring."""
        for stage in range(self.num_stages):
            cute.arch.mbarrier_init(self.full(stage), num_producer_lanes)
            cute.arch.mbarrier_init(self.empty(stage), num_consumer_warps)

    def wait_full(self, index, phase):
        """What was copied to the stage is visible afterwards."""
        cute.arch.mbarrier_wait(self.full(index), phase)

    def wait_empty(self, index, phase):
        """All consumer warps have read the stage afterwards."""
        cute.arch.mbarrier_wait(self.empty(index), phase)

    def release(self, index, lane):
        """Run by every consumer warp, once per stage, when it has read it."""
        arrive(self.empty(index), lane)

    def state(self, role):
        """Index and phase to carry through a loop; `advance` moves them on."""
        return pipeline.make_pipeline_state(role, self.num_stages)


@cute.jit
def arrive(barrier: cute.Pointer, lane: Int32):
    """One arrival of a warp."""
    if lane == 0:
        cute.arch.mbarrier_arrive(barrier)


def has_passed(barrier) -> Int32:
    """Run by a whole warp: 1 when a barrier has had its first arrivals, else 0; does not wait."""
    flag = cute.arch.inline_ptx(
        "{ .reg .pred p; mbarrier.test_wait.parity.shared::cta.b64 p, [{$r0}], 0; selp.b32 {$w0}, 1, 0, p; }",
        write_only_types=[Int32],
        read_only_args=[barrier.toint()],
    )
    return cute.arch.make_warp_uniform(flag)
