"""What all tests share: one thread of torch for each of pytest's processes, and the skip of GPU tests elsewhere."""

import pytest
import torch

from cute_fa.core.hardware import COMPUTE_CAPABILITY

torch.set_num_threads(1)


def pytest_collection_modifyitems(items):
    if torch.cuda.is_available() and torch.cuda.get_device_capability() == COMPUTE_CAPABILITY:
        return
    skip = pytest.mark.skip(reason="needs a Hopper GPU")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)
