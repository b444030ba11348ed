"""Compile: architecture and options, the object file, its function, threads, and a machine without the DSL."""

import os
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest

from cute_fa.core.errors import DeviceError
from cute_fa.host import compile


@pytest.fixture
def tiny(monkeypatch, tmp_path):
    """The module tiny_kernel, in place of the registry of kernels."""
    monkeypatch.syspath_prepend(Path(__file__).parent)
    import tiny_kernel

    monkeypatch.setitem(sys.modules, tiny_kernel.REGISTRY, tiny_kernel)
    monkeypatch.setenv(tiny_kernel.LOG, str(tmp_path / "log"))
    return tiny_kernel


def test_architecture_and_options(tiny, tmp_path):
    compiled = compile.compile_plan(tiny.plan_of(64), options=f"--keep-cubin --dump-dir {tmp_path}")
    assert isinstance(compiled.__cubin__, bytes), "the options of the caller count"
    assert re.search(rb"-arch (\w+)", compiled.__cubin__)[1] == b"sm_90a", "for Hopper, on any machine"


def test_object_code_is_a_shared_symbol_in_elf(tiny):
    code = compile.object_code(tiny.plan_of(64))
    assert code[:4] == b"\x7fELF", "an ELF file"
    assert b"\0__tvm_ffi_cute_fa_forward_d64_bf16_full_" in code, "which exports the plan's name"


@pytest.mark.parametrize("rest", [pytest.param(b"", id="alone"), pytest.param(bytes(range(32)), id="bytes-after-it")])
def test_load_object(rest, tiny, tmp_path):
    plan = tiny.plan_of(96)
    path = tmp_path / "kernel.o"
    path.write_bytes(compile.object_code(plan) + rest)
    assert tiny.size_of(compile.load_object(plan, path)) == 96, "the function of this plan"


def test_threads_take_turns(tiny):
    plans = [tiny.plan_of(head_dim) for head_dim in (64, 96, 128, 192)]
    with ThreadPoolExecutor(4) as pool:
        codes = list(pool.map(compile.object_code, plans))
    assert len(set(codes)) == 4, "each thread has its own kernel"


FRESH = """
import sys
from pathlib import Path
import tiny_kernel
from cute_fa.host import compile
function = compile.load_object(tiny_kernel.plan_of(96), Path(sys.argv[1]))
print(tiny_kernel.size_of(function), "cutlass" in sys.modules)
"""


@pytest.mark.parametrize("has_linker", [True, False], ids=["linker", "no-linker"])
def test_a_fresh_process_loads_without_the_dsl(has_linker, tiny, tmp_path):
    """Importing it takes longer than all else in a first call; where there is no linker, it loads the file itself."""
    if has_linker and not shutil.which("cc"):
        pytest.skip("no C compiler on this machine")
    path = tmp_path / "kernel.o"
    path.write_bytes(compile.object_code(tiny.plan_of(96)) + bytes(range(32)))
    folders = os.pathsep.join((str(Path(compile.__file__).parents[2]), str(Path(__file__).parent)))
    environment = os.environ | {"PYTHONPATH": folders} | ({} if has_linker else {"PATH": str(tmp_path)})
    done = subprocess.run([sys.executable, "-c", FRESH, path], env=environment, capture_output=True, text=True)
    assert done.stdout.split() == ["96", str(not has_linker)], f"the function, and the DSL: {done.stderr[-2000:]}"


@pytest.mark.parametrize(
    "owner, name, error",
    [
        (compile, "cuda_flavour", ImportError("no runtime library")),
        (compile.subprocess, "run", subprocess.CalledProcessError(1, "cc")),
        (compile.ctypes, "CDLL", OSError("cannot open shared object file")),
    ],
    ids=["no-runtime", "linker-fails", "library-fails"],
)
def test_what_does_not_link_is_left_to_the_dsl(owner, name, error, tiny, tmp_path, monkeypatch):
    def fail(*_arguments, **_options):
        raise error

    path = tmp_path / "kernel.o"
    path.write_bytes(compile.object_code(tiny.plan_of(96)))
    monkeypatch.setattr(owner, name, fail)
    assert compile._link(path) is None, "no module, and no error"


def test_toolchain():
    assert compile.toolchain() == (
        f"nvidia-cutlass-dsl {metadata.version('nvidia-cutlass-dsl')}",
        f"nvidia-cutlass-dsl-libs-cu{compile.import_dsl().CUDA_VERSION.major} {metadata.version('nvidia-cutlass-dsl')}",
        f"apache-tvm-ffi {metadata.version('apache-tvm-ffi')}",
    ), "DSL, its CUDA flavour, TVM-FFI"


def test_toolchain_of_packages_without_metadata(monkeypatch):
    def missing(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(compile.metadata, "version", missing)
    dsl, cuda, tvm_ffi = compile.toolchain.__wrapped__()
    flavour = compile.import_dsl().CUDA_VERSION
    assert dsl.startswith("nvidia-cutlass-dsl 4."), f"version of the DSL, got {dsl}"
    assert f"major={flavour.major}" in cuda and f"minor={flavour.minor}" in cuda, f"flavour, got {cuda}"
    assert tvm_ffi.startswith("apache-tvm-ffi 0."), f"version of TVM-FFI, got {tvm_ffi}"


@pytest.mark.parametrize(
    "driver, flavour",
    [(None, 13), (13010, 13), (12090, 12), (14000, 13), (11080, None)],
    ids=["no-driver", "driver-13", "driver-12", "driver-14", "driver-11"],
)
def test_flavour_that_a_driver_admits(driver, flavour, tmp_path, monkeypatch):
    """Two flavours are installed, CUDA 12 and 13."""
    for major in (12, 13):
        library = tmp_path / f"cu{major}" / "lib" / "libcute_dsl_runtime.so"
        library.parent.mkdir(parents=True)
        library.touch()

    def open_driver(name):
        if driver is None:
            raise OSError(name)
        return SimpleNamespace(cuDriverGetVersion=lambda found: setattr(found._obj, "value", driver) or 0)

    monkeypatch.setattr(compile, "find_spec", lambda name: SimpleNamespace(submodule_search_locations=[str(tmp_path)]))
    monkeypatch.setattr(compile.ctypes, "CDLL", open_driver)
    if flavour is None:
        with pytest.raises(ImportError, match="no libcute_dsl_runtime.so for this driver"):
            compile.cuda_flavour.__wrapped__()
    else:
        assert compile.cuda_flavour.__wrapped__() == (flavour, tmp_path / f"cu{flavour}/lib/libcute_dsl_runtime.so"), "newest"


@pytest.mark.parametrize("missing", ["cutlass", "tvm_ffi"])
@pytest.mark.parametrize("function", [compile.compile_plan, compile.object_code], ids=["compile", "object"])
def test_without_a_package(missing, function, tiny, monkeypatch):
    for module in (missing, f"{missing}.cute"):
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(DeviceError) as refused:
        function(tiny.plan_of(64))
    message = str(refused.value)
    assert message.startswith("nvidia-cutlass-dsl and apache-tvm-ffi: expected "), f"says what is needed, got {message}"
    assert missing in message, f"says what is missing, got {message}"
    cure = r"Run: pip install 'nvidia-cutlass-dsl>=\S+' 'apache-tvm-ffi>=\S+'\."
    assert re.search(cure, message), f"says what to do, got {message}"
