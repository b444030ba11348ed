"""What the package needs of a machine, as facts: Python, packages, and the architecture its kernels are compiled for.

`pyproject.toml` tells pip the same versions. They stand here again because a checkout has no metadata and Python 3.10
no TOML reader; the test of this file fails when the two differ. `cute-fa` and `host/compile.py` read this table.
"""

import re
from dataclasses import dataclass

from cute_fa.core.errors import expected


@dataclass(frozen=True)
class Requirement:
    """name: as pip spells it. module: what to import. at_least, below: bounds on the version, "" for no upper bound."""

    name: str
    module: str
    at_least: str
    below: str = ""

    @property
    def specifier(self) -> str:
        return f">={self.at_least}" + (f",<{self.below}" if self.below else "")

    def __str__(self) -> str:
        """As pip takes it."""
        return self.name + self.specifier

    def admits(self, version: str) -> bool:
        """Compares release numbers alone: 2.9.0a0+git counts as 2.9, as in the containers that NVIDIA ships."""
        found = release(version)
        return found >= release(self.at_least) and (not self.below or found < release(self.below))


def release(version: str) -> tuple[int, ...]:
    """The numbers that a version starts with, without zeros at their end, so that 2.9 and 2.9.0 are equal."""
    numbers = re.match(r"\d+(\.\d+)*", version)
    if not numbers:
        raise ValueError(expected("version", "a release number", repr(version), "Install a released version"))
    parts = [int(part) for part in numbers[0].split(".")]
    while parts and parts[-1] == 0:
        parts.pop()
    return tuple(parts)


PYTHON = Requirement("Python", "sys", "3.10", "3.14")

TORCH = Requirement("torch", "torch", "2.9")
DSL = Requirement("nvidia-cutlass-dsl", "cutlass", "4.8.1", "4.9")
TVM_FFI = Requirement("apache-tvm-ffi", "tvm_ffi", "0.1.15", "0.2")
EINOPS = Requirement("einops", "einops", "0.8")
TYPER = Requirement("typer", "typer", "0.16")
RICH = Requirement("rich", "rich", "13")

PACKAGES = (TORCH, DSL, TVM_FFI, EINOPS, TYPER, RICH)

# What ptxas is told. The "a" admits instructions of Hopper alone (warpgroup MMA), so no other GPU runs the result.
ARCH = "sm_90a"
