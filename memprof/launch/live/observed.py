"""Observes a running job: a recording of some steps, the device's peak, and where a step ends."""

from __future__ import annotations

import gc
import os
import shutil
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from memprof.errors import InconclusiveError
from memprof.launch.outcome.output import write_exit, write_launch
from memprof.launch.parent.settings import Settings
from memprof.launch.parent.target import Target
from memprof.recorder.recorder import Recorder
from memprof.recorder.steps.rounds import OptimizerRounds
from memprof.recorder.steps.update_hooks import UpdateHooks
from memprof.recorder.steps.window import Window
from memprof.trace.store import Trace

#: The peak is reported again once it has grown by this fraction since the last report.
_GROWTH = 0.05


class Observed:
    """Steps of the running job, recorded from now on into a temporary folder.

    The step that begins now is skipped, one is recorded, one is timed, and one is left alone; then all hooks are
    removed. The caller marks the ends of steps: other live optimizers may be unrelated to the job.
    """

    def __init__(self) -> None:
        """Starts recording.

        Raises:
            OSError: No space for temporary files.
        """
        gc.collect()  # garbage would be attributed to the job, and be missing from the steps compared with these
        self._folder = Path(tempfile.mkdtemp(prefix="memprof-"))
        self._process = os.getpid()
        self._spool = self._folder / "steps.memprof.spool"
        self._spool.mkdir(mode=0o700)
        window = Window(skip=1, steps=1, plain=1)
        settings = Settings(skip=window.skip, steps=window.steps)
        write_launch(self._spool, Target(arguments=tuple(sys.argv), name=sys.argv[0]), settings)
        self._recorder = Recorder(self._spool / f"process-{self._process}", window, is_late=True)
        self._recorder.install()
        self.end_step()  # starts the first step, and switches the recorder to explicit steps

    @property
    def is_over(self) -> bool:
        """Whether the last of the steps has ended, or recording has failed."""
        return self._recorder.is_closed or bool(self._recorder.failure)

    def end_step(self) -> None:
        """Ends a step."""
        self._recorder.step()

    def read(self) -> Trace:
        """Ends the recording and reads it.

        Raises:
            InconclusiveError: Recording failed.
            BadInputError: Nothing was recorded.
        """
        self._recorder.finish("the observed steps ended")
        if self._recorder.failure:
            raise InconclusiveError(f"recording failed: {self._recorder.failure.strip().splitlines()[-1]}")
        write_exit(self._spool, 0)
        return Trace.open(self._spool)

    def discard(self) -> None:
        """Ends the recording now, and deletes its files."""
        if os.getpid() != self._process:
            return  # a forked child: the files belong to its parent
        self._recorder.finish("no longer needed")
        shutil.rmtree(self._folder, ignore_errors=True)


class DevicePeak:
    """Peak bytes allocated by PyTorch on a CUDA device since the watch began.

    The counter is torch.cuda.max_memory_allocated; it is reset once, when the watch begins.
    """

    def __init__(self, device: torch.device, limit_bytes: int) -> None:
        """Resets the counter."""
        self._device = device
        self._limit_bytes = limit_bytes
        torch.cuda.reset_peak_memory_stats(device)

    def exceeded(self) -> int:
        """Returns the peak if it exceeds the expected one, or has grown further since the last report; 0 otherwise."""
        peak = torch.cuda.max_memory_allocated(self._device)
        if peak <= self._limit_bytes:
            return 0
        self._limit_bytes = int(peak * (1 + _GROWTH))
        return peak


class StepEnds:
    """Calls back after each step, when hooks may safely be added or removed.

    Updates in other processes and threads, within backward, and of other models end no step.
    """

    def __init__(
        self, model: torch.nn.Module, optimizers: list[torch.optim.Optimizer], then: Callable[[], None]
    ) -> None:
        """Stores the callback; nothing is called before `install`."""
        self._model, self._then = model, then
        self._process, self._thread = os.getpid(), threading.get_ident()
        self._rounds = OptimizerRounds()
        self._updates = UpdateHooks(self._before_update, self._after_update)
        self._rounds.meet(optimizers)
        self._own: set[int] = set()

    def install(self) -> None:
        """Installs the hooks, after all existing ones."""
        self._updates.install()

    def remove(self) -> None:
        """Removes the hooks; the callback is not called any more."""
        self._updates.remove()

    def _before_update(self, optimizer: Any, *_: Any) -> None:
        if self._counts(optimizer):
            self._rounds.begin_update(optimizer)

    def _after_update(self, optimizer: Any, *_: Any) -> None:
        if not self._counts(optimizer) or not self._updates.is_last() or not self._rounds.update(optimizer):
            return
        self._rounds.begin_step()
        self._then()

    def _counts(self, optimizer: Any) -> bool:
        """Whether an update can end a step: it is the model's, in its thread and outside backward."""
        is_mine = os.getpid() == self._process and threading.get_ident() == self._thread
        return is_mine and torch._C._current_graph_task_id() == -1 and self._is_of_model(optimizer)

    def _is_of_model(self, optimizer: Any) -> bool:
        """Whether an optimizer updates the model: the given ones may be wrappers of those that call the hooks."""
        if not self._own:
            self._own = {id(parameter) for parameter in self._model.parameters()}
        return any(id(parameter) in self._own for group in optimizer.param_groups for parameter in group["params"])
