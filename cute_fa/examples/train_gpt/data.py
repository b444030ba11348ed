"""Text as bytes: where it comes from, its held-out tail, and batches that depend on (seed, step) alone."""

import hashlib
import platform
import random
import sysconfig
from pathlib import Path

import torch

from cute_fa.core.errors import expected

VOCABULARY = 256

HELD_OUT_SHARE = 20  # one part in so many
STANDARD_LIBRARY_BYTES = 16 * 2**20  # a bound; Python 3.11 has 11 MB of such source

# Foreign packages, tests, and `encodings`, which are tables of characters rather than text.
SKIPPED_FOLDERS = {"site-packages", "dist-packages", "test", "tests", "idle_test", "encodings"}


def standard_library() -> bytes:
    """The source of Python's standard library, files in the order of their paths: the same on each call."""
    root = Path(sysconfig.get_path("stdlib"))
    files = (path for path in root.rglob("*.py") if SKIPPED_FOLDERS.isdisjoint(path.relative_to(root).parts))
    text = bytearray()
    for path in sorted(files):
        text += path.read_bytes()
        if len(text) > STANDARD_LIBRARY_BYTES:
            break
    return bytes(text[:STANDARD_LIBRARY_BYTES])


class Corpus:
    """A text cut into bytes to train on and a held-out tail, read in sequences of `seqlen` bytes.

    path: a file, or empty for the standard library. name: for the reader. digest: tells whether two texts are one.
    """

    def __init__(self, path: str, seqlen: int):
        if path and not Path(path).is_file():
            raise ValueError(expected("text", "a file", path, "Check its path"))
        text = Path(path).read_bytes() if path else standard_library()
        window = seqlen + 1  # the targets are the inputs moved on by one byte
        if len(text) < 2 * window:
            rule = f"at least {2 * window} bytes (one sequence of {seqlen} to train on and one held out)"
            raise ValueError(expected("text", rule, len(text), "Choose a longer text or a smaller seqlen"))
        self.name = Path(path).name if path else f"the standard library of Python {platform.python_version()}"
        self.digest = hashlib.sha256(text).hexdigest()
        num_held_out = max(window, len(text) // HELD_OUT_SHARE)
        tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        self.train, self.held_out = tokens[:-num_held_out], tokens[-num_held_out:]
        self._train_windows = self.train.unfold(0, window, 1)
        self._held_out_windows = self.held_out.unfold(0, window, seqlen)

    def batch(self, seed: int, step: int, size: int) -> torch.Tensor:
        """(size, seqlen + 1) int64: windows of the training text, drawn anew from (seed, step) each time."""
        draw = random.Random(f"{seed}, {step}")
        return self._train_windows[[draw.randrange(len(self._train_windows)) for _ in range(size)]].long()

    def held_out_windows(self, at_most: int) -> torch.Tensor:
        """(n, seqlen + 1) int64: windows spread evenly over the held-out tail, whose targets do not overlap."""
        stride = -(-len(self._held_out_windows) // at_most)
        return self._held_out_windows[::stride].long()
