"""The table, the mean ratios and the reasons at the end of a run, against numbers worked out by hand."""

import re

from benchmarks.summary import geometric_mean, summary


def row(head_dim, seqlen, backend, tflops="", reason="", suite="grid", **changes):
    case = dict(suite=suite, direction="fwd", variant="default", mask="full")
    sizes = dict(batch=1, seqlen_q=seqlen, seqlen_k=seqlen, heads_q=8, heads_kv=8)
    dims = dict(head_dim=head_dim, head_dim_v=head_dim)
    return {**case, **sizes, **dims, "backend": backend, "tflops": tflops, "reason": reason, **changes}


ROWS = [
    row(64, 4096, "cute_fa", "400"),
    row(64, 4096, "fa4", "200"),
    row(64, 4096, "cudnn", "500.0"),
    row(128, 16384, "cute_fa", "800"),
    row(128, 16384, "fa4", "100"),
    row(128, 16384, "cudnn", reason="RuntimeError: no kernel"),
    row(256, 1024, "cute_fa", "100"),
    row(256, 1024, "fa4", "400"),
    row(256, 1024, "cudnn", "50"),
]


def test_geometric_mean():
    assert geometric_mean([2.0, 8.0]) == 4.0, "the root of 16"


def test_table_has_a_line_a_cell():
    lines = summary(ROWS).splitlines()
    assert lines[0] == "grid fwd default, TFLOP/s", "what the block is about"
    assert lines[1].split() == ["cell", "cute_fa", "fa4", "cudnn", "best", "peer"], "a column a backend"
    assert lines[2].split() == ["d64-s4096-full-b1-h8", "400.0", "200.0", "500.0", "0.800"], "over the best peer"
    assert lines[3].split() == ["d128-s16384-full-b1-h8", "800.0", "100.0", "-", "8.000"], "a peer without a number"


def test_mean_ratios():
    lines = summary(ROWS).splitlines()
    # Against fa4 the cells give 2, 8 and 1/4, against cudnn 4/5 and 2.
    assert "all cells: cute_fa/fa4 1.587 (3 cells), cute_fa/cudnn 1.265 (2 cells)" in lines, (
        "cube root of 4, root of 1.6"
    )
    assert "head_dim 64 at 4096: cute_fa/fa4 2.000 (1 cells), cute_fa/cudnn 0.800 (1 cells)" in lines, "a group"
    assert "head_dim 128 at 16384: cute_fa/fa4 8.000 (1 cells), cute_fa/cudnn - (no cell)" in lines, (
        "nothing to compare"
    )
    assert "these together: cute_fa/fa4 4.000 (2 cells), cute_fa/cudnn 0.800 (1 cells)" in lines, (
        "head_dim 256 is no part"
    )
    assert not [line for line in lines if line.startswith("head_dim 128 at 4096")], "a group without a cell has no line"


def test_other_suites_have_no_groups():
    text = summary([row(64, 4096, name, "100", suite="odd") for name in ("cute_fa", "fa4")])
    assert "all cells: cute_fa/fa4 1.000 (1 cells)" in text and "head_dim 64 at" not in text, (
        "groups belong to the grid"
    )


def test_reasons_come_last():
    assert summary(ROWS).splitlines()[-1] == "cudnn d128-s16384-full-b1-h8 fwd default: RuntimeError: no kernel", (
        "in words"
    )


def test_directions_and_variants_are_apart():
    rows = [
        row(64, 4096, "cute_fa", "300", direction="bwd"),
        row(64, 4096, "fa4", "100", direction="bwd"),
        row(64, 4096, "cute_fa", reason="none", direction="bwd", variant="deterministic"),
        row(64, 4096, "fa4", "50", direction="bwd", variant="deterministic"),
    ]
    blocks = summary(ROWS + rows).split("\n\n")
    titles = [block.splitlines()[0] for block in blocks[:-1]]
    assert titles == [f"grid {kind}, TFLOP/s" for kind in ("fwd default", "bwd default", "bwd deterministic")], (
        "a block each"
    )
    assert "all cells: cute_fa/fa4 3.000 (1 cells)" in blocks[1], "only rows of its own"
    assert re.search(r"- +50\.0 +-$", blocks[2].splitlines()[2]), "ours has no number there"


def test_peers_alone():
    assert "all cells: no peer" not in summary([row(64, 4096, "fa4", "100")]), "ours is missing, not the peer"
    assert "all cells: no peer" in summary([row(64, 4096, "cute_fa", "100")]), "nothing to compare with"
