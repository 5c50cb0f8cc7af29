"""`memprof largest`: the largest batch, or the longest sequence, that fits a budget."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from memprof.cli.main import main
from memprof.planners.scaling.base import scale_by_shape
from memprof.planners.scaling.doubt import SEEN, step_with_errors
from memprof.planners.search.explore import explore
from memprof.planners.search.request import SearchRequest
from memprof.policies.plan.interval import interval_of
from memprof.policies.plan.plan_file import read_plan
from memprof.replay.live import live_bytes
from memprof.trace.store import Trace

SAMPLES = Path(__file__).parents[2] / "sample_traces"
RESNET = str(SAMPLES / "resnet" / "run.memprof")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def run(capsys: pytest.CaptureFixture[str], *words: str, status: int = 0) -> str:
    assert main(["largest", *words]) == status
    captured = capsys.readouterr()
    assert "Traceback" not in captured.err
    return captured.out if status in (0, 4) else captured.err


def test_largest_batch_fits_and_the_next_does_not(capsys: pytest.CaptureFixture[str]) -> None:
    """The number it prints is the last that fits; the plan is written with the prediction at that size.

    At a size that was not recorded, the upper bound of the peak is within the budget, not only the peak.
    """
    words = (RESNET, "--budget", "39.5MiB", "--allow", "checkpoint")
    told = json.loads(run(capsys, *words, "--write", "plan.toml", "--json"))
    sizes = {one["size"]: one["fits"] for one in told["sizes"]}
    largest = told["largest"]
    assert largest > told["recorded_sizes"][0]
    assert sizes[largest]
    assert not sizes[largest + 1]
    plan = read_plan(Path("plan.toml"))
    assert (plan.at_batch, plan.at_length) == (largest, None)
    assert plan.prediction is not None
    assert plan.prediction.peak_allocated_bytes == told["plan"]["peak_allocated_bytes"] < told["budget_bytes"]
    sized = scale_by_shape(Trace.open(RESNET).fullest_step(is_whole=True))
    for size, fits in ((largest, True), (largest + 1, False)):
        step = step_with_errors(sized, size)
        assert step.size_errors == (SEEN, SEEN)
        most = interval_of(plan.policies, (step,), (plan.transform(step),)).most_bytes
        assert (most <= told["budget_bytes"]) is fits
    # By the peak alone, the next size would fit as well.
    assert live_bytes(plan.transform(sized.step_at(largest + 1))).during.max() <= told["budget_bytes"]


def test_the_page_shows_the_bounds(capsys: pytest.CaptureFixture[str]) -> None:
    """Both ends of the peak, as suggest shows them; nothing below the recorded size without a plan."""
    page = run(capsys, RESNET, "--budget", "39.5MiB", "--allow", "checkpoint")
    assert page.startswith("Largest batch within 39.50 MiB: ")
    assert " to " in page.splitlines()[0].partition("; peak ")[2]
    page = run(capsys, RESNET, "--budget", "1MiB", "--allow", "checkpoint", "--time-limit", "60", status=4)
    assert page.startswith("No batch fits 1.00 MiB: at 1 the lowest peak is ")


def test_a_peak_within_and_bounds_beyond_the_budget_start_a_search() -> None:
    """If the peak at another size fits but its upper bound does not, plans are tried."""
    step = step_with_errors(scale_by_shape(Trace.open(RESNET).fullest_step(is_whole=True)), 40)
    recorded = interval_of((), (step,), (step,))
    peak = int(live_bytes(step).during.max())
    assert recorded.least_bytes < peak < recorded.most_bytes
    answer = explore(step, SearchRequest((peak + recorded.most_bytes) // 2, allow=("checkpoint",)))
    assert answer.best is not None
    assert answer.best.policies


def test_recordings_of_two_jobs_are_not_two_sizes(capsys: pytest.CaptureFixture[str]) -> None:
    """Recordings that are not of one job are named as such, exit code 3."""
    other = str(SAMPLES / "gpt" / "run.memprof")
    message = run(capsys, RESNET, "--budget", "50%", "--also", other, status=3)
    assert "cannot determine the varying size" in message or "operators" in message


def test_a_sequence_needs_two_recordings(capsys: pytest.CaptureFixture[str]) -> None:
    """A single recording shows the batch by its shapes, not the length: exit code 2 and what to add."""
    message = run(capsys, RESNET, "--budget", "50%", "--sequence", status=2)
    assert "needs the job recorded at two lengths" in message
