"""Keeps account of the steps that were not recorded because the job's own profiler warmed up or ran in them."""

from __future__ import annotations

from memprof.recorder.steps.window import Watch, Window

#: The window is moved behind so many of them; a job that profiles itself throughout is recorded no further.
_MOST_MOVED = 100


class StepsAside:
    """Which steps were passed over, and how far the window has moved for it.

    Attributes:
        is_due: The job's profiler has begun, and was not yet found to be over.
        has_begun: The step under way has called a model, or an optimizer.
        is_lost: The job's profiler ran in the step under way.
        moved: Steps by which the window is later.
    """

    def __init__(self) -> None:
        """Nothing was passed over yet."""
        self.is_due = False
        self.has_begun = False
        self.is_lost = False
        self.moved = 0
        self._passed: list[int] = []

    def pass_over(self, step: int, window: Window) -> None:
        """Notes that a step was not recorded; one of the window is made up for by a later one.

        Args:
            step: Its number, from 0.
            window: The window.
        """
        self._passed.append(step)
        if window.watch(step - self.moved) in (Watch.RECORDED, Watch.TIMED) and self.moved < _MOST_MOVED:
            self.moved += 1

    def notes(self) -> list[str]:
        """Returns a sentence for the reader of the recording, where steps were passed over."""
        if not self._passed:
            return []
        first, last, count = self._passed[0], self._passed[-1], len(self._passed)
        where = f"step {first} was" if count == 1 else f"{count} steps (of {first} to {last}) were"
        return [f"{where} not recorded: the job's own profiler was warming up or running"]
