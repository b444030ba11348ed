"""`cute-fa train`: the options and the display of `cute_fa.examples.train_gpt`, which does the work.

Torch and the example are imported inside functions, so that help is fast.
"""

import math
import os
import shlex
import statistics
import textwrap
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

SAMPLE_BYTES = 240
NUM_LINES = 10  # of progress, where the output is not a terminal


def train(
    steps: Annotated[int | None, typer.Option(help="Total number of steps: 200 on a CPU, 500 on a GPU.")] = None,
    text: Annotated[Path | None, typer.Option(help="File to train on, else Python's standard library.")] = None,
    attention: Annotated[str | None, typer.Option(help="cute_fa, or torch's sdpa to compare.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda; cuda where a GPU runs the attention.")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder for the run, else runs/<date and time>.")] = None,
    resume: Annotated[Path | None, typer.Option(help="Folder of a run to go on with; --steps may extend it.")] = None,
    batch: Annotated[int | None, typer.Option(help="Sequences a step: 16 on a CPU, 32 on a GPU.")] = None,
    seqlen: Annotated[int | None, typer.Option(help="Bytes a sequence: 128 on a CPU, 1024 on a GPU.")] = None,
    seed: Annotated[int | None, typer.Option(help="Of the weights and the batches: 0.")] = None,
    is_compiled: Annotated[
        bool | None, typer.Option("--compile/--no-compile", help="Run the training steps through torch.compile.")
    ] = None,
) -> None:
    """Train a small GPT on real text. Ctrl-C saves and stops; --resume goes on as if nothing had happened."""
    import torch

    from cute_fa.core.errors import expected
    from cute_fa.examples.train_gpt.interrupt import on_interrupt
    from cute_fa.examples.train_gpt.run_folder import RunFolder
    from cute_fa.examples.train_gpt.train_config import TrainConfig, preset
    from cute_fa.examples.train_gpt.trainer import Trainer

    # Torch's threads wait for each other: where they fill every core, any other process slows all of them down.
    torch.set_num_threads(max(1, min(torch.get_num_threads(), (os.cpu_count() or 2) - 1)))
    text = text and str(text.resolve())  # a resumed run finds it from any folder
    fixed = given(text=text, attention=attention, batch=batch, seqlen=seqlen, seed=seed)
    if resume:
        unwanted = fixed | given(out=out)
        if unwanted:
            name, value = unwanted.popitem()
            raise ValueError(expected(name, "no value beside resume", value, "Leave it out: the run keeps its own"))
        folder = RunFolder(resume)
        state, changes = folder.load(), given(steps=steps, device=device, is_compiled=is_compiled)
        refused = refusal(TrainConfig(**state["config"] | changes))
        if refused:
            raise type(refused)(f"{refused} Use --device cpu.")
        trainer = Trainer.from_state(state, **changes)
    else:
        folder = RunFolder(out or Path("runs", datetime.now().strftime("%Y-%m-%d_%H-%M-%S")))
        folder.check_new()
        facts = given(steps=steps, is_compiled=is_compiled) | fixed
        config = preset(device or ("cuda" if has_gpu() else "cpu"), **facts)
        refused = refusal(config)
        if refused and device:
            raise type(refused)(f"{refused} Use --device cpu, or --attention sdpa.")
        trainer = Trainer(preset("cpu", **facts) if refused else config)

    report = Report(Console(highlight=False, markup=False, soft_wrap=True), trainer, folder)
    if refused:
        report.say(f"The GPU is not used, --attention sdpa would use it: {refused}")
    report.open()
    progress = report.bar if report.console.is_terminal else report.lines
    with on_interrupt(trainer.stop), progress() as show:
        for result in folder.record(trainer):
            show(result)
    if trainer.step < trainer.config.steps:
        command = f"cute-fa train --resume {shlex.quote(str(folder.path))}"
        report.say(f"\nStopped after {trainer.step} of {trainer.config.steps} steps. Go on with: {command}")
        report.draw()
        raise typer.Exit(130)
    report.close()


def given(**options) -> dict:
    """The options that have a value."""
    return {name: value for name, value in options.items() if value is not None}


def has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def refusal(config) -> RuntimeError | None:
    """Why cute_fa cannot run on the GPU, or None. Asks the public call, with an empty batch."""
    import torch

    import cute_fa
    from cute_fa.core.errors import DeviceError

    if config.attention != "cute_fa" or config.device != "cuda" or not has_gpu():
        return None
    shape = (0, config.seqlen, config.heads, config.width // config.heads)
    try:
        cute_fa.flash_attn_func(*(torch.empty(shape, device="cuda", dtype=torch.bfloat16) for _ in range(3)), causal=True)
    except DeviceError as error:
        return error


class Report:
    """What the terminal shows of one run, before, during and after."""

    def __init__(self, console: Console, trainer, folder):
        import torch

        from cute_fa.core.hardware import gpu_by_device_name

        self.console, self.trainer, self.folder, self.config = console, trainer, folder, trainer.config
        self.begin = time.perf_counter()
        is_gpu = self.config.device == "cuda"
        device_name = torch.cuda.get_device_name() if is_gpu else "CPU"
        self.gpu = gpu_by_device_name(device_name) if is_gpu else None
        millions = trainer.model.num_parameters / 1e6
        compiled = ", compiled" * self.config.is_compiled
        self.title = f"{self.config.attention} attention{compiled}, {millions:.2f} M parameters, {device_name}"

    def open(self):
        config, corpus = self.config, self.trainer.corpus
        shape = f"{config.layers} layers, width {config.width}, {config.heads} heads"
        self.say(f"{self.title}: {shape}, {config.batch} sequences of {config.seqlen} bytes a step")
        train, held_out = len(corpus.train) / 1e6, len(corpus.held_out) / 1e6
        self.say(f"text: {corpus.name}, {train:.2f} MB to train on and {held_out:.2f} MB held out")
        self.say(f"run folder: {self.folder.path}\n")

    def say(self, line: str):
        self.console.print(line)

    def speed(self, tokens_per_s: float) -> str:
        words = f"{tokens_per_s:,.0f} tokens/s"
        if self.gpu is None:
            return words
        share = tokens_per_s * self.trainer.model.flops_per_token / (self.gpu.peak_bf16_tflops * 1e12)
        return f"{words}, {share:.0%} of peak"

    @contextmanager
    def bar(self) -> Iterator[Callable]:
        """Yields a function that shows a step's result as a progress bar."""
        columns = (BarColumn(bar_width=16), MofNCompleteColumn(), TextColumn("{task.description}"), TimeRemainingColumn())
        with Progress(*columns, console=self.console) as progress:
            task = progress.add_task("", total=self.config.steps, completed=self.trainer.step)

            def show(result):
                description = f"loss {result.loss:.3f}  {self.speed(result.tokens_per_s)}"
                progress.update(task, completed=result.step + 1, description=description)

            yield show

    @contextmanager
    def lines(self) -> Iterator[Callable]:
        """Yields a function that shows about every tenth of the run as a plain line."""
        every = max(1, self.config.steps // NUM_LINES)

        def show(result):
            if result.step % every == 0 or result.step == self.config.steps - 1:
                self.say(f"step {result.step:>6}  loss {result.loss:.3f}  {self.speed(result.tokens_per_s)}")

        yield show

    def draw(self, validation: float | None = None) -> list[str]:
        """Draws the picture where matplotlib is installed; returns the names of the files in the folder."""
        from cute_fa.examples.train_gpt.loss_plot import draw_loss

        files = [self.folder.log.name, self.folder.checkpoint.name]
        try:
            draw_loss(self.folder.picture, self.folder.results(), self.title, validation)
        except ModuleNotFoundError:
            self.say("No loss.png without matplotlib. Run: pip install 'cute-fa[bench]'")
            return files
        return [*files, self.folder.picture.name]

    def close(self):
        """The summary; validation and sample are computed here."""
        seconds = time.perf_counter() - self.begin
        results, validation = self.folder.results(), self.trainer.validation_loss()
        files = ", ".join(self.draw(validation))
        # The median leaves out the first step, which also warms up or compiles.
        speed = self.speed(statistics.median(result.tokens_per_s for result in results))
        self.say("")
        self.say(f"loss      {results[0].loss:.3f} at step {results[0].step}, {results[-1].loss:.3f} at step {results[-1].step}")
        self.say(f"held out  {validation:.3f} nats or {validation / math.log(2):.3f} bits per byte")
        self.say(f"speed     {speed}, {seconds:.0f} s for training")
        self.say(f"files     {self.folder.path}: {files}")
        sample = self.trainer.sample(SAMPLE_BYTES)
        # ASCII alone, which every terminal's encoding can show.
        visible = "".join(chr(byte) if 32 <= byte < 127 or byte == 10 else "." for byte in sample)
        self.say(f"sample\n{textwrap.indent(visible, '          ')}")
