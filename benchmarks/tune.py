"""Tunes the forward kernel: `python -m benchmarks.tune --head-dim 128` finds the fastest plan of one pair of head dims.

Compiles every candidate (`cute_fa/tuning/candidates.py`) into the user's cache, without a GPU, and leaves out what the
compiler made slow. On a GPU it then times the rest on cells as large as those of the suite `grid`: all of them briefly,
the best and today's choice by the protocol of `run.py`. Prints the best of each cell and rows for
`cute_fa/tuning/winners.py`.
"""

import argparse
import math
import multiprocessing
import os
import re
import struct
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import astuple, dataclass
from functools import partial
from itertools import groupby
from pathlib import Path

import torch

from benchmarks.backends import Inputs, Run, make_inputs
from benchmarks.command import run_command
from benchmarks.machine import Machine, cublas_tflops, cuda_machine
from benchmarks.record import append_rows, begin
from benchmarks.run import (
    Timing,
    describe,
    dropping_out,
    figures,
    max_difference,
    shared_columns,
    take_turns,
)
from benchmarks.suites import CAUSAL, DIRECTIONS, FULL, GRID, Case, dense, sizes
from cute_fa.core.dtypes import BFLOAT16
from cute_fa.core.env import cache_dir
from cute_fa.core.errors import expected
from cute_fa.host import cache, launch
from cute_fa.host.cubin import MACHINE_CUDA, read_kernels
from cute_fa.tuning.candidates import forward_candidates
from cute_fa.tuning.heuristics import HEAD_DIM_TILES, forward_plan, head_dim_tile
from cute_fa.tuning.plan import ForwardPlan
from cute_fa.tuning.winners import ForwardWinner
from cute_fa.tuning.work import forward_work

SUITE = "tune"
MASKS = {"causal": CAUSAL, "full": FULL}
TOKENS, WIDTH = 16384, 2048  # of a cell, as in the suite `grid`
SEQLENS = (1024, 4096, 16384)

# Of the brief round. Clocks fall while it begins, so all go through it twice, and the second time counts.
TRIAL_CALLS = 4
NUM_FINALISTS = 8

# Plans of one arithmetic differ by what 16 bits round, about half of one percent.
MAX_DIFFERENCE = 1e-2

# Medians this near are one speed: then a plan that serves already stays, so that noise makes no rows.
NEAR = 5e-3

COLUMN_WIDTHS = 3, 3, 6, 6, 3, 4, 1, 2, 6, 5  # of the table of winners, all but the last

Setup = Callable[[ForwardPlan, Inputs], Run]


@dataclass(frozen=True)
class Outcome:
    """Of one cell, by plans' names. present: that of `forward_plan`. timings: of the finalists. failures: reasons."""

    case: Case
    present: str
    timings: dict[str, Timing]
    failures: dict[str, str]

    @property
    def fastest_first(self) -> list[str]:
        return sorted(self.timings, key=lambda name: self.timings[name].p50)


def main(arguments: Sequence[str] | None = None) -> None:
    """Raises DeviceError without a GPU, unless it only compiles, and ValueError for a choice that it cannot measure."""
    options = parser().parse_args(arguments)
    if options.direction != "fwd":
        rule, advice = "fwd", "The backward kernel has no candidates yet"
        raise ValueError(expected("direction", rule, options.direction, advice))
    if options.output and not options.commit:
        raise ValueError(expected("commit", "a hash, with --output", "none", "Tell which code is measured"))
    dims = options.head_dim, options.head_dim_v or options.head_dim
    candidates = chosen_candidates(dims, options.mask, options.only)
    if options.compile_only:
        compile_candidates(candidates, options.jobs)
        return
    machine = cuda_machine()
    if options.output:
        begin(options.output)
    num_sms = launch.sm_count(torch.cuda.current_device())
    cells = [(case, forward_plan(case.problem, num_sms)) for case in cases_of(dims, options.mask, options.seqlen)]
    sound = compile_candidates(list(dict.fromkeys([*(present for _, present in cells), *candidates])), options.jobs)
    shared = shared_columns(machine, SUITE, options.commit)
    shared["cublas_tflops"] = f"{cublas_tflops(machine):.1f}"
    outcomes = []
    for case, present in cells:
        rivals = [plan for plan in sound if plan.is_causal == present.is_causal]
        outcomes.append(measure_case(case, present, rivals, machine, partial(setup_plan, num_sms)))
        if options.output:
            append_rows(options.output, [shared | row for row in rows_of(outcomes[-1])])
        print("\n".join(["", *table(outcomes[-1])]), flush=True)
    lines = map(table_line, winners(outcomes, sound, shared["run"]))
    print("\n".join(["", "rows for cute_fa/tuning/winners.py:", *lines]))


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="benchmarks.tune", description="Find the fastest plan of a kernel on a GPU.")
    made.add_argument("--direction", choices=DIRECTIONS, default="fwd", help="default: fwd")
    made.add_argument("--head-dim", required=True, type=head_dim, metavar="N", help="of q and k")
    made.add_argument("--head-dim-v", type=head_dim, metavar="N", help="default: that of q and k")
    made.add_argument("--mask", nargs="+", choices=MASKS, default=list(MASKS), help="default: both")
    made.add_argument("--seqlen", nargs="+", type=positive, default=SEQLENS, help="default: 1024 4096 16384")
    made.add_argument("--only", default="", metavar="WORD", help="only candidates whose name contains this")
    made.add_argument("--jobs", type=positive, default=os.cpu_count() or 1, help="processes; default: one a core")
    made.add_argument("--compile-only", action="store_true", help="stop when all is compiled; needs no GPU")
    made.add_argument("--output", type=Path, metavar="FILE", help="csv to which rows are added")
    made.add_argument("--commit", default="", metavar="HASH", help="commit of the code, needed with --output")
    return made


def head_dim(word: str) -> int:
    number, largest = int(word), HEAD_DIM_TILES[-1]
    if number % 8 or not 0 < number <= largest:
        raise argparse.ArgumentTypeError(f"expected a multiple of 8 up to {largest}, got {number}")
    return number


def positive(word: str) -> int:
    if int(word) < 1:
        raise argparse.ArgumentTypeError(f"expected 1 or more, got {word}")
    return int(word)


def chosen_candidates(dims: tuple[int, int], masks: Sequence[str], only: str) -> list[ForwardPlan]:
    tiles = map(head_dim_tile, dims)
    sized = partial(forward_candidates, BFLOAT16.name, *tiles)
    candidates = [plan for mask in dict.fromkeys(masks) for plan in sized(MASKS[mask].is_causal)]
    chosen = [plan for plan in candidates if only in plan.name]
    if not chosen:
        advice = f"A name is, for example, {candidates[0].name}"
        raise ValueError(expected("only", "a part of a candidate's name", repr(only), advice))
    return chosen


def cases_of(dims: tuple[int, int], masks: Sequence[str], seqlens: Sequence[int]) -> list[Case]:
    """Mask by mask, shorter sequences first."""
    heads = (WIDTH // dims[0],) * 2
    problems = [
        dense(max(1, TOKENS // seqlen), seqlen, heads, dims, MASKS[mask])
        for mask in dict.fromkeys(masks)
        for seqlen in sorted(set(seqlens))
    ]
    return [Case(SUITE, problem, "fwd", "default") for problem in problems]


def compile_candidates(plans: Sequence[ForwardPlan], jobs: int) -> list[ForwardPlan]:
    """The plans whose code is sound, in their order; each is in the user's cache. Prints what is left out, and why."""
    folder, sound = cache_dir(), []
    # The compiler takes one thread at a time, and a forked process would inherit locks that torch's threads hold.
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(jobs, len(plans)), mp_context=spawn) as pool:
        for plan, found in zip(plans, pool.map(partial(compile_one, folder), plans)):
            if found:
                print(f"left out {plan.name}: {'; '.join(found)}", flush=True)
            else:
                sound.append(plan)
    print(f"{len(sound)} of {len(plans)} candidates are sound, compiled into {folder}", flush=True)
    return sound


def compile_one(folder: Path, plan: ForwardPlan) -> list[str]:
    """The faults of a plan's code; a plan that does not compile is a fault, not an error."""
    try:
        path = cache.fill(plan, folder)
    except Exception as error:
        return [describe(error)]
    return faults(path.read_bytes(), plan.required_opcodes)


def faults(content: bytes, required_opcodes: Sequence[str]) -> list[str]:
    """What is slow or missing in the kernel of an object file.

    `cute_fa/host/inspect.py` knows more, but asks ptxas, so it compiles once more. Here the cubin has to tell, which
    the object file holds as it is.
    """
    cubin = re.search(rb"\x7fELF.{14}" + re.escape(struct.pack("<H", MACHINE_CUDA)), content, re.DOTALL)
    assert cubin, f"an object file has a cubin, got {len(content)} bytes without one"
    (kernel,) = read_kernels(content[cubin.start() :])
    count, found = kernel.opcodes.get, []
    if kernel.stack_bytes or count("LDL") or count("STL"):
        found.append(f"local memory: {kernel.stack_bytes} bytes, {count('LDL', 0)} LDL, {count('STL', 0)} STL")
    # ptxas puts a fence and a wait round each product that it serialises; otherwise they stand round groups.
    if count("WARPGROUP", 0) > count("HGMMA", 0):
        found.append(f"serialised products: {count('WARPGROUP')} WARPGROUP for {count('HGMMA', 0)} HGMMA")
    missing = [name for name in required_opcodes if name not in kernel.opcodes]
    return [*found, *([f"missing instructions: {', '.join(missing)}"] if missing else [])]


def measure_case(
    case: Case, present: ForwardPlan, plans: Sequence[ForwardPlan], machine: Machine, setup: Setup
) -> Outcome:
    """The brief round of all plans, then full rounds of the best and of the present one."""
    inputs = make_inputs(case.problem, machine.device)
    # The present choice comes first, so that others are compared with it.
    ordered = sorted(plans, key=lambda plan: plan != present)
    runs, failures = set_up(ordered, inputs, setup)
    trial: dict[str, float] = {}
    for _ in range(2):
        for name in [name for name in runs if name not in failures]:
            with dropping_out(name, failures):
                trial[name] = machine.time(runs[name], TRIAL_CALLS).ms
    chosen = finalists({name: ms for name, ms in trial.items() if name not in failures}, present.name)
    timings, failed = take_turns({name: runs[name] for name in chosen}, machine.time, GRID.slice_ms, GRID.num_rounds)
    return Outcome(case, present.name, timings, failures | failed)


def set_up(plans: Sequence[ForwardPlan], inputs: Inputs, setup: Setup) -> tuple[dict[str, Run], dict[str, str]]:
    """Runs by name, and the reasons of those that raise or compute something else than the first that does neither."""
    runs: dict[str, Run] = {}
    failures: dict[str, str] = {}
    wanted, first = None, ""
    for plan in plans:
        with dropping_out(plan.name, failures):
            run = setup(plan, inputs)
            out = run(1)
            difference = max_difference(out, out if wanted is None else wanted)  # infinite where out has a NaN
            if difference > MAX_DIFFERENCE:
                failures[plan.name] = f"differs from {first or 'numbers'} by {difference:.2g} of the norm"
                continue
            runs[plan.name] = run
            if wanted is None:
                wanted, first = out, plan.name
    return runs, failures


def setup_plan(num_sms: int, plan: ForwardPlan, inputs: Inputs) -> Run:
    """Launches of the plan's kernel as `cute_fa/host/launch.py` makes them, on results of its own."""
    q, k, v = inputs.q, inputs.k, inputs.v
    batch, seqlen, num_heads, dim = q.shape
    # NaN shows what is not written, where memory may still hold the right result of another plan.
    out = q.new_full((batch, seqlen, num_heads, v.shape[3]), torch.nan)
    lse = q.new_full((batch, num_heads, seqlen), torch.nan, dtype=torch.float32)
    counter = q.new_zeros(2, dtype=torch.int32)
    kernel, scale = cache.load(plan), dim**-0.5

    def run(num_calls: int) -> tuple[torch.Tensor, ...]:
        for _ in range(num_calls):
            kernel(q, k, v, out, lse, counter, scale, num_sms)
        return (out,)

    return run


def finalists(trial: Mapping[str, float], present: str) -> list[str]:
    """The shortest of the brief round, and the present choice wherever it came in."""
    best = sorted(trial, key=trial.__getitem__)[:NUM_FINALISTS]
    return best if present in best or present not in trial else [*best, present]


def rows_of(outcome: Outcome) -> list[dict[str, object]]:
    """A row for each finalist, fastest first, and one for each failure, without the columns that a whole run shares."""
    problem = outcome.case.problem
    shared = {"suite": SUITE, "direction": "fwd", "variant": "default", **sizes(problem), "backend": "cute_fa"}
    flops = forward_work(problem).flops
    measured = [{"config": name, **figures(outcome.timings[name], flops)} for name in outcome.fastest_first]
    failed = [{"config": name, "reason": reason} for name, reason in outcome.failures.items()]
    return [shared | row for row in (*measured, *failed)]


def table(outcome: Outcome) -> list[str]:
    """A line for each finalist, fastest first: its speed, and how much faster it is than the present choice."""
    names, flops = outcome.fastest_first, forward_work(outcome.case.problem).flops
    width = max(map(len, [*names, outcome.case.name]))
    lines = [f"{outcome.case.name:<{width}}{'ms':>10}{'TFLOP/s':>9}{'ratio':>7}"]
    now = outcome.timings.get(outcome.present)
    for name in names:
        p50 = outcome.timings[name].p50
        ratio = f"{now.p50 / p50:.3f}" if now else "-"
        mark = "  now" if name == outcome.present else ""
        lines.append(f"{name:<{width}}{p50:>10.5f}{flops / p50 / 1e9:>9.1f}{ratio:>7}{mark}")
    return [*lines, *(f"failed {name}: {reason}" for name, reason in outcome.failures.items())]


def choose(outcomes: Sequence[Outcome]) -> list[str]:
    """The plan of each cell of one mask, shorter sequences first: the fastest, or one as good that serves already, in
    the cell before it or today."""
    chosen: list[str] = []
    for outcome in outcomes:
        fastest = outcome.fastest_first[0]
        limit = outcome.timings[fastest].p50 * (1 + NEAR)
        near = [name for name in outcome.timings if outcome.timings[name].p50 <= limit]
        serving = [*chosen[-1:], outcome.present]
        chosen.append(next((name for name in serving if name in near), fastest))
    return chosen


def winners(outcomes: Sequence[Outcome], plans: Sequence[ForwardPlan], run: str) -> list[ForwardWinner]:
    """Rows of the table. Between two cells with different plans, the geometric mean of their lengths parts them."""
    by_name = {plan.name: plan for plan in plans}
    rows = []
    for _, group in groupby((one for one in outcomes if one.timings), lambda one: one.case.problem.scores.mask.name):
        cells = list(group)
        lengths = [one.case.problem.seqlen_k for one in cells]
        chosen = choose(cells)
        for idx, name in enumerate(chosen):
            is_last = idx + 1 == len(chosen)
            if is_last or chosen[idx + 1] != name:
                max_seqlen = None if is_last else math.isqrt(lengths[idx] * lengths[idx + 1])
                rows.append(row_of(by_name[name], max_seqlen, run))
    return rows


def row_of(plan: ForwardPlan, max_seqlen: int | None, run: str) -> ForwardWinner:
    t = plan.tile
    where = t.head_dim, t.head_dim_v, plan.is_causal, max_seqlen
    stages = t.num_q_stages, t.num_kv_stages, t.has_o_staging
    what = t.num_consumer_warpgroups, t.tile_n, *stages, plan.has_turns
    return ForwardWinner(*where, *what, run)


def table_line(row: ForwardWinner) -> str:
    """The row as a line of the table."""
    *values, measured = astuple(row)
    cells = ", ".join(f"{value!s:>{width}}" for value, width in zip(values, COLUMN_WIDTHS, strict=True))
    return f'    ForwardWinner({cells}, "{measured}"),'


if __name__ == "__main__":
    run_command(main, "benchmarks.tune")
