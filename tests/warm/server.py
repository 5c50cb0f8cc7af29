"""Has imported what many processes need, and runs each of them in a fork of itself, as a new interpreter would.

Importing torch and what its first optimizer needs takes most of a small job's processor time (2.7 of 2.8 s); numpy and
pyarrow take most of a command line's, and the modules of memprof most of what is left (0.2 of 0.3 s for `memprof
record`, 0.15 of 0.2 s in the job that it records). A server of its own, forked from that of jobs, runs jobs that this
checkout records: other jobs must not find memprof imported.

It ends when its standard input does. Its own code is named like the standard library (client.py), since its
frames are below those of every job.
"""

from __future__ import annotations

import array
import ast
import atexit
import builtins
import contextlib
import ctypes
import gc
import importlib
import io
import os
import pkgutil
import resource
import runpy
import selectors
import signal
import socket
import struct
import sys
import threading
import weakref
from types import ModuleType
from typing import Any, NoReturn

HERE = os.path.dirname(os.path.abspath(sys.argv[1]))
_MOST_DESCRIPTORS = 64
#: glibc's number of the setting, from malloc.h.
_M_ARENA_MAX = -8


class Server:
    """Forks a process for each request, and sends its exit status to the relay."""

    def __init__(self, address: str) -> None:
        self._selector = selectors.DefaultSelector()
        self._jobs: dict[int, socket.socket] = {}
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(address)
        self._listener.listen(64)
        self._woken, waking = socket.socketpair()
        waking.setblocking(False)
        signal.set_wakeup_fd(waking.fileno(), warn_on_full_buffer=False)
        self._waking = waking
        signal.signal(signal.SIGCHLD, lambda *_: None)
        for source in (self._listener, self._woken, sys.stdin):
            self._selector.register(source, selectors.EVENT_READ)

    def serve(self) -> dict[str, Any] | None:
        """Serves; returns in a fork, with what it shall run, and with None when it is over."""
        while True:
            for key, _ in self._selector.select():
                source = key.fileobj
                if source is sys.stdin:
                    self._end_jobs()
                    return None
                if source is self._woken:
                    self._woken.recv(4096)
                    self._tell_ended()
                elif source is self._listener:
                    request = self._begin()
                    if request is not None:
                        return request
                elif source in self._selector.get_map():  # its job may have ended in this round
                    assert isinstance(source, socket.socket)
                    self._relay_signals(source)

    def _begin(self) -> dict[str, Any] | None:
        connection, _ = self._listener.accept()
        space = socket.CMSG_SPACE(_MOST_DESCRIPTORS * 4)
        descriptors: array.array[int] = array.array("i")
        try:
            head, rights, *_ = connection.recvmsg(4, space)
            descriptors.frombytes(rights[0][2] if rights else b"")
            text = _read(connection, struct.unpack("=i", _read(connection, 4, head))[0])
        except (EOFError, OSError):  # the relay was killed, as tests do to what they start
            connection.close()
            for number in descriptors:
                os.close(number)
            return None
        pid = os.fork()
        if pid:
            for number in descriptors:
                os.close(number)
            self._jobs[pid] = connection
            self._selector.register(connection, selectors.EVENT_READ, pid)
            return None
        request: dict[str, Any] = ast.literal_eval(text.decode())
        self._leave(connection)
        _take_descriptors(list(descriptors), request["descriptors"])
        return request

    def _leave(self, connection: socket.socket) -> None:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for other in (connection, self._listener, self._woken, self._waking, *self._jobs.values()):
            other.close()
        self._selector.close()

    def _relay_signals(self, connection: socket.socket) -> None:
        pid = self._selector.get_key(connection).data
        try:
            numbers = connection.recv(64)
        except OSError:
            numbers = b""
        for number in numbers or [signal.SIGKILL]:  # the relay was killed
            os.kill(pid, number)
        if not numbers:
            self._selector.unregister(connection)

    def _tell_ended(self) -> None:
        while self._jobs:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                return
            connection = self._jobs.pop(pid, None)
            if connection is None:
                continue  # the server of recorded jobs
            if connection in self._selector.get_map():
                self._selector.unregister(connection)
            with contextlib.suppress(OSError):  # the relay was killed
                connection.sendall(struct.pack("=i", os.waitstatus_to_exitcode(status)))
            connection.close()

    def _end_jobs(self) -> None:
        for pid in self._jobs:
            os.kill(pid, signal.SIGKILL)


def _read(connection: socket.socket, size: int, before: bytes = b"") -> bytes:
    """Reads up to a size, what came before counted.

    Raises:
        EOFError: The other side has ended.
    """
    while len(before) < size:
        part = connection.recv(size - len(before))
        if not part:
            raise EOFError
        before += part
    return before


def _take_descriptors(held: list[int], wanted: list[int]) -> None:
    """Gives descriptors the numbers that they had."""
    beyond = max([*held, *wanted, 2]) + 1
    parked = []
    for number in held:
        parked.append(_copy_beyond(number, beyond))
        os.close(number)
    for number, target in zip(parked, wanted, strict=True):
        os.dup2(number, target, inheritable=True)
        os.close(number)


def _copy_beyond(number: int, beyond: int) -> int:
    import fcntl

    return fcntl.fcntl(number, fcntl.F_DUPFD_CLOEXEC, beyond)


def become(request: dict[str, Any]) -> tuple[str, str, str]:
    """Makes this process look as if an interpreter had just started it.

    Returns:
        The module to run, the script's path, and the code of ``-c``; "" for what it is not.
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2):
        default = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
        signal.signal(number, signal.SIG_IGN if number in request["ignored"] else default)
    os.umask(request["umask"])
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    words, flags = list(request["words"]), set()
    while words[0] in ("-u", "-P", "-B"):
        flags.add(words.pop(0))
    sys.dont_write_bytecode = bool(os.environ.get("PYTHONDONTWRITEBYTECODE")) or "-B" in flags
    unbuffered = bool(os.environ.get("PYTHONUNBUFFERED")) or "-u" in flags
    sys.stdin = open(0, closefd=False)  # noqa: SIM115 - as the interpreter does
    for number, name in ((1, "stdout"), (2, "stderr")):
        is_terminal = os.isatty(number)
        raw = io.FileIO(number, "w", closefd=False)
        stream = io.TextIOWrapper(
            raw if unbuffered else io.BufferedWriter(raw),
            encoding="utf-8",
            errors="backslashreplace" if number == 2 else "strict",
            line_buffering=is_terminal or number == 2,
            write_through=unbuffered,
        )
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    sys.__stdin__ = sys.stdin
    if arenas := os.environ.get("MALLOC_ARENA_MAX"):
        ctypes.CDLL(None).mallopt(_M_ARENA_MAX, int(arenas))  # malloc has read the variable long ago
    for name, limit in request["limits"].items():
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(getattr(resource, name), tuple(limit))
    sys.orig_argv = [sys.executable, *request["words"]]
    is_module, is_code = words[0] == "-m", words[0] == "-c"
    sys.argv = words[1:] if is_module else ["-c", *words[2:]] if is_code else list(words)
    first = request["folder"] if is_module else "" if is_code else os.path.dirname(os.path.realpath(words[0]))
    paths = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path and path != HERE]
    sys.path[:] = [*([] if "-P" in flags else [first]), *paths, *BASE_PATH]
    sys.path_importer_cache.clear()
    importlib.invalidate_caches()
    try:
        import sitecustomize  # noqa: F401 - as site does
    except ImportError as error:
        if error.name != "sitecustomize":
            raise
    if is_module:
        return words[1], "", ""
    return ("", "", words[1]) if is_code else ("", os.path.abspath(words[0]), "")


def run(module: str, script: str, code: str) -> None:
    """Runs a module, a script or the code of ``-c`` as the main module."""
    if module:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
        return
    from importlib.machinery import BuiltinImporter, SourceFileLoader

    main = ModuleType("__main__")
    main.__dict__.update(__builtins__=builtins, __loader__=BuiltinImporter)
    sys.modules["__main__"] = main
    text: bytes | str = code
    if script:
        main.__dict__.update(__file__=script, __loader__=SourceFileLoader("__main__", script), __cached__=None)
        with open(script, "rb") as file:
            text = file.read()
    exec(compile(text, script or "<string>", "exec", dont_inherit=True), main.__dict__)


def show(error: BaseException) -> None:
    """Prints an uncaught exception, like the interpreter."""
    traceback = error.__traceback__
    while traceback is not None and traceback.tb_frame.f_code.co_filename.startswith("<"):
        traceback = traceback.tb_next
    error.__traceback__ = traceback
    sys.last_type, sys.last_value, sys.last_traceback = type(error), error, traceback
    if sys.version_info >= (3, 12):
        sys.last_exc = error
    sys.excepthook(type(error), error, traceback)


def end(status: int) -> NoReturn:
    """Ends this process as the interpreter does, but for taking apart what it has imported, which takes a second."""
    threading._shutdown()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    if status < 0:  # as the interpreter ends after a KeyboardInterrupt
        signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status)


def status_of(error: SystemExit) -> int:
    """Returns the exit status that an exit stands for, having printed its message."""
    if error.code is None:
        return 0
    if isinstance(error.code, int):
        return error.code & 0xFF
    print(error.code, file=sys.stderr)
    return 1


def prepare(kind: str) -> None:
    """Imports what processes of a kind need; nothing in it starts a thread."""
    if kind == "job":
        import torch
        import torch._dynamo  # noqa: F401
    elif kind == "recorded":
        _import_below(
            "memprof.recorder",
            "memprof.virtual",
            "memprof.launch.child",
            "memprof.launch.under_plan",
            "memprof.policies.plan",
        )
    else:
        import pandas  # noqa: F401

        of_launch = ("memprof.launch.parent", "memprof.launch.outcome", "memprof.launch.dry")
        _import_below("memprof.cli", "memprof.analysis", "memprof.planners", "memprof.trace", *of_launch)
        # Every command that records would measure the same machine, for 0.2 s.
        importlib.import_module("memprof.launch.parent.speed").machine_speed()
        sys.path.insert(0, HERE)
        from relay import put_first

        sys.addaudithook(put_first)
        sys.path.remove(HERE)
        # It runs as the main module, before which runpy must not find it.
        del sys.modules["memprof.cli.main"], sys.modules["memprof.cli"].main
    for finalizer in list(weakref.finalize._registry):  # torch's libraries of operators: taking them apart takes 35 ms
        finalizer.atexit = False
    gc.collect()
    gc.freeze()


def _import_below(*names: str) -> None:
    """Imports modules, and all modules of those that are packages."""
    for name in names:
        module = importlib.import_module(name)
        for found in pkgutil.walk_packages(getattr(module, "__path__", ()), f"{name}."):
            importlib.import_module(found.name)


def main(address: str, kind: str) -> None:
    """Serves until its standard input ends; in a fork, runs what was handed over."""
    prepare(kind)
    if kind == "job" and os.fork() == 0:
        address = f"{address.removesuffix(kind)}recorded"
        prepare("recorded")
    request = Server(address).serve()
    if request is None:
        return
    what = become(request)
    status = 0
    try:
        run(*what)
    except SystemExit as error:
        status = status_of(error)
    except BaseException as error:  # noqa: BLE001
        show(error)
        status = -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    end(status)


BASE_PATH = [entry for entry in sys.path if entry not in ("", HERE)]

if __name__ == "__main__":
    main(*sys.argv[2:])
