"""View: the same memory with its modes in another order, and cut into tiles."""

from cutlass import cute


def reordered(tensor, modes):
    """The modes of a tensor in another order; in shared memory the swizzle stays."""
    return cute.make_tensor(tensor.iterator, cute.select(tensor.layout, mode=modes))


def rows_first(tensor):
    """(batch, rows, heads, dim) as (rows, dim, heads, batch)."""
    return reordered(tensor, (1, 3, 2, 0))


def transposed(tiles):
    """(rows, columns, stage) as (columns, rows, stage): an operand whose other mode is contiguous."""
    return reordered(tiles, (1, 0, 2))


def row_tiles(tensor, tile):
    """Tiles of (rows, dim, heads, batch), indexed by (block of rows, head, batch); the dim is one tile wide."""
    return cute.local_tile(tensor, tile, (None, 0, None, None))
