"""Detects from outside that a job ran out of memory, where no recording shows it."""

from __future__ import annotations

import json
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from memprof.machines.host_limits import HostLimit, cgroup_limit, machine_memory
from memprof.trace.files.spool import KILLED, RAN_OUT
from memprof.units import format_bytes

_PROC = Path("/proc")
_CGROUPS = Path("/sys/fs/cgroup")
#: Resident memory above this fraction of a limit counts as near it: the kernel kills before the last page is used, and
#: samples are half a second apart.
_NEAR = 0.85


@dataclass(frozen=True)
class KillerWatch:
    """Detects whether the kernel killed processes for lack of memory while a job ran.

    Attributes:
        kills: The kernel's count of OOM kills before the job.
        limit: The limit of the job's control group, or else the machine's memory; None if neither is available.
    """

    kills: int | None
    limit: HostLimit | None

    @staticmethod
    def begin() -> KillerWatch:
        """Reads the count before the job starts."""
        return KillerWatch(_kills(_PROC, _CGROUPS), cgroup_limit() or machine_memory())

    def describe(self, spool: Path, returncode: int) -> str:
        """Returns the message that the job was killed: by the kernel for lack of memory, or without evidence for that.

        Args:
            spool: The recording's spool folder, with the samples of the job's resident memory.
            returncode: The job's exit status; one that a shell or a launcher reports for SIGKILL counts too.
        """
        now = _kills(_PROC, _CGROUPS)
        has_killed = self.kills is not None and now is not None and now > self.kills
        is_killed = returncode in (-signal.SIGKILL, 128 + signal.SIGKILL)
        if not is_killed and not (has_killed and returncode):
            return ""
        # Imported only now: the parent stays small while the job may need the memory.
        from memprof.analysis.host.host_use import HostUse
        from memprof.trace.files.spool_folder import read_host

        use = HostUse(*read_host(spool / "host.jsonl"), {})
        most = use.total_bytes or use.resident_bytes  # the kinds are unknown where the system reports none
        is_near = self.limit is not None and most >= _NEAR * self.limit.total_bytes
        parts = use.list_parts()
        if not has_killed and not is_near:
            held = f" Its processes held {format_bytes(most)} at most{parts and f': {parts}'}."
            return f"{KILLED}, without a sign that memory had run out: no limit was near.{held}" if most else ""
        of_limit = f" of the {format_bytes(self.limit.total_bytes)} it may have" if self.limit is not None else ""
        sure = "the kernel killed the job" if has_killed else "the kernel probably killed the job"
        if not is_killed:
            sure = "the kernel killed a process while the job ran, such as one of its workers"
        held = f"; its processes held {format_bytes(most)}{of_limit} at most{parts and f': {parts}'}" if most else ""
        grown = "".join(f" {growth.describe()}" for growth in use.growth)
        return f"{RAN_OUT} {sure} (SIGKILL){held}. Host memory ran out, not torch's allocator.{grown}"


def describe_unrecorded(spool: Path) -> list[str]:
    """Returns what ran out of memory in processes without a recording, one sentence each."""
    sentences = []
    for path in sorted(spool.glob("out-of-memory-*.json")):
        try:
            record = json.loads(path.read_bytes())
        except ValueError:
            continue  # truncated when the process was killed
        sentences.append(record.get("full") or _describe(record))
    return sentences


def _describe(record: dict[str, Any]) -> str:
    # Imported only now: the parent stays small while the job may need the memory.
    from memprof.analysis.report.sources import find_sources
    from memprof.phases import PHASES
    from memprof.trace.schema import Stacks

    frames = record.get("frames") or []
    source = find_sources(Stacks.of(stack_id=[0], frames=["\n".join(frames)])).of_stack(0) if frames else None
    requested = record.get("requested_bytes")
    phase, module = record.get("phase", -1), record.get("module")
    place = f", {PHASES[phase]}{f' of {module}' if module else ''}" if phase >= 0 else ""
    where = f", {source.place}" if source is not None else ""
    free, total = record.get("free_bytes"), record.get("total_bytes")
    room = f" {format_bytes(free)} of {format_bytes(total)} were left." if free is not None and total else ""
    size = "more memory" if requested is None else format_bytes(requested)
    what = f"{size} requested on {record['device']}{place}{where}"
    return f"out of memory before a training step was recorded: {what}.{room}"


def _kills(proc: Path, cgroups: Path) -> int | None:
    """Returns the kernel's count of OOM kills, in the job's control group or on the machine."""
    for path in (cgroups / "memory.events", proc / "vmstat"):
        try:
            words = [line.split() for line in path.read_text(encoding="utf-8").splitlines()]
        except OSError:
            continue
        for name, number in (pair for pair in words if len(pair) == 2):
            if name == "oom_kill":
                return int(number)
    return None
