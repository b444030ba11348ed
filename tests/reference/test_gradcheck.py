"""Finite differences through the public functions in float64: every option alone and every compatible pair of options.

Every output that has a gradient is checked against every input that has one: out and lse, q, k, v and the sink.
"""

import itertools

import pytest
import torch
from torch.autograd import gradcheck

import cute_fa

HEADS = 2
SLOPES = torch.tensor([[0.5, -0.2], [1.0, 0.1], [0.3, 0.7]], dtype=torch.float64)
INT32 = torch.int32

# What each option changes: keyword arguments of the public function, sizes, or which outputs the loss reads.
OPTIONS = {
    "causal": {"causal": True},
    "window": {"window_size": (1, 1)},
    "window-left": {"window_size": (1, None)},
    "chunk": {"attention_chunk": 2},
    "scale": {"softmax_scale": -0.8},
    "softcap": {"softcap": 0.7},
    "alibi": {"alibi_slopes": SLOPES[0]},
    "alibi-batch": {"alibi_slopes": SLOPES},
    "sink": {"learnable_sink": torch.tensor([-0.5, 0.8], dtype=torch.float64)},
    "dropout": {"dropout_p": 0.4},
    "gqa": {"heads_kv": 1},
    "head-dim-v": {"head_dim_v": 3},
    "out-alone": {"outputs": "out"},
    "lse-alone": {"outputs": "lse"},
}
# Sequences 0, 1, 2 of the packed cases have 2, 0, 2 queries and 3, 1, 1 keys.
CU_SEQLENS_Q, CU_SEQLENS_K = torch.tensor([0, 2, 2, 4], dtype=INT32), torch.tensor([0, 3, 4, 5], dtype=INT32)
PAGE_SIZE = 2
VARLEN_OPTIONS = OPTIONS | {
    "seqused-q": {"seqused_q": torch.tensor([1, 0, 2], dtype=INT32)},
    "seqused-k": {"seqused_k": torch.tensor([2, 1, 0], dtype=INT32)},
    # Sequences 0 and 2 share page 3; page 2 belongs to none.
    "block-table": {"block_table": torch.tensor([[3, 0], [1, -1], [3, -1]], dtype=INT32)},
}
ONE_OF = ({"window", "window-left"}, {"alibi", "alibi-batch"}, {"out-alone", "lse-alone"})


def alone_and_in_pairs(options):
    pairs = (pair for pair in itertools.combinations(options, 2) if not any(set(pair) <= group for group in ONE_OF))
    return [(), *((name,) for name in options), *pairs]


def changes_of(names, options, batch):
    changes = {}
    for name in names:
        changes.update(options[name])
    if "alibi-batch" in names:
        changes["alibi_slopes"] = SLOPES[:batch]
    return changes


def leaf(generator, *size):
    return torch.randn(size, generator=generator, dtype=torch.float64).requires_grad_()


def check(function, q, k, v, arguments, outputs="both"):
    """gradcheck of out and lse; rows without a key stay out, for their lse is -inf."""
    sink = arguments.pop("learnable_sink", None)
    leaves = [q, k, v] if sink is None else [q, k, v, sink.clone().requires_grad_()]

    def call(q, k, v, sink=None):
        torch.default_generator.manual_seed(7)  # the same dropout mask every time
        found = function(q, k, v, **arguments, learnable_sink=sink, return_lse=outputs != "out")
        if outputs == "out":
            return found
        out, lse = found
        lse = lse.masked_fill(lse == -torch.inf, 0)
        return lse if outputs == "lse" else (out, lse)

    assert gradcheck(call, leaves), "gradcheck returned False"


def ids(names):
    return "-and-".join(names) or "plain"


def check_dense(names, batch, seqlen_q, seqlen_k):
    changes = changes_of(names, OPTIONS, batch)
    heads_kv, head_dim_v = changes.pop("heads_kv", HEADS), changes.pop("head_dim_v", 2)
    outputs, generator = changes.pop("outputs", "both"), torch.Generator().manual_seed(0)
    q = leaf(generator, batch, seqlen_q, HEADS, 2)
    k = leaf(generator, batch, seqlen_k, heads_kv, 2)
    v = leaf(generator, batch, seqlen_k, heads_kv, head_dim_v)
    check(cute_fa.flash_attn_func, q, k, v, changes, outputs)


@pytest.mark.parametrize("names", alone_and_in_pairs(OPTIONS), ids=ids)
def test_dense(names):
    """More queries than keys, so that causal masks and windows leave a row without a key."""
    check_dense(names, 2 if "alibi-batch" in names else 1, 4, 3)


@pytest.mark.parametrize("names", [(), *((name,) for name in OPTIONS)], ids=ids)
def test_dense_with_more_keys_than_queries(names):
    check_dense(names, 1, 3, 5)


@pytest.mark.parametrize("names", alone_and_in_pairs(VARLEN_OPTIONS), ids=ids)
def test_varlen(names):
    changes = changes_of(names, VARLEN_OPTIONS, 3)
    heads_kv, head_dim_v = changes.pop("heads_kv", HEADS), changes.pop("head_dim_v", 2)
    outputs, generator = changes.pop("outputs", "both"), torch.Generator().manual_seed(0)
    rows = (4, PAGE_SIZE) if "block_table" in changes else (int(CU_SEQLENS_K[-1]),)
    q = leaf(generator, int(CU_SEQLENS_Q[-1]), HEADS, 2)
    k = leaf(generator, *rows, heads_kv, 2)
    v = leaf(generator, *rows, heads_kv, head_dim_v)
    sizes = dict(cu_seqlens_q=CU_SEQLENS_Q, cu_seqlens_k=CU_SEQLENS_K, max_seqlen_q=2, max_seqlen_k=3)
    check(cute_fa.flash_attn_varlen_func, q, k, v, sizes | changes, outputs)


@pytest.mark.parametrize("options", [{}, {"causal": True, "dropout_p": 0.4}], ids=["plain", "causal-dropout"])
def test_packed_tensors(options):
    """Gradients of the packed functions come back packed."""
    generator = torch.Generator().manual_seed(0)
    two_sides = dict(cu_seqlens_q=CU_SEQLENS_Q, cu_seqlens_k=CU_SEQLENS_K, max_seqlen_q=2, max_seqlen_k=3)
    one_side = dict(cu_seqlens=CU_SEQLENS_K, max_seqlen=3)
    packed_q, packed_kv = leaf(generator, 4, HEADS, 2), leaf(generator, 5, 2, HEADS, 2)
    calls = {
        cute_fa.flash_attn_qkvpacked_func: ([leaf(generator, 1, 3, 3, HEADS, 2)], {}),
        cute_fa.flash_attn_kvpacked_func: ([leaf(generator, 1, 3, HEADS, 2), leaf(generator, 1, 4, 2, HEADS, 2)], {}),
        cute_fa.flash_attn_varlen_qkvpacked_func: ([leaf(generator, 5, 3, HEADS, 2)], one_side),
        cute_fa.flash_attn_varlen_kvpacked_func: ([packed_q, packed_kv], two_sides),
    }
    for function, (leaves, arguments) in calls.items():

        def call(*leaves):
            torch.default_generator.manual_seed(7)
            out, lse = function(*leaves, **arguments, **options, return_lse=True)
            return out, lse.masked_fill(lse == -torch.inf, 0)

        assert gradcheck(call, leaves), function.__name__
