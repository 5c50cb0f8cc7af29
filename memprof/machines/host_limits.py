"""Host memory still available to a process under its tightest limit."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from memprof.hidden_import import import_hidden

resource = import_hidden("resource")

_PROC = Path("/proc")
_CGROUPS = Path("/sys/fs/cgroup")
#: Where tensors lie that processes share, and what helps where it is full.
SHARED = "/dev/shm"
SHARED_ADVICE = (
    "batches of loader workers lie there. Fewer workers, a smaller prefetch_factor, or more of it "
    "(docker run --shm-size) help."
)
#: A cgroup without a limit contains a number near the maximum, or the word max.
_UNLIMITED = 1 << 60


@dataclass(frozen=True)
class HostLimit:
    """One limit on a process's memory.

    Attributes:
        total_bytes: The limit.
        free_bytes: Bytes left of it.
    """

    total_bytes: int
    free_bytes: int


def nearest_limit(proc: Path = _PROC, cgroups: Path = _CGROUPS, pid: int | None = None) -> HostLimit | None:
    """Returns the limit with the least memory left: the process's own, its cgroup's, or the machine's memory.

    Args:
        proc: The proc file system.
        cgroups: The cgroup file system.
        pid: The process; this one by default.

    Returns:
        The limit; None where the system reports none.
    """
    known = (_own(proc, pid), cgroup_limit(proc, cgroups, pid), machine_memory(proc))
    return min((limit for limit in known if limit is not None), key=lambda limit: limit.free_bytes, default=None)


def named_limits(proc: Path = _PROC, cgroups: Path = _CGROUPS, shared: str = SHARED) -> dict[str, HostLimit]:
    """Returns the limits that the processes of a job share, by their names in a recording; those that exist.

    Args:
        proc: The proc file system.
        cgroups: The cgroup file system.
        shared: The file system of shared memory.
    """
    try:
        space = os.statvfs(shared)
        pages = HostLimit(space.f_blocks * space.f_frsize, space.f_bavail * space.f_frsize)
    except (OSError, AttributeError):  # Windows has no statvfs
        pages = None
    found = {"control group": cgroup_limit(proc, cgroups), "machine": machine_memory(proc), SHARED: pages}
    return {name: limit for name, limit in found.items() if limit is not None and limit.total_bytes}


def machine_memory(proc: Path = _PROC) -> HostLimit | None:
    """Returns the machine's memory and how much is available without swapping; None where not reported."""
    known = {}
    for line in _read(proc / "meminfo").splitlines():
        name, _, rest = line.partition(":")
        number = rest.split()[0] if rest.split() else ""
        if number.isdecimal():
            known[name] = int(number) * 1024
    if "MemTotal" not in known or "MemAvailable" not in known:
        return None
    return HostLimit(known["MemTotal"], known["MemAvailable"])


def free_memory() -> HostLimit:
    """Returns the machine's memory on any system; without /proc, what caches hold counts as used."""
    import psutil  # a recorded job imports this module, but not psutil

    try:
        memory = psutil.virtual_memory()
    except OSError:
        total, free = (os.sysconf(name) * os.sysconf("SC_PAGE_SIZE") for name in ("SC_PHYS_PAGES", "SC_AVPHYS_PAGES"))
        return HostLimit(total, free)
    return HostLimit(memory.total, memory.available)


def cgroup_limit(proc: Path = _PROC, cgroups: Path = _CGROUPS, pid: int | None = None) -> HostLimit | None:
    """Returns the limit of a process's (by default this one's) control group, as of a container; None for none.

    A nested group has its parents' limits too; the one with the least memory left counts.
    """
    limits = []
    for line in _read(proc / str(pid or "self") / "cgroup").splitlines():
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        # Version 2 has a single tree; version 1 has one for memory.
        is_memory = "memory" in controllers.split(",")
        if controllers and not is_memory:
            continue
        root = cgroups / "memory" if is_memory else cgroups
        names = ("memory.limit_in_bytes", "memory.usage_in_bytes") if is_memory else ("memory.max", "memory.current")
        folder = root / path.strip("/")
        # In a container the path is the host's, and the group's own files are at the root.
        for group in [folder, *folder.parents]:
            if not group.is_relative_to(root):
                break
            total, used = (_number(group / name) for name in names)
            if used is not None:
                used = max(0, used - _droppable(group))
            if total is not None and used is not None and total < _UNLIMITED:
                limits.append(HostLimit(total, max(0, total - used)))
    return min(limits, key=lambda limit: limit.free_bytes, default=None)


def _droppable(group: Path) -> int:
    """Returns the bytes of files that a control group has read and not used lately: the kernel drops them first."""
    known = dict(line.split() for line in _read(group / "memory.stat").splitlines() if len(line.split()) == 2)
    found = known.get("total_inactive_file", known.get("inactive_file", ""))
    return int(found) if found.isdecimal() else 0


def _own(proc: Path, pid: int | None) -> HostLimit | None:
    """Returns the address space left under ``ulimit -v``."""
    try:
        total = (resource.prlimit(pid, resource.RLIMIT_AS) if pid else resource.getrlimit(resource.RLIMIT_AS))[0]
    except OSError:  # it has ended
        return None
    pages = _read(proc / str(pid or "self") / "statm").split()
    if total == resource.RLIM_INFINITY or not pages:
        return None
    return HostLimit(total, max(0, total - int(pages[0]) * resource.getpagesize()))


def _number(path: Path) -> int | None:
    text = _read(path).strip()
    return int(text) if text.isdecimal() else None


def _read(path: Path) -> str:
    """Reads a system file; "" where it is missing or not readable."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
