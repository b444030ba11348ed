"""The table of requirements: equal to pyproject.toml, and its comparison of versions."""

from pathlib import Path

import pytest

from cute_fa.core.requirements import PACKAGES, PYTHON, Requirement, release

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10, where pytest brings tomli
    import tomli as tomllib

PYPROJECT = Path(__file__).parents[2] / "pyproject.toml"


def test_table_equals_pyproject():
    project = tomllib.loads(PYPROJECT.read_text())["project"]
    assert [str(package) for package in PACKAGES] == project["dependencies"], "dependencies differ from pyproject.toml"
    assert PYTHON.specifier == project["requires-python"], "requires-python differs from pyproject.toml"


@pytest.mark.parametrize(
    "version, numbers",
    [
        pytest.param("2.9", (2, 9), id="plain"),
        pytest.param("2.9.0", (2, 9), id="zero-at-the-end"),
        pytest.param("2.10.1", (2, 10, 1), id="two-digits"),
        pytest.param("2.13.0+cpu", (2, 13), id="local"),
        pytest.param("2.9.0a0+git1a2b", (2, 9), id="container"),
        pytest.param("4.9.0.dev1", (4, 9), id="dev"),
    ],
)
def test_release(version, numbers):
    assert release(version) == numbers, f"numbers of {version}"


def test_release_of_no_version():
    with pytest.raises(ValueError, match="expected a release number, got 'unknown'"):
        release("unknown")


@pytest.mark.parametrize(
    "version, admitted",
    [
        pytest.param("4.8.0", False, id="one-below"),
        pytest.param("4.8.1", True, id="lowest"),
        pytest.param("4.8.10", True, id="inside"),
        pytest.param("4.9", False, id="upper-bound"),
        pytest.param("4.9.0", False, id="upper-bound-with-zero"),
        pytest.param("4.10.0", False, id="two-digits-above"),
    ],
)
def test_admits(version, admitted):
    assert Requirement("name", "module", "4.8.1", "4.9").admits(version) == admitted, f"{version} in >=4.8.1,<4.9"


def test_no_upper_bound():
    open_ended = Requirement("name", "module", "2.9")
    assert open_ended.admits("2.9.0"), "2.9.0 is 2.9"
    assert open_ended.admits("99.0"), "nothing is too new"
    assert not open_ended.admits("2.8.9"), "2.8.9 is below 2.9"
    assert str(open_ended) == "name>=2.9", "as pip takes it"
