"""AttentionProblem: one call of attention as plain, hashable facts, made by `host/validate.py` once per call.

Support matrix, tuning and work counts read it; nothing in it is a tensor.
"""

from dataclasses import dataclass

from cute_fa.core.mask_spec import MaskSpec


@dataclass(frozen=True)
class ScoreSpec:
    """How raw products q . k become probabilities, in this order: scale, softcap, ALiBi, mask, softmax, dropout.

    scale multiplies q . k; softcap 0 means none; dropout_p is the probability of dropping an entry.
    """

    scale: float
    mask: MaskSpec
    softcap: float = 0.0
    dropout_p: float = 0.0


@dataclass(frozen=True)
class AttentionProblem:
    """Sizes, dtype and options of one call.

    layout: "dense" (batch, seqlen, heads, head_dim), "varlen" (total tokens, heads, head_dim with cu_seqlens), or
        "kvcache". In "varlen" the seqlens are the declared maxima.
    features: names from the support matrix (`host/support.py`) that the call uses.
    """

    layout: str
    dtype: str
    batch: int
    seqlen_q: int
    seqlen_k: int
    num_heads_q: int
    num_heads_kv: int
    head_dim: int
    head_dim_v: int
    scores: ScoreSpec
    features: frozenset[str] = frozenset()
