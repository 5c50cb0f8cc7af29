"""Determines whether a recording is still being written."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import psutil

#: Tolerance in seconds by which a process may seem younger than its recording: clocks are read at different times.
_SLACK_S = 2.0
#: Process ids of another machine mean nothing here; a recording there is running if it was written to this recently, in
#: seconds. Its parent samples the job's memory twice a second.
_QUIET_S = 60.0


def process_space() -> str:
    """Returns an identifier of the set of processes that process ids refer to here; empty where the system has none."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
        return f"{boot} {Path('/proc/self/ns/pid').readlink()}"
    except (OSError, ValueError):
        return ""


def is_being_written(spool: Path) -> bool:
    """Returns whether the parent or any recorded process of a recording is still running."""
    launch, space = _launch_of(spool), process_space()
    # Without /proc, no process is seen.
    if launch.get("process_space", space) != space or (psutil.LINUX and not space):
        return _last_written_s(spool) > time.time() - _QUIET_S
    pids: dict[int, float] = {}
    try:
        pids[int(launch["parent_pid"])] = float(launch["started_us"]) / 1e6
    except (ValueError, KeyError, TypeError):
        pids.clear()  # launch.json is missing or was cut short: the recorded processes are known by their folders
    for folder in spool.glob("process-*/"):
        number = folder.name.removeprefix("process-")
        if number.isdecimal():
            pids[int(number)] = folder.stat().st_mtime
    return any(_has_run_since(pid, moment) for pid, moment in pids.items())


def _launch_of(spool: Path) -> dict[str, Any]:
    """Returns the launch record; empty where it is missing or was cut short."""
    try:
        launch = json.loads((spool / "launch.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return launch if isinstance(launch, dict) else {}


def _last_written_s(spool: Path) -> float:
    """Returns when any file of a folder was last written, as a Unix time in seconds; 0 where there is none."""
    times = []
    for path in (spool, *spool.rglob("*")):
        try:
            times.append(path.stat().st_mtime)
        except FileNotFoundError:
            continue  # the job has just packed it
    return max(times, default=0.0)


def _has_run_since(pid: int, moment_s: float) -> bool:
    try:
        process = psutil.Process(pid)
        # A younger process merely reuses the process id.
        return process.status() != psutil.STATUS_ZOMBIE and process.create_time() < moment_s + _SLACK_S
    except psutil.Error:
        return False
