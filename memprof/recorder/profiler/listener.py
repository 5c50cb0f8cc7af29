"""Listens to torch's allocators with a small library in C++, where `memprof doctor --build` has built it.

It takes a fraction of the time of torch's profiler, which creates objects in Python for each event. It is called
through ctypes and uses nothing of Python's, so one build serves every Python with the same torch. Where there is none,
torch's profiler is used.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import sys
from array import array
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch

from memprof.recorder.faults import raise_if_of_job
from memprof.trace.files.private_file import FOLDER_MODE, user_folder

_SOURCE = Path(__file__).with_name("listener.cpp")
_COMPILERS = ("c++", "g++", "clang++")
_NO_COMPILER = f"there is no C++ compiler ({', '.join(_COMPILERS)}, or the variable CXX)"
_ON_LINUX = "it is built on Linux only"
_LIMIT_S = 120  # twice this is below the limit of what examines torch
#: Run by a new library before it is installed: an allocation, of which torch says that no profiler sees it.
_TRIAL = """
import sys, torch
from pathlib import Path
from memprof.recorder.profiler.listener import Listener
def check(is_right):
    if not is_right:
        raise SystemExit("error: it does not report what torch allocates")
listener = Listener(Path(sys.argv[1]))
check(listener.start() and not torch._C._autograd._profiler_enabled())
kept = torch.ones(1234, requires_grad=True)
kept.sum().backward()
rows = listener.stop().cpu
check(rows[1:3].tolist() == [kept.data_ptr(), kept.nbytes] and sum(rows[2::4]) == 2 * kept.nbytes)
check(listener.clear())
torch.ones(10)
check(listener.stop() is None)
check(listener.start(keeps_events=False))
torch.ones(10)
check(listener.high.value >= kept.nbytes + 40 and not listener.stop().cpu and listener.clear())
"""


class Heard(NamedTuple):
    """What the allocators reported.

    Attributes:
        cpu: Rows of Unix time in ns, address, bytes (negative for a free), and the allocator's count after it.
        cuda: Rows of Unix time in ns, index of the device, and bytes.
    """

    cpu: array[int]
    cuda: array[int]


class Listener:
    """The library, which listens in one thread at a time and in those that run its backward.

    Attributes:
        high: The CPU allocator's highest count since this was last set to 0, while it listens without keeping events.
    """

    def __init__(self, path: Path) -> None:
        """Loads it; torch's own libraries, which it needs, are loaded already.

        Args:
            path: The library.

        Raises:
            OSError: It cannot be loaded.
        """
        self._library: Any = ctypes.PyDLL(str(path))  # holds the interpreter's lock: its functions take less than that
        self._library.memprof_rows.restype = ctypes.c_int64
        self._library.memprof_high.restype = ctypes.c_void_p
        self.high = ctypes.c_int64.from_address(self._library.memprof_high())

    def start(self, *, keeps_events: bool = True) -> bool:
        """Starts in this thread; returns False if a profiler runs in it.

        Args:
            keeps_events: Keep each event, and not the highest count alone.
        """
        return bool(self._library.memprof_start(int(keeps_events)))

    def stop(self) -> Heard | None:
        """Stops, and returns the events; None if it was not running in this thread, or lacked memory for them.

        `clear` must follow, after backward once more.
        """
        return Heard(self._rows(0), self._rows(1)) if self._library.memprof_stop() else None

    def clear(self, *, evicts: bool = False) -> bool:
        """Removes what is left of ended ones in this thread; returns whether nothing is.

        Args:
            evicts: Also remove one that still listens, in backward's threads: its events are then incomplete.
        """
        return bool(self._library.memprof_clear(int(evicts)))

    def _rows(self, which: int) -> array[int]:
        place = ctypes.c_void_p()
        words = self._library.memprof_rows(which, ctypes.byref(place))
        rows = array("q")
        if words:
            rows.frombytes(ctypes.string_at(place, words * rows.itemsize))
        return rows


@cache
def find_listener() -> Listener | None:
    """Returns the library built for this torch, loaded; None where there is none that is safe to load."""
    try:
        path = library_path()
        return Listener(path) if _is_ours(path) else None
    except Exception as error:  # noqa: BLE001 - audit hooks of the job may raise any
        raise_if_of_job(error)
        return None


def why_none() -> str:
    """Returns why `find_listener` returns None; "" if it does not."""
    if find_listener() is not None:
        return ""
    try:
        if library_path().is_file():
            return (
                "built, but cannot be loaded" if _is_ours(library_path()) else "built, but others may have written it"
            )
    except (OSError, RuntimeError) as error:
        return f"there is no folder for it: {error}"
    if sys.platform != "linux":
        return _ON_LINUX
    return "not built" if _compiler() else f"not built, and {_NO_COMPILER}"


def library_path() -> Path:
    """Returns where the library for this torch is, or would be."""
    version = torch.version.git_version
    core = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    build = (core.stat().st_size, core.stat().st_mtime_ns) if core.is_file() else ()  # others may share its version
    built_for = (_SOURCE.read_bytes(), torch.__version__, version, build, _has_new_abi(), platform.machine())
    key = hashlib.sha256(repr(built_for).encode()).hexdigest()[:16]
    return user_folder("XDG_CACHE_HOME", ".cache") / "memprof" / "listener" / f"listener-{key}.so"


def build() -> str:
    """Builds the library for this torch, tries it in a process of its own, and puts it into the user's cache folder.

    Returns:
        Why it could not be built; "" if it was.
    """
    if sys.platform != "linux":
        return _ON_LINUX
    import tempfile  # here and below: the job gets no needless modules

    compiler = _compiler()
    if compiler is None:
        return _NO_COMPILER
    folder = Path(torch.__file__).parent
    try:
        path = library_path()
        path.parent.mkdir(mode=FOLDER_MODE, parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as place:  # so that two builds at once do not meet
            new = Path(place) / path.name
            paths = [f"-I{folder / 'include'}", f"-L{folder / 'lib'}", "-ltorch_cpu", "-lc10"]
            options = ["-shared", "-fPIC", "-O2", "-std=c++20", f"-D_GLIBCXX_USE_CXX11_ABI={int(_has_new_abi())}"]
            fault = _run([*compiler, *options, str(_SOURCE), "-o", str(new), *paths])
            fault = fault or _run([sys.executable, "-P", "-c", _TRIAL, str(new)])
            if not fault:
                new.chmod(FOLDER_MODE)
                new.replace(path)
            return fault
    except (OSError, RuntimeError) as error:
        return str(error)


def _run(command: list[str]) -> str:
    """Runs a command; returns why it failed, "" if it did not."""
    import subprocess

    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=_LIMIT_S, check=False, env=environment
        )
    except subprocess.TimeoutExpired:
        return f"{command[0]} took more than {_LIMIT_S} seconds"
    if not done.returncode:
        return ""
    lines = [line for line in done.stderr.splitlines() if "error" in line.lower()] or done.stderr.splitlines()
    return f"{Path(command[0]).name} failed: {lines[0] if lines else f'status {done.returncode}'}"


def _compiler() -> list[str] | None:
    """Returns the words of the command that compiles, which may be `ccache g++`; None where there is none."""
    import shlex
    import shutil

    commands = (shlex.split(os.environ.get("CXX", "")), *([name] for name in _COMPILERS))
    return next(([found, *words[1:]] for words in commands if words and (found := shutil.which(words[0]))), None)


def _has_new_abi() -> bool:
    return bool(torch.compiled_with_cxx11_abi())


def _is_ours(path: Path) -> bool:
    """Whether only this user could have put the library there."""
    if not path.is_file():
        return False
    found = [each.stat() for each in (path, path.parent)]
    return all(each.st_uid == os.geteuid() and not each.st_mode & 0o022 for each in found)
