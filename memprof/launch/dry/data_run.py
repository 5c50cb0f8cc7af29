"""Dry-runs a job on a typical and on the largest batches of its data."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

from memprof.analysis.plans.data_batches import DataBatches, of_loop, of_survey
from memprof.errors import InconclusiveError
from memprof.launch.dry.dry_outcome import EndedError, outcome_of
from memprof.launch.parent.recorded_job import run_recorded
from memprof.launch.parent.relay import ENDING
from memprof.launch.parent.settings import Settings
from memprof.launch.parent.target import Target
from memprof.trace.schema import Steps
from memprof.trace.store import Trace

#: Steps that are dry-run at most: of a loop without a loader, all of them.
_MOST_STEPS = 64


def read_data(target: Target, device: str, seconds: float) -> DataBatches:
    """Reads the batches of a job's training data without training, and dry-runs it on the largest.

    Raises:
        EndedError: A signal that asks the whole command to end arrived meanwhile.
        InconclusiveError: The job could not be dry-run.
    """
    with tempfile.TemporaryDirectory(prefix="memprof-data-") as folder:
        path, survey = Path(folder, "data.memprof"), Path(folder, "survey.json")
        settings = Settings(
            output=path,
            skip=0,
            steps=_MOST_STEPS,
            stop=True,
            dry_run=True,
            device=device,
            survey=survey,
            survey_s=seconds,
        )
        with open(os.devnull, "wb") as nothing, Path(folder, "errors").open("w+b") as errors:
            done = run_recorded(target, settings, nothing.fileno(), errors.fileno())
            if ending := sorted(done.signals & ENDING):
                raise EndedError(ending[0])
            errors.seek(0)
            outcome = outcome_of(done, errors.read().decode("utf-8", errors="replace"))
        if path.is_file() and not Trace.open(path).table(Steps).is_complete.any() and done.returncode == 0:
            raise InconclusiveError("the job made no training step: no optimizer updated parameters.")
        if outcome.peak_bytes is None:
            raise InconclusiveError(f"the job cannot be dry-run: {outcome.reason}")
        trace = Trace.open(path)
        if len(trace.ranks) > 1:
            trace = trace.rank_trace(trace.ranks[0])
        read: dict[str, Any] | None = json.loads(survey.read_bytes()) if survey.is_file() else None
        return of_loop(trace) if read is None else of_survey(read, trace)
