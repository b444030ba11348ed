"""The suites' cells against the published table, and the names that choose and label them."""

import pytest

from benchmarks.suites import CAUSAL, DETERMINISTIC, DIMS, FULL, GQA, GRID, ODD, SHORT, SUITES, cell_name, dense, sizes


def cells(suite):
    """(batch, seqlen, heads_q, heads_kv, head_dim, head_dim_v, is_causal) of each cell, as a set."""
    found = [
        (p.batch, p.seqlen_q, p.num_heads_q, p.num_heads_kv, p.head_dim, p.head_dim_v, p.scores.mask == CAUSAL)
        for p in suite.problems
    ]
    assert len(found) == len(set(found)), "no cell twice"
    return set(found)


def test_grid():
    sides = {64: 32, 128: 16, 256: 8}  # heads by head_dim
    lengths = {1024: 16, 4096: 4, 16384: 1}  # batch by seqlen
    assert cells(GRID) == {
        (batch, seqlen, heads, heads, dim, dim, causal)
        for dim, heads in sides.items()
        for seqlen, batch in lengths.items()
        for causal in (False, True)
    }, "3 head_dims x 3 seqlens x 2 masks"
    assert GRID.backends == ("cute_fa", "fa4", "cudnn", "fa2"), "ours first, and every peer"


@pytest.mark.parametrize(
    "suite, wanted",
    [
        pytest.param(
            GQA,
            {
                (1, 2048, 32, 8, 128, 128, True),
                (1, 8192, 32, 8, 128, 128, True),
                (1, 32768, 32, 8, 128, 128, True),
                (1, 8192, 64, 8, 128, 128, True),
                (1, 8192, 32, 4, 128, 128, True),
                (4, 4096, 16, 1, 64, 64, True),
            },
            id="gqa",
        ),
        pytest.param(
            SHORT,
            {(b, s, 16, 16, 128, 128, c) for b, s in ((128, 128), (64, 256), (32, 512)) for c in (False, True)},
            id="short",
        ),
        pytest.param(ODD, {(4, s, 16, 16, 128, 128, True) for s in (1025, 4033, 4096, 4097)}, id="odd"),
        pytest.param(
            DIMS,
            {
                (4, 4096, 16, 16, 80, 80, True),
                (4, 4096, 21, 21, 96, 96, True),
                (4, 4096, 11, 11, 192, 192, True),
                (4, 4096, 16, 16, 192, 128, True),
            },
            id="dims",
        ),
        pytest.param(
            DETERMINISTIC,
            {(b, s, h, h, d, d, True) for b, s in ((4, 4096), (1, 16384)) for h, d in ((32, 64), (16, 128), (8, 256))},
            id="deterministic",
        ),
    ],
)
def test_cells(suite, wanted):
    assert cells(suite) == wanted, suite.name


def test_deterministic_is_backward_in_two_variants():
    first, second = list(DETERMINISTIC.cases(DETERMINISTIC.directions))[:2]
    assert first.problem == second.problem, "variants of a cell are neighbours"
    assert [(c.direction, c.variant) for c in (first, second)] == [("bwd", "default"), ("bwd", "deterministic")], "both"


@pytest.mark.parametrize("suite", SUITES.values(), ids=SUITES)
def test_every_problem_is_one_that_all_backends_read_alike(suite):
    for problem in suite.problems:
        assert problem.dtype == "bfloat16" and problem.seqlen_q == problem.seqlen_k, "square, so causal has one meaning"
        assert problem.scores.scale == pytest.approx(problem.head_dim**-0.5), "the default scale of every backend"
        assert problem.scores.mask in (FULL, CAUSAL), "masks that every backend has"


@pytest.mark.parametrize(
    "problem, name",
    [
        pytest.param(dense(4, 4096, (16, 16), (128, 128), CAUSAL), "d128-s4096-causal-b4-h16", id="plain"),
        pytest.param(dense(1, 2048, (32, 8), (192, 128), FULL), "d192x128-s2048-full-b1-h32:8", id="unequal"),
    ],
)
def test_names_of_cells(problem, name):
    assert cell_name(sizes(problem)) == name, "from a problem"
    assert cell_name({column: str(value) for column, value in sizes(problem).items()}) == name, "and from a file's row"


def test_only_keeps_names_that_contain_it():
    kept = [case.name for case in GRID.cases(("fwd", "bwd"), "d64-s1024-causal")]
    assert kept == [f"d64-s1024-causal-b16-h32 {direction} default" for direction in ("fwd", "bwd")], (
        "one cell, both ways"
    )
    assert len(list(GRID.cases(("fwd",)))) == 18, "without it, every cell"
