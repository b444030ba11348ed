"""The launch of a call, up to its kernels: what TMA reads as it lies, what is copied, plans and workspace."""

from functools import partial
from threading import get_ident

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


def recorded(calls, plan, *arguments):
    """A kernel that notes its arguments, after the check of addresses that every compiled kernel makes."""
    if any(isinstance(x, torch.Tensor) and x.dtype.itemsize == 2 and x.data_ptr() % 16 for x in arguments):
        raise ValueError("Misaligned Tensor data")
    calls.append((plan, *arguments))


@pytest.fixture
def launched(monkeypatch):
    """The launch with CPU tensors (device -1): a kernel that notes its plan and arguments, an H20, and stream 1."""
    calls = []
    monkeypatch.setattr(launch.cache, "load", lambda plan: partial(recorded, calls, plan))
    monkeypatch.setattr(launch, "sm_count", lambda device_index: 78)
    monkeypatch.setattr(launch, "_counters", {})
    monkeypatch.setattr(launch, "_zeros", lambda device_index: torch.zeros(2, dtype=torch.int32))
    monkeypatch.setattr(launch, "_synchronized_zeros", lambda device_index: torch.zeros(2, dtype=torch.int32))
    monkeypatch.setattr(launch, "_empty_lse", lambda device_index: torch.empty(0, 0, 0))
    # As strict as the one for CUDA: sizes and strides are tuples.
    monkeypatch.setattr(launch, "_empty_strided", torch._C._dynamo.guards._empty_strided_cpu)
    # Builds of torch without CUDA have none of these three.
    monkeypatch.setattr(torch._C, "_cuda_isCurrentStreamCapturing", lambda: False, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: -1, raising=False)
    use_stream(monkeypatch, 1)
    launch.forward_launch.cache_clear()
    yield calls
    launch.forward_launch.cache_clear()


def use_stream(monkeypatch, number: int):
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


def test_an_odd_address_is_copied_after_an_even_one(launched):
    """The same shapes and strides each time: only the address differs, which no launch may remember."""
    storage = torch.randn(2 * 5 * 4 * 64 + 1).to(torch.bfloat16)
    even, odd = (storage[i : i + 2 * 5 * 4 * 64].view(2, 5, 4, 64) for i in (0, 1))
    for q in (even, odd, even):
        call(q=q)
    first, copy, last = (arguments[1] for arguments in launched)
    assert first is even and last is even, "read as it lies"
    assert launch.is_tma_readable(copy) and torch.equal(copy, odd), "a copy of the same numbers"


def test_a_launch_is_for_one_shape_and_layout(launched):
    """Calls in turns: each has outputs and a plan of its own sizes, and copies what it must."""
    rows = aligned(2, 5, 4, 64)
    columns = torch.as_strided(aligned(4096), (2, 5, 4, 64), (1280, 256, 1, 4))
    for _ in range(2):
        for q in (rows, columns, aligned(2, 6, 4, 64), rows.half()):
            k, v = (aligned(*shape, dtype=q.dtype) for shape in ((2, 7, 2, 64), (2, 7, 2, 40)))
            *_, out, lse = call(q, k, v)
            assert (out.shape, out.dtype, lse.shape) == ((*q.shape[:3], 40), q.dtype, (2, 4, q.shape[1])), "of this call"
            plan, q_given, *_ = launched[-1]
            assert plan.dtype == str(q.dtype).removeprefix("torch."), "the kernel of this dtype"
            assert (q_given is q) == (q is not columns), "copied where columns lie apart"


def test_results_are_fresh_in_every_call(launched):
    results = [x for _ in range(3) for x in call()[3:]]
    assert len({x.data_ptr() for x in results}) == 6, "out and lse of each call"


def test_no_memory_for_an_lse_that_nobody_needs(launched):
    q, k, v = aligned(2, 5, 4, 64), aligned(2, 7, 2, 64), aligned(2, 7, 2, 40)
    shapes, strides = tuple(x.shape for x in (q, k, v)), tuple(x.stride() for x in (q, k, v))
    launch_one = launch.forward_launch(-1, q.dtype, CAUSAL, shapes, strides)
    for needs_lse, lse_shape in ((True, (2, 4, 5)), (False, (0, 0, 0)), (True, (2, 4, 5))):
        out, lse = launch_one(q, k, v, 0.3, needs_lse)
        _, *_, out_given, lse_given, _, _, _ = launched[-1]
        assert out_given is out and out.shape == (2, 5, 4, 40), "out is the same in both"
        assert lse_given is lse and lse.shape == lse_shape, f"needs_lse {needs_lse}"


def test_strides_of_results_are_those_of_torch(launched):
    for shape in ((2, 5, 4, 64), (1, 1, 1, 8), (0, 5, 4, 64), (2, 0, 4, 64)):
        *_, out, lse = call(aligned(*shape), aligned(shape[0], 7, 1, shape[3]), aligned(shape[0], 7, 1, 24))
        assert out.stride() == torch.empty(*shape[:3], 24).stride(), f"out of {shape}"
        assert lse.stride() == torch.empty(shape[0], shape[2], shape[1]).stride(), f"lse of {shape}"


def test_a_kernel_is_looked_up_once(launched, monkeypatch):
    plans, load = [], launch.cache.load
    monkeypatch.setattr(launch.cache, "load", lambda plan: plans.append(plan) or load(plan))
    call(), call()
    assert (len(plans), len(launched)) == (1, 2), "two launches of it"


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


def watch_devices(monkeypatch):
    """(stack of current devices, which begins with 1; a copy of it for each kernel that was launched)."""
    current, seen = [1], []

    class Device:
        def __init__(self, index):
            self.index = index

        def __enter__(self):
            current.append(self.index)

        def __exit__(self, *_error):
            current.pop()

    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: current[-1], raising=False)
    monkeypatch.setattr(torch.cuda, "device", Device)
    monkeypatch.setattr(launch.cache, "load", lambda plan: lambda *arguments: seen.append(list(current)))
    return current, seen


def test_the_device_of_the_tensors_is_made_current(launched, monkeypatch):
    current, seen = watch_devices(monkeypatch)
    call()
    assert seen == [[1, -1]] and current == [1], "during the launch alone, and the launch happens once"


def test_launches_of_one_stream_share_a_counter(launched, monkeypatch):
    call(), call()
    use_stream(monkeypatch, 2)
    call()
    first, second, other = (arguments[6] for arguments in launched)
    assert second is first, "launches of a stream follow each other"
    assert other.data_ptr() != first.data_ptr(), "those of another stream may run beside them"


def test_a_counter_that_stays_is_of_another_thread(launched, monkeypatch):
    """Else it could be of a pool that the caller's thread allocates from, and be taken back with that."""
    threads, make = [], launch._synchronized_zeros
    monkeypatch.setattr(launch, "_synchronized_zeros", lambda index: threads.append(get_ident()) or make(index))
    call(), call()
    assert len(threads) == 1 and threads[0] != get_ident(), "made once, elsewhere"


def test_every_launch_of_a_graph_has_a_counter(launched, monkeypatch):
    call()
    monkeypatch.setattr(torch._C, "_cuda_isCurrentStreamCapturing", lambda: True)
    call(), call()
    assert len({arguments[6].data_ptr() for arguments in launched}) == 3, "three launches, three counters"


def test_more_tiles_than_32_bits_number(launched):
    shapes = (2**24, 1, 128, 8), (2**24, 1, 128, 8), (2**24, 1, 128, 8)
    with pytest.raises(NotSupportedError, match="q: expected at most 2147418112 tiles of 128 queries of one head, got shape"):
        launch.forward_launch(-1, torch.bfloat16, CAUSAL, shapes, ((1024, 1024, 8, 1),) * 3)
    few = ((2**23, 1, 128, 8),) * 3
    assert launch.forward_launch(-1, torch.bfloat16, CAUSAL, few, ((1024, 1024, 8, 1),) * 3), "half of them are launched"


ALL = (True, True, True)
SUBSETS = {name: tuple(x in name for x in ("dq", "dk", "dv")) for name in ("dq", "dk", "dv", "dk-dv")}


@pytest.fixture
def launched_backward(launched):
    launch._backward_launch.cache_clear()
    yield launched
    launch._backward_launch.cache_clear()


def backward_tensors(seqlen_q=130, seqlen_k=7, head_dim=64, dtype=torch.bfloat16, **given):
    """Inputs, results and gradients of a call, by name: 4 query heads, 2 key heads, head_dim_v 40."""
    shapes = {"q": (2, seqlen_q, 4, head_dim), "k": (2, seqlen_k, 2, head_dim), "v": (2, seqlen_k, 2, 40)}
    shapes |= {"dout": (2, seqlen_q, 4, 40), "out": (2, seqlen_q, 4, 40)}
    generator = torch.Generator().manual_seed(0)
    x = {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes.items()}
    return x | {"lse": torch.randn(2, 4, seqlen_q, generator=generator), "dlse": None} | given


def call_backward(tensors, mask=CAUSAL, is_deterministic=False, needs=ALL):
    groups = ("q", "k", "v"), ("out", "lse"), ("dout", "dlse")
    groups = [tuple(tensors[name] for name in names) for names in groups]
    return launch.backward(*groups, 0.3, mask, is_deterministic, needs)


def facts(x):
    return tuple(x.shape), x.dtype, x.is_contiguous()


def test_arguments_of_three_kernels(launched_backward):
    """130 queries are two blocks of 128."""
    x = backward_tensors()
    gradients = call_backward(x)
    (before, *first), (plan, *second), (after, *third) = launched_backward
    assert (before.dtype, before.head_dim_v) == ("bfloat16", 64), "of out and dout"
    assert (plan.dtype, plan.is_causal, plan.is_deterministic) == ("bfloat16", True, False), "the plan of this call"
    assert (plan.tile.head_dim, plan.tile.head_dim_v, plan.tile.tile_m) == (64, 64, 128), "tiles of this call"
    assert (after.dtype, after.tile) == ("bfloat16", plan.tile.dq), "dq of the main kernel"
    out, dout, lse, dlse, has_dlse, statistics, (accumulator, counters) = first
    assert out is x["out"] and dout is x["dout"] and lse is x["lse"] and dlse is lse, "the tensors; any for no dlse"
    assert has_dlse == 0 and isinstance(has_dlse, int), "it is not read"
    assert facts(statistics) == ((2 * 4 * 2, 2, 128), torch.float32, True), "LSE and delta of whole blocks of queries"
    assert facts(accumulator) == ((2 * 4 * 2, 128 * 64), torch.float32, True), "blocks of all heads and batches"
    assert facts(counters) == ((1 + 2 * 4 + 2 * 78,), torch.int32, True), "of tiles, of heads, of converters"
    (q, k, v), dout, same_statistics, same_accumulator, same_counters, (dq, dk, dv), scale, num_sms = second
    assert q is x["q"] and k is x["k"] and v is x["v"] and dout is x["dout"], "the tensors themselves"
    assert same_statistics is statistics, "what the first kernel writes"
    assert same_accumulator is accumulator and same_counters is counters, "what it clears"
    assert (scale, num_sms) == (0.3, 78), "scale of the call, and the device's SMs"
    same_accumulator, same_counters, same_dq, scale, num_ctas = third
    assert same_accumulator is accumulator and same_counters is counters, "what the second kernel leaves"
    assert same_dq is dq and (scale, num_ctas) == (0.3, 78), "each writes a part of dq"
    for found, written, name in zip(gradients, (dq, dk, dv), "qkv"):
        assert found is written, f"d{name} is what a kernel writes"
        assert facts(found) == (tuple(x[name].shape), torch.bfloat16, True), f"d{name} is like {name}"


@pytest.mark.parametrize(
    "head_dim, seqlen_q, block, num_blocks",
    [(64, 128, 128, 1), (64, 129, 128, 2), (128, 129, 64, 3), (256, 1, 64, 1), (72, 64, 64, 1)],
    ids=["d64-s128", "d64-s129", "d128-s129", "d256-s1", "d72-s64"],
)
def test_workspace_has_whole_blocks(launched_backward, head_dim, seqlen_q, block, num_blocks):
    call_backward(backward_tensors(seqlen_q, head_dim=head_dim), is_deterministic=True)
    _, (_, _, _, statistics, accumulator, counters, *_), _ = launched_backward
    compiled = {64: 64, 72: 96, 128: 128, 256: 256}[head_dim]
    num_blocks *= 2 * 4
    assert statistics.shape == (num_blocks, 2, block), "padded rows"
    assert accumulator.shape == (num_blocks, block * compiled), "padded rows and columns"
    assert counters.shape == (1 + 2 * 4 + 2 * 78 + num_blocks,), "and how many have added to each block"
    assert counters.dtype == torch.int32, "counts"


def test_two_calls_share_no_workspace(launched_backward):
    x = backward_tensors()
    call_backward(x, is_deterministic=True), call_backward(x, is_deterministic=True)
    (_, one, _), (_, other, _) = launched_backward[:3], launched_backward[3:]
    assert one[0] == other[0], "one plan"
    for i, name in ((3, "statistics"), (4, "accumulator"), (5, "counters")):
        assert one[i].data_ptr() != other[i].data_ptr(), f"{name}: nothing is cleared behind a launch"


@pytest.mark.parametrize("needs", SUBSETS.values(), ids=SUBSETS)
def test_gradients_that_nobody_needs(launched_backward, needs):
    x = backward_tensors()
    gradients = call_backward(x, is_deterministic=True, needs=needs)
    assert tuple(gradient is not None for gradient in gradients) == needs, "None where there is none"
    (before, *_, zeros), (plan, *_, accumulator, counters, written, _, _), *after = launched_backward
    assert (plan.needs_dq, plan.needs_dk, plan.needs_dv) == needs and before.needs_dq == needs[0], "plans of this call"
    assert tuple(x is not None for x in written) == needs, "what the main kernel writes"
    assert (accumulator is not None, len(after)) == (needs[0], needs[0]), "for dq alone"
    assert zeros[0] is accumulator and zeros[1] is counters, "what is cleared"


UNREADABLE_DOUT = {
    "expanded-columns": torch.randn(2, 130, 4, 1).bfloat16().expand(-1, -1, -1, 40),
    "one-number": torch.ones((), dtype=torch.bfloat16).expand(2, 130, 4, 40),
    "one-column-on": torch.randn(2, 130, 4, 48).bfloat16()[..., 1:41],
    "columns-outside": torch.randn(40, 2, 130, 4).bfloat16().permute(1, 2, 3, 0),
}


@pytest.mark.parametrize("dout", UNREADABLE_DOUT.values(), ids=UNREADABLE_DOUT)
def test_dout_that_tma_does_not_read_is_copied(launched_backward, dout):
    """The gradient of a sum is one number, expanded; both kernels that read dout get one copy."""
    call_backward(backward_tensors(dout=dout))
    (_, _, first, *_), (_, _, second, *_), _ = launched_backward
    assert launch.is_tma_readable(first) and first.is_contiguous() and torch.equal(first, dout), "the same numbers"
    assert second is first, "copied once"


@pytest.mark.parametrize("name", ["q", "k", "v", "out"])
def test_other_tensors_that_tma_does_not_read_are_copied(launched_backward, name):
    whole = backward_tensors()[name]
    odd = torch.nn.functional.pad(whole, (1, 7))[..., 1 : whole.shape[3] + 1]
    gradients = call_backward(backward_tensors(**{name: odd}))
    (_, out, *_), (_, (q, k, v), *_), _ = launched_backward
    copy = {"q": q, "k": k, "v": v, "out": out}[name]
    assert not launch.is_tma_readable(odd) and launch.is_tma_readable(copy), "as TMA reads it"
    assert torch.equal(copy, whole), "the same numbers"
    for gradient in gradients:
        assert launch.is_tma_readable(gradient) and gradient.is_contiguous(), "written, not given"


def test_readable_tensors_stay_where_they_lie(launched_backward):
    qkv = torch.randn(2, 130, 3, 4, 64).bfloat16()
    dout, k_given = (torch.randn(shape).bfloat16().transpose(1, 2) for shape in ((2, 4, 130, 40), (2, 2, 7, 64)))
    dq, dk, _ = call_backward(backward_tensors(dout=dout, q=qkv[:, :, 0], k=k_given))
    (_, _, first, *_), (_, (q, k, _), second, *_), _ = launched_backward
    assert q.data_ptr() == qkv.data_ptr() and q.stride() == qkv[:, :, 0].stride(), "packed"
    assert first is dout and second is dout and k is k_given, "heads before rows"
    assert facts(dq) == ((2, 130, 4, 64), torch.bfloat16, True), "not packed"
    assert facts(dk) == ((2, 7, 2, 64), torch.bfloat16, True), "rows before heads"


@pytest.mark.parametrize("is_strided", [False, True], ids=["contiguous", "strided"])
def test_gradient_of_lse_goes_to_the_first_kernel(launched_backward, is_strided):
    dlse = torch.randn(2, 130, 4).transpose(1, 2) if is_strided else torch.randn(2, 4, 130)
    call_backward(backward_tensors(dlse=dlse))
    (_, _, _, _, given, has_dlse, *_), *_ = launched_backward
    assert given is dlse and has_dlse == 1, "of any strides"


EMPTY = {
    "no-keys": {"seqlen_k": 0},
    "no-queries": {"seqlen_q": 0},
    "no-columns": {"v": aligned(2, 7, 2, 0), "out": aligned(2, 130, 4, 0), "dout": aligned(2, 130, 4, 0)},
    "no-sequences": {
        **{name: aligned(0, 130, 4, dim) for name, dim in (("q", 64), ("out", 40), ("dout", 40))},
        **{name: aligned(0, 7, 2, dim) for name, dim in (("k", 64), ("v", 40))},
    },
}


@pytest.mark.parametrize("needs", [ALL, *SUBSETS.values()], ids=["all", *SUBSETS])
@pytest.mark.parametrize("given", EMPTY.values(), ids=EMPTY)
def test_nothing_to_compute_gives_zeros(launched_backward, given, needs):
    x = backward_tensors(**given)
    gradients = call_backward(x, needs=needs)
    assert launched_backward == [], "TMA has no tensor to read"
    for gradient, name, needed in zip(gradients, "qkv", needs):
        assert (gradient is not None) == needed, f"d{name}"
        if needed:
            assert facts(gradient) == (tuple(x[name].shape), torch.bfloat16, True), f"d{name} is like {name}"
            assert not gradient.any(), f"d{name}: pairs that are not there give nothing"


def test_backward_makes_the_device_of_the_tensors_current(launched_backward, monkeypatch):
    current, seen = watch_devices(monkeypatch)
    call_backward(backward_tensors())
    assert seen == [[1, -1]] * 3 and current == [1], "during the three launches alone"
