"""Layouts of tiles in shared memory, byte by byte, against the swizzles of TMA and wgmma written out by hand."""

import pytest
from cutlass import BFloat16, Float16, cute

from cute_fa.device.smem import tile_layout


def offsets_of(on_host, dtype, rows, columns, num_stages=1, columns_of_warpgroup=None):
    """(element offsets by (stage, row, column), size in elements). A swizzle is one of byte addresses."""

    def evaluate():
        layout = tile_layout(dtype, rows, columns, num_stages, columns_of_warpgroup)
        swizzle = cute.make_composed_layout(layout.inner, 0, cute.make_layout(2**20))
        places = [(s, r, c) for s in range(num_stages) for r in range(rows) for c in range(columns)]
        return {(s, r, c): swizzle(2 * layout.outer((r, c, s))) // 2 for s, r, c in places}, cute.cosize(layout)

    return on_host(evaluate)


def place_by_hand(stage, row, column, rows, columns, width):
    """Rows of `width` columns below each other, then the next `width` columns, then the next stage.

    In the 128 bytes of a line, the 16-byte unit u of line l stands at u ^ l, of which the last 1, 2 or 3 bits count for
    rows of 32, 64 or 128 bytes (PTX ISA, "tensor swizzling modes").
    """
    byte = 2 * (((stage * (columns // width) + column // width) * rows + row) * width + column % width)
    line, unit = byte // 128, byte // 16 % 8
    return (128 * line + 16 * (unit ^ line % (width // 8)) + byte % 16) // 2


# rows (few, an element takes long), columns, stages, columns of a warpgroup: columns of a swizzled row
WIDTHS = {
    "d64": (16, 64, 2, None, 64),
    "d96": (16, 96, 2, None, 32),
    "d128": (24, 128, 1, None, 64),
    "d192": (8, 192, 2, None, 64),
    "d256": (16, 256, 1, None, 64),
    "columns-80": (16, 80, 2, None, 16),
    "halves-of-d64": (16, 64, 2, 32, 32),
    "halves-of-d96": (16, 96, 2, 48, 16),
    "halves-of-d128": (24, 128, 1, 64, 64),
    "halves-of-d192": (16, 192, 1, 96, 32),
    "halves-of-d256": (8, 256, 1, 128, 64),
}


@pytest.mark.parametrize("rows, columns, num_stages, columns_of_warpgroup, width", WIDTHS.values(), ids=WIDTHS)
def test_every_element_has_its_place(on_host, rows, columns, num_stages, columns_of_warpgroup, width):
    """The widest swizzled row that divides the columns, or the part of them that a warpgroup has."""
    offsets, size = offsets_of(on_host, BFloat16, rows, columns, num_stages, columns_of_warpgroup)
    assert size == rows * columns * num_stages, "elements, without gaps"
    assert sorted(offsets.values()) == list(range(size)), "one element each"
    wrong = [pair for pair in offsets.items() if pair[1] != place_by_hand(*pair[0], rows, columns, width)]
    assert not wrong, f"{len(wrong)} of {size} elements, ((stage, row, column), offset) first {wrong[0]}"


def test_both_dtypes_lie_alike(on_host):
    assert offsets_of(on_host, Float16, 8, 96, 2) == offsets_of(on_host, BFloat16, 8, 96, 2), "16 bits each"
