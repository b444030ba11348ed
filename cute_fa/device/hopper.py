"""Hopper: what the DSL offers for sm_90 and moves between its releases; imported here, and from here everywhere else."""

from cutlass.memory import SmemAllocator
from cutlass.tensor_utils import LayoutEnum
from cutlass.utils.hopper_helpers import make_smem_layout_b, make_trivial_tiled_mma

COL_MAJOR = LayoutEnum.COL_MAJOR

__all__ = [
    "COL_MAJOR",
    "SmemAllocator",
    "make_smem_layout_b",
    "make_trivial_tiled_mma",
]
