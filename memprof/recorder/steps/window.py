"""Decides how each step of a job is observed, and ends the job after the last one."""

from __future__ import annotations

import signal
import sys
from dataclasses import dataclass
from enum import Enum
from typing import Any

_TIMERS = ("ITIMER_REAL", "ITIMER_VIRTUAL", "ITIMER_PROF")


class Watch(Enum):
    """How a step is observed."""

    WARM_UP = "warm_up"  # as recorded, but before the window: the only data if a job dies or ends early
    SKIPPED = "skipped"  # allocation events only, to keep track of live memory
    RECORDED = "recorded"  # operators and allocations
    TIMED = "timed"  # operator times, without the dispatch mode
    PLAIN = "plain"  # only the clock
    RESTING = "resting"  # after the window: the sizes of model inputs, until one is larger
    CLOSED = "closed"  # after all recording


#: After the window, input sizes are checked for this many steps.
_MOST_RESTING = 100_000


@dataclass(frozen=True)
class Window:
    """Which steps are recorded: `skip` steps pass, `steps` are recorded, then one is timed, `plain` are clocked.

    Attributes:
        skip: Steps to skip first; optimizer state and workspaces are allocated in them.
        steps: Steps to record.
        stop: End the job after the window.
        is_dry: Nothing is timed after it: the job is a dry run.
        is_whole: Every step of a dry run is recorded, until its time is over.
        goes_on: Later steps with larger inputs than all recorded ones are recorded as well.
        plain: Steps whose median is the step time, a single one of which may be off by 10 %: the unobserved one, and
            those after it, where after the window only the sizes of inputs are checked, or nothing at all.
    """

    skip: int = 2
    steps: int = 3
    stop: bool = False
    is_dry: bool = False
    is_whole: bool = False
    goes_on: bool = False
    plain: int = 3

    def __post_init__(self) -> None:
        """Validates the numbers.

        Raises:
            ValueError: They form no valid window.
        """
        if self.skip < 0 or self.steps < 1:
            raise ValueError(f"invalid window: skip={self.skip}, steps={self.steps}; skip must be >= 0 and steps >= 1")

    def watch(self, step: int) -> Watch:
        """Returns how step number `step` (from 0) is observed."""
        if self.is_whole:
            return Watch.RECORDED
        if step < self.skip:
            return Watch.WARM_UP if step < self.steps else Watch.SKIPPED
        after = step - self.skip - self.steps
        if after < 0:
            return Watch.RECORDED
        if self.is_dry:
            return Watch.CLOSED
        if after == 0:
            return Watch.TIMED
        if after <= (1 if self.goes_on else self.plain):
            return Watch.PLAIN
        return Watch.RESTING if self.goes_on and after < 2 + _MOST_RESTING else Watch.CLOSED

    def is_clocked(self, step: int) -> bool:
        """Returns whether the duration of a step after the window counts as that of a plain one."""
        return 0 < step - self.skip - self.steps <= self.plain


#: Largest shift of the window behind such steps; a job that profiles itself throughout is recorded no further.
_MOST_MOVED = 100


class StepsAside:
    """The skipped steps, and how far the window has moved because of them.

    Attributes:
        is_due: The job's profiler has begun, and was not yet found to be over.
        has_begun: The current step has called a model or an optimizer.
        is_lost: The job's profiler ran in the current step.
        moved: Steps by which the window is delayed.
    """

    def __init__(self) -> None:
        self.is_due = False
        self.has_begun = False
        self.is_lost = False
        self.moved = 0
        self._passed: list[int] = []

    def pass_over(self, step: int, window: Window) -> None:
        """Notes that a step was not recorded; a step of the window is replaced by a later one.

        Args:
            step: Its number, from 0.
            window: The window.
        """
        self._passed.append(step)
        if window.watch(step - self.moved) in (Watch.RECORDED, Watch.TIMED) and self.moved < _MOST_MOVED:
            self.moved += 1

    def notes(self) -> list[str]:
        """Returns a note for the reader of the recording, if steps were skipped."""
        if not self._passed:
            return []
        first, last, count = self._passed[0], self._passed[-1], len(self._passed)
        where = f"step {first} was" if count == 1 else f"{count} steps (of {first} to {last}) were"
        return [f"{where} not recorded: the job's own profiler was warming up or running"]


def end_job() -> None:
    """Ends this process the way `sys.exit` does; a pool worker continues, since its result would be awaited forever.

    The job's timers are stopped: Python removes signal handlers as it exits, after which a timer would kill it.

    Raises:
        SystemExit: Always, except in a pool.
    """
    if _is_daemon():
        return
    for name in _TIMERS:
        timer = getattr(signal, name, None)  # missing on some systems
        if timer is not None:
            signal.setitimer(timer, 0)
    raise SystemExit(0)


def _is_daemon() -> bool:
    """Whether another process owns this one and ends it with itself, like the workers of `multiprocessing.Pool`."""
    multiprocessing: Any = sys.modules.get("multiprocessing.process")
    return multiprocessing is not None and bool(multiprocessing.current_process().daemon)
