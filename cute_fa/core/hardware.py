"""Hopper in numbers: what sm_90 allows a block, what each part can compute and move, and the roofline between the two.

Plain data for tuning, benchmarks and messages. What a device in hand really has (SMs, clocks, free memory) is asked
from the driver by those who launch on it.
"""

from dataclasses import dataclass

# Hopper's warpgroup MMA and register hand-over exist on sm_90a only; a newer capability does not include them
# (CUDA C++ programming guide, "architecture-specific features").
COMPUTE_CAPABILITY = (9, 0)

# CUDA C++ programming guide, table "technical specifications per compute capability", column 9.0. An SM has 228 KiB
# of shared memory, of which 1 KiB per resident block is the system's.
MAX_SMEM_BYTES_PER_BLOCK = 227 * 1024
REGISTERS_PER_SM = 65536
MAX_REGISTERS_PER_THREAD = 255

# PTX ISA, "wgmma": a warpgroup is four consecutive warps, the first of which has a rank that is a multiple of four.
WARPGROUP_THREADS = 128

# NVIDIA H100 whitepaper: 4 tensor cores an SM, each 512 fused multiply-adds a clock for dense fp16 and bf16 operands.
TENSOR_FLOPS_PER_CLOCK_PER_SM = 4096


@dataclass(frozen=True)
class Gpu:
    """One part, as its maker declares it.

    hbm_gbps: GB/s (1e9 bytes). peak_bf16_tflops: dense, at the maker's boost clock; under load the clock may be lower.
    max_sm_clock_mhz: the highest clock the part is allowed, which a kernel sees only until power or heat limits it;
        None where no source was at hand.
    """

    name: str
    num_sms: int
    l2_bytes: int
    hbm_gbps: float
    peak_bf16_tflops: float
    max_sm_clock_mhz: int | None = None

    @property
    def ridge_intensity(self) -> float:
        """FLOP per byte of device memory above which the tensor cores are the limit, below which the memory is."""
        return self.peak_bf16_tflops * 1e3 / self.hbm_gbps

    def attainable_tflops(self, intensity: float) -> float:
        """The roofline (Williams et al. 2009) at `intensity` FLOP per byte."""
        return min(self.peak_bf16_tflops, intensity * self.hbm_gbps / 1e3)


MIB = 1024 * 1024

# Bandwidth and peak: NVIDIA's data sheets of each part. SMs: H100 whitepaper and, for H20, what the driver reports.
# L2: what the driver reports, which is 50 MiB with five stacks of memory and 60 MiB with six.
# Clocks: H100 whitepaper (1980 and 1755) and nvidia-smi on an H200.
H100_SXM = Gpu("H100 SXM", 132, 50 * MIB, 3350, 989, 1980)
H100_PCIE = Gpu("H100 PCIe", 114, 50 * MIB, 2000, 756, 1755)
H200 = Gpu("H200", 132, 60 * MIB, 4800, 989, 1980)
# H20's peak is far below TENSOR_FLOPS_PER_CLOCK_PER_SM at any clock it runs at: its tensor cores are held back.
H20 = Gpu("H20", 78, 60 * MIB, 4000, 148)
# The part with 96 GB of HBM3. The one with 144 GB of HBM3e (4900 GB/s) calls itself "NVIDIA GH200 144G HBM3e".
GH200 = Gpu("GH200 96GB", 132, 60 * MIB, 4000, 989)

GPUS = (H100_SXM, H100_PCIE, H200, H20, GH200)

# Whole names as torch.cuda.get_device_name gives them. Near names are other parts ("NVIDIA H100 NVL", "NVIDIA H20-3e",
# slices of a part in MIG mode), so nothing is guessed from a prefix. GH200 names its CPU memory: 120 or 480 GB.
BY_DEVICE_NAME = {
    "NVIDIA H100 80GB HBM3": H100_SXM,
    "NVIDIA H100 PCIe": H100_PCIE,
    "NVIDIA H200": H200,
    "NVIDIA H20": H20,
    "NVIDIA GH200 120GB": GH200,
    "NVIDIA GH200 480GB": GH200,
}


def gpu_by_device_name(name: str) -> Gpu | None:
    """The part that torch calls `name`, or None for a device whose numbers are not in this file."""
    return BY_DEVICE_NAME.get(name)
