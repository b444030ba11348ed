"""A run's files: one row a step whatever happened, checkpoints that are whole, earlier runs that are kept."""

import re
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from cute_fa.examples.train_gpt import run_folder
from cute_fa.examples.train_gpt.run_folder import RunFolder
from cute_fa.examples.train_gpt.train_config import preset
from cute_fa.examples.train_gpt.trainer import StepResult, Trainer


@pytest.fixture
def config(tmp_path):
    (tmp_path / "text").write_text("one two three " * 50)
    return preset("cpu", steps=5, batch=2, seqlen=16, width=16, layers=1, heads=2, text=str(tmp_path / "text"))


@pytest.fixture
def folder(tmp_path):
    return RunFolder(tmp_path / "runs" / "one")


def test_log_and_checkpoint(folder, config):
    results = list(folder.record(Trainer(config)))
    lines = folder.log.read_text().splitlines()
    assert lines[0] == "step,loss,tokens_per_s", "the header"
    assert [line.split(",")[0] for line in lines[1:]] == ["0", "1", "2", "3", "4"], "one row a step"
    assert all(re.fullmatch(r"\d+,\d\.\d+,\d+\.\d", line) for line in lines[1:]), "three numbers each"
    assert [float(line.split(",")[1]) for line in lines[1:]] == pytest.approx([r.loss for r in results]), "its losses"
    assert folder.load()["step"] == 5, "saved at the end"
    assert sorted(path.name for path in folder.path.iterdir()) == ["checkpoint.pt", "log.csv"], "and nothing else"


def test_results_are_the_rows(folder):
    folder.path.mkdir(parents=True)
    folder.log.write_text("step,loss,tokens_per_s\n0,5.5,10.0\n1,4.25,20.5\n")
    assert folder.results() == [StepResult(0, 5.5, 10.0), StepResult(1, 4.25, 20.5)], "as numbers"


def test_rows_are_on_disk_after_each_step(folder, config):
    for result in folder.record(Trainer(config)):
        assert len(folder.log.read_text().splitlines()) == result.step + 2, "header and rows so far"


def test_stopped_run_goes_on_with_one_row_a_step(folder, config):
    unbroken = RunFolder(folder.path.parent / "two")
    list(unbroken.record(Trainer(config)))
    trainer = Trainer(config)
    for result in folder.record(trainer):
        if result.step == 1:
            trainer.stop()
    assert folder.load()["step"] == 2, "saved when stopped"
    list(folder.record(Trainer.from_state(folder.load())))
    losses = [[line.rsplit(",", 1)[0] for line in each.log.read_text().splitlines()] for each in (folder, unbroken)]
    assert losses[0] == losses[1], "steps and losses as if nothing had happened"


def test_saves_each_minute_so_that_a_killed_run_can_go_on(folder, config, monkeypatch):
    seconds, saved = 0, []
    monkeypatch.setattr(run_folder, "time", SimpleNamespace(monotonic=lambda: seconds))
    for _ in folder.record(Trainer(replace(config, steps=8))):
        saved.append(folder.load()["step"] if folder.checkpoint.exists() else None)
        seconds += 25
    # Step i ends at 25 i seconds: the first at 60 or later is step 3 at 75, from there it is step 6 at 150.
    assert saved == [None, None, None, 4, 4, 4, 7, 7], "steps in the checkpoint after each step"
    assert folder.load()["step"] == 8, "and it is saved at the end"


def test_rows_after_the_last_checkpoint_are_trained_again(folder, config):
    list(folder.record(Trainer(replace(config, steps=3))))
    with folder.log.open("a") as file:
        file.write("3,1.0,1.0\n4,1.0,1.0\n5,1")  # killed while it wrote
    list(folder.record(Trainer.from_state(folder.load(), steps=5)))
    results = folder.results()
    assert [result.step for result in results] == [0, 1, 2, 3, 4], "one row a step"
    assert all(result.loss > 2 for result in results), "the killed rows are gone"


def test_nothing_is_created_before_the_first_step(folder, config, monkeypatch):
    def fail(self):
        raise ValueError("cannot start")

    monkeypatch.setattr(Trainer, "_train_step", fail)
    with pytest.raises(ValueError, match="cannot start"):
        list(folder.record(Trainer(config)))
    assert not folder.path.exists(), "so the same folder can be named again"


@pytest.mark.parametrize(
    "names, advice",
    [
        pytest.param(
            ["log.csv", "checkpoint.pt"], "Go on with it by --resume {}, or choose another folder.", id="saved"
        ),
        pytest.param(
            ["log.csv"], "It was killed before its first checkpoint: remove it, or choose another folder.", id="killed"
        ),
    ],
)
def test_folder_with_a_run_is_refused(names, advice, folder):
    folder.check_new()
    folder.path.mkdir(parents=True)
    folder.check_new()
    for name in names:
        (folder.path / name).write_text("")
    with pytest.raises(ValueError) as caught:
        folder.check_new()
    message = f"out: expected a folder without a run, got {folder.path}. {advice.format(folder.path)}"
    assert str(caught.value) == message, "says what can be done"


def test_check_leaves_nothing(folder, tmp_path):
    folder.check_new()
    assert not list(tmp_path.iterdir()), "neither the folder nor a file in the one above"


# A folder that cannot be written even by root is or lies below a regular file, or is a link to nowhere.
@pytest.mark.parametrize(
    "name, place, reason",
    [
        pytest.param("file", "file", "Not a directory", id="a-file"),
        pytest.param("file/far/below", "file", "Not a directory", id="far-below-a-file"),
        pytest.param("nowhere", "nowhere", "No such file or directory", id="dangling-link"),
    ],
)
def test_place_that_cannot_be_written_is_refused(name, place, reason, tmp_path):
    (tmp_path / "file").write_text("")
    (tmp_path / "nowhere").symlink_to(tmp_path / "absent" / "absent")
    with pytest.raises(ValueError) as caught:
        RunFolder(tmp_path / name).check_new()
    got = f"{tmp_path / name} ({tmp_path / place}: {reason})"
    message = f"out: expected a folder that can be written, got {got}. Choose another."
    assert str(caught.value) == message, "names the place and the reason"


def test_folder_without_checkpoint_is_refused(folder):
    with pytest.raises(ValueError, match="^resume: expected a folder with checkpoint.pt, got .*/runs/one. Name the "):
        folder.load()


@pytest.mark.parametrize(
    "damage",
    [
        pytest.param(lambda whole: b"", id="empty"),
        pytest.param(lambda whole: whole[:300], id="cut"),
        pytest.param(lambda whole: b"text\n", id="foreign"),
    ],
)
def test_damaged_checkpoint_is_refused(damage, folder):
    folder.path.mkdir(parents=True)
    folder.save({"step": 1, "model": torch.zeros(100)})
    folder.checkpoint.write_bytes(damage(folder.checkpoint.read_bytes()))
    message = r"^resume: expected a folder whose checkpoint.pt can be read, got .*/runs/one \(\w+\). Train anew "
    with pytest.raises(ValueError, match=message):
        folder.load()


def test_failed_save_keeps_the_earlier_checkpoint(folder, monkeypatch):
    folder.path.mkdir(parents=True)
    folder.save({"step": 1})

    def fail(state, path):
        path.write_bytes(b"half")
        raise OSError("disk full")

    monkeypatch.setattr(torch, "save", fail)
    with pytest.raises(OSError, match="disk full"):
        folder.save({"step": 2})
    assert folder.load() == {"step": 1}, "whole and unchanged"
