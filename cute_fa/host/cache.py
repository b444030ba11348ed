"""Cache: plan -> function on the GPU, from memory, else from the folder of compiled kernels, else from the compiler.

`host/launch.py` calls `load` once a launch; `cute-fa compile` calls `fill` ahead of time. An entry is one file
`<plan>-<key>.o`: the object file, then a digest of key and object file, so that a truncated, changed or renamed file is
compiled again and never loaded. Entries appear whole, by a rename. Nothing here removes one: a folder may be deleted at
any time, and may be shared by machines with the same kind of CPU (an entry holds host code too).
"""

import atexit
import fcntl
import hashlib
import os
import platform
import secrets
import shutil
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path
from threading import RLock

from cute_fa.core.env import CACHE_DIR, cache_dir
from cute_fa.core.errors import expected
from cute_fa.host.compile import OPTIONS, load_object, object_code, toolchain

# Waiting for another process saves the work of compiling twice and guards nothing, so it ends: that process may be
# stopped, or dead with a forked child that still holds its lock.
LOCK_WAIT_S = 60.0
LOCK_POLL_S = 0.02

PACKAGE = Path(__file__).resolve().parents[1]
KERNEL_ROOMS = ("core", "tuning", "device", "kernels")  # whose files can change a kernel

DIGEST_BYTES = hashlib.sha256().digest_size

# For the life of the process: a kernel in flight or in a captured graph must not be unloaded. As many as there are plans,
# of which heuristics give about a hundred.
_loaded: dict[object, Callable] = {}
_lock = RLock()  # of everything but a hit in memory
_fallback: Path | None = None


def load(plan) -> Callable:
    """The TVM-FFI function of the plan's kernel."""
    return _loaded.get(plan) or _load_first(plan)


def fill(plan, folder: Path) -> Path:
    """The plan's sound entry in `folder`, compiled if there is none. OSError where the folder cannot be written."""
    key = key_of(plan)
    path = folder / f"{plan.name}-{key[:16]}.o"
    if not _is_sound(path, key):
        folder.mkdir(parents=True, exist_ok=True)
        with _only_writer(path):
            if not _is_sound(path, key):
                code = object_code(plan)
                _write(path, code + _digest(key, code))
    return path


def key_of(plan) -> str:
    """A digest of everything that an object file depends on, the kind of CPU that its host code runs on included."""
    parts = (source_digest(PACKAGE, KERNEL_ROOMS), repr(plan), OPTIONS, platform.machine(), *toolchain())
    return hashlib.sha256(repr(parts).encode()).hexdigest()


@cache
def source_digest(package: Path, rooms: tuple[str, ...]) -> str:
    """A digest of the source files in these rooms of `package`, as they are when it is first asked for."""
    files = sorted(file for room in rooms for file in (package / room).rglob("*.py"))
    contents = [(file.relative_to(package).as_posix(), file.read_bytes()) for file in files]
    return hashlib.sha256(repr(contents).encode()).hexdigest()


def _load_first(plan) -> Callable:
    with _lock:
        if plan not in _loaded:
            _loaded[plan] = load_object(plan, _entry(plan))
        return _loaded[plan]


def _entry(plan) -> Path:
    """The entry in the user's folder, or in a temporary one when that cannot be written."""
    try:
        return fill(plan, cache_dir())
    except OSError as error:
        return fill(plan, _temporary_folder(error))


def _temporary_folder(reason: OSError) -> Path:
    """One a process, removed at its end; warns when it is made."""
    global _fallback
    if _fallback is None:
        _fallback = Path(tempfile.mkdtemp(prefix="cute_fa-"))
        atexit.register(shutil.rmtree, _fallback, ignore_errors=True)
        got = f"{cache_dir()} ({type(reason).__name__}: {reason})"
        advice = "This process compiles its kernels into a temporary folder; set the variable to keep them"
        message = expected(CACHE_DIR.name, "a folder that can be written", got, advice)
        warnings.warn(message, RuntimeWarning, stacklevel=2)
    return _fallback


def _digest(key: str, code: bytes) -> bytes:
    return hashlib.sha256(key.encode() + code).digest()


def _is_sound(path: Path, key: str) -> bool:
    try:
        content = path.read_bytes()
    except OSError:
        return False
    return content[-DIGEST_BYTES:] == _digest(key, content[:-DIGEST_BYTES])


def _write(path: Path, content: bytes) -> None:
    """Readers see the whole file or none; a writer that is killed leaves a `.tmp` that nobody reads."""
    temporary = path.with_name(f"{path.name}.{secrets.token_hex(8)}.tmp")
    try:
        temporary.write_bytes(content)
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


@contextmanager
def _only_writer(path: Path) -> Iterator[None]:
    """Holds a lock on `<path>.lock`, for at most as long as this process lives; goes on without one after a while."""
    with open(f"{path}.lock", "ab") as file, ExitStack() as held:
        deadline = time.monotonic() + LOCK_WAIT_S
        try:
            while not _try_lock(file) and time.monotonic() < deadline:
                time.sleep(LOCK_POLL_S)
            # Closing alone leaves the lock with every child that was forked meanwhile.
            held.callback(fcntl.flock, file, fcntl.LOCK_UN)
        except OSError:  # a file system without locks
            pass
        yield


def _try_lock(file) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
