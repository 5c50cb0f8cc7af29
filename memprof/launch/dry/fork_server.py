"""A process that imports torch once and forks each dry-run rank: a rank then costs only its own work.

It is started with the ranks' own command line, and runs in ``sitecustomize``, before the first line of the script. A
forked rank returns from `serve` and continues to the script, as any Python process does. torch is hidden from it until
it imports torch, which then takes no time; the recorder is installed at that moment, as in a rank that is not forked.

Messages are lines of JSON. The parent sends the number of a rank with its environment, and the path for its errors;
the process answers with its process id, and later with its wait status. Before its first answer it may end, without
any: then ranks must be started in another way.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import io
import json
import os
import select
import signal
import socket
import sys
from collections.abc import Iterator, Mapping
from importlib.abc import Loader
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

from memprof.launch.parent.relay import RELAYED

#: Packages hidden from a rank until it imports one of them.
_HIDDEN = frozenset({"torch", "torchgen", "functorch"})
#: Variables read while these are imported: a script that sets one before must import them anew.
_READ_AT_IMPORT = ("TORCH", "PYTORCH", "OMP_", "GOMP_", "MKL_", "KMP_", "OPENBLAS_", "ATEN_")
#: Variables with such a name that are read later.
_READ_LATER = frozenset({"PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"})
_TASKS = Path("/proc/self/task")


def serve(descriptor: int) -> None:
    """Imports torch, then forks ranks as requested; returns in each rank, and never in the process itself.

    Args:
        descriptor: The socket to the parent.
    """
    # Of another package by these names, in the script's own folder, nothing may be imported here.
    standard = set(sys.modules)
    from memprof.launch.child import prepare_ranks

    prepare_ranks()
    sys.stdout.flush()
    sys.stderr.flush()
    if set(_top_names(set(sys.modules) - standard)) & _own_names() or len(list(_TASKS.iterdir())) > 1:
        os._exit(0)
    connection = socket.socket(fileno=descriptor)
    handlers: dict[int, Any] = {number: signal.signal(number, signal.SIG_IGN) for number in RELAYED}
    pids: dict[int, tuple[int, int]] = {}
    poller = select.poll()
    poller.register(connection, select.POLLIN)
    reader = connection.makefile("r", encoding="utf-8")
    while True:
        for found, _ in poller.poll():
            if found == descriptor:
                request = reader.readline()
                if not request:
                    os._exit(0)
                job = json.loads(request)
                pid = _fork(handlers)
                if pid == 0:
                    for watched in (descriptor, *pids):
                        os.close(watched)
                    connection.detach()
                    _become(job)
                    return
                watched = os.pidfd_open(pid)
                pids[watched] = job["rank"], pid
                poller.register(watched, select.POLLIN)
                _answer(connection, job["rank"], "pid", pid)
            else:
                rank, pid = pids.pop(found)
                poller.unregister(found)
                os.close(found)
                _answer(connection, rank, "status", os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))


def can_fork() -> bool:
    """Whether this system can fork ranks, and tell when they end (Linux 5.3)."""
    return hasattr(os, "fork") and hasattr(os, "pidfd_open") and _TASKS.is_dir()


def _answer(connection: socket.socket, rank: int, key: str, value: int) -> None:
    try:
        connection.sendall(json.dumps({"rank": rank, key: value}).encode() + b"\n")
    except OSError:  # the parent was killed
        os._exit(0)


def _fork(handlers: Mapping[int, Any]) -> int:
    """Forks; no signal reaches the rank before it handles signals as the process did at its start."""
    signal.pthread_sigmask(signal.SIG_BLOCK, handlers)
    try:
        pid = os.fork()
        if pid == 0:
            for number, handler in handlers.items():
                signal.signal(number, handler)
        return pid
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, handlers)


def _become(job: Mapping[str, Any]) -> None:
    """Makes this process the rank of a request: its environment, its streams, and torch not imported yet."""
    os.environ.update(job["environment"])
    if job["errors"]:
        nothing = os.open(os.devnull, os.O_RDWR)
        errors = os.open(job["errors"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        for descriptor, given in ((0, nothing), (1, nothing), (2, errors)):
            os.dup2(given, descriptor)
        os.close(nothing)
        os.close(errors)
    atexit.register(_leave_quickly)  # the first, which runs last
    numbers = sys.modules.get("numpy.random")
    if numbers is not None:
        numbers.seed()  # Python's own are seeded anew in each forked process
    hidden = {name: sys.modules.pop(name) for name in [*sys.modules] if name.partition(".")[0] in _HIDDEN}
    sys.meta_path.insert(0, _Imported(hidden))


def _leave_quickly() -> None:
    """Spares the collector's search of all objects as the process ends, which would take half a second of a core.

    Files that only this search would have closed are flushed.
    """
    from memprof.recorder.memory.live_objects import live_objects

    for file in live_objects(io.IOBase):
        with contextlib.suppress(Exception):  # closed, or the job's own
            file.flush()
    gc.freeze()


def _top_names(names: set[str]) -> Iterator[str]:
    return (name.partition(".")[0] for name in names)


def _own_names() -> set[str]:
    """Returns the modules that the script's folder may contain, which come before installed ones."""
    script = Path(sys.argv[0])
    folder = Path() if sys.argv[0] == "-m" else script if script.is_dir() else script.resolve().parent
    try:
        return {path.name.partition(".")[0] for path in folder.iterdir()}
    except OSError:
        return set()


class _Imported:
    """A meta path entry that finds what this process has imported before; the first use shows all of it."""

    def __init__(self, modules: dict[str, ModuleType]) -> None:
        self._modules = modules
        self._environment = dict(os.environ)

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """Finds a hidden module.

        Args:
            name: Its full name.
            path: Ignored.
            target: Ignored.
        """
        if name not in self._modules:
            return None
        if name != "torch":
            importlib.import_module("torch")
        else:
            if _import_settings(self._environment) != _import_settings(os.environ):
                _start_anew(self._environment)
            sys.meta_path.remove(self)
            sys.modules.update(self._modules)
        del sys.modules[name]  # else the import system would take its own spec, and run it once more
        return ModuleSpec(name, _Finished(self._modules[name]))


class _Finished(Loader):
    """A loader of a module that is complete."""

    def __init__(self, module: ModuleType) -> None:
        self._module = module
        self._spec = module.__spec__

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Returns the module."""
        return self._module

    def exec_module(self, module: ModuleType) -> None:
        """Restores the module's own spec, which the import replaced."""
        module.__spec__ = self._spec


def _import_settings(environment: Mapping[str, str]) -> dict[str, str]:
    return {
        name: value
        for name, value in environment.items()
        if name.startswith(_READ_AT_IMPORT) and name not in _READ_LATER
    }


def _start_anew(environment: Mapping[str, str]) -> NoReturn:
    """Starts this rank without a fork: its script set a variable that is read while torch is imported."""
    os.execve(sys.executable, sys.orig_argv, dict(environment))
