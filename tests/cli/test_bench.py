"""`cute-fa bench`: it passes its options on in a checkout, and says what is missing outside of one or without a GPU."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import benchmarks.run
from cute_fa.cli import main

PACKAGE = Path(__file__).parents[2] / "cute_fa"


def run_main(monkeypatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["cute-fa", "bench", *arguments])
    with pytest.raises(SystemExit) as stop:
        main()
    return stop.value.code


def test_options_are_passed_on(monkeypatch):
    seen = []
    monkeypatch.setattr(benchmarks.run, "main", lambda arguments, prog: seen.append((arguments, prog)))
    options = ["--suite", "grid", "--backends", "cute_fa", "fa4", "--output", "x.csv", "--commit", "abc", "--rounds=7"]
    assert run_main(monkeypatch, *options) == 0, "success"
    assert seen == [(options, "cute-fa bench")], "every word, in order"


def test_help_is_that_of_the_benchmarks(monkeypatch, capsys):
    assert run_main(monkeypatch, "--help") == 0, "help succeeds"
    out = capsys.readouterr().out
    assert out.startswith("usage: cute-fa bench "), "named as it was called"
    for option in ("--suite", "--backends", "--direction", "--output", "--commit", "--only", "--rounds"):
        assert option in out, f"help does not name {option}"


def test_wrong_options(monkeypatch, capsys):
    assert run_main(monkeypatch, "--suite", "nonsense") == 2, "a wrong argument"
    assert "nonsense" in capsys.readouterr().err, "which one"


def test_without_a_gpu_is_one_line(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    code = run_main(monkeypatch, "--suite", "grid", "--output", str(tmp_path / "x.csv"), "--commit", "abc")
    err = capsys.readouterr().err
    assert code == 1 and err.startswith("cute-fa: device: expected a CUDA GPU") and err.count("\n") == 1, err


def test_outside_a_checkout_is_one_line(tmp_path):
    shutil.copytree(PACKAGE, tmp_path / "cute_fa", ignore=shutil.ignore_patterns("__pycache__"))
    command = [sys.executable, "-m", "cute_fa", "bench", "--suite", "grid"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 1 and not done.stdout, done.stderr
    assert done.stderr.startswith("cute-fa: bench: expected a checkout of the repository"), done.stderr
    assert done.stderr.count("\n") == 1, done.stderr
