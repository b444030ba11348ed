"""How a benchmark command ends."""

import pytest

from benchmarks.command import run_command
from cute_fa.core.errors import DeviceError, expected


def raising(error):
    def main():
        raise error

    return main


@pytest.mark.parametrize(
    "error, code",
    [
        pytest.param(DeviceError("device: expected a GPU, got none. Use one."), 1, id="device"),
        pytest.param(ValueError(expected("only", "a name", "x", "Leave it out")), 2, id="argument"),
    ],
)
def test_users_errors_are_one_line(error, code, capsys):
    with pytest.raises(SystemExit) as stop:
        run_command(raising(error), "name")
    assert (stop.value.code, *capsys.readouterr()) == (code, "", f"name: {error}\n"), "one line"


@pytest.mark.parametrize("error", [ValueError("ours"), ValueError(), KeyError("ours")], ids=["value", "empty", "key"])
def test_other_errors_pass(error):
    with pytest.raises(type(error)) as caught:
        run_command(raising(error), "name")
    assert caught.value is error, "the very exception"
