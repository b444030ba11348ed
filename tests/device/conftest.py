"""Tiny kernels around one building block: compiled for sm_90a anywhere, called with torch tensors on a Hopper GPU."""

import os

os.environ.setdefault("CUTE_DSL_ARCH", "sm_90a")  # the DSL reads it once, on import

import cutlass
import pytest
from cutlass import cute
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream

from cute_fa.host.compile import OPTIONS


@pytest.fixture(scope="session")
def build(tmp_path_factory):
    """build(launch, *arguments) gives a function of torch tensors and numbers, without the compile-time arguments.

    launch: a @cute.jit function whose last argument is the stream. arguments: a pair (dtype, shape) for a contiguous
    tensor, all else as it is. The function comes from an object file, which loads on a machine of any architecture.
    """

    def made(argument):
        if isinstance(argument, tuple) and isinstance(argument[1], tuple):
            dtype, shape = argument
            row_major = tuple(reversed(range(len(shape))))
            return make_fake_compact_tensor(dtype, shape, stride_order=row_major, assumed_align=16)
        return argument

    def build(launch, *arguments):
        stream = make_fake_stream(use_tvm_ffi_env_stream=True)
        compiled = cute.compile(launch, *map(made, arguments), stream, options=OPTIONS)
        path = str(tmp_path_factory.mktemp("kernel") / "kernel.o")
        compiled.export_to_c(path, function_name="launch")
        return cute.runtime.load_module(path, enable_tvm_ffi=True)["launch"]

    return build


@cute.jit
def _trace(function: cutlass.Constexpr, found: cutlass.Constexpr):
    found.append(function())


@pytest.fixture(scope="session")
def on_host():
    """on_host(function) gives what `function` returns where layouts can be made: inside a trace, in plain Python."""

    def run(function):
        found = []
        cute.compile(_trace, function, found)
        return found[0]

    return run
