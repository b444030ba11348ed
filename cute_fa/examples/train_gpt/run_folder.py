"""RunFolder: what a run leaves on disk: the log, the checkpoint, and where its picture goes."""

import os
from collections.abc import Iterator
from pathlib import Path

import torch

from cute_fa.core.errors import expected
from cute_fa.examples.train_gpt.trainer import StepResult, Trainer

LOG_HEADER = "step,loss,tokens_per_s"


class RunFolder:
    """The files of one run. Nothing is created before the first row, so a run that cannot start leaves nothing."""

    def __init__(self, path: Path):
        self.path = path
        self.log, self.checkpoint, self.picture = path / "log.csv", path / "checkpoint.pt", path / "loss.png"

    def check_new(self):
        """Refuses a folder that holds a run."""
        if self.log.exists() or self.checkpoint.exists():
            advice = f"Go on with it by --resume {self.path}, or choose another folder"
            raise ValueError(expected("out", "a folder without a run", self.path, advice))
        if self.path.exists() and not self.path.is_dir():
            raise ValueError(expected("out", "a folder", self.path, "Choose another name"))

    def record(self, trainer: Trainer) -> Iterator[StepResult]:
        """Runs the trainer to its end, or until its `stop()`, with a row for each step, and saves it.

        A process that was killed may have logged steps after its last checkpoint: they are trained again, so their
        rows go first.
        """
        if self.log.exists():
            lines = self.log.read_text().splitlines(keepends=True)
            self.log.write_text("".join(lines[: 1 + trainer.step]))
        for result in trainer.run():
            self.append(result)
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
            advice = "Name the folder of a run that ended or was stopped by Ctrl-C"
            raise ValueError(expected("resume", f"a folder with {self.checkpoint.name}", self.path, advice))
        return torch.load(self.checkpoint, map_location="cpu", weights_only=True)
