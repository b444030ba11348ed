"""TMA: copies of tiles between global and shared memory, whose descriptors are kernel parameters, and of plain vectors."""

from cutlass import Int32, cute
from cutlass.cute.nvgpu import cpasync

from cute_fa.device.pipeline import Ring


def load_atom(tensor, smem_layout, tile):
    """(atom, tensor of coordinates) for loads of `tile` of a global tensor into one stage of smem_layout. Host side.

    Elements outside the tensor are read as zeros, and their bytes count as copied.
    """
    stage = cute.slice_(smem_layout, (None, None, 0))
    return cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileG2SOp(), tensor, stage, tile)


def store_atom(tensor, smem_layout, tile):
    """The same for stores; elements outside the tensor are not written. Host side."""
    stage = cute.slice_(smem_layout, (None, None, 0))
    return cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileS2GOp(), tensor, stage, tile)


def partition(atom, smem, gmem):
    """(smem, gmem) as the atom copies them; the first two modes of both are the tile, the rest index tiles."""
    tiles = cute.group_modes(smem, 0, 2), cute.group_modes(gmem, 0, 2)
    return cpasync.tma_partition(atom, 0, cute.make_layout(1), *tiles)


@cute.jit
def load(atom: cute.CopyAtom, gmem: cute.Tensor, smem: cute.Tensor, ring: Ring, index: Int32, phase: Int32, num_bytes: int):
    """Run by the whole load warp: waits for an empty stage, then leaves the copy of one tile in flight to it.

    gmem: one tile, smem: all stages, as `partition` gave them. num_bytes: of the whole box, also at the tensor's edge.
    """
    ring.wait_empty(index, phase)
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive_and_expect_tx(ring.full(index), num_bytes)
    # The copy elects a lane itself.
    cute.copy(atom, gmem, smem[None, index], tma_bar_ptr=ring.full(index))


def load_beside(atom, gmem, smem, ring: Ring, index):
    """Run by the whole load warp behind `load`, whose num_bytes counts this copy too: another tile for the same stage."""
    cute.copy(atom, gmem, smem[None, index], tma_bar_ptr=ring.full(index))


def add_vector(smem, gmem, count: int):
    """Run by one thread: leaves the addition of fp32 values in shared memory to global memory in flight, as one group.

    smem, gmem: pointers, aligned to 16 bytes. count: of values.
    """
    cute.arch.inline_ptx(
        "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [{$r0}], [{$r1}], {$r2};",
        read_only_args=[gmem.toint(), smem.toint(), Int32(4 * count)],
    )
    cute.arch.cp_async_bulk_commit_group()
