"""One call on a Hopper GPU from end to end: strides, streams, graphs, threads, devices, torch.compile, autocast."""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

import cute_fa
from cute_fa.ops.attention import Call
from cute_fa.testing.inputs import LAYOUTS

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

BF16 = torch.bfloat16
attention = cute_fa.flash_attn_func


def qkv(batch=2, seqlen=300, heads=4, head_dim=64, dtype=BF16, device="cuda", seed=0):
    generator = torch.Generator(device).manual_seed(seed)
    shape = (batch, seqlen, heads, head_dim)
    return [torch.randn(shape, generator=generator, device=device).to(dtype) for _ in range(3)]


COPIED = {"3-columns-apart", "dim-outside", "misaligned"}


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(layout, causal):
    """The same bits for every layout; only those that TMA cannot read are copied."""
    q, k, v = qkv()
    expected = attention(q, k, v, causal=causal)
    laid = [LAYOUTS[layout](x) for x in (q, k, v)]
    assert all(torch.equal(a, b) for a, b in zip(laid, (q, k, v))), "the same numbers"
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    out = attention(*laid, causal=causal)
    allocations = torch.cuda.memory_stats()["allocation.all.allocated"] - before
    assert torch.equal(out, expected), "bitwise equal"
    assert allocations == 1 + 3 * (layout in COPIED), "out and copies"


def test_known_calls_in_turns():
    """Calls with one key but another address, and with other keys: each is its own, in memory of its own."""
    x = torch.randn(2 * 300 * 4 * 64 + 1, device="cuda", dtype=torch.bfloat16)
    even, odd = (x[i : i + 2 * 300 * 4 * 64].view(2, 300, 4, 64) for i in (0, 1))
    calls = [(even, False), (odd, False), (even, True), (even[:, :200], False), (even.transpose(0, 1), False)]
    wanted = [attention(x.clone(memory_format=torch.contiguous_format), *[x.contiguous()] * 2, causal=c) for x, c in calls]
    found = [attention(x, x, x, causal=c, return_lse=True) for _ in range(2) for x, c in calls]
    for (out, _), expected in zip(found, wanted * 2, strict=True):
        assert torch.equal(out, expected), "bitwise equal"
    assert len({x.data_ptr() for results in found for x in results}) == 20, "out and lse of ten calls"


def test_expanded_keys():
    """Stride 0: one head for all, one batch for all."""
    q, k, v = qkv()
    k, v = (x[:1, :, :1].expand(2, 300, 4, 64) for x in (k, v))
    assert torch.equal(attention(q, k, v), attention(q, k.contiguous(), v.contiguous())), "bitwise equal"


def test_packed_views():
    qkv_packed = torch.randn(2, 300, 3, 4, 64, device="cuda", dtype=BF16)
    out = cute_fa.flash_attn_qkvpacked_func(qkv_packed, causal=True)
    assert torch.equal(out, attention(*(x.contiguous() for x in qkv_packed.unbind(2)), causal=True)), "bitwise equal"
    kv = qkv_packed[:, :, 1:]
    out = cute_fa.flash_attn_kvpacked_func(qkv_packed[:, :, 0], kv, causal=True)
    assert torch.equal(out, cute_fa.flash_attn_qkvpacked_func(qkv_packed, causal=True)), "bitwise equal"


def test_inputs_written_late_on_another_stream():
    """The launch goes to the current stream, behind what is in flight there."""
    q, k, v = qkv(seqlen=1024, heads=8)
    expected = attention(q, k, v)
    stream = torch.cuda.Stream()
    for _ in range(50):
        late = torch.zeros_like(q)
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(1_000_000)
            late.copy_(q)
            out = attention(late, k, v)
        stream.synchronize()
        assert torch.equal(out, expected), "bitwise equal"


def test_streams_side_by_side():
    """Calls in flight on several streams at once do not take each other's tiles."""
    inputs = [qkv(batch=1, seqlen=500 + 64 * i, heads=8, seed=i) for i in range(4)]
    expected = [attention(*x, causal=True) for x in inputs]
    streams = [torch.cuda.Stream() for _ in inputs]
    torch.cuda.synchronize()
    for _ in range(50):
        outs = []
        for stream, x in zip(streams, inputs):
            with torch.cuda.stream(stream):
                outs.append(attention(*x, causal=True))
        torch.cuda.synchronize()
        assert all(torch.equal(a, b) for a, b in zip(outs, expected)), "bitwise equal"


def test_cuda_graph():
    """Replays read what the inputs hold then; a graph beside eager calls on the stream it was captured on."""
    q, k, v = qkv(seqlen=700)
    attention(q, k, v, causal=True)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attention(q, k, v, causal=True)
        twice = attention(out, k, v)
    for seed in range(5):
        fresh = qkv(seqlen=700, seed=seed)
        for buffer, x in zip((q, k, v), fresh):
            buffer.copy_(x)
        graph.replay()
        beside = [attention(*fresh, causal=True) for _ in range(3)]
        torch.cuda.synchronize()
        assert all(torch.equal(out, x) for x in beside), "bitwise equal"
        assert torch.equal(twice, attention(beside[0], fresh[1], fresh[2])), "the second call of the graph"


def test_graphs_replayed_side_by_side():
    inputs = [qkv(batch=1, seqlen=900, heads=8, seed=i) for i in range(2)]
    expected = [attention(*x, causal=True) for x in inputs]
    graphs, outs = [], []
    for x in inputs:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            outs.append(attention(*x, causal=True))
        graphs.append(graph)
    streams = [torch.cuda.Stream() for _ in graphs]
    for _ in range(50):
        for out in outs:
            out.zero_()
        torch.cuda.synchronize()
        for graph, stream in zip(graphs, streams):
            with torch.cuda.stream(stream):
                graph.replay()
        torch.cuda.synchronize()
        assert all(torch.equal(a, b) for a, b in zip(outs, expected)), "bitwise equal"


def test_threads():
    """Eight threads call at once, each on a stream of its own."""
    inputs = [qkv(head_dim=(32, 64, 128)[i % 3], seed=i) for i in range(8)]
    expected = [attention(*x) for x in inputs]
    torch.cuda.synchronize()

    def work(x):
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(30):
                out = attention(*x)
            torch.cuda.current_stream().synchronize()
        return out

    with ThreadPoolExecutor(8) as pool:
        outs = list(pool.map(work, inputs))
    assert all(torch.equal(a, b) for a, b in zip(outs, expected)), "bitwise equal"


FIRST_CALLS = """
import threading, torch, cute_fa
inputs = [torch.randn(1, 100, 2, d, device="cuda", dtype=torch.bfloat16) for d in (64, 80, 128, 192) for _ in range(2)]
outs, barrier = [None] * 8, threading.Barrier(8)
def first(i):
    barrier.wait()
    outs[i] = cute_fa.flash_attn_func(inputs[i], inputs[i], inputs[i])
threads = [threading.Thread(target=first, args=(i,)) for i in range(8)]
[t.start() for t in threads]; [t.join() for t in threads]
for x, out in zip(inputs, outs):
    y = x.transpose(1, 2)
    plain = torch.nn.functional.scaled_dot_product_attention(y, y, y).transpose(1, 2)
    assert (out - plain).abs().max() < 0.05, x.shape
print("eight first calls")
"""


def run_python(code, tmp_path):
    root = Path(cute_fa.__file__).parent.parent
    environment = os.environ | {"CUTE_FA_CACHE_DIR": str(tmp_path / "cache")}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)  # as in an installed package, whose sources are not parsed again
    return subprocess.run([sys.executable, "-c", code], cwd=root, env=environment, capture_output=True, text=True)


def test_eight_threads_with_eight_first_calls(tmp_path):
    done = run_python(FIRST_CALLS, tmp_path)
    assert done.stdout.strip() == "eight first calls", done.stderr[-2000:]


FIRST_CALL = """
import time, torch
begin = time.perf_counter()
import cute_fa
x = torch.randn(1, 100, 2, 64, device="cuda", dtype=torch.bfloat16)
cute_fa.flash_attn_func(x, x, x)
torch.cuda.synchronize()
print(time.perf_counter() - begin)
"""


def test_second_process_starts_fast(tmp_path):
    """A warm disk cache: from `import torch` to the first result in under a second, CUDA's own start included."""
    cold = run_python(FIRST_CALL, tmp_path)
    warm = [run_python(FIRST_CALL, tmp_path) for _ in range(3)]  # other tests run beside this one, so the best of three
    assert all(done.returncode == 0 for done in (cold, *warm)), cold.stderr[-2000:] + warm[0].stderr[-2000:]
    seconds = [float(done.stdout) for done in warm]
    assert min(seconds) < 1, f"first process {cold.stdout.strip()} s, later ones {seconds} s"


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_tensors_of_another_device():
    q, k, v = qkv(device="cuda:1")
    with torch.cuda.device(0):
        out, lse = attention(q, k, v, causal=True, return_lse=True)
        assert torch.cuda.current_device() == 0, "the current device is as before"
    assert out.device == lse.device == torch.device("cuda:1"), "where the inputs are"
    expected = attention(*(x.to("cuda:0") for x in (q, k, v)), causal=True)
    assert torch.equal(out.cpu(), expected.cpu()), "bitwise equal"


def test_autocast():
    q, k, v = qkv(dtype=torch.float32)
    with torch.autocast("cuda", dtype=torch.float16):
        out = attention(q, k, v)
    assert torch.equal(out, attention(q.half(), k.half(), v.half())), "cast as autocast says"
    with pytest.raises((TypeError, ValueError), match="q: expected"):
        attention(q, k, v)


def test_compiled_call_with_dynamic_lengths():
    compiled = torch.compile(lambda q, k, v: attention(q, k, v, causal=True, return_lse=True), fullgraph=True, dynamic=True)
    for seqlen in (100, 256, 300):
        inputs = qkv(seqlen=seqlen)
        found, expected = compiled(*inputs), attention(*inputs, causal=True, return_lse=True)
        assert all(torch.equal(a, b) for a, b in zip(found, expected)), "bitwise equal"


def test_compiled_calls_in_cuda_graphs():
    """torch keeps count of what lies in the memory of its graphs; the first launch on their stream adds nothing to it."""

    def chain(q, k, v):
        for _ in range(3):
            q = attention(q, k, v, causal=True)
        return q

    compiled = torch.compile(chain, fullgraph=True, mode="reduce-overhead")
    for _ in range(5):  # warmed up, recorded, replayed
        inputs = qkv(seqlen=200)
        with torch.no_grad():
            found, wanted = compiled(*inputs).clone(), chain(*inputs)
        assert torch.equal(found, wanted), "without gradients"
        leaves = [x.requires_grad_() for x in inputs]
        dout = torch.randn_like(wanted)
        torch.compiler.cudagraph_mark_step_begin()
        found, wanted = (torch.autograd.grad(function(*leaves), leaves, dout) for function in (compiled, chain))
        assert all(map(torch.allclose, found, wanted, [1e-2] * 3, [1e-2] * 3)), "gradients"
    torch.compiler.reset()  # the graphs keep memory, which other tests count


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_out_alone(causal):
    """Without memory for lse, eager and in a CUDA graph."""
    q, k, v = qkv(seqlen=200)
    wanted, _ = attention(q, k, v, causal=causal, return_lse=True)
    assert torch.equal(attention(q, k, v, causal=causal), wanted), "eager"
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attention(q, k, v, causal=causal)
    graph.replay()
    assert torch.equal(out, wanted), "replayed"


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_opcheck(causal):
    call = Call(*(None,) * 8, 0, 0, 0.125, None, 0 if causal else None, 0, 0.0, 0.0, False, False)
    torch.library.opcheck(torch.ops.cute_fa.attention_forward, (*qkv(), *call))
    torch.library.opcheck(torch.ops.cute_fa.attention_plain, (*qkv(), *call.plain))


def test_against_the_reference_backend():
    """The same call on the CPU."""
    q, k, v = qkv(seqlen=200)
    out, lse = attention(q, k, v, causal=True, return_lse=True)
    cpu_out, cpu_lse = attention(q.cpu(), k.cpu(), v.cpu(), causal=True, return_lse=True)
    assert (out.cpu() - cpu_out).abs().max() < 2e-2 and (lse.cpu() - cpu_lse).abs().max() < 1e-3, "same results"
