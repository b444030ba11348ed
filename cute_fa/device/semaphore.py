"""Semaphore: a counter in global memory that makes CTAs do something in a fixed order.

Whoever waits for a count relies on others that count up to it; these must have been started before, or start without its
help. Additions of fp32 numbers in a fixed order give the same bits in every run.
"""

from cutlass import Int32, cute


@cute.jit
def wait_for(counter: cute.Pointer, value: Int32):
    """Run by one thread, until the count is at least value. SYNC: what others did before is visible afterwards, to TMA too.

    At least, because a neighbour that waited for the same value may have counted up already.
    """
    address = counter.toint()
    while _load(address) < value:
        pass
    cute.arch.fence_proxy("async")


@cute.jit
def count_up(counter: cute.Pointer, by: Int32):
    """Run by one thread. SYNC: what this thread did or saw before is visible to who waits for the new count."""
    cute.arch.inline_ptx(
        "fence.proxy.async; fence.acq_rel.gpu; red.relaxed.gpu.global.add.s32 [{$r0}], {$r1};",
        read_only_args=[counter.toint(), by],
    )


def read(counter: cute.Pointer) -> Int32:
    """Run by a whole warp: the count, without what happened before it."""
    count = cute.arch.load(counter, Int32, sem="relaxed", scope="gpu")
    return cute.arch.make_warp_uniform(count)


def _load(address) -> Int32:
    return cute.arch.inline_ptx(
        "ld.acquire.gpu.global.b32 {$w0}, [{$r0}];", write_only_types=[Int32], read_only_args=[address]
    )
