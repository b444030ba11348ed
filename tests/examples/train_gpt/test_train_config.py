"""What a TrainConfig refuses, in the package's one form of messages."""

import pytest

from cute_fa.examples.train_gpt.train_config import preset


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
