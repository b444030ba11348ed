"""What importing the package costs and brings along, in fresh interpreters."""

import json
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

import cute_fa

CHECKOUT = Path(cute_fa.__file__).resolve().parents[1]
DSL = {"cutlass", "tvm_ffi"}
TOOLS = {"matplotlib", "rich", "typer", "transformers"}
PUBLIC = {
    "__version__",
    "flash_attn_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_kvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_with_kvcache",
    "NotSupportedError",
    "DeviceError",
}


def run(code: str):
    """What a fresh interpreter in the checkout prints as JSON."""
    command = [sys.executable, "-c", f"import json, sys, time\n{code}"]
    done = subprocess.run(command, cwd=CHECKOUT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


TOP_LEVEL = "print(json.dumps(sorted({name.split('.')[0] for name in sys.modules})))"


def test_package_imports_nothing():
    found = set(run(f"import cute_fa\n{TOP_LEVEL}"))
    assert "cute_fa" in found, "the package itself"
    assert not found & {"torch", "numpy", "einops", *DSL, *TOOLS}, "the package is only a table of names"


def test_function_imports_torch_alone():
    found = set(run(f"import cute_fa\ncute_fa.flash_attn_func\n{TOP_LEVEL}"))
    assert {"torch", "einops"} <= found, "what the reference backend is written in"
    assert not found & (DSL | TOOLS), "the DSL comes with the first kernel, tools with the command line"


def test_exception_imports_no_torch():
    found = set(run(f"import cute_fa\ncute_fa.NotSupportedError, cute_fa.DeviceError\n{TOP_LEVEL}"))
    assert not found & {"torch", *DSL, *TOOLS}, "an exception needs no torch"


@pytest.mark.parametrize("room", ["core", "tuning"])
def test_pure_python_rooms(room):
    """Rooms that a build script or a scheduler may import where there is no torch."""
    folder = str(CHECKOUT / "cute_fa" / room)
    modules = [f"cute_fa.{room}.{module.name}" for module in pkgutil.iter_modules([folder])]
    assert modules, f"{room} has modules"
    found = set(run(f"import {', '.join(modules)}\n{TOP_LEVEL}"))
    assert not found & {"torch", "einops", *DSL, *TOOLS}, f"{room} is plain Python"


def test_import_time():
    """Ours alone, einops included, torch not; the best of three, for a machine that is busy."""
    code = """
import torch
begin = time.perf_counter()
import cute_fa
cute_fa.flash_attn_func
print(json.dumps(time.perf_counter() - begin))
"""
    seconds = min(run(code) for _ in range(3))
    assert seconds < 0.5, f"{seconds:.2f} s beyond torch's own import"


def test_every_module_imports_without_a_gpu():
    """With every GPU hidden; __main__ is left out, which would start the command line."""
    code = """
import importlib, pkgutil
import cute_fa
names = [m.name for m in pkgutil.walk_packages(cute_fa.__path__, "cute_fa.") if not m.name.endswith("__main__")]
for name in names:
    importlib.import_module(name)
print(json.dumps(names))
"""
    names = run(f"import os\nos.environ |= {{'CUDA_VISIBLE_DEVICES': '', 'CUTE_DSL_ARCH': 'sm_90a'}}\n{code}")
    files = (CHECKOUT / "cute_fa").rglob("*.py")
    stems = {".".join(file.relative_to(CHECKOUT).with_suffix("").parts).removesuffix(".__init__") for file in files}
    assert set(names) == stems - {"cute_fa", "cute_fa.__main__"}, "files that no package leads to"


def test_public_names():
    assert set(cute_fa.__all__) == PUBLIC, "the public names"
    assert PUBLIC <= set(dir(cute_fa)), "dir() shows them before their first use"
    for name in PUBLIC:
        assert getattr(cute_fa, name) is getattr(cute_fa, name), f"{name} is one object"


def test_dir_before_first_use():
    assert PUBLIC <= set(run("import cute_fa\nprint(json.dumps(dir(cute_fa)))")), "dir() of a fresh import"


def test_star_import():
    found = run("from cute_fa import *\nprint(json.dumps(sorted(name for name in globals() if 'flash' in name)))")
    assert found == sorted(name for name in PUBLIC if "flash" in name), "all seven functions"


def test_unknown_attribute():
    with pytest.raises(AttributeError, match="^module 'cute_fa' has no attribute 'flash_attn_fun'$"):
        cute_fa.flash_attn_fun
    assert not hasattr(cute_fa, "_flash_attn_forward"), "nothing private is handed out by accident"
