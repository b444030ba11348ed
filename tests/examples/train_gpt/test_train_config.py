"""What a TrainConfig refuses, in the package's one form of messages, and the tracked log of the default run."""

from pathlib import Path

import pytest

from cute_fa.examples.train_gpt.train_config import preset

LOG = Path(__file__).parents[3] / "benchmarks" / "results" / "train_cpu" / "log.csv"


@pytest.mark.parametrize(
    "changes, message",
    [
        pytest.param({"steps": 0}, "steps: expected a whole number >= 1, got 0.", id="no-steps"),
        pytest.param({"batch": -1}, "batch: expected a whole number >= 1, got -1.", id="batch"),
        pytest.param({"seqlen": 0}, "seqlen: expected a whole number >= 1, got 0.", id="seqlen"),
        pytest.param({"heads": 5}, "heads: expected a divisor of half the width, 64, got 5.", id="heads"),
        pytest.param({"heads": 128}, "heads: expected a divisor of half the width, 64, got 128.", id="odd-head-dim"),
        pytest.param({"attention": "fast"}, "attention: expected cute_fa or sdpa, got fast.", id="attention"),
        pytest.param({"seed": -1}, "seed: expected a whole number from 0 to 2**63 - 1, got -1.", id="seed"),
    ],
)
def test_wrong_values_are_refused(changes, message):
    with pytest.raises(ValueError) as caught:
        preset("cpu", **changes)
    assert str(caught.value).startswith(message), "names the field, the rule and the value"


def test_unknown_device_is_refused():
    with pytest.raises(ValueError, match="^device: expected cpu or cuda, got tpu. Choose one of these.$"):
        preset("tpu")


def test_each_device_has_its_preset():
    assert (preset("cpu").width, preset("cuda").width) == (128, 1024), "small for a CPU, GPT-2's size for a GPU"
    assert preset("cuda", steps=7).steps == 7 and preset("cuda", steps=7).seqlen == 1024, "only what is named changes"


def test_tracked_log_is_of_a_default_run_that_learned():
    header, *rows = (line.split(",") for line in LOG.read_text().splitlines())
    assert header == ["step", "loss", "tokens_per_s"], "the columns of a run's log"
    assert [int(row[0]) for row in rows] == list(range(preset("cpu").steps)), "one row a step of the default run"
    losses = [float(row[1]) for row in rows]
    assert losses[0] == pytest.approx(5.5, abs=0.1), "before training every byte is about as likely: log(256)"
    assert losses[39] < losses[0] - 1, "forty steps are enough to see it learn"
    assert losses[-1] < 3, "and it has learned"
