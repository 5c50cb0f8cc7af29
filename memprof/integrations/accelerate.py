"""Recording a training loop of accelerate: `recording = record(accelerator, "run.memprof", budget="8GiB")`."""

from __future__ import annotations

import os
from types import TracebackType
from typing import Any, Self

import torch
from accelerate import Accelerator

from memprof.integrations.fitting import FittingPlan, make_request
from memprof.integrations.planned import inner_optimizer
from memprof.integrations.session import Session
from memprof.recorder.steps.rounds import OptimizerRounds
from memprof.recorder.steps.update_hooks import UpdateHooks


class AcceleratedRecording:
    """The recording of a loop run by an Accelerator; it ends by itself after its last step.

    A step ends when all of the Accelerator's optimizers have updated. Prepared optimizers apply an update only when
    gradients are synchronised, so all micro-batches under ``accelerator.accumulate`` form one step.
    """

    def __init__(self, accelerator: Accelerator, session: Session) -> None:
        """Starts recording; see `record`."""
        self._accelerator = accelerator
        self._session = session
        self._rounds = OptimizerRounds()
        self._hooks = UpdateHooks(self._before_update, self._after_update)
        prepared = [inner_optimizer(optimizer) for optimizer in accelerator._optimizers]
        self._rounds.meet(prepared)
        self._own = {id(optimizer) for optimizer in prepared}
        self._inner_end_training = accelerator.end_training
        session.begin(ends_steps=bool(self._own))
        if session.is_active:
            self._hooks.install()  # after the recorder's own
            accelerator.end_training = self._end_training  # restored in `end`

    @property
    def fit(self) -> FittingPlan | None:
        """The search result for the budget, once the recorded steps are over; None before."""
        return self._session.fit

    def pause(self) -> None:
        """Pauses recording until `resume`, e.g. during evaluation. Call both between two steps."""
        self._session.pause()

    def resume(self) -> None:
        """Resumes after `pause`."""
        self._session.resume()

    def end(self, error: BaseException | None = None) -> None:
        """Ends the recording now, unless it has already ended.

        Args:
            error: The error that ends the training; None if it ends normally.
        """
        self._hooks.remove()
        self._accelerator.__dict__.pop("end_training", None)
        self._session.end(error)

    def __enter__(self) -> Self:
        """Returns the recording, which has already started."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Ends the recording. An error of the training propagates unchanged."""
        self.end(error)

    def _before_update(self, optimizer: Any, *_: Any) -> None:
        if id(optimizer) in self._own:
            self._rounds.begin_update(optimizer)

    def _after_update(self, optimizer: Any, *_: Any) -> None:
        # A step cannot end within backward, and hooks must not be added or removed while others run.
        if torch._C._current_graph_task_id() != -1 or not self._hooks.is_last():
            return
        if not self._own:
            self._session.look()  # nothing was prepared: the updates themselves end the steps
        elif id(optimizer) in self._own and self._rounds.update(optimizer):
            self._rounds.begin_step()
            self._session.end_step()
        if not self._session.is_active:
            self.end()

    def _end_training(self) -> None:
        self.end()
        self._inner_end_training()


def record(
    accelerator: Accelerator,
    path: str | os.PathLike[str] = "run.memprof",
    *,
    steps: int = 3,
    skip: int = 2,
    force: bool = False,
    budget: str | int | None = None,
    allow: tuple[str, ...] | list[str] = (),
    forbid: tuple[str, ...] | list[str] = (),
    time_limit: float = 30.0,
) -> AcceleratedRecording:
    """Records some steps of a loop run by an Accelerator.

        from memprof.integrations.accelerate import record
        recording = record(accelerator, "run.memprof", budget="8GiB")

    Call it after ``accelerator.prepare``, before the loop. The recording ends after its last step, with
    ``accelerator.end_training()``, with an enclosing ``with`` statement, or with the program, whichever comes first.
    Training continues even if recording fails.

    Args:
        accelerator: The Accelerator.
        path: File to write; each process writes its own, ``run.rank1.memprof`` for ``run.memprof``.
        steps: Steps to record.
        skip: Steps to skip first.
        force: Overwrite the file, and the plan next to it, if they exist.
        budget: Maximum live bytes, as ``"8GiB"``, ``"60%"`` of the recorded peak, or a number: once the steps are
            recorded, a plan is searched for and written to ``plan.toml`` next to them.
        allow: Names of the policies that the plan may use; none for the default ones.
        forbid: Names of the policies that it may not use.
        time_limit: Time limit of the plan search, in seconds.

    Raises:
        UsageError: An argument is invalid.
        PolicyError: Unknown policy.
    """
    request = make_request(
        path, steps=steps, skip=skip, force=force, budget=budget, allow=allow, forbid=forbid, time_limit=time_limit
    )
    return AcceleratedRecording(accelerator, Session(request))
