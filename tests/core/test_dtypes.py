"""The dtypes by name, against torch's own numbers."""

import pytest
import torch

from cute_fa.core.dtypes import BY_NAME, KERNEL_DTYPES, REFERENCE_DTYPES


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str)
def test_numbers_are_torch_s(dtype):
    name = str(dtype).removeprefix("torch.")
    known, info = BY_NAME[name], torch.finfo(dtype)
    assert known.name == name, "the table is keyed by name"
    assert known.bits == info.bits, f"bits of {name}"
    assert known.num_bytes == dtype.itemsize, f"bytes of {name}"
    assert known.eps == info.eps, f"rounding of {name}"


def test_what_runs_where():
    assert KERNEL_DTYPES == ("bfloat16", "float16"), "kernels compute in 16 bits"
    assert set(REFERENCE_DTYPES) == {"bfloat16", "float16", "float32", "float64"}, "the CPU backend takes all four"
    assert set(BY_NAME) == set(REFERENCE_DTYPES), "every dtype in use has its numbers"
