"""The jobs: run plain or under ``memprof record``, several in parallel, one of them computing at a time."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from lab.gpu.running import ROOT, environment
from lab.gpu.section import Found, Place

JOBS = Path(__file__).parent / "jobs"
#: Steps before the window, in it, and behind it: one in which operators are timed, one that is timed as a whole and at
#: whose end the recorder leaves, then untouched ones.
SKIP, WINDOW, BEHIND = 2, 2, 6
#: The size of each model on a device; in a rehearsal all are tiny.
SIZES = {"gpt": "small", "gpt-medium": "medium", "resnet50": "base", "vit": "base", "lstm": "base", "unet": "base"}
MEMPROF = [sys.executable, "-m", "memprof.cli.main"]

T = TypeVar("T")


class JobError(Exception):
    """A job or a command failed; the message is the end of what it said."""

    def __init__(self, returncode: int, said: str) -> None:
        super().__init__(f"ended with {returncode}: {said}")
        self.returncode = returncode
        self.said = said


class NoTimeError(Exception):
    """The section's time is up."""


@dataclass(frozen=True)
class Job:
    """One of the training scripts, with its settings.

    Attributes:
        model: A key of SIZES.
        arguments: More arguments.
        variables: Of its environment.
        script: Name of the script, where it is not the model's.
    """

    model: str
    arguments: tuple[str, ...] = ()
    variables: dict[str, str] = field(default_factory=dict)
    script: str = ""

    def command(self, place: Place, steps: int) -> list[str]:
        """Returns the words that run it, Python left out."""
        size = "tiny" if place.is_rehearsal else SIZES[self.model]
        script = JOBS / f"{self.script or self.model.partition('-')[0]}.py"
        fixed = ["--device", place.device, "--size", size, "--steps", str(steps)]
        return [str(script), *fixed, "--gate", str(place.folder("work") / "gate"), *self.arguments]


@dataclass(frozen=True)
class Trained:
    """What a job printed of its steps: microseconds, losses and, on a device, the allocator's own peaks."""

    steps: list[dict[str, Any]]

    def behind(self, parts: int = 1) -> list[dict[str, Any]]:
        """Returns the steps after all recorded ones; ``parts`` rounds of the loop are one."""
        return self.steps[(SKIP + WINDOW + 2) * parts :]

    def peak(self, counter: str, parts: int = 1) -> int:
        """Returns the highest count of the untouched steps."""
        return max(int(step[counter]) for step in self.behind(parts))

    def step_us(self, parts: int = 1) -> float:
        """Returns the median time of the untouched steps."""
        return parts * statistics.median(step["us"] for step in self.behind(parts))


def run(
    place: Place,
    command: Sequence[str],
    *,
    has_memprof: bool = False,
    folder: Path = ROOT,
    allowed: tuple[int, ...] = (0,),
    **variables: str,
) -> tuple[str, str]:
    """Runs a command to its end and returns its stdout, and the end of its stderr.

    Args:
        place: Where.
        command: The command.
        has_memprof: It imports memprof itself, from another folder than the checkout.
        folder: Where it runs.
        allowed: The exit codes of a success.
        variables: More variables of its environment.

    Raises:
        JobError: It failed.
        NoTimeError: The section's time is used up.
    """
    left = place.end - time.monotonic()
    if left <= 0:
        raise NoTimeError("no time was left")
    if place.is_rehearsal:
        variables = {"OMP_NUM_THREADS": "1", **variables}
    try:
        done = subprocess.run(
            command,
            cwd=folder,
            env=environment(has_memprof=has_memprof, **variables),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=left,
        )
    except subprocess.TimeoutExpired:
        raise NoTimeError("it was not done when the section's time was up") from None
    said = " | ".join([line for line in done.stderr.decode(errors="replace").splitlines() if line.strip()][-3:])
    if done.returncode not in allowed:
        raise JobError(done.returncode, said)
    return done.stdout.decode(), said


def train(place: Place, job: Job, steps: int = SKIP + WINDOW + BEHIND) -> Trained:
    """Runs a job as it is."""
    printed, _ = run(place, [sys.executable, *job.command(place, steps)], **job.variables)
    return _read(printed)


def record(place: Place, job: Job, output: Path, *, plan: Path | None = None, flags: Sequence[str] = ()) -> Trained:
    """Runs a job under ``memprof record``, and under a plan where there is one.

    Args:
        place: Where.
        job: The job.
        output: The recording.
        plan: The plan.
        flags: More flags of ``memprof record``.
    """
    window = ["--skip", str(SKIP), "--steps", str(WINDOW), *(["--plan", str(plan)] if plan else []), *flags]
    words = job.command(place, SKIP + WINDOW + BEHIND)
    printed, said = run(place, [*MEMPROF, "record", "-f", "-o", str(output), *window, *words], **job.variables)
    if not output.is_file():
        raise JobError(0, said)
    return _read(printed)


def side_by_side(
    place: Place, found: Found, items: Iterable[tuple[str, T]], work: Callable[[T], Any]
) -> Iterator[tuple[T, Any]]:
    """Processes items in parallel, and yields each with its result in the given order; those that fail are recorded.

    A job begins while another computes, and computes when that has ended: the gate (see ``jobs/training.py``).
    """
    with ThreadPoolExecutor(place.lanes) as pool:
        futures = [(name, item, pool.submit(work, item)) for name, item in items]
        left_out = []
        for name, item, future in futures:
            try:
                yield item, future.result()
            except NoTimeError:
                left_out.append(name)
            except Exception as error:  # noqa: BLE001 - one row must not lose the others; its error is in the results
                found.lost(name, error)
    if left_out:
        found.note(f"No time was left for {', '.join(left_out)}.")


def _read(stdout: str) -> Trained:
    return Trained(json.loads(stdout.splitlines()[-1])["steps"])
