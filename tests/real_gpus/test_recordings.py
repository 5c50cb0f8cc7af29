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
from tests.gpu.reading import device_peak

HERE = Path(__file__).parent / "recordings"
ROWS: list[dict[str, Any]] = json.loads((HERE / "measured.json").read_text(encoding="utf-8"))["rows"]
#: Largest errors of predicted peaks: what cuDNN chooses in a short type, and blocks that are not split.
_WORST = {"unet: bf16": 0.02, "resnet50: bf16": 0.007, "vit: bf16": 0.0035}
_USUAL = 0.002
#: Under bf16, ResNet-50's batch norms run in other kernels.
_WORK_ERRORS = {"gpt": 0.12, "vit": 0.2, "resnet50": 0.15}


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
    step = trace.steady_step() if plan is None else forecast(trace, plan).step
    error = device_peak(step, "cuda:0") / row["allocated_bytes"] - 1
    assert abs(error) <= _WORST.get(name_of(row), _USUAL)


def test_a_recurrent_layer_is_exact_in_bf16() -> None:
    """What cuDNN keeps for backward has half the size in a short type."""
    (row,) = [row for row in ROWS if name_of(row) == "lstm: bf16"]
    plan = chosen_plan(None, {"precision": ("bf16",)})
    assert plan is not None
    assert device_peak(forecast(opened("lstm"), plan).step, "cuda:0") == row["allocated_bytes"]


@pytest.mark.parametrize("model", _WORK_ERRORS)
def test_the_time_in_bf16_is_that_of_a_run_in_bf16(model: str) -> None:
    """Products gain what the device's rates say (fifteenfold on an H200), attention half of it, convolutions little."""
    plan = chosen_plan(None, {"precision": ("bf16",)})
    assert plan is not None
    predicted = device_work(forecast(opened(model), plan).step).sum()
    recorded = device_work(opened(f"{model}-bf16").steady_step()).sum()
    assert predicted / recorded == pytest.approx(1, abs=_WORK_ERRORS[model])
