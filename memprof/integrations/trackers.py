"""Logs a recording's figures, and a picture of its timeline, to an experiment tracker by the tracker's own API."""

from __future__ import annotations

import importlib
import io
import math
import os
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Protocol

from memprof.errors import UsageError

if TYPE_CHECKING:
    from memprof.trace.store import Trace

#: Name of the picture in every tracker.
TIMELINE = "memprof/timeline"


class _Still(Protocol):
    """A picture: ``memprof_dashboard.cell_output.Still``."""

    def to_svg(self) -> str: ...
    def to_png(self) -> bytes: ...


def log(trace: str | os.PathLike[str] | Trace, to: Any, *, step: int | None = None) -> dict[str, float]:
    """Logs a recording to a tracker: what `summary` returns, and a picture of the timeline.

        with SummaryWriter() as writer:
            memprof.integrations.log("run.memprof", writer)

    Args:
        trace: The recording: a path, or an open trace.
        to: A TensorBoard ``SummaryWriter`` (torch's or tensorboardX's), a run of W&B or Trackio, or the module
            ``wandb``, ``mlflow`` or ``trackio`` for its active run.
        step: The tracker's step at which to log; None for the tracker's default.

    Returns:
        The logged figures.

    Raises:
        UsageError: `to` is none of these, or what the tracker needs for pictures is missing.
        BadInputError: The recording is missing or damaged, or contains no operators.
        InconclusiveError: The recording contains no complete step.
    """
    from memprof.replay.history import History
    from memprof.trace.store import Trace

    kind = (to.__name__ if isinstance(to, ModuleType) else type(to).__module__).partition(".")[0]
    if kind not in _TRACKERS:
        raise UsageError(
            f"cannot log to {to!r}: give a SummaryWriter, a run of W&B or Trackio, or the module wandb, mlflow or "
            "trackio."
        )
    opened = trace if isinstance(trace, Trace) else Trace.open(Path(trace))
    figures = summary(opened)
    # The dashboard draws the picture, with a module that needs neither dash nor plotly.
    still: _Still = importlib.import_module("memprof_dashboard.cell_output").still_timeline(
        History(opened), f"{opened.path.name}: live bytes"
    )
    _TRACKERS[kind](to, figures, still, step)
    return figures


def _log_tensorboard(writer: Any, figures: dict[str, float], still: _Still, step: int | None) -> None:
    import numpy as np

    for name, value in figures.items():
        writer.add_scalar(name, value, step)
    writer.add_image(TIMELINE, np.asarray(_image(still)), step, dataformats="HWC")


def _log_wandb(run: Any, figures: dict[str, float], still: _Still, step: int | None) -> None:
    import wandb

    run.log({**figures, TIMELINE: wandb.Image(_image(still))}, step=step)


def _log_mlflow(mlflow: Any, figures: dict[str, float], still: _Still, step: int | None) -> None:
    mlflow.log_metrics(figures, step=step)
    mlflow.log_text(still.to_svg(), f"{TIMELINE}.svg")


def _log_trackio(run: Any, figures: dict[str, float], still: _Still, step: int | None) -> None:
    import trackio

    run.log({**figures, TIMELINE: trackio.Image(_image(still))}, step=step)


def _image(still: _Still) -> Any:
    png = still.to_png()  # raises a sentence where Pillow is missing
    from PIL import Image

    return Image.open(io.BytesIO(png)).convert("RGB")


#: How each tracker logs, by the name of its package.
_TRACKERS: dict[str, Callable[[Any, dict[str, float], _Still, int | None], None]] = {
    "mlflow": _log_mlflow,
    "tensorboardX": _log_tensorboard,
    "torch": _log_tensorboard,
    "trackio": _log_trackio,
    "wandb": _log_wandb,
}


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
