"""Inspection: what the compiler made of a plan, found without a GPU, and what is wrong with it.

`cute-fa inspect` and the tests of plans call this. A kernel that spills, or that ptxas quietly changed, gives right
results slowly, so no comparison of results finds it; `faults` does. What else must not be belongs there, what else is
worth knowing in `Inspection`.
"""

import contextlib
import io
import multiprocessing
import os
import re
import shlex
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path

from cute_fa.core.errors import expected
from cute_fa.core.hardware import MAX_SMEM_BYTES_PER_BLOCK
from cute_fa.host.compile import compile_plan
from cute_fa.host.cubin import ptxas_version, read_kernels
from cute_fa.tuning.budget import SMEM_ALIGNMENT
from cute_fa.tuning.plan import Plan

NVDISASM = "nvidia-cuda-nvdisasm>=13.4,<14"

# ptxas says under these numbers what it did other than asked: setmaxnreg dropped (C7508), products serialised (C7511),
# a wait put in where an accumulator is read too early (C7517), registers that do not suffice (C7600, C7602).
REMARK = re.compile(r"\((C7[56]\d\d)\) (.+?)(?= in (?:the )?function | ptxas (?:info|fatal) |$)")
SPILLS = re.compile(r"(\d+) bytes spill stores, (\d+) bytes spill loads")


@dataclass(frozen=True)
class Inspection:
    """What one compile gave, its PTX and its cubin.

    registers: per thread at launch. spill_bytes: of all stores and loads. stack_bytes: local memory per thread.
    smem_bytes: of a block, all of it dynamic. remarks: code of ptxas -> its words. opcodes: as `host/cubin.py` counts
    them. cuda: the flavour of the DSL that compiled it.
    """

    plan: str
    registers: int
    spill_bytes: int
    stack_bytes: int
    smem_bytes: int
    num_instructions: int
    remarks: dict[str, str]
    opcodes: dict[str, int]
    compile_seconds: float
    cuda: str
    ptxas: str
    ptx: str = field(repr=False)
    cubin: bytes = field(repr=False)


@dataclass(frozen=True)
class Report:
    """inspection: None where the plan does not compile; the only fault is then what was raised."""

    plan: Plan
    inspection: Inspection | None
    faults: list[str]


def inspect_plan(plan: Plan) -> Inspection:
    """Compiles the plan's kernel; raises what the compiler raises.

    What Python prints on stderr meanwhile is lost, in other threads too: there ptxas speaks.
    """
    words, begin = io.StringIO(), time.perf_counter()
    # The DSL names its dumps after the types of the arguments, in which plans do not differ: each needs its own folder.
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stderr(words):
        dumps = f"remarks{{ptx}} --keep-ptx --keep-cubin --dump-dir {shlex.quote(folder)}"
        compiled = compile_plan(plan, options=dumps)
        ptx, cubin = compiled.__ptx__, compiled.__cubin__
    seconds = time.perf_counter() - begin
    from cutlass import CUDA_VERSION

    (kernel,), (smem_bytes,) = read_kernels(cubin), launch_smem_bytes(str(compiled.ir_module))
    said = " ".join(words.getvalue().split())
    spills = SPILLS.findall(said)
    assert len(spills) == 1, f"ptxas tells the spills of one kernel, got {said}"
    return Inspection(
        plan=plan.name,
        registers=kernel.registers,
        spill_bytes=sum(map(int, spills[0])),
        stack_bytes=kernel.stack_bytes,
        smem_bytes=smem_bytes,
        num_instructions=kernel.num_instructions,
        remarks=read_remarks(said),
        opcodes=kernel.opcodes,
        compile_seconds=seconds,
        cuda=f"{CUDA_VERSION.major}.{CUDA_VERSION.minor}",
        ptxas=ptxas_version(cubin),
        ptx=ptx,
        cubin=cubin,
    )


def faults(inspection: Inspection, plan: Plan) -> list[str]:
    """What must not be, a line each; empty for a kernel that is what its plan says."""
    found = []
    local = {name: inspection.opcodes[name] for name in ("LDL", "STL") if name in inspection.opcodes}
    if inspection.spill_bytes or inspection.stack_bytes or local:
        count = ", ".join(f"{number} {name}" for name, number in local.items()) or "no LDL or STL"
        found.append(f"spill: {inspection.spill_bytes} bytes, stack of {inspection.stack_bytes} bytes, {count}")
    found += [f"ptxas {code}: {words}" for code, words in inspection.remarks.items()]
    if inspection.smem_bytes > MAX_SMEM_BYTES_PER_BLOCK:
        found.append(f"shared memory: {inspection.smem_bytes} bytes, a block has at most {MAX_SMEM_BYTES_PER_BLOCK}")
    if abs(inspection.smem_bytes - plan.smem_bytes) > SMEM_ALIGNMENT:
        found.append(f"shared memory: {inspection.smem_bytes} bytes, the plan counts {plan.smem_bytes}")
    missing = [name for name in plan.required_opcodes if name not in inspection.opcodes]
    if missing:
        found.append(f"missing instructions: {', '.join(missing)}")
    return found


def report(plan: Plan) -> Report:
    """The inspection with its faults; a plan that does not compile is a fault, not an error."""
    try:
        inspection = inspect_plan(plan)
    except Exception as error:
        # The compiler's first line has ptxas's own words, source code follows; colours are for terminals.
        first = re.sub(r"\x1b\[\d*m", "", str(error)).strip().partition("\n")[0]
        return Report(plan, None, [f"fails: {type(error).__name__}: {first}"])
    return Report(plan, inspection, faults(inspection, plan))


def report_all(plans: Sequence[Plan]) -> Iterator[Report]:
    """A report of each plan, in the order in which they are done, from a process for each core."""
    # The compiler takes one thread at a time, and a forked process would inherit locks that torch's threads hold.
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(os.cpu_count() or 1, len(plans)), mp_context=spawn) as pool:
        for done in as_completed([pool.submit(report, plan) for plan in plans]):
            yield done.result()


def launch_smem_bytes(ir: str) -> list[int]:
    """Bytes of dynamic shared memory of every launch in the host code that the DSL generates (LLVM dialect, as text).

    Neither the cubin nor anything else of the DSL has them. A launch is configured by a struct whose third field, the
    bytes, is stored from a constant of the same function.
    """
    config = r"struct<\(array<3 x i32>, array<3 x i32>, i64, ptr, ptr, i32\)>"
    field_address = rf"(%\d+) = llvm\.getelementptr %\d+\[0, 2\][^\n]*{config}\s+llvm\.store (%\d+), \1 : i64"
    sizes = []
    for launch in re.finditer(field_address, ir):
        function = ir[ir.rfind("llvm.func ", 0, launch.start()) : launch.start()]
        constant = re.search(rf"{launch[2]} = llvm\.mlir\.constant\((\d+) : i64\)", function)
        assert constant, f"shared memory of a launch is a constant, got {launch[0]}"
        sizes.append(int(constant[1]))
    return sizes


def read_remarks(said: str) -> dict[str, str]:
    """Code -> words where it stands first. said: by ptxas, in one line, for the DSL breaks lines anywhere."""
    remarks = {}
    for code, words in REMARK.findall(said):
        remarks.setdefault(code, words)
    return remarks


def find_nvdisasm() -> str:
    """The path of NVIDIA's disassembler: that of its pip package, else the one on PATH."""
    try:
        files = metadata.files("nvidia-cuda-nvdisasm") or ()
    except metadata.PackageNotFoundError:
        files = ()
    found = next((str(file.locate()) for file in files if file.name == "nvdisasm"), None) or shutil.which("nvdisasm")
    if found is None:
        rule, advice = "nvdisasm beside this Python or on PATH", f"Run: pip install '{NVDISASM}'"
        raise ValueError(expected("sass", rule, "none", advice))
    return found


def disassemble(cubin: bytes) -> str:
    """The SASS of a cubin."""
    nvdisasm = find_nvdisasm()
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(cubin)
        done = subprocess.run([nvdisasm, "-c", file.name], capture_output=True, text=True)
    if done.returncode:
        advice = f"Run: pip install '{NVDISASM}'"
        raise ValueError(expected("sass", "an nvdisasm that reads this cubin", done.stderr.strip(), advice))
    return done.stdout
