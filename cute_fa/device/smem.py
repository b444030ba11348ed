"""Smem: swizzled layouts of tiles in shared memory, as TMA writes and warpgroup MMA reads them."""

from cutlass import cute
from cutlass.cute.nvgpu import warpgroup

# Columns of 16 bits that a swizzled row of 128, 64 or 32 bytes holds.
_KINDS = {
    64: warpgroup.SmemLayoutAtomKind.K_SW128,
    32: warpgroup.SmemLayoutAtomKind.K_SW64,
    16: warpgroup.SmemLayoutAtomKind.K_SW32,
}


def tile_layout(dtype, rows: int, columns: int, num_stages: int = 1, columns_of_warpgroup: int | None = None):
    """(rows, columns, stage), 16 bits an element, columns contiguous in the widest swizzled rows that divide them.

    columns_of_warpgroup: of a product in which warpgroups share the columns; no swizzled row may lie in two parts.
    """
    width = next(width for width in _KINDS if (columns_of_warpgroup or columns) % width == 0)
    atom = warpgroup.make_smem_layout_atom(_KINDS[width], dtype)
    return cute.tile_to_shape(atom, (rows, columns, num_stages), order=(0, 1, 2))
