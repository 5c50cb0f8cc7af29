"""The common base of Trainer callbacks: a recording, and a plan that is undone at the end."""

from __future__ import annotations

from memprof.integrations.fitting import FittingPlan
from memprof.integrations.session import Session
from memprof.policies.runtime.job import Job


class PlannedTraining:
    """A training that is recorded, and optionally runs under a plan."""

    _session: Session
    _job: Job | None

    @property
    def fit(self) -> FittingPlan | None:
        """The search result for the budget, once the recorded steps are over; None before."""
        return self._session.fit

    def _undo(self) -> None:
        """Undoes the plan, if one was applied."""
        job, self._job = self._job, None
        if job is not None:
            job.undo()
