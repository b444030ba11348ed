"""Texts are the same on every call, the held-out tail stays out, batches follow from (seed, step)."""

import sysconfig

import pytest
import torch

from cute_fa.examples.train_gpt import data
from cute_fa.examples.train_gpt.data import Corpus, standard_library


@pytest.fixture
def small_library(tmp_path, monkeypatch):
    """A folder that stands for the standard library's; returns what should be read of it."""
    files = {
        "b.py": "second, ",
        "a.py": "first, ",
        "pack/c.py": "third, ",
        "pack/test/d.py": "a test",
        "test/e.py": "a test",
        "site-packages/f.py": "foreign",
        "encodings/g.py": "a table",
        "notes.txt": "no source",
        "z.py": "last",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(sysconfig, "get_path", {"stdlib": str(tmp_path)}.__getitem__)
    return b"first, second, third, last"


def test_standard_library_is_its_own_sources_in_order(small_library):
    assert standard_library() == small_library, "sorted, without tests, foreign packages and tables"


def test_standard_library_is_bounded(small_library, monkeypatch):
    monkeypatch.setattr(data, "STANDARD_LIBRARY_BYTES", 10)
    assert standard_library() == small_library[:10], "cut at the bound"


def test_standard_library_of_this_python():
    text = standard_library()
    assert len(text) > 4e6, "some megabytes of source"
    assert text == standard_library(), "the same on each call"
    assert Corpus("", seqlen=8).digest == Corpus("", seqlen=8).digest, "and so its digest"


@pytest.fixture
def counting_text(tmp_path):
    """2000 bytes: 1900 that count 0, 1, ..., 199 over and over, and a tail of 100 that are all 255."""
    path = tmp_path / "text"
    path.write_bytes(bytes(i % 200 for i in range(1900)) + b"\xff" * 100)
    return str(path)


def test_batches_are_windows_of_the_training_text(counting_text):
    windows = Corpus(counting_text, seqlen=16).batch(seed=0, step=0, size=500)
    assert windows.shape == (500, 17) and windows.dtype == torch.int64, "seqlen bytes and one more for the targets"
    assert ((windows[:, :-1] + 1) % 200 == windows[:, 1:]).all(), "each byte is followed by its successor in the text"
    assert windows.max() < 200, "nothing of the held-out tail"


def test_batches_follow_from_seed_and_step(counting_text):
    corpus, again = Corpus(counting_text, seqlen=16), Corpus(counting_text, seqlen=16)
    corpus.batch(seed=5, step=6, size=8)
    assert corpus.batch(seed=1, step=2, size=8).equal(again.batch(seed=1, step=2, size=8)), "whatever came before"
    assert not corpus.batch(seed=1, step=2, size=8).equal(corpus.batch(seed=1, step=3, size=8)), "the step counts"
    assert not corpus.batch(seed=1, step=2, size=8).equal(corpus.batch(seed=2, step=1, size=8)), "and the seed"


def test_every_position_of_the_training_text_is_drawn(tmp_path):
    (tmp_path / "text").write_bytes(bytes(range(40)))  # 20 bytes are held out: one window
    windows = Corpus(str(tmp_path / "text"), seqlen=15).batch(seed=0, step=0, size=500)
    assert set(windows[:, 0].tolist()) == set(range(24 - 15)), "from the first window to the last"


def test_held_out_windows(tmp_path):
    (tmp_path / "text").write_bytes(bytes(200) + bytes(range(1, 11)))  # a twentieth of 210 bytes is 10
    corpus = Corpus(str(tmp_path / "text"), seqlen=3)
    first, second, third = [1, 2, 3, 4], [4, 5, 6, 7], [7, 8, 9, 10]
    assert corpus.held_out_windows(at_most=9).tolist() == [first, second, third], "each target once"
    assert corpus.held_out_windows(at_most=2).tolist() == [first, third], "spread over the tail"


def test_shortest_text(tmp_path):
    (tmp_path / "text").write_bytes(b"0123456789")
    corpus = Corpus(str(tmp_path / "text"), seqlen=4)
    assert bytes(corpus.train.tolist()) == b"01234" and bytes(corpus.held_out.tolist()) == b"56789", "one window each"
    (tmp_path / "text").write_bytes(b"012345678")
    with pytest.raises(ValueError) as caught:
        Corpus(str(tmp_path / "text"), seqlen=4)
    assert str(caught.value) == (
        "text: expected at least 10 bytes (one sequence of 4 to train on and one held out), got 9. "
        "Choose a longer text or a smaller seqlen."
    ), "says how long it must be"


def test_missing_text():
    with pytest.raises(ValueError, match="^text: expected a file, got no/such/file. Check its path.$"):
        Corpus("no/such/file", seqlen=4)
