"""Cache: what is compiled how often by threads and processes, which files are trusted, keys, folders, and memory."""

import atexit
import errno
import fcntl
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from cute_fa.host import cache

HERE = Path(__file__).parent
HEAD_DIMS = (64, 96, 128, 192, 256)


class Setting:
    """A fresh process as far as the cache can tell, with an empty folder and tiny kernels."""

    def __init__(self, monkeypatch, tmp_path: Path):
        import tiny_kernel

        self.monkeypatch, self.folder, self.log = monkeypatch, tmp_path / "cache", tmp_path / "log"
        self.plan_of, self.size_of = tiny_kernel.plan_of, tiny_kernel.size_of
        self.log.touch()
        monkeypatch.setitem(sys.modules, tiny_kernel.REGISTRY, tiny_kernel)
        monkeypatch.setenv(tiny_kernel.LOG, str(self.log))
        monkeypatch.setenv("CUTE_FA_CACHE_DIR", str(self.folder))
        self.forget()

    def forget(self):
        self.monkeypatch.setattr(cache, "_loaded", {})
        self.monkeypatch.setattr(cache, "_fallback", None)

    def load(self, *head_dims: int):
        """The functions of tiny kernels, each checked to be the right one."""
        functions = [cache.load(self.plan_of(head_dim)) for head_dim in head_dims]
        assert [self.size_of(function) for function in functions] == list(head_dims), "a function of another plan"
        return functions

    @property
    def compiled(self) -> list[str]:
        return self.log.read_text().splitlines()

    @property
    def entries(self) -> list[Path]:
        return sorted(self.folder.glob("*.o"))

    def run(self, *arguments: object) -> subprocess.CompletedProcess:
        """The processes of tiny_kernel.py, on this folder and log."""
        command = [sys.executable, str(HERE / "tiny_kernel.py"), *map(str, arguments)]
        environment = os.environ | {"PYTHONPATH": str(cache.PACKAGE.parent)}
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)


@pytest.fixture
def setting(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(HERE)
    return Setting(monkeypatch, tmp_path)


def test_memory_then_disk_then_compiler(setting):
    (first,) = setting.load(64)
    assert setting.load(64) == [first], "from memory: the same function"
    setting.forget()
    assert setting.load(64) != [first], "from disk: another copy of it"
    assert len(setting.compiled) == 1, "compiled once in all"
    (entry,) = setting.entries
    plan = setting.plan_of(64)
    assert entry.name == f"{plan.name}-{cache.key_of(plan)[:16]}.o", "named after plan and key"


def test_reading_writes_nothing(setting):
    """So that a folder filled ahead of time may be mounted read-only."""
    setting.load(64)
    for lock in setting.folder.glob("*.lock"):
        lock.unlink()
    setting.monkeypatch.setattr(cache, "_only_writer", None)
    setting.forget()
    setting.load(64)
    assert list(setting.folder.iterdir()) == setting.entries, "no lock, no temporary file"


def flip(position: int):
    def change(content: bytes) -> bytes:
        changed = bytearray(content)
        changed[position] ^= 1
        return bytes(changed)

    return change


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda content: b"", id="empty"),
        pytest.param(lambda content: content[:20], id="shorter-than-a-digest"),
        pytest.param(lambda content: content[:-1], id="last-byte-missing"),
        pytest.param(lambda content: content[:-32], id="no-digest"),
        pytest.param(lambda content: content[: len(content) // 2], id="half"),
        pytest.param(lambda content: content + b"\0", id="longer"),
        pytest.param(flip(0), id="first-bit"),
        pytest.param(flip(5000), id="one-bit"),
        pytest.param(flip(-1), id="bit-of-the-digest"),
        pytest.param(lambda content: bytes(len(content)), id="zeros"),
    ],
)
def test_damaged_entry(change, setting):
    setting.load(64)
    (entry,) = setting.entries
    whole = entry.read_bytes()
    entry.write_bytes(change(whole))
    setting.forget()
    setting.load(64)
    assert len(setting.compiled) == 2, "compiled again"
    assert entry.read_bytes()[-32:] == whole[-32:], "the entry is mended"


def test_entry_of_another_plan(setting):
    setting.load(64, 96)
    first, second = (next(setting.folder.glob(f"forward-d{head_dim}-*.o")) for head_dim in (64, 96))
    second.write_bytes(first.read_bytes())
    setting.forget()
    setting.load(64, 96)
    assert len(setting.compiled) == 3, "a whole file under the wrong name is compiled again"


def test_entry_of_other_sources(setting):
    """The first 16 digits of the key may stand for another key: by accident, or because a file was renamed."""
    plan = setting.plan_of(64)
    setting.load(64)
    (entry,) = setting.entries
    setting.monkeypatch.setattr(cache, "source_digest", lambda *_: "other sources")
    entry.rename(setting.folder / f"{plan.name}-{cache.key_of(plan)[:16]}.o")
    setting.forget()
    setting.load(64)
    assert len(setting.compiled) == 2, "compiled again"


def test_damage_found_while_waiting_for_the_lock(setting):
    """What another process finished meanwhile is taken, not compiled again."""
    setting.load(64)
    (entry,) = setting.entries
    whole = entry.read_bytes()
    entry.unlink()

    @contextmanager
    def other_writer(path):
        path.write_bytes(whole)
        yield

    setting.monkeypatch.setattr(cache, "_only_writer", other_writer)
    setting.forget()
    setting.load(64)
    assert len(setting.compiled) == 1, "compiled once in all"


def test_key_parts(monkeypatch):
    class Plan:
        text = "Plan(head_dim=64)"

        def __repr__(self):
            return self.text

    plan, versions = Plan(), ("DSL 1", "CUDA 2", "TVM-FFI 3")
    monkeypatch.setattr(cache, "toolchain", lambda: versions)
    keys = [cache.key_of(plan), cache.key_of(plan)]
    assert keys.pop() == keys[0], "the same facts give the same key"
    changes = [
        (cache, "source_digest", lambda *_: "changed"),
        (Plan, "text", "Plan(head_dim=96)"),
        (cache, "OPTIONS", cache.OPTIONS.replace("sm_90a", "sm_100a")),
        (cache, "OPTIONS", f"{cache.OPTIONS} --opt-level 2"),
        (cache.platform, "machine", lambda: "another"),
        *((cache, "toolchain", lambda i=i: (*versions[:i], "changed", *versions[i + 1 :])) for i in range(3)),
    ]
    for owner, name, value in changes:
        with monkeypatch.context() as change:
            change.setattr(owner, name, value)
            keys.append(cache.key_of(plan))
    assert len(set(keys)) == 9, "each part changes the key"


def test_key_of_plans_that_share_a_name(setting):
    plan = setting.plan_of(64)
    other = replace(plan, has_turns=not plan.has_turns)
    assert cache.key_of(plan) != cache.key_of(other), "names need not tell plans apart"


@pytest.mark.parametrize("room", ["core", "tuning", "device", "kernels/forward"])
def test_source_change(room, tmp_path):
    def digest_of(package):
        return cache.source_digest.__wrapped__(package, cache.KERNEL_ROOMS)

    file = tmp_path / room / "a.py"
    file.parent.mkdir(parents=True)
    file.write_text("a = 1")
    digests = [digest_of(tmp_path)]
    file.write_text("a = 2")
    digests.append(digest_of(tmp_path))
    file.rename(file.with_name("b.py"))
    digests.append(digest_of(tmp_path))
    file.with_name("__init__.py").touch()
    digests.append(digest_of(tmp_path))
    assert len(set(digests)) == 4, "contents, names, and files that come or go"
    file.with_suffix(".pyc").touch()
    (tmp_path / "host").mkdir()
    (tmp_path / "host" / "cache.py").write_text("b = 1")
    assert digest_of(tmp_path) == digests[-1], "files that change no kernel"


def test_sources_of_this_package():
    sources = {path.parent.name for room in cache.KERNEL_ROOMS for path in (cache.PACKAGE / room).rglob("*.py")}
    assert {"core", "tuning", "device", "forward"} <= sources, f"the rooms are where they are looked for, got {sources}"


@contextmanager
def recorded_warnings():
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        yield found


def check_fallback(setting, found):
    assert len(found) == 1, f"exactly one warning, got {[str(warning.message) for warning in found]}"
    message = str(found[0].message)
    assert message.startswith("CUTE_FA_CACHE_DIR: expected a folder that can be written, got "), message
    assert str(setting.folder) in message, "says which folder"
    assert cache._fallback != setting.folder and len(list(cache._fallback.glob("*.o"))) == 2, "both kernels are there"
    setting.monkeypatch.setattr(cache, "_loaded", {})
    setting.load(64, 96)


@pytest.mark.parametrize("below", ["", "far/below"], ids=["file", "below-a-file"])
def test_folder_that_cannot_be_written(below, setting):
    """Root may write anywhere, but not in a folder that is a file."""
    setting.folder.write_text("")
    setting.monkeypatch.setenv("CUTE_FA_CACHE_DIR", str(setting.folder / below))
    at_exit = []
    setting.monkeypatch.setattr(atexit, "register", lambda *call, **options: at_exit.append((call, options)))
    with recorded_warnings() as found:
        setting.load(64, 96)
        check_fallback(setting, found)
    assert len(setting.compiled) == 2, "each kernel is compiled once"
    # What is imported meanwhile registers functions of its own.
    (((remove, *arguments), options),) = [found for found in at_exit if found[0][0] is shutil.rmtree]
    remove(*arguments, **options)
    assert not cache._fallback.exists(), "the temporary folder goes with the process"


def test_full_disk(setting):
    write = cache._write

    def write_elsewhere(path, content):
        if path.parent == setting.folder:
            raise OSError(errno.ENOSPC, "No space left on device")
        write(path, content)

    setting.monkeypatch.setattr(cache, "_write", write_elsewhere)
    with recorded_warnings() as found:
        setting.load(64, 96)
        check_fallback(setting, found)


def test_failed_write_leaves_nothing(setting):
    def fail(source, target):
        raise OSError(errno.EDQUOT, "Disk quota exceeded")

    setting.monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="quota"):
        cache.fill(setting.plan_of(64), setting.folder)
    assert [path.suffix for path in setting.folder.iterdir()] == [".lock"], "no entry, no temporary file"


def test_killed_writer(setting):
    killed = setting.run("die", 64)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    left = sorted(path.suffix for path in setting.folder.iterdir())
    assert left == [".lock", ".tmp"], f"killed with the lock held and no entry made, got {left}"
    begin = time.monotonic()
    setting.load(64)
    assert time.monotonic() - begin < cache.LOCK_WAIT_S / 2, "the lock went with its process"
    assert len(setting.compiled) == 2 and len(setting.entries) == 1, "the next one makes the entry"


def held_lock(setting, monkeypatch):
    """A lock on the entry of head_dim 64, as another process would hold it, and a short patience."""
    plan = setting.plan_of(64)
    setting.folder.mkdir()
    file = open(setting.folder / f"{plan.name}-{cache.key_of(plan)[:16]}.o.lock", "ab")
    fcntl.flock(file, fcntl.LOCK_EX)
    monkeypatch.setattr(cache, "LOCK_WAIT_S", 0.2)
    return file


def test_lock_that_is_never_released(setting, monkeypatch):
    with held_lock(setting, monkeypatch):
        begin = time.monotonic()
        setting.load(64)
    assert time.monotonic() - begin >= 0.2, "waits for it"
    assert len(setting.compiled) == 1 and len(setting.entries) == 1, "then goes on without it"


def test_file_system_without_locks(setting, monkeypatch):
    def refuse(file, operation):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with recorded_warnings() as found:
        setting.load(64)
    assert not found and len(setting.entries) == 1, "the folder is used all the same"


def test_lock_is_released_in_forked_children_too(tmp_path, monkeypatch):
    copies, try_lock = [], cache._try_lock

    def try_lock_and_fork(file) -> bool:
        copies.append(os.dup(file.fileno()))  # as a child that is forked now would have it
        return try_lock(file)

    monkeypatch.setattr(cache, "_try_lock", try_lock_and_fork)
    with cache._only_writer(tmp_path / "entry.o"):
        with open(tmp_path / "entry.o.lock") as other:
            assert not try_lock(other), "held meanwhile"
    with open(tmp_path / "entry.o.lock") as other:
        assert try_lock(other), "free afterwards"
    os.close(*copies)


def test_eight_processes(setting):
    done = setting.run("race", 8, 64, 96)
    assert done.returncode == 0, done.stderr
    assert sorted(setting.compiled) == sorted(setting.plan_of(head_dim).name for head_dim in (64, 96)), "each once"


@pytest.mark.parametrize("head_dims", [HEAD_DIMS[:1] * 8, (*HEAD_DIMS, *HEAD_DIMS[:3])], ids=["one-plan", "five-plans"])
def test_eight_threads(head_dims, setting):
    start = threading.Barrier(8)

    def load(head_dim):
        start.wait()
        return setting.load(head_dim)[0]

    with ThreadPoolExecutor(8) as pool:
        functions = list(pool.map(load, head_dims))
    assert len(setting.compiled) == len(set(head_dims)), "each plan is compiled once"
    assert len({id(function) for function in functions}) == len(set(head_dims)), "and loaded once"


@pytest.fixture
def memory(monkeypatch):
    """Functions that are made of nothing; gives the plans that were loaded, in order."""
    made = []
    monkeypatch.setattr(cache, "_loaded", {})
    monkeypatch.setattr(cache, "_entry", lambda plan: None)
    monkeypatch.setattr(cache, "load_object", lambda plan, path: made.append(plan) or f"function of {plan}")
    return made


def load_all(plans: str) -> None:
    for plan in plans:
        assert cache.load(plan) == f"function of {plan}", "its own function"


def test_each_plan_is_loaded_once_and_kept(memory):
    load_all("abcadcb")
    assert memory == list("abcd"), "a kernel in flight or in a graph must not be unloaded, so nothing is dropped"


def test_hit_takes_no_lock(memory):
    load_all("a")
    hit = threading.Thread(target=load_all, args="a", daemon=True)
    with cache._lock:
        hit.start()
        hit.join(10)
        assert not hit.is_alive(), "a loaded function is handed out while another thread compiles"


def test_failure_is_not_remembered(setting):
    def fail(plan):
        raise RuntimeError("the compiler failed")

    with setting.monkeypatch.context() as change:
        change.setattr(cache, "object_code", fail)
        with pytest.raises(RuntimeError, match="the compiler failed"):
            setting.load(64)
    setting.load(64)
    assert len(setting.compiled) == 1, "the next call tries again"
