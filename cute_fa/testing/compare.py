"""The accuracy rule: how far a result may be from the oracle, given what plain torch does at the same dtype."""

from dataclasses import dataclass
from math import inf, isfinite

import torch

MULTIPLE = 2.0
MULTIPLE_WITH_SOFTCAP = 3.0


@dataclass(frozen=True)
class Comparison:
    """Largest absolute errors of one tensor: ours, plain torch's at the same dtype, and the bound on ours."""

    error: float
    torch_error: float
    bound: float

    @property
    def ok(self) -> bool:
        return self.error <= self.bound and isfinite(self.error)

    @property
    def share(self) -> float:
        """error / bound: 1 is the limit; infinite where the error is, or where the bound is 0 and the error is not."""
        if self.error == 0:
            return 0.0
        return self.error / self.bound if self.bound and isfinite(self.error) else inf


def compare(got, plain, oracle, softcap: bool = False, cancelled: float = 0.0) -> Comparison:
    """Compares `got` with the float64 `oracle`; `plain` is plain torch's result at got's dtype.

    The bound is 2x (3x with a softcap) plain's error plus half a unit of rounding of the largest value, which is what
    a correctly rounded result may be off. Where the oracle is 0 everywhere, it is a unit of fp32's rounding of `cancelled`,
    the size of what cancels. Infinities must agree in place and sign; a NaN is an infinite error.
    """
    error = _max_error(got, oracle)
    torch_error = _max_error(plain, oracle)
    multiple = MULTIPLE_WITH_SOFTCAP if softcap else MULTIPLE
    finite = oracle[torch.isfinite(oracle)]
    largest = finite.abs().max().item() if finite.numel() else 0.0
    rounding = torch.finfo(got.dtype).eps / 2 * largest if largest else torch.finfo(torch.float32).eps * cancelled
    return Comparison(error, torch_error, multiple * torch_error + rounding)


def _max_error(got, oracle) -> float:
    if got.numel() == 0:
        return 0.0
    difference = (got.double() - oracle.double()).abs()
    difference = difference.masked_fill(torch.isinf(oracle) & (got.double() == oracle.double()), 0)
    return difference.nan_to_num(nan=inf, posinf=inf).max().item()
