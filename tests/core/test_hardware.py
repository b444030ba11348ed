"""Hopper's numbers: names that torch gives, the roofline, and that the parts agree with the architecture."""

import pytest

from cute_fa.core import hardware
from cute_fa.core.hardware import GH200, GPUS, H20, H100_PCIE, H100_SXM, H200, gpu_by_device_name


@pytest.mark.parametrize(
    ("name", "gpu"),
    [
        ("NVIDIA H100 80GB HBM3", H100_SXM),
        ("NVIDIA H100 PCIe", H100_PCIE),
        ("NVIDIA H200", H200),
        ("NVIDIA H20", H20),
        ("NVIDIA GH200 480GB", GH200),
    ],
    ids=["h100-sxm", "h100-pcie", "h200", "h20", "gh200"],
)
def test_torch_device_names_are_recognised(name, gpu):
    assert gpu_by_device_name(name) is gpu, f"{name} is not {gpu.name}"


@pytest.mark.parametrize(
    "name",
    [
        "NVIDIA H100 NVL",
        "NVIDIA H200 NVL",
        "NVIDIA H20-3e",
        "NVIDIA GH200 144G HBM3e",
        "NVIDIA H100 80GB HBM3 MIG 1g.10gb",
        "NVIDIA A100-SXM4-80GB",
        "",
    ],
    ids=["h100-nvl", "h200-nvl", "h20-3e", "gh200-144", "mig-slice", "a100", "empty"],
)
def test_parts_with_other_numbers_are_not_recognised(name):
    assert gpu_by_device_name(name) is None, f"{name} has other numbers than any entry"


def test_limits_of_sm_90():
    assert hardware.COMPUTE_CAPABILITY == (9, 0), "kernels need sm_90a"
    assert hardware.MAX_SMEM_BYTES_PER_BLOCK == 232448, "227 KiB"
    assert hardware.REGISTERS_PER_SM == 65536, "256 KiB of 4-byte registers"
    assert hardware.MAX_REGISTERS_PER_THREAD == 255, "8-bit register numbers, one of which is RZ"
    assert hardware.WARPGROUP_THREADS == 128, "four warps"
    assert hardware.TENSOR_FLOPS_PER_CLOCK_PER_SM == 4 * 512 * 2, "4 tensor cores, 512 multiplications and additions each"


@pytest.mark.parametrize("gpu", [H100_SXM, H100_PCIE, H200, GH200], ids=lambda gpu: gpu.name.replace(" ", "-"))
def test_peak_is_the_tensor_rate_at_an_allowed_clock(gpu):
    clock_mhz = gpu.peak_bf16_tflops * 1e6 / (hardware.TENSOR_FLOPS_PER_CLOCK_PER_SM * gpu.num_sms)
    assert 1600 < clock_mhz < (gpu.max_sm_clock_mhz or 1980), f"{gpu.name} would run at {clock_mhz} MHz"


def test_roofline_of_h100_and_h200():
    assert H100_SXM.ridge_intensity == pytest.approx(295.2, abs=0.05), "989 TFLOP/s / 3.35 TB/s"
    assert H200.ridge_intensity == pytest.approx(206.0, abs=0.05), "the same peak over 4.8 TB/s"
    assert H100_SXM.attainable_tflops(100) == pytest.approx(335), "100 FLOP per byte at 3.35 TB/s"
    assert H100_SXM.attainable_tflops(1000) == 989, "limited by the tensor cores"


@pytest.mark.parametrize("gpu", GPUS, ids=lambda gpu: gpu.name.replace(" ", "-"))
def test_roofline_bends_at_the_ridge(gpu):
    ridge = gpu.ridge_intensity
    assert gpu.attainable_tflops(ridge) == pytest.approx(gpu.peak_bf16_tflops), "the ridge reaches the peak"
    assert gpu.attainable_tflops(ridge / 2) == pytest.approx(gpu.peak_bf16_tflops / 2), "below it, memory is the limit"
    assert gpu.attainable_tflops(ridge * 2) == gpu.peak_bf16_tflops, "above it, the peak is"
