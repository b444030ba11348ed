"""RunFolder: what a run leaves on disk: the log, the checkpoint, and where its picture goes."""

import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from cute_fa.core.errors import expected
from cute_fa.examples.train_gpt.trainer import StepResult, Trainer

LOG_HEADER = "step,loss,tokens_per_s"
SECONDS_BETWEEN_SAVES = 60  # not steps: a checkpoint of the GPU preset has 1.5 GB


class RunFolder:
    """The files of one run. Nothing is created before the first row, so a run that cannot start leaves nothing."""

    def __init__(self, path: Path):
        self.path = path
        self.log, self.checkpoint, self.picture = path / "log.csv", path / "checkpoint.pt", path / "loss.png"

    def check_new(self):
        """Refuses a folder that holds a run, and a place that cannot be written.

        Where the folder is not there yet, the nearest one above it, in which it would be made, must take a file.
        """
        if self.checkpoint.exists():
            advice = f"Go on with it by --resume {self.path}, or choose another folder"
            raise ValueError(expected("out", "a folder without a run", self.path, advice))
        if self.log.exists():
            advice = "It was killed before its first checkpoint: remove it, or choose another folder"
            raise ValueError(expected("out", "a folder without a run", self.path, advice))
        place = next(path for path in (self.path, *self.path.absolute().parents) if os.path.lexists(path))
        try:
            tempfile.TemporaryFile(dir=place).close()
        except OSError as error:
            got = f"{self.path} ({place}: {error.strerror})"
            raise ValueError(expected("out", "a folder that can be written", got, "Choose another")) from error

    def record(self, trainer: Trainer) -> Iterator[StepResult]:
        """Runs the trainer to its end, or until its `stop()`, with a row for each step; saves it now and then and last.

        A process that was killed may have logged steps after its last checkpoint: they are trained again, so their
        rows go first.
        """
        if self.log.exists():
            lines = self.log.read_text().splitlines(keepends=True)
            self.log.write_text("".join(lines[: 1 + trainer.step]))
        saved = time.monotonic()
        for result in trainer.run():
            self.append(result)
            if time.monotonic() - saved >= SECONDS_BETWEEN_SAVES:
                self.save(trainer.state())
                saved = time.monotonic()
            yield result
        self.save(trainer.state())

    def append(self, result: StepResult):
        """Adds the row of a step. The file is closed again, so that rows survive whatever ends the process.

        Nine digits tell any two fp32 losses apart.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        is_new = not self.log.exists()
        with self.log.open("a") as file:
            if is_new:
                file.write(f"{LOG_HEADER}\n")
            file.write(f"{result.step},{result.loss:.9g},{result.tokens_per_s:.1f}\n")

    def results(self) -> list[StepResult]:
        """The rows of the log."""
        rows = (line.split(",") for line in self.log.read_text().splitlines()[1:])
        return [StepResult(int(step), float(loss), float(tokens_per_s)) for step, loss, tokens_per_s in rows]

    def save(self, state: dict):
        """Replaces the checkpoint; at every moment the old or the new one is whole."""
        unfinished = self.checkpoint.with_suffix(".unfinished")
        torch.save(state, unfinished)
        os.replace(unfinished, self.checkpoint)

    def load(self) -> dict:
        """The state that was saved last."""
        if not self.checkpoint.exists():
            advice = f"Name the folder of a run that ended, was stopped by Ctrl-C or ran for {SECONDS_BETWEEN_SAVES} s"
            raise ValueError(expected("resume", f"a folder with {self.checkpoint.name}", self.path, advice))
        try:
            return torch.load(self.checkpoint, map_location="cpu", weights_only=True)
        except Exception as error:  # damage shows as RuntimeError, EOFError, UnpicklingError and others
            rule, got = f"a folder whose {self.checkpoint.name} can be read", f"{self.path} ({type(error).__name__})"
            raise ValueError(expected("resume", rule, got, "Train anew into another folder")) from error
