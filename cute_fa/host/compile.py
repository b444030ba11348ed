"""Compile: a plan becomes the DSL's compiled object, an object file, and from that a function. Needs no GPU.

`host/cache.py` and `host/inspect.py` call this. The DSL is imported by the first call, never before.
"""

import tempfile
from collections.abc import Callable
from functools import cache
from importlib import import_module
from pathlib import Path
from threading import RLock

from cute_fa.core.errors import DeviceError, expected
from cute_fa.core.requirements import ARCH, DSL, TVM_FFI
from cute_fa.tuning.plan import symbol

# The option alone gives the same object with any CUTE_DSL_ARCH, and with none on a machine without a GPU.
OPTIONS = f"--enable-tvm-ffi --gpu-arch {ARCH}"

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
        return import_dsl().cute.runtime.load_module(str(path), enable_tvm_ffi=True)[symbol(plan)]


@cache
def toolchain() -> tuple[str, ...]:
    """Versions of what makes an object file. The DSL has a compiler for each CUDA flavour that is installed."""
    dsl, tvm_ffi = import_dsl(), import_module(TVM_FFI.module)
    return f"{DSL.name} {dsl.__version__}", f"CUDA {dsl.CUDA_VERSION}", f"{TVM_FFI.name} {tvm_ffi.__version__}"


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
