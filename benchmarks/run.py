"""Measures a suite: `python -m benchmarks.run --suite grid --backends cute_fa fa4 --output FILE --commit HASH`.

The contestants of a case take turns in short slices, so that each meets the clock and the heat that the others meet
(README.md tells the protocol). Every case gives one row per contestant: its times, or the reason why it has none.
"""

import argparse
import random
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path

from benchmarks.backends import BACKENDS, Entry, Inputs, Run, make_inputs
from benchmarks.command import run_command
from benchmarks.machine import Machine, Slice, cublas_tflops, cuda_machine
from benchmarks.record import append_rows, begin
from benchmarks.suites import DIRECTIONS, SUITES, Case, Suite, sizes
from benchmarks.summary import summary
from cute_fa.core.errors import expected
from cute_fa.tuning.work import backward_work, forward_work

MIN_ROUNDS = 5

# Results of two right kernels in 16 bits differ by about half of one percent, those of a wrong one by tens.
MAX_DIFFERENCE = 2e-2

Setup = Callable[[Case, Inputs], Entry]


@dataclass(frozen=True)
class Timing:
    """Milliseconds a call over the rounds: quantiles and median; and the median clock, None if unknown."""

    p20: float
    p50: float
    p80: float
    clock_mhz: int | None


def main(arguments: Sequence[str] | None = None, prog: str = "benchmarks.run") -> None:
    """Raises DeviceError without a GPU and ValueError for a choice that measures nothing; wrong options exit with 2."""
    options = parser(prog).parse_args(arguments)
    suite = SUITES[options.suite]
    cases = chosen_cases(suite, options.direction, options.only)
    machine = cuda_machine()
    begin(options.output)
    shared = shared_columns(machine, suite.name, options.commit)
    cublas = cublas_tflops(machine)
    print(f"{shared['device']}: cuBLAS bf16 8192^3 {cublas:.0f} TFLOP/s, {len(cases)} cases", flush=True)
    shared["cublas_tflops"] = f"{cublas:.1f}"
    backends = {name: BACKENDS[name] for name in options.backends or suite.backends}
    num_rounds = options.rounds or suite.num_rounds
    rows = []
    for number, case in enumerate(cases, start=1):
        new = [shared | row for row in measure_case(case, backends, machine, suite.slice_ms, num_rounds)]
        append_rows(options.output, new)
        rows += new
        print(f"{number}/{len(cases)} {case.name}: " + ", ".join(map(outcome, new)), flush=True)
    print(f"\n{summary(rows)}")


def shared_columns(machine: Machine, name: str, commit: str) -> dict[str, str]:
    """What all rows of one invocation have in common; `run` is the same for no two that begin in different seconds."""
    now = datetime.now(timezone.utc)
    return {"run": f"{now:%Y%m%dT%H%M%SZ}-{name}", "date": f"{now:%Y-%m-%d}", "commit": commit, **machine.facts}


def parser(prog: str) -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog=prog, description="Measure attention beside its peers on a GPU.")
    made.add_argument("--suite", required=True, choices=SUITES, help="the cells to measure")
    made.add_argument("--backends", nargs="+", choices=BACKENDS, help="default: cute_fa and the suite's peers")
    made.add_argument("--direction", nargs="+", choices=DIRECTIONS, help="default: all that the suite has")
    made.add_argument("--output", required=True, type=Path, metavar="FILE", help="csv to which rows are added")
    made.add_argument("--commit", required=True, metavar="HASH", help="commit of the code that is measured")
    made.add_argument("--only", default="", metavar="SUBSTRING", help="only cases whose name contains this")
    made.add_argument("--rounds", type=rounds, help=f"at least {MIN_ROUNDS}; default: the suite's")
    return made


def rounds(text: str) -> int:
    if int(text) < MIN_ROUNDS:
        raise argparse.ArgumentTypeError(f"expected {MIN_ROUNDS} or more, got {text}")
    return int(text)


def chosen_cases(suite: Suite, directions: Sequence[str] | None, only: str) -> list[Case]:
    """In the suite's order. directions: None for all that the suite has."""
    wanted = tuple(direction for direction in suite.directions if not directions or direction in directions)
    if not wanted:
        rule = f"{' or '.join(suite.directions)} for suite {suite.name}"
        raise ValueError(expected("direction", rule, " ".join(directions), "Leave it out for all that the suite has"))
    cases = list(suite.cases(wanted, only))
    if not cases:
        name = next(suite.cases(wanted)).name
        raise ValueError(expected("only", "a part of a case's name", repr(only), f"A name is, for example, {name}"))
    return cases


def measure_case(
    case: Case, backends: Mapping[str, Setup], machine: Machine, slice_ms: float, num_rounds: int
) -> list[dict[str, object]]:
    """One row for each backend, in their order, without the columns that a whole run shares."""
    entries = set_up(case, backends, machine.device)
    runs = {name: entry.run for name, entry in entries.items() if entry.run}
    timings, failures = take_turns(runs, machine.time, slice_ms, num_rounds)
    work = (forward_work if case.direction == "fwd" else backward_work)(case.problem)
    rows = []
    for name, entry in entries.items():
        row = {"suite": case.suite, "direction": case.direction, "variant": case.variant, **sizes(case.problem)}
        row |= {"backend": name, "config": entry.config, "reason": entry.reason or failures.get(name, "")}
        rows.append(row | (figures(timings[name], work.flops) if name in timings else {}))
    return rows


def figures(timing: Timing, flops: float) -> dict[str, object]:
    return {
        "ms_p20": f"{timing.p20:.5f}",
        "ms_p50": f"{timing.p50:.5f}",
        "ms_p80": f"{timing.p80:.5f}",
        "tflops": f"{flops / timing.p50 / 1e9:.5g}",
        "clock_mhz": "" if timing.clock_mhz is None else timing.clock_mhz,
    }


def outcome(row: Mapping[str, object]) -> str:
    return f"{row['backend']} {'-' if row['reason'] else row['tflops']}"


def set_up(case: Case, backends: Mapping[str, Setup], device: str) -> dict[str, Entry]:
    """An entry for each backend. What raises, or differs from what most contestants compute, has a reason and no run.

    Each contestant makes its first call here, so everything is compiled before anyone is timed.
    """
    inputs = make_inputs(case.problem, device)
    entries, results = {}, {}
    # Ours comes last, so that a fault of ours does not cost the peers their rows.
    for name, setup in sorted(backends.items(), key=lambda item: item[0] == "cute_fa"):
        try:
            entries[name] = setup(case, inputs)
            if entries[name].run:
                results[name] = entries[name].run(1)
        except Exception as error:
            entries[name] = Entry(None, describe(error))
    differences = {(a, b): max_difference(results[a], results[b]) for a in results for b in results}

    def num_agreeing(name: str) -> int:
        return sum(differences[other, name] <= MAX_DIFFERENCE for other in results)

    first = max(results, key=num_agreeing, default="")
    for name in results:
        if differences[name, first] > MAX_DIFFERENCE:
            reason = f"differs from {first} by {differences[name, first]:.2g} of the norm"
            entries[name] = Entry(None, reason, entries[name].config)
    return {name: entries[name] for name in backends}


def max_difference(tensors: Iterable, expected_tensors: Iterable) -> float:
    """The largest relative norm of a tensor's difference; infinite where one is not a number or shapes differ."""
    worst = 0.0
    for got, wanted in zip(tensors, expected_tensors, strict=True):
        if got.shape != wanted.shape:
            return float("inf")
        difference = ((got.float() - wanted.float()).norm() / wanted.float().norm()).item()
        worst = max(worst, difference if difference == difference else float("inf"))
    return worst


def take_turns(
    runs: Mapping[str, Run], time: Callable[[Run, int], Slice], slice_ms: float, num_rounds: int
) -> tuple[dict[str, Timing], dict[str, str]]:
    """Timings by name, and the reasons of those that raised; these drop out, and the others go on.

    Each round has an order of its own, by chance: on a hot GPU it matters whom one follows.
    """
    num_calls: dict[str, int] = {}
    slices: dict[str, list[Slice]] = {name: [] for name in runs}
    failures: dict[str, str] = {}
    for name, run in runs.items():
        with dropping_out(name, failures):
            num_calls[name] = calls_of_a_slice(run, time, slice_ms)
    for _ in range(num_rounds):
        names = [name for name in runs if name not in failures]
        for name in random.sample(names, len(names)):
            with dropping_out(name, failures):
                slices[name].append(time(runs[name], num_calls[name]))
    return {name: timing(slices[name], num_calls[name]) for name in runs if name not in failures}, failures


@contextmanager
def dropping_out(name: str, failures: dict[str, str]) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        failures[name] = describe(error)


def calls_of_a_slice(run: Run, time: Callable[[Run, int], Slice], slice_ms: float) -> int:
    """How many calls fill slice_ms, estimated from ever longer tries: a few short calls show how fast the host is."""
    num_calls = 1
    while (ms := time(run, num_calls).ms) < slice_ms / 2:
        num_calls *= 4
    return max(1, round(num_calls * slice_ms / ms))


def timing(slices: Sequence[Slice], num_calls: int) -> Timing:
    fifths = statistics.quantiles((part.ms / num_calls for part in slices), n=5, method="inclusive")
    clocks = [part.clock_mhz for part in slices if part.clock_mhz is not None]
    return Timing(
        p20=fifths[0],
        p50=statistics.median(part.ms / num_calls for part in slices),
        p80=fifths[3],
        clock_mhz=round(statistics.median(clocks)) if clocks else None,
    )


def describe(error: Exception) -> str:
    """One line, short enough for a cell of a table."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]


if __name__ == "__main__":
    run_command(main, "benchmarks.run")
