"""Work: how many FLOPs and bytes one call of attention costs at least; benchmarks and the roofline divide by it.

In "varlen" problems the seqlens are the declared maxima, so the work is that of a batch in which all sequences have
them.
"""

from dataclasses import dataclass

from cute_fa.core.dtypes import BY_NAME, FLOAT32
from cute_fa.core.problem import AttentionProblem


@dataclass(frozen=True)
class Work:
    """flops: multiplications and additions of the matrix products. bytes: device memory traffic, each tensor once."""

    flops: float
    bytes: int

    @property
    def intensity(self) -> float:
        """FLOP per byte, the abscissa of the roofline (`core/hardware.py`)."""
        return self.flops / self.bytes


def forward_work(problem: AttentionProblem) -> Work:
    """S = Q K^T and O = P V over the visible pairs; reads q, k, v and writes out and the fp32 lse."""
    q, k, v, out, lse = _tensor_bytes(problem)
    return Work(_forward_flops(problem), q + k + v + out + lse)


def backward_work(problem: AttentionProblem) -> Work:
    """The five products S, dP, dV, dQ, dK against the forward's two; reads q, k, v, out, dout, lse, writes dq, dk, dv.

    2.5 times the forward's FLOPs is exact for head_dim_v = head_dim and what everyone counts where they differ.
    """
    q, k, v, out, lse = _tensor_bytes(problem)
    return Work(2.5 * _forward_flops(problem), 2 * (q + k + v + out) + lse)


def _forward_flops(problem: AttentionProblem) -> float:
    pairs = problem.batch * problem.num_heads_q * _visible_pairs(problem)
    return 2.0 * pairs * (problem.head_dim + problem.head_dim_v)


def _visible_pairs(problem: AttentionProblem) -> float:
    """Visible (query, key) pairs of one head: exact, but for a causal square.

    Published benchmarks of attention count half of the square there, without the half diagonal that is visible too.
    Ours do the same, so that the numbers compare.
    """
    mask, seqlen_q, seqlen_k = problem.scores.mask, problem.seqlen_q, problem.seqlen_k
    if mask.is_causal and seqlen_q == seqlen_k:
        return seqlen_q * seqlen_k / 2
    return mask.num_visible(seqlen_q, seqlen_k)


def _tensor_bytes(problem: AttentionProblem) -> tuple[int, int, int, int, int]:
    """Sizes of q, k, v, out, lse: whole tensors, also where a mask leaves keys that no query sees."""
    rows_q = problem.batch * problem.seqlen_q * problem.num_heads_q
    rows_k = problem.batch * problem.seqlen_k * problem.num_heads_kv
    num_bytes = BY_NAME[problem.dtype].num_bytes
    q, out = (rows_q * dim * num_bytes for dim in (problem.head_dim, problem.head_dim_v))
    k, v = (rows_k * dim * num_bytes for dim in (problem.head_dim, problem.head_dim_v))
    return q, k, v, out, rows_q * FLOAT32.num_bytes
