"""Phases named by the job, in each mode of recording."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import memprof
from memprof.phases import MOST_NAMES
from memprof.policies.checkpoint.policy import Checkpoint
from memprof.replay.live import live_bytes
from memprof.trace.schema import ModulePeaks, Ops
from memprof.trace.store import Trace
from tests.recorder.beside import LABELS, ROWS, evaluate, runs, save_and_load, training
from tests.recorder.conftest import RecordJob
from tests.recorder.recorded import record_script


def test_names_cover_what_is_not_trained(record_job: RecordJob) -> None:
    """A rollout under no_grad, one with gradients on, saving, and a phase inside: the inner name counts."""

    def between(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> torch.Tensor:
        with memprof.phase("rollout"):
            torch.ones(2)
            with torch.no_grad():
                found: torch.Tensor = model(ROWS).argmax(1)
            with memprof.phase("save.best"):
                save_and_load(model, optimizer)
            model(ROWS)
        torch.ones(3)
        return found

    step = record_job(training(between)).steady_step()
    assert runs(step)[:4] == ["other", "rollout", "save.best", "rollout"]
    assert runs(step, "ones")[:2] == ["rollout", "save.best"]
    assert runs(step, "addmm") == ["rollout", "forward"]


def test_naming_the_training_itself_changes_no_phase(record_job: RecordJob) -> None:
    """Nor what policies predict: saved tensors hang on forward, backward and the update."""

    def loss(model: nn.Module) -> torch.Tensor:
        return nn.functional.cross_entropy(model(ROWS * 1), LABELS)

    @memprof.phase("my forward")
    def named(model: nn.Module) -> torch.Tensor:
        return loss(model)

    plain = record_job(training(lambda *_: None, loss=loss)).steady_step()
    told = record_job(training(lambda *_: None, loss=named)).steady_step()
    assert runs(told) == [*(["other"] if "other" in runs(plain)[:1] else []), "my forward", *runs(plain)[1:]]
    policy = Checkpoint(modules=("0",))
    peaks = [int(live_bytes(policy.transform(step)).during.max()) for step in (plain, told)]
    assert peaks[0] == peaks[1] != int(live_bytes(plain).during.max())
    assert plain.saved.forward_op_id.tolist() == told.saved.forward_op_id.tolist()


def test_a_whole_step_can_be_named(record_job: RecordJob) -> None:
    def loss(model: nn.Module) -> torch.Tensor:
        with memprof.phase("step"):
            error = nn.functional.cross_entropy(model(ROWS), LABELS)
            error.backward()
            error = nn.functional.cross_entropy(model(ROWS), LABELS)
        return error

    step = record_job(training(lambda *_: None, loss=loss)).steady_step()
    assert runs(step, "addmm", "_log_softmax_backward_data") == ["forward", "backward", "forward", "backward"]


def test_names_of_other_threads_are_not_the_recorded_ones(record_job: RecordJob) -> None:
    def between(*_: Any) -> None:
        entered, done = threading.Event(), threading.Event()

        def elsewhere() -> None:
            with memprof.phase("elsewhere"):
                entered.set()
                done.wait()

        thread = threading.Thread(target=elsewhere)
        thread.start()
        entered.wait()
        torch.ones(2)
        done.set()
        thread.join()

    assert runs(record_job(training(between)).steady_step(), "ones") == ["other"]


def test_more_names_than_a_recording_holds(record_job: RecordJob) -> None:
    """A thousand phases do not break the file: further ones lose their names, with a note."""

    def between(*_: Any) -> None:
        for number in range(1000):
            with memprof.phase(f"phase {number}"):
                torch.ones(2)

    trace = record_job(training(between))
    assert len({phase for phase in trace.table(Ops).phase if phase.startswith("phase ")}) == MOST_NAMES
    assert [note for note in trace.manifest.notes if "names more than 64 phases" in note]


def test_a_recording_that_begins_inside_a_phase_knows_it(tmp_path: Path) -> None:
    path = tmp_path / "run.memprof"
    with memprof.phase("around"), memprof.record(path, skip=0, steps=2):
        training(evaluate)()
    assert "around" in Trace.open(path).steady_step().ops.phase.tolist()
    assert "evaluation" not in Trace.open(path).table(Ops).phase.tolist()


JOB = """
import io, torch, memprof
from torch import nn
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 8))
optimizer = torch.optim.Adam(model.parameters())
for _ in range(6):
    with memprof.phase("collect"), torch.no_grad():
        states = torch.randn(512, 64)
        actions = model(states).argmax(1)
    loss = nn.functional.cross_entropy(model(states[:32]), actions[:32])
    optimizer.zero_grad(); loss.backward(); optimizer.step()
    print(loss.item())
    model.eval()
    with torch.no_grad():
        print(nn.functional.mse_loss(model(torch.ones(300, 64)), torch.zeros(300, 8)).item())
    model.train()
    file = io.BytesIO()
    torch.save([model.state_dict(), optimizer.state_dict()], file); file.seek(0)
    optimizer.load_state_dict(torch.load(file)[1])
"""


@pytest.mark.parametrize("mode", ["record", "--dry-run", "--light"])
def test_each_way_of_recording_tells_them(tmp_path: Path, mode: str) -> None:
    """Losses are those of the plain run; the verdict names the phase with the highest peak."""
    ended = record_script(tmp_path, JOB, *(["--steps", "2"] if mode == "record" else [mode]))
    phases = set(ended.trace.table(Ops).phase)
    assert {"collect", "evaluation", "forward", "backward", "optimizer"} <= phases
    assert {"saving", "loading"} <= phases
    assert " collect of Sequential" in ended.stderr or " collect of 1" in ended.stderr, ended.stderr
    if mode == "--light":
        assert {"collect", "evaluation"} <= set(ended.trace.table(ModulePeaks).phase)


def test_compiled_functions_may_name_phases() -> None:
    """A compiled region is one piece: the name is passed over there, and the graph stays whole."""

    def double(rows: torch.Tensor) -> torch.Tensor:
        with memprof.phase("inside"):
            return rows * 2

    compiled = torch.compile(double, backend="eager", fullgraph=True)
    assert torch.equal(compiled(ROWS), ROWS * 2)
