"""Compile: architecture and options, the object file, its function, threads, and a machine without the DSL."""

import re
import sys
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path

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


def test_toolchain():
    import cutlass

    dsl, cuda, tvm_ffi = compile.toolchain()
    assert metadata.version("nvidia-cutlass-dsl") in dsl, f"version of the DSL, got {dsl}"
    flavour = cutlass.CUDA_VERSION
    assert f"major={flavour.major}" in cuda and f"minor={flavour.minor}" in cuda, f"flavour, got {cuda}"
    assert metadata.version("apache-tvm-ffi") in tvm_ffi, f"version of TVM-FFI, got {tvm_ffi}"


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
