"""Processes of this user that have torch loaded: which they are, and whether this one may attach to them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from memprof.launch.attach.injection import CannotAttachError, NoAnswerError, read_mappings
from memprof.trace.launchers import rank_in, rank_texts

_LIBRARY = re.compile(r"/(?:libpython|python)(\d)\.(\d+)(?:t|d)?(?:\.so[\d.]*|/lib-dynload/.*)?$")
_FOLDER = re.compile(r"/python(\d)\.(\d+)t?/(?:lib-dynload|site-packages|dist-packages)/")
_OLDEST = (3, 11)
_REMOTE = (3, 14)
_SCOPE = Path("/proc/sys/kernel/yama/ptrace_scope")
_SYS_PTRACE = 1 << 19
_DISABLED = "PYTHON_DISABLE_REMOTE_DEBUG"


@dataclass(frozen=True)
class JobProcess:
    """A process.

    Attributes:
        pid: Its id.
        command: Its command line.
        python: Version of its Python; (0, 0) for another program.
        has_torch: Whether torch is loaded.
        rss_bytes: Resident memory.
        device_bytes: Memory on NVIDIA devices; None where the driver does not tell it.
    """

    pid: int
    command: tuple[str, ...]
    python: tuple[int, int]
    has_torch: bool
    rss_bytes: int
    device_bytes: int | None = None

    @property
    def is_remote(self) -> bool:
        """Whether its Python runs scripts for others by itself."""
        return self.python >= _REMOTE


def find_process(pid: int) -> JobProcess:
    """Returns a process that may be attached to.

    Raises:
        CannotAttachError: The system is not Linux; it is another user's, no Python, too old, without torch, stopped, in
            another container, or may not be traced; the message says what to do.
        NoAnswerError: There is no such process.
    """
    status = _status(pid) if pid in _process_ids() else {}
    if pid == os.getpid():
        raise CannotAttachError(
            f"process {pid} is this command itself: give the job's, as memprof attach --list has it."
        )
    if not status or status["State"][:1] in "ZX":
        raise NoAnswerError(f"process {pid} does not exist, or has ended.")
    owner = int(status["Uid"].split()[1])
    if owner != os.geteuid():
        raise CannotAttachError(
            f"process {pid} belongs to user {owner}, and this is user {os.geteuid()}: run memprof as its user "
            f"(sudo -u '#{owner}' memprof attach {pid} ...)."
        )
    try:
        process = _describe(pid, status)
    except PermissionError:
        raise CannotAttachError(f"process {pid} may not be read: {_how_to_permit()}") from None
    except OSError:
        raise NoAnswerError(f"process {pid} has ended.") from None
    if not process.python[0]:
        raise CannotAttachError(f"process {pid} ({_shown(process)}) is no Python program: give the job's process.")
    if process.python < _OLDEST:
        version = ".".join(map(str, process.python))
        raise CannotAttachError(f"process {pid} runs Python {version}, and memprof needs 3.11 or newer in the job.")
    if not process.has_torch:
        raise CannotAttachError(
            f"process {pid} ({_shown(process)}) has not loaded torch: memprof attach --list shows those that have."
        )
    if status["State"][:1] in "Tt":
        raise CannotAttachError(f"process {pid} is stopped: let it go on first (fg, or kill -CONT {pid}).")
    is_same_space = os.readlink("/proc/self/ns/mnt") == os.readlink(f"/proc/{pid}/ns/mnt")
    if not is_same_space or not os.path.samefile("/proc/self/root", f"/proc/{pid}/root"):
        raise CannotAttachError(
            f"process {pid} runs in a container or a chroot of its own: attach inside it (docker exec, chroot)."
        )
    refusal = _refusal(pid, process)
    if refusal:
        raise CannotAttachError(refusal)
    return process


def _refusal(pid: int, process: JobProcess) -> str:
    """Returns why a process may not be attached to, and what to do; "" if it may."""
    if process.is_remote:
        environment = _environment(pid)
        if environment.get(_DISABLED):
            return f"process {pid} was started with {_DISABLED}: start it without, to attach to it."
        if "disable-remote-debug" in process.command or "-Xdisable-remote-debug" in process.command:
            return f"process {pid} was started with -X disable-remote-debug: start it without, to attach to it."
    may_trace = bool(int(_status(os.getpid())["CapEff"], 16) & _SYS_PTRACE)
    scope = int(_SCOPE.read_text(encoding="ascii")) if _SCOPE.exists() else 0
    if scope >= 3 or (scope and not may_trace and not (scope == 1 and _is_below_us(pid))):
        return f"this system lets no process trace another (ptrace_scope {scope}): {_how_to_permit()}"
    return ""


def _how_to_permit() -> str:
    if _SCOPE.exists() and _SCOPE.read_text(encoding="ascii").strip() == "3":
        return "only a restart with kernel.yama.ptrace_scope = 1 in /etc/sysctl.conf changes that."
    return "sudo sysctl kernel.yama.ptrace_scope=0 permits it, and in a container docker run --cap-add SYS_PTRACE."


def _is_below_us(pid: int) -> bool:
    while pid not in (0, os.getpid()):
        pid = int(_status(pid).get("PPid", "0"))
    return pid > 0


def list_processes() -> list[JobProcess]:
    """Returns this user's processes that have torch loaded and may be read, by their ids."""
    found = []
    for pid in _process_ids():
        status = _status(pid) if pid != os.getpid() else {}
        if not status or status["Uid"].split()[1] != str(os.geteuid()) or status["State"][:1] in "ZX":
            continue
        try:
            process = _describe(pid, status)
        except OSError:  # it has ended, or may not be read
            continue
        if process.has_torch and process.python[0]:
            found.append(process)
    devices = _device_bytes() if found else {}
    found = [JobProcess(**{**vars(one), "device_bytes": devices.get(one.pid)}) for one in found]
    return sorted(found, key=lambda one: one.pid)


def ranks_below(pid: int) -> list[int]:
    """Returns the processes of the ranks that a launcher started, by rank; empty if the process is not a launcher.

    A rank's environment has its number, and its launcher's another one (that of its pod) or none.
    """
    children: dict[int, list[int]] = {}
    for one in _process_ids():
        children.setdefault(int(_status(one).get("PPid", "0")), []).append(one)
    found: list[tuple[int, int]] = []
    own, waiting = rank_texts(_environment(pid)), [pid]
    while waiting:
        for child in children.get(waiting.pop(), []):
            environment = _environment(child)
            if rank_texts(environment) not in ((), own):
                found.append((rank_in(environment)[0], child))
            else:
                waiting.append(child)
    return [child for _, child in sorted(found)]


def started_at(pid: int) -> str:
    """Returns when a process was started, in ticks of the system; "" if there is none."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in "ZX" else fields[19]


def describe_state(pid: int) -> str:
    """Returns what the main thread of a process does, as a clause."""
    try:
        state = Path(f"/proc/{pid}/task/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]
        call = Path(f"/proc/{pid}/task/{pid}/wchan").read_text(encoding="utf-8").strip("0\n")
    except OSError:
        return "it has ended"
    if state == "R":
        return "its main thread is inside native code"
    return f"its main thread waits in the kernel{f' ({call})' if call else ''}"


def _describe(pid: int, status: dict[str, str]) -> JobProcess:
    mappings = read_mappings(pid)
    python, has_torch = (0, 0), False
    for mapping in mappings:
        named = _LIBRARY.search(mapping.path) or _FOLDER.search(mapping.path)
        if named and named[1] == "3" and not python[0]:
            python = int(named[1]), int(named[2])
        has_torch |= "/libtorch_python" in mapping.path
    command = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").rstrip("\0").split("\0")
    rss = int(status.get("VmRSS", "0 kB").split()[0]) * 1024
    return JobProcess(pid, tuple(command), python, has_torch, rss)


def _process_ids() -> set[int]:
    """Returns the ids of all processes.

    Raises:
        CannotAttachError: The system is not Linux.
    """
    if not sys.platform.startswith("linux"):
        raise CannotAttachError(f"memprof attach needs Linux, and this is {sys.platform}: record the job instead.")
    return {int(name) for name in os.listdir("/proc") if name.isdecimal()}


def _status(pid: int) -> dict[str, str]:
    try:
        lines = Path(f"/proc/{pid}/status").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return {}
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}


def _environment(pid: int) -> dict[str, str]:
    try:
        parts = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return {}
    return {name: value for name, _, value in (part.partition("=") for part in parts)}


def _device_bytes() -> dict[int, int]:
    """Returns the memory on NVIDIA devices by process, as the driver tells it; empty without one."""
    command = ["nvidia-smi", "--query-compute-apps=pid,used_memory", "--format=csv,noheader,nounits"]
    try:
        lines = subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.splitlines()
    except (OSError, subprocess.SubprocessError):
        return {}
    found = Counter[int]()
    for line in lines:
        pid, _, size = line.partition(",")
        if pid.strip().isdecimal() and size.strip().isdecimal():
            found[int(pid)] += int(size) * 2**20
    return found


def _shown(process: JobProcess) -> str:
    return " ".join(process.command)[:60] or "without a command line"
