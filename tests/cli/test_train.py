"""`cute-fa train` as its user meets it: a run, its files, how it stops and goes on, and what it refuses."""

import io
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console
from torch._subclasses.fake_tensor import FakeTensorMode

from cute_fa.cli import main
from cute_fa.cli import train as train_file
from cute_fa.cli.train import Report, refusal
from cute_fa.core.errors import DeviceError, NotSupportedError
from cute_fa.examples.train_gpt.run_folder import RunFolder
from cute_fa.examples.train_gpt.train_config import preset
from cute_fa.examples.train_gpt.trainer import StepResult, Trainer

CHECKOUT = Path(__file__).parents[2]
SMALL = ("--device", "cpu", "--batch", "2", "--seqlen", "16", "--text", "text")


@pytest.fixture(autouse=True)
def in_empty_folder(tmp_path, monkeypatch):
    """Each test works in a folder of its own, with a short text."""
    monkeypatch.chdir(tmp_path)
    Path("text").write_text("The quick brown fox jumps over the lazy dog. " * 20)


@pytest.fixture
def command(monkeypatch, capsys):
    """command(*arguments) runs `cute-fa train` here: exit code, stdout, stderr."""

    def run(*arguments: str):
        monkeypatch.setattr(sys, "argv", ["cute-fa", "train", *arguments])
        with pytest.raises(SystemExit) as stop:
            main()
        out, err = capsys.readouterr()
        return stop.value.code, out, err

    return run


def steps_and_losses(folder: str) -> list[str]:
    return [line.rsplit(",", 1)[0] for line in Path(folder, "log.csv").read_text().splitlines()[1:]]


def test_run(command):
    code, out, err = command(*SMALL, "--steps", "20", "--out", "runs/here")
    assert (code, err) == (0, ""), "succeeds"
    sizes = "cute_fa attention, 0.85 M parameters, CPU: 4 layers, width 128, 4 heads, 2 sequences of 16 bytes a step"
    assert out.startswith(sizes), "begins with what is trained"
    assert re.findall(r"^step +(\d+)  loss \d\.\d{3}  [\d,]+ tokens/s$", out, re.MULTILINE) == [
        *("0", "2", "4", "6", "8", "10", "12", "14", "16", "18"),
        "19",
    ], "a line for each tenth of the run and its last step"
    first, last = (float(steps_and_losses("runs/here")[step].split(",")[1]) for step in (0, 19))
    assert f"{first:.3f} at step 0, {last:.3f} at step 19" in out, "the summary has the losses of the log"
    nats, bits = re.search(r"held out +([\d.]+) nats or ([\d.]+) bits per byte", out).groups()
    assert float(bits) == pytest.approx(float(nats) / 0.6931, abs=2e-3), "a bit is 0.6931 nats"
    assert "runs/here: log.csv, checkpoint.pt, loss.png" in out, "names the files"
    written = sorted(path.name for path in Path("runs/here").iterdir())
    assert written == ["checkpoint.pt", "log.csv", "loss.png"], "and has written them"
    assert "sample" in out, "shows what the model writes"


def test_run_folder_is_named_after_the_time(command):
    assert command(*SMALL, "--steps", "1")[0] == 0, "succeeds"
    (folder,) = Path("runs").iterdir()
    assert re.fullmatch(r"\d{4}-\d\d-\d\d_\d\d-\d\d-\d\d", folder.name), "date and time"


def test_resume_extends_a_run_exactly(command, tmp_path, monkeypatch):
    options = (*SMALL, "--seed", "5", "--attention", "sdpa")
    assert command(*options, "--steps", "4", "--out", "unbroken")[0] == 0, "succeeds"
    assert command(*options, "--steps", "2", "--out", "broken")[0] == 0, "succeeds"
    Path("elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")  # the checkpoint knows where the text is
    code, out, _ = command("--resume", "../broken", "--steps", "4")
    assert code == 0 and "sdpa attention" in out, "attention comes from the checkpoint"
    assert steps_and_losses("../broken") == steps_and_losses("../unbroken"), "the same losses, one row a step"


@pytest.fixture
def compiled(monkeypatch):
    """Modules given to torch.compile, which traces them without generating code."""
    modules, compile_ = [], torch.compile
    monkeypatch.setattr(torch, "compile", lambda module: modules.append(module) or compile_(module, backend="aot_eager"))
    return modules


def test_compiled_run_goes_on_without_and_a_plain_one_with(compiled, command):
    assert command(*SMALL, "--steps", "4", "--out", "plain")[0] == 0 and not compiled, "nothing is compiled unasked"
    code, out, _ = command(*SMALL, "--steps", "2", "--out", "here", "--compile")
    assert (code, len(compiled)) == (0, 1) and "cute_fa attention, compiled, 0.85 M parameters, CPU" in out, "compiled"
    assert command("--resume", "here", "--steps", "3")[0] == 0 and len(compiled) == 2, "a run keeps what it has"
    code, out, _ = command("--resume", "here", "--steps", "4", "--no-compile")
    assert (code, len(compiled)) == (0, 2) and "compiled" not in out, "unless it is told"
    losses = [[float(row.split(",")[1]) for row in steps_and_losses(name)] for name in ("here", "plain")]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4), "the same training"


@pytest.mark.timeout(120)
def test_ctrl_c_saves_and_says_how_to_go_on():
    arguments = (sys.executable, "-m", "cute_fa", "train", *SMALL, "--steps", "100000", "--out", "a run")
    environment = os.environ | {"PYTHONPATH": str(CHECKOUT), "OMP_NUM_THREADS": "1"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen(arguments, env=environment, **pipes)
    try:
        while not process.stdout.readline().startswith("step"):
            assert process.poll() is None, process.stderr.read()
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130, err
    done = len(steps_and_losses("a run"))
    assert f"Stopped after {done} of 100000 steps. Go on with: cute-fa train --resume 'a run'\n" in out, "the way on"
    assert RunFolder(Path("a run")).load()["step"] == done, "every logged step is saved"
    assert "Traceback" not in err, "quietly"


@pytest.mark.parametrize(
    "arguments, message",
    [
        pytest.param(("--steps", "0"), "steps: expected a whole number >= 1, got 0.", id="no-steps"),
        pytest.param(("--attention", "fast"), "attention: expected cute_fa or sdpa, got fast.", id="attention"),
        pytest.param(("--device", "tpu"), "device: expected cpu or cuda, got tpu.", id="device"),
        pytest.param(("--seqlen", "500"), "text: expected at least 1002 bytes", id="short-text"),
        pytest.param(("--text", "missing"), "text: expected a file, got", id="missing-text"),
        pytest.param(("--out", "text"), "out: expected a folder that can be written, got text (", id="file-as-folder"),
        pytest.param(("--out", "text/x"), "out: expected a folder that can be written, got text/x", id="below-a-file"),
        pytest.param(("--out", "earlier"), "out: expected a folder without a run, got earlier.", id="earlier-run"),
    ],
)
def test_wrong_arguments(arguments, message, command):
    Path("earlier").mkdir()
    Path("earlier", "log.csv").write_text("step,loss,tokens_per_s\n")
    code, out, err = command(*SMALL, *arguments)
    assert (code, out) == (2, ""), "refused before anything is shown"
    assert err.startswith(f"cute-fa: {message}") and err.count("\n") == 1, f"one line, got {err}"
    assert not Path("runs").exists(), "nothing is left behind"


@pytest.mark.parametrize("option", ["seed", "out", "text", "batch", "seqlen", "attention"])
def test_resume_takes_no_new_facts(option, command):
    code, _, err = command("--resume", "here", f"--{option}", "1")
    assert code == 2, "refused"
    assert err.startswith(f"cute-fa: {option}: expected no value beside resume, got "), err


def test_resume_of_nothing(command):
    code, _, err = command("--resume", "nowhere")
    assert code == 2 and "resume: expected a folder with checkpoint.pt, got nowhere." in err, err


def test_resume_of_a_damaged_checkpoint(command):
    Path("here").mkdir()
    Path("here", "checkpoint.pt").write_text("half")
    code, out, err = command("--resume", "here")
    assert (code, out) == (2, "") and err.count("\n") == 1, f"one line, got {err}"
    assert err.startswith("cute-fa: resume: expected a folder whose checkpoint.pt can be read, got here ("), err


@pytest.fixture
def gpu_without_kernel(monkeypatch):
    """A machine whose GPU torch can use and cute_fa cannot; no tensor ever goes there."""
    monkeypatch.setattr(train_file, "has_gpu", lambda: True)

    def refuse(config):
        is_refused = (config.device, config.attention) == ("cuda", "cute_fa")
        return DeviceError("q: expected capability 9.0, got 8.0. Use an H100.") if is_refused else None

    monkeypatch.setattr(train_file, "refusal", refuse)


def test_default_device_is_the_cpu_where_the_gpu_has_no_kernel(gpu_without_kernel, command):
    code, out, err = command(*SMALL[2:], "--steps", "1", "--out", "here")
    assert (code, err) == (0, ""), "trains"
    reason = "The GPU is not used, --attention sdpa would use it: q: expected capability 9.0, got 8.0. Use an H100.\n"
    assert out.startswith(f"{reason}cute_fa attention, 0.85 M parameters, CPU: "), "on the CPU, and says why"


@pytest.mark.parametrize("attention", ["cute_fa", "sdpa"])
def test_default_device_is_the_gpu_where_the_attention_runs(attention, command, monkeypatch):
    def stop(self, config):
        raise NotSupportedError(f"{config.device}, {config.width}")

    monkeypatch.setattr(train_file, "has_gpu", lambda: True)
    monkeypatch.setattr(Trainer, "__init__", stop)
    if attention == "cute_fa":
        monkeypatch.setattr(train_file, "refusal", lambda config: None)
    assert command(*SMALL[2:], "--attention", attention) == (1, "", "cute-fa: cuda, 1024\n"), "with the GPU's preset"


def test_named_gpu_without_kernel_is_refused(gpu_without_kernel, command):
    code, out, err = command("--device", "cuda", "--out", "here")
    message = "q: expected capability 9.0, got 8.0. Use an H100. Use --device cpu, or --attention sdpa."
    assert (code, out, err) == (1, "", f"cute-fa: {message}\n"), "the same error, with advice for the command line"
    assert not Path("here").exists(), "nothing is left behind"


def test_resume_on_a_gpu_without_kernel_is_refused(gpu_without_kernel, command):
    assert command(*SMALL, "--steps", "1", "--out", "here")[0] == 0, "trains on the CPU"
    code, _, err = command("--resume", "here", "--steps", "2", "--device", "cuda")
    message = "q: expected capability 9.0, got 8.0. Use an H100. Use --device cpu."
    assert (code, err) == (1, f"cute-fa: {message}\n"), "a run keeps its attention, so only the device is advised"
    assert len(steps_and_losses("here")) == 1, "and its files"


def test_refusal_asks_the_public_call(monkeypatch):
    monkeypatch.setattr(train_file, "has_gpu", lambda: True)
    monkeypatch.setattr("cute_fa.host.support.compute_capability", lambda device: (8, 0))
    with FakeTensorMode():  # CUDA tensors on any machine
        refused = refusal(preset("cuda"))
        assert isinstance(refused, DeviceError) and "8.0" in str(refused), f"an older GPU has no kernels, got {refused}"
        assert refusal(preset("cuda", attention="sdpa")) is None, "torch's attention runs on any GPU"
        assert refusal(preset("cpu")) is None, "the CPU needs no kernel"
        monkeypatch.setattr("cute_fa.host.support.compute_capability", lambda device: (9, 0))
        assert refusal(preset("cuda")) is None, "a Hopper GPU trains"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_named_gpu_where_there_is_none(command):
    code, _, err = command("--device", "cuda")
    assert code == 2 and err.startswith("cute-fa: device: expected cpu where torch finds no GPU, got cuda."), err


def test_missing_kernel_is_one_line(command, monkeypatch):
    def refuse(self):
        raise NotSupportedError("q: expected a CPU tensor, got cuda. Use sdpa.")

    monkeypatch.setattr(Trainer, "_train_step", refuse)
    code, _, err = command(*SMALL, "--out", "here")
    assert (code, err) == (1, "cute-fa: q: expected a CPU tensor, got cuda. Use sdpa.\n"), "its own message"
    assert not Path("here").exists(), "the folder stays free for the next try"


def test_sample_is_shown_in_ascii(command, monkeypatch):
    monkeypatch.setattr(Trainer, "sample", lambda self, num_bytes: "a\té\0~".encode() + b"\x7f\xff\n b")
    out = command(*SMALL, "--steps", "1", "--out", "here")[1]
    assert out.endswith("sample\n          a....~..\n           b\n"), f"a dot for each other byte, got {out}"


def test_without_matplotlib(command, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    code, out, _ = command(*SMALL, "--steps", "2", "--out", "here")
    assert code == 0 and "pip install 'cute-fa[bench]'" in out, "says what to install"
    assert "here: log.csv, checkpoint.pt\n" in out and not Path("here/loss.png").exists(), "and does the rest"


@pytest.fixture
def report():
    """A report on a small run, and the text that its terminal shows."""
    config = preset("cpu", steps=4, text="text", batch=2, seqlen=16, width=16, layers=1, heads=2)
    console = Console(file=io.StringIO(), force_terminal=True, width=120)
    return Report(console, Trainer(config), RunFolder(Path("here")))


def test_bar_on_a_terminal(report):
    with report.bar() as show:
        show(StepResult(2, 3.25, 1234.0))
    shown = re.sub(r"\x1b\[[\d;?]*[a-zA-Z]", "", report.console.file.getvalue())
    assert "3/4" in shown and "loss 3.250  1,234 tokens/s" in shown, f"steps, loss and speed, got {shown}"


def test_share_of_peak(report):
    report.gpu = SimpleNamespace(peak_bf16_tflops=2.0)
    report.trainer.model = SimpleNamespace(flops_per_token=5e6)
    assert report.speed(100_000) == "100,000 tokens/s, 25% of peak", "0.5 of 2 TFLOP/s"


def test_help_gives_the_presets_numbers(command):
    words = " ".join(command("--help")[1].replace("│", " ").split())
    for what, name in (("steps", "steps"), ("Sequences a step", "batch"), ("Bytes a sequence", "seqlen")):
        cpu, gpu = getattr(preset("cpu"), name), getattr(preset("cuda"), name)
        assert f"{what}: {cpu} on a CPU, {gpu} on a GPU." in words, f"{name} as in the presets"
