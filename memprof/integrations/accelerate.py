"""Recording a training loop of accelerate: `recording = record(accelerator, "run.memprof", budget="8GiB")`."""

from __future__ import annotations

import os
from types import TracebackType
from typing import Any, Self

import torch
from accelerate import Accelerator

from memprof.integrations.asked import ask
from memprof.integrations.fitting import FittingPlan
from memprof.integrations.plans import inner_optimizer
from memprof.integrations.session import Session
from memprof.recorder.steps.rounds import OptimizerRounds
from memprof.recorder.steps.update_hooks import UpdateHooks


class AcceleratedRecording:
    """The recording of a loop that an Accelerator runs; it ends by itself behind its last step.

    A step ends when all of the Accelerator's optimizers have updated. Prepared optimizers pass an update on only where
    gradients are synchronised, so that all micro-batches under ``accelerator.accumulate`` are one step.
    """

    def __init__(self, accelerator: Accelerator, session: Session) -> None:
        """Begins to record; see `record`."""
        self._accelerator = accelerator
        self._session = session
        self._hooks = UpdateHooks(None, self._after_update)
        self._rounds = OptimizerRounds()
        prepared = [inner_optimizer(optimizer) for optimizer in accelerator._optimizers]
        self._rounds.meet(prepared)
        self._own = {id(optimizer) for optimizer in prepared}
        self._inner_end_training = accelerator.end_training
        session.begin(tells_steps=bool(self._own))
        if session.is_active:
            self._hooks.install()  # behind the recorder's own
            accelerator.end_training = self._end_training  # taken back in `end`

    @property
    def fit(self) -> FittingPlan | None:
        """What was found for the budget, once the recorded steps are over; None before."""
        return self._session.fit

    def pause(self) -> None:
        """Records nothing until `resume`, such as while the model is evaluated. Call both between two steps."""
        self._session.pause()

    def resume(self) -> None:
        """Goes on after `pause`."""
        self._session.resume()

    def end(self, error: BaseException | None = None) -> None:
        """Ends the recording where it is, if it has not ended by itself.

        Args:
            error: The error that ends the training, None where it ends in order.
        """
        self._hooks.remove()
        self._accelerator.__dict__.pop("end_training", None)
        self._session.end(error)

    def __enter__(self) -> Self:
        """Is under way already."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Ends the recording. An error of the training goes on as it is."""
        self.end(error)

    def _after_update(self, optimizer: Any, *_: Any) -> None:
        # Within backward no step ends, and in the midst of others' hooks none may come or go.
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
    """Records some steps of a loop that an Accelerator runs.

        from memprof.integrations.accelerate import record
        recording = record(accelerator, "run.memprof", budget="8GiB")

    Call it behind ``accelerator.prepare``, before the loop. The recording ends behind its last step, with
    ``accelerator.end_training()``, with a ``with`` statement around it, or with the program, whichever is first. The
    training goes on whatever becomes of the recording.

    Args:
        accelerator: The Accelerator.
        path: File to write; each process writes its own, ``run.rank1.memprof`` for ``run.memprof``.
        steps: Steps to record.
        skip: Steps to let pass first.
        force: Replace the file, and the plan beside it, if they exist.
        budget: Most bytes that may be allocated at once, as ``"8GiB"``, ``"60%"`` of what the training needs, or a
            number: once the steps are recorded, a plan is searched for and written to ``plan.toml`` beside them.
        allow: Names of the policies that the plan may use, none for the usual ones.
        forbid: Names of those that it may not.
        time_limit: Longest time that the search for a plan takes, in seconds.

    Raises:
        UsageError: Something makes no sense.
        PolicyError: A policy is named that there is not.
    """
    asked = ask(
        path, steps=steps, skip=skip, force=force, budget=budget, allow=allow, forbid=forbid, time_limit=time_limit
    )
    return AcceleratedRecording(accelerator, Session(asked))
