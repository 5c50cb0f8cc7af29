"""The dry run of a whole loop: what repeats is skipped, and the run ends when its time is over."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from memprof.trace.files.spool import WHOLE
from memprof.virtual.repeats.calls import CallRepeats
from memprof.virtual.repeats.meter import Meter
from memprof.virtual.repeats.updates import UpdateRepeats

if TYPE_CHECKING:
    from memprof.virtual.mode import DryMode

#: The steps of a dry run that is not whole: with these, the time of the whole one is compared.
_FIRST_STEPS = 3
#: The run ends after so many times the processor time of those, and of its clock where it mostly waits.
_MOST_TIMES, _MOST_CLOCK_TIMES = 2.7, 6.0


class Whole:
    """Follows a dry run through the whole loop.

    Attributes:
        meter: Counts live bytes.
    """

    def __init__(self) -> None:
        """Starts the clock."""
        self.meter = Meter()
        self._begin_s = time.monotonic() - time.process_time()
        self._calls: CallRepeats | None = None
        self._updates: UpdateRepeats | None = None
        self._steps = 0
        self._until_s = self._until_clock_s = float("inf")
        self._is_cut = False

    def install(self, mode: DryMode, notice: Callable[[torch.Tensor], None]) -> None:
        """Wraps the calls of modules and the updates of optimizers; all run until the first step is over.

        Args:
            mode: The dry run's mode.
            notice: Logs the memory of a tensor that no operator returns.
        """
        self._calls = CallRepeats(mode, self.meter, notice)
        self._updates = UpdateRepeats(self.meter, mode.answers, self._calls.end_update)
        self._calls.install()
        self._updates.install()

    def begin_step(self, step: int) -> None:
        """Begins a step, from 0."""
        self._steps = step
        if self._calls is not None and self._updates is not None:
            self._calls.is_on = self._updates.is_on = step > 0
        if step == _FIRST_STEPS:
            self._until_s = time.process_time() * _MOST_TIMES
            self._until_clock_s = self._begin_s + (time.monotonic() - self._begin_s) * _MOST_CLOCK_TIMES

    def is_over(self) -> bool:
        """Whether the time is over."""
        self._is_cut = self._is_cut or time.process_time() > self._until_s or time.monotonic() > self._until_clock_s
        return self._is_cut

    def notes(self) -> list[str]:
        """Returns notes for the reader of the recording."""
        calls = self._calls.skipped if self._calls is not None else 0
        updates = self._updates.skipped if self._updates is not None else 0
        reach = (
            f"its time ({_MOST_TIMES} times that of {_FIRST_STEPS} steps) was over in step {self._steps:,}: later ones "
            "are not covered"
            if self._is_cut
            else "the job ended"
        )
        return [f"{WHOLE}: {reach}; {calls:,} calls of models and {updates:,} updates repeated earlier ones"]
