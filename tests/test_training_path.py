"""Training on a Hopper GPU from end to end: strides of dout, streams, graphs, torch.compile, memory, commands."""

import copy
import gc
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import cute_fa
from cute_fa.core.errors import NotSupportedError
from cute_fa.ops.attention import BackwardCall, Call
from cute_fa.testing.inputs import LAYOUTS

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

BF16 = torch.bfloat16
attention = partial(cute_fa.flash_attn_func, causal=True, deterministic=True)
by_mask = pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])


def qkv(batch=2, seqlen=300, heads=4, head_dim=64, dtype=BF16, device="cuda", seed=0):
    """Leaves that need gradients, and dout."""
    generator = torch.Generator(device).manual_seed(seed)
    shape = (batch, seqlen, heads, head_dim)
    *leaves, dout = (torch.randn(shape, generator=generator, device=device).to(dtype) for _ in range(4))
    return [x.requires_grad_() for x in leaves], dout


def step(leaves, dout, call=attention):
    """out, dq, dk, dv."""
    out = call(*leaves)
    return (out.detach(), *torch.autograd.grad(out, leaves, dout))


def are_equal(found, wanted):
    """Bitwise, tensor by tensor."""
    return all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


def are_close(found, wanted):
    """Within 2% of the largest number of each tensor."""
    return all((a - b).abs().max() <= 0.02 * b.abs().max() for a, b in zip(found, wanted, strict=True))


EXPANDED = {
    "one-number": lambda x: x[:1, :1, :1, :1].expand_as(x),
    "one-batch": lambda x: x[:1].expand_as(x),
    "one-row": lambda x: x[:, :1].expand_as(x),
    "one-head": lambda x: x[:, :, :1].expand_as(x),
    "one-number-a-row": lambda x: x[..., :1].expand_as(x),
}


@pytest.mark.parametrize("layout", [*LAYOUTS, *EXPANDED])
def test_layouts_of_dout(layout):
    leaves, dout = qkv()
    laid = (LAYOUTS | EXPANDED)[layout](dout)
    assert not laid.is_contiguous() or laid.data_ptr() % 16, "another layout"
    wanted = step(leaves, laid.clone(memory_format=torch.contiguous_format))
    assert are_equal(step(leaves, laid), wanted), "bitwise equal"


def test_dout_of_a_sum():
    leaves, dout = qkv()
    attention(*leaves).sum().backward()
    _, *wanted = step(leaves, torch.ones_like(dout))
    assert are_equal([x.grad for x in leaves], wanted), "bitwise equal"


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_of_inputs(layout):
    """q, k and v as they lie; each gradient has the shape of its input."""
    leaves, dout = qkv()
    laid = [LAYOUTS[layout](x.detach()).requires_grad_() for x in leaves]
    assert are_equal(step(laid, dout), step(leaves, dout)), "bitwise equal"


def test_expanded_keys():
    """Gradients of what was expanded are sums."""
    leaves, dout = qkv()
    q, k, v = (x.detach() for x in leaves)
    small = [x[:, :, :1].clone().requires_grad_() for x in (k, v)]
    out = attention(q, *(x.expand_as(q) for x in small))
    found = torch.autograd.grad(out, small, dout)
    copies = [x.detach().expand_as(q).contiguous().requires_grad_() for x in small]
    _, _, *wanted = step([q.requires_grad_(), *copies], dout)
    assert are_close(found, [x.float().sum(dim=2, keepdim=True) for x in wanted]), "sums over heads"


def test_packed_views():
    """The gradient of a packed tensor holds those of its parts."""
    leaves, dout = qkv()
    packed = torch.stack([x.detach() for x in leaves], dim=2).requires_grad_()
    cute_fa.flash_attn_qkvpacked_func(packed, causal=True, deterministic=True).backward(dout)
    assert are_equal(packed.grad.unbind(2), step(leaves, dout)[1:]), "bitwise equal"


def test_compiled_with_dynamic_lengths():
    call = partial(attention, return_lse=True)
    compiled = torch.compile(lambda q, k, v: call(q, k, v), fullgraph=True, dynamic=True)
    for seqlen in (100, 256, 300):
        leaves, dout = qkv(seqlen=seqlen)
        dlse = dout[..., 0].transpose(1, 2).float()
        found, wanted = (torch.autograd.grad(f(*leaves), leaves, (dout, dlse)) for f in (compiled, call))
        assert are_equal(found, wanted), f"bitwise equal at seqlen {seqlen}"


class Block(torch.nn.Module):
    """Projections in fp32 and attention in bf16, two heads of 64."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.qkv, self.out = (torch.nn.Linear(128, width, device="cuda") for width in (384, 128))

    def forward(self, x):
        q, k, v = self.qkv(x).to(BF16).unflatten(-1, (3, 2, 64)).unbind(2)
        return x + self.out(attention(q, k, v).flatten(-2).float())


def train_step(block, optimizer, x):
    """One update; returns the loss before it."""
    loss = block(x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def sgd(block):
    return torch.optim.SGD(block.parameters(), lr=1.0)


def batches(count):
    generator = torch.Generator("cuda").manual_seed(1)
    return [torch.randn(2, 200, 128, generator=generator, device="cuda") for _ in range(count)]


def moves(block, begin):
    """How far each parameter is from where it began."""
    return [(x - y).detach() for x, y in zip(block.parameters(), begin.parameters())]


def test_compiled_block_trains():
    begin = Block()
    blocks = [copy.deepcopy(begin) for _ in range(2)]
    compiled = torch.compile(blocks[0], fullgraph=True)
    [x] = batches(1)
    losses = [train_step(call, sgd(block), x) for call, block in zip((compiled, blocks[1]), blocks)]
    found, wanted = (moves(block, begin) for block in blocks)
    assert torch.allclose(*losses, rtol=1e-4), f"losses {losses}"
    assert all(x.any() for x in wanted) and are_close(found, wanted), "the same update"


def test_exported_module():
    """Forward and gradients of the parameters, at a length that was not exported."""
    block, seqlen = Block(), torch.export.Dim("seqlen", min=2, max=4096)
    short, x = torch.randn(2, 50, 128, device="cuda"), batches(1)[0]
    exported = torch.export.export(block, (short,), dynamic_shapes={"x": {1: seqlen}}).module()
    results = []
    for module in (exported, block):
        out = module(x)
        results.append((out.detach(), *torch.autograd.grad(out.square().mean(), list(module.parameters()))))
    by_shape = [sorted(result, key=lambda x: tuple(x.shape)) for result in results]
    assert are_close(*by_shape), "exported and eager differ"


@pytest.mark.parametrize("use_reentrant", [False, True], ids=["hooks", "reentrant"])
def test_activation_checkpointing(use_reentrant):
    leaves, dout = qkv()
    found = [x.detach().clone().requires_grad_() for x in leaves]
    checkpoint(attention, *found, use_reentrant=use_reentrant).backward(dout)
    assert are_equal([x.grad for x in found], step(leaves, dout)[1:]), "bitwise equal"


def test_cuda_graph_of_a_whole_step():
    """Forward, loss, backward and update in one graph, which replays follow the eager run of the same steps."""
    begin, (x, *fresh) = Block(), batches(5)
    eager, captured = copy.deepcopy(begin), copy.deepcopy(begin)
    optimizer = sgd(captured)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            train_step(captured, optimizer, x)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = train_step(captured, optimizer, x)
    captured.load_state_dict(begin.state_dict())
    for number, batch in enumerate(fresh):
        x.copy_(batch)
        graph.replay()
        wanted = train_step(eager, sgd(eager), batch)
        assert torch.allclose(loss, wanted, rtol=1e-4), f"loss of step {number}"
    assert are_close(moves(captured, begin), moves(eager, begin)), "the same parameters"


def test_cuda_graph_of_gradients():
    """Bitwise, with q, k, v and dout new in each replay, and eager calls beside it."""
    leaves, dout = qkv(seqlen=700)
    step(leaves, dout)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step(leaves, dout)
    for seed in range(5):
        fresh, fresh_dout = qkv(seqlen=700, seed=seed)
        with torch.no_grad():
            for buffer, x in zip((*leaves, dout), (*fresh, fresh_dout)):
                buffer.copy_(x)
        graph.replay()
        assert are_equal(found, step(fresh, fresh_dout)), "bitwise equal"


def test_inputs_written_late_on_a_side_stream():
    """Forward and backward go to the current stream, behind what is in flight there."""
    leaves, dout = qkv(seqlen=1000, heads=8)
    wanted, stream = step(leaves, dout), torch.cuda.Stream()
    for _ in range(50):
        late = [torch.full_like(x, torch.nan, requires_grad=x.requires_grad) for x in (*leaves, dout)]
        torch.cuda.synchronize()
        with torch.cuda.stream(stream), torch.no_grad():
            torch.cuda._sleep(1_000_000)
            for buffer, x in zip(late, (*leaves, dout)):
                buffer.copy_(x)
            with torch.enable_grad():
                found = step(late[:3], late[3])
        stream.synchronize()
        assert are_equal(found, wanted), "bitwise equal"


def test_streams_side_by_side():
    inputs = [qkv(batch=1, seqlen=500 + 64 * i, heads=8, seed=i) for i in range(2)]
    wanted, streams = [step(*x) for x in inputs], [torch.cuda.Stream() for _ in inputs]
    torch.cuda.synchronize()
    for _ in range(50):
        found = []
        for stream, x in zip(streams, inputs):
            with torch.cuda.stream(stream):
                found.append(step(*x))
        torch.cuda.synchronize()
        assert all(are_equal(*pair) for pair in zip(found, wanted)), "bitwise equal"


def test_threads():
    """Four threads train at once, each on a stream of its own."""
    inputs = [qkv(head_dim=(32, 64, 128, 256)[i], seed=i) for i in range(4)]
    wanted = [step(*x) for x in inputs]
    torch.cuda.synchronize()

    def work(x):
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(30):
                found = step(*x)
            torch.cuda.current_stream().synchronize()
        return found

    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(work, inputs))
    assert all(are_equal(*pair) for pair in zip(found, wanted)), "bitwise equal"


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_tensors_of_another_device():
    leaves, dout = qkv(device="cuda:1")
    with torch.cuda.device(0):
        found = step(leaves, dout)
        assert torch.cuda.current_device() == 0, "the current device is as before"
    assert all(x.device == dout.device for x in found), "where the inputs are"
    there = [x.detach().to("cuda:0").requires_grad_() for x in leaves]
    assert are_equal([x.to("cuda:0") for x in found], step(there, dout.to("cuda:0"))), "bitwise equal"


def test_function_transforms():
    """torch.func's gradients are autograd's, bit for bit where the order of sums is fixed."""
    leaves, dout = qkv(seqlen=200)
    call = partial(attention, causal=True, deterministic=True)
    wanted = torch.autograd.grad(call(*leaves), leaves, dout)
    inputs = [x.detach() for x in leaves]
    _, pullback = torch.func.vjp(call, *inputs)
    assert are_equal(pullback(dout), wanted), "vjp"
    of_two = torch.func.vmap(call, in_dims=(0, None, None))(torch.stack((inputs[0], -inputs[0])), *inputs[1:])
    assert are_equal(of_two, [call(x, *inputs[1:]) for x in (inputs[0], -inputs[0])]), "vmap"


def test_autocast():
    """fp32 leaves get fp32 gradients, those of the call in the dtype of autocast."""
    leaves, dout = qkv(dtype=torch.float32)
    with torch.autocast("cuda", dtype=BF16):
        found = step(leaves, dout.to(BF16))
    wanted = step([x.detach().to(BF16).requires_grad_() for x in leaves], dout.to(BF16))
    assert found[0].dtype == BF16 and all(x.dtype == torch.float32 for x in found[1:]), "dtypes"
    assert are_equal(found[1:], [x.float() for x in wanted[1:]]), "bitwise equal"


def test_double_backward_is_refused():
    leaves, dout = qkv()
    for found in attention(*leaves, return_lse=True):
        [dq] = torch.autograd.grad(found.float().square().sum(), leaves[0], create_graph=True)
        with pytest.raises(NotSupportedError, match="expected a first derivative"):
            torch.autograd.grad(dq.sum(), leaves[0])


def test_gradients_under_no_grad():
    leaves, _ = qkv()
    with torch.no_grad():
        assert not attention(*leaves).requires_grad, "no gradient asked for"


@by_mask
def test_opcheck(causal):
    """Schemas, fakes, autograd's registration, and the traced backward with static and dynamic sizes."""
    leaves, dout = qkv(batch=1, seqlen=100, heads=2)
    call = Call(*(None,) * 8, 0, 0, 0.125, None, 0 if causal else None, 0, 0.0, 0.0, True, False)
    torch.library.opcheck(torch.ops.cute_fa.attention, (*leaves, *call))
    q, k, v = (x.detach() for x in leaves)
    out, lse, _ = torch.ops.cute_fa.attention_forward(q, k, v, *call)
    for needs, dlse in (((True, True, True), torch.randn_like(lse)), ((True, False, True), None)):
        backward_call = BackwardCall(*needs, False, *call)
        torch.library.opcheck(torch.ops.cute_fa.attention_backward, (dout, dlse, q, k, v, out, lse, *backward_call))


def test_against_the_reference_backend():
    """The same step on the CPU."""
    leaves, dout = qkv(seqlen=200)
    found = step(leaves, dout)
    wanted = step([x.detach().cpu().requires_grad_() for x in leaves], dout.cpu())
    assert are_close([x.cpu() for x in found], wanted), "same results"


@pytest.mark.parametrize("deterministic", [False, True], ids=["any-order", "deterministic"])
@pytest.mark.parametrize("head_dim", [64, 128, 256], ids="d{}".format)
def test_memory_of_a_backward(head_dim, deterministic):
    """Beyond the gradients at most dQ in fp32 and two statistics a row, with lengths rounded up to whole tiles."""
    batch, seqlen, heads, heads_kv = 2, 2000, 8, 2
    leaves = [torch.randn(batch, seqlen, h, head_dim, device="cuda", dtype=BF16) for h in (heads, heads_kv, heads_kv)]
    leaves = [x.requires_grad_() for x in leaves]
    dout = torch.ones_like(leaves[0])

    def peak():
        out = cute_fa.flash_attn_func(*leaves, causal=True, deterministic=deterministic)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        # What was asked for: of a block of memory torch may keep the rest, up to 1 MiB a tensor, unused.
        before = torch.cuda.memory_stats()["requested_bytes.all.current"]
        grads = torch.autograd.grad(out, leaves, dout)
        return torch.cuda.memory_stats()["requested_bytes.all.peak"] - before - sum(x.nbytes for x in grads)

    peak()  # whatever a first call keeps
    workspace = batch * heads * -(-seqlen // 128) * 128 * (head_dim + 2) * 4
    assert peak() <= workspace + 2**20, f"{peak()} bytes beside the gradients, at most {workspace} expected"


def test_memory_stays_flat():
    """20,000 steps keep nothing, on the device or on the host."""
    leaves, dout = qkv(batch=1, seqlen=64, heads=1)

    def held(count):
        for _ in range(count):
            step(leaves, dout, cute_fa.flash_attn_func)
        torch.cuda.synchronize()
        resident_pages = int(Path("/proc/self/statm").read_text().split()[1])
        return torch.cuda.memory_allocated(), torch.cuda.memory_reserved(), resident_pages * os.sysconf("SC_PAGE_SIZE")

    gc.collect()  # what other tests left
    before, after = held(2000), held(20_000)
    assert after[0] <= before[0] and after[1] <= before[1], f"device memory {before[:2]} before, {after[:2]} after"
    assert after[2] - before[2] < 8 * 2**20, f"{(after[2] - before[2]) / 2**20:.1f} MiB more on the host"


def run_command(*arguments):
    root = Path(cute_fa.__file__).parent.parent
    return subprocess.run([sys.executable, "-m", "cute_fa", *arguments], cwd=root, capture_output=True, text=True)


@pytest.mark.timeout(900)
def test_gradcheck_command():
    done = run_command("gradcheck", "--device", "cuda")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
    assert ": 0 beyond their bound" in done.stdout, "the last line counts misses"


@pytest.mark.timeout(600)
def test_train_command(tmp_path):
    sizes = ("--steps", "3", "--batch", "2", "--seqlen", "128")
    done = run_command("train", "--device", "cuda", *sizes, "--out", str(tmp_path / "run"))
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
    assert "of peak" in done.stdout and "cute_fa attention" in done.stdout, "on our kernels, as a share of the peak"
