"""Host time of an eager forward call: `python -m benchmarks.host_time [--output FILE --commit HASH]`.

Time runs from before the first to after the last call of a batch. The device is waited for outside of it, and whatever
only a first call does is done before.
"""

import argparse
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from time import perf_counter

from benchmarks.backends import BACKENDS, Run
from benchmarks.command import run_command
from benchmarks.machine import Machine, Slice, cuda_machine
from benchmarks.record import append_rows, begin
from benchmarks.run import Setup, set_up, shared_columns, timing
from benchmarks.suites import FULL, Case, dense, sizes
from cute_fa.core.errors import expected

# (1, 128, 2, 64): so little work that the device is done before the host comes with the next call.
CASE = Case("host_time", dense(1, 128, (2, 2), (64, 64), FULL), "fwd", "default")
NUM_BATCHES, CALLS_A_BATCH = 10, 200


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.host_time", description="Host time of a forward call.")
    parser.add_argument("--backends", nargs="+", choices=BACKENDS, default=["cute_fa"], help="default: cute_fa")
    parser.add_argument("--output", type=Path, metavar="FILE", help="csv to which rows are added")
    parser.add_argument("--commit", default="", metavar="HASH", help="commit of the code, needed with --output")
    options = parser.parse_args(arguments)
    if options.output and not options.commit:
        raise ValueError(expected("commit", "a hash, with --output", "none", "Tell which code is measured"))
    machine = cuda_machine()
    if options.output:
        begin(options.output)
    shared = shared_columns(machine, CASE.suite, options.commit)
    rows = [shared | row for row in measure({name: BACKENDS[name] for name in options.backends}, machine)]
    if options.output:
        append_rows(options.output, rows)
    for row in rows:
        print(f"{row['backend']}: " + (row["reason"] or f"{float(row['ms_p50']) * 1e3:.1f} us a call"))


def measure(
    backends: Mapping[str, Setup], machine: Machine, clock: Callable[[], float] = perf_counter
) -> list[dict[str, object]]:
    """A row for each backend, without the columns that a whole run shares. clock: gives seconds."""
    rows = []
    for name, entry in set_up(CASE, backends, machine.device).items():
        row = {"suite": CASE.suite, "direction": CASE.direction, "variant": CASE.variant, **sizes(CASE.problem)}
        row |= {"op": "host_time", "backend": name, "config": entry.config, "reason": entry.reason}
        if entry.run:
            entry.run(CALLS_A_BATCH)  # Warms caches: torch's allocator, the plan, the loaded kernel.
            batches = [batch(entry.run, machine, clock) for _ in range(NUM_BATCHES)]
            found = timing(batches, CALLS_A_BATCH)
            row |= {"ms_p20": f"{found.p20:.5f}", "ms_p50": f"{found.p50:.5f}", "ms_p80": f"{found.p80:.5f}"}
        rows.append(row)
    return rows


def batch(run: Run, machine: Machine, clock: Callable[[], float]) -> Slice:
    """200 calls fit into the queue of launches (1024 deep), so no call waits for the device."""
    machine.synchronize()
    begin_s = clock()
    run(CALLS_A_BATCH)
    return Slice((clock() - begin_s) * 1e3, None)


if __name__ == "__main__":
    run_command(main, "benchmarks.host_time")
