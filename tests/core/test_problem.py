"""AttentionProblem and ScoreSpec: plain facts that compare, hash and cannot be changed."""

from dataclasses import FrozenInstanceError, replace

import pytest

from cute_fa.core.mask_spec import MaskSpec
from cute_fa.core.problem import AttentionProblem, ScoreSpec


def problem(**changes) -> AttentionProblem:
    facts = dict(
        layout="dense",
        dtype="bfloat16",
        batch=2,
        seqlen_q=128,
        seqlen_k=256,
        num_heads_q=12,
        num_heads_kv=4,
        head_dim=64,
        head_dim_v=64,
        scores=ScoreSpec(0.125, MaskSpec(right=0)),
        features=frozenset({"dense", "causal", "gqa"}),
    )
    return AttentionProblem(**{**facts, **changes})


def test_equal_facts_are_one_key():
    assert {problem(): "first", problem(): "second"} == {problem(): "second"}, "equal problems are one key"


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"layout": "varlen"}, id="layout"),
        pytest.param({"dtype": "float16"}, id="dtype"),
        pytest.param({"batch": 3}, id="batch"),
        pytest.param({"head_dim_v": 128}, id="head-dim-v"),
        pytest.param({"scores": ScoreSpec(0.125, MaskSpec())}, id="mask"),
        pytest.param({"scores": ScoreSpec(0.25, MaskSpec(right=0))}, id="scale"),
        pytest.param({"features": frozenset({"dense"})}, id="features"),
    ],
)
def test_different_facts_are_different_keys(changes):
    assert len({problem(), problem(**changes)}) == 2, f"{changes} is another problem"


@pytest.mark.parametrize(
    "facts, name",
    [(problem(), "batch"), (problem().scores, "scale")],
    ids=["problem", "scores"],
)
def test_facts_cannot_be_changed(facts, name):
    with pytest.raises(FrozenInstanceError):
        setattr(facts, name, 5)
    assert getattr(replace(facts, **{name: 5}), name) == 5, "a changed copy is the way"


def test_defaults_ask_for_nothing():
    scores = ScoreSpec(0.5, MaskSpec())
    assert (scores.softcap, scores.dropout_p) == (0.0, 0.0), "no softcap, no dropout"
    bare = AttentionProblem("dense", "float32", 1, 1, 1, 1, 1, 8, 8, scores)
    assert bare.features == frozenset(), "no features"
