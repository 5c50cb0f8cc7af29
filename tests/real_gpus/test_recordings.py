"""Recordings made on an H200, and what the same jobs took there under plans: predictions come true on a real device.

`recordings` has what `make gpu` recorded (its paths were replaced by neutral ones) and, in ``measured.json``, the peaks
that torch's allocator counted in runs without the recorder.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from memprof.analysis.plans.predict import forecast
from memprof.cli.options.plan_options import chosen_plan
from memprof.trace.schema import Floats
from memprof.trace.step import Step
from memprof.trace.store import Trace
from tests.devices import device_peak

HERE = Path(__file__).parent / "recordings"
ROWS: list[dict[str, Any]] = json.loads((HERE / "measured.json").read_text(encoding="utf-8"))["rows"]
#: Largest error of predicted peaks: blocks that are not split.
_USUAL = 0.002


def name_of(row: dict[str, Any]) -> str:
    return f"{row['model']}: {row['plan']}"


def opened(name: str) -> Trace:
    return Trace.open(HERE / f"{name}.memprof")


def device_work(step: Step) -> Floats:
    """Returns the time of the operators on the device: neither the loader's nor the update's, whose form may differ."""
    is_of_device = np.isin(step.ops.phase, ("forward", "backward")) & (step.ops.name != "aten.index.Tensor")
    return np.where(is_of_device, np.nan_to_num(step.ops.duration_us), 0.0)


@pytest.mark.parametrize("row", ROWS, ids=name_of)
def test_predicted_peaks_are_those_measured(row: dict[str, Any]) -> None:
    """From the recording of the plain job, the peak that torch's allocator counted under the plan."""
    trace = opened(row["model"])
    plan = chosen_plan(None, {name: tuple(values) for name, values in row["flags"].items()})
    if "precision" in row["flags"]:  # estimated
        bounds = forecast(trace, plan).plan.prediction.interval
        assert bounds.least_bytes <= row["allocated_bytes"] <= bounds.most_bytes
        return
    step = trace.steady_step() if plan is None else forecast(trace, plan).step
    error = device_peak(step, "cuda:0") / row["allocated_bytes"] - 1
    assert abs(error) <= _USUAL


@pytest.mark.parametrize("model", ["gpt", "vit", "resnet50"])
def test_the_time_in_bf16_is_a_lower_bound(model: str) -> None:
    """Products gain what the device's rates say (fifteenfold on an H200), but convolutions ran in TF32 already."""
    plan = chosen_plan(None, {"precision": ("bf16",)})
    assert plan is not None
    steps = (forecast(opened(model), plan).step, opened(f"{model}-bf16").steady_step(), opened(model).steady_step())
    estimated, recorded, plain = (device_work(step).sum() for step in steps)
    assert estimated < recorded < plain
