"""`cute-fa inspect` on real plans: what it prints and writes, and that a fault ends it with 1 and is named."""

import json
import re
import sys
from dataclasses import replace

import pytest

from cute_fa.cli import inspect as inspect_file
from cute_fa.cli import main
from cute_fa.cli.inspect import plan_of
from cute_fa.host import inspect as host
from cute_fa.tuning.heuristics import build_forward_plan

SMALL = build_forward_plan("bfloat16", 64, 64, False)


@pytest.fixture
def command(monkeypatch, capsys):
    """command(*arguments) runs `cute-fa inspect` here: exit code, stdout, stderr."""

    def run(*arguments: str):
        monkeypatch.setattr(sys, "argv", ["cute-fa", "inspect", *arguments])
        with pytest.raises(SystemExit) as stop:
            main()
        out, err = capsys.readouterr()
        return stop.value.code, out, err

    return run


@pytest.fixture(scope="module")
def small():
    """The inspection of SMALL."""
    return host.inspect_plan(SMALL)


@pytest.fixture
def compiled(monkeypatch, small):
    """Every plan compiles to something as good as SMALL; compiled(**facts) makes these facts other. Holds the plans."""

    class Compiled(list):
        def __call__(self, **facts):
            self.facts = facts

        def inspect_plan(self, plan):
            self.append(plan)
            return replace(small, plan=plan.name, smem_bytes=plan.smem_bytes, **self.facts)

    made = Compiled()
    made()
    monkeypatch.setattr(host, "inspect_plan", made.inspect_plan)
    return made


def test_one_plan(command, tmp_path):
    ptx, sass = tmp_path / "k.ptx", tmp_path / "k.sass"
    files = ("--ptx", str(ptx), "--sass", str(sass))
    code, out, err = command("--head-dim", "64", "--direction", "forward", "--json", *files)
    assert (code, err) == (0, ""), "no fault"
    found = json.loads(out)
    assert found["plan"].startswith("forward-d64-bf16-full-") and found["faults"] == [], "the plan of this problem"
    assert found["spill_bytes"] == found["stack_bytes"] == 0 and found["remarks"] == {}, "as a kernel should be"
    assert found["opcodes"]["HGMMA"] > 0 and not {"ptx", "cubin"} & found.keys(), "facts without the code"
    assert "wgmma.mma_async" in ptx.read_text(), "PTX has the products"
    assert len(re.findall(r"\bHGMMA\b", sass.read_text())) == found["opcodes"]["HGMMA"], "and SASS as many as counted"


def test_table(command, compiled, small):
    code, out, err = command()
    assert (code, err) == (0, ""), "no fault"
    rows = (r"plan +forward-d128-bf16-full", r"registers +\d+ a thread", r"spills +0 bytes", r"shared memory +\d+ bytes")
    for row in (*rows, rf"instructions +{small.num_instructions}, of which {small.opcodes['HGMMA']} HGMMA", "faults +none"):
        assert re.search(row, out), f"{row} is not in {out}"


def test_a_fault_ends_with_1(command, compiled, small):
    opcodes = {name: count for name, count in small.opcodes.items() if name != "UTMALDG"}
    compiled(opcodes=opcodes, spill_bytes=24)
    code, out, _ = command("--head-dim", "64")
    assert code == 1 and "missing instructions: UTMALDG" in out and "spill: 24 bytes" in out, out
    code, out, _ = command("--head-dim", "64", "--json")
    assert code == 1 and len(json.loads(out)["faults"]) == 2, "in JSON too"


@pytest.mark.parametrize(
    "arguments, name",
    [
        pytest.param((), "forward-d128-bf16-full", id="defaults"),
        pytest.param(("--causal", "--dtype", "float16"), "forward-d128-fp16-causal", id="causal-fp16"),
        pytest.param(("--head-dim", "192", "--head-dim-v", "128"), "forward-d192-128-bf16-full", id="unequal"),
        pytest.param(("--head-dim", "40"), "forward-d64-bf16-full", id="padded"),
        pytest.param(("--seqlen", "128", "--no-causal"), "forward-d128-bf16-full", id="short"),
        pytest.param(("--direction", "backward", "--causal"), "backward-d128-bf16-causal", id="backward"),
    ],
)
def test_options_choose_the_plan(arguments, name, command, compiled):
    command(*arguments)
    (plan,) = compiled
    assert plan.name.startswith(f"{name}-m") and "deterministic" not in plan.name, f"got {plan.name}"


@pytest.mark.parametrize(
    "direction, name",
    [
        ("backward", r"backward-d192-128-fp16-full-m\d+n\d+-persistent"),
        ("backward-deterministic", r"backward-d192-128-fp16-full-m\d+n\d+-deterministic-persistent"),
        ("preprocess", "preprocess-d128-fp16-zeros"),
        ("postprocess", r"postprocess-d192-fp16-m\d+(-shared)?"),
    ],
    ids=["main", "deterministic", "before", "after"],
)
def test_direction_chooses_the_kernel(direction, name, command, compiled):
    """The one before the main kernel reads out and dout, as wide as v; the one after it writes dq, as wide as q."""
    command("--direction", direction, "--head-dim", "192", "--head-dim-v", "128", "--dtype", "float16")
    (plan,) = compiled
    assert re.fullmatch(name, plan.name), f"got {plan.name}"


def test_kernels_without_products(command, monkeypatch):
    code, out, err = command("--direction", "preprocess", "--json")
    found = json.loads(out)
    assert (code, err, found["faults"]) == (0, "", []), "no fault"
    assert found["opcodes"]["HGMMA"] == found["smem_bytes"] == 0, "it adds rows up in registers"
    before, after = plan_of("preprocess", 64), plan_of("postprocess", 64)
    monkeypatch.setattr(inspect_file, "checked_plans", lambda: (before, after))
    code, out, _ = command("--all")
    assert code == 0 and re.fullmatch(r"2 plans in \d+ s, 0 with faults", out.splitlines()[-1]), out
    for plan in (before, after):
        assert re.search(rf"^ok    {plan.name}: .* 0 HGMMA", out, re.MULTILINE), out


def test_sizes_of_the_problem(monkeypatch):
    monkeypatch.setattr(inspect_file, "forward_plan", lambda problem, num_sms: (problem, num_sms))
    problem, num_sms = plan_of(head_dim=64, seqlen=1024)
    sizes = (problem.batch, problem.seqlen_q, problem.seqlen_k, problem.num_heads_q, problem.num_heads_kv)
    assert (sizes, num_sms) == ((16, 1024, 1024, 32, 32), 132), "16384 tokens, a width of 2048, an H100"
    assert (problem.head_dim, problem.head_dim_v) == (64, 64), "v is as wide as q"
    longest, _ = plan_of(seqlen=10**6)
    assert longest.batch == 1, "one sequence at least"


def test_all_and_check(command, monkeypatch):
    # Of its 240 registers a consumer needs 128 for S, 64 for P and 64 for O; Q, K and V take 288 KiB.
    large = replace(SMALL, tile=replace(SMALL.tile, head_dim=128, head_dim_v=128, tile_n=256, has_o_staging=False))
    monkeypatch.setattr(inspect_file, "checked_plans", lambda: (SMALL, large))
    code, out, _ = command("--all", "--check")
    lines = out.splitlines()
    assert code == 1 and re.fullmatch(r"2 plans in \d+ s, 1 with faults", lines[-2]), out
    assert lines[-1] == f"  {large.name}", "which is named"
    assert sum(line.startswith(f"ok    {SMALL.name}: ") for line in lines) == 1, "the good one has a line"
    assert re.search(rf"^FAULT {large.name}: spill: [1-9]\d* bytes", out, re.MULTILINE), out
    assert f"FAULT {large.name}: shared memory: " in out and "a block has at most 232448" in out, out


def test_all_without_a_fault(command, monkeypatch, small):
    monkeypatch.setattr(host, "report_all", lambda plans: [host.Report(plan, small, []) for plan in plans])
    monkeypatch.setattr(inspect_file, "checked_plans", lambda: (SMALL,))
    code, out, _ = command("--all", "--check")
    assert code == 0 and out.splitlines()[-1].endswith(" s, 0 with faults"), out
    code, out, _ = command("--all", "--json")
    assert code == 0 and [entry["plan"] for entry in json.loads(out)] == [SMALL.name], "a list, alone on stdout"


@pytest.mark.parametrize(
    "arguments, message",
    [
        pytest.param(("--all", "--head-dim", "64"), "head_dim: expected no value beside all, got 64.", id="all-shape"),
        pytest.param(("--all", "--direction", "backward"), "direction: expected no value beside all", id="all-kernel"),
        pytest.param(("--all", "--ptx", "f"), "ptx: expected no value beside all, got f.", id="all-file"),
        pytest.param(("--ptx", "/"), "ptx: expected a file that can be written, got /. Is a directory", id="no-file"),
        pytest.param(("--head-dim", "257"), "Invalid value for '--head-dim'", id="too-wide"),
        pytest.param(("--direction", "sideways"), "Invalid value for '--direction'", id="no-such-direction"),
    ],
)
def test_wrong_arguments(arguments, message, command, compiled):
    code, _, err = command(*arguments)
    assert code == 2 and message in err, err


def test_sass_without_nvdisasm_compiles_nothing(command, compiled, monkeypatch):
    def not_found():
        raise ValueError(host.expected("sass", "nvdisasm", "none", "Install it"))

    monkeypatch.setattr(host, "find_nvdisasm", not_found)
    code, _, err = command("--sass", "f")
    assert (code, err) == (2, "cute-fa: sass: expected nvdisasm, got none. Install it.\n"), "one line"
    assert not compiled, "before anything is compiled"
