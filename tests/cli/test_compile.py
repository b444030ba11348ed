"""`cute-fa compile`: which problems give the plans, processes, what is printed, and whether the folder is then used."""

import os
import re
import sys
from itertools import product
from pathlib import Path
from typing import NamedTuple

import pytest

from cute_fa.cli import compile as file
from cute_fa.cli import main
from cute_fa.host import cache

HEAD_DIMS = {64, 96, 128, 192, 256}
HOST_TESTS = Path(__file__).parents[1] / "host"


class Plan(NamedTuple):
    name: str


def run(monkeypatch, capsys, *arguments: str):
    """Exit code, stdout and stderr of the command."""
    monkeypatch.setattr(sys, "argv", ["cute-fa", "compile", *arguments])
    with pytest.raises(SystemExit) as stop:
        main()
    return stop.value.code, *capsys.readouterr()


@pytest.fixture
def problems(monkeypatch):
    """The problems that were turned into plans; problems of one head_dim share their forward plan.

    Those of one head_dim_v share the kernel before a backward one, those of one head_dim the one after it.
    """
    asked = []

    def forward_plan(problem, num_sms):
        assert num_sms == 132, "an H100's or H200's"
        asked.append(problem)
        return Plan(f"plan of {problem.head_dim}")

    def backward_plans(problem):
        asked.append(problem)
        kind = "deterministic" if "deterministic" in problem.features else "main"
        names = f"{kind} {problem.head_dim}", f"before {problem.head_dim_v}", f"after {problem.head_dim}"
        return tuple(map(Plan, names))

    monkeypatch.setattr(file, "forward_plan", forward_plan)
    monkeypatch.setattr(file, "backward_plans", backward_plans)
    return asked


def names_of(directions, is_deterministic):
    dims = [(64, 32), (80, 32)]
    return [plan.name for plan in file.plans_of(directions, dims, ["bfloat16"], [True], is_deterministic, [4096])]


def test_directions(problems):
    forward = {"plan of 64", "plan of 80"}
    backward = {"main 64", "main 80", "before 32", "after 64", "after 80"}
    deterministic = {"deterministic 64", "deterministic 80"}
    choices = {
        (("forward",), (False,)): forward,
        (("backward",), (False,)): backward,
        (("forward", "backward"), (False,)): forward | backward,
        (("backward",), (False, True)): backward | deterministic,
        (("forward", "backward"), (False, True)): forward | backward | deterministic,
    }
    for choice, wanted in choices.items():
        names = names_of(*choice)
        assert set(names) == wanted and len(names) == len(wanted), f"{choice}: each plan once, got {names}"


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_problems(direction, problems):
    file.plans_of([direction], [(64, 32), (80, 80)], ["bfloat16", "float16"], [False, True], [False], [100, 5000])
    found = {(p.head_dim, p.dtype, p.scores.mask.name, p.seqlen_q) for p in problems}
    combinations = product((64, 80), ("bfloat16", "float16"), ("full", "causal"), (100, 5000))
    assert found == set(combinations), "every combination"
    for problem in problems:
        assert problem.layout == "dense" and problem.head_dim_v == {64: 32, 80: 80}[problem.head_dim], f"got {problem}"
        assert problem.seqlen_k == problem.seqlen_q and problem.num_heads_kv == problem.num_heads_q, f"got {problem}"


def test_little_and_much_work(problems):
    file.plans_of(["forward"], [(64, 64)], ["bfloat16"], [False], [False], [4096])
    blocks = [problem.batch * problem.num_heads_q * problem.seqlen_q // 128 for problem in problems]
    assert min(blocks) < 132 < max(blocks), f"fewer blocks than SMs, and more, got {blocks}"


@pytest.mark.parametrize(
    "arguments, num_plans, head_dims, dtypes, masks, seqlens",
    [
        pytest.param("", 4 * 5, HEAD_DIMS, {"bfloat16", "float16"}, {"full", "causal"}, {4096}, id="default"),
        pytest.param("--causal", 4 * 5, HEAD_DIMS, {"bfloat16", "float16"}, {"causal"}, {4096}, id="causal"),
        pytest.param(
            "--direction forward --head-dim 72 --head-dim 128 --dtype float16 --no-causal --seqlen 7 --seqlen 9",
            *(2, {72, 128}, {"float16"}, {"full"}, {7, 9}),
            id="forward",
        ),
        pytest.param(
            "--direction backward --deterministic --head-dim 72 --head-dim-v 64 --dtype float16 --causal --seqlen 7",
            *(4, {72}, {"float16"}, {"causal"}, {7}),
            id="deterministic",
        ),
    ],
)
def test_options(arguments, num_plans, head_dims, dtypes, masks, seqlens, problems, monkeypatch, tmp_path):
    def stop(plans, folder, jobs):
        raise RuntimeError(f"{len(plans)} plans, {jobs} jobs, {folder}")

    monkeypatch.setattr(file, "compile_all", stop)
    monkeypatch.setattr(sys, "argv", ["cute-fa", "compile", *arguments.split(), "--jobs", "3", "--out", str(tmp_path)])
    with pytest.raises(RuntimeError, match=f"^{num_plans} plans, 3 jobs, {tmp_path}"):
        main()
    found = [{problem.head_dim for problem in problems}, {problem.dtype for problem in problems}]
    found += [{problem.scores.mask.name for problem in problems}, {problem.seqlen_q for problem in problems}]
    assert found == [head_dims, dtypes, masks, seqlens], "what was asked for"


def test_fills_a_folder(monkeypatch, capsys, tmp_path):
    """In spawned processes, which find tiny kernels in place of the registry's; then this one loads from the folder."""
    monkeypatch.syspath_prepend(HOST_TESTS)
    import tiny_kernel

    (tmp_path / "sitecustomize.py").write_text(
        f"import sys\nsys.path.append({str(HOST_TESTS)!r})\n"
        f"import tiny_kernel\nsys.modules[{tiny_kernel.REGISTRY!r}] = tiny_kernel\n"
    )
    cache.source_digest.cache_clear()  # sources may have been edited since an earlier test asked for it
    log, folder = tmp_path / "log", tmp_path / "made" / "by the command"
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{cache.PACKAGE.parent}")
    monkeypatch.setenv(tiny_kernel.LOG, str(log))
    chosen = "--direction forward --head-dim 96 --head-dim 128 --dtype bfloat16 --causal --jobs 2 --out".split()
    code, out, err = run(monkeypatch, capsys, *chosen, str(folder))
    assert code == 0, err
    seconds = re.findall(r"^(forward-d(?:96|128)-bf16-causal-\S+) +\d+\.\d s$", out, re.MULTILINE)
    assert sorted(seconds) == sorted(log.read_text().splitlines()) and len(seconds) == 2, f"a line each, got {out}"
    assert f"2 kernels in {folder}, " in out, f"how many and where, got {out}"
    assert f"export CUTE_FA_CACHE_DIR='{folder}'\n" in out, f"how to use it, got {out}"
    monkeypatch.setenv("CUTE_FA_CACHE_DIR", str(folder))
    monkeypatch.setattr(cache, "_loaded", {})
    monkeypatch.setitem(sys.modules, tiny_kernel.REGISTRY, tiny_kernel)
    assert tiny_kernel.size_of(cache.load(tiny_kernel.plan_of(96, is_causal=True))) == 96, "this process loads it"
    assert len(log.read_text().splitlines()) == 2, "without the compiler"


def test_deterministic_is_of_backward(problems, monkeypatch, capsys, tmp_path):
    code, _, err = run(monkeypatch, capsys, "--deterministic", "--direction", "forward", "--out", str(tmp_path))
    message = "cute-fa: deterministic: expected direction backward beside it, got forward."
    assert code == 2 and err.startswith(message) and not problems, f"refused before anything is compiled, got {err}"


def test_default_folder_is_that_of_this_machine(problems, monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("CUTE_FA_CACHE_DIR", str(tmp_path / "cache"))
    filled = []
    monkeypatch.setattr(file, "compile_all", lambda plans, folder, jobs: filled.append(folder) or ())
    code, _, err = run(monkeypatch, capsys)
    assert (code, filled) == (0, [tmp_path / "cache"]), err


def test_folder_that_cannot_be_written(problems, monkeypatch, capsys, tmp_path):
    (tmp_path / "file").touch()
    code, out, err = run(monkeypatch, capsys, "--out", str(tmp_path / "file" / "below"))
    assert (code, out) == (2, "") and not problems, "refused before anything is compiled"
    assert err.startswith(f"cute-fa: out: expected a folder that can be written, got {tmp_path}/file/below"), err


@pytest.mark.parametrize(
    "option", ["--direction up", "--head-dim 257", "--head-dim 0", "--dtype float32", "--seqlen 0", "--jobs 0"]
)
def test_refused_options(option, problems, monkeypatch, capsys, tmp_path):
    code, _, err = run(monkeypatch, capsys, *option.split(), "--out", str(tmp_path))
    assert code == 2 and option.split()[0] in err and not problems, f"names the option, got {err}"
