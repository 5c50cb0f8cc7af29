"""Attaches to one job many times: with commands that are killed at random moments, and what 100 dumps leave behind.

python -m lab.attach.endurance [--out FOLDER] [--python PROGRAM] [--kills COUNT] [--dumps COUNT] [--tensors COUNT]

The first job computes its losses twice, attached to and alone, and ends with status 7. Of the second it is printed what
its memory grows by after the first ten dumps, and the time for which a dump held it up.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path

from lab.attach.kinds import PROGRAMS
from lab.attach.running import attached
from lab.zoo_runs import environment
from memprof.launch.attach.session import Session

_WARM, _LONGEST_S, _WAIT_S = 10, 3.0, 600.0


def main() -> int:
    """Runs both; returns 1 where the killed job's losses or status differ."""
    parser = argparse.ArgumentParser(prog="python -m lab.attach.endurance", description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("build/attach-endurance"), help="folder for what runs leave")
    parser.add_argument("--python", default=sys.executable, help="interpreter of the jobs")
    parser.add_argument("--kills", type=int, default=30, help="commands that are killed")
    parser.add_argument("--dumps", type=int, default=100, help="dumps of the second job")
    parser.add_argument("--tensors", type=int, default=5000, help="tensors of the second job")
    args = parser.parse_args()
    home = args.out.resolve()
    home.mkdir(parents=True, exist_ok=True)
    is_same = not args.kills or _killed(home, args.python, args.kills)
    if args.dumps:
        _dumped(home, args.python, args.dumps, args.tensors)
    return int(not is_same)


def _start(home: Path, python: str, *words: str) -> subprocess.Popen[str]:
    ready = home / "ready"
    ready.unlink(missing_ok=True)
    settings = {**environment(home), "LAB_READY": str(ready), "LAB_DONE": str(home / "done")}
    settings["PYTHONPATH"] = str(PROGRAMS)
    job = subprocess.Popen([python, *words], cwd=home, env=settings, stdout=subprocess.PIPE, text=True)
    while not ready.exists() and job.poll() is None:
        time.sleep(0.05)
    return job


def _killed(home: Path, python: str, count: int) -> bool:
    stop, dice = home / "stop", random.Random(1)
    stop.unlink(missing_ok=True)
    job = _start(home, python, str(PROGRAMS / "steady.py"), str(stop))
    ended = 0
    for number in range(count):
        options = dice.choice(
            (["--dump"], ["-f", "-o", f"{number}.memprof"], ["-f", "-o", f"{number}.memprof", "--light"])
        )
        os.chdir(home)
        attach = attached(["attach", str(job.pid), *options], home / "attach.txt")
        attach.join(dice.uniform(0, _LONGEST_S))
        ended += attach.exitcode is not None
        attach.kill()
        attach.join()
    stop.touch()
    text, _ = job.communicate(timeout=_WAIT_S)
    print(
        f"{count} commands killed, {ended} of which had ended: {text.strip()}, exit status {job.returncode}", flush=True
    )
    return text.strip().endswith("True") and job.returncode == 7


def _dumped(home: Path, python: str, count: int, tensors: int) -> None:
    job = _start(home, python, str(PROGRAMS / "many.py"), str(tensors), "100000")
    assert job.stdout is not None
    pauses, before = [], (0, 0)
    for number in range(_WARM + count):
        if number == _WARM:
            before = _memory(job)
        with Session(job.pid, print, _WAIT_S) as session:
            pauses.append(float(session.ask("dump")["processor_s"]))
    after = _memory(job)
    job.send_signal(signal.SIGKILL)
    job.wait()
    timed = sorted(pauses[_WARM:])
    heap, objects = (new - old for new, old in zip(after, before, strict=True))
    print(f"{count} dumps of {tensors} tensors: {heap:+,} B in the C heap, {objects:+,} objects of Python")
    print(f"pause, s of a processor: {timed[0]:.3f} least, {statistics.median(timed):.3f} median, {timed[-1]:.3f} most")


def _memory(job: subprocess.Popen[str]) -> tuple[int, int]:
    """Returns what the job prints of its memory next: bytes of the C heap, and objects of Python."""
    assert job.stdout is not None
    until = time.monotonic() + 8  # what was printed before is skipped
    words: list[str] = []
    while time.monotonic() < until:
        words = job.stdout.readline().split()
    return int(words[0]), int(words[2])


if __name__ == "__main__":
    sys.exit(main())
