"""The GPU that measures: how long calls take on it, at which clock, and what a row says about it.

Everything that asks the device or its driver is here; `run.py` and `host_time.py` take a `Machine` and so run in tests
on any clock.
"""

import ctypes
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata

import torch

from benchmarks.backends import Run
from cute_fa.core.errors import DeviceError, expected
from cute_fa.core.requirements import DSL

CUBLAS_SIZE = 8192


@dataclass(frozen=True)
class Slice:
    """Some calls back to back. ms: of all of them on the device. clock_mhz: of the SMs meanwhile, None if unknown."""

    ms: float
    clock_mhz: int | None


@dataclass(frozen=True)
class Machine:
    """device: of the tensors, as torch names it. facts: the columns device, driver, torch, dsl.

    time: makes a number of calls that do not count, then as many that do. synchronize: returns when the device is idle.
    """

    device: str
    facts: dict[str, str]
    time: Callable[[Run, int], Slice]
    synchronize: Callable[[], None]


def cuda_machine() -> Machine:
    """The current CUDA device; raises DeviceError where there is none."""
    if not torch.cuda.is_available():
        raise DeviceError(expected("device", "a CUDA GPU that torch finds", "none", "Run this on a machine with one"))
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    management = Management(f"GPU-{properties.uuid}")
    facts = {
        "device": properties.name,
        "driver": management.driver(),
        "torch": torch.__version__,
        "dsl": metadata.version(DSL.name),
    }
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def time(run: Run, num_calls: int) -> Slice:
        run(num_calls)  # The first of them still find the L2 of the contestant before.
        start.record()
        run(num_calls)
        end.record()
        clock_mhz = management.clock_mhz()  # The queue is ahead of the device, so this is the clock of the slice.
        end.synchronize()
        return Slice(start.elapsed_time(end), clock_mhz)

    return Machine("cuda", facts, time, torch.cuda.synchronize)


def cublas_tflops(machine: Machine, num_slices: int = 20, num_calls: int = 15) -> float:
    """What cuBLAS gives on bf16 8192^3: tells how fast a run's device was. About a second, until clocks settle."""
    generator = torch.Generator(machine.device).manual_seed(0)
    size = (CUBLAS_SIZE, CUBLAS_SIZE)
    a, b = (torch.randn(size, generator=generator, device=machine.device, dtype=torch.bfloat16) for _ in range(2))

    def run(num_calls: int) -> tuple[torch.Tensor, ...]:
        for _ in range(num_calls):
            product = torch.matmul(a, b)
        return (product,)

    ms = statistics.median(machine.time(run, num_calls).ms for _ in range(num_slices)) / num_calls
    return 2 * CUBLAS_SIZE**3 / ms / 1e9


class Management:
    """NVML, the library behind nvidia-smi, for one GPU. A query takes microseconds where nvidia-smi outlasts a slice.

    Answers None or "" where the library is missing or does not know the GPU (containers, slices in MIG mode).
    """

    def __init__(self, uuid: str):
        self._gpu = ctypes.c_void_p()
        try:
            self._nvml = ctypes.CDLL("libnvidia-ml.so.1")
        except OSError:
            self._nvml = None
            return
        if self._nvml.nvmlInit_v2() or self._nvml.nvmlDeviceGetHandleByUUID(uuid.encode(), ctypes.byref(self._gpu)):
            self._nvml = None

    def driver(self) -> str:
        version = ctypes.create_string_buffer(80)
        if self._nvml is None or self._nvml.nvmlSystemGetDriverVersion(version, len(version)):
            return ""
        return version.value.decode()

    def clock_mhz(self) -> int | None:
        sm_clock, mhz = 1, ctypes.c_uint()  # nvmlClockType_t
        if self._nvml is None or self._nvml.nvmlDeviceGetClockInfo(self._gpu, sm_clock, ctypes.byref(mhz)):
            return None
        return mhz.value
