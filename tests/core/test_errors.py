"""The exceptions' families and the one form of every message."""

import pytest

from cute_fa.core.errors import DeviceError, NotSupportedError, expected


def test_message_form():
    message = expected("softcap", "a finite number >= 0", -1.5, "0 means no softcap")
    assert message == "softcap: expected a finite number >= 0, got -1.5. 0 means no softcap.", "all four parts"


@pytest.mark.parametrize(
    "got, shown",
    [
        pytest.param((2, 3), "(2, 3)", id="shape"),
        pytest.param(None, "None", id="none"),
        pytest.param("float32", "float32", id="word-without-quotes"),
    ],
)
def test_values_are_shown_as_str(got, shown):
    message = expected("q", "a rule", got, "Advice")
    assert message == f"q: expected a rule, got {shown}. Advice.", f"{got!r} reads {shown}"


@pytest.mark.parametrize(
    "error, family",
    [
        pytest.param(NotSupportedError, NotImplementedError, id="not-supported"),
        pytest.param(DeviceError, RuntimeError, id="device"),
    ],
)
def test_exceptions_are_caught_by_their_families(error, family):
    with pytest.raises(family, match="^a message$"):
        raise error("a message")


def test_missing_kernel_and_wrong_device_are_told_apart():
    assert not issubclass(DeviceError, NotImplementedError), "a wrong GPU is no missing kernel"
    assert not issubclass(NotSupportedError, (ValueError, TypeError)), "the call is legal"
    assert not issubclass(DeviceError, (ValueError, TypeError)), "the call is legal"
