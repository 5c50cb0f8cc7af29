"""`memprof verify` as it is typed and read."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from memprof.analysis.plans.predict import forecast, predicted_trace
from memprof.cli.main import main
from memprof.policies.checkpoint.policy import Checkpoint
from memprof.policies.plan.plan import Plan
from memprof.policies.plan.plan_file import write_plan
from memprof.policies.plan.plan_tables import plan_to_tables
from memprof.trace.manifest import Backend
from memprof.trace.schema import NONE, Modules, Steps, Storages
from memprof.trace.store import Trace, write_trace

SAMPLE = Path(__file__).parent.parent.parent / "sample_traces" / "gpt" / "run.memprof"
PLAN = Plan((Checkpoint(modules=("layers.*",)),))
EXTRA = 1_048_576


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A plan with its prediction, the recording it is from, and a run that met it but for 1 MiB held all along."""
    monkeypatch.chdir(tmp_path)
    shutil.copy(SAMPLE, "run.memprof")
    made = forecast(Trace.open("run.memprof"), PLAN)
    write_plan("plan.toml", made.plan)
    write_plan("bare.toml", PLAN)
    manifest, tables = predicted_trace(made)
    manifest = dataclasses.replace(manifest, backend=Backend(name="cpu-native"), plan=plan_to_tables(made.plan))
    step_time = made.predicted.step_time_us
    steps = tables[Steps]
    assert isinstance(steps, Steps)
    plain = Steps.of(
        step=[*steps.step, steps.step[0] + 2],
        kind=["recorded", "plain"],
        start_us=[0.0, 1.0],
        duration_us=[step_time * 2, step_time * 1.25],
        micro_batches=[1, 0],
        optimizer_updates=[1, 1],
        first_op_id=[steps.first_op_id[0], NONE],
        last_op_id=[steps.last_op_id[0], NONE],
        is_complete=[True, True],
    )
    storages = tables[Storages]
    assert isinstance(storages, Storages)
    row = int(np.flatnonzero((storages.category == "parameter") & (storages.freed_op_id == NONE))[0])
    larger = storages.allocated_bytes.copy()
    larger[row] += EXTRA
    tables = {**tables, Steps: plain, Storages: storages.replace(allocated_bytes=larger)}
    write_trace("head.memprof", [(manifest, tables)])
    write_trace("unplanned.memprof", [(dataclasses.replace(manifest, plan=None), tables)])
    modules = tables[Modules]
    assert isinstance(modules, Modules)
    renamed = modules.type.copy()
    renamed[:] = "Other"
    write_trace("other.memprof", [(manifest, {**tables, Modules: modules.replace(type=renamed)})])
    return tmp_path


def run(capsys: pytest.CaptureFixture[str], *words: object, status: int = 0) -> str:
    assert main(["verify", *map(str, words)]) == status
    captured = capsys.readouterr()
    assert "Traceback" not in captured.err
    return captured.out if status == 0 else captured.err


@pytest.mark.parametrize("words", [("plan.toml", "head.memprof"), ("bare.toml", "run.memprof", "head.memprof")])
def test_errors_are_predicted_less_measured(capsys: pytest.CaptureFixture[str], words: tuple[str, ...]) -> None:
    """The run holds 1 MiB more of parameters and takes a quarter longer: so say peak, phase, category and time."""
    told = json.loads(run(capsys, *words, "--json"))
    assert set(told) == {
        "schema", "predicted", "measured", "error", "budget_bytes", "measured_bytes", "fits", "phases", "categories",
        "policies", "warnings", "unlike", "peak_interval_bytes", "step_time_interval_us",
    }  # fmt: skip
    measured = told["measured"]["peak_allocated_bytes"]
    assert told["predicted"]["peak_allocated_bytes"] == measured - EXTRA
    assert told["error"]["peak_bytes"] == -EXTRA
    assert told["error"]["peak_ratio"] == pytest.approx(-EXTRA / measured)
    assert told["error"]["time_ratio"] == pytest.approx(1 / 1.25 - 1)
    assert {row["phase"]: row["error_bytes"] for row in told["phases"]}["backward"] == -EXTRA
    errors = {row["category"]: row["error_bytes"] for row in told["categories"]}
    assert errors.pop("parameter") == -EXTRA
    assert set(errors.values()) == {0}
    assert told["warnings"] == []
    assert told["policies"][0]["policy"] == "checkpoint"


def test_page_says_it_in_the_first_line(capsys: pytest.CaptureFixture[str]) -> None:
    """The first line is the comparison in words; tables give it by counter, phase and category."""
    lines = run(capsys, "plan.toml", "head.memprof").splitlines()
    assert "1.00 MiB too low" in lines[0]
    assert "(-20.0 %)" in lines[0]
    assert any(line.startswith("peak predicted: ") for line in lines)
    assert any(line.startswith("peak measured:  ") for line in lines)
    for title in ("Counters", "Peak of each phase", "Live bytes at the peak, by category"):
        assert title in lines
    assert lines[-1] == "next: memprof report head.memprof  what remains"


@pytest.mark.parametrize(
    ("words", "warning"),
    [
        (("plan.toml", "unplanned.memprof"), "unplanned.memprof was recorded without a plan"),
        (("other.toml", "run.memprof", "head.memprof"), "head.memprof was recorded under another plan."),
        (("plan.toml", "run.memprof"), "run.memprof was recorded without a plan"),
        (("plan.toml", "predicted.memprof"), "predicted.memprof is itself a prediction, not a run."),
        (("plan.toml", "predicted.memprof"), "no step without the recorder, so step time was not measured"),
    ],
)
def test_what_spoils_the_comparison_is_said(
    capsys: pytest.CaptureFixture[str], words: tuple[str, ...], warning: str
) -> None:
    """A run without a plan or under another one is compared, with a warning."""
    write_plan("other.toml", Plan((Checkpoint(modules=("layers.0",)),)))
    write_trace("predicted.memprof", [predicted_trace(forecast(Trace.open("run.memprof"), PLAN))])
    assert f"warning: {warning}" in run(capsys, *words) or warning in run(capsys, *words)


@pytest.mark.parametrize(
    ("words", "status", "sentence"),
    [
        (("bare.toml", "head.memprof"), 2, "the plan contains no prediction."),
        (("absent.toml", "head.memprof"), 5, "plan absent.toml does not exist"),
        (("plan.toml", "absent.memprof"), 5, "no file absent.memprof: check its name"),
        (("plan.toml", "other.memprof"), 3, "not comparable: the plan was made for GPT, but other.memprof is a run of"),
        (("plan.toml",), 2, "missing argument"),
        (("plan.toml", "run.memprof", "head.memprof", "head.memprof"), 2, "not 3 traces"),
    ],
)
def test_mistakes_are_one_sentence(
    capsys: pytest.CaptureFixture[str], words: tuple[str, ...], status: int, sentence: str
) -> None:
    """Errors are reported in one message with their exit code."""
    assert sentence in run(capsys, *words, status=status)
