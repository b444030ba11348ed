"""Every environment variable that the package reads, in one table (the README prints it)."""

import os
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Variable:
    name: str
    default: str
    meaning: str


CACHE_DIR = Variable(
    "CUTE_FA_CACHE_DIR",
    "$XDG_CACHE_HOME/cute_fa, else ~/.cache/cute_fa",
    "folder of compiled kernels",
)

VARIABLES = (CACHE_DIR,)


def cache_dir() -> Path:
    """The folder of compiled kernels; it need not exist."""
    chosen = os.environ.get(CACHE_DIR.name)
    if chosen:
        return Path(chosen).expanduser()
    home = os.environ.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path.home() / ".cache") / "cute_fa"
