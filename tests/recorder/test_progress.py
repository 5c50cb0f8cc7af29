"""A job's position in its step: phases and micro-batches."""

from __future__ import annotations

from collections.abc import Callable
from itertools import groupby

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from memprof.recorder.steps.progress import OpenCall, Progress
from memprof.trace.files.spool import BACKWARD, FORWARD, OPTIMIZER, OTHER
from memprof.trace.schema import Steps
from memprof.trace.store import Trace
from tests.recorder.conftest import RecordJob


@pytest.fixture
def progress() -> Progress:
    progress = Progress()
    progress.begin_step()
    return progress


def call() -> OpenCall:
    return OpenCall(0, 0, -1, 0, 0, -1, is_recompute=False)


def test_a_step_begins_outside_the_phases(progress: Progress) -> None:
    """Until a model is called or autograd makes a node, operators prepare data."""
    assert progress.phase(is_backward=False, makes_node=False) == OTHER


def test_forward_lasts_until_backward(progress: Progress) -> None:
    """The loss computed outside any module belongs to it, and what lies between is no node of autograd's."""
    progress.begin_model_call()
    assert [progress.phase(False, makes) for makes in (False, True, False)] == [FORWARD] * 3
    assert progress.phase(is_backward=True, makes_node=False) == BACKWARD
    assert progress.phase(is_backward=False, makes_node=False) == OTHER


def test_a_job_without_modules_runs_forward_where_nodes_are_made(progress: Progress) -> None:
    """Functions of plain tensors, from the first that autograd notes."""
    assert [progress.phase(False, makes) for makes in (False, True, False)] == [OTHER, FORWARD, FORWARD]


def test_micro_batches_are_counted(progress: Progress) -> None:
    """A model called again after backward begins the next; a second model before backward does not."""
    seen = []
    for _ in range(3):
        progress.begin_model_call()
        progress.begin_model_call()
        seen.append(progress.micro_batch)
        progress.phase(is_backward=True, makes_node=False)
    assert seen == [0, 1, 2]
    progress.leave_backward()
    assert progress.backward_rounds == 3
    progress.begin_step()
    assert (progress.micro_batch, progress.backward_rounds) == (0, 0)


def test_an_optimizer_runs_in_its_own_phase(progress: Progress) -> None:
    """From its beginning to its end; nested optimizers end with the outermost."""
    progress.begin_model_call()
    progress.begin_optimizer()
    progress.begin_optimizer()
    assert progress.phase(is_backward=False, makes_node=False) == OPTIMIZER
    progress.end_optimizer()
    assert progress.phase(is_backward=False, makes_node=False) == OPTIMIZER
    progress.end_optimizer()
    assert progress.phase(is_backward=False, makes_node=False) == OTHER


def test_a_closure_inside_an_optimizer_runs_forward_and_backward(progress: Progress) -> None:
    """LBFGS calls the model and backward within its step: by nesting alone all would be optimizer."""
    progress.begin_optimizer()
    assert progress.phase(is_backward=False, makes_node=True) == FORWARD
    progress.calls.append(call())
    assert progress.phase(is_backward=False, makes_node=False) == FORWARD
    progress.calls.pop()
    assert progress.phase(is_backward=True, makes_node=False) == BACKWARD
    assert progress.phase(is_backward=False, makes_node=False) == OPTIMIZER
    progress.end_optimizer()
    assert progress.backward_rounds == 1


def test_an_optimizer_called_inside_a_module_is_no_forward(progress: Progress) -> None:
    """A trainer that is a module itself and steps within its forward."""
    progress.calls.append(call())
    progress.begin_optimizer()
    assert progress.phase(is_backward=False, makes_node=False) == OPTIMIZER


def phases(trace: Trace, step: int) -> list[str]:
    """Returns the phases of a step in order, each once in a row, "other" left out."""
    ops = trace.step(step).ops
    return [phase for phase, _ in groupby(ops.phase[ops.kind == "compute"]) if phase != "other"]


def make() -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)), torch.randn(6, 4)


def weights(model: nn.Module) -> list[torch.Tensor]:
    return [parameter.detach() for parameter in model.parameters()]


def test_accumulated_gradients(record_job: RecordJob) -> None:
    """Three rounds of forward and backward before each update are three micro-batches."""

    def job() -> list[torch.Tensor]:
        model, x = make()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(4):
            optimizer.zero_grad()
            for part in x.split(2):
                (model(part).square().sum() / 3).backward()
            optimizer.step()
        return weights(model)

    trace = record_job(job)
    steps = trace.table(Steps)
    assert steps.micro_batches[steps.step == 1].tolist() == [3]
    ops = trace.step(1).ops
    assert phases(trace, 1) == ["forward", "backward"] * 3 + ["optimizer"]
    for number in range(3):
        inside = ops.take((ops.micro_batch == number) & (ops.phase == "forward"))
        assert list(inside.name).count("aten.addmm.default") == 2


def test_lbfgs(record_job: RecordJob) -> None:
    """Its closure's forward and backward are separated from its own work."""

    def job() -> list[torch.Tensor]:
        model, x = make()
        optimizer = torch.optim.LBFGS(model.parameters(), max_iter=2)

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = model(x).square().sum()
            loss.backward()
            return loss

        for _ in range(4):
            optimizer.step(closure)
        return weights(model)

    trace = record_job(job)
    assert phases(trace, 1) == ["optimizer", "forward", "backward"] * 2 + ["optimizer"]


def test_an_optimizer_step_inside_backward(record_job: RecordJob) -> None:
    """Updates in post-accumulate hooks, one optimizer a parameter: their work is optimizer; steps end after."""

    def job() -> list[torch.Tensor]:
        model, x = make()
        hooks = []
        for parameter in model.parameters():
            optimizer = torch.optim.SGD([parameter], lr=0.1, momentum=0.9)

            def update(parameter: torch.Tensor, optimizer: torch.optim.Optimizer = optimizer) -> None:
                optimizer.step()
                optimizer.zero_grad()

            hooks.append(parameter.register_post_accumulate_grad_hook(update))
        for _ in range(5):
            model(x).square().sum().backward()
        for hook in hooks:
            hook.remove()  # through it the optimizer would keep itself alive, out of the collector's sight
        return weights(model)

    trace = record_job(job)
    steps = trace.table(Steps)
    assert steps.optimizer_updates[steps.step == 1].tolist() == [4]
    assert steps.micro_batches[steps.step == 1].tolist() == [1]
    ops = trace.step(1).ops
    updates = ops.take(ops.phase == "optimizer")
    assert list(updates.name).count("aten.mul_.Tensor") == 4
    assert set(ops.phase[ops.name == "aten.mm.default"]) == {"backward"}


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_checkpoint_repeats_forward_in_backward(record_job: RecordJob, use_reentrant: bool) -> None:
    """What runs again is marked so, in the phase it runs in and in its module; backward finds it."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            inside = checkpoint(lambda y: self.second(y).exp(), self.first(x), use_reentrant=use_reentrant)
            assert isinstance(inside, torch.Tensor)
            return inside + 1

    def job() -> list[torch.Tensor]:
        torch.manual_seed(1)
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for _ in range(4):
            optimizer.zero_grad()
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
        return weights(model)

    trace = record_job(job)
    step = trace.step(1)
    ops, modules = step.ops, step.modules
    second = list(modules.name).index("second")
    repeated = ops.take(ops.is_recompute)
    assert list(repeated.name[repeated.name != "aten.detach.default"])[:2] == ["aten.t.default", "aten.addmm.default"]
    assert set(repeated.phase) == {"backward"}
    assert repeated.module_id[repeated.name == "aten.addmm.default"].tolist() == [second]
    assert step.module_calls.is_recompute[step.module_calls.module_id == second].tolist() == [False, True]
    # The gradients of the repeated layer are in its module, linked to the forward that made their nodes: a reentrant
    # checkpoint makes new ones, the other fills those it has.
    gradients = ops.take((ops.name == "aten.mm.default") & (ops.module_id == second))
    assert len(gradients) == 2
    assert ops.is_recompute[gradients.forward_op_id].tolist() == [use_reentrant] * 2
    # exp saved its result: made again for backward, it is an activation; the first one was temporary.
    results = step.storages.take(step.storages.shape == "2x4")
    made = [(ops.name[op], ops.is_recompute[op], category) for op, category in zip(
        results.created_op_id, results.category, strict=True) if op >= 0]  # fmt: skip
    assert ("aten.exp.default", True, "activation") in made
    assert ("aten.exp.default", False, "temporary") in made


def test_two_models_in_turn(record_job: RecordJob) -> None:
    """Each is trained in its own forward and backward; data is prepared outside the phases."""

    def job() -> list[torch.Tensor]:
        (one, x), (two, _) = make(), make()
        optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (one, two)]
        for _ in range(4):
            for model, optimizer in zip((one, two), optimizers, strict=True):
                optimizer.zero_grad()
                batch = torch.randn(6, 4) + x
                model(batch).sum().backward()
                optimizer.step()
        return weights(one) + weights(two)

    trace = record_job(job)
    assert phases(trace, 1) == ["forward", "backward", "optimizer"] * 2
    ops = trace.step(1).ops
    assert set(ops.phase[ops.name == "aten.randn.default"]) == {"other"}


def inference() -> torch.Tensor:
    model, x = make()
    with torch.inference_mode():
        return model(x).clone()


def no_grad() -> torch.Tensor:
    model, x = make()
    with torch.no_grad():
        return model(x)


@pytest.mark.parametrize("job", [inference, no_grad])
def test_inference_alone_is_forward(record_job: RecordJob, job: Callable[[], torch.Tensor]) -> None:
    """A model that only infers runs forward."""
    trace = record_job(job)
    assert phases(trace, 0) == ["forward"]
    ops = trace.step(0).ops
    assert set(ops.phase[ops.module_id >= 0]) == {"forward"}


def test_a_job_that_updates_by_hand(record_job: RecordJob) -> None:
    """Without an optimizer a step ends where the model is called again after backward."""

    def job() -> list[torch.Tensor]:
        model, x = make()
        for _ in range(5):
            model(x).square().mean().backward()
            with torch.no_grad():
                for parameter in model.parameters():
                    assert parameter.grad is not None
                    parameter.sub_(0.1 * parameter.grad)
                    parameter.grad = None
        return weights(model)

    trace = record_job(job, steps=2)
    assert trace.recorded_steps == (1, 2)
    assert phases(trace, 1) == ["forward", "backward"]
    assert list(trace.step(1).ops.name).count("aten.sub_.Tensor") == 4


def test_double_backward(record_job: RecordJob) -> None:
    """A gradient penalty: the graph is kept, backward runs through backward, and again through the same graph."""

    def job() -> list[torch.Tensor]:
        model, x = make()
        x.requires_grad_()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for _ in range(4):
            optimizer.zero_grad()
            loss = model(x).square().sum()
            (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
            (loss + gradient.square().sum()).backward(retain_graph=True)
            loss.backward()
            optimizer.step()
        return weights(model)

    trace = record_job(job)
    ops = trace.step(1).ops
    assert not ops.is_recompute.any()
    backward = ops.take(ops.phase == "backward")
    assert {"aten.tanh_backward.default"} <= set(backward.name[backward.forward_op_id >= 0])


def test_logging_in_a_closure_is_forward(record_job: RecordJob) -> None:
    """What a closure runs without gradients between forward and backward is forward, as the loss is; the update's
    own operators, which run without gradients too, are the optimizer's."""
    rows, logged = torch.ones(4, 8), []

    def train() -> list[float]:
        torch.manual_seed(0)
        model = nn.Linear(8, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = model(rows).square().mean()
            with torch.no_grad():
                logged.append(loss.clone())
            loss.backward()
            return loss

        losses = [float(optimizer.step(closure).detach()) for _ in range(3)]
        logged.clear()
        return losses

    step = record_job(train).steady_step()
    phases = [phase for phase, _ in groupby(step.ops.phase[step.ops.phase != "other"])]
    assert phases[-3:] == ["forward", "backward", "optimizer"]
    assert set(step.ops.phase[step.ops.name == "aten.clone.default"]) == {"forward"}
    assert set(step.ops.phase[step.ops.name == "aten.add_.Tensor"]) <= {"optimizer", "backward"}


def test_update_behind_a_closure_without_backward_is_the_optimizers(record_job: RecordJob) -> None:
    """An optimizer that only asks its closure for the loss updates without gradients: no operator of it is forward."""
    weight = torch.zeros(16, requires_grad=True)

    class Shifting(torch.optim.Optimizer):
        def __init__(self) -> None:
            super().__init__([weight], {})

        def step(self, closure: Callable[[], torch.Tensor]) -> torch.Tensor:  # type: ignore[override]
            with torch.enable_grad():
                loss = closure()
            with torch.no_grad():
                weight.add_(0.5)
            return loss

    def train() -> list[float]:
        with torch.no_grad():
            weight.zero_()
        optimizer = Shifting()

        def closure() -> torch.Tensor:
            return (weight * 2).sum()

        return [float(optimizer.step(closure).detach()) for _ in range(3)]

    step = record_job(train).steady_step()
    assert set(step.ops.phase[step.ops.name == "aten.add_.Tensor"]) == {"optimizer"}
    assert "forward" in set(step.ops.phase[step.ops.name == "aten.mul.Tensor"])
