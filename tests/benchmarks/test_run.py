"""A run on a clock that the test sets: turns, slices, statistics, reasons, and the rows in the file."""

import csv
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks import run as subject
from benchmarks.backends import Entry
from benchmarks.machine import Machine, Slice
from benchmarks.record import COLUMNS
from benchmarks.suites import CAUSAL, FULL, SUITES, Case, Suite, dense

CHECKOUT = Path(__file__).parents[2]
FACTS = {"device": "NVIDIA Test", "driver": "1.2", "torch": "2.0", "dsl": "4.0"}
TINY = Suite("tiny", (dense(2, 8, (2, 2), (16, 16), FULL), dense(2, 8, (2, 2), (16, 16), CAUSAL)), peers=("peer",))


class Clock:
    """Each run costs what `ms` says a call, and every slice is noted."""

    def __init__(self, ms: dict, clock_mhz=1600):
        self.ms, self.clock_mhz, self.slices = ms, clock_mhz, []

    def time(self, run, num_calls):
        self.slices.append((run, num_calls))
        cost = self.ms[run]
        return Slice(num_calls * (next(cost) if hasattr(cost, "__next__") else cost), self.clock_mhz)


def tiny(direction="fwd", mask=FULL) -> Case:
    return Case("tiny", dense(2, 8, (2, 2), (16, 16), mask), direction, "default")


def returning(*tensors):
    """A setup whose run returns these tensors."""
    return lambda case, inputs: Entry(lambda num_calls: tensors)


def raising(error):
    def setup(case, inputs):
        raise error

    return setup


@pytest.mark.parametrize(
    "ms, num_calls",
    [
        pytest.param(0.01, 4500, id="ten-microseconds"),
        pytest.param(0.09, 500, id="ninety-microseconds"),
        pytest.param(9.0, 5, id="milliseconds"),
        pytest.param(60.0, 1, id="longer-than-a-slice"),
    ],
)
def test_calls_fill_a_slice(ms, num_calls):
    assert subject.calls_of_a_slice("run", Clock({"run": ms}).time, 45.0) == num_calls, "45 ms a slice"


def test_estimate_looks_past_the_launch_of_a_few_calls():
    def time(run, num_calls):
        return Slice(1.0 + 0.01 * num_calls, None)  # one millisecond until the first call begins

    found = subject.calls_of_a_slice("run", time, 45.0)
    assert 3600 <= found <= 4500, f"4500 calls of 10 us without the launch; from one call it would be 45, got {found}"


def test_contestants_take_turns():
    clock = Clock({"a": 9.0, "b": 18.0, "c": 45.0})
    timings, failures = subject.take_turns({name: name for name in "abc"}, clock.time, 45.0, 40)
    turns = clock.slices[-120:]
    orders = ["".join(name for name, _ in turns[first : first + 3]) for first in range(0, 120, 3)]
    assert all(sorted(order) == list("abc") for order in orders), "each once a round"
    assert len(set(orders)) > 1, "neighbours change"
    assert {name: count for name, count in turns} == {"a": 5, "b": 2, "c": 1}, "slices of like length"
    assert {name: found.p50 for name, found in timings.items()} == {"a": 9.0, "b": 18.0, "c": 45.0}, (
        "milliseconds a call"
    )
    assert not failures, "nobody dropped out"


def test_statistics_over_rounds():
    slices = [Slice(10 * ms, clock) for ms, clock in zip((5.0, 1.0, 4.0, 2.0, 3.0), (1500, 1900, 1600, 1700, None))]
    found = subject.timing(slices, 10)
    assert (found.p20, found.p50, found.p80) == pytest.approx((1.8, 3.0, 4.2)), "quantiles between the rounds' values"
    assert found.clock_mhz == 1650, "the median of the known clocks"
    assert subject.timing([Slice(1.0, None)] * 5, 1).clock_mhz is None, "no clock is known"


def test_one_that_fails_while_timed_drops_out():
    def costs():
        yield from (45.0, 45.0)
        raise RuntimeError("launch failed\nin two lines")

    clock = Clock({"good": 45.0, "bad": costs()})
    timings, failures = subject.take_turns({"bad": "bad", "good": "good"}, clock.time, 45.0, 5)
    assert failures == {"bad": "RuntimeError: launch failed in two lines"}, "on one line"
    assert list(timings) == ["good"], "the other one is measured"
    assert [name for name, _ in clock.slices].count("good") == 6, "one estimate and five rounds"


def test_nobody_to_time():
    assert subject.take_turns({}, Clock({}).time, 45.0, 5) == ({}, {}), "every backend has a reason"


def test_outputs_are_compared_with_what_most_compute():
    good = torch.linspace(1, 2, 64).reshape(2, 4, 2, 4)
    backends = {
        "broken": raising(NotImplementedError("no kernel:\n  none")),
        "first": returning(good),
        "close": returning(good * 1.01),
        "far": returning(good * 1.05),
        "nan": returning(good.where(good < 2, float("nan"))),
        "transposed": returning(good.transpose(1, 2)),
        "without": lambda case, inputs: Entry(None, "has no such call"),
    }
    entries = subject.set_up(tiny(), backends, "cpu")
    assert list(entries) == list(backends), "an entry for each, in order"
    reasons = {name: entry.reason for name, entry in entries.items()}
    assert reasons["broken"] == "NotImplementedError: no kernel: none", "the exception on one line"
    assert reasons["first"] == reasons["close"] == "", "1% off is rounding"
    assert reasons["far"] == "differs from first by 0.05 of the norm", "5% off is wrong"
    assert reasons["nan"].startswith("differs") and reasons["transposed"].startswith("differs"), "no number to compare"
    assert reasons["without"] == "has no such call", "the backend's own words"
    assert [name for name, entry in entries.items() if entry.run] == ["first", "close"], "only these are timed"


def test_one_peer_alone_does_not_tell_what_is_right():
    good = torch.ones(2, 4)
    backends = {"wrong": returning(2 * good), "right": returning(good), "cute_fa": returning(good)}
    entries = subject.set_up(tiny(), backends, "cpu")
    assert entries["wrong"].reason == "differs from right by 1 of the norm", "two against one"
    assert not entries["right"].reason and not entries["cute_fa"].reason, "these agree"


def test_every_gradient_is_compared():
    one = torch.ones(2, 2)
    entries = subject.set_up(tiny("bwd"), {"a": returning(one, one, one), "b": returning(one, 2 * one, one)}, "cpu")
    assert entries["b"].reason == "differs from a by 1 of the norm", "one of three differs"


@pytest.mark.parametrize(
    "direction, mask, flops",
    [
        pytest.param("fwd", FULL, 4 * 2 * 2 * 8 * 8 * 16, id="forward"),
        pytest.param("fwd", CAUSAL, 4 * 2 * 2 * 8 * 8 * 16 / 2, id="causal"),
        pytest.param("bwd", FULL, 2.5 * 4 * 2 * 2 * 8 * 8 * 16, id="backward"),
    ],
)
def test_a_row_holds_times_and_speed(direction, mask, flops):
    ms = flops / 300e12 * 1e3  # 300 TFLOP/s

    def time(run, num_calls):
        return Slice(ms * num_calls, 1755)

    backends = {"a": returning(torch.ones(1)), "b": raising(ValueError("no"))}
    machine = Machine("cpu", FACTS, time, lambda: None)
    first, second = subject.measure_case(tiny(direction, mask), backends, machine, 45.0, 5)
    assert (first["backend"], first["tflops"], first["clock_mhz"], first["reason"]) == ("a", "300", 1755, ""), (
        "measured"
    )
    assert (second["backend"], second["reason"]) == ("b", "ValueError: no"), "a reason"
    assert "tflops" not in second and "ms_p50" not in second, "and no number"
    sizes = {"batch": 2, "seqlen_q": 8, "seqlen_k": 8, "heads_q": 2, "heads_kv": 2, "head_dim": 16, "head_dim_v": 16}
    assert sizes.items() <= first.items() and first["direction"] == direction, "both rows tell the cell"
    assert set(first) <= set(COLUMNS) and set(second) <= set(COLUMNS), "only columns of the file"


def test_a_row_of_one_that_fails_while_timed():
    def time(run, num_calls):
        raise torch.OutOfMemoryError("no memory left")

    machine = Machine("cpu", FACTS, time, lambda: None)
    (row,) = subject.measure_case(tiny(), {"a": returning(torch.ones(1))}, machine, 45.0, 5)
    assert row["reason"] == "OutOfMemoryError: no memory left" and "ms_p50" not in row, "the reason, no number"


@pytest.fixture
def fake_run(monkeypatch, tmp_path):
    """main() on the CPU with a tiny suite; the peer is twice as slow as ours and has no causal call."""
    file, seen = tmp_path / "rows.csv", []

    def ours(case, inputs):
        seen.append(len(file.read_text().splitlines()))
        return Entry(lambda num_calls: (torch.ones(1),), config="plan")

    def peer(case, inputs):
        if case.problem.scores.mask == CAUSAL:
            return Entry(None, "not causal")
        return Entry(lambda num_calls: (torch.ones(2)[:1],))

    def time(run, num_calls):
        return Slice(num_calls * (2.0 if run(1)[0].untyped_storage().nbytes() == 8 else 1.0), None)

    monkeypatch.setitem(SUITES, "tiny", TINY)
    monkeypatch.setitem(subject.BACKENDS, "cute_fa", ours)
    monkeypatch.setitem(subject.BACKENDS, "peer", peer)
    monkeypatch.setattr(subject, "cuda_machine", lambda: Machine("cpu", FACTS, time, lambda: None))
    monkeypatch.setattr(subject, "cublas_tflops", lambda machine: 712.34)
    return file, seen


def read(file: Path) -> list[dict]:
    with file.open(newline="") as opened:
        return list(csv.DictReader(opened))


def test_a_whole_run(fake_run, capsys):
    file, seen = fake_run
    subject.main(["--suite", "tiny", "--direction", "fwd", "--output", str(file), "--commit", "abc123"])
    rows = read(file)
    assert [(row["mask"], row["backend"]) for row in rows] == [
        ("full", "cute_fa"),
        ("full", "peer"),
        ("causal", "cute_fa"),
        ("causal", "peer"),
    ], "a row for each cell and contestant"
    assert seen == [1, 3], "the header is there before the first cell, its two rows before the second"
    shared = {"commit": "abc123", "cublas_tflops": "712.3", "suite": "tiny", "variant": "default", **FACTS}
    assert all(shared.items() <= row.items() for row in rows), "what all rows share"
    assert len({row["run"] for row in rows}) == 1 and rows[0]["run"].endswith("-tiny"), "one run"
    assert [row["ms_p50"] for row in rows] == ["1.00000", "2.00000", "1.00000", ""], "milliseconds, or nothing"
    assert rows[0]["config"] == "plan" and rows[3]["reason"] == "not causal", "what was measured, and why it was not"
    out = capsys.readouterr().out
    assert "all cells: cute_fa/peer 2.000 (1 cells)" in out, "the mean ratio over the cells that both have"


@pytest.mark.parametrize("arguments, num_rounds", [((), 6), (("--rounds", "7"), 7)], ids=["suite", "asked-for"])
def test_slices_and_rounds_of_a_suite(arguments, num_rounds, fake_run, monkeypatch):
    file, given, take_turns = fake_run[0], [], subject.take_turns
    monkeypatch.setitem(SUITES, "tiny", replace(TINY, slice_ms=3.0, num_rounds=6))
    monkeypatch.setattr(subject, "take_turns", lambda *all_of: given.append(all_of[2:]) or take_turns(*all_of))
    subject.main(["--suite", "tiny", "--direction", "fwd", "--output", str(file), "--commit", "abc", *arguments])
    assert given == [(3.0, num_rounds)] * 2, "in each cell"


def test_a_second_run_is_added(fake_run):
    file, _ = fake_run
    command = ["--suite", "tiny", "--output", str(file), "--commit", "abc", "--backends", "peer", "--only", "full"]
    subject.main(command)
    subject.main([*command, "--direction", "bwd"])
    assert [row["direction"] for row in read(file)] == ["fwd", "bwd", "bwd"], "all directions, then one"


@pytest.mark.parametrize(
    "changes, message",
    [
        pytest.param(
            {"--suite": "deterministic", "--direction": "fwd"}, "direction: expected bwd for suite", id="direction"
        ),
        pytest.param({"--only": "nothing"}, "only: expected a part of a case's name, got 'nothing'", id="only"),
        pytest.param({"--output": "/nowhere/rows.csv"}, "output: expected a file that can be written", id="output"),
    ],
)
def test_refusals_before_anything_is_measured(fake_run, changes, message):
    file, seen = fake_run
    options = {"--suite": "tiny", "--output": str(file), "--commit": "abc"} | changes
    with pytest.raises(ValueError, match=f"^{message}"):
        subject.main([word for pair in options.items() for word in pair])
    assert not seen, "nobody was set up"


def test_a_file_of_something_else_stays_as_it_is(fake_run):
    file, seen = fake_run
    file.write_text("step,loss\n1,5.5\n")
    with pytest.raises(ValueError, match="unknown loss, step|unknown step, loss"):
        subject.main(["--suite", "tiny", "--output", str(file), "--commit", "abc"])
    assert file.read_text() == "step,loss\n1,5.5\n" and not seen, "no row was added"


def test_fewer_than_five_rounds_are_refused(capsys):
    with pytest.raises(SystemExit) as stop:
        subject.main(["--suite", "grid", "--output", "x", "--commit", "abc", "--rounds", "4"])
    assert stop.value.code == 2 and "expected 5 or more, got 4" in capsys.readouterr().err, "a wrong argument"


def test_without_a_gpu_is_one_line(tmp_path):
    command = [
        sys.executable,
        "-m",
        "benchmarks.run",
        "--suite",
        "grid",
        "--output",
        str(tmp_path / "x"),
        "--commit",
        "a",
    ]
    # An empty list of devices makes every machine one without a GPU.
    environment = {"CUDA_VISIBLE_DEVICES": "", "PATH": ""}
    done = subprocess.run(command, cwd=CHECKOUT, capture_output=True, text=True, env=environment)
    assert done.returncode == 1 and not done.stdout, done.stderr
    assert done.stderr.startswith("benchmarks.run: device: expected a CUDA GPU") and done.stderr.count("\n") == 1, (
        done.stderr
    )
