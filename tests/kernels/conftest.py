"""What the GPU tests of kernels share: calls under NVIDIA's compute-sanitizer."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import cute_fa

# Torch's thread of the backward may still drop Python objects, and at exit that ends the process (pytorch issue 38228).
END = """
import time, torch
torch.cuda.synchronize()
time.sleep(1)
"""


@pytest.fixture
def sanitized():
    """sanitized(tool, code) runs Python code in a process of its own, and fails on what the tool reports."""

    def run(tool: str, code: str):
        if shutil.which("compute-sanitizer") is None:
            pytest.skip("compute-sanitizer is not installed")
        calls, root = [sys.executable, "-c", code + END], Path(cute_fa.__file__).parent.parent
        # Compiled first: the compiler asks the driver questions that it answers with errors, which memcheck reports too.
        subprocess.run(calls, check=True, cwd=root)
        command = ["compute-sanitizer", "--tool", tool, "--error-exitcode", "9", *calls]
        done = subprocess.run(command, capture_output=True, text=True, cwd=root)
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]

    return run
