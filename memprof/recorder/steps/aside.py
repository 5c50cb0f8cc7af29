"""Tracks the steps not recorded because the job's own profiler was warming up or running in them."""

from __future__ import annotations

from memprof.recorder.steps.window import Watch, Window

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
        """Starts with no step skipped."""
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
