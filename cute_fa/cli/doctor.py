"""`cute-fa doctor`: what is installed, whether it can be used, and what to do about what cannot.

Each check is a function that returns one `Finding`; `examine` runs them all, and a check that raises becomes a fault,
so the command ends in a report on any machine: without torch, without the DSL, without a driver.
"""

import contextlib
import ctypes
import json
import os
import platform
import re
import shlex
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from importlib import import_module, metadata
from pathlib import Path
from typing import Annotated

import typer
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

import cute_fa
from cute_fa.core.env import CACHE_DIR, cache_dir
from cute_fa.core.hardware import COMPUTE_CAPABILITY
from cute_fa.core.requirements import ARCH, DSL, PACKAGES, PYTHON, TORCH, Requirement

OK, NOTE, FAULT = "ok", "note", "fault"
COLOURS = {OK: "green", NOTE: "yellow", FAULT: "red"}

ON_CPU = "CPU tensors take the reference backend"
GET_DRIVER = "Nothing to do without an NVIDIA GPU; with one, install its driver: https://www.nvidia.com/drivers"
REPORT = "Report this with the output of `cute-fa doctor --json`"
GET_TORCH = "https://pytorch.org/get-started/locally"


@dataclass(frozen=True)
class Finding:
    """status: ok, note (worth knowing) or fault (must be mended). fix: a command or a sentence, empty when ok."""

    status: str
    part: str
    found: str
    fix: str = ""


def doctor(as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for a bug report.")] = False) -> None:
    """Check this machine: packages, driver, GPU, compiler, cache folder, and one small result."""
    # Libraries that print while they are imported must not spoil the JSON.
    with contextlib.redirect_stdout(sys.stderr):
        findings = examine()
    if as_json:
        print(json.dumps([asdict(finding) for finding in findings], indent=2))
    else:
        Console().print(render(findings))
    if any(finding.status == FAULT for finding in findings):
        raise typer.Exit(1)


def render(findings: list[Finding]) -> Table:
    table = Table("", "part", "found, and what to do", box=box.SIMPLE)
    for finding in findings:
        # Text, not str: square brackets in versions and messages are no markup.
        found = Text(finding.found)
        if finding.fix:
            found.append(f"\n-> {finding.fix}", COLOURS[finding.status])
        table.add_row(Text(finding.status, COLOURS[finding.status]), finding.part, found)
    return table


def examine() -> list[Finding]:
    return [guarded(part, check, fix) for part, check, fix in checks()]


def guarded(part: str, check: Callable[[], Finding], fix: str) -> Finding:
    """The check's finding, or a fault with this fix when it raises, whatever it raises."""
    try:
        return check()
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        return Finding(FAULT, part, describe(error), fix)


def describe(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())


def checks() -> Iterator[tuple[str, Callable[[], Finding], str]]:
    """(part, check, what to do when the check itself raises), in the order of the report."""
    special = {TORCH: check_torch, DSL: check_dsl}
    yield "cute-fa", check_cute_fa, REPORT
    yield "Python", check_python, REPORT
    for package in PACKAGES:
        check = special.get(package, partial(check_package, package))
        yield package.name, check, f"pip install --force-reinstall '{package}'"
    yield "compiler", check_compiler, f"Mend {DSL.name} first. {REPORT} if it stays"
    yield "driver", check_driver, GET_DRIVER
    yield "GPU", check_gpu, "Make `nvidia-smi` work first. After an update of the driver, restart the machine"
    yield "cache folder", check_cache, f"export {CACHE_DIR.name}=/a/folder/that/you/may/write"
    yield "smoke result", check_smoke, f"Mend {TORCH.name} first. {REPORT} if it stays"


def check_cute_fa() -> Finding:
    return Finding(OK, "cute-fa", f"{cute_fa.__version__} in {Path(cute_fa.__file__).parent}")


def check_python(version: str = platform.python_version()) -> Finding:
    found = f"{version} on {platform.system()} {platform.machine()}"
    if PYTHON.admits(version):
        return Finding(OK, "Python", found)
    return Finding(FAULT, "Python", found, f"Make the environment with a Python {PYTHON.specifier}")


def check_package(package: Requirement) -> Finding:
    """Installed, in the range of versions, and importable; raises what the import raises."""
    install = f"pip install '{package}'"
    try:
        version = metadata.version(package.name)
    except metadata.PackageNotFoundError:
        return Finding(FAULT, package.name, "not installed", install)
    if not package.admits(version):
        return Finding(FAULT, package.name, f"{version}, needed is {package.specifier}", install)
    import_module(package.module)
    return Finding(OK, package.name, version)


def check_torch() -> Finding:
    """Also the CUDA that torch is built for; within one major version older drivers serve newer builds."""
    finding = check_package(TORCH)
    if finding.status != OK:
        return finding
    built_for = import_module("torch").version.cuda
    if built_for is None:
        return Finding(OK, TORCH.name, f"{finding.found}, built without CUDA")
    found = f"{finding.found}, built for CUDA {built_for}"
    libcuda = load_libcuda()
    if libcuda is None:
        return Finding(OK, TORCH.name, found)
    needed, (major, minor) = int(built_for.split(".")[0]), driver_cuda(libcuda)
    if needed <= major:
        return Finding(OK, TORCH.name, found)
    fix = f"Update the driver to one that runs CUDA {needed}, or take a torch built for CUDA {major}: {GET_TORCH}"
    return Finding(FAULT, TORCH.name, f"{found}, but the driver runs at most CUDA {major}.{minor}", fix)


def check_dsl() -> Finding:
    """Also the flavour that the DSL picked when it was imported: the newest installed one that the driver runs."""
    finding = check_package(DSL)
    if finding.status != OK:
        return finding
    cuda = import_module("cutlass").CUDA_VERSION
    return Finding(OK, DSL.name, f"{finding.found}, flavour cu{cuda.major} (CUDA {cuda.major}.{cuda.minor})")


def check_compiler() -> Finding:
    return read_compiler(compile_nothing())


def compile_nothing() -> bytes:
    """The cubin of an empty kernel. Needs no GPU, and leaves the DSL's cache alone: keeping the cubin turns it off."""
    from cutlass import cute

    @cute.kernel
    def nothing():
        pass

    @cute.jit
    def launch():
        nothing().launch(grid=(1, 1, 1), block=(32, 1, 1))

    with tempfile.TemporaryDirectory() as folder:
        options = f"--gpu-arch {ARCH} --keep-cubin --dump-dir {shlex.quote(folder)}"
        return cute.compile(launch, options=options).__cubin__


def read_compiler(cubin: bytes) -> Finding:
    """ptxas writes its version and its options into the note section `.note.nv.tkinfo` of every cubin."""
    arch = re.search(rb"-arch (\w+)", cubin)
    version = re.search(rb"Cuda compilation tools, release [\d.]+, V([\d.]+)", cubin)
    if arch is None or version is None:
        fix = "Nothing to do: kernels compile, only the note in their cubin is missing"
        return Finding(NOTE, "compiler", "ptxas of unknown version", fix)
    found = f"ptxas {version[1].decode()}, kernels are compiled for {arch[1].decode()}"
    if arch[1].decode() == ARCH:
        return Finding(OK, "compiler", found)
    return Finding(FAULT, "compiler", f"{found}, needed is {ARCH}", "Unset the environment variables CUTE_DSL_*")


def load_libcuda() -> ctypes.CDLL | None:
    """The driver's library, or None where there is no driver. It answers without torch, as nvidia-smi does."""
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None


def ask(libcuda: ctypes.CDLL, function: str, *arguments) -> None:
    """Calls a function of the CUDA driver API; raises with the driver's own words."""
    code = getattr(libcuda, function)(*arguments)
    if code:
        words = ctypes.c_char_p()
        libcuda.cuGetErrorString(code, ctypes.byref(words))
        raise RuntimeError(f"{function}: {(words.value or b'unknown error').decode()} (CUDA error {code})")


def driver_cuda(libcuda: ctypes.CDLL) -> tuple[int, int]:
    """The newest CUDA, (major, minor), that the driver runs. The driver says 13010 for 13.1."""
    number = ctypes.c_int()
    ask(libcuda, "cuDriverGetVersion", ctypes.byref(number))
    return number.value // 1000, number.value % 1000 // 10


def visible_gpus(libcuda: ctypes.CDLL) -> list[tuple[str, tuple[int, int]]]:
    """Name and compute capability of each GPU that CUDA_VISIBLE_DEVICES lets through."""
    no_device, capability_major, capability_minor = 100, 75, 76  # CUresult, CUdevice_attribute
    if libcuda.cuInit(0) == no_device:
        return []
    ask(libcuda, "cuInit", 0)
    count, device, name = ctypes.c_int(), ctypes.c_int(), ctypes.create_string_buffer(256)
    major, minor = ctypes.c_int(), ctypes.c_int()
    ask(libcuda, "cuDeviceGetCount", ctypes.byref(count))
    gpus = []
    for ordinal in range(count.value):
        ask(libcuda, "cuDeviceGet", ctypes.byref(device), ordinal)
        ask(libcuda, "cuDeviceGetName", name, len(name), device)
        ask(libcuda, "cuDeviceGetAttribute", ctypes.byref(major), capability_major, device)
        ask(libcuda, "cuDeviceGetAttribute", ctypes.byref(minor), capability_minor, device)
        gpus.append((name.value.decode(), (major.value, minor.value)))
    return gpus


def check_driver(kernel_module: Path = Path("/sys/module/nvidia/version")) -> Finding:
    """kernel_module: where Linux shows the driver's own version; absent under WSL and in some sandboxes."""
    libcuda = load_libcuda()
    if libcuda is None:
        return Finding(NOTE, "driver", f"none found: {ON_CPU}", GET_DRIVER)
    version = f"{kernel_module.read_text().strip()}, " if kernel_module.exists() else ""
    major, minor = driver_cuda(libcuda)
    return Finding(OK, "driver", f"{version}runs CUDA up to {major}.{minor}")


def check_gpu() -> Finding:
    """A Hopper GPU that torch can use too."""
    libcuda = load_libcuda()
    gpus = visible_gpus(libcuda) if libcuda else []
    if not gpus:
        fix = "Where there is one, look at `nvidia-smi` and at CUDA_VISIBLE_DEVICES" if libcuda else GET_DRIVER
        return Finding(NOTE, "GPU", f"none found: {ON_CPU}", fix)
    wanted = "{}.{}".format(*COMPUTE_CAPABILITY)
    found = ", ".join(
        f"{count} x {name} (compute capability {major}.{minor})"
        for (name, (major, minor)), count in Counter(gpus).items()
    )
    usable = [str(index) for index, (_, capability) in enumerate(gpus) if capability == COMPUTE_CAPABILITY]
    if not usable:
        fix = f"Kernels need compute capability {wanted} (H100, H200, H20, GH200); here, {ON_CPU}"
        return Finding(NOTE, "GPU", found, fix)
    try:
        import_module("torch").cuda.init()
    except Exception as error:
        fix = f"Take a torch built for the CUDA that the driver runs: {GET_TORCH}"
        return Finding(FAULT, "GPU", f"{found}, but torch cannot use it: {describe(error)}", fix)
    if len(usable) < len(gpus):
        return Finding(NOTE, "GPU", found, f"Only these can be used: devices {', '.join(usable)}")
    return Finding(OK, "GPU", found)


def check_cache() -> Finding:
    """Tries a file without a name in the folder, or in the nearest existing folder above, where it would be made."""
    folder = cache_dir()
    place = next(path for path in (folder, *folder.absolute().parents) if os.path.lexists(path))
    tempfile.TemporaryFile(dir=place).close()
    return Finding(OK, "cache folder", f"{folder} ({'writable' if place == folder else 'can be made'})")


def check_smoke() -> Finding:
    """One causal call and its gradients on each backend that this machine has, against torch in fp64.

    Outputs are averages of normals, gradients as large: fp32 errs below 1e-6 and bf16, whose eps is 2^-7, below 0.02.
    """
    import torch

    runs = [("reference backend, fp32 on the CPU", "cpu", torch.float32, 1e-5)]
    if torch.cuda.is_available() and torch.cuda.get_device_capability() == COMPUTE_CAPABILITY:
        runs.append((f"kernels, bf16 on {torch.cuda.get_device_name()}", "cuda", torch.bfloat16, 3e-2))
    status, found = OK, []
    for backend, device, dtype, allowed in runs:
        generator = torch.Generator().manual_seed(0)
        shape = (1, 33, 2, 16)  # (batch, seqlen, heads, head_dim)
        tensors = [torch.randn(shape, generator=generator).to(device, dtype) for _ in range(4)]
        ours = with_gradients(partial(cute_fa.flash_attn_func, causal=True), *tensors)
        oracle = with_gradients(causal_attention, *(x.double() for x in tensors))
        error = (ours - oracle).abs().max().item()
        line = f"{backend}: largest error {error:.1e} of out, dq, dk and dv against torch in fp64"
        if not error <= allowed:
            status, line = FAULT, f"{line}, allowed is {allowed:.1e}"
        found.append(line)
    return Finding(status, "smoke result", "; ".join(found), "" if status == OK else REPORT)


def with_gradients(attention: Callable, q, k, v, dout):
    """out, dq, dk, dv, which have one shape, stacked."""
    import torch

    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    out = attention(*leaves)
    return torch.stack([out, *torch.autograd.grad(out, leaves, dout)]).detach()


def causal_attention(q, k, v):
    """Torch's, for tensors (batch, seqlen, heads, head_dim)."""
    import torch

    by_head = (x.transpose(1, 2) for x in (q, k, v))
    return torch.nn.functional.scaled_dot_product_attention(*by_head, is_causal=True).transpose(1, 2)
