"""Views name each mode's place, on tensors whose elements are their own coordinates."""

from cutlass import cute

from cute_fa.device import view


def test_rows_first(on_host):
    """(batch, rows, heads, dim) to (rows, dim, heads, batch)."""
    place = on_host(lambda: view.rows_first(cute.make_identity_tensor((2, 3, 4, 5)))[2, 4, 3, 1])
    assert place == (1, 2, 3, 4), "batch 1, row 2, head 3, column 4"


def test_transposed(on_host):
    place = on_host(lambda: view.transposed(cute.make_identity_tensor((8, 16, 2)))[15, 7, 1])
    assert place == (7, 15, 1), "row 7, column 15, stage 1"


def test_row_tiles(on_host):
    """Rows 64 to 127 of 130, of one head and batch; the dim, 40, is narrower than the tile."""
    tensor = on_host(lambda: str(view.row_tiles(cute.make_identity_tensor((130, 40, 3, 2)), (64, 48)).layout.shape))
    assert tensor == "(64, 48, 3, 3, 2)", "tile, blocks of rows, heads, batches"
    place = on_host(lambda: view.row_tiles(cute.make_identity_tensor((130, 40, 3, 2)), (64, 48))[5, 6, 1, 2, 1])
    assert place == (69, 6, 2, 1), "row 5 of the second block"
