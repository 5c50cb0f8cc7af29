"""Steps after the default window that have larger inputs than all recorded ones are recorded as well."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jsonschema
import numpy as np
import pytest

from memprof.analysis.report.whole_run import describe_later, later_rise
from memprof.recorder.steps import peak_watch
from memprof.recorder.steps.after_window import AfterWindow
from memprof.recorder.steps.peak_watch import BETWEEN, TRAINING, PeakWatch
from memprof.recorder.steps.window import Watch
from memprof.trace.manifest import LaterPeak
from memprof.trace.schema import NOT_RECORDED, Ops, Steps
from memprof.trace.store import Trace
from memprof.units import format_bytes
from tests.json_outputs import read_schema, strict

#: Batches of these sizes; the figures printed must not depend on being recorded.
JOB = """
import os, sys, torch
torch.manual_seed(0)
torch.set_num_threads(1)
model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.Tanh(), torch.nn.Dropout(), torch.nn.Linear(64, 32))
optimizer = None if "manual" in sys.argv else torch.optim.AdamW(model.parameters())
compute_loss = torch.nn.MSELoss()

def update():
    if optimizer is not None:
        optimizer.step()
        optimizer.zero_grad()
        return
    for parameter in model.parameters():
        parameter.data.add_(parameter.grad, alpha=-0.1)
        parameter.grad = None

for step in range(60):
    size = {40: 300, 55: 300}.get(step, 24 if "equal" in sys.argv else 10 + step * 7 % 20)
    rows = torch.randn(size, 32)
    loss = compute_loss(model(rows), rows)
    loss.backward()
    update()
    print(step, loss.item(), torch.rand(1).item())
    if "evaluates" in sys.argv and step % 20 == 19:
        model.eval()
        with torch.no_grad():
            for _ in range(3):
                rows = torch.randn(2000, 32)
                print(compute_loss(model(rows), rows).item())
        model.train()
    if "fails" in sys.argv and step == 40:
        raise ValueError(step)
    if "killed" in sys.argv and step == 50:
        os.kill(os.getpid(), 9)
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(JOB)
    return tmp_path


def run(*words: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MEMPROF_")}
    return subprocess.run([sys.executable, *words], env=environment, capture_output=True, text=True, timeout=240)


def record(*words: str) -> tuple[subprocess.CompletedProcess[str], Trace]:
    name = f"{len(list(Path().glob('*.memprof')))}.memprof"
    ended = run("-P", "-m", "memprof.cli.main", "record", "-o", name, *words)
    return ended, Trace.open(name)


def test_the_fullest_step_is_recorded_to_the_byte() -> None:
    """It has the peak that it has where the window is put there; the steady step stays one of the window."""
    plain = run("train.py")
    ended, trace = record("train.py")
    assert (ended.stdout, ended.returncode) == (plain.stdout, 0)
    assert trace.recorded_steps[:3] == (2, 3, 4)
    assert 40 in trace.recorded_steps
    assert 55 not in trace.recorded_steps
    assert f"in step {trace.fullest_step().number}," in ended.stderr
    assert trace.fullest_step().number == 40
    assert trace.steady_step().number in (2, 3, 4)
    for number in trace.recorded_steps:
        trace.step(number).check()
    peaks = trace.step_peaks()
    later = [number for number in trace.recorded_steps if number > 4]
    assert len(later) > 1
    for number in (later[0], 40):
        _, alone = record("--skip", str(number), "--steps", "1", "train.py")
        assert alone.step_peaks()[number] == peaks[number]
    assert any(note.startswith("steps ") and "40: recorded after the window" in note for note in trace.manifest.notes)
    # Two rows stand for each gap, outside of every recorded step, in one that was skipped.
    steps, ops = trace.table(Steps), trace.table(Ops)
    gaps = np.flatnonzero(ops.name == NOT_RECORDED)
    assert len(gaps) == 2 * len(later)
    for row in np.flatnonzero(steps.kind == "recorded"):
        assert not ((gaps >= steps.first_op_id[row]) & (gaps <= steps.last_op_id[row])).any()
    assert set(ops.step[gaps].tolist()) == {number - 1 for number in later}


def test_equal_steps_are_recorded_as_with_a_window() -> None:
    """The recording has the same steps, tables and peaks as with an explicit window."""
    (Path("train.py")).write_text(JOB.replace("{40: 300, 55: 300}", "{}"))
    _, trace = record("train.py", "equal")
    _, window = record("--skip", "2", "--steps", "3", "train.py", "equal")
    assert trace.table(Steps).kind.tolist() == window.table(Steps).kind.tolist()
    assert trace.step_peaks() == window.step_peaks()
    assert trace.table(Ops).name.tolist() == window.table(Ops).name.tolist()
    assert trace.manifest.notes == window.manifest.notes == ()
    assert trace.manifest.capture == window.manifest.capture


def test_an_evaluation_is_recorded_in_part() -> None:
    """One batch of it, with the peak of the whole evaluation; the report says so."""
    plain = run("train.py", "evaluates")
    ended, trace = record("train.py", "evaluates")
    assert ended.stdout == plain.stdout
    assert trace.fullest_step().number == 20
    _, whole = record("--skip", "20", "--steps", "1", "train.py", "evaluates")
    assert trace.step_peaks()[20] == whole.step_peaks()[20]
    report = run("-P", "-m", "memprof.cli.main", "report", "0.memprof")
    assert "step 20 is incomplete: only one batch of its evaluation was recorded" in report.stdout


def test_a_job_without_an_optimizer() -> None:
    """Its steps are delimited by the calls of its model."""
    plain = run("train.py", "manual")
    ended, trace = record("train.py", "manual")
    assert ended.stdout == plain.stdout
    _, whole = record("--skip", "0", "--steps", "60", "train.py", "manual")
    assert trace.recorded_steps[:3] == (2, 3, 4)
    assert trace.fullest_step().number == 40
    assert trace.step_peaks()[40] == whole.step_peaks()[40]


@pytest.mark.parametrize(("how", "status"), [("fails", 1), ("killed", -9)])
def test_a_job_that_ends_later_leaves_a_whole_recording(how: str, status: int) -> None:
    """With its own status and traceback."""
    plain = run("train.py", how)
    ended, trace = record("-q", "train.py", how)
    assert (ended.returncode, ended.stdout, ended.stderr) == (plain.returncode, plain.stdout, plain.stderr)
    assert plain.returncode == status
    assert trace.manifest.capture.is_complete
    assert trace.fullest_step().number == 40


@pytest.mark.parametrize("options", [("--steps", "3"), ("--skip", "2"), ("--stop",)])
def test_a_window_that_is_asked_for_is_all_that_is_recorded(options: tuple[str, ...]) -> None:
    """Whoever names one wants that."""
    _, trace = record(*options, "train.py")
    assert trace.recorded_steps == (2, 3, 4)


def test_a_step_that_is_not_recorded_is_named() -> None:
    """In the sentence at the end of the run: here the warm-up had the largest inputs of all."""
    (Path("train.py")).write_text(JOB.replace("{40: 300, 55: 300}", "{0: 300}"))
    ended, _ = record("train.py", "equal")
    assert "Not recorded: step 0 had larger inputs (28,800 elements) than any recorded step (2,304)" in ended.stderr
    assert "--skip 0 --steps 1" in ended.stderr


#: Nothing but a list, an update or a checkpoint needs more than the steps before, none of which shows in an input.
_LATER = """
import io, sys, time, torch
torch.set_num_threads(1); at = int(sys.argv[2])
model = torch.nn.Linear(256, 256)
class Renewed(torch.optim.SGD):
    count = 0
    def step(self, closure=None):
        self.count += 1
        if "update" in sys.argv and self.count == at + 1:
            torch.ones(100 * 2**18)
        return super().step()
optimizer = Renewed(model.parameters(), lr=1e-3)
extra = torch.nn.Linear(2**13, 2**12)
for step in range(at + 6):
    time.sleep(0.06)  # the counter is read for at most 0.2 % of the time
    model(torch.randn(16, 256)).square().mean().backward()
    time.sleep(0.06)
    optimizer.step()
    optimizer.zero_grad()
    time.sleep(0.06)
    if "save" in sys.argv and step == at - 1:
        torch.save({name: one.clone() for name, one in extra.state_dict().items()}, io.BytesIO())
"""


@pytest.mark.parametrize(
    ("word", "step", "phase"),
    [
        ("update", 8, "optimizer"),
        pytest.param("update", 30, "optimizer", marks=pytest.mark.slow),
        ("save", 9, "saving"),
        ("", 8, ""),
    ],
)
def test_a_later_step_that_needs_more_is_named(word: str, step: int, phase: str) -> None:
    """Its step and phase, though no input is larger; of steps that need no more nothing is said."""
    Path("train.py").write_text(_LATER)
    ended, trace = record("train.py", word, str(step))
    later = trace.manifest.later
    if not word:
        assert later == LaterPeak()
        assert "resident memory by" not in ended.stderr
        return
    assert (later.step, later.device, later.line) == (step, "cpu", f"train.py:{18 if word == 'update' else 22}")
    assert phase == later.phase
    assert later.peak_bytes - later.window_bytes > 64 * 2**20
    said = f"Step {step} ({phase} from {later.line}) raised the peak of the process's resident memory by "
    assert said in ended.stderr
    shown = run("-P", "-m", "memprof.cli.main", "report", str(trace.path)).stdout.splitlines()
    assert any(said in line for line in shown[:4])
    found = json.loads(run("-P", "-m", "memprof.cli.main", "report", "--json", str(trace.path)).stdout)
    assert found["later_peak"] == later.to_json()
    jsonschema.Draft202012Validator(strict(read_schema("report"))).validate(found)


class Devices:
    """Stands for torch.cuda: devices with these peaks in GiB; None has no counters, as the job's own allocator."""

    def __init__(self, *peaks: float | None) -> None:
        self.peaks = list(peaks)
        self.takes_s = 0.0

    def is_initialized(self) -> bool:
        return True

    def device_count(self) -> int:
        return len(self.peaks)

    def memory_stats_as_nested_dict(self, number: int) -> dict[str, dict[str, dict[str, int]]]:
        time.sleep(self.takes_s)
        peak = self.peaks[number]
        if peak is None:
            raise RuntimeError("CUDAPluggableAllocator does not yet support getDeviceStats")
        return {"allocated_bytes": {"all": {"peak": int(peak * 2**30)}}}


@pytest.fixture
def devices(monkeypatch: pytest.MonkeyPatch) -> Devices:
    found = Devices(10)
    monkeypatch.setattr(peak_watch, "_cuda", found)
    return found


def look(watch: PeakWatch, devices: Devices, step: int, *peaks: float, phase: str = BETWEEN) -> list[LaterPeak]:
    devices.peaks = list(peaks)
    return [LaterPeak.from_json(news) for news in watch.look(step, phase, at_once=True)]


def test_a_peak_after_another_recorded_step_is_compared_with_it(devices: Devices) -> None:
    """Of 10, 14, a step recorded again, then 14.5 and 17 GiB, all that rise are written; a lower one is not."""
    watch = PeakWatch()
    watch.restart(5)
    assert [one.peak_bytes for one in look(watch, devices, 6, 14)] == [14 * 2**30]
    watch.restart(8)
    assert [one.window_bytes for one in look(watch, devices, 9, 14.5)] == [14 * 2**30]
    assert [one.peak_bytes for one in look(watch, devices, 10, 17)] == [17 * 2**30]
    devices.peaks = [12]
    watch.restart(12)
    assert look(watch, devices, 13, 13) == []


def test_a_counter_that_the_job_resets_hides_nothing(devices: Devices) -> None:
    """A peak of loading hides later ones until the job resets the counter; then a lower one is news as well."""
    devices.peaks = [16]
    watch = PeakWatch()
    watch.restart(5)
    assert look(watch, devices, 6, 16) == []
    assert [(one.peak_bytes, one.window_bytes) for one in look(watch, devices, 7, 12)] == [(12 * 2**30, 0)]
    assert look(watch, devices, 8, 9) == []
    assert look(watch, devices, 9, 12) == []


def test_each_device_has_its_own_peak(devices: Devices) -> None:
    """A small rise of one does not stand for a large one of another."""
    devices.peaks = [10, 5]
    watch = PeakWatch()
    watch.restart(5)
    assert [one.device for one in look(watch, devices, 6, 14, 5.5)] == ["cuda:0", "cuda:1"]


def test_a_peak_between_two_readings_has_the_steps_between_them(devices: Devices) -> None:
    """The phase is known where no other began; a reading that is due at once is made in any case."""
    devices.takes_s = 0.01
    watch = PeakWatch()
    watch.restart(7)
    assert look(watch, devices, 7, 10, phase="optimizer") == []
    (one,) = look(watch, devices, 8, 11)
    assert (one.step, one.steps, one.phase) == (7, 1, "optimizer")
    devices.peaks = [12]
    assert watch.look(8, TRAINING) == watch.look(8, "optimizer") == watch.look(9, BETWEEN) == []
    (one,) = look(watch, devices, 9, 12)
    assert (one.step, one.steps, one.phase) == (8, 2, "")


def test_readings_rest_by_what_they_cost(devices: Devices) -> None:
    """Those of 10 ms are 5 s apart; 50 ms would be a sixth of the run."""
    devices.takes_s = 0.01
    watch = PeakWatch()
    watch.restart(0)
    watch.look(0, TRAINING)
    devices.peaks = [20]
    time.sleep(0.1)
    assert watch.look(0, "optimizer") == []


def test_the_last_reading_is_made_at_once(devices: Devices) -> None:
    """A peak in the job's last milliseconds is written, though a reading was made just before it."""
    devices.takes_s = 0.01
    written: list[dict[str, Any]] = []
    hooks: Any = SimpleNamespace(install_for=lambda ids: None, remove=lambda: None, switch_off=lambda: None)
    observation: Any = SimpleNamespace(
        has_ended=False, root_ids=(), rest=lambda: None, watch=Watch.RECORDED, write_later_peak=written.append
    )
    after = AfterWindow(hooks, hooks, hooks, lambda call: call())
    try:
        after.begin_step(observation, 7)
        devices.peaks = [12]
        after.see("optimizer")
        assert written == []
        after.write_notes(observation, 7)
    finally:
        after.remove()
    assert [(one["step"], one["peak_bytes"]) for one in written] == [(7, 12 * 2**30)]


def test_an_allocator_without_counters_is_not_watched(devices: Devices) -> None:
    """Resident memory is, and nothing fails."""
    devices.peaks = [None]
    watch = PeakWatch()
    watch.restart(0)
    assert watch.look(1, BETWEEN, at_once=True) == []
    assert set(peak_watch._read_counters()) == {"cpu"}


def test_a_later_peak_is_compared_with_the_recorded_steps() -> None:
    """The counter may be that of loading, or may have been reset: then a recorded step can be as high."""
    _, trace = record("--steps", "1", "train.py")
    peaks, manifest = trace.step_peaks(), trace.manifest
    recorded = max(peaks.values())
    more = "Step 7 took 1.00 MiB more than the recorded steps: its peak is {}; record it with --skip 7 --steps 1."
    for steps, window_bytes, peak_bytes, said in (
        (1, 0, 2**20, more),
        (2, 0, 2**20, "Step 7 or 8 took 1.00 MiB more"),
        (6, 0, 2**20, "One of steps 7 to 12 took"),
        (1, recorded + 2**19, 2**20, "took 512.00 KiB more than anything before"),
        (1, 0, 0, ""),
    ):
        found = LaterPeak(
            device="cuda:0", step=7, steps=steps, window_bytes=window_bytes, peak_bytes=recorded + peak_bytes
        )
        trace.manifest = replace(manifest, later=found)
        text = describe_later(trace)
        assert said.format(format_bytes(found.peak_bytes)) in text
        assert bool(text) is bool(said) is bool(later_rise(found, peaks))
