"""Optimizer state that is in memory for one parameter at a time, within step()."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import memprof
from memprof.errors import PolicyError
from memprof.policies.optimizer.policy import OptimizerPolicy
from memprof.policies.plan.plan import Plan
from memprof.policies.runtime.job import Job
from memprof.policies.swap.policy import Swap
from memprof.replay.live import live_bytes
from memprof.trace.store import Trace
from tests.policies.faces import compare, faces, load_job, record_step, recorded, train, trained

STATE = Swap(what="optimizer", to="disk", minimum_bytes=1 << 10, one_by_one=True)


@pytest.mark.parametrize("job", ["gpt", "unet"])
def test_weights_are_those_of_the_plain_job(job: str) -> None:
    """Every update computes the same to the bit, and gradients are there after step()."""
    plain, planned = trained(job), train(job, Plan((STATE,)))
    assert planned.losses == plain.losses
    for key, value in plain.state.items():
        assert torch.equal(planned.state[key], value), key
    assert planned.gradients.keys() == plain.gradients.keys()


@pytest.mark.parametrize("job", ["gpt", "resnet"])
def test_peak_is_predicted(job: str) -> None:
    """The predicted peak is the measured one, to the byte."""
    predicted, measured = faces(job, Plan((STATE,)))
    more = int(live_bytes(measured).during.max()) - int(live_bytes(predicted).during.max())
    assert more == 0, compare(predicted, measured)


def test_state_of_some_modules_is_predicted() -> None:
    """The state of the other parameters stays, and theirs are updated one by one as well."""
    some = Swap(("layers.0", "head"), "optimizer", "disk", 1 << 10, one_by_one=True)
    predicted, measured = faces("gpt", Plan((some,)))
    more = int(live_bytes(measured).during.max()) - int(live_bytes(predicted).during.max())
    assert more == 0, compare(predicted, measured)


class Counting(torch.optim.Optimizer):
    """Counts steps in its groups, as many optimizers outside torch do."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.01})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        """Moves each parameter against the mean of its gradients."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            for parameter in group["params"]:
                if parameter.grad is not None:
                    state = self.state[parameter]
                    if not state:
                        state["mean"] = torch.zeros_like(parameter)
                    state["mean"].lerp_(parameter.grad, 0.1)
                    parameter.sub_(state["mean"] / (1 - 0.9 ** group["step"]), alpha=group["lr"])
        return loss


class Normalised(Counting):
    """Divides by the norm of all gradients, as LAMB does."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        """Moves the parameters together."""
        given = [each for group in self.param_groups for each in group["params"]]
        norm = torch.stack([each.grad.norm() for each in given if each.grad is not None]).norm()
        for parameter in given:
            state = self.state[parameter]
            if not state:
                state["mean"] = torch.zeros_like(parameter)
            state["mean"].lerp_(parameter.grad / norm, 0.1)
            parameter.sub_(state["mean"], alpha=0.01)


def loop(optimizer_type: Any, plan: Plan, *, steps: int = 5, use_closure: bool = False) -> Iterator[Any]:
    """Yields once per step of a loop that clips its gradients and schedules its rate; at last its weights."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(4)))
    optimizer = optimizer_type(model.parameters())
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    job = memprof.apply(plan, model, optimizer) if plan.policies else Job(model)
    given = torch.randn(steps, 8, 64)
    for batch in given:

        def closure(batch: torch.Tensor = batch) -> torch.Tensor:
            optimizer.zero_grad()
            loss = model(batch).square().mean()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            return loss

        if use_closure:
            optimizer.step(closure)
        else:
            closure()
            optimizer.step()
        schedule.step()
        yield None
    job.undo()
    yield [parameter.detach().clone() for parameter in model.parameters()], optimizer.state_dict()


@pytest.mark.parametrize("use_closure", [False, True])
@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.RMSprop, Counting])
def test_loops_that_clip_and_schedule_train_the_same(kind: Any, use_closure: bool) -> None:
    """Clipping, schedules, closures and counts of steps work as without the plan."""
    results = []
    for plan in (Plan(()), Plan((STATE,))):
        *_, last = loop(kind, plan, use_closure=use_closure)
        results.append(last)
    (plain, plain_state), (planned, planned_state) = results
    assert all(torch.equal(one, other) for one, other in zip(plain, planned, strict=True))
    for key in ("lr", "step"):
        assert plain_state["param_groups"][0].get(key) == planned_state["param_groups"][0].get(key)


def test_one_step_in_backward_counts_once_in_a_group() -> None:
    """An optimizer that counts steps in its groups computes the same with updates in backward."""

    def train_counting(*policies: OptimizerPolicy) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = torch.nn.Sequential(*(torch.nn.Linear(16, 16) for _ in range(3)))
        optimizer = Counting(model.parameters())
        job = memprof.apply(Plan(policies), model, optimizer) if policies else Job(model)
        for _ in range(4):
            optimizer.zero_grad()
            model(torch.ones(2, 16)).square().mean().backward()
            optimizer.step()
        job.undo()
        assert optimizer.param_groups[0]["step"] == 4
        return [parameter.detach() for parameter in model.parameters()]

    plain, planned = train_counting(), train_counting(OptimizerPolicy(in_backward=True))
    assert all(torch.equal(one, other) for one, other in zip(plain, planned, strict=True))


@pytest.mark.parametrize("policy", [STATE, OptimizerPolicy(in_backward=True)])
def test_updates_that_depend_on_each_other_are_refused(policy: Any, tmp_path: Path) -> None:
    """An optimizer that reads all gradients before it updates cannot update one parameter at a time."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(4)))
    optimizer = Normalised(model.parameters())
    with memprof.record(tmp_path / "run.memprof", skip=2, steps=2):
        for _ in range(5):
            optimizer.zero_grad()
            model(torch.ones(8, 64)).square().mean().backward()
            optimizer.step()
    step = Trace.open(tmp_path / "run.memprof").steady_step()
    with pytest.raises(PolicyError, match="Normalised computes the updates of 8 parameters together"):
        Plan((policy,)).transform(step)


class Common(Counting):
    """Has one rate for all parameters, which it computes from their gradients, as Prodigy does."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        """Moves the parameters at that rate."""
        for group in self.param_groups:
            given = [each for each in group["params"] if each.grad is not None]
            group["rate"] = sum(each.grad.norm().item() for each in given)
            for parameter in given:
                parameter.sub_(parameter.grad, alpha=group["rate"])


@pytest.mark.parametrize("policy", [STATE, OptimizerPolicy(in_backward=True)])
def test_settings_made_of_all_parameters_are_refused(policy: Any) -> None:
    """A rate that is computed of all parameters together would differ without a word: the run ends."""
    model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Linear(16, 16))
    optimizer = Common(model.parameters())
    job = memprof.apply(Plan((policy,)), model, optimizer)

    def update() -> None:
        model(torch.ones(2, 16)).square().mean().backward()
        optimizer.step()

    with pytest.raises(PolicyError, match="as Prodigy does"):
        update()
    job.undo()


def test_other_forms_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A foreach update has no single parameters; one in backward has no step to change."""
    step = recorded("gpt")
    job = load_job("shared")
    monkeypatch.setattr(job, "make_optimizer", lambda model: torch.optim.AdamW(model.parameters(), foreach=True))
    with pytest.raises(PolicyError, match="runs its foreach form"):
        STATE.transform(record_step("shared"))
    for policy in (OptimizerPolicy(in_backward=True), OptimizerPolicy(state="8bit")):
        with pytest.raises(PolicyError, match="leave one_by_one, or in_backward and state"):
            Plan((STATE, policy)).transform(step)


def test_settings() -> None:
    """The flag, its description, and what it is refused with."""
    assert Swap.from_flag("optimizer,one-by-one:disk") == Swap(what="optimizer", to="disk", one_by_one=True)
    some = Swap.from_flag("optimizer,one-by-one,layers.*:disk")
    assert some == Swap(("layers.*",), "optimizer", "disk", one_by_one=True)
    assert some.describe() == "swap optimizer of layers.* to disk, one parameter at a time"
    with pytest.raises(PolicyError, match="only optimizer state one by one"):
        Swap(one_by_one=True)


class CountingOutside(torch.optim.Optimizer):
    """Counts steps in an attribute, and in a tensor of each group that it writes to."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"steps": torch.zeros(())})
        self.count = 0

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        """Moves each parameter by less in every step."""
        self.count += 1
        for group in self.param_groups:
            group["steps"] += 1
            for parameter in group["params"]:
                if parameter.grad is not None:
                    state = self.state[parameter]
                    state["sum"] = state.get("sum", 0) + parameter.grad
                    parameter.sub_(state["sum"] / (self.count + group["steps"]))


class Further(torch.optim.AdamW):
    """Moves each parameter once more by its state, after a step that has hooks of its own."""

    def step(self, closure: Any = None) -> Any:
        """Updates twice."""
        loss = super().step(closure)
        with torch.no_grad():
            for parameter in (each for group in self.param_groups for each in group["params"]):
                if parameter.grad is not None:
                    parameter.sub_(self.state[parameter]["exp_avg"], alpha=0.001)
        return loss


@pytest.mark.parametrize(
    "policy", [STATE, dataclasses.replace(STATE, one_by_one=False), OptimizerPolicy(in_backward=True)]
)
@pytest.mark.parametrize("kind", [CountingOutside, Further])
def test_optimizers_outside_torch_train_the_same(kind: Any, policy: Any, tmp_path: Path) -> None:
    """One step counts once wherever it is counted, and steps within steps are part of those."""
    torch.optim.AdamW([torch.nn.Parameter(torch.ones(1))])  # torch puts hooks around the step of its class

    def train_with(*policies: Any) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(3)))
        optimizer = kind(model.parameters())
        if policies:
            memprof.apply(Plan(policies), model, optimizer)
        path = tmp_path / f"{len(policies)}.memprof"
        with memprof.record(path, skip=1, steps=2):
            for _ in range(4):
                optimizer.zero_grad()
                model(torch.ones(2, 64)).square().mean().backward()
                optimizer.step()
        assert Trace.open(path).recorded_steps == (1, 2)
        return [parameter.detach() for parameter in model.parameters()]

    plain, planned = train_with(), train_with(policy)
    assert all(torch.equal(one, other) for one, other in zip(plain, planned, strict=True))


def test_hooks_of_the_job_run_around_the_updates() -> None:
    """A hook before steps that clips gradients, added after the plan, and one after steps that reads them."""

    def train_hooked(*policies: Swap) -> tuple[list[torch.Tensor], list[float]]:
        torch.manual_seed(0)
        model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(3)))
        optimizer = torch.optim.AdamW(model.parameters())
        norms: list[float] = []

        def clip(*_: Any) -> None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-4)

        def note(*_: Any) -> None:
            norms.extend(each.grad.norm().item() for each in model.parameters() if each.grad is not None)

        optimizer.register_step_post_hook(note)
        job = memprof.apply(Plan(policies), model, optimizer) if policies else Job(model)
        optimizer.register_step_pre_hook(clip)
        for _ in range(4):
            optimizer.zero_grad()
            model(torch.ones(2, 64)).square().mean().backward()
            optimizer.step()
        job.undo()
        assert "register_step_pre_hook" not in vars(optimizer)
        return [parameter.detach() for parameter in model.parameters()], norms

    (plain, plain_norms), (planned, planned_norms) = train_hooked(), train_hooked(STATE)
    assert all(torch.equal(one, other) for one, other in zip(plain, planned, strict=True))
    assert planned_norms == plain_norms
    assert len(plain_norms) == 4 * 6
