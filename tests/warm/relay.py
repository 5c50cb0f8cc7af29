"""A proxy for another process: it passes on its command line and files, waits, and ends as the other did.

Thousands of processes of the tests import it: it needs no more than what is built in.
"""

from __future__ import annotations

import _signal as signal  # what `signal` and `socket` add takes 6 ms to import
import _socket as socket
import os
import resource
import sys
from _struct import pack, unpack

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

#: Signals that a job may be sent.
_RELAYED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)

#: What pip installs to be typed.
_COMMAND = os.path.join(sys.prefix, "bin", "memprof")

_HERE = os.path.dirname(os.path.abspath(__file__))
#: What memprof sets for the process from which it forks dry runs (launch/dry/rank_processes.py).
_FORK = "MEMPROF_FORK"

#: What the servers have imported.
_MEMPROF = os.path.join(os.path.dirname(os.path.dirname(os.path.dirname(os.path.realpath(__file__)))), "memprof")

_LIMITS = tuple(name for name in dir(resource) if name.startswith("RLIMIT_"))

#: Settings of the interpreter's that the server's fork follows.
_FOLLOWED = ("PYTHONPATH", "PYTHONUNBUFFERED", "PYTHONDONTWRITEBYTECODE", "PYTHONHASHSEED")


def kind_of(words: Sequence[str], environment: Mapping[str, str]) -> str:
    """Returns which server may run a command line, given without the interpreter.

    It is ``job``, ``recorded`` for a job that this checkout records, ``cli``, or "" for none.

    Options of the interpreter only take effect when it starts, so such processes are started normally.
    """
    if any(name.startswith("PYTHON") and name not in _FOLLOWED for name in environment):
        return ""
    while words[:1] in (["-u"], ["-P"], ["-B"]):
        words = words[1:]
    is_module = words[:1] == ["-m"] and len(words) > 1
    is_code = words[:1] == ["-c"] and len(words) > 1
    if words[:1] == [_COMMAND] or (is_module and words[1] in ("memprof", "memprof.cli.main")):
        return "job" if environment.get("WARM_OTHER_MEMPROF") else "cli"
    if is_code:
        # Code that imports torch, and processes that multiprocessing spawns: those unpickle what needs torch.
        is_job = "import torch" in words[1] or "--multiprocessing-fork" in words[2:]
    elif is_module:
        is_own = words[1].startswith(("lab.", "tests.")) or os.path.isfile(f"{words[1]}.py")
        is_job = is_own or words[1] in ("pytest", "torch.distributed.run")
    else:
        is_job = bool(words) and words[0].endswith(".py") and os.path.isfile(words[0])
    if not is_job:
        return ""
    is_recorded = environment.get("MEMPROF_PACKAGE") == _MEMPROF and os.path.isdir(environment.get("MEMPROF_SPOOL", ""))
    return "recorded" if is_recorded else "job"


def put_first(event: str, arguments: Sequence[object]) -> None:
    """Lets a process that forks dry runs be handed over, too: an audit hook, which changes its ``PYTHONPATH``.

    memprof's own folder stands first there, and would have imported torch before the relay is found.
    """
    if event == "subprocess.Popen" and isinstance(environment := arguments[3], dict):
        paths = environment.get("PYTHONPATH", "").split(os.pathsep)
        if _FORK in environment and _HERE in paths:
            environment["PYTHONPATH"] = os.pathsep.join([_HERE, *(path for path in paths if path != _HERE)])


def run_elsewhere(address: str) -> None:
    """Runs this process's command line in a fork of the server's, and ends as it does; returns where there is none."""
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.connect(address)
    except OSError:
        return
    descriptors = _descriptors(connection.fileno())
    umask = os.umask(0)
    os.umask(umask)
    ignored = [number for number in _RELAYED if signal.getsignal(number) == signal.SIG_IGN]
    request = {
        "words": sys.orig_argv[1:],
        "folder": os.getcwd(),
        "environment": dict(os.environ),
        "umask": umask,
        "descriptors": descriptors,
        "ignored": ignored,
        "limits": {name: resource.getrlimit(getattr(resource, name)) for name in _LIMITS},
    }
    for number in _RELAYED:
        if number not in ignored:
            signal.signal(number, lambda arrived, _: connection.send(bytes([arrived])))
    text = repr(request).encode()  # lone surrogates are escaped
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, pack(f"{len(descriptors)}i", *descriptors))]
    connection.sendmsg([pack("=i", len(text))], rights)
    connection.sendall(text)
    answer = connection.recv(4)
    # Without an answer the server has died; a job that was killed looks the same.
    _end_like(unpack("=i", answer)[0] if len(answer) == 4 else -signal.SIGKILL)


def _descriptors(own: int) -> list[int]:
    found = [int(name) for name in os.listdir("/proc/self/fd")]
    return [number for number in found if number != own and _is_open(number)]


def _is_open(number: int) -> bool:
    try:
        os.fstat(number)
    except OSError:
        return False
    return os.get_inheritable(number)


def _end_like(returncode: int) -> None:
    if returncode < 0:
        signal.signal(-returncode, signal.SIG_DFL) if -returncode != signal.SIGKILL else None
        os.kill(os.getpid(), -returncode)
    os._exit(returncode)
