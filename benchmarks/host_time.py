"""Host time of a forward call: `python -m benchmarks.host_time [--compiled] [--output FILE --commit HASH]`.

Time runs from before the first to after the last call of a batch. The device is waited for outside of it, and whatever
only a first call does is done before. Calls are eager; with --compiled there are rows of cute_fa inside torch.compile,
too: variant compiled, and variant reduce-overhead, where torch replays CUDA graphs.
"""

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from time import perf_counter

import torch

from benchmarks.backends import BACKENDS, Entry, Inputs, Run
from benchmarks.command import run_command
from benchmarks.machine import Machine, Slice, cuda_machine
from benchmarks.record import append_rows, begin
from benchmarks.run import Setup, set_up, shared_columns, timing
from benchmarks.suites import FULL, Case, dense, sizes
from cute_fa.core.errors import expected

# (1, 128, 2, 64): so little work that the device is done before the host comes with the next call.
CASE = Case("host_time", dense(1, 128, (2, 2), (64, 64), FULL), "fwd", "default")
NUM_BATCHES, CALLS_A_BATCH = 10, 200

CALLS_A_GRAPH = 20  # one after the other, as in a model of many layers, which share what a compiled function costs once
MODES = {"compiled": "default", "reduce-overhead": "reduce-overhead"}  # variant -> mode of torch.compile


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.host_time", description="Host time of a forward call.")
    parser.add_argument("--backends", nargs="+", choices=BACKENDS, default=["cute_fa"], help="default: cute_fa")
    parser.add_argument("--compiled", action="store_true", help="also cute_fa inside torch.compile")
    parser.add_argument("--output", type=Path, metavar="FILE", help="csv to which rows are added")
    parser.add_argument("--commit", default="", metavar="HASH", help="commit of the code, needed with --output")
    options = parser.parse_args(arguments)
    if options.output and not options.commit:
        raise ValueError(expected("commit", "a hash, with --output", "none", "Tell which code is measured"))
    machine = cuda_machine()
    if options.output:
        begin(options.output)
    shared = shared_columns(machine, CASE.suite, options.commit)
    rows = measure(CASE, {name: BACKENDS[name] for name in options.backends}, machine)
    for variant, mode in MODES.items() if options.compiled else ():
        rows += measure(replace(CASE, variant=variant), {"cute_fa": partial(setup_compiled, mode)}, machine)
    rows = [shared | row for row in rows]
    if options.output:
        append_rows(options.output, rows)
    for row in rows:
        print(f"{row['backend']} {row['variant']}: " + (row["reason"] or f"{float(row['ms_p50']) * 1e3:.1f} us a call"))


def measure(
    case: Case, backends: Mapping[str, Setup], machine: Machine, clock: Callable[[], float] = perf_counter
) -> list[dict[str, object]]:
    """A row for each backend, without the columns that a whole run shares. clock: gives seconds."""
    rows = []
    for name, entry in set_up(case, backends, machine.device).items():
        row = {"suite": case.suite, "direction": case.direction, "variant": case.variant, **sizes(case.problem)}
        row |= {"op": "host_time", "backend": name, "config": entry.config, "reason": entry.reason}
        if entry.run:
            entry.run(CALLS_A_BATCH)  # Warms caches: torch's allocator, the plan, the loaded kernel.
            batches = [batch(entry.run, machine, clock) for _ in range(NUM_BATCHES)]
            found = timing(batches, CALLS_A_BATCH)
            row |= {"ms_p20": f"{found.p20:.5f}", "ms_p50": f"{found.p50:.5f}", "ms_p80": f"{found.p80:.5f}"}
        rows.append(row)
    return rows


def setup_compiled(mode: str, case: Case, inputs: Inputs) -> Entry:
    """cute_fa in one graph of several calls, each of which takes what the one before gave as q."""
    from cute_fa import flash_attn_func

    @partial(torch.compile, fullgraph=True, mode=mode)
    def layers(q, k, v):
        for _ in range(CALLS_A_GRAPH):
            q = flash_attn_func(q, k, v)
        return q

    def run(num_calls: int) -> tuple[torch.Tensor, ...]:
        with torch.no_grad():
            for _ in range(num_calls // CALLS_A_GRAPH - 1):
                layers(inputs.q, inputs.k, inputs.v)  # kept by nobody, or the next replay could not overwrite it
            return (layers(inputs.q, inputs.k, inputs.v),)

    return Entry(run, config=f"{CALLS_A_GRAPH} calls in a graph")


def batch(run: Run, machine: Machine, clock: Callable[[], float]) -> Slice:
    """200 calls fit into the queue of launches (1024 deep), so no call waits for the device."""
    machine.synchronize()
    begin_s = clock()
    run(CALLS_A_BATCH)
    return Slice((clock() - begin_s) * 1e3, None)


if __name__ == "__main__":
    run_command(main, "benchmarks.host_time")
