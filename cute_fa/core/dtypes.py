"""The dtypes of attention by name: size and rounding, without torch."""

from dataclasses import dataclass


@dataclass(frozen=True)
class DType:
    """name: as in torch. bits: size. eps: distance from 1 to the next larger number."""

    name: str
    bits: int
    eps: float

    @property
    def num_bytes(self) -> int:
        return self.bits // 8


BFLOAT16 = DType("bfloat16", 16, 2.0**-7)
FLOAT16 = DType("float16", 16, 2.0**-10)
FLOAT32 = DType("float32", 32, 2.0**-23)
FLOAT64 = DType("float64", 64, 2.0**-52)

BY_NAME = {dtype.name: dtype for dtype in (BFLOAT16, FLOAT16, FLOAT32, FLOAT64)}

KERNEL_DTYPES = ("bfloat16", "float16")
REFERENCE_DTYPES = ("bfloat16", "float16", "float32", "float64")
