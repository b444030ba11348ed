"""Named barriers (bar.sync, bar.arrive) by number, and what consumer warpgroups do with them.

A CTA has 16; number 0 is `sync_threads`. Warpgroups are counted among the consumers, from 0.
"""

from cutlass import cute

from cute_fa.core.hardware import WARPGROUP_THREADS

TURN = 1  # TURN + w: warpgroup w may issue its products
WARPGROUP = 5  # WARPGROUP + w: all threads of warpgroup w
CONSUMERS = 8  # all threads of two consumer warpgroups
BUFFER_FREE = 9  # BUFFER_FREE + w: warpgroup w may write to its buffer; a warp has read it
BUFFER_FULL = 11  # BUFFER_FULL + w: the warp may read it


def wait_for_turn(warpgroup):
    """SYNC: waits until the warpgroup before has issued its products (`pass_turn`)."""
    cute.arch.barrier(barrier_id=TURN + warpgroup, number_of_threads=2 * WARPGROUP_THREADS)


def pass_turn(to):
    """SYNC: lets warpgroup `to` issue; does not wait. One pending arrival at exit is harmless."""
    cute.arch.barrier_arrive(barrier_id=TURN + to, number_of_threads=2 * WARPGROUP_THREADS)


def sync_warpgroup(warpgroup):
    """SYNC: all 128 threads of a warpgroup; what they wrote to shared memory is visible to them afterwards."""
    cute.arch.barrier(barrier_id=WARPGROUP + warpgroup, number_of_threads=WARPGROUP_THREADS)


def sync_consumers():
    """SYNC: all threads of two consumer warpgroups; what they wrote to shared memory is visible to them afterwards."""
    cute.arch.barrier(barrier_id=CONSUMERS, number_of_threads=2 * WARPGROUP_THREADS)


def wait_buffer(barrier: int, warpgroup):
    """SYNC: warpgroup waits for the warp (BUFFER_FREE), or the warp for the warpgroup (BUFFER_FULL)."""
    cute.arch.barrier(barrier_id=barrier + warpgroup, number_of_threads=WARPGROUP_THREADS + 32)


def pass_buffer(barrier: int, warpgroup):
    """SYNC: the other side of `wait_buffer`; does not wait."""
    cute.arch.barrier_arrive(barrier_id=barrier + warpgroup, number_of_threads=WARPGROUP_THREADS + 32)
