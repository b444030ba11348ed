"""`cute-fa gradcheck`: what it prints, and that a wrong gradient ends it with 1."""

import subprocess
import sys

import pytest
import torch
import typer
from typer.testing import CliRunner

import cute_fa
from cute_fa.cli import gradcheck as gradcheck_file
from cute_fa.cli.gradcheck import case_names, gradcheck
from cute_fa.core.errors import NotSupportedError
from cute_fa.host import support
from cute_fa.ops import attention

app = typer.Typer()
app.command()(gradcheck)


def run(*arguments):
    return CliRunner().invoke(app, arguments)


def test_every_option_and_packed_form_is_a_case():
    options = {"full", "causal", "window", "chunk", "softcap", "alibi", "sink", "dropout", "lse"}
    assert options | {"varlen", "seqused", "block_table"} <= set(case_names()), "each can be checked alone"


@pytest.mark.parametrize("option", ["causal", "sink", "varlen"])
def test_right_results_pass(option):
    result = run("--option", option)
    assert result.exit_code == 0, result.output
    assert "bf16" in result.output and "fp16" in result.output, "both dtypes have a row"
    assert "1 options: 0 beyond their bound" in result.output, "the summary counts one option and no miss"


def test_verbose_prints_every_tensor():
    lines = run("--option", "sink", "--verbose").output.splitlines()
    tensors = {line.split()[3] for line in lines if ": error " in line}
    assert tensors == {"out:", "lse:", "dq:", "dk:", "dv:", "dsink:"}, "the outputs and the gradient of each input"


def test_a_wrong_gradient_is_a_miss(monkeypatch):
    attention = cute_fa.flash_attn_func

    def wrong(q, k, v, **options):
        return attention(q, 0.5 * k + 0.5 * k.detach(), v, **options)  # halves dk, leaves the output

    monkeypatch.setattr(cute_fa, "flash_attn_func", wrong)
    result = run("--option", "full")
    assert result.exit_code == 1, result.output
    misses = [line for line in result.output.splitlines() if line.startswith("MISS")]
    assert misses and all(" dk:" in line for line in misses), f"dk alone is wrong, got {misses}"


@pytest.fixture
def hopper(monkeypatch):
    """A GPU that refuses what a Hopper GPU refuses, and computes the rest as the CPU does."""
    compared, require = gradcheck_file.compared, support.require
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(support, "compute_capability", lambda device: (9, 0))
    monkeypatch.setattr(support, "require", lambda problem, device: require(problem, torch.device("cuda:0")))
    monkeypatch.setattr(attention, "_known", {})
    monkeypatch.setattr(gradcheck_file, "compared", lambda name, dtype, device, seed: compared(name, dtype, "cpu", seed))


def test_gpu_leaves_out_what_it_has_no_kernel_for(hopper):
    result = run("--device", "cuda")
    assert result.exit_code == 0, result.output
    *_, left_out, summary = result.output.splitlines()
    windows = "window, window-left, window-right, window-causal"
    others = "chunk, softcap, alibi, alibi-batch, sink, dropout, varlen, seqused, block_table"
    assert left_out == f"not on cuda yet: {windows}, {others}", "each of them once, in one line"
    # 14 shapes with five tensors each, of full, causal, scale and lse, in two dtypes
    assert summary == "560 tensors on cuda, 4 options: 0 beyond their bound", "the rest is checked"


def test_gpu_refuses_an_option_that_was_named(hopper):
    result = run("--device", "cuda", "--option", "softcap")
    assert isinstance(result.exception, NotSupportedError), result.output
    assert "for a call that uses softcap" in str(result.exception), "the error of the call itself"


def test_cpu_leaves_nothing_out(monkeypatch):
    def refuse(*arguments, **options):
        raise NotSupportedError("q: expected nothing, got a tensor. Wait.")

    monkeypatch.setattr(cute_fa, "flash_attn_func", refuse)
    assert isinstance(run().exception, NotSupportedError), "the CPU has every option, so a refusal is a fault"


@pytest.mark.parametrize(
    "arguments, message",
    [
        pytest.param(("--option", "colour"), "cute-fa: option: expected one of full, causal, ", id="unknown-option"),
        pytest.param(("--device", "cuda"), "cute-fa: device: expected cpu where torch finds no GPU, got cuda.", id="no-gpu"),
    ],
)
def test_wrong_arguments_are_one_line(arguments, message):
    command = [sys.executable, "-m", "cute_fa", "gradcheck", *arguments]
    # An empty list of devices makes every machine one without a GPU.
    done = subprocess.run(command, capture_output=True, text=True, env={"CUDA_VISIBLE_DEVICES": "", "PATH": ""})
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith(message) and len(done.stderr.splitlines()) == 1, done.stderr
