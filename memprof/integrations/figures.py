"""A recording as a flat dict of numbers, to log to an experiment tracker in one line."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from memprof.trace.store import Trace


def summary(trace: str | os.PathLike[str] | Trace) -> dict[str, float]:
    """Summarizes a recording as numbers under flat names.

        wandb.run.summary.update(memprof.integrations.summary("run.memprof"))

    Args:
        trace: The recording: a path, or an open trace.

    Returns:
        ``memprof/peak_bytes`` (of the step with the highest peak), ``memprof/phase/<phase>_bytes`` (peak of each
        phase), ``memprof/peak/<category>_bytes`` (live bytes at the peak; they sum to it), ``memprof/parameter_bytes``,
        ``memprof/start_bytes`` (alive before the step), ``memprof/steps_recorded``; if known,
        ``memprof/step_time_us``, ``memprof/reserved_bytes``, and for a run under a plan with a prediction
        ``memprof/predicted_peak_bytes``.

    Raises:
        BadInputError: The recording is missing or damaged, or contains no operators.
        InconclusiveError: The recording contains no complete step.
    """
    from memprof.analysis.diff.summary import PEAK, summarise
    from memprof.policies.plan.plan_tables import plan_from_tables
    from memprof.trace.store import Trace

    opened = trace if isinstance(trace, Trace) else Trace.open(Path(trace))
    found = summarise(opened)
    figures: dict[str, float] = {
        "peak_bytes": found.peak.bytes,
        "start_bytes": found.start_bytes,
        "parameter_bytes": found.parameter_bytes,
        "steps_recorded": len(opened.recorded_steps),
        "step_time_us": found.step_time_us,
    }
    figures |= {f"phase/{name}_bytes": spot.bytes for name, spot in found.spots.items() if name != PEAK}
    figures |= {f"peak/{name}_bytes": size for name, size in found.peak.parts.get("category", {}).items()}
    if found.reserved_bytes >= 0:
        figures["reserved_bytes"] = found.reserved_bytes
    plan = plan_from_tables(opened.manifest.plan) if opened.manifest.plan else None
    if plan is not None and plan.prediction is not None:
        figures["predicted_peak_bytes"] = plan.prediction.peak_allocated_bytes
    return {f"memprof/{name}": float(value) for name, value in figures.items() if math.isfinite(value)}
