"""The cubin reader against a kernel of which every counted instruction, the stack and the registers are known."""

import contextlib
import io
import struct

import cutlass
import pytest
from cutlass import Float32, Int32, cute
from cutlass.cute.runtime import make_fake_tensor

from cute_fa.host.cubin import _read_facts, ptxas_version, read_kernels

# One line of PTX, how often the kernel has it, and the one SASS instruction that it becomes. a: global address,
# s: shared address, r0 to r3: registers, d: matrix descriptor, b: stack.
BULK, TENSOR = "cp.async.bulk", "cp.async.bulk.tensor.2d"
LOADED = "shared::cluster.global.mbarrier::complete_tx::bytes"
WGMMA = "wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {f0, f1, f2, f3},"
KEEP = "st.volatile.global.b32 [a], r0;"  # for the compiler, which leaves out loads that nobody uses
LINES = (
    (1, "USETMAXREG", "setmaxnreg.inc.sync.aligned.u32 152;"),
    (2, "UTMALDG", f"{TENSOR}.{LOADED} [s], [a, {{s, s}}], [s];"),
    (3, "UTMALDG", f"{TENSOR}.{LOADED}.multicast::cluster [s], [a, {{s, s}}], [s], 3;"),
    (2, "UTMASTG", f"{TENSOR}.global.shared::cta.bulk_group [a, {{s, s}}], [s];"),
    (3, "UTMAREDG", "cp.reduce.async.bulk.tensor.2d.global.shared::cta.add.tile.bulk_group [a, {s, s}], [s];"),
    (4, "UBLKCP", f"{BULK}.global.shared::cta.bulk_group [a], [s], 32;"),
    (1, "UBLKCP", f"{BULK}.{LOADED} [s], [a], 32, [s];"),
    (6, "UBLKRED", "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [a], [s], 32;"),
    (4, "REDG", "red.relaxed.gpu.global.add.v4.f32 [a], {f0, f1, f2, f3};"),
    (2, "REDG", "red.relaxed.gpu.global.add.s32 [a], 1;"),
    (1, "LDSM", f"ldmatrix.sync.aligned.m8n8.x1.shared.b16 {{r0}}, [s]; {KEEP}"),
    (8, "STSM", "stmatrix.sync.aligned.m8n8.x1.shared.b16 [s], {r0};"),
    (9, "STL", "st.volatile.local.b32 [b + 4], r0;"),
    (10, "LDL", f"ld.volatile.local.b32 r0, [b + 4]; {KEEP}"),
    (1, "WARPGROUP", "wgmma.fence.sync.aligned;"),
    (3, "HGMMA", f"{WGMMA} d, d, 1, 1, 1, 0, 0;"),
    (2, "HGMMA", f"{WGMMA} {{r0, r1, r2, r3}}, d, 1, 1, 1, 0;"),
    (1, "", "wgmma.commit_group.sync.aligned;"),
    (1, "WARPGROUP", "wgmma.wait_group.sync.aligned 0;"),
)
STACK_BYTES = 192
PROLOGUE = f"""
    .reg .b64 a, d; .reg .b32 s, r<4>; .reg .f32 f<4>; .local .align 16 .b8 b[{STACK_BYTES}];
    mov.b64 a, {{$r0}}; mov.b64 d, a; mov.b32 s, {{$r1}};
    ld.global.v4.b32 {{r0, r1, r2, r3}}, [a]; ld.global.v4.f32 {{f0, f1, f2, f3}}, [a + 16];
"""
EPILOGUE = "st.global.v4.f32 [a + 32], {f0, f1, f2, f3}; st.global.b32 [a + 48], r0;"


@cute.kernel
def known(x: cute.Tensor):
    address = x.iterator.toint()
    body = " ".join(line for count, _, line in LINES for _ in range(count))
    cute.arch.inline_ptx(f"{{{PROLOGUE}{body}{EPILOGUE}}}", read_only_args=[address, Int32(address)])


@cute.jit
def launch_known(x: cute.Tensor):
    known(x).launch(grid=(1, 1, 1), block=(384, 1, 1), min_blocks_per_mp=1)


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """(cubin, what ptxas says of it)."""
    x, words = make_fake_tensor(Float32, (1024,), stride=(1,), assumed_align=16), io.StringIO()
    options = f"--gpu-arch sm_90a remarks{{ptx}} --keep-cubin --dump-dir {tmp_path_factory.mktemp('dump')}"
    with contextlib.redirect_stderr(words):
        return cute.compile(launch_known, x, options=options).__cubin__, words.getvalue()


@pytest.fixture
def cubin(compiled) -> bytes:
    return compiled[0]


def test_opcodes(cubin):
    (kernel,) = read_kernels(cubin)
    counts = {}
    for count, name, _ in LINES:
        if name:
            counts[name] = counts.get(name, 0) + count
    assert kernel.opcodes == counts, "one SASS instruction for each line of PTX"


def test_sizes(compiled):
    (kernel,), words = read_kernels(compiled[0]), compiled[1]
    assert kernel.stack_bytes == STACK_BYTES, "the array in local memory is the whole stack"
    assert f"Used {kernel.registers} registers" in words, words
    assert kernel.num_instructions > sum(count for count, name, _ in LINES if name), "and there are other instructions"
    assert "known" in kernel.name, "the name of the Python function is in it"


def test_ptxas_version(cubin):
    major, minor, _ = map(int, ptxas_version(cubin).split("."))
    flavour = cutlass.CUDA_VERSION
    assert (major, minor) == (flavour.major, flavour.minor), "ptxas is that of the DSL's flavour"
    assert ptxas_version(b"no note") == "unknown", "a cubin without its note"


@pytest.mark.parametrize(
    "change, message",
    [
        pytest.param(lambda cubin: b"", "got 0 bytes that begin with b''", id="empty"),
        pytest.param(lambda cubin: b"PK\3\4" + cubin[4:], "begin with b'PK", id="no-elf"),
        pytest.param(lambda cubin: cubin[:18] + b"\x3e\0" + cubin[20:], "expected a cubin, got", id="x86-elf"),
        pytest.param(lambda cubin: cubin[:49] + b"\x64" + cubin[50:], "got one for sm_100", id="blackwell"),
    ],
)
def test_other_bytes(change, message, cubin):
    with pytest.raises(ValueError, match=message):
        read_kernels(change(cubin))


def test_attributes_of_other_sizes_are_passed_over():
    sized, unsized, registers, other = 4, 3, 0x2F, 0x50
    fact = struct.pack("<BBHII", sized, registers, 8, 5, 168)  # symbol 5 has 168 registers
    decoy = struct.pack("<BBH", sized, other, len(fact)) + fact
    assert list(_read_facts(struct.pack("<BBH", unsized, other, 64) + decoy + fact)) == [(registers, 5, 168)], "once"
