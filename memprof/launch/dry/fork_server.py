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
import copy
import importlib
import json
import os
import select
import signal
import socket
import sys
from collections.abc import Callable, Mapping
from importlib.abc import Loader
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

from memprof.launch.dry.apart import SCRATCH, drop_rights, isolate
from memprof.launch.parent.relay import RELAYED
from memprof.launch.torch_versions import is_read_at_import
from memprof.trace.files.private_file import open_private

#: Packages hidden from a rank until it imports one of them.
_HIDDEN = frozenset({"torch", "torchgen", "functorch"})
_TASKS = Path("/proc/self/task")


def serve(descriptor: int) -> None:
    """Imports torch, then forks ranks as requested; returns in each rank, and never in the process itself.

    Args:
        descriptor: The socket to the parent.
    """
    handlers = {number: signal.getsignal(number) for number in RELAYED}
    if handlers[signal.SIGINT] is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # else torch's import would print a traceback, and exit with 1
    # Of another package by these names, in the script's own folder, nothing may be imported here.
    standard = set(sys.modules)
    from memprof.launch.child import prepare_ranks

    prepare_ranks()
    sys.stdout.flush()
    sys.stderr.flush()
    if {name.partition(".")[0] for name in set(sys.modules) - standard} & _own_names() or _keeps_threads():
        os._exit(0)
    _become(_Server(descriptor, handlers).fork_all())


class _Server:
    """Forks ranks, reports their ends to the parent, and ends them if the parent is killed."""

    def __init__(self, descriptor: int, handlers: Mapping[signal.Signals, Any]) -> None:
        self._socket = socket.socket(fileno=descriptor)
        self._handlers = handlers
        for number in handlers:
            signal.signal(number, signal.SIG_IGN)
        self._poller = select.poll()
        self._poller.register(descriptor, select.POLLIN)
        #: The rank and process id of each descriptor that shows the end of a process.
        self._ranks: dict[int, tuple[int, int]] = {}
        self._received = b""

    def fork_all(self) -> dict[str, Any]:
        """Forks a process for each request; returns the request in that process, and never here."""
        while True:
            for found, _ in self._poller.poll():
                if found in self._ranks:
                    rank, pid = self._ranks.pop(found)
                    self._poller.unregister(found)
                    os.close(found)
                    self._answer(rank, "status", os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
                    continue
                for request in self._requests():
                    if self._fork():
                        return request
                    self._watch(request["rank"])

    def _requests(self) -> list[dict[str, Any]]:
        try:
            received = self._socket.recv(65_536)
        except OSError:
            received = b""
        if not received:
            self._end()
        *lines, self._received = (self._received + received).split(b"\n")
        return [json.loads(line) for line in lines]

    def _fork(self) -> bool:
        """Forks; returns whether this is the new process, which handles signals as this one did at its start."""
        signal.pthread_sigmask(signal.SIG_BLOCK, self._handlers)
        try:
            self._pid = os.fork()
            if self._pid:
                return False
            for number, handler in self._handlers.items():
                signal.signal(number, handler)
            for descriptor in (self._socket.detach(), *self._ranks):
                os.close(descriptor)
            return True
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, self._handlers)

    def _watch(self, rank: int) -> None:
        descriptor = os.pidfd_open(self._pid)
        self._ranks[descriptor] = rank, self._pid
        self._poller.register(descriptor, select.POLLIN)
        self._answer(rank, "pid", self._pid)

    def _answer(self, rank: int, key: str, value: int) -> None:
        try:
            self._socket.sendall(json.dumps({"rank": rank, key: value}).encode() + b"\n")
        except OSError:
            self._end()

    def _end(self) -> NoReturn:
        """Ends this process after the parent's end, with ranks that a killed parent left: some may be stopped."""
        for _, pid in self._ranks.values():
            os.kill(pid, signal.SIGTERM)
            os.kill(pid, signal.SIGCONT)
        os._exit(0)


def _become(job: Mapping[str, Any]) -> None:
    """Makes this process the rank of a request: its environment, its streams, and torch not imported yet.

    Raises:
        OSError: It cannot be isolated.
    """
    os.environ.update(job["environment"])
    if scratch := os.environ.pop(SCRATCH, ""):
        isolate(scratch)
        drop_rights()
    if job["errors"]:
        with open(os.devnull, "r+b") as nothing, open_private(job["errors"], "xb") as errors:
            for descriptor, given in enumerate((nothing, nothing, errors)):
                os.dup2(given.fileno(), descriptor)
    from memprof.launch.child import leave_quickly

    atexit.register(leave_quickly)  # the first, which runs last
    numbers = sys.modules.get("numpy.random")
    if numbers is not None:
        numbers.seed()  # Python's own are seeded anew in each forked process
    hidden = {name: sys.modules.pop(name) for name in [*sys.modules] if name.partition(".")[0] in _HIDDEN}
    sys.meta_path.insert(0, _Imported(hidden))


def _keeps_threads() -> bool:
    """Returns whether libraries have started threads that a fork would lose.

    OpenBLAS, which numpy loads, starts one for each core, but ends them before a fork and starts them again when it
    needs them, in both processes.
    """
    if len(list(_TASKS.iterdir())) > 1:
        if not (pid := os.fork()):
            os._exit(0)
        os.waitpid(pid, 0)
    return len(list(_TASKS.iterdir())) > 1


def _own_names() -> set[str]:
    """Returns the modules that the script's folder may contain, which come before installed ones."""
    script = Path(sys.argv[0])
    folder = Path() if sys.argv[0] == "-m" else script if script.is_dir() else script.resolve().parent
    try:
        return {path.name.partition(".")[0] for path in folder.iterdir()}
    except OSError:
        return set()


class _Imported:
    """A meta path entry that finds hidden modules; the first one that is imported shows all of them.

    Finding one changes nothing: libraries look for torch's spec to learn whether torch is installed.
    """

    def __init__(self, modules: dict[str, ModuleType]) -> None:
        self._modules = modules
        self._environment, self._folder = dict(os.environ), os.getcwd()

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """Finds a hidden module."""
        if name not in self._modules:
            return None
        module = self._modules[name]
        spec = copy.copy(module.__spec__) or ModuleSpec(name, None)
        spec.loader = _Finished(module, self._show)
        return spec

    def _show(self, name: str) -> None:
        if self not in sys.meta_path:
            return
        if name != "torch":
            importlib.import_module("torch")
            return
        if _import_settings(self._environment) != _import_settings(os.environ):  # read while torch is imported: anew
            os.chdir(self._folder)  # which the script's path may be relative to
            os.execve(sys.executable, sys.orig_argv, dict(self._environment))
        sys.meta_path.remove(self)
        sys.modules.update(self._modules)


class _Finished(Loader):
    """A loader of a module that is complete."""

    def __init__(self, module: ModuleType, show: Callable[[str], None]) -> None:
        self._module, self._show = module, show
        self._spec = module.__spec__

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Shows the hidden modules; returns the module."""
        self._show(spec.name)
        return self._module

    def exec_module(self, module: ModuleType) -> None:
        """Restores the module's own spec, which the import replaced."""
        module.__spec__ = self._spec


def _import_settings(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if is_read_at_import(name)}
