"""`cute-fa doctor`: every part healthy, missing, too old, broken on a simulated machine; then the real machine."""

import ctypes
import json
import os
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import typer
from rich.console import Console

import cute_fa
from cute_fa.cli import doctor
from cute_fa.cli.doctor import FAULT, NOTE, OK, Finding

CHECKOUT = Path(__file__).parents[2]
PARTS = [
    *("cute-fa", "Python", "torch", "nvidia-cutlass-dsl", "apache-tvm-ffi", "einops", "typer", "rich"),
    *("compiler", "driver", "GPU", "cache folder", "smoke result"),
]
MODULES = {
    "torch": "torch",
    "nvidia-cutlass-dsl": "cutlass",
    "apache-tvm-ffi": "tvm_ffi",
    "einops": "einops",
    "typer": "typer",
    "rich": "rich",
}
HEALTHY = {
    "torch": "2.9.1+cu130",
    "nvidia-cutlass-dsl": "4.8.1",
    "apache-tvm-ffi": "0.1.15",
    "einops": "0.8.2",
    "typer": "0.29.2",
    "rich": "15.0.0",
}
TOO_OLD = {
    "torch": ("2.8.0", ">=2.9"),
    "nvidia-cutlass-dsl": ("4.8.0", ">=4.8.1,<4.9"),
    "apache-tvm-ffi": ("0.1.14", ">=0.1.15,<0.2"),
    "einops": ("0.7.0", ">=0.8"),
    "typer": ("0.12.5", ">=0.16"),
    "rich": ("12.6.0", ">=13"),
}
H200, A100, B200 = ("NVIDIA H200", (9, 0)), ("NVIDIA A100", (8, 0)), ("NVIDIA B200", (10, 0))
NOTES = b"Cuda compilation tools, release 13.4, V13.4.59\0ptxas\0-O 3 -arch sm_90a \0"


class FakeCuda:
    """Answers like libcuda.so.1 for the functions that the doctor calls; init_code is what cuInit returns."""

    def __init__(self, cuda: int, gpus=(), init_code: int = 0):
        self.cuda, self.gpus, self.init_code = cuda, gpus, init_code

    def cuDriverGetVersion(self, number):
        number._obj.value = self.cuda
        return 0

    def cuInit(self, flags):
        return self.init_code

    def cuGetErrorString(self, code, words):
        words._obj.value = b"system not yet initialized"
        return 0

    def cuDeviceGetCount(self, count):
        count._obj.value = len(self.gpus)
        return 0

    def cuDeviceGet(self, device, ordinal):
        device._obj.value = ordinal
        return 0

    def cuDeviceGetName(self, name, size, device):
        name.value = self.gpus[device.value][0].encode()
        return 0

    def cuDeviceGetAttribute(self, value, attribute, device):
        value._obj.value = self.gpus[device.value][1][{75: 0, 76: 1}[attribute]]
        return 0


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """A simulated machine on which all is well: every package installed, an H200, a cache folder.

    versions: what pip has installed. modules: stand-ins for the heavy imports. plug(cuda): another driver and GPUs.
    """
    versions = dict(HEALTHY)

    def version(name):
        if name not in versions:
            raise metadata.PackageNotFoundError(name)
        return versions[name]

    torch = ModuleType("torch")
    torch.version = SimpleNamespace(cuda="13.0")
    torch.cuda = SimpleNamespace(init=lambda: None)
    cutlass = ModuleType("cutlass")
    cutlass.CUDA_VERSION = SimpleNamespace(major=13, minor=4)
    modules = {"torch": torch, "cutlass": cutlass, "tvm_ffi": ModuleType("tvm_ffi"), "einops": ModuleType("einops")}
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(metadata, "version", version)
    monkeypatch.setattr(doctor, "compile_nothing", lambda: NOTES)
    monkeypatch.setattr(doctor, "check_smoke", lambda: Finding(OK, "smoke result", "simulated"))
    monkeypatch.setenv("CUTE_FA_CACHE_DIR", str(tmp_path))

    def plug(cuda):
        monkeypatch.setattr(doctor, "load_libcuda", lambda: cuda)

    plug(FakeCuda(13010, [H200]))
    return SimpleNamespace(versions=versions, torch=torch, plug=plug, monkeypatch=monkeypatch)


def faults() -> list[Finding]:
    return [finding for finding in doctor.examine() if finding.status == FAULT]


def only_fault() -> Finding:
    found = faults()
    assert len(found) == 1, f"expected one fault, got {found}"
    return found[0]


def of(part: str) -> Finding:
    return next(finding for finding in doctor.examine() if finding.part == part)


def test_healthy_machine(machine):
    findings = doctor.examine()
    assert [finding.part for finding in findings] == PARTS, "every part once, in this order"
    assert {finding.status for finding in findings} == {OK}, f"nothing to mend, got {findings}"
    assert not any(finding.fix for finding in findings), "and so no fixes"
    assert of("torch").found == "2.9.1+cu130, built for CUDA 13.0", "version and CUDA build"
    assert of("nvidia-cutlass-dsl").found == "4.8.1, flavour cu13 (CUDA 13.4)", "version and flavour"
    assert of("compiler").found == "ptxas 13.4.59, kernels are compiled for sm_90a", "ptxas and arch"
    assert of("GPU").found == "1 x NVIDIA H200 (compute capability 9.0)", "name and capability"


@pytest.mark.parametrize(
    "version, status",
    [
        pytest.param("3.9.18", FAULT, id="too-old"),
        pytest.param("3.10.0", OK, id="oldest"),
        pytest.param("3.13.9", OK, id="newest"),
        pytest.param("3.14.0rc1", FAULT, id="too-new"),
    ],
)
def test_python(version, status):
    finding = doctor.check_python(version)
    assert finding.status == status, f"{version} is not judged {status}"
    assert finding.found.startswith(version + " on "), "names version and system"
    assert ("3.10" in finding.fix and "3.14" in finding.fix) == (status == FAULT), "the fix names the range"


@pytest.mark.parametrize("name", MODULES)
def test_package_not_installed(name, machine):
    del machine.versions[name]
    install = f"pip install '{name}{TOO_OLD[name][1]}'"
    assert only_fault() == Finding(FAULT, name, "not installed", install), "and how to get it"


@pytest.mark.parametrize("name", MODULES)
def test_package_too_old(name, machine):
    version, specifier = TOO_OLD[name]
    machine.versions[name] = version
    fix = f"pip install '{name}{specifier}'"
    assert only_fault() == Finding(FAULT, name, f"{version}, needed is {specifier}", fix), "what is needed, and the fix"


def test_dsl_too_new(machine):
    machine.versions["nvidia-cutlass-dsl"] = "4.9.0"
    assert only_fault().found == "4.9.0, needed is >=4.8.1,<4.9", "an upper bound is kept"


def test_version_that_is_none(machine):
    machine.versions["einops"] = None
    assert only_fault().part == "einops", "damaged metadata is a fault of that part"


@pytest.mark.parametrize(
    "error",
    [
        pytest.param(ImportError("libcudart.so.13: cannot open shared object file"), id="import-error"),
        pytest.param(OSError("bad\n  library"), id="os-error"),
        pytest.param(SystemExit("leaves"), id="system-exit"),
        pytest.param(type("PanicException", (BaseException,), {})("rust"), id="base-exception"),
    ],
)
@pytest.mark.parametrize("name, module", MODULES.items(), ids=MODULES)
def test_broken_import(name, module, error, machine):
    def import_module(wanted):
        if wanted == module:
            raise error
        return sys.modules[wanted]

    machine.monkeypatch.setattr(doctor, "import_module", import_module)
    finding = next(finding for finding in faults() if finding.part == name)
    assert finding.found == f"{type(error).__name__}: {' '.join(str(error).split())}", "the exception on one line"
    assert finding.fix == f"pip install --force-reinstall '{name}{TOO_OLD[name][1]}'", "reinstalling is the cure"


def test_interrupt_is_no_fault():
    def check():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        doctor.guarded("part", check, "fix")


def test_torch_without_cuda(machine):
    machine.torch.version.cuda = None
    machine.plug(None)
    assert of("torch") == Finding(OK, "torch", "2.9.1+cu130, built without CUDA"), "fine where there is no driver"


@pytest.mark.parametrize(
    "driver, status",
    [
        pytest.param(12080, FAULT, id="older-major"),
        pytest.param(13000, OK, id="same-major"),
        pytest.param(14020, OK, id="newer-major"),
    ],
)
def test_driver_and_torch(driver, status, machine):
    machine.torch.version.cuda = "13.2"
    machine.plug(FakeCuda(driver, [H200]))
    finding = of("torch")
    assert finding.status == status, f"CUDA 13.2 on a driver for {driver}"
    if status == FAULT:
        assert finding.found == "2.9.1+cu130, built for CUDA 13.2, but the driver runs at most CUDA 12.8", "numbers"
        for cure in ("driver to one that runs CUDA 13", "torch built for CUDA 12"):
            assert cure in finding.fix, f"offers: {cure}"


def test_no_driver(machine):
    machine.plug(None)
    assert not faults(), "a machine without a GPU is no fault"
    for part in ("driver", "GPU"):
        finding = of(part)
        assert finding.status == NOTE, f"{part} is worth a note"
        assert finding.found == "none found: CPU tensors take the reference backend", "and says what happens instead"
        assert finding.fix, f"{part} says what to do where there is a GPU"


def test_no_driver_library(monkeypatch):
    def no_library(name):
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", no_library)
    assert doctor.load_libcuda() is None, "no library, no driver"


def test_driver_version(machine, tmp_path):
    (tmp_path / "version").write_text("580.159.03\n")
    machine.plug(FakeCuda(13000))
    assert doctor.check_driver(tmp_path / "version").found == "580.159.03, runs CUDA up to 13.0", "both versions"
    assert doctor.check_driver(tmp_path / "absent").found == "runs CUDA up to 13.0", "where Linux does not show it"


def test_driver_without_gpu(machine):
    machine.plug(FakeCuda(13000, init_code=100))
    finding = of("GPU")
    assert finding.status == NOTE and finding.found.startswith("none found"), "no device is a note"
    assert "CUDA_VISIBLE_DEVICES" in finding.fix, "which may have hidden it"


def test_driver_that_does_not_start(machine):
    machine.plug(FakeCuda(13000, [H200], init_code=802))
    finding = only_fault()
    assert finding.part == "GPU", "the GPU cannot be used"
    assert finding.found == "RuntimeError: cuInit: system not yet initialized (CUDA error 802)", "the driver's words"


@pytest.mark.parametrize("gpu", [A100, B200], ids=["ampere", "blackwell"])
def test_other_architecture(gpu, machine):
    machine.plug(FakeCuda(13000, [gpu, gpu]))
    assert not faults(), "CPU tensors work there as on a machine without a GPU"
    finding = of("GPU")
    assert finding.status == NOTE, "but it is worth a note"
    name, (major, minor) = gpu
    assert finding.found == f"2 x {name} (compute capability {major}.{minor})", "what is there"
    assert "9.0" in finding.fix and "H100" in finding.fix and "reference backend" in finding.fix, "what is needed"


def test_hopper_beside_another_gpu(machine):
    machine.plug(FakeCuda(13000, [A100, H200]))
    finding = of("GPU")
    assert finding.status == NOTE, "one GPU of two can be used"
    assert finding.found == "1 x NVIDIA A100 (compute capability 8.0), 1 x NVIDIA H200 (compute capability 9.0)", "both"
    assert finding.fix.endswith("devices 1"), "and it is the second"


def test_torch_that_cannot_use_the_gpu(machine):
    def init():
        raise AssertionError("Torch not compiled with CUDA enabled")

    machine.torch.cuda.init = init
    finding = only_fault()
    assert finding.part == "GPU" and "AssertionError: Torch not compiled with CUDA enabled" in finding.found, "why"
    assert "https://pytorch.org" in finding.fix, "where to get another torch"


@pytest.mark.parametrize(
    "cubin, status, found",
    [
        pytest.param(NOTES.replace(b"90a", b"100a"), FAULT, "compiled for sm_100a, needed is sm_90a", id="other-arch"),
        pytest.param(b"\x7fELF", NOTE, "ptxas of unknown version", id="no-note"),
    ],
)
def test_compiler(cubin, status, found):
    finding = doctor.read_compiler(cubin)
    assert finding.status == status and found in finding.found, f"got {finding}"
    assert finding.fix, "says what to do"


def test_compiler_that_fails(machine):
    def fails():
        raise RuntimeError("libcute_dsl_runtime.so is missing")

    machine.monkeypatch.setattr(doctor, "compile_nothing", fails)
    finding = only_fault()
    assert finding.part == "compiler" and "libcute_dsl_runtime.so is missing" in finding.found, "the exception's text"


def test_cache_folder_is_left_as_it_was(machine, tmp_path):
    kept = tmp_path / "kept"
    kept.write_text("kernel")
    assert of("cache folder").found == f"{tmp_path} (writable)", "an existing folder"
    assert [path.name for path in tmp_path.iterdir()] == ["kept"], "nothing new in it"


def test_cache_folder_to_be_made(machine, tmp_path):
    machine.monkeypatch.setenv("CUTE_FA_CACHE_DIR", str(tmp_path / "deep" / "down"))
    assert of("cache folder").found == f"{tmp_path / 'deep' / 'down'} (can be made)", "a folder that can be made"
    assert not list(tmp_path.iterdir()), "was not made"


# A folder that cannot be written even by root is or lies below a regular file, or is a link to nowhere.
@pytest.mark.parametrize(
    "name",
    [
        pytest.param("file", id="a-file"),
        pytest.param("file/below", id="below-a-file"),
        pytest.param("file/far/below", id="far-below-a-file"),
        pytest.param("nowhere", id="dangling-link"),
    ],
)
def test_cache_folder_not_writable(name, machine, tmp_path):
    (tmp_path / "file").write_text("")
    (tmp_path / "nowhere").symlink_to(tmp_path / "absent" / "absent")
    machine.monkeypatch.setenv("CUTE_FA_CACHE_DIR", str(tmp_path / name))
    finding = only_fault()
    assert finding.part == "cache folder" and str(tmp_path) in finding.found, "where"
    assert finding.fix.startswith("export CUTE_FA_CACHE_DIR="), "the variable that moves it"


def smoke_with(monkeypatch, change) -> Finding:
    """The smoke check with a flash_attn_func that computes softmax(q k^T / 4) v in fp32 and then changes it."""
    import torch

    def flash_attn_func(q, k, v, causal):
        assert causal and q.shape == (1, 33, 2, 16), f"a small causal call, got {q.shape}"
        scores = torch.einsum("bihd,bjhd->bhij", q, k) / 4
        scores = scores.masked_fill(torch.ones(33, 33).triu(1).bool(), -torch.inf)
        return change(torch.einsum("bhij,bjhd->bihd", scores.softmax(-1), v))

    monkeypatch.setitem(vars(cute_fa), "flash_attn_func", flash_attn_func)
    return doctor.check_smoke()


def test_smoke_match(monkeypatch):
    finding = smoke_with(monkeypatch, lambda out: out)
    assert finding.status == OK and "reference backend" in finding.found, f"got {finding}"


def test_smoke_mismatch(monkeypatch):
    def shift_one(out):
        out[0, 32, 1, 15] += 0.01
        return out

    finding = smoke_with(monkeypatch, shift_one)
    assert finding.status == FAULT and "largest error 1.0e-02" in finding.found and finding.fix, f"got {finding}"


def test_smoke_mismatch_of_gradients(monkeypatch):
    finding = smoke_with(monkeypatch, lambda out: out + 0.01 * (out - out.detach()))
    assert finding.status == FAULT and "of out, dq, dk and dv" in finding.found, f"1 % too large, got {finding}"


def test_smoke_nan(monkeypatch):
    assert smoke_with(monkeypatch, lambda out: out * float("nan")).status == FAULT, "NaN is no match"


def test_smoke_nan_of_gradients(monkeypatch):
    finding = smoke_with(monkeypatch, lambda out: out + (out - out.detach()).sqrt())
    assert finding.status == FAULT, f"gradients at which the square root has none, got {finding}"


def test_smoke_with_the_package():
    finding = doctor.check_smoke()
    assert finding.status == OK, f"flash_attn_func differs from torch: {finding}"


def test_exit_code_and_table(machine, capsys):
    doctor.doctor()
    assert "fault" not in capsys.readouterr().out, "a healthy machine returns, which is exit code 0"
    machine.versions["einops"] = "0.7.0"
    with pytest.raises(typer.Exit) as stop:
        doctor.doctor()
    out = capsys.readouterr().out
    assert stop.value.exit_code == 1, "a fault is exit code 1"
    assert re.search(r"fault +einops", out) and "pip install 'einops>=0.8'" in out, f"the line and its fix, got {out}"


def test_table_takes_brackets_as_text():
    console = Console(width=80, record=True, file=open(os.devnull, "w"))
    console.print(doctor.render([Finding(FAULT, "part", "[red] found [/]", "pip install 'a[cu13]'")]))
    text = console.export_text()
    assert "[red] found [/]" in text and "-> pip install 'a[cu13]'" in text, f"nothing is taken for markup, got {text}"


def test_json_is_alone_on_stdout(machine, capsys):
    def noisy():
        print("a library greets")
        return NOTES

    machine.monkeypatch.setattr(doctor, "compile_nothing", noisy)
    doctor.doctor(as_json=True)
    out, err = capsys.readouterr()
    first = json.loads(out)[1]
    assert list(first) == ["status", "part", "found", "fix"] and first["part"] == "Python", "one object a finding"
    assert err == "a library greets\n", "what libraries print goes to stderr"


def run(*arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, *arguments], cwd=CHECKOUT, capture_output=True, text=True, timeout=120)


def test_this_machine():
    """The real thing from the checkout: what pip says is installed is what the report says."""
    done = run("-m", "cute_fa", "doctor", "--json")
    report = {finding["part"]: finding for finding in json.loads(done.stdout)}
    assert list(report) == PARTS, "every part once, in this order"
    assert done.returncode == any(finding["status"] == FAULT for finding in report.values()), "exit code"
    assert "Traceback" not in done.stderr, done.stderr
    for name in ("torch", "nvidia-cutlass-dsl", "einops"):
        assert report[name]["found"].startswith(metadata.version(name)), f"{name}: {report[name]}"
    assert re.fullmatch(r"ptxas \d+\.\d+\.\d+, kernels are compiled for sm_90a", report["compiler"]["found"]), report
    assert report["smoke result"]["status"] == OK, report["smoke result"]


def test_without_torch_and_dsl():
    program = (
        "import sys; sys.modules.update(torch=None, cutlass=None); sys.argv = ['cute-fa', 'doctor', '--json']\n"
        "from cute_fa.cli import main; main()"
    )
    done = run("-c", program)
    report = {finding["part"]: finding for finding in json.loads(done.stdout)}
    assert done.returncode == 1 and list(report) == PARTS, "the whole report, and exit code 1"
    for part in ("torch", "nvidia-cutlass-dsl", "compiler", "smoke result"):
        assert report[part]["status"] == FAULT and report[part]["fix"], f"{part}: {report[part]}"
    assert report["einops"]["status"] == OK, "the others are judged on their own"
