"""Evaluation, saving and loading, and phases named by the job, in each mode of recording."""

from __future__ import annotations

import copy
import threading
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import torch.distributed.checkpoint as distributed
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

TRAINED = ["forward", "backward", "optimizer", "other"]


def test_evaluation_begins_with_the_model_and_lasts_while_gradients_are_off(record_job: RecordJob) -> None:
    """The first batch stays outside, the metrics are inside; what runs with gradients again is not."""
    step = record_job(training(evaluate)).steady_step()
    assert runs(step)[:3] == ["other", "evaluation", "other"]
    assert runs(step, "full") == ["other", "evaluation"]
    assert runs(step, "argmax", "eq", "mean") == ["evaluation"]
    assert runs(step, "zeros") == ["other"]
    assert set(step.ops.phase) == {*TRAINED, "evaluation"}


def test_evaluation_under_autocast_stays_evaluation(record_job: RecordJob) -> None:
    """Autocast casts weights with gradients on, wherever it runs."""

    def between(model: nn.Module, *_: Any) -> float:
        with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
            return float(model(ROWS).float().mean())

    step = record_job(training(between)).steady_step()
    casts = [phase for name, phase in zip(step.ops.name, step.ops.phase, strict=True) if "_to_copy" in name]
    assert len(casts) >= 3
    assert set(casts) == {"evaluation"}
    assert runs(step, "mean") == ["evaluation"]


def test_evaluation_with_gradients_on_is_told_by_its_mode(record_job: RecordJob) -> None:
    """No backward belongs to it, and the model is in evaluation mode."""

    def between(model: nn.Module, *_: Any) -> float:
        model.eval()
        loss = float(nn.functional.cross_entropy(model(ROWS), LABELS))
        model.train()
        return loss

    step = record_job(training(between)).steady_step()
    assert runs(step, "addmm", "_log_softmax") == ["evaluation", "forward"]


def test_a_model_may_train_in_evaluation_mode(record_job: RecordJob) -> None:
    """As fine-tuning with fixed statistics does: backward belongs to it, so it is forward."""

    def loss(model: nn.Module) -> torch.Tensor:
        return nn.functional.cross_entropy(model.eval()(ROWS), LABELS)

    step = record_job(training(lambda *_: None, loss=loss)).steady_step()
    assert "evaluation" not in runs(step)
    assert runs(step, "addmm") == ["forward"]


def test_models_that_no_optimizer_updates_are_not_evaluated(record_job: RecordJob) -> None:
    """A frozen teacher is part of training, as ever."""
    teacher = nn.Linear(8, 4)

    def loss(model: nn.Module) -> torch.Tensor:
        with torch.no_grad():
            wanted = teacher(ROWS)
        return (model(ROWS) - wanted).square().mean()

    assert set(runs(record_job(training(lambda *_: None, loss=loss)).steady_step())) == set(TRAINED)


def test_evaluation_within_forward_leaves_the_rest_of_it(record_job: RecordJob) -> None:
    """Double Q-learning asks its own network for the next action before the loss: that alone is evaluation."""

    def loss(model: nn.Module) -> torch.Tensor:
        found = model(ROWS)
        with torch.no_grad():
            action = model(ROWS).argmax(1)
        return (found.gather(1, action[:, None]) - 1).square().mean()

    step = record_job(training(lambda *_: None, loss=loss)).steady_step()
    assert runs(step, "addmm", "argmax", "gather", "pow") == ["forward", "evaluation", "forward", "backward"]


def test_autograd_functions_turn_gradients_off_themselves(record_job: RecordJob) -> None:
    """A module that a custom function calls in its forward is trained, not evaluated."""

    class Through(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, rows: torch.Tensor, layer: nn.Module) -> torch.Tensor:
            ctx.layer = layer
            ctx.save_for_backward(rows)
            return layer(rows)  # type: ignore[no-any-return]

        @staticmethod
        def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
            (rows,) = ctx.saved_tensors
            with torch.enable_grad():
                again = rows.detach().requires_grad_()
                torch.autograd.backward(ctx.layer(again), gradients)
            return again.grad, None

    def loss(model: nn.Module) -> torch.Tensor:
        assert isinstance(model, nn.Sequential)
        return Through.apply(ROWS.clone().requires_grad_(), model[0]).square().mean()  # type: ignore[no-any-return,no-untyped-call]

    step = record_job(training(lambda *_: None, loss=loss)).steady_step()
    assert "evaluation" not in runs(step)


def test_evaluation_without_an_optimizer(record_job: RecordJob) -> None:
    """The job updates by hand: the model that was called with gradients on is the one it trains."""

    def train() -> list[Any]:
        torch.manual_seed(0)
        model, found = nn.Linear(8, 4), []
        for _ in range(5):
            loss = nn.functional.cross_entropy(model(ROWS), LABELS)
            loss.backward()
            with torch.no_grad():
                for parameter in model.parameters():
                    assert parameter.grad is not None
                    parameter.sub_(0.1 * parameter.grad)
                    parameter.grad = None
            found += [loss.detach(), evaluate(model)]
        return found

    step = record_job(train).steady_step()
    assert runs(step, "addmm", "argmax") in (["forward", "evaluation"], ["evaluation", "forward"])


def test_inference_alone_stays_forward(record_job: RecordJob) -> None:
    """There is nothing else in it."""

    def infer() -> torch.Tensor:
        torch.manual_seed(0)
        model = nn.Linear(8, 4)
        with torch.no_grad():
            return sum((model(ROWS) for _ in range(3)), torch.zeros(16, 4))

    assert runs(record_job(infer, skip=0).steady_step(), "addmm") == ["forward"]


def test_saving_and_loading_are_told_by_their_callers(record_job: RecordJob) -> None:
    """What is read takes memory outside of operators: that is loading, as what follows it."""
    trace = record_job(training(save_and_load))
    step = trace.steady_step()
    assert runs(step)[:5] == ["other", "saving", "other", "loading", "forward"]
    assert runs(step, "ones") == ["other"]
    made = step.ops.phase[step.storages.created_op_id]
    read = step.storages.take((made == "loading") & (step.storages.created_op_id >= 0))
    assert int(read.requested_bytes.sum()) >= 2 * (8 * 8 + 8 + 8 * 4 + 4) * 4  # weights and momenta


@pytest.mark.parametrize("wrapped", [False, True])
def test_copies_of_a_state_dict_are_saved_and_those_of_a_model_are_not(record_job: RecordJob, wrapped: bool) -> None:
    def between(model: nn.Module, *_: Any) -> Any:
        best = {"model": model.state_dict()} if wrapped else model.state_dict()
        copied = copy.deepcopy(best)
        torch.ones(5)
        copy.deepcopy(nn.Sequential(model, nn.BatchNorm1d(3)))
        return copied["model"]["0.weight"] if wrapped else copied["0.weight"]

    step = record_job(training(between)).steady_step()
    copies = step.ops.phase[step.ops.name == "aten.set_.source_Storage"].tolist()
    assert [phase for phase, _ in groupby(copies)] == ["saving", "other"]
    assert copies.count("saving") == 2 * 4  # its storage, and itself


def test_other_ways_to_save_and_load(record_job: RecordJob, tmp_path: Path) -> None:
    """safetensors, and torch.distributed.checkpoint with one process."""

    def between(model: nn.Module, *_: Any) -> None:
        safetensors.torch.save_file(model.state_dict(), tmp_path / "model.safetensors")
        torch.ones(5)
        model.load_state_dict(safetensors.torch.load_file(tmp_path / "model.safetensors"))
        torch.ones(5)
        state = {"model": model.state_dict()}
        distributed.save(state, checkpoint_id=tmp_path / "checkpoint", no_dist=True)
        torch.ones(5)
        distributed.load(state, checkpoint_id=tmp_path / "checkpoint", no_dist=True)

    step = record_job(training(between)).steady_step()
    told = [phase for phase in runs(step) if phase not in TRAINED]
    assert told == ["saving", "loading", "saving", "loading"]


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
