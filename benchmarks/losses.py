"""Training runs beside each other: `python -m benchmarks.losses FOLDER` prints and draws their losses. It never trains.

FOLDER holds the logs of `cute-fa train` (log.csv of a run folder), each as `<attention>-seed<number>.csv`. Writes
FOLDER/losses.png. Needs matplotlib (extra `bench`).
"""

import argparse
import csv
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.command import run_command
from benchmarks.plot import COLOURS
from cute_fa.core.errors import expected
from cute_fa.examples.train_gpt.loss_plot import smoothed

LAST_STEPS = 50  # over which a run's final loss is averaged

# Losses of one run and its median tokens/s.
Run = tuple[list[float], float]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.losses", description="Print and draw losses of training runs.")
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="of logs named <attention>-seed<number>.csv")
    folder = parser.parse_args(arguments).folder
    runs = read_runs(folder)
    for name, seeds in runs.items():
        finals = [statistics.fmean(losses[-LAST_STEPS:]) for losses, _ in seeds.values()]
        each = ", ".join(f"{final:.4f}" for final in finals)
        print(f"{name}: loss {statistics.fmean(finals):.4f} (seeds {each}), {speed(seeds):,.0f} tokens/s")
    print(draw(runs, folder / "losses.png"))


def read_runs(folder: Path) -> dict[str, dict[str, Run]]:
    """Attention -> seed -> run."""
    runs: dict[str, dict[str, Run]] = {}
    for path in sorted(folder.glob("*-seed*.csv")):
        attention, _, seed = path.stem.rpartition("-seed")
        with path.open(newline="") as file:
            rows = list(csv.DictReader(file))
        losses, speeds = ([float(row[column]) for row in rows] for column in ("loss", "tokens_per_s"))
        runs.setdefault(attention, {})[seed] = losses, statistics.median(speeds)
    if not runs:
        raise ValueError(expected("folder", "logs named <attention>-seed<number>.csv", folder, "Train first"))
    return runs


def speed(seeds: Mapping[str, Run]) -> float:
    return statistics.median(tokens_per_s for _, tokens_per_s in seeds.values())


def draw(runs: Mapping[str, Mapping[str, Run]], path: Path) -> Path:
    """A line for each run, smoothed; runs of one attention share a colour."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), dpi=150, layout="constrained")
    axes = figure.add_subplot()
    for name, seeds in runs.items():
        # Ours stands out; what it is compared with is grey.
        colour, label = COLOURS.get(name, "#7f7f7f"), f"{name}: {len(seeds)} seeds, {speed(seeds):,.0f} tokens/s"
        for losses, _ in seeds.values():
            axes.plot(smoothed(losses), color=colour, linewidth=1, label=label, alpha=0.8)
            label = None
    axes.set(xlabel="step", ylabel="loss (nats per byte), smoothed")
    axes.margins(x=0)
    axes.grid(color="#e6e6e6", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(path)
    return path


if __name__ == "__main__":
    run_command(main, "benchmarks.losses")
