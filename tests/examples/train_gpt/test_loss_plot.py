"""The smoothed line, and a picture that can be opened."""

import pytest

from cute_fa.examples.train_gpt.loss_plot import draw_loss, smoothed
from cute_fa.examples.train_gpt.trainer import StepResult


def test_smoothed_by_hand():
    # A run of 5 reaches one step to each side: itself, then means of three, at the end of the last two.
    assert smoothed([6.0, 3.0, 0.0, 3.0, 9.0]) == [6.0, 3.0, 2.0, 4.0, 6.0], "means round each step"
    assert smoothed([5.0]) == [5.0], "one step is its own mean"


def test_smoothing_reaches_further_in_longer_runs():
    spike = [0.0] * 200
    spike[100] = 11.0
    # A fortieth of 200 is 5 to each side, 11 steps in all.
    assert smoothed(spike) == [0.0] * 95 + [1.0] * 11 + [0.0] * 94, "the spike spreads over its window"


@pytest.mark.parametrize("validation", [None, 4.5], ids=["stopped", "ended"])
def test_picture(validation, tmp_path):
    pillow = pytest.importorskip("PIL.Image", reason="needs matplotlib, which brings pillow")
    results = [StepResult(step, 6.0 - step / 10, 100.0) for step in range(10)]
    draw_loss(tmp_path / "loss.png", results, "a title", validation)
    with pillow.open(tmp_path / "loss.png") as picture:
        assert picture.size == (1200, 675), "8 x 4.5 inches at 150 dots each"
        assert len(picture.convert("RGB").getcolors(2**16)) > 20, "something is drawn"
