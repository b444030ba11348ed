"""The launch of a call, up to the kernel: what TMA reads as it lies, what is copied, which plan and counter it gets."""

import pytest
import torch

from cute_fa.core.errors import NotSupportedError
from cute_fa.core.mask_spec import MaskSpec
from cute_fa.host import launch

FULL, CAUSAL = (None, None, 0), (None, 0, 0)  # left, right, chunk


def aligned(*shape, dtype=torch.bfloat16):
    """Contiguous, at an address that is a multiple of 16 bytes."""
    x = torch.zeros(shape, dtype=dtype)
    assert x.data_ptr() % 16 == 0, "torch's CPU allocations are aligned to 64 bytes"
    return x


READABLE = {
    "contiguous": aligned(2, 5, 3, 64),
    "heads-before-rows": aligned(2, 3, 5, 64).transpose(1, 2),
    "batch-inside": aligned(5, 2, 3, 64).transpose(0, 1),
    "packed-qkv": aligned(2, 5, 3, 3, 64)[:, :, 1],
    "columns-cut": aligned(2, 5, 3, 64)[..., :40],
    "columns-from-eight": aligned(2, 5, 3, 64)[..., 8:48],
    "every-second-row": aligned(2, 10, 3, 64)[:, ::2],
    "expanded-heads": aligned(2, 5, 1, 64).expand(-1, -1, 3, -1),
    "expanded-batch": aligned(1, 5, 3, 64).expand(4, -1, -1, -1),
    "odd-stride-of-one-head": torch.as_strided(aligned(4096), (2, 5, 1, 64), (320, 64, 7, 1)),
    "odd-stride-of-one-row": torch.as_strided(aligned(4096), (2, 1, 3, 64), (192, 3, 64, 1)),
    "odd-stride-of-one-sequence": torch.as_strided(aligned(4096), (1, 5, 3, 64), (1001, 192, 64, 1)),
    "fp16": aligned(2, 5, 3, 8, dtype=torch.float16),
    "fp32-rows-of-four": aligned(2, 5, 3, 4, dtype=torch.float32),
}

UNREADABLE = {
    "columns-apart": aligned(2, 5, 3, 128)[..., ::2],
    "columns-before-heads": aligned(2, 5, 64, 8).transpose(2, 3),
    "one-column-on": aligned(2, 5, 3, 72)[..., 1:65],
    "seven-columns-on": aligned(2, 5, 3, 72)[..., 7:71],
    "head-dim-of-four": aligned(2, 5, 3, 4),
    "odd-stride-of-heads": torch.as_strided(aligned(4096), (2, 5, 3, 64), (1040, 208, 68, 1)),
    "odd-stride-of-rows": torch.as_strided(aligned(4096), (2, 5, 3, 64), (1040, 196, 64, 1)),
    "odd-stride-of-batch": torch.as_strided(aligned(4096), (2, 5, 3, 64), (1001, 192, 64, 1)),
    "expanded-columns": aligned(2, 5, 3, 1).expand(-1, -1, -1, 64),
}


@pytest.mark.parametrize("x", READABLE.values(), ids=READABLE)
def test_tma_reads_it_as_it_lies(x):
    assert launch.is_tma_readable(x), f"strides {x.stride()}, address {x.data_ptr() % 16} past 16"


@pytest.mark.parametrize("x", UNREADABLE.values(), ids=UNREADABLE)
def test_tma_does_not_read_it(x):
    assert not launch.is_tma_readable(x), f"strides {x.stride()}, address {x.data_ptr() % 16} past 16"


@pytest.mark.parametrize(
    "num_sms, head_dim, mask, tile_m",
    [(78, 64, FULL, 192), (132, 64, FULL, 128), (78, 64, CAUSAL, 128), (78, 128, FULL, 128), (132, 128, CAUSAL, 128)],
    ids=["h20-d64-full", "h200-d64-full", "h20-d64-causal", "h20-d128-full", "h200-d128-causal"],
)
def test_plan_of_a_call(num_sms, head_dim, mask, tile_m):
    """100 tiles of 192 queries: enough for the SMs of an H20 and not for those of an H200."""
    shapes = torch.Size((10, 192, 10, head_dim)), torch.Size((10, 500, 2, head_dim))
    for dtype, name in ((torch.bfloat16, "bfloat16"), (torch.float16, "float16")):
        plan = launch.plan_of(dtype, *shapes, mask, num_sms)
        assert (plan.dtype, plan.is_causal) == (name, mask == CAUSAL), "dtype and mask of the call"
        assert (plan.tile.head_dim, plan.tile.tile_m) == (head_dim, tile_m), "head_dim, queries of a tile"


def test_sizes_and_mask_reach_the_heuristics(monkeypatch):
    monkeypatch.setattr(launch, "forward_plan", lambda problem, num_sms: (problem, num_sms))
    problem, num_sms = launch.plan_of(torch.float16, (3, 5, 4, 64), (3, 7, 2, 40), (9, 0, 11), 78)
    assert (problem.layout, problem.dtype, problem.batch) == ("dense", "float16", 3), "layout, dtype, batch"
    assert (problem.seqlen_q, problem.seqlen_k) == (5, 7), "queries and keys"
    assert (problem.num_heads_q, problem.num_heads_kv) == (4, 2), "heads of both"
    assert (problem.head_dim, problem.head_dim_v) == (64, 40), "dims of both"
    assert (problem.scores.mask, num_sms) == (MaskSpec(9, 0, 11), 78), "mask and SMs"


@pytest.fixture
def launched(monkeypatch):
    """The launch with CPU tensors (device -1): a kernel that notes its plan and arguments, an H20, and stream 1."""
    calls = []
    monkeypatch.setattr(launch.cache, "load", lambda plan: lambda *arguments: calls.append((plan, *arguments)))
    monkeypatch.setattr(launch, "sm_count", lambda device_index: 78)
    monkeypatch.setattr(launch, "_counters", {})
    monkeypatch.setattr(launch, "_zeros", lambda device_index: torch.zeros(2, dtype=torch.int32))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: -1)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    use_stream(monkeypatch, 1)
    launch._prepare.cache_clear()
    yield calls
    launch._prepare.cache_clear()


def use_stream(monkeypatch, number: int):
    # Builds of torch without CUDA have no such function.
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device_index: number, raising=False)


def call(q=None, k=None, v=None):
    q = aligned(2, 5, 4, 64) if q is None else q
    k = aligned(2, 7, 2, 64) if k is None else k
    v = aligned(2, 7, 2, 40) if v is None else v
    return q, k, v, *launch.forward(q, k, v, 0.3, CAUSAL)


def test_arguments_of_the_kernel(launched):
    q, k, v, out, lse = call()
    (plan, *given, scale, num_sms), = launched
    q_given, k_given, v_given, out_given, lse_given, counter = given
    assert q_given is q and k_given is k and v_given is v, "the tensors themselves"
    assert out_given is out and lse_given is lse, "the outputs are what the kernel writes"
    assert (out.shape, out.dtype, out.is_contiguous()) == ((2, 5, 4, 40), torch.bfloat16, True), "rows of head_dim_v"
    assert (lse.shape, lse.dtype) == ((2, 4, 5), torch.float32), "(batch, heads, seqlen_q)"
    assert counter.tolist() == [0, 0] and counter.dtype == torch.int32, "two zeros"
    assert (scale, num_sms) == (0.3, 78), "scale of the call, SMs of the device"
    assert plan.is_causal and (plan.tile.head_dim, plan.tile.head_dim_v) == (64, 64), "the plan of this call"


@pytest.mark.parametrize("is_shifted", [True, False], ids=["shifted", "columns-outside"])
@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_what_tma_does_not_read_is_copied(name, is_shifted, launched):
    rows = {"q": (2, 5, 4), "k": (2, 7, 2), "v": (2, 7, 2)}[name]
    if is_shifted:
        odd = torch.randn(*rows, 72).to(torch.bfloat16)[..., 1:65]
    else:
        odd = torch.randn(64, *rows).to(torch.bfloat16).permute(1, 2, 3, 0)
    call(**{name: odd})
    (_, *given), = launched
    copy = given["qkv".index(name)]
    assert launch.is_tma_readable(copy) and copy.is_contiguous(), "as TMA reads it"
    assert torch.equal(copy, odd), "the same numbers"


def test_a_copy_of_expanded_columns_has_rows_of_its_own(launched):
    call(v=torch.arange(28.0, dtype=torch.bfloat16).view(2, 7, 2, 1).expand(-1, -1, -1, 64))
    (_, _, _, v, *_), = launched
    assert v.is_contiguous() and (v[..., 0] == v[..., 63]).all(), "all columns are written out"


@pytest.mark.parametrize(
    "q_shape, kv_shape",
    [((0, 5, 4, 64), (0, 7, 2, 64)), ((2, 0, 4, 64), (2, 7, 2, 64)), ((2, 0, 4, 64), (2, 0, 2, 64))],
    ids=["no-sequence", "no-query", "no-row-at-all"],
)
def test_nothing_to_compute_launches_nothing(q_shape, kv_shape, launched):
    _, _, _, out, lse = call(aligned(*q_shape), aligned(*kv_shape), aligned(*kv_shape))
    batch, seqlen_q, heads, _ = q_shape
    assert (out.shape, lse.shape, launched) == (q_shape, (batch, heads, seqlen_q), []), "empty results"


def test_no_key_gives_zero_and_minus_infinity(launched):
    _, _, _, out, lse = call(k=aligned(2, 0, 2, 64), v=aligned(2, 0, 2, 40))
    assert launched == [], "TMA has no tensor to read"
    assert out.shape == (2, 5, 4, 40) and (out == 0).all(), "rows without a visible key"
    assert (lse == -torch.inf).all(), "the logarithm of an empty sum"


def test_the_device_of_the_tensors_is_made_current(launched, monkeypatch):
    current, seen = [1], []

    class Device:
        def __init__(self, index):
            self.index = index

        def __enter__(self):
            current.append(self.index)

        def __exit__(self, *_error):
            current.pop()

    monkeypatch.setattr(torch.cuda, "current_device", lambda: current[-1])
    monkeypatch.setattr(torch.cuda, "device", Device)
    monkeypatch.setattr(launch.cache, "load", lambda plan: lambda *arguments: seen.append(list(current)))
    call()
    assert seen == [[1, -1]] and current == [1], "during the launch alone, and the launch happens once"


def test_launches_of_one_stream_share_a_counter(launched, monkeypatch):
    call(), call()
    use_stream(monkeypatch, 2)
    call()
    first, second, other = (arguments[6] for arguments in launched)
    assert second is first, "launches of a stream follow each other"
    assert other.data_ptr() != first.data_ptr(), "those of another stream may run beside them"


def test_every_launch_of_a_graph_has_a_counter(launched, monkeypatch):
    call()
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    call(), call()
    assert len({arguments[6].data_ptr() for arguments in launched}) == 3, "three launches, three counters"


def test_more_tiles_than_32_bits_number(launched):
    shapes = (2**24, 1, 128, 8), (2**24, 1, 128, 8), (2**24, 1, 128, 8)
    with pytest.raises(NotSupportedError, match="q: expected at most 2147418112 tiles of 128 queries of one head, got shape"):
        launch._prepare(-1, torch.bfloat16, CAUSAL, shapes, ((1024, 1024, 8, 1),) * 3)
    few = ((2**23, 1, 128, 8),) * 3
    assert launch._prepare(-1, torch.bfloat16, CAUSAL, few, ((1024, 1024, 8, 1),) * 3)[0], "a plan for half of them"
