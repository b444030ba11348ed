"""Training works, repeats, goes on exactly, stops when asked; both attentions train alike."""

import math
from dataclasses import replace
from itertools import islice

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from cute_fa.examples.train_gpt.train_config import preset
from cute_fa.examples.train_gpt.trainer import Trainer, learning_rate


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """small(**changes): a config that trains in a second, on a text of one sentence over and over."""
    text = tmp_path_factory.mktemp("text") / "sentences.txt"
    text.write_text("The quick brown fox jumps over the lazy dog. " * 50)
    sizes = {"steps": 6, "batch": 4, "seqlen": 32, "width": 32, "layers": 2, "heads": 2, "warmup": 5}
    return lambda **changes: preset("cpu", **{"text": str(text), **sizes, **changes})


def losses(trainer: Trainer) -> list[float]:
    return [result.loss for result in trainer.run()]


def test_loss_falls(small):
    results = list(Trainer(small(steps=60)).run())
    assert [result.step for result in results] == list(range(60)), "one result a step, from 0"
    assert results[0].loss == pytest.approx(math.log(256), abs=0.3), "before training every byte is as likely"
    assert results[-1].loss < 2.5, "28 letters and signs alone would leave 3.3"
    assert all(result.tokens_per_s > 0 for result in results), "the speed is measured"


def test_same_seed_same_losses(small):
    assert losses(Trainer(small(seed=3))) == losses(Trainer(small(seed=3))), "bit for bit"
    assert losses(Trainer(small(seed=3))) != losses(Trainer(small(seed=4))), "another seed is another run"


def test_both_attentions_train_alike(small):
    by_name = [losses(Trainer(small(steps=3, attention=name))) for name in ("cute_fa", "sdpa")]
    assert by_name[0] == pytest.approx(by_name[1], abs=1e-3), "the same mathematics"


def test_resumed_run_equals_the_unbroken_one(small, tmp_path):
    unbroken = Trainer(small(steps=6))
    expected = losses(unbroken)
    first = Trainer(small(steps=2))
    begun = losses(first)
    torch.save(first.state(), tmp_path / "state")
    second = Trainer.from_state(torch.load(tmp_path / "state", weights_only=True), steps=6)
    assert begun + losses(second) == expected, "bit for bit"
    for name, weight in second.model.state_dict().items():
        assert weight.equal(unbroken.model.state_dict()[name]), name


@pytest.mark.parametrize("attention", ["cute_fa", "sdpa"])
def test_compiled_steps_train_alike(small, attention, monkeypatch):
    """One graph without breaks; state, validation and sample are of the plain module."""
    counter, compile_ = CompileCounterWithBackend("aot_eager"), torch.compile
    monkeypatch.setattr(torch, "compile", lambda model: compile_(model, backend=counter, fullgraph=True))
    plain, compiled = (Trainer(small(attention=attention, is_compiled=is_on)) for is_on in (False, True))
    assert losses(compiled) == pytest.approx(losses(plain), rel=1e-4), "the same mathematics"
    assert plain.state()["model"].keys() == compiled.state()["model"].keys(), "names of the weights"
    for trainer in (plain, compiled):
        resumed = Trainer.from_state(trainer.state(), steps=7, is_compiled=not trainer.config.is_compiled)
        assert resumed.validation_loss() == trainer.validation_loss(), "the same weights"
        assert resumed.sample(4) == trainer.sample(4), "and the same sample"
        assert len(losses(resumed)) == 1, "goes on"
    assert counter.frame_count in (1, 2), "whole graphs: one for each compiled run at most"


def test_stop_ends_after_the_step_in_hand(small):
    trainer, seen = Trainer(small(steps=6)), []
    for result in trainer.run():
        seen.append(result.step)
        if result.step == 2:
            trainer.stop()
    assert seen == [0, 1, 2] and trainer.step == 3, "no further step"
    assert [result.step for result in trainer.run()] == [3, 4, 5], "and it can go on"


def test_resume_refuses_another_text(small, tmp_path):
    text = tmp_path / "changing.txt"
    text.write_text("one two three " * 50)
    state = Trainer(small(text=str(text))).state()
    text.write_text("one two four " * 50)
    with pytest.raises(ValueError, match="^text: expected the text of the run, got another one in changing.txt. "):
        Trainer.from_state(state)


def test_resume_refuses_a_finished_run(small):
    trainer = Trainer(small(steps=2))
    losses(trainer)
    message = "^steps: expected more than the 2 steps done, got 2. Ask for a larger total.$"
    with pytest.raises(ValueError, match=message):
        Trainer.from_state(trainer.state())


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_cuda_without_a_gpu_is_refused(small):
    with pytest.raises(ValueError, match="^device: expected cpu where torch finds no GPU, got cuda. Use cpu.$"):
        Trainer(replace(small(), device="cuda"))


@pytest.mark.parametrize(
    "step, rate",
    [
        pytest.param(0, 0.1, id="first"),
        pytest.param(4, 0.5, id="warming-up"),
        pytest.param(9, 1.0, id="peak"),
        pytest.param(39, 0.5, id="four-times-later"),
        pytest.param(999, 0.1, id="hundred-times-later"),
    ],
)
def test_learning_rate(small, step, rate):
    assert learning_rate(small(learning_rate=1.0, warmup=10), step) == pytest.approx(rate), "of a peak of 1 at step 9"


def test_learning_rate_reaches_the_optimizer(small):
    trainer = Trainer(small(learning_rate=1.0, warmup=10))
    next(islice(trainer.run(), 1, None))
    assert trainer.optimizer.param_groups[0]["lr"] == pytest.approx(0.2), "the rate of step 1"


def test_gradients_are_clipped(small):
    trainer, norms = Trainer(small(steps=3)), []
    torch.nn.init.normal_(trainer.model.head.weight, generator=torch.Generator().manual_seed(0))  # 50 times too large

    def record(*_):
        norms.append(math.sqrt(sum(weight.grad.square().sum().item() for weight in trainer.model.parameters())))

    trainer.optimizer.register_step_pre_hook(record)
    losses(trainer)
    assert norms == pytest.approx([1.0] * 3, rel=1e-4), "steep gradients reach the optimizer with norm 1"


def test_validation_loss_of_a_model_that_knows_nothing(small):
    trainer = Trainer(small())
    torch.nn.init.zeros_(trainer.model.head.weight)
    assert trainer.validation_loss() == pytest.approx(math.log(256)), "every byte is as likely"


def test_validation_reads_the_held_out_text(small, tmp_path):
    text = tmp_path / "two_halves.txt"
    text.write_text("a" * 1900 + "b" * 100)
    trainer = Trainer(small(text=str(text), steps=60))
    assert losses(trainer)[-1] < 0.5, "the training text is easy"
    assert trainer.validation_loss() > 3, "the held-out text was never seen"


def test_sample(small):
    trainer = Trainer(small(steps=100, learning_rate=1e-2))
    losses(trainer)
    text = trainer.sample(64)
    assert len(text) == 64 and text == trainer.sample(64), "longer than a sequence, and the same each time"
    assert set(text) <= set(b"The quick brown fox jumps over the lazy dog. "), "of the letters it was trained on"
