"""Compile: a plan becomes the DSL's compiled object, an object file, and from that a function. Needs no GPU.

`host/cache.py` and `host/inspect.py` call this. Compiling imports the DSL, which takes most of a second; loading an object
file and telling versions do without it where they can.
"""

import ctypes
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import cache
from importlib import import_module, metadata
from importlib.util import find_spec
from pathlib import Path
from threading import RLock

from cute_fa.core.errors import DeviceError, expected
from cute_fa.core.requirements import ARCH, DSL, TVM_FFI
from cute_fa.tuning.plan import symbol

# The option alone gives the same object with any CUTE_DSL_ARCH, and with none on a machine without a GPU.
OPTIONS = f"--enable-tvm-ffi --gpu-arch {ARCH}"

_RUNTIME = "libcute_dsl_runtime.so"

# The DSL keeps the state of its compiler and its loader in globals of the process.
_lock = RLock()


def compile_plan(plan, options: str = ""):
    """The DSL's compiled object of the plan's kernel. options: more of the DSL's, such as --keep-ptx.

    Read it or export it, but do not call it: where the machine's own architecture is not sm_90a, it has no code to run.
    """
    cute = import_dsl().cute
    from cute_fa.kernels.registry import kernel_of

    with _lock:
        kernel = kernel_of(plan)
        return cute.compile(kernel, *kernel.fake_arguments(), options=f"{OPTIONS} {options}")


def object_code(plan) -> bytes:
    """An ELF object file that exports the kernel as a TVM-FFI function: cubin, launch, checks of the arguments."""
    with _lock, tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "kernel.o")
        compile_plan(plan).export_to_c(str(path), function_name=symbol(plan))
        return path.read_bytes()


def load_object(plan, path: Path) -> Callable:
    """The function in an object file that holds `object_code(plan)`; bytes after it do no harm."""
    with _lock:
        module = None if DSL.module in sys.modules else _link(path)
        if module is None:
            module = import_dsl().cute.runtime.load_module(str(path), enable_tvm_ffi=True)
        return module[symbol(plan)]


def _link(path: Path):
    """The object file as a TVM-FFI module, linked by the machine's C compiler; None where something for that is missing.

    The DSL links in memory, but what does that is imported with all of it. Source: CUTLASS documentation, "Exporting
    compiled module with TVM FFI".
    """
    try:
        tvm_ffi = import_module(TVM_FFI.module)
        _, runtime = cuda_flavour()
        with tempfile.TemporaryDirectory() as folder:
            library = Path(folder, "kernel.so")
            command = ["cc", "-shared", "-o", library, path, runtime, tvm_ffi.libinfo.find_libtvm_ffi()]
            subprocess.run(command, check=True, capture_output=True, timeout=10)
            ctypes.CDLL(str(runtime))  # which the library asks for by its name alone
            return tvm_ffi.load_module(str(library))
    except (ImportError, AttributeError, OSError, RuntimeError, subprocess.SubprocessError):
        return None


@cache
def toolchain() -> tuple[str, ...]:
    """Versions of what makes an object file. The DSL has a compiler for each CUDA flavour that is installed."""
    try:
        major, _ = cuda_flavour()
        packages = DSL.name, f"{DSL.name}-libs-cu{major}", TVM_FFI.name
        return tuple(f"{name} {metadata.version(name)}" for name in packages)
    except ImportError:  # as it is for packages without metadata
        dsl, tvm_ffi = import_dsl(), import_module(TVM_FFI.module)
        return f"{DSL.name} {dsl.__version__}", f"CUDA {dsl.CUDA_VERSION}", f"{TVM_FFI.name} {tvm_ffi.__version__}"


@cache
def cuda_flavour() -> tuple[int, Path]:
    """The CUDA major version of the compiler that the DSL takes, and its runtime library; ImportError where none is found.

    The rule of `cutlass/_mlir/_mlir_libs/__init__.py`: the newest that the driver admits, or of all where there is none.
    """
    spec = find_spec("nvidia_cutlass_dsl")
    roots = spec.submodule_search_locations if spec else ()
    found = {int(library.parts[-3][2:]): library for root in roots for library in Path(root).glob(f"cu*/lib/{_RUNTIME}")}
    driver = ctypes.c_int()
    try:
        has_driver = ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(driver)) == 0
    except (OSError, AttributeError):
        has_driver = False
    admitted = [major for major in found if not has_driver or major <= driver.value // 1000]  # 12090 is 12.9
    if not admitted:
        raise ImportError(f"{DSL.name}: no {_RUNTIME} for this driver")
    return max(admitted), found[max(admitted)]


def import_dsl():
    """The module `cutlass`, with `cutlass.cute` and TVM-FFI imported; DeviceError where one of them is missing."""
    try:
        for module in (f"{DSL.module}.cute", TVM_FFI.module):
            import_module(module)
    except ImportError as error:
        got = f"{type(error).__name__} ({error})"
        packages, rule = f"{DSL.name} and {TVM_FFI.name}", "packages that compile the kernels of CUDA tensors"
        advice = f"Run: pip install '{DSL}' '{TVM_FFI}'"
        raise DeviceError(expected(packages, rule, got, advice)) from error
    return import_module(DSL.module)
