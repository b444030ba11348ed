"""`cute-fa compile`: fills a folder with compiled kernels ahead of time, without a GPU, for this machine or others."""

import multiprocessing
import os
import platform
import shlex
import signal
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from enum import Enum
from itertools import product
from pathlib import Path
from typing import Annotated

import typer

from cute_fa.core.dtypes import KERNEL_DTYPES
from cute_fa.core.env import CACHE_DIR, cache_dir
from cute_fa.core.errors import expected
from cute_fa.core.hardware import H100_SXM
from cute_fa.core.mask_spec import MaskSpec
from cute_fa.core.problem import AttentionProblem, ScoreSpec
from cute_fa.tuning.heuristics import HEAD_DIM_TILES, backward_plans, forward_plan
from cute_fa.tuning.plan import Plan

# A plan may depend on whether there is work for every SM; nobody knows yet, so take a problem with little and one with
# much.
NUM_HEADS = (1, 4096)

Direction = Enum("Direction", {name: name for name in ("forward", "backward")}, type=str)
Dtype = Enum("Dtype", {name: name for name in KERNEL_DTYPES}, type=str)


def compile(
    head_dim: Annotated[
        list[int], typer.Option(min=1, max=HEAD_DIM_TILES[-1], help="Of q and k; may be repeated.")
    ] = list(HEAD_DIM_TILES),
    head_dim_v: Annotated[
        int | None, typer.Option(min=1, max=HEAD_DIM_TILES[-1], help="Of v, else that of q and k.")
    ] = None,
    direction: Annotated[list[Direction], typer.Option(help="Both if left out.")] = list(Direction),
    dtype: Annotated[list[Dtype], typer.Option(help="Of q, k and v; may be repeated.")] = list(Dtype),
    causal: Annotated[bool | None, typer.Option("--causal/--no-causal", help="One mask; both if left out.")] = None,
    deterministic: Annotated[bool, typer.Option("--deterministic", help="Those of deterministic calls too.")] = False,
    seqlen: Annotated[
        list[int], typer.Option(min=1, help="Of q and k, as far as it shapes the kernel; may be repeated.")
    ] = [4096],
    jobs: Annotated[int, typer.Option(min=1, help="Processes; one a core if left out.")] = os.cpu_count() or 1,
    out: Annotated[Path | None, typer.Option(help="Folder to fill, else the one that this machine uses.")] = None,
) -> None:
    """Compile kernels ahead of time, without a GPU."""
    folder = writable(out or cache_dir())
    is_causal = (False, True) if causal is None else (causal,)
    dims = [(dim, head_dim_v or dim) for dim in head_dim]
    directions, dtypes = ([choice.value for choice in choices] for choices in (direction, dtype))
    if deterministic and "backward" not in directions:
        rule, advice = "direction backward beside it", "Leave it out, or add --direction backward"
        raise ValueError(expected("deterministic", rule, directions[0], advice))
    is_deterministic = (False, True) if deterministic else (False,)
    plans = plans_of(directions, dims, dtypes, is_causal, is_deterministic, seqlen)
    width, begin = max(len(plan.name) for plan in plans), time.perf_counter()
    for plan, seconds in compile_all(plans, folder, jobs):
        typer.echo(f"{plan.name:{width}}  {seconds:5.1f} s")
    typer.echo(f"\n{len(plans)} kernels in {folder}, {time.perf_counter() - begin:.1f} s in all")
    typer.echo(
        f"Use them here or on another machine: export {CACHE_DIR.name}={shlex.quote(str(folder))}\n"
        f"A machine takes them if it has the same versions of cute-fa and of the packages that `cute-fa doctor` lists,"
        f" and the same kind of CPU ({platform.machine()}); others compile their own."
    )


def writable(folder: Path) -> Path:
    """The absolute path of the folder, which is made if it is not there."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        got = f"{folder} ({error.strerror})"
        raise ValueError(expected("out", "a folder that can be written", got, "Choose one with --out")) from error
    return folder.absolute()


def plans_of(
    directions: Sequence[str],
    dims: Sequence[tuple[int, int]],
    dtypes: Sequence[str],
    is_causal: Sequence[bool],
    is_deterministic: Sequence[bool],
    seqlens: Sequence[int],
) -> list[Plan]:
    """The plans of every combination, backward for all gradients, each once. dims: (head_dim, head_dim_v)."""
    plans = {}
    choices = product(dims, dtypes, is_causal, is_deterministic, seqlens, NUM_HEADS)
    for (head_dim, head_dim_v), dtype, causal, deterministic, seqlen, heads in choices:
        scores = ScoreSpec(head_dim**-0.5, MaskSpec(right=0) if causal else MaskSpec())
        sizes = 1, seqlen, seqlen, heads, heads, head_dim, head_dim_v
        features = frozenset({"deterministic"} if deterministic else ())
        problem = AttentionProblem("dense", dtype, *sizes, scores, features)
        if "forward" in directions:
            plans[forward_plan(problem, num_sms=H100_SXM.num_sms)] = None
        if "backward" in directions:
            plans |= dict.fromkeys(backward_plans(problem))
    return list(plans)


def compile_all(plans: Sequence[Plan], folder: Path, jobs: int) -> Iterator[tuple[Plan, float]]:
    """(plan, seconds) as they are done. The compiler takes one thread at a time, so each job is a process."""
    pool = ProcessPoolExecutor(
        min(jobs, len(plans)),
        mp_context=multiprocessing.get_context("spawn"),  # a forked process would inherit locks of threads
        initializer=signal.signal,
        initargs=(signal.SIGINT, signal.SIG_IGN),  # Ctrl-C is for the parent, which starts no more of them
    )
    try:
        running = {pool.submit(compile_one, plan, folder): plan for plan in plans}
        for done in as_completed(running):
            yield running[done], done.result()
    finally:
        pool.shutdown(cancel_futures=True)


def compile_one(plan: Plan, folder: Path) -> float:
    """Seconds that it took, next to none where the kernel was there already."""
    from cute_fa.host.cache import fill
    from cute_fa.host.compile import import_dsl

    import_dsl()
    begin = time.perf_counter()
    fill(plan, folder)
    return time.perf_counter() - begin
