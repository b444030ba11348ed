"""The picture of a run: its loss over the steps, raw and smoothed. Needs matplotlib, which is imported when drawing."""

from collections.abc import Sequence
from pathlib import Path

from cute_fa.examples.train_gpt.trainer import StepResult

SMOOTHED_SHARE = 40  # one part of the run in so many goes into the mean on each side of a step


def smoothed(losses: Sequence[float]) -> list[float]:
    """Means over a window round each step. It grows from the first step, so that the steep beginning stays true."""
    reach = max(1, len(losses) // SMOOTHED_SHARE)
    windows = (losses[max(0, i - reach) : i + min(i, reach) + 1] for i in range(len(losses)))
    return [sum(window) / len(window) for window in windows]


def draw_loss(path: Path, results: Sequence[StepResult], title: str, validation: float | None = None):
    """Writes a PNG. validation: the loss on held-out text after the last step, None where it was not measured."""
    from matplotlib.figure import Figure

    steps, losses = [result.step for result in results], [result.loss for result in results]
    figure = Figure(figsize=(8, 4.5), dpi=150, layout="constrained")
    axes = figure.add_subplot()
    axes.plot(steps, losses, color="#9ec5e8", linewidth=0.9, label="each step")
    axes.plot(steps, smoothed(losses), color="#1f5f9e", linewidth=2, label="smoothed")
    if validation is not None:
        label = f"held-out text at the end: {validation:.2f}"
        axes.plot(steps[-1], validation, "o", color="#d1495b", markersize=6, label=label, clip_on=False, zorder=3)
    axes.set(title=title, xlabel="step", ylabel="loss (nats per byte)")
    axes.margins(x=0)
    axes.grid(color="#e6e6e6", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(path)
