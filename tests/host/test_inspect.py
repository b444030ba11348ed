"""Inspection: small kernels that spill, lose their setmaxnreg or do neither, and every fault on made-up facts."""

import re
import shutil
from collections import Counter
from dataclasses import replace
from importlib import metadata

import cuda.bindings.driver as cuda
import cutlass
import pytest
from cutlass import Float32, cute
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor
from cutlass.memory import SmemAllocator

from cute_fa.host import inspect
from cute_fa.host.cubin import OPCODES
from cute_fa.host.inspect import Inspection, faults, inspect_plan, read_remarks, report
from cute_fa.tuning.budget import ForwardTile
from cute_fa.tuning.heuristics import build_forward_plan
from cute_fa.tuning.plan import PreprocessPlan

# 32 KiB each: Q, two stages of K and of V, O; 1 KiB of barriers.
TILE, TILE_BYTES = ForwardTile(128, 128, 128, 128, 2), 6 * 32768 + 1024
PLAN = replace(build_forward_plan("bfloat16", 128, 128, True), tile=TILE)
SMEM_BYTES = 5000


class Reverse:
    """Reverses rows of num_values floats through registers, with SMEM_BYTES of shared memory that get one float.

    min_blocks: launch bound without which ptxas drops setmaxnreg, or None.
    """

    def __init__(self, num_values: int, num_threads: int, min_blocks: int | None = 1):
        self.num_values, self.num_threads, self.min_blocks = num_values, num_threads, min_blocks

    def fake_arguments(self):
        shape, stride = (self.num_threads, self.num_values), (self.num_values, 1)
        x = make_fake_tensor(Float32, shape, stride=stride, assumed_align=16)
        return x, make_fake_stream(use_tvm_ffi_env_stream=True)

    @cute.jit
    def __call__(self, x: cute.Tensor, stream: cuda.CUstream):
        bound = {} if self.min_blocks is None else {"min_blocks_per_mp": self.min_blocks}
        self.kernel(x).launch(grid=(1, 1, 1), block=(self.num_threads, 1, 1), stream=stream, **bound)

    @cute.kernel
    def kernel(self, x: cute.Tensor):
        row, _, _ = cute.arch.thread_idx()
        values = cute.make_rmem_tensor(self.num_values, Float32)
        buffer = SmemAllocator().allocate_tensor(Float32, cute.make_layout(SMEM_BYTES // 4), byte_alignment=16)
        for i in cutlass.range(self.num_values, unroll_full=True):
            values[i] = x[row, i]
        buffer[row] = values[0]
        cute.arch.setmaxregister_increase(168)
        cute.arch.sync_threads()
        for i in cutlass.range(self.num_values, unroll_full=True):
            x[row, self.num_values - 1 - i] = values[i]
        x[row, 0] = buffer[self.num_threads - 1 - row]


@pytest.fixture
def kernel(monkeypatch):
    """kernel(k) makes k the kernel of every plan."""
    return lambda k: monkeypatch.setattr("cute_fa.kernels.registry.kernel_of", lambda plan: k)


def healthy(**changes) -> Inspection:
    """What PLAN's kernel should look like."""
    opcodes = {"HGMMA": 48, "UTMALDG": 10, "USETMAXREG": 2, "UTMASTG": 1, "STSM": 8}
    facts = {
        **dict(plan=PLAN.name, registers=168, spill_bytes=0, stack_bytes=0, smem_bytes=TILE_BYTES),
        **dict(num_instructions=2000, remarks={}, opcodes=opcodes, compile_seconds=2.0),
        **dict(cuda="13.4", ptxas="13.4.59", ptx=".version 9.4", cubin=b"\x7fELF"),
    }
    return Inspection(**facts | changes)


def test_facts_of_a_kernel(kernel):
    kernel(Reverse(16, 384))
    found = inspect_plan(PLAN)
    assert found.plan == PLAN.name and found.spill_bytes == found.stack_bytes == 0, "16 values stay in registers"
    assert found.smem_bytes == SMEM_BYTES, "the launch asks for what the kernel allocates"
    assert found.opcodes == {"USETMAXREG": 1} and found.remarks == {}, "setmaxnreg is kept"
    assert 16 <= found.registers <= 168 and found.num_instructions >= 16 + 16, "loads and stores of 16 values"
    version = cutlass.CUDA_VERSION
    assert found.cuda == f"{version.major}.{version.minor}" and found.ptxas.startswith(found.cuda), "what compiled it"
    assert found.compile_seconds > 0 and ".target sm_90a" in found.ptx, "compiled here, for Hopper"


def test_a_spill_is_a_fault(kernel):
    kernel(Reverse(96, 1024, None))  # 1024 threads have 64 registers each
    found = inspect_plan(PLAN)
    assert found.registers == 64 and found.stack_bytes > 4 * (96 - 64), "32 values and more have no register"
    assert found.spill_bytes >= 2 * 4 * (96 - 64), "each is stored and loaded"
    assert faults(found, PLAN)[0].startswith(f"spill: {found.spill_bytes} bytes"), "and that is told"


def test_a_dropped_setmaxnreg_is_a_fault(kernel):
    kernel(Reverse(16, 384, None))
    found = inspect_plan(PLAN)
    assert list(found.remarks) == ["C7508"] and "setmaxnreg" in found.remarks["C7508"], found.remarks
    assert "function" not in found.remarks["C7508"], "without the mangled name"
    assert f"ptxas C7508: {found.remarks['C7508']}" in faults(found, PLAN), "the remark is a fault"
    assert any("USETMAXREG" in fault for fault in faults(found, PLAN)), "and so is the missing instruction"


def test_a_plan_that_does_not_compile(monkeypatch):
    def fails(plan, options):
        raise RuntimeError("\x1b[91merror:\x1b[0m PTX assembly failed: (C7600)\n\n  --> file.py:1:2")

    monkeypatch.setattr(inspect, "compile_plan", fails)
    found = report(PLAN)
    assert (found.plan, found.inspection) == (PLAN, None), "there is nothing to inspect"
    assert found.faults == ["fails: RuntimeError: error: PTX assembly failed: (C7600)"], "its first line"


def test_no_faults():
    assert faults(healthy(), PLAN) == [], "a kernel that is as it should be"


LOCAL = {**healthy().opcodes, "LDL": 3, "STL": 2}
FEW = {"HGMMA": 1, "UTMALDG": 1, "STSM": 1}


@pytest.mark.parametrize(
    "changes, fault",
    [
        pytest.param({"spill_bytes": 192}, "spill: 192 bytes, stack of 0 bytes, no LDL or STL", id="spill"),
        pytest.param({"stack_bytes": 8}, "spill: 0 bytes, stack of 8 bytes, no LDL or STL", id="stack"),
        pytest.param({"opcodes": LOCAL}, "spill: 0 bytes, stack of 0 bytes, 3 LDL, 2 STL", id="local-memory"),
        pytest.param({"remarks": {"C7511": "serialized"}}, "ptxas C7511: serialized", id="remark"),
        pytest.param({"opcodes": FEW}, "missing instructions: USETMAXREG, UTMASTG", id="opcodes"),
    ],
)
def test_faults(changes, fault):
    (found,) = faults(healthy(**changes), PLAN)
    assert found == fault, "one fault, with its numbers"


@pytest.mark.parametrize(
    "excess, is_fault",
    [(-1025, True), (-1024, False), (1024, False), (1025, True)],
    ids=["far-below", "just-below", "just-above", "far-above"],
)
def test_shared_memory_agrees_with_the_plan(excess, is_fault):
    found = faults(healthy(smem_bytes=TILE_BYTES + excess), PLAN)
    fault = f"shared memory: {TILE_BYTES + excess} bytes, the plan counts {TILE_BYTES}"
    assert found == [fault] * is_fault, "1 KiB apart at most"


def test_shared_memory_of_a_kernel_that_takes_none():
    (found,) = faults(healthy(smem_bytes=4096), PreprocessPlan("bfloat16", 64, True))
    assert found == "shared memory: 4096 bytes, the plan counts 0", "plans of other kernels than the main ones too"


def test_shared_memory_over_the_limit():
    wide = replace(PLAN, tile=replace(TILE, num_kv_stages=3))
    found = faults(healthy(smem_bytes=TILE_BYTES + 2 * 32768), wide)
    assert found == ["shared memory: 263168 bytes, a block has at most 232448"], "the kernel would not start"


def test_remarks():
    said = (
        "ptxas info : (C7517) wgmma.wait_group is injected in around line 4 by compiler in function 'k' "
        "ptxas info : (C7517) wgmma.wait_group is injected in around line 9 by compiler in function 'k' "
        "ptxas info : (C7511) Potential Performance Loss: serialized in the function 'k' in line 10 "
        "ptxas info : 0 bytes ptxas fatal : (C7602) too few registers"
    )
    assert read_remarks(said) == {
        "C7517": "wgmma.wait_group is injected in around line 4 by compiler",
        "C7511": "Potential Performance Loss: serialized",
        "C7602": "too few registers",
    }, "each code once, with its first words"


def test_disassembly_has_the_counted_instructions(kernel):
    kernel(Reverse(96, 1024, None))
    found = inspect_plan(PLAN)
    sass = inspect.disassemble(found.cubin)
    names = re.findall(r"^\s+/\*[0-9a-f]+\*/\s+(?:@\S+ )?([A-Z0-9]+)", sass, re.MULTILINE)
    assert len(names) == found.num_instructions, "as many as nvdisasm sees"
    assert Counter(name for name in names if name in OPCODES) == found.opcodes, "and the same"
    assert found.opcodes["LDL"] and found.opcodes["STL"], "of which there are some"


def test_without_nvdisasm(monkeypatch):
    def not_found(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "files", not_found)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    message = "sass: expected nvdisasm beside this Python or on PATH, got none. Run: pip install 'nvidia-cuda-nvdisasm"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        inspect.disassemble(b"")
    monkeypatch.setattr(shutil, "which", lambda name: f"/cuda/bin/{name}")
    assert inspect.find_nvdisasm() == "/cuda/bin/nvdisasm", "else the one of a CUDA toolkit"


def test_nvdisasm_that_cannot_read_the_cubin():
    with pytest.raises(ValueError, match="^sass: expected an nvdisasm that reads this cubin, got nvdisasm"):
        inspect.disassemble(b"no cubin")
