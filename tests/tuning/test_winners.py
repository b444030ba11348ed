"""The table of measured winners: every row has its measurement, fits, is reached, and is what forward_plan gives."""

import csv
from pathlib import Path

import pytest

from cute_fa.core.mask_spec import MaskSpec
from cute_fa.core.problem import AttentionProblem, ScoreSpec
from cute_fa.tuning.heuristics import build_forward_plan, forward_plan
from cute_fa.tuning.winners import FORWARD_WINNERS, ForwardWinner

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
LONG = 100_000


def name_of(row: ForwardWinner) -> str:
    mask = "causal" if row.is_causal else "full"
    return f"d{row.head_dim}-{row.head_dim_v}-{mask}-to-{row.max_seqlen or 'the-end'}"


by_row = pytest.mark.parametrize("row", FORWARD_WINNERS, ids=name_of)


def rows_beside(row: ForwardWinner) -> list[ForwardWinner]:
    """All rows of the same head dims and mask, in their order."""
    key = row.head_dim, row.head_dim_v, row.is_causal
    return [other for other in FORWARD_WINNERS if (other.head_dim, other.head_dim_v, other.is_causal) == key]


def lengths_of(row: ForwardWinner) -> tuple[int, float]:
    """The fewest and the most keys that are this row's, with shorter sequences first."""
    beside = rows_beside(row)
    idx = beside.index(row)
    first = beside[idx - 1].max_seqlen + 1 if idx else 1
    return first, float("inf") if row.max_seqlen is None else row.max_seqlen


def plan_of(row: ForwardWinner, seqlen_q: int, seqlen_k: int, dtype="bfloat16", num_heads=4096):
    """Of a problem for which the row could hold, with as many tiles as anyone may want."""
    scores = ScoreSpec(1.0, MaskSpec(right=0 if row.is_causal else None))
    sizes = 1, seqlen_q, seqlen_k, num_heads, num_heads, row.head_dim, row.head_dim_v
    return forward_plan(AttentionProblem("dense", dtype, *sizes, scores), 132)


def test_every_row_differs():
    assert len(set(FORWARD_WINNERS)) == len(FORWARD_WINNERS) > 0, "rows once each"


@by_row
def test_a_run_measured_it(row):
    """The results have a row of that run with the plan's name, head dims and mask, and a length for which it holds."""
    lines = [line for path in sorted(RESULTS.glob("*.csv")) for line in csv.DictReader(path.open(newline=""))]
    wanted = {
        "run": row.measured,
        "backend": "cute_fa",
        "direction": "fwd",
        "config": row.plan("bfloat16").name,
        "head_dim": str(row.head_dim),
        "head_dim_v": str(row.head_dim_v),
        "mask": "causal" if row.is_causal else "full",
    }
    first, last = lengths_of(row)
    mine = [line for line in lines if wanted.items() <= line.items() and line["ms_p50"]]
    mine = [line for line in mine if first <= int(line["seqlen_k"]) <= last]
    assert mine, f"{RESULTS} has no row of {wanted} with {first} to {last} keys"
    assert row.measured, "a run has a name"


@by_row
def test_it_fits(row):
    """Shared memory of a block, 227 KiB, and registers of a consumer thread, of which 32 are for other things."""
    tile_m = 64 * row.num_consumer_warpgroups
    q, o = 2 * tile_m * row.head_dim, 2 * tile_m * row.head_dim_v
    keys = 2 * row.tile_n * (row.head_dim + row.head_dim_v)
    smem_bytes = row.num_q_stages * q + row.num_kv_stages * keys + row.has_o_staging * o + 1024
    assert smem_bytes <= 227 * 1024, f"{smem_bytes} bytes"
    registers = 0.75 * row.tile_n + row.head_dim_v / 2  # S, P in 16 bits, O
    assert registers <= {2: 240, 3: 160}[row.num_consumer_warpgroups] - 32, f"{registers} registers"
    assert row.plan("bfloat16").tile.fits and row.tile_m == tile_m, "tuning counts the same"


@by_row
def test_it_is_reached(row):
    """Shorter sequences come first, and what has no end comes last."""
    ends = [float("inf") if other.max_seqlen is None else other.max_seqlen for other in rows_beside(row)]
    assert ends == sorted(set(ends)) and ends[0] >= 1, f"rows end at {ends}"
    first, _ = lengths_of(row)
    assert plan_of(row, LONG, first) == row.plan("bfloat16"), "the fewest keys that are its own"


@by_row
def test_it_holds_to_its_end(row):
    if row.max_seqlen is None:
        assert plan_of(row, LONG, LONG) == row.plan("bfloat16"), "however long"
        return
    for seqlen in (row.max_seqlen - 1, row.max_seqlen):
        assert plan_of(row, LONG, seqlen) == row.plan("bfloat16"), f"{seqlen} keys"
    beside = rows_beside(row)
    rest = beside[beside.index(row) + 1 :]
    sizes = row.head_dim, row.head_dim_v, row.is_causal
    wanted = rest[0].plan("bfloat16") if rest else build_forward_plan("bfloat16", *sizes)
    assert plan_of(row, LONG, row.max_seqlen + 1) == wanted, "one key more"


@by_row
def test_its_plan_has_what_the_row_says(row):
    for dtype in ("bfloat16", "float16"):
        plan = row.plan(dtype)
        t = plan.tile
        assert (plan.dtype, plan.is_causal, plan.has_turns) == (dtype, row.is_causal, row.has_turns), "flags"
        assert (t.head_dim, t.head_dim_v, t.tile_n) == (row.head_dim, row.head_dim_v, row.tile_n), "sizes"
        assert (t.num_q_stages, t.num_kv_stages) == (row.num_q_stages, row.num_kv_stages), "rings"
        assert t.has_o_staging == row.has_o_staging, "stores"
        assert t.num_consumer_warpgroups == row.num_consumer_warpgroups, "warpgroups"
        assert plan_of(row, LONG, row.max_seqlen or LONG, dtype) == plan, "both dtypes get it"


def row_to(max_seqlen, num_warpgroups, tile_n):
    return ForwardWinner(128, 96, True, max_seqlen, num_warpgroups, tile_n, 1, 3, False, False, "a-run")


def test_first_row_that_holds(monkeypatch):
    """On a table of its own: three ranges, of which the last has an end, and rules behind it and for other masks."""
    table = (row_to(100, 2, 80), row_to(200, 3, 64), row_to(300, 2, 96))
    monkeypatch.setattr("cute_fa.tuning.heuristics.FORWARD_WINNERS", table)

    def tile_of(seqlen_k, seqlen_q=192, num_heads=132, right=0, head_dim=128):
        scores = ScoreSpec(1.0, MaskSpec(right=right))
        sizes = 1, seqlen_q, seqlen_k, num_heads, num_heads, head_dim, 96
        tile = forward_plan(AttentionProblem("dense", "float16", *sizes, scores), 132).tile
        return tile.tile_m, tile.tile_n

    found = [tile_of(seqlen_k) for seqlen_k in (1, 100, 101, 200, 201, 300, 301)]
    rules = (128, 128)
    assert found == [(128, 80)] * 2 + [(192, 64)] * 2 + [(128, 96)] * 2 + [rules], f"got {found}"
    assert tile_of(101, num_heads=131) == (128, 96), "131 wide tiles leave one of 132 SMs idle: the next row that holds"
    assert tile_of(101, seqlen_q=193, num_heads=66) == (192, 64), "66 heads of two tiles"
    assert tile_of(100, seqlen_q=5000) == (128, 80), "keys decide, however many queries"
    assert tile_of(1, num_heads=1) == (128, 80), "rows of 128 queries ask for nothing"
    assert tile_of(1, right=None) == tile_of(1, head_dim=136) == tile_of(1, head_dim=96) == rules, "not of this table"
