"""`cute-fa gradcheck`: what it prints, and that a wrong gradient ends it with 1."""

import subprocess
import sys

import pytest
import typer
from typer.testing import CliRunner

import cute_fa
from cute_fa.cli.gradcheck import case_names, gradcheck

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
