"""A run's files: one row a step whatever happened, checkpoints that are whole, earlier runs that are kept."""

import re
from dataclasses import replace

import pytest
import torch

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


@pytest.mark.parametrize("name", ["log.csv", "checkpoint.pt"])
def test_folder_with_a_run_is_refused(name, folder):
    folder.check_new()
    folder.path.mkdir(parents=True)
    folder.check_new()
    (folder.path / name).write_text("")
    with pytest.raises(ValueError) as caught:
        folder.check_new()
    assert str(caught.value) == (
        f"out: expected a folder without a run, got {folder.path}. "
        f"Go on with it by --resume {folder.path}, or choose another folder."
    ), "advises"


def test_file_in_place_of_the_folder_is_refused(folder):
    folder.path.parent.mkdir()
    folder.path.write_text("")
    with pytest.raises(ValueError, match="^out: expected a folder, got .*/runs/one. Choose another name.$"):
        folder.check_new()


def test_folder_without_checkpoint_is_refused(folder):
    with pytest.raises(ValueError, match="^resume: expected a folder with checkpoint.pt, got .*/runs/one. Name the "):
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
