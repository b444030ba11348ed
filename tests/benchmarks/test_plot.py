"""Pictures from rows: which run is drawn, what the bars are, and that both files are images."""

import re

import pytest

from benchmarks.plot import draw, draw_panel, latest_run, main, panels_of
from benchmarks.record import append_rows, read_rows


def row(run, backend, tflops, seqlen=1024, head_dim=64, mask="full", **changes):
    facts = dict(device="NVIDIA H200", date="2030-01-01", commit="0123456789", run=run)
    case = dict(suite="grid", direction="fwd", variant="default", dtype="bfloat16", mask=mask)
    sizes = dict(batch=1, seqlen_q=seqlen, seqlen_k=seqlen, heads_q=8, heads_kv=8)
    dims = dict(head_dim=head_dim, head_dim_v=head_dim)
    return {**facts, **case, **sizes, **dims, "backend": backend, "tflops": tflops, **changes}


def strings(rows, tmp_path):
    """Rows as a file gives them."""
    append_rows(tmp_path / "h200.csv", rows)
    return read_rows(tmp_path / "h200.csv")


ROWS = [
    row("old", "cute_fa", 1),
    *(row("new", name, speed) for name, speed in (("cute_fa", 500), ("fa4", 400))),
    *(row("new", name, speed, seqlen=4096) for name, speed in (("cute_fa", 600), ("fa4", ""))),
    *(row("new", name, 300, head_dim=128, mask="causal") for name in ("cute_fa", "fa4")),
    row("back", "cute_fa", 2, direction="bwd"),
    row("odd", "cute_fa", 3, suite="odd"),
]


def test_latest_run_of_the_suite_and_direction(tmp_path):
    rows = strings(ROWS, tmp_path)
    assert {one["run"] for one in latest_run(rows, "grid", "fwd")} == {"new"}, "not the old one, not other suites"
    assert len(latest_run(rows, "grid", "fwd")) == 6, "all of its rows"
    with pytest.raises(ValueError, match="^suite: expected one with rows in the results, got gqa fwd"):
        latest_run(rows, "gqa", "fwd")


def test_bars_are_the_rows(tmp_path):
    from matplotlib.figure import Figure

    panels = panels_of(latest_run(strings(ROWS, tmp_path), "grid", "fwd"))
    assert list(panels) == [("64", "full"), ("128", "causal")], "a panel for each head_dim and mask"
    axes = Figure().subplots()
    draw_panel(axes, panels["64", "full"], ["cute_fa", "fa4"])
    heights = {bars.get_label(): [bar.get_height() for bar in bars] for bars in axes.containers}
    assert heights == {"cute_fa": [500, 600], "fa4": [400, 0]}, "TFLOP/s, no bar where there is no number"
    assert [label.get_text() for label in axes.get_xticklabels()] == ["1024", "4096"], "a group for each seqlen"
    crosses = [list(line.get_xdata()) for line in axes.get_lines()]
    assert crosses == [[pytest.approx(1.2)]], "one cross, in the place of the second bar of the second group"


def test_cells_of_one_seqlen_are_told_by_their_heads(tmp_path):
    from matplotlib.figure import Figure

    rows = strings([row("a", "cute_fa", 5, heads_q=heads) for heads in (32, 64)], tmp_path)
    axes = Figure().subplots()
    draw_panel(axes, rows, ["cute_fa"])
    assert [label.get_text() for label in axes.get_xticklabels()] == ["1024\n32:8", "1024\n64:8"], "query and key heads"


def test_variants_are_contestants(tmp_path):
    rows = [row("a", "fa4", 5, direction="bwd"), row("a", "fa4", 4, direction="bwd", variant="deterministic")]
    svg, _ = draw(strings(rows, tmp_path), tmp_path / "picture")
    names = re.findall(r"<!-- (fa4.*?) -->", svg.read_text())  # text is drawn as paths, named in comments
    assert names == ["fa4", "fa4 deterministic"], "the legend names both"


def test_command_writes_both_files(tmp_path, capsys):
    strings(ROWS, tmp_path)
    arguments = ["--results", str(tmp_path / "h200.csv"), "--suite", "grid", "--direction", "fwd"]
    main(arguments)
    svg, png = (tmp_path / f"h200-grid-fwd.{ending}" for ending in ("svg", "png"))
    assert capsys.readouterr().out == f"{svg}\n{png}\n", "their paths"
    assert "<svg" in svg.read_text() and png.read_bytes().startswith(b"\x89PNG\r\n"), "an SVG and a PNG"
    before = svg.read_bytes()
    main(arguments)
    assert svg.read_bytes() == before, "the same rows give the same bytes, so a commit shows real changes only"
