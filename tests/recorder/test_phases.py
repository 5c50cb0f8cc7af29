"""Evaluation, saving and loading are phases of their own."""

from __future__ import annotations

import copy
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import torch.distributed.checkpoint as distributed
from torch import nn

from tests.recorder.beside import LABELS, ROWS, evaluate, runs, save_and_load, training
from tests.recorder.conftest import RecordJob

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
