"""The tuner on a clock that the test sets: who is timed how often, what is chosen, printed, written and left out."""

import csv
import re
from pathlib import Path

import pytest
import torch

from benchmarks import tune as subject
from benchmarks.backends import make_inputs
from benchmarks.machine import Machine, Slice
from benchmarks.record import COLUMNS
from benchmarks.run import Timing
from benchmarks.suites import CAUSAL, FULL, GRID, Case, dense
from cute_fa.core.errors import DeviceError
from cute_fa.host import cache
from cute_fa.tuning.budget import ForwardTile
from cute_fa.tuning.candidates import forward_candidates
from cute_fa.tuning.heuristics import build_forward_plan
from cute_fa.tuning.plan import ForwardPlan
from cute_fa.tuning.winners import FORWARD_WINNERS, ForwardWinner

FACTS = {"device": "NVIDIA Test", "driver": "1.2", "torch": "2.0", "dsl": "4.0"}
WINNERS = Path(__file__).parents[2] / "cute_fa" / "tuning" / "winners.py"

# Twelve plans that nothing but the keys of a block tells apart.
PLANS = [ForwardPlan("bfloat16", ForwardTile(64, 64, 128, 16 * number, 2), True, True) for number in range(1, 13)]
NAMES = [plan.name for plan in PLANS]


def tiny(seqlen=8, mask=CAUSAL) -> Case:
    return Case("tune", dense(2, seqlen, (2, 2), (64, 64), mask), "fwd", "default")


class Fake:
    """A machine and its kernels. ms: plan's name -> milliseconds a call, or an iterator of them, one a slice.

    outs: what plans compute, where it is not ones; an exception is raised.
    """

    def __init__(self, ms, outs=()):
        self.ms, self.outs, self.slices = ms, dict(outs), []
        self.machine = Machine("cpu", FACTS, self.time, lambda: None)

    def setup(self, plan, inputs):
        out = self.outs.get(plan.name, torch.ones(4))
        if isinstance(out, Exception):
            raise out

        def run(num_calls):
            return (out,)

        run.plan = plan.name
        return run

    def time(self, run, num_calls):
        self.slices.append((run.plan, num_calls))
        ms = self.ms[run.plan]
        return Slice(num_calls * (next(ms) if hasattr(ms, "__next__") else ms), 1600)


def measure(fake, present=PLANS[0], plans=PLANS):
    return subject.measure_case(tiny(), present, plans, fake.machine, fake.setup)


def test_a_brief_round_then_full_rounds():
    """Twelve plans of 9 ms, of 18 ms and so on, the present choice among the slowest."""
    fake = Fake({name: 9.0 * (idx + 1) for idx, name in enumerate(NAMES)})
    outcome = measure(fake, present=PLANS[10])
    trial, full = fake.slices[:24], fake.slices[24:]
    ordered = [NAMES[10], *NAMES[:10], NAMES[11]]
    assert trial == [(name, subject.TRIAL_CALLS) for name in ordered] * 2, "the present choice first, all of them twice"
    assert set(outcome.timings) == {*NAMES[:8], NAMES[10]}, "the best eight and the present choice"
    for name in outcome.timings:
        assert sum(timed == name for timed, _ in full) == 1 + GRID.num_rounds, f"an estimate and all rounds of {name}"
    assert {name: found.p50 for name, found in outcome.timings.items()} == pytest.approx(
        {name: 9.0 * (NAMES.index(name) + 1) for name in outcome.timings}
    ), "milliseconds a call"
    assert outcome.present == NAMES[10] and not outcome.failures, "nobody failed"


def test_the_second_pass_counts():
    """A plan that is fast while the clock is high does not keep a better one out."""

    def cools_down():
        yield 1.0
        while True:
            yield 99.0

    ms = {name: 50.0 + idx for idx, name in enumerate(NAMES)} | {NAMES[11]: cools_down()}
    assert set(measure(Fake(ms)).timings) == set(NAMES[:8]), "it is the slowest in the second pass"


def test_finalists():
    trial = {"a": 3.0, "b": 1.0, "c": 2.0}
    assert subject.finalists(trial, "c") == ["b", "c", "a"], "all of few, shortest first"
    many = {str(number): float(number) for number in range(20)}
    assert subject.finalists(many, "15") == [*map(str, range(8)), "15"], "eight and the present choice"
    assert subject.finalists(many, "3") == [*map(str, range(8))], "once each"
    assert subject.finalists(many, "gone") == [*map(str, range(8))], "the present choice failed"


def test_wrong_results_are_not_timed():
    good = torch.linspace(1, 2, 64)
    outs = {
        NAMES[0]: good,
        NAMES[1]: good * 1.009,
        NAMES[2]: good * 1.02,
        NAMES[3]: good.where(good < 2, torch.nan),
        NAMES[4]: RuntimeError("no\nkernel"),
    }
    fake = Fake(dict.fromkeys(NAMES, 30.0), outs)
    outcome = measure(fake, plans=PLANS[:5])
    assert set(outcome.timings) == set(NAMES[:2]), "0.9% is rounding"
    assert outcome.failures == {
        NAMES[2]: f"differs from {NAMES[0]} by 0.02 of the norm",
        NAMES[3]: f"differs from {NAMES[0]} by inf of the norm",
        NAMES[4]: "RuntimeError: no kernel",
    }, "in words"
    assert {name for name, _ in fake.slices} == set(NAMES[:2]), "nothing else is timed"


def test_one_without_numbers_is_no_measure_for_others():
    fake = Fake(dict.fromkeys(NAMES, 30.0), {NAMES[0]: torch.full((4,), torch.nan)})
    outcome = measure(fake, plans=PLANS[:3])
    assert list(outcome.failures) == [NAMES[0]], "it holds a NaN"
    assert set(outcome.timings) == set(NAMES[1:3]), "the others are compared with the next one"


def test_one_that_fails_while_timed():
    def breaks(good_slices):
        yield from [30.0] * good_slices
        raise RuntimeError("launch failed")

    ms = dict.fromkeys(NAMES, 30.0) | {NAMES[1]: breaks(1), NAMES[2]: breaks(4)}
    outcome = measure(Fake(ms), plans=PLANS[:4])
    assert set(outcome.failures) == {NAMES[1], NAMES[2]}, "in the brief round, and in a full one"
    assert set(outcome.timings) == {NAMES[0], NAMES[3]}, "the others go on"


def outcome(seqlen, ms, present="now", mask=CAUSAL, failures=()):
    timings = {name: Timing(value, value, value, 1600) for name, value in ms.items()}
    return subject.Outcome(tiny(seqlen, mask), present, timings, dict(failures))


@pytest.mark.parametrize(
    "cells, chosen",
    [
        pytest.param([{"now": 1.004, "new": 1.0}], ["now"], id="noise-changes-nothing"),
        pytest.param([{"now": 1.006, "new": 1.0}], ["new"], id="faster"),
        pytest.param([{"new": 1.0, "old": 1.1}], ["new"], id="present-failed"),
        pytest.param([{"now": 2.0, "a": 1.0}, {"now": 1.0, "a": 1.004}], ["a", "a"], id="one-row-for-two-cells"),
        pytest.param([{"now": 2.0, "a": 1.0}, {"now": 1.0, "a": 1.006}], ["a", "now"], id="two-rows"),
        pytest.param([{"now": 1.0, "a": 1.1}, {"now": 1.5, "b": 1.2, "a": 1.21}], ["now", "b"], id="another"),
    ],
)
def test_choice(cells, chosen):
    assert subject.choose([outcome(1, ms) for ms in cells]) == chosen, "plans of the cells"


def test_rows_of_the_table():
    """Lengths are parted at geometric means: of 1024 and 4096 it is 2048, of 4096 and 16384 it is 8192."""
    now, a, b = NAMES[:3]

    def cell(seqlen, fastest, mask=CAUSAL):
        return outcome(seqlen, {name: 1.0 if name == fastest else 2.0 for name in (now, a, b)}, now, mask)

    cells = [cell(1024, a), cell(4096, b), cell(16384, b), cell(1024, b, FULL), cell(4096, a, FULL)]
    rows = subject.winners([*cells, outcome(16384, {}, mask=FULL, failures={now: "broken"})], PLANS, "7-tune")
    found = [(row.tile_n, row.max_seqlen) for row in rows]
    assert found == [(32, 2048), (48, None), (48, 2048), (32, None)], "mask by mask, the last one without an end"
    assert {row.measured for row in rows} == {"7-tune"}, "of this run"
    assert [row.plan("bfloat16") for row in rows] == [PLANS[1], PLANS[2], PLANS[2], PLANS[1]], "rows are plans"


@pytest.mark.parametrize("head_dim", [64, 128, 256], ids="d{}".format)
def test_a_row_is_its_plan(head_dim):
    for plan in forward_candidates("float16", head_dim, 128, True):
        row = subject.row_of(plan, 5, "a")
        assert row.plan("float16") == plan and (row.max_seqlen, row.measured) == (5, "a"), plan.name


def test_printed_rows_are_lines_of_the_table():
    lines = WINNERS.read_text().splitlines()
    begin = lines.index("FORWARD_WINNERS = (") + 2
    printed = [subject.table_line(row) for row in FORWARD_WINNERS]
    assert lines[begin : begin + len(printed)] == printed, "as they stand there"
    row = ForwardWinner(192, 128, False, 16384, 2, 96, 1, 3, False, True, "20301130T075651Z-tune")
    line = subject.table_line(row)
    assert eval(line.strip().rstrip(","), {"ForwardWinner": ForwardWinner}) == row, "Python reads it"
    assert len(line) <= 120, "a line"


def test_table_of_a_cell():
    cell = outcome(8, {"now": 0.2, "fast": 0.1, "slow": 0.4}, failures={"bad": "differs"})
    # 2 sequences, 2 heads, half of 8 x 8 pairs, 2 products of 64: 32768 FLOPs
    head, *lines = subject.table(cell)
    assert head.split() == ["d64-s8-causal-b2-h2", "fwd", "default", "ms", "TFLOP/s", "ratio"], "the cell, columns"
    assert [line.split() for line in lines] == [
        ["fast", "0.10000", "0.0", "2.000"],
        ["now", "0.20000", "0.0", "1.000", "now"],
        ["slow", "0.40000", "0.0", "0.500"],
        ["failed", "bad:", "differs"],
    ], "fastest first, above 1 is faster than now"
    _, line = subject.table(outcome(8, {"fast": 32768 / 300e12 * 1e3}))
    assert line.split()[2:] == ["300.0", "-"], "TFLOP/s, and nothing to compare with"


def test_rows_of_a_cell():
    first, second, third = subject.rows_of(outcome(8, {"now": 0.2, "fast": 0.1}, failures={"bad": "differs"}))
    assert [row["config"] for row in (first, second, third)] == ["fast", "now", "bad"], "fastest first, failures last"
    cell = {"suite": "tune", "direction": "fwd", "variant": "default", "backend": "cute_fa", "op": "attention"}
    cell |= {"mask": "causal", "seqlen_k": 8, "head_dim": 64, "dtype": "bfloat16"}
    assert all(cell.items() <= row.items() and set(row) <= set(COLUMNS) for row in (first, second, third)), "columns"
    assert (first["ms_p50"], first["clock_mhz"]) == ("0.10000", 1600) and "reason" not in first, "measured"
    assert third["reason"] == "differs" and "ms_p50" not in third, "a reason, no number"


@pytest.mark.parametrize(
    "dims, wanted",
    [
        pytest.param((64, 64), [(16, 1024, 32), (1, 20000, 32)], id="d64"),
        pytest.param((192, 128), [(16, 1024, 10), (1, 20000, 10)], id="d192-128"),
    ],
)
def test_cells(dims, wanted):
    """16384 tokens and a width of 2048, like the grid; longer sequences come alone."""
    cases = subject.cases_of(dims, ["full", "causal"], [20000, 1024, 1024])
    problems = [case.problem for case in cases]
    sizes = [(problem.batch, problem.seqlen_k, problem.num_heads_q) for problem in problems]
    assert sizes == 2 * wanted, "batch, length and heads of each mask, shorter first"
    assert [problem.scores.mask.name for problem in problems] == ["full", "full", "causal", "causal"], "mask by mask"
    assert {(problem.head_dim, problem.head_dim_v) for problem in problems} == {dims}, "as asked for"


def test_candidates_that_are_chosen():
    causal = forward_candidates("bfloat16", 128, 128, True)
    assert subject.chosen_candidates((104, 128), ["causal"], "") == list(causal), "of the tile that holds the head dims"
    both = subject.chosen_candidates((128, 128), ["causal", "full"], "m128n176")
    assert {(plan.is_causal, plan.tile.tile_n) for plan in both} == {(True, 176), (False, 176)}, "by a part of the name"
    with pytest.raises(ValueError, match="^only: expected a part of a candidate's name, got 'm5'. A name is, for exam"):
        subject.chosen_candidates((128, 128), ["causal"], "m5")


@pytest.fixture
def fake_run(monkeypatch):
    """main() on the CPU: every plan takes as many milliseconds as its blocks have keys, less with three KV stages.

    The present choice is that of the rules. Gives what was to be compiled.
    """

    def setup(num_sms, plan, inputs):
        def run(num_calls):
            return (torch.ones(1),)

        run.ms = plan.tile.tile_n - 50 * (plan.tile.num_kv_stages == 3)
        return run

    def forward_plan(problem, num_sms):
        assert num_sms == 132, "of the device"
        return build_forward_plan(problem.dtype, problem.head_dim, problem.head_dim_v, problem.scores.mask.is_causal)

    machine = Machine("cpu", FACTS, lambda run, num_calls: Slice(num_calls * float(run.ms), None), lambda: None)
    compiled = []

    def compile_candidates(plans, jobs):
        compiled.append((list(plans), jobs))
        return list(plans)

    monkeypatch.setattr(subject, "cuda_machine", lambda: machine)
    monkeypatch.setattr(subject, "cublas_tflops", lambda machine: 712.34)
    monkeypatch.setattr(subject, "setup_plan", setup)
    monkeypatch.setattr(subject, "forward_plan", forward_plan)
    monkeypatch.setattr(subject, "compile_candidates", compile_candidates)
    monkeypatch.setattr(subject, "make_inputs", lambda problem, device: None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(subject.launch, "sm_count", lambda index: 132)
    return compiled


def test_a_whole_run(fake_run, tmp_path, capsys):
    file = tmp_path / "rows.csv"
    options = "--head-dim 64 --mask causal --seqlen 1024 4096 --only n128 --jobs 3 --commit abc --output".split()
    subject.main([*options, str(file)])
    ((plans, jobs),) = fake_run
    assert jobs == 3 and len(set(plans)) == len(plans), "each is compiled once"
    with file.open(newline="") as opened:
        rows = list(csv.DictReader(opened))
    shared = {"suite": "tune", "commit": "abc", "cublas_tflops": "712.3", "reason": "", **FACTS}
    assert rows and all(shared.items() <= row.items() for row in rows), "what all rows share"
    best = [next(row for row in rows if row["seqlen_k"] == seqlen) for seqlen in ("1024", "4096")]
    assert all("kv3" in row["config"] and row["ms_p50"] == "78.00000" for row in best), "128 keys, three stages"
    out = capsys.readouterr().out
    name = rows[0]["run"]
    assert name.endswith("-tune") and len({row["run"] for row in rows}) == 1, "one run"
    lines = out[out.index("rows for cute_fa/tuning/winners.py:") :].splitlines()[1:]
    assert len(lines) == 1 and lines[0].endswith(f'"{name}"),') and "None" in lines[0], "one plan for both lengths"
    assert out.count("  now\n") == 2, "the present choice stands in each table"


def test_the_present_choice_is_measured_whatever_only_says(fake_run, capsys):
    subject.main("--head-dim 128 --mask full --seqlen 4096 --only n176-".split())
    ((plans, _),) = fake_run
    blocks = [plan.name.removeprefix("forward-d128-bf16-full-") for plan in plans]
    assert blocks == ["m128n128-turns", "m128n176-turns"], "the present choice and the one that was asked for"
    out = capsys.readouterr().out
    assert re.search(r"m128n128-turns +128\.0+ .* 1\.000  now$", out, re.MULTILINE), "and compared with it"


@pytest.mark.parametrize(
    "options, message",
    [
        pytest.param("--head-dim 64 --direction bwd", "direction: expected fwd, got bwd. The backward", id="backward"),
        pytest.param("--head-dim 64 --output x", "commit: expected a hash, with --output, got none", id="no-commit"),
        pytest.param("--head-dim 64 --only nothing", "only: expected a part of a candidate's name", id="only"),
    ],
)
def test_refusals_before_anything_is_compiled(options, message, fake_run):
    with pytest.raises(ValueError, match=f"^{message}"):
        subject.main(options.split())
    assert not fake_run, "nothing was compiled"


def test_a_file_that_cannot_be_written_is_refused_before_anything_is_compiled(fake_run):
    with pytest.raises(ValueError, match="^output: expected a file that can be written"):
        subject.main("--head-dim 64 --commit a --output /nowhere/rows.csv".split())
    assert not fake_run, "nothing was compiled"


@pytest.mark.parametrize(
    "options",
    ["--head-dim 0", "--head-dim 12", "--head-dim 264", "--head-dim 64 --seqlen 0", "--head-dim 64 --jobs 0", ""],
    ids=["zero", "no-multiple-of-8", "too-wide", "no-key", "no-process", "no-head-dim"],
)
def test_wrong_options(options, fake_run, capsys):
    with pytest.raises(SystemExit) as stop:
        subject.main(options.split())
    assert stop.value.code == 2 and "error: " in capsys.readouterr().err and not fake_run, "a wrong argument"


def test_without_a_gpu_only_compiling_goes_on(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(subject, "compile_candidates", lambda plans, jobs: pytest.fail("compiled first"))
    with pytest.raises(DeviceError, match="^device: expected a CUDA GPU"):
        subject.main("--head-dim 64".split())


def test_compile_only(monkeypatch, tmp_path, capsys):
    """In a process of its own, for real: one sound candidate. Then what its object file would be blamed for."""
    monkeypatch.setenv("CUTE_FA_CACHE_DIR", str(tmp_path))
    subject.main("--head-dim 64 --mask full --only m128n64-turns --compile-only --jobs 1".split())
    assert capsys.readouterr().out == f"1 of 1 candidates are sound, compiled into {tmp_path}\n", "nothing is left out"
    (path,) = tmp_path.glob("*.o")
    assert path.name.startswith("forward-d64-bf16-full-m128n64-turns-kv3-"), "in the user's folder, under its name"
    content = path.read_bytes()
    assert subject.faults(content, ("HGMMA", "UTMALDG")) == [], "sound"
    assert subject.faults(content, ("HGMMA", "REDG")) == ["missing instructions: REDG"], "it adds nothing to memory"


def test_slow_code_is_left_out(tmp_path):
    """S, P and O of 192 x 96 and 192 x 128 need 136 registers of the 128 that three warpgroups have for them."""
    plan = ForwardPlan("bfloat16", ForwardTile(128, 128, 192, 96, 3, has_o_staging=False), False, True)
    assert not plan.tile.fits, "so this is no candidate"
    spill, serialised = subject.compile_one(tmp_path, plan)
    assert re.fullmatch(r"local memory: [1-9]\d* bytes, [1-9]\d* LDL, [1-9]\d* STL", spill), spill
    assert re.fullmatch(r"serialised products: \d+ WARPGROUP for \d+ HGMMA", serialised), serialised


def test_what_is_left_out_is_printed(monkeypatch, capsys, tmp_path):
    class InThisProcess:
        def __init__(self, num_processes, mp_context):
            assert num_processes == 2, "no more processes than plans"

        def __enter__(self):
            return self

        def __exit__(self, *error):
            return None

        map = staticmethod(map)

    def fill(plan, folder):
        raise RuntimeError("ptxas fatal:\n  too many registers")

    monkeypatch.setenv("CUTE_FA_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(subject, "ProcessPoolExecutor", InThisProcess)
    monkeypatch.setattr(cache, "fill", fill)
    assert subject.compile_candidates(PLANS[:2], 9) == [], "none is sound"
    assert capsys.readouterr().out.splitlines() == [
        f"left out {NAMES[0]}: RuntimeError: ptxas fatal: too many registers",
        f"left out {NAMES[1]}: RuntimeError: ptxas fatal: too many registers",
        f"0 of 2 candidates are sound, compiled into {tmp_path}",
    ], "a line each, in their order"


def test_launches_have_results_of_their_own(monkeypatch):
    launched = []
    monkeypatch.setattr(cache, "load", lambda plan: lambda *arguments: launched.append((plan, arguments)))
    problem = dense(2, 8, (4, 2), (16, 32), FULL)
    inputs = make_inputs(problem, "cpu")
    runs = [subject.setup_plan(132, plan, inputs) for plan in PLANS[:2]]
    (first,), (second,) = runs[0](2), runs[1](1)
    assert [plan for plan, _ in launched] == [PLANS[0], PLANS[0], PLANS[1]], "as many launches as calls"
    assert first.shape == (2, 8, 4, 32) and first.isnan().all(), "what a kernel does not write is seen"
    assert first.data_ptr() != second.data_ptr(), "results are not shared"
    q, k, v, out, lse, counter, scale, num_sms = launched[0][1]
    assert (q is inputs.q, k is inputs.k, v is inputs.v, out is first) == (True,) * 4, "tensors of the case"
    assert lse.shape == (2, 4, 8) and lse.dtype == torch.float32, "lse"
    assert counter.tolist() == [0, 0] and counter.dtype == torch.int32, "two zeros"
    assert (scale, num_sms) == (16**-0.5, 132), "numbers"


@pytest.mark.gpu
def test_candidates_compute_attention():
    """Three that differ in everything, against torch."""
    case = Case("tune", dense(2, 500, (3, 3), (64, 64), CAUSAL), "fwd", "default")
    inputs = make_inputs(case.problem, "cuda")
    views = (x.transpose(1, 2) for x in (inputs.q, inputs.k, inputs.v))
    wanted = torch.nn.functional.scaled_dot_product_attention(*views, is_causal=True).transpose(1, 2)
    for tile in (ForwardTile(64, 64, 192, 96, 3, 1, 3, False), ForwardTile(64, 64, 128, 144, 2, 2, 2, True)):
        plan = ForwardPlan("bfloat16", tile, True, tile.has_o_staging)
        num_sms = torch.cuda.get_device_properties(0).multi_processor_count
        assert subject.max_difference(subject.setup_plan(num_sms, plan, inputs)(3), (wanted,)) < 1e-2, plan.name


def test_plans_of_these_tests_have_names_of_their_own():
    assert len(set(NAMES)) == 12, "names are keys here"
