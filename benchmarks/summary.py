"""What a run says when it ends: a table of TFLOP/s, ratios of cute_fa to its peers, and the reasons of empty cells.

Ratios above 1 mean that cute_fa is faster. They compare rows of one run only.
"""

import math
from collections.abc import Iterable, Mapping, Sequence

from benchmarks.suites import SUITES, cell_name

Row = Mapping[str, object]
OURS = "cute_fa"


def summary(rows: Sequence[Row]) -> str:
    """Of the rows of one run: for each direction and variant a table and mean ratios, then the reasons."""
    blocks = []
    for direction, variant in dict.fromkeys((row["direction"], row["variant"]) for row in rows):
        chosen = [row for row in rows if (row["direction"], row["variant"]) == (direction, variant)]
        lines = [f"{chosen[0]['suite']} {direction} {variant}, TFLOP/s", *table(chosen), *ratio_lines(chosen)]
        blocks.append("\n".join(lines))
    reasons = [f"{label(row)}: {row['reason']}" for row in rows if row["reason"]]
    return "\n\n".join([*blocks, *(["\n".join(reasons)] if reasons else [])])


def label(row: Row) -> str:
    return f"{row['backend']} {cell_name(row)} {row['direction']} {row['variant']}"


def table(rows: Sequence[Row]) -> list[str]:
    """A line a cell, a column a backend, and cute_fa over the best peer."""
    backends = names_of(rows)
    peers = [backend for backend in backends if backend != OURS]
    width = max(len(cell_name(row)) for row in rows)
    lines = [f"{'cell':<{width}}" + "".join(f"{backend:>10}" for backend in backends) + f"{'best peer':>12}"]
    for cell, speeds in by_cell(rows).items():
        numbers = "".join(f"{speeds[name]:>10.1f}" if name in speeds else f"{'-':>10}" for name in backends)
        best = max((speeds[name] for name in peers if name in speeds), default=None)
        ratio = f"{speeds[OURS] / best:>12.3f}" if best and OURS in speeds else f"{'-':>12}"
        lines.append(f"{cell:<{width}}{numbers}{ratio}")
    return lines


def ratio_lines(rows: Sequence[Row]) -> list[str]:
    """The geometric means of cute_fa over each peer, over all cells and over each of the suite's groups."""
    groups = SUITES[rows[0]["suite"]].groups if rows[0]["suite"] in SUITES else ()
    named = {
        f"head_dim {dim} at {length}": [row for row in rows if place(row) == (dim, length)] for dim, length in groups
    }
    if groups:
        named["these together"] = [row for row in rows if place(row) in groups]
    lines = []
    for title, members in {"all cells": rows, **named}.items():
        if members:
            means = ", ".join(mean_ratio(members, peer) for peer in names_of(members) if peer != OURS)
            lines.append(f"{title}: {means}" if means else f"{title}: no peer")
    return lines


def place(row: Row) -> tuple[int, int]:
    return int(row["head_dim"]), int(row["seqlen_q"])


def mean_ratio(rows: Sequence[Row], peer: str) -> str:
    ratios = [speeds[OURS] / speeds[peer] for speeds in by_cell(rows).values() if {OURS, peer} <= set(speeds)]
    if not ratios:
        return f"{OURS}/{peer} - (no cell)"
    return f"{OURS}/{peer} {geometric_mean(ratios):.3f} ({len(ratios)} cells)"


def geometric_mean(values: Sequence[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values))


def names_of(rows: Iterable[Row]) -> list[str]:
    return list(dict.fromkeys(row["backend"] for row in rows))


def by_cell(rows: Iterable[Row]) -> dict[str, dict[str, float]]:
    """TFLOP/s by cell and backend, without the rows that have a reason instead."""
    cells: dict[str, dict[str, float]] = {}
    for row in rows:
        speeds = cells.setdefault(cell_name(row), {})
        if not row["reason"]:
            speeds[row["backend"]] = float(row["tflops"])
    return cells
