"""Pictures of what was measured: `python -m benchmarks.plot` draws the latest run of a suite. It never measures.

Writes `<device>-<suite>-<direction>.svg` and `.png`: a panel for each head_dim and mask, a group of bars for each cell,
a bar for each contestant. Needs matplotlib (extra `bench`).
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from benchmarks.command import run_command
from benchmarks.record import RESULTS, Row, read_rows
from benchmarks.suites import DIRECTIONS, SUITES, unless_equal
from cute_fa.core.errors import expected

# Colours of the palette of Okabe and Ito, which colour-blind readers tell apart; ours stands out.
COLOURS = {"cute_fa": "#d55e00", "fa4": "#0072b2", "cudnn": "#009e73", "fa2": "#a6a6a6"}
DIRECTION_WORDS = {"fwd": "forward", "bwd": "backward"}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.plot", description="Draw the latest run of a suite.")
    parser.add_argument("--results", type=Path, default=RESULTS / "h200.csv", metavar="FILE", help="rows of a device")
    parser.add_argument("--suite", choices=SUITES, default="grid", help="default: grid")
    parser.add_argument("--direction", choices=DIRECTIONS, default="fwd", help="default: fwd")
    parser.add_argument("--output", type=Path, metavar="FOLDER", help="default: the folder of the results")
    options = parser.parse_args(arguments)
    rows = latest_run(read_rows(options.results), options.suite, options.direction)
    stem = f"{options.results.stem}-{options.suite}-{options.direction}"
    for path in draw(rows, (options.output or options.results.parent) / stem):
        print(path)


def latest_run(rows: Sequence[Row], suite: str, direction: str) -> list[Row]:
    """The rows of the run that stands last in the file among those that measured this suite in this direction."""
    matching = [row for row in rows if (row["suite"], row["direction"]) == (suite, direction)]
    if not matching:
        advice = "Measure it with benchmarks.run and keep the rows with benchmarks.record"
        raise ValueError(expected("suite", "one with rows in the results", f"{suite} {direction}", advice))
    return [row for row in matching if row["run"] == matching[-1]["run"]]


def panels_of(rows: Sequence[Row]) -> dict[tuple[str, str], list[Row]]:
    """Rows by head_dim (a word) and mask, in the order of the file."""
    panels: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        panels.setdefault((unless_equal(row["head_dim"], "/", row["head_dim_v"]), row["mask"]), []).append(row)
    return panels


def contestant(row: Row) -> str:
    return row["backend"] if row["variant"] == "default" else f"{row['backend']} {row['variant']}"


def tick(row: Row, rows: Sequence[Row]) -> str:
    """What tells a cell from the other cells of its panel: the seqlen, and the heads where the panel has several."""
    seqlen, heads = unless_equal(row["seqlen_q"], ":", row["seqlen_k"]), f"{row['heads_q']}:{row['heads_kv']}"
    tells_all = len({(r["seqlen_q"], r["seqlen_k"]) for r in rows}) == len({cell_key(r) for r in rows})
    return seqlen if tells_all else f"{seqlen}\n{heads}"


def cell_key(row: Row) -> tuple[str, ...]:
    return tuple(row[name] for name in ("batch", "seqlen_q", "seqlen_k", "heads_q", "heads_kv"))


def draw(rows: Sequence[Row], stem: Path) -> list[Path]:
    """Writes `stem`.svg and `stem`.png, the same bytes for the same rows, and returns their paths."""
    import matplotlib
    from matplotlib.figure import Figure

    panels = panels_of(rows)
    masks, dims = (list(dict.fromkeys(key[part] for key in panels)) for part in (1, 0))
    names = list(dict.fromkeys(map(contestant, rows)))
    figure = Figure(figsize=(1.5 + 3.2 * len(dims), 1.2 + 2.4 * len(masks)), dpi=150, layout="constrained")
    grid = figure.subplots(len(masks), len(dims), sharey=True, squeeze=False)
    for mask, line in zip(masks, grid, strict=True):
        for dim, axes in zip(dims, line, strict=True):
            if (dim, mask) in panels:
                draw_panel(axes, panels[dim, mask], names)
                axes.set_title(f"head_dim {dim}, {mask}", fontsize=9)
            else:
                axes.set_axis_off()
        line[0].set_ylabel("TFLOP/s")
    first = rows[0]
    words = f"{first['device']}, {first['suite']} {DIRECTION_WORDS[first['direction']]}, {first['dtype']}"
    figure.suptitle(f"{words}, {first['date']}, commit {first['commit'][:8]}", fontsize=10)
    handles, labels = next(axes for axes in grid.flat if axes.axison).get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(names), frameon=False)
    paths = [stem.with_name(stem.name + ending) for ending in (".svg", ".png")]
    with matplotlib.rc_context({"svg.hashsalt": "cute_fa"}):
        figure.savefig(paths[0], metadata={"Date": None})
        figure.savefig(paths[1])
    return paths


def draw_panel(axes, rows: Sequence[Row], names: Sequence[str]) -> None:
    """A contestant without a number leaves its place empty, marked with a cross on the axis."""
    cells = list(dict.fromkeys(map(cell_key, rows)))
    width = 0.8 / len(names)
    for place, name in enumerate(names):
        mine = {cell_key(row): row["tflops"] for row in rows if contestant(row) == name}
        speeds = [float(mine.get(cell) or 0) for cell in cells]
        left = [number - 0.4 + (place + 0.5) * width for number in range(len(cells))]
        backend, _, variant = name.partition(" ")
        hatch = "///" if variant else None
        axes.bar(
            left, speeds, width, label=name, color=COLOURS.get(backend), hatch=hatch, edgecolor="white", linewidth=0.4
        )
        missing = [x for x, speed in zip(left, speeds, strict=True) if not speed]
        if missing:
            axes.plot(missing, [0] * len(missing), "x", color=COLOURS.get(backend), markersize=4, clip_on=False)
    ticks = {cell_key(row): tick(row, rows) for row in rows}
    axes.set_xticks(range(len(cells)), [ticks[cell] for cell in cells], fontsize=8)
    axes.set_xlabel("seqlen", fontsize=8)
    axes.grid(axis="y", color="#e6e6e6", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


if __name__ == "__main__":
    run_command(main, "benchmarks.plot")
