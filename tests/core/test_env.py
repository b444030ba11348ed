"""The table of environment variables, and the folder of compiled kernels."""

import re
from pathlib import Path

import pytest

import cute_fa
from cute_fa.core.env import CACHE_DIR, VARIABLES, cache_dir

PACKAGE = Path(cute_fa.__file__).parent


@pytest.mark.parametrize(
    "variables, folder",
    [
        pytest.param({"CUTE_FA_CACHE_DIR": "/fast/kernels"}, "/fast/kernels", id="own-variable"),
        pytest.param({"CUTE_FA_CACHE_DIR": "~/kernels"}, "/home/ada/kernels", id="tilde"),
        pytest.param({"CUTE_FA_CACHE_DIR": "/fast", "XDG_CACHE_HOME": "/xdg"}, "/fast", id="own-before-xdg"),
        pytest.param({"XDG_CACHE_HOME": "/xdg"}, "/xdg/cute_fa", id="xdg"),
        pytest.param({"CUTE_FA_CACHE_DIR": "", "XDG_CACHE_HOME": ""}, "/home/ada/.cache/cute_fa", id="empty"),
        pytest.param({}, "/home/ada/.cache/cute_fa", id="unset"),
    ],
)
def test_cache_dir(monkeypatch, variables, folder):
    monkeypatch.setenv("HOME", "/home/ada")
    for name in ("CUTE_FA_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert cache_dir() == Path(folder), f"cache folder under {variables}"


def test_cache_dir_is_not_created(monkeypatch, tmp_path):
    monkeypatch.setenv("CUTE_FA_CACHE_DIR", str(tmp_path / "kernels"))
    assert not cache_dir().exists(), "asking where the cache is must write nothing"


def test_table():
    assert CACHE_DIR in VARIABLES, "the cache folder's variable is in the table"
    names = [variable.name for variable in VARIABLES]
    assert len(set(names)) == len(names), "a variable stands twice"
    for variable in VARIABLES:
        assert variable.name.startswith("CUTE_FA_"), f"{variable.name} could be another program's"
        assert variable.default and variable.meaning, f"{variable.name} has an empty cell"


def test_table_is_complete():
    """Every name of ours that any source file spells is in the table."""
    spelled = {name for file in PACKAGE.rglob("*.py") for name in re.findall(r"\bCUTE_FA_[A-Z_]+", file.read_text())}
    assert spelled == {variable.name for variable in VARIABLES}, "names in sources and names in the table differ"
