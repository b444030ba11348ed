"""The device that measures: refusal without one, cuBLAS from a clock that is known, and the driver's answers."""

import ctypes

import pytest
import torch

from benchmarks import machine
from benchmarks.machine import Machine, Management, Slice
from cute_fa.core.errors import DeviceError


def test_without_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(DeviceError, match="^device: expected a CUDA GPU that torch finds, got none"):
        machine.cuda_machine()


def test_cublas_divides_its_work_by_the_median_time_of_a_call(monkeypatch):
    monkeypatch.setattr(machine, "CUBLAS_SIZE", 100)
    ms_of_slices = iter([40.0, 8.0, 1.0])

    def time(run, num_calls):
        (product,) = run(1)
        assert product.shape == (100, 100), "the product of two squares"
        return Slice(next(ms_of_slices), None)

    found = machine.cublas_tflops(Machine("cpu", {}, time, lambda: None), num_slices=3, num_calls=4)
    assert found == pytest.approx(2 * 100**3 / 2e-3 / 1e12), "the median slice of 8 ms holds 4 calls of 2 ms"


class Nvml:
    """NVML with one GPU, as a ctypes library would answer: 0 for success."""

    def nvmlInit_v2(self):
        return 0

    def nvmlDeviceGetHandleByUUID(self, uuid, handle):
        return 0 if uuid == b"GPU-known" else 6

    def nvmlSystemGetDriverVersion(self, version, size):
        version.value = b"580.159"
        return 0

    def nvmlDeviceGetClockInfo(self, handle, kind, clock):
        clock._obj.value = {0: 1111, 1: 1605, 2: 3201}[kind]  # graphics, SM, memory
        return 0


def test_the_drivers_answers(monkeypatch):
    monkeypatch.setattr(ctypes, "CDLL", lambda name: Nvml())
    known = Management("GPU-known")
    assert (known.driver(), known.clock_mhz()) == ("580.159", 1605), "version and SM clock"


def test_no_answer_is_empty(monkeypatch):
    monkeypatch.setattr(ctypes, "CDLL", lambda name: Nvml())
    unknown = Management("GPU-other")
    assert (unknown.driver(), unknown.clock_mhz()) == ("", None), "a GPU that the library does not know"

    def missing(name):
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", missing)
    absent = Management("GPU-known")
    assert (absent.driver(), absent.clock_mhz()) == ("", None), "no library"


@pytest.mark.gpu
def test_time_counts_the_calls_on_the_device():
    here = machine.cuda_machine()
    assert here.facts["device"] == torch.cuda.get_device_name(), "the name that torch gives"
    cycles = 4_000_000  # 2.0 ms at 1.98 GHz, the highest clock of a Hopper GPU

    def run(num_calls):
        for _ in range(num_calls):
            torch.cuda._sleep(cycles)

    found = here.time(run, 5)
    assert 10 <= found.ms < 30, "five calls, not six, at a clock between 0.67 and 2 GHz"
    assert found.clock_mhz is None or 300 <= found.clock_mhz <= 2100, "MHz"
