"""Suites: which cells a run measures, as data. `run.py` measures them; `summary.py` and `plot.py` name them.

A case is one cell in one direction and variant. Nothing here needs torch.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from cute_fa.core.mask_spec import MaskSpec
from cute_fa.core.problem import AttentionProblem, ScoreSpec

FULL, CAUSAL = MaskSpec(), MaskSpec(right=0)
DIRECTIONS = ("fwd", "bwd")


@dataclass(frozen=True)
class Case:
    """What the contestants of one comparison all do. direction: fwd or bwd. variant: default or deterministic."""

    suite: str
    problem: AttentionProblem
    direction: str
    variant: str

    @property
    def name(self) -> str:
        return f"{cell_name(sizes(self.problem))} {self.direction} {self.variant}"


@dataclass(frozen=True)
class Suite:
    """Cells that answer one question.

    peers: backends that must have a row beside cute_fa's. variants: of each cell, where a backend has
    them. groups: (head_dim, seqlen) pairs whose ratios the summary prints apart. slice_ms, num_rounds: how long
    contestants run in turn, and how often; README.md tells what the length decides.
    """

    name: str
    problems: tuple[AttentionProblem, ...]
    peers: tuple[str, ...]
    directions: tuple[str, ...] = DIRECTIONS
    variants: tuple[str, ...] = ("default",)
    groups: tuple[tuple[int, int], ...] = ()
    slice_ms: float = 5.0
    num_rounds: int = 20

    @property
    def backends(self) -> tuple[str, ...]:
        return ("cute_fa", *self.peers)

    def cases(self, directions: tuple[str, ...], only: str = "") -> Iterator[Case]:
        """Cell by cell, all directions and variants of a cell together; `only` keeps the names that contain it."""
        for problem in self.problems:
            for direction in directions:
                for variant in self.variants:
                    case = Case(self.name, problem, direction, variant)
                    if only in case.name:
                        yield case


def dense(batch: int, seqlen: int, heads: tuple[int, int], dims: tuple[int, int], mask: MaskSpec) -> AttentionProblem:
    """heads: of q and of k and v. dims: head_dim and head_dim_v. In bf16, with the scale that everyone uses."""
    scores = ScoreSpec(dims[0] ** -0.5, mask)
    return AttentionProblem("dense", "bfloat16", batch, seqlen, seqlen, *heads, *dims, scores)


def square(tokens: int, seqlen: int, num_heads: int, head_dim: int, mask: MaskSpec) -> AttentionProblem:
    """`tokens` tokens cut into sequences, as many heads for keys as for queries, one head_dim."""
    return dense(tokens // seqlen, seqlen, (num_heads, num_heads), (head_dim, head_dim), mask)


def sizes(problem: AttentionProblem) -> dict[str, object]:
    """The columns of a row that tell its cell."""
    return {
        "op": "attention",
        "dtype": problem.dtype,
        "batch": problem.batch,
        "seqlen_q": problem.seqlen_q,
        "seqlen_k": problem.seqlen_k,
        "heads_q": problem.num_heads_q,
        "heads_kv": problem.num_heads_kv,
        "head_dim": problem.head_dim,
        "head_dim_v": problem.head_dim_v,
        "mask": problem.scores.mask.name,
    }


def cell_name(row: Mapping[str, object]) -> str:
    """A word for a row's cell, such as d128-s4096-causal-b4-h16 or d192x128-s4096-causal-b4-h32:8."""
    dims = unless_equal(row["head_dim"], "x", row["head_dim_v"])
    seqlens = unless_equal(row["seqlen_q"], ":", row["seqlen_k"])
    heads = unless_equal(row["heads_q"], ":", row["heads_kv"])
    return f"d{dims}-s{seqlens}-{row['mask']}-b{row['batch']}-h{heads}"


def unless_equal(first: object, mark: str, second: object) -> str:
    return f"{first}" if first == second else f"{first}{mark}{second}"


GRID = Suite(
    "grid",
    tuple(
        square(16384, seqlen, 2048 // head_dim, head_dim, mask)
        for head_dim in (64, 128, 256)
        for seqlen in (1024, 4096, 16384)
        for mask in (FULL, CAUSAL)
    ),
    peers=("fa4", "cudnn", "fa2"),
    groups=((64, 4096), (64, 16384), (128, 4096), (128, 16384)),
)

# Each at the clock that its own power allows.
SETTLED = replace(GRID, name="settled", slice_ms=100.0, num_rounds=5)

GQA = Suite(
    "gqa",
    (
        dense(1, 2048, (32, 8), (128, 128), CAUSAL),
        dense(1, 8192, (32, 8), (128, 128), CAUSAL),
        dense(1, 32768, (32, 8), (128, 128), CAUSAL),
        dense(1, 8192, (64, 8), (128, 128), CAUSAL),
        dense(1, 8192, (32, 4), (128, 128), CAUSAL),
        dense(4, 4096, (16, 1), (64, 64), CAUSAL),
    ),
    peers=("fa4", "cudnn"),
)

SHORT = Suite(
    "short",
    tuple(square(16384, seqlen, 16, 128, mask) for seqlen in (128, 256, 512) for mask in (FULL, CAUSAL)),
    peers=("fa4", "cudnn"),
)

# Beside, below and far below a multiple of every tile; 4096 is the even one to compare with.
ODD = Suite(
    "odd",
    tuple(dense(4, seqlen, (16, 16), (128, 128), CAUSAL) for seqlen in (1025, 4033, 4096, 4097)),
    peers=("fa4", "cudnn"),
)

DIMS = Suite(
    "dims",
    tuple(
        dense(4, 4096, (num_heads, num_heads), dims, CAUSAL)
        for num_heads, dims in ((16, (80, 80)), (21, (96, 96)), (11, (192, 192)), (16, (192, 128)))
    ),
    peers=("fa4", "cudnn"),
)

DETERMINISTIC = Suite(
    "deterministic",
    tuple(
        square(16384, seqlen, 2048 // head_dim, head_dim, CAUSAL)
        for head_dim in (64, 128, 256)
        for seqlen in (4096, 16384)
    ),
    peers=("fa4",),
    directions=("bwd",),
    variants=("default", "deterministic"),
)

SUITES = {suite.name: suite for suite in (GRID, SETTLED, GQA, SHORT, ODD, DIMS, DETERMINISTIC)}
