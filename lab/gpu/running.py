"""Runs sections and jobs in processes of their own."""

from __future__ import annotations

import datetime
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from lab.gpu.results import BROKEN, OK, TIMED_OUT, Section

ROOT = Path(__file__).resolve().parents[2]
#: What the machine may lack and was brought along (`make carry`), for this version of Python.
CARRIED = ROOT / "build" / f"carried-{sys.version_info.major}.{sys.version_info.minor}"
#: The sections in order of value, and the seconds each takes of ten minutes. What one leaves over the others get.
SHARES = {
    "exact": 80,
    "replay": 35,
    "policies": 180,
    "suggest": 55,
    "overhead": 45,
    "swap": 30,
    "samples": 20,
    "pytest": 35,
    "dry": 120,
}
#: How long before it is killed a section is asked to end.
_GRACE_S = 5.0


def environment(*, has_memprof: bool = False, **changes: str) -> dict[str, str]:
    """Returns the environment of a process that is started: outside any recording, with the carried variables.

    Args:
        has_memprof: It imports memprof itself, which need not be installed.
        changes: More variables.
    """
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("MEMPROF_")}
    given = [part for part in inherited.get("PYTHONPATH", "").split(os.pathsep) if part]
    ours = [str(path) for path, is_used in ((ROOT, has_memprof), (CARRIED, CARRIED.is_dir())) if is_used]
    paths = [*ours, *(part for part in given if part not in ours)]
    if paths:
        inherited["PYTHONPATH"] = os.pathsep.join(paths)
    return {**inherited, "KINETO_LOG_LEVEL": "9", **changes}


def run_section(name: str, device: str, out: Path, seconds: float) -> Section:
    """Runs a section to its end, or ends it, and returns what it found in either case."""
    start = time.monotonic()
    path = out / "work" / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    inner = max(seconds - _GRACE_S, 1.0)
    command = [sys.executable, "-m", "lab.gpu.section", name, device, str(out.resolve()), str(inner)]
    log = out / "work" / f"{name}.log"
    status, said = OK, ""
    with log.open("wb") as stderr:
        # A session of its own: jobs that it started end with it.
        process = subprocess.Popen(command, cwd=ROOT, env=environment(), stderr=stderr, start_new_session=True)
        try:
            if process.wait(max(seconds, 1.0)):
                status, said = BROKEN, _end_of(log)
        except subprocess.TimeoutExpired:
            status, said = TIMED_OUT, f"not done after {seconds:.0f} s"
        finally:
            _end(process)
    section = Section.from_json(json.loads(path.read_text())) if path.exists() else Section(name)
    section.status, section.error = status, said
    section.seconds = time.monotonic() - start
    section.date = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    return section


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ends a section and what it started and left; most have ended by themselves."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass  # nobody is left
    process.wait()


def _end_of(log: Path) -> str:
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return " | ".join(lines[-3:]) if lines else "it said nothing"
