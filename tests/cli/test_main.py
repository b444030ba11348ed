"""The command itself: help, version, what becomes of errors, and a start without torch, the DSL, typer or rich."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

import cute_fa
from cute_fa.cli import main
from cute_fa.core.errors import DeviceError, NotSupportedError, expected

CHECKOUT = Path(__file__).parents[2]
COMMANDS = ("train", "doctor", "gradcheck", "inspect", "compile")  # and bench, whose help is that of benchmarks.run


def python(*arguments: str) -> subprocess.CompletedProcess:
    """A fresh interpreter in the checkout."""
    return subprocess.run([sys.executable, *arguments], cwd=CHECKOUT, capture_output=True, text=True, timeout=120)


def run_main(monkeypatch, capsys, *arguments: str):
    """main() with these arguments: exit code, stdout, stderr."""
    monkeypatch.setattr(sys, "argv", ["cute-fa", *arguments])
    with pytest.raises(SystemExit) as stop:
        main()
    out, err = capsys.readouterr()
    return stop.value.code, out, err


def test_version(monkeypatch, capsys):
    monkeypatch.setattr("cute_fa.cli.__version__", "7.8.9")
    assert run_main(monkeypatch, capsys, "--version") == (0, "cute-fa 7.8.9\n", ""), "prints the package's version"


def test_help_names_every_subcommand(monkeypatch, capsys):
    code, out, _ = run_main(monkeypatch, capsys, "--help")
    assert code == 0, "help succeeds"
    for command in (*COMMANDS, "bench"):
        assert re.search(rf"\b{command}\b", out), f"help does not name {command}"


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_a_subcommand(command, monkeypatch, capsys):
    code, out, _ = run_main(monkeypatch, capsys, command, "--help")
    assert code == 0, f"{command} --help succeeds"
    assert f"cute-fa {command}" in out, "usage names the command as the user calls it"


def test_unknown_subcommand(monkeypatch, capsys):
    code, _, err = run_main(monkeypatch, capsys, "nonsense")
    assert code == 2 and "nonsense" in err, "an unknown subcommand is a wrong argument"


@pytest.mark.parametrize(
    "error, code",
    [
        pytest.param(ValueError(expected("steps", "at least 1", 0, "Give more")), 2, id="value"),
        pytest.param(TypeError(expected("q", "a tensor", "list", "Give a tensor")), 2, id="type"),
        pytest.param(NotSupportedError("softcap: expected 0, got 3.0. Drop it."), 1, id="not-supported"),
        pytest.param(DeviceError("q: expected (9, 0), got (8, 0). Use the CPU."), 1, id="device"),
    ],
)
def test_users_errors_are_one_line(error, code, monkeypatch, capsys):
    monkeypatch.setattr("cute_fa.cli.doctor.doctor", raising(error))
    assert run_main(monkeypatch, capsys, "doctor") == (code, "", f"cute-fa: {error}\n"), "one line, no traceback"


def test_message_of_several_lines_becomes_one(monkeypatch, capsys):
    monkeypatch.setattr("cute_fa.cli.doctor.doctor", raising(NotSupportedError("first\n  second\n")))
    assert run_main(monkeypatch, capsys, "doctor") == (1, "", "cute-fa: first second\n"), "lines are joined"


@pytest.mark.parametrize(
    "error",
    [RuntimeError("ours"), NotImplementedError("ours"), KeyError("ours"), ValueError("ours"), TypeError()],
    ids=["runtime", "not-implemented", "key", "value", "type"],
)
def test_other_errors_pass(error, monkeypatch):
    monkeypatch.setattr("cute_fa.cli.doctor.doctor", raising(error))
    monkeypatch.setattr(sys, "argv", ["cute-fa", "doctor"])
    with pytest.raises(type(error)) as caught:
        main()
    assert caught.value is error, "the very exception"


def test_other_errors_show_their_traceback():
    program = (
        "import sys, cute_fa.cli, cute_fa.cli.doctor as file\n"
        "def doctor(): raise RuntimeError('ours')\n"
        "file.doctor = doctor; sys.argv = ['cute-fa', 'doctor']; cute_fa.cli.main()"
    )
    done = python("-c", program)
    assert done.returncode == 1, "Python's own exit code"
    assert done.stderr.startswith("Traceback (most recent call last):\n"), "a plain traceback"
    assert done.stderr.endswith("RuntimeError: ours\n"), "that ends in the exception"


def raising(error: BaseException):
    def doctor():
        raise error

    return doctor


def test_python_dash_m():
    done = python("-m", "cute_fa", "--version")
    assert (done.returncode, done.stdout) == (0, f"cute-fa {cute_fa.__version__}\n"), done.stderr
    assert "Usage: cute-fa " in python("-m", "cute_fa", "--help").stdout, "usage names the command as it is installed"


def test_start_imports_neither_torch_nor_dsl():
    program = (
        "import importlib, pkgutil, sys, cute_fa.cli\n"
        "for room in pkgutil.iter_modules(cute_fa.cli.__path__, 'cute_fa.cli.'): importlib.import_module(room.name)\n"
        "cute_fa.cli.build_app()\n"
        "print(sorted({'torch', 'cutlass', 'numpy', 'tvm_ffi', 'einops'} & set(sys.modules)))"
    )
    done = python("-c", program)
    assert (done.returncode, done.stdout) == (0, "[]\n"), f"imported at start: {done.stdout}{done.stderr}"


def test_without_site_packages():
    done = python("-S", "-E", "-m", "cute_fa", "--help")
    assert done.returncode == 1, "nothing can be done without typer"
    assert re.fullmatch(
        r"cute-fa: the command line needs typer and rich \(.*\)\. Run: pip install 'typer>=[\d.]+' 'rich>=[\d.]+'\n",
        done.stderr,
    ), f"one line that says what to install, got {done.stderr}"


@pytest.mark.parametrize("missing", ["typer", "rich"])
def test_without_one_package(missing, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, missing, None)
    code, out, err = run_main(monkeypatch, capsys, "--version")
    assert (code, out) == (1, ""), "nothing is printed on stdout"
    assert err.count("\n") == 1 and missing in err and "pip install" in err, f"one line with the cure, got {err}"
