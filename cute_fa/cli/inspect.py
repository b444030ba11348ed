"""`cute-fa inspect`: registers, spills, instruction counts, PTX and SASS of a kernel, without a GPU.

The options and the display of `cute_fa.host.inspect`, which does the work and is imported inside functions, so that
help is fast. `--all --check` is what continuous integration runs.
"""

import json
import time
from collections.abc import Sequence
from dataclasses import asdict
from enum import Enum
from pathlib import Path
from typing import Annotated

import typer
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from cute_fa.core.dtypes import BFLOAT16, KERNEL_DTYPES
from cute_fa.core.errors import expected
from cute_fa.core.hardware import H100_SXM
from cute_fa.core.mask_spec import MaskSpec
from cute_fa.core.problem import AttentionProblem, ScoreSpec
from cute_fa.tuning.candidates import checked_plans
from cute_fa.tuning.heuristics import HEAD_DIM_TILES, backward_plans, forward_plan
from cute_fa.tuning.plan import Plan

MAX_HEAD_DIM = HEAD_DIM_TILES[-1]

DETERMINISTIC = "backward-deterministic"
DIRECTIONS = ("forward", "backward", DETERMINISTIC, "preprocess", "postprocess")
Direction = Enum("Direction", {name: name for name in DIRECTIONS}, type=str)
Dtype = Enum("Dtype", {name: name for name in KERNEL_DTYPES}, type=str)


def inspect(
    direction: Annotated[
        Direction | None, typer.Option(help="forward, or a kernel of a backward call: forward.")
    ] = None,
    head_dim: Annotated[int | None, typer.Option(min=1, max=MAX_HEAD_DIM, help="Of q and k: 128.")] = None,
    head_dim_v: Annotated[int | None, typer.Option(min=1, max=MAX_HEAD_DIM, help="Of v: that of q and k.")] = None,
    causal: Annotated[bool | None, typer.Option("--causal/--no-causal", help="The mask: --no-causal.")] = None,
    dtype: Annotated[Dtype | None, typer.Option(help="Of q, k and v: bfloat16.")] = None,
    seqlen: Annotated[int | None, typer.Option(min=1, help="Of q and k, where a plan depends on it: 4096.")] = None,
    ptx: Annotated[Path | None, typer.Option(help="File for the PTX.")] = None,
    sass: Annotated[Path | None, typer.Option(help="File for the SASS; needs nvdisasm.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    every: Annotated[bool, typer.Option("--all", "--check", help="Check every plan, on all cores.")] = False,
) -> None:
    """Compile the kernel of a problem for sm_90a and show what became of it. Exits with 1 on a fault.

    A fault is a spill, ptxas's remark that it did other than asked, too much shared memory, or a missing instruction.
    """
    words = dict(direction=direction and direction.value, dtype=dtype and dtype.value)
    problem = dict(**words, head_dim=head_dim, head_dim_v=head_dim_v, causal=causal, seqlen=seqlen)
    if every:
        for name, value in dict(**problem, ptx=ptx, sass=sass).items():
            if value is not None:
                raise ValueError(expected(name, "no value beside all", value, "Leave it out: all plans are checked"))
        good = check_all(checked_plans(), as_json)
    else:
        plan = plan_of(**{name: value for name, value in problem.items() if value is not None})
        good = show(plan, ptx, sass, as_json)
    if not good:
        raise typer.Exit(1)


def plan_of(
    direction: str = "forward",
    head_dim: int = 128,
    head_dim_v: int | None = None,
    causal: bool = False,
    dtype: str = BFLOAT16.name,
    seqlen: int = 4096,
) -> Plan:
    """The plan of a problem of the size of the benchmarks: 16384 tokens, and heads that make up a model 2048 wide."""
    problem = AttentionProblem(
        layout="dense",
        dtype=dtype,
        batch=max(1, 16384 // seqlen),
        seqlen_q=seqlen,
        seqlen_k=seqlen,
        num_heads_q=max(1, 2048 // head_dim),
        num_heads_kv=max(1, 2048 // head_dim),
        head_dim=head_dim,
        head_dim_v=head_dim_v or head_dim,
        scores=ScoreSpec(scale=head_dim**-0.5, mask=MaskSpec(right=0 if causal else None)),
        features=frozenset({"deterministic"} if direction == DETERMINISTIC else ()),
    )
    if direction == "forward":
        return forward_plan(problem, H100_SXM.num_sms)
    main, before, after = backward_plans(problem)
    return {"preprocess": before, "postprocess": after}.get(direction, main)


def show(plan: Plan, ptx: Path | None, sass: Path | None, as_json: bool) -> bool:
    """Inspects one plan, writes the files, prints the facts; True if there is no fault."""
    from cute_fa.host.inspect import Report, disassemble, faults, find_nvdisasm, inspect_plan

    if sass:
        find_nvdisasm()
    inspection = inspect_plan(plan)
    report = Report(plan, inspection, faults(inspection, plan))
    if ptx:
        write("ptx", ptx, inspection.ptx)
    if sass:
        write("sass", sass, disassemble(inspection.cubin))
    if as_json:
        print(json.dumps(facts(report), indent=2))
    else:
        Console(highlight=False, markup=False).print(table(report))
    return not report.faults


def check_all(plans: Sequence[Plan], as_json: bool) -> bool:
    """Inspects the plans and prints a line each as it is done, and one a fault; True if there is none."""
    from cute_fa.host.inspect import report_all

    begin, reports = time.perf_counter(), []
    for report in report_all(plans):
        reports.append(report)
        if not as_json:
            print(*lines(report), sep="\n", flush=True)
    faulty = [report.plan.name for report in reports if report.faults]
    if as_json:
        print(json.dumps([facts(report) for report in reports], indent=2))
    else:
        seconds = time.perf_counter() - begin
        print(f"{len(reports)} plans in {seconds:.0f} s, {len(faulty)} with faults", *faulty, sep="\n  ")
    return not faulty


def write(option: str, path: Path, text: str) -> None:
    try:
        path.write_text(text)
    except OSError as error:
        rule, advice = "a file that can be written", f"{error.strerror}: choose another"
        raise ValueError(expected(option, rule, path, advice)) from None


def facts(report) -> dict:
    """What is printed as JSON: all but the code."""
    known = {"plan": report.plan.name}
    if report.inspection:
        known = asdict(report.inspection) | {"opcodes": counts(report.inspection)}
    return {name: fact for name, fact in known.items() if name not in ("ptx", "cubin")} | {"faults": report.faults}


def table(report) -> Table:
    i = report.inspection
    rows = Table(box=SIMPLE, show_header=False, pad_edge=False)
    rows.add_row("plan", i.plan)
    rows.add_row("registers", f"{i.registers} a thread at launch")
    rows.add_row("spills", f"{i.spill_bytes} bytes, stack of {i.stack_bytes} bytes")
    rows.add_row("shared memory", f"{i.smem_bytes} bytes")
    rows.add_row("ptxas remarks", ", ".join(i.remarks) or "none")
    rows.add_row("instructions", f"{i.num_instructions}, of which {', '.join(f'{number} {name}' for name, number in counts(i).items())}")
    rows.add_row("compiled", f"in {i.compile_seconds:.1f} s by ptxas {i.ptxas} for CUDA {i.cuda}")
    rows.add_row("faults", "\n".join(report.faults) or "none", style="red" if report.faults else None)
    return rows


def lines(report) -> list[str]:
    """One that a person can read past, or one for each fault."""
    if report.faults:
        return [f"FAULT {report.plan.name}: {fault}" for fault in report.faults]
    i = report.inspection
    sizes = f"{i.registers} registers, {i.smem_bytes} bytes of shared memory, {i.num_instructions} instructions"
    return [f"ok    {i.plan}: {sizes}, {counts(i)['HGMMA']} HGMMA, {i.compile_seconds:.1f} s"]


def counts(inspection) -> dict[str, int]:
    """Of every instruction that is counted, 0 where there is none."""
    from cute_fa.host.cubin import OPCODES

    return {name: inspection.opcodes.get(name, 0) for name in OPCODES}
